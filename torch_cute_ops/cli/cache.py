"""``python -m torch_cute_ops cache``: list, verify or clear the kernels on disk."""

import json
import sys
import time
from typing import Any

from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.compiler import reason_no_store, store
from torch_cute_ops.runtime.store import Damaged, Store


def run(action: str, *, as_json: bool = False) -> int:
    """List, verify or clear the kernels on disk.

    Args:
        action: ``"list"``, ``"verify"`` or ``"clear"``.
        as_json: True to print one JSON object instead of readable lines.

    Returns:
        Exit status: 1 if a kernel could not be deleted, or ``verify`` found a damaged or unreadable kernel, else 0.

    Raises:
        OSError: if the cache cannot be read.
    """
    kernels, reason = store(), reason_unusable()
    if kernels is None or reason is not None:
        print(json.dumps({"folder": None, "why": reason}) if as_json else f"no kernels are kept on disk: {reason}")
        return 0
    return _clear(kernels, as_json) if action == "clear" else _list(kernels, action, as_json)


def reason_unusable() -> str | None:
    """Return the reason that compiled kernels cannot be stored on disk, or None if they can."""
    if store() is None:
        return reason_no_store()
    folder = settings.cache_folder()
    if folder is not None and folder.exists() and not folder.is_dir():
        return f"{folder} is no folder; set TORCH_CUTE_OPS_CACHE_DIR to a folder"
    return None


def _clear(kernels: Store, as_json: bool) -> int:
    deleted, errors = kernels.clear()
    if as_json:
        print(json.dumps({"folder": str(kernels.root), "deleted": deleted, "errors": [*map(str, errors)]}, indent=2))
        return 1 if errors else 0
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    failed = f", {len(errors)} could not be deleted" if errors else ""
    print(f"{deleted} kernels deleted{failed}, in {kernels.root}")
    return 1 if errors else 0


def _list(kernels: Store, action: str, as_json: bool) -> int:
    found: list[dict[str, Any]] = []
    for digest, _ in kernels.entries():
        try:
            entry = kernels.read(digest)
        except FileNotFoundError:  # another process deleted the kernel meanwhile
            continue
        except (Damaged, OSError) as error:
            state = "damaged" if isinstance(error, Damaged) else "unreadable"
            found.append({"digest": digest, "error": f"{state}: {error}"})
        else:
            about = {"bytes": entry.size, "created": entry.created, "key": entry.key, "error": None}
            found.append({"digest": digest, **about})
    damaged = [each for each in found if each["error"]]
    if as_json:
        print(json.dumps({"folder": str(kernels.root), "kernels": found}, indent=2))
    else:
        _print(found if action == "list" else damaged)
        total = sum(each.get("bytes", 0) for each in found)
        count = len(found) - len(damaged)
        print(f"{count} kernels, {total / 2**20:.1f} MB, {len(damaged)} damaged, in {kernels.root}")
    return 1 if damaged and action == "verify" else 0


def _print(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        if entry["error"]:
            print(f"{entry['digest'][:16]}  {entry['error']}")
            continue
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["created"]))
        print(f"{entry['digest'][:16]}  {created}  {entry['bytes'] / 1024:6.0f} KB  {entry['key'][:400]}")
