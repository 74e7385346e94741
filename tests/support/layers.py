"""All kinds of quantised linear layers, and their expected results in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expected._fp8_fp4 import fp4_weight
from expected._fp8_gemm import BLOCK, PROMOTED, sum_of_block, sum_of_tokens
from torch._dynamo.testing import CompileCounterWithBackend

from support import spec, weights
from torch_cute_ops.nn import (
    FP8BlockLinear,
    FP8ChannelLinear,
    FP8TensorLinear,
    MXFP4Linear,
    MXFP8Linear,
    NVFP4Linear,
    QuantLinear,
)

CLASSES = (NVFP4Linear, MXFP4Linear, FP8BlockLinear, MXFP8Linear, FP8TensorLinear, FP8ChannelLinear)
KINDS = [(cls, activations) for cls in CLASSES for activations in cls.choices]
by_kind = pytest.mark.parametrize(
    ("cls", "activations"), KINDS, ids=[f"{cls.scheme}-{activations}" for cls, activations in KINDS]
)


def has_row_scales(layer: QuantLinear) -> bool:
    """Return True if the layer's FP8 activations have one scale per row, or one scale for all rows."""
    return layer.scheme in ("fp8_tensor", "fp8_channel") or layer.activations == "fp8_token"


def as_multiplied(x: torch.Tensor, layer: QuantLinear) -> np.ndarray:
    """Return, in float64, the rows (M, K) that the layer's GEMM multiplies for the input ``x``."""
    rows = x.flatten(0, -2).float().cpu().numpy()
    if layer.activations == "16bit":
        rows = x.flatten(0, -2).bfloat16().float().cpu().numpy() if layer.scheme == "mxfp4" else rows
        return rows.astype(np.float64)
    if layer.activations in ("fp8", "fp8_token"):
        has_rows = has_row_scales(layer)
        granularity, scale = "token" if has_rows else "block32" if layer.scheme == "mxfp8" else "block128", None
        if has_rows and layer.has_input_scale:
            granularity, scale = "tensor", layer.input_scale.item()
        elements, scales = spec.quantise_fp8(rows, granularity, scale)
        numbers = spec.scale_value(elements, "e4m3").astype(np.float64)
        if granularity == "block128":
            scales = scales.repeat(128, 1)[:, : rows.shape[1]]
        if granularity == "block32":
            scales = spec.scale_value(scales, "ue8m0").repeat(32, 1)
        return numbers * scales.astype(np.float64)
    if layer.activations == "fp4_token":
        found, row_scales = spec.quantise_per_token(rows)
        scales = spec.scale_value(found.scales, "e4m3").astype(np.float64).repeat(16, 1)
        return spec.e2m1_value(found.codes).astype(np.float64) * scales * row_scales[:, None].astype(np.float64)
    factor = None if layer.scheme == "mxfp4" else np.float32(1) / np.float32(layer.input_scale.item())
    found = spec.quantise(rows, layer.format.block_size, factor)
    scales = spec.scale_value(found.scales, layer.format.scale_format).astype(np.float64)
    numbers = spec.e2m1_value(found.codes).astype(np.float64) * scales.repeat(layer.format.block_size, 1)
    return numbers if factor is None else numbers * float(layer.input_scale)


def assert_computes(layer: QuantLinear, x: torch.Tensor) -> None:
    """Check ``layer(x)`` against the float64 product. The allowed error is the error of fp32 accumulation plus one
    rounding."""
    assert_product(layer(x), layer, x)


def weight_multiplied(layer: QuantLinear) -> np.ndarray:
    """Return the weight (N, K) that the layer's GEMM multiplies, in float64. If activations are FP8, an FP4 weight is
    re-encoded in FP8."""
    tensors = {name: each.cpu() for name, each in layer.state_dict().items()}
    if layer.activations not in ("fp8", "fp8_token") or layer.scheme not in ("nvfp4", "mxfp4"):
        return weights.decoded(tensors, layer.parts)
    return recoded(tensors, layer, has_row_scales(layer))


def recoded(tensors: dict[str, torch.Tensor], layer: QuantLinear, by_row: bool) -> np.ndarray:
    """Return the FP8 weight by which an FP4 layer multiplies FP8 activations, computed from the layer's tensors. If
    ``by_row``, the activations have one scale per row."""
    span = layer.in_features if by_row else BLOCK
    given = tensors["weight"], tensors["weight_scale"], "linear", layer.format.block_size
    elements, factors = fp4_weight(*given, span)
    whole = elements * factors.repeat(span, 1)[:, : layer.in_features]
    if layer.scheme == "nvfp4":
        whole *= tensors["weight_scale_2"].double().numpy().repeat(layer.parts)[:, None]
    return whole


def assert_product(got: torch.Tensor, layer: QuantLinear, x: torch.Tensor) -> None:
    """Check ``got`` against the float64 product of ``x`` and the layer's weight."""
    assert got.shape == (*x.shape[:-1], layer.out_features) and got.dtype == x.dtype
    k = layer.in_features
    a, b = as_multiplied(x, layer), weight_multiplied(layer)
    want = a @ b.T + (0 if layer.bias is None else layer.bias.double().cpu().numpy())
    bound = (np.abs(a) @ np.abs(b).T + np.abs(want)) * (k + 4) * 2.0**-24 + np.abs(want) * torch.finfo(x.dtype).eps
    if has_row_scales(layer):
        bound += sum_of_tokens(a, b, PROMOTED // BLOCK, x.device.type)[1]
    elif layer.activations == "fp8":
        blocks = [slice(begin, begin + BLOCK) for begin in range(0, k, BLOCK)]
        bound += sum(sum_of_block(a[:, block], b[:, block], x.device.type).bound for block in blocks)
    error = np.abs(got.flatten(0, -2).double().cpu().numpy() - want)
    assert (error <= bound + 1e-30).all(), f"off by {(error - bound).max()}"


@torch.no_grad()
def assert_compiles_once(layer: QuantLinear) -> None:
    """Check that one compiled full graph serves every number of rows, with the same results as the layer."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for rows in (2, 3, 17):
        x = torch.randn(rows, 4, layer.in_features).bfloat16()
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def assert_same_layer(actual: QuantLinear, expected: QuantLinear) -> None:
    assert actual.scheme == expected.scheme
    got, want = actual.tensors(), expected.tensors()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (actual.bias is None) == (expected.bias is None)
    assert actual.bias is None or torch.equal(actual.bias, expected.bias)
