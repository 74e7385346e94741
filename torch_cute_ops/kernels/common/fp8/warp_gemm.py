"""FP8 GEMMs by mma.sync, for every GPU, and the parts from which kernels compose them.

``WarpGemm`` contains the tiles of a CTA, the pipeline, the MMAs and the epilogue. Three parts differ between kernels:

- *activations*: ``place`` is the offset of a 16-byte piece of a row of ``a`` in a stage; ``fragments`` loads MMA
  operands.
- *weight*: ``load`` starts the copies of weight rows to a stage; ``words`` loads, or decodes, a lane's words of a
  weight row. If ``scale_words`` is not 0, each thread holds this number of words of scales: ``load_scales`` loads the
  words of the next k tile from memory, and ``store_scales`` stores the scales in a slot of shared memory, before the k
  tile is multiplied.
- *promotion* of a k tile's MMA results: ``factors`` loads scales before the thread waits for the k tile; ``of_rows``
  and ``of_columns`` return the factors of a lane's two rows of ``a`` and two weight rows; ``add`` adds a result to an
  accumulator in fp32; ``finish`` is called after the last k tile. The MMAs of a k tile are summed in the tensor cores.
  If ``by_step`` is True, ``multiply`` replaces ``add``: it computes an MMA, whose index it gets, and returns the new
  values of a lane's four accumulators.

A lane loads eight words (32 elements of a k tile) of each of its rows. The MMA ``step`` multiplies words ``step`` and
``4 + step`` of both operands. So the elements of a k tile may have any order that is the same for both operands. With
``BlockRows`` and ``MatrixRows``, each MMA multiplies 32 neighbouring elements.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as primitives
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.fp8.consumers import load_token_scales
from torch_cute_ops.kernels.common.fp8.layouts import K_TILE, STORE_TILE_BYTES, Arguments
from torch_cute_ops.kernels.common.fp8.row_stores import store_rows
from torch_cute_ops.kernels.common.fp8.tiles import ExpertTiles, Tile
from torch_cute_ops.kernels.common.fp8.warp_layouts import SLOTS, TILE_N, WarpGemmConfig

PIECE = 16  # number of bytes that a lane copies or reads at once
PIECES = K_TILE // PIECE
STEPS = 4  # MMAs per k tile


class Work(NamedTuple):
    """Work of a thread, and the tensors of the call.

    Attributes:
        tid, lane: index of the thread in its CTA, and index in its warp.
        row, column: first row and column of the warp in its tile.
        n, k: sizes of the GEMM. ``k`` is the number of elements of a row of ``a``.
        k_tiles: number of k tiles. The last k tile may have 64 elements.
        a, b, a_scale, b_scale: operands and their scales, for all experts.
        alpha, bias: operands of the epilogue, or None.
    """

    tid: Int32
    lane: Int32
    row: Int32
    column: Int32
    n: Int32
    k: Int32
    k_tiles: Int32
    a: cute.Tensor
    b: cute.Tensor
    a_scale: cute.Tensor
    b_scale: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None


class WarpGemm:
    """GEMM by mma.sync.

    Args:
        config: configuration.
        source: weight source (``common.fp8.weights``), which defines the arguments and views of the weight.
        activations, weight, promotion: parts of the kernel.
        epilogue: ``GemmEpilogue`` or ``UnitEpilogue``.
    """

    def __init__(
        self, config: WarpGemmConfig, source: Any, activations: Any, weight: Any, promotion: Any, epilogue: Any
    ):
        self.config = config
        self.activations, self.weight, self.promotion, self.epilogue = activations, weight, promotion, epilogue
        self.tiles = ExpertTiles(config.rows, config.tile_m, TILE_N, source, by_token=not config.has_blocks)

    def arguments(self) -> Arguments:
        return self.tiles.arguments(EpilogueOps(self.config.epilogue))

    def launch(self, given: Arguments, stream) -> None:
        """Launch the kernel, with persistent CTAs, or with split-K persistent clusters."""
        view = self.tiles.views(given)
        operands = view.a, view.b, view.a_scale, view.b_scale
        rows, terms = (given.offsets, given.counts), (given.alpha, given.bias)
        self.kernel(operands, rows, terms, view.out, view.space).launch(
            grid=[self.tiles.ctas(given, self.config.split_k), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            cluster=[self.config.split_k, 1, 1] if const_expr(self.config.split_k > 1) else None,
            stream=stream,
            use_pdl=self.config.pdl,
        )

    @cute.kernel
    def kernel(self, operands, rows, terms, out, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        a, b, a_scale, b_scale = operands
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        slots = base + c.stages * c.stage_bytes
        stores = slots + SLOTS * c.slot_bytes
        table = stores + c.warps * STORE_TILE_BYTES
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        m, n = out.shape
        self.tiles.prepare(*rows, b.shape[2], space, table, tid, c.threads)
        lane, warp = tid % 32, tid // 32
        across = c.tiles[c.tile_m][1]
        work = Work(
            tid=tid,
            lane=lane,
            row=warp // across * c.warp_m,
            column=warp % across * c.warp_n,
            n=n,
            k=a.shape[1],
            k_tiles=a_scale.shape[0] if const_expr(c.has_blocks) else cute.ceil_div(a.shape[1], K_TILE),
            a=a,
            b=b,
            a_scale=a_scale,
            b_scale=b_scale,
            alpha=terms[0],
            bias=terms[1],
        )
        size = c.warp_n // 2
        acc = cute.make_rmem_tensor((c.warp_m // 16 * size,), Float32)
        scales = cute.make_rmem_tensor((max(self.weight.scale_words, 1),), Uint32)
        rank, first, count = Int32(0), Int32(0), work.k_tiles
        if const_expr(c.split_k > 1):
            rank = cta % c.split_k
            first = rank * work.k_tiles // c.split_k
            count = (rank + 1) * work.k_tiles // c.split_k - first
        for number in range(cta // c.split_k, self.tiles.count(m, n, table), ctas // c.split_k):
            tile = Tile(*self.tiles.find(number, m, n, table, lane))
            for i in range_constexpr(c.stages - 1):
                if i < count:
                    self._load(first + i, i, base, tile, work)
                cute.arch.cp_async_commit_group()
            if const_expr(self.weight.scale_words > 0):
                self.weight.load_scales(scales, first, tile, work)
            acc.fill(0.0)
            for index in cutlass.range(count, unroll=1):
                k_tile = first + index
                factors = self.promotion.factors(k_tile, tile, work)
                slot = slots
                if const_expr(self.weight.scale_words > 0):
                    slot = slots + cute.assume(index % SLOTS * c.slot_bytes, divby=PIECE)
                    self.weight.store_scales(scales, slot, k_tile, work)
                cute.arch.cp_async_wait_group(c.stages - 2)
                # After this barrier, all threads' copies of this k tile have arrived, and all warps have read the
                # previous k tile. So the copies below may overwrite the previous k tile's stage.
                cute.arch.sync_threads()
                ahead = index + c.stages - 1
                if ahead < count:
                    self._load(first + ahead, ahead % c.stages, base, tile, work)
                cute.arch.cp_async_commit_group()
                if const_expr(self.weight.scale_words > 0):
                    self.weight.load_scales(scales, cutlass.min(k_tile + 1, work.k_tiles - 1), tile, work)
                self._multiply(index % c.stages, factors, acc, base, slot, work)
            # Wait until all warps have read the last k tile, because the next tile's copies, or partial sums, overwrite
            # its stage.
            cute.arch.sync_threads()
            if const_expr(c.split_k > 1):
                self._reduce(acc, base, rank, tid)
                if rank == 0:
                    self._store(acc, tile, out, stores, warp, work)
            else:
                self._store(acc, tile, out, stores, warp, work)
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _reduce(self, acc: cute.Tensor, base: cute.Pointer, rank, tid):
        """Add the accumulators of the cluster's CTAs, in the order of the ranks, to the accumulators of rank 0. The
        other CTAs store their accumulators in their stages, where rank 0 reads them between two barriers of the
        cluster."""
        c = self.config
        if rank > 0:
            for i in range_constexpr(cute.size(acc) // 4):
                words = [ptx.bits_of(acc[4 * i + j]) for j in range(4)]
                store_words(words, self._accumulators(base, i, tid))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if rank == 0:
            for peer in range_constexpr(1, c.split_k):
                there = cute.arch.map_dsmem_ptr(base, peer)
                for i in range_constexpr(cute.size(acc) // 4):
                    for j, word in enumerate(load_words(self._accumulators(there, i, tid))):
                        acc[4 * i + j] = ptx.add_rn(acc[4 * i + j], ptx.float_of(word))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _accumulators(self, base: cute.Pointer, i: int, tid) -> cute.Tensor:
        """View the place of accumulators ``4 i`` to ``4 i + 3`` of thread ``tid`` as words. The vectors of neighbouring
        threads are adjacent."""
        at = base + cute.assume((i * self.config.threads + tid) * PIECE, divby=PIECE)
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4))

    @cute.jit
    def _store(self, acc: cute.Tensor, tile: Tile, out, stores: cute.Pointer, warp, work: Work):
        """Apply the epilogue to a tile's sums and store the results. ``stores`` is shared memory for all warps."""
        c = self.config
        self.promotion.finish(acc, tile, work)
        epilogue = self.epilogue.of_tile(tile.expert, tile.column, work)
        size = c.warp_n // 2
        for i in range_constexpr(c.warp_m // 16):
            store_rows(
                cute.make_tensor(acc.iterator + i * size, cute.make_layout(size)),
                out,
                stores + cute.assume(warp * STORE_TILE_BYTES, divby=PIECE),
                tile.row + work.row + 16 * i,
                tile.rows - work.row - 16 * i,
                tile.column + work.column,
                work.lane,
                epilogue,
            )

    @cute.jit
    def _load(self, k_tile, stage, base, tile, work):
        """Start this thread's part of the copies of a k tile. Elements that do not exist become zeros. A stage holds
        rows of ``a``, then rows of the weight."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=K_TILE)
        piece = work.tid % PIECES
        begin = k_tile * K_TILE + piece * PIECE
        for i in range_constexpr(-(-c.tile_m * PIECES // c.threads)):
            row = work.tid // PIECES + i * (c.threads // PIECES)
            exists = (row < tile.rows) & (begin < work.k)
            offset = ptx.select(exists, Int64(tile.row + row) * work.k + begin, Int64(0))
            source = work.a.iterator + cute.assume(offset, divby=PIECE)
            to = at + cute.assume(self.activations.place(row, piece), divby=PIECE)
            if const_expr(c.tile_m * PIECES % c.threads == 0):
                ptx.copy_async_16(to, source, exists)
            elif row < c.tile_m:
                ptx.copy_async_16(to, source, exists)
        self.weight.load(k_tile, at, tile, work)

    @cute.jit
    def _multiply(self, stage, factors, acc, base, slot, work):
        """Multiply a k tile, and let the promotion add the results to the accumulators. ``slot`` contains the weight's
        scales."""
        c = self.config
        at = base + cute.assume(Int32(stage) * c.stage_bytes, divby=K_TILE)
        blocks, groups = range(c.warp_m // 16), range(c.warp_n // 8)
        if const_expr(c.warp_m <= c.warp_n and not c.holds_weight):
            fragments = self.activations.fragments(at, work.row, c.warp_m, work.lane)
            of_rows = [self.promotion.of_rows(factors, slot, i, work) for i in blocks]
            for group in range_constexpr(len(groups)):
                columns = self._columns(at, factors, slot, group, work)
                for i in range_constexpr(len(blocks)):
                    self._multiply_rows(i, fragments[i], {group: columns}, of_rows[i], acc)
        else:
            # Hold the weight in registers.
            columns_of = {group: self._columns(at, factors, slot, group, work) for group in groups}
            for i in range_constexpr(len(blocks)):
                (fragment,) = self.activations.fragments(at, work.row + 16 * i, 16, work.lane)
                of_rows = self.promotion.of_rows(factors, slot, i, work)
                self._multiply_rows(i, fragment, columns_of, of_rows, acc)

    def _columns(
        self, at: cute.Pointer, factors: list, slot: cute.Pointer, group: int, work: Work
    ) -> tuple[list, list]:
        """Load eight weight rows of a k tile. Return this lane's words, and the promotion's factors of its columns."""
        column = work.column + group * 8
        words = self.weight.words(at, slot, column, work.lane)
        return words, self.promotion.of_columns(factors, slot, group, column, work.lane)

    def _multiply_rows(self, i: int, fragment: list, columns_of: dict, of_rows: list, acc: cute.Tensor) -> None:
        """Multiply 16 rows of ``a`` by groups of eight weight rows, and let the promotion add the results to the
        accumulators. ``columns_of`` is keyed by the index of the group."""
        if self.promotion.by_step:
            self._multiply_by_step(i, fragment, columns_of, of_rows, acc)
            return
        totals = dict.fromkeys(columns_of, [Float32(0.0)] * 4)
        for step in range(STEPS):
            for group, (words, _) in columns_of.items():
                b = [words[step], words[STEPS + step]]
                totals[group] = ptx.mma_16x8x32(fragment[step], b, totals[group])
        for group, (_, of_columns) in columns_of.items():
            first = (i * (self.config.warp_n // 8) + group) * 4
            for j in range(4):
                at, total = first + j, totals[group][j]
                acc[at] = self.promotion.add(acc[at], total, of_rows, j // 2, of_columns, j % 2)

    def _multiply_by_step(self, i: int, fragment: list, columns_of: dict, of_rows: list, acc: cute.Tensor) -> None:
        """Compute ``_multiply_rows``, but let the promotion compute each MMA and add its result."""
        for step in range(STEPS):
            for group, (words, of_columns) in columns_of.items():
                b = [words[step], words[STEPS + step]]
                first = (i * (self.config.warp_n // 8) + group) * 4
                values = [acc[first + j] for j in range(4)]
                values = self.promotion.multiply(fragment[step], b, values, of_rows, of_columns, step)
                for j in range(4):
                    acc[first + j] = values[j]


def fragments_of(rows: list) -> list:
    """Return the operands of rows whose ``words`` are given, for each 16 rows and each MMA of the k tile: four words.
    A lane holds every eighth row."""
    return [
        [[rows[2 * i + r][half + step] for half in (0, STEPS) for r in (0, 1)] for step in range(STEPS)]
        for i in range(len(rows) // 2)
    ]


class BlockRows:
    """Rows of 128 bytes of a k tile, whose MMAs multiply 32 neighbouring elements each.

    For each MMA, lane ``q`` of four reads 8 bytes of a row, at ``32 * step + 8 * q``. Pieces of 16 bytes are swapped in
    pairs, so that the 16 lanes that read at the same time, of four rows, avoid bank conflicts.
    """

    def place(self, row, piece):
        """Return the offset, in a stage, of the ``piece``-th 16-byte piece of a row."""
        return row * K_TILE + (piece ^ row % 4 * 2) * PIECE

    def words(self, at: cute.Pointer, row, lane) -> list:
        """Load this lane's words of a row, as four vectors of two words: for each MMA the first word, then for each MMA
        the second word."""
        pairs = []
        for step in range(STEPS):
            offset = self.place(row, lane % 4 // 2 + 2 * step) + lane % 2 * (PIECE // 2)
            place = at + cute.assume(offset, divby=PIECE // 2)
            pairs.append(load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(2))))
        return [pair[half] for half in range(2) for pair in pairs]

    def fragments(self, at: cute.Pointer, first_row, count: int, lane) -> list:
        """Load the operands of ``count`` rows: for each 16 rows and each MMA of the k tile, four words."""
        row = first_row + lane // 4
        return fragments_of([self.words(at, row + 8 * i, lane) for i in range(count // 8)])


class LaneRows:
    """Rows of 128 bytes of a k tile, of which a lane reads two pieces of 16 bytes.

    Pieces of every second row are swapped, so that lanes that read at the same time avoid bank conflicts.

    Args:
        are_neighbours: True if lane ``q`` of four reads pieces ``2 q`` and ``2 q + 1``, False if it reads pieces ``q``
            and ``q + 4``.
    """

    def __init__(self, are_neighbours: bool = False):
        self.are_neighbours = are_neighbours

    def place(self, row, piece):
        """Return the offset, in a stage, of the ``piece``-th 16-byte piece of a row."""
        return row * K_TILE + (piece ^ (row % 2 * (1 if self.are_neighbours else PIECES // 2))) * PIECE

    def words(self, at: cute.Pointer, row, lane) -> list:
        """Load this lane's words of a row, as two vectors of four words."""
        words = []
        pieces = lane % 4, lane % 4 + PIECES // 2
        if self.are_neighbours:
            pieces = lane % 4 * 2, lane % 4 * 2 + 1
        for piece in pieces:
            place = at + cute.assume(self.place(row, piece), divby=PIECE)
            words += load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
        return words

    def fragments(self, at: cute.Pointer, first_row, count: int, lane) -> list:
        """Load the operands of ``count`` rows: for each 16 rows and each MMA of the k tile, four words."""
        row = first_row + lane // 4
        return fragments_of([self.words(at, row + 8 * i, lane) for i in range(count // 8)])


class MatrixRows:
    """Rows of 128 bytes of a k tile, which ``ldmatrix`` distributes among the lanes.

    Each MMA multiplies 32 neighbouring elements, in the order of memory.

    A piece of a row contains a word of each of four lanes. The pieces of eight rows are permuted, so that
    ``ldmatrix`` reads the same piece of eight rows without bank conflicts.
    """

    def piece(self, step, half):
        """Return the index of the piece that contains the first or second word of each lane for an MMA."""
        return 2 * step + half

    def place(self, row, piece):
        """Return the offset, in a stage, of the ``piece``-th 16-byte piece of a row."""
        return row * K_TILE + (piece ^ row % PIECES) * PIECE

    def fragments(self, at: cute.Pointer, first_row, count: int, lane) -> list:
        """Load the operands of ``count`` rows: for each 16 rows and each MMA of the k tile, four words."""
        row, half = first_row + lane % 16, lane // 16
        loaded = []
        for i in range(count // 16):
            of_rows = []
            for step in range(STEPS):
                of_rows.append(self._load(at, row + 16 * i, self.piece(step, half)))
            loaded.append(of_rows)
        return loaded

    def words(self, at: cute.Pointer, row, lane) -> list:
        """Load this lane's words of a row: for each MMA the first word, then for each MMA the second word. The lanes
        of a warp pass eight neighbouring rows, four lanes the same row. The first row is a multiple of eight."""
        row = row - lane // 4 + lane % 8
        words = [word for i in range(2) for word in self._load(at, row, lane // 8 + 4 * i)]
        return [words[self.piece(step, half)] for half in range(2) for step in range(STEPS)]

    def _load(self, at: cute.Pointer, row, piece) -> list:
        """Load four matrices of eight rows and one piece. Each lane gives the row and the piece of an address."""
        place = at + cute.assume(self.place(row, piece), divby=PIECE)
        vector = primitives.ldmatrix(place.to_llvm_ptr(), 4, primitives.MMALayout.ROW)
        return [Uint32(vector[word]) for word in range(4)]


class InterleavedRows(MatrixRows):
    """Rows of a k tile of interleaved activations (``formats.interleave``): half of 256 interleaved elements.

    Piece ``w`` of a row contains word ``w`` of each of the four lanes.
    """

    def piece(self, step, half):
        return step + half * STEPS


class Promotion:
    """Base class of promotions: no factors, and nothing to do after the last k tile."""

    by_step = False

    def __init__(self, config: WarpGemmConfig):
        self.config = config

    def factors(self, k_tile, tile: Tile, work: Work) -> list:
        return []

    def of_rows(self, factors: list, slot, i: int, work: Work) -> Any:
        return []

    def of_columns(self, factors: list, slot, group: int, column, lane) -> Any:
        return []

    def finish(self, acc: cute.Tensor, tile: Tile, work: Work) -> None:
        """Return at once, because all scales have been applied."""


class TokenPromotion(Promotion):
    """Promotion with per-token scales of ``a``, which are applied after the sum over K."""

    def add(self, acc, total, of_rows: list, row: int, of_columns: list, column: int) -> Float32:
        return ptx.add_rn(acc, total)

    def finish(self, acc: cute.Tensor, tile: Tile, work: Work) -> None:
        """Multiply the accumulators by the scales of their rows."""
        c = self.config
        size = c.warp_n // 2
        places = [work.row + i * 8 + work.lane // 4 for i in range(c.warp_m // 8)]
        for i, scale in enumerate(load_token_scales(tile.row, tile.rows, places, work)):
            for j in range(size // 2):
                at = i // 2 * size + j // 2 * 4 + i % 2 * 2 + j % 2
                acc[at] = ptx.mul_rn(acc[at], scale)
