"""Quantising the linear layers of a model in place."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import Activations, QuantLinear
from torch_cute_ops.nn._saving import guard_saving
from torch_cute_ops.nn.float_experts import float_experts, quantized_experts, topk_of
from torch_cute_ops.nn.fp4_linear import MXFP4Linear, NVFP4Linear
from torch_cute_ops.nn.fp8_linear import FP8BlockLinear, FP8ChannelLinear, FP8TensorLinear

Scheme = Literal["nvfp4", "mxfp4", "fp8_block", "fp8_tensor", "fp8_channel"]
SCHEMES: Final[dict[str, type[QuantLinear]]] = {
    cls.scheme: cls for cls in (NVFP4Linear, MXFP4Linear, FP8BlockLinear, FP8TensorLinear, FP8ChannelLinear)
}


@torch.no_grad()
def quantize_(
    model: nn.Module,
    scheme: Scheme = "nvfp4",
    *,
    activations: Activations = "auto",
    ignore: str | Iterable[str] = ("lm_head",),
    calibrate: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Replace each ``nn.Linear`` of a model by a quantised layer, one after the other, in place.

    Experts in two parameters, as models of Hugging Face have them (``gate_up_proj`` and ``down_proj`` of three
    dimensions), become :class:`QuantExperts`, whose activations are FP8 with every scheme; they can be in NVFP4, MXFP4
    and FP8 blocks.

    Left as they are: subclasses of ``nn.Linear``; layers whose weight another module shares, such as the tied embedding
    of an ``lm_head``; and, with a warning that names them, layers and experts that the ops do not take. With NVFP4, q,
    k and v of an attention share a global scale, and gate and up of an MLP do, as serving engines expect of
    checkpoints.

    Args:
        model: on any device; its linear layers in bfloat16, float16 or float32.
        scheme: ``"nvfp4"``, ``"mxfp4"``, ``"fp8_block"``, ``"fp8_tensor"`` or ``"fp8_channel"``. Activations of the
            last two get a scale for each row, or with ``calibrate`` one for all rows (static).
        activations: as of the layers: ``"16bit"``, ``"fp4"`` or ``"fp8"`` beside FP4 weights, ``"fp8"`` beside FP8
            ones; ``"auto"`` is the first that the scheme has.
        ignore: layers to leave, one pattern or several: names, last parts of names, wildcards
            (``"model.layers.0.*"``), or regular expressions behind ``re:``.
        calibrate: called with the model before it is changed, to run it on typical inputs: NVFP4 activations and
            static FP8 ones need the largest magnitude that each layer's input has. Not called for other activations.

    Returns:
        ``model``. Its ``save_pretrained``, if it has one, raises from here on: use
        :func:`torch_cute_ops.checkpoint.save`.

    Raises:
        ValueError: for an unknown scheme; for activations that the scheme does not have; without ``calibrate`` where it
            is needed; for layers that it did not reach, or whose input it found not finite; for a model that is itself
            a linear layer.
    """
    cls = SCHEMES.get(scheme)
    if cls is None:
        raise ValueError(f"quantize_: scheme is {scheme!r}; expected one of {', '.join(map(repr, SCHEMES))}")
    if type(model) is nn.Linear:
        raise ValueError(f"quantize_: the model is itself a linear layer; use {cls.__name__}.from_float(model)")
    needs_input = cls is NVFP4Linear and cls._chosen(activations) == "fp4"
    takes_input = needs_input or cls in (FP8TensorLinear, FP8ChannelLinear)
    cls._chosen(activations)
    if needs_input and calibrate is None:
        raise ValueError(
            "quantize_: calibrate is None; NVFP4 activations need a function that runs the model on typical inputs"
        )
    shared, patterns = _names.shared_parameters(model), _names.as_patterns(ignore)
    chosen, unfit = {}, []
    for name, linear in _names.linears_of(model).items():
        if _names.matches(name, patterns) or _names.identity(linear.weight) in shared:
            continue
        if cls.reason_unsupported(linear.out_features, linear.in_features, activations) is None:
            chosen[name] = linear
        else:
            unfit.append(f"{name} ({linear.out_features}, {linear.in_features})")
    if unfit:
        n, k = cls.multiples_for(activations)
        warnings.warn(
            f"not quantised, because N is no multiple of {n} or K none of {k}: {', '.join(unfit)}", stacklevel=3
        )
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
    _quantize_experts(model, scheme, patterns)
    guard_saving(model)
    return model


def _quantize_experts(model: nn.Module, scheme: Any, ignore: tuple[str, ...]) -> None:
    for name, module in [*model.named_modules()]:
        given = float_experts(module)
        if given is None or _names.matches(name, ignore):
            continue
        reason = given.reason_unsupported(scheme)
        if reason is None:
            _names.replace(model, module, quantized_experts(given, scheme, topk_of(model, name)))
        else:
            warnings.warn(f"not quantised: the experts {name}, because {reason}", stacklevel=4)


def _shared_amax(linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """The largest magnitude in the weights of the layers that share an input, of those that have siblings."""
    group_of = {part: merged for merged, parts in _names.MERGED.items() for part in parts}
    groups = defaultdict(list)
    for name in linears:
        parent, _, last = name.rpartition(".")
        if last in group_of:
            groups[parent, group_of[last]].append(name)
    found = {}
    for names in groups.values():
        amax = torch.stack([linears[name].weight.abs().amax().float() for name in names]).amax()
        found.update(dict.fromkeys(names, amax))
    return found


def _input_amax(
    model: nn.Module, linears: dict[str, nn.Linear], calibrate: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """The largest magnitude in the input of each layer while ``calibrate`` runs."""
    amax: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("input")
            if not isinstance(given, Tensor):
                raise TypeError(
                    f"quantize_: in the calibration {name} was called with {len(args)} arguments and "
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
    problems = [f"{name} was not called" for name in linears if name not in amax]
    problems += [f"{name} had an input that is not finite" for name, found in amax.items() if not found.isfinite()]
    if problems:
        raise ValueError(f"quantize_: in the calibration {', '.join(problems)}")
    return amax
