"""Read and write files in folders that several processes use."""

import contextlib
import errno
import json
import os
import stat
import time
import uuid
from pathlib import Path
from typing import Any, Final

STALE_SECONDS: Final = 3600.0
"""Age at which temporary files count as abandoned."""
RETRY_SECONDS: Final = 0.05
"""Pause before a failed read is repeated."""


class Unusable(ValueError):
    """Error for a path that is not a regular file, or whose content is not as expected."""


def read(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        Unusable: for a FIFO, device, socket or folder, without waiting for a writer; and for a larger file.
        OSError: if the file cannot be opened or read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # the path is a socket, or a device without a driver
            raise Unusable(f"{path} is not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(f"{path} is not a regular file")
        if status.st_size > limit:
            raise Unusable(f"{path} is too large: {status.st_size:,} bytes; the limit is {limit:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_again(path: Path, limit: int) -> bytes:
    """Read a file as ``read`` does, and retry once after an error: errors of a disk or a network may be temporary."""
    try:
        return read(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError:
        time.sleep(RETRY_SECONDS)
        return read(path, limit)


def parse_json(content: bytes) -> Any:
    """Parse JSON text.

    Raises:
        Unusable: if the text is not JSON, is nested too deeply, or contains NaN or infinity.
    """
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise Unusable("JSON nested too deeply") from None
    except ValueError as error:
        raise Unusable(f"not JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, writable only by their owner, whatever the umask is.

    Raises:
        OSError: if a folder cannot be created.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file with these permissions, and wait until its content is on disk.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def replace(path: Path, content: bytes, mode: int = 0o644, *, follow_links: bool = True) -> None:
    """Create or replace a file atomically: readers find either the old or the new content.

    Args:
        path: file.
        content: new content.
        mode: permissions of the new file.
        follow_links: if ``path`` is a symbolic link, True to replace its target and keep the link, False to replace the
            link itself.

    Raises:
        OSError: if the file cannot be written; the old file stays.
    """
    target = Path(os.path.realpath(path)) if follow_links else path
    for left in target.parent.glob(f"{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if is_stale(left):
                left.unlink()
    work = target.with_name(f"{target.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        write(work, content, mode)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def is_stale(path: Path) -> bool:
    """Return True if a file or folder was last modified long ago, or has a modification date so far in the future that
    no clock error explains it.

    Raises:
        OSError: if the path does not exist.
    """
    return abs(time.time() - path.lstat().st_mtime) > STALE_SECONDS
