"""`python -m benchmarks plots`: which rows of which result files are drawn, and how."""

import pytest

from benchmarks import plots
from benchmarks.performance import RESULTS


def test_every_result_has_its_picture():
    if not any(RESULTS.glob("*.png")):
        pytest.skip("there are no pictures here: copies of the repository may go without")
    for path in RESULTS.glob("*.json"):
        assert path.with_suffix(".png").exists() == (path.stem not in plots.WITHOUT), path.stem
