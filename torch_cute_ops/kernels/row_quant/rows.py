"""Which rows a group works on, and how they get through shared memory into registers."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import silu_mul, swiglu
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, add, load_words, store_words, unpack, words_per
from torch_cute_ops.kernels.common.fp8.layouts import SCALE_THREADS
from torch_cute_ops.kernels.row_quant.config import QUAD, WARP, Config
from torch_cute_ops.kernels.row_quant.experts import row_of
from torch_cute_ops.kernels.row_quant.scales import FP4Scales


def bulk_load(source: cute.Pointer, target: cute.Pointer, elements: int, barrier: cute.Pointer, policy) -> None:
    """Start one bulk copy from global to shared memory; ``barrier`` counts its bytes."""
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), source.dtype)
    layout = cute.make_layout(elements)
    tensors = (cute.make_tensor(source, layout), cute.make_tensor(target, layout))
    cute.copy(atom, *tensors, mbar_ptr=barrier, cache_policy=policy)


def sync_group(config: Config, t) -> None:
    """A barrier for the threads of a group."""
    if config.group_warps == 1:
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(barrier_id=1 + t.group, number_of_threads=config.group_threads)


class Rows:
    """Row distribution and loads of one ``Config``; ``t`` is a ``Thread``, ``s`` the ``Shared`` memory."""

    def __init__(self, config: Config, scales: FP4Scales):
        self.config, self.scales = config, scales
        p = config.problem
        self.dtype = DSL_DTYPES[p.dtype]
        self.weight_dtype = None if p.weight_dtype is None else DSL_DTYPES[p.weight_dtype]

    @cute.jit
    def deal(self, t):
        """Distribute the rows over the walkers: quads first, then single rows; see ``row_at``."""
        c = self.config
        t.quads = Int32(0)
        t.quad_its = Int32(0)
        if const_expr(c.quads):
            # Whole rounds of quads, and a partial round if the rows that are left take a walker four iterations anyway.
            # Only full tiles are handed out as quads, and single rows begin with a tile.
            whole = t.rows // 128 * 32
            rounds = whole // t.walkers * t.walkers // 32 * 32
            t.quads = ptx.select(t.rows - rounds * QUAD > (QUAD - 1) * t.walkers, whole, rounds)
            t.quad_its = (t.quads - t.walker + t.walkers - 1) // t.walkers * QUAD
        singles = cute.ceil_div(t.rows - t.quads * QUAD, c.group_rows)
        t.its = t.quad_its + (singles - t.walker + t.walkers - 1) // t.walkers

    def row_at(self, it, t):
        """The row, or first row, of this walker's iteration ``it``."""
        c = self.config
        single = t.quads * QUAD + ((it - t.quad_its) * t.walkers + t.walker) * c.group_rows
        if not c.quads:
            return single
        quad = it // QUAD * t.walkers + t.walker
        return ptx.select(it < t.quad_its, self.scales.quad_row(quad) + it % QUAD * self.scales.quad_step, single)

    def place_of(self, it, t, s):
        """The thread's row of iteration ``it`` as a row of the tensors in global memory; warp-uniform control flow."""
        row = self.row_at(it, t) + t.row
        p = self.config.problem
        if p.rows != "experts":
            return row
        if not p.has_table:
            return t.first_row + row
        return row_of(s.experts, row, t.lane, is_of_warp=self.config.group_rows == 1)

    def issue_first(self, place, after, t, s) -> None:
        """Start the copies of the first iterations, one for each stage; ``place`` and ``after`` are their rows."""
        for i in range(self.config.stages):
            self.issue(Int32(i), i, (place, after)[i], t, s)

    @cute.jit
    def issue(self, it, stage, place, t, s):
        """Start the copies of iteration ``it``'s rows into a buffer: for each row its first thread, from ``place``."""
        c = self.config
        p = c.problem
        row = self.row_at(it, t) + t.row
        bytes_per_row = t.my_blocks * (p.inputs * p.unit * self.dtype.width // 8)
        if t.in_group == 0:
            if it < t.its:
                count = cutlass.min(t.rows - row, c.group_rows)
                cute.arch.mbarrier_arrive_and_expect_tx(s.full + stage, count * bytes_per_row)
        if const_expr(c.group_rows > 1):
            cute.arch.sync_warp()
        if t.in_group % c.threads_per_row == 0:
            if (it < t.its) & (row < t.rows):
                for i in range_constexpr(p.inputs):
                    load = functools.partial(
                        bulk_load,
                        source=self.slice_of(self.input_row(i, place, t), t),
                        target=self.buffer(i, stage, t.row, s),
                        barrier=s.full + stage,
                        policy=Int64(ptx.EVICT_FIRST),
                    )
                    self.copy_slice(load, t)

    def slice_of(self, row: cute.Pointer, t) -> cute.Pointer:
        """Where the CTA's slice of a row in global memory begins."""
        return row + cute.assume(t.first_block * self.config.problem.unit, divby=16)

    def input_row(self, i: int, row, t) -> cute.Pointer:
        """The i-th row in global memory that goes into a row of values."""
        p = self.config.problem
        tensor = t.residual if p.source == "add" and i == 1 else t.input
        start = tensor.iterator + cute.assume(Int64(row) * tensor.stride[0], divby=128 // self.dtype.width)
        return start + p.width if p.source == "silu_mul" and i == 1 else start

    def buffer(self, i: int, stage, row, s) -> cute.Pointer:
        """The buffer of the i-th input of a group's row."""
        c = self.config
        slot = (stage * c.group_rows + row) * c.problem.inputs + i
        return s.buffers + cute.assume(slot * c.slice_width, divby=16)

    @cute.jit
    def copy_slice(self, copy, t):
        """Call ``copy`` with the elements of the CTA's slice."""
        c = self.config
        last_width = c.problem.width - (c.splits - 1) * c.slice_width
        if const_expr(last_width == c.slice_width):
            copy(elements=c.slice_width)
        else:
            if t.rank < c.splits - 1:
                copy(elements=c.slice_width)
            else:
                copy(elements=last_width)

    @cute.jit
    def issue_weight(self, weight, t, s):
        """Start the copy of the CTA's slice of the norm's weight."""
        unit = self.config.problem.unit
        bytes_ = t.my_blocks * (unit * self.weight_dtype.width // 8)
        cute.arch.mbarrier_arrive_and_expect_tx(s.weight_barrier, bytes_)
        source = self.slice_of(weight.iterator, t)
        load = functools.partial(bulk_load, source=source, target=s.weight, barrier=s.weight_barrier, policy=None)
        self.copy_slice(load, t)

    def _block_words(self, pointer: cute.Pointer, dtype, block) -> list:
        """The words of one block in shared memory."""
        c = self.config
        words = words_per(c.problem.unit, dtype)
        layout = cute.make_layout((words, c.slice_blocks), stride=(1, words))
        return load_words(cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), layout)[None, block])

    def weight(self, j: int, t, s) -> list:
        """The weight of the thread's j-th block in fp32."""
        words = self._block_words(s.weight, self.weight_dtype, self._safe_block(j, t))
        return unpack(words, self.weight_dtype)

    @property
    def is_ragged(self) -> bool:
        """Whether some threads have fewer blocks than others."""
        c = self.config
        return c.threads_per_row * c.thread_blocks * c.splits != c.blocks

    def _safe_block(self, j: int, t):
        """The thread's j-th block, or one that is safe to read instead if that is beyond the row.

        That is the thread's first block. But the threads that would have the missing half of a short FP8 block read the
        half that exists, which leaves the block's amax as it is.
        """
        c = self.config
        block = t.column + j * c.threads_per_row
        if not self.is_ragged or (j == 0 and not c.has_idle_threads):
            return block
        instead = t.column
        if c.has_short_block:
            half = SCALE_THREADS // 2
            beside = block < (t.my_blocks + half) // SCALE_THREADS * SCALE_THREADS
            instead = ptx.select(beside, block - half, instead)
        return ptx.select(block < t.my_blocks, block, instead)

    def has_last_block(self, t):
        """Whether a thread of the warp has one block more than ``common_blocks``."""
        return t.warp * WARP + self.config.common_blocks * self.config.threads_per_row < t.my_blocks

    def values(self, stage, j: int, t, s, again: bool = False) -> tuple[list, list]:
        """The values of the thread's j-th block in fp32, and the words that hold them in the input dtype.

        A gate has values in fp32 only, and no words.

        ``again``: the row is read a second time, after its sums have overwritten the residual.
        """
        p = self.config.problem
        block = self._safe_block(j, t)
        if again and p.source == "add":
            words = self._block_words(self.buffer(1, stage, t.row, s), self.dtype, block)
            return unpack(words, self.dtype), words
        words = [self._block_words(self.buffer(i, stage, t.row, s), self.dtype, block) for i in range(p.inputs)]
        if p.source == "rows":
            return unpack(words[0], self.dtype), words[0]
        if p.source == "add":
            total = add(*words, self.dtype)
            return unpack(total, self.dtype), total
        pairs = zip(*(unpack(half, self.dtype) for half in words), strict=True)
        if p.swiglu:
            return [swiglu(gate, up, *t.gate) for gate, up in pairs], []
        return [silu_mul(gate, up) for gate, up in pairs], []

    @cute.jit
    def fill_buffer(self, words: list, buffer: cute.Pointer, j: int, t):
        """Write the thread's j-th block into a row in shared memory, which is stored in bulk later."""
        c = self.config
        block = t.column + j * c.threads_per_row
        layout = cute.make_layout((len(words), c.slice_blocks), stride=(1, len(words)))
        target = cute.make_tensor(cute.recast_ptr(buffer, dtype=Uint32), layout)[None, block]
        if const_expr(self.is_ragged and (j > 0 or c.has_idle_threads)):
            if block < t.my_blocks:
                store_words(words, target)
        else:
            store_words(words, target)
