"""``random_``: layers with random codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_cute_ops.nn import QuantLinear, random_

SCHEMES = ["nvfp4", "mxfp4", "fp8_block", "fp8_tensor", "fp8_channel", "mxfp8"]
OF_ANY_SIZE = ["fp8_tensor", "fp8_channel"]


def model_of() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "up": nn.Linear(256, 512, dtype=torch.bfloat16),
                "odd": nn.Linear(250, 512),
                "lm_head": nn.Linear(256, 512),
            }
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights(scheme, device):
    """Check that weights are finite, have the right standard deviation, and use every bit of the codes."""
    model = random_(model_of(), scheme, device=device)
    layer = model["up"]
    assert isinstance(layer, QuantLinear) and layer.scheme == scheme and layer.weight.device.type == device
    assert isinstance(model["odd"], QuantLinear) is (scheme in OF_ANY_SIZE)
    assert type(model["lm_head"]) is nn.Linear
    weight = layer.dequantize()
    assert weight.isfinite().all() and abs(weight.mean()) < 1e-3 and 0.018 < weight.std() < 0.025
    assert len(weight.unique()) > 12
    x = torch.randn(3, 256, dtype=torch.bfloat16, device=device)
    want = x.double() @ weight.double().t()
    assert layer.bias.dtype == torch.bfloat16 and not layer.bias.any()
    assert (layer(x) - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_seed(scheme):
    first, same, other = (random_(model_of(), scheme, device="cpu", seed=seed)["up"].weight for seed in (1, 1, 2))
    assert torch.equal(first.view(torch.uint8), same.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), other.view(torch.uint8))


def test_ignore():
    """Check that ``ignore`` accepts a single pattern as a ``str``."""
    model = random_(model_of(), device="cpu", ignore="up")
    assert type(model["up"]) is nn.Linear and isinstance(model["lm_head"], QuantLinear)


def test_bad_scheme():
    with pytest.raises(ValueError, match="random_: scheme is 'int4'; expected one of 'nvfp4', 'mxfp4', 'fp8_block'"):
        random_(model_of(), "int4")
