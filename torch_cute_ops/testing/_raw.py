"""The compiled function behind an op, called as directly as Python can."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.registry import OPS


def raw_call(op: str, *args: Any, out: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """A callable without arguments that calls the TVM-FFI function of an op for these CUDA tensors, and only that.

    Args:
        op: an op that is one kernel, such as ``"rmsnorm_fp4quant"``.
        args: its arguments in order; tensors that the kernel accesses as they are.
        out: its outputs.
    """
    spec = OPS[op]
    values = tuple(spec.bind(*args))
    given = out[0] if spec.path.is_single else out
    spec.path.run(given, None, *values)
    launcher = spec.path.launchers[spec.path.key(values, values[0].get_device())]
    passed: list[Any] = []
    compiled = launcher.function  # type: ignore[attr-defined]
    launcher.function = lambda *arguments: passed.extend(arguments)  # type: ignore[attr-defined]
    try:
        spec.path.run(given, None, *values)
    finally:
        launcher.function = compiled  # type: ignore[attr-defined]
    return lambda: compiled(*passed)
