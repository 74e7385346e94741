"""Check that each layer of the package imports only lower layers, as listed in the table of docs/architecture.md."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.example_scripts import ROOT

PACKAGE = ROOT / "torch_cute_ops"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Layers")[1].split("##")[0]
LAYERS = [re.sub(r"(/<\w+>)?(\.py|/)$", "", path) for path in re.findall(r"^\| `([\w/.<>]+)`", TEXT, re.MULTILINE)]
"""Folders and modules in the table, from the highest layer to the lowest, relative to the package."""


def modules() -> Iterator[tuple[Path, int]]:
    """Yield every module of the package with the index of its layer."""
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = layer_of(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."))
        if layer is not None:
            yield path, layer


def layer_of(module: str) -> int | None:
    """Return the index of a module's layer, or None if the module belongs to no layer.

    The package itself, which exports the public functions, counts as part of the layer ``cli``.
    """
    if not module:
        return LAYERS.index("cli")
    path = module.replace(".", "/")
    fitting = [layer for layer in LAYERS if path == layer or path.startswith(f"{layer}/")]
    return LAYERS.index(max(fitting, key=len)) if fitting else None


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each module of this package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "torch_cute_ops":
                yield node.lineno, name.removeprefix("torch_cute_ops").lstrip(".")


def test_the_table_has_every_folder() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {layer.split("/")[0] for layer in LAYERS}


def test_imports_go_down() -> None:
    upwards = [
        f"{path}:{line}: {name}"
        for path, layer in modules()
        for line, name in imported(path)
        if (other := layer_of(name)) is not None and other < layer
    ]
    assert not upwards


ALONE = {
    "nn": {"torch", "typing_extensions"},
    "checkpoint": {"torch", "typing_extensions", "safetensors"},
    "distributed": {"torch", "typing_extensions"},
    "integrations": {"torch", "transformers", "huggingface_hub", "tqdm", "torchao", "vllm", "sglang", "peft"},
    "integrations/_engines": {"torch"},
}
"""Other libraries that each upper layer may import, in addition to the standard library and this package."""


@pytest.mark.parametrize("layer", ALONE)
def test_upper_layers_import_no_integration(layer: str) -> None:
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        others = {name.split(".")[0] for name in modules_of(path)} - {"torch_cute_ops"} - sys.stdlib_module_names
        assert others <= ALONE[layer], path


def modules_of(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module
