"""The sums of a tile of tokens and a slice of rows, in shared memory; and how they become results.

A worker that does not have all classes of a slice writes its partial sums to the workspace for the one that has the
slice's last class; that one adds them up, and stores the result.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, as_vectors, load_words, pack, store_words
from torch_cute_ops.kernels.common.experts.lists import TokenLists
from torch_cute_ops.kernels.common.experts.units import UnitLists
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.fp4_experts.config import ROWS, Config

WARP = 32


class Share(NamedTuple):
    """A worker's share of the GEMM, and the operands.

    Attributes:
        m, n: sizes of the result.
        worker, workers: the CTA among those of its tile of tokens; their number.
        tile, first_token: the tile of tokens, and its first.
        experts: number of experts.
        lists: what the other kernel has listed.
        left: partial sums of workers, and their flags; ``None`` if there are none.
        bias: the experts' biases (E, n), or ``None``.
        out: the result.
        slices, begins, ends: the two slices of rows that the worker may have classes of, the one of higher number
            first, since another worker waits for the other's sums; and which classes: those from ``begins`` to
            ``ends``.
        units, first_units: how many units the worker has, and how many of the first slice.
    """

    m: Int32
    n: Int32
    worker: Int32
    workers: Int32
    tile: Int32
    first_token: Int32
    experts: Int32
    lists: TokenLists
    left: tuple[cute.Tensor, cute.Tensor] | None
    bias: cute.Tensor | None
    out: cute.Tensor
    slices: tuple
    begins: tuple
    ends: tuple
    units: Int32 | None = None
    first_units: Int32 | None = None


class Smem(NamedTuple):
    """Shared memory: the stages of codes, scales, activations (``tokens``) and pairs; the sums of the tile; lists
    of ``units``; and barriers, of which a stage's are full, or free, and a warp's says that it may add its sums."""

    codes: cute.Pointer
    scales: cute.Pointer
    sums: cute.Pointer
    tokens: cute.Pointer
    pairs: cute.Pointer
    units: UnitLists
    full: cute.Pointer
    free: cute.Pointer
    turns: cute.Pointer


class Totals:
    """The sums of one ``Config``: fp32, (tokens, 64), permuted by ``sum_offset``."""

    def __init__(self, config: Config):
        self.config = config
        self.out_dtype = DSL_DTYPES[config.out_dtype]

    def token_offset(self, token):
        """Offset of a token's sums, in bytes. ``sum_offset`` permutes groups of eight rows by its low bits, so that
        tokens are in different banks."""
        return token * (ROWS * 4) + token % ATOM_M * 32

    def sum_offset(self, token_offset, row):
        """Offset of a row's sum, in bytes."""
        return token_offset ^ (row * 4)

    @cute.jit
    def end_slice(self, part: int, tid, share, smem):
        """Write the partial sums of the worker's first or second slice (``part``) for the worker that has the slice's
        last class; or add up those of others, and store the result."""
        c = self.config
        threads = c.warps * WARP
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if const_expr(c.pdl and c.scans and part == 0):
            # The kernel that lists tokens clears the flags; and it has to have ended before the next one starts.
            # One wait serves both slices.
            cute.arch.griddepcontrol_wait()
        if const_expr(c.pdl):
            if (part == 1) | (share.ends[1] == 0) | (c.classes == 1):
                cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.classes == 1):
            self._write(share.slices[0], tid, share, smem)
        else:
            if share.ends[part] < c.classes:
                self._leave(tid, share, smem)
            else:
                if share.begins[part] > 0:
                    self._collect(share.slices[part], tid, share, smem)
                self._write(share.slices[part], tid, share, smem)
            if const_expr(part == 0):
                # The second slice's sums replace these.
                cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    def _left(self, worker, share) -> tuple[cute.Tensor, cute.Pointer]:
        """A worker's partial sums in the workspace, by four, and its flag."""
        sums, flags = share.left
        slot = share.tile * share.workers + worker
        at = sums.iterator + cute.assume(Int64(slot) * self.config.sum_bytes, divby=ROWS * 4)
        return as_vectors(at, self.config.sum_bytes), flags.iterator + slot

    @cute.jit
    def _leave(self, tid, share, smem):
        """Write the sums to the workspace for another worker, and clear them."""
        c = self.config
        threads = c.warps * WARP
        here = as_vectors(smem.sums, c.sum_bytes)
        there, flag = self._left(share.worker, share)
        for i in range(tid, cute.size(here, mode=[0]), threads):
            store_words(load_words(here[i, None]), there[i, None])
            store_words([Uint32(0)] * 4, here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if tid == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(flag, Uint32(1))

    @cute.jit
    def _collect(self, slice_, tid, share, smem):
        """Add other workers' partial sums of this slice, in the order of their classes; this worker's come last."""
        c = self.config
        here = as_vectors(smem.sums, c.sum_bytes)
        # The worker that has the slice's first class: portions are rounded down.
        tasks = cute.ceil_div(share.n, ROWS) * c.classes
        first = ((slice_ * c.classes + 1) * share.workers - 1) // tasks
        for worker in range(first, share.worker):
            _, flag = self._left(worker, share)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        for i in range(tid, cute.size(here, mode=[0]), c.warps * WARP):
            total = cute.make_rmem_tensor((4,), Float32)
            total.fill(0.0)
            for worker in range(first, share.worker):
                there, _ = self._left(worker, share)
                for e, word in enumerate(load_words(there[i, None])):
                    total[e] = total[e] + ptx.float_of(word)
            own = load_words(here[i, None])
            store_words([ptx.bits_of(total[e] + ptx.float_of(own[e])) for e in range(4)], here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=c.warps * WARP)

    @cute.jit
    def _write(self, slice_, tid, share, smem):
        """Round the sums, and store them."""
        c = self.config
        for piece in range(tid, c.tokens * (ROWS // 4), c.warps * WARP):
            token, row = piece // (ROWS // 4), piece % (ROWS // 4) * 4
            m, n = share.first_token + token, slice_ * ROWS + row
            if (m < share.m) & (n < share.n):
                at = smem.sums + cute.assume(self.sum_offset(self.token_offset(token), row), divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = share.out.iterator + cute.assume(Int64(m) * share.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
