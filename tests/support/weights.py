"""Decode quantised weights in float64 with the formulas of ``spec``. The tensors are as checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from support import spec

Tensors = Mapping[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor with one-byte elements."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def fp4(codes: torch.Tensor, scale: torch.Tensor, factor: np.ndarray | float = 1.0) -> np.ndarray:
    """Decode packed codes (N, K/2) with linear scales: ``e2m1 · scale · factor``, with one factor or one per row."""
    numbers = spec.e2m1_value(spec.unpack(raw(codes))).astype(np.float64)
    kind = "e4m3" if scale.dtype == torch.float8_e4m3fn else "ue8m0"
    scales = spec.scale_value(raw(scale), kind).astype(np.float64)
    return numbers * scales.repeat(numbers.shape[1] // scales.shape[1], 1) * np.asarray(factor).reshape(-1, 1)


def fp8_blocks(elements: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Multiply elements (N, K) by the scales (⌈N/128⌉, ⌈K/128⌉) of their blocks."""
    numbers = spec.scale_value(raw(elements), "e4m3").astype(np.float64)
    scales = scale.detach().cpu().double().numpy().repeat(128, 0).repeat(128, 1)
    return numbers * scales[: numbers.shape[0], : numbers.shape[1]]


def mxfp8(elements: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Multiply elements (N, K) by linear ue8m0 scales (N, K/32) of uint8 or float8_e8m0fnu."""
    numbers = spec.scale_value(raw(elements), "e4m3").astype(np.float64)
    return numbers * spec.scale_value(raw(scale), "ue8m0").astype(np.float64).repeat(32, 1)


def fp8_rows(elements: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Multiply elements (N, K) by one scale, or by one scale per row."""
    numbers = spec.scale_value(raw(elements), "e4m3").astype(np.float64)
    return numbers * scale.detach().cpu().double().numpy().reshape(-1, 1)


def decoded(tensors: Tensors, parts: tuple[int, ...]) -> np.ndarray:
    """Decode the weight (N, K) in the state dict of a quantised layer."""
    if "weight_scale_inv" in tensors:
        return fp8_blocks(tensors["weight"], tensors["weight_scale_inv"])
    if tensors["weight"].dtype == torch.float8_e4m3fn:
        scale = tensors["weight_scale"]
        if scale.dtype == torch.uint8:
            return mxfp8(tensors["weight"], scale)
        if len(scale) == len(parts):  # one scale per part, not per row
            scale = scale.cpu().repeat_interleave(torch.tensor(parts))
        return fp8_rows(tensors["weight"], scale)
    factor = tensors["weight_scale_2"].double().numpy().repeat(parts) if "weight_scale_2" in tensors else 1.0
    return fp4(tensors["weight"], tensors["weight_scale"], factor)
