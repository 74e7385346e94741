"""The compiled function behind an op, called as directly as Python can."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._row_quant import RowQuant


def raw_call(op: str, *args: Any, out: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """A callable without arguments that calls the TVM-FFI function of an op for these CUDA tensors, and only that.

    Args:
        op: a row-quantising op, such as ``"rmsnorm_fp4quant"``.
        args: its arguments in order; matrices that the kernel reads as they are.
        out: its outputs.
    """
    quant: RowQuant = importlib.import_module(f"torch_cute_ops.ops.{op}")._quant
    quant.cuda_out(*args, **dict(zip(quant.out_names, out, strict=True)))
    input, residual, weight, factor, eps, choices = quant.signature.arrange(lambda *call: call, *args)
    launcher = quant.launcher_of(input, weight, factor, choices)
    function, max_ctas = launcher.function, launcher.max_ctas
    y, scale, *third = out
    linear, norm = (None, *third) if quant.third == "norm" else (*third, None) if third else (None, None)
    return lambda: function(input, residual, weight, factor, y, scale, linear, norm, None, None, eps, max_ctas)
