"""Base class of the benchmarks of the `moe_fc1_` ops: sizes, the bytes and operations of routed pairs, and the check of
results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from . import targets
from .case import Case, Mark, Row, Tensors, Variant, at_most
from .compositions import from_128x4, nvfp4_dequantize, nvfp4_quantize, silu_mul_fp32, to_128x4
from .expert_gemms import EXPERTS, ROWS, TOP, routing
from .fp4_gemms import FP4GemmBenchmark, random_nvfp4
from .gemms import DTYPE

INTERMEDIATE, HIDDEN = 256, 7168
"""I and H of DeepSeek-V3 on one of eight GPUs, which stores 256 of each expert's 2,048 columns."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "marks": {"top-8": ROWS},
    "quick": {"top-8": ROWS, "Zipf": ROWS},
    "full": {"top-8": ROWS, "Zipf": ROWS, "dense": ROWS},
}
"""Values of M (numbers of tokens) by routing, for each set of sizes."""
ALPHA = 2.0**-9
"""Value of `alpha`, chosen so that gates have magnitudes of a few units."""

ABOUT = """\
With "top-8" routing, a token uses 8 experts, all equally likely. With "Zipf" routing, a token uses 8 experts, and the
r-th likeliest expert has a probability proportional to 1/r. With "dense" routing, a token uses all experts. Bytes and
operations are counted for routed pairs: the weight of each expert that some token uses, each token's activations once,
and the result columns of each pair. Our op chooses its backend ("auto"). A column named after a backend gives the time
of our op with that backend. cuBLAS computes a dense bfloat16 GEMM of all experts without the gate."""


class GatedExpertBenchmark(FP4GemmBenchmark):
    """Benchmark of `swiglu(alpha[e] · a @ w[e].T)` for each routed pair of a token and an expert e, with results in
    bfloat16. Subclasses define the format of `a`."""

    peers = ("cublas_bf16",)
    family = "fp4_gated_experts"
    about = ABOUT
    goals: ClassVar[Mapping[str, Mapping[int, float]]] = {}
    """Targets: the largest time in µs, by routing and number of tokens."""
    settings: ClassVar = {
        "weight": "NVFP4",
        "scale layout": "128x4",
        "experts of a token": str(TOP),
        "alpha": "for each expert",
        "result": "bfloat16",
    }

    def properties(self, case: Case) -> dict[str, Any]:
        n, experts = case["E"] * case["I"], case["E"]
        return {"n": n, "k": case["H"], "m": case["M"], "experts": experts, "alpha": "expert"}

    # --- cases ---

    def case(
        self, m: int, width: int = INTERMEDIATE, hidden: int = HIDDEN, experts: int = EXPERTS, name: str = "top-8"
    ) -> Case:
        """Return the benchmark case with these sizes and the routing `name`."""
        return Case({"M": m, "I": width, "H": hidden, "E": experts}, choices={"routing": name})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, name=name) for name, rows in SIZES[sizes].items() for m in rows]

    def panel(self, case: Case) -> str:
        return f"I = {case['I']:,}, H = {case['H']:,}, E = {case['E']}, {case.choices['routing']}"

    # --- formulas based on the case's actual routing, which `GemmProblem` only estimates ---

    def bytes_moved(self, case: Case) -> int:
        """Return the number of bytes moved: weights of all experts that tokens are routed to, activations, results of
        routed pairs, scales of all three, and `routing`."""
        problem, m, routed = self.problem(case), case["M"], self.routing_of(case)
        used, pairs = int(routed.any(0).sum()), int(routed.count_nonzero())
        read = used * 2 * case["I"] * problem.b.row_bytes(problem.k) + m * problem.a.row_bytes(problem.k)
        return read + routed.nbytes + 4 * case["E"] + pairs * self.column_bytes(case)

    def column_bytes(self, case: Case) -> int:
        """Return the number of bytes that the op writes for one pair of a token and an expert."""
        return case["I"] * DTYPE.itemsize

    def flops(self, case: Case) -> int:
        """Return the number of multiplications and additions for all routed pairs of a token and an expert."""
        return 2 * int(self.routing_of(case).count_nonzero()) * 2 * case["I"] * case["H"]

    def routing_of(self, case: Case) -> torch.Tensor:
        """Return the argument `routing` of a case, on the CPU."""
        return routing(case.choices["routing"], case["M"], case["E"])

    # --- tensors ---

    def operands(self, case: Case, device: torch.device) -> Tensors:
        experts, lines, hidden = case["E"], 2 * case["I"], case["H"]
        codes, scale = random_nvfp4(experts * lines, hidden, device)
        made = {"w": codes.view(experts, lines, -1), "w_scale": scale, **self.make_a(case["M"], hidden, device)}
        made["routing"] = self.routing_of(case).to(device, copy=True)
        made["alpha"] = torch.full((experts,), ALPHA, device=device)
        return made

    def arguments(self, tensors: Tensors) -> Tensors:
        names = ("a", "w", "a_scale", "w_scale", "routing", "alpha")
        return {name: tensors[name] for name in names if name in tensors} | {"w": tensors["w"].mT}

    # --- peers ---

    def _peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        weight = nvfp4_dequantize(sets[0]["w"].flatten(0, 1), self.weight_scales(sets[0]), DTYPE).t()
        a = [self.decoded_a(tensors, DTYPE) for tensors in sets]
        out = torch.empty(case["M"], weight.shape[1], dtype=DTYPE, device=weight.device)
        moved = 2 * (a[0].numel() + weight.numel() + out.numel())
        return Variant(lambda i: torch.mm(a[i], weight, out=out), moved, "all experts, no gate", checked=False)

    def prepare(self, cases: Sequence[Case], device: torch.device) -> None:
        """Do nothing: the only peer is cuBLAS, which needs no compilation."""

    # --- the check ---

    def weight_scales(self, tensors: Tensors) -> torch.Tensor:
        """Return the scales of the weight in row-major order, converted from the 128x4 layout."""
        experts, lines, held = tensors["w"].shape
        return from_128x4(tensors["w_scale"], experts * lines, held // 8)

    def gated(self, tensors: Tensors) -> torch.Tensor:
        """Compute the expected result (M, E·I) after the gate, in float32. Pairs that are not routed are zero."""
        w, a = tensors["w"], self.decoded_a(tensors, torch.float64)
        scales = self.weight_scales(tensors).view(*w.shape[:2], -1)
        value = torch.zeros(len(a), len(w), w.shape[1] // 2, dtype=torch.float32, device=w.device)
        for expert, (codes, own, factor) in enumerate(zip(w, scales, tensors["alpha"].double(), strict=True)):
            rows = tensors["routing"][:, expert].nonzero()[:, 0]
            if len(rows):
                value[rows, expert] = silu_mul_fp32((factor * (a[rows] @ nvfp4_dequantize(codes, own).t())).float())
        return value.flatten(1)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        routed = (tensors["routing"] != 0).repeat_interleave(case["I"], 1)
        return (torch.where(routed, self.gated(tensors).to(DTYPE), tensors["out"]),)

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        usual = (INTERMEDIATE, HIDDEN, EXPERTS)
        times = {
            (row["choices"]["routing"], row["sizes"]["M"]): row["variants"]["ours"]["us"]
            for row in rows
            if (row["sizes"]["I"], row["sizes"]["H"], row["sizes"]["E"]) == usual
        }
        return [
            *(
                at_most(f"{name}, M = {m}: time", times.get((name, m)), most, " µs")
                for name, by_rows in self.goals.items()
                for m, most in by_rows.items()
            ),
            *self.choice_marks(rows),
        ]


class QuantisedGates(GatedExpertBenchmark):
    """Benchmark of `moe_fc1_` ops that take `a` in NVFP4 and quantise the result to NVFP4."""

    goals = targets.GATED_EXPERTS_US
    tolerance = 1e-3
    settings: ClassVar = {"activations": "NVFP4", **GatedExpertBenchmark.settings, "result": "NVFP4"}

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        codes, scale = random_nvfp4(m, k, device)
        return {"a": codes, "a_scale": scale}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        m, held = tensors["a"].shape
        return nvfp4_dequantize(tensors["a"], from_128x4(tensors["a_scale"], m, held // 8), dtype)

    def column_bytes(self, case: Case) -> int:
        return case["I"] // 2 + case["I"] // 16

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        codes, scale = nvfp4_quantize(self.gated(tensors))
        routed = tensors["routing"] != 0
        y = torch.where(routed.repeat_interleave(case["I"] // 2, 1), codes, tensors["y"])
        # Make a mask that is 1 for scales that the op leaves unwritten, and convert the mask to the 128x4 layout.
        skipped = (~routed).repeat_interleave(case["I"] // 16, 1).to(torch.uint8)
        left = to_128x4(skipped.view(torch.float8_e4m3fn)).view(torch.uint8) != 0
        new = to_128x4(scale).view(torch.uint8)
        return y, torch.where(left, tensors["scale"].view(torch.uint8), new).view(torch.float8_e4m3fn)

    def mismatch(
        self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: Case | None = None
    ) -> float:
        """Compare codes and scales with the expected values. Return the larger of the two fractions of differing
        elements."""
        return super(FP4GemmBenchmark, self).mismatch(got, expected)
