"""Find norms and gates in graphs of ATen ops, in the variants that models use."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from torch_cute_ops.integrations._inductor_graph import Node, aten, is_call, value_of

_CONVERT: Final = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_MUL: Final = (aten.mul.Tensor, aten.mul.Scalar)
_ADD: Final = (aten.add.Tensor, aten.add.Scalar)
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


class Norm(NamedTuple):
    """Matched norm over the last dimension.

    Attributes:
        input: tensor that is normalised.
        weight: factor of each column, or None. A float32 input may have a 16-bit weight; the ops of this package
            support this combination only if they also add 16-bit rows to a float32 residual.
        eps: number added to the mean square or the variance.
        weight_plus_one: True if the factor is ``1 + weight``.
        bias: summand of each column, in the dtype of the weight, or None.
        subtract_mean: True for LayerNorm, False for RMSNorm.
    """

    input: Node
    weight: Node | None
    eps: float
    weight_plus_one: bool = False
    bias: Node | None = None
    subtract_mean: bool = False


def match_norm(node: Node) -> Norm | None:
    """Match an RMSNorm or a LayerNorm."""
    return match_rms_norm(node) or match_layer_norm(node)


def match_layer_norm(node: Node) -> Norm | None:
    """Match ``(x - mean(x)) · rsqrt(var(x) + eps) · weight + bias``, as Inductor decomposes LayerNorm. The bias, or
    both bias and weight, may be missing."""
    value, bias, weight = _unconverted(node), None, None
    if is_call(value, aten.add.Tensor) and not value.kwargs and _is_vector(value.args[1]):
        value, bias = value.args
    if is_call(value, aten.mul.Tensor) and _is_vector(value.args[1]):
        value, weight = value.args
    if bias is not None and weight is None:
        return None
    for difference, root in _factors(value):
        found = _input_and_eps(difference, root)
        if found is None:
            continue
        x, eps = found
        source = unwidened(x)
        vectors = [None if each is None else unwidened(each) for each in (weight, bias)]
        allowed = (value_of(source).dtype, torch.float32)
        if (
            value_of(source).dtype in _FLOATS
            and value_of(source).shape == value_of(node).shape
            and all(each is None or value_of(each).shape == value_of(source).shape[-1:] for each in vectors)
            and all(each is None or value_of(each).dtype in allowed for each in vectors)
            and (vectors[1] is None or value_of(vectors[1]).dtype == value_of(vectors[0]).dtype)
        ):
            return Norm(source, vectors[0], eps, bias=vectors[1], subtract_mean=True)
    return None


def _is_vector(node: Any) -> bool:
    # A node may also stand for a symbolic size, whose value is not a tensor.
    return isinstance(node, fx.Node) and isinstance(value_of(node), torch.Tensor) and value_of(node).dim() == 1


def _input_and_eps(difference: Any, root: Any) -> tuple[Node, float] | None:
    """Match ``x - mean(x)`` and ``rsqrt(var(x) + eps)`` over the last dimension. Return x and eps, or None if the nodes
    are something else."""
    if not is_call(difference, aten.sub.Tensor) or difference.kwargs or not is_call(root, aten.rsqrt.default):
        return None
    x, mean = difference.args
    terms = _with_number(root.args[0])
    if terms is None or not is_call(mean, operator.getitem) or not is_call(terms[0], operator.getitem):
        return None
    (variance, eps), both = terms, mean.args[0]
    if mean.args != (both, 1) or variance.args != (both, 0) or not is_call(both, aten.var_mean.correction):
        return None
    is_of_rows = (
        len(both.args) == 2
        and both.args[0] is x
        and both.kwargs == {"correction": 0, "keepdim": True}
        and _is_last(both.args[1], x)
    )
    return (x, eps) if is_of_rows else None


def _is_last(dims: Any, node: Node) -> bool:
    """Return True if ``dims`` are the last dimension of a tensor, which may have no dimensions."""
    return [*dims] in ([-1], [value_of(node).dim() - 1]) and value_of(node).dim() > 0


def _with_number(node: Any) -> tuple[Any, float] | None:
    """Match the sum of a tensor and a number and return both, or None if the node is something else."""
    if not is_call(node, *_ADD) or not isinstance(node.args[1], (int, float)) or node.kwargs:
        return None
    return node.args[0], float(node.args[1])


def _squared(node: Any) -> Any:
    """Match ``x²``, as a power or as a product, and return x, or None if the node is something else."""
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args[0] if node.args[1] == 2 else None
    return next((a for a, b in _factors(node) if a is b), None)


def match_rms_norm(node: Node) -> Norm | None:
    """Match ``x · rsqrt(mean(x²) + eps) · weight + bias``, with dtype conversions anywhere in between. The factor
    ``weight`` may also be ``1 + weight``, if it is added in float32. The bias, or both bias and weight, may be
    missing."""
    for x, root in _factors(_unconverted(node)):
        eps = _eps_of_root(root, x)
        if eps is not None:
            source = unwidened(x)
            is_same = value_of(source).dtype in _FLOATS and value_of(source).shape == value_of(node).shape
            return Norm(source, None, eps) if is_same else None
    for product, bias in _with_bias(_unconverted(node)):
        for weight, scaled in _factors(_unconverted(product)):
            if not _is_vector(weight):
                continue
            for x, root in _factors(_unconverted(scaled)):
                eps = _eps_of_root(root, x)
                if eps is None:
                    continue
                addend = _without_one(weight)
                source = unwidened(x)
                dtype = value_of(source).dtype
                vectors = [weight if addend is None else addend, *([] if bias is None else [bias])]
                narrow = [unwidened(each) for each in vectors]
                if _have_one_dtype(narrow, (dtype, torch.float32)):
                    vectors = narrow
                if (
                    dtype in _FLOATS
                    and _have_one_dtype(vectors, _FLOATS if dtype == torch.float32 else (dtype, torch.float32))
                    and all(value_of(each).shape == value_of(source).shape[-1:] for each in vectors)
                    and value_of(source).shape == value_of(node).shape
                ):
                    return Norm(source, vectors[0], eps, addend is not None, bias=vectors[1] if vectors[1:] else None)
    return None


def _with_bias(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """Yield ``(node, None)``. If the node adds a vector to another node, also yield the other node and the vector."""
    yield node, None
    if is_call(node, aten.add.Tensor) and not node.kwargs:
        for value, bias in (node.args, node.args[::-1]):
            if isinstance(value, fx.Node) and _is_vector(bias):
                yield value, bias


def _have_one_dtype(nodes: Sequence[Node], allowed: Sequence[torch.dtype]) -> bool:
    """Return True if all nodes have the same dtype, which must be one of the allowed dtypes."""
    dtypes = {value_of(each).dtype for each in nodes}
    return len(dtypes) == 1 and dtypes <= {*allowed}


def _without_one(node: Node) -> Node | None:
    """Match ``x + 1`` of a float32 tensor x and return x, or None if the node is something else."""
    is_sum = is_call(node, *_ADD) and not node.kwargs and value_of(node).dtype == torch.float32
    if not is_sum or len(node.args) != 2 or not isinstance(node.args[1], (int, float)) or node.args[1] != 1:
        return None
    addend = _as_node(node.args[0])
    return addend if addend is not None and value_of(addend).dtype == torch.float32 else None


def _eps_of_root(node: Any, x: Node) -> float | None:
    """Match ``rsqrt(mean(x²) + eps)`` and return eps, or None if the node is something else."""
    if not is_call(node, aten.rsqrt.default) and not (is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5):
        return None
    terms = _with_number(node.args[0])
    if terms is None:
        return None
    mean, eps = terms
    if not is_call(mean, aten.mean.dim) or mean.kwargs or len(mean.args) != 3 or not mean.args[2]:
        return None
    square, dims, _ = mean.args
    if not _is_last(dims, square):
        return None
    squared = _squared(square)
    is_same = squared is not None and unwidened(squared) is unwidened(x)
    return eps if is_same else None


class Gate(NamedTuple):
    """Matched product ``act(gate) * up``.

    Attributes:
        input: tensor whose two halves are gate and up.
        gate: activation function, as the argument ``gate`` of the ops names it.
    """

    input: Node
    gate: str


def match_gate(node: Node) -> Gate | None:
    """Match ``silu(gate) * up``, ``gelu(gate) * up`` or ``relu(gate)² * up``, where gate and up are the two halves of
    one tensor."""
    for activated, up in _factors(_unconverted(node)):
        if not isinstance(activated, fx.Node) or not isinstance(up, fx.Node):
            continue
        found = _input_of_activation(_unconverted(activated))
        if found is None:
            continue
        gate, name = found
        first, second = _half(unwidened(gate)), _half(unwidened(up))
        if first is not None and second is not None and first[0] is second[0] and (first[1], second[1]) == (0, 1):
            return Gate(first[0], name) if value_of(first[0]).dtype in _FLOATS else None
    return None


def _input_of_activation(node: Node) -> tuple[Node, str] | None:
    """Match an activation function. Return its input and the function's name, or None if the node is something else."""
    x = _input_of_silu(node)
    if x is not None:
        return x, "silu"
    x = _input_of_squared_relu(node)
    return _input_of_gelu(node) if x is None else (x, "relu2")


def _input_of_squared_relu(node: Node) -> Node | None:
    """Match ``relu(x)²`` and return x, or None if the node is something else."""
    root = _squared(node)
    return _as_node(root.args[0]) if root is not None and is_call(root, aten.relu.default) else None


def _input_of_gelu(node: Node) -> tuple[Node, str] | None:
    """Match ``x / 2 * (1 + f)`` as Inductor decomposes GELU, with ``f = erf(x / sqrt(2))`` or ``f = tanh(sqrt(2 / pi) *
    (x + 0.044715 * x³))``. Return x and the name of the gate, or None if the node is something else."""
    for half, total in _factors(node):
        x = _scaled(half, 0.5)
        if x is None or not is_call(total, *_ADD) or total.kwargs or total.args[1] != 1:
            continue
        curve = total.args[0]
        if is_call(curve, aten.erf.default) and _scaled(curve.args[0], math.sqrt(0.5)) is x:
            return x, "gelu"
        if is_call(curve, aten.tanh.default):
            inner: Any = _scaled(curve.args[0], math.sqrt(2 / math.pi))
            if is_call(inner, aten.add.Tensor) and not inner.kwargs and inner.args[0] is x:
                cube = _scaled(inner.args[1], 0.044715)
                if any(again is x and _is_square(square, x) for square, again in _factors(cube)):
                    return x, "gelu_tanh"
    return None


def _scaled(node: Any, factor: float) -> Node | None:
    """Match ``x * factor`` and return x, or None if the node is something else."""
    for x, number in _factors(node):
        if isinstance(number, float) and math.isclose(number, factor, rel_tol=1e-6):
            return _as_node(x)
    return None


def _is_square(node: Any, x: Node) -> bool:
    return any(a is x and b is x for a, b in _factors(node))


def _input_of_silu(node: Node) -> Node | None:
    """Match ``silu(x)``, ``x / (1 + exp(-x))`` or ``x * sigmoid(x)`` and return x, or None if the node is something
    else."""
    if is_call(node, aten.silu.default):
        return _as_node(node.args[0])
    if is_call(node, aten.div.Tensor):
        x, total = node.args
        if (
            is_call(total, *_ADD)
            and total.args[1] == 1
            and not total.kwargs
            and is_call(total.args[0], aten.exp.default)
        ):
            inverse = total.args[0].args[0]
            if is_call(inverse, aten.neg.default) and inverse.args[0] is x:
                return _as_node(x)
    for x, sigmoid in _factors(node):
        if is_call(sigmoid, aten.sigmoid.default) and sigmoid.args[0] is x:
            return _as_node(x)
    return None


def _half(node: Node) -> tuple[Node, int] | None:
    """If the node is a half of a tensor along the last dimension, return the tensor, and 0 for the first half or 1 for
    the second. Otherwise return None."""
    if is_call(node, operator.getitem):
        split, index = node.args
        if not is_call(split, aten.split.Tensor, aten.split_with_sizes.default):
            return None
        whole, sizes, *dim = split.args
        last = value_of(whole).dim() - 1
        width = value_of(whole).shape[-1]
        halves = [*sizes] if isinstance(sizes, Sequence) else [sizes] * 2
        if not all(isinstance(each, int) for each in (width, *halves)):
            return None
        if (dim[0] if dim else 0) not in (last, -1) or halves * 2 != [width // 2] * 4 or width % 2:
            return None
        return whole, index
    if is_call(node, aten.slice.Tensor):
        whole, dim, begin, end, *step = node.args
        last, width = value_of(whole).dim() - 1, value_of(whole).shape[-1]
        if not all(isinstance(each, int) for each in (width, begin, end)):
            return None
        if dim not in (last, -1) or width % 2 or step not in ([], [1]):
            return None
        return {(0, width // 2): (whole, 0), (width // 2, width): (whole, 1)}.get((begin, min(end, width)))
    return None


def _as_node(value: Any) -> Node | None:
    return value if isinstance(value, fx.Node) else None


def _factors(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the two factors of a product in both orders. Yield nothing if the node is not a product."""
    if is_call(node, *_MUL):
        a, b = node.args
        yield a, b
        yield b, a


def _unconverted(node: Node) -> Any:
    """Skip conversions between 16-bit and 32-bit floating-point dtypes: return the node before them."""
    while is_call(node, *_CONVERT) and {value_of(node).dtype, value_of(node.args[0]).dtype} <= {*_FLOATS}:
        node = node.args[0]
    return node


def unwidened(node: Node) -> Node:
    """Skip a lossless conversion to float32: return the node before it."""
    is_wider = is_call(node, *_CONVERT) and value_of(node).dtype == torch.float32
    return node.args[0] if is_wider and value_of(node.args[0]).dtype in _FLOATS else node
