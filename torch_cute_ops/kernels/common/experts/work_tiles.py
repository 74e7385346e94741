"""Lists of routed tokens, and the work tiles of GEMMs that compute only routed (token, expert) pairs.

The GEMM's tokens are divided into *token blocks*. A first kernel lists, for each expert, the tokens of a block that are
routed to the expert (``TokenLister``). An *m tile* consists of up to ``tile_m`` tokens of such a list. Each CTA of the
GEMM then writes a second list to shared memory: the experts with a token in the CTA's block ("touched" experts), and
the index of each expert's first m tile (``ExpertMTiles``).

A list holds tokens in ascending order. An entry consists of two words: the index of a token and its factor. The index
is negative in unused entries of the last m tile. If the activations depend on the expert, as in the second GEMM of an
MoE layer, the list also holds the activations, rearranged as ``kernels.common.fp4.activations`` describes. In memory, k
tiles follow each other. In a k tile, groups of eight tokens follow each other, so the tokens of an m tile are
contiguous too.
"""

import itertools
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import factor_counts
from torch_cute_ops.kernels.common.core.memory import store_words
from torch_cute_ops.kernels.common.experts.layouts import (
    MAX_SCANNED_TOKENS,
    PAIR_BYTES,
    WARP,
    TokenListLayout,
    m_tile_list_bytes,
)
from torch_cute_ops.kernels.common.experts.search import running_sum
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.code_mma import CodeActivations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES

MAX_LOADED_FACTORS = 16
"""Largest number of factors that a thread loads at the same time in kernels that are short of registers."""


class TokenLists(NamedTuple):
    """Lists of all token blocks, in the workspace. Each tensor is contiguous.

    Attributes:
        activations: uint8, rearranged activations of the listed tokens.
        pairs: uint8, entries: the number and the factor of each listed token.
        counts: int32, number of listed tokens, per token block and expert.
    """

    activations: cute.Tensor
    pairs: cute.Tensor
    counts: cute.Tensor


class TokenLister:
    """Device code that lists the tokens of one token block for one expert. A CTA has ``TokenListLayout.threads``
    threads."""

    def __init__(self, layout: TokenListLayout, activations: Activations | CodeActivations):
        self.layout, self.activations = layout, activations
        self.token_bytes = layout.token_bytes

    def workspace_tensors(
        self, at: cute.Pointer, token_blocks, experts
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Pointer]:
        """Return ``activations`` and ``pairs`` of ``TokenLists``, which begin at ``at``, and a pointer to the end of
        both."""
        layout = self.layout
        entries = Int64(token_blocks) * experts * layout.capacity
        token_bytes = cute.assume(entries * (layout.k_tiles * layout.token_bytes), divby=layout.token_bytes)
        pair_bytes = cute.assume(entries * PAIR_BYTES, divby=PAIR_BYTES * ATOM_M)
        pairs = at + token_bytes
        return (
            cute.make_tensor(at, cute.make_layout((token_bytes,))),
            cute.make_tensor(pairs, cute.make_layout((pair_bytes,))),
            pairs + pair_bytes,
        )

    def entry(self, block_index, expert, experts):
        """Return the index of a list's first entry, counted over all lists."""
        return (Int64(block_index) * experts + expert) * self.layout.capacity

    def group_at(self, activations, entry, k_tile, place) -> cute.Pointer:
        """Return the workspace address of eight tokens' activations in a k tile. ``place`` is the index of the first
        token in its list."""
        layout = self.layout
        at = entry * layout.k_tiles + Int64(k_tile) * layout.capacity + place
        return activations.iterator + cute.assume(at * layout.token_bytes, divby=ATOM_M * layout.token_bytes)

    @cute.jit
    def list_tokens(self, factors, lists, block_index, expert, experts, m, number_of):
        """List the expert's tokens. An entry is ``number_of(token)`` and the token's factor.

        Returns:
            Shared-memory tensor with the listed tokens' indices in the token block, and the number of listed tokens.
        """
        layout = self.layout
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        warps = layout.threads // WARP
        smem = SmemAllocator()
        found = cute.make_tensor(smem.allocate_array(Int32, warps), cute.make_layout(warps))
        token_ids = cute.make_tensor(smem.allocate_array(Int32, layout.capacity), cute.make_layout(layout.capacity))
        value = Float32(0.0)
        if (tid < layout.token_block) & (block_index * layout.token_block + tid < m):
            value = factors[block_index * layout.token_block + tid, expert]
        ballot = Uint32(cute.arch.vote_ballot_sync(factor_counts(value)))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        entry = self.entry(block_index, expert, experts)
        if factor_counts(value):
            token_ids[before] = tid
            self._store_pair(lists.pairs, entry + before, number_of(tid), value)
        # The last m tile may not be full. Mark its unused entries with a negative number.
        if (tid >= total) & (tid < cute.ceil_div(total, layout.tile_m) * layout.tile_m):
            self._store_pair(lists.pairs, entry + tid, Int32(-1), Float32(0.0))
        if tid == 0:
            lists.counts[block_index * experts + expert] = total
        cute.arch.sync_threads()
        return token_ids, total

    def _store_pair(self, pairs, at, number, factor) -> None:
        to = cute.recast_ptr(pairs.iterator + cute.assume(at * PAIR_BYTES, divby=PAIR_BYTES), dtype=Uint32)
        store_words([Uint32(number), ptx.bits_of(factor)], cute.make_tensor(to, cute.make_layout(2)))

    @cute.jit
    def arrange(
        self, a, a_scale, token_ids, total, activations, entry, first_token, first_k, width, first_k_tile, k_tiles
    ):
        """Rearrange the activations of the first ``total`` listed tokens, and write them to the workspace.

        Args:
            token_ids: indices of the listed tokens in the token block.
            entry: index of the list's first entry, a result of the method ``entry``.
            first_token: first token of the token block.
            first_k, width: first element of the expert's range of k, and length of the range.
            first_k_tile, k_tiles: first k tile to rearrange, and number of k tiles.
        """
        layout = self.layout
        pieces = self.activations.k_groups
        elements = self.activations.config.k_tile
        tid, _, _ = cute.arch.thread_idx()
        for i in range(tid, total * (k_tiles * pieces), layout.threads):
            piece, k_tile = i % pieces, i // pieces % k_tiles + first_k_tile
            place = i // (pieces * k_tiles)
            token, start = first_token + token_ids[place], k_tile * elements
            words = self.activations.read(a, a_scale, token, first_k + start, width - start, piece)
            to = self.group_at(activations, entry, k_tile, place // ATOM_M * ATOM_M)
            self.activations.store(words, 1, piece, place % ATOM_M, to)

    @cute.jit
    def copy_m_tile(self, activations, entry, k_tile, position, tokens, target, barrier):
        """Start the copies of one k tile of an m tile's activations, in one thread.

        Args:
            position: index, in the list, of the m tile's first token.
            tokens: number of tokens to copy.
            target: destination in shared memory.
            barrier: mbarrier that counts the bytes.
        """
        source = self.group_at(activations, entry, k_tile, position)
        # In the layout for mma.sync, the bytes of each token are contiguous. In the layout for wgmma, the bytes of
        # eight tokens are contiguous.
        by_warp = self.activations.config.by_warp
        whole = tokens if const_expr(by_warp) else tokens // ATOM_M * ATOM_M
        if whole > 0:
            ptx.copy_bulk(target, source, whole * self.token_bytes, barrier)
        if whole < tokens:
            after = cute.assume(whole * self.token_bytes, divby=ATOM_M * self.token_bytes)
            for i in range_constexpr(ATOM_M * self.token_bytes // ATOM_BYTES):
                at = after + i * ATOM_BYTES
                ptx.copy_bulk(target + at, source + at, (tokens - whole) * ATOM_ROW_BYTES, barrier)


class MTileLists(NamedTuple):
    """Lists of a CTA's m tiles, in shared memory. An expert is touched if a token in the CTA's token block is routed to
    it.

    Attributes:
        experts: indices of the touched experts.
        begins: index of each touched expert's first m tile, followed by the total number of m tiles.
        counts: number of tokens of each touched expert.
        num_m_tiles: one element, the number of m tiles.
        num_first: one element, the number of m tiles in the CTA's first range of classes.
    """

    experts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    num_m_tiles: cute.Tensor
    num_first: cute.Tensor


class ExpertMTiles:
    """Device code that lists the m tiles of a token block. The lists have room for ``max_experts`` experts.

    With several ``classes``, the class of an expert is its index modulo ``classes``. A CTA computes the m tiles of up
    to two ranges of classes, one range after the other.

    If ``is_short_of_registers``, a thread loads at most 16 factors at the same time. With 32 factors, ptxas would spill
    other values on sm_120a.
    """

    def __init__(
        self, max_experts: int, token_block: int, tile_m: int, classes: int = 1, *, is_short_of_registers: bool = False
    ):
        self.max_experts, self.is_short_of_registers = max_experts, is_short_of_registers
        self.token_block, self.tile_m, self.classes = token_block, tile_m, classes
        # Number of counts per register. A lane lists 16 or 32 experts; a count is at most 512, so two fit into a
        # register.
        self.packed = 1 if max_experts <= USUAL_EXPERTS else 2

    def lists(self, at: cute.Pointer) -> tuple[MTileLists, cute.Pointer]:
        """Return the lists that begin at ``at`` in shared memory, and a pointer to the end of the lists."""
        at = cute.recast_ptr(at, dtype=Int32)
        most = self.max_experts
        sizes = MTileLists(experts=most, begins=most + 4, counts=most, num_m_tiles=1, num_first=1)
        starts = (0, *itertools.accumulate(sizes[:-1]))
        places = zip(starts, sizes, strict=True)
        lists = MTileLists(*(cute.make_tensor(at + start, cute.make_layout(size)) for start, size in places))
        return lists, at + m_tile_list_bytes(most) // 4

    def list_in_cta(self, *arguments, waits: bool) -> None:
        """List the m tiles of the CTA's token block (``gather``). If ``waits``, first wait for the kernel that lists
        tokens, because ``gather`` then reads that kernel's counts."""
        if waits:
            cute.arch.griddepcontrol_wait()
        self.gather(*arguments)

    @cute.jit
    def gather(
        self,
        factors,
        counts,
        block_index,
        m,
        tid,
        warp,
        listing_warp: Constexpr[int],
        threads: Constexpr[int],
        class_ranges,
        lists,
    ):
        """List the m tiles of the CTA's token block, with all threads of the CTA.

        Args:
            factors: (M, experts) factors, nonzero for routed pairs.
            counts: number of tokens per token block and expert; not read if the CTA scans the factors itself.
            block_index, m: index of the token block, and number of tokens of all token blocks.
            warp, listing_warp: index of this thread's warp, and index of the warp that calls ``list_m_tiles``.
            class_ranges: arguments ``begins`` and ``ends`` of ``list_m_tiles``.
        """
        experts = factors.shape[1]
        for expert in range(tid, experts, threads):
            if const_expr(self.token_block <= MAX_SCANNED_TOKENS and self.is_short_of_registers):
                lists.counts[expert] = self.count_in_steps(factors, expert, block_index * self.token_block, m)
            elif const_expr(self.token_block <= MAX_SCANNED_TOKENS):
                lists.counts[expert] = self.count(factors, expert, block_index * self.token_block, m, self.token_block)
            else:
                lists.counts[expert] = counts[block_index * experts + expert]
        cute.arch.sync_threads()
        if warp == listing_warp:
            self.list_m_tiles(tid % WARP, experts, *class_ranges, lists)
        cute.arch.sync_threads()

    @cute.jit
    def count_in_steps(self, factors, expert, first_token, m):
        """Return the number of tokens of a token block that are routed to an expert. Load at most
        ``MAX_LOADED_FACTORS`` factors at the same time."""
        step = min(self.token_block, MAX_LOADED_FACTORS)
        count = Int32(0)
        for i in range(self.token_block // step):
            count += self.count(factors, expert, first_token + i * step, m, step)
        return count

    @cute.jit
    def count(self, factors, expert, first_token, m, tokens: Constexpr[int]):
        """Return the number of tokens that are routed to an expert, among the ``tokens`` tokens from ``first_token``
        on. Load the factors of all these tokens at the same time."""
        values = cute.make_rmem_tensor((tokens,), Float32)
        for i in range_constexpr(tokens):
            values[i] = Float32(0.0)
            if first_token + i < m:
                values[i] = factors[first_token + i, expert]
        count = Int32(0)
        for i in range_constexpr(tokens):
            count = count + Int32(factor_counts(values[i]))
        return count

    @cute.jit
    def list_m_tiles(self, lane, experts, begins, ends, lists):
        """Convert ``lists.counts``, the number of tokens of every expert, to the lists of touched experts, with one
        warp.

        If there are several classes, the lists first hold the experts of classes ``begins[0]`` to ``ends[0]``, then the
        experts of classes ``begins[1]`` to ``ends[1]``. The ends are exclusive.
        """
        each = self.max_experts // WARP
        first = lane * each
        counts = cute.make_rmem_tensor((each // self.packed,), Int32)
        for i in range_constexpr(each):
            at = i // self.packed
            if const_expr(i % self.packed == 0):
                counts[at] = Int32(0)
            if first + i < experts:
                if const_expr(i % self.packed == 0):
                    counts[at] = lists.counts[first + i]
                else:
                    counts[at] = counts[at] | lists.counts[first + i] << 16
        # The lists are written over the counts. Wait until all lanes have loaded their counts.
        cute.arch.sync_warp()
        before_m_tiles, before_touched = Int32(0), Int32(0)
        for which in range_constexpr(2 if self.classes > 1 else 1):
            # With many experts, count an expert's m tiles twice instead of storing them, to save registers.
            m_tiles_of = cute.make_rmem_tensor((each if self.packed == 1 else 1,), Int32)
            m_tiles, touched = Int32(0), Int32(0)
            for i in range_constexpr(each):
                at = i if self.packed == 1 else 0
                m_tiles_of[at] = self._m_tiles_of(self._count(counts, i), first + i, begins, ends, which)
                m_tiles = m_tiles + m_tiles_of[at]
                touched = touched + Int32(m_tiles_of[at] > 0)
            own_m_tiles, own_touched = m_tiles, touched
            m_tiles, touched = running_sum(m_tiles, lane), running_sum(touched, lane)
            begin, index = before_m_tiles + m_tiles - own_m_tiles, before_touched + touched - own_touched
            for i in range_constexpr(each):
                at = i if self.packed == 1 else 0
                if const_expr(self.packed > 1):
                    m_tiles_of[at] = self._m_tiles_of(self._count(counts, i), first + i, begins, ends, which)
                if m_tiles_of[at] > 0:
                    lists.experts[index] = first + i
                    lists.begins[index] = begin
                    lists.counts[index] = self._count(counts, i)
                    index = index + 1
                begin = begin + m_tiles_of[at]
            before_m_tiles = before_m_tiles + cute.arch.shuffle_sync(m_tiles, WARP - 1)
            before_touched = before_touched + cute.arch.shuffle_sync(touched, WARP - 1)
            if const_expr(which == 0):
                if lane == 0:
                    lists.num_first[0] = before_m_tiles
        if lane == 0:
            lists.begins[before_touched] = before_m_tiles
            lists.num_m_tiles[0] = before_m_tiles

    def _count(self, counts, i: int) -> Int32:
        """Return the number of tokens of the lane's i-th expert."""
        if self.packed == 1:
            return counts[i]
        return counts[i // 2] >> 16 if i % 2 else counts[i // 2] & 0xFFFF

    def _m_tiles_of(self, count, expert, begins, ends, which: int) -> Int32:
        """Return the number of m tiles of an expert, or 0 if its class is outside of range ``which``."""
        is_in_range = Int32(1)
        if self.classes > 1:
            class_ = expert % self.classes
            is_in_range = Int32((class_ >= begins[which]) & (class_ < ends[which]))
        return is_in_range * ((count + (self.tile_m - 1)) // self.tile_m)

    @cute.jit
    def index_of(self, m_tile, index, lists):
        """Return the index in the lists of the expert that m tile ``m_tile`` belongs to. The search begins at
        ``index``, which is the result for an earlier m tile."""
        while lists.begins[index + 1] <= m_tile:
            index += 1
        return index
