"""``torch.compile`` in tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.guards


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo as if it had compiled nothing, before a test and after it.

    And without what takes 20 ms of each compilation: for its log it flushes the processor's caches, and measures
    how long guards take then.
    """
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *args: 0.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
