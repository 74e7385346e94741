"""Limits of the kernels that decode FP4 weights: no device code."""

import torch

from torch_cute_ops.formats import NVFP4, FP4Format
from torch_cute_ops.runtime.arch import Arch


def reason_beyond(dtype: torch.dtype, fmt: FP4Format, smem_bytes: int, arch: Arch) -> str | None:
    """Why ``dtype`` cannot hold decoded weights, or ``arch`` cannot hold a CTA; ``None`` if both can."""
    if dtype == torch.float16 and fmt != NVFP4:
        return f"decoded {fmt.name} weights exceed float16"
    if smem_bytes > arch.smem_per_cta:
        return f"needs {smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
    return None
