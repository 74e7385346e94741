"""Quantised weights as one object, without modules: ``quantize``, ``linear`` and ``dequantize``.

``encode`` and the functions for FP8 blocks are shared with the layers of :mod:`torch_cute_ops.nn`.
"""

import math
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, MXFP8, NVFP4, FP4Format, nvfp4_global_scale
from torch_cute_ops.formats.fp4 import E4M3_MAX, _has_value, decode_ue8m0
from torch_cute_ops.formats.fp8 import float32_scales
from torch_cute_ops.formats.scale_layout import (
    SCALE_LAYOUTS,
    FP4ScaleLayout,
    convert_scales,
    fitting_layouts,
    layout_of_operand,
)
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops._checks import INPUT_DTYPES, PACKED_DTYPES, is_transposed_scale
from torch_cute_ops.ops._fp8_gemm import MX_SCALE_DTYPES
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp4_quantize_four_over_six import fp4_quantize_four_over_six
from torch_cute_ops.ops.fp8_quantize import fp8_quantize
from torch_cute_ops.ops.fp8_quantize_block128x128 import fp8_quantize_block128x128
from torch_cute_ops.ops.mm_fp4 import mm_fp4
from torch_cute_ops.ops.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.ops.mm_fp8_block import mm_fp8_block
from torch_cute_ops.ops.mm_fp8_fp4 import mm_fp8_fp4
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.dispatch import is_proxy

WeightFormat = Literal["nvfp4", "mxfp4", "fp8_block", "mxfp8"]
LinearActivations = Literal["auto", "16bit", "fp8", "fp4"]

FP4_FORMATS: Final[dict[str, FP4Format]] = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}
MXFP8_NAME: Final = "mxfp8"
"""Name of MXFP8 among the formats of weights."""
FP8_BLOCK: Final = FP8_BLOCK128.block_size
"""Number of rows, and of columns, of the block of an FP8 weight that shares a scale."""


class _Kind(NamedTuple):
    """Requirements of one weight format.

    Attributes:
        multiples: numbers that must divide N and K, because the format's GEMMs need this.
        activations: values of ``activations`` that ``linear`` accepts for this format; the first is the default.
    """

    multiples: tuple[int, int]
    activations: tuple[str, ...]


_KINDS: Final[dict[str, _Kind]] = {
    "nvfp4": _Kind((8, 32), ("16bit", "fp8")),
    "mxfp4": _Kind((8, 32), ("16bit", "fp8", "fp4")),
    "fp8_block": _Kind((8, 64), ("fp8",)),
    "mxfp8": _Kind((8, 64), ("fp8",)),
}
_FP8_MULTIPLE: Final = 64
"""Number that must divide K if activations are FP8."""


class QuantizedWeight:
    """A quantised matrix (N, K), as :func:`quantize` returns it, for :func:`linear` and :func:`dequantize`.

    The class is a pytree node: its tensors are the leaves, and ``format`` and ``shape`` are static. ``tree_map``
    therefore changes only the tensors, and the object can be an input of compiled and exported programs. The object is
    immutable, and its tensors are never cast.

    Args:
        codes: (N, K/2) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble (FP4); (N, K)
            float8_e4m3fn (FP8).
        scale: block scales. NVFP4: float8_e4m3fn. MXFP4: uint8 or float8_e8m0fnu. FP4 scales may be linear or tiled, as
            :func:`fp4_quantize` returns them; linear scales are converted to the 128x4 layout. FP8 blocks: (⌈N/128⌉,
            ⌈K/128⌉) float32, or float8_e8m0fnu, which is converted to float32; decoded blocks are multiplied by these
            scales. MXFP8: uint8 or float8_e8m0fnu, linear or tiled; the layout is kept.
        global_scale: float32, one element, positive and finite, by which the matrix was multiplied before it was
            encoded. It equals compressed-tensors' ``weight_global_scale``, and 1 / ModelOpt's ``weight_scale_2``. NVFP4
            requires it; other formats take None. The value is checked on a CPU, and on a GPU if
            ``TORCH_CUTE_OPS_CHECK=1``. No check can detect that the reciprocal was passed.
        format: ``"nvfp4"``, ``"mxfp4"``, ``"fp8_block"`` or ``"mxfp8"``.

    Attributes:
        alpha: (1,) float32, 1 / ``global_scale``, by which a GEMM's result must be multiplied. None without a global
            scale.
        shape: (N, K).

    Raises:
        ValueError: for an unknown format, a wrong shape, strides or device, or a ``global_scale`` that is missing, not
            used, or not positive and finite, or whose reciprocal overflows.
        TypeError: for a wrong dtype, or an argument that is not a tensor.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    alpha: Tensor | None
    format: WeightFormat
    shape: tuple[int, int]

    def __init__(self, codes: Tensor, scale: Tensor, global_scale: Tensor | None = None, *, format: WeightFormat):
        kind = _kind_of("QuantizedWeight", format)
        given = {"codes": codes, "scale": scale, "global_scale": global_scale}
        shape = _checked_shape(given, format, kind)
        fmt = FP4_FORMATS.get(format)
        if fmt is not None:
            codes = codes.view(torch.uint8)
            layout: FP4ScaleLayout = "linear" if layout_of_operand(scale).is_linear else "128x4"
            scale = convert_scales(scale, *shape, layout, "128x4").view(fmt.scale_dtype)
        elif format == MXFP8_NAME:
            scale = scale.view(torch.uint8)
        else:
            scale = float32_scales(scale)
        alpha = None
        if global_scale is not None:
            global_scale = global_scale.reshape(1)
            alpha = global_scale.reciprocal()
        _fill(self, (codes, scale, global_scale, alpha, format, shape))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"QuantizedWeight is immutable: {name} cannot be set; make a new object")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"QuantizedWeight is immutable: {name} cannot be deleted")

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "QuantizedWeight":
        """Return the object with all tensors on ``device``.

        Raises:
            TypeError: if a dtype is given, because codes and scales are never cast.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"QuantizedWeight.to: got {device}; expected a device, since codes and scales are not cast")
        moved: QuantizedWeight = pytree.tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)
        return moved

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """Return the object's node in a graph that ``torch.fx.symbolic_trace`` records."""
        tensors = tuple(tracer.create_arg(each) for each in (self.codes, self.scale, self.global_scale))
        return tracer.create_node("call_function", QuantizedWeight, tensors, {"format": self.format})

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Total size of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in _tensors(self))

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.format}, {self.shape}, device='{self.device}')"


_FIELDS: Final = ("codes", "scale", "global_scale", "alpha", "format", "shape")


def _fill(made: QuantizedWeight, values: Iterable[Any]) -> QuantizedWeight:
    for name, value in zip(_FIELDS, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _tensors(q: QuantizedWeight) -> list[Tensor]:
    if q.global_scale is None or q.alpha is None:
        return [q.codes, q.scale]
    return [q.codes, q.scale, q.global_scale, q.alpha]


Context = tuple[WeightFormat, tuple[int, int]]


def _flatten(q: QuantizedWeight) -> tuple[list[Tensor], Context]:
    return _tensors(q), (q.format, q.shape)


def _flatten_with_keys(q: QuantizedWeight) -> tuple[list[tuple[Any, Tensor]], Context]:
    tensors = _tensors(q)
    return [(pytree.GetAttrKey(name), tensor) for name, tensor in zip(_FIELDS, tensors, strict=False)], _flatten(q)[1]


def _unflatten(children: Iterable[Any], context: Context) -> QuantizedWeight:
    # Do not check the children: tree_map also builds trees whose leaves are shapes, names or other objects.
    children = list(children)
    return _fill(object.__new__(QuantizedWeight), (*children, *[None] * (4 - len(children)), *context))


pytree.register_pytree_node(
    QuantizedWeight,
    _flatten,
    _unflatten,
    serialized_type_name="torch_cute_ops.QuantizedWeight",
    to_dumpable_context=lambda context: [context[0], [*context[1]]],
    from_dumpable_context=lambda dumped: (dumped[0], (dumped[1][0], dumped[1][1])),
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([QuantizedWeight])


# Public functions


def quantize(
    w: Tensor, format: WeightFormat = "nvfp4", *, amax: Tensor | None = None, four_over_six: bool = False
) -> QuantizedWeight:
    """Quantise a weight, and return codes and scales as one object.

    An NVFP4 weight gets the global scale ``448 · 6 / amax``, or ``256 · 6 / amax`` with ``four_over_six``;
    :func:`linear` and :func:`dequantize` apply it.

    Args:
        w: (N, K) bfloat16, float16 or float32, as in ``nn.Linear.weight``. N is a multiple of 8. K is a multiple of 32,
            or of 64 with ``"fp8_block"`` and ``"mxfp8"``.
        format: ``"nvfp4"`` (4-bit codes, one e4m3 scale per 16 codes, and a global scale), ``"mxfp4"`` (4-bit codes,
            and one power of 2 per 32 codes), ``"fp8_block"`` (FP8, and one scale per 128 × 128 elements, as in
            DeepSeek-V3), or ``"mxfp8"`` (FP8, and one power of 2 per 32 elements of a row; the scales are linear).
        amax: one element, the largest magnitude that the global scale covers, for weights that share a global scale,
            such as q, k and v. None means the largest magnitude of ``w``. Only for ``"nvfp4"``.
        four_over_six: True to choose the better of two scales for each block
            (:func:`fp4_quantize_four_over_six`), which reduces the error. Only for ``"nvfp4"``.

    Raises:
        ValueError: for an unknown format, a wrong shape, or an ``amax`` that the format does not use.
        TypeError: for a wrong dtype, or if ``w`` is not a tensor.

    Example:
        >>> import torch
        >>> import torch_cute_ops
        >>> weight = torch.eye(8, 32)
        >>> q = torch_cute_ops.quantize(weight, "nvfp4")
        >>> q
        QuantizedWeight(nvfp4, (8, 32), device='cpu')
        >>> assert torch.equal(torch_cute_ops.dequantize(q), weight)
        >>> x = torch.arange(64).view(1, 2, 32).bfloat16()
        >>> torch_cute_ops.linear(x, q).tolist()
        [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [32.0, 33.0, 34.0, 35.0, 36.0, 37.0, 38.0, 39.0]]]
    """
    if is_proxy(w):
        return handle_torch_function(quantize, (w,), w, format, amax=amax, four_over_six=four_over_six)
    kind = _kind_of("quantize", format)
    if isinstance(w, nn.Module):
        raise TypeError(f"quantize: w is a {type(w).__name__}; expected a tensor: pass its weight")
    _check_is_tensor("quantize", "w", w)
    _check_dtype("quantize", "w", w, INPUT_DTYPES)
    if w.dim() != 2:
        raise ValueError(f"quantize: got w with shape {tuple(w.shape)}; expected (N, K)")
    _check_multiples("quantize", "w", (w.shape[0], w.shape[1]), kind)
    if amax is not None and format != "nvfp4":
        raise ValueError(f"quantize: amax is given; format={format!r} has no global scale, so pass None")
    if four_over_six and format != "nvfp4":
        raise ValueError(f"quantize: four_over_six is True; format={format!r} has no second scale, so pass False")
    encoded = encode(w.detach().contiguous(), format, amax, four_over_six=four_over_six)
    return QuantizedWeight(*encoded, format=format)


def linear(
    x: Tensor, q: QuantizedWeight, bias: Tensor | None = None, *, activations: LinearActivations = "auto"
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with a quantised weight, accumulated in fp32 and rounded once.

    Layers of :mod:`torch_cute_ops.nn` compute the same function. In addition they can merge projections, prefetch
    weights, pass gradients to their input, and quantise activations to NVFP4, which needs calibration.

    Args:
        x: (..., K) bfloat16 or float16; also float32 if the activations are quantised. Under ``torch.autocast`` it is
            cast as for ``nn.functional.linear``.
        q: weight (N, K), as :func:`quantize` returns it.
        bias: (N,) float32 or the dtype of ``x``.
        activations: ``"16bit"`` does not quantise ``x`` (FP4 weights); ``"fp8"`` quantises ``x`` with one scale per 128
            elements of a row (FP4 and FP8 block weights; K is a multiple of 64), or to MXFP8 (MXFP8 weights);
            ``"fp4"`` quantises ``x`` to MXFP4 (MXFP4 weights).
            ``"auto"`` means ``"16bit"`` for FP4 weights, ``"fp8"`` for FP8 weights.

    Returns:
        (..., N) in the dtype of ``x``.

    Raises:
        ValueError: for a wrong shape or device, activations that the format does not support, or an input that requires
            grad while gradients are enabled.
        TypeError: for a wrong dtype, or a ``q`` that is not from :func:`quantize`.

    Example:
        >>> import torch
        >>> import torch_cute_ops
        >>> q = torch_cute_ops.quantize(2 * torch.eye(8, 64), "mxfp4")
        >>> torch_cute_ops.linear(torch.ones(64).bfloat16(), q, bias=torch.arange(8.0)).tolist()
        [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    """
    if is_proxy(x):
        return handle_torch_function(linear, (x,), x, q, bias, activations=activations)
    _check_record("linear", q)
    n, k = q.shape
    _check_is_tensor("linear", "x", x)
    x = autocast(x)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"linear: got x with shape {tuple(x.shape)}; expected (..., {k}) for q of shape {(n, k)}")
    if x.device != q.codes.device:
        raise ValueError(f"linear: x is on {x.device}, q on {q.codes.device}; pass q.to(x.device)")
    choices = _KINDS[q.format].activations
    if activations not in ("auto", *choices):
        expected = ", ".join(map(repr, ("auto", *choices)))
        calibrated = ""
        if activations == "fp4" and q.format == "nvfp4":
            calibrated = "; NVFP4 activations need a calibrated global scale: use nn.NVFP4Linear"
        raise ValueError(
            f"linear: activations is {activations!r}; expected one of {expected} for {q.format} weights{calibrated}"
        )
    chosen = choices[0] if activations == "auto" else activations
    _check_dtype("linear", "x", x, SIXTEEN_BIT if chosen == "16bit" else INPUT_DTYPES)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return _product(rows, q, bias, chosen).view(*x.shape[:-1], n)


def dequantize(q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a quantised weight to (N, K), computed in fp32 and rounded once to ``dtype``.

    Args:
        q: weight, as :func:`quantize` returns it.
        dtype: bfloat16, float16 or float32.

    Raises:
        TypeError: for another dtype, or a ``q`` that is not from :func:`quantize`.
    """
    if is_proxy(q):
        return handle_torch_function(dequantize, (q,), q, dtype)
    _check_record("dequantize", q)
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"dequantize: dtype is {dtype}; expected torch.bfloat16, torch.float16 or torch.float32")
    if q.format == "fp8_block":
        return decode_fp8_blocks(q.codes, q.scale, dtype)
    if q.format == MXFP8_NAME:
        return decode_mxfp8(q.codes, linear_mx_scales(q.scale, *q.shape), dtype)
    block = FP4_FORMATS[q.format].block_size
    return fp4_dequantize(q.codes, q.scale, q.global_scale, block_size=block, out_dtype=dtype)


def _product(rows: Tensor, q: QuantizedWeight, bias: Tensor | None, activations: str) -> Tensor:
    b = q.codes.t()
    # Pass None instead of bfloat16, the default for quantised activations: AOTInductor of torch 2.9 passes a wrong
    # dtype if a dtype is given.
    dtype = None if rows.dtype == torch.bfloat16 else rows.dtype
    if q.format == "fp8_block":
        a, a_scale = fp8_quantize(rows, granularity="block128")
        return mm_fp8_block(a, b, a_scale, q.scale, bias=bias, out_dtype=dtype)
    if q.format == MXFP8_NAME:
        # The kernels that read linear scales of the weight in place also take linear scales of activations.
        layout: FP4ScaleLayout = "linear" if layout_of_operand(q.scale).is_linear else "128x4"
        a, a_scale = fp8_quantize(rows, granularity="block32", scale_layout=layout)
        return mm_fp8_block(a, b, a_scale, q.scale, bias=bias, out_dtype=dtype)
    block = FP4_FORMATS[q.format].block_size
    if activations == "16bit":
        return mm_fp4_weight_only(rows, b, q.scale, q.alpha, bias, block_size=block)
    if activations == "fp4":
        a, a_scale = fp4_quantize(rows, block_size=block)
        return mm_fp4(a, b, a_scale, q.scale, q.alpha, bias, dtype, block)
    if rows.shape[1] % _FP8_MULTIPLE:
        raise ValueError(
            f"linear: got x with {rows.shape[1]} columns; expected a multiple of {_FP8_MULTIPLE} for activations='fp8'"
        )
    a, a_scale = fp8_quantize(rows, granularity="block128")
    return mm_fp8_fp4(a, b, a_scale, q.scale, q.alpha, bias, dtype, block)


# Shared with the layers


def autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype to which ``torch.autocast`` would cast the input of ``nn.functional.linear``."""
    kind = x.device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def encode(
    weight: Tensor,
    format: str,
    amax: Tensor | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    four_over_six: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a weight (N, K); return its codes, its block scales, and its global scale (NVFP4) or None.

    Args:
        weight: (N, K) bfloat16, float16 or float32, contiguous.
        format: name of a format in ``WeightFormat``.
        amax: one element, the largest magnitude that NVFP4's global scale covers; None means the weight's largest
            magnitude.
        scale_layout: layout of FP4 scales. MXFP8 scales are linear.
        four_over_six: True to choose the better of two scales for each NVFP4 block.
    """
    if format == "fp8_block":
        return *fp8_quantize_block128x128(weight), None
    if format == MXFP8_NAME:
        return *fp8_quantize(weight, granularity="block32", scale_layout="linear"), None
    fmt = FP4_FORMATS[format]
    global_scale = None
    if fmt.has_global_scale:
        global_scale = nvfp4_global_scale(weight.abs().amax() if amax is None else amax, four_over_six)
    if four_over_six:
        return *fp4_quantize_four_over_six(weight, global_scale, scale_layout), global_scale
    codes, scale = fp4_quantize(weight, global_scale, block_size=fmt.block_size, scale_layout=scale_layout)
    return codes, scale, global_scale


def decode_fp8_blocks(elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 elements (N, K) by the float32 scales of their blocks, and round once to ``dtype``."""
    n, k = elements.shape
    factors = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (elements.float() * factors[:n, :k]).to(dtype)


def decode_mxfp8(elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 elements (N, K) by linear ue8m0 scales, uint8 (N, K/32), and round once to ``dtype``."""
    factors = decode_ue8m0(scale).repeat_interleave(MXFP8.block_size, 1)
    return (elements.float() * factors).to(dtype)


def fp8_blocks(size: int) -> int:
    """Return the number of FP8 blocks that cover ``size`` rows or columns."""
    return -(-size // FP8_BLOCK)


def fp8_scale_of(amax: Tensor) -> Tensor:
    """Return the FP8 scale with which ``amax`` becomes the largest FP8 number, or 1 if ``amax`` is 0."""
    scale = amax / E4M3_MAX
    return torch.where(scale == 0, 1.0, scale)


# Checks


def _kind_of(function: str, format: str) -> _Kind:
    kind = _KINDS.get(format) if isinstance(format, str) else None
    if kind is None:
        raise ValueError(f"{function}: format is {format!r}; expected one of {', '.join(map(repr, _KINDS))}")
    return kind


def _check_is_tensor(function: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} is {value!r}, a {type(value).__name__}; expected a tensor")


def _check_dtype(function: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{function}: got {name} with dtype {tensor.dtype}; expected {expected}")


def _check_record(function: str, q: Any) -> None:
    if not isinstance(q, QuantizedWeight):
        raise TypeError(f"{function}: q is a {type(q).__name__}; expected the result of torch_cute_ops.quantize")


def _check_multiples(function: str, name: str, shape: tuple[int, int], kind: _Kind) -> None:
    for size, multiple, letter in zip(shape, kind.multiples, "NK", strict=True):
        if size == 0 or size % multiple:
            raise ValueError(
                f"{function}: {name} has shape {shape}; expected {letter} to be a positive multiple of {multiple}"
            )


def _checked_shape(given: dict[str, Any], format: str, kind: _Kind) -> tuple[int, int]:
    """Check the arguments of ``QuantizedWeight``, and return the shape (N, K) of the unpacked weight."""
    name, codes, scale, global_scale = "QuantizedWeight", given["codes"], given["scale"], given["global_scale"]
    fmt = FP4_FORMATS.get(format)
    needs_global_scale = fmt is not None and fmt.has_global_scale
    if (global_scale is not None) != needs_global_scale:
        fix = "pass the factor that the matrix was multiplied by" if needs_global_scale else "pass None"
        state = "is None" if needs_global_scale else "is given"
        raise ValueError(f"{name}: global_scale {state} for format={format!r}; {fix}")
    for argument, value in given.items():
        if value is not None or argument != "global_scale":
            _check_is_tensor(name, argument, value)
            if value.device != codes.device:
                raise ValueError(f"{name}: {argument} is on {value.device}, codes on {codes.device}; move them to one")
    if codes.dim() != 2:
        raise ValueError(
            f"{name}: got codes with shape {tuple(codes.shape)}; expected {'(N, K/2)' if fmt else '(N, K)'}"
        )
    _check_dtype(name, "codes", codes, PACKED_DTYPES if fmt else (torch.float8_e4m3fn,))
    is_mxfp8 = format == MXFP8_NAME
    dtypes = MX_SCALE_DTYPES if is_mxfp8 else (torch.float32, torch.float8_e8m0fnu)
    _check_dtype(name, "scale", scale, fmt.scale_dtypes if fmt else dtypes)
    if codes.stride(1) != 1:
        raise ValueError(f"{name}: got codes with strides {codes.stride()}; expected row-major codes")
    n, k = codes.shape[0], codes.shape[1] * (2 if fmt else 1)
    _check_multiples(name, "the matrix", (n, k), kind)
    block_size = MXFP8.block_size if is_mxfp8 else fmt.block_size if fmt else 0
    if not block_size:
        if scale.shape != (fp8_blocks(n), fp8_blocks(k)):
            raise ValueError(
                f"{name}: got scale with shape {tuple(scale.shape)}; expected {(fp8_blocks(n), fp8_blocks(k))}"
            )
    elif layout_of_operand(scale) not in fitting_layouts(scale.shape, (n,), k // block_size):
        tiles, linear = (SCALE_LAYOUTS[each].shape((n,), k // block_size) for each in ("128x4", "linear"))
        raise ValueError(
            f"{name}: got scale with shape {tuple(scale.shape)}; expected {tiles}, or linear scales {linear}. Tiles of "
            f"another shape: pass as_tiles(scale, {n}, {k}, '128x4')"
        )
    if is_transposed_scale(scale, layout_of_operand(scale) if block_size else SCALE_LAYOUTS["linear"]):
        raise ValueError(
            f"{name}: got scale with shape {tuple(scale.shape)} and strides {scale.stride()}, a transposed view; if "
            "the view has the right order, pass scale.contiguous()"
        )
    if global_scale is not None:
        _check_dtype(name, "global_scale", global_scale, (torch.float32,))
        if global_scale.numel() != 1:
            raise ValueError(f"{name}: got global_scale with shape {tuple(global_scale.shape)}; expected one element")
        value = next(iter(readable_values(global_scale)), None)
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"{name}: global_scale is {value}; expected a positive, finite number")
        if value is not None and 1 / value > torch.finfo(torch.float32).max:
            raise ValueError(f"{name}: global_scale is {value}; expected a number with a finite reciprocal")
    return n, k


def readable_values(tensor: Tensor) -> list[float]:
    """Read a vector on a CPU, or in debug mode also on a GPU. Return an empty list if it cannot be read, as in compiled
    programs, transforms and captures."""
    if not _has_value(tensor) or _get_current_dispatch_mode() is not None:
        return []
    reads_gpu = settings.CHECK and tensor.is_cuda and not torch.cuda.is_current_stream_capturing()
    return tensor.flatten().tolist() if tensor.is_cpu or reads_gpu else []
