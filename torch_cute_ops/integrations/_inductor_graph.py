"""Helpers with which the Inductor pass inspects nodes of an ATen graph and inserts calls of our ops."""

import operator
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import fx

import torch_cute_ops  # noqa: F401  registers the ops

aten: Final = torch.ops.aten
cute: Final = torch.ops.cute
c10d: Final = torch.ops._c10d_functional
Node: TypeAlias = Any
"""``torch.fx.Node``. Typed as Any, because the types of its arguments are too wide for pattern matching."""

_RESHAPE: Final = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def is_call(node: Any, *targets: Any) -> bool:
    """Return True if the node calls one of the target functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value_of(node: Node) -> torch.Tensor:
    """Return the fake tensor with the shape, dtype and strides of a node's result."""
    return node.meta["val"]


def without_reshape(node: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Skip reshapes that only change leading dimensions. Return the node before the reshapes, and the sizes after them,
    or None if no reshape was skipped."""
    sizes: tuple[Any, ...] | None = None
    while is_call(node, *_RESHAPE) and value_of(node).shape[-1:] == value_of(node.args[0]).shape[-1:]:
        sizes = tuple(node.args[1]) if sizes is None else sizes
        node = node.args[0]
    return node, sizes


def readers_of(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a node's result, directly or through reshapes. The reshapes are not yielded."""
    for user in node.users:
        if is_call(user, *_RESHAPE) and value_of(user).shape[-1:] == value_of(node).shape[-1:]:
            yield from readers_of(user)
        else:
            yield user


def _is_view(node: Node) -> bool:
    """Return True if a node's result can share memory with the node's first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target in _RESHAPE or node.target.is_view or node.target is aten.contiguous.default


def storage_of(node: Node) -> Node:
    """Return the node that allocated the memory of this node's result: follow views back to their source."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def ends_at(node: Node, last: Node) -> bool:
    """Return True if the memory of ``node`` may be overwritten after ``last``: an op of the graph allocated it, and no
    later op reads it."""
    base = storage_of(node)
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


def are_before(anchor: Node, values: Any) -> bool:
    """Return True if all graph nodes in ``values`` precede ``anchor`` in the graph."""
    return all(value < anchor for value in values if isinstance(value, fx.Node))


def named_arguments(node: Node) -> dict[str, Any]:
    """Return a call's arguments by name, including defaults."""
    given = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return all_named(node.target, given)


def all_named(op: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an op by name, with defaults for missing arguments."""
    return {each.name: given.get(each.name, each.default_value) for each in op._schema.arguments}


def call_op(graph: fx.Graph, name: str, **named: Any) -> Node:
    """Insert a call of our op with this name and return its node.

    Raises:
        TypeError: If the op does not take an argument. Ignoring the argument would change the result.
    """
    op = getattr(cute, name).default
    if unknown := named.keys() - {each.name for each in op._schema.arguments}:
        raise TypeError(f"{name} does not take {', '.join(sorted(unknown))}")
    every = all_named(op, named)
    node = graph.call_function(op, tuple(every.values()))
    node.meta["val"] = fake_results(op, every)
    return node


def fake_results(op: Any, named: dict[str, Any]) -> Any:
    """Run the op on fake tensors and return its results: one fake tensor or several."""
    values: dict[str, Any] = {key: value_of(each) if isinstance(each, fx.Node) else each for key, each in named.items()}
    with next(iter(values.values())).fake_mode:
        if "residual" in values:
            values["residual"] = torch.empty_like(
                values["residual"]
            )  # pass copies, because the op may write to its arguments, and other nodes use the same fake tensors
        return op(**values)


def result_of(node: Node, index: int) -> Node:
    """Insert a node that selects one result of a call, right after the call."""
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item
