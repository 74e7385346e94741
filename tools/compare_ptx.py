"""Compare the PTX of every kernel in the test grid with committed digests, or write the digests anew.

    python tools/compare_ptx.py                    compare with tests/ptx_digests.json; exit status 1 if any differs
    python tools/compare_ptx.py --write            write tests/ptx_digests.json
    python tools/compare_ptx.py --only fp8_wgmma   take only cases with this text in their id; with --write, keep others
    python tools/compare_ptx.py --root CHECKOUT --against FILE   take kernels from another checkout, digests from FILE

Equal digests prove that a change moved or renamed device code without changing a kernel. No GPU is needed. Symbol
names are masked because they contain module and class names. The digests belong to one version of the DSL.
"""

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def digest(case: Any) -> str:
    """Return the digest of the PTX of a test case's kernel."""
    from support.ptx_digests import digest_of

    return digest_of(case)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout whose kernels are compiled")
    parser.add_argument("--against", type=Path, default=ROOT / "tests" / "ptx_digests.json", help="file of digests")
    parser.add_argument("--only", default="", help="text in the ids of the cases to compile")
    parser.add_argument("--write", action="store_true", help="write the file instead of comparing")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    options = parser.parse_args()
    # The processes of the pool must import the same checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(options.root), str(options.root / "tests")))
    sys.path[:0] = [str(options.root), str(options.root / "tests")]
    from support.ptx_digests import every_checked_case

    cases = [case for case in every_checked_case() if options.only in case.id]
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip((case.id for case in cases), pool.map(digest, cases, chunksize=4), strict=True))
    if options.write:
        if options.only:
            found = json.loads(options.against.read_text(encoding="utf-8")) | found
        options.against.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{len(found)} digests in {options.against}")
        return 0
    known = json.loads(options.against.read_text(encoding="utf-8"))
    changed = [name for name in found if known.get(name) != found[name]]
    for name in changed:
        print("differs" if name in known else "new", name)
    print(f"PTX of {len(found) - len(changed)} of {len(found)} kernels is unchanged")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
