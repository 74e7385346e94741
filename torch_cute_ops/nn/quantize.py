"""Quantise the linear layers of a model in place."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import Activations, QuantLinear
from torch_cute_ops.nn._saving import guard_saving
from torch_cute_ops.nn._selection import DEFAULT_IGNORE, FilterFn, Selection, select
from torch_cute_ops.nn._summary import Summary, bytes_of, grouped, record
from torch_cute_ops.nn.experts import QuantExperts
from torch_cute_ops.nn.float_experts import float_experts, quantized_experts, topk_of
from torch_cute_ops.nn.fp4_linear import MXFP4Linear, NVFP4Linear
from torch_cute_ops.nn.fp8_linear import FP8BlockLinear, FP8ChannelLinear, FP8TensorLinear, MXFP8Linear

Scheme = Literal["nvfp4", "mxfp4", "fp8_block", "fp8_tensor", "fp8_channel", "mxfp8"]
SCHEMES: Final[dict[str, type[QuantLinear]]] = {
    cls.scheme: cls
    for cls in (NVFP4Linear, MXFP4Linear, FP8BlockLinear, FP8TensorLinear, FP8ChannelLinear, MXFP8Linear)
}


@torch.no_grad()
def quantize_(
    model: nn.Module,
    scheme: Scheme = "nvfp4",
    *,
    activations: Activations = "auto",
    ignore: str | Iterable[str] = DEFAULT_IGNORE,
    filter_fn: FilterFn | None = None,
    calibrate: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Replace each ``nn.Linear`` of a model, and the experts of Hugging Face models, by quantised layers, in place.

    Experts in two three-dimensional parameters (``gate_up_proj`` and ``down_proj``), as in Hugging Face models, become
    :class:`QuantExperts`. They support every scheme except ``"fp8_tensor"``, and their activations are always FP8.

    Only modules whose computation is known are replaced. Experts must first pass a trial: for random tokens, their
    ``forward`` must give the same results as :class:`QuantExperts`. Some of these tokens are so large that gate and up
    exceed every clamp. These modules stay unchanged:

    - modules with hooks, parametrizations or a replaced ``forward``, and subclasses of ``nn.Linear``;
    - layers to which a buffer, parameter or module was added, or an attribute with the name of an attribute of the
      quantised layer (other attributes are kept);
    - modules that share a weight with another module, such as an ``lm_head`` with tied embedding;
    - routers;
    - layers and experts of sizes that the ops do not support;
    - modules of all other classes.

    :func:`summary` gives the reason for each module that stayed. A warning names each such module, except routers,
    embeddings and ignored modules.

    With NVFP4, the q, k and v layers of an attention block share a global scale, and so do gate and up of an MLP, as
    serving engines require.

    Args:
        model: model on any device, with linear layers in bfloat16, float16 or float32.
        scheme: ``"nvfp4"``, ``"mxfp4"``, ``"fp8_block"``, ``"fp8_tensor"``, ``"fp8_channel"`` or ``"mxfp8"``. With
            ``"fp8_tensor"`` and ``"fp8_channel"``, activations use one scale per row, or with ``calibrate`` one static
            scale for all rows. With ``"mxfp8"``, activations are MXFP8 too.
        activations: format of the layers' activations: ``"16bit"``, ``"fp4"``, ``"fp8"`` or ``"fp8_token"`` for FP4
            weights, ``"fp4_token"`` for NVFP4 weights, ``"fp8"`` for FP8 weights. ``"auto"`` selects the first of these
            that the scheme supports. With ``"nvfp4"`` and ``"fp8_token"``, activations use one scale per row, or with
            ``calibrate`` one static scale.
        ignore: layers to leave unchanged, as one pattern or several patterns. A pattern is a name, the last component
            of a name, a wildcard (``"model.layers.0.*"``), or ``re:`` followed by a regular expression. Your patterns
            replace the default. A pattern that matches nothing gives a warning.
        filter_fn: function that takes a linear layer or experts and the module's name, and returns False for modules to
            leave unchanged.
        calibrate: function that runs the model, before any change, on typical inputs, to find the largest magnitude of
            each layer's input. Required for NVFP4 activations and static FP8 activations; not called for other
            activations.

    Returns:
        ``model``. If the model has a ``save_pretrained``, it now raises an error: use
        :func:`torch_cute_ops.checkpoint.save`.

    Raises:
        ValueError: for an unknown scheme; for activations that the scheme does not support; for a missing
            ``calibrate``; for layers that ``calibrate`` did not call, or whose inputs were not finite; for a model that
            is itself a linear layer or experts.
    """
    cls = SCHEMES.get(scheme)
    if cls is None:
        raise ValueError(f"quantize_: scheme is {scheme!r}; expected one of {', '.join(map(repr, SCHEMES))}")
    if type(model) is nn.Linear:
        raise ValueError(f"quantize_: the model is itself a linear layer; use {cls.__name__}.from_float(model)")
    if float_experts(model) is not None:
        raise ValueError("quantize_: the model is itself a module of experts; pass a module that contains it")
    needs_input = cls._chosen(activations) == "fp4" and cls is NVFP4Linear
    is_static = cls in (FP8TensorLinear, FP8ChannelLinear) or (cls is NVFP4Linear and activations == "fp8_token")
    takes_input = needs_input or is_static
    if needs_input and calibrate is None:
        raise ValueError(
            "quantize_: calibrate is None; activations='fp4' needs a function that runs the model on typical inputs, "
            "and activations='fp4_token' needs none"
        )
    selection, bytes_before = select(model, cls, activations, ignore, filter_fn), bytes_of(model)
    chosen = selection.linears
    amax = _input_amax(model, chosen, calibrate) if takes_input and calibrate is not None else {}
    of_weights = _shared_amax(chosen) if cls is NVFP4Linear else {}
    for name, linear in chosen.items():
        own: dict[str, Any] = {}
        if name in of_weights:
            own["amax"] = of_weights[name]
        if name in amax:
            own["input_amax"] = amax[name]
        quantised: QuantLinear = cls.from_float(linear, activations=activations, **own)  # type: ignore[attr-defined]
        _names.replace(model, linear, quantised)
    of_experts: Any = scheme
    for name, (given, swiglu) in selection.experts.items():
        _names.replace(model, given.module, quantized_experts(given, swiglu, of_experts, topk_of(model, name)))
    for text in finished("quantize_", model, cls, selection, bytes_before):
        warnings.warn(text, stacklevel=3)
    return model


def finished(
    function: str, model: nn.Module, cls: type[QuantLinear], selection: Selection, bytes_before: int
) -> list[str]:
    """Make ``save_pretrained`` refuse a model whose modules were replaced, and record the summary. Return the texts of
    warnings.

    Args:
        function: name of the function, for the summary and the warnings.
        model: model that was changed.
        cls: class of the new linear layers.
        selection: modules that were replaced, and the reasons why other modules were not.
        bytes_before: bytes of the model before the change.
    """
    guard_saving(model)
    replaced = dict.fromkeys(selection.linears, cls.__name__) | dict.fromkeys(selection.experts, QuantExperts.__name__)
    reasons = {name: left.reason for name, left in selection.left.items()}
    record(model, Summary(function, replaced, reasons, bytes_before, bytes_of(model)))
    texts = [f"{function}: {text}" for text in selection.unmatched]
    surprising = {name: left.reason for name, left in selection.left.items() if not left.is_expected}
    if surprising:
        groups = (f"{_names.listed(names)}: {reason}" for reason, names in grouped(surprising).items())
        texts.append(f"{function}: modules stay unchanged. {'; '.join(groups)}")
    if not replaced:
        expected = {name: reason for name, reason in reasons.items() if name not in surprising}
        groups = (f"{_names.listed(names)}: {reason}" for reason, names in grouped(expected).items())
        reason = "; ".join(groups) or ("see above" if surprising else "no linear layers and no experts")
        texts.append(f"{function}: nothing was replaced in this {type(model).__name__} ({reason})")
    return texts


def _shared_amax(linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """For each layer that shares its input with sibling layers, return the largest magnitude in all their weights."""
    found = {}
    for names in sibling_groups(linears):
        amax = torch.stack([linears[name].weight.abs().amax().float() for name in names]).amax()
        found.update(dict.fromkeys(names, amax))
    return found


def sibling_groups(names: Iterable[str]) -> list[list[str]]:
    """Return groups of layers that have the same input, such as q, k and v of an attention block. The layers of a group
    share a global scale. A layer without siblings is in no group."""
    group_of = {layer: merged for merged, layers in _names.MERGED.items() for layer in layers}
    groups = defaultdict(list)
    for name in names:
        parent, _, last = name.rpartition(".")
        if last in group_of:
            groups[parent, group_of[last]].append(name)
    return [*groups.values()]


def _input_amax(
    model: nn.Module, linears: dict[str, nn.Linear], calibrate: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """Run ``calibrate`` and return the largest magnitude of each layer's input."""
    amax: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("input")
            if not isinstance(given, Tensor):
                raise TypeError(
                    f"quantize_: in the calibration the layer {name!r} was called with {len(args)} arguments and "
                    f"{', '.join(kwargs) or 'no keywords'}; expected a tensor, first or as input="
                )
            if given.numel():
                found = given.detach().abs().amax().float()
                amax[name] = torch.maximum(amax[name], found) if name in amax else found

        return hook

    handles = [linear.register_forward_pre_hook(watch(name), with_kwargs=True) for name, linear in linears.items()]
    try:
        calibrate(model)
    finally:
        for handle in handles:
            handle.remove()
    problems = {name: "was not called" for name in linears if name not in amax}
    problems |= {name: "received an input that is not finite" for name, found in amax.items() if not found.isfinite()}
    if problems:
        texts = (f"the layer {name!r} {problem}" for name, problem in problems.items())
        raise ValueError(f"quantize_: in the calibration {_names.listed([*texts])}")
    return amax
