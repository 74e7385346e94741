"""Tuned choices on disk: one JSON file, which processes share.

It is replaced as a whole, by renaming, so that whoever reads finds the old or the new one; a writer merges with what is
there, under a lock beside the file. A file that is not of this format is ignored and left as it is.
"""

import contextlib
import json
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch_cute_ops.runtime.locks import one_process

log = logging.getLogger("torch_cute_ops")

FORMAT = 1
LIMIT = 10_000
"""Records that a file keeps; the oldest go first. A record has some 700 bytes."""
LOCK_SECONDS = 30.0
STALE_SECONDS = 3600
"""Age from which what a writer has left behind is taken to be abandoned."""


class Candidate(NamedTuple):
    """One way to compute: a backend's name and one of its tactics."""

    backend: str
    tactic: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.backend} {list(self.tactic)}"


@dataclass(frozen=True)
class Key:
    """What a choice is for.

    Attributes:
        family: of ops that choose among the same candidates.
        static: all that is static about the calls, as canonical JSON.
        bucket: the number of rows that stands for the calls'.
        device: name of the GPU.
        versions: of what computes and compiles, as canonical JSON.
    """

    family: str
    static: str
    bucket: int
    device: str
    versions: str


class Tuned(NamedTuple):
    """A choice, and the seconds that a call of it took; ``None``: it was the only one left."""

    candidate: Candidate
    seconds: float | None


def canonical(value: Any) -> str:
    """JSON of ``value``, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class TuningFile:
    """The choices in a file, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._usable = True

    def read(self) -> dict[Key, Tuned]:
        """Every choice, for all devices and versions, the oldest first; none where the file cannot be used, and one
        warning says so."""
        try:
            return _parse(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._give_up(f"is no tuning file ({type(error).__name__}: {error}); it is ignored and left as it is")
            return {}

    def add(self, key: Key, tuned: Tuned) -> bool:
        """Write a choice beside those that are there, or in place of an earlier one; whether that worked."""
        if not self._usable:
            return False
        with one_process(self.path.with_name(f"{self.path.name}.lock"), LOCK_SECONDS):
            choices = self.read()
            if not self._usable:
                return False
            choices.pop(key, None)
            choices[key] = tuned
            try:
                self._replace(_format(dict(list(choices.items())[-LIMIT:])))
            except OSError as error:
                self._give_up(f"cannot be written ({error})")
                return False
        return True

    def _give_up(self, why: str) -> None:
        if self._usable:
            log.warning("tuning: %s %s; choices of this process stay in memory", self.path, why)
        self._usable = False

    def _replace(self, content: str) -> None:
        for left in self.path.parent.glob(f"{self.path.name}.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
        work = self.path.with_name(f"{self.path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
        try:
            with work.open("w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            work.replace(self.path)
        finally:
            work.unlink(missing_ok=True)


def _format(choices: dict[Key, Tuned]) -> str:
    records = [
        {
            "device": key.device,
            "family": key.family,
            "static": json.loads(key.static),
            "bucket": key.bucket,
            "backend": tuned.candidate.backend,
            "tactic": tuned.candidate.tactic,
            "seconds": tuned.seconds,
            "versions": json.loads(key.versions),
        }
        for key, tuned in choices.items()
    ]
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"torch_cute_ops tuning": {FORMAT}, "choices": [\n{lines}\n]}}\n'


def _parse(content: bytes) -> dict[Key, Tuned]:
    """The choices; ``ValueError``, ``TypeError`` or ``KeyError`` for anything that was not written by ``_format``."""
    whole = json.loads(content)
    if whole["torch_cute_ops tuning"] != FORMAT:
        raise ValueError(f"format {whole['torch_cute_ops tuning']!r}; expected {FORMAT}")
    return dict(map(_entry, whole["choices"]))


def _entry(record: dict[str, Any]) -> tuple[Key, Tuned]:
    texts = [record[name] for name in ("device", "family", "backend")]
    bucket, tactic, seconds = record["bucket"], record["tactic"], record["seconds"]
    if not all(isinstance(text, str) for text in texts) or type(bucket) is not int:
        raise TypeError(f"a choice with {texts} and bucket {bucket!r}")
    if type(tactic) is not list or not all(type(part) in (int, str) for part in tactic):
        raise TypeError(f"a choice with tactic {tactic!r}")
    if seconds is not None and type(seconds) not in (int, float):
        raise TypeError(f"a choice with seconds {seconds!r}")
    device, family, backend = texts
    key = Key(family, canonical(record["static"]), bucket, device, canonical(record["versions"]))
    return key, Tuned(Candidate(backend, tuple(tactic)), seconds)
