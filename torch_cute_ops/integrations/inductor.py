"""Inductor pass that replaces norms, gates and quantisations in models by fused ops of this package.

It fuses norms and gates with a following quantisation, computes norms before 16-bit GEMMs with our ops, moves gates of
one row and FP4 quantisations of few rows into a GEMM's prologue, and makes GEMMs of few rows prefetch the next weight.
Models need no changes.

:func:`enable` turns the pass on for the process. ``options={"post_grad_custom_pre_pass": FuseQuantization()}`` of
``torch.compile`` turns the pass on for one model.
"""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from torch_cute_ops.formats.fp8 import MXFP8
from torch_cute_ops.formats.scale_layout import SCALE_LAYOUTS, weight_layout
from torch_cute_ops.integrations import _inductor_graph, _inductor_patterns
from torch_cute_ops.integrations._inductor_graph import (
    Node,
    all_named,
    are_before,
    aten,
    c10d,
    call_op,
    cute,
    ends_at,
    fake_results,
    is_call,
    named_arguments,
    readers_of,
    result_of,
    storage_of,
    value_of,
    without_reshape,
)
from torch_cute_ops.integrations._inductor_patterns import Gate, Norm, match_gate, match_norm, unwidened
from torch_cute_ops.ops import _row_quant, _with_gemm
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.ops._row_quant import gates_plainly
from torch_cute_ops.ops._with_gemm import gates_with_gemm, is_prefetchable, prefetches_with_gemm, quantises_with_gemm
from torch_cute_ops.runtime import groups

__all__ = ["FuseQuantization", "disable", "enable"]

_OPTION: Final = "post_grad_custom_pre_pass"

_QUANTISE: Final = {
    cute.fp4_quantize.default: "fp4quant",
    cute.fp4_quantize_per_token.default: "fp4quant_per_token",
    cute.fp8_quantize.default: "fp8quant",
}
"""Quantisations that are fused with the op before them, and the suffix of the fused ops."""
_MULTIPLY: Final = (cute.mm_fp4_weight_only.default,)
"""GEMMs with 16-bit activations ``a``."""
_MULTIPLY_FP4: Final = (cute.mm_fp4.default,)
"""GEMMs with FP4 activations."""
_IN_ONE_LAUNCH: Final = {
    cute.fp4_quantize.default: "fp4quant_mm_fp4",
    cute.silu_mul_fp4quant.default: "silu_mul_fp4quant_mm_fp4",
}
"""Ops that can move into the prologue of a GEMM with FP4 activations, and the resulting op."""
_PREFETCH: Final = (
    *_MULTIPLY,
    *_MULTIPLY_FP4,
    cute.mm_fp8.default,
    cute.mm_fp8_block.default,
    cute.mm_fp8_fp4.default,
    *(getattr(cute, name).default for name in (*_IN_ONE_LAUNCH.values(), "silu_mul_mm_fp4_weight_only")),
)
"""GEMMs that can load the next GEMM's weight into L2."""
_GATE: Final = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
"""Parameters of a gate."""
_INTEGERS: Final = (torch.int32, torch.int64)
"""Dtypes of counters."""
_PURE: Final = frozenset(
    {
        *_QUANTISE,
        cute.rmsnorm_fp4quant.default,
        cute.rmsnorm_fp4quant_per_token.default,
        cute.rmsnorm_fp4quant_with_norm.default,
        cute.rmsnorm_fp8quant.default,
        cute.silu_mul_fp4quant.default,
        cute.silu_mul_fp4quant_per_token.default,
        cute.silu_mul_fp8quant.default,
    }
)
"""Ops without side effects that quantise: a repeated call with equal arguments is redundant."""
_FILES: Final = (
    __file__,
    *(each.__file__ for each in (_inductor_graph, _inductor_patterns, _with_gemm, _row_quant, groups)),
)
"""Source files that are hashed into the pass's cache key. The last three decide which ops fuse into a GEMM, which gates
are plain, and over which groups ops can sum."""


class FuseQuantization(CustomGraphPass):
    """Pass for ``torch._inductor.config.post_grad_custom_pre_pass``.

    Rewrites:

    - ``fp4_quantize``, ``fp4_quantize_per_token`` or ``fp8_quantize`` is fused with the operation that computes its
      input: a norm, a residual addition with the norm after it, or a gate. Several quantisations of one tensor with
      equal arguments become one.
    - A norm before ``mm_fp4_weight_only`` becomes ``rmsnorm`` or ``add_rmsnorm``. These ops let the GEMM start before
      they end (programmatic dependent launch).
    - A sum over the ranks of a process group (``torch.distributed.all_reduce``) before such an addition is fused too if
      the group has up to 8 ranks on one host, no other node reads the sum, and the residual can be overwritten: the
      op becomes ``all_reduce_add_rmsnorm`` or its FP4 or FP8 form. The ranks' numbers are then added in float32, in the
      order of the ranks, and rounded once.
    - On Hopper, a gate of one row and the ``mm_fp4_weight_only`` after it become one op that computes the gate in its
      prologue. The number of rows must be static in the graph. On other GPUs the gate stays separate, because
      Inductor's kernel is as fast.
    - On Hopper, for NVFP4: if only an ``mm_fp4`` reads the result of ``fp4_quantize`` of up to 8 rows, or of
      ``silu_mul_fp4quant`` of one row, the GEMM quantises in its prologue. Codes and scales are the same; the order of
      additions in the GEMM can differ.
    - On Hopper, GEMMs of up to 16 rows, or up to 64 rows with an FP8 weight, load the next GEMM's weight into L2.
    - Counters that grow by the same number, such as the numbers of tokens in the layers of a static KV cache, are
      computed by one op.

    Recognised patterns:

    - RMSNorm of the last dimension with a weight (H,), or without a weight, as computed by
      ``torch.nn.functional.rms_norm`` and Hugging Face decoders, with any rounding in between, or with ``1 + weight``,
      added in float32, as in Gemma. A bias (H,) may be added to the product with the weight. The fused ops round only
      once, so results differ in the last bits of the normalised rows. If the bias cancels most of a product, the sum
      differs by as much as the last bits of the product. If other nodes also read the normalised rows in the dtype of
      the norm's input, an FP4 op writes them as an additional output (``…_with_norm``). FP8 ops cannot write them, so
      the norm is then not fused.
    - LayerNorm of the last dimension, as computed by ``torch.nn.functional.layer_norm``, with weight and bias, with a
      weight alone, or without both. A sum over ranks is not fused with LayerNorm, nor with an RMSNorm that has a bias
      or no weight.
    - A sum of two tensors of equal shape and dtype before the norm, if at least one of the tensors is not read
      afterwards. The sum overwrites this tensor. An input of the graph is never overwritten. 16-bit rows may also be
      added to a float32 residual, which the sum then overwrites.
    - ``silu(gate) * up``, ``gelu(gate) * up`` or ``relu(gate)² * up`` of the two halves of one tensor, as a merged
      ``gate_up_proj`` returns it (:func:`torch_cute_ops.nn.merge_`).

    Args:
        before: pass or passes to run before this pass, such as the previous value of ``post_grad_custom_pre_pass``.
    """

    def __init__(self, before: Any = None) -> None:
        self.before: tuple[Callable[[fx.Graph], None], ...] = (
            () if before is None else tuple(before) if isinstance(before, (list, tuple)) else (before,)
        )

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a functional graph of ATen ops in place. Mutations of the graph's inputs must be at its end."""
        for each in self.before:
            each(graph)
        merged = _merge_equal(graph)
        fused = [_fuse(node) for node in [*graph.nodes] if node.target in _QUANTISE]
        fused += [_fuse_input(node) for node in [*graph.nodes] if node.target in _MULTIPLY]
        fused += [_multiply_quantised(node) for node in [*graph.nodes] if node.target in _MULTIPLY_FP4]
        if merged or any(fused):
            graph.eliminate_dead_code()
        changes = (_prefetch(graph), _count_at_once(graph), merged, *fused)
        if any(changes):
            graph.lint()

    def uuid(self) -> Any | None:
        """Return the key for Inductor's cache. If a pass in ``before`` lacks a uuid, return None, which disables
        caching."""
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.before]
        return None if None in others else (get_hash_for_files(_FILES), groups.layout(), *others)


def enable() -> None:
    """Make Inductor run :class:`FuseQuantization` in all compilations from now on.

    Passes that are already set in ``post_grad_custom_pre_pass`` run before it. A second call changes nothing.
    """
    current = getattr(inductor_config, _OPTION)
    if not isinstance(current, FuseQuantization):
        setattr(inductor_config, _OPTION, FuseQuantization(current))


def disable() -> None:
    """Undo :func:`enable`. Code that is already compiled does not change.

    Raises:
        RuntimeError: if another pass has replaced ours.
    """
    current = getattr(inductor_config, _OPTION)
    if current is None:
        return
    if not isinstance(current, FuseQuantization):
        raise RuntimeError(f"torch._inductor.config.{_OPTION} is {current!r}; expected the pass that enable() set")
    before = current.before
    setattr(inductor_config, _OPTION, None if not before else before[0] if len(before) == 1 else [*before])


# Equal quantisations


def _merge_equal(graph: fx.Graph) -> bool:
    """Merge quantisations that have equal arguments; return True if any were merged."""
    seen: dict[Any, Node] = {}
    found = False
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target not in _PURE:
            if _is_mutating(node):
                seen.clear()
            continue
        named = named_arguments(node)
        source, sizes = without_reshape(named.pop("input"))
        key = (node.target, source, sizes, *named.items())
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            found = True
    return found


def _is_mutating(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# Fusion


def _fuse(node: Node) -> bool:
    """Replace a quantisation, and the norm or gate that computes its input, by one fused op. Return True on success."""
    named = named_arguments(node)
    value, _ = without_reshape(named["input"])
    named.pop("input")
    suffix, outputs = _QUANTISE[node.target], len(node.target._schema.returns)
    is_alone = all(user.target in _QUANTISE for user in readers_of(value))
    gated = match_gate(value)
    if gated is not None:
        if not is_alone:
            return False
        with node.graph.inserting_before(node):
            new = call_op(node.graph, f"silu_mul_{suffix}", **gated._asdict(), **named)
        _take_over(node, [result_of(new, i) for i in range(outputs)])
        return True
    norm = match_norm(value)
    if norm is None or not (is_alone or suffix == "fp4quant"):
        return False
    # Insert the fused op right after the RMSNorm, because other nodes that read the normalised rows can precede the
    # quantisation.
    ending, count, anchor = (suffix, outputs, node) if is_alone else (f"{suffix}_with_norm", outputs + 1, value.next)
    dtype = None if is_alone else value_of(value).dtype
    results = _normalised(norm, f"rmsnorm_{ending}", named, count, anchor, dtype)
    if results is None:
        return False
    _take_over(node, results[:outputs])
    if not is_alone:
        value.replace_all_uses_with(results[outputs])
    return True


def _fuse_input(node: Node) -> bool:
    """Compute a norm before this GEMM with our op, or fuse a one-row gate before this GEMM into the GEMM. Return True
    on success."""
    value, _ = without_reshape(named_arguments(node)["a"])
    gated = match_gate(value)
    if gated is not None:
        return _multiply_gated(node, value, gated)
    norm = match_norm(value)
    if norm is None or not value_of(value).is_contiguous():
        return False
    results = _normalised(norm, "rmsnorm", {}, 1, value, value_of(value).dtype)
    if results is None:
        return False
    value.replace_all_uses_with(results[0])
    return True


def _multiply_gated(node: Node, value: Node, matched: Gate) -> bool:
    """Fuse a gate of one row into the GEMM ``node``, if only this GEMM reads the gate's result ``value``. Return True
    on success."""
    named = named_arguments(node)
    rows = value_of(named.pop("a")).shape[0]
    gated = matched.input
    is_alone = all(user is node for user in readers_of(value))
    is_same = value_of(gated).dtype == value_of(value).dtype and value_of(gated).is_contiguous()
    if not is_alone or not is_same or not isinstance(rows, int) or not gates_with_gemm(rows, value_of(value).device):
        return False
    _multiply_made(node, "silu_mul_mm_fp4_weight_only", gated, {**named, "gate": matched.gate})
    return True


def _multiply_quantised(node: Node) -> bool:
    """Fuse a quantisation of few rows into the FP4 GEMM ``node``, if no other node reads the quantised rows. Return
    True on success."""
    named = named_arguments(node)
    (codes, _), scale = without_reshape(named.pop("a")), named.pop("a_scale")
    if not all(is_call(each, operator.getitem) for each in (codes, scale)):
        return False
    made: Node = codes.args[0]
    if not is_call(made, *_IN_ONE_LAUNCH) or codes.args != (made, 0) or scale.args != (made, 1):
        return False
    readers = [user for item in made.users for user in readers_of(item)]
    quantisation = named_arguments(made)
    source, layout = quantisation["input"], named["scale_layout"]
    rows, value = value_of(node).shape[0], value_of(source)
    gate = [quantisation[name] for name in _GATE if name in quantisation]
    if (
        any(user is not node for user in readers)
        or any(quantisation[name] != named[name] for name in ("block_size", "scale_format"))
        or layout not in (None, quantisation["scale_layout"])
        or (gate and not gates_plainly(*gate))
        or value.dtype not in SIXTEEN_BIT
        or not value.is_contiguous()
        or not isinstance(rows, int)
        or named.pop("row_scale") is not None
        or not quantises_with_gemm(rows, value.device, named["block_size"], gated=bool(gate))
    ):
        return False
    named["scale_layout"] = None if layout is None else weight_layout(SCALE_LAYOUTS[layout]).name
    named |= {"global_scale": quantisation["global_scale"], "out_dtype": named["out_dtype"] or torch.bfloat16}
    if "gate" in quantisation:
        named["gate"] = quantisation["gate"]
    _multiply_made(node, _IN_ONE_LAUNCH[made.target], source, named)
    return True


def _multiply_made(node: Node, name: str, source: Node, named: dict[str, Any]) -> None:
    """Replace a GEMM by the op ``name``, which computes the GEMM's activations from ``source`` in its prologue.

    Leading dimensions of ``source`` are flattened.
    """
    value = value_of(source)
    with node.graph.inserting_before(node):
        if value.dim() != 2:
            shape = [value_of(node).shape[0], value.shape[-1]]
            source = node.graph.call_function(aten.reshape.default, (source, shape))
            source.meta["val"] = value.reshape(shape)
        new = call_op(node.graph, name, a=source, **named)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _normalised(
    norm: Norm, name: str, named: dict[str, Any], count: int, anchor: Node, dtype: torch.dtype | None
) -> list[Node] | None:
    """Insert the op that computes the norm. Return its results, or None if one of its arguments comes after
    ``anchor``, or if the op would not return normalised rows in ``dtype``. If ``dtype`` is None, the op returns no
    normalised rows.

    If possible, the op also computes the addition before the norm and replaces it. Otherwise the op is inserted before
    ``anchor``.
    """
    weight = _weight_without_elements(norm.input, anchor.graph) if norm.weight is None else norm.weight
    named = {**named, "weight": weight, "eps": norm.eps, "weight_plus_one": norm.weight_plus_one}
    if norm.bias is not None:
        named["bias"] = norm.bias
    if norm.subtract_mean:
        named["subtract_mean"] = True
    results = _add_norm(norm, f"add_{name}", named, count, dtype)
    if results is not None or not are_before(anchor, named.values()):
        return results
    if dtype not in (None, value_of(norm.input).dtype) or not _is_weight_for(norm.input, weight):
        return None
    with anchor.graph.inserting_before(anchor):
        new = call_op(anchor.graph, name, input=norm.input, **named)
    return [new] if count == 1 else [result_of(new, i) for i in range(count)]


def _is_weight_for(rows: Node, weight: Node) -> bool:
    """Return True if the weight has a dtype that ops take for these rows."""
    return value_of(weight).dtype in (value_of(rows).dtype, torch.float32)


def _weight_without_elements(input: Node, graph: fx.Graph) -> Node:
    """Insert a weight without elements, which our ops take for a norm without a weight, at the start of the graph."""
    value = value_of(input)
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        made: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        weight = graph.call_function(aten.empty.memory_format, ([0],), made)
    weight.meta["val"] = value.new_empty(0)
    return weight


def _add_norm(norm: Norm, name: str, named: dict[str, Any], count: int, dtype: torch.dtype | None) -> list[Node] | None:
    """Replace an addition and the norm after it by one op. Return the op's results except the sum.

    Return None if the norm's input is not a sum, or the sum cannot overwrite either operand, or the op would not return
    normalised rows in ``dtype``. If ``dtype`` is None, the op returns no normalised rows.
    """
    total = norm.input
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return None
    operands = [each for each in total.args if isinstance(each, fx.Node)]
    if len(operands) < 2 or operands[0] is operands[1]:
        return None
    # The operands may be a float32 residual and 16-bit rows.
    allowed = (torch.float32, *SIXTEEN_BIT) if value_of(total).dtype == torch.float32 else (value_of(total).dtype,)
    if any(value_of(each).dtype not in allowed or value_of(each).dim() != value_of(total).dim() for each in operands):
        return None
    # Refuse broadcasting. Tuples of symbolic sizes can be compared, because equal sizes are equal expressions.
    if any(tuple(value_of(each).shape) != tuple(value_of(total).shape) for each in operands):
        return None
    # The sum will overwrite an operand. Nodes that read the sum rely on its dtype and its strides, so the operand must
    # have the same.
    alike = [
        each
        for each in operands
        if value_of(each).dtype == value_of(total).dtype and value_of(each).stride() == value_of(total).stride()
    ]
    # Prefer the residual as the operand to overwrite. Then an all-reduce that computes the other operand can be fused,
    # and 16-bit rows can be added without a conversion.
    alike.sort(key=lambda each: (_sum_over_ranks(each, total) is not None, unwidened(each) is not each))
    spent = next((each for each in alike if ends_at(each, total)), None)
    if spent is None or not are_before(total, named.values()):
        return None
    other = operands[1] if spent is operands[0] else operands[0]
    summed = _sum_over_ranks(other, total)
    if dtype != value_of(total).dtype:
        other = unwidened(other)
    if storage_of(other) is storage_of(spent):
        return None
    if dtype not in (None, value_of(other).dtype) or not _is_weight_for(other, named["weight"]):
        return None
    unused: Any = other
    # The ops with an all-reduce compute RMSNorm with a weight and without a bias, and take a residual in the rows'
    # dtype.
    is_plain_norm = norm.weight is not None and norm.bias is None and not norm.subtract_mean
    is_general = not is_plain_norm or value_of(other).dtype != value_of(total).dtype
    if summed is not None and hasattr(cute, f"all_reduce_{name}") and not is_general:
        name, named = f"all_reduce_{name}", {**named, "group": summed.group}
        other = _reshaped(summed.input, value_of(total).shape, total)
    op = getattr(cute, name).default
    every = all_named(op, {"input": other, "residual": spent, **named})
    with total.graph.inserting_before(total):
        # Inductor's reinplacing pass later turns this functional node into a call that overwrites the operand in place.
        new = total.graph.call_function(torch.ops.higher_order.auto_functionalized, (op,), every)
    new.meta["val"] = (*as_tuple(fake_results(op, every)), value_of(total))
    results = [result_of(new, i) for i in range(count + 1)]
    total.replace_all_uses_with(results[count])
    total.graph.erase_node(total)
    if summed is not None and summed.group == named.get("group"):
        # Erase the nodes of the all-reduce, from its last node to its first. Dead-code elimination would keep them.
        while unused is not summed.input and not unused.users:
            unused, erased = unused.args[0], unused
            erased.graph.erase_node(erased)
    return results[:count]


class _Sum(NamedTuple):
    """Matched sum over the ranks of the process group named ``group``."""

    input: Node
    group: str


def _sum_over_ranks(node: Node, reader: Node) -> _Sum | None:
    """Match the result of an all-reduce, perhaps with other leading dimensions, that only ``reader`` reads. Return None
    for any other node, or if ops of this package cannot sum over the group."""
    waited, _ = without_reshape(node)
    if not is_call(waited, c10d.wait_tensor.default) or [*readers_of(waited)] != [reader]:
        return None
    reduced = waited.args[0]
    if not is_call(reduced, c10d.all_reduce.default) or [*reduced.users] != [waited]:
        return None
    input, operation, group = reduced.args
    if operation != "sum" or groups.reason_unsupported(group) is not None:
        return None
    return _Sum(input, group)


def _reshaped(node: Node, shape: Sequence[Any], anchor: Node) -> Node:
    """Insert a reshape before ``anchor``, unless the node has this shape."""
    value = value_of(node)
    if tuple(value.shape) == tuple(shape):
        return node
    with anchor.graph.inserting_before(anchor):
        made = anchor.graph.call_function(aten.reshape.default, (node, [*shape]))
    made.meta["val"] = value.reshape(shape)
    return made


def _take_over(node: Node, results: Sequence[Node]) -> None:
    """Replace the codes and scales of ``node`` by the fused op's results. If the input of ``node`` was reshaped,
    reshape the results."""
    _, sizes = without_reshape(node.args[0] if node.args else node.kwargs["input"])
    for user in [*node.users]:
        index = user.args[1]
        old, new = value_of(user), results[index]
        # Tiled scales are computed over the flattened rows, so their shape does not depend on the leading dimensions.
        if sizes is not None and (index == 0 or (index == 1 and _has_row_scales(node))):
            with node.graph.inserting_before(user):
                new = node.graph.call_function(aten.reshape.default, (new, [*sizes[:-1], *old.shape[len(sizes) - 1 :]]))
            new.meta["val"] = old
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _has_row_scales(node: Node) -> bool:
    """Return True if the scales have the leading dimensions of the quantised tensor."""
    named = named_arguments(node)
    if "granularity" in named and named["granularity"] != MXFP8.granularity:
        return bool(named["granularity"] != "tensor")
    return bool(named["scale_layout"] == "linear")


# Prefetch of the next weight


def _prefetch(graph: fx.Graph) -> bool:
    """Make each GEMM of few rows load the weight of the next GEMM into L2, if this weight is an input of the graph.
    Return True if any GEMM was changed."""
    gemms = [node for node in graph.nodes if node.target in _PREFETCH]
    found = False
    for node, following in itertools.pairwise(gemms):
        value, weight = value_of(node), _weight_rows(named_arguments(following)["b"])
        rows, named = value.shape[0], named_arguments(node)
        if weight is None or named["prefetch"] is not None or not isinstance(rows, int):
            continue
        has_fp8_weight = value_of(named["b"]).dtype == torch.float8_e4m3fn
        is_near = value_of(weight).device == value.device
        if is_near and prefetches_with_gemm(rows, value.device, has_fp8_weight=has_fp8_weight):
            with graph.inserting_before(node):
                new = call_op(graph, node.target._schema.name.removeprefix("cute::"), **{**named, "prefetch": weight})
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            found = True
    return found


def _weight_rows(b: Node) -> Node | None:
    """Return the graph input that stores the weight ``b`` before its transposition, or None if the weight cannot be
    prefetched."""
    if not is_call(b, aten.permute.default, aten.t.default, aten.transpose.int):
        return None
    rows = b.args[0]
    return rows if rows.op in ("placeholder", "get_attr") and is_prefetchable(value_of(rows)) else None


# Counters


def _count_at_once(graph: fx.Graph) -> bool:
    """Increment all counters that grow by the same number in one op instead of one op per counter. A counter is an
    integer input of the graph that the sum overwrites at the end of the graph. Return True if any additions were
    merged."""
    groups: defaultdict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
            continue
        counter, number = node.args
        if not isinstance(counter, fx.Node) or counter.op != "placeholder" or type(number) is not int:
            continue
        value, users = value_of(counter), [*node.users]
        # Other nodes must not read the sum: Inductor updates the counters in place, without a result to read.
        is_written_back = len(users) == 1 and is_call(users[0], aten.copy_.default) and users[0].args == (counter, node)
        if is_written_back and value.dim() == 0 and value.dtype in _INTEGERS:
            groups[value.device, value.dtype, number].append(node)
    # Leave out counters with two additions: Inductor does not update a list in place if it contains a tensor twice.
    sums = Counter(node.args[0] for nodes in groups.values() for node in nodes)
    changed = False
    for (_, _, number), counted in groups.items():
        nodes = [node for node in counted if sums[node.args[0]] == 1]
        if len(nodes) < 2:
            continue
        changed = True
        with graph.inserting_before(nodes[0]):
            new = graph.call_function(aten._foreach_add.Scalar, ([node.args[0] for node in nodes], number))
        new.meta["val"] = [value_of(node) for node in nodes]
        for i, node in enumerate(nodes):
            node.replace_all_uses_with(result_of(new, i))
            graph.erase_node(node)
    return changed
