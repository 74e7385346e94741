"""Evaluate single operations of host functions."""

import pytest

from ptx_emulator.host import _Host, _Operation


@pytest.mark.parametrize(("value", "zeros"), [(0, 32), (1, 31), (0x7FFFFFFF, 1), (-1, 0), (-(2**31), 0)])
def test_leading_zeros(value: int, zeros: int) -> None:
    values = {1: value}
    _Host({})._evaluate(_Operation("intr.ctlz", [1], ["i32"], 2, "i32", {}, []), values)
    assert values[2] == zeros
