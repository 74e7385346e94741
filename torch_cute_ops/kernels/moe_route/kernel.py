"""The device code; the package's docstring tells the roles and the data path."""

import itertools
import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common import pdl, ptx
from torch_cute_ops.kernels.common.convert import DSL_DTYPES
from torch_cute_ops.kernels.common.scan import running_sum_of_cta
from torch_cute_ops.kernels.moe_route.config import ALONE, ALONE_ROWS, BITS, CHUNK, ROWS, RUN, THREADS, WARP, Config
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg

NAN_KEY = 1
"""Behind every number; 0 is no expert, or one of a group that is left out."""
TINY = 1e-20
"""What is added to a sum of sigmoids, that it may divide, as DeepSeek-V3's reference does."""


class MoeRouteKernel:
    """The kernels of one ``Config``.

    Methods pass on what a thread knows: ``t``, places and tensors in global memory; ``s``, tensors in shared memory.
    """

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[Argument, ...]:
        c = self.config
        tokens = Dim("tokens")

        def pairs(dtype: str) -> TensorArg:
            return TensorArg(dtype, (tokens, c.topk), (c.topk, 1), align=4)

        def integers(count: Dim | int) -> TensorArg:
            return TensorArg("Int32", (count,), (1,), align=4)

        return (
            TensorArg(self.dtype.__name__, (tokens, c.experts), (Dim("row_stride", bits=64), 1), c.dtype.itemsize),
            TensorArg("Float32", (c.experts,), (1,), align=4) if c.has_bias else None,
            pairs("Float32"),
            pairs("Int32"),
            pairs("Int32"),
            integers(Dim("rows")),
            integers(c.experts + 1),
            integers(c.experts),
            integers(Dim("workspace_words")),
            ScalarArg("Float32"),
            ScalarArg("Int32"),
            ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self,
        logits,
        bias,
        weights,
        ids,
        expanded,
        permuted,
        offsets,
        counts,
        workspace,
        factor: Float32,
        unit: Int32,
        sms: Int32,
        stream,
    ):
        c = self.config
        tokens = logits.shape[0]
        # As in ``Config.workspace_words``
        wanted = cutlass.max(cute.ceil_div(tokens, RUN), cute.ceil_div(permuted.shape[0], ROWS))
        ctas = cutlass.max(cutlass.min(sms, wanted), 1)
        rows = (permuted, offsets, counts)
        if (tokens <= ALONE) & (permuted.shape[0] <= ALONE_ROWS):
            self.kernel(logits, bias, weights, ids, expanded, rows, factor, unit).launch(
                grid=[1, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
            )
        else:
            self.choose_kernel(logits, bias, weights, ids, expanded, workspace, factor).launch(
                grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
            )
            self.place_kernel(ids, expanded, rows, workspace, unit).launch(
                grid=[ctas, 1, 1], block=[c.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=c.pdl
            )

    @cute.kernel
    def kernel(self, logits, bias, weights, ids, expanded, rows, factor: Float32, unit: Int32):
        """All of it, by one CTA, for one chunk of tokens."""
        t, s = self._begin(ids.shape[0]), self._allocate()
        self._clear(t, s)
        self._choose_chunk(t.first, logits, bias, weights, ids, factor, t, s)
        expert, rank = self._rank(t.first, t, s)
        self._divide(self._count(t, s), rows, unit, t, s)
        if t.tid < (t.last - t.first) * self.config.topk:
            self._put(t.tid, expert, rank, expanded, rows, unit, s)
        self._fill(rows, t, s)

    @cute.kernel
    def choose_kernel(self, logits, bias, weights, ids, expanded, workspace, factor: Float32):
        """The experts of a run of tokens, each pair's rank in the run, and each expert's count."""
        c = self.config
        t, s = self._begin(ids.shape[0]), self._allocate()
        ranks = self._flat(expanded)
        self._clear(t, s)
        for chunk in range(t.first, t.last, CHUNK):
            self._choose_chunk(chunk, logits, bias, weights, ids, factor, t, s)
            _, rank = self._rank(chunk, t, s)
            if t.tid < cutlass.min(t.last - chunk, CHUNK) * c.topk:
                ranks[chunk * c.topk + t.tid] = rank
            cute.arch.sync_threads()
            self._add_chunk(t, s)
        if t.tid < c.experts:
            workspace[t.cta * c.experts + t.tid] = s.before[t.tid]

    @cute.kernel
    def place_kernel(self, ids, expanded, rows, workspace, unit: Int32):
        """The row of each pair of a run of tokens."""
        c = self.config
        t, s = self._begin(ids.shape[0]), self._allocate()
        expert, part = t.tid % (THREADS // c.parts), t.tid // (THREADS // c.parts)
        before, total = Int32(0), Int32(0)
        if expert < c.experts:
            for run in range(part, t.ctas, c.parts, unroll=8):
                count = workspace[run * c.experts + expert]
                total = total + count
                before = before + ptx.select(run < t.cta, count, Int32(0))
        total = self._sum_parts(before, total, t, s)
        self._divide(total, rows, unit, t, s)
        chosen, ranks = self._flat(ids), self._flat(expanded)
        for pair in range(t.first * c.topk + t.tid, t.last * c.topk, THREADS):
            self._put(pair, chosen[pair], ranks[pair], expanded, rows, unit, s)
        self._fill(rows, t, s)

    # What the kernels share

    @cute.jit
    def _begin(self, tokens):
        """Where the thread is, and its CTA's run of tokens; what came before is complete."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        run = cute.ceil_div(tokens, ctas)
        pdl.start(self.config.pdl)
        first = cutlass.min(cta * run, tokens)
        return SimpleNamespace(
            tid=tid,
            lane=tid % WARP,
            warp=cute.arch.make_warp_uniform(tid // WARP),
            cta=cta,
            ctas=ctas,
            first=first,
            last=cutlass.min(first + run, tokens),
        )

    def _allocate(self) -> SimpleNamespace:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 128)
        at = c.smem_offsets._asdict()
        tensors = {}
        for name, after in itertools.pairwise(at):
            dtype = Uint32 if name == "bits" else Int32
            words = cute.recast_ptr(base + 4 * at[name], dtype=dtype)
            tensors[name] = cute.make_tensor(words, cute.make_layout(at[after] - at[name]))
        return SimpleNamespace(**tensors)

    def _flat(self, pairs: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(pairs.iterator, cute.make_layout((pairs.shape[0] * self.config.topk,)))

    @cute.jit
    def _clear(self, t, s):
        """No token chose anything yet."""
        before, bits = s.before, s.bits
        if t.tid < self.config.experts:
            before[t.tid] = Int32(0)
            for i in range_constexpr(BITS):
                bits[t.tid * BITS + i] = Uint32(0)
        cute.arch.sync_threads()

    # The choice

    @cute.jit
    def _choose_chunk(self, chunk, logits, bias, weights, ids, factor, t, s):
        """The experts of a chunk's tokens; a barrier follows."""
        for token in range(chunk + t.warp, cutlass.min(chunk + CHUNK, t.last), THREADS // WARP):
            self._choose(token, token - chunk, logits, bias, weights, ids, factor, t, s)
        cute.arch.sync_threads()

    @cute.jit
    def _choose(self, token, number, logits, bias, weights, ids, factor, t, s):
        """A warp chooses the experts of a token, which has this number in its chunk."""
        c = self.config
        experts, keys = [], []
        is_nan = Boolean(False)
        for i in range_constexpr(c.lane_experts):
            expert, exists = self._expert_of(t.lane, i)
            value = Float32(logits[token, ptx.select(exists, expert, Int32(0))])
            score = value
            if const_expr(c.is_sigmoid):
                score = _sigmoid(value)
            if const_expr(c.has_bias):
                score = score + bias[ptx.select(exists, expert, Int32(0))]
            keys.append(ptx.select(exists, _key_of(score), Uint32(0)))
            experts.append(expert)
            is_nan = is_nan | (exists & (value != value))
        if const_expr(c.num_groups > 1):
            keys = self._of_best_groups(keys, t)
        largest = Float32(0.0)
        total = Float32(0.0)
        own = Int32(0)
        for j in range_constexpr(c.topk):
            best = keys[0]
            for key in keys[1:]:
                best = _larger(best, key)
            best = cute.arch.warp_redux_sync(best, "max")
            if const_expr(j == 0 and not c.is_sigmoid):
                largest = _value_of(best)
                if const_expr(not c.renormalize):
                    for key in keys:
                        # Of no expert it is zero.
                        total = total + _exp(_value_of(key) - largest)
            first = Int32(c.experts)
            for expert, key in zip(reversed(experts), reversed(keys), strict=True):
                first = ptx.select(key == best, expert, first)
            first = cute.arch.warp_redux_sync(first, "min")
            keys = [ptx.select(e == first, Uint32(0), key) for e, key in zip(experts, keys, strict=True)]
            own = ptx.select(t.lane == j, first, own)
        # Lane j has the j-th expert.
        value = Float32(logits[token, own])
        weight = _sigmoid(value) if c.is_sigmoid else _exp(value - largest)
        weight = ptx.select(t.lane < c.topk, weight, Float32(0.0))
        if const_expr(c.renormalize):
            total = weight
        if const_expr(c.renormalize or not c.is_sigmoid):
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
            weight = ptx.div_rn(weight, total + Float32(TINY) if c.is_sigmoid else total)
        if const_expr(not c.is_sigmoid):
            # As a softmax, all are NaN if one is.
            weight = ptx.select(cute.arch.vote_any_sync(is_nan), Float32(math.nan), weight)
        chosen = s.chosen
        if t.lane < c.topk:
            ids[token, t.lane] = own
            weights[token, t.lane] = ptx.mul_rn(weight, factor)
            chosen[number * c.topk + t.lane] = own
            cute.arch.atomic_or(
                s.bits.iterator + (own * BITS + number // 32), Uint32(1) << Uint32(number % 32), scope="cta"
            )

    def _expert_of(self, lane, i: int):
        """The lane's i-th expert, and whether there is one."""
        c = self.config
        group, in_group = lane // c.group_lanes, lane % c.group_lanes * c.lane_experts + i
        return group * c.group_size + in_group, (group < c.num_groups) & (in_group < c.group_size)

    def _of_best_groups(self, keys: list, t) -> list:
        """Keys of the groups whose two best scores have the largest sums; 0 for the experts of the others."""
        c = self.config
        best, second = keys[0], Uint32(0)
        for key in keys[1:]:
            second = _larger(second, _smaller(best, key))
            best = _larger(best, key)
        step = 1
        while step < c.group_lanes:
            others = [cute.arch.shuffle_sync_bfly(key, step) for key in (best, second)]
            second = _larger(_smaller(best, others[0]), _larger(second, others[1]))
            best = _larger(best, others[0])
            step *= 2
        score = _value_of(best)
        if c.group_size > 1:
            score = score + _value_of(second)
        group = t.lane // c.group_lanes
        own = _key_of(score)
        better = Int32(0)
        for other in range(c.num_groups):
            key = cute.arch.shuffle_sync(own, other * c.group_lanes)
            better = better + Int32((key > own) | ((key == own) & (group > other)))
        return [ptx.select(better < c.topk_groups, key, Uint32(0)) for key in keys]

    # Places

    @cute.jit
    def _rank(self, chunk, t, s):
        """The expert of the thread's pair of a chunk, and how many tokens of the run before it chose that too."""
        c = self.config
        expert, rank = Int32(0), Int32(0)
        if t.tid < cutlass.min(t.last - chunk, CHUNK) * c.topk:
            expert = s.chosen[t.tid]
            rank = s.before[expert]
            token = t.tid // c.topk
            for i in range_constexpr(BITS):
                # Of the words before the token's all bits, of its own those below.
                below = cutlass.min(cutlass.max(token - 32 * i, 0), 32)
                mask = ptx.select(below < 32, (Uint32(1) << Uint32(below % 32)) - 1, Uint32(0xFFFFFFFF))
                rank = rank + Int32(cute.arch.popc(s.bits[expert * BITS + i] & mask))
        return expert, rank

    @cute.jit
    def _count(self, t, s):
        """How many tokens of the chunk chose the thread's expert."""
        count = Int32(0)
        if t.tid < self.config.experts:
            for i in range_constexpr(BITS):
                count = count + Int32(cute.arch.popc(s.bits[t.tid * BITS + i]))
        return count

    @cute.jit
    def _add_chunk(self, t, s):
        """The chunk is one of those before, and the next one's bits are clear."""
        count = self._count(t, s)
        before, bits = s.before, s.bits
        if t.tid < self.config.experts:
            before[t.tid] = before[t.tid] + count
            for i in range_constexpr(BITS):
                bits[t.tid * BITS + i] = Uint32(0)
        cute.arch.sync_threads()

    @cute.jit
    def _sum_parts(self, before, total, t, s):
        """Add up the parts of each expert's counts: how many chose it before the run stays in shared memory."""
        c = self.config
        sums, befores = s.sums, s.before
        sums[t.tid] = before
        sums[THREADS + t.tid] = total
        cute.arch.sync_threads()
        total = Int32(0)
        if t.tid < c.experts:
            before = Int32(0)
            for i in range_constexpr(c.parts):
                before = before + sums[t.tid + i * (THREADS // c.parts)]
                total = total + sums[THREADS + t.tid + i * (THREADS // c.parts)]
            befores[t.tid] = before
        return total

    @cute.jit
    def _divide(self, total, rows, unit, t, s):
        """Divide the buffer among the experts: thread e has the pairs of expert e, ``total``."""
        c = self.config
        _, offsets, counts = rows
        size, space = total, unit
        if const_expr(c.is_masked):
            size = cutlass.min(total, unit)
        else:
            space = cute.ceil_div(total, unit) * unit
        space = ptx.select(t.tid < c.experts, space, Int32(0))
        end = running_sum_of_cta(space, s.warps, t.tid, -(-c.experts // WARP))
        begins, sizes = s.begins, s.sizes
        if t.tid < c.experts:
            begins[t.tid] = end - space
            sizes[t.tid] = size
            if t.tid == c.experts - 1:
                begins[c.experts] = end
            if t.cta == 0:
                offsets[t.tid] = end - space
                counts[t.tid] = size
                if t.tid == c.experts - 1:
                    offsets[c.experts] = end
        cute.arch.sync_threads()

    @cute.jit
    def _put(self, pair, expert, rank, expanded, rows, unit, s):
        """Give a pair its row, if there is room."""
        permuted, _, _ = rows
        rank = rank + s.before[expert]
        row = s.begins[expert] + rank
        if const_expr(self.config.is_masked):
            row = ptx.select(rank < unit, row, Int32(-1))
        places = self._flat(expanded)
        places[pair] = row
        if row >= 0:
            permuted[row] = pair

    @cute.jit
    def _fill(self, rows, t, s):
        """Write -1 for rows without a pair: behind each expert's, shared out over all warps; and behind them all."""
        c = self.config
        permuted, _, _ = rows
        warps = THREADS // WARP
        for expert in range(t.cta * warps + t.warp, c.experts, t.ctas * warps):
            for row in range(s.begins[expert] + s.sizes[expert] + t.lane, s.begins[expert + 1], WARP):
                permuted[row] = Int32(-1)
        for row in range(s.begins[c.experts] + t.cta * THREADS + t.tid, permuted.shape[0], t.ctas * THREADS):
            permuted[row] = Int32(-1)


def _key_of(value: Float32) -> Uint32:
    """An integer in the order of numbers, zeros of both signs alike; ``NAN_KEY`` for NaN."""
    # One zero: a sum with it has no sign.
    bits = ptx.bits_of(ptx.select(value == Float32(0.0), Float32(0.0), value))
    negative = bits >> 31 != Uint32(0)
    key = ptx.select(negative, ~bits, bits | Uint32(0x80000000))
    return ptx.select(value != value, Uint32(NAN_KEY), key)


def _value_of(key: Uint32) -> Float32:
    """The number of a key; the least one for NaN, and for no expert."""
    bits = ptx.select(key >> 31 != Uint32(0), key & Uint32(0x7FFFFFFF), ~key)
    return ptx.select(key > Uint32(NAN_KEY), ptx.float_of(bits), Float32(-math.inf))


def _larger(a: Uint32, b: Uint32) -> Uint32:
    # ``cutlass.max`` may compare them as signed (DSL 4.8.1).
    return ptx.select(a > b, a, b)


def _smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx.select(a > b, b, a)


def _exp(value: Float32) -> Float32:
    """``exp(value)``, to some ulps, or about |value| of them."""
    return ptx.ex2_approx(ptx.mul_rn(value, Float32(math.log2(math.e))))


def _sigmoid(value: Float32) -> Float32:
    """``1 / (1 + exp(-value))``."""
    return ptx.div_rn(Float32(1.0), _exp(-value) + Float32(1.0))
