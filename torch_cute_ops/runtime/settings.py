"""Package settings, each from one environment variable, read once at import."""

import os
from typing import Final


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}; use 0 or 1")
    return text == "1"


PDL: Final = _flag("TORCH_CUTE_OPS_PDL", True)
"""Launch kernels with programmatic dependent launch, so that a kernel's start overlaps the end of the one before."""
