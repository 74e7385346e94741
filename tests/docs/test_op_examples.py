"""Docstrings of the ops: every section exists, examples show correct results, and references name existing sections."""

import doctest
import re

import pytest
import torch
from support.example_scripts import ROOT

from torch_cute_ops.registry import OPS

SECTIONS = ("Args:", "Returns:", "Raises:", "Example:", "References:")


@pytest.mark.parametrize("name", OPS)
def test_docstring_has_every_section(name: str) -> None:
    lines = OPS[name].function.__doc__.splitlines()
    assert [line.strip() for line in lines if line.strip() in SECTIONS] == list(SECTIONS)


@pytest.mark.parametrize("name", OPS)
def test_references_exist(name: str) -> None:
    """Check that the sections of documents to which a docstring refers exist."""
    text = " ".join(OPS[name].function.__doc__.split()).partition("References: ")[2]
    references = re.findall(r'(docs/\w+\.md)((?:(?:,| and) "[^"]+")+)', text)
    assert len(references) == text.count("docs/") > 0
    for document, titles in references:
        headings = re.findall(r"^#+ (.*)", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
        assert set(re.findall(r'"([^"]+)"', titles)) <= set(headings), document


@pytest.mark.parametrize("name", OPS)
def test_example_runs(name: str, device: str) -> None:
    """Run the example in the docstring of an op, with tensors created on ``device`` by default.

    The example must call the op, and must show a result or contain an assertion about a result.
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
