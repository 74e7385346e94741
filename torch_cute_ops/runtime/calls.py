"""Descriptions of calls as text, for the log and for messages of CUDA errors."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.runtime import settings

log = logging.getLogger("torch_cute_ops")


def configure_log() -> None:
    """Log to standard error at the level in ``TORCH_CUTE_OPS_LOG``. If it is not set, leave the logger unchanged."""
    # Add a handler only if the user asked for a log; Python writes warnings to standard error without a handler.
    if settings.LOG:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(settings.LOG.upper())
        log.propagate = False


def described(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call in one line, with the dtype, shape, strides and device of each tensor."""
    shown = [_shown(value) for value in args]
    shown += [f"{name}={_shown(value)}" for name, value in kwargs.items()]
    return f"cute::{op}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    return f"{dtype}{list(value.shape)}{strides} on {value.device}"


def logged(op: str, entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``entry`` so that each call is logged before it runs. If the process crashes, the log names the call."""

    @functools.wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        log.debug("%s", described(op, args, kwargs))
        return entry(*args, **kwargs)

    return call


def launch_error(op: str, error: Exception, *args: Any) -> RuntimeError:
    """Return an exception for a failed launch that names the op. The DSL's exception does not name it, and is not a
    ``RuntimeError``."""
    return RuntimeError(f"{described(op, args, {})} failed: {type(error).__name__}: {error}")
