#!/usr/bin/env python3
"""Make an environment with vLLM for CPUs, or keep it if nothing has changed; then run a command in it.

    python3.11 tools/setup_vllm.py [--venv .venv-vllm] [-- ARGUMENTS OF ITS PYTHON ...]

vLLM pins torch and other packages that the project's own environment has in other versions, so this environment is
separate. Its packages are pinned in tests/engines/vllm-dependencies.txt, and vLLM itself by version and hash in
tests/engines/vllm.txt. All packages take 2.3 GB. The script needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / "tests" / "engines"
VLLM, DEPENDENCIES = ENGINES / "vllm.txt", ENGINES / "vllm-dependencies.txt"
OLDEST = (3, 11)


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="folder of the environment")
    args = parser.parse_args(sys.argv[1:at])
    if sys.version_info < OLDEST:
        sys.exit(f"vLLM needs Python {'.'.join(map(str, OLDEST))} or newer: make test-vllm PYTHON=python3.11")

    venv = Path(os.path.abspath(args.venv))
    python, stamp = venv / "bin" / "python", venv / "torch_cute_ops.sha256"
    inputs = [VLLM.read_bytes(), DEPENDENCIES.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), bytes(ROOT)]
    key = hashlib.sha256(b"\0".join(inputs)).hexdigest()
    if not (python.exists() and stamp.exists() and stamp.read_text() == key):
        stamp.unlink(missing_ok=True)
        install(venv, python)
        stamp.write_text(key)
    if at + 1 < len(sys.argv):
        os.execv(python, [str(python), *sys.argv[at + 1 :]])


def install(venv: Path, python: Path) -> None:
    """Make the environment, and install torch with its dependencies and all other packages without."""
    if not python.exists():
        print(f"making {venv}", flush=True)
        subprocess.check_call([sys.executable, "-m", "venv", str(venv)])
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    print("installing torch, vLLM for CPUs and its dependencies (minutes)", flush=True)
    subprocess.check_call([*pip, "-c", str(DEPENDENCIES), "torch", "setuptools"])
    subprocess.check_call([*pip, "--no-deps", "-r", str(DEPENDENCIES)])
    subprocess.check_call([*pip, "--no-deps", "--require-hashes", "-r", str(VLLM)])
    subprocess.check_call([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])


if __name__ == "__main__":
    main()
