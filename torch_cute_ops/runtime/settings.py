"""Settings of the package, each from one environment variable, read once at import."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from torch_cute_ops.runtime import once

T = TypeVar("T")

_known: dict[str, tuple[Any, str]] = {}


def described() -> list[dict[str, str]]:
    """Each variable, its value, and where the value comes from."""
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
"""Launch kernels with programmatic dependent launch, so that a kernel's start overlaps the end of the previous one."""

LOG: Final = _read(
    "TORCH_CUTE_OPS_LOG", "", lambda text: {"": "", "info": "info", "debug": "debug"}[text], "info or debug"
)
"""Log on standard error what is compiled and loaded (info), and each call before it is launched (debug)."""

BUNDLE: Final = _path("TORCH_CUTE_OPS_BUNDLE", "a folder")
"""A folder of kernels that ``python -m torch_cute_ops build`` made; they come before the cache and the compiler."""

DSL_RUNTIME: Final = _path("TORCH_CUTE_OPS_DSL_RUNTIME", "a file")
"""The DSL's runtime library, ``libcute_dsl_runtime.so``, which a bundle needs; ``None``: the one in the bundle, or in
the DSL's package, which then must be the one that the bundle was built with."""

CACHE: Final = _flag("TORCH_CUTE_OPS_CACHE", True)
"""Keep compiled kernels on disk."""

CACHE_DIR: Final = _path("TORCH_CUTE_OPS_CACHE_DIR", "a folder")
"""Where; ``None``: see ``cache_folder``."""

CACHE_MB: Final = _read("TORCH_CUTE_OPS_CACHE_MB", 1024, _megabytes, "a whole number, 0 or more")
"""How many megabytes of them; the least recently used go first."""

TUNING: Final = _path("TORCH_CUTE_OPS_TUNING", "a file")
"""The file of tuned choices; ``None``: one in the folder of compiled kernels, if those are kept on disk."""


def cache_folder() -> Path | None:
    """The folder that is kept on disk: the one that is named, or this user's; ``None``, after a warning, where the
    process has no home folder."""
    return CACHE_DIR or _user_cache_folder()


@functools.cache
def _user_cache_folder() -> Path | None:
    """``torch_cute_ops`` in ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification)."""
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
