"""Reading and writing files in folders that other processes, and perhaps other users, use too."""

import contextlib
import errno
import json
import os
import pwd
import stat
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_cute_ops.runtime import once

STALE_SECONDS = 3600.0
"""Age at which what a writer left behind counts as abandoned."""
RETRY_SECONDS = 0.05
"""Pause before what failed is read once more."""


class Unusable(ValueError):
    """Something that is not a file with the content that is expected there."""


def read(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        Unusable: for a FIFO, device, socket or folder, without waiting for whoever is at its other end; and for a file
            that is larger.
        OSError: if the file cannot be opened or read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
            raise Unusable(f"{path} is not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable(f"{path} is not a regular file")
        if status.st_size > limit:
            raise Unusable(f"{path} has {status.st_size:,} bytes, more than the {limit:,} that it may have")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def read_again(path: Path, limit: int) -> bytes:
    """As ``read``, once more after an error that may pass: of a disk or a network, or of too many open files."""
    try:
        return read(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError:
        time.sleep(RETRY_SECONDS)
        return read(path, limit)


def parse_json(content: bytes) -> Any:
    """The value that JSON text stands for.

    Raises:
        Unusable: if it is not JSON, is nested too deeply, or has numbers that JSON does not know.
    """
    try:
        return json.loads(content, parse_constant=_refuse)
    except RecursionError:
        raise Unusable("JSON that is nested too deeply") from None
    except ValueError as error:
        raise Unusable(f"not JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, writable by nobody else whatever the umask is.

    Raises:
        OSError: if that does not work.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)


def write(path: Path, content: bytes) -> None:
    """Write a new file, and have its content on disk before this returns.

    Raises:
        OSError: if that does not work.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Put a file in the place of another, or of none: readers find the old content or the new.

    Where ``path`` is a symbolic link, the file that it leads to is replaced, and the link stays.

    Raises:
        OSError: if that does not work; the old file is still there.
    """
    target = Path(os.path.realpath(path))
    for left in target.parent.glob(f"{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if is_stale(left):
                left.unlink()
    work = target.with_name(f"{target.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        write(work, content)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def is_stale(path: Path) -> bool:
    """Whether a file or folder was left behind by a writer: it is old, or from a future that no clock's error explains.

    Raises:
        OSError: if it is not there.
    """
    return abs(time.time() - path.lstat().st_mtime) > STALE_SECONDS


def warn_of_writers(what: str, paths: Sequence[Path], remedy: str) -> bool:
    """Warn, once for each first path, if other users can write to what this process loads code from.

    Root may, and so may this process's user; a folder that others may write to counts as safe where its sticky bit
    keeps them from replacing what belongs to others. What does not exist is passed over.

    Args:
        what: what is loaded from there, as a message begins.
        paths: a folder, then folders and files in it.
        remedy: what to do besides changing owner or mode, as a message ends.

    Returns:
        Whether others can write.
    """
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        user = os.geteuid()
        if status.st_uid not in (0, user):
            why, mend = f"belongs to {_user(status.st_uid)}", f"chown -R {user} '{path}'"
        elif status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            why, mend = "can be written by other users", f"chmod -R go-w '{path}'"
        else:
            continue
        once.warn(
            ("writers", str(paths[0])),
            "%s: %s %s, who can have any code run in this process; if you do not trust them, check what is there and "
            "run `%s`, or %s",
            *(what, path, why, mend, remedy),
        )
        return True
    return False


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
