"""A made-up device, and the repository's root on the path: `benchmarks` is no part of the installed package."""

import sys
from pathlib import Path

import pytest
from support.fake_device import FakeDevice

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def fake_backend():
    """The class of the made-up device."""
    return FakeDevice
