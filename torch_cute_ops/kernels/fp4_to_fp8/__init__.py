"""Write an FP4 weight to memory in FP8, with exponents of powers of two, as ``mm_fp8_fp4`` is defined: for
``fp8_fp4_recoded``, which multiplies by it.

Each row has a unit, a power of two that follows from the scales of its first K block of 128 elements, and its numbers
are e4m3 over that unit. Where those of a K block do not fit the unit, they are over ``2^t`` of their own
(``fp8_fp4_wgmma.decode`` says when, and why the product is the same). Units and exponents are written too
(``Notes``).

Roles and data path. A thread recodes 16 elements of a K block at a time: it loads 8 bytes of codes and a scale, makes a
table of eight bytes, looks up four codes by one PRMT, and stores 16 bytes. Eight neighbouring threads share a row; a
*team* of 256 threads has 32 rows of 16 K blocks. No shared memory is used.

Either CTAs of a team each recode all of the weight, and the GEMM waits for this kernel; or they recode what its first
tiles need, and a second launch recodes the rest ``beside`` it. That one has a few CTAs, each on an SM of its own, whose
teams take such pieces in the order in which the GEMM comes to them, and count those that are done: the GEMM's tiles
wait for the counts of their rows (``Notes.done``), not for the kernel. All CTAs of this one run before the GEMM
starts, since it releases its dependents only when each of them has begun.

Bytes moved for each element: 1/2 + 1/block_size read, 1 + 1/64 written.
"""

from typing import TYPE_CHECKING

from torch_cute_ops.kernels._lazy import on_demand
from torch_cute_ops.kernels.fp4_to_fp8.config import COLUMNS, Arguments, Config, Notes, note_words

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_to_fp8.kernel import FP4ToFP8Kernel

__all__ = ["COLUMNS", "KERNEL", "Arguments", "Config", "FP4ToFP8Kernel", "Notes", "note_words"]

KERNEL = f"{__name__}.kernel.FP4ToFP8Kernel"
__getattr__ = on_demand(__name__, "FP4ToFP8Kernel")
