"""What PyTorch's dispatcher would do for an op, where a CUDA entry sees to it itself; and whether it may.

Private names of torch are looked up with a fallback that is slower and right: calls then go through the dispatcher.
"""

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_cute_ops.runtime import settings

PLAIN: Final = frozenset((torch.Tensor, Parameter))
"""Types of tensors that need no dispatcher: not subclasses."""

try:
    # What torch.autograd.graph.increment_version calls, for half of the time.
    from torch._C import _increment_version
except ImportError:
    _increment_version = torch.autograd.graph.increment_version  # type: ignore[assignment, unused-ignore]

mark_written: Final = _increment_version
"""Move the version counters of tensors that a kernel has written, so that autograd notices a stale saved tensor."""

NEEDS_REDISPATCH: str
"""``NEEDS_DISPATCHER`` at the Autograd key, which compiler and tracer, having come before, do not ask about."""

NEEDS_DISPATCHER: str
"""Whether something has to see calls of ops: compiler, tracer, dispatch mode, transform, dual level, or log.

Where nothing has, a Python function saves the dispatcher's 2.5 µs (measured on torch 2.11). Modes of
``__torch_function__`` and the profiler are not asked about: they see calls of ``torch.ops.cute``, and kernels, but not
calls of the Python functions. An expression over ``CHECKS``, for generated functions: a call would add 0.06 µs.
"""

CHECKS: dict[str, Any]

try:
    from torch._C import _is_tracing, _len_torch_dispatch_stack
    from torch._C._functorch import peek_interpreter_stack
    from torch.compiler import is_dynamo_compiling

    forward_ad._current_level  # noqa: B018
except (ImportError, AttributeError):
    # Without torch's private names nobody knows.
    NEEDS_REDISPATCH = NEEDS_DISPATCHER = "True"
    CHECKS = {}
else:
    NEEDS_REDISPATCH = (
        "logs_calls or dispatch_modes() > 0 or peek_interpreter_stack() is not None or forward_ad._current_level >= 0"
    )
    NEEDS_DISPATCHER = f"is_dynamo_compiling() or is_tracing() or {NEEDS_REDISPATCH}"
    CHECKS = {
        "forward_ad": forward_ad,
        "is_dynamo_compiling": is_dynamo_compiling,
        "is_tracing": _is_tracing,
        "logs_calls": settings.LOG == "debug",
        "dispatch_modes": _len_torch_dispatch_stack,
        "peek_interpreter_stack": peek_interpreter_stack,
    }


def in_dual_level() -> bool:
    """Whether tensors may have tangents: whether this is inside of a ``torch.autograd.forward_ad.dual_level()``."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows the tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def below_autograd() -> AbstractContextManager[Any]:
    """Calls of ops inside go on below the Autograd key.

    Raises:
        AttributeError: if this torch has no such guard (``has_autograd_key``).
    """
    return torch._C._AutoDispatchBelowAutograd()


has_autograd_key: Final = hasattr(torch._C, "_AutoDispatchBelowAutograd")
"""Whether an implementation at the Autograd key can go on below it."""

below_inplace: Final = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
"""The dispatch keys below ADInplaceOrView, where the counters of mutated subclasses are moved; ``None``: this torch
does not say, and only those of plain tensors are."""
