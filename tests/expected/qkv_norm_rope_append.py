"""``qkv_norm_rope_append``: q and both caches must equal the specification bit for bit."""

import numpy as np
import torch
from support import spec

from expected import Tensors, assert_same, rows_of

_ARGUMENTS = (
    "Tensor qkv, Tensor cos_sin, Tensor positions, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "int q_heads, int kv_heads, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, bool norm_plus_one=False, "
    "bool interleaved=False, int? rotary_dim=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor(c!)? key_block_scale=None, Tensor(d!)? value_block_scale=None, ScalarType? q_dtype=None"
)
SCHEMA = f"cute::qkv_norm_rope_append({_ARGUMENTS}) -> Tensor"
OUT_SCHEMA = f"cute::qkv_norm_rope_append.out({_ARGUMENTS}, *, Tensor(e!) out) -> ()"

UPDATED = ("key_cache", "value_cache", "key_block_scale", "value_block_scale")


def results(given) -> Tensors:
    """Return q, and the caches and block scales after the call."""
    with np.errstate(all="ignore"):
        count = given["q_heads"] + 2 * given["kv_heads"]
        heads = rows_of(given["qkv"]).reshape(-1, count, given["qkv"].shape[1] // count)
        q, k, v = np.split(heads, np.cumsum([given["q_heads"], given["kv_heads"]]), axis=1)
        q, k = (turned(normed(part, given[name], given), given) for part, name in ((q, "q_norm"), (k, "k_norm")))
        dtype = given["q_dtype"] or given["qkv"].dtype
        stored = {name: given[name].clone() for name in UPDATED if given[name] is not None}
        write(stored, "key", k, given["k_scale"], given)
        write(stored, "value", v, given["v_scale"], given)
        return encoded(q, dtype, given["q_scale"]), *stored.values()


assert_results = assert_same


def normed(heads: np.ndarray, weight: torch.Tensor | None, given) -> np.ndarray:
    """Normalise heads (M, heads, D). A balanced binary tree adds the squares, and each sum is rounded to fp32."""
    if weight is None:
        return heads
    width = heads.shape[-1]
    sums = [heads[..., i] * heads[..., i] for i in range(width)]
    while len(sums) & (len(sums) - 1):
        sums.append(np.zeros_like(sums[0]))
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    mean = sums[0] * np.float32(1 / width) + np.float32(given["eps"])
    factor = weight.detach().cpu().float().numpy()
    factor = factor + np.float32(1) if given["norm_plus_one"] else factor
    return heads * (np.float32(1) / np.sqrt(mean))[..., None] * factor


def turned(heads: np.ndarray, given) -> np.ndarray:
    """Rotate the pairs of elements of heads (M, heads, D). Each product and each sum is rounded to fp32."""
    table = given["cos_sin"].detach().cpu().float().numpy()[given["positions"].cpu().numpy()]
    pairs = table.shape[1] // 2
    out = heads.copy()
    for p in range(pairs):
        i, j = (2 * p, 2 * p + 1) if given["interleaved"] else (p, p + pairs)
        cos, sin = table[:, p, None], table[:, p + pairs, None]
        out[..., i] = heads[..., i] * cos - heads[..., j] * sin
        out[..., j] = heads[..., j] * cos + heads[..., i] * sin
    assert out.dtype == np.float32
    return out


def of_heads(scale: torch.Tensor | None, heads: int) -> np.ndarray:
    """Return a scale as one number per head."""
    if scale is None:
        return np.ones(heads, np.float32)
    return np.broadcast_to(scale.detach().cpu().numpy().reshape(-1), (heads,))


def encoded(heads: np.ndarray, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if dtype != torch.float8_e4m3fn:
        return torch.from_numpy(np.ascontiguousarray(heads)).to(dtype)
    return torch.from_numpy(spec.e4m3(heads / of_heads(scale, heads.shape[1])[:, None])).view(dtype)


def write(stored, kind: str, heads: np.ndarray, scale: torch.Tensor | None, given) -> None:
    """Write heads, row by row, to their slots in ``stored``, which contains the caches and block scales by name."""
    cache, block_scale = stored[f"{kind}_cache"], stored.get(f"{kind}_block_scale")
    if block_scale is None:
        new = [(cache, encoded(heads, cache.dtype, scale))]
    else:
        factors = np.float32(1) / of_heads(scale, heads.shape[1])
        blocks = [spec.quantise(np.ascontiguousarray(heads[:, h]), 16, factor) for h, factor in enumerate(factors)]
        codes, scales = (
            np.stack(part, 1) for part in zip(*((each.packed, each.scales) for each in blocks), strict=True)
        )
        new = [(cache, torch.from_numpy(codes)), (block_scale, torch.from_numpy(scales).view(block_scale.dtype))]
    page = cache.shape[1]
    for m, slot in enumerate(given["slots"].tolist()):
        for target, rows in new:
            if slot >= 0:
                as_bytes = (each.view(torch.uint8) if each.itemsize == 1 else each for each in (target, rows))
                to, source = as_bytes
                to[slot // page, slot % page] = source[m].to(to.device)


def rows_alone(given, outputs):
    """Yield calls with a single row, and their expected results."""
    q, rows, count = outputs[0], len(given["qkv"]), len(given["slots"])
    for m in {0, rows // 3, rows - 1} if rows else ():
        alone = {**given, "qkv": given["qkv"][m : m + 1], "positions": given["positions"][m : m + 1]}
        alone["slots"] = given["slots"][m : m + 1] if m < count else given["slots"][:0]
        want, slot = [], alone["slots"].tolist()
        for name, after in zip((name for name in UPDATED if given[name] is not None), outputs[1:], strict=True):
            before = given[name].clone()
            to, source = (each.view(torch.uint8) if each.itemsize == 1 else each for each in (before, after))
            if slot and slot[0] >= 0:
                at = slot[0] // before.shape[1], slot[0] % before.shape[1]
                to[at] = source[at]
            want.append(before)
        yield alone, (q[m : m + 1], *want)
