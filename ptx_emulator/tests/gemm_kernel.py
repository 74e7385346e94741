"""A small GEMM kernel in CuTe DSL. It uses ``cp.async`` with several stages, ``ldmatrix`` and ``mma``."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.memory import SmemAllocator

from torch_cute_ops.runtime.argspec import Dim, TensorArg

TILE, DEPTH, STAGES, THREADS = 32, 16, 2, 64


class Config(NamedTuple):
    dtype: str
    k: int
    transposed: bool


class GemmKernel:
    """``C = A @ B`` in fp32: A is (m, k) with at most 32 rows. B is (k, 32), or (32, k) if ``transposed``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = getattr(cutlass, config.dtype)

    def arguments(self):
        c, m = self.config, Dim("m")
        b_shape = (TILE, c.k) if c.transposed else (c.k, TILE)
        return (
            TensorArg(c.dtype, (m, c.k), (c.k, 1), align=16),
            TensorArg(c.dtype, b_shape, (b_shape[1], 1), align=16),
            TensorArg("Float32", (m, TILE), (TILE, 1), align=16),
        )

    @cute.jit
    def __call__(self, a, b, c, stream):
        # CuTe expects B as (n, k), with any strides. So transpose the view.
        if const_expr(not self.config.transposed):
            b = cute.make_tensor(b.iterator, cute.select(b.layout, [1, 0]))
        # Each warp computes 16 columns, which takes two MMAs. One ldmatrix.x4 loads B for both MMAs.
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)),
            cute.make_layout((1, 2, 1)),
            permutation_mnk=(16, 32, 16),
        )
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128)
        # Each thread copies 16 bytes along the contiguous dimension, which is k or n.
        k_first = cute.make_tiled_copy_tv(atom, cute.make_layout((32, 2), stride=(2, 1)), cute.make_layout((1, 8)))
        n_first = cute.make_tiled_copy_tv(atom, cute.make_layout((4, 16), stride=(1, 4)), cute.make_layout((8, 1)))
        copy_b = k_first if const_expr(self.config.transposed) else n_first
        self.kernel(a, b, c, mma, k_first, copy_b).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], smem=STAGES * 2 * TILE * DEPTH * 2, stream=stream
        )

    @cute.kernel
    def kernel(self, a, b, c, mma, copy_a, copy_b):
        transposed = const_expr(self.config.transposed)
        tid, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        k_first = cute.make_layout((TILE, DEPTH, STAGES), stride=(DEPTH, 1, TILE * DEPTH))
        n_first = cute.make_layout((TILE, DEPTH, STAGES), stride=(1, TILE, TILE * DEPTH))
        s_a = smem.allocate_tensor(self.dtype, k_first, 16)
        s_b = smem.allocate_tensor(self.dtype, k_first if transposed else n_first, 16)

        # Copy from global to shared memory. Rows beyond A are filled with zeros.
        copy_a, copy_b = copy_a.get_slice(tid), copy_b.get_slice(tid)
        from_a = copy_a.partition_S(cute.local_tile(a, (TILE, DEPTH), (0, None)))
        from_b = copy_b.partition_S(cute.local_tile(b, (TILE, DEPTH), (0, None)))
        to_a, to_b = copy_a.partition_D(s_a), copy_b.partition_D(s_b)
        place = copy_a.partition_S(cute.local_tile(cute.make_identity_tensor(a.shape), (TILE, DEPTH), (0, None)))
        exists = cute.make_rmem_tensor(cute.make_layout((1, 1, 1)), cutlass.Boolean)
        exists[0] = cute.elem_less(place[0][0], a.shape[0])

        # Load from shared memory to registers.
        load_a = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        load_b = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=not transposed, num_matrices=4), self.dtype)
        load_a = cute.make_tiled_copy_A(load_a, mma).get_slice(tid)
        load_b = cute.make_tiled_copy_B(load_b, mma).get_slice(tid)
        thread = mma.get_slice(tid)
        r_a = mma.make_fragment_A(thread.partition_A(s_a[None, None, 0]))
        r_b = mma.make_fragment_B(thread.partition_B(s_b[None, None, 0]))
        out = thread.partition_C(cute.local_tile(c, (TILE, TILE), (0, 0)))
        r_c = mma.make_fragment_C(out)
        r_c.fill(0.0)

        tiles = self.config.k // DEPTH
        for step in range_constexpr(tiles + STAGES - 1):
            if const_expr(step < tiles):
                stage = step % STAGES
                cute.copy(copy_a, from_a[None, None, None, step], to_a[None, None, None, stage], pred=exists)
                cute.copy(copy_b, from_b[None, None, None, step], to_b[None, None, None, stage])
            # Commit a group even if nothing was copied, because the wait counts groups.
            cute.arch.cp_async_commit_group()
            if const_expr(step >= STAGES - 1):
                stage = (step - STAGES + 1) % STAGES
                cute.arch.cp_async_wait_group(STAGES - 1)
                cute.arch.sync_threads()
                cute.copy(load_a, load_a.partition_S(s_a)[None, None, None, stage], load_a.retile(r_a))
                cute.copy(load_b, load_b.partition_S(s_b)[None, None, None, stage], load_b.retile(r_b))
                cute.gemm(mma, r_c, r_a, r_b, r_c)
                # Wait until all threads have read the stage, because the next copy overwrites it.
                cute.arch.sync_threads()

        place = thread.partition_C(cute.local_tile(cute.make_identity_tensor(c.shape), (TILE, TILE), (0, 0)))
        for i in range_constexpr(cute.size(r_c)):
            if cute.elem_less(place[i][0], c.shape[0]):
                out[i] = r_c[i]
