"""Reference of ``moe_fc1_fp4``."""

from typing import Any

import torch

from torch_cute_ops.formats import SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import from_linear, to_linear
from torch_cute_ops.reference.fp4_dequantize import decode_rows
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.mm_fp4 import activations, apply_epilogue, formats_of, matmul_rows
from torch_cute_ops.reference.moe_fc2_fp4 import rows_of
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows

Tensor = torch.Tensor


def moe_fc1_fp4(w: Tensor, global_scale: Tensor | None, **named: Any) -> tuple[Tensor, Tensor]:
    """Apply the gate to each expert's gate and up columns, and quantise the result to FP4. Pairs that are not routed
    become zero. See the op's docstring."""
    fmt, layout, _ = formats_of(named["a_scale"], **named)
    return quantize_experts(gated_columns(w=w, **named), len(w), global_scale, fmt, layout)


def gated_columns(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    routing: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
    swiglu_alpha: float,
    swiglu_beta: float,
    swiglu_limit: float | None,
    gate: str,
    a_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    **formats: Any,
) -> Tensor:
    """Call ``gated_experts`` with the arguments of an op. 16-bit activations need no scales."""
    how = swiglu_alpha, swiglu_beta, swiglu_limit, gate
    resolved = formats_of(w_scale if a_scale is None else a_scale, **formats)
    return gated_experts(a, a_scale, w.mT, w_scale, routing, alpha, bias, how, *resolved, row_scale)


def gated_experts(
    a: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    routing: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
    gate: tuple[float, float, float | None, str],
    fmt: FP4Format,
    a_layout: ScaleLayout | None,
    w_layout: ScaleLayout,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Apply the gate to ``a @ w[e].T · row_scale · alpha + bias[e]`` for each expert: (M, E·I) float32, 0 if
    ``routing`` is 0. ``gate`` holds the arguments of ``silu_mul_rows``.

    Each product is accumulated in float64 and rounded to float32.
    """
    experts, lines, held = w.shape
    scales = to_linear(w_scale.view(fmt.scale_dtype), w_layout, experts * lines, 2 * held // fmt.block_size)
    left = activations(a, a_scale, fmt, a_layout)
    value = torch.zeros(len(a), experts, lines // 2, dtype=torch.float32, device=a.device)
    for expert, codes in enumerate(w.view(torch.uint8)):
        routed = routing[:, expert, None] != 0
        rows = rows_of(routed)
        if isinstance(rows, Tensor) and not len(rows):
            continue
        own = scales.view(experts, lines, -1)[expert]
        product = matmul_rows(left[rows], decode_rows(codes, own, fmt, SCALE_LAYOUTS["linear"]).double()).float()
        if row_scale is not None:
            product = product * row_scale[rows, None]
        factor = None if alpha is None else alpha[expert].repeat_interleave(lines // alpha[expert].numel())
        both = apply_epilogue(product, factor, None if bias is None else bias[expert], torch.float32)
        value[rows, expert] = torch.where(routed[rows], silu_mul_rows(both, *gate), 0.0)
    return value.flatten(1)


def quantize_experts(
    value: Tensor, experts: int, global_scale: Tensor | None, fmt: FP4Format, layout: ScaleLayout
) -> tuple[Tensor, Tensor]:
    """Quantise ``value`` (M, E·I) to codes and scales. ``global_scale`` has one element for all experts, or one per
    expert."""
    encode = [None] * experts if global_scale is None else list(global_scale.reshape(-1).expand(experts))
    parts = value.chunk(experts, 1)
    codes, scales = zip(
        *(quantize_rows(part, fmt, one, "linear") for part, one in zip(parts, encode, strict=True)), strict=True
    )
    joined = torch.cat([scale.view(torch.uint8) for scale in scales], 1).view(scales[0].dtype)
    return torch.cat(codes, 1), from_linear(joined, layout)


def written_parts(
    outputs: tuple[Tensor, ...], routing: Tensor, fmt: FP4Format, layout: ScaleLayout
) -> tuple[Tensor, Tensor]:
    """Return masks of the codes and of the scales that the op writes: the elements of routed pairs, and all padding."""
    skipped, width = routing == 0, outputs[0].shape[1] // routing.shape[1]
    scales = from_linear(skipped.repeat_interleave(2 * width // fmt.block_size, 1).to(torch.uint8), layout)
    return ~skipped.repeat_interleave(width, 1), scales == 0


def written(outputs: tuple[Tensor, ...], routing: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Return, for each output, a mask of the elements that the op writes."""
    fmt, layout, _ = formats_of(named["a_scale"], **named)
    return written_parts(outputs, routing, fmt, layout)
