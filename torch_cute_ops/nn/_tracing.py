"""Support for ``torch.fx.symbolic_trace``: our modules become single nodes, as modules of ``torch.nn`` do."""

from typing import Any

from torch import nn

from torch_cute_ops.runtime.dispatch import is_proxy


def one_node(module: nn.Module, *inputs: Any) -> Any:
    """Record a call of the module as one node. The module's code cannot be traced itself, because it depends on shapes.

    Raises:
        ValueError: if the traced module is this module. A node can only call a module inside the traced module.
    """
    tracer: Any = next(each for each in inputs if is_proxy(each)).tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(
            f"symbolic_trace: a {type(module).__name__} is one node and is not traced itself; trace a module that "
            "contains it, such as nn.Sequential(layer)"
        )
    return tracer.create_proxy("call_module", path, inputs, {})
