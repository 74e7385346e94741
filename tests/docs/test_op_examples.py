"""The example in each op's docstring runs and shows the results that it claims."""

import doctest

import pytest
import torch

from torch_cute_ops.registry import OPS

SECTIONS = ("Args:", "Returns:", "Raises:", "Example:", "References:")


@pytest.mark.parametrize("name", OPS)
def test_docstring_has_every_section(name: str) -> None:
    lines = OPS[name].function.__doc__.splitlines()
    assert [line.strip() for line in lines if line.strip() in SECTIONS] == list(SECTIONS)


@pytest.mark.parametrize("name", OPS)
def test_example_runs(name: str, device: str) -> None:
    """Run the example of one op, with tensors created on ``device`` by default.

    The example must call the op, and must show a result or assert something about one.
    """
    documentation = OPS[name].function.__doc__
    test = doctest.DocTestParser().get_doctest(documentation, {}, name, None, 0)
    sources = [example.source for example in test.examples]
    assert any(f"{name}(" in source for source in sources), "the example does not call the op"
    assert any(example.want or example.source.startswith("assert ") for example in test.examples), "no result is shown"
    report: list[str] = []
    with torch.device(device):
        failed, attempted = doctest.DocTestRunner().run(test, out=report.append)
    assert attempted == len(sources) and not failed, "".join(report)
