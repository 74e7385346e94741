"""Call the compiled function of an op directly, without argument checks or the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.registry import OPS


def raw_call(op: str, *args: Any, out: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Return a function without arguments that makes one bare TVM-FFI call of an op's kernel with these CUDA tensors.

    Args:
        op: name of an op that launches one kernel, such as ``"rmsnorm_fp4quant"``.
        args: arguments of the op in order; the kernel must read the tensors without a copy.
        out: outputs of the op.
    """
    spec = OPS[op]
    call = spec.bind(*args)
    given = out[0] if spec.path.is_single else out
    spec.path.run(given, None, *call)
    launcher = spec.path.launchers[spec.path.key(call, call[0].get_device())]
    passed: list[Any] = []
    compiled = launcher.function  # type: ignore[attr-defined]
    launcher.function = lambda *arguments: passed.extend(arguments)  # type: ignore[attr-defined]
    try:
        spec.path.run(given, None, *call)
    finally:
        launcher.function = compiled  # type: ignore[attr-defined]
    return lambda: compiled(*passed)
