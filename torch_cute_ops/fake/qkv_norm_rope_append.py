"""Output of ``qkv_norm_rope_append``."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def qkv_norm_rope_append(
    qkv: torch.Tensor, q_heads: int, kv_heads: int, q_dtype: torch.dtype | None, **_: Any
) -> OutputShapes:
    """Describe q (M, Hq, D), in ``q_dtype`` or the dtype of ``qkv``."""
    width = qkv.shape[1] // (q_heads + 2 * kv_heads)
    return [((qkv.shape[0], q_heads, width), qkv.dtype if q_dtype is None else q_dtype)]
