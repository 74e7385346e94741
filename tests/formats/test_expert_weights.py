"""``moe_fc2_weight``: positions of each expert's codes and scales, and the op's sums in float64."""

import doctest

import numpy as np
import pytest
import torch
from expected._fp4_gemm import decoded
from hypothesis import given as given_by
from hypothesis import strategies as st
from samples._fp4_gemm import random_matrix

import torch_cute_ops
from torch_cute_ops import moe_fc2_fp4_weight_only, moe_fc2_weight
from torch_cute_ops.formats import MXFP4, NVFP4, expert_weights
from torch_cute_ops.formats.experts import MAX_EXPERTS

CPU = torch.device("cpu")


def experts_of(experts, n, width, fmt, layout):
    """Return the random stacked codes (E, N, I/2) of experts, their scales, and the decoded weights (E, N, I) in
    float64."""
    codes, scale = random_matrix(experts * n, width, fmt, layout, CPU)
    exact = decoded(codes, scale, layout, fmt.block_size).reshape(experts, n, width)
    if layout == "linear":
        scale = scale.view(experts, n, -1)
    return codes.view(experts, n, -1), scale, exact


@pytest.mark.parametrize("target", ["128x4", "linear"])
@pytest.mark.parametrize("source", ["128x4", "linear"])
@given_by(data=st.data())
def test_each_expert_is_at_its_place(source, target, data):
    """Check every decoded number of the result against the same expert's decoded weight, for any size."""
    fmt = data.draw(st.sampled_from([NVFP4, MXFP4]))
    experts, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 140))
    width = fmt.block_size * data.draw(st.integers(1, 9))
    codes, scale, exact = experts_of(experts, n, width, fmt, source)
    before = codes.clone(), scale.view(torch.uint8).clone()
    w, w_scale = moe_fc2_weight(codes, scale, target)
    assert w.shape == (experts * width // 2, n) and w.mT.is_contiguous() and w_scale.dtype == scale.dtype
    got = decoded(w.mT, w_scale, target, fmt.block_size).reshape(n, experts, width)
    assert np.array_equal(got, exact.transpose(1, 0, 2), equal_nan=True)
    assert torch.equal(codes, before[0]) and torch.equal(scale.view(torch.uint8), before[1])


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("target", ["128x4", "linear"])
def test_the_op_takes_the_weight(fmt, target):
    """Compare the op's sums over the experts with float64, including with torch's packed dtype for the codes."""
    codes, scale, exact = experts_of(3, 24, 128, fmt, "linear")
    x = torch.randn(5, 3 * 128).bfloat16()
    alpha = torch.rand(5, 3) + 0.5
    want = np.einsum("mei,eni,me->mn", x.double().view(5, 3, 128).numpy(), exact, alpha.double().numpy())
    for stored in (codes, codes.view(torch.float4_e2m1fn_x2)):
        w, w_scale = moe_fc2_weight(stored, scale, target)
        assert w.dtype == stored.dtype
        form = {"block_size": fmt.block_size, "scale_layout": target, "out_dtype": torch.float32}
        got = moe_fc2_fp4_weight_only(x, w, w_scale, alpha, **form)
        bound = np.einsum("mei,eni,me->mn", x.double().abs().view(5, 3, 128).numpy(), np.abs(exact), alpha.numpy())
        assert (np.abs(got.double().numpy() - want) <= bound * 140 * 2.0**-24).all()


def test_quantised_experts_give_the_layer():
    """Check a GEMM with stacked weights from ``fp4_quantize``: scaled identity matrices, whose codes are exact."""
    down = torch.stack([6 * torch.eye(64), 3 * torch.eye(64).flip(1)])
    w, w_scale = moe_fc2_weight(*torch_cute_ops.fp4_quantize(down))
    x = torch.arange(128.0)[None].bfloat16()
    got = moe_fc2_fp4_weight_only(x, w, w_scale, torch.tensor([[1.0, 1.0]]), out_dtype=torch.float32)
    assert torch.equal(got[0], 6 * torch.arange(64.0) + 3 * torch.arange(64.0, 128.0).flip(0))


def test_the_example():
    failed, attempted = doctest.testmod(expert_weights)
    assert attempted and not failed


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"codes": torch.zeros(8, 32, dtype=torch.uint8)}, ValueError, r"got codes with shape \(8, 32\); expected \(E"),
        ({"codes": torch.zeros(0, 8, 32, dtype=torch.uint8)}, ValueError, f"E from 1 to {MAX_EXPERTS}"),
        ({"codes": torch.zeros(2, 8, 32, dtype=torch.int8)}, TypeError, "got codes with dtype torch.int8; expected"),
        ({"codes": [1]}, TypeError, "codes is .*, a list; expected a tensor"),
        ({"scale": torch.ones(2, 8, 4)}, TypeError, "got scale with dtype torch.float32; expected float8_e4m3fn"),
        ({"scale": torch.ones(2, 8, 3).to(torch.float8_e4m3fn)}, ValueError, "got scale with shape"),
        ({"scale_layout": "8x4"}, ValueError, "scale_layout='8x4' is for activations; use '128x4' or 'linear'"),
        ({"scale_layout": "tiled"}, ValueError, "scale_layout='tiled' is unknown; use one of"),
    ],
)
def test_wrong_arguments(change, error, match):
    given = {"codes": torch.zeros(2, 8, 32, dtype=torch.uint8), "scale": torch.ones(2, 8, 4).to(torch.float8_e4m3fn)}
    moe_fc2_weight(**given)
    with pytest.raises(error, match=rf"^moe_fc2_weight: .*{match}"):
        moe_fc2_weight(**{**given, **change})
