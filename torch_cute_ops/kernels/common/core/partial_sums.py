"""Reduction of partial sums across the CTAs of a cluster (split-K) through shared memory.

Each CTA stores its partial sums in its own shared memory (``store_partial_sums``). The cluster then reduces the partial
sums in one of two ways:

- ``reduce_partial_sums``: each CTA reads the other CTAs' partial sums, between two barriers of the cluster.
- ``send_partial_sums``, ``reduce_received``: each CTA sends its partial sums to the CTAs that reduce them. The second
  way needs extra shared memory for the received partial sums.

Partial sums are added in the order of the CTAs. If several warps of a CTA divide the k tiles, their partial sums are
added in the order of the warps. Both ways of reducing expect MMAs with the weight on the M side. For every 8 tokens, a
lane then holds four accumulators: columns ``column`` and ``column + 8`` of the result, for two tokens.

MMAs with the activations on the M side need no common layout: a thread sends its accumulators unchanged to the thread
with the same index in another CTA (``send_accumulators``, ``add_accumulators``).
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import Finish, load_row_scale
from torch_cute_ops.kernels.common.core.layouts import WARPGROUP, PartialSums
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words
from torch_cute_ops.kernels.common.core.pipeline import VECTOR_BYTES

MMA_TOKENS = 8  # size N of an MMA, its number of tokens
COLUMNS = 4  # number of columns of the result that a thread reduces at once


@cute.jit
def store_partial_sums(tile: PartialSums, acc: cute.Tensor, base: cute.Pointer, column, quad, step=8) -> None:
    """Store a lane's accumulators in this CTA's shared memory, at ``base``, in the layout ``tile``.

    The lane's columns are ``column`` and ``column + step``. Four lanes share each column. ``quad`` is the index of this
    lane among the four. If ``tile_m`` is 1, the four lanes hold the same two accumulators, ``acc[0]`` and ``acc[2]``.
    """
    layout = cute.make_layout((tile.tile_m, tile.pitch), stride=(tile.pitch, 1))
    to = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
    if const_expr(tile.tile_m == 1):
        if quad < 2:
            to[0, column + quad * 8] = ptx.select(quad == 0, acc[0], acc[2])
    for group in range(tile.tile_m // MMA_TOKENS):
        for i in range(4):
            to[group * MMA_TOKENS + quad * 2 + i % 2, column + i // 2 * step] = acc[group * 4 + i]


def thread_columns(tile: PartialSums, threads: int, tid, first_column) -> tuple:
    """Return the first column that this thread reduces, and the number of columns.

    The thread loads alpha and bias of these columns before the cluster's barrier, so that the loads overlap the wait.
    """
    width = tile.tile_n // COLUMNS
    if threads % width:
        raise ValueError(f"{threads} threads do not have the same columns in each pass over {tile.tile_n}")
    return first_column + tid % width * COLUMNS, COLUMNS


def reduced_rows(tile: PartialSums, split_k: int, rank, existing=None):
    """Return the number of rows that this CTA reduces: every ``split_k``-th row of the tile or, if ``existing`` is
    given, of its first ``existing`` rows."""
    if existing is None and tile.tile_m % split_k == 0:
        return Int32(tile.tile_m // split_k)
    return ((tile.tile_m if existing is None else existing) - rank + split_k - 1) // split_k


@cute.jit
def send_partial_sums(tile: PartialSums, split_k: int, threads: int, base, received, barrier, rank, tid, m, n):
    """Send this CTA's partial sums to the CTAs that reduce them.

    Args:
        tile: layout of the partial sums.
        split_k: number of CTAs of the cluster.
        threads: number of threads that send.
        base: address of this CTA's partial sums, stored by ``store_partial_sums``.
        received: address in each CTA's shared memory that receives ``PartialSums.received_bytes`` bytes.
        barrier: mbarrier in each CTA that counts the received bytes.
        rank, tid: rank of this CTA in the cluster, and index of the thread.
        m, n: numbers of the tile's rows and columns that exist. Only existing rows and columns are sent.
    """
    width = tile.tile_n // COLUMNS
    for i in range(tid, m * width, threads):
        row, column = i // width, i % width * COLUMNS
        if column < n:
            words = tuple(Int32(ptx.bits_of(x)) for x in _own_sums(tile, base, row, column))
            at = ((row // split_k * split_k + rank) * tile.tile_n + column) * 4
            target = cute.recast_ptr(received + cute.assume(at, divby=16), dtype=Int32)
            cute.arch.store_async_dsmem(target, words, barrier, row % split_k)


@cute.jit
def reduce_received(
    tile: PartialSums,
    split_k: int,
    threads: int,
    finish: Finish,
    out,
    received,
    rank,
    tid,
    rows,
    first_row,
    first_column,
    row_scale=None,
):
    """Add up the partial sums that this CTA received for its ``rows`` rows, apply the epilogue, and store the results
    in ``out``. ``row_scale`` contains the scales of the rows of ``out``, or is None."""
    width = tile.tile_n // COLUMNS
    for i in range(tid, rows * width, threads):
        place, column = i // width, i % width * COLUMNS
        acc = [Float32(0.0)] * 4
        for peer in range_constexpr(split_k):
            acc = _added(acc, received, (place * split_k + peer) * tile.tile_n + column)
        _finish(acc, finish, out, place * split_k + rank, column, first_row, first_column, row_scale)


@cute.jit
def reduce_partial_sums(
    tile: PartialSums,
    split_k: int,
    threads: int,
    finish: Finish,
    out,
    base,
    rank,
    tid,
    first_row,
    first_column,
    row_scale=None,
):
    """Add up the partial sums of the ``split_k`` CTAs of the cluster, apply the epilogue, and store the results in
    ``out``.

    Each CTA reduces every ``split_k``-th row. ``thread_columns`` gives the columns of each thread. The caller ensures
    that all CTAs have stored their partial sums before the call, and that no CTA overwrites its partial sums until all
    CTAs have returned. ``split_k`` is 1 without a cluster. ``row_scale`` contains the scales of the rows of ``out``, or
    is None.
    """
    width = tile.tile_n // COLUMNS
    for i in range(tid, reduced_rows(tile, split_k, rank) * width, threads):
        row = i // width * split_k + rank
        column = i % width * COLUMNS
        acc = [Float32(0.0)] * 4
        for peer in range_constexpr(split_k):
            there = base
            if const_expr(split_k > 1):
                there = cute.arch.map_dsmem_ptr(base, peer)
            acc = [x + y for x, y in zip(acc, _own_sums(tile, there, row, column), strict=True)]
        _finish(acc, finish, out, row, column, first_row, first_column, row_scale)


@cute.jit
def _own_sums(tile: PartialSums, base, row, column) -> list:
    """Return a CTA's partial sums of four columns. If several warps divide the k tiles of these columns, add up their
    partial sums."""
    place = row * tile.pitch + column
    acc = _loaded(base, place)
    if const_expr(tile.warp_split_k > 1):
        if column >= tile.tile_n - tile.split_n:
            for i in range_constexpr(1, tile.warp_split_k):
                acc = _added(acc, base, place + i * tile.split_n)
    return acc


@cute.jit
def _finish(acc: list, finish: Finish, out, row, column, first_row, first_column, row_scale):
    """Apply the epilogue to the sums of four columns of a row, and store the results."""
    m, n = out.shape
    factor = None
    if const_expr(row_scale is not None):
        factor = load_row_scale(row_scale, first_row + row, m)
    values = [finish(x, i, factor) for i, x in enumerate(acc)]
    to_row, to_column = first_row + row, first_column + column
    if (to_row < m) & (to_column < n):
        at = out.iterator + cute.assume(Int64(to_row) * n + to_column, divby=4)
        packed = pack(values, out.element_type)
        store_words(packed, cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(len(packed))))


def _loaded(sums: cute.Pointer, place) -> list:
    """Load the four partial sums that begin at element ``place`` of ``sums``."""
    at = sums + cute.assume(place * 4, divby=16)
    words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
    return [ptx.float_of(word) for word in words]


def _added(acc: list, sums: cute.Pointer, place) -> list:
    """Return ``acc`` plus the four partial sums that begin at element ``place`` of ``sums``."""
    return [x + y for x, y in zip(acc, _loaded(sums, place), strict=True)]


@cute.jit
def send_accumulators(acc: cute.Tensor, received, barrier, rank, tid) -> None:
    """Send this thread's accumulators to the thread with the same index in CTA ``rank`` of the cluster.

    The other CTA's ``barrier`` counts the bytes. When this barrier completes, the other CTA calls ``add_accumulators``.
    """
    to, there = (ptx.address_at(place, rank) for place in (_accumulators(received, 0, tid), barrier))
    for i in range_constexpr(cute.size(acc) // 4):
        words = [ptx.bits_of(acc[4 * i + j]) for j in range(4)]
        ptx.send(to, words, there, offset=i * WARPGROUP * VECTOR_BYTES)


@cute.jit
def add_accumulators(acc: cute.Tensor, received, tid) -> None:
    """Add, to this thread's accumulators, the accumulators that another CTA sent to this thread."""
    for i in range_constexpr(cute.size(acc) // 4):
        own = [acc[4 * i + j] for j in range(4)]
        for j, total in enumerate(_added(own, _accumulators(received, i, tid), 0)):
            acc[4 * i + j] = total


def _accumulators(received: cute.Pointer, i: int, tid) -> cute.Pointer:
    """Return the address of accumulators ``4 i`` to ``4 i + 3`` of thread ``tid``. The vectors of neighbouring threads
    are adjacent."""
    return received + cute.assume((i * WARPGROUP + tid) * VECTOR_BYTES, divby=VECTOR_BYTES)
