"""Cache of compiled kernels on disk, shared by processes.

An entry is a folder ``<root>/<digest>`` that contains a shared library, or an object file if no linker was present,
and its description. The digest is the SHA-256 of the cache key. The description contains the cache key, and the
function in the library is named after the digest. A new entry is written under a temporary name and then renamed,
which is atomic on local and on network file systems. An entry never changes afterwards. An entry whose content
contradicts its description or its name is deleted; an unreadable entry stays. In both cases the kernel is compiled
again. If nothing can be written, kernels stay in memory, and each kind of error is logged once.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch_cute_ops.runtime import files, locks, once
from torch_cute_ops.runtime.provenance import text_digest

log = logging.getLogger("torch_cute_ops")

OBJECT: Final = "kernel.o"
LIBRARY: Final = "kernel.so"
DESCRIPTION: Final = "kernel.json"
FORMAT: Final = 2
"""Version of the entries' format. Each version uses its own folder, so that different package versions can coexist."""
PATIENCE_SECONDS: Final = 120.0
"""Longest wait for another process that compiles the same kernel. Compiling takes 0.5 to 5 s on an idle machine."""
OBJECT_BYTES: Final = 2**30
DESCRIPTION_BYTES: Final = 2**20
"""Maximum file sizes in bytes. A ``Store`` writes no larger files, so larger files are refused."""


@dataclass(frozen=True)
class Entry:
    """Description of a stored kernel.

    Attributes:
        symbol: name of the function in the object file.
        size: size of the object file, bytes.
        sha256: SHA-256 of the object file, hexadecimal.
        key: text of the cache key; its digest is the entry's name.
        created: time of creation, seconds since 1970.
    """

    symbol: str
    size: int
    sha256: str
    key: str
    created: float


class Damaged(Exception):
    """Error for an entry whose content contradicts its description or its name."""


def symbol_of(digest: str) -> str:
    """Return the name of a kernel's function in its object file."""
    return f"k{digest[:16]}"


def file_of(folder: Path) -> Path:
    """Return the path of an entry's shared library or object file."""
    library = folder / LIBRARY
    return library if os.path.lexists(library) else folder / OBJECT


class Store:
    """Compiled kernels in one folder.

    Args:
        folder: folder of the cache; created at the first write.
        limit: maximum size of all object files, bytes. The least recently used kernels are deleted first.

    Attributes:
        root: subfolder for entries of this format.
        failure: reason that the last kernel could not be written, or None.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.root = folder / f"v{FORMAT}"
        self.limit = limit
        self.failure: str | None = None

    def load(self, digest: str, load: Callable[[Path, str], Any]) -> Any | None:
        """Load the function of an entry.

        Args:
            digest: name of the entry.
            load: function that loads a symbol from an object file, or raises ``OSError``.

        Returns:
            Result of ``load``, or None if no usable entry exists.
        """
        folder = self.root / digest
        identity = _identity(folder)
        try:
            try:
                function = load(file_of(folder), self.read(digest).symbol)
            except FileNotFoundError:
                raise
            except OSError:  # the disk or network failed, or too many files are open; such errors may be temporary
                time.sleep(files.RETRY_SECONDS)
                function = load(file_of(folder), self.read(digest).symbol)
        except FileNotFoundError:
            return None
        except Damaged as error:
            log.warning("kernel cache: %s is damaged (%s); the kernel is compiled again", folder, error)
            with contextlib.suppress(OSError):
                self._delete(folder, identity)
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

    def read(self, digest: str) -> Entry:
        """Read the description of an entry and check it against the entry's name and object file.

        Raises:
            FileNotFoundError: if the entry does not exist.
            Damaged: if the content contradicts the description or the name.
            OSError: if the entry cannot be read.
        """
        folder = self.root / digest
        try:
            entry, file, content = _content(folder)
        except (FileNotFoundError, NotADirectoryError):
            if not folder.exists():
                raise FileNotFoundError(folder) from None
            # Another process may have stored the whole entry meanwhile. So the entry is damaged only if a file is still
            # missing.
            try:
                entry, file, content = _content(folder)
            except (FileNotFoundError, NotADirectoryError) as error:
                if not folder.exists():
                    raise FileNotFoundError(folder) from None
                raise Damaged(f"{Path(error.filename).name} is missing") from None
        try:
            is_named = text_digest(entry.key) == digest and entry.symbol == symbol_of(digest)
        except ValueError as error:  # the key cannot be encoded
            raise Damaged(str(error)) from None
        if not is_named:
            raise Damaged(f"{DESCRIPTION} describes another kernel")
        if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise Damaged(f"{file.name} does not match {DESCRIPTION}")
        if entry.symbol.encode() not in content:
            raise Damaged(f"{file.name} is another kernel's: it contains no function {entry.symbol}")
        return entry

    def has(self, digest: str) -> bool:
        """Return True if the entry exists. Its content is not checked."""
        try:
            return (self.root / digest / DESCRIPTION).is_file()
        except OSError:
            return False

    def save(self, key: str, export: Callable[[Path, str], None]) -> bool:
        """Store a kernel.

        Args:
            key: text of the cache key.
            export: function (path, name of the kernel's function) that writes an object file to the path, or a shared
                library ``LIBRARY`` to the same folder. The function may raise ``OSError``.

        Returns:
            True if the kernel is stored, by this or by another process.
        """
        digest = text_digest(key)
        symbol = symbol_of(digest)
        work = self.root / "work" / uuid.uuid4().hex
        try:
            files.make_folder(work)
            export(work / OBJECT, symbol)
            file = file_of(work)
            content = files.read(file, OBJECT_BYTES)
            if symbol.encode() not in content:
                raise OSError(f"{file.name} contains no function {symbol}")
            entry = Entry(symbol, len(content), hashlib.sha256(content).hexdigest(), key, time.time())
            files.write(work / DESCRIPTION, json.dumps(asdict(entry), indent=1).encode())
            _flush(file)
            file.chmod(0o644)
            try:
                work.rename(self.root / digest)
            except OSError:
                if not self.has(digest):  # unless another process has stored the kernel meanwhile
                    raise
        except (OSError, files.Unusable) as error:
            self.failure = str(error)
            once.warn(
                ("kernel cache", str(self.root), "write", getattr(error, "errno", None)),
                "kernel cache: cannot write to %s (%s); kernels that cannot be written stay in memory",
                *(self.root, error),
            )
            return False
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.prune()
        return True

    def writing(self, digest: str, patience: float = PATIENCE_SECONDS) -> AbstractContextManager[None]:
        """Hold the lock for compiling ``digest``. If the lock cannot be acquired in ``patience`` seconds, continue
        without it."""
        return locks.one_process(self.root / "locks" / f"{digest}.lock", patience)

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Yield the digest and the folder of each entry.

        Raises:
            OSError: if the root exists but cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder in sorted(self.root.iterdir()):
                if re.fullmatch("[0-9a-f]{64}", folder.name):
                    yield folder.name, folder

    def used(self) -> list[tuple[float, int, Path]]:
        """Return the time of last use, the size in bytes and the folder of each entry, least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for _, folder in self.entries():
                with contextlib.suppress(OSError):
                    found.append(((folder / DESCRIPTION).stat().st_mtime, file_of(folder).stat().st_size, folder))
        return sorted(found)

    def prune(self) -> None:
        """Delete the least recently used entries beyond the size limit, old lock files, and files that killed processes
        left."""
        used = self.used()
        total = sum(size for _, size, _ in used)
        for _, size, folder in used[:-1]:
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):
                self._delete(folder)
            total -= size
        for parent in (self.root / "work", self.root / "locks"):
            with contextlib.suppress(OSError):
                for left in parent.iterdir():
                    with contextlib.suppress(OSError):
                        if files.is_stale(left):
                            _remove(left)

    def clear(self) -> tuple[int, list[OSError]]:
        """Delete all entries.

        Returns:
            Number of deleted entries, and the errors of entries that could not be deleted.

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
        return len(folders) - len(errors), errors

    def _delete(self, folder: Path, identity: tuple[int, int] | None = None) -> None:
        """Delete an entry. The entry is renamed first, so that no process finds a half-deleted entry.

        With ``identity``, only the entry with this identity is deleted. If another entry has replaced this entry
        meanwhile, the other entry is put back: another process has deleted the damaged entry, and compiled the kernel
        again.

        Raises:
            OSError: if the entry cannot be renamed or deleted.
        """
        doomed = self.root / "work" / uuid.uuid4().hex
        files.make_folder(doomed.parent)
        with contextlib.suppress(FileNotFoundError):  # another process has already deleted the entry
            folder.rename(doomed)
            if identity is not None and _identity(doomed) != identity:
                with contextlib.suppress(OSError):  # a third process has stored the kernel meanwhile
                    doomed.rename(folder)
                    return
            _remove(doomed)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return numbers that identify an entry even after the entry is renamed, or None if the entry does not exist.
    Another entry that gets the same name has other numbers."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _content(folder: Path) -> tuple[Entry, Path, bytes]:
    """Return the description, and the path and content of the library or object file, of an entry.

    Raises:
        Damaged: if ``_entry`` refuses the description, or a file is not regular or too large.
        OSError: if a file is missing or cannot be read.
    """
    try:
        entry, file = _entry(files.read(folder / DESCRIPTION, DESCRIPTION_BYTES)), file_of(folder)
        return entry, file, files.read(file, OBJECT_BYTES)
    except ValueError as error:
        raise Damaged(str(error)) from None


def _entry(content: bytes) -> Entry:
    """Parse a description.

    Raises:
        Damaged: if ``content`` is not a description.
    """
    try:
        entry = Entry(**files.parse_json(content))
    except (TypeError, ValueError) as error:
        raise Damaged(f"{DESCRIPTION}: {error}") from None
    texts = (entry.symbol, entry.sha256, entry.key)
    is_number = type(entry.size) is int and type(entry.created) in (int, float) and 0 <= entry.created < 1e11
    if not all(isinstance(text, str) for text in texts) or not is_number:
        raise Damaged(f"{DESCRIPTION} contains values of wrong types")
    return entry


def _remove(path: Path) -> None:
    """Delete a folder with its content, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush(path: Path) -> None:
    """Flush a file to disk, which must happen before its folder is renamed to its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
