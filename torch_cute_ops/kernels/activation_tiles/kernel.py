"""The device code; the package's docstring tells the roles and the data path."""

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.activation_tiles.config import CHUNK, THREADS, TILE_BYTES, TILE_TOKENS, Config
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, store_words
from torch_cute_ops.kernels.common.fp4_weights import decode, pair_activations, scale_argument, scale_factors
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

QUAD = 4  # lanes that share a row of an operand
EIGHTHS = CHUNK // QUAD // 8  # a thread has eight elements of each quarter of a chunk


class ActivationTilesKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[Argument, ...]:
        c, m = self.config, Dim("m")
        if c.layout is None:
            k = Dim("k", divisibility=32)
            a, scale = TensorArg(self.dtype.__name__, (m, k), (k, 1), align=16), None
        else:
            half = Dim("a_bytes", divisibility=16)
            a = TensorArg("Uint8", (m, half), (half, 1), align=16)
            scale = scale_argument(c.fmt, Dim("a_scale_rows"), Dim("a_blocks"), align=1)
        tiles = TensorArg("Uint8", (Dim("tile_bytes", TILE_BYTES, bits=64),), (1,), align=16)
        return a, scale, tiles, TensorArg("Int32", (Dim("flags"),), (1,), align=4)

    @cute.jit
    def __call__(self, a, scale, tiles, flags, stream):
        chunks = cute.ceil_div(self._width(a), CHUNK)
        self.kernel(a, scale, tiles, flags).launch(
            grid=[cute.ceil_div(a.shape[0] * chunks * EIGHTHS, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.config.pdl,
        )

    def _width(self, a):
        """Elements of k."""
        return a.shape[1] if self.config.layout is None else a.shape[1] * 2

    @cute.kernel
    def kernel(self, a, scale, tiles, flags):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        me = cta * THREADS + tid
        k = self._width(a)
        chunks = cute.ceil_div(k, CHUNK)
        groups = Int32(tiles.shape[0] // (Int64(chunks) * (QUAD * TILE_BYTES)))
        if const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
            # What comes next may read its weight already: all that was before this kernel has been written.
            cute.arch.griddepcontrol_launch_dependents()
        for i in range(me, flags.shape[0], ctas * THREADS):
            flags[i] = Int32(0)
        if me < a.shape[0] * chunks * EIGHTHS:
            eighth, chunk, token = me % EIGHTHS, me // EIGHTHS % chunks, me // EIGHTHS // chunks
            quarters = [
                self._eight(a, scale, token, chunk * CHUNK + q * (CHUNK // QUAD) + eighth * 8, k) for q in range(QUAD)
            ]
            for half in range_constexpr(2):
                step = eighth * 2 + half
                tile = Int64(chunk * QUAD + step // 4) * groups + token // TILE_TOKENS
                row = token % TILE_TOKENS
                start = tiles.iterator + cute.assume(tile * TILE_BYTES + row * 128, divby=128)
                for h in range_constexpr(2):
                    piece = (step % 4 * 2 + h) ^ row
                    to = cute.recast_ptr(start + cute.assume(piece * 16, divby=16), dtype=Uint32)
                    words = [quarter[2 * half + h] for quarter in quarters]
                    store_words(words, cute.make_tensor(to, cute.make_layout(QUAD)))

    def _eight(self, a, scale, token, first, k) -> list:
        """Eight elements of a token from element ``first``, as ``decode`` pairs them; zeros beyond ``k``."""
        c = self.config
        exists = first < k
        first = ptx.select(exists, first, Int32(0))
        offset = Int64(token) * k + first
        if c.layout is None:
            at = cute.recast_ptr(a.iterator + cute.assume(offset, divby=8), dtype=Uint32)
            words = pair_activations(load_words(cute.make_tensor(at, cute.make_layout(4))), self.dtype)
        else:
            at = cute.recast_ptr(a.iterator + cute.assume(offset // 2, divby=4), dtype=Uint32)
            codes = load_words(cute.make_tensor(at, cute.make_layout(1)))
            blocks = k // c.fmt.block_size
            place = c.layout.row_offset(Int64(token), blocks) + c.layout.block_offset(first // c.fmt.block_size)
            byte = Uint32(
                cute.make_tensor(cute.recast_ptr(scale.iterator, dtype=Uint8) + place, cute.make_layout(1))[0]
            )
            factors = scale_factors(byte, self.dtype, c.fmt)
            words = [word for pair in decode(codes, factors[:1], self.dtype, c.fmt)[0] for word in pair]
        return [ptx.select(exists, word, Uint32(0)) for word in words]
