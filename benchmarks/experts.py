"""What the benchmarks of products over experts share: sizes, routings, bytes and operations of what is routed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from .case import Case, Mark, Row, at_most
from .compositions import from_128x4, nvfp4_dequantize
from .formulas import fp4_bytes, product_flops, row_bytes
from .fp4_peers import DTYPE, Operands
from .products import ProductBenchmark, Tensors, size_of

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
N, K, EXPERTS = 7168, 65536, 256
"""Of DeepSeek-V3's experts, with an eighth of each expert's 2,048 elements: 256 on one of eight GPUs."""
TOP = 8
"""Experts of a token."""
DENSE_ROWS = ROWS[:5]
SIZES = {
    "marks": {"top-8": ROWS, "dense": DENSE_ROWS},
    "quick": {"top-8": ROWS, "Zipf": ROWS, "dense": DENSE_ROWS},
    "full": {"top-8": ROWS, "Zipf": ROWS, "dense": ROWS},
}
"""M of each routing, for each set of sizes."""
GOALS = {
    "top-8": {1: 5, 8: 18, 16: 29, 32: 45, 64: 61, 128: 68, 256: 72, 512: 85},
    "dense": {1: 69, 8: 69, 16: 69, 32: 76, 64: 98},
}
"""µs, by routing and M."""
MARLIN_US = dict(zip(ROWS, (7.0, 35, 54, 86, 115, 130, 170, 290), strict=True))
"""Of Marlin's expert kernel at these sizes, top-8: from notes, not from a run of this benchmark."""
MARLIN_NOTE = "Marlin's expert kernel, from notes and not from this run, top-8, µs: " + ", ".join(
    f"{us:g} (M = {m})" for m, us in MARLIN_US.items()
)

ABOUT = """\
A token has 8 experts, all as likely ("top-8") or the r-th likeliest with a chance of 1/r ("Zipf"), or all ("dense").
Bytes and operations are those of the pairs that alpha has: of the experts that some token has the weight, of each pair
the activations. Ours chooses its backend ("auto"); the columns of a backend's name are ours with that one. The peers
multiply dense matrices: all experts' weights with activations that were multiplied by alpha outside of the timing."""


@cache
def routing(name: str, m: int, experts: int) -> torch.Tensor:
    """`alpha` (M, E), float32 on the CPU, the same in each call; `name` is a key of `SIZES[…]`. Factors are powers of
    two, so that bfloat16 activations can be multiplied by them beforehand."""
    generator = torch.Generator().manual_seed(m)
    factors = 2.0 ** -torch.randint(1, 5, (m, experts), generator=generator)
    if name == "dense":
        return factors
    ranks = torch.ones(experts) if name == "top-8" else torch.randperm(experts, generator=generator) + 1.0
    # The largest of logarithms of chances, with Gumbel noise, are a draw without replacement.
    keys = -ranks.log() - torch.empty(m, experts).exponential_(generator=generator).log()
    chosen = keys.topk(min(TOP, experts), dim=1).indices
    return torch.zeros(m, experts).scatter_(1, chosen, factors.gather(1, chosen))


class ExpertBenchmark(ProductBenchmark):
    """`out = Σ_e alpha[:, e] · a_e @ w_e.T`, (M, N) in bfloat16: subclasses say what `a` is, and call the op."""

    peers = ("humming", "cublas_bf16")
    about = ABOUT
    peer_note = "dense, activations times alpha"
    settings: ClassVar = {
        "weight": "NVFP4",
        "scale layout": "128x4",
        "experts of a token": str(TOP),
        "result": "bfloat16",
    }
    notes = (MARLIN_NOTE,)

    def own_facts(self, experts: int) -> dict[str, Any]:
        return {"experts": experts}

    # --- cases ---

    def case(self, m: int, n: int = N, k: int = K, experts: int = EXPERTS, name: str = "top-8") -> Case:
        """A case of this op."""
        return Case({"M": m, "N": n, "K": k, "E": experts}, choices={"routing": name})

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, name=name) for name, rows in SIZES[sizes].items() for m in rows]

    def panel(self, case: Case) -> str:
        return f"{super().panel(case)}, E = {case['E']}, {case.choices['routing']}"

    # --- formulas ---

    def bytes_moved(self, case: Case) -> int:
        """The weight of the experts that a token has, the activations of the pairs, both with their scales, and `alpha`
        read, and the result written; bytes."""
        m, n, k = size_of(case)
        alpha = self.alpha_of(case)
        experts, width = alpha.shape[1], k // alpha.shape[1]
        met, pairs = int(alpha.any(0).sum()), int(alpha.count_nonzero())
        read = fp4_bytes(n, met * width) + self.a_bytes(pairs, width) + row_bytes(m, experts, 4)
        return read + row_bytes(m, n, DTYPE.itemsize)

    def flops(self, case: Case) -> int:
        """Of the pairs."""
        return product_flops(int(self.alpha_of(case).count_nonzero()), case["N"], case["K"] // case["E"])

    def alpha_of(self, case: Case) -> torch.Tensor:
        """`alpha`, on the CPU."""
        return routing(case.choices["routing"], case["M"], case["E"])

    # --- tensors and calls ---

    def make_alpha(self, case: Case, device: torch.device) -> torch.Tensor:
        return self.alpha_of(case).to(device, copy=True)

    def weight(self, tensors: Tensors) -> torch.Tensor:
        return tensors["b"]

    def operands(self, case: Case, tensors: Tensors) -> Operands:
        """A buffer set as peers take it: a dense product."""
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
                at_most(f"{name}, M = {m}: time", times.get((name, m)), goal, " µs")
                for name, goals in GOALS.items()
                for m, goal in goals.items()
            ),
            *self.choice_marks(rows),
        ]
