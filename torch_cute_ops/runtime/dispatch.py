"""Conditions under which a CUDA call may bypass PyTorch's dispatcher, and replacements for the work that the dispatcher
would have done.

The module uses private names of torch. If a torch version lacks one, calls go through the dispatcher, which is slower
and always correct.
"""

from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter

from torch_cute_ops.runtime import settings

PLAIN: Final = frozenset((torch.Tensor, Parameter))
"""Exact types of tensors that do not need the dispatcher; subclasses do."""

try:
    # The public torch.autograd.graph.increment_version calls this function and takes twice as long.
    from torch._C import _increment_version
except ImportError:
    _increment_version = torch.autograd.graph.increment_version  # type: ignore[assignment, unused-ignore]

mark_written: Final = _increment_version
"""Increment the version counters of tensors that a kernel wrote, so that autograd detects stale saved tensors."""

NEEDS_REDISPATCH: str
"""Variant of ``NEEDS_DISPATCHER`` for calls that have reached the Autograd key. It lacks the tests for a compiler or
tracer, because these act before the Autograd key."""

NEEDS_DISPATCHER: str
"""Expression that is true if a compiler, tracer, dispatch mode, transform, dual level, log or dump must see the call.

If the expression is false, the op's Python function bypasses the dispatcher, which saves 2.5 µs (torch 2.11). The
expression does not test for ``__torch_function__`` modes and the profiler. Such modes and the profiler see kernels and
calls of ``torch.ops.cute``, but not calls of the Python functions. The expression uses the names in ``CHECKS``. The
expression is inserted into generated functions, because calling a function would cost 0.06 µs.
"""

NEEDS_DISPATCHER_WITHOUT_DYNAMO: str
"""``NEEDS_DISPATCHER`` for processes without ``torch._dynamo``, which cannot compile."""

CHECKS: dict[str, Any]

try:
    from torch._C import _is_tracing, _len_torch_dispatch_stack
    from torch._C._functorch import peek_interpreter_stack
    from torch.compiler import is_dynamo_compiling

    forward_ad._current_level  # noqa: B018
except (ImportError, AttributeError):
    # Without torch's private names, we cannot test whether the dispatcher is needed, so every call uses it.
    NEEDS_REDISPATCH = NEEDS_DISPATCHER = NEEDS_DISPATCHER_WITHOUT_DYNAMO = "True"
    CHECKS = {}
else:
    NEEDS_REDISPATCH = (
        "logs_calls or dispatch_modes() > 0 or peek_interpreter_stack() is not None or forward_ad._current_level >= 0"
    )
    NEEDS_DISPATCHER_WITHOUT_DYNAMO = f"is_tracing() or {NEEDS_REDISPATCH}"
    NEEDS_DISPATCHER = f"is_dynamo_compiling() or {NEEDS_DISPATCHER_WITHOUT_DYNAMO}"
    CHECKS = {
        "forward_ad": forward_ad,
        "is_dynamo_compiling": is_dynamo_compiling,
        "is_tracing": _is_tracing,
        "logs_calls": settings.LOG == "debug" or settings.DUMP is not None,
        "dispatch_modes": _len_torch_dispatch_stack,
        "peek_interpreter_stack": peek_interpreter_stack,
    }


def is_proxy(value: Any) -> bool:
    """Return True for a proxy of ``torch.fx.symbolic_trace``, which records calls and has no shape or dtype."""
    return isinstance(value, Proxy)


def in_dual_level() -> bool:
    """Return True inside ``torch.autograd.forward_ad.dual_level()``, where tensors may carry tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return True if the tensor carries a tangent of forward-mode differentiation."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which calls of ops skip the Autograd key.

    Raises:
        AttributeError: if this torch version lacks the guard (see ``has_autograd_key``).
    """
    return torch._C._AutoDispatchBelowAutograd()


has_autograd_key: Final = hasattr(torch._C, "_AutoDispatchBelowAutograd")
"""True if an implementation at the Autograd key can continue below it."""

below_inplace: Final = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
"""Dispatch keys below ADInplaceOrView, whose kernel increments the version counters of mutated subclasses. None if this
torch version lacks the name; then only plain tensors' counters are incremented."""
