"""Lists of routed tokens, and the work tiles of GEMMs that compute only routed pairs of a token and an expert.

A GEMM divides its tokens into *token blocks*. A CTA of a first kernel lists the tokens of a block that are routed to an
expert (``TokenLister``). An *m tile* is an expert and up to ``tile_m`` of its listed tokens. Each CTA of the GEMM lists
in shared memory the touched experts (experts with a token in the block) and the index of their first m tile
(``ExpertMTiles``).

A list holds the tokens in ascending order. An entry is a *pair* of words, the number of a token and its factor. The
number is negative in unused entries of the last m tile. If the activations depend on the expert (second GEMM), the list
also holds the activations, rearranged as ``kernels.common.fp4.activations`` describes. K tiles are contiguous, and so
are the groups of eight tokens in a k tile; the tokens of an m tile are then contiguous too.
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
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES


class TokenLists(NamedTuple):
    """Lists of all token blocks in the workspace. Each tensor is contiguous.

    Attributes:
        activations: uint8, rearranged activations.
        pairs: uint8, numbers and factors of tokens.
        counts: int32, number of tokens per token block and expert.
    """

    activations: cute.Tensor
    pairs: cute.Tensor
    counts: cute.Tensor


class TokenLister:
    """Device code of a CTA that lists the tokens of an expert and a token block, with ``TokenListLayout.threads``
    threads."""

    def __init__(self, layout: TokenListLayout, activations: Activations):
        self.layout, self.activations = layout, activations
        self.token_bytes = layout.token_bytes

    def workspace_tensors(
        self, at: cute.Pointer, token_blocks, experts
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Pointer]:
        """Return the first two tensors of ``TokenLists``, which begin at ``at``, and the pointer to their end."""
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
        """Return the index of the first token of a list, over all lists."""
        return (Int64(block_index) * experts + expert) * self.layout.capacity

    def group_at(self, activations, entry, k_tile, place) -> cute.Pointer:
        """Return the address in the workspace of a k tile of eight tokens, from the list's ``place``-th token on."""
        layout = self.layout
        at = entry * layout.k_tiles + Int64(k_tile) * layout.capacity + place
        return activations.iterator + cute.assume(at * layout.token_bytes, divby=ATOM_M * layout.token_bytes)

    @cute.jit
    def list_tokens(self, factors, lists, block_index, expert, experts, m, number_of):
        """List the expert's tokens as pairs: ``number_of(token)`` and the token's factor.

        Returns:
            Tensor in shared memory with the indices of the tokens in the token block, and the number of tokens.
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
        # Fill the unused entries of the last m tile.
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
        """Rearrange activations of ``total`` listed tokens.

        Args:
            token_ids: indices of the tokens in the token block.
            entry: index of the list's first token, from ``entry``.
            first_token: first token of the token block.
            first_k, width: first element of k of the expert, and number of elements.
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
        """Start the copies of a k tile of an m tile's activations, in one thread.

        Args:
            position: index in the list of the first token of the m tile.
            tokens: number of tokens to copy.
            target: address in shared memory.
            barrier: mbarrier that counts the bytes.
        """
        source = self.group_at(activations, entry, k_tile, position)
        # A token is contiguous in the layout for mma.sync; eight tokens are contiguous in the layout for wgmma.
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
    """Lists of a CTA's m tiles in shared memory. Touched experts are in order.

    Attributes:
        experts: index of each touched expert.
        begins: index of the first m tile of each touched expert, then the number of m tiles.
        counts: number of tokens of each touched expert.
        num_m_tiles: number of m tiles, one element.
        num_first: number of m tiles of the CTA's first range of classes, one element.
    """

    experts: cute.Tensor
    begins: cute.Tensor
    counts: cute.Tensor
    num_m_tiles: cute.Tensor
    num_first: cute.Tensor


class ExpertMTiles:
    """M tiles of a token block, for up to ``max_experts`` experts.

    With several ``classes``, an expert's class is its number modulo ``classes``. A CTA computes the m tiles of up to
    two ranges of classes in sequence.
    """

    def __init__(self, max_experts: int, token_block: int, tile_m: int, classes: int = 1):
        self.max_experts = max_experts
        self.token_block, self.tile_m, self.classes = token_block, tile_m, classes
        # Number of counts packed into one register. A lane lists 16 or 32 experts; counts are at most 512.
        self.packed = 1 if max_experts <= USUAL_EXPERTS else 2

    def lists(self, at: cute.Pointer) -> tuple[MTileLists, cute.Pointer]:
        """Return the lists that begin at ``at`` in shared memory, and the pointer to their end."""
        at = cute.recast_ptr(at, dtype=Int32)
        most = self.max_experts
        sizes = MTileLists(experts=most, begins=most + 4, counts=most, num_m_tiles=1, num_first=1)
        starts = (0, *itertools.accumulate(sizes[:-1]))
        places = zip(starts, sizes, strict=True)
        lists = MTileLists(*(cute.make_tensor(at + start, cute.make_layout(size)) for start, size in places))
        return lists, at + m_tile_list_bytes(most) // 4

    def list_in_cta(self, *arguments, waits: bool) -> None:
        """Call ``gather``; if ``waits``, first wait for the kernel that lists tokens."""
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
            factors: (M, experts), nonzero for routed pairs.
            counts: number of tokens per token block and expert; unused if the CTA scans the factors itself.
            block_index, m: index of the token block, and number of tokens of all token blocks.
            warp, listing_warp: index of the thread's warp, and index of the warp that calls ``list_m_tiles``.
            class_ranges: first and end class of every range of classes of the CTA, for ``list_m_tiles``.
        """
        experts = factors.shape[1]
        for expert in range(tid, experts, threads):
            if const_expr(self.token_block <= MAX_SCANNED_TOKENS):
                lists.counts[expert] = self.count(factors, expert, block_index * self.token_block, m)
            else:
                lists.counts[expert] = counts[block_index * experts + expert]
        cute.arch.sync_threads()
        if warp == listing_warp:
            self.list_m_tiles(tid % WARP, experts, *class_ranges, lists)
        cute.arch.sync_threads()

    @cute.jit
    def count(self, factors, expert, first_token, m):
        """Return the number of tokens of the token block that are routed to an expert."""
        values = cute.make_rmem_tensor((self.token_block,), Float32)
        for i in range_constexpr(self.token_block):
            values[i] = Float32(0.0)
            if first_token + i < m:
                values[i] = factors[first_token + i, expert]
        count = Int32(0)
        for i in range_constexpr(self.token_block):
            count = count + Int32(factor_counts(values[i]))
        return count

    @cute.jit
    def list_m_tiles(self, lane, experts, begins, ends, lists):
        """Turn ``lists.counts``, the number of tokens of every expert, into the lists of the touched experts, with one
        warp.

        With several classes, the lists hold the experts of the classes from ``begins[0]`` to ``ends[0]``, then the
        experts of the classes from ``begins[1]`` to ``ends[1]``.
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
        # The lists overwrite the counts, which all lanes have read.
        cute.arch.sync_warp()
        before_m_tiles, before_touched = Int32(0), Int32(0)
        for which in range_constexpr(2 if self.classes > 1 else 1):
            # With many experts, m tiles are counted again instead of kept, to save registers.
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
        """Return the number of tokens of a lane's i-th expert."""
        if self.packed == 1:
            return counts[i]
        return counts[i // 2] >> 16 if i % 2 else counts[i // 2] & 0xFFFF

    def _m_tiles_of(self, count, expert, begins, ends, which: int) -> Int32:
        """Return the number of m tiles of an expert; 0 outside of the range of classes."""
        is_in_range = Int32(1)
        if self.classes > 1:
            class_ = expert % self.classes
            is_in_range = Int32((class_ >= begins[which]) & (class_ < ends[which]))
        return is_in_range * ((count + (self.tile_m - 1)) // self.tile_m)

    @cute.jit
    def index_of(self, m_tile, index, lists):
        """Return the index in the lists of an m tile's expert, searched from the ``index`` of an earlier m tile's
        expert."""
        while lists.begins[index + 1] <= m_tile:
            index += 1
        return index
