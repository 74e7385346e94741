"""The ops as compositions of plain torch operations, as a user would write them for `torch.compile`.

The benchmarks time these functions as baselines, eagerly or compiled by Inductor. They also check the kernels' results
against the results of these functions. docs/numerics.md defines the results.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_cute_ops.formats.experts import rows_bound

BLOCK = 16
E4M3_MAX = 448.0


def nvfp4_quantize(
    y: torch.Tensor, global_scale: torch.Tensor | float = 1.0, ratio: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (M, K) fp32 to packed e2m1 (M, K/2) uint8 and block scales (M, K/16) float8_e4m3fn. `global_scale` is
    one number, or (M, 1). Scales are multiplied by `ratio` before they are rounded."""
    blocks = y.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    scale = (amax * global_scale * (1 / 6) * ratio).clamp(max=E4M3_MAX)
    scale = torch.where(torch.isfinite(amax), scale, float("nan")).to(torch.float8_e4m3fn)
    decoded = scale.to(torch.float32)
    inverse = torch.where(decoded > 0, global_scale / decoded, 0.0)  # 0 if the block is all zero or contains NaN
    scaled = blocks * inverse.unsqueeze(-1)
    magnitude = scaled.abs().clamp(max=6.0)
    # Round half to even, to multiples of 0.5 below 2, of 1 from 2 to 4, and of 2 above 4.
    code = torch.where(
        magnitude < 2,
        torch.round(magnitude * 2),
        torch.where(magnitude < 4, torch.round(magnitude) + 2, torch.round(magnitude * 0.5) + 4),
    )
    code = code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    code = torch.where(inverse.unsqueeze(-1) > 0, code, 0)
    pairs = code.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale


def to_128x4(scale: torch.Tensor) -> torch.Tensor:
    """Convert row-major scales (M, K/16) float8_e4m3fn to the "128x4" layout of cuBLAS, (⌈M/128⌉, ⌈K/64⌉, 32, 4, 4),
    with zero padding."""
    rows, columns = scale.shape
    row_tiles, column_tiles = (rows + 127) // 128, (columns + 3) // 4
    padding = (0, column_tiles * 4 - columns, 0, row_tiles * 128 - rows)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), padding)
    tiles = padded.view(row_tiles, 4, 32, column_tiles, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(torch.float8_e4m3fn)


def from_128x4(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Convert scales in the layout of `to_128x4` to a row-major matrix (rows, columns), without padding."""
    padded = scale.view(torch.uint8).permute(0, 3, 2, 1, 4).reshape(scale.shape[0] * 128, scale.shape[1] * 4)
    return padded[:rows, :columns].contiguous().view(torch.float8_e4m3fn)


def nvfp4_dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Decode packed e2m1 (M, K/2) with row-major block scales (M, K/16) to (M, K). The result is exact in bfloat16 and
    in wider dtypes."""
    step = torch.arange(8, dtype=dtype, device=codes.device)  # a CUDA graph cannot capture a copy from the host
    magnitudes = torch.where(step < 4, step / 2, torch.where(step < 6, step - 2, step * 2 - 8))
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=codes.device)
    pairs = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1)[codes.long()]
    blocks = pairs.view(*scale.shape, BLOCK)
    return blocks.mul_(scale.float().to(dtype).unsqueeze(-1)).flatten(-2)


def rmsnorm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalised rows in fp32."""
    v = x.to(torch.float32)
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight.to(torch.float32)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the normalised rows in the input dtype."""
    return rmsnorm_fp32(x, weight, eps).to(x.dtype)


def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to the residual in place, and return `rmsnorm` of the sum."""
    return rmsnorm(residual.add_(x), weight, eps)


def fp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to NVFP4 with 128x4 scales."""
    y, scale = nvfp4_quantize(x.to(torch.float32))
    return y, to_128x4(scale)


def fp4_dequantize(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decode NVFP4 with 128x4 scales to bfloat16."""
    return nvfp4_dequantize(y, from_128x4(scale, y.shape[0], y.shape[1] // 8), torch.bfloat16)


def rmsnorm_fp4quant(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm, then quantise to NVFP4 with 128x4 scales."""
    y, scale = nvfp4_quantize(rmsnorm_fp32(x, weight, eps))
    return y, to_128x4(scale)


def rmsnorm_fp4quant_with_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return NVFP4 codes and 128x4 scales of RMSNorm, and the normalised rows in the input dtype."""
    norm = rmsnorm_fp32(x, weight, eps)
    y, scale = nvfp4_quantize(norm)
    return y, to_128x4(scale), norm.to(x.dtype)


def add_rmsnorm_fp4quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual in place, and return `rmsnorm_fp4quant` of the sum."""
    return rmsnorm_fp4quant(residual.add_(x), weight, eps)


def add_rmsnorm_fp4quant_with_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add `x` to the residual in place, and return `rmsnorm_fp4quant_with_norm` of the sum."""
    return rmsnorm_fp4quant_with_norm(residual.add_(x), weight, eps)


def add_rmsnorm_fp4quant_both_layouts(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of `add_rmsnorm_fp4quant`, and the scales once more in the linear layout."""
    y, scale = nvfp4_quantize(rmsnorm_fp32(residual.add_(x), weight, eps))
    return y, to_128x4(scale), scale


def add_rmsnorm_fp4quant_with_norm_both_layouts(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of `add_rmsnorm_fp4quant_with_norm`, and the scales once more in the linear layout."""
    norm = rmsnorm_fp32(residual.add_(x), weight, eps)
    y, scale = nvfp4_quantize(norm)
    return y, to_128x4(scale), scale, norm.to(x.dtype)


def silu_mul_fp32(x: torch.Tensor) -> torch.Tensor:
    """Multiply the SiLU of each row's first half by the second half, in fp32."""
    gate, up = x.to(torch.float32).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu_mul_fp32` in the input dtype."""
    return silu_mul_fp32(x).to(x.dtype)


def silu_mul_fp4quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the result of `silu_mul_fp32` to NVFP4 with 128x4 scales."""
    y, scale = nvfp4_quantize(silu_mul_fp32(x))
    return y, to_128x4(scale)


def fp4_quantize_four_over_six(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to NVFP4 with 128x4 scales. Each block gets the scale of two that has the smaller sum of squared
    errors."""
    y = x.to(torch.float32)
    (codes, scale), (larger_codes, larger_scale) = nvfp4_quantize(y), nvfp4_quantize(y, ratio=1.5)
    squares, larger_squares = (
        (nvfp4_dequantize(*each, torch.float32) - y).square().unflatten(-1, (-1, BLOCK))
        for each in ((codes, scale), (larger_codes, larger_scale))
    )
    while squares.shape[-1] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
        larger_squares = larger_squares[..., 0::2] + larger_squares[..., 1::2]
    larger = larger_squares < squares
    chosen = torch.where(larger, larger_codes.unflatten(-1, (-1, BLOCK // 2)), codes.unflatten(-1, (-1, BLOCK // 2)))
    bytes_ = torch.where(larger.squeeze(-1), larger_scale.view(torch.uint8), scale.view(torch.uint8))
    return chosen.flatten(-2), to_128x4(bytes_.view(scale.dtype))


def nvfp4_quantize_per_token(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise (M, K) fp32 to NVFP4 with 128x4 scales and a scale per row, (M,). Rows of extreme magnitude are not
    handled."""
    amax = y.abs().amax(-1)
    # Divide by a tensor: on a GPU, torch computes a division by a Python number as a multiplication by the reciprocal.
    row_scale = amax / torch.full_like(amax, 2688)
    factor = torch.where(row_scale > 0, 1 / row_scale, row_scale)
    codes, scale = nvfp4_quantize(y, factor.unsqueeze(-1))
    return codes, to_128x4(scale), row_scale


def fp4_quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise to NVFP4 with a scale per row."""
    return nvfp4_quantize_per_token(x.to(torch.float32))


def rmsnorm_fp4quant_per_token(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply RMSNorm, then quantise to NVFP4 with a scale per row."""
    return nvfp4_quantize_per_token(rmsnorm_fp32(x, weight, eps))


def add_rmsnorm_fp4quant_per_token(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add `x` to the residual in place, and return `rmsnorm_fp4quant_per_token` of the sum."""
    return rmsnorm_fp4quant_per_token(residual.add_(x), weight, eps)


def silu_mul_fp4quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the result of `silu_mul_fp32` to NVFP4 with a scale per row."""
    return nvfp4_quantize_per_token(silu_mul_fp32(x))


def e4m3_quantize(
    y: torch.Tensor, scale: torch.Tensor | None, granularity: str, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise (M, K) fp32 to e4m3 with fp32 scales.

    With granularity "tensor", the scale is the argument `scale`. Otherwise each scale is amax / 448 of a row, giving
    (M, 1), or of 128 elements, giving (M, K/128). In the column layout the matrix of scales is column-major.
    """
    if scale is not None:
        return (y / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale.clone()
    blocks = y.unflatten(-1, (-1, 128 if granularity == "block128" else y.shape[-1]))
    amax = blocks.abs().amax(-1)
    # Divide by a tensor: on a GPU, torch computes a division by a Python number as a multiplication by the reciprocal.
    scale = torch.where(torch.isfinite(amax), amax / torch.full_like(amax, E4M3_MAX), float("nan"))
    divisor = scale.unsqueeze(-1)
    scaled = torch.where(divisor > 0, blocks / divisor, 0.0)  # 0 if the block is all zero or contains NaN
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    return codes, scale.t().contiguous().t() if scale_layout == "column" else scale


def fp8_quantize(
    x: torch.Tensor, scale: torch.Tensor | None = None, granularity: str = "token", scale_layout: str = "row"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3, and return the codes and scales."""
    return e4m3_quantize(x.to(torch.float32), scale, granularity, scale_layout)


def fp8_quantize_per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one scale, amax / 448 of the tensor, and return the codes and the scale."""
    codes, scale = e4m3_quantize(x.to(torch.float32).view(1, -1), None, "token", "row")
    return codes.view(x.shape), scale.view(1)


def fp8_quantize_block128x128(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to e4m3 with a scale per 128 × 128 elements, and return the codes and scales."""
    m, h = x.shape
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, -h % 128, 0, -m % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    codes, scale = e4m3_quantize(blocks.flatten(2).flatten(0, 1), None, "token", "row")
    codes = codes.view(torch.uint8).view(blocks.shape).transpose(1, 2).reshape(padded.shape)[:m, :h].contiguous()
    return codes.view(torch.float8_e4m3fn), scale.view(blocks.shape[:2])


def rmsnorm_fp8quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    granularity: str = "token",
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm, quantise the normalised rows to e4m3, and return the codes and scales."""
    return e4m3_quantize(rmsnorm_fp32(x, weight, eps), scale, granularity, scale_layout)


def add_rmsnorm_fp8quant(
    x: torch.Tensor, residual: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual in place, and return `rmsnorm_fp8quant` of the sum."""
    return rmsnorm_fp8quant(residual.add_(x), *rest, **named)


def silu_mul_fp8quant(
    x: torch.Tensor, scale: torch.Tensor | None = None, granularity: str = "token", scale_layout: str = "row"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the result of `silu_mul_fp32` to e4m3, and return the codes and scales."""
    return e4m3_quantize(silu_mul_fp32(x), scale, granularity, scale_layout)


# --- routing: DeepSeek-V3's choice of experts (sigmoid scores, expert groups), and the order of the experts' rows ---


def choose_experts(
    logits: torch.Tensor, topk: int, num_groups: int, topk_groups: int, scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token. Return their routing weights, (M, topk) float32, and their indices, (M, topk)
    int64. The order of experts with equal scores is unspecified."""
    scores = logits.to(torch.float32).sigmoid()
    groups = scores.unflatten(1, (num_groups, -1))
    best = groups.topk(2, dim=2).values.sum(2).topk(topk_groups, dim=1).indices
    left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, best, False)
    weights, ids = groups.masked_fill(left_out.unsqueeze(-1), -1.0).flatten(1).topk(topk, dim=1)
    return weights / weights.sum(1, keepdim=True) * scaling_factor, ids


def moe_route_dense(
    logits: torch.Tensor, topk: int, scoring: str, num_groups: int, topk_groups: int, scaling_factor: float
) -> torch.Tensor:
    """Choose experts with `choose_experts`, and write their routing weights to a matrix (M, E) with zeros elsewhere.
    The argument `scoring` must be "sigmoid"."""
    weights, ids = choose_experts(logits, topk, num_groups, topk_groups, scaling_factor)
    return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter(1, ids, weights)


def moe_route_ids(
    ids: torch.Tensor, experts: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, expert) pairs by expert. Return the row of each pair, the pair of each row, and each expert's offset
    and number of rows."""
    tokens, topk = ids.shape
    expert, order = ids.flatten().sort(stable=True)
    expert = expert.long()
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    padded = (counts + alignment - 1) // alignment * alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0)).to(torch.int32)
    firsts = offsets[:-1] - (counts.cumsum(0) - counts)  # add this to the index of a sorted pair to get its row
    row = torch.arange(tokens * topk, device=ids.device) + firsts[expert]
    rows = torch.full((rows_bound(tokens, topk, experts, alignment),), -1, dtype=torch.int32, device=ids.device)
    rows.scatter_(0, row, order.to(torch.int32))
    places = torch.empty(tokens * topk, dtype=torch.int32, device=ids.device).scatter_(0, order, row.to(torch.int32))
    return places.view(tokens, topk), rows, offsets, counts


def moe_route(
    logits: torch.Tensor,
    topk: int,
    scoring: str,
    num_groups: int,
    topk_groups: int,
    scaling_factor: float,
    alignment: int,
) -> tuple[torch.Tensor, ...]:
    """Choose experts with `choose_experts`. Return their weights and indices, and the results of `moe_route_ids`. The
    argument `scoring` must be "sigmoid"."""
    weights, ids = choose_experts(logits, topk, num_groups, topk_groups, scaling_factor)
    ids = ids.to(torch.int32)
    return weights, ids, *moe_route_ids(ids, logits.shape[1], alignment)


# --- around attention: norm and rotation of q and k, and the write of k and v to paged caches ---


def rotated_heads(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply the rotary embedding, in halves, to the heads of q and k, (M, heads, D). Return both in their dtype."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    results = []
    for heads in (q, k):
        a, b = heads.to(torch.float32).chunk(2, -1)
        results.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(heads.dtype))
    return tuple(results)


def append_heads(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    block_scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Write heads of k and v, (M, heads, D), to slots of contiguous caches: in 16 bits, in FP8 with scales, or in NVFP4
    with scales and block scales."""
    for heads, cache, scale, block_scale in zip((k, v), caches, scales, block_scales, strict=True):
        if block_scale is not None:
            assert scale is not None
            codes, scales_of_blocks = nvfp4_quantize((heads.to(torch.float32) * (1.0 / scale)).flatten(0, 1))
            flat = block_scale.view(torch.uint8).flatten(0, 1)
            flat[slots] = scales_of_blocks.view(torch.uint8).view(len(slots), *flat.shape[1:])
            cache.flatten(0, 1)[slots] = codes.view(len(slots), *cache.shape[2:])
        elif scale is not None:
            fp8, _ = e4m3_quantize(heads.to(torch.float32), scale, "tensor", "row")
            cache.view(torch.uint8).flatten(0, 1)[slots] = fp8.view(torch.uint8)
        else:
            cache.flatten(0, 1)[slots] = heads


def qkv_norm_rope_append(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    key_block_scale: torch.Tensor | None = None,
    value_block_scale: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the heads of q and k, write k and v to the caches, and return q. Each step rounds to the
    dtype of `qkv`, as engines do. With `compiled`, Inductor compiles each step separately."""
    norm, rotate, write = (
        torch.compile(each, fullgraph=True, dynamic=False) if compiled else each
        for each in (rmsnorm, rotated_heads, append_heads)
    )
    heads = qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1))
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), 1)
    q, k = rotate(norm(q, q_norm, eps), norm(k, k_norm, eps), cos_sin, positions)
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    write(k, v, slots, caches, scales, (key_block_scale, value_block_scale))
    return q
