"""Partial sums of a tile, which the CTAs of a cluster exchange through shared memory, and for some rows the warps of a
CTA: added up in the order of the CTAs, and in a CTA in that of the warps, finished and stored. Either a CTA reads the
others' sums, between two barriers of the cluster (``write_sums``), or they send these, which needs room beside what is
still in use (``send_sums``, ``write_received``).

Those sums are accumulators of MMAs with the weight on the M side. For each 8 tokens a lane has four: of the weight's
rows ``row`` and ``row + 8``, and of two tokens each.

With activations there, a thread sends its accumulators as they are to the same thread of another CTA
(``send_accumulators``, ``add_accumulators``).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, SumTile
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words
from torch_cute_ops.kernels.common.core.pipeline import PIECE

TILE = 8  # tokens
COLUMNS = 4  # of the result, that a thread adds up at once


@cute.jit
def leave_sums(tile: SumTile, sums: cute.Tensor, base: cute.Pointer, row, quad) -> None:
    """Store a lane's sums in this CTA's shared memory. With one token all lanes of a quad have the same two, in
    ``sums[0]`` and ``sums[2]``."""
    layout = cute.make_layout((tile.tokens, tile.pitch), stride=(tile.pitch, 1))
    to = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
    if const_expr(tile.tokens == 1):
        if quad < 2:
            to[0, row + quad * 8] = ptx.select(quad == 0, sums[0], sums[2])
    for group in range(tile.tokens // TILE):
        for i in range(4):
            to[group * TILE + quad * 2 + i % 2, row + i // 2 * 8] = sums[group * 4 + i]


def sum_columns(tile: SumTile, threads: int, tid, first_row) -> tuple:
    """The first of the columns that a thread finishes in ``write_sums``, and their number.

    The epilogue loads its terms for them before the cluster meets, so that they have arrived when it has.
    """
    width = tile.rows // COLUMNS
    if threads % width:
        raise ValueError(f"{threads} threads do not have the same columns in each pass over {tile.rows}")
    return first_row + tid % width * COLUMNS, COLUMNS


def tokens_of(tile: SumTile, splits: int, rank, existing=None):
    """How many of a tile's tokens, or of its ``existing`` ones, a CTA adds up: every ``splits``-th."""
    if existing is None and tile.tokens % splits == 0:
        return Int32(tile.tokens // splits)
    return ((tile.tokens if existing is None else existing) - rank + splits - 1) // splits


@cute.jit
def send_sums(tile: SumTile, splits: int, threads: int, base, received, barrier, rank, tid, tokens, rows):
    """Send this CTA's sums of the first ``tokens`` and ``rows``, those that exist, to the CTAs that add them up: from
    ``base``, where ``leave_sums`` has stored them, to ``received``, which has ``SumTile.received_bytes``. ``barrier``
    counts the bytes."""
    width = tile.rows // COLUMNS
    for piece in range(tid, tokens * width, threads):
        token, column = piece // width, piece % width * COLUMNS
        if column < rows:
            words = tuple(Int32(ptx.bits_of(x)) for x in _own_sums(tile, base, token, column))
            at = ((token // splits * splits + rank) * tile.rows + column) * 4
            target = cute.recast_ptr(received + cute.assume(at, divby=16), dtype=Int32)
            cute.arch.store_async_dsmem(target, words, barrier, token % splits)


@cute.jit
def write_received(tile: SumTile, splits: int, threads: int, finish: Finish, out, received, rank, tid, tokens, *at):
    """Add up what CTAs have sent of this CTA's ``tokens``, finish and store it; ``at``: as of ``write_sums``."""
    width = tile.rows // COLUMNS
    for piece in range(tid, tokens * width, threads):
        place, column = piece // width, piece % width * COLUMNS
        total = [Float32(0.0)] * 4
        for peer in range_constexpr(splits):
            total = _added(total, received, (place * splits + peer) * tile.rows + column)
        _finish(total, finish, out, place * splits + rank, column, *at)


@cute.jit
def write_sums(tile: SumTile, splits: int, threads: int, finish: Finish, out, base, rank, tid, first_token, first_row):
    """Add up the partial sums of the ``splits`` CTAs of the cluster, finish and store them; 1: there is no cluster.

    Each CTA has every ``splits``-th token, and its ``threads`` threads share them: each has the columns of
    ``sum_columns``. The caller ensures that all CTAs have written their partial sums, and that these stay until all
    CTAs have read them.
    """
    width = tile.rows // COLUMNS
    for piece in range(tid, tokens_of(tile, splits, rank) * width, threads):
        token = piece // width * splits + rank
        column = piece % width * COLUMNS
        total = [Float32(0.0)] * 4
        for peer in range_constexpr(splits):
            part = base
            if const_expr(splits > 1):
                part = cute.arch.map_dsmem_ptr(base, peer)
            total = [x + y for x, y in zip(total, _own_sums(tile, part, token, column), strict=True)]
        _finish(total, finish, out, token, column, first_token, first_row)


@cute.jit
def _own_sums(tile: SumTile, base, token, column) -> list:
    """A CTA's sums of four columns: those of warps that share them added up in the order of the warps."""
    place = token * tile.pitch + column
    total = _loaded(base, place)
    if const_expr(tile.turns > 1):
        if column >= tile.rows - tile.shared:
            for turn in range_constexpr(1, tile.turns):
                total = _added(total, base, place + turn * tile.shared)
    return total


@cute.jit
def _finish(total: list, finish: Finish, out, token, column, first_token, first_row):
    """Finish and store the sums of four columns of a token."""
    m, n = out.shape
    values = [finish(x, i) for i, x in enumerate(total)]
    to_token, to_row = first_token + token, first_row + column
    if (to_token < m) & (to_row < n):
        row = out.iterator + cute.assume(Int64(to_token) * n + to_row, divby=4)
        packed = pack(values, out.element_type)
        store_words(packed, cute.make_tensor(cute.recast_ptr(row, dtype=Uint32), cute.make_layout(len(packed))))


def _loaded(sums: cute.Pointer, place) -> list:
    """Four sums from ``place`` on."""
    at = sums + cute.assume(place * 4, divby=16)
    words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
    return [ptx.float_of(word) for word in words]


def _added(total: list, sums: cute.Pointer, place) -> list:
    """Four totals, each with one of the sums from ``place`` on."""
    return [x + y for x, y in zip(total, _loaded(sums, place), strict=True)]


@cute.jit
def send_accumulators(sums: cute.Tensor, received, barrier, rank, tid) -> None:
    """Send all accumulators of a warpgroup's thread ``tid`` to that thread of the other CTA, ``rank``, which finishes
    them (``add_accumulators``). ``barrier`` counts the bytes."""
    to, there = (ptx.address_at(place, rank) for place in (_accumulators(received, 0, tid), barrier))
    for piece in range_constexpr(cute.size(sums) // 4):
        words = [ptx.bits_of(sums[4 * piece + i]) for i in range(4)]
        ptx.send(to, words, there, offset=piece * WARPGROUP * PIECE)


@cute.jit
def add_accumulators(sums: cute.Tensor, received, tid) -> None:
    """Add what has been sent to a thread's accumulators."""
    for piece in range_constexpr(cute.size(sums) // 4):
        own = [sums[4 * piece + i] for i in range(4)]
        for i, total in enumerate(_added(own, _accumulators(received, piece, tid), 0)):
            sums[4 * piece + i] = total


def _accumulators(received: cute.Pointer, piece: int, tid) -> cute.Pointer:
    """Where four accumulators of a thread are received: neighbours side by side."""
    return received + cute.assume((piece * WARPGROUP + tid) * PIECE, divby=PIECE)
