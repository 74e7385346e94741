"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.activation_tiles.config import CHUNK, TILE_TOKENS, TOKEN_BYTES
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.activations import EIGHTHS, Activations
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.warp_products import multiply_word
from torch_cute_ops.kernels.common.weight_ring import WORDS, WeightRing, next_stage
from torch_cute_ops.kernels.fp4_experts.config import (
    BANDS,
    MAX_EXPERTS,
    PAIR_BYTES,
    ROWS,
    Config,
)
from torch_cute_ops.runtime.argspec import Argument, Dim, TensorArg

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

    def arguments(self) -> tuple[Argument, ...]:
        m, n, experts = Dim("m"), Dim("n", divisibility=8), Dim("experts")
        strides = (Dim("alpha_stride", bits=64), Dim("alpha_column_stride", bits=64))
        return (
            *self.activations.arguments(),
            *self.ring.arguments(n),
            TensorArg("Float32", (m, experts), strides, align=4),
            TensorArg(self.out_dtype.__name__, (m, n), (n, 1), align=16),
            TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, scale, alpha, out, workspace, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens)
        experts = alpha.shape[1]
        # As in ``Config.workspace_bytes``
        entries = Int64(tiles) * experts * c.capacity
        token_bytes = cute.assume(entries * (c.expert_chunks * TOKEN_BYTES), divby=TOKEN_BYTES)
        pair_bytes = cute.assume(entries * PAIR_BYTES, divby=PAIR_BYTES * TILE_TOKENS)
        pairs = workspace.iterator + token_bytes
        counts = cute.recast_ptr(pairs + pair_bytes, dtype=Int32)
        lists = (
            cute.make_tensor(workspace.iterator, cute.make_layout((token_bytes,))),
            cute.make_tensor(pairs, cute.make_layout((pair_bytes,))),
            cute.make_tensor(counts, cute.make_layout((tiles * experts,))),
        )
        self.list_kernel(a, a_scale, alpha, lists, out.shape[0]).launch(
            grid=[experts, tiles, 1], block=[c.list_threads, 1, 1], stream=stream, use_pdl=c.pdl
        )
        slices = cute.ceil_div(out.shape[1], ROWS)
        self.kernel(self.ring.maps(b, scale, experts), alpha, lists, out).launch(
            grid=[slices, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, a, a_scale, alpha, lists, m):
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
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            # What comes next may read weights and factors already: all that was before this kernel has been written.
            cute.arch.griddepcontrol_launch_dependents()
        value = Float32(0.0)
        if (tid < c.tokens) & (tile * c.tokens + tid < m):
            value = alpha[tile * c.tokens + tid, expert]
        ballot = Uint32(cute.arch.vote_ballot_sync(self._counts(value)))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        entry = (Int64(tile) * experts + expert) * c.capacity
        if self._counts(value):
            members[before] = tid
            self._store_pair(pairs, entry + before, self._token_offset(tid), value)
        # What is left of the last unit
        if (tid >= total) & (tid < cute.ceil_div(total, c.group) * c.group):
            self._store_pair(pairs, entry + tid, Int32(-1), Float32(0.0))
        if tid == 0:
            counts[tile * experts + expert] = total
        cute.arch.sync_threads()
        for piece in range(tid, total * (c.expert_chunks * EIGHTHS), c.list_threads):
            eighth, chunk = piece % EIGHTHS, piece // EIGHTHS % c.expert_chunks
            place = piece // (EIGHTHS * c.expert_chunks)
            token, start = tile * c.tokens + members[place], chunk * CHUNK
            words = self.activations.read(a, a_scale, token, expert * c.width + start, c.width - start, eighth)
            base = (entry * c.expert_chunks + Int64(chunk) * c.capacity) * TOKEN_BYTES
            to = tiles.iterator + cute.assume(base, divby=TILE_TOKENS * TOKEN_BYTES)
            self.activations.order(words, 1, eighth, place, to)

    def _counts(self, factor):
        """Whether a factor lets its product count: NaN is not zero."""
        return (ptx.bits_of(factor) & Uint32(0x7FFFFFFF)) != Uint32(0)

    def _store_pair(self, pairs, at, offset, factor) -> None:
        """Write where a token's sums are, negative for none, and its factor."""
        to = cute.recast_ptr(pairs.iterator + cute.assume(at * PAIR_BYTES, divby=PAIR_BYTES), dtype=Uint32)
        store_words([Uint32(offset), ptx.bits_of(factor)], cute.make_tensor(to, cute.make_layout(2)))

    # Products

    @cute.kernel
    def kernel(self, weight, alpha, lists, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        slice_, tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        tiles, pairs, counts = lists
        t = SimpleNamespace(
            m=out.shape[0],
            n=out.shape[1],
            slice=slice_,
            tile=tile,
            first_token=tile * c.tokens,
            experts=alpha.shape[1],
            tiles=tiles,
            pairs=pairs,
            out=out,
        )
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
        zeros = cute.make_layout(((c.sum_bytes + c.stages * self._token_bytes) // 16, 4), stride=(4, 1))
        cleared = cute.make_tensor(cute.recast_ptr(s.sums, dtype=Uint32), zeros)
        for i in range(tid, cute.size(zeros, mode=[0]), c.threads):
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
        if warp >= c.warps:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp < c.warps + c.slots:
                self._feed(warp - c.warps, self.ring.open(weight, s.codes, s.scales), t, s)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self._multiply(warp, tid % WARP, t, s)
            cute.arch.barrier(barrier_id=1, number_of_threads=c.warps * WARP)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_launch_dependents()
            self._write(tid, t, s)

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        scales = base + c.stages * self.ring.code_bytes
        sums = scales + c.stages * self.ring.scale_bytes
        tokens = sums + c.sum_bytes
        pairs = tokens + c.stages * self._token_bytes
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
        are; and for how many tokens each is."""
        sizes = {"experts": MAX_EXPERTS, "begins": MAX_EXPERTS + 4, "counts": MAX_EXPERTS, "total": 1}
        tensors, start = {}, 0
        for name, size in sizes.items():
            tensors[name] = cute.make_tensor(s.lists + start, cute.make_layout(size))
            start += size
        return SimpleNamespace(**tensors)

    @property
    def _token_bytes(self) -> int:
        """Activations of a stage."""
        return self.config.group * TOKEN_BYTES

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
            count = count + Int32(self._counts(values[i]))
        return count

    @cute.jit
    def _find_units(self, lane, t, s):
        """A warp makes of the numbers of tokens of every expert the lists of those that any is for."""
        c = self.config
        each = MAX_EXPERTS // WARP
        first = lane * each
        units, touched = Int32(0), Int32(0)
        lists = self._lists(s)
        counts = cute.make_rmem_tensor((each,), Int32)
        mine = cute.make_rmem_tensor((each,), Int32)
        for i in range_constexpr(each):
            counts[i] = Int32(0)
            if first + i < t.experts:
                counts[i] = lists.counts[first + i]
        for i in range_constexpr(each):
            mine[i] = (counts[i] + (c.group - 1)) // c.group
            units = units + mine[i]
            touched = touched + Int32(mine[i] > 0)
        own_units, own_touched = units, touched
        for i in range_constexpr(5):
            above_units = cute.arch.shuffle_sync_up(units, 1 << i, mask_and_clamp=0)
            above_touched = cute.arch.shuffle_sync_up(touched, 1 << i, mask_and_clamp=0)
            units = units + ptx.select(lane >= (1 << i), above_units, Int32(0))
            touched = touched + ptx.select(lane >= (1 << i), above_touched, Int32(0))
        begin, index = units - own_units, touched - own_touched
        # All lanes have read what the lists replace.
        cute.arch.sync_warp()
        for i in range_constexpr(each):
            if mine[i] > 0:
                lists.experts[index] = first + i
                lists.begins[index] = begin
                lists.counts[index] = counts[i]
                index = index + 1
            begin = begin + mine[i]
        if lane == WARP - 1:
            lists.begins[touched] = units
            lists.total[0] = units

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
                    self._load_weight(of, i, first + loaded, weight, t, s)
                    loaded += 1
                ahead += c.slots
            cute.arch.griddepcontrol_wait()
        stage, parity = Int32(0), Int32(1)  # a ring that was never used counts as free
        done, index = Int32(0), Int32(0)
        for unit in range(slot, t.units, c.slots):
            index = self._index_of(unit, index, s)
            for chunk in range(c.expert_chunks):
                if done >= loaded:
                    cute.arch.mbarrier_wait(s.free + (first + stage), parity)
                    self._load_weight(index, chunk, first + stage, weight, t, s)
                self._load_tokens(index, unit, chunk, first + stage, t, s)
                done += 1
                stage, parity = next_stage(stage, parity, depth)

    def _load_weight(self, index, chunk, stage, weight, t, s) -> None:
        """Start the copies of a chunk of the weight."""
        expert = self._lists(s).experts[index]
        blocks = self.config.width // self.config.fmt.block_size
        self.ring.load(t.slice, chunk, expert, stage, s.full + stage, weight, t.n, Int32(blocks))

    @cute.jit
    def _load_tokens(self, index, unit, chunk, stage, t, s):
        """Start the copies of a chunk of a unit's activations, and of which tokens these are of."""
        c = self.config
        lists = self._lists(s)
        position = (unit - lists.begins[index]) * c.group
        entry = (Int64(t.tile) * t.experts + lists.experts[index]) * c.capacity
        size = cutlass.min(lists.counts[index] - position, Int32(c.group)) * TOKEN_BYTES
        source = (entry * c.expert_chunks + Int64(chunk) * c.capacity + position) * TOKEN_BYTES
        pairs = c.group * PAIR_BYTES
        barrier = s.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size + pairs)
            ptx.copy_bulk(
                s.tokens + cute.assume(stage * self._token_bytes, divby=TOKEN_BYTES),
                t.tiles.iterator + cute.assume(source, divby=TOKEN_BYTES),
                size,
                barrier,
            )
            ptx.copy_bulk(
                s.pairs + cute.assume(stage * pairs, divby=16),
                t.pairs.iterator + cute.assume((entry + position) * PAIR_BYTES, divby=16),
                pairs,
                barrier,
            )

    @cute.jit
    def _multiply(self, warp, lane, t, s):
        """A warp that multiplies: 16 rows of every unit of a slot, and its part of their k."""
        c = self.config
        # A scheduler of the SM has the warps of a band, which are not at the same point of their units.
        place, band = warp // BANDS, warp % BANDS
        slot, part = place // c.parts, place % c.parts
        depth = c.stages // c.slots
        first = slot * depth
        w = SimpleNamespace(
            lane=lane,
            quad=lane % 4,
            row=band * 16 + lane // 4,  # and the eighth row after it
            leads=Uint32(lane == 0),
        )
        # Of two tiles of a slice's rows, where scales lie in tiles of 128
        w.scale_row = w.row if c.layout.is_linear else w.row + t.slice % 2 * ROWS
        chain = s.turns + band * c.places
        sums = cute.make_rmem_tensor((c.group // 2,), Float32)
        stage, parity, turn = Int32(0), Int32(0), Int32(place == 0)
        for unit in range(slot, t.units, c.slots):
            sums.fill(0.0)
            last = stage
            for chunk in range(c.expert_chunks):
                cute.arch.mbarrier_wait(s.full + (first + stage), parity)
                if const_expr(c.parts == 1):
                    self._multiply_chunk(range(WORDS), chunk, first + stage, sums, w, t, s)
                else:
                    for half in range_constexpr(c.parts):
                        if part == half:
                            words = range(half * WORDS // c.parts, (half + 1) * WORDS // c.parts)
                            self._multiply_chunk(words, chunk, first + stage, sums, w, t, s)
                last = stage
                stage, parity = next_stage(stage, parity, depth)
                if chunk + 1 < c.expert_chunks:
                    self._free(first + last, w, s)
            offsets, factors = self._pairs(first + last, w, s)
            self._free(first + last, w, s)
            # After the warp that has the same rows and comes before: of the unit before, or of the part of k before.
            if (unit > 0) | (part > 0):
                cute.arch.mbarrier_wait(chain + place, turn)
            turn ^= 1
            self._add(sums, offsets, factors, w, s)
            cute.arch.sync_warp()
            ptx.arrive_if(chain + (place + 1) % c.places, w.leads)

    def _free(self, stage, w, s) -> None:
        """Free a stage."""
        # All lanes have read. (The products do not see to it: ptxas puts them behind the arrival.)
        fence_async()
        cute.arch.sync_warp()
        ptx.arrive_if(s.free + stage, w.leads)

    def _multiply_chunk(self, words, chunk, stage, sums, w, t, s) -> None:
        """Add a chunk's products, of some words of each lane's codes, to the sums."""
        c = self.config
        left = None
        if c.width % CHUNK:
            left = c.width // c.fmt.block_size - chunk * self.ring.blocks
        codes = [self.ring.codes(s.codes, stage, w.row + 8 * r, w.quad) for r in range(2)]
        scales = [self.ring.factors(s.scales, stage, w.scale_row + 8 * r, w.quad, left, self.dtype) for r in range(2)]
        at = s.tokens + cute.assume(stage * self._token_bytes, divby=TOKEN_BYTES)
        for word in words:
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            multiply_word(pairs, word, c.group, at, w.lane, sums, self.dtype)

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
            product = ptx.mul_rn(factors[i], ptx.mul_rn(sums[i // 2 * 4 + r * 2 + i % 2], scale))
            ptx.store_shared_if(x, ptx.bits_of(total + product), offsets[i] >= 0)

    @cute.jit
    def _write(self, tid, t, s):
        """Round the sums, and store them."""
        c = self.config
        for piece in range(tid, c.tokens * (ROWS // 4), c.warps * WARP):
            token, row = piece // (ROWS // 4), piece % (ROWS // 4) * 4
            m, n = t.first_token + token, t.slice * ROWS + row
            if (m < t.m) & (n < t.n):
                at = s.sums + cute.assume(self._sum_offset(self._token_offset(token), row), divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = t.out.iterator + cute.assume(Int64(m) * t.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
