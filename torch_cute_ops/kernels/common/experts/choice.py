"""Choose the experts of a token and compute their weights, by a warp.

Scores become keys: 32-bit integers in the same order. Each lane holds the keys of up to 16 consecutive experts, so that
a group of experts is a whole number of lanes. (Where the number of groups is not a power of two a lane has up to 30,
and keys are spilled to local memory, up to 2 KB for each thread.) ``topk`` times the warp picks the largest key, and
among equal ones the first, by two warp-wide reductions.
"""

import math

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, range_constexpr

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

NAN_KEY = 1
"""Key of NaN, below that of any number; 0 is for no expert, and for experts of groups that were not chosen."""
TINY = 1e-20
"""Added to a sum of sigmoids, which may be 0, before dividing by it; as in DeepSeek-V3's reference."""


class ExpertChooser:
    """The device code of one ``ExpertChoice``."""

    def __init__(self, choice: ExpertChoice):
        self.choice = choice

    @cute.jit
    def choose(self, token, logits, bias, factor, lane):
        """The ``lane``-th best expert of a token and its weight times ``factor``; expert 0 for lanes from ``topk`` on.

        All lanes of a warp come here with the same token.
        """
        c = self.choice
        experts, keys = [], []
        is_nan = Boolean(False)
        for i in range_constexpr(c.lane_experts):
            expert, exists = self._expert_of(lane, i)
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
            keys = self._of_best_groups(keys, lane)
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
                        # Zero for the keys of no expert.
                        total = total + _exp(_value_of(key) - largest)
            first = Int32(c.experts)
            for expert, key in zip(reversed(experts), reversed(keys), strict=True):
                first = ptx.select(key == best, expert, first)
            first = cute.arch.warp_redux_sync(first, "min")
            keys = [ptx.select(e == first, Uint32(0), key) for e, key in zip(experts, keys, strict=True)]
            own = ptx.select(lane == j, first, own)
        # Lane j has the j-th expert.
        value = Float32(logits[token, own])
        weight = _sigmoid(value) if c.is_sigmoid else _exp(value - largest)
        weight = ptx.select(lane < c.topk, weight, Float32(0.0))
        if const_expr(c.renormalize):
            total = weight
        if const_expr(c.renormalize or not c.is_sigmoid):
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
            weight = ptx.div_rn(weight, total + Float32(TINY) if c.is_sigmoid else total)
        if const_expr(not c.is_sigmoid):
            # As in any softmax, one NaN makes all weights NaN.
            weight = ptx.select(cute.arch.vote_any_sync(is_nan), Float32(math.nan), weight)
        return own, ptx.mul_rn(weight, factor)

    def _expert_of(self, lane, i: int):
        """The lane's i-th expert, and whether there is one."""
        c = self.choice
        group, in_group = lane // c.group_lanes, lane % c.group_lanes * c.lane_experts + i
        return group * c.group_size + in_group, (group < c.num_groups) & (in_group < c.group_size)

    def _of_best_groups(self, keys: list, lane) -> list:
        """The keys, 0 except in the groups with the largest sums of their two best scores."""
        c = self.choice
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
        group = lane // c.group_lanes
        own = _key_of(score)
        better = Int32(0)
        for other in range(c.num_groups):
            key = cute.arch.shuffle_sync(own, other * c.group_lanes)
            better = better + Int32((key > own) | ((key == own) & (group > other)))
        return [ptx.select(better < c.topk_groups, key, Uint32(0)) for key in keys]


def _key_of(value: Float32) -> Uint32:
    """An integer that is ordered like the number; both zeros have the same, and NaN has ``NAN_KEY``."""
    bits = ptx.bits_of(ptx.select(value == Float32(0.0), Float32(0.0), value))
    negative = bits >> 31 != Uint32(0)
    key = ptx.select(negative, ~bits, bits | Uint32(0x80000000))
    return ptx.select(value != value, Uint32(NAN_KEY), key)


def _value_of(key: Uint32) -> Float32:
    """The number of a key; minus infinity for NaN, and for no expert."""
    bits = ptx.select(key >> 31 != Uint32(0), key & Uint32(0x7FFFFFFF), ~key)
    return ptx.select(key > Uint32(NAN_KEY), ptx.float_of(bits), Float32(-math.inf))


def _larger(a: Uint32, b: Uint32) -> Uint32:
    # ``cutlass.max`` may compare them as signed (DSL 4.8.1).
    return ptx.select(a > b, a, b)


def _smaller(a: Uint32, b: Uint32) -> Uint32:
    return ptx.select(a > b, b, a)


def _exp(value: Float32) -> Float32:
    """``exp(value)``, accurate to some ulps, or for large values to about |value| ulps."""
    return ptx.ex2_approx(ptx.mul_rn(value, Float32(math.log2(math.e))))


def _sigmoid(value: Float32) -> Float32:
    """``1 / (1 + exp(-value))``."""
    return ptx.div_rn(Float32(1.0), _exp(-value) + Float32(1.0))
