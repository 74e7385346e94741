"""``silu_mul_fp4quant_mm_fp4``: results are checked as in ``mm_fp4``, with the quantised results of the gate as
activations. If a value is so close to a rounding boundary that the numerical error of the gate can change its code,
either code is accepted."""

import numpy as np

from expected import Tensors, _fp4_gemm, _quantised_gemm, gated, rows_of
from torch_cute_ops.testing import GATE_ERROR

SCHEMA, OUT_SCHEMA = _quantised_gemm.schemas("silu_mul_fp4quant_mm_fp4", ", str gate='silu'")


def values(given, error: float = 0.0) -> np.ndarray:
    """Return the gated rows in fp32, with magnitudes increased by the relative ``error``."""
    with np.errstate(all="ignore"):
        return (gated(rows_of(given["a"]), given) * np.float64(1 + error)).astype(np.float32)


def results(given) -> Tensors:
    return _quantised_gemm.results(values(given), given)


def assert_results(actual, expected, given) -> None:
    # The error of the gate may also change the scale of a block. Results with either scale are then accepted.
    errors = (-GATE_ERROR, GATE_ERROR)
    exact, *others = (_quantised_gemm.decoded(values(given, error), given) for error in (0.0, *errors))
    with np.errstate(all="ignore"):
        spread = np.maximum(*(np.abs(other - exact) for other in others))
    _fp4_gemm.assert_results(actual, expected, _quantised_gemm.multiplied(values(given), given), spread)
