"""Weights that torchao has quantised to FP4, on the layers of this package.

Needs torchao 0.18 or later, of which ``NVFP4Tensor`` and ``MXTensor`` are read: the extra ``torchao``.
"""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from torch_cute_ops.formats import convert_scales
from torch_cute_ops.nn import MXFP4Linear, NVFP4Linear, QuantLinear, _names
from torch_cute_ops.nn._base import Activations

try:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torch_cute_ops.integrations.torchao needs {missing.name}: pip install 'torch-cute-ops[torchao]'",
        name=missing.name,
    ) from missing

__all__ = ["accelerate_"]

_FP4: Final = torch.float4_e2m1fn_x2


@torch.no_grad()
def accelerate_(model: nn.Module, *, activations: Activations = "auto", ignore: Iterable[str] = ()) -> nn.Module:
    """Put the linear layers of a model that torchao has quantised to NVFP4 or MXFP4 on our layers, in place.

    Codes are taken as they are, and scales rearranged; no weight is decoded. Layers whose weight is of another type of
    torchao's, such as MXFP8, stay what they are, with one warning that names them.

    Args:
        model: after ``torchao.quantization.quantize_`` with ``NVFP4WeightOnlyConfig``,
            ``NVFP4DynamicActivationNVFP4WeightConfig`` or ``MXDynamicActivationMXWeightConfig`` in FP4, or with weights
            that were loaded so.
        activations: as of the layers: ``"16bit"``, which is ``"auto"``, or ``"fp4"``. NVFP4 activations need the
            ``act_per_tensor_scale`` that torchao's calibration leaves.
        ignore: layers to leave: names, last parts of names, wildcards, or regular expressions behind ``re:``.

    Returns:
        ``model``.

    Raises:
        ValueError: for a weight that is transposed, is shared with another module, or has a size or scale that the ops
            do not take; without the scale that ``activations="fp4"`` needs. It names the layer.
    """
    patterns, others = tuple(ignore), []
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    for name, module in [*model.named_modules()]:
        weight = module._parameters.get("weight")
        if weight is None or not type(weight).__module__.startswith("torchao.") or _names.matches(name, patterns):
            continue
        if not _is_fp4(weight):
            others.append(f"{name} ({type(weight).__name__})")
            continue
        if owners[id(weight)] > 1:
            raise ValueError(f"accelerate_: {name} shares its weight with another module")
        try:
            layer = _layer_of(module, weight, activations)
        except (TypeError, ValueError) as error:
            raise ValueError(f"accelerate_: {name}: {error}") from error
        _names.replace(model, module, layer)
    if others:
        warnings.warn(f"not of a type that has a layer: {', '.join(others)}", stacklevel=3)
    return model


def _is_fp4(weight: Tensor) -> bool:
    return isinstance(weight, NVFP4Tensor) or (isinstance(weight, MXTensor) and weight.elem_dtype == _FP4)


def _layer_of(module: Any, weight: Any, activations: Activations) -> QuantLinear:
    if not isinstance(module, nn.Linear):
        raise ValueError(f"it is a {type(module).__name__}; expected a linear layer")
    codes = weight.qdata.view(torch.uint8)
    if codes.dim() != 2 or codes.stride(-1) != 1:
        raise ValueError(f"qdata has shape {tuple(codes.shape)} and strides {codes.stride()}; expected rows")
    n, k = codes.shape[0], 2 * codes.shape[1]
    block = 16 if isinstance(weight, NVFP4Tensor) else 32
    if weight.block_size != block:
        raise ValueError(f"block_size is {weight.block_size}; expected {block}")
    scale = weight.scale
    if weight.is_swizzled_scales:
        tiled = (-(-n // 128) * 128, -(-(k // block) // 4) * 4)
        scale = convert_scales(scale.contiguous().view(tiled), n, k, "128x4", "linear")
    if block == 32:
        return MXFP4Linear.from_tensors(codes, scale.view(torch.uint8), bias=module.bias, activations=activations)
    whole, of_input = weight.per_tensor_scale, weight.act_per_tensor_scale
    return NVFP4Linear.from_tensors(
        codes,
        scale,
        torch.ones(1, device=codes.device) if whole is None else whole.float(),
        input_scale=None if of_input is None else of_input.float(),
        bias=module.bias,
        activations=activations,
    )
