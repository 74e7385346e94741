"""``add_rmsnorm_fp4quant_with_norm_both_layouts``: the normalised rows must be within half an ulp; the other outputs
are checked as in ``add_rmsnorm_fp4quant_both_layouts``."""

from expected import (
    Tensors,
    add_rmsnorm_fp4quant_both_layouts,
    add_rmsnorm_fp4quant_with_norm,
    rmsnorm_fp4quant_with_norm,
)

_ARGUMENTS = (
    "Tensor input, Tensor(a!) residual, Tensor weight, Tensor? global_scale=None, float eps=1e-6, int block_size=16, "
    "str? scale_format=None, bool weight_plus_one=False, Tensor? bias=None, bool subtract_mean=False"
)
_RETURNS = "Tensor y, Tensor scale_128x4, Tensor scale_linear, Tensor norm"
_OUTPUTS = "Tensor(b!) y, Tensor(c!) scale_128x4, Tensor(d!) scale_linear, Tensor(e!) norm"
SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm_both_layouts({_ARGUMENTS}) -> ({_RETURNS})"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant_with_norm_both_layouts.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"


def results(given) -> Tensors:
    """Return the expected outputs, with the normalised rows in float64, and the expected residual."""
    *outputs, total = add_rmsnorm_fp4quant_both_layouts.results(given)
    norm = add_rmsnorm_fp4quant_with_norm.results({**given, "scale_layout": "linear"})[2]
    return *outputs, norm, total


def assert_results(actual, expected, given) -> None:
    *scaled, norm, residual = actual
    *want_scaled, want_norm, total = expected
    add_rmsnorm_fp4quant_both_layouts.assert_results((*scaled, residual), (*want_scaled, total), given)
    assert norm.dtype == given["input"].dtype
    rmsnorm_fp4quant_with_norm.assert_norm_close(norm.to(want_norm.device), want_norm, given)
