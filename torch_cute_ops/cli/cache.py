"""``python -m torch_cute_ops cache``."""

import time

from torch_cute_ops.runtime.compiler import store
from torch_cute_ops.runtime.store import Damaged


def run(action: str) -> int:
    """List, verify or clear the kernels on disk; the exit status."""
    kernels = store()
    if kernels is None:
        print("no kernels are kept on disk: TORCH_CUTE_OPS_CACHE=0")
        return 0
    if action == "clear":
        print(f"{kernels.clear()} kernels deleted from {kernels.root}")
        return 0
    total = damaged = count = 0
    for digest, _ in kernels.entries():
        try:
            entry = kernels.read(digest)
        except (FileNotFoundError, Damaged, OSError) as error:
            damaged += 1
            print(f"{digest[:16]}  damaged: {error}")
            continue
        count, total = count + 1, total + entry.size
        if action == "list":
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
            print(f"{digest[:16]}  {created}  {entry.size / 1024:6.0f} KB  {entry.key[:400]}")
    print(f"{count} kernels, {total / 2**20:.1f} MB, {damaged} damaged, in {kernels.root}")
    return 1 if damaged and action == "verify" else 0
