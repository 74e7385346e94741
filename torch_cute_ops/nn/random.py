"""Create quantised layers with random codes, to build models of any size without a checkpoint."""

import warnings
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import Activations, QuantLinear
from torch_cute_ops.nn._selection import DEFAULT_IGNORE, FilterFn, select
from torch_cute_ops.nn._summary import bytes_of
from torch_cute_ops.nn.experts import FORMATS, QuantExperts
from torch_cute_ops.nn.float_experts import topk_of
from torch_cute_ops.nn.quantize import SCHEMES, Scheme, finished

DEVIATION: Final = 0.02
"""Standard deviation of the weights, as in freshly initialised models."""
INPUT_AMAX: Final = 8.0
"""Largest activation that the input scales can represent."""

# Root mean squares (rms) of random codes. All bits of e2m1 codes are random. In e4m3 codes only the sign and the three
# mantissa bits are random, so that weights lie between 0.5 and 1, and scales between 1 and 2.
_E2M1, _FRACTION, _SCALE = 2.93, 0.74, 1.46

_BITS: Final[dict[tuple[str, str], tuple[int, int]]] = {
    ("nvfp4", "weight"): (0xFF, 0),
    ("nvfp4", "weight_scale"): (0x07, 0x38),
    ("mxfp4", "weight"): (0xFF, 0),
    ("mxfp4", "weight_scale"): (0, 120),
    ("fp8_block", "weight"): (0x87, 0x30),
    ("fp8_tensor", "weight"): (0x87, 0x30),
    ("fp8_channel", "weight"): (0x87, 0x30),
    ("mxfp8", "weight"): (0x87, 0x30),
    ("mxfp8", "weight_scale"): (0, 122),
}
"""(mask of random bits, fixed bits) of each one-byte tensor. 120 is 2^-7 in e8m0, and 122 is 2^-5."""
_NUMBERS: Final[dict[tuple[str, str], float]] = {
    ("nvfp4", "weight_scale_2"): DEVIATION / (_E2M1 * _SCALE),
    ("nvfp4", "input_scale"): INPUT_AMAX / (6 * 448),
    ("fp8_block", "weight_scale_inv"): DEVIATION / _FRACTION,
    ("fp8_tensor", "weight_scale"): DEVIATION / _FRACTION,
    ("fp8_channel", "weight_scale"): DEVIATION / _FRACTION,
}
"""Value with which each float32 tensor is filled."""


def random_(
    model: nn.Module,
    scheme: Scheme = "nvfp4",
    *,
    activations: Activations = "auto",
    ignore: str | Iterable[str] = DEFAULT_IGNORE,
    filter_fn: FilterFn | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Replace the linear layers and experts of a model by layers with random codes, in place, to measure speed and
    sizes.

    Weights have a standard deviation of about 0.02; biases are 0. No unquantised weight is ever made.

    Args:
        model: model on any device, such as meta; only sizes and the dtype of biases are used.
        scheme: as in :func:`quantize_`.
        activations: as in :func:`quantize_`.
        ignore: as in :func:`quantize_`.
        filter_fn: as in :func:`quantize_`.
        device: device of the layers; ``None`` for the weight's device.
        seed: seed of the generator.

    Returns:
        ``model``. :func:`summary` and warnings name the modules that stayed unchanged, as with :func:`quantize_`.

    Raises:
        ValueError: for an unknown scheme, or activations that the scheme does not support.
    """
    for text in replace_randomly("random_", model, scheme, activations, ignore, filter_fn, device, seed):
        warnings.warn(text, stacklevel=2)
    return model


@torch.no_grad()
def replace_randomly(
    function: str,
    model: nn.Module,
    scheme: str,
    activations: Activations,
    ignore: str | Iterable[str],
    filter_fn: FilterFn | None,
    device: torch.device | str | None,
    seed: int,
) -> list[str]:
    """Replace layers as :func:`random_` does, and return the texts of warnings, which name ``function`` as their
    origin."""
    if scheme not in SCHEMES:
        raise ValueError(f"{function}: scheme is {scheme!r}; expected one of {', '.join(map(repr, SCHEMES))}")
    cls = SCHEMES[scheme]
    cls._chosen(activations)
    selection, bytes_before = select(model, cls, activations, ignore, filter_fn), bytes_of(model)
    for i, linear in enumerate(selection.linears.values()):
        n, k = linear.out_features, linear.in_features
        target = linear.weight.device if device is None else torch.device(device)
        generator = torch.Generator(target).manual_seed(seed + i)
        layout = cls(k, n, activations=activations, device="meta").layout()
        tensors = {key: _random(scheme, key, *each, generator) for key, each in layout.items()}
        bias = None if linear.bias is None else torch.zeros(n, dtype=linear.bias.dtype, device=target)
        _names.replace(model, linear, cls._build(k, tensors, bias, None, activations))
    for i, (name, (given, swiglu)) in enumerate(selection.experts.items()):
        target = given.module.gate_up_proj.device if device is None else torch.device(device)
        generator = torch.Generator(target).manual_seed(seed + 10_000 + i)
        biases = given.biases()
        new = QuantExperts(
            random_stack(scheme, given.hidden, [given.width] * (2 * given.experts), biases[0], generator),
            random_stack(scheme, given.width, [given.hidden] * given.experts, biases[1], generator),
            given.experts,
            swiglu=swiglu,
            topk=topk_of(model, name),
        )
        _names.replace(model, given.module, new)
    return finished(function, model, cls, selection, bytes_before)


def random_stack(
    scheme: str, in_features: int, parts: list[int], bias: Tensor | None, generator: torch.Generator
) -> QuantLinear:
    """Create one layer with random codes that stacks several layers along N, such as the layers of all experts.

    Args:
        scheme: format of the weights, a key of ``FORMATS``.
        in_features: K of every layer.
        parts: rows of each layer.
        bias: tensor with the dtype of the biases, which are 0; ``None`` for layers without biases.
        generator: generator on the device of the result.
    """
    cls = FORMATS[scheme]
    layout = cls(in_features, sum(parts), parts=parts, device="meta").layout()
    tensors = {key: _random(scheme, key, *each, generator) for key, each in layout.items()}
    zeros = None if bias is None else torch.zeros(sum(parts), dtype=bias.dtype, device=generator.device)
    return cls._build(in_features, tensors, zeros, parts, "auto")


def _random(scheme: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    device = generator.device
    if (scheme, name) in _NUMBERS:
        return torch.full(shape, _NUMBERS[scheme, name], dtype=dtype, device=device)
    drawn, fixed = _BITS[scheme, name]
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    return codes.bitwise_and_(drawn).bitwise_or_(fixed).view(dtype)
