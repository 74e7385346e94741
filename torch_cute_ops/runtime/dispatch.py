"""What PyTorch's dispatcher would do for an op, where a CUDA entry has to see to it itself."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter

_PLAIN = (torch.Tensor, Parameter)


def is_plain_eager(*tensors: torch.Tensor | None) -> bool:
    """Whether these are ordinary CUDA tensors and nothing (compiler, mode, transform) watches calls of ops.

    Saves the dispatcher's 2.5 µs (measured on torch 2.11).
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(tensor is None or (type(tensor) in _PLAIN and tensor.is_cuda) for tensor in tensors)
    )


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Move the version counters of tensors that a kernel has written, so that autograd notices a stale saved tensor."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
