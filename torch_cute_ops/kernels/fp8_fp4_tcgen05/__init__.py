"""FP8 x FP4 GEMMs for data-center Blackwell, with ``tcgen05.mma`` of ``kind::f8f6f4``: decoder warps decode the weight.

The GEMM is plain or grouped by expert. ``w8`` is the weight in e4m3 (``reference.mm_fp8_fp4``). With block scales of
``a``, ``out[m, n] = epilogue(Σ_j a_scale[j, m] · 2^t[n, j] · (Σ_{k of block j} a[m, k] · w8[n, k]))``. With per-token
scales, the weight's scales are prepared (``formats.prepared_scales``), and ``out[m, n] = epilogue(a_scale[m] · 2^u[n] ·
Σ_k a[m, k] · w8[n, k])``.

The kernel shares its tiles, CTAs, MMAs, accumulators, epilogue and split-K with ``kernels.fp8_tcgen05``
(``common.blackwell.fp8_gemm``). A tile is 128 rows of the weight, on the M side of the MMAs, by ``tile_m`` tokens, on
the N side. Only the weight source differs. Roles:

1. The producer warp copies a k tile's activations (128 bytes per token) and FP4 codes (64 bytes per weight row) to a
   stage by TMA.
2. Groups of four decoder warps take turns at the k tiles. A thread decodes one weight row of a k tile. It loads the
   row's scales while its group decodes the previous k tile. The thread computes a table of eight e4m3 bytes for each
   block, looks up four codes by one PRMT, and stores the e4m3 numbers where the MMAs read them, with the 128-byte
   swizzle. With block scales, all numbers of a row and k tile are divided by ``2^t``, and the group writes the tokens'
   scales and the rows' ``2^t`` to one of ``factor_slots`` slots in shared memory. With per-token scales, the numbers
   are divided by ``2^u``, and the epilogue multiplies alpha by ``2^u``.
3. The MMA thread issues a k tile's four MMAs when the group has decoded the k tile. With per-token scales, tensor
   memory adds up all of K in fp32. With block scales, neighbouring k tiles use different accumulators.
4. Four epilogue warps load accumulators. A thread handles a row of the weight, which is a column of the result. With
   block scales, the thread multiplies each k tile's accumulator by the products of the tokens' scales and the row's
   ``2^t``, and adds the results to sums in fp32 registers (promotion).

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| copied | activations and codes of a k tile | producer | decoders | 1 | - | stages |
| pipeline | decoded weight, and activations | decoders | MMA thread | 4 | 5 | stages |
| factor_pipeline | factors of a k tile | decoders | epilogue warps | 4 | 4 | factor_slots |
| acc_pipeline | accumulator | MMA thread | epilogue warps | 1 | 4 | accumulators |

A stage holds the FP4 codes and the decoded weight. The stage is empty when its MMAs have ended and the four decoder
warps have read the codes.

Bytes moved: The kernel moves the same bytes as ``kernels.fp8_tcgen05``, except that the weight takes half the bytes,
plus its block scales.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_tcgen05.config import SPLIT_K, TILES_M, Arguments, Config, plan, splits, teams

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_tcgen05.kernel import FP8FP4Tcgen05Kernel

__all__ = ["KERNEL", "SPLIT_K", "TILES_M", "Arguments", "Config", "FP8FP4Tcgen05Kernel", "plan", "splits", "teams"]

KERNEL = f"{__name__}.kernel.FP8FP4Tcgen05Kernel"
__getattr__ = on_demand(__name__, "FP8FP4Tcgen05Kernel")
