"""Arguments of unusual types. For a wrong type, the error says what to write instead; other unusual types are
accepted."""

import numpy as np
import pytest
import torch
from torch import nn

import torch_cute_ops
from torch_cute_ops.nn import FP8TensorLinear, MXFP4Linear, NVFP4Linear, merge, warmup

N, K = 64, 128
CODES, SCALE = torch_cute_ops.fp4_quantize(torch.randn(N, K))
X = torch.randn(4, K).bfloat16()


def product(a=X, **given):
    return torch_cute_ops.mm_fp4_weight_only(a, CODES.t(), SCALE, **given)


@pytest.mark.parametrize("alpha", [0.5, 2, np.float32(0.5), np.int64(2)])
def test_a_number_for_a_tensor(alpha):
    """Check that the error for a number contains the tensor to pass instead, and that the call with this tensor
    succeeds."""
    with pytest.raises(TypeError) as raised:
        product(alpha=alpha)
    text = f"torch.tensor([{float(alpha)}], device=…)"
    assert str(raised.value).endswith(f"expected a tensor or None: pass {text}")
    right = eval(text.replace("…", "'cpu'"))
    assert torch.equal(product(alpha=right), (product(out_dtype=torch.float32) * float(alpha)).bfloat16())


@pytest.mark.parametrize("value", ["0.5", [0.5], True, 1j])
def test_another_value_for_a_tensor(value):
    with pytest.raises(TypeError, match=r"expected a tensor or None$"):
        product(alpha=value)


def from_fp4(x):
    codes, scale = torch_cute_ops.fp4_quantize(x)
    return torch_cute_ops.mm_fp4(codes, CODES.t(), scale, SCALE)


def from_fp8(x):
    codes, scale = torch_cute_ops.fp8_quantize(x, granularity="block128")
    return torch_cute_ops.mm_fp8_fp4(codes, CODES.t(), scale, SCALE)


def quantising(x):
    return torch_cute_ops.fp4quant_mm_fp4(x, CODES.t(), SCALE)


@pytest.mark.parametrize("call", [product, from_fp4, from_fp8, quantising])
def test_three_dimensions(call):
    """Check that GEMMs accept only matrices, and that the error says how to make one."""
    with pytest.raises(ValueError, match=r"got a with shape \(2, 3, \d+\); expected \(M, .*; pass a.flatten\(0, -2\)$"):
        call(torch.randn(2, 3, K).bfloat16())
    with pytest.raises(ValueError, match=r"got a with shape \(128,\); expected \(M, K\)$"):
        product(X[0])


@pytest.mark.parametrize("bias", [None, torch.ones(N), torch.ones(N).bfloat16()], ids=["none", "fp32", "bf16"])
def test_a_wrong_dtype_of_the_result(bias):
    """Check that the error names the result's wrong dtype, and not the bias, whose allowed dtypes depend on it."""
    with pytest.raises(TypeError, match=r"out_dtype is torch.int8; expected bfloat16 or float16 or float32"):
        product(bias=bias, out_dtype=torch.int8)


def test_numbers_of_numpy():
    """Check that numbers of NumPy are accepted, because the dispatcher accepts them."""
    logits = torch.randn(5, 8)
    for got, want in zip(
        torch_cute_ops.moe_route(logits, np.int64(2)), torch_cute_ops.moe_route(logits, 2), strict=True
    ):
        assert torch.equal(got, want)
    weight = torch.ones(K, dtype=torch.bfloat16)
    got = torch_cute_ops.rmsnorm(X, weight, np.float32(0.5))
    assert torch.equal(got, torch_cute_ops.rmsnorm(X, weight, 0.5))
    y, scale = torch_cute_ops.fp4_quantize(X, block_size=np.int32(32))
    assert torch.equal(y, torch_cute_ops.fp4_quantize(X, block_size=32)[0]) and scale.dtype == torch.uint8
    with pytest.raises(TypeError, match=r"topk is .*2.5.*; expected an int"):
        torch_cute_ops.moe_route(logits, np.float32(2.5))
    with pytest.raises(TypeError, match=r"topk is .*; expected an int"):
        torch_cute_ops.moe_route(logits, np.bool_(True))


@pytest.mark.parametrize("timeout", ["x", None, True, [1]])
def test_a_timeout_that_is_no_number(timeout):
    with pytest.raises(TypeError, match=r"timeout_s=.*; use a number of seconds, 0 or more"):
        torch_cute_ops.autotune(timeout_s=timeout).__enter__()


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_out_of_range(timeout):
    with pytest.raises(ValueError, match=r"timeout_s=.*; use a number of seconds, 0 or more"):
        torch_cute_ops.autotune(timeout_s=timeout).__enter__()


# Arguments of layers and of warmup


@pytest.mark.parametrize("cls", [NVFP4Linear, MXFP4Linear, FP8TensorLinear])
def test_sizes_of_layers(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__}: in_features is '256', a str; expected an int"):
        cls("256", 256)
    with pytest.raises(TypeError, match=f"{cls.__name__}: out_features is 256.0, a float; expected an int"):
        cls(256, 256.0)
    layer = cls(np.int64(256), np.int64(64))
    assert (type(layer.in_features), type(layer.out_features)) == (int, int)
    assert repr(layer) == repr(cls(256, 64))


def test_rows_of_a_warmup(monkeypatch):
    """Check that ``warmup`` accepts a single number of rows as well as several."""
    counts = []
    monkeypatch.setattr(NVFP4Linear, "forward", lambda self, x: counts.append(len(x)))
    model = nn.Sequential(NVFP4Linear(256, 64))
    for rows in (4, [4], np.int64(4), (4, 4)):
        warmup(model, rows, fused=False)
    assert counts == [4] * 4
    for rows, shown in (((1, 2.5), "2.5, a float"), ("12", "'12', a str"), (True, "True, a bool"), ([None], "None")):
        with pytest.raises(TypeError, match=f"warmup: rows contains {shown}.*; expected positive integers"):
            warmup(model, rows)
    with pytest.raises(ValueError, match=r"warmup: rows contains 0; expected positive numbers"):
        warmup(model, 0)


def test_layers_to_merge():
    layer = NVFP4Linear(256, 64)
    for wrong, shown in ((nn.Linear, "the class Linear"), (nn.Linear(256, 64), "a Linear"), ("q_proj", "a str")):
        with pytest.raises(TypeError, match=rf"merge: layers\[1\] is {shown}; expected quantised layers"):
            merge([layer, wrong])
