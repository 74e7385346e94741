"""Fresh interpreters that find this package."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch_cute_ops

PACKAGE = Path(torch_cute_ops.__file__).parent


def variables_of(**environment: str) -> dict[str, str]:
    """The environment of an interpreter that finds this package, with no settings of it but these."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUTE_OPS_")}
    return {**kept, "PYTHONPATH": path, **environment}


def python(code: str, *, arguments: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds this package."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables_of(**environment), timeout=120)
