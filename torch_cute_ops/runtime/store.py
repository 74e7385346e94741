"""Compiled kernels on disk, shared by processes.

A kernel is a folder ``<root>/<digest>`` with an object file and its description; the digest is that of the cache key,
which the description holds, and the object file's function is named after it. Folders appear whole, by renaming, which
is atomic on local and on network file systems, and are never changed. An entry whose content contradicts its
description or its name is put aside; one that merely cannot be read is left alone. Either way the kernel is compiled
again. Where nothing can be written, kernels stay in memory, and one warning for each kind of error says so.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_cute_ops.runtime import files, locks, once
from torch_cute_ops.runtime.provenance import text_digest

log = logging.getLogger("torch_cute_ops")

OBJECT = "kernel.o"
DESCRIPTION = "kernel.json"
FORMAT = 1
"""Version of the folders' format; each version has a place of its own, so that packages of different age do not
meet."""
PATIENCE_SECONDS = 120.0
"""How long to wait for another process that compiles the same kernel: on an idle machine that takes 0.5 to 5 s."""
OBJECT_BYTES = 2**30
DESCRIPTION_BYTES = 2**20
"""Larger files are not ours."""


@dataclass(frozen=True)
class Entry:
    """A stored kernel, as its description says.

    Attributes:
        symbol: the function's name in the object file.
        size: of the object file, bytes.
        sha256: of the object file, hexadecimal.
        key: text of the cache key, whose digest names the entry.
        created: seconds since 1970.
    """

    symbol: str
    size: int
    sha256: str
    key: str
    created: float


class Damaged(Exception):
    """An entry whose content contradicts its description or its name."""


def symbol_of(digest: str) -> str:
    """The name of a kernel's function in its object file."""
    return f"k{digest[:16]}"


class Store:
    """The kernels under one folder.

    Args:
        folder: where they are; made when something is written.
        limit: bytes that objects may take; the least recently used go first.

    Attributes:
        root: the part of the folder for entries of this format.
        failure: why the last kernel could not be written; ``None`` if all could.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.root = folder / f"v{FORMAT}"
        self.limit = limit
        self.failure: str | None = None

    def load(self, digest: str, load: Callable[[Path, str], Any]) -> Any | None:
        """What ``load`` makes of the object file and symbol of ``digest``.

        Args:
            digest: names the entry.
            load: raises ``OSError`` if it cannot load the function.

        Returns:
            ``None`` if there is no such entry, or none that can be used.
        """
        folder = self.root / digest
        try:
            try:
                function = self._load(digest, load)
            except FileNotFoundError:
                raise
            except OSError:  # of a disk or a network, or of too many open files: it may pass
                time.sleep(files.RETRY_SECONDS)
                function = self._load(digest, load)
        except FileNotFoundError:
            return None
        except Damaged as error:
            aside = self.put_aside(digest)
            log.warning(
                "kernel cache: %s is damaged (%s); the kernel is compiled again%s",
                *(folder, error, f", and the entry is put aside in {aside}" if aside else ""),
            )
            return None
        except OSError as error:
            once.warn(
                ("kernel cache", str(self.root), "read", error.errno),
                "kernel cache: %s cannot be read or loaded (%s); the kernel is compiled again, and the entry stays",
                *(folder, error),
            )
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / DESCRIPTION)
        return function

    def _load(self, digest: str, load: Callable[[Path, str], Any]) -> Any:
        folder = self.root / digest
        entry = self.read(digest)
        self.warn_of_writers(folder, folder / OBJECT, folder / DESCRIPTION)
        return load(folder / OBJECT, entry.symbol)

    def read(self, digest: str) -> Entry:
        """The description of ``digest``, checked against its name and its object file.

        Raises:
            FileNotFoundError: if there is no such entry.
            Damaged: if its content contradicts its description or its name.
            OSError: if it cannot be read.
        """
        folder = self.root / digest
        try:
            status = folder.stat()
        except NotADirectoryError:  # above the folder
            raise FileNotFoundError(folder) from None
        try:
            return self._checked(digest, folder, status)
        except Damaged:
            # Of two entries, one deleted and one stored meanwhile, a reader may have seen a part each.
            if not _is_still(folder, status):
                raise FileNotFoundError(folder) from None
            raise

    def _checked(self, digest: str, folder: Path, status: os.stat_result) -> Entry:
        try:
            if not stat.S_ISDIR(status.st_mode):
                raise Damaged(f"{folder.name} is not a folder")
            entry = _entry(files.read(folder / DESCRIPTION, DESCRIPTION_BYTES))
            if text_digest(entry.key) != digest or entry.symbol != symbol_of(digest):
                raise Damaged(f"{DESCRIPTION} is of another kernel")
            content = files.read(folder / OBJECT, OBJECT_BYTES)
        except ValueError as error:
            raise Damaged(str(error)) from None
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Damaged(f"{Path(error.filename).name} is missing") from None
        if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise Damaged(f"{OBJECT} does not match {DESCRIPTION}")
        if entry.symbol.encode() not in content:
            raise Damaged(f"{OBJECT} is of another kernel: it has no function {entry.symbol}")
        return entry

    def has(self, digest: str) -> bool:
        """Whether there is such an entry; not whether it is whole."""
        try:
            return (self.root / digest / DESCRIPTION).is_file()
        except OSError:
            return False

    def save(self, key: str, export: Callable[[Path, str], None]) -> bool:
        """Store what ``export`` writes to a path, with a function of the given name; whether that worked.

        Args:
            key: text of the cache key.
            export: raises ``OSError`` if it cannot write.
        """
        digest = text_digest(key)
        symbol = symbol_of(digest)
        work = self.root / "work" / f"{_writer(os.getpid())}-{uuid.uuid4().hex}"
        try:
            files.make_folder(work)
            export(work / OBJECT, symbol)
            content = files.read(work / OBJECT, OBJECT_BYTES)
            if symbol.encode() not in content:
                raise OSError(f"the object file has no function {symbol}")
            entry = Entry(symbol, len(content), hashlib.sha256(content).hexdigest(), key, time.time())
            files.write(work / DESCRIPTION, json.dumps(asdict(entry), indent=1).encode())
            _flush(work / OBJECT)
            (work / OBJECT).chmod(0o644)
            try:
                work.rename(self.root / digest)
            except OSError:
                if not self.has(digest):  # another process was faster
                    raise
        except (OSError, files.Unusable) as error:
            self.failure = str(error)
            once.warn(
                ("kernel cache", str(self.root), "write", getattr(error, "errno", None)),
                "kernel cache: cannot write to %s (%s); what cannot be written stays in memory",
                *(self.root, error),
            )
            return False
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.prune()
        return True

    def writing(self, digest: str, patience: float = PATIENCE_SECONDS) -> AbstractContextManager[None]:
        """One process at a time compiles ``digest``; where there are no locks, or the other one hangs, all may."""
        return locks.one_process(self.root / "locks" / f"{digest}.lock", patience)

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Digest and folder of each stored kernel.

        Raises:
            OSError: if there is a folder that cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder in sorted(self.root.iterdir()):
                if re.fullmatch("[0-9a-f]{64}", folder.name):
                    yield folder.name, folder

    def used(self) -> list[tuple[float, int, Path]]:
        """When each kernel was last used, its bytes, its folder; the least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for _, folder in self.entries():
                with contextlib.suppress(OSError):
                    found.append(((folder / DESCRIPTION).stat().st_mtime, (folder / OBJECT).stat().st_size, folder))
        return sorted(found)

    def put_aside(self, digest: str) -> Path | None:
        """Take an entry out of use, and keep it for whoever wants to know why; where it is now, if that worked."""
        target = self.root / "aside" / f"{digest}-{uuid.uuid4().hex[:8]}"
        try:
            files.make_folder(target.parent)
            (self.root / digest).rename(target)
            os.utime(target)  # its age there counts
        except OSError:
            return None
        return target

    def prune(self) -> None:
        """Delete the least recently used kernels beyond the limit, and what writers that died have left."""
        used = self.used()
        total = sum(size for _, size, _ in used)
        for _, size, folder in used[:-1]:
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):
                self._delete(folder)
            total -= size
        for parent in (self.root / "work", self.root / "aside"):
            with contextlib.suppress(OSError):
                for left in parent.iterdir():
                    with contextlib.suppress(OSError):
                        if files.is_stale(left):
                            _remove(left)
        locks.sweep(self.root / "locks")

    def sweep_after(self, processes: Iterable[int]) -> None:
        """Delete what processes of this machine, which have ended, have left half-written.

        Args:
            processes: their ids.
        """
        names = tuple(f"{_writer(process)}-" for process in processes)
        with contextlib.suppress(OSError):
            for folder in (self.root / "work").iterdir():
                if folder.name.startswith(names):
                    shutil.rmtree(folder, ignore_errors=True)
        locks.sweep(self.root / "locks")

    def clear(self) -> tuple[int, list[OSError]]:
        """Delete every kernel; how many there were that could be deleted, and why others could not.

        Raises:
            OSError: if the folder cannot be read.
        """
        errors = []
        folders = [folder for _, folder in self.entries()]
        for folder in folders:
            try:
                self._delete(folder)
            except OSError as error:
                errors.append(error)
        shutil.rmtree(self.root / "aside", ignore_errors=True)
        locks.sweep(self.root / "locks")
        return len(folders) - len(errors), errors

    def _delete(self, folder: Path) -> None:
        """Delete an entry: out of sight first, so that nobody finds half of it.

        Raises:
            OSError: if that does not work.
        """
        doomed = self.root / "work" / f"doomed-{uuid.uuid4().hex}"
        files.make_folder(doomed.parent)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rename(doomed)
            _remove(doomed)

    def warn_of_writers(self, *paths: Path) -> None:
        """Warn, once, if other users can write to the cache, or to these parts of it."""
        files.warn_of_writers(
            "kernel cache",
            (self.root.parent, self.root, *paths),
            "set TORCH_CUTE_OPS_CACHE_DIR to a folder of your own",
        )


def _entry(content: bytes) -> Entry:
    """A description.

    Raises:
        Damaged: if it is none.
    """
    try:
        entry = Entry(**files.parse_json(content))
    except (TypeError, ValueError) as error:
        raise Damaged(f"{DESCRIPTION}: {error}") from None
    texts = (entry.symbol, entry.sha256, entry.key)
    is_number = type(entry.size) is int and type(entry.created) in (int, float) and 0 <= entry.created < 1e11
    if not all(isinstance(text, str) for text in texts) or not is_number:
        raise Damaged(f"{DESCRIPTION} has values of wrong types")
    return entry


def _is_still(folder: Path, status: os.stat_result) -> bool:
    """Whether a folder is there, and the one of which this was the status."""
    try:
        return os.path.samestat(folder.stat(), status)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _writer(process: int) -> str:
    """A process's mark on what it writes: ids are unique on one machine."""
    return f"{re.sub('[^0-9A-Za-z.]', '_', platform.node())[:64]}-{process}"


def _remove(path: Path) -> None:
    """Delete a folder with what is in it, or whatever else is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush(path: Path) -> None:
    """Have the file on disk before its name is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
