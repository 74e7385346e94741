"""Base class of the benchmarks of FP8 GEMMs: tensors, checks, and the peers (GEMMs of torch and DeepGEMM).

The distribution `sgl-deep-gemm` contains DeepGEMM. A wheel works only with the torch version that it was built for
(version 0.1.4 with torch 2.11). With another version of torch, the assertion `dim == 2 or dim == 3` in DeepGEMM fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch

from torch_cute_ops.formats import FP8_BLOCK128

from . import targets
from .case import Case, Mark, Row, Tensors, Variant, at_least
from .gemms import DTYPE, GemmBenchmark

FP8 = torch.float8_e4m3fn
BLOCK = FP8_BLOCK128.block_size
NOISE = 2.0**-9
"""Largest accepted error, relative to the root mean square of the results. Tensor cores keep only 14 bits of a sum. The
limit is a few times the resulting error in one k tile."""
TOKEN_NOISE = 2.0**-5
"""Largest accepted error with per-token scales. With fast accumulation, tensor cores sum over all of K."""

ABOUT = """\
"rowwise" is torch's GEMM with one scale for each row of `a` and each column of the result, which cuBLAS computes. It
does less work than our op, because the tensor cores sum over all of K. Its results differ from the op's results, and
are not compared. "blockwise" is torch's GEMM with the op's scales, if torch and cuBLAS support them. DeepGEMM computes
the same result as the op. Its scales are converted to its layout before the timing, and it compiles its kernels on
their first call."""
DEEP_GEMM = "deep_gemm"
Prepared = tuple[Callable[[], None], torch.Tensor]
"""Function that runs a peer's GEMM, and the tensor that it writes."""


class FP8GemmBenchmark(GemmBenchmark):
    """Benchmark of a GEMM of e4m3 operands. Subclasses define cases, operands and peers."""

    settings: ClassVar = {"operands": "e4m3", "scales": "1 x 128 and 128 x 128, float32", "result": "bfloat16"}
    family = "fp8_wgmma"
    about = ABOUT

    def panel(self, case: Case) -> str:
        return f"N = {case['N']:,}, K = {case['K']:,}"

    # --- operands ---

    def weight(self, case: Case, device: torch.device) -> Tensors:
        """Return random FP8 weights (E, N, K) and their block scales."""
        n, k, experts = case["N"], case["K"], experts_of(case)
        b = torch.empty(experts, n, k, dtype=FP8, device=device)
        for one in b:
            one.copy_(codes(n, k, device))
        return {"b": b, "b_scale": scales(experts, -(-n // BLOCK), k // BLOCK, device=device)}

    def activations(self, rows: int, case: Case, device: torch.device) -> Tensors:
        """Return random activations (rows, K) and their column-major block scales."""
        k = case["K"]
        return {"a": codes(rows, k, device), "a_scale": scales(k // BLOCK, rows, device=device).t()}

    # --- peers ---

    def torch_gemm(
        self, make: Callable[[Tensors], Callable[[], torch.Tensor]], case: Case, sets: Sequence[Tensors], note: str = ""
    ) -> Variant | str:
        """Return the variant of one of torch's GEMMs, or the reason why the GEMM does not run. ``make`` takes a buffer
        set and returns the call to time."""
        try:
            functions = [make(tensors) for tensors in sets]
            functions[0]()
        except Exception as error:  # not supported on this GPU, or by this torch
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return Variant(lambda i: (functions[i](),), self.bytes_moved(case), note, checked=not note)

    def deep_gemm(
        self, make: Callable[[ModuleType, Tensors], Prepared], case: Case, sets: Sequence[Tensors]
    ) -> Variant | str:
        """Return the variant of one of DeepGEMM's GEMMs, or the reason why the GEMM does not run. ``make`` takes a
        buffer set and prepares the call to time."""

        def prepared(tensors: Tensors) -> Callable[[], torch.Tensor]:
            import deep_gemm

            multiply, out = make(deep_gemm, tensors)

            def call() -> torch.Tensor:
                multiply()
                return out

            return call

        return self.torch_gemm(prepared, case, sets)

    # --- the check ---

    def noise(self, case: Case | None) -> float:
        """Return the largest accepted error of sums in the tensor cores, relative to the root mean square of the
        results. Without a case, return the largest value of all cases."""
        return NOISE

    def mismatch(
        self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: Case | None = None
    ) -> float:
        """Return the fraction of elements whose error exceeds one rounding of the result plus `noise`."""
        ((a,), (b,)) = got, expected
        if not b.numel():
            return 0.0
        exact = b.double()
        limit = exact.abs() * 2.0**-7 + self.noise(case) * exact.square().mean().sqrt()
        return 1.0 - ((a.double() - exact).abs() <= limit).double().mean().item()


def aligned_columns(scale: torch.Tensor) -> torch.Tensor:
    """Copy scales (..., M, K/128) to the layout that DeepGEMM requires: each column is contiguous and aligned to 16
    bytes."""
    m = scale.shape[-2]
    return torch.nn.functional.pad(scale.mT, (0, -m % 4))[..., :m].mT


def experts_of(case: Case) -> int:
    return case.sizes.get("E", 1)


def codes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return a (rows, columns) tensor of random e4m3 values, normally distributed."""
    return torch.randn(rows, columns, dtype=DTYPE, device=device).to(FP8)


def scales(*shape: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of random scales, of about the size that occurs in trained models."""
    return torch.rand(shape, device=device) * 1e-2 + 1e-3


def decoded_gemm(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b.T`` (M, N) of the decoded operands in float64, rounded to the result's dtype."""
    of_rows = a_scale.double().repeat_interleave(BLOCK, 1)
    of_columns = b_scale.double().repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)
    return ((a.double() * of_rows) @ (b.double() * of_columns).t()).to(DTYPE)


def rate(row: Row, name: str = "ours") -> float | None:
    """Return the TFLOP/s of a variant."""
    variant: dict[str, Any] | None = row["variants"].get(name)
    return None if variant is None else variant["tflops"]


def found(rows: Sequence[Row], **labels: Any) -> Row | None:
    """Return the row of results with these sizes and choices, or None if the case was not measured."""
    for row in rows:
        if {**row["sizes"], **row["choices"]} == labels:
            return row
    return None


def peer_mark(name: str, rows: Sequence[Row], peers: Sequence[str], least: float = targets.FP8_OVER_PEER) -> Mark:
    """Return a target for our rate divided by the rate of the fastest peer in ``peers``. The smallest ratio over all
    rows must be at least ``least``."""
    ratios = []
    for row in rows:
        best = max((value for peer in peers if (value := rate(row, peer)) is not None), default=None)
        mine = rate(row)
        if best is not None and mine is not None:
            ratios.append(mine / best)
    return at_least(name, min(ratios, default=None), least)
