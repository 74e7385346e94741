"""What PyTorch's dispatcher would do for an op, where a CUDA entry has to see to it itself."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter

from torch_cute_ops.runtime import settings

_PLAIN = (torch.Tensor, Parameter)
_LOGS = settings.LOG == "debug"


def is_plain_eager(
    a: torch.Tensor,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    out: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
) -> bool:
    """Whether these are ordinary CUDA tensors, outputs ordinary ones, and nothing (compiler, mode, transform, log)
    watches calls of ops.

    Saves the dispatcher's 2.5 µs (measured on torch 2.11).
    """
    return (
        not _LOGS
        and not torch.compiler.is_compiling()
        and type(a) in _PLAIN
        and a.is_cuda
        and (b is None or (type(b) in _PLAIN and b.is_cuda))
        and (c is None or (type(c) in _PLAIN and c.is_cuda))
        and (d is None or (type(d) in _PLAIN and d.is_cuda))
        and (out is None or type(out) in _PLAIN or (type(out) is tuple and all(type(x) in _PLAIN for x in out)))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Move the version counters of tensors that a kernel has written, so that autograd notices a stale saved tensor."""
    torch.autograd.graph.increment_version(tensors)
