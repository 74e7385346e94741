"""Test the data and the pictures of `python -m benchmarks plots`."""

import pytest

from benchmarks import plots
from benchmarks.performance import RESULTS


def test_every_result_has_its_picture():
    if not any(RESULTS.glob("*.png")):
        pytest.skip("this copy of the repository contains no pictures")
    for path in RESULTS.glob("*.json"):
        assert path.with_suffix(".png").exists() == (path.stem not in plots.WITHOUT), path.stem
