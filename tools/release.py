#!/usr/bin/env python3
"""Build a release into `dist/`, and check it: `make release`.

    python tools/release.py [--models gpt-oss-120b] [--arch sm_90a] [--rows 1,64] [--no-kernels] [--no-install]

1. Check that the changelog has a section for the version in `torch_cute_ops/_version.py`. With `--changelog`, only turn
   the section "Unreleased" into this section.
2. Build the source distribution, the wheel, and a wheel of kernels for `--arch` and `--models`.
3. Check their metadata with twine.
4. Install the wheels in a new environment, and run examples/quickstart.py there, outside of the source tree.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = ROOT / "CHANGELOG.md"
CHECK = """
import sys, torch_cute_ops
from torch_cute_ops.cli import info
assert torch_cute_ops.__file__.startswith(sys.prefix), torch_cute_ops.__file__
assert torch_cute_ops.__version__ == sys.argv[1], torch_cute_ops.__version__
print(info.bundle_state())
assert len(info.bundle_state()["packages"]) == int(sys.argv[2]), "the wheel of kernels is not used"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "folder of the files (default: dist); packages of earlier releases are deleted"
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help=text)
    parser.add_argument("--models", default="gpt-oss-120b", help="models of the wheel of kernels")
    parser.add_argument("--arch", default="sm_90a", help="architecture of the wheel of kernels")
    parser.add_argument("--rows", help="numbers of rows of the wheel of kernels")
    parser.add_argument("--no-kernels", action="store_true", help="build no wheel of kernels")
    parser.add_argument("--no-install", action="store_true", help="do not install the wheels in a new environment")
    parser.add_argument("--changelog", action="store_true", help="only write the changelog's section")
    options = parser.parse_args()
    version = package_version()
    if options.changelog:
        CHANGELOG.write_text(with_section(CHANGELOG.read_text(), version, time.strftime("%Y-%m-%d")))
        return
    if f"\n## [{version}] - " not in CHANGELOG.read_text():
        sys.exit(f"CHANGELOG.md has no section for {version}: run tools/release.py --changelog")
    dist: Path = options.dist.absolute()
    delete_packages(dist)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), cwd=ROOT)
    if not options.no_kernels:
        rows = ("--rows", options.rows) if options.rows else ()
        build = (*("build", "--wheel", "--arch", options.arch, "--models", options.models), *rows, "-o", str(dist))
        run(sys.executable, "-m", "torch_cute_ops", *build, cwd=ROOT)
    files = sorted(map(str, dist.iterdir()))
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=ROOT)
    if not options.no_install:
        try_in_new_environment([each for each in files if each.endswith(".whl")], version)
    for file in files:
        print(f"{file}  {Path(file).stat().st_size / 1e6:.1f} MB")
    print("SUCCESS")


def package_version() -> str:
    """Return the version in `torch_cute_ops/_version.py`, without importing the package."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "torch_cute_ops" / "_version.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def delete_packages(folder: Path) -> None:
    """Delete the wheels and source distributions of earlier releases. If the folder contains anything else,
    delete nothing and exit."""
    if not folder.exists():
        return
    if not folder.is_dir():
        sys.exit(f"--dist {folder} is not a folder")
    found = sorted(folder.iterdir())
    others = [each.name for each in found if each.is_dir() or not each.name.endswith((".whl", ".tar.gz"))]
    if others:
        sys.exit(f"--dist {folder} contains more than wheels and .tar.gz files: {', '.join(others[:5])}; name another")
    for each in found:
        each.unlink()


def with_section(changelog: str, version: str, date: str) -> str:
    """Return the changelog with its section "Unreleased" renamed to `version`, below a new, empty "Unreleased"."""
    if f"\n## [{version}] - " in changelog:
        sys.exit(f"CHANGELOG.md already has a section for {version}")
    title = "\n## [Unreleased]\n"
    if title not in changelog:
        sys.exit("CHANGELOG.md has no section [Unreleased]")
    return changelog.replace(title, f"{title}\n## [{version}] - {date}\n", 1)


def try_in_new_environment(wheels: list[str], version: str) -> None:
    """Install wheels in a new environment, and run the demo in an empty folder."""
    with tempfile.TemporaryDirectory() as work:
        run(sys.executable, "-m", "venv", f"{work}/venv", cwd=work)
        python = f"{work}/venv/bin/python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "-c", str(ROOT / "constraints.txt"), *wheels, cwd=work)
        kernels = sum("_kernels_" in Path(wheel).name for wheel in wheels)
        run(python, "-c", CHECK, version, str(kernels), cwd=work)
        shutil.copytree(ROOT / "examples", f"{work}/examples")
        run(python, "examples/quickstart.py", cwd=work)


def run(*command: str, cwd: str | Path) -> None:
    """Run a command without the variables that would make it import the source tree."""
    print("+", *command[:12], flush=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if code := subprocess.call(command, cwd=cwd, env=variables):
        sys.exit(code)


if __name__ == "__main__":
    main()
