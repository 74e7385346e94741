"""Check whether ``QuantExperts`` can replace a module of experts: run both on random tokens and compare the results.

A trial first looks for the gate, with a few tokens in float64. Then the results of four more sets of tokens must agree
with this gate:

- the same tokens, in the module's own dtype;
- one token, because a forward may treat a single token separately;
- tokens that together choose every expert, or a part of the experts if they are large, with routing weights from 0.001
  to 1, and with the number of experts per token that the module or its configuration names;
- many tokens that all choose the same two experts: these reveal a limit on the tokens per expert.

The first and the last set run in evaluation and in training mode.
"""

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.nn.experts import SwiGLU

if TYPE_CHECKING:
    from torch_cute_ops.nn.float_experts import FloatExperts

MAGNITUDES: Final = (0.25, 1.0, 3.0, 12.0, 50.0, 200.0, 1000.0, 20000.0)
"""Standard deviations of gate and up, one for each token. The largest exceed every usual clamp, so that a clamp changes
some results."""
GREATEST_LIMIT: Final = 1e6
"""Larger clamps are not tried, because tokens that reach them are out of range for 16-bit activations."""
LARGEST: Final = 2**27
"""Maximum number of weight elements that one op of a trial may read, unless one expert has more."""
TOLERANCE: Final = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Largest relative error of a token's result in the Frobenius norm, keyed by the dtype of the trial. In 16 bits, a
forward rounds after each step: 63 replaced classes of transformers 5.24 have errors of up to 0.0007 in float16 and
0.006 in bfloat16."""
SEARCHED: Final = (torch.float64, torch.float32)
"""Dtypes in which the trial looks for the gate, in order. The second dtype is used if the forward does not accept the
first."""
GREATEST_HALF: Final = 12.0
"""Largest magnitude of tokens in float16 trials: products of gate and up must stay finite."""
CROWD: Final = (64, 256)
"""Smallest and largest number of tokens in a trial that sends all tokens to two experts."""
CROWD_WORK: Final = 2**33
"""Maximum number of multiplications in the trial that sends all tokens to two experts. The trial exceeds it only if the
smallest number of tokens needs more."""
SPREAD_WORK: Final = 2**30
"""Maximum number of weight elements that are read by the trial whose tokens choose many different experts. The trial
exceeds it only if ``LEAST_SPREAD`` experts have more elements."""
LEAST_SPREAD: Final = 8
"""Minimum number of different experts in the trial whose tokens choose many experts, or all experts if the module has
fewer."""
UNKNOWN_TOPK: Final = 3
"""Number of experts per token to try if neither the module nor its configuration names one. Other trials use 2."""
_TOPK_NAMES: Final = ("top_k", "topk", "num_experts_per_tok", "moe_topk")
_BUILT_IN: Final = (None, "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe")
"""transformers' own implementations of an experts' forward. All of them compute the same as the class's code."""
_SHIFT, _PERIOD = 101, 65537
"""The experts' synthetic weights are windows of one repeated vector: the distance between windows, and the vector's
length. Both are prime, so that neither rows nor columns repeat."""

_FOUND: dict[Hashable, SwiGLU | str] = {}
"""Results of earlier trials, keyed by everything that a trial depends on."""
_MOST_FOUND: Final = 256


def found_swiglu(given: "FloatExperts") -> SwiGLU | str:
    """Return the gate with which ``QuantExperts`` computes the same as the module, or the reason why none was found.

    A copy of the module runs on the CPU, with synthetic weights of the module's sizes, so the trial also works for
    modules on the meta device. Some tokens are so large that gate and up exceed every clamp. The trial needs memory for
    one expert in float64. docs/models.md lists the differences that a trial cannot detect.
    """
    key = _key_of(given.module)
    if key is None:
        return _tried(given)
    key = (*given[1:], given.module.gate_up_proj.dtype, key)
    if key not in _FOUND:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = _tried(given)
    return _FOUND[key]


def candidates(module: Any) -> list[SwiGLU]:
    """Return the gates to try: plain SwiGLU first, then SwiGLU with parameters that the module's attributes give, then
    GELU and squared ReLU."""
    limits, alphas = (
        [value for name in names if isinstance(value := getattr(module, name, None), (int, float)) and value > 0]
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    gates = [
        SwiGLU(alpha, beta, limit)
        for limit in (None, *dict.fromkeys(limit for limit in limits if limit < GREATEST_LIMIT))
        for alpha in dict.fromkeys((1.0, *alphas))
        for beta in (0.0, 1.0)
    ]
    return [*gates, *(SwiGLU(gate=gate) for gate in ("gelu_tanh", "gelu", "relu2"))]


@torch.no_grad()
def _tried(given: "FloatExperts") -> SwiGLU | str:
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        reasons = []
        for dtype in SEARCHED:
            found = _found_in(given, dtype)
            if isinstance(found, SwiGLU):
                return _reason_of_more(given, found) or found
            reasons.append(found)
    # If the forward casts to float32, it may fail in float64 for this reason alone. Then report the reason from the
    # float32 trial.
    return reasons[0] if REFUSES not in reasons[0] else reasons[-1]


class _Tokens(NamedTuple):
    """Arguments of a module's forward: tokens (M, H), chosen experts (M, topk), and routing weights (M, topk)."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


def _few(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> _Tokens:
    """Return a few tokens, one for each magnitude, that choose different pairs of experts."""
    limits = {4 * gate.limit for gate in candidates(given.module) if gate.limit is not None}
    magnitudes = [*MAGNITUDES, *limits]
    if dtype == torch.float16:
        magnitudes = [min(each, GREATEST_HALF) for each in magnitudes]
    used = _used(given)
    chosen = torch.tensor([used[i % len(used) :] + used[: i % len(used)] for i in range(len(magnitudes))])[:, :2]
    return _tokens(given, magnitudes, chosen, dtype, generator)


def _crowd(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> _Tokens:
    """Return many tokens that all choose the same two experts."""
    least, most = CROWD
    count = min(most, max(least, CROWD_WORK // (3 * given.experts * given.hidden * given.width)))
    chosen = torch.tensor([_used(given)[:2]]).expand(count, -1).contiguous()
    return _tokens(given, [1.0] * count, chosen, dtype, generator)


def _single(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> _Tokens:
    """Return one token."""
    return _tokens(given, [1.0], torch.tensor([_used(given)[:2]]), dtype, generator)


def _spread(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> _Tokens:
    """Return tokens that together choose every expert, or evenly distributed experts if the experts are large."""
    count = min(given.experts, max(LEAST_SPREAD, SPREAD_WORK // (3 * given.hidden * given.width)))
    used = [i * given.experts // count for i in range(count)]
    topk = min(count, _topk_of(given.module) or UNKNOWN_TOPK)
    chosen = torch.tensor([[used[(i + j) % count] for j in range(topk)] for i in range(0, count, topk)])
    drawn = _tokens(given, [1.0] * len(chosen), chosen, dtype, generator)
    weights = 10 ** (-3 * torch.rand(chosen.shape, generator=generator, dtype=torch.float64))
    return drawn._replace(weights=weights.to(dtype))


def _used(given: "FloatExperts") -> list[int]:
    return sorted({0, given.experts // 2, given.experts - 1})


def _topk_of(module: nn.Module) -> int | None:
    """Return the number of experts per token that the module or its configuration names, or None if neither does."""
    found = [getattr(each, name, None) for each in (module, getattr(module, "config", None)) for name in _TOPK_NAMES]
    return next((each for each in found if type(each) is int and 1 <= each <= MAX_TOPK), None)


def _tokens(
    given: "FloatExperts",
    magnitudes: Sequence[float],
    chosen: Tensor,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> _Tokens:
    tokens = torch.randn(len(magnitudes), given.hidden, generator=generator, dtype=torch.float64)
    tokens *= torch.tensor(magnitudes, dtype=torch.float64)[:, None]
    weights = torch.rand(chosen.shape, generator=generator, dtype=torch.float64) + 0.25
    return _Tokens(tokens.to(dtype), chosen, weights.to(dtype))


def _found_in(given: "FloatExperts", dtype: torch.dtype) -> SwiGLU | str:
    """Return the gate with which ``QuantExperts`` gives the module's results for a few tokens in ``dtype``, or the
    reason why no gate does."""
    generator = torch.Generator("cpu").manual_seed(0)
    gates, few = candidates(given.module), _few(given, dtype, generator)
    clone = _cloned(given, dtype, generator)
    got = clone if isinstance(clone, str) else _result(clone, few)
    if isinstance(got, str):
        return got
    errors = [_error(got, want) for want in _results(given._replace(module=clone), gates, few)]
    for gate, largest in zip(gates, errors, strict=True):
        if largest <= TOLERANCE[dtype]:
            return gate
    return (
        f"{type(given.module).__name__} computes something else than experts with SwiGLU: on random tokens its results "
        f"differ by {min(errors):.1e} (relative) from the nearest of {len(gates)} candidates"
    )


def _reason_of_more(given: "FloatExperts", gate: SwiGLU) -> str | None:
    """Compare results with this gate and the module's results for other tokens, dtypes and modes. Return the reason why
    they differ, or None if they agree."""
    kind, own = type(given.module).__name__, given.module.gate_up_proj.dtype
    if own not in TOLERANCE:  # a quantised parameter; quantize_ refuses it
        own = torch.float32
    generator = torch.Generator("cpu").manual_seed(1)
    clone: Any = None
    for name, make, dtype, modes in (
        ("", _few, own, (False, True)),
        ("", _single, own, (False,)),
        (" of different experts", _spread, torch.float32, (False,)),
        (" of the same experts", _crowd, torch.float32, (False, True)),
    ):
        if make in (_few, _spread):  # the next set has the same dtype
            clone = _cloned(given, dtype, generator)
        arguments, want = make(given, dtype, generator), None
        for is_training in modes:
            got = clone if isinstance(clone, str) else _result(clone.train(is_training), arguments)
            count = len(arguments.tokens)
            where = f"for {count} token{'s' if count > 1 else ''}{name} in {str(dtype).removeprefix('torch.')}"
            where += " in training mode" if is_training else ""
            if isinstance(got, str):
                if make is _spread and _topk_of(given.module) is None:
                    continue  # the forward may be written for another number of experts per token
                return f"{got} ({where})"
            if want is None:
                (want,) = _results(given._replace(module=clone), [gate], arguments)
            error = _error(got, want)
            if error > TOLERANCE[dtype]:
                return (
                    f"{kind} computes something else than experts with SwiGLU {where}: its results differ by "
                    f"{error:.1e} (relative)"
                )
    return None


def _cloned(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Return a copy of the module with synthetic weights in ``dtype``, or the reason why it cannot be copied."""
    try:
        return _clone(given.module, _synthetic(given, dtype, generator), dtype, generator)
    except Exception as error:  # a user's module can raise any exception
        return _refusal(error)


def _result(clone: Any, arguments: _Tokens) -> Tensor | str:
    """Return the result of the module's forward, or the reason why the forward failed."""
    copies = [each.clone() for each in arguments]
    try:
        with _OneExpertAtATime(max(LARGEST, clone.gate_up_proj[0].numel())):
            got = clone(*copies)
    except Exception as error:  # a user's module can raise any exception
        return _refusal(error)
    if not all(map(torch.equal, copies, arguments)):
        return "its forward changes its arguments in place"
    if not isinstance(got, Tensor) or got.shape != arguments.tokens.shape:
        result = f"a tensor {tuple(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"
        return f"its forward returns {result} for tokens {tuple(arguments.tokens.shape)}"
    return got


def _refusal(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{REFUSES}: {type(error).__name__}: {text[:160]}"


REFUSES: Final = "its forward refuses tokens, expert ids and weights"


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a token's result."""
    relative = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    return relative.nan_to_num(torch.inf, torch.inf).amax().item()


class _OneExpertAtATime(TorchDispatchMode):
    """Dispatch mode that refuses ops that would read or gather too many elements of the experts' weights. It refuses
    an op before the op allocates its result.

    The experts' synthetic weights share memory, so they are small, but a copy of them might not fit into memory.

    Args:
        limit: largest number of elements.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if not is_view and any(isinstance(each, Tensor) and each.numel() > self.limit for each in args):
            raise MemoryError(LIMITED)
        if func in _GATHERS and _size_of_gather(*args) > self.limit:
            raise MemoryError(LIMITED)
        return func(*args, **(kwargs or {}))


LIMITED: Final = "the trial is limited to modules that read the weight of one expert at a time"
_GATHERS: Final = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)


def _size_of_gather(source: Tensor, *where: Any) -> int:
    """Return the number of elements in the result of a gathering op (one of ``_GATHERS``)."""
    indices = [where[1]] if isinstance(where[0], int) else [each for each in where[0] if each is not None]
    indexed = [where[0]] if isinstance(where[0], int) else [i for i, each in enumerate(where[0]) if each is not None]
    count = max((each.numel() for each in indices), default=1)
    rest = [size for dim, size in enumerate(source.shape) if dim not in indexed]
    return count * math.prod(rest)


def _synthetic(given: "FloatExperts", dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random tensors in the shapes of the module's parameters. Together, the tensors need little more memory
    than one expert.

    The weights are overlapping windows of one vector, which repeats a shorter random vector. All matrices differ, and a
    GEMM can read each of them in place.
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
    """Return a module on the CPU with the same class and attributes, but with the given parameters."""
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
    """Return a copy of a buffer on the CPU. A buffer on the meta device gets random values between 0.5 and 1.5."""
    if buffer is None:
        return None
    if buffer.is_meta:
        value = torch.rand(buffer.shape, generator=generator).add(0.5).to(buffer.dtype)
    else:
        value = buffer.detach().to("cpu", copy=True)
    return value.to(dtype) if value.is_floating_point() else value


def _results(given: "FloatExperts", gates: Sequence[SwiGLU], arguments: _Tokens) -> list[Tensor]:
    """For each gate, compute the result of ``QuantExperts`` from the unquantised weights, in at least float32."""
    tokens, chosen, weights = arguments
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    tokens, weights = tokens.to(dtype), weights.to(dtype)
    totals = [torch.zeros_like(tokens) for _ in gates]
    gate_up_bias, down_bias = (
        torch.zeros(given.experts, parts, dtype=dtype) if bias is None else bias.view(given.experts, -1).to(dtype)
        for bias, parts in zip(given.biases(), (2, 1), strict=True)
    )
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        *halves, down = (each.to(dtype) for each in given.weights(expert))
        biases = gate_up_bias[expert].chunk(2)
        gate, up = (tokens[rows] @ half.t() + bias for half, bias in zip(halves, biases, strict=True))
        hidden = torch.cat([swiglu.of(gate, up) for swiglu in gates])
        for total, result in zip(totals, (hidden @ down.t() + down_bias[expert]).chunk(len(gates)), strict=True):
            total[rows] += weights[rows, slots, None] * result
    return totals


def _key_of(module: nn.Module) -> Hashable | None:
    """Return a key that is equal for modules that compute the same from equal weights, or None if the module's
    attributes cannot be compared."""
    own = [base for base in type(module).__mro__ if base is not nn.Module and issubclass(base, nn.Module)]
    items: list[Any] = [type(module)]
    for name, value in (each for base in own for each in vars(base).items()):
        if callable(value) or isinstance(value, (property, classmethod)):
            items += [value, *_globals_of(value)]
        elif _is_plain(value):
            items.append((name, repr(value)))
        elif not name.startswith("__"):
            return None
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


def _is_plain(value: Any) -> bool:
    """Return True for a number, text or dtype, and for a container of such values."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype))


def _globals_of(member: Any) -> list[tuple[str, str]]:
    """Return the names and values of plain global variables that a method reads, directly or through functions of its
    file."""
    waiting, seen, found = [getattr(member, "__func__", getattr(member, "fget", member))], set(), {}
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            for name in code.co_names:
                value = function.__globals__.get(name)
                if _is_plain(value):
                    found[f"{function.__module__}.{name}"] = repr(value)
                elif getattr(value, "__module__", None) == function.__module__:
                    waiting.append(value)
    return sorted(found.items())


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, set, list, tuple)) and not value
