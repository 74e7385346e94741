"""Samples and error inputs of the FP4 GEMMs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from samples._epilogue import (
    Epilogue,
    epilogue_errors,
    epilogues,
    exact_epilogue,
    special_epilogues,
)
from samples._fp4 import FORMATS
from samples._inputs import ErrorInput, Sample
from samples._prefetch import prefetch_errors, prefetched, prefetches
from samples._row_errors import error_maker, out_errors
from samples._rows import DTYPES, short
from samples._weights import scale_stride_errors, stride_errors, unaligned, with_padding
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import from_linear, weight_layout

SCALE_BYTES = {"e4m3": (0x20, 0x50), "ue8m0": (120, 132)}
"""Range of random scale bytes for each scale format: e4m3 from 2^-3 to 2^3, ue8m0 from 2^-7 to 2^4."""
POWERS = {"e4m3": (0x28, 0x41, 8), "ue8m0": (125, 129, 1)}
"""Range of scale bytes that are powers of two from 1/4 to 2, with which sums are exact."""


def random_matrix(
    rows: int,
    k: int,
    fmt: FP4Format,
    layout: str,
    device: torch.device,
    scales: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes and scales of a (rows, K) matrix. Scale bytes are drawn from ``range(*scales)``; padding is
    NaN."""
    low, high, step = (*(scales or SCALE_BYTES[fmt.scale_format]), 1)[:3]
    linear = torch.randint(0, (high - low - 1) // step + 1, (rows, k // fmt.block_size), device=device) * step + low
    placed = from_linear(linear.to(torch.uint8) + 1, SCALE_LAYOUTS[layout])
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device)
    # Replace the zeros that ``from_linear`` writes to padding by NaN, which shows if the op reads padding.
    nan = 0x7F if fmt == NVFP4 else 0xFF
    return codes, torch.where(placed == 0, nan, placed - 1).to(torch.uint8).view(fmt.scale_dtype)


@dataclass(frozen=True)
class FP4Samples:
    """Base class of the samples of ops that multiply an FP4 weight.

    Attributes:
        has_a_scale: True if ``a`` is FP4, with scales.
    """

    has_a_scale: bool
    sizes: ClassVar[tuple[int, int, int]]
    """M, N and K of samples that test values."""
    gpu_backend: ClassVar[str] = "routed"
    """Name of a backend that does not support CPUs."""
    weight: ClassVar[str] = "w"
    """Name of the weight argument."""

    def sample(
        self,
        name: str,
        m: int,
        n: int,
        k: int,
        fmt: FP4Format,
        layout: str,
        device: torch.device,
        *,
        experts: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        scales: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> Sample:
        """Return a call. ``dtype`` is the dtype of a 16-bit ``a``. If the op has experts, each expert owns 64 columns
        of the weight, unless ``experts`` gives their number."""
        experts = experts or n // 64
        b, b_scale = self.matrix(n, experts, k, fmt, weight_layout(SCALE_LAYOUTS[layout]), device, scales)
        kwargs = {**self.defaults(m, k, experts, fmt, device), "block_size": fmt.block_size, **kwargs}
        if not self.has_a_scale:
            return Sample(name, (torch.randn(m, self.a_width(k), device=device).to(dtype), b, b_scale), kwargs)
        a, a_scale = random_matrix(m, k, fmt, layout, device, scales)
        return Sample(name, (a, b, a_scale, b_scale), kwargs)

    def matrix(
        self, n: int, experts: int, k: int, fmt: FP4Format, layout: ScaleLayout, device: torch.device, scales: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a weight for ``n`` columns of the result, and its scales."""
        raise NotImplementedError

    def a_width(self, k: int) -> int:
        """Return the number of elements in a row of a 16-bit ``a``, if the GEMM sums over ``k`` elements."""
        return k

    def defaults(self, m: int, k: int, experts: int, fmt: FP4Format, device: torch.device) -> dict[str, Any]:
        """Return the default keyword arguments of a sample."""
        return {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments that ``sample`` passes by position."""
        scales = ("a_scale",) if self.has_a_scale else ()
        return "a", self.weight, *scales, f"{self.weight}_scale"

    def by_name(self, sample: Sample) -> dict[str, Any]:
        """Return the positional arguments of ``sample`` by name."""
        return dict(zip(self.names, sample.args, strict=True))

    def changed(self, sample: Sample, name: str | None = None, /, **given: Any) -> Sample:
        """Return a copy of ``sample`` with some operands replaced, and a new name if one is given."""
        return replace(sample, name=name or sample.name, args=tuple((self.by_name(sample) | given).values()))

    @property
    def layouts(self) -> tuple[str, ...]:
        """Scale layouts that the op accepts."""
        return tuple(SCALE_LAYOUTS) if self.has_a_scale else ("linear", "128x4")

    def common_values(self, device: torch.device) -> Iterator[Sample]:
        """Yield scales with exact sums, scales that are NaN, formats and backends by name, and a static weight."""
        for fmt in FORMATS:
            values = (*self.sizes, fmt, "linear", device)
            yield self.sample(f"{fmt.name}-exact", *values, scales=POWERS[fmt.scale_format])
            sample = self.sample(f"{fmt.name}-nan-scales", *values)
            for scale in sample.args[2:]:
                scale.view(torch.uint8)[..., 1::7, -1] = 0x7F if fmt == NVFP4 else 0xFF
            yield sample
            name = fmt.scale_format
            yield self.sample(f"format-named-{name}", *self.sizes, fmt, "128x4", device, scale_format=name)
        for layout in self.layouts:
            yield self.sample(f"layout-named-{layout}", *self.sizes, NVFP4, layout, device, scale_layout=layout)
            if layout != "linear":
                yield from self._foreign_tiles(layout, device)
        values = (*self.sizes, NVFP4, "128x4", device)
        for backend in ("auto", "reference"):
            yield self.sample(f"backend-{backend}", *values, backend=backend)
        yield self.sample("static-weight", *values, static_weight=True)

    def _foreign_tiles(self, layout: str, device: torch.device) -> Iterator[Sample]:
        """Yield calls whose tiled scales have other libraries' shapes (a flat tensor, or a padded matrix), or gaps
        between rows of tiles."""
        sample = self.sample("", *self.sizes, NVFP4, layout, device, scale_layout=layout)
        for name in self.names[2:]:
            scale = self.by_name(sample)[name]
            rows = 8 if scale.dim() == 4 else 128
            matrix = scale.reshape(scale.shape[0] * rows, scale.shape[1] * 4)
            short_name = name.replace("_", "-")
            yield self.changed(sample, f"{short_name}-{layout}-flat", **{name: scale.flatten()})
            yield self.changed(sample, f"{short_name}-{layout}-matrix", **{name: matrix})
            bytes_ = scale.view(torch.uint8)
            gaps = torch.cat((bytes_, bytes_), 1)[:, : scale.shape[1]].view(scale.dtype)
            yield self.changed(sample, f"{short_name}-{layout}-gaps", **{name: gaps})

    def common_errors(
        self, tensors: dict[str, torch.Tensor], bad: Callable[..., ErrorInput], device: torch.device
    ) -> Iterator[ErrorInput]:
        """Yield wrong dtypes, scales, layouts, formats and backends, for otherwise valid ``tensors`` in NVFP4 with
        linear scales. ``bad`` is a function made by ``error_maker``."""
        a, weight = tensors["a"], tensors[self.weight]
        for dtype in (torch.int8, torch.float32, torch.float64):
            yield bad(f"a-{short(dtype)}", TypeError, f"got a with dtype {short(dtype)}; expected", a=a.to(dtype))
        for dtype in (torch.int8, torch.bfloat16):
            text = rf"got {self.weight}(\.mT)? with dtype {short(dtype)}; expected uint8"
            yield bad(f"{self.weight}-{short(dtype)}", TypeError, text, **{self.weight: weight.to(dtype)})
        for name in self.names[2:]:
            scale = tensors[name]
            for wrong in (scale.view(torch.uint8), scale.float(), scale.view(torch.float8_e5m2)):
                text = f"got {name} with dtype {short(wrong.dtype)}; expected float8_e4m3fn"
                yield bad(f"{name}-{short(wrong.dtype)}", TypeError, text, **{name: wrong})
            text = f"got {name} with shape .*, the (linear )?scales"
            yield bad(f"{name}-rows", ValueError, text, **{name: scale[:-1]})
            yield bad(f"{name}-narrow", ValueError, text, **{name: scale[..., :-1]})
            for layout, shape in (("128x4", (1, 3, 32, 4, 4)), ("8x4", (1, 3, 8, 4))):
                tiles = torch.zeros(shape, dtype=torch.uint8, device=device).view(scale.dtype)
                yield bad(f"{name}-{layout}", ValueError, "got .*_scale with shape", **{name: tiles})
                given = {"scale_layout": "linear"}
                yield bad(f"{name}-not-linear-{layout}", ValueError, "the linear scales", given, **{name: tiles})
            yield bad(f"{name}-flat", ValueError, f"got {name} with shape", **{name: scale.reshape(-1)})
            yield bad(f"{name}-device", ValueError, f"{name} is on meta, a on", **{name: scale.to("meta")})
        text = "with shape .*, which are not the 128x4 scales"
        narrow = {name: tensors[name][..., :-1] for name in self.names[2:]}
        yield bad("scales-not-tiled", ValueError, text, {"scale_layout": "128x4"}, **narrow)
        for value in ("tiled", ""):
            yield bad(f"layout-{value}", ValueError, f"scale_layout='{value}' is unknown", {"scale_layout": value})
        yield bad("block-size", ValueError, "block_size", {"block_size": 8})
        yield bad("scale-format", ValueError, "scale_format", {"scale_format": "ue8m0"})
        if not self.has_a_scale:
            yield bad("layout-8x4", ValueError, "scale_layout='8x4' is for activations", {"scale_layout": "8x4"})
        yield bad("backend-unknown", ValueError, "backend='marlin' is unknown; use 'auto', ", {"backend": "marlin"})
        if device.type == "cpu":
            text = f"backend '{self.gpu_backend}': needs a CUDA device"
            yield bad("backend-on-cpu", ValueError, text, {"backend": self.gpu_backend})


@dataclass(frozen=True)
class GemmSamples(FP4Samples):
    """Samples and error inputs of one FP4 GEMM."""

    sizes = (9, 24, 128)
    gpu_backend = "cublas"
    weight = "b"
    prefetches: ClassVar[bool] = True
    """True if the op has the argument ``prefetch``."""
    smallest_k: ClassVar[int] = 64
    """K of samples that do not test values."""
    extreme_scales: ClassVar[tuple[int, int]] = (60, 190)
    """Range of MXFP4 scale bytes with which sums stay finite."""

    def matrix(
        self, n: int, experts: int, k: int, fmt: FP4Format, layout: ScaleLayout, device: torch.device, scales: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = random_matrix(n, k, fmt, layout.name, device, scales)
        return codes.mT, scale

    def samples(self, device: torch.device) -> Iterator[Sample]:
        """Yield the samples of the op."""
        yield from self._grid(device)
        yield from self._shapes(device)
        yield from self.common_values(device)
        yield from self._scale_values(device)
        yield from self._alpha_values(device)
        yield from self._epilogues(device)
        yield from self._all_by_position(device)
        yield from self._views(device)
        if self.prefetches:
            yield from self._prefetches(device)

    def _grid(self, device: torch.device) -> Iterator[Sample]:
        for fmt in FORMATS:
            for layout in self.layouts:
                for out_dtype in DTYPES:
                    name = f"{fmt.name}-{layout}-to-{short(out_dtype)}"
                    alpha = torch.rand(1, device=device) + 0.5 if out_dtype is not torch.float16 else None
                    dtype = torch.float16 if out_dtype is torch.float16 else torch.bfloat16
                    yield self.sample(
                        name,
                        *(19, 40, 5 * fmt.block_size, fmt, layout, device),
                        dtype=dtype,
                        alpha=alpha,
                        out_dtype=out_dtype,
                    )

    def _shapes(self, device: torch.device) -> Iterator[Sample]:
        for name, m, n, k in (
            ("one-block", 1, 16, 32),
            ("decode", 1, 256, 2048),
            ("few-rows", 7, 130, 288),
            ("many-rows", 300, 48, 96),
            ("several-tiles", 130, 264, 160),
            ("one-column", 5, 1, 64),
            ("odd-columns", 5, 37, 64),
            ("long", 2, 16, 65536),
            ("no-rows", 0, 24, 64),
            ("no-columns", 3, 0, 64),
        ):
            for fmt in FORMATS:
                yield self.sample(f"{fmt.name}-{name}", m, n, k, fmt, "128x4", device)
        yield self.sample("no-rows-linear", 0, 24, 64, NVFP4, "linear", device)

    def _scale_values(self, device: torch.device) -> Iterator[Sample]:
        sizes = self.sizes
        yield self.sample("nvfp4-small-scales", *sizes, NVFP4, "linear", device, scales=(0, 8), out_dtype=torch.float32)
        extreme: dict[str, Any] = {"scales": self.extreme_scales, "out_dtype": torch.float32}
        yield self.sample("mxfp4-extreme-scales", *sizes, MXFP4, "linear", device, **extreme)

    def _alpha_values(self, device: torch.device) -> Iterator[Sample]:
        for name, value in (("zero", 0.0), ("negative", -3.0), ("nan", torch.nan), ("inf", torch.inf)):
            alpha = torch.full((1,), value, device=device)
            yield self.sample(f"alpha-{name}", *self.sizes, NVFP4, "128x4", device, alpha=alpha)

    def _epilogues(self, device: torch.device) -> Iterator[Sample]:
        for i, out_dtype in enumerate(DTYPES):
            m, n, fmt = (1, 70, 17)[i], (40, 136, 72)[i], FORMATS[i % 2]
            for name, given in epilogues(n, out_dtype, device):
                chosen: dict[str, Any] = {
                    "dtype": torch.float16 if i else torch.bfloat16,
                    "out_dtype": out_dtype,
                    **given,
                }
                yield self.sample(f"{name}-to-{short(out_dtype)}", m, n, 160, fmt, "128x4", device, **chosen)
        m, n, k = self.sizes
        exact = exact_epilogue(n, device) | {"out_dtype": torch.float32}
        yield self.sample("epilogue-exact", m, n, k, NVFP4, "linear", device, scales=POWERS["e4m3"], **exact)
        for name, given in special_epilogues(n, device):
            yield self.sample(name, m, n, k, NVFP4, "linear", device, **given)
        for columns in (1, 37):
            one: Epilogue = dict(zip(("alpha", "bias"), torch.randn(2, columns, device=device), strict=True))
            yield self.sample(f"epilogue-{columns}-columns", 5, columns, 64, NVFP4, "128x4", device, **one)

    def _all_by_position(self, device: torch.device) -> Iterator[Sample]:
        sample = self.sample("positional", *self.sizes, NVFP4, "128x4", device)
        rest = (torch.float16, 16, "e4m3", "128x4", "auto", True, *([prefetched(device)] if self.prefetches else []))
        yield replace(sample, args=(*sample.args, *self._positional(sample, device), *rest), kwargs={})

    def _prefetches(self, device: torch.device) -> Iterator[Sample]:
        """Yield calls with ``prefetch``, for one row and for several rows."""
        for m in (1, *self.sizes[:1]):
            for name, given in prefetches(device):
                yield self.sample(f"{name}-{m}", m, *self.sizes[1:], NVFP4, "128x4", device, prefetch=given)

    def _positional(self, sample: Sample, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the positional arguments between the operands and ``out_dtype``."""
        return torch.rand(1, device=device), torch.rand(self.sizes[1], device=device)

    def _views(self, device: torch.device) -> Iterator[Sample]:
        fp4, e8m0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu

        def plain(name: str, fmt: FP4Format = NVFP4, layout: str = "linear") -> tuple[Sample, torch.Tensor, Any, Any]:
            sample = self.sample(name, 6, 24, self.smallest_k, fmt, layout, device)
            return sample, sample.args[0], sample.args[1], sample.args[-1]

        b_name = self.names[1]
        b_scale_name = self.names[-1]
        sample, a, b, scale = plain(f"{b_name}-float4")
        yield self.changed(sample, **{b_name: b.view(fp4)})
        if self.has_a_scale:
            yield self.changed(sample, "a-float4", a=a.view(fp4))
        for name, weight, scales in (
            ("every-other-column", b[:, ::2], scale[::2]),
            ("pitched", with_padding(b), scale),
            ("unaligned", unaligned(b), scale),
        ):
            given = {b_name: weight, b_scale_name: scales}
            yield self.changed(sample, f"{b_name}-{name}", **given)
        yield self.changed(sample, "a-columns-first", a=a.t().contiguous().t())
        wide_a = torch.cat((a, a, a), 1)
        yield self.changed(sample, "a-row-strided", a=wide_a[:, : a.shape[1]])
        yield self.changed(sample, "a-offset", a=wide_a[:, 1 : 1 + a.shape[1]])
        yield self.changed(sample, "a-rows-expanded", a=a[:1].expand(6, -1))
        sample, *_, scale = plain(f"{b_name}-scale-e8m0", MXFP4, "128x4")
        yield self.changed(sample, **{b_scale_name: scale.view(e8m0)})
        sample, *_ = plain("", NVFP4, "128x4")
        for name, alpha in self._alpha_views(6, device):
            yield replace(sample, name=f"alpha-{name}", kwargs={**sample.kwargs, "alpha": alpha})

    def _alpha_views(self, m: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        yield "0d", torch.rand((), device=device)
        yield "2d", torch.rand((1, 1), device=device)

    def errors(self, device: torch.device) -> Iterator[ErrorInput]:
        """Yield the error inputs of the op."""
        m, n, k = 4, 24, self.smallest_k
        good = self.sample("good", m, n, k, NVFP4, "linear", device)
        kwargs, b_name = good.kwargs, self.weight
        tensors = self.by_name(good)
        bad, a, b = error_maker(tensors, kwargs), tensors["a"], tensors[b_name]
        yield from self.common_errors(tensors, bad, device)
        for name, tensor in (("a", a), (b_name, b)):
            yield bad(f"{name}-1d", ValueError, rf"got {name} with shape \(\d+,\); expected", **{name: tensor[0]})
            yield bad(f"{name}-3d", ValueError, rf"got {name} with shape .*; expected", **{name: tensor[None]})
            yield bad(f"{name}-device", ValueError, " on meta", **{name: tensor.to("meta")})
        text = rf"got a with shape \(4, {a.shape[1] // 2}\); expected"
        yield bad("a-narrow", ValueError, text, a=a[:, : a.shape[1] // 2])
        for name, held, text in (("k-no-blocks", 40, "; expected a positive multiple"), ("k-zero", 0, "")):
            yield bad(name, ValueError, f"holds {held} elements per row{text}", **{b_name: b[: held // 2]})
        for error in self._epilogue_errors(m, n, device):
            yield replace(error, args=good.args, kwargs=kwargs | error.kwargs)
        for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn):
            yield bad(f"out-dtype-{dtype}", TypeError, f"out_dtype is {dtype}; expected", {"out_dtype": dtype})
        out = {"out": torch.zeros(m, n, dtype=torch.bfloat16, device=device)}
        yield from out_errors(good.args, kwargs, out, device)
        yield from stride_errors(good, b_name)
        square = self.sample("square", m, k // 2, k, NVFP4, "128x4", device)
        yield from stride_errors(square, b_name)
        for sample in (good, self.sample("tiles", m, 136, 2 * k, NVFP4, "128x4", device)):
            yield from scale_stride_errors(sample, *range(2, len(self.names)))
        if self.prefetches:
            yield from prefetch_errors(bad, device)

    def _epilogue_errors(self, m: int, n: int, device: torch.device) -> Iterator[ErrorInput]:
        """Yield wrong values of ``alpha`` and ``bias`` for ``m`` rows and ``n`` columns, without other arguments."""
        return epilogue_errors(n, device)
