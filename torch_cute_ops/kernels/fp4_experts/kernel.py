"""The device code; the package's docstring tells the roles and the data path."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.activation_tiles.config import CHUNK, TILE_TOKENS
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.activations import EIGHTHS, GROUP_BYTES, Activations
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, load_words, pack, store_words
from torch_cute_ops.kernels.common.fp4_weights import sum_scale
from torch_cute_ops.kernels.common.proxy import fence_async
from torch_cute_ops.kernels.common.warp_products import multiply_word
from torch_cute_ops.kernels.common.weight_ring import WORDS, WeightRing
from torch_cute_ops.kernels.fp4_experts.config import MAX_EXPERTS, ROWS, SLOTS, TILES, WARPS, Config
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg

WARP = 32
LIST_THREADS = max(TILES)  # one for each token


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
            ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(self, a, a_scale, b, scale, alpha, out, workspace, experts: Int32, stream):
        c = self.config
        tiles = cute.ceil_div(out.shape[0], c.tokens)
        # As in ``Config.workspace_bytes``
        entries = Int64(tiles) * experts * c.tokens
        tokens = cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), cute.make_layout((entries,)))
        after = workspace.iterator + cute.assume(4 * entries, divby=16)
        factors = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), cute.make_layout((entries,)))
        after = after + cute.assume(4 * entries, divby=16)
        counts = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((tiles * experts,)))
        lists = (counts, tokens, factors)
        self.list_kernel(alpha, lists, out.shape[0]).launch(
            grid=[experts, tiles, 1], block=[LIST_THREADS, 1, 1], stream=stream, use_pdl=c.pdl
        )
        slices = cute.ceil_div(out.shape[1], ROWS)
        self.kernel(a, a_scale, self.ring.maps(b, scale, experts), lists, experts, out).launch(
            grid=[slices, tiles, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
        )

    # Lists

    @cute.kernel
    def list_kernel(self, alpha, lists, m):
        """The tokens of a tile that an expert is for, in their order, and their factors."""
        c = self.config
        counts, tokens, factors = lists
        tid, _, _ = cute.arch.thread_idx()
        expert, tile, _ = cute.arch.block_idx()
        experts, _, _ = cute.arch.grid_dim()
        lane, warp = tid % WARP, tid // WARP
        warps = LIST_THREADS // WARP
        found = cute.make_tensor(SmemAllocator().allocate_array(Int32, warps), cute.make_layout(warps))
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        value = Float32(0.0)
        if (tid < c.tokens) & (tile * c.tokens + tid < m):
            value = alpha[tile * c.tokens + tid, expert]
        # NaN is not zero.
        counted = (ptx.bits_of(value) & Uint32(0x7FFFFFFF)) != Uint32(0)
        ballot = Uint32(cute.arch.vote_ballot_sync(counted))
        if lane == 0:
            found[warp] = Int32(cute.arch.popc(ballot))
        cute.arch.sync_threads()
        before = Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - 1)))
        total = Int32(0)
        for i in range_constexpr(warps):
            before = before + ptx.select(warp > i, found[i], Int32(0))
            total = total + found[i]
        if counted:
            at = (Int64(tile) * experts + expert) * c.tokens + before
            tokens[at] = tid
            factors[at] = value
        if tid == 0:
            counts[tile * experts + expert] = total

    # Products

    @cute.kernel
    def kernel(self, a, a_scale, weight, lists, experts, out):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        slice_, tile, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        counts, tokens, factors = lists
        width = self.activations.width(a) // experts
        t = SimpleNamespace(
            m=out.shape[0],
            n=out.shape[1],
            slice=slice_,
            tile=tile,
            first_token=tile * c.tokens,
            experts=experts,
            width=width,
            chunks=cute.ceil_div(width, CHUNK),
            blocks=width // c.fmt.block_size,
            counts=counts,
            tokens=tokens,
            factors=factors,
            a=a,
            a_scale=a_scale,
            out=out,
        )
        s = self._allocate()
        if tid == 0:
            for i in range_constexpr(c.stages):
                # The copies of the weight, and the activations
                cute.arch.mbarrier_init(s.full + i, 2)
                cute.arch.mbarrier_init(s.free + i, WARPS // SLOTS)
            for i in range_constexpr(WARPS):
                cute.arch.mbarrier_init(s.turns + i, 1)
        cute.arch.mbarrier_init_fence()
        sums = cute.make_tensor(
            cute.recast_ptr(s.sums, dtype=Uint32), cute.make_layout((c.tokens * ROWS // 4, 4), stride=(4, 1))
        )
        for i in range(tid, c.tokens * ROWS // 4, c.threads):
            store_words([Uint32(0)] * 4, sums[i, None])
        if const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
        if warp == WARPS:
            self._find_units(tid % WARP, t, s)
        cute.arch.sync_threads()
        t.units = self._lists(s).total[0]
        if warp >= WARPS:
            cute.arch.setmaxregister_increase(c.registers[1])
            self._feed(warp - WARPS, tid % WARP, self.ring.open(weight, s.codes, s.scales), t, s)
        else:
            cute.arch.setmaxregister_decrease(c.registers[0])
            self._multiply(warp, tid % WARP, t, s)
            cute.arch.barrier(barrier_id=1, number_of_threads=WARPS * WARP)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_launch_dependents()
            self._write(tid, t, s)

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        tokens = base + c.stages * self.ring.code_bytes
        scales = tokens + c.stages * self._token_bytes
        members = scales + c.stages * self.ring.scale_bytes
        sums = members + c.stages * c.group * 8
        lists = cute.recast_ptr(sums + c.sum_bytes, dtype=Int32)
        barriers = cute.recast_ptr(lists + 3 * (MAX_EXPERTS + 8), dtype=Int64)
        return SimpleNamespace(
            codes=base,
            tokens=tokens,
            scales=scales,
            members=members,
            sums=sums,
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
        return self.config.group // TILE_TOKENS * GROUP_BYTES

    # Units: the touched experts in order, each with its tokens, ``group`` at a time

    @cute.jit
    def _find_units(self, lane, t, s):
        """A warp lists the experts that any token of the tile is for, and where their units begin."""
        c = self.config
        each = MAX_EXPERTS // WARP
        first = lane * each
        units, touched = Int32(0), Int32(0)
        counts = cute.make_rmem_tensor((each,), Int32)
        mine = cute.make_rmem_tensor((each,), Int32)
        for i in range_constexpr(each):
            counts[i] = Int32(0)
            if first + i < t.experts:
                counts[i] = t.counts[t.tile * t.experts + first + i]
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
        lists = self._lists(s)
        experts, begins, tokens, total = lists.experts, lists.begins, lists.counts, lists.total
        for i in range_constexpr(each):
            if mine[i] > 0:
                experts[index] = first + i
                begins[index] = begin
                tokens[index] = counts[i]
                index = index + 1
            begin = begin + mine[i]
        if lane == WARP - 1:
            begins[touched] = units
            total[0] = units

    @cute.jit
    def _index_of(self, unit, index, s):
        """The touched expert of a unit, from that of a unit before it."""
        begins = self._lists(s).begins
        while begins[index + 1] <= unit:
            index += 1
        return index

    # Each slot has a ring of its own, and a warp that fills it: so all waits for a stage come in order.

    def _place(self, slot, use) -> tuple:
        """The stage of a slot's use, and whether it is the ring's odd time around."""
        depth = self.config.stages // SLOTS
        return slot * depth + use % depth, use // depth % 2

    @cute.jit
    def _feed(self, slot, lane, weight, t, s):
        """A warp that feeds a slot: the weight's chunks, and beside them its unit's activations, put in order.

        What it reads from memory is under way while it works on the use before: tokens two uses ahead, activations one.
        """
        c = self.config
        groups = c.group // TILE_TOKENS
        parts = groups // self._together
        uses = cutlass.max(t.units - slot + SLOTS - 1, Int32(0)) // SLOTS * t.chunks
        if uses > 0:
            # Of this use, the next, and the one after
            members = [cute.make_rmem_tensor((groups,), Int32) for _ in range(3)]
            factors = [cute.make_rmem_tensor((groups,), Float32) for _ in range(3)]
            held = cute.make_rmem_tensor((self._together * self._words,), Uint32)
            first = self._index_of(slot, Int32(0), s)
            now = self._read_members(members[0], factors[0], slot, first, lane, t, s)
            unit, chunk = self._place_of(cutlass.min(Int32(1), uses - 1), slot, t)
            index = self._index_of(unit, first, s)
            then = self._read_members(members[1], factors[1], unit, index, lane, t, s)
            if const_expr(parts == 1):
                self._keep(held, self._read(members[0], 0, now, Int32(0), lane, t))
            for use in range(uses):
                stage, odd = self._place(slot, use)
                _, chunk = self._place_of(use, slot, t)
                if const_expr(parts == 1):
                    read = self._kept(held)
                    _, next_chunk = self._place_of(cutlass.min(use + 1, uses - 1), slot, t)
                    self._keep(held, self._read(members[1], 0, then, next_chunk, lane, t))
                unit, _ = self._place_of(cutlass.min(use + 2, uses - 1), slot, t)
                index = self._index_of(unit, index, s)
                after = self._read_members(members[2], factors[2], unit, index, lane, t, s)
                cute.arch.mbarrier_wait(s.free + stage, odd ^ 1)
                self.ring.load(t.slice, chunk, now, stage, s.full + stage, weight, t.n, t.blocks)
                if const_expr(parts == 1):
                    self._order(read, 0, stage, lane, s)
                else:
                    # There are registers for no more.
                    for part in range_constexpr(0, groups, self._together):
                        self._order(self._read(members[0], part, now, chunk, lane, t), part, stage, lane, s)
                self._write_members(members[0], factors[0], stage, lane, s)
                cute.arch.sync_warp()
                ptx.arrive_if(s.full + stage, Uint32(lane == 0))
                now, then = then, after
                for i in range_constexpr(2):
                    for group in range_constexpr(groups):
                        members[i][group] = members[i + 1][group]
                        factors[i][group] = factors[i + 1][group]

    def _place_of(self, use, slot, t) -> tuple:
        """Unit and chunk of a slot's use."""
        turn = use // t.chunks
        return slot + turn * SLOTS, use - turn * t.chunks

    def _read_members(self, members, factors, unit, index, lane, t, s):
        """The tokens of a unit and their factors, one of each eight for this lane; its expert.

        Beyond the last token it is the last again, as a negative number: what comes of it counts for nothing.
        """
        lists = self._lists(s)
        expert = lists.experts[index]
        begin = (Int64(t.tile) * t.experts + expert) * self.config.tokens
        first = (unit - lists.begins[index]) * self.config.group
        for group in range(self.config.group // TILE_TOKENS):
            position = first + group * TILE_TOKENS + lane % TILE_TOKENS
            at = begin + cutlass.min(position, lists.counts[index] - 1)
            token = t.tokens[at]
            members[group] = ptx.select(position < lists.counts[index], token, -1 - token)
            factors[group] = t.factors[at]
        return expert

    @cute.jit
    def _write_members(self, members, factors, stage, lane, s) -> None:
        """Tell those that multiply which tokens a stage has, and their factors."""
        size = self.config.group
        at = cute.recast_ptr(s.members + cute.assume(stage * (size * 8), divby=64), dtype=Int32)
        tokens = cute.make_tensor(at, cute.make_layout(size))
        numbers = cute.make_tensor(cute.recast_ptr(at + size, dtype=Float32), cute.make_layout(size))
        # Four lanes have the same.
        if lane < TILE_TOKENS:
            for group in range_constexpr(size // TILE_TOKENS):
                tokens[group * TILE_TOKENS + lane] = members[group]
                numbers[group * TILE_TOKENS + lane] = factors[group]

    @property
    def _together(self) -> int:
        """Groups of eight tokens that a warp reads before it writes them."""
        return min(self.config.group // TILE_TOKENS, 1 if self.config.a_layout is None else 2)

    @property
    def _words(self) -> int:
        """That a lane reads of a chunk for each group of tokens."""
        return (4 * 4 if self.config.a_layout is None else 4 * 2) * (EIGHTHS * TILE_TOKENS // WARP)

    def _read(self, members, part: int, expert, chunk, lane, t) -> list:
        """What ``_order`` writes, of some groups of tokens from ``part`` on."""
        after = range(0, EIGHTHS, WARP // TILE_TOKENS)
        start, left = expert * t.width + chunk * CHUNK, t.width - chunk * CHUNK
        place = (start, left, lane // TILE_TOKENS)
        read = []
        for group in range(part, part + self._together):
            token = t.first_token + ptx.select(members[group] < 0, -1 - members[group], members[group])
            read.append([self.activations.read(t.a, t.a_scale, token, *place, i) for i in after])
        return read

    def _keep(self, held, read: list) -> None:
        """What was read, into registers that live from use to use."""
        words = [word for eighths in read for quarters in eighths for quarter in quarters for word in quarter]
        for i, word in enumerate(words):
            held[i] = word

    def _kept(self, held) -> list:
        """What was kept, as it was read."""
        words = iter([held[i] for i in range(cute.size(held))])
        size, per = self._words, EIGHTHS * TILE_TOKENS // WARP
        each = size // per // 4
        groups = cute.size(held) // size
        return [[[[next(words) for _ in range(each)] for _ in range(4)] for _ in range(per)] for _ in range(groups)]

    def _order(self, read: list, part: int, stage, lane, s) -> None:
        """Write groups of tokens of a chunk, from group ``part`` on."""
        base = s.tokens + cute.assume(stage * self._token_bytes, divby=GROUP_BYTES)
        for i, eighths in enumerate(read):
            place = (part + i) * TILE_TOKENS + lane % TILE_TOKENS
            for j, quarters in enumerate(eighths):
                eighth = lane // TILE_TOKENS + j * (WARP // TILE_TOKENS)
                self.activations.order(quarters, self.config.group // TILE_TOKENS, eighth, place, base)

    @cute.jit
    def _multiply(self, warp, lane, t, s):
        """A warp that multiplies: 16 rows of every fourth unit."""
        c = self.config
        groups = c.group // TILE_TOKENS
        slot = warp % SLOTS
        w = SimpleNamespace(
            lane=lane,
            quad=lane % 4,
            rows=warp // SLOTS * 16,
            row=warp // SLOTS * 16 + lane // 4,  # and the eighth row after it
            leads=Uint32(lane == 0),
        )
        # Of two tiles of a slice's rows, where scales lie in tiles of 128
        scale_row = w.row if c.layout.is_linear else w.row + t.slice % 2 * ROWS
        sums = cute.make_rmem_tensor((4 * groups,), Float32)
        members = cute.make_rmem_tensor((2 * groups,), Int32)
        factors = cute.make_rmem_tensor((2 * groups,), Float32)
        for unit in range(slot, t.units, SLOTS):
            sums.fill(0.0)
            whole = unit // SLOTS
            for chunk in range(t.chunks):
                stage, odd = self._place(slot, whole * t.chunks + chunk)
                cute.arch.mbarrier_wait(s.full + stage, odd)
                at = cute.recast_ptr(s.members + cute.assume(stage * (c.group * 8), divby=64), dtype=Int32)
                tokens = cute.make_tensor(at, cute.make_layout(c.group))
                numbers = cute.make_tensor(cute.recast_ptr(at + c.group, dtype=Float32), cute.make_layout(c.group))
                for i in range_constexpr(2 * groups):
                    # Lane ``quad`` has two tokens of each eight.
                    members[i] = tokens[i // 2 * TILE_TOKENS + w.quad * 2 + i % 2]
                    factors[i] = numbers[i // 2 * TILE_TOKENS + w.quad * 2 + i % 2]
                self._multiply_chunk(chunk, stage, scale_row, sums, w, t, s)
                # All lanes have read. (The products do not see to it: ptxas puts them behind the arrival.)
                fence_async()
                cute.arch.sync_warp()
                ptx.arrive_if(s.free + stage, w.leads)
            # After the unit before, whose warp has the same rows
            chain = s.turns + warp // SLOTS * SLOTS
            if unit > 0:
                cute.arch.mbarrier_wait(chain + slot, (whole - Int32(slot == 0)) % 2)
            self._add(sums, members, factors, w, s)
            cute.arch.sync_warp()
            ptx.arrive_if(chain + (slot + 1) % SLOTS, w.leads)

    def _multiply_chunk(self, chunk, stage, scale_row, sums, w, t, s) -> None:
        """Add a chunk's products to the sums."""
        c = self.config
        left = t.blocks - chunk * self.ring.blocks
        codes = [self.ring.codes(s.codes, stage, w.row + 8 * r, w.quad) for r in range(2)]
        scales = [self.ring.factors(s.scales, stage, scale_row + 8 * r, w.quad, left, self.dtype) for r in range(2)]
        at = s.tokens + cute.assume(stage * self._token_bytes, divby=GROUP_BYTES)
        for word in range(WORDS):
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            multiply_word(pairs, word, c.group, at, w.lane, sums, self.dtype)

    def _sum_place(self, token, row):
        """Where a token's sum of a row lies: eight rows at a time, swapped, so that tokens do not share banks."""
        return token * ROWS + (row ^ (token % TILE_TOKENS * 8))

    @cute.jit
    def _add(self, sums, members, factors, w, s):
        """Multiply a unit's sums by the factors, and add them to those of the tile."""
        c = self.config
        totals = cute.make_tensor(cute.recast_ptr(s.sums, dtype=Float32), cute.make_layout(c.tokens * ROWS))
        scale = Float32(sum_scale(c.fmt, c.a_layout))
        for i in range_constexpr(c.group // 4):
            if members[i] >= 0:
                for r in range_constexpr(2):
                    at = self._sum_place(members[i], w.row + 8 * r)
                    value = ptx.mul_rn(sums[i // 2 * 4 + r * 2 + i % 2], scale)
                    totals[at] = totals[at] + ptx.mul_rn(factors[i], value)

    @cute.jit
    def _write(self, tid, t, s):
        """Round the sums, and store them."""
        c = self.config
        for piece in range(tid, c.tokens * (ROWS // 4), WARPS * WARP):
            token, row = piece // (ROWS // 4), piece % (ROWS // 4) * 4
            m, n = t.first_token + token, t.slice * ROWS + row
            if (m < t.m) & (n < t.n):
                at = s.sums + cute.assume(self._sum_place(token, row) * 4, divby=16)
                words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
                packed = pack([ptx.float_of(word) for word in words], self.out_dtype)
                to = t.out.iterator + cute.assume(Int64(m) * t.n + n, divby=4)
                store_words(packed, cute.make_tensor(cute.recast_ptr(to, dtype=Uint32), cute.make_layout(len(packed))))
