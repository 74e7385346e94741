"""Exchange of rows between GPUs: a GPU sends its rows to its peers, and adds up the rows of all GPUs.

The threads that process a row divide it into vectors of 16 bytes: thread i processes vectors i, i + threads_per_row,
and so on. So a warp sends 512 contiguous bytes at a time. (If a thread sent its quantisation blocks of ``row_quant``
instead, a warp would send halves of sectors.)
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.all_reduce_rows import instructions
from torch_cute_ops.kernels.all_reduce_rows.config import FAILED, MAX_CTAS, Config
from torch_cute_ops.kernels.all_reduce_rows.instructions import ABSENT, OTHER_NAN
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words, unpack
from torch_cute_ops.kernels.row_quant.config import ceil_div
from torch_cute_ops.kernels.row_quant.rows import Rows, sync_group

VECTOR_WORDS = 4
VECTOR_BYTES = 16
AT_ONCE = 8
"""Largest number of vectors that a thread loads before it waits for the first vector."""


class Peers(NamedTuple):
    """State of an exchange in one launch.

    Attributes:
        rank: index of this GPU.
        epoch: number of launches before this one.
        has_failed: 1 after a launch whose wait failed. From then on, launches neither send nor wait.
        deadline: value of the global timer at which all waits end.
        staging: address of this GPU's staging.
        slot_bytes: bytes of a peer's slot in the staging.
        slots: addresses of this GPU's slots at the peers.
        half_bytes: bytes of half of a staging.
        control, report: addresses of ``Arguments.control`` and ``Arguments.report``.
    """

    rank: Int32
    epoch: Uint32
    has_failed: Uint32
    deadline: Int64
    staging: Int64
    slot_bytes: Int64
    slots: tuple
    half_bytes: Int64
    control: Int64
    report: Int64


class Exchange:
    """Device code that exchanges rows. ``thread`` is a ``Thread`` and ``smem`` an ``Smem`` of ``row_quant``; the
    thread's ``peers`` are a ``Peers``."""

    def __init__(self, config: Config, rows: Rows):
        self.config, self.rows = config, rows
        c = config.rows
        self.block_bytes = c.spec.block_elements * c.spec.dtype.itemsize
        self.slice_vectors = c.slice_width * c.spec.dtype.itemsize // VECTOR_BYTES
        self.vectors_per_thread = ceil_div(self.slice_vectors, c.threads_per_row)

    def start(self, given) -> Peers:
        """Read the state of the exchange. Call this function after the wait for the previous kernel.

        The state is not used at once, so that the copies of the first rows need not wait for it.
        """
        rank, staging, slots, control, report, timeout_ms = given
        control_at = Int64(control.iterator.toint())
        cta, _, _ = cute.arch.block_idx()
        slot_bytes = Int64(staging.shape[2]) * 4
        return Peers(
            rank=rank,
            epoch=instructions.load_word(control_at + cta * 4),
            has_failed=instructions.load_word(control_at + 4 * FAILED),
            deadline=instructions.now() + Int64(timeout_ms) * 1_000_000,
            staging=Int64(staging.iterator.toint()),
            slot_bytes=slot_bytes,
            slots=tuple(Int64(slot.iterator.toint()) for slot in slots),
            half_bytes=slot_bytes * (self.config.ranks - 1),
            control=control_at,
            report=Int64(report.iterator.toint()),
        )

    @cute.jit
    def count_launch(self, thread):
        """Increment this CTA's copies of the number of launches: its own copy, which no other CTA reads, and some of
        the copies that CTAs of other grids read. Call this function after a synchronisation that follows ``start``."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        for i in range(cta + thread.tid * ctas, MAX_CTAS, thread.threads * ctas):
            instructions.store_word(thread.peers.control + i * 4, thread.peers.epoch + 1)

    @cute.jit
    def push(self, iteration, thread, smem):
        """Send the row of an iteration, if the row exists, to all peers. Before this call, the row's bulk copy to
        shared memory must have been started."""
        c = self.config.rows
        if iteration < thread.iterations:
            stage = iteration % c.stages
            ptx.wait(smem.full + stage, (iteration // c.stages) & 1)
            row = self.rows.row_at(iteration, thread) + thread.row
            buffer = self._vectors(self.rows.buffer(0, stage, thread.row, smem))
            offset = self._row_offset(row, thread)
            for i in range_constexpr(self.vectors_per_thread):
                vector = self._vector(i, thread)
                condition = self._takes(vector, row, thread)
                words = load_words(buffer[None, ptx.select(condition != 0, vector, Int32(0))])
                words = [ptx.select(word == ABSENT, Uint32(OTHER_NAN), word) for word in words]
                for k in range_constexpr(len(thread.peers.slots)):
                    address = thread.peers.slots[k] + offset + vector * VECTOR_BYTES
                    instructions.store_far_if(address, words, self._sends(k, row, condition, thread))

    def sum_row(self, row, stage, thread, smem):
        """Replace the input's row in shared memory by the sum over all GPUs.

        Wait for the peers' vectors, and clear them in the staging.
        """
        peers = thread.peers
        offset = peers.staging + self._row_offset(row, thread)
        buffer = self._vectors(self.rows.buffer(0, stage, thread.row, smem))
        slots = [offset + peers.slot_bytes * k for k in range(self.config.ranks - 1)]
        receives = [self._receives(k, row, thread) for k in range(self.config.ranks - 1)]
        at_once = max(1, AT_ONCE // len(slots))
        for first in range(0, self.vectors_per_thread, at_once):
            some = range(first, min(first + at_once, self.vectors_per_thread))
            vectors = [self._vector(i, thread) for i in some]
            takes = [self._takes(vector, row, thread) for vector in vectors]
            conditions = [[each & received for received in receives] for each in takes]
            loaded = [
                [
                    instructions.load_far_if(slot + vector * VECTOR_BYTES, condition)
                    for slot, condition in zip(slots, of_slots, strict=True)
                ]
                for vector, of_slots in zip(vectors, conditions, strict=True)
            ]
            if len(vectors) * len(slots) > 1:
                self._await_last(vectors, takes, conditions, loaded, slots, thread)
            for vector, exists, of_slots, staged in zip(vectors, takes, conditions, loaded, strict=True):
                self._sum_vector(row, vector, exists, of_slots, staged, slots, buffer, thread)
        sync_group(self.config.rows, thread)

    def _await_last(self, vectors: list, takes: list, conditions: list, loaded: list[list], slots: list, thread):
        """Wait for the last of the thread's vectors, which peers send last. Then load all absent vectors again.

        Without this method, the thread would wait for the absent vectors one after the other. The method updates
        ``loaded``.
        """
        peers = thread.peers
        later_exists = Uint32(0)
        # A thread's last vector may be beyond the end of the row. In this case, wait for the vector before the last
        # vector.
        for i in reversed(range(max(0, len(vectors) - 2), len(vectors))):
            waits = [ptx.select(later_exists != 0, Uint32(0), condition) for condition in conditions[i]]
            later_exists = later_exists | takes[i]
            for k, slot in enumerate(slots):
                address = slot + vectors[i] * VECTOR_BYTES
                loaded[i][k] = self._await(loaded[i][k], k, address, waits[k], peers)
                if k == 0:
                    for other in range(1, len(slots)):
                        address = slots[other] + vectors[i] * VECTOR_BYTES
                        loaded[i][other] = instructions.load_again_if(loaded[i][other], address, waits[other])
        for i, vector in enumerate(vectors):
            for k, slot in enumerate(slots):
                address = slot + vector * VECTOR_BYTES
                loaded[i][k] = instructions.load_again_if(loaded[i][k], address, conditions[i][k])

    def _await(self, words: list, k: int, address, condition, peers: Peers) -> list:
        """Wait for a vector of the peer with slot ``k``, if ``condition``."""
        failed, report = peers.control + 4 * FAILED, peers.report + 4 * k
        return instructions.await_far_if(words, address, condition, peers.deadline, failed, report)

    @cute.jit
    def _sum_vector(self, row, vector, exists, conditions: list, staged: list, slots: list, buffer, thread):
        """Wait for the peers' vectors that had not arrived at the time of their load, and store the sum in shared
        memory. In two shots, the owner of the row also sends the sum to the peers, which use it unchanged."""
        peers = thread.peers
        absent = [Uint32(ABSENT)] * VECTOR_WORDS
        others = []
        for k in range_constexpr(self.config.ranks - 1):
            address = slots[k] + vector * VECTOR_BYTES
            others.append(self._await(staged[k], k, address, conditions[k], peers))
            instructions.store_far_if(address, absent, conditions[k])
        if exists != 0:
            target = buffer[None, vector]
            total = self._sum(load_words(target), others, peers.rank)
            if const_expr(self.config.two_shot_rows is not None):
                is_own = self._in_two_shots(thread) & Uint32(self._owner(row) == peers.rank)
                # If the wait ended without a vector, send no sum, so that the peers' waits fail too.
                for word in [word for words in others for word in words]:
                    is_own = is_own & Uint32(word != ABSENT)
                offset = self._row_offset(row, thread) + vector * VECTOR_BYTES
                for k in range_constexpr(self.config.ranks - 1):
                    instructions.store_far_if(peers.slots[k] + offset, total, is_own)
                for k in range_constexpr(self.config.ranks - 1):
                    total = self._unless_sent(total, others[k], k, row, thread)
            store_words(total, target)

    def _sum(self, own: list, others: list[list], rank) -> list:
        """Add up the ranks' words in the order of the ranks, in fp32, and round the sum once."""
        total = None
        for r in range(self.config.ranks):
            before = others[r] if r < len(others) else None
            after = others[r - 1] if r > 0 else None
            words = []
            for i, word in enumerate(own):
                other = (before or after)[i]
                if before is not None and after is not None:
                    other = ptx.select(rank > r, before[i], after[i])
                words.append(ptx.select(rank == r, word, other))
            values = unpack(words, self.rows.dtype)
            total = values if total is None else [ptx.add_rn(a, b) for a, b in zip(total, values, strict=True)]
        return pack(total, self.rows.dtype)

    def _in_two_shots(self, thread) -> Uint32:
        """Return 1 if rows are exchanged in two shots."""
        return Uint32(thread.rows >= self.config.two_shot_rows)

    def _owner(self, row) -> Int32:
        """Return the rank that sums a row in two shots.

        All rows of a warp have the same owner. Otherwise, lanes that wait for a sum could keep other lanes of their
        warp from sending the sum for which the peer's warp waits.
        """
        return row // self.config.rows.group_rows % self.config.ranks

    def _peer(self, k: int, thread) -> Int32:
        """Return the rank of the peer with slot ``k``."""
        return ptx.select(thread.peers.rank <= k, Int32(k + 1), Int32(k))

    def _sends(self, k: int, row, condition, thread) -> Uint32:
        """Return 1 if ``condition`` is true and this GPU sends its row to the peer with slot ``k``. In two shots, the
        GPU sends the row only to the owner."""
        if self.config.two_shot_rows is None:
            return condition
        is_owner = Uint32(self._owner(row) == self._peer(k, thread))
        return condition & ptx.select(self._in_two_shots(thread) != 0, is_owner, Uint32(1))

    def _receives(self, k: int, row, thread) -> Uint32:
        """Return 1 if the peer with slot ``k`` sends words of a row to this GPU. The peer sends its row if this GPU
        computes the sum, and sends the sum if the peer owns the row."""
        if self.config.two_shot_rows is None:
            return Uint32(1)
        owner = self._owner(row)
        is_sent = Uint32((owner == thread.peers.rank) | (owner == self._peer(k, thread)))
        return ptx.select(self._in_two_shots(thread) != 0, is_sent, Uint32(1))

    def _unless_sent(self, total: list, sent: list, k: int, row, thread) -> list:
        """Return ``sent``, the words from the peer with slot ``k``, if this peer owns the row in two shots, otherwise
        ``total``."""
        is_sum = self._in_two_shots(thread) & Uint32(self._owner(row) == self._peer(k, thread))
        return [ptx.select(is_sum != 0, mine, other) for mine, other in zip(sent, total, strict=True)]

    def _vector(self, i: int, thread) -> Int32:
        """Return the index, in the CTA's slice of a row, of the thread's i-th vector."""
        return thread.column + i * self.config.rows.threads_per_row

    def _takes(self, vector, row, thread) -> Uint32:
        """Return 1 if the thread exchanges a vector of a row: the vector and the row exist, and no wait has failed in
        earlier launches."""
        exists = (vector < thread.cta_blocks * (self.block_bytes // VECTOR_BYTES)) & (row < thread.rows)
        return Uint32(exists & (thread.peers.has_failed == 0))

    def _vectors(self, buffer: cute.Pointer) -> cute.Tensor:
        """View a row in shared memory as a matrix of words, one column per vector."""
        layout = cute.make_layout((VECTOR_WORDS, self.slice_vectors), stride=(1, VECTOR_WORDS))
        return cute.make_tensor(cute.recast_ptr(buffer, dtype=Uint32), layout)

    def _row_offset(self, row, thread) -> Int64:
        """Return the byte offset of the CTA's slice of a row, relative to a slot in the first half of a staging."""
        half = Int64(thread.peers.epoch & 1) * thread.peers.half_bytes
        return half + Int64(row) * self.config.row_bytes + thread.first_block * self.block_bytes
