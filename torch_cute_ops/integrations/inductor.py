"""A pass for Inductor that fuses norms and gates with the quantisation behind them, has our ops compute norms before
GEMMs with 16-bit activations, makes gates of one row and FP4 quantisations of few a part of the GEMM, and has GEMMs of
few rows prefetch, in models that know nothing of it.

:func:`enable` turns it on for the process; ``options={"post_grad_custom_pre_pass": FuseQuantization()}`` of
``torch.compile`` for one model.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import torch_cute_ops  # noqa: F401  registers the ops
from torch_cute_ops.formats.scale_layout import SCALE_LAYOUTS, weight_layout
from torch_cute_ops.ops import _row_quant, _with_gemm
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.ops._row_quant import gates_plainly
from torch_cute_ops.ops._with_gemm import gates_with_gemm, is_prefetchable, prefetches_with_gemm, quantises_with_gemm

__all__ = ["FuseQuantization", "disable", "enable"]

aten: Final = torch.ops.aten
cute: Final = torch.ops.cute
Node: TypeAlias = Any
"""``torch.fx.Node``, whose arguments have types that no pattern can use."""
_OPTION: Final = "post_grad_custom_pre_pass"

_CONVERT: Final = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_RESHAPE: Final = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_MUL: Final = (aten.mul.Tensor, aten.mul.Scalar)
_ADD: Final = (aten.add.Tensor, aten.add.Scalar)
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

_QUANTISE: Final = {cute.fp4_quantize.default: "fp4quant", cute.fp8_quantize.default: "fp8quant"}
"""What is fused with what comes before, and how the fused ops end."""
_MULTIPLY: Final = (cute.mm_fp4_weight_only.default,)
"""GEMMs that take 16-bit activations ``a``."""
_MULTIPLY_FP4: Final = (cute.mm_fp4.default,)
"""Those that take FP4 ones."""
_IN_ONE_LAUNCH: Final = {
    cute.fp4_quantize.default: "fp4quant_mm_fp4",
    cute.silu_mul_fp4quant.default: "silu_mul_fp4quant_mm_fp4",
}
"""What may be a part of a GEMM with FP4 activations, and the op that is both."""
_PREFETCH: Final = (
    *_MULTIPLY,
    *_MULTIPLY_FP4,
    cute.mm_fp8_block.default,
    cute.mm_fp8_fp4.default,
    *(getattr(cute, name).default for name in (*_IN_ONE_LAUNCH.values(), "silu_mul_mm_fp4_weight_only")),
)
"""GEMMs that may bring the weight of the next one into L2."""
_GATE: Final = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
"""The parameters of a gate."""
_PURE: Final = frozenset(
    {
        *_QUANTISE,
        cute.rmsnorm_fp4quant.default,
        cute.rmsnorm_fp4quant_with_norm.default,
        cute.rmsnorm_fp8quant.default,
        cute.silu_mul_fp4quant.default,
        cute.silu_mul_fp8quant.default,
    }
)
"""Ops that quantise and change nothing: the second of two with equal arguments is the first."""


class FuseQuantization(CustomGraphPass):
    """Turns RMSNorm, residual addition and RMSNorm, or SiLU·mul, followed by ``fp4_quantize`` or ``fp8_quantize``, into
    the fused op, and merges equal quantisations of one tensor. Norms before ``mm_fp4_weight_only`` become ``rmsnorm``
    or ``add_rmsnorm``, behind which it starts early. SiLU·mul of one row, which the graph has to say, becomes
    a part of it, on Hopper; and in NVFP4 ``fp4_quantize`` of up to 8 rows and ``silu_mul_fp4quant`` of one become
    parts of the ``mm_fp4`` that alone reads them: the same codes and scales, and sums that may be in another order.
    (Elsewhere a gate before it stays: Inductor's kernel of one is as good.) GEMMs of up to 16 rows, or beside an FP8
    weight of 64, bring the weight of the next one into L2, on Hopper.

    A pass for ``torch._inductor.config.post_grad_custom_pre_pass``. What is recognised:

    - RMSNorm of the last dimension with a weight (H,), as ``torch.nn.functional.rms_norm`` and the decoders of Hugging
      Face compute it, whatever they round in between. The fused ops round only once, so that results differ in the
      last bits of the norm. Where something else reads the norm too, it reads what the op wrote; of those that
      quantise, FP4 has ops that write it (``…_with_norm``), and with FP8 the norm stays.
    - Before the norm, a sum of two tensors of one shape and dtype, one of which nothing reads any more: it becomes the
      sum, in place. An input of the graph is never overwritten.
    - ``silu(gate) * up`` of the two halves of one tensor, as a merged ``gate_up_proj`` makes it
      (:func:`torch_cute_ops.nn.merge_`).

    Args:
        before: passes that run first: one, or several, such as those that the option had.
    """

    def __init__(self, before: Any = None) -> None:
        self.before: tuple[Callable[[fx.Graph], None], ...] = (
            () if before is None else tuple(before) if isinstance(before, (list, tuple)) else (before,)
        )

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph of ATen ops, which has no mutation but of its own inputs at the end."""
        for each in self.before:
            each(graph)
        merged = _merge_equal(graph)
        fused = [_fuse(node) for node in [*graph.nodes] if node.target in _QUANTISE]
        fused += [_fuse_input(node) for node in [*graph.nodes] if node.target in _MULTIPLY]
        fused += [_multiply_quantised(node) for node in [*graph.nodes] if node.target in _MULTIPLY_FP4]
        if merged or any(fused):
            graph.eliminate_dead_code()
        if _prefetch(graph) or merged or any(fused):
            graph.lint()

    def uuid(self) -> Any | None:
        """What Inductor's cache knows the pass by; ``None``, so that it caches nothing, where one of ``before`` has no
        uuid."""
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.before]
        # What goes with a GEMM, and which gates are plain, those files say.
        ours = get_hash_for_files((__file__, _with_gemm.__file__, _row_quant.__file__))
        return None if None in others else (ours, *others)


def enable() -> None:
    """Have Inductor run :class:`FuseQuantization` in all that is compiled from now on.

    Passes that the option ``post_grad_custom_pre_pass`` has already run first. Calling it again changes nothing.
    """
    current = getattr(inductor_config, _OPTION)
    if not isinstance(current, FuseQuantization):
        setattr(inductor_config, _OPTION, FuseQuantization(current))


def disable() -> None:
    """Undo :func:`enable`; what is compiled already stays.

    Raises:
        RuntimeError: if another pass has taken the place of ours since then.
    """
    current = getattr(inductor_config, _OPTION)
    if current is None:
        return
    if not isinstance(current, FuseQuantization):
        raise RuntimeError(
            f"torch._inductor.config.{_OPTION} is {current!r}; expected the pass that enable() put there"
        )
    before = current.before
    setattr(inductor_config, _OPTION, None if not before else before[0] if len(before) == 1 else [*before])


# Equal quantisations


def _merge_equal(graph: fx.Graph) -> bool:
    """Whether there were any."""
    seen: dict[Any, Node] = {}
    found = False
    for node in [*graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target not in _PURE:
            if _is_mutating(node):
                seen.clear()
            continue
        named = _named_arguments(node)
        source, sizes = _without_reshape(named.pop("input"))
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


class _Norm(NamedTuple):
    input: Node
    weight: Node
    eps: float


def _fuse(node: Node) -> bool:
    """Fuse a quantisation with what made its input, if that is a norm or gate; whether it was."""
    named = _named_arguments(node)
    value, _ = _without_reshape(named["input"])
    named.pop("input")
    suffix = _QUANTISE[node.target]
    is_alone = all(user.target in _QUANTISE for user in _readers(value))
    gated = _match_silu_mul(value)
    if gated is not None:
        if not is_alone:
            return False
        with node.graph.inserting_before(node):
            new = _call(node.graph, f"silu_mul_{suffix}", input=gated, **named)
        _take_over(node, [_item(new, i) for i in range(2)])
        return True
    norm = _match_rms_norm(value)
    if norm is None or not (is_alone or suffix == "fp4quant"):
        return False
    # Other readers of the norm may come before this one.
    ending, count, anchor = (suffix, 2, node) if is_alone else (f"{suffix}_with_norm", 3, value.next)
    results = _normalised(norm, f"rmsnorm_{ending}", named, count, anchor)
    if results is None:
        return False
    _take_over(node, results[:2])
    if not is_alone:
        value.replace_all_uses_with(results[2])
    return True


def _fuse_input(node: Node) -> bool:
    """Have one op make the activations of a GEMM, where they are a norm; or that and the GEMM's result, where they are
    a gate of one row; whether they are."""
    value, _ = _without_reshape(_named_arguments(node)["a"])
    gated = _match_silu_mul(value)
    if gated is not None:
        return _multiply_gated(node, value, gated)
    norm = _match_rms_norm(value)
    if norm is None or _value(norm.input).dtype != _value(value).dtype or not _value(value).is_contiguous():
        return False
    results = _normalised(norm, "rmsnorm", {}, 1, value)
    if results is None:
        return False
    value.replace_all_uses_with(results[0])
    return True


def _multiply_gated(node: Node, value: Node, gated: Node) -> bool:
    """Replace a GEMM of a gate's ``value``, of one row of gate and up in one tensor, if nothing else reads that;
    whether it was."""
    named = _named_arguments(node)
    rows = _value(named.pop("a")).shape[0]
    is_alone = all(user is node for user in _readers(value))
    is_same = _value(gated).dtype == _value(value).dtype and _value(gated).is_contiguous()
    if not is_alone or not is_same or not isinstance(rows, int) or not gates_with_gemm(rows, _value(value).device):
        return False
    _multiply_made(node, "silu_mul_mm_fp4_weight_only", gated, named)
    return True


def _multiply_quantised(node: Node) -> bool:
    """Replace a GEMM of few rows in FP4 and the op that quantises them, if nothing else reads the codes; whether they
    were."""
    named = _named_arguments(node)
    (codes, _), scale = _without_reshape(named.pop("a")), named.pop("a_scale")
    if not all(_is_call(each, operator.getitem) for each in (codes, scale)):
        return False
    made: Node = codes.args[0]
    if not _is_call(made, *_IN_ONE_LAUNCH) or codes.args != (made, 0) or scale.args != (made, 1):
        return False
    readers = [user for item in made.users for user in _readers(item)]
    how = _named_arguments(made)
    source, fmt = how["input"], ("block_size", "scale_format", "scale_layout")
    rows, value = _value(node).shape[0], _value(source)
    gate = [how[name] for name in _GATE if name in how]
    if (
        any(user is not node for user in readers)
        or any(how[name] != named[name] for name in fmt)
        or (gate and not gates_plainly(*gate))
        or value.dtype not in SIXTEEN_BIT
        or not value.is_contiguous()
        or not isinstance(rows, int)
        or not quantises_with_gemm(rows, value.device, named["block_size"], gated=bool(gate))
    ):
        return False
    named["scale_layout"] = weight_layout(SCALE_LAYOUTS[named["scale_layout"]]).name
    named |= {"global_scale": how["global_scale"], "out_dtype": named["out_dtype"] or torch.bfloat16}
    _multiply_made(node, _IN_ONE_LAUNCH[made.target], source, named)
    return True


def _multiply_made(node: Node, name: str, source: Node, named: dict[str, Any]) -> None:
    """Replace a GEMM by the op that also makes its activations of ``source``, the rows of which may have more leading
    dimensions."""
    value = _value(source)
    with node.graph.inserting_before(node):
        if value.dim() != 2:
            shape = [_value(node).shape[0], value.shape[-1]]
            source = node.graph.call_function(aten.reshape.default, (source, shape))
            source.meta["val"] = value.reshape(shape)
        new = _call(node.graph, name, a=source, **named)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _normalised(norm: _Norm, name: str, named: dict[str, Any], count: int, anchor: Node) -> list[Node] | None:
    """The results of an op that normalises: the one that also adds, where it can; else the one called so, before
    ``anchor``. ``None``: an argument comes later than that."""
    named = {**named, "weight": norm.weight, "eps": norm.eps}
    results = _add_norm(norm, f"add_{name}", named, count)
    if results is not None or not _are_before(anchor, named.values()):
        return results
    with anchor.graph.inserting_before(anchor):
        new = _call(anchor.graph, name, input=norm.input, **named)
    return [new] if count == 1 else [_item(new, i) for i in range(count)]


def _add_norm(norm: _Norm, name: str, named: dict[str, Any], count: int) -> list[Node] | None:
    """The results of the op that also adds, in place of the addition before the norm; ``None``: there is none, or no
    operand to overwrite."""
    total = norm.input
    if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return None
    operands = [each for each in total.args if isinstance(each, fx.Node)]
    if len(operands) < 2 or operands[0] is operands[1]:
        return None
    if any(_value(each).dtype != _value(total).dtype or _value(each).dim() != _value(total).dim() for each in operands):
        return None
    # Broadcast operands have other sizes. Equal symbols are equal expressions.
    if any(tuple(_value(each).shape) != tuple(_value(total).shape) for each in operands):
        return None
    # What reads the sum knows its strides, which the operand has to have then.
    alike = [each for each in operands if _value(each).stride() == _value(total).stride()]
    spent = next((each for each in alike if _ends_at(each, total)), None)
    if spent is None or not _are_before(total, named.values()):
        return None
    other = operands[1] if spent is operands[0] else operands[0]
    if _storage_of(other) is _storage_of(spent):
        return None
    op = getattr(cute, name).default
    every = _all_named(op, {"input": other, "residual": spent, **named})
    with total.graph.inserting_before(total):
        # Inductor's reinplacing makes it a call that overwrites the operand.
        new = total.graph.call_function(torch.ops.higher_order.auto_functionalized, (op,), every)
    new.meta["val"] = (*as_tuple(_fake_results(op, every)), _value(total))
    results = [_item(new, i) for i in range(count + 1)]
    total.replace_all_uses_with(results[count])
    total.graph.erase_node(total)
    return results[:count]


def _take_over(node: Node, results: Sequence[Node]) -> None:
    """Let the fused op's codes and scales take the place of those of ``node``, whose input may have been reshaped."""
    _, sizes = _without_reshape(node.args[0] if node.args else node.kwargs["input"])
    for user in [*node.users]:
        index = user.args[1]
        old, new = _value(user), results[index]
        # Scales in tiles or by columns are of all rows, whatever dimensions these have.
        if sizes is not None and (index == 0 or _has_row_scales(node)):
            with node.graph.inserting_before(user):
                new = node.graph.call_function(aten.reshape.default, (new, [*sizes[:-1], old.shape[-1]]))
            new.meta["val"] = old
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _has_row_scales(node: Node) -> bool:
    """Whether the scales have the leading dimensions of the input."""
    named = _named_arguments(node)
    return named["scale_layout"] in ("linear", "row") and named.get("granularity") != "tensor"


# The next weight


def _prefetch(graph: fx.Graph) -> bool:
    """Have each GEMM of few rows bring the weight of the next one into L2, if that is an input of the graph; whether
    one does."""
    gemms = [node for node in graph.nodes if node.target in _PREFETCH]
    found = False
    for node, following in itertools.pairwise(gemms):
        value, weight = _value(node), _weight_rows(_named_arguments(following)["b"])
        rows, named = value.shape[0], _named_arguments(node)
        if weight is None or named["prefetch"] is not None or not isinstance(rows, int):
            continue
        has_fp8_weight, is_near = _value(named["b"]).dtype == torch.float8_e4m3fn, _value(weight).device == value.device
        if is_near and prefetches_with_gemm(rows, value.device, has_fp8_weight=has_fp8_weight):
            with graph.inserting_before(node):
                new = _call(graph, node.target._schema.name.removeprefix("cute::"), **{**named, "prefetch": weight})
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            found = True
    return found


def _weight_rows(b: Node) -> Node | None:
    """The input of the graph that a weight is the transposed view of, if it can be prefetched."""
    if not _is_call(b, aten.permute.default, aten.t.default, aten.transpose.int):
        return None
    rows = b.args[0]
    return rows if rows.op in ("placeholder", "get_attr") and is_prefetchable(_value(rows)) else None


# Patterns


def _match_rms_norm(node: Node) -> _Norm | None:
    """``x · rsqrt(mean(x²) + eps) · weight``, with conversions anywhere between."""
    for weight, scaled in _factors(_unconverted(node)):
        if not isinstance(weight, fx.Node) or _value(weight).dim() != 1:
            continue
        for x, root in _factors(_unconverted(scaled)):
            eps = _eps_of_root(root, x)
            if eps is None:
                continue
            source, factor = _unwidened(x), _unwidened(weight)
            dtype = _value(source).dtype
            if _value(factor).dtype not in (dtype, torch.float32):
                factor = weight
            if (
                dtype in _FLOATS
                and _value(factor).dtype in (dtype, torch.float32)
                and _value(factor).shape == _value(source).shape[-1:]
                and _value(source).shape == _value(node).shape
            ):
                return _Norm(source, factor, eps)
    return None


def _eps_of_root(node: Any, x: Node) -> float | None:
    """That of ``rsqrt(mean(x²) + eps)``; ``None``: the node is something else."""
    if not _is_call(node, aten.rsqrt.default) and not (_is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5):
        return None
    total = node.args[0]
    if not _is_call(total, *_ADD) or not isinstance(total.args[1], (int, float)) or total.kwargs:
        return None
    mean, eps = total.args
    if not _is_call(mean, aten.mean.dim) or mean.kwargs or len(mean.args) != 3 or not mean.args[2]:
        return None
    square, dims, _ = mean.args
    if [dim % _value(square).dim() for dim in dims] != [_value(square).dim() - 1]:
        return None
    if _is_call(square, aten.pow.Tensor_Scalar):
        squared = square.args[0] if square.args[1] == 2 else None
    else:
        squared = next((a for a, b in _factors(square) if a is b), None)
    is_same = squared is not None and _unwidened(squared) is _unwidened(x)
    return float(eps) if is_same else None


def _match_silu_mul(node: Node) -> Node | None:
    """The tensor of which the first half is the gate, and the second half up, of ``silu(gate) * up``."""
    for activated, up in _factors(_unconverted(node)):
        if not isinstance(activated, fx.Node) or not isinstance(up, fx.Node):
            continue
        gate = _input_of_silu(_unconverted(activated))
        if gate is None:
            continue
        first, second = _half(_unwidened(gate)), _half(_unwidened(up))
        if first is not None and second is not None and first[0] is second[0] and (first[1], second[1]) == (0, 1):
            return first[0] if _value(first[0]).dtype in _FLOATS else None
    return None


def _input_of_silu(node: Node) -> Node | None:
    """x of ``silu(x)``, of ``x / (1 + exp(-x))``, and of ``x * sigmoid(x)``."""
    if _is_call(node, aten.silu.default):
        return _as_node(node.args[0])
    if _is_call(node, aten.div.Tensor):
        x, total = node.args
        if (
            _is_call(total, *_ADD)
            and total.args[1] == 1
            and not total.kwargs
            and _is_call(total.args[0], aten.exp.default)
        ):
            inverse = total.args[0].args[0]
            if _is_call(inverse, aten.neg.default) and inverse.args[0] is x:
                return _as_node(x)
    for x, sigmoid in _factors(node):
        if _is_call(sigmoid, aten.sigmoid.default) and sigmoid.args[0] is x:
            return _as_node(x)
    return None


def _half(node: Node) -> tuple[Node, int] | None:
    """The tensor that a node is one half of along the last dimension, and which."""
    if _is_call(node, operator.getitem):
        parts, index = node.args
        if not _is_call(parts, aten.split.Tensor, aten.split_with_sizes.default):
            return None
        whole, sizes, *dim = parts.args
        last = _value(whole).dim() - 1
        width = _value(whole).shape[-1]
        halves = [sizes] * 2 if isinstance(sizes, int) else [*sizes]
        if (dim[0] if dim else 0) not in (last, -1) or halves * 2 != [width // 2] * 4 or width % 2:
            return None
        return whole, index
    if _is_call(node, aten.slice.Tensor):
        whole, dim, begin, end, *step = node.args
        last, width = _value(whole).dim() - 1, _value(whole).shape[-1]
        if dim not in (last, -1) or width % 2 or step not in ([], [1]) or not isinstance(end, int):
            return None
        return {(0, width // 2): (whole, 0), (width // 2, width): (whole, 1)}.get((begin, min(end, width)))
    return None


# Walking


def _is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _as_node(value: Any) -> Node | None:
    return value if isinstance(value, fx.Node) else None


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _factors(node: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of a product's factors; nothing if it is no product."""
    if _is_call(node, *_MUL):
        a, b = node.args
        yield a, b
        yield b, a


def _unconverted(node: Node) -> Any:
    """What a node was before conversions between floating-point dtypes of 16 and 32 bits."""
    while _is_call(node, *_CONVERT) and {_value(node).dtype, _value(node.args[0]).dtype} <= {*_FLOATS}:
        node = node.args[0]
    return node


def _unwidened(node: Node) -> Node:
    """What a node was before it became float32, which loses nothing."""
    is_wider = _is_call(node, *_CONVERT) and _value(node).dtype == torch.float32
    return node.args[0] if is_wider and _value(node.args[0]).dtype in _FLOATS else node


def _without_reshape(node: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """What a node was before its rows were put under other leading dimensions, and the sizes it has now."""
    sizes: tuple[Any, ...] | None = None
    while _is_call(node, *_RESHAPE) and _value(node).shape[-1:] == _value(node.args[0]).shape[-1:]:
        sizes = tuple(node.args[1]) if sizes is None else sizes
        node = node.args[0]
    return node, sizes


def _readers(node: Node) -> Iterator[Node]:
    """The users of a node, and those of its reshapings, none of which is a user."""
    for user in node.users:
        if _is_call(user, *_RESHAPE) and _value(user).shape[-1:] == _value(node).shape[-1:]:
            yield from _readers(user)
        else:
            yield user


def _is_view(node: Node) -> bool:
    """Whether the memory of a node may be that of its first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target in _RESHAPE or node.target.is_view or node.target is aten.contiguous.default


def _storage_of(node: Node) -> Node:
    """The node that made the memory which a node is in."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def _ends_at(node: Node, last: Node) -> bool:
    """Whether nothing reads the memory of ``node`` behind ``last``, and it is the graph's own."""
    base = _storage_of(node)
    if base.op != "call_function":
        return False
    pending = [base]
    while pending:
        each = pending.pop()
        for user in each.users:
            if user is not last and not user < last:
                return False
            if _is_view(user):
                pending.append(user)
    return True


def _are_before(anchor: Node, values: Any) -> bool:
    """Whether the nodes among the values come before ``anchor``."""
    return all(value < anchor for value in values if isinstance(value, fx.Node))


# Nodes


def _named_arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name, defaults included."""
    given = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return _all_named(node.target, given)


def _all_named(op: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {each.name: given.get(each.name, each.default_value) for each in op._schema.arguments}


def _call(graph: fx.Graph, name: str, **named: Any) -> Node:
    op = getattr(cute, name).default
    every = _all_named(op, named)
    node = graph.call_function(op, tuple(every.values()))
    node.meta["val"] = _fake_results(op, every)
    return node


def _fake_results(op: Any, named: dict[str, Any]) -> Any:
    """Of a call: a fake tensor, or several."""
    values: dict[str, Any] = {key: _value(each) if isinstance(each, fx.Node) else each for key, each in named.items()}
    with next(iter(values.values())).fake_mode:
        if "residual" in values:
            values["residual"] = torch.empty_like(values["residual"])  # no write to the fake of another node
        return op(**values)


def _item(node: Node, index: int) -> Node:
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item
