"""Samples and error inputs of the FP4 GEMMs with a prologue: a gate, a quantisation, or both."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from samples._fp4 import FORMATS
from samples._fp4_gemm import GemmSamples
from samples._inputs import ErrorInput, Sample
from samples._row_errors import error_maker
from samples._rows import short
from samples._silu_mul import OTHER_GATES, gate_errors
from torch_cute_ops.formats import MXFP4, NVFP4


@dataclass(frozen=True)
class PrologueGemmSamples(GemmSamples):
    """Samples and error inputs of one FP4 GEMM with a prologue.

    Attributes:
        prologue_gate: True for an op whose ``a`` contains gate and up.
        prologue_quant: True for an op that quantises its activations.
    """

    prologue_gate: bool = False
    prologue_quant: bool = False

    def a_width(self, k: int) -> int:
        return 2 * k if self.prologue_gate else k

    def samples(self, device: torch.device) -> Iterator[Sample]:
        """Yield the samples of every FP4 GEMM, gates with special values, global scales, and values outside the range
        of FP4 blocks."""
        yield from super().samples(device)
        if self.prologue_gate:
            yield from self._gates(device)
        if self.prologue_quant:
            yield from self._quantised(device)

    def _gates(self, device: torch.device) -> Iterator[Sample]:
        m, n, k = self.sizes
        for dtype in (torch.bfloat16, torch.float16):
            sample = self.sample("", m, n, k, NVFP4, "128x4", device, dtype=dtype, out_dtype=torch.float32)
            up = sample.args[0].chunk(2, 1)[1]
            # The gate values range from values at which exp(-gate) overflows, past the minimum of silu, to values with
            # silu(gate) = gate.
            slope = torch.linspace(-110, 20, up.numel(), device=device).view_as(up)
            special = torch.ones_like(up)
            special[:3, 5] = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device)
            for name, gate in (("slope", slope), ("special", special)):
                a = torch.cat((gate.to(dtype), up), 1)
                yield self.changed(sample, f"gate-{name}-{short(dtype)}", a=a)
                for activation in OTHER_GATES:
                    changed = self.changed(sample, f"{activation}-{name}-{short(dtype)}", a=a)
                    yield replace(changed, kwargs={**changed.kwargs, "gate": activation})
        for activation, fmt in zip(OTHER_GATES, (NVFP4, MXFP4, NVFP4), strict=True):
            for rows in (1, m):
                name = f"{activation}-{fmt.name}-{rows}"
                yield self.sample(name, rows, n, k, fmt, "128x4", device, gate=activation)

    def _quantised(self, device: torch.device) -> Iterator[Sample]:
        m, n, k = self.sizes
        given: dict[str, Any] = {"out_dtype": torch.float32}
        for rows in (1, m):
            for dtype in (torch.bfloat16, torch.float16):
                for value in (0.02, 300.0):
                    scale = torch.full((1,), value, device=device)
                    name = f"global-scale-{value}-{rows}-{short(dtype)}"
                    sizes = rows, n, k + 16 * (rows > 1)
                    yield self.sample(name, *sizes, NVFP4, "linear", device, dtype=dtype, global_scale=scale, **given)
            # Infinity and NaN; a block of zeros; a block of numbers too small for a scale; a block that saturates.
            for fmt in FORMATS:
                sample = self.sample(f"{fmt.name}-unusual-{rows}", rows, n, k, fmt, "128x4", device, **given)
                a = sample.args[0].clone()
                a[:, :16], a[:, 32:48] = 0, 1e-30
                a[0, 64:96] *= 2.0**60
                if rows > 1:
                    a[1, 3], a[2, k - 1] = torch.nan, torch.inf
                yield self.changed(sample, a=a)
        for name, shape in (("0d", ()), ("2d", (1, 1))):
            scale = torch.full(shape, 2.5, device=device)
            yield self.sample(f"global-scale-{name}", m, n, k, NVFP4, "128x4", device, global_scale=scale)

    def _all_by_position(self, device: torch.device) -> Iterator[Sample]:
        for sample in super()._all_by_position(device):
            yield replace(sample, args=(*sample.args, *["gelu_tanh"] * self.prologue_gate))

    def _positional(self, sample: Sample, device: torch.device) -> tuple[torch.Tensor, ...]:
        scale = (torch.rand(1, device=device) + 0.5,) if self.prologue_quant else ()
        return (*scale, *super()._positional(sample, device))

    def errors(self, device: torch.device) -> Iterator[ErrorInput]:
        yield from super().errors(device)
        good = self.sample("good", 4, 24, self.smallest_k, NVFP4, "linear", device)
        if self.prologue_gate:
            for error in gate_errors(good.args):
                if error.kwargs.keys() == {"gate"}:  # These ops take no parameters of SwiGLU.
                    yield replace(error, kwargs={**good.kwargs, **error.kwargs})
        if not self.prologue_quant:
            return
        bad, one = error_maker(self.by_name(good), good.kwargs), torch.ones(1, device=device)
        for name, error, text, scale in (
            ("float64", TypeError, "got global_scale with dtype float64; expected", one.double()),
            ("two", ValueError, "got global_scale with", one.repeat(2)),
            ("device", ValueError, "global_scale is on meta", one.to("meta")),
        ):
            yield bad(f"global-scale-{name}", error, text, {"global_scale": scale})
        mxfp4 = self.sample("global-scale-mxfp4", 4, 24, self.smallest_k, MXFP4, "linear", device, global_scale=one)
        text = "global_scale is given; mxfp4 takes none"
        yield ErrorInput(mxfp4.name, mxfp4.args, mxfp4.kwargs, ValueError, text)
