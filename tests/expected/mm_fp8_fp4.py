"""``mm_fp8_fp4``: results may differ from float64 sums by the error bound of tensor cores."""

from expected._epilogue import of_rows
from expected._fp4_gemm import layout_of
from expected._fp8_fp4 import fp4_weight, has_tokens, in_order, token_gemm, weight_of_tokens
from expected._fp8_gemm import gemm
from expected.mm_fp8_block import assert_results
from expected.mm_fp8_block import rows_alone as rows_alone_of_blocks

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, str? scale_layout=None, "
    "str backend='auto', bool static_weight=False, Tensor? prefetch=None, bool fast_accum=False"
)
SCHEMA = f"cute::mm_fp8_fp4({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::mm_fp8_fp4.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"

__all__ = ["OUT_SCHEMA", "SCHEMA", "assert_results", "results", "rows_alone"]


def results(given):
    """Return the sums and their error bounds."""
    device, given = given["a"].device.type, in_order(given)
    if has_tokens(given):
        weight = weight_of_tokens(given["b"].t(), given["b_scale"], layout_of(given), given["block_size"])
        epilogue = of_rows(given["alpha"]), of_rows(given["bias"])
        return (token_gemm(given["a"], weight, given["a_scale"], *epilogue, given["fast_accum"], device),)
    weight = fp4_weight(given["b"].t(), given["b_scale"], layout_of(given), given["block_size"])
    epilogue = of_rows(given["alpha"]), of_rows(given["bias"])
    return (gemm(given["a"], weight, given["a_scale"], *epilogue, device),)


def rows_alone(given, outputs):
    """Yield calls in which all rows of ``a`` but one are NaN, and calls with one row alone, each with the expected
    result of this row. See ``mm_fp8_block``."""
    flat = given | {"a": given["a"].flatten(1)}
    one = {"a_scale": given["a_scale"]} if given["a_scale"].dim() == 1 else {}
    for call, want in rows_alone_of_blocks(flat, outputs):
        yield call | one | {"a": call["a"].view(-1, *given["a"].shape[1:])}, want
