"""Check whether ``qkv_norm_rope_append`` computes the steps of an attention block of transformers between its
projections and attention: run the block on random tokens, and compare with a float64 formula.

The block runs on the CPU, without its weights: its projections and its attention are replaced by functions that record
their arguments and return random numbers. A trial therefore also works for blocks on the meta device. The block must

- call ``q_proj``, ``k_proj`` and ``v_proj`` with the hidden states;
- normalise the heads of q and k, rotate them, and pass k and v to ``cache.update``, or without a cache to attention;
- call transformers' attention function with the result of ``cache.update``, the mask, and arguments that do not depend
  on the tokens;
- pass the result of attention to ``o_proj``, and return the result of ``o_proj``.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from torch_cute_ops.nn._names import MERGED, reason_bound
from torch_cute_ops.nn._qkv_steps import QkvSteps
from torch_cute_ops.nn.merging import Groups, merging
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops.qkv_norm_rope_append import HEAD_DIMS

_RECORDER: Final = "torch_cute_ops_trial"
"""Name of the attention function of trials in transformers' ``AttentionInterface``."""
_FUNCTIONS: Final = ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward")
"""Names of transformers' attention functions in the file of a model."""
_PARAMETERS: Final = ("self", "hidden_states", "position_embeddings", "attention_mask")
CACHE_NAMES: Final = ("cache", "past_key_values")
"""Names of the argument for the KV cache: in transformers 5.24, and in 5.17."""
_MAGNITUDES: Final = (1e-3, 0.02, 0.3, 1.0, 8.0, 300.0)
"""Standard deviations of the rows of q, k and v, one for each token. The smallest rows reveal the norms' eps, the
largest rows reveal a clamp."""
_TOLERANCE: Final = 1e-5
"""Largest relative error of a row, in the Frobenius norm. A block in float64 may compute its norms in float32."""
_TABLES: Final = (("in halves", False), ("in pairs", True), ("in halves", True), ("once", False))
"""Formulas of the rotation to try, as pairs (table, interleaved). A table repeats all cosines in a second half, as in
Llama; repeats each cosine next to itself, as in Cohere; or contains each cosine once, as in gpt-oss."""
_BATCH: Final = 2
MERGED_QKV: Final[Groups] = (("qkv_proj", MERGED["qkv_proj"]),)
"""Layers that a block's projection of q, k and v merges."""
_NORMS: Final = ("q_norm", "k_norm")
_LAYERS: Final = ("qkv_proj", *MERGED["qkv_proj"], "o_proj", *_NORMS)
"""Layers that a block may contain."""
_PROBE: Final = "torch_cute_ops_probe"
"""Name of an argument that the block must pass on to attention."""
_CASES: Final = ((3, True), (1, True), (2, False))
"""Trials: tokens of each of ``_BATCH`` sequences, and whether there is a cache. With a cache, the block also gets
``position_ids``."""
_LONGEST: Final = 2**20
"""Smallest bound of ``position_ids`` in trials. Blocks may scale queries only at large positions."""


class Block(NamedTuple):
    """Attention block whose steps between projections and attention are verified.

    Attributes:
        steps: steps that the op computes.
        width: width of the decoder's cosines and sines.
        table: how the decoder's tables repeat the cosines of the rotated pairs, an entry of ``_TABLES``.
        cache_name: name of the argument of ``forward`` for the cache.
        passes_kwargs: True if the block passes its other arguments to ``cache.update``, as from transformers 5.18 on.
        values: arguments that the block adds to the call of attention, such as ``scaling``.
        tensors: parameters of the block that it adds to the call of attention, as pairs (argument, parameter).
        interface: the attention functions from which the block chooses.
        eager: the attention function that the block calls if its configuration names ``"eager"``.
    """

    steps: QkvSteps
    width: int
    table: str
    cache_name: str
    passes_kwargs: bool
    values: dict[str, Any]
    tensors: tuple[tuple[str, str], ...]
    interface: Any
    eager: Any

    def angles(self, table: Tensor) -> Tensor:
        """Return the cosines, or sines, of the rotated pairs, (B or 1, S, rotary_dim / 2), from a decoder's table."""
        if self.table == "once":
            return table
        return table[..., ::2] if self.table == "in pairs" else table[..., : self.width // 2]

    def attention(self, implementation: str | None) -> Callable[..., tuple[Tensor, Any]]:
        """Return transformers' attention function with this name."""
        found: Callable[..., tuple[Tensor, Any]] = self.interface.get_interface(implementation, self.eager)
        return found

    def arguments(self, module: Any) -> dict[str, Any]:
        """Return the arguments that the block adds to the call of attention."""
        return self.values | {name: getattr(module, parameter) for name, parameter in self.tensors}


def found_block(module: nn.Module, decoder: nn.Module | None) -> Block | str:
    """Describe an attention block, or return the reason why the op does not compute its steps.

    Args:
        module: attention block with quantised layers ``q_proj``, ``k_proj`` and ``v_proj``, or with a ``qkv_proj`` that
            merges them. Separate layers are merged in the copy that runs, and stay as they are in ``module``.
        decoder: module with the block's ``rotary_emb``, or None.
    """
    if decoder is None:
        return "no module around it contains a rotary_emb"
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _tried(module, decoder.rotary_emb)
    except _Unlike as reason:
        return str(reason)
    except Exception as error:  # a user's module can raise any exception
        text = str(error).strip().split("\n")[0]
        return f"its forward refuses a trial: {type(error).__name__}: {text[:160]}"


class _Unlike(Exception):
    """Reason why a block computes something else than the op."""


def _tried(module: Any, rotary: Any) -> Block:
    forward = inspect.unwrap(type(module).forward)
    names = [*inspect.signature(forward).parameters]
    if tuple(names[:4]) != _PARAMETERS or len(names) != 6 or names[4] not in CACHE_NAMES:
        raise _Unlike(f"its forward takes {', '.join(names[1:])}")
    if any(name not in forward.__globals__ for name in _FUNCTIONS):
        raise _Unlike("it does not choose among transformers' attention functions")
    head_dim = module.head_dim
    if head_dim not in HEAD_DIMS:
        raise _Unlike(f"its heads have {head_dim} elements; expected {', '.join(map(str, HEAD_DIMS))}")
    parts, _ = _sizes(module)
    if any(part % head_dim for part in parts):
        raise _Unlike(f"q, k and v contain {parts} columns; expected multiples of {head_dim}")
    more = [name for name, _ in module.named_parameters() if name.split(".")[0] not in (*_LAYERS, name)]
    if more:
        raise _Unlike(f"it contains {', '.join(more)}")
    for norm in (module._modules.get(name) for name in _NORMS):
        reason = None if norm is None else reason_bound(norm)
        if reason is not None:
            raise _Unlike(f"of its {type(norm).__name__}: {reason}")
    found: Block | None = None
    for tokens, has_cache in _CASES:
        trial = _Trial(module, rotary, tokens, names[4], has_cache)
        trial.run()
        if found is None:
            found = trial.block(forward, _table_dtype(module, rotary))
        trial.compare(found)
    assert found is not None
    return found


def _sizes(module: Any) -> tuple[tuple[int, ...], int]:
    """Return the columns of q, k and v that a block projects its input to, and the number of input features."""
    if "qkv_proj" in module._modules:
        return (*module.qkv_proj.parts,), module.qkv_proj.in_features
    layers = [getattr(module, name) for name in MERGED["qkv_proj"]]
    return tuple(layer.out_features for layer in layers), layers[0].in_features


class _Projection(nn.Module):
    """Layer that records its inputs and returns ``result``. It replaces ``qkv_proj`` or ``o_proj``."""

    def __init__(self, result: Tensor, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.result, self.parts = result, parts
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.result


class _Cache:
    """Cache that records the keys and values that it gets, and returns other keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.returned = keys, values
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.calls.append((args, kwargs))
        return self.returned


class _Trial:
    """One call of a copy of a block.

    Args:
        module: attention block.
        rotary: rotary embedding of the decoder.
        tokens: number of tokens of each sequence.
        cache_name: name of the argument for the cache.
        has_cache: True to pass a cache.
    """

    def __init__(self, module: Any, rotary: Any, tokens: int, cache_name: str, has_cache: bool) -> None:
        self.head_dim, self.cache_name = module.head_dim, cache_name
        parts, features = _sizes(module)
        self.q_heads, kv_heads, _ = (part // self.head_dim for part in parts)
        lead = (_BATCH, tokens)
        scales = torch.tensor(_MAGNITUDES[-_BATCH * tokens :], dtype=torch.float64).view(*lead, 1)
        self.qkv = _numbers(*lead, sum(parts)) * scales
        self.hidden = _numbers(*lead, features)
        self.tables = _tables(module, rotary, tokens)
        self.attended = _numbers(*lead, self.q_heads, self.head_dim)
        self.result = _numbers(*lead, module.o_proj.out_features)
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", 0)
        self.positions = _positions(max(longest, _LONGEST), tokens) if has_cache else None
        self.mask, self.weights, self.probe = torch.ones(1), object(), object()
        new = [_numbers(_BATCH, kv_heads, tokens + 2, self.head_dim) for _ in range(2)]
        self.cache = _Cache(*new) if has_cache else None
        projections: dict[str, nn.Module] = {
            "qkv_proj": _Projection(self.qkv, parts),
            "o_proj": _Projection(self.result),
        }
        self.clone = _clone(module, projections)
        self.clone.__dict__["_record_attention"] = self._attend
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        self.calls.append((args, kwargs))
        return self.attended, self.weights

    def run(self) -> None:
        """Call the copy, and check everything except the values of q, k and v."""
        given = {self.cache_name: self.cache, "position_ids": self.positions, _PROBE: self.probe}
        got = self.clone(self.hidden, position_embeddings=self.tables, attention_mask=self.mask, **given)
        if not isinstance(got, tuple) or len(got) != 2 or got[0] is not self.result or got[1] is not self.weights:
            raise _Unlike("it does not return the results of o_proj and of attention")
        qkv_proj, o_proj = self.clone.qkv_proj, self.clone.o_proj
        if len(qkv_proj.inputs) != 1 or qkv_proj.inputs[0] is not self.hidden:
            raise _Unlike("it does not project its input once")
        if len(self.calls) != 1:
            raise _Unlike(f"it calls transformers' attention function {len(self.calls)} times")
        if len(o_proj.inputs) != 1 or not torch.equal(o_proj.inputs[0], self.attended.flatten(2)):
            raise _Unlike("it does not pass the result of attention to o_proj")
        (_, self.q, *kv, mask), kwargs = self.calls[0]
        if mask is not self.mask:
            raise _Unlike("it changes the mask")
        self.updated: tuple[Any, ...] = tuple(kv)
        self.passes_kwargs = False
        if self.cache is not None:
            if len(self.cache.calls) != 1 or any(a is not b for a, b in zip(kv, self.cache.returned, strict=True)):
                raise _Unlike("it does not pass the cache's keys and values to attention")
            args, more = self.cache.calls[0]
            if len(args) != 3 or args[2] != self.clone.layer_idx or more.keys() - {"kwargs"}:
                raise _Unlike("it passes other arguments to the cache")
            self.updated, self.passes_kwargs = args[:2], "kwargs" in more
        self.kwargs = {key: value for key, value in kwargs.items() if key not in ("position_ids", _PROBE)}
        if kwargs.get(_PROBE) is not self.probe or kwargs.get("position_ids", self) is not self.positions:
            raise _Unlike("it does not pass further arguments to attention")

    def block(self, forward: Any, table_dtype: torch.dtype | None) -> Block:
        """Return the description of the block with which a formula gives its q, k and v.

        Args:
            forward: the function in which the block's class defines its forward.
            table_dtype: dtype of cosines and sines, as in ``QkvSteps``.
        """
        values, tensors = self._arguments()
        norms = [self.clone._modules.get(name) for name in _NORMS]
        eps = {_eps_of(norm) for norm in norms if norm is not None} or {1e-6}
        if len(eps) > 1:
            raise _Unlike("the norms of q and k add different numbers to the mean square")
        for norm in norms:
            if norm is not None and norm.weight.shape != (self.head_dim,):
                shape = tuple(norm.weight.shape)
                raise _Unlike(f"its norms have weights {shape}; expected a weight of a head, ({self.head_dim},)")
        width = self.tables[0].shape[-1]
        interface, eager = (forward.__globals__[name] for name in _FUNCTIONS)
        has_q_norm, has_k_norm = (norm is not None for norm in norms)
        errors = []
        for plus_one, (table, interleaved) in itertools.product((False, True), _TABLES):
            steps = QkvSteps(
                self.head_dim,
                2 * width if table == "once" else width,
                interleaved,
                has_q_norm=has_q_norm,
                has_k_norm=has_k_norm,
                eps=next(iter(eps)),
                norm_plus_one=plus_one,
                table_dtype=table_dtype,
            )
            if steps.rotary_dim > self.head_dim or (plus_one and not has_q_norm and not has_k_norm):
                continue
            block = Block(steps, width, table, self.cache_name, self.passes_kwargs, values, tensors, interface, eager)
            errors.append(self.error(block))
            if errors[-1] <= _TOLERANCE:
                return block
        raise _Unlike(
            f"its q, k and v differ by {min(errors):.1e} (relative) from the nearest of {len(errors)} formulas"
        )

    def compare(self, block: Block) -> None:
        """Check that a block that another trial found describes this trial, too."""
        values, tensors = self._arguments()
        if (values, tensors) != (block.values, block.tensors):
            raise _Unlike("the arguments of attention depend on the tokens")
        if self.cache is not None and self.passes_kwargs != block.passes_kwargs:
            raise _Unlike("the arguments of the cache depend on the tokens")
        error = self.error(block)
        if error > _TOLERANCE:
            count = self.hidden.shape[1]
            where = "with" if self.cache is not None else "without"
            raise _Unlike(f"for {count} tokens {where} a cache, its q, k and v differ by {error:.1e} (relative)")

    def error(self, block: Block) -> float:
        """Return the largest relative error of a row of q, k or v, compared with the formula."""
        heads = [part // self.head_dim for part in self.clone.qkv_proj.parts]
        q, k, v = self.qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(heads, 1)
        cos, sin = (block.angles(table).unsqueeze(1) for table in self.tables)
        weights = block.steps.weights(self.clone)
        want = [
            _rotated(x if weight is None else _normalised(x, weight, block.steps), cos, sin, block.steps)
            for x, weight in zip((q, k), weights, strict=True)
        ]
        errors = [_error(a, b) for a, b in zip((self.q, *self.updated), (*want, v), strict=True)]
        return max(errors)

    def _arguments(self) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
        """Return the arguments that the block adds to attention: values, and names of parameters."""
        values, tensors = {}, []
        for name, value in self.kwargs.items():
            if value is None or isinstance(value, (bool, int, float, str)):
                values[name] = value
                continue
            own = [key for key, parameter in self.clone._parameters.items() if parameter is value]
            if not own:
                raise _Unlike(f"it passes a {type(value).__name__} as {name} to attention")
            tensors.append((name, own[0]))
        return values, tuple(tensors)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _tables(module: Any, rotary: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines that the decoder passes to a block, (2, S, width) float64, for positions up to the
    longest context."""
    positions = _positions(getattr(getattr(module, "config", None), "max_position_embeddings", 4096), tokens)
    cos, sin = _angles(module, rotary, torch.float64, positions)
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[:2] != (_BATCH, tokens) or cos.shape[-1] % 2:
        raise _Unlike(f"its rotary embedding returns {tuple(cos.shape)} and {tuple(sin.shape)}")
    return cos, sin


def _table_dtype(module: Any, rotary: Any) -> torch.dtype | None:
    """Return the dtype of the tables of a decoder in 16 bits, or None if it is the dtype of the activations."""
    found = {dtype: _angles(module, rotary, dtype, torch.zeros(1, 1).long())[0].dtype for dtype in SIXTEEN_BIT}
    if all(dtype == given for given, dtype in found.items()):
        return None
    if {*found.values()} != {torch.float32}:
        raise _Unlike(f"its rotary embedding returns {', '.join(map(str, found.values()))}")
    return torch.float32


def _angles(module: Any, rotary: Any, dtype: torch.dtype, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of positions (B, S) that the decoder computes for activations in ``dtype``."""
    if any(each.is_meta for each in rotary.buffers()):
        raise _Unlike("its rotary embedding is on the meta device; load the model first")
    own = copy.deepcopy(rotary).to("cpu")
    given: dict[str, Any] = {}
    if "layer_type" in inspect.signature(own.forward).parameters:
        given["layer_type"] = module.config.layer_types[module.layer_idx]
    cos, sin = own(torch.empty(0, dtype=dtype), positions, **given)
    return cos, sin


def _positions(longest: int, tokens: int) -> Tensor:
    """Return positions below ``longest``, evenly spaced, (2, S) int64."""
    count = _BATCH * tokens
    return torch.arange(count, dtype=torch.float64).add(0.7).mul(longest / (count + 1)).long().view(_BATCH, tokens)


def _clone(module: Any, projections: dict[str, nn.Module]) -> Any:
    """Return a block with the same class and attributes, random norms and parameters in float64, and other
    projections. If q, k and v are separate layers, the copy has the class that merges them, which raises an error if
    their inputs differ."""
    base: Any = type(module)
    clone: Any = object.__new__(base if "qkv_proj" in module._modules else merging(base, MERGED_QKV))
    clone.__dict__ |= module.__dict__
    clone._parameters = {
        name: None if each is None else nn.Parameter(_numbers(*each.shape), requires_grad=False)
        for name, each in module._parameters.items()
    }
    clone._buffers = {name: None if each is None else each.detach().to("cpu") for name, each in module._buffers.items()}
    replaced = (*projections, *MERGED["qkv_proj"])
    children = {name: child for name, child in module._modules.items() if name not in replaced}
    clone._modules = {name: _random_norm(child) for name, child in children.items()} | projections
    clone.config = copy.copy(module.config)
    clone.config._attn_implementation_internal = _RECORDER
    return clone.eval()


def _random_norm(child: nn.Module | None) -> Any:
    """Return a copy of a norm on the CPU, in float64, with random weights."""
    if child is None:
        return None
    own = copy.deepcopy(child)
    own = (own.to_empty(device="cpu") if _is_on_meta(own) else own.to("cpu")).double()
    for parameter in own.parameters():
        parameter.data = _numbers(*parameter.shape)
    return own


def _is_on_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in (*module.parameters(), *module.buffers()))


def _eps_of(norm: Any) -> float:
    found = [getattr(norm, name, None) for name in ("variance_epsilon", "eps")]
    given = next((each for each in found if isinstance(each, float)), None)
    if given is None or not math.isfinite(given):
        raise _Unlike(f"{type(norm).__name__} names no number that it adds to the mean square")
    return given


def _normalised(x: Tensor, weight: Tensor, steps: QkvSteps) -> Tensor:
    root = (x.square().mean(-1, keepdim=True) + steps.eps).sqrt()
    return x / root * (1 + weight if steps.norm_plus_one else weight)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, steps: QkvSteps) -> Tensor:
    """Rotate heads (B, heads, S, D) by angles with cosines (B, 1, S, rotary_dim / 2)."""
    head, rest = x[..., : steps.rotary_dim], x[..., steps.rotary_dim :]
    one, other = (head[..., ::2], head[..., 1::2]) if steps.interleaved else head.chunk(2, -1)
    pair = one * cos - other * sin, other * cos + one * sin
    return torch.cat((torch.stack(pair, -1).flatten(-2) if steps.interleaved else torch.cat(pair, -1), rest), -1)


def _error(got: Any, want: Tensor) -> float:
    """Return the largest relative error of a row, or infinity if the shapes differ."""
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return math.inf
    relative = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return relative.nan_to_num(torch.inf, torch.inf).amax().item()


def _record(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Attention function of trials."""
    found: tuple[Tensor, Any] = module._record_attention(module, *args, **kwargs)
    return found


AttentionInterface.register(_RECORDER, _record)
