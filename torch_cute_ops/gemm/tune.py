"""Tuning of GEMMs: the candidates, random operands, and how results are checked and timed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from torch_cute_ops.formats import FP8_BLOCK128, SCALE_LAYOUTS, FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends.reference import round_activations, unrounded_activations
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.fp8_tiles import has_random_rows
from torch_cute_ops.gemm.operands import GatedOperands, Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.gemm.select import candidates, key_of, reasons
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.reference.mm_fp8_block import factors_of_columns
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight
from torch_cute_ops.reference.moe_fc1_fp4 import quantize_experts, written_parts
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.runtime import timing, tuner, tuning
from torch_cute_ops.runtime.tuner import Candidate, Problem

SETTINGS = timing.Settings(max_sets=1024, graph_ms=1.0, max_rounds=15)
EPS = 2.0**-24
"""Relative error of a rounding in fp32."""
GATE_EPS = 2.0**-17
"""The same of SwiGLU, whose exponential is in fp32."""
CHUNK = 2**24
"""Elements of an operand that are decoded at a time to check results: 0.4 GB."""
SCALE_BYTES = {"e4m3": (0x18, 0x31), "ue8m0": (123, 127)}
"""Range of the random FP4 scales, 1/16 to 1/2: sums stay far from the largest float16."""

EXACT_SCALES = {"e4m3": (0x38, 8), "ue8m0": (127, 1)}
"""The scale byte that stands for 1, and by how much that for 2 is more."""

Tensor = torch.Tensor
Given = tuple[Any, tuple[Tensor | None, ...]]
"""``Operands`` or ``GatedOperands``, and the results, as launches take them."""


def tune(op: str, problem: GemmProblem, m: int, target: Target) -> None:
    """Have the tuner settle the choice for ``m`` rows on ``target``, if it is on."""
    key = key_of(problem, m, target)
    if key is not None and tuning.is_on():
        bench = bench_of(problem, bucket(m), target)
        try:
            tuner.tune(Problem(op, key, estimates(problem, bucket(m), target), bench.check, bench.time))
        finally:
            bench.free()


def estimates(problem: GemmProblem, m: int, target: Target) -> dict[Candidate, float]:
    """Every candidate with its estimated seconds; infinite for a backend that is taken by name only."""
    return {
        Candidate(name, tactic): math.inf if backend.by_name_only else backend.estimate(problem, m, tactic, target)
        for name, backend in candidates(problem).items()
        if reasons(problem, target)[name] is None
        for tactic in backend.tactics(problem, m, target)
    }


def bench_of(problem: GemmProblem, m: int, target: Target) -> "Bench":
    """The bench for problems of this kind."""
    return (Bench if problem.gate is None else GatedBench)(problem, m, target)


class Bench:
    """Candidates for ``m`` rows, side by side on random operands, which are made when first needed.

    Args:
        problem: what is computed.
        m: rows; in the masked layout, of an expert.
        target: where.
    """

    def __init__(self, problem: GemmProblem, m: int, target: Target) -> None:
        self.problem = problem
        self.m = m
        self.target = target
        self._launchers: dict[Candidate, Launch] = {}

    def check(self, candidate: Candidate) -> str | None:
        """What is wrong with the candidate's result; ``None``: it is within the error bound."""
        _, (out,) = self._exact
        assert out is not None
        out.fill_(math.nan)  # which is what an element is that was not written
        with torch.no_grad(), _on(self.target.device):
            self._run(candidate, self._exact)
            return difference(out.reshape(-1, self.problem.n), *self._expected)

    def time(self, candidates: Sequence[Candidate]) -> Mapping[Candidate, float]:
        """Seconds of a call: the median over replays with a cold L2."""
        device, problem = self.target.device, self.problem
        least = min(estimates(problem, self.m, self.target)[candidate] for candidate in candidates)
        with torch.no_grad(), _on(device):
            operands, results = self._random
            how = timing.plan(
                sum(each.nbytes for each in (*operands, *results) if isinstance(each, Tensor)),
                len(candidates),
                torch.cuda.get_device_properties(device).L2_cache_size,
                SETTINGS,
                call_ms=1e3 * least if math.isfinite(least) else None,
            )
            sets = [self._random, *((_copy(operands), _copy(results)) for _ in range(how.n_sets - 1))]
            variants = {candidate: partial(self._run_set, candidate, sets) for candidate in candidates}
            timings = timing.measure(variants, how.n_sets, how.calls, how.rounds, timing.CudaGraphs())
        return {candidate: timing.us * 1e-6 for candidate, timing in timings.items()}

    def free(self) -> None:
        """Return the memory to the GPU, since a server may plan with what is free."""
        names = ("_random", "_exact", "_expected")
        used = any(name in self.__dict__ for name in names)
        for name in names:
            self.__dict__.pop(name, None)
        if used and self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, candidate: Candidate, given: Given) -> None:
        launch = self._launchers.get(candidate)
        if launch is None:
            backend = candidates(self.problem)[candidate.backend]
            launch = self._launchers[candidate] = backend.launcher(self.problem, candidate.tactic, self.target)
        operands, results = given
        launch(operands, results[0] if self.problem.gate is None else results)

    def _run_set(self, candidate: Candidate, sets: Sequence[Given], i: int) -> None:
        self._run(candidate, sets[i])

    @cached_property
    def _random(self) -> Given:
        """Random operands, and results. Packed rows belong to random experts."""
        return self._made(exact=False)

    @cached_property
    def _exact(self) -> Given:
        """Operands whose results are known: random ones for sums in fp32, whole numbers for FP8's tensor cores, which
        add up a block of k with some 14 bits."""
        return self._made(exact=True) if self.problem.a.is_fp8 else self._random

    def _made(self, *, exact: bool) -> Given:
        problem, device = self.problem, self.target.device
        # Not the user's generator: tuning changes no number that a program draws.
        generator = torch.Generator(device).manual_seed(0)
        over, layout = problem.grouping.over, problem.grouping.rows
        experts = problem.experts if over == "rows" else 1
        lead = (problem.experts, self.m) if layout.is_masked else (self.m,)
        a, a_scale = _operand(problem.a, lead, problem.a_width, generator, exact)
        if problem.prologue_quant == "scaled":
            a_scale = torch.full((1,), 3.0, dtype=torch.float32, device=device)
        weights = (experts, problem.n) if over == "rows" else (problem.n,)
        # Beside FP8, sums of an FP4 weight are exact only if its scales are powers of two, the same in each row.
        b, b_scale = _weight(problem.b, weights, problem.k, generator, exact and problem.a.is_fp8)
        offsets = counts = None
        if over == "rows":
            ends = torch.arange(experts + 1, dtype=torch.int64, device=device) * self.m // experts
            if has_random_rows(problem) and not exact:
                # Tiles that fit equally many rows of each expert are too small for many experts.
                drawn = torch.randint(experts, (self.m,), device=device, generator=generator)
                ends[1:] = torch.bincount(drawn, minlength=experts).cumsum(0)
            offsets = ends.to(torch.int32) if layout.has_offsets else None
            room = torch.full((experts,), self.m, device=device) if layout.is_masked else ends.diff()
            counts = room.to(torch.int32) if layout.has_counts else None
        out = torch.empty(*lead, problem.n, dtype=problem.out_dtype, device=device)
        b = b if over == "rows" else b.t()
        operands = Operands(a, b, a_scale, b_scale, *self._epilogue(generator, exact), offsets, counts)
        return operands, (out,)

    def _routed(self, generator: torch.Generator) -> Tensor:
        """Factors (M, E), routing as servers see it: ``topk`` experts for each token, all as likely, whose weights sum
        to 1."""
        shape = self.m, self.problem.experts
        scores = torch.rand(shape, dtype=torch.float32, device=generator.device, generator=generator)
        best = scores.topk(self.problem.topk, dim=1)
        return torch.zeros_like(scores).scatter_(1, best.indices, best.values.softmax(1))

    def _epilogue(self, generator: torch.Generator, exact: bool) -> tuple[Tensor | None, Tensor | None]:
        """``alpha``, or experts' factors; and the bias."""
        problem, device = self.problem, generator.device
        epilogue, experts, n = problem.epilogue, problem.experts, problem.n
        shapes = {"one": (1,), "column": (n,), "expert": (experts,), "expert_column": (experts, n)}
        alpha = bias = None
        if problem.grouping.over == "k":
            alpha = self._routed(generator)
        elif epilogue.alpha is not None:
            value = 0.5 if exact else 0.7
            alpha = torch.full(shapes[epilogue.alpha], value, dtype=torch.float32, device=device)
        if epilogue.bias_dtype is not None:
            shape = (experts, n) if problem.grouping.over != "none" else (n,)
            bias = torch.randint(-8, 9, shape, device=device, generator=generator).to(epilogue.bias_dtype)
        return alpha, bias

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor]:
        """The result (rows, N) in fp32, and how far from it another may be: the rounding errors of a sum of K terms, or
        with experts over K those of an expert's sum, of its bias, its multiplication by the factor and each addition;
        those of a gate in front and of the epilogue; and that of the result's dtype."""
        problem, (operands, (out,)) = self.problem, self._exact
        assert out is not None
        a, b, a_scale, b_scale, alpha, bias, *_ = operands
        n, k, over = problem.n, problem.k, problem.grouping.over
        rows = out.reshape(-1, n).shape[0]
        info = torch.finfo(problem.out_dtype)
        left_operand, off = problem.a, None
        if isinstance(problem.a.format, torch.dtype) and isinstance(problem.b.format, FP4Format):
            if problem.has_prologue:
                left_operand = problem.without_prologue.a
                value, global_scale = unrounded_activations(problem, a), a_scale
                a, a_scale = round_activations(problem, value, global_scale)
                off = _off_by_gate(problem, value, global_scale, a, a_scale) if problem.prologue_gate else None
            a = a if left_operand.is_fp4 else a.to(problem.b.format.operand_dtype(problem.a.format))
        want, allowed = (torch.empty((rows, n), dtype=torch.float32, device=out.device) for _ in range(2))
        factors = _linear_scales(problem, b_scale)
        roundings = k if over != "k" else problem.expert_k + 1 + problem.topk
        if problem.a.is_fp8:
            roundings = 0
        weight = b if over == "rows" else b.t()[None]
        for expert, of_expert in enumerate(self._rows_of_experts(rows)):
            for part in _chunks(of_expert, k):
                left = _decoded(left_operand, a.reshape(rows, -1), a_scale, part, rows, k)
                if over == "k" and alpha is not None:
                    left = left * alpha[part].double().repeat_interleave(problem.expert_k, 1)
                for columns in _chunks(slice(0, n), k):
                    right = _decoded_weight(problem, weight, factors, expert, columns).t()
                    total = left @ right
                    lost = (left.abs() @ right.abs()) * (roundings * EPS)
                    if off is not None:
                        lost = lost + off[part] @ right.abs()
                    if over != "k" and alpha is not None:
                        factor = _of_columns(alpha, expert, columns, n, over == "rows").double()
                        total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
                    if bias is not None and over == "k":
                        assert alpha is not None
                        own, added = alpha[part].double(), bias[:, columns].double()
                        total = total + own @ added
                        lost = lost + (own.abs() @ added.abs()) * ((problem.topk + 2) * EPS)
                    elif bias is not None:
                        added = _of_columns(bias, expert, columns, n, over == "rows").double()
                        total = total + added
                        lost = lost + (total.abs() + added.abs()) * EPS
                    want[part, columns] = total.float()
                    allowed[part, columns] = (lost + total.abs() * info.eps + info.smallest_normal).float()
        return want, allowed

    def _rows_of_experts(self, rows: int) -> list[slice]:
        if self.problem.grouping.over != "rows":
            return [slice(0, rows)]
        experts = self.problem.experts
        return [slice(e * rows // experts, (e + 1) * rows // experts) for e in range(experts)]


class GatedBench(Bench):
    """The same for a GEMM with experts over N and a gate, whose results are checked where they are routed."""

    def check(self, candidate: Candidate) -> str | None:
        """What is wrong with the candidate's results where they are routed; ``None``: they are as they must be."""
        operands, (y, scale) = self._random
        assert y is not None
        for result in (y, scale):
            if result is not None:
                result.view(torch.uint8).fill_(0xFF)  # NaN, or codes that no sum is likely to have
        with torch.no_grad(), _on(self.target.device):
            self._run(candidate, self._random)
            value, lost = self._expected
            if scale is None:
                info = torch.finfo(y.dtype)
                allowed = lost + value.abs() * info.eps + info.smallest_normal
                routed = (operands.routing != 0).repeat_interleave(self.problem.expert_n, 1)
                return difference(torch.where(routed, y, 0), value, allowed)
            fmt, quantised = self.problem.b.format, self.problem.quantised
            assert isinstance(fmt, FP4Format) and quantised is not None and quantised.scale_layout is not None
            want = quantize_experts(value, self.problem.experts, operands.global_scale, fmt, quantised.scale_layout)
            masks = written_parts((y, scale), operands.routing, fmt, quantised.scale_layout)
            return block_difference((y, scale), want, masks, fmt)

    def _made(self, *, exact: bool) -> Given:
        problem, device = self.problem, self.target.device
        generator = torch.Generator(device).manual_seed(0)
        experts, epilogue, quantised = problem.experts, problem.epilogue, problem.quantised
        rows = problem.weight_rows // experts
        a, a_scale = _operand(problem.a, (self.m,), problem.k, generator, exact)
        b, b_scale = _weight(problem.b, (experts, rows), problem.k, generator, exact)

        def filled(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float32, device=device)

        alpha = bias = global_scale = None
        if epilogue.alpha is not None:
            # Gates are a few units large, as in models.
            alpha = filled(2 * problem.k**-0.5, *((experts,) if epilogue.alpha == "expert" else (experts, 2)))
        if epilogue.bias_dtype is not None:
            drawn = torch.randint(-2, 3, (experts, rows), device=device, generator=generator)
            bias = drawn.to(epilogue.bias_dtype)
        if problem.global_scale is not None:
            global_scale = filled(8.0, 1 if problem.global_scale == "one" else experts)
        gate = (1.702, 1.0, 7.0) if problem.gate == "swiglu" else (None, None, None)
        routing = self._routed(generator)
        operands = GatedOperands(a, b, a_scale, b_scale, alpha, bias, routing, global_scale, *gate)
        if quantised is None:
            return operands, (torch.empty(self.m, problem.n, dtype=epilogue.out_dtype, device=device), None)
        assert isinstance(quantised.format, FP4Format) and quantised.scale_layout is not None
        codes, scales = fp4_shapes((self.m, problem.n), quantised.format, quantised.scale_layout)
        scale = torch.empty(scales, dtype=torch.uint8, device=device).view(quantised.format.scale_dtype)
        return operands, (torch.empty(codes, dtype=torch.uint8, device=device), scale)

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor]:
        """Gated columns (M, E·I) in fp32, zeros where they are not routed, and how far another result may be from them
        before it is rounded: through the gate, whose slope is 1.1 at most, a rounding for each term of a sum, and those
        of the exponential."""
        problem, (operands, _) = self.problem, self._random
        a, b, a_scale, b_scale, alpha, bias, routing, _, *gate = operands
        fmt, experts, lines, k = problem.b.format, problem.experts, b.shape[1], problem.k
        assert isinstance(fmt, FP4Format) and problem.b.scale_layout is not None
        if isinstance(problem.a.format, torch.dtype):
            a = a.to(fmt.operand_dtype(problem.a.format))
        scales = to_linear(b_scale, problem.b.scale_layout, experts * lines, k // fmt.block_size)
        scales = scales.view(experts, lines, -1)
        alpha_beta_limit = gate if problem.gate == "swiglu" else (1.0, 0.0, None)
        want, allowed = (
            torch.zeros(self.m, experts, lines // 2, dtype=torch.float32, device=a.device) for _ in range(2)
        )
        every = _decoded(problem.a, a, a_scale, slice(0, self.m), self.m, k)
        for expert in range(experts):
            rows = routing[:, expert].nonzero()[:, 0]
            right = decode_rows(b[expert], scales[expert], fmt, SCALE_LAYOUTS["linear"]).double().t()
            total = every[rows] @ right
            lost = (every[rows].abs() @ right.abs()) * (k * EPS)
            if alpha is not None:
                factor = alpha[expert].double().repeat_interleave(lines // alpha[expert].numel())
                total, lost = total * factor, (lost + total.abs() * EPS) * factor.abs()
            if bias is not None:
                total = total + bias[expert].double()
                lost = lost + total.abs() * EPS
            want[rows, expert] = silu_mul_rows(total.float(), *alpha_beta_limit)
            (gates, ups), (of_gates, of_ups) = (each.chunk(2, 1) for each in (total.abs(), lost))
            ups = ups + of_ups + abs(alpha_beta_limit[1])
            off = 1.1 * of_gates * ups + gates * of_ups + gates * ups * GATE_EPS
            allowed[rows, expert] = off.float()
        return want.flatten(1), allowed.flatten(1)


def block_difference(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], fmt: FP4Format
) -> str | None:
    """In words, why blocks are not as behind an exponential they must, where the masks say that they are written:
    scales that differ by more than one, codes by more than a step, or more than one in 1,000 of either; ``None``: they
    are."""
    (codes, scales), (want_codes, want_scales) = ([each.view(torch.uint8) for each in pair] for pair in (got, want))
    off = torch.where(masks[1], (scales.to(torch.int16) - want_scales.to(torch.int16)).abs(), 0)
    halves = [torch.stack((each & 15, each >> 4), -1).to(torch.int16) for each in (codes, want_codes)]
    values = [torch.where(half >= 8, 8 - half, half) for half in halves]
    steps = torch.where(masks[0].unsqueeze(-1), (values[0] - values[1]).abs(), 0)
    most = 2 if fmt.scale_format == "ue8m0" else 1
    for what, distance, limit, whole in (("scales", off, 1, 1), ("codes", steps, most, fmt.block_size)):
        wrong, count = int((distance > limit).sum()), int((distance > 0).sum())
        if wrong:
            return f"{wrong} {what} are off by more than {limit}, the worst by {int(distance.max())}"
        if count > whole + distance.numel() // 1000:
            return f"{count} of {distance.numel()} {what} differ"
    return None


def difference(got: Tensor, want: Tensor, allowed: Tensor) -> str | None:
    """Where ``got`` is farther from ``want`` than ``allowed``, in words; ``None``: nowhere."""
    error = (got.float() - want).abs()
    wrong = ~(error <= allowed)  # a NaN is wrong, too
    count = int(wrong.sum())
    if count == 0:
        return None
    i, j = wrong.nonzero()[0].tolist()
    ratio = (error / allowed).nan_to_num(math.inf, posinf=math.inf)[wrong].max().item()
    return (
        f"{count} of {got.numel()} sums are off, by up to {ratio:.3g} times what may be lost; first at ({i}, {j}): "
        f"{got[i, j].item():.6g}, expected {want[i, j].item():.6g} ± {allowed[i, j].item():.2g}"
    )


def _of_columns(value: Tensor, expert: int, columns: slice, n: int, is_grouped: bool) -> Tensor:
    """The part of an ``alpha`` or a bias for these columns of an expert, or for all of them."""
    if value.dim() == 2 or (is_grouped and value.shape[0] > 1):
        value = value[expert]
    value = value.reshape(-1)
    return value[columns] if len(value) == n and n > 1 else value[:1]


def _operand(
    operand: Operand, lead: tuple[int, ...], k: int, generator: torch.Generator, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """Random activations (..., K) and their scales."""
    device = generator.device
    if isinstance(operand.format, FP4Format):
        assert operand.scale_layout is not None
        return _fp4(lead, k, operand.format, operand.scale_layout, generator)
    if isinstance(operand.format, FP8Format):
        codes = _fp8((*lead, k), generator, exact)
        blocks = operand.format.scales_per_row(k)
        return codes, _fp8_scales((blocks, *lead), generator, exact)
    return torch.randn(*lead, k, dtype=operand.format, device=device, generator=generator), None


def _off_by_gate(
    problem: GemmProblem, value: Tensor, global_scale: Tensor | None, a: Tensor, a_scale: Tensor | None
) -> Tensor:
    """How far activations, as numbers in fp64, may be off that another exponential makes of the same rows: ``value``
    before, ``a`` and ``a_scale`` after they are rounded."""
    operand, fmt = problem.without_prologue.a, problem.b.format
    assert isinstance(fmt, FP4Format)

    def numbers(a: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return a.to(fmt.operand_dtype(a.dtype)).double()
        assert operand.scale_layout is not None
        return decode_rows(a, scale, fmt, operand.scale_layout).double()

    exact = numbers(a, a_scale)
    off = (numbers(*round_activations(problem, value * (1 + error), global_scale)) for error in (-GATE_EPS, GATE_EPS))
    return torch.maximum(*((each - exact).abs() for each in off))


def _weight(
    operand: Operand, lead: tuple[int, ...], k: int, generator: torch.Generator, exact: bool
) -> tuple[Tensor, Tensor]:
    """A random weight (..., N, K) and its scales."""
    if isinstance(operand.format, FP4Format):
        assert operand.scale_layout is not None
        return _fp4(lead, k, operand.format, operand.scale_layout, generator, exact)
    assert isinstance(operand.format, FP8Format)
    *experts, n = lead
    codes = _fp8((*lead, k), generator, exact)
    return codes, _fp8_scales((*experts, -(-n // 128), operand.format.scales_per_row(k)), generator, exact)


def _fp8(shape: tuple[int, ...], generator: torch.Generator, exact: bool) -> Tensor:
    if exact:
        numbers = torch.randint(-3, 4, shape, device=generator.device, generator=generator)
        return numbers.to(torch.bfloat16).to(torch.float8_e4m3fn)
    return torch.randn(shape, dtype=torch.bfloat16, device=generator.device, generator=generator).to(
        torch.float8_e4m3fn
    )


def _fp8_scales(shape: tuple[int, ...], generator: torch.Generator, exact: bool) -> Tensor:
    if exact:
        return torch.randint(-1, 2, shape, device=generator.device, generator=generator).float().exp2()
    return torch.rand(shape, dtype=torch.float32, device=generator.device, generator=generator) * 0.02 + 1e-3


def _fp4(
    lead: tuple[int, ...], k: int, fmt: FP4Format, layout: ScaleLayout, generator: torch.Generator, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Random codes and scales, those of padding included; with ``exact``, each row's scales are one power of two."""
    codes, scale = fp4_shapes((*lead, k), fmt, layout)
    device = generator.device
    packed = torch.randint(0, 256, codes, dtype=torch.uint8, device=device, generator=generator)
    if exact:
        one, step = EXACT_SCALES[fmt.scale_format]
        of_rows = torch.randint(-1, 2, (math.prod(lead), 1), device=device, generator=generator) * step + one
        every = of_rows.to(torch.uint8).expand(-1, k // fmt.block_size).contiguous()
        bytes_ = from_linear(every, layout).view(scale)
    else:
        low, high = SCALE_BYTES[fmt.scale_format]
        bytes_ = torch.randint(low, high, scale, dtype=torch.uint8, device=device, generator=generator)
    return packed, bytes_.view(fmt.scale_dtype)


def _decoded(operand: Operand, a: Tensor, scale: Tensor | None, part: slice, rows: int, k: int) -> Tensor:
    """These rows decoded, in fp64."""
    if isinstance(operand.format, FP4Format):
        assert scale is not None and operand.scale_layout is not None
        linear = to_linear(scale, operand.scale_layout, rows, k // operand.format.block_size)
        return decode_rows(a[part], linear[part], operand.format, SCALE_LAYOUTS["linear"]).double()
    if isinstance(operand.format, FP8Format):
        assert scale is not None
        factors = scale.reshape(scale.shape[0], rows)[:, part].t().double()
        return a[part].double() * factors.repeat_interleave(128, 1)[:, :k]
    return a[part].double()


def _linear_scales(problem: GemmProblem, scale: Tensor) -> Tensor:
    """The scales of the weight's rows, of all experts: (E, N, blocks)."""
    experts = problem.experts if problem.grouping.over == "rows" else 1
    if isinstance(problem.b.format, FP4Format):
        assert problem.b.scale_layout is not None
        rows, blocks = experts * problem.n, problem.k // problem.b.format.block_size
        return to_linear(scale, problem.b.scale_layout, rows, blocks).view(experts, problem.n, blocks)
    return factors_of_columns(scale, problem.n).view(experts, problem.n, -1)


def _decoded_weight(problem: GemmProblem, weight: Tensor, scales: Tensor, expert: int, columns: slice) -> Tensor:
    """These rows of an expert's weight, (E, N, K), decoded as they are multiplied, in fp64."""
    codes, factors = weight[expert, columns], scales[expert, columns]
    if isinstance(problem.b.format, FP4Format):
        if not problem.a.is_fp8:
            return decode_rows(codes, factors, problem.b.format, SCALE_LAYOUTS["linear"]).double()
        codes, factors = fp8_weight(codes, factors, problem.b.format, SCALE_LAYOUTS["linear"])
    return codes.double() * factors.double().repeat_interleave(FP8_BLOCK128.block_size, 1)[:, : problem.k]


def _chunks(within: slice, k: int) -> Iterator[slice]:
    step = max(1, CHUNK // k)
    return (slice(start, min(start + step, within.stop)) for start in range(within.start, within.stop, step))


def _copy(values: Any) -> Any:
    """A tuple of the same kind with copies of the tensors."""
    copies: Iterator[Any] = (each.clone() if isinstance(each, Tensor) else each for each in values)
    return type(values)(*copies) if isinstance(values, (Operands, GatedOperands)) else tuple(copies)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """What is queued goes to that GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
