"""Graphs of ATen ops as the pass for Inductor sees them: what nodes are, what reads them, and new calls of our ops."""

import operator
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import fx

import torch_cute_ops  # noqa: F401  registers the ops

aten: Final = torch.ops.aten
cute: Final = torch.ops.cute
Node: TypeAlias = Any
"""``torch.fx.Node``, whose arguments have types that no pattern can use."""

_RESHAPE: Final = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def is_call(node: Any, *targets: Any) -> bool:
    """Whether it is a node that calls one of the targets."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor that a node stands for."""
    return node.meta["val"]


def without_reshape(node: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """What a node was before its rows were put under other leading dimensions, and the sizes it has now."""
    sizes: tuple[Any, ...] | None = None
    while is_call(node, *_RESHAPE) and value_of(node).shape[-1:] == value_of(node.args[0]).shape[-1:]:
        sizes = tuple(node.args[1]) if sizes is None else sizes
        node = node.args[0]
    return node, sizes


def readers_of(node: Node) -> Iterator[Node]:
    """The users of a node, and those of its reshapings, none of which is a user."""
    for user in node.users:
        if is_call(user, *_RESHAPE) and value_of(user).shape[-1:] == value_of(node).shape[-1:]:
            yield from readers_of(user)
        else:
            yield user


def _is_view(node: Node) -> bool:
    """Whether the memory of a node may be that of its first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target in _RESHAPE or node.target.is_view or node.target is aten.contiguous.default


def storage_of(node: Node) -> Node:
    """The node that made the memory which a node is in."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def ends_at(node: Node, last: Node) -> bool:
    """Whether nothing reads the memory of ``node`` behind ``last``, and it is the graph's own."""
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
    """Whether the nodes among the values come before ``anchor``."""
    return all(value < anchor for value in values if isinstance(value, fx.Node))


def named_arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name, defaults included."""
    given = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return all_named(node.target, given)


def all_named(op: Any, given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an op by name, defaults in place of those that are not given."""
    return {each.name: given.get(each.name, each.default_value) for each in op._schema.arguments}


def call_op(graph: fx.Graph, name: str, **named: Any) -> Node:
    """A new call of our op of that name."""
    op = getattr(cute, name).default
    every = all_named(op, named)
    node = graph.call_function(op, tuple(every.values()))
    node.meta["val"] = fake_results(op, every)
    return node


def fake_results(op: Any, named: dict[str, Any]) -> Any:
    """What a call returns: a fake tensor, or several."""
    values: dict[str, Any] = {key: value_of(each) if isinstance(each, fx.Node) else each for key, each in named.items()}
    with next(iter(values.values())).fake_mode:
        if "residual" in values:
            values["residual"] = torch.empty_like(values["residual"])  # no write to the fake of another node
        return op(**values)


def result_of(node: Node, index: int) -> Node:
    """A new node for one of the results of a call, behind it."""
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item
