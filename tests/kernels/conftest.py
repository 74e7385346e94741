"""Fixtures of kernel tests, and skipping of tests that passed with the same code (``support.unchanged``)."""

from collections.abc import Iterator

import pytest
from support import unchanged

from ptx_emulator import adapter


@pytest.fixture(scope="module", autouse=True)
def forget_kernels() -> Iterator[None]:
    """Delete the kernels that the tests of a file have compiled and shared. Otherwise they would grow to 2 GB and two
    million objects."""
    yield
    adapter.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if it passed with the same kernels, test code and toolchain."""
    if not unchanged.is_covered(item):
        return
    digest = unchanged.digest_of(item)
    item.user_properties.append(("digest", digest))
    options = ("unchanged", "every_kernel", "more_emulated")
    if not any(map(item.config.getoption, options)) and digest in unchanged.passed():
        pytest.skip("its kernels have not changed since they passed; --unchanged runs it")
