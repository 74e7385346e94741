"""SHA-256 digests of source files and of cache keys. A digest of sources ties a stored kernel, or a recorded GPU run,
to the code that produced it."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def source_digest(root: Path | None = None) -> str:
    """Return the SHA-256 of the names and contents of the Python files below ``root`` (default: this package)."""
    root = root or ROOT
    return _digest(root.rglob("*.py"), root)


@functools.cache
def kernel_digest() -> str:
    """Return the SHA-256 of the names and contents of the files that kernels are made from."""
    folders = ("formats", "kernels")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return _digest([*files, *(ROOT / "runtime" / name for name in ("argspec.py", "compiler.py"))], ROOT)


def _digest(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
