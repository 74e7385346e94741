"""Compiled kernels on disk, shared by processes.

A kernel is a folder ``<root>/<digest>`` with an object file and its description; the digest is that of the cache key.
Folders appear whole, by renaming, which is atomic on local and on network file systems, and are never changed. What
cannot be read, or does not match its description, is put aside and compiled again. Where nothing can be written,
kernels stay in memory, and one warning says so.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_cute_ops.runtime.locks import one_process

log = logging.getLogger("torch_cute_ops")

OBJECT = "kernel.o"
DESCRIPTION = "kernel.json"
FORMAT = 1
"""Of the folders; another number is another place, so that packages of different age do not meet."""
STALE_SECONDS = 3600
"""Age from which what a writer has left behind is taken to be abandoned."""


@dataclass(frozen=True)
class Entry:
    """A stored kernel, as its description says.

    Attributes:
        symbol: the function's name in the object file.
        size: bytes of the object file.
        sha256: of the object file.
        key: what it was compiled from, for people.
        created: seconds since 1970.
    """

    symbol: str
    size: int
    sha256: str
    key: str
    created: float


class Damaged(Exception):
    """An entry that is not what its description says."""


class Store:
    """The kernels under one folder.

    Args:
        root: the folder; made when something is written.
        limit: bytes that objects may take; the least recently used go first.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root / f"v{FORMAT}"
        self.limit = limit
        self._writes = True

    def load(self, digest: str, load: Callable[[Path, str], Any]) -> Any | None:
        """What ``load`` makes of the object file and symbol of ``digest``; ``None`` if there is none that is whole."""
        folder = self.root / digest
        try:
            entry = self.read(digest)
            function = load(folder / OBJECT, entry.symbol)
        except FileNotFoundError:
            return None
        except (Damaged, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            log.warning("kernel cache: %s cannot be used (%s); it is put aside and compiled again", folder, error)
            self.put_aside(digest)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder / DESCRIPTION)
        return function

    def read(self, digest: str) -> Entry:
        """The description of ``digest``, checked against its object file.

        Raises:
            FileNotFoundError: if there is no such entry.
            Damaged: if it is not whole.
        """
        folder = self.root / digest
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        try:
            entry = Entry(**json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
            content = (folder / OBJECT).read_bytes()
        except (FileNotFoundError, ValueError, TypeError) as error:
            if not folder.is_dir():
                # Pruned, or put aside, while it was read.
                raise FileNotFoundError(folder) from None
            raise Damaged(f"{type(error).__name__}: {error}") from None
        if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise Damaged("the object file does not match its description")
        return entry

    def has(self, digest: str) -> bool:
        """Whether there is such an entry; not whether it is whole."""
        return (self.root / digest / DESCRIPTION).is_file()

    def save(self, digest: str, key: str, symbol: str, export: Callable[[Path], None]) -> bool:
        """Store what ``export`` writes to a path; whether that worked."""
        if not self._writes:
            return False
        work = self.root / "work" / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            work.mkdir(parents=True)
            export(work / OBJECT)
            content = (work / OBJECT).read_bytes()
            entry = Entry(symbol, len(content), hashlib.sha256(content).hexdigest(), key, time.time())
            (work / DESCRIPTION).write_text(json.dumps(asdict(entry), indent=1), encoding="utf-8")
            for name in (OBJECT, DESCRIPTION):
                _flush(work / name)
            try:
                work.rename(self.root / digest)
            except OSError:
                if not (self.root / digest).is_dir():
                    raise
            self.prune()
        except OSError as error:
            self._writes = False
            log.warning(
                "kernel cache: cannot write to %s (%s); kernels of this process stay in memory", self.root, error
            )
            return False
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return True

    def writing(self, digest: str, patience: float = 600.0) -> AbstractContextManager[None]:
        """One process at a time compiles ``digest``; where locks do not work, or the other one hangs, all may."""
        return one_process(self.root / "locks" / f"{digest}.lock", patience)

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Digest and folder of each stored kernel."""
        with contextlib.suppress(OSError):
            for folder in sorted(self.root.iterdir()):
                if len(folder.name) == 64:
                    yield folder.name, folder

    def used(self) -> list[tuple[float, int, Path]]:
        """When each kernel was last used, its bytes, its folder; the least recently used first."""
        found = []
        for _, folder in self.entries():
            with contextlib.suppress(OSError):
                found.append(((folder / DESCRIPTION).stat().st_mtime, (folder / OBJECT).stat().st_size, folder))
        return sorted(found)

    def put_aside(self, digest: str) -> None:
        """Take an entry out of use, keeping it for whoever wants to know why."""
        with contextlib.suppress(OSError):
            aside = self.root / "aside"
            aside.mkdir(exist_ok=True)
            target = aside / f"{digest}-{uuid.uuid4().hex[:8]}"
            (self.root / digest).rename(target)
            os.utime(target)  # its age there counts

    def prune(self) -> None:
        """Delete the least recently used kernels beyond the limit, and what dead writers have left."""
        used = self.used()
        total = sum(size for _, size, _ in used)
        for _, size, folder in used[:-1]:
            if total <= self.limit:
                break
            self._delete(folder)
            total -= size
        for parent in (self.root / "work", self.root / "aside"):
            with contextlib.suppress(OSError):
                for folder in parent.iterdir():
                    if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> int:
        """Delete every kernel; how many there were."""
        folders = [folder for _, folder in self.entries()]
        for folder in folders:
            self._delete(folder)
        shutil.rmtree(self.root / "aside", ignore_errors=True)
        return len(folders)

    def _delete(self, folder: Path) -> None:
        """Out of sight first, so that nobody finds half of it."""
        doomed = self.root / "work" / f"doomed-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            doomed.parent.mkdir(exist_ok=True)
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the file on disk before its name is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
