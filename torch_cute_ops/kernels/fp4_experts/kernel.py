"""The device code; the package's docstring describes the roles and the data path."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import load_terms
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import clear, load_words
from torch_cute_ops.kernels.common.core.pipeline import next_stage, release
from torch_cute_ops.kernels.common.experts.factors import biases_argument, factors_argument
from torch_cute_ops.kernels.common.experts.layouts import PAIR_BYTES
from torch_cute_ops.kernels.common.experts.lists import TokenLister, TokenLists
from torch_cute_ops.kernels.common.experts.units import ExpertUnits
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.decode import acc_scale
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M
from torch_cute_ops.kernels.common.fp4.mma import KTileMma
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_experts.config import BANDS, ROWS, Arguments, Config
from torch_cute_ops.kernels.fp4_experts.totals import Share, Smem, Totals
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

WARP = 32


class Consumer(NamedTuple):
    """A thread of a consumer warp.

    Attributes:
        lane, quad: index in the warp, and among the four lanes that share a row.
        row: the first of its two rows of the slice; the other is ``row + 8``.
        leads: whether it arrives at barriers for its warp, 1 or 0.
        place: index of its warp among those that have the same rows.
        slot, part: which units it has, and which part of their k.
        chain: the barriers of the warps that have the same rows.
    """

    lane: Int32
    quad: Int32
    row: Int32
    leads: Uint32
    place: Int32
    slot: Int32
    part: Int32
    chain: cute.Pointer


class FP4ExpertsKernel:
    """The kernels of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.totals = Totals(config)
        self.ring = WeightStages(config.chunks, config.stages)
        self.activations = Activations(config.arranged, config.spread)
        self.lister = TokenLister(config.lists, self.activations)
        self.units = ExpertUnits(config.tokens, config.group, config.classes)
        self.mma = KTileMma(self.ring, config.arranged, config.group, config.stages, config.width)

    def arguments(self) -> Arguments:
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.ring.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=factors_argument(m),
            bias=biases_argument(self.config.bias_dtype, n),
            out=TensorArg(self.totals.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            workers=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, b_scale, alpha, bias, out, workspace, workers: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens)
        experts = alpha.shape[1]
        # As in ``Config.workspace_bytes``
        arranged, pairs, after = self.lister.parts(workspace.iterator, tiles, experts)
        left = None
        if const_expr(c.classes > 1):
            sum_bytes = Int64(tiles) * workers * c.sum_bytes
            sums = cute.make_tensor(after, cute.make_layout((sum_bytes,)))
            after = after + cute.assume(sum_bytes, divby=ROWS * 4)
            flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * workers,)))
            left = sums, flags
            after = after + tiles * workers * 4
        counts = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * experts,)))
        lists = TokenLists(arranged, pairs, counts)
        listed = ctas_unless_overlapping(experts, (out, workspace), (a, a_scale, b, b_scale, alpha, bias))
        self.list_kernel(a, a_scale, alpha, lists, left, out.shape[0]).launch(
            grid=[listed, tiles, 1], block=[c.lists.threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self.ring.maps(b, b_scale, experts), alpha, bias, lists, left, out).launch(
            grid=[workers, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, alpha, lists, left, m):
        """List the tokens of a tile that are routed to an expert, in their order, with their factors, and rearrange
        their activations."""
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        expert, tile, _ = cute.arch.block_idx()
        experts, _, _ = cute.arch.grid_dim()
        # The next kernel may start to read weights and factors.
        pdl_start(c.pdl)
        if const_expr(c.classes > 1):
            flags = left[1]
            ctas = experts * cute.arch.grid_dim()[1]
            for i in range((tile * experts + expert) * c.lists.threads + tid, flags.shape[0], ctas * c.lists.threads):
                flags[i] = Int32(0)
        members, total = self.lister.find(alpha, lists, tile, expert, experts, m, self.totals.token_offset)
        entry = self.lister.entry(tile, expert, experts)
        first_token, first_k = tile * c.tokens, expert * c.width
        self.lister.arrange(
            a, a_scale, members, total, lists.tiles, entry, first_token, first_k, c.width, 0, c.expert_chunks
        )

    # GEMM

    @cute.kernel
    def kernel(self, weight, alpha, bias, lists, left, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        worker, tile, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        slices, begins, ends = self._classes_of(worker, workers, out.shape[1])
        share = Share(
            m=out.shape[0],
            n=out.shape[1],
            worker=worker,
            workers=workers,
            tile=tile,
            first_token=tile * c.tokens,
            experts=alpha.shape[1],
            lists=lists,
            left=left,
            bias=bias,
            out=out,
            slices=slices,
            begins=begins,
            ends=ends,
        )
        smem = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # One arrival for the weight, one for what the other kernel has listed
                cute.arch.mbarrier_init(smem.full + i, 2)
                cute.arch.mbarrier_init(smem.free + i, BANDS * c.parts)
            for i in range_constexpr(c.warps):
                cute.arch.mbarrier_init(smem.turns + i, 1)
        cute.arch.mbarrier_init_fence()
        # The sums; and the activations, of which a unit that is not full overwrites only some
        clear(smem.sums, c.sum_bytes + c.stages * self.mma.activation_bytes, tid, c.threads)
        if const_expr(c.pdl and not c.scans):
            cute.arch.griddepcontrol_wait()
        self.units.gather(alpha, lists.counts, tile, share.m, tid, warp, c.warps, c.threads, (begins, ends), smem.units)
        share = share._replace(units=smem.units.total[0], first_units=smem.units.first[0])
        if warp >= c.warps:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.warps + c.slots:
                self._feed(warp - c.warps, self.ring.open(weight, smem.codes, smem.scales), share, smem)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._multiply(warp, tid, share, smem)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        scales = base + c.stages * self.ring.code_bytes
        sums = scales + c.stages * self.ring.scale_bytes
        tokens = sums + c.sum_bytes
        pairs = tokens + c.stages * self.mma.activation_bytes
        units, end = self.units.lists(pairs + c.stages * c.group * PAIR_BYTES)
        barriers = cute.recast_ptr(end, dtype=Int64)
        return Smem(
            codes=base,
            scales=scales,
            sums=sums,
            tokens=tokens,
            pairs=pairs,
            units=units,
            full=barriers,
            free=barriers + c.stages,
            turns=barriers + 2 * c.stages,
        )

    def _classes_of(self, worker, workers, n) -> tuple[tuple, tuple, tuple]:
        """The slices, begins and ends of a worker's ``Share``."""
        c = self.config
        if c.classes == 1:
            return (worker, worker), (Int32(0), Int32(1)), (Int32(1), Int32(1))
        tasks = cute.ceil_div(n, ROWS) * c.classes
        begin, end = worker * tasks // workers, (worker + 1) * tasks // workers
        first, last = begin // c.classes, (end - 1) // c.classes
        at = last * c.classes
        begins = cutlass.max(begin - at, Int32(0)), ptx.select(first < last, begin - first * c.classes, Int32(0))
        ends = end - at, ptx.select(first < last, Int32(c.classes), Int32(0))
        return (last, first), begins, ends

    # Each slot has its own ring and its own producer warp, so that waits for stages are in order.

    @cute.jit
    def _feed(self, slot, weight, share, smem):
        """The producer warp of a slot: the weight's chunks, and with each what the other kernel has listed; the first
        ones before that, where it may (``unit_lists.SCANNED``)."""
        c = self.config
        depth = c.stages // c.slots
        first = slot * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, of = slot, Int32(0)
            while (ahead < share.units) & (loaded < depth):
                of = self.units.index_of(ahead, of, smem.units)
                for i in range(cutlass.min(c.expert_chunks, depth - loaded)):
                    self._load_weight(of, ahead, i, first + loaded, weight, share, smem)
                    loaded += 1
                ahead += c.slots
            cute.arch.griddepcontrol_wait()
        # With parity 1, a stage that was never used counts as free.
        stage, parity = Int32(0), Int32(1)
        done, index = Int32(0), Int32(0)
        for unit in range(slot, share.units, c.slots):
            index = self.units.index_of(unit, index, smem.units)
            for chunk in range(c.expert_chunks):
                if done >= loaded:
                    ptx.wait(smem.free + (first + stage), parity)
                    self._load_weight(index, unit, chunk, first + stage, weight, share, smem)
                self._load_tokens(index, unit, chunk, first + stage, share, smem)
                done += 1
                stage, parity = next_stage(stage, parity, depth)

    def _slice_of(self, unit, share):
        """The slice that a unit is of."""
        return share.slices[0] if self.config.classes == 1 else ptx.select(unit < share.first_units, *share.slices)

    def _load_weight(self, index, unit, chunk, stage, weight, share, smem) -> None:
        """Start the copies of a chunk of the weight."""
        expert = smem.units.experts[index]
        blocks = self.config.width // self.config.operands.fmt.block_size
        self.ring.load(
            self._slice_of(unit, share), chunk, expert, stage, smem.full + stage, weight, share.n, Int32(blocks)
        )

    @cute.jit
    def _load_tokens(self, index, unit, chunk, stage, share, smem):
        """Start the copies of a chunk of a unit's activations, and of the unit's pairs."""
        c = self.config
        units = smem.units
        position = (unit - units.begins[index]) * c.group
        entry = self.lister.entry(share.tile, units.experts[index], share.experts)
        tokens = cutlass.min(units.counts[index] - position, Int32(c.group))
        target = smem.tokens + cute.assume(stage * self.mma.activation_bytes, divby=self.mma.activation_bytes)
        pairs = c.group * PAIR_BYTES
        barrier = smem.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tokens * self.lister.token_bytes + pairs)
            self.lister.copy_unit(share.lists.tiles, entry, chunk, position, tokens, target, barrier)
            ptx.copy_bulk(
                smem.pairs + cute.assume(stage * pairs, divby=16),
                share.lists.pairs.iterator + cute.assume((entry + position) * PAIR_BYTES, divby=16),
                pairs,
                barrier,
            )

    @cute.jit
    def _multiply(self, warp, tid, share, smem):
        """A consumer warp: 16 rows of every unit of a slot, and its part of their k."""
        c = self.config
        # The warps of a band share a scheduler of the SM, and are at different points of their units.
        place, band = warp // BANDS, warp % BANDS
        lane = tid % WARP
        consumer = Consumer(
            lane=lane,
            quad=lane % 4,
            row=band * 16 + lane // 4,
            leads=Uint32(lane == 0),
            place=place,
            slot=place // c.parts,
            part=place % c.parts,
            chain=smem.turns + band * c.places,
        )
        state = Int32(0), Int32(0), Int32(place == 0)
        state = self._multiply_units(consumer.slot, share.first_units, share.slices[0], state, consumer, share, smem)
        self.totals.end_slice(0, tid, share, smem)
        if const_expr(c.classes > 1):
            if share.ends[1] > 0:
                begin = consumer.slot + (share.first_units - consumer.slot + c.slots - 1) // c.slots * c.slots
                self._multiply_units(begin, share.units, share.slices[1], state, consumer, share, smem)
                self.totals.end_slice(1, tid, share, smem)

    @cute.jit
    def _multiply_units(self, begin, end, slice_, state, consumer, share, smem):
        """A slot's units of a slice. ``state``: the ring's stage and its parity, and the parity of the warp's turn.
        Returns the next."""
        c = self.config
        depth = c.stages // c.slots
        first = consumer.slot * depth
        # A tile of scales has 128 rows, those of two slices.
        scale_row = consumer.row if c.operands.layout.is_linear else consumer.row + slice_ % 2 * ROWS
        sums = cute.make_rmem_tensor((c.group // 2,), Float32)
        start = self.mma.start_of(smem.tokens)
        index = Int32(0)
        stage, parity, turn = state
        for unit in range(begin, end, c.slots):
            bias = phase = None
            if const_expr(c.bias_dtype is not None or c.spread):
                index = self.units.index_of(unit, index, smem.units)
                expert = smem.units.experts[index]
                if const_expr(c.bias_dtype is not None):
                    bias = self._bias(expert, slice_, consumer, share)
                if const_expr(c.spread):
                    phase = expert % 2
            if const_expr(c.by_warp):
                sums.fill(0.0)
            last = stage
            for chunk in range(c.expert_chunks):
                ptx.wait(smem.full + (first + stage), parity)
                if const_expr(c.parts == 1):
                    self._multiply_chunk(
                        start, 0, chunk, first + stage, first + last, scale_row, phase, sums, consumer, smem
                    )
                else:
                    for part in range_constexpr(c.parts):
                        if consumer.part == part:
                            self._multiply_chunk(
                                start, part, chunk, first + stage, first + last, scale_row, phase, sums, consumer, smem
                            )
                last = stage
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(c.by_warp):
                    if chunk + 1 < c.expert_chunks:
                        release(smem.free + (first + last), consumer.leads)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
            offsets, factors = self._pairs(first + last, consumer, smem)
            release(smem.free + (first + last), consumer.leads)
            # After the warp with the same rows that has the part of k before, or the unit before
            if (unit > 0) | (consumer.part > 0):
                ptx.wait(consumer.chain + consumer.place, turn)
            turn ^= 1
            self._add(sums, offsets, factors, bias, consumer, smem)
            cute.arch.sync_warp()
            ptx.arrive_if(consumer.chain + (consumer.place + 1) % c.places, consumer.leads)
        return stage, parity, turn

    def _multiply_chunk(self, start, part: int, chunk, stage, before, scale_row, phase, sums, consumer, smem) -> None:
        """Add a chunk to the sums, with a part of each lane's codes; free the stage ``before``."""
        c = self.config
        rows = [(stage, consumer.row + 8 * r, scale_row + 8 * r) for r in range(2)]

        def free_before() -> None:
            release(smem.free + before, consumer.leads, chunk > 0)

        done = free_before if c.expert_chunks > 1 else None
        self.mma.multiply(start, part, c.parts, chunk, stage, chunk > 0, rows, consumer.lane, sums, smem, done, phase)

    # Sums

    def _bias(self, expert, slice_, consumer, share) -> list:
        """An expert's bias of the two rows of a lane. Of the warps that share the k of a unit the first adds it."""
        n = slice_ * ROWS + consumer.row
        return [
            load_terms(share.bias, expert, n, 8 * r, 1, (n + 8 * r < share.n) & (consumer.part == 0))[0]
            for r in range(2)
        ]

    def _pairs(self, stage, consumer, smem) -> tuple[list, list]:
        """Offsets of the sums of a lane's tokens of a unit, two of each eight, negative where there is no token; and
        their factors."""
        c = self.config
        offsets, factors = [], []
        for group in range(c.group // ATOM_M):
            at = stage * (c.group * PAIR_BYTES) + (group * ATOM_M + consumer.quad * 2) * PAIR_BYTES
            words = cute.recast_ptr(smem.pairs + cute.assume(at, divby=16), dtype=Uint32)
            loaded = load_words(cute.make_tensor(words, cute.make_layout(4)))
            offsets += [Int32(loaded[0]), Int32(loaded[2])]
            factors += [ptx.float_of(loaded[1]), ptx.float_of(loaded[3])]
        return offsets, factors

    @cute.jit
    def _add(self, sums, offsets, factors, bias, consumer, smem):
        """Add a unit's sums, with the bias of the two rows, times the factors, to those of the tile."""
        c = self.config
        scale = Float32(acc_scale(c.operands.fmt, c.operands.decodes_both))
        places = [(i, r) for i in range(c.group // 4) for r in range(2)]
        at = [smem.sums + self.totals.sum_offset(offsets[i], consumer.row + 8 * r) for i, r in places]
        # All are loaded before the first is stored.
        totals = [ptx.float_of(ptx.load_shared_if(x, offsets[i] >= 0)) for x, (i, _) in zip(at, places, strict=True)]
        for x, total, (i, r) in zip(at, totals, places, strict=True):
            own = ptx.mul_rn(sums[i // 2 * 4 + r * 2 + i % 2], scale)
            if const_expr(bias is not None):
                own = ptx.add_rn(own, bias[r])
            total = ptx.fma_rn(factors[i], own, total)
            ptx.store_shared_if(x, ptx.bits_of(total), offsets[i] >= 0)
