"""Import the programs in ``tools/``, which is not a package."""

import importlib.util
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[2] / "tools"


def program_of(name: str) -> ModuleType:
    """Import ``tools/<name>.py`` and return a new module object."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
