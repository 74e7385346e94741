"""What the benchmarks of FP8 products under block scales share: tensors, bytes, checks, and torch's own products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch

from .case import Benchmark, Case, Mark, Row, Tensors, Variant
from .formulas import fp8_bytes, product_flops, row_bytes

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
BLOCK = 128
FLOPS_GOAL = 1150.0
"""TFLOP/s of large products."""
PEER_GOAL = 0.95
"""Of the rate of torch's own FP8 products."""
STREAM_GOAL = 0.80
"""Of a copy's bandwidth, with few rows."""
NOISE = 2.0**-9
"""Of the results' size: what the sums of tensor cores may lose of a block (they keep 14 bits), several times over."""

ABOUT = """\
torch's products with a scale a row of `a` and a column of the result ("rowwise"), which cuBLAS computes, have less to
do: nothing is taken out of the tensor cores every 128 elements of k. Their results are not those of the op, and are not
compared. "blockwise" has the op's scales, where torch and cuBLAS support them. DeepGEMM's products are the op's; scales
are given to it as it wants them, and it compiles its kernels when they are first called."""
DEEP_GEMM = "deep_gemm"
Prepared = tuple[Callable[[], None], torch.Tensor]
"""A peer's product, and where it leaves its result."""


class FP8ProductBenchmark(Benchmark):
    """Products of e4m3 matrices, bfloat16 results: subclasses have the cases, and call the op."""

    settings: ClassVar = {"operands": "e4m3", "scales": "1 x 128 and 128 x 128, float32", "result": "bfloat16"}
    about = ABOUT
    tolerance = 0.0
    checked_elements = 2**28

    def smallest(self, case: Case) -> Case:
        return case  # which kernel runs is chosen by all sizes

    def panel(self, case: Case) -> str:
        return f"N = {case['N']:,}, K = {case['K']:,}"

    def flops(self, case: Case) -> int:
        return experts_of(case) * product_flops(case["M"], case["N"], case["K"])

    def bytes_moved(self, case: Case) -> int:
        """Rows and weights, both with their scales, read, and the result written; bytes."""
        m, n, k, experts = case["M"], case["N"], case["K"], experts_of(case)
        weight = n * k + 4 * -(-n // BLOCK) * (k // BLOCK)
        return experts * (fp8_bytes(m, k, "block128") + weight + row_bytes(m, n, DTYPE.itemsize))

    # --- tensors ---

    def weight(self, case: Case, device: torch.device) -> Tensors:
        """The weights (E, N, K) and their scales."""
        n, k, experts = case["N"], case["K"], experts_of(case)
        b = torch.empty(experts, n, k, dtype=FP8, device=device)
        for one in b:
            one.copy_(codes(n, k, device))
        return {"b": b, "b_scale": scales(experts, -(-n // BLOCK), k // BLOCK, device=device)}

    def rows(self, count: int, case: Case, device: torch.device) -> Tensors:
        """``count`` rows (R, K) and their scales."""
        k = case["K"]
        return {"a": codes(count, k, device), "a_scale": scales(k // BLOCK, count, device=device)}

    # --- variants ---

    def call(self, tensors: Tensors) -> None:
        """Our op on one buffer set, into its preallocated output."""
        raise NotImplementedError

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        def call(i: int) -> tuple[torch.Tensor, ...]:
            self.call(sets[i])
            return (sets[i]["out"],)

        return Variant(call, self.bytes_moved(case))

    def peer_of(
        self, make: Callable[[Tensors], Callable[[], torch.Tensor]], case: Case, sets: Sequence[Tensors], note: str = ""
    ) -> Variant | str:
        """A product of torch's, that ``make`` prepares for a buffer set; the reason why it does not run."""
        try:
            functions = [make(tensors) for tensors in sets]
            functions[0]()
        except Exception as error:  # not on this GPU, or not in this torch
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return Variant(lambda i: (functions[i](),), self.bytes_moved(case), note, checked=not note)

    def deep_gemm(
        self, make: Callable[[ModuleType, Tensors], Prepared], case: Case, sets: Sequence[Tensors]
    ) -> Variant | str:
        """DeepGEMM's product, that ``make`` prepares; the reason why it does not run."""

        def prepared(tensors: Tensors) -> Callable[[], torch.Tensor]:
            import deep_gemm

            multiply, out = make(deep_gemm, tensors)

            def call() -> torch.Tensor:
                multiply()
                return out

            return call

        return self.peer_of(prepared, case, sets)

    # --- the check ---

    def mismatch(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """The fraction of elements that are off by more than a rounding and what tensor cores may lose."""
        ((a,), (b,)) = got, expected
        if not b.numel():
            return 0.0
        exact = b.double()
        limit = exact.abs() * 2.0**-7 + NOISE * exact.square().mean().sqrt()
        return 1.0 - ((a.double() - exact).abs() <= limit).double().mean().item()


def rows_last(scale: torch.Tensor) -> torch.Tensor:
    """Scales (..., K/128, M) as DeepGEMM reads them: (..., M, K/128), each column contiguous and on 16 bytes."""
    m = scale.shape[-1]
    return torch.nn.functional.pad(scale, (0, -m % 4))[..., :m].mT


def experts_of(case: Case) -> int:
    return case.sizes.get("E", 1)


def codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Normally distributed numbers in e4m3."""
    return torch.randn(rows, columns, dtype=DTYPE, device=device).to(FP8)


def scales(*shape: int, device: torch.device) -> torch.Tensor:
    """Scales of usual size."""
    return torch.rand(shape, device=device) * 1e-2 + 1e-3


def sums(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` (M, N) of the numbers that codes and scales stand for, in float64, rounded to the result's dtype."""
    of_rows = a_scale.t().double().repeat_interleave(BLOCK, 1)
    of_columns = b_scale.double().repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)
    return ((a.double() * of_rows) @ (b.double() * of_columns).t()).to(DTYPE)


def rate(row: Row, name: str = "ours") -> float | None:
    """TFLOP/s of a variant."""
    variant: dict[str, Any] | None = row["variants"].get(name)
    return None if variant is None else variant["tflops"]


def found(rows: Sequence[Row], **facts: Any) -> Row | None:
    """The row of these sizes and choices."""
    for row in rows:
        if {**row["sizes"], **row["choices"]} == facts:
            return row
    return None


def peer_mark(name: str, rows: Sequence[Row], peers: Sequence[str]) -> Mark:
    """Ours against the fastest of torch's products, at the least over the rows."""
    ratios = []
    for row in rows:
        best = max((value for peer in peers if (value := rate(row, peer)) is not None), default=None)
        mine = rate(row)
        if best is not None and mine is not None:
            ratios.append(mine / best)
    least = min(ratios, default=None)
    return Mark(name, f"≥ {PEER_GOAL:g}", least, None if least is None else least >= PEER_GOAL)
