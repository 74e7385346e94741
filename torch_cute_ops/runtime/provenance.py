"""A digest of the package's sources, which ties a recorded GPU run to the code that ran."""

import hashlib
from pathlib import Path


def source_digest() -> str:
    """SHA-256 over the names and contents of the package's Python files, hexadecimal."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
