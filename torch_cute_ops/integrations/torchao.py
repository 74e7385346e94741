"""Replace layers whose weights torchao has quantised to FP4 by the layers of this package.

Needs torchao 0.18 or later, for ``NVFP4Tensor`` and ``MXTensor``: the extra ``torchao``.
"""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint.torchao import FP4, Weight, expert_stacks, linear_tensors, weight_of
from torch_cute_ops.nn import QuantExperts, QuantLinear, _names
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._saving import guard_saving
from torch_cute_ops.nn.float_experts import FloatExperts, float_experts, topk_of
from torch_cute_ops.nn.quantize import SCHEMES

try:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"torch_cute_ops.integrations.torchao needs {missing.name}: pip install 'torch-cute-ops[torchao]'",
        name=missing.name,
    ) from missing

__all__ = ["accelerate_"]

_FP4: Final = getattr(torch, FP4)


@torch.no_grad()
def accelerate_(model: nn.Module, *, activations: Activations = "auto", ignore: str | Iterable[str] = ()) -> nn.Module:
    """Replace the layers and experts that torchao has quantised to NVFP4 or MXFP4 by our modules, in place.

    Codes stay unchanged, scales are rearranged, and no weight is decoded. Experts in two three-dimensional parameters,
    ``gate_up_proj`` and ``down_proj``, become :class:`torch_cute_ops.nn.QuantExperts`, which copies their codes. Layers
    with weights of another torchao type, such as MXFP8, stay unchanged; one warning names them.

    Args:
        model: model after ``torchao.quantization.quantize_`` with ``NVFP4WeightOnlyConfig``,
            ``NVFP4DynamicActivationNVFP4WeightConfig`` or ``MXDynamicActivationMXWeightConfig`` in FP4, or with loaded
            weights of these types.
        activations: format of the layers' activations: ``"16bit"`` (also ``"auto"``) or ``"fp4"``. NVFP4 activations
            need the ``act_per_tensor_scale`` from torchao's calibration. Activations of experts are always FP8.
        ignore: layers and experts to leave unchanged: names, last components of names, wildcards, or regular
            expressions after ``re:``.

    Returns:
        ``model``.

    Raises:
        ValueError: naming the layer, for a weight that is transposed, is shared with another module, or has an
            unsupported size or scale; for a missing scale that ``activations="fp4"`` needs.
    """
    patterns, others = _names.as_patterns(ignore), []
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    for name, module in [*model.named_modules()]:
        parameters = {key: each for key, each in module._parameters.items() if each is not None}
        weights = {key: each for key, each in parameters.items() if type(each).__module__.startswith("torchao.")}
        if not weights or _names.matches(name, patterns):
            continue
        if not all(map(_is_fp4, weights.values())):
            kinds = ", ".join(sorted({type(each).__name__ for each in weights.values()}))
            others.append(f"{name} ({kinds})")
            continue
        if any(owners[id(weight)] > 1 for weight in weights.values()):
            raise ValueError(f"accelerate_: {name} shares its weight with another module")
        experts = float_experts(module)
        try:
            if experts is not None:
                new: nn.Module = _experts_of(experts, topk_of(model, name))
            else:
                new = _layer_of(module, activations)
        except (TypeError, ValueError) as error:
            raise ValueError(f"accelerate_: {name}: {error}") from error
        _names.replace(model, module, new)
    guard_saving(model)
    if others:
        warnings.warn(f"layers of unsupported weight types stay unchanged: {', '.join(others)}", stacklevel=3)
    return model


def _is_fp4(weight: Tensor) -> bool:
    return isinstance(weight, NVFP4Tensor) or (isinstance(weight, MXTensor) and weight.elem_dtype == _FP4)


def _weight_of(module: Any, name: str) -> Weight:
    parameter = getattr(module, name)
    if not _is_fp4(parameter):
        raise ValueError(f"{name} is not an FP4 tensor of torchao")
    names = ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale")
    return weight_of(
        type(parameter).__name__,
        {each: getattr(parameter, each, None) for each in names},
        block_size=parameter.block_size,
        is_swizzled=parameter.is_swizzled_scales,
        elem_dtype=FP4,
    )


def _layer_of(module: Any, activations: Activations) -> QuantLinear:
    reason = _names.reason_unlike_linear(module, (NVFP4Tensor, MXTensor))
    if reason is not None:
        raise ValueError(f"{reason}; expected an unchanged nn.Linear")
    weight = _weight_of(module, "weight")
    cls: Any = SCHEMES[weight.format]
    layer: QuantLinear = cls.from_tensors(**linear_tensors(weight), bias=module.bias, activations=activations)
    return layer


def _experts_of(given: FloatExperts, topk: int | None) -> QuantExperts:
    swiglu = given.verified()
    if isinstance(swiglu, str):
        raise ValueError(swiglu)
    gate_up, down = (_weight_of(given.module, name) for name in ("gate_up_proj", "down_proj"))
    layers = expert_stacks(gate_up, down, given)
    return QuantExperts(*layers, given.experts, swiglu=swiglu, topk=topk)
