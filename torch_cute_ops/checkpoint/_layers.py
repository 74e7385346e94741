"""Description of the tensors that checkpoints store for a quantised layer, and functions that build such layers."""

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.checkpoint import torchao
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._values import (
    POWERS,
    block_factors,
    check_elements,
    check_factors,
    check_finite,
    check_scales,
    check_zeros,
)
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.nn import QuantLinear
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.quantize import SCHEMES

KV_SCALES: Final = frozenset({"k_scale", "v_scale"})
"""Names of the KV cache's scales. They are stored next to linear layers, but are not part of them."""


_V4_SCALE: Final = "scale"
"""Name of DeepSeek-V4's block scales, which DeepSeek-V3 calls ``weight_scale_inv``."""


def _one(n: int, k: int) -> tuple[int, ...]:
    return ()


def _one_row(n: int, k: int) -> tuple[int, ...]:
    return (1,)


class Field(NamedTuple):
    """One tensor that a checkpoint stores for a quantised linear layer with a weight (N, K).

    Attributes:
        stored: last component of the tensor's name in the checkpoint.
        name: name of the buffer in our module.
        dtypes: dtypes that are accepted when reading; the first is used for writing.
        shape: function that returns the tensor's shape for N and K. Additional dimensions of size 1 are ignored.
        is_reciprocal: True if the checkpoint stores the reciprocal of the module's value.
        is_optional: True for the scale of activations. Static FP8 activations need this scale, and so does a module
            with ``activations="fp4"``. Schemes with dynamic FP8 activations refuse it.
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
_NVFP4_SCALE_OF_32: Final = _NVFP4_SCALE._replace(shape=lambda n, k: (n, k // 32))
_MX_SCALE: Final = Field("weight_scale", "weight_scale", (torch.uint8, torch.float8_e8m0fnu), lambda n, k: (n, k // 32))
_ELEMENTS: Final = Field("weight", "weight", (torch.float8_e4m3fn,), lambda n, k: (n, k))
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def _block_scale(stored: str) -> Field:
    return Field(stored, "weight_scale_inv", (*_FLOATS, *POWERS), _blocks)


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
    ("compressed-tensors", "mxfp4"): (_codes("weight_packed"), _MX_SCALE),
    ("compressed-tensors", "fp8_block"): (_ELEMENTS, _block_scale("weight_scale")),
    ("compressed-tensors", "mxfp8"): (_ELEMENTS, _MX_SCALE),
    ("modelopt", "mxfp8"): (_ELEMENTS, _MX_SCALE),
    ("modelopt", "fp8_tensor"): _fp8(_one, _one),
    ("modelopt", "fp8_channel"): _fp8(lambda n, k: (n,), _one),
    ("compressed-tensors", "fp8_tensor"): _fp8(_one_row, _one_row),
    ("compressed-tensors", "fp8_channel"): _fp8(lambda n, k: (n, 1), _one_row),
}
"""Tensors that are stored for each (style, format) that can be both read and written."""
READ: Final[dict[tuple[str, str], tuple[Field, ...]]] = {
    **FIELDS,
    ("deepseek", "fp8_block"): (_ELEMENTS, _block_scale("weight_scale_inv")),
    ("deepseek", "mxfp8"): (_ELEMENTS, _MX_SCALE._replace(stored="weight_scale_inv")),
    ("modelopt", "fp8_block"): (_ELEMENTS, _block_scale("weight_scale")),
    **{
        (style, "mxfp4"): (
            _codes("weight"),
            _MX_SCALE,
            Field("input_scale", "input_scale", _FLOATS, _one, is_optional=True),
        )
        for style in ("modelopt", "quark")
    },
}


def read_layer(
    files: Files,
    name: str,
    scheme: LayerScheme,
    activations: Activations,
    device: torch.device,
    bias_dtype: torch.dtype | None,
    *,
    has_input_scale: bool = True,
) -> QuantLinear:
    """Read the quantised layer ``name`` of a checkpoint and build our module for it.

    Args:
        files: tensors of the checkpoint.
        name: layer name in the checkpoint.
        scheme: quantisation of the layer.
        activations: format of the module's activations.
        device: device of the module.
        bias_dtype: dtype of the module's bias; ``None`` keeps the stored dtype.
        has_input_scale: False to build the module without an input scale; see :func:`lacks_input_scale`.

    Raises:
        ValueError: as :func:`read_tensors`; for activations that the format does not support or whose scale is missing;
            for sizes that the ops do not support.
    """
    if activations == "fp8_token":
        # Only a static FP8 scale fits per-token FP8 activations. A scale of FP4 activations is six times smaller.
        has_input_scale = has_input_scale and scheme.activations == "fp8_static"
    stored = read_tensors(files, name, scheme, activations, has_input_scale=has_input_scale)
    tensors = {key: each.to(device, copy=True) for key, each in stored if has_input_scale or key != "input_scale"}
    bias = None
    if f"{name}.bias" in files:
        bias = files.read(f"{name}.bias")
        check_finite(files.describe(f"{name}.bias"), bias)
        bias = bias.to(device, bias_dtype, copy=True)
    cls = SCHEMES[scheme.format]
    try:
        layer: QuantLinear = cls.from_tensors(**tensors, bias=bias, activations=activations)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        weight = "_weight_qdata" if scheme.style == "torchao" else READ[scheme.style, scheme.format][0].stored
        raise ValueError(f"{files.describe(f'{name}.{weight}')}: {error}") from error
    return layer


def lacks_input_scale(files: Files, name: str, scheme: LayerScheme) -> bool:
    """Return True if the layer should have an input scale for NVFP4 or static FP8 activations, but has none or 0.

    Experts to which no token of the calibration data was routed lack input scales.
    """
    if scheme.style == "torchao" or scheme.activations not in ("fp4", "fp8_static"):
        return False
    field = next((each for each in READ[scheme.style, scheme.format] if each.is_optional), None)
    if field is None or (scheme.format != "nvfp4" and scheme.activations == "fp4"):
        return False
    return _is_uncalibrated(files, f"{name}.{field.stored}", field)


def _is_uncalibrated(files: Files, stored: str, field: Field) -> bool:
    if stored not in files:
        return True
    value = files.read(stored)
    if value.numel() != 1 or value.dtype not in field.dtypes:
        return False  # read_tensors raises an error for this bad scale
    return bool(value == 0) or (field.is_reciprocal and bool(value == torch.inf))


def read_tensors(
    files: Files,
    name: str,
    scheme: LayerScheme,
    activations: Activations = "auto",
    *,
    has_input_scale: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (buffer name, tensor on the CPU) for each tensor of the layer ``name`` except its bias.

    Tensors are read one at a time, and may be mapped from the file.

    Args:
        files: tensors of the checkpoint.
        name: layer name in the checkpoint.
        scheme: quantisation of the layer.
        activations: format of the module's activations.
        has_input_scale: False to leave out the input scale, which may then be missing or 0. It is always left out for
            FP4 weights that were made for static FP8 activations, unless they are NVFP4 and ``activations`` is
            ``"fp8_token"``.

    Raises:
        ValueError: for a tensor that is missing or unknown, or that has a wrong shape, dtype or value.
    """
    if scheme.style == "torchao":
        names = torchao.tensor_names(files, f"{name}.weight")
        _refuse_unknown(files, name, scheme, {each.rpartition(".")[2] for each in names.values()})
        yield from torchao.read_linear(files, f"{name}.weight").items()
        return
    is_unused = scheme.activations == "fp8_static" and scheme.format == "nvfp4" and activations != "fp8_token"
    is_left_out = not has_input_scale or is_unused or scheme.format == "mxfp4"
    fields = [
        field for field in _fields_in(files, name, scheme) if not (field.is_optional and scheme.activations == "fp8")
    ]
    _refuse_unknown(files, name, scheme, {field.stored for field in fields})
    weight = f"{name}.{fields[0].stored}"
    shape = files.shape(weight) if weight in files else (0, 0)
    n, k = (*shape[:1], shape[-1] * (1 if fields[0] is _ELEMENTS else 2)) if len(shape) == 2 else (0, 0)
    for field in fields:
        stored = f"{name}.{field.stored}"
        if field.is_optional and is_left_out:
            if not _is_uncalibrated(files, stored, field):
                _checked(files, stored, field, n, k)
        elif stored in files:
            if field is _NVFP4_SCALE and scheme.activations == "fp8_static" and files.shape(stored)[-1:] == (k // 32,):
                # ModelOpt's W4A8_NVFP4_FP8 has blocks of 32 elements. Read each block as two blocks of 16 elements with
                # the same scale.
                tensor = _checked(files, stored, _NVFP4_SCALE_OF_32, n, k)
                tensor = tensor.view(torch.uint8).repeat_interleave(2, 1).view(tensor.dtype)
            else:
                tensor = _checked(files, stored, field, n, k)
            if field.name.startswith("weight") and tensor.dtype == torch.float32 and (tensor == 0).any():
                check_zeros(files.describe(stored), tensor, files.read(weight))
            yield field.name, tensor
        elif not field.is_optional or scheme.activations in ("fp4", "fp8_static"):
            raise ValueError(f"{files.path} contains no {stored}, which {scheme.style} {scheme.format} needs")


def _fields_in(files: Files, name: str, scheme: LayerScheme) -> tuple[Field, ...]:
    """Return the tensors that the checkpoint stores for the layer ``name``, with the names that it uses."""
    fields = READ[scheme.style, scheme.format]
    if scheme.style == "deepseek" and f"{name}.{_V4_SCALE}" in files:
        return tuple(
            field._replace(stored=_V4_SCALE) if field.stored == "weight_scale_inv" else field for field in fields
        )
    return fields


def _refuse_unknown(files: Files, name: str, scheme: LayerScheme, known: set[str]) -> None:
    unknown = sorted(files.suffixes(name) - known - {"bias"} - KV_SCALES)
    if unknown:
        raise ValueError(
            f"{files.describe(f'{name}.{unknown[0]}')} is unknown to {scheme.style} {scheme.format}; expected only "
            f"{', '.join(sorted(known | {'bias'}))}"
        )


def _checked(files: Files, stored: str, field: Field, n: int, k: int) -> Tensor:
    """Read a tensor, check it, and convert it to the dtype and meaning of the module's buffer."""
    tensor, shape = files.read(stored), field.shape(n, k)
    if tensor.dtype not in field.dtypes:
        expected = " or ".join(map(str, field.dtypes))
        raise ValueError(f"got {files.describe(stored)} with dtype {tensor.dtype}; expected {expected}")
    if [size for size in tensor.shape if size != 1] != [size for size in shape if size != 1]:
        expected = f"{shape}, for the weight ({n}, {k})" if math.prod(shape) != 1 else "one element"
        raise ValueError(f"got {files.describe(stored)} with shape {tuple(tensor.shape)}; expected {expected}")
    if tensor.shape != shape:  # dimensions of size 1, such as in ModelOpt's block scales (⌈N/128⌉, 1, ⌈K/128⌉, 1)
        tensor = tensor.reshape(shape)
    described = files.describe(stored)
    if field.shape is _blocks:
        return block_factors(described, tensor)
    if tensor.dtype in _FLOATS:
        check_factors(described, tensor, is_zero_allowed=field.name.startswith("weight") and not field.is_reciprocal)
        return tensor.reciprocal().float() if field.is_reciprocal else tensor.float()
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.uint8)
    if field is _ELEMENTS:
        check_elements(described, tensor)
    elif field.name == "weight_scale":
        check_scales(described, tensor)
    return tensor


def fields_of(style: str, fmt: str) -> tuple[Field, ...]:
    """Return the tensors that a checkpoint in this style stores for a layer in this format.

    Raises:
        ValueError: if the style does not support the format.
    """
    fields = FIELDS.get((style, fmt))
    if fields is None:
        able = " or ".join(repr(of) for of, known in FIELDS if known == fmt)
        raise ValueError(f"style {style!r} does not support {fmt}; expected {able}")
    return fields


def stored_tensors(layer: QuantLinear, style: str) -> dict[str, Tensor]:
    """Return an unmerged layer's tensors, without the bias, as a checkpoint in this style stores them. Keys are the
    last components of the tensors' names."""
    held, size = layer.tensors(), (layer.out_features, layer.in_features)
    return {
        field.stored: (_inverse(held[field.name]) if field.is_reciprocal else held[field.name]).reshape(
            field.shape(*size)
        )
        for field in fields_of(style, layer.scheme)
        if field.name in held
    }


def _inverse(value: Tensor) -> Tensor:
    """Return a float32 number whose reciprocal is ``value`` or, if none exists, the number nearest to ``1 / value``.

    Because of rounding, the reciprocal of the number nearest to ``1 / value`` need not be ``value``. In this case, the
    reciprocal of a number one ulp away may be ``value``.
    """
    nearest = value.reciprocal()
    up, down = (torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (torch.inf, 0.0))
    for candidate in (up, down):
        nearest = torch.where((nearest.reciprocal() != value) & (candidate.reciprocal() == value), candidate, nearest)
    return nearest
