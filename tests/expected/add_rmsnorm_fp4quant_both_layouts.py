"""``add_rmsnorm_fp4quant_both_layouts``: outputs are checked as in ``add_rmsnorm_fp4quant``; both layouts must contain
the same scales."""

import torch
from support import spec

from expected import Tensors, add_rmsnorm_fp4quant, raw

_ARGUMENTS = add_rmsnorm_fp4quant.ARGUMENTS.replace("str scale_layout='128x4', ", "")
_RETURNS = "Tensor y, Tensor scale_128x4, Tensor scale_linear"
_OUTPUTS = "Tensor(b!) y, Tensor(c!) scale_128x4, Tensor(d!) scale_linear"
SCHEMA = f"cute::add_rmsnorm_fp4quant_both_layouts({_ARGUMENTS}) -> ({_RETURNS})"
OUT_SCHEMA = f"cute::add_rmsnorm_fp4quant_both_layouts.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"


def results(given) -> Tensors:
    """Return the expected outputs and the expected residual."""
    y, tiled, total = add_rmsnorm_fp4quant.results({**given, "scale_layout": "128x4"})
    _, linear, _ = add_rmsnorm_fp4quant.results({**given, "scale_layout": "linear"})
    return y, tiled, linear, total


def assert_results(actual, expected, given) -> None:
    y, tiled, linear, residual = actual
    want_y, want_tiled, want_linear, total = expected
    for layout, got, want in (("128x4", tiled, want_tiled), ("linear", linear, want_linear)):
        laid_out = {**given, "scale_layout": layout}
        add_rmsnorm_fp4quant.assert_results((y, got, residual), (want_y, want, total), laid_out)
    rows, blocks = linear.shape[:-1].numel(), linear.shape[-1]
    collected = torch.from_numpy(spec.collect(raw(tiled).numpy(), "128x4", rows, blocks))
    assert torch.equal(collected, raw(linear).reshape(rows, blocks))
