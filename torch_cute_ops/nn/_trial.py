"""Trial of a module of experts: compare its forward with the computation of ``QuantExperts`` on random tokens."""

import copy
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.nn.experts import SwiGLU

if TYPE_CHECKING:
    from torch_cute_ops.nn.float_experts import FloatExperts

MAGNITUDES: Final = (0.25, 1.0, 3.0, 12.0, 50.0, 200.0, 1000.0, 20000.0)
"""Standard deviations of gate and up, one for each token. Each clamp below the largest one changes some results."""
GREATEST_LIMIT: Final = 1e6
"""Clamps at larger values are not tried, because their tokens would leave the range of 16-bit activations."""
LARGEST: Final = 2**27
"""Largest number of weights that one op of a trial may read."""
TOLERANCE: Final = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest relative error of a token's result in the Frobenius norm, by the dtype of the trial."""
_BUILT_IN: Final = (None, "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe")
"""transformers' own implementations of a forward, which all compute what the class itself computes."""
_SHIFT, _PERIOD = 101, 65537
"""Distance between experts' windows, and length of the vector that the weights repeat: prime numbers, so that neither
rows nor columns are equal."""

_FOUND: dict[Hashable, SwiGLU | str] = {}
"""Results of earlier trials, by everything that a trial depends on."""
_MOST_FOUND: Final = 256


def found_swiglu(given: "FloatExperts") -> SwiGLU | str:
    """Return the gate's parameters with which ``QuantExperts`` gives the module's results, or the reason that no
    parameters were found.

    A copy of the module runs with synthetic weights of the module's sizes, on the CPU, with tokens that exceed all
    clamps. Therefore the trial also works for modules on the meta device. It needs memory for one expert in float64.
    """
    key = _key_of(given.module)
    if key is None:
        return _tried(given)
    key = (*given[1:], key)
    if key not in _FOUND:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = _tried(given)
    return _FOUND[key]


def candidates(module: Any) -> list[SwiGLU]:
    """Return the gates that the attributes of a module suggest, plain SwiGLU first."""
    limits, alphas = (
        [value for name in names if isinstance(value := getattr(module, name, None), (int, float)) and value > 0]
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    return [
        SwiGLU(alpha, beta, limit)
        for limit in (None, *dict.fromkeys(limit for limit in limits if limit < GREATEST_LIMIT))
        for alpha in dict.fromkeys((1.0, *alphas))
        for beta in (0.0, 1.0)
    ]


@torch.no_grad()
def _tried(given: "FloatExperts") -> SwiGLU | str:
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        reasons = []
        for dtype in TOLERANCE:
            found = _tried_in(given, dtype)
            if isinstance(found, SwiGLU):
                return found
            reasons.append(found)
    # If a forward fails in float64 because it casts to float32, report the reason from the float32 trial.
    return reasons[0] if "its forward refuses" not in reasons[0] else reasons[-1]


def _tried_in(given: "FloatExperts", dtype: torch.dtype) -> SwiGLU | str:
    generator = torch.Generator("cpu").manual_seed(0)
    gates = candidates(given.module)
    magnitudes = [*MAGNITUDES, *{4 * gate.limit for gate in gates if gate.limit is not None}]
    tokens = torch.randn(len(magnitudes), given.hidden, generator=generator, dtype=dtype)
    tokens *= torch.tensor(magnitudes, dtype=dtype)[:, None]
    used = sorted({0, given.experts // 2, given.experts - 1})
    chosen = torch.tensor([used[i % len(used) :] + used[: i % len(used)] for i in range(len(magnitudes))])[:, :2]
    weights = torch.rand(chosen.shape, generator=generator, dtype=dtype) + 0.25
    try:
        clone = _clone(given.module, _synthetic(given, dtype, generator), dtype, generator)
        with _OneExpertAtATime():
            got = clone(tokens.clone(), chosen.clone(), weights.clone())
    except Exception as error:  # a module's own code may raise anything
        text = str(error).strip().split("\n")[0]
        return f"its forward refuses tokens, expert ids and weights: {type(error).__name__}: {text[:160]}"
    if not isinstance(got, Tensor) or got.shape != tokens.shape:
        result = f"a tensor {tuple(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"
        return f"its forward returns {result} for tokens {tuple(tokens.shape)}"
    errors = []
    for want in _results(given._replace(module=clone), gates, tokens, chosen, weights):
        relative = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
        errors.append(relative.nan_to_num(torch.inf, torch.inf).amax().item())
    for gate, largest in zip(gates, errors, strict=True):
        if largest <= TOLERANCE[dtype]:
            return gate
    return (
        f"{type(given.module).__name__} computes something else than experts with SwiGLU: on random tokens its results "
        f"differ by {min(errors):.1e} (relative) from the nearest of {len(gates)} candidates"
    )


class _OneExpertAtATime(TorchDispatchMode):
    """Mode that refuses ops that read more than ``LARGEST`` elements of the experts' weights, before such an op
    allocates its result.

    The synthetic weights of all experts take almost no memory, but a copy of the weights might not fit.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if not is_view and any(isinstance(each, Tensor) and each.numel() > LARGEST for each in args):
            raise MemoryError("the trial is limited to modules that read the weight of one expert at a time")
        return func(*args, **(kwargs or {}))


def _synthetic(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Return tensors in the shapes of the module's parameters.

    The weights of the experts are overlapping windows of one vector, which repeats a shorter random vector. All experts
    together need little more memory than one expert, and each matrix is still different and ready for a GEMM.
    """
    made = {}
    for name, k in (("gate_up_proj", given.hidden), ("down_proj", given.width)):
        experts, rows, columns = given.module._parameters[name].shape
        length = (experts - 1) * _SHIFT + rows * columns
        values = torch.randn(_PERIOD, generator=generator, dtype=dtype) / k**0.5
        windows = values.repeat(-(-length // _PERIOD))
        made[name] = windows.as_strided((experts, rows, columns), (_SHIFT, columns, 1))
        if given.has_bias:
            shape = given.module._parameters[f"{name}_bias"].shape
            made[f"{name}_bias"] = torch.randn(shape, generator=generator, dtype=dtype)
    return made


def _clone(module: Any, tensors: dict[str, Tensor], dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Return a module of the same class and attributes with these parameters, on the CPU."""
    clone = object.__new__(type(module))
    clone.__dict__ |= module.__dict__
    clone._parameters = dict.fromkeys(module._parameters) | {
        name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
    }
    clone._buffers = {name: _on_cpu(buffer, dtype, generator) for name, buffer in module._buffers.items()}
    clone._modules = {name: copy.deepcopy(child) for name, child in module._modules.items()}
    for child in (each for own in clone._modules.values() if own is not None for each in own.modules()):
        for name, buffer in child._buffers.items():
            child._buffers[name] = _on_cpu(buffer, dtype, generator)
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation_internal", "other") in _BUILT_IN:
        clone.config = copy.copy(config)
        clone.config._experts_implementation_internal = "eager"
    return clone.eval()


def _on_cpu(buffer: Tensor | None, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Return a buffer's values, or random values between 0.5 and 1.5 for a buffer on the meta device."""
    if buffer is None:
        return None
    if buffer.is_meta:
        value = torch.rand(buffer.shape, generator=generator).add(0.5).to(buffer.dtype)
    else:
        value = buffer.detach().to("cpu", copy=True)
    return value.to(dtype) if value.is_floating_point() else value


def _results(
    given: "FloatExperts", gates: Sequence[SwiGLU], tokens: Tensor, chosen: Tensor, weights: Tensor
) -> list[Tensor]:
    """Return the results of ``QuantExperts`` with each gate, from the weights that quantisation would read."""
    totals = [torch.zeros_like(tokens) for _ in gates]
    gate_up_bias, down_bias = (
        torch.zeros(given.experts, parts, dtype=tokens.dtype) if bias is None else bias.view(given.experts, -1)
        for bias, parts in zip(given.biases(), (2, 1), strict=True)
    )
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        *halves, down = given.weights(expert)
        biases = gate_up_bias[expert].chunk(2)
        gate, up = (tokens[rows] @ half.t() + bias for half, bias in zip(halves, biases, strict=True))
        hidden = torch.cat([swiglu.of(gate, up) for swiglu in gates])
        for total, result in zip(totals, (hidden @ down.t() + down_bias[expert]).chunk(len(gates)), strict=True):
            total[rows] += weights[rows, slots, None] * result
    return totals


def _key_of(module: nn.Module) -> Hashable | None:
    """Return a value that is equal for modules that compute the same from equal weights, or None if attributes of the
    module cannot be compared."""
    own = [base for base in type(module).__mro__ if base is not nn.Module and issubclass(base, nn.Module)]
    members = [each for base in own for each in vars(base).values()]
    items: list[Any] = [type(module), *(each for each in members if callable(each) or isinstance(each, property))]
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules", "training") or _is_empty(value):
            continue
        config: Callable[[], Any] | None = getattr(value, "to_dict", None)
        if isinstance(value, (bool, int, float, str, type(None), type, FunctionType, BuiltinFunctionType, torch.dtype)):
            items.append((name, type(value), value))
        elif config is not None:
            if getattr(value, "_experts_implementation_internal", None) not in _BUILT_IN:
                return None
            items.append((name, type(value), repr(config())))
        else:
            return None
    if any(buffer is not None for buffer in module._buffers.values()):
        return None
    for name, child in module._modules.items():
        key = None if child is None else _key_of(child)
        if key is None:
            return None
        items.append((name, key))
    return tuple(items)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, set, list, tuple)) and not value
