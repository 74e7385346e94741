"""Package settings, each from one environment variable, read once at import."""

import os
from pathlib import Path
from typing import Final


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}; use 0 or 1")
    return text == "1"


def _count(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r}; use a whole number")
    return int(text)


def _path(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text).expanduser() if text else None


PDL: Final = _flag("TORCH_CUTE_OPS_PDL", True)
"""Launch kernels with programmatic dependent launch, so that a kernel's start overlaps the end of the one before."""

CACHE: Final = _flag("TORCH_CUTE_OPS_CACHE", True)
"""Keep compiled kernels on disk."""

CACHE_DIR: Final = _path("TORCH_CUTE_OPS_CACHE_DIR")
"""Where; ``None``: in the user's cache directory, as the system has it."""

CACHE_MB: Final = _count("TORCH_CUTE_OPS_CACHE_MB", 1024)
"""How many megabytes of them; the least recently used go first."""
