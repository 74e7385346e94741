"""Convert FP4 weights that torchao quantised to our layout, from memory or from a checkpoint. This module does not
import torchao."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._values import check_factors, check_scales, check_zeros
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.formats import as_tiles, convert_scales
from torch_cute_ops.nn import QuantLinear
from torch_cute_ops.nn.experts import FORMATS, stack
from torch_cute_ops.nn.float_experts import FloatExperts

FP4: Final = "float4_e2m1fn_x2"
"""torch's name for two e2m1 codes per byte. MXFP4's ``MXTensor`` stores it as ``elem_dtype``."""

_FORMATS: Final = {"NVFP4Tensor": ("nvfp4", 16, torch.float8_e4m3fn), "MXTensor": ("mxfp4", 32, torch.uint8)}
"""Format, block size and dtype of the scales of each torchao tensor class."""


class Weight(NamedTuple):
    """FP4 weight (N, K) of a layer, or weights (E, N, K) of E experts, from torchao.

    Attributes:
        format: ``"nvfp4"`` or ``"mxfp4"``.
        codes: (..., N, K/2) uint8, element 0 in the low nibble.
        scale: block scales in e4m3, or ue8m0 as uint8: (..., N, K / block size), or any shape in the 128x4 layout if
            ``is_swizzled``.
        is_swizzled: True if the scales are in the 128x4 layout.
        factor: float32, one element or (E, 1, 1), factor of the decoded weights, like ``weight_scale_2`` of our layers;
            ``None`` means 1.
        input_scale: float32, one element, calibrated factor of the decoded activations; or ``None``.
    """

    format: str
    codes: Tensor
    scale: Tensor
    is_swizzled: bool
    factor: Tensor | None
    input_scale: Tensor | None


def weight_of(
    kind: str,
    tensors: Mapping[str, Tensor | None],
    *,
    block_size: int | None,
    is_swizzled: bool | None,
    elem_dtype: str | None,
) -> Weight:
    """Check the attributes of a torchao tensor and return them as a :class:`Weight`.

    Args:
        kind: class name of the torchao tensor.
        tensors: attributes ``qdata``, ``scale``, ``per_tensor_scale`` and ``act_per_tensor_scale`` of the torchao
            tensor; absent tensors are omitted or ``None``.
        block_size: attribute ``block_size`` of the torchao tensor, or ``None``.
        is_swizzled: attribute ``is_swizzled_scales`` of the torchao tensor, or ``None``.
        elem_dtype: torch's dtype name without ``torch.``; ``None`` for an ``NVFP4Tensor``.

    Raises:
        ValueError: for an unsupported class, dtype, block size or shape, or if ``is_swizzled`` is ``None``.
    """
    elements = f" of {elem_dtype}" if kind == "MXTensor" else ""
    if kind not in _FORMATS or elements not in ("", f" of {FP4}"):
        raise ValueError(f"the class is torchao's {kind}{elements}; expected NVFP4Tensor, or MXTensor of {FP4}")
    fmt, block, dtype = _FORMATS[kind]
    if block_size != block:
        raise ValueError(f"block_size is {block_size}; expected {block}")
    if is_swizzled is None:
        raise ValueError("is_swizzled_scales is missing; the layout of the scales is unknown without it")
    codes, scale = tensors.get("qdata"), tensors.get("scale")
    if codes is None or scale is None:
        raise ValueError(f"{'qdata' if codes is None else 'scale'} is missing")
    if codes.dim() not in (2, 3) or codes.stride(-1) != 1 or codes.itemsize != 1:
        raise ValueError(
            f"got qdata with shape {tuple(codes.shape)} and strides {codes.stride()}; expected rows of bytes"
        )
    codes, scale = codes.view(torch.uint8), scale.view(torch.uint8) if scale.itemsize == 1 else scale
    if scale.dtype != torch.uint8:
        raise ValueError(f"got scale with dtype {scale.dtype}; expected {dtype}")
    factors = {}
    for name in ("per_tensor_scale", "act_per_tensor_scale"):
        given = factors[name] = tensors.get(name)
        if given is None:
            continue
        count = codes.shape[0] if codes.dim() == 3 and name == "per_tensor_scale" else 1
        if given.numel() not in (1, count) or not given.is_floating_point():
            raise ValueError(
                f"got {name} with shape {tuple(given.shape)} and dtype {given.dtype}; expected {count} numbers"
            )
        factors[name] = given.float()
    return Weight(fmt, codes, scale.view(dtype), is_swizzled, *factors.values())


def linear_tensors(weight: Weight) -> dict[str, Tensor]:
    """Convert a weight (N, K) to the tensors of our layer, by name. Scales are linear.

    Raises:
        ValueError: for the weights of several experts, or scales of a wrong size.
    """
    codes, fmt = weight.codes, weight.format
    if codes.dim() != 2:
        raise ValueError(f"got qdata with shape {tuple(codes.shape)}; expected (N, K/2)")
    n, k = codes.shape[0], 2 * codes.shape[1]
    tensors = {"weight": codes, "weight_scale": _linear_scales(weight, n, k)}
    if fmt == "nvfp4":
        one = torch.ones(1, device=codes.device) if weight.factor is None else weight.factor
        tensors["weight_scale_2"] = one.reshape(-1)
        if weight.input_scale is not None:
            tensors["input_scale"] = weight.input_scale.reshape(-1)
    return tensors


def _linear_scales(weight: Weight, n: int, k: int) -> Tensor:
    scale = weight.scale.contiguous()
    if weight.is_swizzled:
        return convert_scales(as_tiles(scale.flatten(), n, k, "128x4"), n, k, "128x4", "linear")
    return convert_scales(scale, n, k, "linear", "linear")


def expert_stacks(
    gate_up: Weight, down: Weight, given: FloatExperts, device: torch.device | None = None
) -> tuple[QuantLinear, QuantLinear]:
    """Build a layer with all experts' gate and up weights, and a layer with all experts' down weights. Take the biases
    from ``given``.

    Args:
        gate_up: (E, 2I, H).
        down: (E, H, I), in the same format.
        given: experts that are to be replaced.
        device: device of the result; ``None`` uses the device of the weights.

    Raises:
        ValueError: for weights of a wrong shape or of different formats, and for transposed experts, whose blocks do
            not run along K.
    """
    if given.is_transposed:
        raise ValueError("experts are transposed, so that torchao's blocks do not run along K; expected (E, N, K)")
    if gate_up.format != down.format:
        raise ValueError(f"gate_up_proj is {gate_up.format} and down_proj is {down.format}; expected one format")
    experts, width, hidden = given.experts, given.width, given.hidden
    biases = given.biases()

    def rows_of(weight: Weight, name: str, n: int, k: int) -> list[dict[str, Tensor]]:
        if weight.codes.shape != (experts, n, k // 2):
            raise ValueError(f"{name} has qdata of shape {tuple(weight.codes.shape)}; expected {(experts, n, k // 2)}")
        if weight.is_swizzled and n % 128:
            raise ValueError(f"{name} has tiled scales and {n} rows per expert; expected a multiple of 128")
        # The rows of each expert fill whole tiles. So the tiles of all experts can be converted as one matrix.
        scale = _linear_scales(weight, experts * n, k).unflatten(0, (experts, n))
        factor = torch.ones(1, device=scale.device) if weight.factor is None else weight.factor
        factors = factor.reshape(-1).expand(experts)
        return [
            {"weight": codes, "weight_scale": own, "weight_scale_2": one}
            for codes, own, one in zip(weight.codes, scale, factors, strict=True)
        ]

    def gate_or_up(i: int) -> dict[str, Tensor]:
        own = both[i // 2]
        halves = {name: given.halves(own[name])[i % 2] for name in ("weight", "weight_scale")}
        return {**own, **halves}

    both, downs = rows_of(gate_up, "gate_up_proj", 2 * width, hidden), rows_of(down, "down_proj", hidden, width)
    cls, target = FORMATS[gate_up.format], device or gate_up.codes.device
    return (
        stack(cls, hidden, [width] * (2 * experts), gate_or_up, device=target, bias=biases[0]),
        stack(cls, width, [hidden] * experts, downs.__getitem__, device=target, bias=biases[1]),
    )


# Checkpoints of torchao: the tensors of ``a.b.weight`` are stored as ``a.b._weight_qdata`` and so on, described by the
# files' metadata


def scheme_of(files: Files, module: str) -> LayerScheme | None:
    """Return the scheme of the linear layer ``module`` in a checkpoint, or None if torchao did not quantise it."""
    described = _described(files, f"{module}.weight")
    if described is None:
        return None
    fmt = _FORMATS.get(described["_type"], (described["_type"],))[0]
    has_input_scale = "act_per_tensor_scale" in described.get("_tensor_data_names", ())
    return LayerScheme(fmt, "torchao", "fp4" if has_input_scale else "16bit")


def tensor_names(files: Files, name: str) -> dict[str, str]:
    """Return the names of the tensors that store the parameter ``name``, keyed by torchao's attribute names.

    Raises:
        ValueError: if the metadata does not describe the parameter.
    """
    described = _described(files, name)
    if described is None:
        raise ValueError(f"the metadata of {files.path} does not describe {name}")
    module, _, parameter = name.rpartition(".")
    return {part: f"{module}._{parameter}_{part}".lstrip(".") for part in described.get("_tensor_data_names", ())}


def read_weight(files: Files, name: str) -> Weight:
    """Read the parameter ``name`` to the CPU. Its tensors may be mapped from the files.

    Raises:
        ValueError: for a tensor that is missing or has a wrong shape, dtype or value, and for an unsupported class.
    """
    names, described = tensor_names(files, name), _described(files, name) or {}
    about: Mapping[str, Any] = described.get("_data", {})
    tensors = {part: files.read(stored) for part, stored in names.items()}
    for part in ("per_tensor_scale", "act_per_tensor_scale"):
        if part in tensors:
            check_factors(files.describe(names[part]), tensors[part], is_zero_allowed=not part.startswith("act"))
    try:
        weight = weight_of(
            described["_type"],
            tensors,
            block_size=about.get("block_size"),
            is_swizzled=about.get("is_swizzled_scales"),
            elem_dtype=(about.get("elem_dtype") or {}).get("_data"),
        )
    except ValueError as error:
        raise ValueError(f"{files.describe(next(iter(names.values()), name))}: {error}") from error
    check_scales(files.describe(names["scale"]), weight.scale)
    if weight.factor is not None and (weight.factor == 0).any():
        factors = weight.factor.reshape(-1).expand(len(weight.codes)) if weight.codes.dim() == 3 else weight.factor
        check_zeros(files.describe(names["per_tensor_scale"]), factors, weight.codes.flatten(1))
    return weight


def read_linear(files: Files, name: str) -> dict[str, Tensor]:
    """Read a linear layer, given the name of its weight, and return the tensors of our layer. Errors name the file."""
    weight = read_weight(files, name)
    try:
        return linear_tensors(weight)
    except ValueError as error:
        raise ValueError(f"{files.describe(tensor_names(files, name)['qdata'])}: {error}") from error


def _described(files: Files, name: str) -> dict[str, Any] | None:
    """Return the metadata of a parameter, or None if it has no metadata or is a plain tensor."""
    module, _, parameter = name.rpartition(".")
    try:
        described = json.loads(files.metadata.get(f"{files.original(module)}.{parameter}".lstrip("."), "null"))
    except ValueError:
        return None
    is_weight = isinstance(described, dict) and isinstance(described.get("_type"), str)
    return described if is_weight and described["_type"] != "Tensor" else None
