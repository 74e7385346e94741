"""Device code that all FP8 wgmma kernels share: producer, scale loaders, decoders and work schedule.

A CTA consists of two or four consumer warpgroups, one warpgroup with a producer warp and three scale-loader warps, and
possibly decoder warps. ``FP8Gemm.kernel`` assigns a role to each warp:

- ``Producer`` copies ``a`` and the weight into the stages of the pipeline, and records each stage's tile;
- ``ScaleLoader`` loads scales and stores them in the stages, in the layout that its *scale source* defines;
- ``Decoders``, if any, decode or rearrange stages that have arrived, as their *decoder* defines;
- the *consumers* multiply, promote and store (``common.fp8.consumers``, or a kernel's own class).

A kernel is an ``FP8Gemm`` that is composed of these objects, with these methods:

- weight source: ``arguments``, ``views``, ``layout``, ``stages``, ``await_rows`` (``common.fp8.weights``);
- scale source: ``begin``, ``load``, ``store``;
- decoder: ``begin``, ``complete``, ``tell``;
- consumers: ``run``.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH
from torch_cute_ops.kernels.common.core.memory import prefetch, prefetch_argument, store_words
from torch_cute_ops.kernels.common.core.pipeline import Pipeline, fence_async
from torch_cute_ops.kernels.common.fp8.layouts import (
    GROUPS,
    K_TILE,
    RECORD_BYTES,
    RECORD_WORDS,
    SCALE_WARPS,
    Arguments,
    FP8GemmConfig,
)
from torch_cute_ops.kernels.common.fp8.tiles import ExpertTiles, Tile

SLEEP: Final = 200  # nanoseconds between the polls of a scale loader that waits for a stage


class Work(NamedTuple):
    """Work of a CTA, and the tensors of the call.

    Attributes:
        m, n: numbers of rows and columns of the result. The rows of all experts are counted.
        k_stages: number of stages that cover K, with ``FP8GemmConfig.span`` k tiles each. The last stage may hold fewer
            k tiles, and the last k tile may have 64 elements instead of 128.
        width: bytes of a row of the weight.
        begin, end: range of stages that this CTA multiplies: all stages, or a part of them under split-K.
        first: index of the first tile of this CTA's cluster.
        num_clusters: number of clusters. A cluster's next tile is ``num_clusters`` tiles further.
        num_tiles: number of tiles of the GEMM.
        rank: rank of this CTA in its cluster.
        m_rank: if the CTAs of a cluster share a tile, index of the group of ``tile_m`` rows that this CTA computes.
        a_scale, b_scale: scales of ``a`` and of the weight, for all experts.
        alpha, bias: operands of the epilogue, or None.
        out: result.
        prefetch: memory to prefetch into L2, or None.
    """

    m: Int32
    n: Int32
    k_stages: Int32
    width: Int32
    begin: Int32
    end: Int32
    first: Int32
    rank: Int32
    m_rank: Int32
    num_tiles: Int32
    num_clusters: Int32
    a_scale: cute.Tensor
    b_scale: cute.Tensor
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor
    prefetch: cute.Tensor | None


@dataclass(frozen=True)
class ScopedPipeline(Pipeline):
    """Pipeline whose waits order accesses at CTA scope or at cluster scope.

    Attributes:
        full_scope, empty_scope: scopes of waits for full and for empty stages: ``"cta"``, or ``"cluster"`` if other
            CTAs of the cluster fill or release the stages.
    """

    full_scope: str
    empty_scope: str

    def wait_full(self, stage, parity) -> None:
        ptx.wait(self.full + stage, parity, scope=self.full_scope)

    def wait_empty(self, stage, parity, sleep: int = 0) -> None:
        ptx.wait(self.empty + stage, parity, sleep, self.empty_scope)


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA. The class is frozen, because the DSL would carry a mutable object through every loop.

    Attributes:
        a, b: stages of ``a``, and stages of the weight as the producer copies it.
        scales, records: scales and tile records of the stages.
        workspace: memory that only some kernels use: for a decoded weight, or for accumulators that one warpgroup
            passes to another.
        stores: memory in which warps assemble lines of the result, or store partial sums before they send them.
        received: partial sums from the other CTAs of the cluster.
        table: table of experts.
        copies: pipeline from the producer and the scale loaders to the decoders. Without decoders, it ends at the
            consumers.
        stages: pipeline of the stages that the consumers multiply. It has the same empty barriers as ``copies``.
        slots: pipeline of the k tiles of ``a``, if the stages of ``stages`` do not hold ``a``.
        partial_sums: barriers of ``received``: full when the other CTAs' partial sums have arrived, empty when all CTAs
            have read the partial sums that they received.
        k_groups: barriers for the accumulators that the second K group passes to the first K group.
    """

    a: cute.Pointer
    b: cute.Pointer
    scales: cute.Pointer
    records: cute.Pointer
    workspace: cute.Pointer
    stores: cute.Pointer
    received: cute.Pointer
    table: cute.Pointer
    copies: ScopedPipeline
    stages: ScopedPipeline
    slots: Pipeline
    partial_sums: Pipeline
    k_groups: Pipeline


def k_tiles_layout(rows: int, count: int):
    """Return the layout of k tiles in shared memory: (rows, ``K_TILE``, count), with the 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    return cute.tile_to_shape(atom, (rows, K_TILE, count), order=(0, 1, 2))


def k_tiles(base: cute.Pointer, rows: int, count: int) -> cute.Tensor:
    """View shared memory as ``count`` k tiles of ``rows`` rows."""
    layout = k_tiles_layout(rows, count)
    return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float8E4M3FN), layout.outer)


def arrive(barrier, lane) -> None:
    """Let a warp arrive once at a barrier of this CTA, after all loads and stores of its lanes."""
    cute.arch.sync_warp()
    ptx.arrive_if(barrier, Uint32(lane == 0))


class Stages:
    """Shared memory of the pipeline, and the barriers of its stages."""

    def __init__(self, config: FP8GemmConfig):
        self.config = config

    def allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        b = base + c.slots * c.tile_m * K_TILE
        workspace = b + c.stages * c.copied_n * c.line
        scales = workspace + c.workspace_bytes
        records = scales + c.stages * c.span * c.slot_words * 4
        stores = records + c.stages * RECORD_BYTES
        received = stores + c.store_bytes
        table = received + c.received_bytes
        barriers = cute.recast_ptr(table + c.rows.table_bytes, dtype=Int64)
        copied = barriers + (2 * c.stages + 2 if const_expr(c.decoder_warps) else 0)
        empty = barriers + c.stages
        scope = "cluster" if c.cluster_m > 1 else "cta"
        return Smem(
            a=base,
            b=b,
            scales=cute.recast_ptr(scales, dtype=Float32),
            records=cute.recast_ptr(records, dtype=Uint32),
            workspace=workspace,
            stores=stores,
            received=received,
            table=table,
            copies=ScopedPipeline(copied, empty, c.stages, "cta", scope),
            stages=ScopedPipeline(barriers, empty, c.stages, scope, scope),
            slots=Pipeline.at(barriers + 2 * c.stages + 2, c.a_slots),
            partial_sums=Pipeline(barriers + 2 * c.stages, barriers + 2 * c.stages + 1, 1),
            k_groups=Pipeline(barriers + 3 * c.stages + 2, barriers + 3 * c.stages + 3, 1),
        )

    def initialise(self, smem: Smem) -> None:
        """Initialise all barriers, in one thread. The tables in the kernels' package docstrings give the arrival
        counts."""
        c = self.config
        for i in range(c.stages):
            # One arrival comes from the producer, and one from a scale loader if the kernel has scale loaders.
            cute.arch.mbarrier_init(smem.copies.full + i, 2 if c.scale_warps else 1)
            if c.decoder_warps:
                cute.arch.mbarrier_init(smem.stages.full + i, c.decoded_arrivals)
            cute.arch.mbarrier_init(smem.stages.empty + i, c.consumer_warps * c.cluster_m)
        if c.a_slots:
            smem.slots.init(1, c.consumer_warps)
        if c.split_k > 1:
            smem.partial_sums.init(1, 4 * GROUPS * c.split_k)
        if c.k_groups > 1:
            smem.k_groups.init(4 * GROUPS, 4 * GROUPS)

    def release(self, stage, lane, smem: Smem) -> None:
        """Release a stage: arrive at its empty barrier for this warp. All lanes must have read the stage."""
        cluster_m = self.config.cluster_m
        if cluster_m > 1:
            cute.arch.sync_warp()
            ptx.arrive_at_if(smem.stages.empty + stage, lane, Uint32(lane < cluster_m), releases="shared")
        else:
            arrive(smem.stages.empty + stage, lane)

    def scales(self, slot, smem: Smem) -> cute.Tensor:
        """Return the fp32 words of a slot, the place of one k tile. The scales of the rows of ``a`` come first. The
        scale source defines the other words."""
        start = cute.assume(Int32(slot) * self.config.slot_words, divby=4)
        return cute.make_tensor(smem.scales + start, cute.make_layout(self.config.slot_words))

    def words(self, slot, at, count: int, smem: Smem) -> cute.Tensor:
        """Return ``count`` words of a k tile's slot, starting at word ``at``."""
        start = self.scales(slot, smem).iterator + cute.assume(at, divby=count)
        return cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), cute.make_layout(count))

    def record(self, stage, smem: Smem) -> cute.Tensor:
        """Return the record of a stage: ``RECORD_WORDS`` words in shared memory that describe the stage's output
        tile."""
        start = cute.assume(Int32(stage) * RECORD_WORDS, divby=4)
        return cute.make_tensor(smem.records + start, cute.make_layout(RECORD_WORDS))


class WorkSchedule:
    """Assigns output tiles and ranges of K to CTAs. Clusters are persistent and take tiles round-robin."""

    def __init__(self, config: FP8GemmConfig, weight: Any, raster: int = RASTER_WIDTH):
        self.config = config
        tile = config.tile_m * config.cluster_m, config.tile_n
        self.tiles = ExpertTiles(config.rows, *tile, weight, raster, by_token=config.has_token_scales)

    def find(self, number, lane, work: Work, smem: Smem) -> Tile:
        """Return the rows and columns of tile ``number`` that this CTA computes."""
        expert, row, rows, column = self.tiles.find(number, work.m, work.n, smem.table, lane)
        before = work.m_rank * self.config.tile_m
        return Tile(expert, row + before, rows - before, column)


class FP8Gemm:
    """GEMM kernel, composed of a work schedule, a scale source, consumers and possibly a decoder.

    Args:
        config: configuration of the kernel.
        schedule: work schedule. It contains the weight source.
        scales: scale source, or None without scale loaders.
        consumers: code of the consumer warps.
        decoder: decoder, or None without decoder warps.
    """

    def __init__(self, config: FP8GemmConfig, schedule: WorkSchedule, scales: Any, consumers: Any, decoder: Any = None):
        self.config, self.schedule, self.weight = config, schedule, schedule.tiles.weight
        self.stages = Stages(config)
        self.producer = Producer(config, self.stages, schedule)
        self.scale_loader = ScaleLoader(config, self.stages, schedule, scales)
        self.decoders = Decoders(config, decoder)
        self.consumers = consumers

    def arguments(self) -> Arguments:
        given = self.schedule.tiles.arguments(EpilogueOps(self.config.epilogue))
        return given._replace(prefetch=prefetch_argument()) if self.config.prefetches else given

    def launch(self, given: Arguments, stream) -> None:
        """Launch the kernel, with persistent CTAs in clusters."""
        c = self.config
        view = self.schedule.tiles.views(given)
        load = cpasync.CopyBulkTensorTileG2SOp()
        layout = cute.select(k_tiles_layout(c.box_m, 1), [0, 1])
        a_map = cpasync.make_tiled_tma_atom(load, view.a, layout, (c.box_m, K_TILE))
        b_map = cpasync.make_tiled_tma_atom(load, view.b, self.weight.layout(1), (c.copied_n, c.line, 1))
        scales, rows = (view.a_scale, view.b_scale), (given.offsets, given.counts)
        terms = given.alpha, given.bias
        self.kernel(a_map, b_map, scales, rows, terms, view.out, given.prefetch, view.space).launch(
            grid=[self.schedule.tiles.ctas(given, c.cluster), 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(self, a_map, b_map, scales, rows, terms, out, prefetch, space):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        smem = self.stages.allocate()
        if tid == 0:
            self.stages.initialise(smem)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.waits_first):
            cute.arch.griddepcontrol_wait()
        if const_expr(c.cluster_m > 1):
            # Wait until all CTAs of the cluster have initialised their barriers, because copies of other CTAs signal
            # them.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif const_expr(c.split_k > 1):
            # The consumers wait until all CTAs have arrived here, before they send partial sums
            # (``Results.meet_cluster``).
            cute.arch.cluster_arrive_relaxed()
        m, n = out.shape
        self.schedule.tiles.prepare(*rows, b_map[1].shape[2], space, smem.table, tid, c.threads)
        if const_expr(c.has_token_scales):
            k_stages = cute.ceil_div(a_map[1].shape[1], c.span * K_TILE)
        else:
            k_stages = cute.ceil_div(scales[0].shape[0], c.span)
        work = Work(
            m=m,
            n=n,
            k_stages=k_stages,
            width=b_map[1].shape[1],
            begin=cta % c.split_k * k_stages // c.split_k,
            end=(cta % c.split_k + 1) * k_stages // c.split_k,
            first=cta // c.cluster,
            rank=cta % c.cluster,
            m_rank=cta % c.cluster_m,
            num_tiles=self.schedule.tiles.count(m, n, smem.table),
            num_clusters=ctas // c.cluster,
            a_scale=scales[0],
            b_scale=scales[1],
            alpha=terms[0],
            bias=terms[1],
            out=out,
            prefetch=prefetch,
        )
        if warp >= c.consumer_warps:
            if warp <= c.consumer_warps + SCALE_WARPS:
                cute.arch.setmaxregister_decrease(c.registers[1])
                if warp == c.consumer_warps:
                    self.producer.run(a_map, b_map, tid % 32, work, smem)
                elif const_expr(c.scale_warps == SCALE_WARPS):
                    self._load_scales(warp, tid, work, smem)
                elif const_expr(c.scale_warps):
                    if warp <= c.consumer_warps + c.scale_warps:
                        self._load_scales(warp, tid, work, smem)
            elif const_expr(c.decoder_warps):
                cute.arch.setmaxregister_decrease(c.registers[2])
                decoder = warp - (c.consumer_warps + 1 + SCALE_WARPS)
                self.decoders.run(decoder // c.decoder_warps, decoder % c.decoder_warps, tid % 32, work, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._wait_if_static()
            self.consumers.run(tid, work, smem)
        if const_expr(c.cluster_m > 1):
            # Other CTAs of the cluster may still access this CTA's shared memory. Wait for them before the CTA ends.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _load_scales(self, warp, tid, work, smem) -> None:
        """Run a scale loader."""
        self._wait_if_static()
        self.scale_loader.run(warp - (self.config.consumer_warps + 1), tid % 32, work, smem)

    def _wait_if_static(self) -> None:
        """Wait for the previous kernels if the weight is static. Otherwise the whole CTA has already waited.

        Decoders never wait, because they access only shared memory.
        """
        if self.config.static_weight:
            cute.arch.griddepcontrol_wait()


class Producer:
    """Producer warp: copies all stages of the CTA's tiles, in order.

    If the weight is static, the producer copies it to the first stages, up to the depth of the pipeline, before the
    previous kernel ends (``core.launch``). The full barriers of these stages also expect the activations, which are
    copied later. After the last copy, the producer may prefetch its share of a later launch's operands into L2.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, schedule: WorkSchedule):
        self.config, self.stages, self.schedule, self.weight = config, stages, schedule, schedule.tiles.weight

    @cute.jit
    def run(self, a_map, b_map, lane, work, smem):
        c = self.config
        a_stages = cute.group_modes(k_tiles(smem.a, c.box_m, c.slots * c.boxes), 0, 2)
        b_stages = cute.group_modes(self.weight.stages(c.stages, smem), 0, 2)
        one = cute.make_layout(1)
        policy = {"cache_policy": Int64(ptx.EVICT_FIRST)} if c.streams_weight else {}
        # The parity starts at 1, so that the first waits for empty stages return immediately.
        stage, parity = Int32(0), Int32(1)
        slot, slot_parity = Int32(0), Int32(1)
        ahead = Int32(0)  # number of stages for which the weight copy has started
        for number in range(work.first, work.num_tiles, work.num_clusters):
            expert, row, rows, column = self.schedule.find(number, lane, work, smem)
            self.weight.await_rows(expert, column, work)
            # The index of an expert's first row need not be a multiple of the box's height, so move the origin of the
            # matrix to this row.
            tiled = cute.local_tile(cute.domain_offset((row, 0), a_map[1]), (c.box_m, K_TILE), (None, None))
            a_to, a_from = cpasync.tma_partition(a_map[0], 0, one, a_stages, cute.group_modes(tiled, 0, 2))
            place = column // c.copied_n + work.m_rank
            tiled = cute.local_tile(b_map[1], (c.copied_n, c.line, 1), (place, None, expert))
            b_to, b_from = cpasync.tma_partition(b_map[0], 0, one, b_stages, cute.group_modes(tiled, 0, 3))
            boxes = cutlass.max(cutlass.min(cute.ceil_div(rows, c.box_m), Int32(c.boxes)), Int32(0))
            size = c.copied_n * c.line
            if const_expr(not c.a_slots):
                size += boxes * (c.span * c.box_m * K_TILE)
            record = row, rows, column, expert if const_expr(c.tells_expert) else 0
            if const_expr(c.static_weight):
                if number == work.first:
                    ahead = cutlass.min(work.end - work.begin, Int32(c.stages))
                    for i in cutlass.range(ahead, unroll=1):
                        self._expect(record, size, i, smem)
                        source, to = b_from[None, work.begin + i], b_to[None, i]
                        cute.copy(b_map[0], source, to, tma_bar_ptr=smem.copies.full + i, **policy)
                    cute.arch.griddepcontrol_wait()
            for k_stage in cutlass.range(work.begin, work.end, unroll=1):
                if const_expr(c.static_weight):
                    if ahead > 0:
                        ahead -= 1
                    else:
                        smem.copies.wait_empty(stage, parity)
                        self._expect(record, size, stage, smem)
                        source, to = b_from[None, k_stage], b_to[None, stage]
                        cute.copy(b_map[0], source, to, tma_bar_ptr=smem.copies.full + stage, **policy)
                else:
                    smem.copies.wait_empty(stage, parity)
                    self._expect(record, size, stage, smem)
                barrier = smem.copies.full + stage
                if const_expr(c.a_slots):
                    cute.copy(b_map[0], b_from[None, k_stage], b_to[None, stage], tma_bar_ptr=barrier, **policy)
                for i in range_constexpr(c.span):
                    at = stage * c.span + i
                    if const_expr(c.a_slots):
                        at, barrier = slot, smem.slots.full + slot
                        smem.slots.wait_empty(slot, slot_parity)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(barrier, boxes * (c.box_m * K_TILE))
                        slot, slot_parity = smem.slots.next(slot, slot_parity)
                    for box in range_constexpr(c.boxes):
                        if box < boxes:
                            to = a_to[None, at * c.boxes + box]
                            cute.copy(a_map[0], a_from[None, box, k_stage * c.span + i], to, tma_bar_ptr=barrier)
                if const_expr(not (c.static_weight or c.a_slots)):
                    source, to = b_from[None, k_stage], b_to[None, stage]
                    cute.copy(b_map[0], source, to, tma_bar_ptr=barrier, **policy)
                stage, parity = smem.copies.next(stage, parity)
        if const_expr(c.prefetches):
            prefetch(work.prefetch, work.first * c.cluster + work.rank, work.num_clusters * c.cluster)

    def _expect(self, record: tuple, size, stage, smem) -> None:
        """Store a stage's record, and make the stage's barrier expect ``size`` bytes."""
        barrier = smem.copies.full + stage
        with cute.arch.elect_one():
            store_words([Uint32(word) for word in record], self.stages.record(stage, smem))
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


class ScaleLoader:
    """Scale-loader warps. They take stages in turn.

    A load takes as long as the MMAs of several stages, so a warp has the loads of several of its stages in flight. The
    pipeline has at least one stage per scale loader, so a warp's previous stage was at most one round ago. A warp is
    therefore never two rounds late, and the parity of an empty barrier is unambiguous.
    """

    def __init__(self, config: FP8GemmConfig, stages: Stages, schedule: WorkSchedule, scales: Any):
        self.config, self.stages, self.schedule, self.scales = config, stages, schedule, scales
        self.weight = schedule.tiles.weight

    @cute.jit
    def run(self, own, lane, work, smem):
        """Run scale loader number ``own`` of the ``scale_warps`` scale loaders."""
        c, warps = self.config, self.config.scale_warps
        before = Int32(0)  # number of stages of this CTA's earlier tiles
        for number in range(work.first, work.num_tiles, work.num_clusters):
            tile = self.schedule.find(number, lane, work, smem)
            self.weight.await_rows(tile.expert, tile.column, work)
            begun = self.scales.begin(tile, lane, work)
            start = work.begin + (own + warps - before % warps) % warps
            for first in cutlass.range(start, work.end, warps * c.scales_ahead, unroll=1):
                loaded = []
                for i in range_constexpr(c.scales_ahead):
                    k_stage = cutlass.min(first + i * warps, work.end - 1)
                    loaded.append(self.scales.load(k_stage, tile, lane, work))
                for i in range_constexpr(c.scales_ahead):
                    if first + i * warps < work.end:
                        turn = before + (first + i * warps - work.begin)
                        stage = turn % c.stages
                        ptx.wait(smem.stages.empty + stage, turn // c.stages % 2 ^ 1, SLEEP, smem.stages.empty_scope)
                        is_last = first + i * warps + 1 == work.end
                        self.scales.store(loaded[i], begun, is_last, stage, lane, work, smem)
                        arrive(smem.copies.full + stage, lane)
            before += work.end - work.begin


class Decoders:
    """Decoder warps. They form groups, which take turns: each group decodes every ``decoder_teams``-th stage."""

    def __init__(self, config: FP8GemmConfig, decoder: Any):
        self.config, self.decoder = config, decoder

    @cute.jit
    def run(self, team, warp, lane, work, smem):
        """Run decoder warp ``warp`` of decoder group ``team``."""
        c = self.config
        begun = self.decoder.begin(warp, lane, work)
        count = cute.ceil_div(work.num_tiles - work.first, work.num_clusters) * (work.end - work.begin)
        stage, parity = Int32(0), Int32(0)
        for i in range_constexpr(c.decoder_teams - 1):
            if team > i:
                stage, parity = self._skip(Int32(i), count, stage, parity, lane, smem)
        for turn in cutlass.range(team, count, c.decoder_teams, unroll=1):
            smem.copies.wait_full(stage, parity)
            self.decoder.complete(begun, stage, lane, work, smem)
            # Fence: MMAs and copies read the decoded data through the async proxy, and later copies overwrite the
            # codes.
            fence_async()
            cute.arch.sync_warp()
            self.decoder.tell(begun, stage, lane, work, smem)
            stage, parity = smem.copies.next(stage, parity)
            for i in range_constexpr(1, c.decoder_teams):
                stage, parity = self._skip(turn + i, count, stage, parity, lane, smem)

    @cute.jit
    def _skip(self, turn, count, stage, parity, lane, smem):
        """Skip a stage that another decoder group decodes.

        If a stage belongs to different groups in successive rounds, wait until the stage has arrived. A warp that does
        not wait could mistake the phase of two rounds ago for the phase that it waits for. The stage becomes full only
        when all groups have seen it arrive, so that no group is late by a round.
        """
        c = self.config
        if const_expr(c.teams_meet):
            wait_if(turn < count, smem.copies.full + stage, parity)
            cute.arch.sync_warp()
            ptx.arrive_if(smem.stages.full + stage, Uint32((lane == 0) & (turn < count)))
        return smem.copies.next(stage, parity)


@cute.jit
def wait_if(condition, barrier, parity, scope: cutlass.Constexpr = "cta"):
    """Wait for a phase of a barrier if ``condition`` holds. ``scope`` is as in ``ptx.wait``.

    In the machine code, MMAs overlap this branch, but they do not overlap a branch around an arrival (see
    ``core.ptx.arrive_if``).
    """
    if condition:
        ptx.wait(barrier, parity, scope=scope)


def tell_decoded(stage, lane, smem: Smem) -> None:
    """Arrive at a stage's full barrier for a decoder warp. The lanes of the warp must have synchronised."""
    ptx.arrive_if(smem.stages.full + stage, Uint32(lane == 0))


def token_scales(tile_m: int, k_tile, tile: Tile, lane, work: Work) -> list:
    """Load a k tile's scales of ``a``. Each lane loads one row's scale per 32 rows. Rows that the expert does not own
    get zeros."""
    at = work.a_scale.iterator + (Int64(k_tile) * work.a_scale.stride[0] + tile.row + lane)
    words = []
    for place in range(0, tile_m, 32):
        words += ptx.load_if(at, lane < tile.rows - place, 1, 4 * place)
    return [ptx.float_of(word) for word in words]


def row_scales(tile_n: int, k_tile, tile: Tile, lane, work: Work) -> list:
    """Load a k tile's scales of the weight, if each row has its own. Each lane loads one row's scale per 32 rows. Rows
    that do not exist get zeros."""
    scale = work.b_scale
    offset = Int64(tile.expert) * scale.stride[2] + Int64(k_tile) * scale.stride[1] + (tile.column + lane)
    words = []
    for place in range(0, tile_n, 32):
        words += ptx.load_if(scale.iterator + offset, tile.column + lane + place < work.n, 1, 4 * place)
    return [ptx.float_of(word) for word in words]


@cute.jit
def store_token_scales(tile_m: int, scales: cute.Tensor, of_rows: list, lane) -> None:
    """Write the scales that ``token_scales`` loaded into ``scales``, the shared-memory words of one slot."""
    for i in range_constexpr(len(of_rows)):
        if lane < tile_m - 32 * i:
            scales[lane + 32 * i] = of_rows[i]
