"""Base classes of the benchmarks of GEMMs with a prologue, which applies a gate to the activations or quantises them.
The column "apart" gives the time if two separate ops compute the prologue and the GEMM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

import torch_cute_ops

from .case import Case, Mark, Row, Tensors, Variant
from .compositions import nvfp4_dequantize, nvfp4_quantize
from .fp4_gemms import FP4GemmBenchmark

OUT = ((4096, 4096), (8192, 8192))
"""(N, K) of the projection after attention in Llama 8B and 70B."""
DOWN = ((4096, 14336), (8192, 28672))
"""(N, K) of the down projections in Llama 8B and 70B."""
ROWS: dict[str, tuple[int, ...]] = {
    "marks": (1, 8),
    "quick": (1, 8, 16, 64, 1024),
    "full": tuple(2**i for i in range(14)),
}
"""Values of M in each set of sizes."""
SEPARATE = "apart"


class PrologueGemm(FP4GemmBenchmark):
    """Benchmark of a GEMM with a prologue. Subclasses define the prologue, and the two ops that compute the same
    result."""

    peers = ()
    weights: ClassVar[tuple[tuple[int, int], ...]]
    """(N, K) of the weights."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the names of the op's backends, followed by the name of the variant with two separate ops."""
        return (*super().ways, SEPARATE)

    def cases(self, sizes: str) -> list[Case]:
        return [self.case(m, n, k) for n, k in self.weights for m in ROWS[sizes]]

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        return super().make_a(m, self.problem(self.case(m, 8, k)).a_width, device)

    @abstractmethod
    def call_apart(self, given: Tensors, out: torch.Tensor) -> None:
        """Call the two separate ops with the arguments `given` of the op, and write the result to `out`."""

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name != SEPARATE:
            return super().peer(name, case, sets)

        def call(i: int) -> tuple[Any, ...]:
            self.call_apart(self.arguments(sets[i]), sets[i]["out"])
            return self.results(sets[i])

        activations = case["M"] * self.problem(case).without_prologue.a.row_bytes(case["K"])
        return Variant(call, self.bytes_moved(case) + 2 * activations)  # activations are written, then read

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        return self.choice_marks(rows)


class QuantisingPrologueGemm(PrologueGemm):
    """Benchmark of a GEMM that quantises its activations. The global scale is 1, because the compositions that check
    the results have no global scale."""

    settings: ClassVar = {**PrologueGemm.settings, "global scale": "given"}
    quantise: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Op that quantises the activations."""

    @abstractmethod
    def value(self, a: torch.Tensor) -> torch.Tensor:
        """Return the values that the prologue quantises, in fp32."""

    def properties(self, case: Case) -> dict[str, Any]:
        return {**super().properties(case), "global_scale": True}

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        return {**super().make_a(m, k, device), "global_scale": torch.ones(1, device=device)}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return nvfp4_dequantize(*nvfp4_quantize(self.value(tensors["a"])), dtype)

    def call_apart(self, given: Tensors, out: torch.Tensor) -> None:
        given = dict(given)
        a, a_scale = self.quantise(given.pop("a"), given.pop("global_scale"))
        torch_cute_ops.mm_fp4(**given, a=a, a_scale=a_scale, out=out)
