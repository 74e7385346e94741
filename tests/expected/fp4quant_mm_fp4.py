"""``fp4quant_mm_fp4``: results are checked as in ``mm_fp4``, for activations whose codes are known exactly."""

from expected import Tensors, _fp4_gemm, _quantised_gemm, rows_of

SCHEMA, OUT_SCHEMA = _quantised_gemm.schemas("fp4quant_mm_fp4")


def results(given) -> Tensors:
    return _quantised_gemm.results(rows_of(given["a"]), given)


def assert_results(actual, expected, given) -> None:
    _fp4_gemm.assert_results(actual, expected, _quantised_gemm.multiplied(rows_of(given["a"]), given))
