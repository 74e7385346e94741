"""``silu_mul``: results may differ from the exact results by half an ulp plus the error of an fp32 exponential."""

import torch

from expected import Tensors, gated, rows_of
from torch_cute_ops.testing import GATE_ERROR

_ARGUMENTS = "Tensor input, float swiglu_alpha=1.0, float swiglu_beta=0.0, float? swiglu_limit=None, str gate='silu'"
SCHEMA = f"cute::silu_mul({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::silu_mul.out({_ARGUMENTS}, *, Tensor(a!) out) -> ()"


def results(given) -> Tensors:
    """Return the expected result in fp32."""
    shape = given["input"].shape
    return (torch.from_numpy(gated(rows_of(given["input"]), given)).reshape(*shape[:-1], shape[-1] // 2),)


def assert_results(actual, expected, given) -> None:
    got, want = actual[0].to(expected[0].device), expected[0].double()
    info = torch.finfo(got.dtype)
    assert actual[0].dtype == given["input"].dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    # A result near the dtype's largest number may or may not round to infinity.
    near = want.abs() * (1 + GATE_ERROR) >= info.max * (1 + info.eps / 4)
    far = ~near & want.isfinite()
    assert torch.equal(got.isinf() & ~near, want.isinf() & ~near) and not got[far].isinf().any()
    # If exp(-gate) is close to overflow in fp32, the sigmoid may be 2^-128 or 0.
    gate, up = (half.double().abs().nan_to_num() for half in given["input"].cpu().chunk(2, -1))
    overflow = gate * (up + abs(given["swiglu_beta"])) * 2.0**-127
    bound = want.abs() * (info.eps / 2 + GATE_ERROR) + 3 * info.smallest_normal * info.eps + overflow.to(want.device)
    if given.get("gate") == "gelu":
        # The product of the gate and Φ is rounded before it is multiplied by up. For the smallest gates this product is
        # subnormal, and the last bit of Φ decides in which direction it is rounded.
        bound = bound + 2.0**-149 * up.to(want.device)
    excess = ((got.double() - want).abs() - bound)[far]
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} elements are off, by up to {float(excess.max())}"
