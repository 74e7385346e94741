"""What kernels that gather tokens share: loads of a token's ``topk`` words, one for each of its experts, from an (M,
topk) tensor, by vectors if possible. Lists of the tokens of a tile that are routed to each expert: how a CTA makes
one."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, store_words
from torch_cute_ops.kernels.common.experts.factors import factor_counts
from torch_cute_ops.kernels.common.experts.layouts import PAIR_BYTES, TokenListLayout
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES

# token words
#
# What kernels that gather tokens share: loads of a token's ``topk`` words, one for each of its experts, from an
# (M, topk) tensor, by vectors if possible.


class TokenKernel:
    """A kernel of one ``Config``, for tokens of ``config.dtype``."""

    def __init__(self, config: Any):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """The alignment in bytes that the tensor needs."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """The ``topk`` words of a token; zeros unless it ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]


# token lists
#
# Lists of the tokens of a tile that are routed to each expert: how a CTA makes one.
#
# A list has the tokens in their order, of each a *pair* of words: a number, negative in what is left of the last unit,
# and a factor. Where experts have activations of their own, these are in the list too, rearranged as ``kernels.common.
# activations`` describes, chunk after chunk; in a chunk, groups of eight tokens follow each other, so that those of a
# unit of work are contiguous.

WARP = 32


class TokenLists(NamedTuple):
    """The lists in the workspace, each part contiguous over all tiles: activations (``tiles``) and pairs, both as
    bytes; and how many tokens an expert has, int32 for each tile and expert."""

    tiles: cute.Tensor
    pairs: cute.Tensor
    counts: cute.Tensor


class TokenLister:
    """What a CTA for an expert and a tile of tokens does, with ``TokenListLayout.threads`` threads."""

    def __init__(self, layout: TokenListLayout, activations: Activations):
        self.layout, self.activations = layout, activations
        self.token_bytes = layout.token_bytes

    def parts(self, at: cute.Pointer, tiles, experts) -> tuple[cute.Tensor, cute.Tensor, cute.Pointer]:
        """The first two parts of ``TokenLists`` from ``at`` on, and where they end."""
        s = self.layout
        entries = Int64(tiles) * experts * s.capacity
        token_bytes = cute.assume(entries * (s.chunks * s.token_bytes), divby=s.token_bytes)
        pair_bytes = cute.assume(entries * PAIR_BYTES, divby=PAIR_BYTES * ATOM_M)
        pairs = at + token_bytes
        return (
            cute.make_tensor(at, cute.make_layout((token_bytes,))),
            cute.make_tensor(pairs, cute.make_layout((pair_bytes,))),
            pairs + pair_bytes,
        )

    def entry(self, tile, expert, experts):
        """Where the list of a tile's tokens of an expert begins, in tokens."""
        return (Int64(tile) * experts + expert) * self.layout.capacity

    def group_at(self, tiles, entry, chunk, place) -> cute.Pointer:
        """Where the workspace has a chunk of the eight tokens from the list's ``place``-th on."""
        s = self.layout
        at = entry * s.chunks + Int64(chunk) * s.capacity + place
        return tiles.iterator + cute.assume(at * s.token_bytes, divby=ATOM_M * s.token_bytes)

    @cute.jit
    def find(self, factors, lists, tile, expert, experts, m, number_of):
        """List the tokens, as the pairs of ``number_of(token)`` and their factors.

        Returns them, numbered in the tile, in shared memory, and how many there are.
        """
        s = self.layout
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        warps = s.threads // WARP
        smem = SmemAllocator()
        found = cute.make_tensor(smem.allocate_array(Int32, warps), cute.make_layout(warps))
        members = cute.make_tensor(smem.allocate_array(Int32, s.capacity), cute.make_layout(s.capacity))
        value = Float32(0.0)
        if (tid < s.tokens) & (tile * s.tokens + tid < m):
            value = factors[tile * s.tokens + tid, expert]
        ballot = Uint32(cute.arch.vote_ballot_sync(factor_counts(value)))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        entry = self.entry(tile, expert, experts)
        if factor_counts(value):
            members[before] = tid
            self._store_pair(lists.pairs, entry + before, number_of(tid), value)
        # What is left of the last unit
        if (tid >= total) & (tid < cute.ceil_div(total, s.group) * s.group):
            self._store_pair(lists.pairs, entry + tid, Int32(-1), Float32(0.0))
        if tid == 0:
            lists.counts[tile * experts + expert] = total
        cute.arch.sync_threads()
        return members, total

    def _store_pair(self, pairs, at, number, factor) -> None:
        to = cute.recast_ptr(pairs.iterator + cute.assume(at * PAIR_BYTES, divby=PAIR_BYTES), dtype=Uint32)
        store_words([Uint32(number), ptx.bits_of(factor)], cute.make_tensor(to, cute.make_layout(2)))

    @cute.jit
    def arrange(self, a, a_scale, members, total, tiles, entry, first_token, first_k, width, first_chunk, chunks):
        """Rearrange the activations of the ``total`` tokens ``members``, of ``chunks`` chunks from ``first_chunk`` on:
        of elements ``first_k ... first_k + width`` of their rows."""
        s = self.layout
        pieces = self.activations.pieces
        elements = self.activations.config.k_tile
        tid, _, _ = cute.arch.thread_idx()
        for i in range(tid, total * (chunks * pieces), s.threads):
            piece, chunk = i % pieces, i // pieces % chunks + first_chunk
            place = i // (pieces * chunks)
            token, start = first_token + members[place], chunk * elements
            words = self.activations.read(a, a_scale, token, first_k + start, width - start, piece)
            to = self.group_at(tiles, entry, chunk, place // ATOM_M * ATOM_M)
            self.activations.store(words, 1, piece, place % ATOM_M, to)

    @cute.jit
    def copy_unit(self, tiles, entry, chunk, position, tokens, target, barrier):
        """One thread starts the copies of a chunk of ``tokens`` activations from the list's ``position``-th on, the
        first of a unit, to ``target`` in shared memory; ``barrier`` counts their bytes."""
        source = self.group_at(tiles, entry, chunk, position)
        # In the layout for mma.sync a token is contiguous, in that for wgmma eight tokens are.
        by_warp = self.activations.config.by_warp
        whole = tokens if const_expr(by_warp) else tokens // ATOM_M * ATOM_M
        if whole > 0:
            ptx.copy_bulk(target, source, whole * self.token_bytes, barrier)
        if whole < tokens:
            after = cute.assume(whole * self.token_bytes, divby=ATOM_M * self.token_bytes)
            for i in range_constexpr(ATOM_M * self.token_bytes // ATOM_BYTES):
                at = after + i * ATOM_BYTES
                ptx.copy_bulk(target + at, source + at, (tokens - whole) * ATOM_ROW_BYTES, barrier)
