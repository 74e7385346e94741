"""Modules as single nodes of graphs that ``torch.fx.symbolic_trace`` records."""

from typing import Any

from torch import nn

from torch_cute_ops.runtime.dispatch import is_proxy


def one_node(module: nn.Module, *inputs: Any) -> Any:
    """Record a call of a module as one node, as for modules of ``torch.nn``, because the module's code depends on
    shapes.

    Raises:
        ValueError: if the module itself is traced; a node names a module inside the traced module.
    """
    tracer: Any = next(each for each in inputs if is_proxy(each)).tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(
            f"symbolic_trace: a {type(module).__name__} is one node and is not traced itself; trace a module that "
            "contains it, such as nn.Sequential(layer)"
        )
    return tracer.create_proxy("call_module", path, inputs, {})
