"""Fixtures for tests of the benchmarks: a simulated device, and the repository's root on the import path, because the
installed package does not contain `benchmarks`."""

import sys
from pathlib import Path

import pytest
from support.fake_device import FakeDevice

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def fake_backend():
    """Return the class of a device with a simulated clock."""
    return FakeDevice
