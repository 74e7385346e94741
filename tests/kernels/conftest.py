"""What the tests of kernels keep for each other."""

from collections.abc import Iterator

import pytest

from ptx_emulator import adapter


@pytest.fixture(scope="module", autouse=True)
def forget_kernels() -> Iterator[None]:
    """A file's tests share what they compile. Behind them it would be 2 GB, and two million objects to collect."""
    yield
    adapter.forget()
