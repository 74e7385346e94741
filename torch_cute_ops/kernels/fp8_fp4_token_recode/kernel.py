"""Device code of the kernel that recodes an FP4 weight with prepared scales. The package's docstring describes its
data path."""

from typing import Final

import cutlass.cute as cute
from cutlass import Int64, Uint32, range_constexpr

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.fp8.fp4_tables import look_up, table_of_index
from torch_cute_ops.kernels.common.fp8.weights import PreparedWeight
from torch_cute_ops.kernels.fp8_fp4_token_recode.config import ROWS, THREADS, Arguments, Config
from torch_cute_ops.runtime.argspec import Dim, TensorArg

PIECE_BYTES: Final = 16  # bytes of the codes of 32 elements
QUARTERS: Final = 4
PART: Final = 32  # number of elements of a row that a thread recodes
PARTS: Final = INTERLEAVED_K // PART


class FP8FP4TokenRecodeKernel:
    """Kernel that recodes the weight, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.weight = PreparedWeight(config.fmt, config.is_plain, 0, 0)

    def arguments(self) -> Arguments:
        n, k, padded = Dim("n", divisibility=8), Dim("k"), Dim("padded_k", divisibility=INTERLEAVED_K)
        experts = 1 if self.config.is_plain else Dim("experts")
        of_row = Dim("weight_row", bits=64, divisibility=INTERLEAVED_K)
        of_expert = Dim("weight_expert", bits=64, divisibility=INTERLEAVED_K)
        b, b_scale = self.weight.arguments(n, k, Dim("blocks"), None if self.config.is_plain else experts)
        return Arguments(
            b=b,
            b_scale=b_scale,
            weight=TensorArg("Float8E4M3FN", (experts, n, padded), (of_expert, of_row, 1), align=16),
            units=TensorArg("Float32", (experts, n), (n, 1), align=16),
        )

    @cute.jit
    def __call__(self, b, b_scale, weight, units, stream):
        codes, scale = self.weight.views(b, b_scale)
        parts = weight.shape[2] // PART
        ctas = cute.ceil_div(parts, THREADS) * (weight.shape[0] * weight.shape[1] // ROWS)
        ctas = ctas_unless_overlapping(ctas, written=(weight, units), read=(b, b_scale))
        self.kernel(codes, scale, weight, units).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.config.pdl
        )

    @cute.kernel
    def kernel(self, codes, scale, weight, units):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(self.config.pdl)
        n, parts = weight.shape[1], weight.shape[2] // PART
        chunks = cute.ceil_div(parts, THREADS)
        rows, part = cta // chunks * ROWS, cta % chunks * THREADS + tid
        expert, row = rows // n, rows % n
        if part < parts:
            self._recode(codes, scale, weight, expert, row, part)
        if part == 0:
            for r in range_constexpr(ROWS):
                (unit,) = ptx.load_if(self.weight.row_of_slab(scale, expert, 0, row + r), True, 1)
                units[expert, row + r] = ptx.float_of(unit)

    def _recode(self, codes, scale, weight, expert, row, part) -> None:
        """Recode ``PART`` elements of each of ``ROWS`` rows."""
        group, half, i = part // PARTS, part // QUARTERS % 2, part % QUARTERS
        at = Int64(expert) * codes.stride[2] + Int64(row) * codes.stride[0]
        first = group * (INTERLEAVED_K // 2) + half * PIECE_BYTES + 4 * i
        at, left = codes.iterator + cute.assume(at + first, divby=4), codes.shape[1] - first
        loaded = []
        for r in range(ROWS):
            own = [
                ptx.load_if(
                    at + cute.assume(r * Int64(codes.stride[0]), divby=4),
                    2 * c * PIECE_BYTES < left,
                    1,
                    2 * c * PIECE_BYTES,
                )[0]
                for c in range(QUARTERS)
            ]
            index_at = self.weight.row_of_slab(scale, expert, group + 1, row + r)
            loaded.append((own, ptx.load_if(index_at, True, self.weight.scale_bytes // 4)))
        for r, (own, indices) in enumerate(loaded):
            decoded = []
            for c in range(QUARTERS):
                if self.config.fmt == MXFP4:
                    word, byte = indices[c // 2], c % 2 * 2 + half
                else:
                    word, byte = indices[c], half * 2 + i // 2
                index = word >> Uint32(8 * byte) & Uint32(0xFF)
                decoded.append(look_up(table_of_index(index, self.config.fmt), own[c]))
            to = Int64(expert) * weight.stride[0] + Int64(row + r) * weight.stride[1] + part * PART
            to = cute.recast_ptr(weight.iterator + cute.assume(to, divby=PART), dtype=Uint32)
            for h in range(2):
                words = [decoded[c][h] for c in range(QUARTERS)]
                store_words(words, cute.make_tensor(to + h * QUARTERS, cute.make_layout(QUARTERS)))
