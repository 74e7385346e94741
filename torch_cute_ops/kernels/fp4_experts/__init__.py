"""The down-projection of a mixture of experts: ``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · w[n, k])``, where
pairs of a token and an expert whose ``alpha`` is zero cost nothing. For sm_90a.

Two kernels of one launch:

1. Lists. A CTA for each expert and tile of up to 256 tokens scans its column of ``alpha`` and writes which tokens it is
   for, in their order, and with what factor.
2. Products. A CTA has 64 rows of ``w`` and one tile of tokens, and walks through the experts that any of these is for;
   so each byte of a touched expert's weight is read once, and sums of a token meet in one CTA. A unit of work is an
   expert and up to ``group`` of its tokens.

Roles in a CTA of the second: 16 warps multiply, four on a unit, each 16 rows, and so four units at a time. Each of
these four slots has a ring of stages, a chunk of 256 elements of k in each (codes, scales, activations of the unit's
tokens), and a warp that feeds it: it starts the copies of the weight, and meanwhile reads the activations where they
lie, decodes them if they are in FP4, and puts them in the order that ``kernels.common.activations`` tells.

A warp keeps a unit's sums in registers; at its end it multiplies them by the factors, in fp32, and adds them to those
of the tokens in shared memory, (tokens, 64). The four warps that have the same rows do that in the order of the units,
each after the one before: sums are added up in the order of the experts, whatever else is computed. So a token's result
depends on nothing but its own row of ``a`` and ``alpha``, bit for bit.

Bytes moved: touched experts' weights and scales once for each tile of tokens; ``alpha`` once; activations of a pair
once for each 64 rows of ``w``, from L2.
"""

from typing import TYPE_CHECKING, Any

from torch_cute_ops.kernels.fp4_experts.config import CLASSES, GROUPS, MAX_EXPERTS, ROWS, TILES, Config, plan

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_experts.kernel import FP4ExpertsKernel

__all__ = ["CLASSES", "GROUPS", "KERNEL", "MAX_EXPERTS", "ROWS", "TILES", "Config", "FP4ExpertsKernel", "plan"]

KERNEL = f"{__name__}.kernel.FP4ExpertsKernel"


def __getattr__(name: str) -> Any:
    """The kernel's class, which needs the DSL, only when it is asked for."""
    if name != "FP4ExpertsKernel":
        raise AttributeError(name)
    from torch_cute_ops.kernels.fp4_experts.kernel import FP4ExpertsKernel

    return FP4ExpertsKernel
