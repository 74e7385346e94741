"""Check that `make docs` renders without a warning, and that the API reference lists every public name."""

import subprocess
import sys
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from support.example_scripts import ROOT

import torch_cute_ops

# Look for the installed distribution instead of importing sphinx: a folder named sphinx could be imported, and scipy
# behaves differently if sphinx is in sys.modules.
try:
    version("sphinx")
except PackageNotFoundError:
    pytest.skip("needs sphinx", allow_module_level=True)
for name in ("myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(name)


def test_documents_render(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = (tmp_path / "objects.inv").read_bytes()
    names = {line.split()[0] for line in zlib.decompress(content.split(b"\n", 4)[4]).decode().splitlines()}
    public = {f"torch_cute_ops.{name}" for name in torch_cute_ops.__all__ if not name.startswith("_")}
    assert public <= names
