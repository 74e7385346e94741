"""Expected results of the ops, computed with ``spec.py``. Each op is checked by the module of the same name.

A module defines ``SCHEMA`` and ``OUT_SCHEMA``, the schemas promised to users; ``results(given)``, which returns the
expected outputs on the CPU for arguments by name; and ``assert_results(actual, expected, given)``. A module may define
``rows_alone(given, outputs)``, which yields calls with a few of the rows, and the expected results of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from support import spec

Tensors = tuple[torch.Tensor, ...]
SWIGLU = {"alpha": 1.0, "beta": 0.0, "limit": None}
"""Parameters of the gate ``silu(gate) · up``."""

_WITHIN = torch.arange(256)
INTERLEAVED = (
    128 * (_WITHIN // 32 % 2) + 32 * (_WITHIN // 8 % 4) + 16 * (_WITHIN // 4 % 2) + 4 * (_WITHIN // 64) + _WITHIN % 4
)
"""Position of each of 256 elements of a row whose k is interleaved, as docs/formats.md describes it."""


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, (..., itemsize), contiguous and on the CPU."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 1:
        # View as bytes first, because some modes cannot copy some one-byte dtypes.
        tensor = tensor.view(torch.uint8)
    # Copy to contiguous strides, also in dimensions of size 1.
    packed = tensor.clone(memory_format=torch.contiguous_format).cpu()
    return packed.reshape(*tensor.shape, 1).view(torch.uint8)


def assert_same(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], given: Any = None) -> None:
    """Check that dtypes, shapes and bytes are equal. All NaNs of a dtype count as equal, except in one-byte formats."""
    for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert got.dtype == want.dtype and got.shape == want.shape, f"output {i}: {got.dtype} {got.shape}"
        different = (raw(got) != raw(want)).any(-1)
        if got.dtype.is_floating_point and got.dtype.itemsize > 1:
            different &= ~(got.isnan().cpu() & want.isnan().cpu())
        assert not different.any(), (
            f"output {i}: {int(different.sum())} of {different.numel()} elements differ, "
            f"first at {different.nonzero()[:4].tolist()}"
        )


def rows_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a floating-point tensor as rows of fp32 values, on the CPU."""
    return tensor.detach().cpu().float().reshape(-1, tensor.shape[-1]).numpy()


def scalar_of(tensor: torch.Tensor | None) -> float | None:
    return None if tensor is None else float(tensor.detach().cpu())


def quantised(value: np.ndarray, lead: torch.Size, given: dict[str, Any]) -> Tensors:
    """Quantise fp32 rows to FP4 with the call's options; return ``(y, scale)``. ``lead`` are the leading dimensions of
    the input."""
    if given.get("four_over_six"):
        blocks = spec.quantise_four_over_six(value, scalar_of(given["global_scale"]))
    else:
        blocks = spec.quantise(value, given["block_size"], scalar_of(given["global_scale"]))
    scale = torch.from_numpy(spec.arrange(blocks.scales, given["scale_layout"]))
    if given["scale_layout"] == "linear":
        scale = scale.reshape(*lead, scale.shape[-1])
    if given["block_size"] == 16:
        scale = scale.view(torch.float8_e4m3fn)
    packed = torch.from_numpy(blocks.packed)
    return packed.reshape(*lead, packed.shape[-1]), scale


def quantised_per_token(value: np.ndarray, lead: torch.Size, given: dict[str, Any]) -> Tensors:
    """Quantise fp32 rows to NVFP4 with a scale per row; return ``(y, scale, row_scale)``. ``lead`` are the leading
    dimensions of the input."""
    blocks, row_scale = spec.quantise_per_token(value)
    scale = torch.from_numpy(spec.arrange(blocks.scales, given["scale_layout"]))
    if given["scale_layout"] == "linear":
        scale = scale.reshape(*lead, scale.shape[-1])
    packed = torch.from_numpy(blocks.packed)
    y = packed.reshape(*lead, packed.shape[-1])
    return y, scale.view(torch.float8_e4m3fn), torch.from_numpy(row_scale)


def quantised_fp8(value: np.ndarray, lead: torch.Size, given: dict[str, Any]) -> Tensors:
    """Quantise fp32 rows to FP8 with the call's options; return ``(y, scale)``. ``lead`` are the leading dimensions of
    the input."""
    named = given["granularity"], scalar_of(given["scale"]), given.get("scale_format")
    codes, scales = map(torch.from_numpy, spec.quantise_fp8(value, *named))
    y = codes.view(torch.float8_e4m3fn).reshape(*lead, codes.shape[-1])
    if given.get("interleaved"):
        stored = torch.zeros(*lead, -(-y.shape[-1] // 256) * 256, dtype=torch.uint8)
        stored[..., : y.shape[-1]] = y.view(torch.uint8)
        stored = stored.unflatten(-1, (-1, 256))
        y = torch.empty_like(stored).index_copy_(-1, INTERLEAVED, stored).view(y.dtype)
    if given["granularity"] == "tensor":
        return y, scales
    if given["granularity"] == "block32" and given["scale_layout"] != "linear":
        return y, torch.from_numpy(spec.arrange(scales.numpy(), given["scale_layout"] or "128x4"))
    return y, scales.reshape(*lead, scales.shape[-1])


def in_order(y: torch.Tensor, k: int) -> torch.Tensor:
    """Return interleaved codes (..., ⌈K/256⌉, 256) in the order of k. Check that codes beyond K are zero."""
    codes = y.view(torch.uint8)[..., INTERLEAVED.to(y.device)].flatten(-2)
    assert y.dim() > 1 and y.shape[-2:] == (-(-k // 256), 256) and not codes[..., k:].any()
    return codes[..., :k].contiguous().view(y.dtype)


def gated(rows: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """Compute the gate of fp32 rows: the first half of a row gates the second half."""
    if given.get("gate") == "relu2":
        return spec.relu2_mul(rows)
    if given.get("gate", "silu") != "silu":
        return spec.gelu_mul(rows, given["gate"])
    parameters = tuple(given.get(f"swiglu_{name}", usual) for name, usual in SWIGLU.items())
    if parameters == tuple(SWIGLU.values()):
        return spec.silu_mul(rows)
    return spec.swiglu(rows, *parameters)


def residual_sum(given: dict[str, Any]) -> torch.Tensor:
    """Return the expected residual after the call has updated it."""
    residual = given["residual"]
    total = spec.add(rows_of(given["input"]), rows_of(residual), str(residual.dtype).removeprefix("torch."))
    return torch.from_numpy(total).to(residual.dtype).reshape(residual.shape)


def after_addition(norm: Any) -> tuple[Callable[..., Tensors], Callable[..., None]]:
    """Return the functions ``results`` and ``assert_results`` for an op that first adds to the residual and then
    computes the op of the module ``norm``. The residual must be exact."""

    def results(given: dict[str, Any]) -> Tensors:
        """Return the expected outputs and the expected residual."""
        total = residual_sum(given)
        return *norm.results({**given, "input": total}), total

    def assert_results(actual: Tensors, expected: Tensors, given: dict[str, Any]) -> None:
        assert_same(actual[-1:], expected[-1:])
        rounded = {"input": expected[-1], "dtype": given["input"].dtype}
        norm.assert_results(actual[:-1], expected[:-1], {**given, **rounded})

    return results, assert_results
