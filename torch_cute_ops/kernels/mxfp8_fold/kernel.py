"""Device code of the kernel that folds MXFP8 matrices. The package's docstring describes the roles and the data
path."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, Uint64, const_expr

from torch_cute_ops.formats import MXFP8
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.core.ue8m0 import float_of_ue8m0
from torch_cute_ops.kernels.common.fp4.codes import scale_argument, scale_matrix
from torch_cute_ops.kernels.common.fp8.fold import MOST_BELOW, MX_BLOCKS, largest_byte, lowered, rounded
from torch_cute_ops.kernels.mxfp8_fold.config import GROUP, THREADS, VECTOR, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg


class MXFP8FoldKernel:
    """Kernel that folds rows, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config

    def arguments(self) -> Arguments:
        c = self.config
        rows = Dim("rows")
        return Arguments(
            codes=TensorArg("Float8E4M3FN", (rows, c.width), (c.width, 1), align=16),
            scale=scale_argument(MXFP8, c.layout, rows, c.blocks, align=1),
            y=TensorArg("Float8E4M3FN", (rows, c.width), (c.width, 1), align=16),
            y_scale=TensorArg("Float32", (c.groups, rows), (rows, 1), align=4),
            max_ctas=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, codes, scale, y, y_scale, max_ctas: Int32, stream):
        ctas = cutlass.min(cute.ceil_div(codes.shape[0], self.config.rows_per_cta), max_ctas)
        ctas = ctas_unless_overlapping(ctas, written=(y, y_scale), read=(codes, scale))
        self.kernel(codes, scale_matrix(scale, self.config.layout), y, y_scale).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.config.pdl
        )

    @cute.kernel
    def kernel(self, codes, scale, y, y_scale):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        pdl_start(c.pdl)
        for row in range(cta * c.rows_per_cta + tid // c.threads_per_row, codes.shape[0], ctas * c.rows_per_cta):
            row_scales = cute.recast_ptr(scale.iterator, dtype=Uint8) + c.layout.row_offset(Uint64(row), c.blocks)
            largest_of_row = Uint32(0)
            if const_expr(c.by_row):
                largest_of_row = self._largest_of_row(row_scales, tid)
            for vector in range(tid % c.threads_per_row, c.vectors, c.threads_per_row):
                group = vector // (GROUP // VECTOR)
                found = self._scales_of_group(row_scales, group)
                largest = largest_of_row
                if const_expr(not c.by_row):
                    largest = largest_byte(found)
                block = vector // (MXFP8.block_size // VECTOR) % MX_BLOCKS
                byte = ptx.select(block < 2, ptx.select(block == 0, found[0], found[1]), found[3])
                byte = ptx.select(block == 2, found[2], byte)
                words = load_words(self._vector(codes, row, vector))
                below = cutlass.min(largest - byte, Uint32(MOST_BELOW))
                folded, fits = lowered(words, below)
                if fits | (below == Uint32(0)):
                    store_words(folded, self._vector(y, row, vector))
                else:
                    store_words(rounded(words, below), self._vector(y, row, vector))
                if vector % c.vectors_per_scale == 0:
                    y_scale[vector // c.vectors_per_scale, row] = float_of_ue8m0(largest)

    @cute.jit
    def _largest_of_row(self, row_scales, tid) -> Uint32:
        """Return the largest scale byte of a row. If all lanes of a warp process the row, they divide its groups.
        Otherwise lanes may have no row, so each lane loads all scales of the row, which has few groups then."""
        lanes = self.config.lanes_per_row
        largest = Uint32(0)
        for group in range(tid % lanes, -(-self.config.width // GROUP), lanes):
            largest = cutlass.max(largest, largest_byte(self._scales_of_group(row_scales, group)))
        if const_expr(lanes > 1):
            largest = cute.arch.warp_reduction(largest, cutlass.max, threads_in_group=lanes)
        return largest

    def _scales_of_group(self, row_scales, group) -> list:
        """Load the scale bytes of a group. Scales that do not exist are 0."""
        c, first = self.config, group * MX_BLOCKS
        at = row_scales + Uint64(c.layout.block_offset(Uint32(first)))
        return [ptx.load_narrow_if(at, Boolean(first + i < c.blocks), 1, i) for i in range(MX_BLOCKS)]

    def _vector(self, tensor, row, vector) -> cute.Tensor:
        """Return 16 elements of a row, the ``vector``-th of these vectors, as a tensor of words."""
        start = tensor.iterator + cute.assume(Int64(row) * self.config.width + vector * VECTOR, divby=VECTOR)
        return cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), cute.make_layout(VECTOR // 4))
