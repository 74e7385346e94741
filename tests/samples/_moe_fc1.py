"""Samples and error inputs of the expert GEMMs with a gate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from samples._fp4 import FORMATS
from samples._fp4_gemm import FP4Samples, random_matrix
from samples._inputs import ErrorInput, Sample
from samples._moe_fc2 import dense_alpha, one_expert_alpha, top_alpha, with_nan_scales
from samples._row_errors import error_maker, out_errors
from samples._rows import short
from samples._silu_mul import GPT_OSS, OTHER_GATES, gate_errors, swiglu_errors
from samples._weights import every_other_expert, scale_stride_errors, stride_errors, unaligned, with_padding
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.formats.shapes import fp4_shapes

ALPHA = {"e4m3": 2.0**-7, "ue8m0": 2.0**-4}
"""Factors with which the sums of random operands have a magnitude of a few units."""


@dataclass(frozen=True)
class GatedSamples(FP4Samples):
    """Samples and error inputs of one expert GEMM with a gate. If ``a`` is FP4, so is the result."""

    sizes = (9, 3 * 64, 128)
    """M, E·I and H of samples that test values, with three experts."""

    def matrix(
        self, n: int, experts: int, k: int, fmt: FP4Format, layout: ScaleLayout, device: torch.device, scales: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = 2 * (n // experts)
        codes, scale = random_matrix(experts * rows, k, fmt, layout.name, device, scales)
        return codes.view(experts, rows, -1).mT, scale.view(fp4_shapes((experts, rows, k), fmt, layout)[1])

    def defaults(self, m: int, k: int, experts: int, fmt: FP4Format, device: torch.device) -> dict[str, Any]:
        """Return a ``routing`` of each token to two experts, and one ``alpha`` per expert."""
        usual = ALPHA[fmt.scale_format] if self.has_a_scale else 2.0**-4
        alpha = (torch.rand(experts, device=device) + 0.5) * usual
        return {"routing": top_alpha(m, experts, device), "alpha": alpha}

    def samples(self, device: torch.device) -> Iterator[Sample]:
        """Yield the samples of the op."""
        yield self.sample("plain", *self.sizes, NVFP4, "128x4", device)
        for fmt in FORMATS:
            for layout in self.layouts:
                yield self.sample(f"{fmt.name}-{layout}", 19, 3 * 64, 5 * fmt.block_size, fmt, layout, device)
                yield self.poisoned(f"{fmt.name}-{layout}-poison", *self.sizes, fmt, layout, device)
        yield from self._shapes(device)
        yield from self.common_values(device)
        yield from self._values(device)
        yield from self._epilogues(device)
        yield from self._all_by_position(device)
        yield from self._views(device)

    def _shapes(self, device: torch.device) -> Iterator[Sample]:
        for name, m, experts, width, k, fmt in (
            ("one-expert", 1, 1, 64, 64, NVFP4),
            ("decode", 1, 16, 64, 256, NVFP4),
            ("decode-mxfp4", 1, 16, 64, 256, MXFP4),
            ("half-words", 5, 3, 192, 96, MXFP4),
            ("many-rows", 130, 2, 64, 64, NVFP4),
            ("many-experts", 3, 1024, 64, 32, NVFP4),
            ("wide", 3, 2, 320, 64, NVFP4),
            ("long", 3, 2, 64, 2048, NVFP4),
            ("no-rows", 0, 2, 64, 64, NVFP4),
            ("no-rows-mxfp4", 0, 2, 64, 64, MXFP4),
        ):
            routing = top_alpha(m, experts, device, 8)
            yield self.sample(name, m, experts * width, k, fmt, "128x4", device, experts=experts, routing=routing)
        yield self.sample("no-rows-linear", 0, 128, 64, NVFP4, "linear", device)

    def _values(self, device: torch.device) -> Iterator[Sample]:
        (m, n, _), sizes = self.sizes, self.sizes
        experts = n // 64
        top, dense = top_alpha(m, experts, device), dense_alpha(m, experts, device)
        with_nan, some = top.clone(), dense.clone()
        with_nan[2, 1], some[m // 2 :] = torch.nan, 0
        for name, routing in (
            ("dense", dense),
            ("one-expert", one_expert_alpha(m, experts, device)),
            ("zero", torch.zeros_like(top)),
            ("negative-zero", -torch.zeros_like(top)),
            ("some-rows", some),
            ("negative", -dense),
            ("nan", with_nan),
        ):
            yield self.sample(f"routing-{name}", *sizes, NVFP4, "128x4", device, routing=routing)

    def _epilogues(self, device: torch.device) -> Iterator[Sample]:
        sizes, experts = self.sizes, self.sizes[1] // 64
        usual = 2.0**-7 if self.has_a_scale else 2.0**-4
        bias = torch.randn(experts, 128, device=device) * 3
        halves = (torch.rand(experts, 2, device=device) + 0.5) * usual
        given: dict[str, dict[str, Any]] = {
            "alpha-none": {"alpha": None},
            "alpha-half": {"alpha": halves},
            "bias-float32": {"bias": bias},
            "bias-bfloat16": {"bias": bias.bfloat16()},
            "alpha-half-bias": {"alpha": halves, "bias": bias},
            "gpt-oss": {**GPT_OSS, "bias": bias.bfloat16()},
            "limit": {"swiglu_limit": 0.5},
            "alpha-of-gate": {"swiglu_alpha": 0.5},
            "beta": {"swiglu_beta": -0.75},
            **{gate: {"gate": gate, "bias": bias} for gate in OTHER_GATES},
            "defaults-named": {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": None},
            "epilogue-strided": {
                "alpha": torch.cat((halves, halves), 1)[:, ::2],
                "bias": torch.cat((bias, bias), 1)[:, 1:129],
            },
            "epilogue-expanded": {"alpha": halves[:1].expand(experts, 2), "bias": bias[:, :1].expand(-1, 128)},
        }
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e38], device=device)
        given["bias-special"] = {"bias": special.repeat(22)[:128].expand(experts, -1).contiguous()}
        given["alpha-special"] = {"alpha": special[:experts].contiguous()}
        if self.has_a_scale:
            for name, scale in (("one", torch.full((1,), 30.0)), ("expert", torch.rand(experts) * 40 + 1)):
                given[f"global-scale-{name}"] = {"global_scale": scale.to(device)}
            given["global-scale-0d"] = {"global_scale": torch.tensor(30.0).to(device)}
            given["global-scale-strided"] = {"global_scale": (torch.rand(2 * experts, device=device) + 9)[::2]}
            given["all"] = {
                "alpha": halves,
                "bias": bias,
                "global_scale": torch.rand(experts, device=device) * 40 + 1,
                **GPT_OSS,
            }
        else:
            given["float16"] = {"dtype": torch.float16, "bias": bias.half()}
            given["all"] = {"alpha": halves, "bias": bias, "dtype": torch.float16, **GPT_OSS}
        for name, kwargs in given.items():
            yield self.sample(name, *sizes, NVFP4, "128x4", device, **kwargs)
        if not self.has_a_scale:
            yield self.sample("mxfp4-of-float16", *sizes, MXFP4, "128x4", device, dtype=torch.float16)

    def _all_by_position(self, device: torch.device) -> Iterator[Sample]:
        sample = self.sample("positional", *self.sizes, NVFP4, "128x4", device)
        bias = torch.randn(self.sizes[1] // 64, 128, device=device)
        rest = [sample.kwargs["routing"], sample.kwargs["alpha"], bias]
        if self.has_a_scale:
            rest.append(torch.full((1,), 8.0, device=device))
        rest += [16, "e4m3", "128x4", *GPT_OSS.values(), "auto", True]
        yield replace(sample, args=(*sample.args, *rest), kwargs={})

    def _views(self, device: torch.device) -> Iterator[Sample]:
        fp4, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
        m, experts = 6, 2
        sample = self.sample("", m, experts * 64, 64, NVFP4, "linear", device)
        given = self.by_name(sample)
        a, w = given["a"], given["w"]

        yield self.changed(sample, "w-float4", w=w.view(fp4))
        if self.has_a_scale:
            yield self.changed(sample, "a-float4", a=a.view(fp4))
        for name, weight in (
            ("pitched", with_padding(w)),
            ("unaligned", unaligned(w)),
            ("every-other-expert", every_other_expert(w)),
        ):
            yield self.changed(sample, f"w-{name}", w=weight)
        wide = torch.cat((a, a, a), 1)
        yield self.changed(sample, "a-columns-first", a=a.t().contiguous().t())
        yield self.changed(sample, "a-row-strided", a=wide[:, : a.shape[1]])
        yield self.changed(sample, "a-offset", a=wide[:, 1 : 1 + a.shape[1]])
        tiled = self.sample("w-scale-e8m0", m, experts * 64, 64, MXFP4, "128x4", device)
        yield self.changed(tiled, w_scale=tiled.args[-1].view(e8m0))
        for name, routing in (
            ("transposed", torch.rand(experts, m, device=device).t()),
            ("row-strided", torch.rand(m, experts + 3, device=device)[:, :experts]),
            ("expanded", torch.rand(1, 1, device=device).expand(m, experts)),
            ("rows-expanded", torch.rand(1, experts, device=device).expand(m, -1)),
        ):
            yield replace(sample, name=f"routing-{name}", kwargs={**sample.kwargs, "routing": routing})

    def poisoned(
        self, name: str, m: int, n: int, k: int, fmt: FP4Format, layout: str, device: torch.device, **kwargs: Any
    ) -> Sample:
        """Return a call with NaN in operands that must not be read: the weight scales of the first expert, to which no
        token is routed, and the rows of tokens without experts. Half of the zeros in ``routing`` are negative."""
        experts = n // 64
        routing = top_alpha(m, experts, device)
        routing[:, 0] = 0
        routing[m // 2] = 0
        routing = torch.where((routing == 0) & (torch.rand_like(routing) < 0.5), -0.0, routing)
        sample = self.sample(name, m, n, k, fmt, layout, device, routing=routing, **kwargs)
        given = self.by_name(sample)
        w_scale, w_layout = given["w_scale"], weight_layout(SCALE_LAYOUTS[layout])
        unused = torch.arange(experts * 128, device=device)[:, None] < 128
        nan = with_nan_scales(w_scale, unused, k, fmt, w_layout.name)
        given["w_scale"] = nan.view(w_scale.shape)
        idle = (routing == 0).all(1, keepdim=True)
        if self.has_a_scale:
            given["a_scale"] = with_nan_scales(given["a_scale"], idle, k, fmt, layout)
        else:
            given["a"] = torch.where(idle, torch.nan, given["a"]).to(given["a"].dtype)
        return self.changed(sample, **given)

    # Bad inputs

    def errors(self, device: torch.device) -> Iterator[ErrorInput]:
        """Yield the error inputs of the op."""
        m, experts, k = 4, 2, 64
        good = self.sample("good", m, experts * 64, k, NVFP4, "linear", device)
        tensors, kwargs = self.by_name(good), good.kwargs
        bad, a, w = error_maker(tensors, kwargs), tensors["a"], tensors["w"]
        yield from self.common_errors(tensors, bad, device)
        for what, value in (("1d", a[0]), ("3d", a[None]), ("narrow", a[:, : a.shape[1] // 2])):
            yield bad(f"a-{what}", ValueError, r"got a with shape \(.*\); expected", a=value)
        for what, value in (("2d", w[0]), ("4d", w[None])):
            yield bad(f"w-{what}", ValueError, r"got w with shape .*; expected \(E, H/2, 2·I\)", w=value)
        yield bad("a-device", ValueError, " on meta", a=a.to("meta"))
        yield bad("w-device", ValueError, "w is on meta, a on", w=w.to("meta"))
        yield bad("h-no-blocks", ValueError, "holds 40 elements per row; expected a positive multiple", w=w[:, :20])
        yield bad("h-zero", ValueError, "holds 0 elements per row", w=w[:, :0])
        for rows in (0, 64, 126, 192):
            text = f"w has {rows} columns per expert; expected 2·I, with I a positive multiple of 64"
            yield bad(f"columns-{rows}", ValueError, text, w=w.new_zeros(experts, rows, k // 2).mT)
        for count in (0, 1025):
            text = f"w is of {count} experts; expected 1 to 1024"
            yield bad(f"experts-{count}", ValueError, text, w=w.new_zeros(1, 128, k // 2).expand(count, -1, -1).mT)
        yield from stride_errors(good, "w")
        square = self.sample("square", m, experts * 64, 256, NVFP4, "128x4", device)
        yield from stride_errors(square, "w")
        for sample in (good, square):
            yield from scale_stride_errors(sample, *range(2, len(self.names)))
        yield from self._epilogue_errors(good, m, experts, device)
        for error in (*swiglu_errors(good.args), *gate_errors(good.args)):
            yield replace(error, kwargs=kwargs | error.kwargs)
        yield from out_errors(good.args, kwargs, self._outputs(m, experts * 64, device), device)

    def _outputs(self, m: int, n: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return outputs with linear scales, keyed by name."""
        if not self.has_a_scale:
            return {"out": torch.zeros(m, n, dtype=torch.bfloat16, device=device)}
        y, scale = (torch.zeros(m, size, dtype=torch.uint8, device=device) for size in (n // 2, n // 16))
        return {"y": y, "scale": scale.view(torch.float8_e4m3fn)}

    def _epilogue_errors(self, good: Sample, m: int, experts: int, device: torch.device) -> Iterator[ErrorInput]:
        def bad(name: str, what: str, error: type[Exception], match: str, value: torch.Tensor) -> ErrorInput:
            given = {**good.kwargs, name: value}
            return ErrorInput(f"{name.replace('_', '-')}-{what}", good.args, given, error, match)

        shapes: dict[str, tuple[tuple[int, ...], str, list[tuple[int, ...]]]] = {
            "routing": (
                (m, experts),
                r"got routing with shape .*; expected \(4, 2\), one row per row of a",
                [(), (m,), (m - 1, experts), (m, experts + 1), (1, m, experts)],
            ),
            "alpha": (
                (experts,),
                r"got alpha with shape .*; expected \(2,\), or \(2, 2\) for gate and up",
                [(), (1,), (3,), (experts, 1), (experts, 3), (1, experts, 2)],
            ),
            "bias": (
                (experts, 128),
                r"got bias with shape .*; expected \(2, 128\), one element per column of w",
                [(), (128,), (experts, 64), (experts, 127), (1, experts, 128)],
            ),
        }
        if self.has_a_scale:
            text = r"got global_scale with shape .*; expected one element, or \(2,\)"
            shapes["global_scale"] = (experts,), text, [(0,), (3,), (experts, 1), (1, experts)]
        for name, (shape, text, wrong) in shapes.items():
            ones = torch.ones(shape, device=device)
            for other in wrong:
                yield bad(name, f"shape-{list(other)}", ValueError, text, torch.ones(other, device=device))
            for dtype in (torch.float64, torch.int32) if name == "bias" else (torch.bfloat16, torch.float64):
                text = f"got {name} with dtype {short(dtype)}; expected float32"
                yield bad(name, short(dtype), TypeError, text, ones.to(dtype))
            yield bad(name, "device", ValueError, f"{name} is on meta, a on", ones.to("meta"))
            if device.type == "cuda":
                yield bad(name, "cpu", ValueError, f"{name} is on cpu, a on", ones.cpu())
            yield bad(name, "requires-grad", ValueError, "no gradient", ones.clone().requires_grad_())
        text = "got bias with dtype float16; expected float32 or bfloat16"
        yield bad("bias", "float16", TypeError, text, torch.ones(experts, 128, dtype=torch.float16, device=device))
        if self.has_a_scale:
            mxfp4 = self.sample("global-scale-mxfp4", m, experts * 64, 64, MXFP4, "linear", device)
            given = {**mxfp4.kwargs, "global_scale": torch.ones(1, device=device)}
            yield ErrorInput(mxfp4.name, mxfp4.args, given, ValueError, "global_scale is given; mxfp4 takes none")
