"""Attention blocks of transformers that call ``qkv_norm_rope_append``, and the caches that they write."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from torch_cute_ops.integrations._transformers_attention_trial import MERGED_QKV, Block, found_block
from torch_cute_ops.nn import QuantLinear, _names
from torch_cute_ops.nn._qkv_steps import PARTS
from torch_cute_ops.nn._straight_through import needs_gradient
from torch_cute_ops.nn._summary import Summary, bytes_of, grouped, record
from torch_cute_ops.nn.merging import MERGED_FROM, merge_, merging
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.runtime.dispatch import is_proxy

_TABLE_DTYPES: Final = (*SIXTEEN_BIT, torch.float32)
"""Dtypes of cosines and sines that the op takes."""


@torch.no_grad()
def fuse_attention_(model: Any) -> Any:
    """Make attention blocks compute the steps between their projections and attention in one launch, in place.

    An attention block with the layers ``q_proj``, ``k_proj`` and ``v_proj`` of this package, or with a ``qkv_proj``
    that merges them, then calls one GEMM and :func:`torch_cute_ops.qkv_norm_rope_append`. The op normalises the heads
    of q and k if the block does, rotates them, and writes k and v to the cache. The op rounds once, whereas the block
    rounds after each step, so the results differ in their last bits.

    - With a ``StaticCache``, the op writes k and v to the cache, also in layers with a sliding window, as long as the
      new tokens fit into the window.
    - With any other cache, such as ``DynamicCache`` or the paged cache of ``generate_batch``, and without a cache, the
      op writes k and v to a temporary tensor, and the cache's own ``update`` copies them.
    - A static cache that is full takes no further token: on a CPU the call raises ``ValueError``; on a GPU the op drops
      the token's k and v, and no error is raised.
    - In training mode, if gradients are needed, and for inputs in float32, the block computes its steps one by one, as
      before.

    Only blocks whose computation is verified are changed: each block runs on random tokens, on the CPU and without its
    weights, and its queries, keys and values are compared with a float64 formula. docs/models.md names models whose
    blocks pass, such as Llama, Qwen3 and Gemma 3. :func:`torch_cute_ops.nn.summary` lists the changed blocks, and the
    reasons why others stay unchanged.

    Arguments that a block adds to the call of attention, such as its ``scaling``, and the norms' eps are read when the
    block is changed. If you set these attributes afterwards, the fused op does not use the new values; only calls that
    compute the steps one by one do.

    Args:
        model: model of transformers with layers of this package, such as after
            :func:`torch_cute_ops.nn.quantize_`. In a block that changes, :func:`torch_cute_ops.nn.merge_` merges
            q, k and v.

    Returns:
        ``model``. A warning names the attention blocks that stay unchanged, except blocks without a rotary embedding
        if others changed. Call the function before :func:`torch_cute_ops.nn.warmup`, which compiles the op's kernel,
        and before ``torch.compile``.
    """
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    surprising: set[str] = set()
    shared: dict[nn.Module, SharedTables] = {}
    for name, module in [*model.named_modules()]:
        if not _is_attention(module):
            continue
        kind = type(module).__name__
        if isinstance(getattr(module, "attention_block", None), Block):
            replaced[name] = f"{kind} with qkv_norm_rope_append"
            continue
        decoder = _decoder_of(model, name)
        found = _reason_unlike(module) or _names.reason_bound(module) or found_block(module, decoder)
        if not isinstance(found, str):
            # Merge only after the check: in other blocks, such as cross-attention, q, k and v can have different
            # inputs.
            merge_(module, dict(MERGED_QKV))
        if isinstance(found, str) or decoder is None or "qkv_proj" not in module._modules:
            left[name] = found if isinstance(found, str) else "q_proj, k_proj and v_proj cannot be merged"
            if decoder is not None:
                surprising.add(name)
            continue
        if decoder not in shared:
            shared[decoder] = SharedTables()
            decoder.register_forward_pre_hook(shared[decoder].begin)
            decoder.register_forward_hook(shared[decoder].end, always_call=True)
        module.attention_block, module.qkv_steps, module.shared_tables = found, found.steps, shared[decoder]
        kind_of: Any = type(module)
        module.__class__ = _fused(kind_of)
        replaced[name] = f"{kind} with qkv_norm_rope_append"
    size = bytes_of(model)
    record(model, Summary("fuse_attention_", replaced, left, size, size))
    # Without a rotary embedding, as in vision towers, no block could change.
    named = {name: reason for name, reason in left.items() if name in surprising or not replaced}
    if named:
        groups = (f"{_names.listed(names)}: {reason}" for reason, names in grouped(named).items())
        warnings.warn(f"fuse_attention_: attention stays unchanged. {'; '.join(groups)}", stacklevel=3)
    elif not replaced:
        warnings.warn(f"fuse_attention_: no attention block in this {type(model).__name__}", stacklevel=3)
    return model


def _is_attention(module: nn.Module) -> bool:
    children = module._modules
    return "qkv_proj" in children or all(name in children for name in _names.MERGED["qkv_proj"])


def _decoder_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost module around an attention block that contains a ``rotary_emb``, or None."""
    names = ["", *_names.parents(name)]
    around = (model.get_submodule(each) for each in reversed(names))
    return next((each for each in around if isinstance(each._modules.get("rotary_emb"), nn.Module)), None)


def _reason_unlike(module: nn.Module) -> str | None:
    """Return the reason why a block's projections of q, k and v cannot be one layer, or None if they can."""
    projection = module._modules.get("qkv_proj")
    if projection is not None:
        if not isinstance(projection, QuantLinear):
            return "qkv_proj is not quantised"
        return None if len(projection.parts) == PARTS else "qkv_proj does not merge q_proj, k_proj and v_proj"
    layers: dict[str, Any] = {name: module._modules[name] for name in _names.MERGED["qkv_proj"]}
    apart = [name for name, layer in layers.items() if not isinstance(layer, QuantLinear)]
    if apart:
        return f"{', '.join(apart)} not quantised"
    for name, layer in layers.items():
        reason = "it merges layers" if len(layer.parts) != 1 else _names.reason_bound(layer)
        if reason is not None:
            return f"of its {name}: {reason}"
    return None


class Tables:
    """Tensors that blocks with the same rotary embedding share during a call of their decoder.

    Attributes:
        cos, sin: (B or 1, S, width), cosines and sines that the decoder passes to each block.
        table: how ``cos`` and ``sin`` repeat each value, as in ``Block``.
        cos_sin: (B · S, rotary_dim), a row for each token: cosines, then sines.
        rows: (B · S,) int64, 0 to B · S - 1.
        slots: slots of the tokens in a static cache, keyed by the cache's layer class and number of positions.
    """

    def __init__(self, cos: Tensor, sin: Tensor, block: Block, batch: int) -> None:
        self.cos, self.sin, self.table = cos, sin, block.table
        both = torch.cat((block.angles(cos), block.angles(sin)), -1)
        count = batch * both.shape[1]
        self.cos_sin = both.expand(batch, -1, -1).reshape(count, both.shape[-1])
        self.rows = _computed_once(torch.arange(count, device=cos.device))
        self.slots: dict[Any, Tensor] = {}


class SharedTables:
    """Tables of the attention blocks of a decoder. Hooks of the decoder create and delete them, so that they are
    computed once in a call of the decoder.

    Outside the decoder's forward, and in layers that are compiled one by one, each block computes its own tables.
    """

    def __init__(self) -> None:
        self.tables: tuple[Tables, ...] | None = None
        self.is_traced = False

    def begin(self, module: nn.Module, args: Any) -> None:
        """Start a call of the decoder."""
        self.tables, self.is_traced = (), torch.compiler.is_compiling()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Delete the tables after a call of the decoder."""
        self.tables = None

    def of(self, cos: Tensor, sin: Tensor, block: Block, batch: int) -> Tables:
        """Return the tables for the decoder's cosines and sines."""
        tables = self.tables
        # A compiled layer must not write its tensors to the tables of a decoder that runs eagerly.
        is_shared = tables is not None and self.is_traced == torch.compiler.is_compiling()
        if is_shared:
            for each in tables or ():
                if each.cos is cos and each.sin is sin and each.table == block.table:
                    return each
        made = Tables(cos, sin, block, batch)
        if is_shared:
            self.tables = (*(tables or ()), made)
        return made


@functools.cache
def _fused(base: Any) -> Any:
    """Return a subclass of a class of attention blocks whose ``forward`` calls ``qkv_norm_rope_append``."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        *cached: Any,
        **kwargs: Any,
    ) -> Any:
        given = (hidden_states, position_embeddings, attention_mask, *cached)
        block: Block = self.attention_block
        if not _is_supported(self, block, hidden_states, position_embeddings, cached, kwargs):
            return base.forward(self, *given, **kwargs)
        batch, tokens = hidden_states.shape[:2]
        # The op has no gradient. Without gradients, do not search the parameters.
        if torch.is_grad_enabled() and needs_gradient(
            hidden_states, *block.steps.weights(self), *self.qkv_proj.parameters()
        ):
            return base.forward(self, *given, **kwargs)
        qkv = self.qkv_proj(hidden_states)
        own = {name: value for name, value in kwargs.items() if name != block.cache_name}
        cache = cached[0] if cached else kwargs.get(block.cache_name)
        tables = self.shared_tables.of(*position_embeddings, block, batch)
        rows = qkv.reshape(batch * tokens, -1)
        q, keys, values = _append(self, block, rows, tables, cache, batch, own)
        attention = block.attention(self.config._attn_implementation)
        q = q.view(batch, tokens, *q.shape[1:]).transpose(1, 2)
        attended, weights = attention(self, q, keys, values, attention_mask, **block.arguments(self), **own)
        return self.o_proj(attended.reshape(batch, tokens, -1).contiguous()), weights

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = object.__reduce_ex__(self, protocol)
        return (_blank, getattr(base, MERGED_FROM, (base,)), *made[2:])

    # As in ``nn.merging``, the subclass has the name of ``base``. Pickle would look up this name and find ``base``, so
    # ``__reduce_ex__`` must create the subclass again.
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "forward": functools.wraps(base.forward)(forward),
    }
    return type(base.__name__, (base,), members)


def _blank(base: Any, *groups: Any) -> Any:
    """Create an empty instance of the subclass that ``_fused`` returns, for pickle.

    Args:
        base: class of the model's blocks.
        groups: groups of layers that ``nn.merging`` merged in the block, or nothing.
    """
    parent: Any = merging(base, *groups) if groups else base
    cls = _fused(parent)
    return cls.__new__(cls)


def _is_supported(
    module: Any, block: Block, hidden: Tensor, embeddings: Any, cached: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return True if the op can compute this call of a block."""
    if module.training or is_proxy(hidden) or hidden.dtype not in SIXTEEN_BIT or hidden.dim() != 3:
        return False
    if len(getattr(getattr(module, "qkv_proj", None), "parts", ())) != PARTS:
        return False
    if len(cached) > 1:
        return False
    # A decorator of the block's forward renames the argument. (In transformers 5.17, where the cache's argument is
    # past_key_values, generate_batch passes ``cache`` as well, to the attention function.)
    if block.cache_name == "cache" and "past_key_values" in kwargs:
        return False
    if not isinstance(embeddings, tuple) or len(embeddings) != 2 or any(each.dim() != 3 for each in embeddings):
        return False
    return embeddings[0].shape[1:] == (hidden.shape[1], block.width) and embeddings[0].dtype in _TABLE_DTYPES


def _append(
    module: Any, block: Block, qkv: Tensor, tables: Tables, cache: Any, batch: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate the heads of q and k, and update the cache.

    Args:
        qkv: (B · S, N), rows of the merged projection.
        kwargs: arguments for attention, which ``cache.update`` may change.

    Returns:
        q, (B · S, heads of q, D), and the keys and values for attention, (B, heads of k, tokens, D).
    """
    steps = block.steps
    _, heads = steps.heads(module.qkv_proj)
    append: Callable[..., Tensor] = functools.partial(steps.append, module, qkv, tables.cos_sin, tables.rows)
    tokens = qkv.shape[0] // batch
    layer = _static_layer(cache, module.layer_idx, tokens)
    if layer is not None:
        if not layer.is_initialized:
            like = qkv.new_empty(batch, heads, 0, steps.head_dim)
            layer.lazy_initialization(like, like)
        if _fits(layer, qkv, (batch, heads, layer.max_cache_len, steps.head_dim)):
            slots = _slots(layer, tables, batch, tokens)
            layer.cumulative_length.add_(tokens)
            if type(layer) is StaticSlidingWindowLayer:
                layer.cumulative_length_int += tokens
            q = append(layer.keys.transpose(1, 2), layer.values.transpose(1, 2), slots)
            return q, layer.keys, layer.values
    kv = qkv.new_empty(2, batch, tokens, heads, steps.head_dim)
    q = append(kv[0], kv[1], tables.rows)
    keys, values = kv[0].transpose(1, 2), kv[1].transpose(1, 2)
    if cache is not None:
        more = {"kwargs": kwargs} if block.passes_kwargs else {}
        keys, values = cache.update(keys, values, module.layer_idx, **more)
    return q, keys, values


def _static_layer(cache: Any, index: int, tokens: int) -> Any:
    """Return the layer of a static cache whose tensors the op can write, or None if it must not write the cache."""
    if type(cache) is not StaticCache or cache.offloading:
        return None
    layer = cache.layers[index]
    if type(layer) is StaticLayer:
        return layer
    # A full sliding window must be shifted by one token, which the op cannot do because it needs a copy.
    is_roomy = type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int + tokens <= layer.max_cache_len
    return layer if is_roomy else None


def _fits(layer: Any, qkv: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if both tensors of a static cache have this shape, and the dtype and device of ``qkv``."""
    return all(
        each.shape == shape and each.dtype == qkv.dtype and each.device == qkv.device
        for each in (layer.keys, layer.values)
    )


def _slots(layer: Any, tables: Tables, batch: int, tokens: int) -> Tensor:
    """Return the slots of the new tokens, (B · S,) int64. The cache has ``max_cache_len`` slots for each sequence.

    All layers of a static cache contain the same number of tokens, as the decoder uses one mask for all of them. Layers
    of equal size therefore share the slots that the first of them computes.
    """
    length: Tensor = layer.cumulative_length
    key = (type(layer), layer.max_cache_len)
    # In eager calls on a CPU, do not share slots: computing them from each layer's own length costs little, and the op
    # raises an error if a slot lies beyond the layer's cache.
    is_shared = torch.compiler.is_compiling() or not length.is_cpu
    if is_shared and key in tables.slots:
        return tables.slots[key]
    positions = tables.rows[:tokens] + length
    slots = positions
    if batch > 1:
        first = tables.rows[:batch, None] * layer.max_cache_len
        # A position beyond the end must not become a slot of the next sequence.
        is_beyond = positions >= layer.max_cache_len
        slots = (first + positions).masked_fill(is_beyond, batch * layer.max_cache_len).flatten()
    tables.slots[key] = _computed_once(slots)
    return tables.slots[key]


def _computed_once(vector: Tensor) -> Tensor:
    """Return a view that makes Inductor compute a contiguous vector once for all blocks. ``as_strided`` forces Inductor
    to store the vector in memory. Otherwise Inductor would compute the vector again before each call of the op."""
    return vector.as_strided(vector.shape, (1,))
