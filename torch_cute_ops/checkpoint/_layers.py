"""Stored tensors of each quantised layer: their names, meaning, and the layer built from them."""

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.checkpoint import torchao
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._values import check_elements, check_scales
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.nn import QuantLinear
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.quantize import SCHEMES

KV_SCALES: Final = frozenset({"k_scale", "v_scale"})
"""Scales of the KV cache, which belong to no linear layer."""


def _one(n: int, k: int) -> tuple[int, ...]:
    return ()


def _one_row(n: int, k: int) -> tuple[int, ...]:
    return (1,)


class Field(NamedTuple):
    """One stored tensor of a layer with a weight (N, K).

    Attributes:
        stored: last component of its name in the checkpoint.
        name: name of the module's buffer.
        dtypes: accepted dtypes; the first is written.
        shape: function that returns the shape for N and K. A tensor of one element is read in any shape.
        is_reciprocal: True if the checkpoint stores the reciprocal of the module's value.
        is_optional: True for a scale of activations. Schemes with FP4 or static FP8 activations need it; schemes with
            dynamic FP8 activations refuse it.
    """

    stored: str
    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: Callable[[int, int], tuple[int, ...]]
    is_reciprocal: bool = False
    is_optional: bool = False


def _codes(stored: str) -> Field:
    return Field(stored, "weight", (torch.uint8,), lambda n, k: (n, k // 2))


def _blocks(n: int, k: int) -> tuple[int, ...]:
    return -(-n // 128), -(-k // 128)


_NVFP4_SCALE: Final = Field("weight_scale", "weight_scale", (torch.float8_e4m3fn,), lambda n, k: (n, k // 16))
_MXFP4_SCALE: Final = Field(
    "weight_scale", "weight_scale", (torch.uint8, torch.float8_e8m0fnu), lambda n, k: (n, k // 32)
)
_ELEMENTS: Final = Field("weight", "weight", (torch.float8_e4m3fn,), lambda n, k: (n, k))
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def _fp8(scale: Callable[[int, int], tuple[int, ...]], one: Callable[[int, int], tuple[int, ...]]) -> tuple[Field, ...]:
    return (
        _ELEMENTS,
        Field("weight_scale", "weight_scale", _FLOATS, scale),
        Field("input_scale", "input_scale", _FLOATS, one, is_optional=True),
    )


FIELDS: Final[dict[tuple[str, str], tuple[Field, ...]]] = {
    ("modelopt", "nvfp4"): (
        _codes("weight"),
        _NVFP4_SCALE,
        Field("weight_scale_2", "weight_scale_2", (torch.float32,), _one),
        Field("input_scale", "input_scale", (torch.float32,), _one, is_optional=True),
    ),
    ("compressed-tensors", "nvfp4"): (
        _codes("weight_packed"),
        _NVFP4_SCALE,
        Field("weight_global_scale", "weight_scale_2", (torch.float32,), _one_row, is_reciprocal=True),
        Field("input_global_scale", "input_scale", (torch.float32,), _one_row, is_reciprocal=True, is_optional=True),
    ),
    ("compressed-tensors", "mxfp4"): (_codes("weight_packed"), _MXFP4_SCALE),
    ("compressed-tensors", "fp8_block"): (_ELEMENTS, Field("weight_scale", "weight_scale_inv", _FLOATS, _blocks)),
    ("modelopt", "fp8_tensor"): _fp8(_one, _one),
    ("modelopt", "fp8_channel"): _fp8(lambda n, k: (n,), _one),
    ("compressed-tensors", "fp8_tensor"): _fp8(_one_row, _one_row),
    ("compressed-tensors", "fp8_channel"): _fp8(lambda n, k: (n, 1), _one_row),
    ("deepseek", "fp8_block"): (_ELEMENTS, Field("weight_scale_inv", "weight_scale_inv", _FLOATS, _blocks)),
}
"""Stored tensors by (style, format)."""


def read_layer(
    files: Files,
    name: str,
    scheme: LayerScheme,
    activations: Activations,
    device: torch.device,
    bias_dtype: torch.dtype | None,
) -> QuantLinear:
    """Read the layer ``name`` of a checkpoint and build the module.

    Args:
        files: tensors of the checkpoint.
        name: layer name in the checkpoint.
        scheme: quantisation of the layer.
        activations: value for the module's ``activations``.
        device: device of the module.
        bias_dtype: dtype of the module's bias; ``None`` keeps the stored dtype.

    Raises:
        ValueError: as :func:`read_tensors`; for activations that the format does not support or lacks a scale for; for
            sizes that the ops do not support.
    """
    tensors = {key: each.to(device, copy=True) for key, each in read_tensors(files, name, scheme)}
    bias = None
    if f"{name}.bias" in files:
        bias = files.read(f"{name}.bias").to(device, bias_dtype, copy=True)
    cls = SCHEMES[scheme.format]
    try:
        layer: QuantLinear = cls.from_tensors(**tensors, bias=bias, activations=activations)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        weight = "_weight_qdata" if scheme.style == "torchao" else fields_of(scheme.style, scheme.format)[0].stored
        raise ValueError(f"{files.describe(f'{name}.{weight}')}: {error}") from error
    return layer


def read_tensors(files: Files, name: str, scheme: LayerScheme) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the layer ``name`` except its bias, as (buffer name, tensor) on the CPU.

    Tensors are read one at a time, and may be mapped from the file.

    Raises:
        ValueError: for a tensor that is missing or unknown, or that has a wrong shape, dtype or value.
    """
    if scheme.style == "torchao":
        names = torchao.tensor_names(files, f"{name}.weight")
        _refuse_unknown(files, name, scheme, {each.rpartition(".")[2] for each in names.values()})
        yield from torchao.read_linear(files, f"{name}.weight").items()
        return
    is_dynamic = scheme.activations == "fp8"
    fields = [field for field in FIELDS[scheme.style, scheme.format] if not (field.is_optional and is_dynamic)]
    _refuse_unknown(files, name, scheme, {field.stored for field in fields})
    weight = f"{name}.{fields[0].stored}"
    shape = files.shape(weight) if weight in files else (0, 0)
    n, k = (*shape[:1], shape[-1] * (1 if fields[0] is _ELEMENTS else 2)) if len(shape) == 2 else (0, 0)
    for field in fields:
        stored = f"{name}.{field.stored}"
        if stored in files:
            yield field.name, _checked(files, stored, field, n, k)
        elif not field.is_optional or scheme.activations in ("fp4", "fp8_static"):
            raise ValueError(f"{files.path} contains no {stored}, which {scheme.style} {scheme.format} needs")


def _refuse_unknown(files: Files, name: str, scheme: LayerScheme, known: set[str]) -> None:
    unknown = sorted(files.suffixes(name) - known - {"bias"} - KV_SCALES)
    if unknown:
        raise ValueError(
            f"{files.describe(f'{name}.{unknown[0]}')} is unknown to {scheme.style} {scheme.format}; expected only "
            f"{', '.join(sorted(known | {'bias'}))}"
        )


def _checked(files: Files, stored: str, field: Field, n: int, k: int) -> Tensor:
    """Read and check a tensor, and convert it to the dtype and meaning of the module's buffer."""
    tensor, shape = files.read(stored), field.shape(n, k)
    if tensor.dtype not in field.dtypes:
        expected = " or ".join(map(str, field.dtypes))
        raise ValueError(f"got {files.describe(stored)} with dtype {tensor.dtype}; expected {expected}")
    if tensor.shape != shape and not tensor.numel() == math.prod(shape) == 1:
        expected = f"{shape}, for the weight ({n}, {k})" if math.prod(shape) != 1 else "one element"
        raise ValueError(f"got {files.describe(stored)} with shape {tuple(tensor.shape)}; expected {expected}")
    if tensor.dtype in _FLOATS:
        # Zero is valid only for the scale of a weight whose elements are all zero.
        is_zero_allowed = field.name.startswith("weight") and not field.is_reciprocal
        bad = ~(tensor.isfinite() & ((tensor >= 0) if is_zero_allowed else (tensor > 0)))
        if bad.any():
            raise ValueError(f"{files.describe(stored)} is {tensor[bad][0].item()}; expected a positive number")
    if field.is_reciprocal:
        tensor = tensor.reciprocal()
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.uint8)
    if field in (_NVFP4_SCALE, _MXFP4_SCALE):
        check_scales(files.describe(stored), tensor)
    elif field is _ELEMENTS:
        check_elements(files.describe(stored), tensor)
    return tensor.float() if field.dtypes == _FLOATS else tensor


def fields_of(style: str, fmt: str) -> tuple[Field, ...]:
    """Return the stored tensors of a format in a style.

    Raises:
        ValueError: if the style does not support the format.
    """
    fields = FIELDS.get((style, fmt))
    if fields is None:
        able = " or ".join(repr(of) for of, known in FIELDS if known == fmt and of != "deepseek")
        raise ValueError(f"style {style!r} does not support {fmt}; expected {able}")
    return fields


def stored_tensors(layer: QuantLinear, style: str) -> dict[str, Tensor]:
    """Return the tensors of an unmerged layer, without its bias, by the last component of their stored names."""
    held, size = layer.tensors(), (layer.out_features, layer.in_features)
    return {
        field.stored: (_inverse(held[field.name]) if field.is_reciprocal else held[field.name]).reshape(
            field.shape(*size)
        )
        for field in fields_of(style, layer.scheme)
        if field.name in held
    }


def _inverse(value: Tensor) -> Tensor:
    """Return the float32 number whose reciprocal is exactly ``value`` if one exists, otherwise the nearest to ``1 /
    value``.

    The nearest number can be off by one ulp, so that reading it back would not give ``value``.
    """
    nearest = value.reciprocal()
    up, down = (torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (torch.inf, 0.0))
    for candidate in (up, down):
        nearest = torch.where((nearest.reciprocal() != value) & (candidate.reciprocal() == value), candidate, nearest)
    return nearest
