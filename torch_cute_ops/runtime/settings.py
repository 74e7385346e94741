"""Package settings, each from one environment variable, read once at import."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

_known: dict[str, tuple[Any, str]] = {}


def described() -> list[dict[str, str]]:
    """Each variable, its value, and where that is from."""
    return [{"variable": name, "value": str(value), "source": source} for name, (value, source) in _known.items()]


def _read(name: str, default: T, parse: Callable[[str], T], expected: str) -> T:
    text = os.environ.get(name)
    if text is None:
        value = default
    else:
        try:
            value = parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{name}={text!r}; use {expected}") from None
    _known[name] = (value, "default" if text is None else "environment")
    return value


def _flag(name: str, default: bool) -> bool:
    return _read(name, default, lambda text: {"0": False, "1": True}[text], "0 or 1")


def _path(name: str, expected: str) -> Path | None:
    return _read(name, None, lambda text: Path(text).expanduser() if text else None, expected)


PDL: Final = _flag("TORCH_CUTE_OPS_PDL", True)
"""Launch kernels with programmatic dependent launch, so that a kernel's start overlaps the end of the one before."""

LOG: Final = _read(
    "TORCH_CUTE_OPS_LOG", "", lambda text: {"": "", "info": "info", "debug": "debug"}[text], "info or debug"
)
"""Log on standard error what is compiled and loaded (info), and each call before it is launched (debug)."""

BUNDLE: Final = _path("TORCH_CUTE_OPS_BUNDLE", "a folder")
"""A folder of kernels that ``python -m torch_cute_ops build`` made; they are used before any is compiled."""

DSL_RUNTIME: Final = _path("TORCH_CUTE_OPS_DSL_RUNTIME", "a file")
"""The DSL's runtime library, ``libcute_dsl_runtime.so``, which a bundle needs; ``None``: in the bundle, or in the DSL's
package."""

CACHE: Final = _flag("TORCH_CUTE_OPS_CACHE", True)
"""Keep compiled kernels on disk."""

CACHE_DIR: Final = _path("TORCH_CUTE_OPS_CACHE_DIR", "a folder")
"""Where; ``None``: in the user's cache directory, as the system has it."""

CACHE_MB: Final = _read("TORCH_CUTE_OPS_CACHE_MB", 1024, lambda text: int(text, 10), "a whole number")
"""How many megabytes of them; the least recently used go first."""

TUNING: Final = _path("TORCH_CUTE_OPS_TUNING", "a file")
"""Where tuned choices are kept; ``None``: a file in the folder of compiled kernels, if those are kept on disk."""


def cache_folder() -> Path:
    """The folder that is kept on disk: the one that is named, or the system's for this user."""
    from platformdirs import user_cache_path

    return CACHE_DIR or user_cache_path("torch_cute_ops", appauthor=False)
