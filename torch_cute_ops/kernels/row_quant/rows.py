"""Distribution of rows over groups of threads, and loads of rows through shared memory into registers."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import GATES, swiglu
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, add, load_words, pack, store_words, unpack, words_per
from torch_cute_ops.kernels.common.fp8.layouts import SCALE_THREADS
from torch_cute_ops.kernels.row_quant.config import QUAD, WARP, Config
from torch_cute_ops.kernels.row_quant.experts import row_of
from torch_cute_ops.kernels.row_quant.scales import FP4Scales


def bulk_load(source: cute.Pointer, target: cute.Pointer, elements: int, barrier: cute.Pointer, policy) -> None:
    """Start one bulk copy from global to shared memory. ``barrier`` counts the bytes."""
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), source.dtype)
    layout = cute.make_layout(elements)
    tensors = (cute.make_tensor(source, layout), cute.make_tensor(target, layout))
    cute.copy(atom, *tensors, mbar_ptr=barrier, cache_policy=policy)


def sync_group(config: Config, thread) -> None:
    """Synchronise the threads of a group."""
    if config.group_warps == 1:
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(barrier_id=1 + thread.group, number_of_threads=config.group_threads)


class Rows:
    """Device code that distributes rows over groups, and loads them. ``thread`` is a ``Thread``, ``smem`` an
    ``Smem``."""

    def __init__(self, config: Config, scales: FP4Scales):
        self.config, self.scales = config, scales
        spec = config.spec
        self.dtype = DSL_DTYPES[spec.dtype]
        self.residual_dtype = Float32 if spec.has_fp32_residual else self.dtype
        self.weight_dtype = None if spec.weight_dtype is None else DSL_DTYPES[spec.weight_dtype]

    @cute.jit
    def distribute(self, thread):
        """Distribute the rows over the walkers (see ``Thread``): first as quads of four rows, then as single rows."""
        c = self.config
        thread.quads = Int32(0)
        thread.quad_iterations = Int32(0)
        if const_expr(c.quads):
            # Distribute whole rounds of quads. In a round, each walker takes one quad. Add a partial round if some
            # walker would need four iterations for the remaining rows anyway. Only rows of full scale tiles form quads,
            # and the rows that are distributed one by one begin at the start of a tile.
            whole = thread.rows // 128 * 32
            rounds = whole // thread.walkers * thread.walkers // 32 * 32
            thread.quads = ptx.select(thread.rows - rounds * QUAD > (QUAD - 1) * thread.walkers, whole, rounds)
            thread.quad_iterations = (thread.quads - thread.walker + thread.walkers - 1) // thread.walkers * QUAD
        singles = cute.ceil_div(thread.rows - thread.quads * QUAD, c.group_rows)
        thread.iterations = thread.quad_iterations + (singles - thread.walker + thread.walkers - 1) // thread.walkers

    def row_at(self, iteration, thread):
        """Return the row that this walker processes in ``iteration``. If the walker processes several rows at once,
        return the first of them."""
        c = self.config
        single = (
            thread.quads * QUAD + ((iteration - thread.quad_iterations) * thread.walkers + thread.walker) * c.group_rows
        )
        if not c.quads:
            return single
        quad = iteration // QUAD * thread.walkers + thread.walker
        return ptx.select(
            iteration < thread.quad_iterations,
            self.scales.quad_row(quad) + iteration % QUAD * self.scales.quad_step,
            single,
        )

    def memory_row_at(self, iteration, thread, smem):
        """Return the index, in the tensors in global memory, of the thread's row in ``iteration``. All lanes of a warp
        take the same branches."""
        row = self.row_at(iteration, thread) + thread.row
        spec = self.config.spec
        if spec.rows != "experts":
            return row
        if not spec.has_table:
            return thread.first_row + row
        found = row_of(smem.experts, row, thread.lane, is_of_warp=self.config.group_rows == 1)
        # Wrong counts of many experts may add up to more than int32 holds, so that the table is wrong. As unsigned
        # numbers, negative indices exceed the last row, too.
        return Int32(cutlass.min(Uint32(found), Uint32(thread.input.shape[0] - 1)))

    def issue_first(self, memory_row, second_row, thread, smem) -> None:
        """Start the copies of the rows of the first iteration (``memory_row``) and, with two stages, of the second
        iteration (``second_row``)."""
        for i in range(self.config.stages):
            self.issue(Int32(i), i, (memory_row, second_row)[i], thread, smem)

    @cute.jit
    def issue(self, iteration, stage, memory_row, thread, smem):
        """Start the copies of an iteration's rows from ``memory_row`` into a row buffer. The first thread of each row
        starts the row's copies."""
        c = self.config
        spec = c.spec
        row = self.row_at(iteration, thread) + thread.row
        bytes_per_row = thread.cta_blocks * (spec.input_units * spec.block_elements * self.dtype.width // 8)
        if thread.in_group == 0:
            if iteration < thread.iterations:
                count = cutlass.min(thread.rows - row, c.group_rows)
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full + stage, count * bytes_per_row)
        if const_expr(c.group_rows > 1):
            cute.arch.sync_warp()
        if thread.in_group % c.threads_per_row == 0:
            if (iteration < thread.iterations) & (row < thread.rows):
                for i in range_constexpr(spec.inputs):
                    load = functools.partial(
                        bulk_load,
                        source=self.slice_of(self.input_row(i, memory_row, thread), thread),
                        target=self.buffer(i, stage, thread.row, smem),
                        barrier=smem.full + stage,
                        policy=Int64(ptx.EVICT_FIRST),
                    )
                    self.copy_slice(load, thread)

    def slice_of(self, row: cute.Pointer, thread) -> cute.Pointer:
        """Return the address in global memory of the CTA's slice of a row."""
        return row + cute.assume(thread.first_block * self.config.spec.block_elements, divby=16)

    def input_row(self, i: int, row, thread) -> cute.Pointer:
        """Return the address, in global memory, of the ``i``-th input row from which a row of values is computed."""
        spec = self.config.spec
        is_residual = spec.source == "add" and i == 1
        tensor, dtype = (thread.residual, self.residual_dtype) if is_residual else (thread.input, self.dtype)
        start = tensor.iterator + cute.assume(Int64(row) * tensor.stride[0], divby=128 // dtype.width)
        return start + spec.width if spec.source == "silu_mul" and i == 1 else start

    def buffer(self, i: int, stage, row, smem) -> cute.Pointer:
        """Return the row buffer of the ``i``-th input row of a group's row."""
        c = self.config
        slot = (stage * c.group_rows + row) * c.spec.input_units + i
        buffer = smem.buffers + cute.assume(slot * c.slice_width, divby=16)
        if c.spec.has_fp32_residual and i == 1:
            return cute.recast_ptr(buffer, dtype=Float32)
        return buffer

    @cute.jit
    def copy_slice(self, copy, thread):
        """Call ``copy`` with the number of elements of the CTA's slice. The last slice of a row takes another branch,
        so that the number is a compile-time constant in both branches."""
        c = self.config
        last_width = c.spec.width - (c.splits - 1) * c.slice_width
        if const_expr(last_width == c.slice_width):
            copy(elements=c.slice_width)
        else:
            if thread.rank < c.splits - 1:
                copy(elements=c.slice_width)
            else:
                copy(elements=last_width)

    @cute.jit
    def issue_weight(self, weight, bias, thread, smem):
        """Start the bulk copies of the CTA's slices of the norm's weight and bias to shared memory."""
        spec = self.config.spec
        copies = spec.has_weight + spec.has_bias
        bytes_ = thread.cta_blocks * (copies * spec.block_elements * self.weight_dtype.width // 8)
        cute.arch.mbarrier_arrive_and_expect_tx(smem.weight_barrier, bytes_)
        for tensor, target in ((weight, smem.weight), (bias, smem.bias)):
            if const_expr(tensor is not None):
                source = self.slice_of(tensor.iterator, thread)
                load = functools.partial(
                    bulk_load, source=source, target=target, barrier=smem.weight_barrier, policy=None
                )
                self.copy_slice(load, thread)

    def block_words(self, pointer: cute.Pointer, dtype, block) -> list:
        """Return one block in shared memory as words."""
        c = self.config
        words = words_per(c.spec.block_elements, dtype)
        layout = cute.make_layout((words, c.slice_blocks), stride=(1, words))
        return load_words(cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), layout)[None, block])

    def weight(self, j: int, thread, smem) -> list:
        """Return the factors of the norm for the thread's j-th block, in fp32: the weight, or 1 + weight."""
        words = self.block_words(smem.weight, self.weight_dtype, self._safe_block(j, thread))
        weight = unpack(words, self.weight_dtype)
        if self.config.spec.weight_plus_one:
            return [ptx.add_rn(each, Float32(1.0)) for each in weight]
        return weight

    def bias(self, j: int, thread, smem) -> list:
        """Return the bias of the norm for the thread's j-th block, in fp32."""
        words = self.block_words(smem.bias, self.weight_dtype, self._safe_block(j, thread))
        return unpack(words, self.weight_dtype)

    @property
    def is_ragged(self) -> bool:
        """True if some threads of a row have fewer blocks than others."""
        c = self.config
        return c.threads_per_row * c.blocks_per_thread * c.splits != c.blocks

    def _safe_block(self, j: int, thread):
        """Return the index of the thread's j-th block. If the block does not exist, return the index of a block that is
        safe to read instead.

        The safe block is the thread's first block. Threads with the missing half of a short FP8 block instead read the
        existing half, which does not change the block's amax.
        """
        c = self.config
        block = thread.column + j * c.threads_per_row
        if not self.is_ragged or (j == 0 and not c.has_idle_threads):
            return block
        instead = thread.column
        if c.has_short_block:
            half = SCALE_THREADS // 2
            beside = block < (thread.cta_blocks + half) // SCALE_THREADS * SCALE_THREADS
            instead = ptx.select(beside, block - half, instead)
        return ptx.select(block < thread.cta_blocks, block, instead)

    def has_last_block(self, thread):
        """Return True if a thread of this warp has one block more than ``common_blocks``."""
        return thread.warp * WARP + self.config.common_blocks * self.config.threads_per_row < thread.cta_blocks

    def values(self, stage, j: int, thread, smem, again: bool = False) -> tuple[list, list]:
        """Return two lists for the thread's j-th block: its values in fp32, and the same values packed into words. The
        words have the dtype of the residual if one is added, otherwise the dtype of the input. With a gate, the list of
        words is empty. ``again`` is True if the row is read a second time, after the sums have overwritten the
        residual.
        """
        spec = self.config.spec
        block = self._safe_block(j, thread)
        if again and spec.source == "add":
            words = self.block_words(self.buffer(1, stage, thread.row, smem), self.residual_dtype, block)
            return unpack(words, self.residual_dtype), words
        dtypes = self.dtype, self.residual_dtype if spec.source == "add" else self.dtype
        words = [
            self.block_words(self.buffer(i, stage, thread.row, smem), dtypes[i], block) for i in range(spec.inputs)
        ]
        if spec.source == "rows":
            return unpack(words[0], self.dtype), words[0]
        if spec.source == "add" and spec.has_fp32_residual:
            values = unpack(words[0], self.dtype), unpack(words[1], Float32)
            total = [ptx.add_rn(a, b) for a, b in zip(*values, strict=True)]
            return total, pack(total, Float32)
        if spec.source == "add":
            total = add(*words, self.dtype)
            return unpack(total, self.dtype), total
        pairs = zip(*(unpack(half, self.dtype) for half in words), strict=True)
        if spec.swiglu:
            return [swiglu(gate, up, *thread.gate) for gate, up in pairs], []
        return [GATES[spec.gate](gate, up) for gate, up in pairs], []

    def has_block(self, j: int, thread):
        """Return True if the thread's j-th block exists."""
        return thread.column + j * self.config.threads_per_row < thread.cta_blocks

    def without_padding(self, values: list, j: int, thread) -> list:
        """In the thread's j-th block, set the elements beyond ``RowQuantSpec.norm_width`` to zero."""
        spec = self.config.spec
        used = spec.norm_width - (spec.blocks - 1) * spec.block_elements
        if used == spec.block_elements:
            return values
        is_last = thread.first_block + self._safe_block(j, thread) == spec.blocks - 1
        return [*values[:used], *(ptx.select(is_last, Float32(0.0), value) for value in values[used:])]

    @cute.jit
    def fill_buffer(self, words: list, buffer: cute.Pointer, j: int, thread):
        """Write the thread's j-th block to a row buffer in shared memory. A bulk copy later stores the row to global
        memory."""
        c = self.config
        block = thread.column + j * c.threads_per_row
        layout = cute.make_layout((len(words), c.slice_blocks), stride=(1, len(words)))
        target = cute.make_tensor(cute.recast_ptr(buffer, dtype=Uint32), layout)[None, block]
        if const_expr(self.is_ragged and (j > 0 or c.has_idle_threads)):
            if block < thread.cta_blocks:
                store_words(words, target)
        else:
            store_words(words, target)
