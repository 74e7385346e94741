"""Tune GEMMs: estimate the time of each candidate, run the candidates on random operands, check and time them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from torch_cute_ops.formats import FP8_TENSOR, MXFP8, SCALE_LAYOUTS, FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.interleave import interleave_k
from torch_cute_ops.formats.prepared_scales import prepared_of_linear
from torch_cute_ops.formats.scale_layout import DEFAULT_SCALE_LAYOUT, from_linear
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm import error_bounds
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.fp8_tiles import has_random_rows
from torch_cute_ops.gemm.operands import GatedOperands, Operands
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.gemm.select import candidates, key_of, reasons
from torch_cute_ops.reference.moe_fc1_fp4 import quantize_experts, written_parts
from torch_cute_ops.runtime import timing, tuner, tuning
from torch_cute_ops.runtime.compiler import KernelSpec
from torch_cute_ops.runtime.tuner import Candidate, TuningTask

SETTINGS = timing.Settings(max_sets=1024, graph_ms=1.0, max_rounds=15)
SCALE_BYTES = {"e4m3": (0x18, 0x31), "ue8m0": (123, 127)}
"""Range of the bytes of random FP4 scales. The scales are 1/16 to 1/2, so that sums stay far below the largest
float16."""

EXACT_SCALES = {"e4m3": (0x38, 8), "ue8m0": (127, 1)}
"""Byte that encodes the scale 1, and difference between the bytes that encode the scales 2 and 1."""

Tensor = torch.Tensor
Given = tuple[Any, tuple[Tensor | None, ...]]
"""``Operands`` or ``GatedOperands`` of a call, and a tuple of its results."""


def tune(op: str, problem: GemmProblem, m: int, target: Target) -> None:
    """If tuning is on, let the tuner choose a backend and tactic for ``m`` rows on ``target``."""
    key = key_of(problem, m, target)
    if key is not None and tuning.is_on():
        bench = bench_of(problem, bucket(m), target)
        try:
            tuner.tune(TuningTask(op, key, estimates(problem, bucket(m), target), bench.check, bench.time))
        finally:
            bench.free()


def kernels(problem: GemmProblem, m: int, target: Target) -> Iterator[KernelSpec]:
    """Yield the kernels that ``tune`` launches, so that they can be compiled before tuning starts."""
    key = key_of(problem, m, target)
    if key is not None and target.arch is not None and tuner.lookup(key) is None:
        for backend, tactic in next(tuner.shortlists(estimates(problem, bucket(m), target))):
            yield from candidates(problem)[backend].kernels(problem, tactic, target.arch)


def estimates(problem: GemmProblem, m: int, target: Target) -> dict[Candidate, float]:
    """Return the estimated seconds of every candidate. The estimate is infinite if the backend can be selected only by
    name."""
    return {
        Candidate(name, tactic): math.inf if backend.by_name_only else backend.estimate(problem, m, tactic, target)
        for name, backend in candidates(problem).items()
        if reasons(problem, target)[name] is None
        for tactic in backend.tactics(problem, m, target)
    }


def bench_of(problem: GemmProblem, m: int, target: Target) -> "Bench":
    """Return the operands and functions with which candidates for this problem are checked and timed."""
    return (Bench if problem.gate is None else GatedBench)(problem, m, target)


class Bench:
    """Random operands, on which candidates are checked and timed. The operands are created on first use.

    Args:
        problem: problem of the candidates.
        m: number of rows or, in the masked layout, number of rows of each expert.
        target: device on which candidates run.
    """

    def __init__(self, problem: GemmProblem, m: int, target: Target) -> None:
        self.problem = problem
        self.m = m
        self.target = target
        self._launchers: dict[Candidate, Launch] = {}

    def check(self, candidate: Candidate) -> str | None:
        """Run a candidate. Return a description of the errors in its result, or None if no error exceeds its bound."""
        _, (out,) = self._exact
        assert out is not None
        out.fill_(math.nan)  # NaN, so that the check below detects unwritten elements
        with torch.no_grad(), _on(self.target.device):
            self._run(candidate, self._exact)
            return error_bounds.difference(out.reshape(-1, self.problem.n), *self._expected)

    def time(self, candidates: Sequence[Candidate]) -> Mapping[Candidate, float]:
        """Return the seconds of a call for each candidate: the median over replays of CUDA graphs with a cold L2."""
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
        """Free all operands, and return their memory to the GPU, because a server may measure the free memory
        afterwards."""
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
        """Random operands and results, on which candidates are timed. In the packed layout, rows belong to random
        experts."""
        return self._made(exact=False)

    @cached_property
    def _exact(self) -> Given:
        """Operands and results, on which candidates are checked against known results.

        If sums are in fp32, these are the random operands. FP8 tensor cores add the products of a k block with about 14
        bits, so FP8 operands are whole numbers, whose sums such tensor cores compute exactly.
        """
        return self._made(exact=True) if self.problem.a.is_fp8 else self._random

    def _made(self, *, exact: bool) -> Given:
        problem, device = self.problem, self.target.device
        # Use a separate generator, so that tuning does not change the random numbers that a program draws.
        generator = torch.Generator(device).manual_seed(0)
        over, layout = problem.grouping.over, problem.grouping.rows
        experts = problem.experts if over == "rows" else 1
        lead = (problem.experts, self.m) if layout.is_masked else (self.m,)
        a, a_scale = _operand(problem.a, lead, problem.a_width, generator, exact)
        if problem.prologue_quant == "scaled":
            a_scale = torch.full((1,), 3.0, dtype=torch.float32, device=device)
        weights = (experts, problem.n) if over == "rows" else (problem.n,)
        # With FP8 activations and an FP4 weight, sums are exact only if all scales of a weight row are the same power
        # of two.
        b, b_scale = _weight(problem.b, weights, problem.k, generator, exact and problem.a.is_fp8)
        offsets = counts = None
        if over == "rows":
            ends = torch.arange(experts + 1, dtype=torch.int64, device=device) * self.m // experts
            if has_random_rows(problem) and not exact:
                # Draw random numbers of rows per expert. With equal numbers, tuning would choose tiles that are too
                # small for larger experts.
                drawn = torch.randint(experts, (self.m,), device=device, generator=generator)
                ends[1:] = torch.bincount(drawn, minlength=experts).cumsum(0)
            offsets = ends.to(torch.int32) if layout.has_offsets else None
            room = torch.full((experts,), self.m, device=device) if layout.is_masked else ends.diff()
            counts = room.to(torch.int32) if layout.has_counts else None
        out = torch.empty(*lead, problem.n, dtype=problem.out_dtype, device=device)
        row_scale = None
        if problem.epilogue.has_row_scale:
            row_scale = torch.rand(self.m, dtype=torch.float32, device=device, generator=generator) + 0.5
        operands = Operands(
            *(a, b.mT, a_scale, b_scale, *self._epilogue(generator, exact), offsets, counts), row_scale=row_scale
        )
        return operands, (out,)

    def _routed(self, generator: torch.Generator) -> Tensor:
        """Return routing factors (M, E). Each token goes to ``topk`` experts, all equally likely, whose weights sum to
        1."""
        shape = self.m, self.problem.experts
        scores = torch.rand(shape, dtype=torch.float32, device=generator.device, generator=generator)
        best = scores.topk(self.problem.topk, dim=1)
        return torch.zeros_like(scores).scatter_(1, best.indices, best.values.softmax(1))

    def _epilogue(self, generator: torch.Generator, exact: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return random values of ``alpha`` and of the bias. With experts over K, ``alpha`` holds the routing
        factors."""
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
        """Expected result for ``_exact``, and allowed error of each element."""
        operands, (out,) = self._exact
        assert out is not None
        return error_bounds.expected(self.problem, operands, out.numel() // self.problem.n)


class GatedBench(Bench):
    """Random operands of a GEMM with a gate in which each expert owns columns of the result. Only results of routed
    pairs are checked."""

    def check(self, candidate: Candidate) -> str | None:
        """Run a candidate. Return a description of the errors in the results of routed pairs, or None."""
        operands, (y, scale) = self._random
        assert y is not None
        for result in (y, scale):
            if result is not None:
                result.view(torch.uint8).fill_(0xFF)  # NaN as a float, and a rare value as codes
        with torch.no_grad(), _on(self.target.device):
            self._run(candidate, self._random)
            value, lost = self._expected
            if scale is None:
                info = torch.finfo(y.dtype)
                allowed = lost + value.abs() * info.eps + info.smallest_normal
                routed = (operands.routing != 0).repeat_interleave(self.problem.expert_n, 1)
                return error_bounds.difference(torch.where(routed, y, 0), value, allowed)
            fmt, quantised = self.problem.b.format, self.problem.quantised
            assert isinstance(fmt, FP4Format) and quantised is not None and quantised.scale_layout is not None
            want = quantize_experts(value, self.problem.experts, operands.global_scale, fmt, quantised.scale_layout)
            masks = written_parts((y, scale), operands.routing, fmt, quantised.scale_layout)
            return error_bounds.block_difference((y, scale), want, masks, fmt)

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
            # With this ``alpha``, the inputs of the gate have magnitudes around 1, as in models.
            alpha = filled(2 * problem.k**-0.5, *((experts,) if epilogue.alpha == "expert" else (experts, 2)))
        if epilogue.bias_dtype is not None:
            drawn = torch.randint(-2, 3, (experts, rows), device=device, generator=generator)
            bias = drawn.to(epilogue.bias_dtype)
        if problem.global_scale is not None:
            global_scale = filled(8.0, 1 if problem.global_scale == "one" else experts)
        gate = (1.702, 1.0, 7.0) if problem.gate == "swiglu" else (None, None, None)
        routing = self._routed(generator)
        row_scale = filled(1.25, self.m) if epilogue.has_row_scale else None
        operands = GatedOperands(a, b.mT, a_scale, b_scale, alpha, bias, routing, global_scale, *gate)
        operands = operands._replace(row_scale=row_scale)
        if quantised is None:
            return operands, (torch.empty(self.m, problem.n, dtype=epilogue.out_dtype, device=device), None)
        assert isinstance(quantised.format, FP4Format) and quantised.scale_layout is not None
        codes, scales = fp4_shapes((self.m, problem.n), quantised.format, quantised.scale_layout)
        scale = torch.empty(scales, dtype=torch.uint8, device=device).view(quantised.format.scale_dtype)
        return operands, (torch.empty(codes, dtype=torch.uint8, device=device), scale)

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor]:
        """Expected values before quantisation, and their allowed errors, for the random operands."""
        return error_bounds.expected_gated(self.problem, self._random[0])


def _operand(
    operand: Operand, lead: tuple[int, ...], k: int, generator: torch.Generator, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """Return random activations (..., K) and their scales."""
    device = generator.device
    if isinstance(operand.format, FP4Format):
        assert operand.scale_layout is not None
        return _fp4(lead, k, operand.format, operand.scale_layout, generator)
    if isinstance(operand.format, FP8Format):
        codes = _fp8(operand, (*lead, k), generator, exact)
        if operand.is_interleaved:
            codes = interleave_k(codes)
        if operand.format == FP8_TENSOR:
            return codes, _fp8_scales((1, 1), generator, exact).expand(math.prod(lead), 1)
        if operand.format == MXFP8:
            return codes, _mx_scales((*lead, k // MXFP8.block_size), generator)
        if not operand.has_fp8_blocks:
            return codes, _fp8_scales((math.prod(lead), 1), generator, exact)
        blocks = operand.format.scales_per_row(k)
        return codes, _fp8_scales((blocks, *lead), generator, exact).movedim(0, -1)  # column-major
    return torch.randn(*lead, k, dtype=operand.format, device=device, generator=generator), None


def _weight(
    operand: Operand, lead: tuple[int, ...], k: int, generator: torch.Generator, exact: bool
) -> tuple[Tensor, Tensor]:
    """Return a random weight (..., N, K) and its scales."""
    if isinstance(operand.format, FP4Format):
        layout = SCALE_LAYOUTS["linear"] if operand.is_prepared else operand.scale_layout
        assert layout is not None
        codes, scale = _fp4(lead, k, operand.format, layout, generator, exact)
        if operand.is_prepared:
            linear = scale.reshape(math.prod(lead), -1)
            scale = prepared_of_linear(linear, lead[-1], operand.format, lead[0] if len(lead) == 2 else None)
        return codes, scale
    assert isinstance(operand.format, FP8Format)
    *experts, n = lead
    codes = _fp8(operand, (*lead, k), generator, exact)
    if operand.format == MXFP8:
        return codes, _mx_scales((*lead, k // MXFP8.block_size), generator)
    if not operand.has_fp8_blocks:
        shape = (*experts, n) if operand.format != FP8_TENSOR else (*experts,) or (1,)
        return codes, _fp8_scales(shape, generator, exact)
    blocks = operand.format.scales_per_row(k)
    if operand.scales_by_row:
        return codes, _fp8_scales((*experts, blocks, n), generator, exact).mT  # column-major
    return codes, _fp8_scales((*experts, -(-n // 128), blocks), generator, exact)


def _fp8(operand: Operand, shape: tuple[int, ...], generator: torch.Generator, exact: bool) -> Tensor:
    """Return random e4m3 numbers.

    Unless ``exact``, the largest magnitude of an MXFP8 block is about as large as quantising ops make it, more than
    half of e4m3's largest number. Kernels that fold MXFP8 take longer if elements are small.
    """
    if exact:
        numbers = torch.randint(-3, 4, shape, device=generator.device, generator=generator)
        return numbers.to(torch.bfloat16).to(torch.float8_e4m3fn)
    values = torch.randn(shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
    if operand.format == MXFP8:
        values = (values * 128).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn)


def _mx_scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random ue8m0 bytes of 1/2, 1 and 2, one for each block of ``shape``.

    The scales of a matrix are in the default layout of the quantising ops. The scales of several experts are linear, as
    in layers of experts.
    """
    linear = torch.randint(126, 129, shape, dtype=torch.uint8, device=generator.device, generator=generator)
    return linear if len(shape) > 2 else from_linear(linear, SCALE_LAYOUTS[DEFAULT_SCALE_LAYOUT])


def _fp8_scales(shape: tuple[int, ...], generator: torch.Generator, exact: bool) -> Tensor:
    if exact:
        return torch.randint(-1, 2, shape, device=generator.device, generator=generator).float().exp2()
    return torch.rand(shape, dtype=torch.float32, device=generator.device, generator=generator) * 0.02 + 1e-3


def _fp4(
    lead: tuple[int, ...], k: int, fmt: FP4Format, layout: ScaleLayout, generator: torch.Generator, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return random FP4 codes and scales, including padding. If ``exact``, all scales of one row are equal, and a power
    of two."""
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


def _copy(values: Any) -> Any:
    """Copy a tuple, which may be a named tuple, together with its tensors."""
    copies: Iterator[Any] = (each.clone() if isinstance(each, Tensor) else each for each in values)
    return type(values)(*copies) if isinstance(values, (Operands, GatedOperands)) else tuple(copies)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the current CUDA device; on a CPU, a context without effect."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
