"""The compiled function behind an op, called as directly as Python can."""

import importlib
from collections.abc import Callable

import torch

from torch_cute_ops.ops._row_quant import Facts

EPS = 1e-6


def raw_call(
    op: str, input: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, scale: torch.Tensor
) -> Callable[[], None]:
    """A callable without arguments that calls the TVM-FFI function of a norm op for these CUDA tensors, and only that.

    Args:
        op: ``"rmsnorm_fp4quant"``.
        input, weight: (M, H) and (H,).
        y, scale: its outputs, NVFP4 in the 128x4 layout.
    """
    quant = importlib.import_module(f"torch_cute_ops.ops.{op}")._norm_quant
    quant.run(input, weight, None, EPS, 16, None, "128x4", (y, scale))
    facts = Facts(input.dtype, weight.dtype, input.shape[-1], False, 16, None, "128x4", input.get_device())
    launcher = quant.launchers[facts]
    function, max_ctas = launcher.function, launcher.max_ctas
    return lambda: function(input, weight, None, y, scale, None, EPS, max_ctas)
