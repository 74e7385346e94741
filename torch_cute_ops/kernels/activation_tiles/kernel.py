"""The device code; ``kernels.common.activations`` tells the layout."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_cute_ops.kernels.activation_tiles.config import THREADS, TILE_BYTES, TILE_TOKENS, Config
from torch_cute_ops.kernels.common import pdl
from torch_cute_ops.kernels.common.activations import Activations
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg


class ActivationTilesKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.activations = Activations(config)

    def arguments(self) -> tuple[Argument, ...]:
        tiles = TensorArg("Uint8", (Dim("tile_bytes", TILE_BYTES, bits=64),), (1,), align=16)
        return *self.activations.arguments(), tiles, TensorArg("Int32", (Dim("flags"),), (1,), align=4), None, None

    @cute.jit
    def __call__(self, a, scale, tiles, flags, alpha, factors, stream):
        """Put ``a`` in order in ``tiles`` and set ``flags`` to zero. If there is an ``alpha`` (M, experts), put it into
        ``factors`` (tokens, experts, tiles), zero for tokens that do not exist."""
        chunks = cute.ceil_div(self.activations.width(a), self.config.chunk)
        self.kernel(a, scale, tiles, flags, alpha, factors).launch(
            grid=[cute.ceil_div(a.shape[0] * chunks * self.activations.pieces, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, a, scale, tiles, flags, alpha, factors):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        me = cta * THREADS + tid
        chunks = cute.ceil_div(self.activations.width(a), self.config.chunk)
        group_bytes = TILE_TOKENS * self.config.token_bytes  # of a chunk
        groups = tiles.shape[0] // (Int64(chunks) * group_bytes)
        # What comes next may read its weight already.
        pdl.start(self.config.pdl)
        for i in range(me, flags.shape[0], ctas * THREADS):
            flags[i] = Int32(0)
        if const_expr(alpha is not None):
            tokens, experts, _ = factors.shape
            for i in range(me, cute.size(factors), ctas * THREADS):
                expert, token = i % experts, i // experts
                value = Float32(0.0)
                if token < alpha.shape[0]:
                    value = alpha[token, expert]
                factors[token % tokens, expert, token // tokens] = value
        if me < a.shape[0] * chunks * self.activations.pieces:
            pieces = self.activations.pieces
            piece, chunk, token = me % pieces, me // pieces % chunks, me // pieces // chunks
            base = tiles.iterator + cute.assume(chunk * groups * group_bytes, divby=TILE_BYTES)
            start = chunk * self.config.chunk
            words = self.activations.read(a, scale, token, start, self.activations.width(a) - start, piece)
            self.activations.order(words, groups, piece, token, base)
