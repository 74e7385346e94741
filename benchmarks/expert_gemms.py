"""Base class of the benchmarks of the `moe_fc2_` ops: sizes, routings, and the bytes and operations of routed pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from . import targets
from .case import Case, Mark, Row, Tensors, at_most
from .compositions import from_128x4, nvfp4_dequantize
from .fp4_gemms import FP4GemmBenchmark, size_of
from .fp4_peers import Operands
from .gemms import DTYPE

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
N, K, EXPERTS = 7168, 65536, 256
"""N, K and number of experts for DeepSeek-V3 on one of eight GPUs, which stores 256 of each expert's 2,048 columns."""
TOP = 8
"""Number of experts per token."""
DENSE_ROWS = ROWS[:5]
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "marks": {"top-8": ROWS, "dense": DENSE_ROWS},
    "quick": {"top-8": ROWS, "Zipf": ROWS, "dense": DENSE_ROWS},
    "full": {"top-8": ROWS, "Zipf": ROWS, "dense": ROWS},
}
"""Numbers of tokens by routing, for each set of sizes."""
MARLIN_US = dict(zip(ROWS, (7.0, 35, 54, 86, 115, 130, 170, 290), strict=True))
"""Times in µs of Marlin's expert kernel at these sizes with top-8 routing, from an earlier measurement outside this
benchmark."""
MARLIN_FIGURES = ", ".join(f"{us:g} (M = {m})" for m, us in MARLIN_US.items())
MARLIN_NOTE = f"Marlin's expert kernel, from notes and not from this run, top-8, µs: {MARLIN_FIGURES}"

ABOUT = """\
With "top-8" routing, a token uses 8 experts, all equally likely. With "Zipf" routing, a token uses 8 experts, and the
r-th likeliest expert has a probability proportional to 1/r. With "dense" routing, a token uses all experts. Bytes and
operations are counted for the pairs whose alpha is not 0: the weight of each expert that some token uses, and the
activations of each pair. Our op chooses its backend ("auto"). A column named after a backend gives the time of our op
with that backend. The peers compute dense GEMMs with the weights of all experts. The peers' activations are multiplied
by alpha before the timing starts."""


def keys(ranks: torch.Tensor, m: int, generator: torch.Generator) -> torch.Tensor:
    """Draw random keys (M, E). Each token is routed to the experts with its largest keys.

    Keys are log-probabilities plus Gumbel noise, so that experts are drawn without replacement, with probabilities
    proportional to 1 / `ranks` (E,).
    """
    return -ranks.log() - torch.empty(m, len(ranks)).exponential_(generator=generator).log()


@cache
def routing(name: str, m: int, experts: int) -> torch.Tensor:
    """Return random routing weights `alpha` (M, E), float32 on the CPU. Equal arguments give equal weights. `name` is
    "top-8", "Zipf" or "dense".

    The weights are powers of two, so that products with bfloat16 activations are exact.
    """
    generator = torch.Generator().manual_seed(m)
    factors = 2.0 ** -torch.randint(1, 5, (m, experts), generator=generator)
    if name == "dense":
        return factors
    ranks = torch.ones(experts) if name == "top-8" else torch.randperm(experts, generator=generator) + 1.0
    chosen = keys(ranks, m, generator).topk(min(TOP, experts), dim=1).indices
    return torch.zeros(m, experts).scatter_(1, chosen, factors.gather(1, chosen))


class ExpertGemmBenchmark(FP4GemmBenchmark):
    """Benchmark of `out = Σ_e alpha[:, e] · a_e @ w_e.T`. Subclasses define the format of `a`."""

    peers = ("humming", "cublas_bf16")
    family = "fp4_experts"
    about = ABOUT
    peer_note = "dense, activations times alpha"
    settings: ClassVar = {
        "weight": "NVFP4",
        "scale layout": "128x4",
        "experts of a token": str(TOP),
        "result": "bfloat16",
    }
    notes: Sequence[str] = (MARLIN_NOTE,)

    def properties(self, case: Case) -> dict[str, Any]:
        return {"n": case["N"], "k": case["K"], "m": case["M"], "experts": case["E"]}

    # --- cases ---

    def case(self, m: int, n: int = N, k: int = K, experts: int = EXPERTS, name: str = "top-8") -> Case:
        """Return the benchmark case with these sizes and the routing `name`."""
        return Case({"M": m, "N": n, "K": k, "E": experts}, choices={"routing": name})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, name=name) for name, rows in SIZES[sizes].items() for m in rows]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, E = {case['E']}, {case.choices['routing']}"

    # --- formulas based on the case's actual routing, which `GemmProblem` only estimates ---

    def bytes_moved(self, case: Case) -> int:
        """Return the number of bytes moved: weights of all experts that tokens are routed to, activations of routed
        pairs, scales of both, `alpha`, and the result."""
        problem, m, alpha = self.problem(case), case["M"], self.alpha_of(case)
        used, pairs = int(alpha.any(0).sum()), int(alpha.count_nonzero())
        read = problem.n * problem.b.row_bytes(used * problem.expert_k) + pairs * problem.a.row_bytes(problem.expert_k)
        return read + alpha.nbytes + m * problem.n * DTYPE.itemsize

    def flops(self, case: Case) -> int:
        """Return the number of multiplications and additions for all routed pairs of a token and an expert."""
        return 2 * int(self.alpha_of(case).count_nonzero()) * case["N"] * self.problem(case).expert_k

    def alpha_of(self, case: Case) -> torch.Tensor:
        """Return the routing weights `alpha` of a case, on the CPU."""
        return routing(case.choices["routing"], case["M"], case["E"])

    # --- tensors ---

    def make_alpha(self, case: Case, device: torch.device) -> torch.Tensor:
        return self.alpha_of(case).to(device, copy=True)

    def arguments(self, tensors: Tensors) -> Tensors:
        weight = {"w": tensors["b"].mT, "w_scale": tensors["b_scale"]}
        return weight | {name: tensors[name] for name in ("a", "a_scale", "alpha") if name in tensors}

    def peer_operands(self, case: Case, tensors: Tensors) -> Operands:
        """Return the operands of the peers, which compute one dense GEMM with the weights of all experts."""
        width = case["K"] // case["E"]
        a = self.decoded_a(tensors, DTYPE) * tensors["alpha"].to(DTYPE).repeat_interleave(width, 1)
        scale = from_128x4(tensors["b_scale"], case["N"], case["K"] // 16)
        return Operands(a, tensors["b"], scale, torch.ones(1, device=a.device), tensors["out"])

    # --- the check ---

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        m, n, k = size_of(case)
        experts = case["E"]
        scale = from_128x4(tensors["b_scale"], n, k // 16)
        parts = (part.chunk(experts, 1) for part in (self.decoded_a(tensors, torch.float64), tensors["b"], scale))
        total = torch.zeros(m, n, dtype=torch.float64, device=tensors["b"].device)
        for factor, a, codes, scales in zip(tensors["alpha"].double().unbind(1), *parts, strict=True):
            if factor.any():
                total += factor[:, None] * (a @ nvfp4_dequantize(codes, scales).t())
        return (total.to(DTYPE),)

    # --- marks ---

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        times = {
            (row["choices"]["routing"], row["sizes"]["M"]): row["variants"]["ours"]["us"]
            for row in rows
            if (row["sizes"]["N"], row["sizes"]["K"], row["sizes"]["E"]) == (N, K, EXPERTS)
        }
        return [
            *(
                at_most(f"{name}, M = {m}: time", times.get((name, m)), most, " µs")
                for name, by_rows in targets.EXPERTS_US.items()
                for m, most in by_rows.items()
            ),
            *self.choice_marks(rows),
        ]
