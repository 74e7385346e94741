"""``python -m torch_cute_ops cache``: list, verify or clear the kernels on disk."""

import sys
import time

from torch_cute_ops.runtime.compiler import reason_no_store, store
from torch_cute_ops.runtime.store import Damaged, Store


def run(action: str) -> int:
    """List, verify or clear the kernels on disk.

    Returns:
        Exit status: 1 if a kernel could not be deleted, or ``verify`` found a damaged or unreadable kernel, else 0.

    Raises:
        OSError: if the cache cannot be read.
    """
    kernels = store()
    if kernels is None:
        print(f"no kernels are kept on disk: {reason_no_store()}")
        return 0
    return _clear(kernels) if action == "clear" else _list(kernels, action)


def _clear(kernels: Store) -> int:
    deleted, errors = kernels.clear()
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    failed = f", {len(errors)} could not be deleted" if errors else ""
    print(f"{deleted} kernels deleted{failed}, in {kernels.root}")
    return 1 if errors else 0


def _list(kernels: Store, action: str) -> int:
    total = damaged = count = 0
    for digest, _ in kernels.entries():
        try:
            entry = kernels.read(digest)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (Damaged, OSError) as error:
            damaged += 1
            print(f"{digest[:16]}  {'damaged' if isinstance(error, Damaged) else 'unreadable'}: {error}")
            continue
        count, total = count + 1, total + entry.size
        if action == "list":
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
            print(f"{digest[:16]}  {created}  {entry.size / 1024:6.0f} KB  {entry.key[:400]}")
    print(f"{count} kernels, {total / 2**20:.1f} MB, {damaged} damaged, in {kernels.root}")
    return 1 if damaged and action == "verify" else 0
