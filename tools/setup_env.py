#!/usr/bin/env python3
"""Make the project's virtual environment, or keep it if nothing has changed; then run a command in it.

    python3 tools/setup_env.py [--venv .venv] [--extras dev,bench] [-- ARGUMENTS OF ITS PYTHON ...]

If the Python that runs this script can import a suitable torch (in a CUDA container, for example, or in another virtual
environment), its packages are made visible in the new environment, and only missing packages are installed. Otherwise
torch is installed at the version in constraints.txt. An existing environment at --venv is completed, not replaced. This
script needs only the standard library.

The variable PINS lists requirements, separated by spaces, that replace the constraints of the same packages:
PINS="torch==2.9.1 nvidia-cutlass-dsl==4.8.0"; a name without a version stands for the newest version. If PINS names
torch, that torch is installed, whichever torch the Python can import.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"

# Program that the examined Python runs. `foreign` lists the packages that it imports from outside its environment.
PROBE = """
import importlib.metadata, json, os, platform, site, sys
found = {"python": platform.python_version(), "torch": None, "cuda": None}
try:
    import torch
    found["torch"] = importlib.metadata.version("torch")
    found["cuda"] = torch.version.cuda
except Exception as error:
    found["error"] = repr(error)
found["sites"] = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
found["foreign"] = [
    dist.metadata["Name"]
    for dist in importlib.metadata.distributions()
    if dist.metadata["Name"] and not str(dist.locate_file("")).startswith(os.path.join(sys.prefix, ""))
]
print(json.dumps(found))
"""


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    command = sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--extras", default="dev", help="extras of pyproject.toml, comma-separated (default: dev)")
    args = parser.parse_args(sys.argv[1:at])

    venv = Path(os.path.abspath(args.venv))
    python = venv / "bin" / "python"
    stamp = venv / "torch_cute_ops.json"
    extras = {extra for extra in args.extras.split(",") if extra}
    files = [PYPROJECT.read_bytes(), CONSTRAINTS.read_bytes(), Path(__file__).read_bytes()]
    inputs = [*files, bytes(ROOT), " ".join(pins()).encode()]
    key = hashlib.sha256(b"\0".join(inputs)).hexdigest()

    done = json.loads(stamp.read_text()) if stamp.exists() and python.exists() else {}
    if done.get("key") != key or not extras <= set(done["extras"]):
        extras |= set(done.get("extras", ()))
        stamp.unlink(missing_ok=True)
        create(venv, python)
        found = install(python, extras)
        stamp.write_text(json.dumps({"key": key, "extras": sorted(extras)}))
        print(f"{venv} is ready: Python {found['python']}, torch {found['torch']}", flush=True)
    if command:
        os.execv(python, [str(python), *command])


def create(venv: Path, python: Path) -> None:
    """Make an environment at `venv` unless one exists. If this Python has a suitable torch, make it visible in the
    environment."""
    if python.exists():
        return
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        sys.exit(f"{venv} exists and is not a virtual environment: name another folder with --venv (make VENV=...)")
    print(f"making {venv}", flush=True)
    base = probe(sys.executable)
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(venv)]):
        # A failed attempt, as on Debian without the package python3-venv, leaves an environment without pip.
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(1)
    if keeps_torch(base["torch"]):
        # The option --system-site-packages does not suffice: inside a virtual environment, it shows the packages of the
        # system's Python.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in base["sites"]]
        Path(site_packages(python), "base_packages.pth").write_text("".join(lines))


def install(python: Path, extras: set[str]) -> dict[str, Any]:
    """Install torch, then the project with `extras`; return `probe(python)`."""
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    found = probe(python)
    compiling = None
    if keeps_torch(found["torch"]):
        print(f"keeping torch {found['torch']}", flush=True)
        _run(*pip, requirement("setuptools"))
    else:
        print("installing torch (minutes the first time)", flush=True)
        torch = next((line for line in constraints() if _name(line) == "torch"), "torch")
        _run(*pip, torch, requirement("setuptools"))
        found = probe(python)
        # Compile torch while pip installs the other packages, because pip uses only one processor.
        compiling = compile_packages(python, 1)
    if found["torch"] is None:
        sys.exit(f"torch does not import: {found['error']}")

    extras = set(extras)
    if int((found["cuda"] or "0").split(".")[0]) >= 13:
        extras.add("cu13")
    if found["torch"].startswith("2.9."):
        extras.add("torch29")
    target = f"{ROOT}[{','.join(sorted(extras))}]"
    print(f"installing {target}", flush=True)
    # Keep the versions of torch and of packages from outside this environment.
    kept = {"torch", *map(_name, found["foreign"])}
    others = [line for line in constraints() if _name(line) not in kept]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "constraints.txt")
        file.write_text("\n".join([*others, f"torch=={found['torch']}", ""]))
        # Build without isolation: an isolated build would import the linked Python's setuptools, which may be too old.
        _run(*pip, "-c", str(file), "--no-build-isolation", "-e", target)
    if compiling is not None:
        compiling.wait()
    compile_packages(python, 0).wait()
    return found


def compile_packages(python: Path, processes: int) -> subprocess.Popen[bytes]:
    """Start to compile the bytecode of the installed packages, with one process per processor if `processes` is 0 (pip
    would use only one processor). Leave out tests of packages and the models of transformers: they are a third of the
    code, and few are ever imported. Errors are ignored: some packages contain files that do not compile."""
    command = [str(python), "-W", "ignore", "-m", "compileall", "-qq", "-j", str(processes)]
    return subprocess.Popen([*command, "-x", "/(tests|transformers/models)/", site_packages(python)])


def constraints() -> list[str]:
    """Return the lines of constraints.txt, except for packages in PINS, and the requirements in PINS."""
    named = {_name(pin) for pin in pins()}
    return [line for line in CONSTRAINTS.read_text().splitlines() if _name(line) not in named] + pins()


def pins() -> list[str]:
    """Return the requirements in the variable PINS."""
    return os.environ.get("PINS", "").split()


def keeps_torch(version: str | None) -> bool:
    """Return True if an installed torch is used: pyproject.toml allows its version, and PINS does not name torch."""
    return torch_is_right(version) and "torch" not in map(_name, pins())


def probe(python: str | Path) -> dict[str, Any]:
    """Return the versions, CUDA version and package folders that `python` reports."""
    output = subprocess.check_output([python, "-c", PROBE], text=True, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def site_packages(python: Path) -> str:
    """Return the site-packages folder of `python`."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
    return subprocess.check_output([python, "-c", code], text=True)


def requirement(package: str) -> str:
    """Return pyproject.toml's requirement for a package. The file is searched as text, because tomllib needs Python
    3.11."""
    match = re.search(rf'"({package}>=[^"]+)"', PYPROJECT.read_text())
    if match is None:
        sys.exit(f"{PYPROJECT} does not require {package}>=VERSION")
    return match.group(1)


def torch_is_right(version: str | None) -> bool:
    """Return True if pyproject.toml allows this torch version. As in pip's order, 2.9.0a0 is older than 2.9."""
    pattern = r"(\d+)\.(\d+)(?:\.\d+)*(a|b|rc|\.dev)?"
    have = re.match(pattern, version or "0.0")
    want = re.match(pattern, requirement("torch").removeprefix("torch>="))
    assert have and want
    present, lowest = (tuple(map(int, match.group(1, 2))) for match in (have, want))
    return present > lowest or (present == lowest and have.group(3) is None)


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]*", requirement)
    return re.sub(r"[-_.]+", "-", match.group() if match else "").lower()


def _run(*command: str) -> None:
    if code := subprocess.call(command):
        sys.exit(code)


if __name__ == "__main__":
    main()
