"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.activation_tiles.config import TILE_BYTES, TILE_LINE, TILE_TOKENS
from torch_cute_ops.kernels.common import pdl, ptx
from torch_cute_ops.kernels.common.activations import Activations
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.expert_factors import factor_counts, factors_argument
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.scan import running_sum
from torch_cute_ops.kernels.common.warp_products import multiply_word
from torch_cute_ops.kernels.common.warpgroup_products import warpgroup_products
from torch_cute_ops.kernels.common.weight_ring import WeightRing, next_stage
from torch_cute_ops.kernels.fp4_experts.config import (
    BANDS,
    MAX_EXPERTS,
    PAIR_BYTES,
    ROWS,
    Config,
)
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg

WARP = 32


class FP4ExpertsKernel:
    """The kernels of one ``Config``.

    Methods pass on what a thread knows: ``t``, sizes and places in memory; ``s``, where things lie in shared memory;
    ``w``, the place among the warps that multiply.
    """

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]
        self.out_dtype = DSL_DTYPES[config.out_dtype]
        self.ring = WeightRing(config.chunks, config.stages)
        self.activations = Activations(config.arranged)
        self.token_bytes = config.arranged.token_bytes

    def arguments(self) -> tuple[Argument, ...]:
        m, n = Dim("m"), Dim("n", divisibility=8)
        return (
            *self.activations.arguments(),
            *self.ring.arguments(n),
            factors_argument(m),
            TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, scale, alpha, out, workspace, workers: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens)
        experts = alpha.shape[1]
        # As in ``Config.workspace_bytes``
        entries = Int64(tiles) * experts * c.capacity
        token_bytes = cute.assume(entries * (c.expert_chunks * self.token_bytes), divby=self.token_bytes)
        pair_bytes = cute.assume(entries * PAIR_BYTES, divby=PAIR_BYTES * TILE_TOKENS)
        pairs = workspace.iterator + token_bytes
        after = pairs + pair_bytes
        left = None
        if const_expr(c.classes > 1):
            sum_bytes = Int64(tiles) * workers * c.sum_bytes
            sums = cute.make_tensor(after, cute.make_layout((sum_bytes,)))
            after = after + cute.assume(sum_bytes, divby=ROWS * 4)
            flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * workers,)))
            left = sums, flags
            after = after + tiles * workers * 4
        lists = (
            cute.make_tensor(workspace.iterator, cute.make_layout((token_bytes,))),
            cute.make_tensor(pairs, cute.make_layout((pair_bytes,))),
            cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * experts,))),
        )
        self.list_kernel(a, a_scale, alpha, lists, left, out.shape[0]).launch(
            grid=[experts, tiles, 1], block=[c.list_threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        self.kernel(self.ring.maps(b, scale, experts), alpha, lists, left, out).launch(
            grid=[workers, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, alpha, lists, left, m):
        """The tokens of a tile that an expert is for, in their order, and their factors; and their activations, as
        products take them."""
        c = self.config
        tiles, pairs, counts = lists
        tid, _, _ = cute.arch.thread_idx()
        expert, tile, _ = cute.arch.block_idx()
        experts, _, _ = cute.arch.grid_dim()
        lane, warp = tid % WARP, tid // WARP
        warps = c.list_threads // WARP
        smem = SmemAllocator()
        found = cute.make_tensor(smem.allocate_array(Int32, warps), cute.make_layout(warps))
        members = cute.make_tensor(smem.allocate_array(Int32, c.capacity), cute.make_layout(c.capacity))
        # What comes next may read weights and factors already.
        pdl.start(c.pdl)
        if const_expr(c.classes > 1):
            flags = left[1]
            ctas = experts * cute.arch.grid_dim()[1]
            for i in range((tile * experts + expert) * c.list_threads + tid, flags.shape[0], ctas * c.list_threads):
                flags[i] = Int32(0)
        value = Float32(0.0)
        if (tid < c.tokens) & (tile * c.tokens + tid < m):
            value = alpha[tile * c.tokens + tid, expert]
        ballot = Uint32(cute.arch.vote_ballot_sync(factor_counts(value)))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        entry = self._entry(tile, expert, experts)
        if factor_counts(value):
            members[before] = tid
            self._store_pair(pairs, entry + before, self._token_offset(tid), value)
        # What is left of the last unit
        if (tid >= total) & (tid < cute.ceil_div(total, c.group) * c.group):
            self._store_pair(pairs, entry + tid, Int32(-1), Float32(0.0))
        if tid == 0:
            counts[tile * experts + expert] = total
        cute.arch.sync_threads()
        pieces = self.activations.pieces
        for i in range(tid, total * (c.expert_chunks * pieces), c.list_threads):
            piece, chunk = i % pieces, i // pieces % c.expert_chunks
            place = i // (pieces * c.expert_chunks)
            token, start = tile * c.tokens + members[place], chunk * c.chunk
            words = self.activations.read(a, a_scale, token, expert * c.width + start, c.width - start, piece)
            to = self._group_at(tiles, entry, chunk, place // TILE_TOKENS * TILE_TOKENS)
            self.activations.order(words, 1, piece, place % TILE_TOKENS, to)

    def _entry(self, tile, expert, experts):
        """Where the list of a tile's tokens that an expert is for begins, in tokens."""
        return (Int64(tile) * experts + expert) * self.config.capacity

    def _group_at(self, tiles, entry, chunk, place) -> cute.Pointer:
        """Where a chunk of the eight tokens from the list's ``place``-th on lies in the workspace: the next eight
        tokens' follows, so that a unit's are together."""
        c = self.config
        at = entry * c.expert_chunks + Int64(chunk) * c.capacity + place
        return tiles.iterator + cute.assume(at * self.token_bytes, divby=TILE_TOKENS * self.token_bytes)

    def _store_pair(self, pairs, at, offset, factor) -> None:
        """Write where a token's sums are, negative for none, and its factor."""
        to = cute.recast_ptr(pairs.iterator + cute.assume(at * PAIR_BYTES, divby=PAIR_BYTES), dtype=Uint32)
        store_words([Uint32(offset), ptx.bits_of(factor)], cute.make_tensor(to, cute.make_layout(2)))

    # Products

    @cute.kernel
    def kernel(self, weight, alpha, lists, left, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        worker, tile, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        tiles, pairs, counts = lists
        t = SimpleNamespace(
            m=out.shape[0],
            n=out.shape[1],
            worker=worker,
            workers=workers,
            tile=tile,
            first_token=tile * c.tokens,
            experts=alpha.shape[1],
            tiles=tiles,
            pairs=pairs,
            left=left,
            out=out,
        )
        self._share(t)
        s = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # The copies of the weight, and those of what the other kernel wrote
                cute.arch.mbarrier_init(s.full + i, 2)
                cute.arch.mbarrier_init(s.free + i, BANDS * c.parts)
            for i in range_constexpr(c.warps):
                cute.arch.mbarrier_init(s.turns + i, 1)
        cute.arch.mbarrier_init_fence()
        # Sums; and activations, of which units that are not full leave some as they are.
        cleared = self._by_four(s.sums, c.sum_bytes + c.stages * self._stage_tokens)
        for i in range(tid, cute.size(cleared, mode=[0]), c.threads):
            store_words([Uint32(0)] * 4, cleared[i, None])
        fence_async()
        if const_expr(c.pdl and not c.scans):
            cute.arch.griddepcontrol_wait()
        every = self._lists(s).counts
        for expert in range(tid, t.experts, c.threads):
            if const_expr(c.scans):
                every[expert] = self._count(alpha, expert, t)
            else:
                every[expert] = counts[tile * t.experts + expert]
        cute.arch.sync_threads()
        if warp == c.warps:
            self._find_units(tid % WARP, t, s)
        cute.arch.sync_threads()
        t.units = self._lists(s).total[0]
        t.first_units = self._lists(s).first[0]
        if warp >= c.warps:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.warps + c.slots:
                self._feed(warp - c.warps, self.ring.open(weight, s.codes, s.scales), t, s)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._multiply(warp, tid, t, s)

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        scales = base + c.stages * self.ring.code_bytes
        sums = scales + c.stages * self.ring.scale_bytes
        tokens = sums + c.sum_bytes
        pairs = tokens + c.stages * self._stage_tokens
        lists = cute.recast_ptr(pairs + c.stages * c.group * PAIR_BYTES, dtype=Int32)
        barriers = cute.recast_ptr(lists + 3 * (MAX_EXPERTS + 8), dtype=Int64)
        return SimpleNamespace(
            codes=base,
            scales=scales,
            sums=sums,
            tokens=tokens,
            pairs=pairs,
            lists=lists,
            full=barriers,
            free=barriers + c.stages,
            turns=barriers + 2 * c.stages,
        )

    def _lists(self, s) -> SimpleNamespace:
        """Of the touched experts, in order: which; where their units begin, and after the last one how many units there
        are; for how many tokens each is; and how many units there are in all, and of the first slice."""
        sizes = {"experts": MAX_EXPERTS, "begins": MAX_EXPERTS + 4, "counts": MAX_EXPERTS, "total": 1, "first": 1}
        tensors, start = {}, 0
        for name, size in sizes.items():
            tensors[name] = cute.make_tensor(s.lists + start, cute.make_layout(size))
            start += size
        return SimpleNamespace(**tensors)

    @property
    def _stage_tokens(self) -> int:
        """Activations of a stage, bytes."""
        return self.config.group * self.token_bytes

    def _share(self, t) -> None:
        """This worker's part: classes of experts of one slice, or of two. The second slice's come first, since another
        worker waits for them."""
        c = self.config
        if c.classes == 1:
            t.slices, t.begins, t.ends = (t.worker, t.worker), (Int32(0), Int32(1)), (Int32(1), Int32(1))
            return
        tasks = cute.ceil_div(t.n, ROWS) * c.classes
        begin, end = t.worker * tasks // t.workers, (t.worker + 1) * tasks // t.workers
        first, last = begin // c.classes, (end - 1) // c.classes
        at = last * c.classes
        t.slices = last, first
        t.begins = cutlass.max(begin - at, Int32(0)), ptx.select(first < last, begin - first * c.classes, Int32(0))
        t.ends = end - at, ptx.select(first < last, Int32(c.classes), Int32(0))

    # Units: the touched experts in order, each with its tokens, ``group`` at a time

    @cute.jit
    def _count(self, alpha, expert, t):
        """How many of the tile's tokens an expert is for."""
        values = cute.make_rmem_tensor((self.config.tokens,), Float32)
        for i in range_constexpr(self.config.tokens):
            values[i] = Float32(0.0)
            if t.first_token + i < t.m:
                values[i] = alpha[t.first_token + i, expert]
        count = Int32(0)
        for i in range_constexpr(self.config.tokens):
            count = count + Int32(factor_counts(values[i]))
        return count

    @cute.jit
    def _find_units(self, lane, t, s):
        """A warp makes of the numbers of tokens of every expert the lists of those that any is for, of this worker's
        classes: of its first slice, then of its second."""
        c = self.config
        each = MAX_EXPERTS // WARP
        first = lane * each
        lists = self._lists(s)
        counts = cute.make_rmem_tensor((each,), Int32)
        for i in range_constexpr(each):
            counts[i] = Int32(0)
            if first + i < t.experts:
                counts[i] = lists.counts[first + i]
        # All lanes have read what the lists replace.
        cute.arch.sync_warp()
        before_units, before_touched = Int32(0), Int32(0)
        for part in range_constexpr(2 if c.classes > 1 else 1):
            mine = cute.make_rmem_tensor((each,), Int32)
            units, touched = Int32(0), Int32(0)
            for i in range_constexpr(each):
                is_mine = Int32(1)
                if const_expr(c.classes > 1):
                    class_ = (first + i) % c.classes
                    is_mine = Int32((class_ >= t.begins[part]) & (class_ < t.ends[part]))
                mine[i] = is_mine * ((counts[i] + (c.group - 1)) // c.group)
                units = units + mine[i]
                touched = touched + Int32(mine[i] > 0)
            own_units, own_touched = units, touched
            units, touched = running_sum(units, lane), running_sum(touched, lane)
            begin, index = before_units + units - own_units, before_touched + touched - own_touched
            for i in range_constexpr(each):
                if mine[i] > 0:
                    lists.experts[index] = first + i
                    lists.begins[index] = begin
                    lists.counts[index] = counts[i]
                    index = index + 1
                begin = begin + mine[i]
            before_units = before_units + cute.arch.shuffle_sync(units, WARP - 1)
            before_touched = before_touched + cute.arch.shuffle_sync(touched, WARP - 1)
            if const_expr(part == 0):
                if lane == 0:
                    lists.first[0] = before_units
        if lane == 0:
            lists.begins[before_touched] = before_units
            lists.total[0] = before_units

    @cute.jit
    def _index_of(self, unit, index, s):
        """The touched expert of a unit, from that of a unit before it."""
        begins = self._lists(s).begins
        while begins[index + 1] <= unit:
            index += 1
        return index

    # Each slot has a ring of its own, and a warp that fills it: so all waits for a stage come in order.

    @cute.jit
    def _feed(self, slot, weight, t, s):
        """A warp that feeds a slot: the weight's chunks, and beside them what the other kernel wrote.

        The weight's first chunks do not wait for that kernel if this one has found the units itself. That is safe
        because the other waits for all kernels before it, and only then lets this one start.
        """
        c = self.config
        depth = c.stages // c.slots
        first = slot * depth
        loaded = Int32(0)
        if const_expr(c.pdl and c.scans):
            ahead, of = slot, Int32(0)
            while (ahead < t.units) & (loaded < depth):
                of = self._index_of(ahead, of, s)
                for i in range(cutlass.min(c.expert_chunks, depth - loaded)):
                    self._load_weight(of, ahead, i, first + loaded, weight, t, s)
                    loaded += 1
                ahead += c.slots
            cute.arch.griddepcontrol_wait()
        stage, parity = Int32(0), Int32(1)  # a ring that was never used counts as free
        done, index = Int32(0), Int32(0)
        for unit in range(slot, t.units, c.slots):
            index = self._index_of(unit, index, s)
            for chunk in range(c.expert_chunks):
                if done >= loaded:
                    ptx.wait(s.free + (first + stage), parity)
                    self._load_weight(index, unit, chunk, first + stage, weight, t, s)
                self._load_tokens(index, unit, chunk, first + stage, t, s)
                done += 1
                stage, parity = next_stage(stage, parity, depth)

    def _slice_of(self, unit, t):
        """The slice that a unit is of."""
        return t.slices[0] if self.config.classes == 1 else ptx.select(unit < t.first_units, *t.slices)

    def _load_weight(self, index, unit, chunk, stage, weight, t, s) -> None:
        """Start the copies of a chunk of the weight."""
        expert = self._lists(s).experts[index]
        blocks = self.config.width // self.config.fmt.block_size
        self.ring.load(self._slice_of(unit, t), chunk, expert, stage, s.full + stage, weight, t.n, Int32(blocks))

    @cute.jit
    def _load_tokens(self, index, unit, chunk, stage, t, s):
        """Start the copies of a chunk of a unit's activations, and of which tokens these are of."""
        c = self.config
        lists = self._lists(s)
        position = (unit - lists.begins[index]) * c.group
        entry = self._entry(t.tile, lists.experts[index], t.experts)
        tokens = cutlass.min(lists.counts[index] - position, Int32(c.group))
        source = self._group_at(t.tiles, entry, chunk, position)
        target = s.tokens + cute.assume(stage * self._stage_tokens, divby=TILE_TOKENS * self.token_bytes)
        pairs = c.group * PAIR_BYTES
        barrier = s.full + stage
        # A token's bytes are together for products of warps; for those of warpgroups, of eight tokens.
        whole = tokens if const_expr(c.by_warp) else tokens // TILE_TOKENS * TILE_TOKENS
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tokens * self.token_bytes + pairs)
            if whole > 0:
                ptx.copy_bulk(target, source, whole * self.token_bytes, barrier)
            if whole < tokens:
                after = cute.assume(whole * self.token_bytes, divby=TILE_TOKENS * self.token_bytes)
                for i in range_constexpr(TILE_TOKENS * self.token_bytes // TILE_BYTES):
                    at = after + i * TILE_BYTES
                    ptx.copy_bulk(target + at, source + at, (tokens - whole) * TILE_LINE, barrier)
            ptx.copy_bulk(
                s.pairs + cute.assume(stage * pairs, divby=16),
                t.pairs.iterator + cute.assume((entry + position) * PAIR_BYTES, divby=16),
                pairs,
                barrier,
            )

    @cute.jit
    def _multiply(self, warp, tid, t, s):
        """A warp that multiplies: 16 rows of every unit of a slot, and its part of their k."""
        c = self.config
        # A scheduler of the SM has the warps of a band, which are not at the same point of their units.
        place, band = warp // BANDS, warp % BANDS
        lane = tid % WARP
        w = SimpleNamespace(
            lane=lane,
            quad=lane % 4,
            row=band * 16 + lane // 4,  # and the eighth row after it
            leads=Uint32(lane == 0),
            place=place,
            slot=place // c.parts,
            part=place % c.parts,
            chain=s.turns + band * c.places,
        )
        state = Int32(0), Int32(0), Int32(place == 0)
        state = self._multiply_units(w.slot, t.first_units, t.slices[0], state, w, t, s)
        self._end_slice(0, tid, t, s)
        if const_expr(c.classes > 1):
            if t.ends[1] > 0:
                begin = w.slot + (t.first_units - w.slot + c.slots - 1) // c.slots * c.slots
                self._multiply_units(begin, t.units, t.slices[1], state, w, t, s)
                self._end_slice(1, tid, t, s)

    @cute.jit
    def _multiply_units(self, begin, end, slice_, state, w, t, s):
        """A slot's units of a slice. ``state``: its stage, the stage's parity, and that of the turn."""
        c = self.config
        depth = c.stages // c.slots
        first = w.slot * depth
        # Of two slices of a tile of 128 rows, as scales lie
        scale_row = w.row if c.layout.is_linear else w.row + slice_ % 2 * ROWS
        sums = cute.make_rmem_tensor((c.group // 2,), Float32)
        start = None
        if const_expr(not c.by_warp):
            # Of a group of eight tokens all elements, then those of the next
            start = warpgroup_products(self.dtype, c.group, c.chunk, c.stages, (1, 0, 2), s.tokens)
        stage, parity, turn = state
        for unit in range(begin, end, c.slots):
            if const_expr(c.by_warp):
                sums.fill(0.0)
            last = stage
            for chunk in range(c.expert_chunks):
                ptx.wait(s.full + (first + stage), parity)
                before = first + last
                if const_expr(c.parts == 1):
                    self._multiply_chunk(start, 0, chunk, first + stage, before, scale_row, sums, w, s)
                else:
                    for part in range_constexpr(c.parts):
                        if w.part == part:
                            self._multiply_chunk(start, part, chunk, first + stage, before, scale_row, sums, w, s)
                last = stage
                stage, parity = next_stage(stage, parity, depth)
                if const_expr(c.by_warp):
                    if chunk + 1 < c.expert_chunks:
                        self._free(first + last, w, s)
            if const_expr(not c.by_warp):
                warpgroup.wait_group(0)
            offsets, factors = self._pairs(first + last, w, s)
            self._free(first + last, w, s)
            # After the warp that has the same rows and comes before: of the unit before, or of the part of k before.
            if (unit > 0) | (w.part > 0):
                ptx.wait(w.chain + w.place, turn)
            turn ^= 1
            self._add(sums, offsets, factors, w, s)
            cute.arch.sync_warp()
            ptx.arrive_if(w.chain + (w.place + 1) % c.places, w.leads)
        return stage, parity, turn

    def _free(self, stage, w, s, exists=True) -> None:
        """Free a stage, if it exists."""
        # All lanes have read. (The products do not see to it: ptxas puts them behind the arrival.)
        fence_async()
        cute.arch.sync_warp()
        ptx.arrive_if(s.free + stage, ptx.select(exists, w.leads, Uint32(0)))

    def _multiply_chunk(self, start, part: int, chunk, stage, before, scale_row, sums, w, s) -> None:
        """Add a chunk's products, of a part of each lane's codes, to the sums.

        Those of a warpgroup take the place of the sums, if it is the first chunk; they may still run in the end, but
        those of the chunk before are done, and its stage ``before`` is freed.
        """
        c = self.config
        left = None
        if c.width % c.chunk:
            left = c.width // c.fmt.block_size - chunk * self.ring.blocks
        codes = [self.ring.codes(s.codes, stage, w.row + 8 * r, w.quad) for r in range(2)]
        scales = [self.ring.factors(s.scales, stage, scale_row + 8 * r, w.quad, left, self.dtype) for r in range(2)]
        count = self.ring.words // c.parts
        for i in range(count):
            word = part * count + i
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            if c.by_warp:
                at = s.tokens + cute.assume(stage * self._stage_tokens, divby=self.token_bytes)
                multiply_word(pairs, word, c.group, at, self.token_bytes, w.lane, sums, self.dtype)
                continue
            start(pairs, word, stage, chunk > 0 if i == 0 else True, sums)
            # The products of the word before are done, and its registers free.
            warpgroup.wait_group(1)
            if i == 0 and c.expert_chunks > 1:
                self._free(before, w, s, chunk > 0)

    # Sums

    def _token_offset(self, token):
        """Where a token's sums are, in bytes; but for which eight rows come first, so that tokens do not share banks:
        ``_sum_offset`` tells."""
        return token * (ROWS * 4) + token % TILE_TOKENS * 32

    def _sum_offset(self, token_offset, row):
        """Where a row's sum is, in bytes."""
        return token_offset ^ (row * 4)

    def _pairs(self, stage, w, s) -> tuple[list, list]:
        """Where the sums are of a lane's tokens of a unit, two of each eight, negative where there is none; and their
        factors."""
        c = self.config
        offsets, factors = [], []
        for group in range(c.group // TILE_TOKENS):
            at = stage * (c.group * PAIR_BYTES) + (group * TILE_TOKENS + w.quad * 2) * PAIR_BYTES
            words = cute.recast_ptr(s.pairs + cute.assume(at, divby=16), dtype=Uint32)
            loaded = load_words(cute.make_tensor(words, cute.make_layout(4)))
            offsets += [Int32(loaded[0]), Int32(loaded[2])]
            factors += [ptx.float_of(loaded[1]), ptx.float_of(loaded[3])]
        return offsets, factors

    @cute.jit
    def _add(self, sums, offsets, factors, w, s):
        """Multiply a unit's sums by the factors, and add them to those of the tile."""
        c = self.config
        scale = Float32(sum_scale(c.fmt, c.a_layout))
        places = [(i, r) for i in range(c.group // 4) for r in range(2)]
        at = [s.sums + self._sum_offset(offsets[i], w.row + 8 * r) for i, r in places]
        # All are loaded before the first is stored.
        totals = [ptx.float_of(ptx.load_shared_if(x, offsets[i] >= 0)) for x, (i, _) in zip(at, places, strict=True)]
        for x, total, (i, r) in zip(at, totals, places, strict=True):
            total = ptx.fma_rn(factors[i], ptx.mul_rn(sums[i // 2 * 4 + r * 2 + i % 2], scale), total)
            ptx.store_shared_if(x, ptx.bits_of(total), offsets[i] >= 0)

    # Results

    @cute.jit
    def _end_slice(self, part: int, tid, t, s):
        """Leave the sums of a slice for the worker that has its last class of experts, or add up what others have left,
        and store the result."""
        c = self.config
        threads = c.warps * WARP
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if const_expr(c.pdl):
            if (part == 1) | (t.ends[1] == 0) | (c.classes == 1):
                cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.classes == 1):
            self._write(t.slices[0], tid, t, s)
        else:
            if const_expr(c.pdl and c.scans):
                # The kernel that lists tokens clears the flags.
                cute.arch.griddepcontrol_wait()
            if t.ends[part] < c.classes:
                self._leave(tid, t, s)
            else:
                if t.begins[part] > 0:
                    self._collect(t.slices[part], tid, t, s)
                self._write(t.slices[part], tid, t, s)
            if const_expr(part == 0):
                # The second slice's sums take the place of these.
                cute.arch.barrier(barrier_id=1, number_of_threads=threads)

    def _left(self, worker, t) -> tuple[cute.Tensor, cute.Pointer]:
        """A worker's sums in memory, by four; and whether it has left them."""
        sums, flags = t.left
        slot = t.tile * t.workers + worker
        at = sums.iterator + cute.assume(Int64(slot) * self.config.sum_bytes, divby=ROWS * 4)
        return self._by_four(at, self.config.sum_bytes), flags.iterator + slot

    def _by_four(self, at: cute.Pointer, size: int) -> cute.Tensor:
        """So many bytes from there on, as words (n, 4)."""
        return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout((size // 16, 4), stride=(4, 1)))

    @cute.jit
    def _leave(self, tid, t, s):
        """Leave the sums for another worker, and begin anew."""
        c = self.config
        threads = c.warps * WARP
        here = self._by_four(s.sums, c.sum_bytes)
        there, flag = self._left(t.worker, t)
        for i in range(tid, cute.size(here, mode=[0]), threads):
            store_words(load_words(here[i, None]), there[i, None])
            store_words([Uint32(0)] * 4, here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
        if tid == 0:
            cute.arch.fence_acq_rel_gpu()
            ptx.store_release(flag, Uint32(1))

    @cute.jit
    def _collect(self, slice_, tid, t, s):
        """Add the sums that others have left of this slice, in the order of their classes; this worker's come last."""
        c = self.config
        here = self._by_four(s.sums, c.sum_bytes)
        # The worker that has the slice's first class: parts are rounded down.
        tasks = cute.ceil_div(t.n, ROWS) * c.classes
        first = ((slice_ * c.classes + 1) * t.workers - 1) // tasks
        for worker in range(first, t.worker):
            _, flag = self._left(worker, t)
            ready = ptx.load_acquire(flag)
            while ready == Uint32(0):
                ready = ptx.load_acquire(flag)
        for i in range(tid, cute.size(here, mode=[0]), c.warps * WARP):
            total = cute.make_rmem_tensor((4,), Float32)
            total.fill(0.0)
            for worker in range(first, t.worker):
                there, _ = self._left(worker, t)
                for e, word in enumerate(load_words(there[i, None])):
                    total[e] = total[e] + ptx.float_of(word)
            own = load_words(here[i, None])
            store_words([ptx.bits_of(total[e] + ptx.float_of(own[e])) for e in range(4)], here[i, None])
        cute.arch.barrier(barrier_id=1, number_of_threads=c.warps * WARP)

    @cute.jit
    def _write(self, slice_, tid, t, s):
        """Round the sums, and store them."""
        c = self.config
        for piece in range(tid, c.tokens * (ROWS // 4), c.warps * WARP):
            token, row = piece // (ROWS // 4), piece % (ROWS // 4) * 4
            m, n = t.first_token + token, slice_ * ROWS + row
            if (m < t.m) & (n < t.n):
                at = s.sums + cute.assume(self._sum_offset(self._token_offset(token), row), divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = t.out.iterator + cute.assume(Int64(m) * t.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
