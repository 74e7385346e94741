"""GEMMs of FP8 activations with block scales and an FP4 weight that a first kernel recodes to FP8 in memory, plain or
grouped by expert, by wgmma. For Hopper and many rows: there ``fp8_fp4_wgmma_ss``, which decodes the weight for each row
tile, takes longer than to write it once.

The GEMM (``kernel.py``) uses the roles and tiles of ``fp8_wgmma``:

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| stages | ``a``, ``b``, scales, record | producer, scale loader | consumer warps | 2 | consumer_warps | stages |

If all weight rows of a tile are over their units, the tile takes the main loop of ``fp8_wgmma``, and the epilogue
multiplies accumulators by the units. If some row is over its own exponent in some k tile, the tile takes another
loop: scale loaders load exponents, and consumers bring the results of each k tile to the units (``common.fp8.units``).
If the weight is recoded while the GEMM runs, the warps that copy the weight and read its notes wait for the tile's
rows, and consumers wait for the end of the recoding kernel before they release dependents. More row tiles run side by
side than in other kernels, so that a weight row is in use for longer.

The kernel that recodes the weight (``weight_kernel.py``) writes it in FP8 with exponents of powers of two, as
``reference.mm_fp8_fp4`` is defined. Each row has a unit, a power of two that follows from the scales of its first K
tile, and its numbers are e4m3 over that unit. If the numbers of a k tile do not fit the unit, they are over ``2^t`` of
their own (``common.fp8.fp4_tables`` says when, and why the product is the same). Units and exponents are written too
(``Notes``).

A thread recodes 16 elements of a k tile at a time: it loads 8 bytes of codes and a scale, makes a table of eight bytes,
looks up four codes by one PRMT, and stores 16 bytes. Eight neighbouring threads share a row; a *team* of 256 threads
recodes a work tile of 32 rows of 16 k tiles. No shared memory is used. Two schedules exist:

- CTAs of a team each recode all of the weight, and the GEMM waits for the kernel;
- or they recode the rows that the GEMM's first tiles need, and a second launch that overlaps the GEMM recodes the
  rest. Its few CTAs run on separate SMs; their teams take work tiles in the order in which the GEMM needs them, and
  count work tiles that are done. The GEMM's tiles wait for the counts of their rows (``Notes.done``), not for the
  kernel. All CTAs of this launch run before the GEMM starts, since it releases its dependents only when each CTA has
  begun.

Bytes moved by the GEMM: as in ``fp8_wgmma``, and four for each weight row and row tile; by the recoding kernel, for
each element: 1/2 + 1/block_size read, 1 + 1/64 written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp8_fp4_recode.config import (
    NOTE_ROWS,
    RASTER,
    Arguments,
    Config,
    Notes,
    WeightArguments,
    WeightConfig,
    note_words,
    plan,
)

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp8_fp4_recode.kernel import FP8FP4RecodeKernel

__all__ = [
    "KERNEL",
    "NOTE_ROWS",
    "RASTER",
    "WEIGHT_KERNEL",
    "Arguments",
    "Config",
    "FP8FP4RecodeKernel",
    "Notes",
    "WeightArguments",
    "WeightConfig",
    "note_words",
    "plan",
]

KERNEL = f"{__name__}.kernel.FP8FP4RecodeKernel"
WEIGHT_KERNEL = f"{__name__}.weight_kernel.RecodeWeightKernel"
__getattr__ = on_demand(__name__, "FP8FP4RecodeKernel")
