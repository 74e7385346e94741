"""Functions that are called on the first import of a module."""

import sys

import pytest
from support.interpreters import python_in_each

from torch_cute_ops.runtime.imports import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Create an importable module."""
    name = "module_of_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_at_the_first_import(module):
    finders, values = list(sys.meta_path), []
    when_imported(module, lambda imported: values.append(imported.value))
    when_imported(module, lambda imported: values.append(-imported.value))
    assert values == []
    __import__(module)
    __import__(module)
    assert sorted(values) == [-1, 1]
    assert sys.meta_path == finders
    # The module's original loader must be restored, because modules can share a loader, such as pytest's.
    imported = sys.modules[module]
    assert imported.__loader__ is imported.__spec__.loader
    assert type(imported.__loader__).__module__ != when_imported.__module__


def test_a_module_that_is_already_imported(module):
    there, finders, found = __import__(module), list(sys.meta_path), []
    when_imported(module, found.append)
    assert found == [there]
    assert sys.meta_path == finders


def test_a_missing_module():
    finders = list(sys.meta_path)
    when_imported("no_such_module", pytest.fail)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        __import__("no_such_module")
    assert sys.meta_path == finders


COUNT = """
import importlib, os
import torch
for name in os.environ["IMPORTED"].split():
    importlib.import_module(name)
import torch_cute_ops
weight, scale = torch_cute_ops.fp4_quantize(torch.randn(64, 64))
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    torch_cute_ops.mm_fp4_weight_only(torch.randn(3, 64, dtype=torch.bfloat16), weight.t(), scale)
print(counter.get_total_flops())
"""


def test_flops_are_counted_in_either_order_of_imports():
    names = ("torch_cute_ops", "torch.utils.flop_counter")
    for done in python_in_each(COUNT, *({"IMPORTED": " ".join(order)} for order in (names, names[::-1]))):
        assert done.stdout.split() == [str(2 * 3 * 64 * 64)], done.stderr
