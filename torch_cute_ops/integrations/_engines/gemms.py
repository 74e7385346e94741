"""Calls of ops that multiply a layer's input by its weight, for each format of weight and activations.

The calls go through ``torch.ops.cute``, so that ``torch.compile`` sees one node for each op and traces no code of this
package, whose files vLLM would hash.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.nn import QuantLinear
from torch_cute_ops.nn.quantize import SCHEMES

Call = tuple[str, dict[str, Any]]
"""Name of an op, with the static properties of a call as ``torch_cute_ops.warmup`` takes them."""

BLOCK_SIZES: Final = {"nvfp4": NVFP4.block_size, "mxfp4": MXFP4.block_size}
"""Number of elements that share a scale, keyed by FP4 format."""
AUTO: Final = "auto"
INVARIANT_ROWS: Final = 128
"""Number of rows of each GEMM in batch-invariant layers. For a layer of an 8B model in NVFP4 on an H200, the cost model
estimates that such GEMMs take 2.5 times the usual time for 1 row, and 1.7 times for 8,192 rows."""
STATIC: Final = {"static_weight": True}
"""Argument that promises that the previous launch does not write the weight. It is true because engines synchronise
after they load weights."""


@dataclass(frozen=True)
class Form:
    """Static description of a layer: layers with equal forms call the same kernels.

    Attributes:
        scheme: format of the weight, a key of ``SCHEMES``.
        activations: ``"16bit"``, ``"fp4"`` or ``"fp8"``.
        n: rows of the weight on this rank.
        k: columns of the weight on this rank.
        parts: number of merged layers. If the format has a scale per tensor, each merged layer has a separate scale.
        has_input_scale: True if the checkpoint contains a scale of the input, which is used unless ``activations`` is
            ``"16bit"``.
        dtype: dtype of input, result and bias.
        has_bias: True if the GEMM adds a bias.
        backend: ``"auto"``; or the name of the backend of a layer whose results do not depend on the batch. Such a
            layer multiplies ``INVARIANT_ROWS`` rows at a time.
    """

    scheme: str
    activations: str
    n: int
    k: int
    parts: int
    has_input_scale: bool
    dtype: torch.dtype
    has_bias: bool
    backend: str = AUTO

    @property
    def is_invariant(self) -> bool:
        """True if a row of the result does not depend on the other rows."""
        return self.backend != AUTO

    @property
    def reason_unsupported(self) -> str | None:
        """Reason that no kernel supports the size of the weight, or None."""
        reason: str | None = SCHEMES[self.scheme].reason_unsupported(self.n, self.k, self.activations)  # type: ignore[arg-type]
        if reason is None and self.scheme in ("fp8_tensor", "fp8_channel") and (self.n % 8 or self.k % 64):
            return f"the weight is ({self.n}, {self.k}); expected multiples of 8 and 64"
        return reason

    @property
    def alpha(self) -> str | None:
        """Kind of the factor of an FP4 GEMM's result, or None if it has no factor."""
        if self.scheme != "nvfp4":
            return None
        return "column" if self.parts > 1 else "one"

    def bucket(self, m: int) -> int:
        """Return a key that is equal for numbers of rows that call the same kernels."""
        return bucket(INVARIANT_ROWS if self.is_invariant else m)

    def calls(self, m: int) -> Iterator[Call]:
        """Yield the calls of ops for ``m`` rows."""
        return product_of(self).calls(self, INVARIANT_ROWS if self.is_invariant else m)


class Gemm(Protocol):
    """Product of a layer's input and its weight."""

    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``rows · Wᵀ + bias``, (M, N), for rows (M, K) and the tensors that are attributes of ``layer``."""


def product_of(form: Form) -> "_Product":
    """Return the product for a form, which multiplies all rows of a call in one GEMM."""
    if form.scheme == "fp8_block":
        return _FP8Block(form.backend)
    if form.scheme not in BLOCK_SIZES:
        return _FP8(form.backend, form.has_input_scale)
    of: dict[str, Callable[[str, str], _Product]] = {"16bit": _FP4WeightOnly, "fp4": _FP4, "fp8": _FP8FP4}
    return of[form.activations](form.backend, form.scheme)


def tensors_of(module: QuantLinear) -> Mapping[str, Tensor]:
    """Return the tensors of a layer of ``torch_cute_ops.nn`` under the names by which a ``Gemm`` reads them."""
    return {name: tensor for name, tensor in module.named_buffers() if not name.startswith("_")}


@dataclass(frozen=True)
class _Product:
    """Product with one GEMM.

    Attributes:
        backend: name of the GEMM's backend.
    """

    backend: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the GEMM."""
        return {**STATIC, **({} if self.backend == AUTO else {"backend": self.backend})}

    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``rows · Wᵀ + bias``, as ``Gemm``."""
        raise NotImplementedError

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        """Yield the calls of ops for ``m`` rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class _FP4Weight(_Product):
    scheme: str

    @property
    def block_size(self) -> int:
        """Elements with a common scale in a row of the weight."""
        return BLOCK_SIZES[self.scheme]

    def alpha(self, layer: Any) -> Tensor | None:
        """Return the factor of the result: one factor per column for merged layers, otherwise one factor for all
        columns."""
        if self.scheme != "nvfp4":
            return None
        alpha: Tensor = layer.alpha if hasattr(layer, "alpha") else layer.weight_scale_2
        return alpha

    def properties(self, form: Form, m: int) -> dict[str, Any]:
        """Return the properties of all GEMMs with an FP4 weight."""
        return _properties(form, m, alpha=form.alpha, block_size=self.block_size)


class _FP4WeightOnly(_FP4Weight):
    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.cute.mm_fp4_weight_only(
            rows, layer.weight.t(), layer.weight_scale, self.alpha(layer), bias, block_size=self.block_size,
            **self.options,
        )  # fmt: skip

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        yield "mm_fp4_weight_only", {**self.properties(form, m), "dtype": form.dtype}


class _FP4(_FP4Weight):
    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        scale = layer.input_global_scale if self.scheme == "nvfp4" else None
        a, a_scale = torch.ops.cute.fp4_quantize(rows, scale, block_size=self.block_size)
        return torch.ops.cute.mm_fp4(
            a, layer.weight.t(), a_scale, layer.weight_scale, self.alpha(layer), bias, rows.dtype, self.block_size,
            **self.options,
        )  # fmt: skip

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        yield (
            "fp4_quantize",
            {
                "hidden": form.k,
                "dtype": form.dtype,
                "global_scale": self.scheme == "nvfp4",
                "block_size": self.block_size,
            },
        )
        yield "mm_fp4", {**self.properties(form, m), "out_dtype": form.dtype}


class _FP8FP4(_FP4Weight):
    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        a, a_scale = torch.ops.cute.fp8_quantize(rows, granularity="block128")
        return torch.ops.cute.mm_fp8_fp4(
            a, layer.weight.t(), a_scale, layer.weight_scale, self.alpha(layer), bias, rows.dtype, self.block_size,
            **self.options,
        )  # fmt: skip

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        yield "fp8_quantize", {"hidden": form.k, "dtype": form.dtype, "granularity": "block128"}
        yield "mm_fp8_fp4", {**self.properties(form, m), "out_dtype": form.dtype}


class _FP8Block(_Product):
    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        a, a_scale = torch.ops.cute.fp8_quantize(rows, granularity="block128")
        return torch.ops.cute.mm_fp8_block(
            a, layer.weight.t(), a_scale, layer.weight_scale_inv, None, bias, rows.dtype, **self.options
        )

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        yield "fp8_quantize", {"hidden": form.k, "dtype": form.dtype, "granularity": "block128"}
        yield "mm_fp8_block", _properties(form, m, out_dtype=form.dtype)


@dataclass(frozen=True)
class _FP8(_Product):
    """Product of weights with a scale per tensor or per row. ``row_scale`` contains one factor for each row of merged
    tensors.

    Attributes:
        is_static: True for a calibrated scale of the input, False for a scale per row.
    """

    is_static: bool

    def __call__(self, layer: Any, rows: Tensor, bias: Tensor | None) -> Tensor:
        scale = layer.input_scale if self.is_static else None
        a, a_scale = torch.ops.cute.fp8_quantize(rows, scale, granularity="tensor" if self.is_static else "token")
        factor = layer.weight_scale
        if hasattr(layer, "row_scale") and factor.numel() > 1:
            factor = layer.row_scale
        return torch.ops.cute.mm_fp8(a, layer.weight.t(), a_scale, factor.view(-1), bias, rows.dtype, **self.options)

    def calls(self, form: Form, m: int) -> Iterator[Call]:
        granularity = "tensor" if self.is_static else "token"
        yield "fp8_quantize", {"hidden": form.k, "dtype": form.dtype, "granularity": granularity}
        one = form.scheme == "fp8_tensor" and form.parts == 1
        yield "mm_fp8", _properties(form, m, out_dtype=form.dtype, one_a_scale=self.is_static, one_b_scale=one)


def _properties(form: Form, m: int, **own: Any) -> dict[str, Any]:
    """Return the properties of all GEMMs, and ``own``, without values that are None."""
    bias = form.dtype if form.has_bias else None
    given = {"n": form.n, "k": form.k, "m": m, "bias_dtype": bias, **own, **STATIC}
    if form.is_invariant:
        given["backend"] = form.backend
    return {name: value for name, value in given.items() if value is not None}
