"""Samples and error inputs of the GEMMs that sum over experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from samples._epilogue import epilogue_errors
from samples._fp4 import FORMATS
from samples._fp4_gemm import GemmSamples
from samples._inputs import ErrorInput, Sample
from samples._rows import DTYPES, short
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.scale_layout import from_linear, to_linear, weight_layout


def dense_alpha(m: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return routing weights with which every token uses every expert."""
    return torch.rand(m, experts, device=device) + 0.1


def top_alpha(m: int, experts: int, device: torch.device, top: int = 2) -> torch.Tensor:
    """Return positive routing weights that route each token to ``top`` experts and sum to 1 for each token."""
    best = torch.randn(m, experts, device=device).topk(min(top, experts), dim=1)
    return torch.zeros(m, experts, device=device).scatter(1, best.indices, best.values.softmax(1))


def one_expert_alpha(m: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return routing weights that route every token only to the last expert."""
    alpha = torch.zeros(m, experts, device=device)
    alpha[:, -1] = torch.rand(m, device=device) + 0.5
    return alpha


@dataclass(frozen=True)
class ExpertGemmSamples(GemmSamples):
    """Samples and error inputs of one GEMM that sums over experts."""

    sizes = (9, 24, 256)
    gpu_backend = "routed"
    weight = "w"
    prefetches = False
    smallest_k = 128
    extreme_scales = (80, 170)  # used together with factors from 2^-47 to 2^42

    def defaults(self, m: int, k: int, experts: int, fmt: FP4Format, device: torch.device) -> dict[str, Any]:
        """Return ``alpha`` for experts of 64 elements. Each token uses two experts."""
        return {"alpha": top_alpha(m, k // 64, device)}

    def _grid(self, device: torch.device) -> Iterator[Sample]:
        for fmt in FORMATS:
            for layout in self.layouts:
                for out_dtype in DTYPES:
                    yield self.sample(
                        f"{fmt.name}-{layout}-to-{short(out_dtype)}",
                        *(19, 40, 3 * 64, fmt, layout, device),
                        dtype=torch.float16 if out_dtype is torch.float16 else torch.bfloat16,
                        alpha=(dense_alpha if out_dtype == torch.float32 else top_alpha)(19, 3, device),
                        out_dtype=out_dtype,
                    )

    def _shapes(self, device: torch.device) -> Iterator[Sample]:
        for name, m, n, experts, width, fmt in (
            ("one-expert", 1, 16, 1, 64, NVFP4),
            ("decode", 1, 256, 16, 64, NVFP4),
            ("decode-mxfp4", 1, 200, 16, 64, MXFP4),
            ("few-rows", 7, 72, 3, 320, NVFP4),
            ("few-rows-mxfp4", 6, 72, 3, 320, MXFP4),
            ("many-rows", 260, 48, 4, 64, NVFP4),
            ("several-tiles", 130, 264, 3, 128, MXFP4),
            ("tail-of-8", 5, 8, 4, 192, NVFP4),
            ("tail-of-72", 17, 200, 2, 256, MXFP4),
            ("long", 3, 136, 2, 512, NVFP4),
            ("many-experts", 3, 24, 1024, 64, NVFP4),
            ("odd-columns", 5, 37, 2, 64, NVFP4),
            ("no-rows", 0, 24, 2, 64, NVFP4),
            ("no-rows-mxfp4", 0, 24, 2, 64, MXFP4),
            ("no-columns", 3, 0, 2, 64, NVFP4),
        ):
            alpha = top_alpha(m, experts, device, 8)
            yield self.sample(name, m, n, experts * width, fmt, "128x4", device, alpha=alpha)
        yield self.sample("no-rows-linear", 0, 24, 128, NVFP4, "linear", device)

    def _epilogues(self, device: torch.device) -> Iterator[Sample]:
        (m, n, k), experts = self.sizes, self.sizes[2] // 64
        bias = torch.randn(experts, n, device=device) * 8
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e38], device=device)
        forms: dict[str, dict[str, Any]] = {
            "float32": {"bias": bias},
            "bfloat16": {"bias": bias.bfloat16()},
            "of-result": {"bias": bias.half(), "out_dtype": torch.float16, "dtype": torch.float16},
            "dense": {"bias": bias, "alpha": dense_alpha(m, experts, device), "out_dtype": torch.float32},
            "no-experts": {"bias": bias, "alpha": torch.zeros(m, experts, device=device)},
            "special": {"bias": special.repeat(n)[: experts * n].view(experts, n)},
            "strided": {"bias": torch.cat((bias, bias), 1)[:, ::2]},
            "unaligned": {"bias": torch.cat((bias, bias), 1)[:, 1 : n + 1]},
            "expanded": {"bias": bias[:1].expand(experts, -1)},
        }
        for name, given in forms.items():
            yield self.sample(f"bias-{name}", m, n, k, NVFP4, "128x4", device, **given)
        yield self.poisoned("bias-poison", m, n, k, NVFP4, "linear", device, bias=bias)
        yield self.sample("bias-mxfp4", m, n, k, MXFP4, "128x4", device, bias=bias.bfloat16())

    def _positional(self, sample: Sample, device: torch.device) -> tuple[torch.Tensor, ...]:
        alpha = sample.kwargs["alpha"]
        return alpha, torch.randn(alpha.shape[1], self.sizes[1], device=device)

    def _alpha_values(self, device: torch.device) -> Iterator[Sample]:
        m, _, k = self.sizes
        experts = k // 64
        top, dense = top_alpha(m, experts, device), dense_alpha(m, experts, device)
        with_nan, with_inf, some = top.clone(), top.clone(), dense.clone()
        with_nan[2, 1], with_inf[3, 2], some[m // 2 :] = torch.nan, -torch.inf, 0
        for name, alpha in (
            ("dense", dense),
            ("top-2", top),
            ("one-hot", top_alpha(m, experts, device, 1)),
            ("one-expert", one_expert_alpha(m, experts, device)),
            ("zero", torch.zeros_like(top)),
            ("negative-zero", -torch.zeros_like(top)),
            ("some-rows", some),
            ("negative", -dense),
            ("of-both-signs", torch.randn_like(top)),
            ("nan", with_nan),
            ("inf", with_inf),
        ):
            yield self.sample(f"alpha-{name}", *self.sizes, NVFP4, "128x4", device, alpha=alpha)
        for name, power in (("huge", 90), ("tiny", -120), ("subnormal", -140)):
            yield self.sample(
                f"alpha-{name}",
                *(*self.sizes, MXFP4, "linear", device),
                alpha=top * 2.0**power,
                out_dtype=torch.float32,
            )
        for fmt in FORMATS:
            for layout in self.layouts:
                yield self.poisoned(f"{fmt.name}-{layout}-poison", *self.sizes, fmt, layout, device)

    def poisoned(
        self, name: str, m: int, n: int, k: int, fmt: FP4Format, layout: str, device: torch.device, **kwargs: Any
    ) -> Sample:
        """Return a call with NaN in operands that must not be read: ``a`` or its scales wherever ``alpha`` is zero, and
        the weight scales of the first expert, to which no token is routed. A third of the zeros in ``alpha`` are
        negative."""
        experts = k // 64
        alpha = top_alpha(m, experts, device)
        alpha[:, 0] = 0
        alpha = torch.where((alpha == 0) & (torch.rand_like(alpha) < 0.3), -0.0, alpha)
        sample = self.sample(name, m, n, k, fmt, layout, device, alpha=alpha, **kwargs)
        w_layout = weight_layout(SCALE_LAYOUTS[layout]).name
        unused = (torch.arange(experts, device=device) == 0).expand(n, -1)
        scales = {"w_scale": with_nan_scales(sample.args[-1], unused, k, fmt, w_layout)}
        a = sample.args[0]
        if self.has_a_scale:
            scales["a_scale"] = with_nan_scales(sample.args[2], alpha == 0, k, fmt, layout)
        else:
            a = torch.where((alpha == 0).repeat_interleave(64, 1), torch.nan, a).to(a.dtype)
        return self.changed(sample, a=a, **scales)

    def _alpha_views(self, m: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        experts = self.smallest_k // 64

        def base(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device)

        yield "transposed", base(experts, m).t()
        yield "row-strided", base(m, experts + 3)[:, :experts]
        yield "column-step", base(m, 2 * experts)[:, 1::2]
        yield "expanded", base(1, 1).expand(m, experts)
        yield "rows-expanded", base(1, experts).expand(m, -1)
        yield "experts-expanded", base(m, 1).expand(-1, experts)

    def _epilogue_errors(self, m: int, n: int, device: torch.device) -> Iterator[ErrorInput]:
        experts = self.smallest_k // 64
        good = torch.ones(m, experts, device=device)

        def bad(what: str, error: type[Exception], match: str, alpha: torch.Tensor) -> ErrorInput:
            return ErrorInput(f"alpha-{what}", (), {"alpha": alpha}, error, match)

        for dtype in (torch.bfloat16, torch.float64, torch.int32):
            text = f"got alpha with dtype {short(dtype)}; expected float32"
            yield bad(short(dtype), TypeError, text, good.to(dtype))
        for shape in ((), (m,), (experts,), (1, m, experts)):
            text = rf"got alpha with shape \({', '.join(map(str, shape))},?\); expected \(M, E\)"
            yield bad(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, device=device))
        for rows in (m - 1, m + 1, 1, 0):
            text = rf"got alpha with shape \({rows}, {experts}\); expected \({m}, {experts}\), one row per row of a"
            yield bad(f"rows-{rows}", ValueError, text, torch.ones(rows, experts, device=device))
        for count in (0, 3, 2 * experts, self.smallest_k, 2 * self.smallest_k):
            text = f"for {count} experts, and a column of w has {self.smallest_k} elements; expected the same .* of 64"
            yield bad(f"experts-{count}", ValueError, text, torch.ones(m, count, device=device))
        yield bad("device", ValueError, "alpha is on meta", good.to("meta"))
        if device.type == "cuda":
            yield bad("cpu", ValueError, "alpha is on cpu", good.cpu())
        yield bad("requires-grad", ValueError, "no gradient", good.clone().requires_grad_())
        for error in epilogue_errors(n, device, experts):
            if error.name.startswith("bias"):
                yield replace(error, kwargs={"alpha": good, **error.kwargs})
        for bias in ((n,), (experts + 1, n), (1, n), (n, experts)):
            text = r"got bias with shape .*, one element per column of the result"
            given = {"alpha": good, "bias": torch.ones(bias, device=device)}
            yield ErrorInput(f"bias-shape-{list(bias)}", (), given, ValueError, text)


def with_nan_scales(scale: torch.Tensor, where: torch.Tensor, k: int, fmt: FP4Format, layout: str) -> torch.Tensor:
    """Return ``scale`` with NaN for the (row, expert) pairs that the mask ``where`` (rows, E) selects."""
    rows, experts = where.shape
    blocks = k // fmt.block_size
    linear = to_linear(scale, SCALE_LAYOUTS[layout], rows, blocks).view(torch.uint8)
    chosen = where.repeat_interleave(blocks // experts, 1)
    nan = 0x7F if fmt == NVFP4 else 0xFF
    return from_linear(torch.where(chosen, nan, linear).to(torch.uint8).view(scale.dtype), SCALE_LAYOUTS[layout])
