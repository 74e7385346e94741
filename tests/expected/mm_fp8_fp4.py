"""``mm_fp8_fp4``: results may differ from float64 sums by the error bound of tensor cores."""

from expected._epilogue import of_rows
from expected._fp4_gemm import layout_of
from expected._fp8_fp4 import fp4_weight
from expected._fp8_gemm import gemm
from expected.mm_fp8_block import assert_results, rows_alone

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, str? scale_layout=None, "
    "str backend='auto', bool static_weight=False, Tensor? prefetch=None"
)
SCHEMA = f"cute::mm_fp8_fp4({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::mm_fp8_fp4.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]


def results(given):
    """Return the sums and their error bounds."""
    device = given["a"].device.type
    weight = fp4_weight(given["b"].t(), given["b_scale"], layout_of(given), given["block_size"])
    epilogue = of_rows(given["alpha"]), of_rows(given["bias"])
    return (gemm(given["a"], weight, given["a_scale"], *epilogue, device),)
