"""What the tuner has to know of products: candidates, operands of random data, how a result is checked and timed."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_shapes
from torch_cute_ops.formats import SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.mm_backends import BACKENDS, Launcher, Operands, Product, Target, bucket, key_of, reasons
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.runtime import timing, tuner, tuning
from torch_cute_ops.runtime.tuner import Candidate, Problem

SETTINGS = timing.Settings(max_sets=1024, graph_ms=1.0, max_rounds=15)
EPS = 2.0**-24
"""Of a rounding in fp32."""
CHUNK = 2**24
"""Elements of an operand that are decoded at a time to check results: 0.4 GB."""
SCALE_BYTES = {"e4m3": (0x18, 0x31), "ue8m0": (123, 127)}
"""Range of the random scales, 1/16 to 1/2: sums stay far from the largest float16."""


def tune(op: str, product: Product, m: int, target: Target) -> None:
    """Have the tuner settle the choice for ``m`` rows on ``target``, if it is on."""
    key = key_of(product, m, target)
    if key is not None and tuning.is_on():
        bench = Bench(product, bucket(m), target)
        try:
            tuner.tune(Problem(op, key, estimates(product, bucket(m), target), bench.check, bench.time))
        finally:
            bench.free()


def estimates(product: Product, m: int, target: Target) -> dict[Candidate, float]:
    """Every candidate, and the seconds that it is thought to take; infinite for the reference."""
    return {
        Candidate(name, tactic): math.inf if name == "reference" else backend.estimate(product, m, tactic, target)
        for name, reason in reasons(product, target).items()
        if reason is None
        for backend in (BACKENDS[name],)
        for tactic in backend.tactics(product, m, target)
    }


class Bench:
    """Candidates for ``m`` rows, side by side on random operands, which are made when first needed.

    Args:
        product: what is computed.
        m: rows.
        target: where.
    """

    def __init__(self, product: Product, m: int, target: Target) -> None:
        self.product = product
        self.m = m
        self.target = target
        self._launchers: dict[Candidate, Launcher] = {}

    def check(self, candidate: Candidate) -> str | None:
        """How wrong the candidate's result is, in words; ``None``: as right as sums in fp32 can be."""
        out = self._operands.out
        out.fill_(math.nan)  # which is what an element is that was not written
        with torch.no_grad(), _on(self.target.device):
            self._run(candidate, self._operands)
            return difference(out, *self._expected)

    def time(self, candidates: Sequence[Candidate]) -> Mapping[Candidate, float]:
        """Seconds that a call takes, the median over replays, with a cold L2."""
        device, product = self.target.device, self.product
        least = min(estimates(product, self.m, self.target)[candidate] for candidate in candidates)
        with torch.no_grad(), _on(device):
            how = timing.plan(
                sum(tensor.nbytes for tensor in self._operands if tensor is not None),
                len(candidates),
                torch.cuda.get_device_properties(device).L2_cache_size,
                SETTINGS,
                call_ms=1e3 * least if math.isfinite(least) else None,
            )
            sets = [self._operands, *(_copy(self._operands) for _ in range(how.n_sets - 1))]
            variants = {candidate: partial(self._run_set, candidate, sets) for candidate in candidates}
            timings = timing.measure(variants, how.n_sets, how.calls, how.rounds, timing.CudaGraphs())
        return {candidate: timing.us * 1e-6 for candidate, timing in timings.items()}

    def free(self) -> None:
        """Give the memory back to the GPU: a server may plan with what is free."""
        used = "_operands" in self.__dict__
        for name in ("_operands", "_expected"):
            self.__dict__.pop(name, None)
        if used and self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, candidate: Candidate, operands: Operands) -> None:
        launcher = self._launchers.get(candidate)
        if launcher is None:
            backend = BACKENDS[candidate.backend]
            launcher = self._launchers[candidate] = backend.launcher(self.product, candidate.tactic, self.target)
        launcher(*operands)

    def _run_set(self, candidate: Candidate, sets: Sequence[Operands], i: int) -> None:
        self._run(candidate, sets[i])

    @cached_property
    def _operands(self) -> Operands:
        product, device = self.product, self.target.device
        # Not the user's generator: tuning changes no number that a program draws.
        generator = torch.Generator(device).manual_seed(0)
        if product.a_layout is not None:
            a, a_scale = _matrix(self.m, product.k, product.fmt, product.a_layout, generator)
        else:
            a = torch.randn(self.m, product.k, dtype=product.a_dtype, device=device, generator=generator)
            a_scale = None
        b, b_scale = _matrix(product.n, product.k, product.fmt, product.b_layout, generator)
        alpha = _alpha(self.m, product, generator)
        out = torch.empty(self.m, product.n, dtype=product.out_dtype, device=device)
        return Operands(a, a_scale, b.t(), b_scale, alpha, out)

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in fp32, and how far from it another may be: the roundings of the sum, K of them, or with experts
        those of an expert's sum, of its product with ``alpha``, and of each addition of an expert; and one to the
        output's dtype."""
        product, (a, a_scale, b, b_scale, alpha, out) = self.product, self._operands
        info = torch.finfo(product.out_dtype)
        want, allowed = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
        roundings = product.k if product.experts is None else product.k // product.experts + 1 + product.routed
        for rows in _chunks(self.m, product.k):
            left = a[rows].double() if a_scale is None else _decoded(a, a_scale, product, product.a_layout, rows)
            if alpha is not None and product.experts is None:
                left *= alpha.double()
            elif alpha is not None and product.experts is not None:
                left *= alpha[rows].double().repeat_interleave(product.k // product.experts, 1)
            for columns in _chunks(product.n, product.k):
                right = _decoded(b.t(), b_scale, product, product.b_layout, columns).t()
                total = left @ right
                lost = (left.abs() @ right.abs()) * (roundings * EPS)
                want[rows, columns] = total.float()
                allowed[rows, columns] = (lost + total.abs() * info.eps + info.smallest_normal).float()
        return want, allowed


def difference(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """How ``got`` is farther from ``want`` than ``allowed``, in words; ``None``: nowhere."""
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


def _alpha(m: int, product: Product, generator: torch.Generator) -> torch.Tensor | None:
    """One number; with experts, routing as servers see it: ``TOP_EXPERTS`` experts for each token, all as likely, with
    weights that sum to 1."""
    device = generator.device
    if product.experts is None:
        return torch.full((1,), 0.7, dtype=torch.float32, device=device) if product.has_alpha else None
    scores = torch.rand(m, product.experts, dtype=torch.float32, device=device, generator=generator)
    best = scores.topk(product.routed, dim=1)
    return torch.zeros_like(scores).scatter_(1, best.indices, best.values.softmax(1))


def _matrix(
    rows: int, k: int, fmt: FP4Format, layout: ScaleLayout, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales; those of padding, which count for nothing, are as random."""
    codes, scale = fp4_shapes((rows, k), fmt, layout)
    device = generator.device
    low, high = SCALE_BYTES[fmt.scale_format]
    return (
        torch.randint(0, 256, codes, dtype=torch.uint8, device=device, generator=generator),
        torch.randint(low, high, scale, dtype=torch.uint8, device=device, generator=generator).view(fmt.scale_dtype),
    )


def _decoded(
    codes: torch.Tensor, scale: torch.Tensor, product: Product, layout: ScaleLayout | None, rows: slice
) -> torch.Tensor:
    """Those rows in fp64."""
    if layout is None:
        raise ValueError("a matrix without a scale layout is not in FP4")
    linear = to_linear(scale, layout, codes.shape[0], product.k // product.fmt.block_size)
    return decode_rows(codes[rows], linear[rows], product.fmt, SCALE_LAYOUTS["linear"]).double()


def _chunks(rows: int, k: int) -> list[slice]:
    step = max(1, CHUNK // k)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _copy(operands: Operands) -> Operands:
    return Operands(*(None if tensor is None else tensor.clone() for tensor in operands))  # type: ignore[arg-type]


def _on(device: torch.device) -> AbstractContextManager[object]:
    """What is queued goes to that GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
