"""Reference of ``qkv_norm_rope_append``."""

import torch
from torch import Tensor

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.formats.fp4 import encode_e4m3
from torch_cute_ops.reference.fp4_quantize import quantize_rows


def qkv_norm_rope_append(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    q_heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    norm_plus_one: bool,
    interleaved: bool,
    rotary_dim: int | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    key_block_scale: Tensor | None,
    value_block_scale: Tensor | None,
    q_dtype: torch.dtype | None,
) -> Tensor:
    """Normalise and rotate q and k, write k and v to the caches, and return q; see the op's docstring."""
    heads = qkv.float().unflatten(-1, (q_heads + 2 * kv_heads, -1))
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
    table = cos_sin.float()[positions.long()].unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    q = rotate(normalise(q, q_norm, eps, norm_plus_one), cos, sin, interleaved)
    k = rotate(normalise(k, k_norm, eps, norm_plus_one), cos, sin, interleaved)
    append(k, slots, key_cache, k_scale, key_block_scale)
    append(v, slots, value_cache, v_scale, value_block_scale)
    return stored(q, qkv.dtype if q_dtype is None else q_dtype, q_scale).contiguous()


def normalise(value: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """RMS-normalise the last dimension of fp32 values in a fixed order of additions; return the values if ``weight`` is
    None.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.
    """
    if weight is None:
        return value
    width = value.shape[-1]
    total = value.square()
    # Add neighbours, then neighbouring sums, and so on. Zeros extend the row to a power of two.
    total = torch.nn.functional.pad(total, (0, (1 << (width - 1).bit_length()) - width))
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    # Compute the root in fp64 and round it: torch's fp32 root on a CPU is not always the nearest number.
    root = (total * (1.0 / width) + eps).double().sqrt().float()
    factor = weight.float() + 1.0 if plus_one else weight.float()
    # Divide a tensor of ones, because torch may divide a Python number by a tensor as a product with the reciprocal.
    return value * (torch.ones_like(root) / root) * factor


def rotate(value: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of each head in pairs, one pair per column of ``cos``; the other elements are
    unchanged.

    A pair is two neighbouring elements if ``interleaved``, otherwise element i of the first and of the second half.
    """
    pairs = cos.shape[-1]
    rotated, rest = value[..., : 2 * pairs], value[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]
    turned = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), -1)


def stored(value: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Round fp32 heads (M, heads, D) to ``dtype``; divide them first by ``scale``, one number or one per head."""
    if dtype != torch.float8_e4m3fn:
        return value.to(dtype)
    return encode_e4m3(value if scale is None else value / scale.reshape(-1, 1))


def append(value: Tensor, slots: Tensor, cache: Tensor, scale: Tensor | None, block_scale: Tensor | None) -> None:
    """Write heads (M, heads, D) to the slots of a cache (blocks, page, heads, ...), except where a slot is -1."""
    places = slots.long()
    kept = places >= 0
    places, rows = places[kept], value[: len(slots)][kept]
    page = cache.shape[1]
    at = (places // page, places % page) if page else (places, places)
    if block_scale is None:
        written = [(cache, stored(rows, cache.dtype, scale))]
    else:
        # Quantise head by head, because each head may have a separate global scale.
        factor = torch.ones(1, device=rows.device) if scale is None else scale.reshape(-1)
        encode = torch.ones_like(factor) / factor
        heads = [
            quantize_rows(rows[:, h], NVFP4, encode[h : h + 1] if len(encode) > 1 else encode, "linear")
            for h in range(rows.shape[1])
        ]
        codes, scales = (torch.stack(part, 1) for part in zip(*heads, strict=True))
        written = [(cache, codes), (block_scale, scales)]
    for target, new in written:
        # Index bytes, because torch before 2.13 cannot index FP8 tensors.
        view = torch.uint8 if target.itemsize == 1 else target.dtype
        target.view(view)[at] = new.view(view)
