"""Device code that updates the accumulators of one token block and one n tile in shared memory, and stores the result.

If several CTAs compute an n tile, each computes some classes of experts. The CTA with the last class adds up the
partial sums of all these CTAs and stores the result. The other CTAs write their partial sums to the workspace.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, as_vectors, load_words, pack, store_words
from torch_cute_ops.kernels.common.core.pipeline import Pipeline
from torch_cute_ops.kernels.common.experts.work_tiles import MTileLists, TokenLists
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.fp4_experts.config import TILE_N, Config

WARP = 32


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        m, n: numbers of rows and columns of the result.
        cta, num_ctas: index of the CTA among the CTAs of its token block, and number of these CTAs.
        block_index, first_token: index of the token block, and index of its first token.
        experts: number of experts.
        lists: lists of routed tokens, which the first kernel wrote.
        partial_sums: (partial sums of all CTAs, flags that say which are complete), or None.
        bias: biases of the experts (E, n), or None.
        out: result.
        n_tiles: indices of the CTA's two n tiles. The higher index is first, because another CTA waits for its partial
            sums.
        begins, ends: range of classes for each of the two n tiles.
        m_tiles, first_m_tiles: number of m tiles of the CTA, and number of m tiles of the CTA's first n tile.
    """

    m: Int32
    n: Int32
    cta: Int32
    num_ctas: Int32
    block_index: Int32
    first_token: Int32
    experts: Int32
    lists: TokenLists
    partial_sums: tuple[cute.Tensor, cute.Tensor] | None
    bias: cute.Tensor | None
    out: cute.Tensor
    n_tiles: tuple
    begins: tuple
    ends: tuple
    m_tiles: Int32 | None = None
    first_m_tiles: Int32 | None = None


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA.

    Attributes:
        codes, scales, activations, pairs: buffers of the stages.
        acc: accumulators of the token block.
        m_tiles: lists of m tiles.
        pipeline: barriers of all stages.
        turns: mbarriers, one per consumer warp. A warp's mbarrier completes when the warp may add to the accumulators.
    """

    codes: cute.Pointer
    scales: cute.Pointer
    acc: cute.Pointer
    activations: cute.Pointer
    pairs: cute.Pointer
    m_tiles: MTileLists
    pipeline: Pipeline
    turns: cute.Pointer


class Accumulators:
    """Device code for the accumulators: a float32 matrix (tokens, 64) in shared memory, permuted by ``acc_offset``."""

    def __init__(self, config: Config):
        self.config = config
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def token_offset(self, token):
        """Return the byte offset of a token's accumulators. ``acc_offset`` permutes groups of eight rows by its low
        bits, so that the accumulators of different tokens are in different banks."""
        return token * (TILE_N * 4) + token % ATOM_M * 32

    def acc_offset(self, token_offset, row):
        """Return the byte offset of the accumulator for one weight row of a token."""
        return token_offset ^ (row * 4)

    @cute.jit
    def finish_n_tile(self, which: int, tid, work, smem):
        """Store the accumulators of the CTA's first or second n tile (``which``).

        If another CTA computes the n tile's last class, write the accumulators to the workspace as partial sums.
        Otherwise add the partial sums of other CTAs to the accumulators, and store the result.
        """
        c = self.config
        threads = c.consumer_warps * WARP
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if const_expr(c.pdl and c.scans and which == 0):
            # The kernel that lists tokens also clears the flags. Wait for this kernel before the flags are used, and
            # before the next kernel may start. One wait serves both n tiles.
            cute.arch.griddepcontrol_wait()
        if const_expr(c.pdl):
            if (which == 1) | (work.ends[1] == 0) | (c.classes == 1):
                cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.classes == 1):
            self._store_result(work.n_tiles[0], tid, work, smem)
        else:
            if work.ends[which] < c.classes:
                self._store_partial_sums(tid, work, smem)
            else:
                if work.begins[which] > 0:
                    self._add_partial_sums(work.n_tiles[which], tid, work, smem)
                self._store_result(work.n_tiles[which], tid, work, smem)
            if const_expr(which == 0):
                # Synchronise before the next n tile's sums are added to the same accumulators.
                cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    def _partial_sums_of(self, cta, work) -> tuple[cute.Tensor, cute.Pointer]:
        """Return a CTA's partial sums in the workspace, as vectors of four floats, and the address of the CTA's
        flag."""
        sums, flags = work.partial_sums
        index = work.block_index * work.num_ctas + cta
        at = sums.iterator + cute.assume(Int64(index) * self.config.acc_bytes, divby=TILE_N * 4)
        return as_vectors(at, self.config.acc_bytes), flags.iterator + index

    @cute.jit
    def _store_partial_sums(self, tid, work, smem):
        """Write the accumulators to the workspace for another CTA, set the flag, and set the accumulators to zero."""
        c = self.config
        threads = c.consumer_warps * WARP
        here = as_vectors(smem.acc, c.acc_bytes)
        there, flag = self._partial_sums_of(work.cta, work)
        for i in range(tid, cute.size(here, mode=[0]), threads):
            store_words(load_words(here[i, None]), there[i, None])
            store_words([Uint32(0)] * 4, here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if tid == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(flag, Uint32(1))

    @cute.jit
    def _add_partial_sums(self, n_tile, tid, work, smem):
        """Add the partial sums of other CTAs for this n tile, in the order of the classes. This CTA's own partial sums
        come last."""
        c = self.config
        here = as_vectors(smem.acc, c.acc_bytes)
        # ``first`` is the CTA that computes the n tile's first class. Find it by inverting the formula that assigns
        # ranges to CTAs.
        work_tiles = cute.ceil_div(work.n, TILE_N) * c.classes
        first = ((n_tile * c.classes + 1) * work.num_ctas - 1) // work_tiles
        for cta in range(first, work.cta):
            _, flag = self._partial_sums_of(cta, work)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        for i in range(tid, cute.size(here, mode=[0]), c.consumer_warps * WARP):
            total = cute.make_rmem_tensor((4,), Float32)
            total.fill(0.0)
            for cta in range(first, work.cta):
                there, _ = self._partial_sums_of(cta, work)
                for e, word in enumerate(load_words(there[i, None])):
                    total[e] = total[e] + ptx.float_of(word)
            own = load_words(here[i, None])
            store_words([ptx.bits_of(total[e] + ptx.float_of(own[e])) for e in range(4)], here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=c.consumer_warps * WARP)

    @cute.jit
    def _store_result(self, n_tile, tid, work, smem):
        """Round the accumulators, and store them."""
        c = self.config
        for piece in range(tid, c.token_block * (TILE_N // 4), c.consumer_warps * WARP):
            token, row = piece // (TILE_N // 4), piece % (TILE_N // 4) * 4
            m, n = work.first_token + token, n_tile * TILE_N + row
            if (m < work.m) & (n < work.n):
                at = smem.acc + cute.assume(self.acc_offset(self.token_offset(token), row), divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = work.out.iterator + cute.assume(Int64(m) * work.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
