"""What the benchmarks of FP4 products share: sizes, marks, buffer sets and peers of (M, K) × (K, N), NVFP4 weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from . import fp4_peers
from .case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most
from .compositions import from_128x4, nvfp4_dequantize, to_128x4
from .formulas import fp4_bytes, product_flops, row_bytes
from .fp4_peers import DTYPE, FP4_PEERS, Operands, Size

SQUARE = (4096, 8192, 16384)
LLAMA_70B = ((8192, 28672), (28672, 8192), (10240, 8192))
SHAPES = (*((size, size) for size in SQUARE), *LLAMA_70B)
"""(N, K) of the weights: square ones, and of a Llama-70B."""
LARGEST = (16384, 16384)

MARK_SIZES = frozenset(
    [
        *((m, *LARGEST) for m in (1, 16, 64, 256, 1024, 2048)),
        *((m, 4096, 4096) for m in (16, 256)),
        *((m, 8192, 28672) for m in (16, 64)),
    ]
)
QUICK_SIZES = MARK_SIZES | {(m, n, k) for m in (1, 16, 64, 256, 1024, 4096) for n, k in SHAPES}
FULL_SIZES = QUICK_SIZES | {(2**i, n, k) for i in range(14) for n, k in SHAPES}
SIZES = {"marks": MARK_SIZES, "quick": QUICK_SIZES, "full": FULL_SIZES}
"""(M, N, K) of each set of sizes: the fewest that hold every mark; six M at every weight too; M = 1 to 8,192 by powers
of two at every weight too."""

ALPHA = 2.0**-6
"""A power of two, so that a bfloat16 weight can hold it."""
SCALE_BYTES = (0x30, 0x41)
"""Range of the random scales' e4m3 bytes: 0.5 to 2."""

ABOUT = """\
Ours chooses its backend ("auto"); the columns of a backend's name are ours with that one. Peers' weights are packed
outside of the timing; their results are checked as ours is, against sums in float64."""


def best_fp4_peer(row: Row) -> float | None:
    """The least time of the FP4 peers of a row, µs; not of one whose result is wrong."""
    variants = [row["variants"][name] for name in FP4_PEERS if name in row["variants"]]
    return min((variant["us"] for variant in variants if variant["correct"] is not False), default=None)


def cublas_bf16(row: Row) -> float | None:
    """Its time in a row, µs."""
    return row["variants"]["cublas_bf16"]["us"] if "cublas_bf16" in row["variants"] else None


def least(rows: Sequence[Row], other: Callable[[Row], float | None]) -> float | None:
    """How many times as fast as `other` ours is at the least, over the rows that have it."""
    pairs = [(other(row), row["variants"]["ours"]["us"]) for row in rows]
    return min((us / ours for us, ours in pairs if us is not None), default=None)


class ProductBenchmark(Benchmark):
    """`out = alpha · a @ b`, (M, N) in bfloat16: subclasses say what `a` is, and call the op."""

    peers = tuple(fp4_peers.PEERS)
    tolerance = 1e-3
    checked_elements = 2**28
    about = ABOUT
    peer_note = ""
    """What the FP4 peers do otherwise."""
    settings: ClassVar = {"weight": "NVFP4", "scale layout": "128x4", "alpha": "given", "result": "bfloat16"}

    @property
    def ways(self) -> tuple[str, ...]:  # type: ignore[override]
        """The op's backends, without the reference."""
        names = torch_cute_ops.backends(self.op, n=64, k=64, device="cpu", **self.own_facts(1))
        return tuple(name for name in names if name != "reference")

    def own_facts(self, experts: int) -> dict[str, Any]:
        """Facts of the op's calls besides sizes."""
        return {"alpha": True}

    # --- cases ---

    def case(self, m: int, n: int, k: int) -> Case:
        """A case of this op."""
        return Case({"M": m, "N": n, "K": k})

    def cases(self, sizes: str) -> list[Case]:
        ordered = sorted(SIZES[sizes], key=lambda size: (SHAPES.index(size[1:]), size[0]))
        return [self.case(*size) for size in ordered]

    def smallest(self, case: Case) -> Case:
        return case  # which kernel runs is chosen by all three sizes

    def panel(self, case: Case) -> str:
        n, k = case["N"], case["K"]
        return f"N = K = {n:,}" if n == k else f"N = {n:,}, K = {k:,}"

    # --- formulas ---

    def bytes_moved(self, case: Case) -> int:
        """`a` and the weight, both with their scales, read, and the result written; bytes."""
        m, n, k = size_of(case)
        return self.a_bytes(m, k) + fp4_bytes(n, k) + row_bytes(m, n, DTYPE.itemsize)

    def a_bytes(self, m: int, k: int) -> int:
        """`a` as the op takes it."""
        return row_bytes(m, k, DTYPE.itemsize)

    def peer_bytes(self, name: str, case: Case) -> int:
        """What a peer must move: bfloat16 activations and result, and its weight."""
        m, n, k = size_of(case)
        weight = fp4_bytes(n, k) if name in FP4_PEERS else row_bytes(n, k, DTYPE.itemsize)
        return row_bytes(m, k, DTYPE.itemsize) + weight + row_bytes(m, n, DTYPE.itemsize)

    def flops(self, case: Case) -> int:
        return product_flops(*size_of(case))

    # --- tensors and calls ---

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        m, n, k = size_of(case)
        tensors = self.make_a(m, k, device)
        tensors["b"], tensors["b_scale"] = random_nvfp4(n, k, device)
        tensors["alpha"] = self.make_alpha(case, device)
        tensors["out"] = torch.full((m, n), float("nan"), dtype=DTYPE, device=device)
        return tensors

    def make_alpha(self, case: Case, device: torch.device) -> torch.Tensor:
        """The factor."""
        return torch.full((1,), ALPHA, device=device)

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        """`a`, and what else the op takes with it."""
        return {"a": torch.randn(m, k, dtype=DTYPE, device=device)}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The numbers (M, K) of `a`, exact in bfloat16."""
        return tensors["a"].to(dtype)

    def run(self, tensors: Tensors, backend: str = "auto") -> None:
        """Our op on one buffer set, into its preallocated output."""
        scales = [tensors[name] for name in ("a_scale", "b_scale") if name in tensors]
        function: Callable[..., Any] = getattr(torch_cute_ops, self.op)
        function(tensors["a"], self.weight(tensors), *scales, tensors["alpha"], backend=backend, out=tensors["out"])

    def weight(self, tensors: Tensors) -> torch.Tensor:
        """The weight as the op takes it."""
        return tensors["b"].t()

    # --- variants ---

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        return self._ours(case, sets, "auto")

    def _ours(self, case: Case, sets: Sequence[Tensors], backend: str) -> Variant:
        def call(i: int) -> tuple[torch.Tensor, ...]:
            self.run(sets[i], backend)
            return (sets[i]["out"],)

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name in fp4_peers.PEERS:
            return self._peer(name, case, sets)
        facts = {"n": case["N"], "k": case["K"], "m": case["M"], "device": sets[0]["b"].device}
        reason = torch_cute_ops.backends(self.op, **facts, **self.own_facts(case.sizes.get("E", 1)))[name]
        return self._ours(case, sets, name) if reason is None else reason

    def _peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        operands = [self.operands(case, tensors) for tensors in sets]
        run = fp4_peers.PEERS[name](operands)
        if isinstance(run, str):
            return run

        def call(i: int) -> tuple[torch.Tensor, ...]:
            run(i)
            return (operands[i].out,)

        return Variant(call, self.peer_bytes(name, case), self.peer_note)

    def operands(self, case: Case, tensors: Tensors) -> Operands:
        """A buffer set as peers take it."""
        scale = from_128x4(tensors["b_scale"], case["N"], case["K"] // 16)
        return Operands(self.decoded_a(tensors, DTYPE), tensors["b"], scale, tensors["alpha"], tensors["out"])

    def prepare(self, cases: Sequence[Case], device: torch.device) -> None:
        fp4_peers.prepare_humming([size_of(case) for case in cases], device)

    # --- the check ---

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        weight = nvfp4_dequantize(tensors["b"], from_128x4(tensors["b_scale"], case["N"], case["K"] // 16))
        total = self.decoded_a(tensors, torch.float64) @ weight.t()
        return ((total * tensors["alpha"].double()).to(DTYPE),)

    def mismatch(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """The fraction of sums that are off by more than one ulp and 2^-8 of their root mean square, which allows for
        partial sums that were rounded to bfloat16, as cuBLAS may."""
        [result], [want] = got, expected
        if result.shape != want.shape or result.dtype != want.dtype:
            raise ValueError(f"the result is {result.dtype} {tuple(result.shape)}, expected {tuple(want.shape)}")
        want = want.float()
        allowed = want.abs() * 2.0**-7 + want.square().mean().sqrt() * 2.0**-8
        return 1.0 - ((result.float() - want).abs() <= allowed).double().mean().item()

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        few = [row for row in rows if row["sizes"]["M"] <= 64]
        some = [row for row in rows if 128 <= row["sizes"]["M"] <= 1024]
        many = [row for row in rows if row["sizes"]["M"] >= 2048]
        decode = [row for row in few if row["sizes"]["M"] <= 16 and (row["sizes"]["N"], row["sizes"]["K"]) == LARGEST]
        longest = max((row["variants"]["ours"]["us"] for row in decode), default=None)
        fp4 = "times as fast as the best FP4 peer"
        return [
            at_most("M ≤ 16, N = K = 16,384: time", longest, 42, " µs"),
            at_least(f"M ≤ 64: {fp4}", least(few, best_fp4_peer), 1.15, " ×"),
            at_least(f"128 ≤ M ≤ 1,024: {fp4}", least(some, best_fp4_peer), 1, " ×"),
            at_least("M ≥ 2,048: times as fast as cuBLAS bf16", least(many, cublas_bf16), 0.97, " ×"),
            at_least(f"M ≥ 2,048: {fp4}", least(many, best_fp4_peer), 1, " ×"),
            *self.choice_marks(rows),
        ]

    def choice_marks(self, rows: Sequence[Row]) -> list[Mark]:
        """What the choice of a backend costs: time over that of our best backend by name."""
        ways, over = self.ways, []
        for row in rows:
            times = [row["variants"][name]["us"] for name in ways if name in row["variants"]]
            if times:
                over.append(row["variants"]["ours"]["us"] / min(times))
        name = "auto over the best of our backends"
        return [
            at_most(f"{name}: median", statistics.median(over) if over else None, 1.1, " ×"),
            at_most(f"{name}: largest", max(over, default=None), 1.25, " ×"),
        ]


class FP4Activations(ProductBenchmark):
    """A product with `a` in NVFP4."""

    def a_bytes(self, m: int, k: int) -> int:
        return fp4_bytes(m, k)

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        codes, scale = random_nvfp4(m, k, device)
        return {"a": codes, "a_scale": scale}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        m, half = tensors["a"].shape
        return nvfp4_dequantize(tensors["a"], from_128x4(tensors["a_scale"], m, half // 8), dtype)


def size_of(case: Case) -> Size:
    """M, N, K."""
    return case["M"], case["N"], case["K"]


def random_nvfp4(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes (rows, columns/2) and scales in the 128x4 layout."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(*SCALE_BYTES, (rows, columns // 16), dtype=torch.uint8, device=device)
    return codes, to_128x4(scale.view(torch.float8_e4m3fn))
