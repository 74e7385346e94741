"""FP8 x FP4 GEMM for Hopper, with wgmma: one kernel recodes the FP4 weight to FP8, and a second kernel multiplies.

The activations have block scales. The GEMM is plain or grouped by expert. The recoding kernel writes the recoded weight
to memory. With many rows of activations, recoding once and then multiplying takes less time than ``fp8_fp4_wgmma_ss``,
which decodes the weight once per row tile.

The GEMM (``kernel.py``) uses the roles and tiles of ``fp8_wgmma``:

| pipeline | buffer | producer | consumer | full | empty | stages |
| --- | --- | --- | --- | --- | --- | --- |
| stages | ``a``, ``b``, scales, record | producer, scale loader | consumer warps | 2 | consumer_warps | stages |

A tile uses one of two mainloops, depending on its weight rows. If all rows of the tile use their units in all k tiles
(see below), the tile uses the mainloop of ``fp8_wgmma``, and the epilogue multiplies accumulators by the units. If a
row uses a k tile's own exponent somewhere, the tile uses another loop, in which scale loaders load the exponents.
Consumers then multiply the results of each k tile by powers of two that convert them to the rows' units
(``common.fp8.units``). If the weight is recoded while the GEMM runs, the warps that copy the weight and read its units
and exponents (``Notes``) first wait until the tile's weight rows are recoded. Consumers let the next kernel start only
after the recoding kernel has ended. More row tiles run at the same time than in other kernels, so that the GEMM needs
the next weight rows later.

The kernel that recodes the weight (``weight_kernel.py``) writes the weight's numbers, divided by powers of two, in
e4m3, as the definition in ``reference.mm_fp8_fp4`` requires. Each row has a *unit*, a power of two that is computed
from the scales of the row's first k tile. The numbers of the row are divided by the unit. If the numbers of a k tile do
not fit the unit, they are divided by the k tile's own ``2^t`` instead. (``common.fp8.fp4_tables`` describes when
numbers fit, and why the product is the same.) The kernel also writes units and exponents (``Notes``).

A thread recodes 16 elements of a k tile at a time: it loads 8 bytes of codes and a scale, computes a table of eight
bytes, looks up four codes by one PRMT, and stores 16 bytes. Eight neighbouring threads share a row. A *thread group* of
256 threads recodes a work tile: 16 k tiles of 32 rows. No shared memory is used. The weight is recoded in one of two
ways:

- One launch recodes the whole weight. Each CTA consists of one thread group. The GEMM waits for the end of this launch.
- Two launches: the first launch recodes only the rows that the GEMM's first tiles need. The second launch overlaps the
  GEMM and recodes the other rows. The second launch consists of a few CTAs on separate SMs. The thread groups process
  work tiles in the order in which the GEMM needs the rows, and count finished work tiles. The GEMM's tiles wait for the
  counts of their rows (``Notes.done``), not for the end of the launch. All CTAs of the second launch run before the
  GEMM starts, since a kernel lets the next kernel start only when each of its CTAs has begun.

Bytes moved: The GEMM moves the same bytes as ``fp8_wgmma``, and 4 more bytes for each pair of a weight row and a row
tile. Per element of the weight, the recoding kernel reads 1/2 + 1/block_size bytes and writes 1 + 1/64 bytes.
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
