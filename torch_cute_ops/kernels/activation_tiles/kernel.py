"""Device code of the kernel that rearranges activations. ``kernels.common.fp4.activations`` describes the layout."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_cute_ops.kernels.activation_tiles.config import THREADS, Arguments, Config
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.codes import scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class ActivationTilesKernel:
    """Kernel that rearranges activations, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.activations = Activations(config)

    def arguments(self) -> Arguments:
        a, scale = self.activations.arguments()
        return Arguments(
            a=a,
            scale=scale,
            tiles=TensorArg("Uint8", (Dim("tile_bytes", ATOM_BYTES, bits=64),), (1,), align=16),
            flags=TensorArg("Int32", (Dim("flags"),), (1,), align=4),
            alpha=None,
            factors=None,
        )

    @cute.jit
    def __call__(self, a, scale, tiles, flags, alpha, factors, stream):
        ctas = ctas_unless_overlapping(self.ctas(a), (tiles, flags, factors), (a, scale, alpha))
        self.launch(ctas, a, scale_matrix(scale, self.config.layout), tiles, flags, alpha, factors, stream)

    def ctas(self, a):
        """Return the number of CTAs that rearrange the activations ``a``."""
        k_tiles = cute.ceil_div(self.activations.width(a), self.config.k_tile)
        return cute.ceil_div(a.shape[0] * k_tiles * self.activations.k_groups, THREADS)

    @cute.jit
    def launch(self, ctas, a, scale, tiles, flags, alpha, factors, stream):
        """Launch ``ctas`` CTAs. This function does not check whether tensors overlap, because the GEMM's host code,
        which calls it, has already checked."""
        self.kernel(a, scale, tiles, flags, alpha, factors).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, a, scale, tiles, flags, alpha, factors):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread = cta * THREADS + tid
        k_tiles = cute.ceil_div(self.activations.width(a), self.config.k_tile)
        group_bytes = ATOM_M * self.config.token_bytes  # bytes of eight tokens in a k tile
        groups = tiles.shape[0] // (Int64(k_tiles) * group_bytes)
        # Let the next kernel, the GEMM, start early: before the GEMM waits for this kernel, it reads only its weight.
        pdl_start(self.config.pdl)
        for i in range(thread, flags.shape[0], ctas * THREADS):
            flags[i] = Int32(0)
        if const_expr(alpha is not None):
            tile_m, experts, _ = factors.shape
            for i in range(thread, cute.size(factors), ctas * THREADS):
                expert, token = i % experts, i // experts
                # The last m tile may contain places of tokens that do not exist. Their factors are zero.
                value = Float32(0.0)
                if token < alpha.shape[0]:
                    value = alpha[token, expert]
                factors[token % tile_m, expert, token // tile_m] = value
        if thread < a.shape[0] * k_tiles * self.activations.k_groups:
            k_groups = self.activations.k_groups
            k_group, k_tile, token = thread % k_groups, thread // k_groups % k_tiles, thread // k_groups // k_tiles
            base = tiles.iterator + cute.assume(k_tile * groups * group_bytes, divby=ATOM_BYTES)
            start = k_tile * self.config.k_tile
            words = self.activations.read(a, scale, token, start, self.activations.width(a) - start, k_group)
            self.activations.store(words, groups, k_group, token, base)
