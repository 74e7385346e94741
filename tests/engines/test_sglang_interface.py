"""Compare the signatures of SGLang's stubs in ``make test`` with the installed SGLang."""

from __future__ import annotations

import pytest
from interface import check_signature, signatures
from support import sglang_stub


@pytest.mark.parametrize(
    ("name", "stub", "theirs"), [pytest.param(*each, id=each[0]) for each in signatures(sglang_stub)]
)
def test_signature(name, stub, theirs):
    check_signature(stub, theirs)
