"""Conversion of values in a thread's registers to codes and scales, or to rounded values, one block at a time.

The argument ``rstd`` is the norm's row factor. ``rstd`` is 1 if the values are already multiplied by the factor, and
None without a norm.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from torch_cute_ops.formats import FP8_BLOCK128_UE8M0, MXFP8
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0, is_live, ue8m0_scale
from torch_cute_ops.kernels.common.fp4.codes import fp4_block, nvfp4_block_four_over_six
from torch_cute_ops.kernels.common.fp8.encode import (
    E4M3_MAX,
    Divisor,
    divide_e4m3,
    dynamic_scale,
    multiply_e4m3,
    scale_divisor,
)
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT, SCALE_THREADS
from torch_cute_ops.kernels.row_quant.config import Config


class SharedBlocks:
    """Blocks that neighbouring lanes of a warp share. Only some of the lanes compute each block's scale.

    ``lanes`` neighbouring lanes share ``count`` blocks, and each lane holds a part of every block. With butterfly
    reductions, every lane would get the amax of every block, and would compute all scales. Here, the lanes divide the
    blocks among themselves while they reduce (recursive halving), so that each lane has the amax of one block in the
    end. A lane therefore computes the two divisions for a scale once instead of ``count`` times. The other lanes
    receive each result by a shuffle. All lanes of a warp must call the methods, and pass their index as ``lane``.
    """

    def __init__(self, lanes: int, count: int):
        self.lanes, self.count = lanes, count
        self.lanes_per_block = lanes
        while self.lanes_per_block > 1 and lanes // self.lanes_per_block < count:
            self.lanes_per_block //= 2
        if lanes // self.lanes_per_block < count:
            raise ValueError(f"{lanes} lanes cannot have one of {count} blocks each")

    def largest(self, values: list, lane):
        """Return the amax of this lane's block, or NaN if any value is NaN.

        ``values`` contains, for each block, the amax of the part that this lane holds.
        """
        values = [*values, *[values[-1]] * (self.lanes // self.lanes_per_block - self.count)]
        offset = self.lanes // 2
        while len(values) > 1:
            half = len(values) // 2
            is_upper = lane & offset != 0
            kept = [ptx.select(is_upper, b, a) for a, b in zip(values[:half], values[half:], strict=True)]
            sent = [ptx.select(is_upper, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
            values = [
                ptx.max_abs_nan(a, cute.arch.shuffle_sync_bfly(b, offset=offset))
                for a, b in zip(kept, sent, strict=True)
            ]
            offset //= 2
        (value,) = values
        while offset > 0:
            value = ptx.max_abs_nan(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
            offset //= 2
        return value

    def mine(self, lane):
        """Return the index of this lane's block. The index is ``count`` or more for a lane without a block."""
        return lane % self.lanes // self.lanes_per_block

    def leads(self, lane):
        """Return True if this lane is the first of the lanes that own the same block (see ``mine``)."""
        return lane % self.lanes_per_block == 0

    def broadcast(self, value, index: int, lane):
        """Return the ``value`` of block ``index`` in every lane. A lane that owns the block sends it to the others."""
        if self.count == 1:
            return value
        return cute.arch.shuffle_sync(value, lane // self.lanes * self.lanes + index * self.lanes_per_block)


class Encoder:
    """Device code that converts a thread's blocks to codes and scales."""

    def __init__(self, config: Config):
        self.config = config

    @property
    def shared(self) -> SharedBlocks:
        """FP8 blocks of 128 elements, each shared by eight threads."""
        return SharedBlocks(SCALE_THREADS, self.config.blocks_per_thread)

    def scaled(self, amax: Float32, rstd: Float32 | None) -> Float32:
        """Return ``amax * rstd``, or ``amax`` if ``rstd`` is None."""
        return amax if rstd is None else ptx.mul_rn(amax, rstd)

    def rounded(self, products, rstd) -> list:
        """Return the values of a block, rounded to the input dtype, as words."""
        values = [products[i] for i in range(self.config.spec.block_elements)]
        if rstd is not None:
            values = [ptx.mul_rn(value, rstd) for value in values]
        return pack(values, DSL_DTYPES[self.config.spec.dtype])

    def block(self, products, amax, rstd, global_scale) -> tuple[list, Uint32]:
        """Return the codes of one FP4 or MXFP8 block as words, and its scale byte."""
        c = self.config
        if c.spec.fmt == MXFP8:
            largest = self.scaled(amax[0], rstd)
            byte, factor = ue8m0_scale(largest, E4M3_MAX)
            factor = factor if rstd is None else ptx.mul_rn(factor, rstd)
            values = [products[i] for i in range(c.spec.block_elements)]
            return multiply_e4m3(values, factor, is_live(largest)), byte
        if c.spec.four_over_six:
            return nvfp4_block_four_over_six(products, amax[0], global_scale, c.has_e2m1_cvt)
        return fp4_block(products, amax[0], global_scale, c.spec.fmt, c.has_e2m1_cvt, rstd)

    def fp8(self, blocks, rstd, amax, global_scale) -> list:
        """Return the codes of each block as words, and the fp32 scale: ``global_scale`` if the tensor has one scale,
        otherwise the row's scale."""
        is_static = self.config.spec.fmt.is_static
        scale = global_scale if self.config.spec.has_tensor_scale else dynamic_scale(self.scaled(amax, rstd))
        divisor = scale_divisor(scale, rstd, is_dynamic=not is_static)
        return [(divide_e4m3(products, divisor), scale) for products, _ in blocks]

    def fp8_blocks(self, blocks, rstd, amax, thread) -> tuple[list, Float32]:
        """Return the codes of each block as words, and the fp32 scale of the FP8 block that this thread owns, whose
        largest magnitude is ``amax``."""
        if self.config.spec.fmt == FP8_BLOCK128_UE8M0:
            return self._blocks_of_powers(blocks, rstd, self.scaled(amax, rstd), thread)
        scale = dynamic_scale(self.scaled(amax, rstd))
        mine = scale_divisor(scale, rstd, is_dynamic=True)
        words = []
        for j, (products, _) in enumerate(blocks):
            factor, near_one, inverse = (self.shared.broadcast(value, j, thread.lane) for value in mine[:3])
            words.append(divide_e4m3(products, Divisor(factor, near_one, inverse, near_one > Float32(0.0))))
        return words, scale

    def _blocks_of_powers(self, blocks, rstd, amax, thread) -> tuple[list, Float32]:
        """Compute ``fp8_blocks`` with scales that are powers of two. ``amax`` is already multiplied by ``rstd``."""
        byte, inverse = ue8m0_scale(amax, E4M3_MAX)
        inverse = ptx.select(is_live(amax), inverse, Float32(0.0))
        words = []
        for j, (products, _) in enumerate(blocks):
            factor = self.shared.broadcast(inverse, j, thread.lane)
            is_block_live = factor > Float32(0.0)
            factor = factor if rstd is None else ptx.mul_rn(factor, rstd)
            words.append(multiply_e4m3([products[i] for i in range(FP8_UNIT)], factor, is_block_live))
        return words, float_of_ue8m0(byte)
