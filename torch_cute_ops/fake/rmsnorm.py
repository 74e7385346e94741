"""Outputs of ``rmsnorm``."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def rmsnorm(input: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the normalised rows, which have the shape and dtype of ``input``."""
    return [(input.shape, input.dtype)]
