"""What a kernel that decodes FP4 weights needs of numbers and of an architecture: no device code."""

import torch

from torch_cute_ops.formats import NVFP4, FP4Format
from torch_cute_ops.runtime.arch import Arch


def reason_beyond(dtype: torch.dtype, fmt: FP4Format, smem_bytes: int, arch: Arch) -> str | None:
    """Why ``dtype`` cannot hold what is decoded, or ``arch`` has no room for a CTA; ``None`` if both can."""
    if dtype == torch.float16 and fmt != NVFP4:
        return f"the numbers of {fmt.name} exceed float16"
    if smem_bytes > arch.smem_per_cta:
        return f"needs {smem_bytes} bytes of shared memory; {arch.name} has {arch.smem_per_cta}"
    return None
