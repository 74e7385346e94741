"""Settings of the package. Each setting is read from its environment variable once, when the package is imported."""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from torch_cute_ops.runtime import once

T = TypeVar("T")

_known: dict[str, tuple[Any, str]] = {}


def described() -> list[dict[str, str]]:
    """Return each setting's environment variable, value and source (``"default"`` or ``"environment"``)."""
    return [{"variable": name, "value": str(value), "source": source} for name, (value, source) in _known.items()]


def _read(name: str, default: T, parse: Callable[[str], T], expected: str) -> T:
    text = os.environ.get(name)
    if text is None:
        value = default
    else:
        try:
            value = parse(text)
        except (ValueError, KeyError):
            message = f"{name}={text!r}; use {expected}"
            if _is_command():
                print(f"error: {message}", file=sys.stderr)
                raise SystemExit(2) from None
            raise ValueError(message) from None
    _known[name] = (value, "default" if text is None else "environment")
    return value


def _is_command() -> bool:
    """Return True if ``python -m torch_cute_ops`` is starting. This command imports the package before it can catch
    errors."""
    # While Python looks up a module, ``sys.argv`` contains "-m" instead of the module's name.
    return sys.argv[:1] == ["-m"] and ["-m", "torch_cute_ops"] in map(list, itertools.pairwise(sys.orig_argv))


def _flag(name: str, default: bool) -> bool:
    return _read(name, default, lambda text: {"0": False, "1": True}[text], "0 or 1")


def _path(name: str, expected: str) -> Path | None:
    return _read(name, None, _expanded, f"{expected}; a ~ stands for a home folder that exists")


def _expanded(text: str) -> Path | None:
    if not text:
        return None
    head, *rest = Path(text).parts
    if not head.startswith("~"):
        return Path(text)
    home = Path(os.path.expanduser(head))
    if not home.is_absolute() or not home.is_dir():
        raise ValueError
    return home.joinpath(*rest)


def _megabytes(text: str) -> int:
    if (number := int(text, 10)) < 0:
        raise ValueError
    return number


PDL: Final = _flag("TORCH_CUTE_OPS_PDL", True)
"""Launch kernels with programmatic dependent launch, so that a kernel's start overlaps the previous kernel's end."""

LOG: Final = _read(
    "TORCH_CUTE_OPS_LOG", "", lambda text: {"": "", "info": "info", "debug": "debug"}[text], "info or debug"
)
"""Log to standard error: compiled and loaded kernels (info), and each call before it is launched (debug)."""

CHECK: Final = _flag("TORCH_CUTE_OPS_CHECK", False)
"""Check each call: values of indices, offsets and global scales, and four rows of each result against the reference.
Calls synchronise and cannot be captured."""

DUMP: Final = _path("TORCH_CUTE_OPS_DUMP", "a folder")
"""Folder in which each op keeps its last call, for problem reports. The files contain the user's data. Calls
synchronise."""

DUMP_MB: Final = _read("TORCH_CUTE_OPS_DUMP_MB", 256, _megabytes, "a whole number, 0 or more")
"""Maximum size of a call's tensors in a dump, MB. If a call's tensors are larger, the dump describes the largest
tensors without their contents."""

BUNDLE: Final = _path("TORCH_CUTE_OPS_BUNDLE", "a folder")
"""Folder of a bundle made by ``python -m torch_cute_ops build``; the bundle takes precedence over the cache and the
compiler."""

DSL_RUNTIME: Final = _path("TORCH_CUTE_OPS_DSL_RUNTIME", "a file")
"""Path of the DSL's runtime library, ``libcute_dsl_runtime.so``, which a bundle needs. None: use the library in the
bundle or in the DSL's package, which must be the library that the bundle was built with."""

CACHE: Final = _flag("TORCH_CUTE_OPS_CACHE", True)
"""Keep compiled kernels on disk."""

CACHE_DIR: Final = _path("TORCH_CUTE_OPS_CACHE_DIR", "a folder")
"""Folder of the cache, or None for ``cache_folder``'s default."""

CACHE_MB: Final = _read("TORCH_CUTE_OPS_CACHE_MB", 1024, _megabytes, "a whole number, 0 or more")
"""Maximum size of the cache, MB. The least recently used kernels are deleted first."""

TUNING: Final = _path("TORCH_CUTE_OPS_TUNING", "a file")
"""File of tuned choices. None: use a file in the cache folder, if kernels are kept on disk."""

VLLM: Final = _read(
    "TORCH_CUTE_OPS_VLLM",
    "",
    lambda text: {"": "", "auto": "auto", "fp4": "fp4", "fp8": "fp8"}[text],
    "auto, fp4 or fp8",
)
"""Serve every supported checkpoint of vLLM with ``--quantization torch_cute_ops`` (auto), ``torch_cute_ops_fp4`` or
``torch_cute_ops_fp8``, unless the user names a method."""


def cache_folder() -> Path | None:
    """Return the configured cache folder, or else the user's cache folder. Without a home folder, warn and return
    None."""
    return CACHE_DIR or _user_cache_folder()


@functools.cache
def _user_cache_folder() -> Path | None:
    """Return ``torch_cute_ops`` in ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.path.expanduser("~"))
    if named.is_absolute():
        return named / "torch_cute_ops"
    if home.is_absolute():
        return home / ".cache" / "torch_cute_ops"
    once.warn(
        "no home",
        "this process has no home folder: compiled kernels and tuned choices stay in memory; set "
        "TORCH_CUTE_OPS_CACHE_DIR to a folder that it can write to",
    )
    return None
