"""First of two kernels that quantise a tensor to FP8 with one scale: the amax of the units that each CTA reads.

CTA i reads units of 16 elements, and stores their largest magnitude in element i of a workspace, or NaN if an element
is NaN. Each thread issues the loads of ``AMAX_UNITS`` units at once, and neighbouring threads read neighbouring units.
In the second kernel, ``kernel.RowQuantKernel``, every warp reduces the workspace to the amax of the tensor. A maximum
does not depend on the order of the elements, so the scale is deterministic. Every CTA writes its element, so the
workspace need not be initialised.
"""

from functools import reduce
from typing import Any, Final

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, unpack
from torch_cute_ops.kernels.common.fp8.encode import dynamic_scale, warp_amaxes
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT
from torch_cute_ops.kernels.row_quant.config import AMAX_THREADS, AMAX_UNITS, WARP

VECTOR: Final = 16  # number of bytes of a load
WARPS: Final = AMAX_THREADS // WARP
UNITS_AT_ONCE: Final = AMAX_THREADS * AMAX_UNITS  # number of units that a CTA loads at once


class TensorAmax:
    """Device code that computes the amax of a tensor."""

    def __init__(self, spec: Any, pdl: bool):
        self.spec, self.pdl = spec, pdl
        self.dtype = DSL_DTYPES[spec.dtype]

    @cute.kernel
    def kernel(self, input, partials):
        """Store the amax of this CTA's units of ``input``, (rows, width), in ``partials``."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        pdl_start(self.pdl)
        units = Int64(input.shape[0]) * self.spec.blocks
        largest = Float32(0.0)
        for group in range(cta, Int32((units + (UNITS_AT_ONCE - 1)) // UNITS_AT_ONCE), ctas):
            first = Int64(group) * UNITS_AT_ONCE + tid
            largest = self._largest(largest, self._load_units(input, first, units))
        of_warps = warp_amaxes(largest, tid, WARPS)
        if tid == 0:
            partials[cta] = reduce(ptx.max_abs_nan, [of_warps[i] for i in range(WARPS)])

    def _load_units(self, input, first, units) -> list:
        """Return the words of a thread's units, beginning with unit ``first``. Units beyond the end are zeros."""
        itemsize = self.spec.dtype.itemsize
        words = []
        for unit in (first + i * AMAX_THREADS for i in range(AMAX_UNITS)):
            row, column = unit // self.spec.blocks, unit % self.spec.blocks * FP8_UNIT
            at = input.iterator + cute.assume(row * input.stride[0] + column, divby=VECTOR // itemsize)
            for offset in range(0, FP8_UNIT * itemsize, VECTOR):
                words += ptx.load_if(at, unit < units, VECTOR // 4, offset)
        return words

    def _largest(self, largest: Float32, words: list) -> Float32:
        return reduce(ptx.max_abs_nan, unpack(words, self.dtype), largest)

    @cute.jit
    def scale(self, partials, lane) -> Float32:
        """Return the scale of the tensor, from the amaxes of all CTAs. All lanes of a warp must call this function."""
        largest = Float32(0.0)
        for i in range(lane, partials.shape[0], WARP):
            largest = ptx.max_abs_nan(largest, partials[i])
        return dynamic_scale(cute.arch.warp_reduction(largest, ptx.max_abs_nan, threads_in_group=WARP))
