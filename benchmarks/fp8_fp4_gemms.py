"""What the benchmarks of GEMMs of FP8 activations and FP4 weights share: weights, and our FP8 GEMMs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight

from .case import Case, Mark, Row, Tensors, at_least, at_most
from .fp8_gemms import BLOCK, DTYPE

FORMATS = {fmt.name: fmt for fmt in (MXFP4, NVFP4)}
FP8_WEIGHT = "fp8_weight"
"""The name of our GEMM with an FP8 weight of the same shape, twice as large."""
SCALE_BYTES = {"e4m3": (0x30, 0x41), "ue8m0": (126, 129)}
"""Ranges of random scales: 1/2 to 2."""
LAYOUT = SCALE_LAYOUTS["128x4"]
ABOUT = """\
The weight is re-encoded to FP8 while it is multiplied. "fp8_weight" is our GEMM with an FP8 weight of the same shape:
its weight takes twice the bytes, its numbers are others, and its results are not compared."""


def format_of(tensors: Tensors) -> FP4Format:
    """The format of a buffer set's weight."""
    return MXFP4 if tensors["b_scale"].dtype == torch.uint8 else NVFP4


def random_weight(fmt: FP4Format, *shape: int, device: torch.device) -> Tensors:
    """A weight (..., N, K): any code, and scales of ordinary size."""
    codes, scale = fp4_shapes(shape, fmt, LAYOUT)
    low, high = SCALE_BYTES[fmt.scale_format]
    return {
        "b": torch.randint(0, 256, codes, dtype=torch.uint8, device=device),
        "b_scale": torch.randint(low, high, scale, dtype=torch.uint8, device=device).view(fmt.scale_dtype),
    }


def decoded_weight(tensors: Tensors) -> torch.Tensor:
    """The numbers (..., N, K) by which a buffer set's activations are multiplied, in float64."""
    weight, factors = fp8_weight(tensors["b"], tensors["b_scale"], format_of(tensors), LAYOUT)
    return weight.double() * factors.double().repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]


def gemm(a: torch.Tensor, a_scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``a @ weight.T`` of e4m3 rows and decoded numbers, in float64, rounded to the result's dtype."""
    return ((a.double() * a_scale.t().double().repeat_interleave(BLOCK, 1)[:, : a.shape[1]]) @ weight.t()).to(DTYPE)


def times_over_fp8(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[float]:
    """Our time over that with an FP8 weight, of these rows."""
    return [
        row["variants"]["ours"]["us"] / row["variants"][FP8_WEIGHT]["us"]
        for row in rows
        if keep(row) and FP8_WEIGHT in row["variants"]
    ]


def few_rows_mark(name: str, ratios: Sequence[float], goal: float) -> Mark:
    """The largest of these times over FP8's."""
    return at_most(f"{name}: time over that with FP8 weights", max(ratios, default=None), goal, " ×")


def many_rows_mark(name: str, ratios: Sequence[float], goal: float) -> Mark:
    """The least of these rates over FP8's."""
    return at_least(
        f"{name}: rate over that with FP8 weights", min((1 / ratio for ratio in ratios), default=None), goal, " ×"
    )


def choices_of(case: Case) -> dict[str, Any]:
    """The static properties that a case's choices stand for."""
    return {"block_size": FORMATS[case.choices["weight"]].block_size}
