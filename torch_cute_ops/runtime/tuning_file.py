"""Tuned choices in a JSON file that several processes share.

The file is replaced as a whole, so a reader finds either the old or the new content. A writer holds a lock next to the
file and merges its choice with the existing content. A file that is not a tuning file is ignored and never changed.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch_cute_ops.runtime import files, once
from torch_cute_ops.runtime.locks import one_process

log = logging.getLogger("torch_cute_ops")

FORMAT = 1
LIMIT = 10_000
"""Maximum number of records; the oldest are dropped first. A record takes about 700 bytes."""
BYTES = 64 * 2**20
"""Maximum size of the file in bytes. ``TuningFile`` writes no larger file, so a larger file is refused."""
LOCK_SECONDS = 30.0


class Candidate(NamedTuple):
    """Name of a backend, and one of its tactics."""

    backend: str
    tactic: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.backend} {list(self.tactic)}"


@dataclass(frozen=True)
class Key:
    """Conditions under which a tuned choice is valid.

    Attributes:
        family: name shared by ops that choose among the same candidates.
        static: static properties of the calls, as canonical JSON.
        bucket: largest M of the bucket; GEMMs with any M in the bucket share the choice.
        device: name of the GPU.
        versions: versions of the software that computes and compiles, as canonical JSON.
    """

    family: str
    static: str
    bucket: int
    device: str
    versions: str


class Tuned(NamedTuple):
    """A tuned choice, and the duration of a call with it in seconds. The duration is None if only one candidate was
    correct, which is then not timed."""

    candidate: Candidate
    seconds: float | None


def canonical(value: Any) -> str:
    """Return the JSON text of ``value``; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class TuningFile:
    """Tuned choices in a file. The file need not exist, and may be a symbolic link."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = True

    def read(self) -> dict[Key, Tuned]:
        """Read all choices, for all devices and versions, oldest first.

        Returns no choices, with a warning, if the file cannot be read or is not a tuning file.
        """
        try:
            return self._read()
        except OSError as error:
            self._warn(error, "cannot be read")
            return {}

    def add(self, key: Key, tuned: Tuned) -> bool:
        """Add a choice to the file, or replace an earlier choice with the same key. Return True on success."""
        if not self._is_ours:
            return False
        target = Path(os.path.realpath(self.path))
        with one_process(target.with_name(f"{target.name}.lock"), LOCK_SECONDS):
            try:
                choices = self._read()
                if not self._is_ours:
                    return False
                choices.pop(key, None)
                choices[key] = tuned
                files.make_folder(target.parent)
                files.replace(target, _format(dict(list(choices.items())[-LIMIT:])).encode())
            except OSError as error:
                self._warn(error, "cannot be written")
                return False
        return True

    def _read(self) -> dict[Key, Tuned]:
        """Read all choices. Raises ``OSError`` if the content is unknown; the file must then not be replaced."""
        try:
            return _parse(files.read_again(self.path, BYTES))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._is_ours = False
            once.warn(
                ("tuning file", str(self.path)),
                "tuning: %s is not a tuning file (%s: %s); it is ignored, and new choices stay in memory",
                *(self.path, type(error).__name__, error),
            )
            return {}

    def _warn(self, error: OSError, what: str) -> None:
        once.warn(
            ("tuning file", str(self.path), error.errno),
            "tuning: %s %s (%s); new choices stay in memory",
            *(self.path, what, error),
        )


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
    """Parse the content of a file.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: for content that ``_format`` did not write.
    """
    whole = files.parse_json(content)
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
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds < 1e9):
        raise TypeError(f"a choice with seconds {seconds!r}")
    device, family, backend = texts
    key = Key(family, canonical(record["static"]), bucket, device, canonical(record["versions"]))
    return key, Tuned(Candidate(backend, tuple(tactic)), seconds)
