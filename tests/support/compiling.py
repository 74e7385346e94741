"""Fixture for tests of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.guards


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset Dynamo before and after a test.

    Also skip a step that takes 20 ms per compilation, in which Dynamo flushes the processor's caches and times the
    guards, only to log the times.
    """
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *args: 0.0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
