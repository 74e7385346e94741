"""Base class of the benchmarks of GEMMs with an NVFP4 weight: sizes, targets, buffer sets and peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

import torch_cute_ops
from torch_cute_ops.gemm.problem import Grouping, Operand

from . import fp4_peers, targets
from .case import Case, Mark, Row, Tensors, Variant, at_least, at_most
from .compositions import from_128x4, nvfp4_dequantize, to_128x4
from .fp4_peers import FP4_PEERS, Operands, Size
from .gemms import DTYPE, GemmBenchmark

SQUARE = (4096, 8192, 16384)
LLAMA_8B = ((6144, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B = ((8192, 28672), (28672, 8192), (10240, 8192))
SHAPES = (*((size, size) for size in SQUARE), *LLAMA_8B, *LLAMA_70B)
"""(N, K) of the weights: square weights, and the other weights of Llama 8B and 70B (8B also uses 4,096 × 4,096)."""
LARGEST = (16384, 16384)

MARK_SIZES = frozenset(
    [
        *((m, *LARGEST) for m in (1, 16, 64, 256, 1024, 2048)),
        *((m, 4096, 4096) for m in (1, 16, 64, 256)),
        *((m, 8192, 28672) for m in (16, 64)),
        *((1, n, k) for n, k in LLAMA_8B),
        (64, 4096, 14336),
    ]
)
QUICK_SIZES = MARK_SIZES | {(m, n, k) for m in (1, 16, 64, 256, 1024, 4096) for n, k in SHAPES}
FULL_SIZES = QUICK_SIZES | {(2**i, n, k) for i in range(14) for n, k in SHAPES}
SIZES = {"marks": MARK_SIZES, "quick": QUICK_SIZES, "full": FULL_SIZES}
"""(M, N, K) of each set of sizes. "marks" contains the sizes that have targets. "quick" adds six values of M for each
weight. "full" adds the powers of two from M = 1 to 8,192 for each weight."""

ALPHA = 2.0**-6
"""Value of `alpha`: a power of two, so that its product with a bfloat16 weight is exact."""
SCALE_BYTES = (0x30, 0x41)
"""Range of the e4m3 bytes that encode random scales. The scales are 0.5 to 2."""

ABOUT = """\
Our op chooses its backend ("auto"). A column named after a backend gives the time of our op with that backend. The
peers' weights are converted to the peers' layouts before the timing starts. The results of our op and of the peers are
compared with sums in float64."""
FP4_ACTIVATIONS_NOTE = "The peers support no FP4 activations on this GPU, so they take the same numbers in bfloat16."


def best_fp4_peer(row: Row) -> float | None:
    """Return the time in µs of the fastest FP4 peer with a correct result."""
    variants = [row["variants"][name] for name in FP4_PEERS if name in row["variants"]]
    return min((variant["us"] for variant in variants if variant["correct"] is not False), default=None)


def cublas_bf16(row: Row) -> float | None:
    """Return the time in µs of cuBLAS with bfloat16 operands."""
    return row["variants"]["cublas_bf16"]["us"] if "cublas_bf16" in row["variants"] else None


def slowest_case(rows: Sequence[Row], other: Callable[[Row], float | None]) -> float | None:
    """Return our smallest speedup over another implementation, over all rows for which `other` returns a time.

    The speedup in a row is the time that `other` returns, divided by our time.
    """
    pairs = [(other(row), row["variants"]["ours"]["us"]) for row in rows]
    return min((us / ours for us, ours in pairs if us is not None), default=None)


class FP4GemmBenchmark(GemmBenchmark):
    """Benchmark of `out = alpha · a @ b` with an NVFP4 weight `b`. Subclasses define the format of `a`."""

    peers = tuple(fp4_peers.PEERS)
    family = "fp4_wgmma"
    tolerance = 1e-3
    about = ABOUT
    peer_note = ""
    """Sentence for the report that explains how the work of the FP4 peers differs from ours."""
    settings: ClassVar = {"weight": "NVFP4", "scale layout": "128x4", "alpha": "given", "result": "bfloat16"}

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), "alpha": "one"}

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the op's backends without the reference."""
        names = torch_cute_ops.backends(self.op, **self.properties(self.cases("marks")[0]), device="cpu")
        return tuple(name for name in names if name != "reference")

    # --- cases ---

    def case(self, m: int, n: int, k: int) -> Case:
        """Return the benchmark case of a GEMM with these sizes."""
        return Case({"M": m, "N": n, "K": k})

    def cases(self, sizes: str) -> list[Case]:
        ordered = sorted(SIZES[sizes], key=lambda size: (SHAPES.index(size[1:]), size[0]))
        return [self.case(*size) for size in ordered]

    def panel(self, case: Case) -> str:
        n, k = case["N"], case["K"]
        return f"N = K = {n:,}" if n == k else f"N = {n:,}, K = {k:,}"

    # --- tensors ---

    def operands(self, case: Case, device: torch.device) -> Tensors:
        m, n, k = size_of(case)
        codes, scale = random_nvfp4(n, k, device)
        return {**self.make_a(m, k, device), "b": codes, "b_scale": scale, "alpha": self.make_alpha(case, device)}

    def arguments(self, tensors: Tensors) -> Tensors:
        names = ("a", "a_scale", "global_scale", "b_scale", "alpha")
        return {"b": tensors["b"].t(), **{name: tensors[name] for name in names if name in tensors}}

    def make_alpha(self, case: Case, device: torch.device) -> torch.Tensor:
        """Return the argument `alpha` of the op, a tensor of one element."""
        return torch.full((1,), ALPHA, device=device)

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        """Return random activations `a` (M, K), and their scales if `a` is quantised."""
        return {"a": torch.randn(m, k, dtype=DTYPE, device=device)}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded values (M, K) of `a`, exact in bfloat16."""
        return tensors["a"].to(dtype)

    # --- peers ---

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name in fp4_peers.PEERS:
            return self._peer(name, case, sets)
        device = next(iter(sets[0].values())).device
        reason = torch_cute_ops.backends(self.op, **self.properties(case), device=device)[name]
        return self.with_backend(case, sets, name) if reason is None else reason

    def _peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        operands = [self.peer_operands(case, tensors) for tensors in sets]
        run = fp4_peers.PEERS[name](operands)
        if isinstance(run, str):
            return run

        def call(i: int) -> tuple[torch.Tensor, ...]:
            run(i)
            return (operands[i].out,)

        return Variant(call, self.peer_bytes(name, case), self.peer_note)

    def peer_operands(self, case: Case, tensors: Tensors) -> Operands:
        """Convert a buffer set to the operands of the peers, whose activations are bfloat16."""
        scale = from_128x4(tensors["b_scale"], case["N"], case["K"] // 16)
        return Operands(self.decoded_a(tensors, DTYPE), tensors["b"], scale, tensors["alpha"], tensors["out"])

    def peer_bytes(self, name: str, case: Case) -> int:
        """Return the number of bytes that a peer must move: the bfloat16 activations and result, and the weights of all
        experts."""
        problem, sixteen_bit = self.problem(case), Operand(DTYPE)
        weight = problem.b if name in FP4_PEERS else sixteen_bit
        return replace(problem, a=sixteen_bit, b=weight, grouping=Grouping()).bytes_moved(case["M"])

    def prepare(self, cases: Sequence[Case], device: torch.device) -> None:
        fp4_peers.prepare_humming([size_of(case) for case in cases], device)

    # --- the check ---

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        weight = nvfp4_dequantize(tensors["b"], from_128x4(tensors["b_scale"], case["N"], case["K"] // 16))
        total = self.decoded_a(tensors, torch.float64) @ weight.t()
        return ((total * tensors["alpha"].double()).to(DTYPE),)

    def mismatch(
        self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: Case | None = None
    ) -> float:
        """Return the fraction of wrong elements. An element is wrong if its error exceeds both one ulp and 2^-8 times
        the root mean square of the results.

        The second condition accepts partial sums that are rounded to bfloat16, as in cuBLAS.
        """
        [result], [correct] = got, expected
        if result.shape != correct.shape or result.dtype != correct.dtype:
            raise ValueError(f"the result is {result.dtype} {tuple(result.shape)}, expected {tuple(correct.shape)}")
        correct = correct.float()
        allowed = correct.abs() * 2.0**-7 + correct.square().mean().sqrt() * 2.0**-8
        return 1.0 - ((result.float() - correct).abs() <= allowed).double().mean().item()

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        few = [row for row in rows if row["sizes"]["M"] <= 64]
        some = [row for row in rows if 128 <= row["sizes"]["M"] <= 1024]
        many = [row for row in rows if row["sizes"]["M"] >= 2048]
        decode = [row for row in few if row["sizes"]["M"] <= 16 and (row["sizes"]["N"], row["sizes"]["K"]) == LARGEST]
        longest = max((row["variants"]["ours"]["us"] for row in decode), default=None)
        faster, cublas = "times as fast as the fastest FP4 peer", "times as fast as cuBLAS bf16"
        return [
            at_most("M ≤ 16, N = K = 16,384: time", longest, targets.FP4_DECODE_US, " µs"),
            at_least(f"M ≤ 64: {faster}", slowest_case(few, best_fp4_peer), targets.FEW_ROWS_OVER_FP4_PEER, " ×"),
            at_least(f"128 ≤ M ≤ 1,024: {faster}", slowest_case(some, best_fp4_peer), targets.OVER_FP4_PEER, " ×"),
            at_least(f"M ≥ 2,048: {cublas}", slowest_case(many, cublas_bf16), targets.OVER_CUBLAS_BF16, " ×"),
            at_least(f"M ≥ 2,048: {faster}", slowest_case(many, best_fp4_peer), targets.OVER_FP4_PEER, " ×"),
            *self.choice_marks(rows),
        ]

    def choice_marks(self, rows: Sequence[Row]) -> list[Mark]:
        """Return the targets for "auto": the time of the backend that it chooses, divided by the time of our fastest
        backend."""
        ways, over = self.ways, []
        for row in rows:
            times = [row["variants"][name]["us"] for name in ways if name in row["variants"]]
            if times:
                over.append(row["variants"]["ours"]["us"] / min(times))
        median = statistics.median(over) if over else None
        name = "time of auto over the fastest of our backends"
        return [
            at_most(f"{name}: median", median, targets.CHOICE_MEDIAN, " ×"),
            at_most(f"{name}: largest", max(over, default=None), targets.CHOICE_LARGEST, " ×"),
        ]


class FP4Activations(FP4GemmBenchmark):
    """Benchmark of a GEMM with `a` in NVFP4."""

    peer_note = "bfloat16 activations"
    notes: Sequence[str] = (FP4_ACTIVATIONS_NOTE,)
    settings: ClassVar = {"activations": "NVFP4", **FP4GemmBenchmark.settings}

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        codes, scale = random_nvfp4(m, k, device)
        return {"a": codes, "a_scale": scale}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        m, half = tensors["a"].shape
        return nvfp4_dequantize(tensors["a"], from_128x4(tensors["a_scale"], m, half // 8), dtype)


def size_of(case: Case) -> Size:
    """Return M, N and K of a case."""
    return case["M"], case["N"], case["K"]


def random_nvfp4(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes (rows, columns/2) and scales in the 128x4 layout."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(*SCALE_BYTES, (rows, columns // 16), dtype=torch.uint8, device=device)
    return codes, to_128x4(scale.view(torch.float8_e4m3fn))
