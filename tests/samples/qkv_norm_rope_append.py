"""Samples (valid calls) and error inputs of ``qkv_norm_rope_append``."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._row_errors import out_errors
from samples._rows import random_rows, short, special_rows

FP8 = torch.float8_e4m3fn
ROWS_OF_TABLE = 83
"""Number of positions. No test uses it as its number of rows, because PyTorch treats equal sizes as one symbol."""
ROW_DIMENSIONS = {"qkv": 0, "positions": 0, "slots": 0}
"""Dimension of each argument that is the number of rows."""


REQUIRED = ("qkv", "cos_sin", "positions", "key_cache", "value_cache", "slots", "q_heads", "kv_heads")


def table(rotary_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the cosines and sines of random angles, (positions, rotary_dim)."""
    angles = torch.rand(ROWS_OF_TABLE, rotary_dim // 2, device=device) * 2 * math.pi
    return torch.cat((angles.cos(), angles.sin()), 1).to(dtype)


def random_bytes(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of random values without NaN, used as the old contents of a cache."""
    if dtype.itemsize == 2:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device).view(dtype)


def cache(
    blocks: int, page: int, heads: int, width: int, dtype: torch.dtype, device: torch.device, layout: str = "nhd"
) -> torch.Tensor:
    """Return a cache (blocks, page, heads, width) that is stored in this order, or with heads before slots."""
    if layout == "nhd":
        return random_bytes(blocks, page, heads, width, dtype=dtype, device=device)
    return random_bytes(blocks, heads, page, width, dtype=dtype, device=device).transpose(1, 2)


def arguments(
    m: int,
    device: torch.device,
    *,
    dim: int = 64,
    heads: tuple[int, int] = (2, 1),
    rotary: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    table_dtype: torch.dtype | None = None,
    key: torch.dtype | None = None,
    value: torch.dtype | None = None,
    pages: tuple[int, int] = (13, 5),
    layout: str = "nhd",
    appended: int | None = None,
    integers: torch.dtype = torch.int64,
    **more: Any,
) -> dict[str, Any]:
    """Return the arguments of a call with ``m`` rows by name. Every fifth slot is -1."""
    (q_heads, kv_heads), (blocks, page) = heads, pages
    given: dict[str, Any] = {
        "qkv": random_rows(m, (q_heads + 2 * kv_heads) * dim, dtype=dtype, device=device),
        "cos_sin": table(dim if rotary is None else rotary, table_dtype or dtype, device),
        "positions": torch.randint(0, ROWS_OF_TABLE, (m,), device=device).to(integers),
    }
    scales = {}
    for name, kind in (("key", key or dtype), ("value", value or dtype)):
        width = dim // 2 if kind == torch.uint8 else dim
        given[f"{name}_cache"] = cache(blocks, page, kv_heads, width, kind, device, layout)
        if kind == torch.uint8:
            scales[f"{name}_block_scale"] = cache(blocks, page, kv_heads, dim // 16, FP8, device, layout)
    count = m if appended is None else appended
    slots = torch.full((count,), -1, dtype=torch.int64, device=device)
    used = torch.randperm(blocks * page, device=device)[:count]
    slots[: len(used)] = used
    slots[4::5] = -1
    return {**given, "slots": slots.to(integers), "q_heads": q_heads, "kv_heads": kv_heads, **scales, **more}


def sample_of(name: str, given: dict[str, Any]) -> Sample:
    """Return a sample with these arguments. The required arguments are positional."""
    return Sample(name, tuple(given[each] for each in REQUIRED), {k: v for k, v in given.items() if k not in REQUIRED})


def weight(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.rand(dim, device=device) * 2 - 0.5).to(dtype)


def scale(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device) * 0.5 + 0.02


def everything(m: int, device: torch.device, pages: tuple[int, int] = (13, 5), **more: Any) -> dict[str, Any]:
    """Return the arguments of a call that passes every optional tensor."""
    given = arguments(m, device, dim=64, heads=(3, 2), key=torch.uint8, value=torch.uint8, pages=pages)
    given |= {"q_norm": weight(64, torch.float32, device), "k_norm": weight(64, torch.bfloat16, device)}
    given |= {"q_scale": scale(3, device), "k_scale": scale(2, device), "v_scale": scale(1, device), "q_dtype": FP8}
    return given | more


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with M rows (the product of all dimensions except the last). The caches always provide slots for
    300 rows, so that calls differ only in M."""
    return sample_of("call", everything(math.prod(shape[:-1]), device, pages=(67, 5)))


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""

    def sample(name: str, m: int = 7, **given: Any) -> Sample:
        return sample_of(name, arguments(m, device, **given))

    def weights(dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        return {"q_norm": weight(dim, dtype, device), "k_norm": weight(dim, dtype, device)}

    yield sample("plain")
    yield sample_of("everything", everything(9, device))
    dtypes = itertools.cycle((torch.bfloat16, torch.float16))
    for dim in (64, 80, 96, 128, 192, 256):
        for interleaved in (False, True):
            name = f"heads-of-{dim}{'-interleaved' if interleaved else ''}"
            yield sample(name, dim=dim, dtype=next(dtypes), interleaved=interleaved, **weights(dim, torch.float32))
    for dim, rotary, interleaved in ((64, 2, True), (64, 16, False), (80, 20, False), (96, 24, False), (96, 48, True)):
        name = f"{rotary}-of-{dim}-rotated{'-interleaved' if interleaved else ''}"
        yield sample(name, dim=dim, rotary=rotary, interleaved=interleaved, rotary_dim=rotary, **weights(dim))
    for dim, rotary in ((64, 2), (64, 30), (128, 64), (128, 96), (256, 250)):
        yield sample(f"{rotary}-of-{dim}-rotated", dim=dim, rotary=rotary, table_dtype=torch.float32)
    for dtype, table_dtype in itertools.product((torch.bfloat16, torch.float16), (torch.float32, torch.float16)):
        name = f"{short(dtype)}-table-{short(table_dtype)}"
        yield sample(name, dtype=dtype, table_dtype=table_dtype, integers=torch.int32, **weights(64, dtype))
    for name, kind in (("fp8", FP8), ("nvfp4", torch.uint8)):
        yield sample(f"{name}-without-scales", key=kind, value=kind)
        one = {"k_scale": scale(1, device), "v_scale": scale(1, device).reshape(())}
        yield sample(f"{name}-one-scale", dim=128, heads=(4, 2), key=kind, value=kind, layout="hnd", **one)
        some = {"k_scale": scale(3, device), "v_scale": scale(3, device)}
        yield sample(f"{name}-scale-of-heads", dim=80, heads=(3, 3), key=kind, value=kind, **some, **weights(80))
    yield sample("fp8-keys", key=FP8, k_scale=scale(1, device))
    yield sample("nvfp4-values", value=torch.uint8, heads=(5, 3), dtype=torch.float16)
    yield sample("fp8-q", q_dtype=FP8, dtype=torch.float16)
    yield sample("fp8-q-scales", heads=(5, 1), q_dtype=FP8, q_scale=scale(5, device), key=FP8, value=FP8)
    yield sample("q-dtype-named", q_dtype=torch.bfloat16)
    yield sample("plus-one", dim=128, norm_plus_one=True, eps=0.0, **weights(128))
    yield sample("only-q-norm", norm_plus_one=True, eps=1e-5, q_norm=weight(64, torch.float32, device))
    yield sample("only-k-norm", eps=3.0, k_norm=weight(64, torch.bfloat16, device))
    for heads in ((1, 1), (7, 1), (8, 8), (17, 5)):
        yield sample(f"{heads[0]}-and-{heads[1]}-heads", heads=heads, layout="hnd")
    yield sample("decode", 1, dim=128, heads=(32, 8), **weights(128))
    yield sample("many-rows", 300, pages=(31, 16), **weights(64))
    yield sample("few-slots", 9, appended=4)
    yield sample("no-slots", 5, appended=0, key=torch.uint8, value=FP8)
    yield sample("no-rows", 0)
    yield sample("one-slot", 3, pages=(1, 1), appended=1)
    yield sample("no-slot-used", 5, slots=torch.full((5,), -1, device=device))
    yield sample("no-blocks", 3, pages=(0, 16), slots=torch.full((3,), -1, device=device))

    # Memory layouts
    for kind in (torch.bfloat16, FP8):
        both = random_bytes(9, 2, 4, 2, 64, dtype=kind, device=device)  # keys and values alternate by block
        name = "alternate" if kind == torch.bfloat16 else "alternate-fp8"
        yield sample(name, heads=(2, 2), key_cache=both[:, 0], value_cache=both[:, 1], pages=(9, 4))
    stacked = random_bytes(2, 9, 2, 4, 64, dtype=torch.bfloat16, device=device)
    halves = {"key_cache": stacked[0].transpose(1, 2), "value_cache": stacked[1].transpose(1, 2)}
    yield sample("stacked-heads-first", heads=(2, 2), pages=(9, 4), **halves)
    joined = random_bytes(9, 2, 4, 128, dtype=FP8, device=device).transpose(1, 2)  # k next to v of a head
    yield sample("side-by-side", heads=(2, 2), pages=(9, 4), key_cache=joined[..., :64], value_cache=joined[..., 64:])
    padded = random_bytes(9, 6, 2, 96, dtype=torch.bfloat16, device=device)[:, :4, :, 16:80]
    yield sample("padded-pages", heads=(2, 2), pages=(9, 4), key_cache=padded)
    rows = random_rows(7, 4 * 64 + 32, device=device)
    yield sample("row-strided", qkv=rows[:, 16 : 16 + 256])
    yield sample("row-offset", qkv=rows[:, 1 : 1 + 256])
    yield sample("column-step", qkv=random_rows(7, 512, device=device)[:, ::2])
    yield sample("columns-first", qkv=random_rows(256, 7, device=device).t())
    yield sample("rows-expanded", qkv=random_rows(1, 256, device=device).expand(7, 256))
    wide = table(192, torch.float32, device)
    yield sample("table-strided", cos_sin=wide[:, 16:80])
    yield sample("table-offset", cos_sin=wide[:, 1:65], interleaved=True)
    yield sample("table-column-step", cos_sin=wide[:, :128:2])
    spread = torch.randint(0, ROWS_OF_TABLE, (14,), device=device)
    yield sample("positions-step", positions=spread[::2])
    yield sample("slots-step", slots=torch.arange(20, device=device)[1:15:2])
    yield sample("norms-step", q_norm=weight(128, torch.float32, device)[::2])

    # Special values
    for dtype in (torch.bfloat16, torch.float16):
        special = special_rows(dtype, device)[:, :128].reshape(14, 2, 64)
        both = torch.cat((special, special), 1).reshape(14, 256)
        for name, kind in (("", dtype), ("-fp8", FP8), ("-nvfp4", torch.uint8)):
            given = {"dtype": dtype, "key": kind, "value": kind}
            yield sample_of(f"special-{short(dtype)}{name}", arguments(14, device, **given) | {"qkv": both})
            norms = weights(64, torch.float32)
            yield sample_of(
                f"special-norm-{short(dtype)}{name}", arguments(14, device, **given, **norms) | {"qkv": both}
            )


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    good = arguments(4, device, heads=(3, 2))

    def bad(name: str, error: type[Exception], match: str, **given: Any) -> ErrorInput:
        changed = sample_of(name, {**good, **given})
        return ErrorInput(name, changed.args, changed.kwargs, error, match)

    qkv, keys, values = good["qkv"], good["key_cache"], good["value_cache"]
    for dtype in (torch.float32, torch.float64, torch.int32, FP8):
        text = f"got qkv with dtype {short(dtype)}; expected bfloat16 or float16"
        yield bad(f"qkv-{short(dtype)}", TypeError, text, qkv=qkv.to(dtype))
    yield bad("qkv-1d", ValueError, r"got qkv with shape \(448,\); expected \(M, ", qkv=qkv[0])
    yield bad("qkv-3d", ValueError, r"expected \(M, ", qkv=qkv[None])
    for width in (0, 447, 7 * 72, 7 * 32):
        text = rf"qkv has rows of {width} elements; expected 7 heads .* of 64, 80, 96, 128, 192 or 256"
        yield bad(f"width-{width}", ValueError, text, qkv=random_rows(4, width, device=device))
    for name in ("q_heads", "kv_heads"):
        for heads in (0, -1):
            yield bad(f"{name}-{heads}", ValueError, f"{name} is {heads}; expected at least 1", **{name: heads})
    for dtype in (torch.float64, torch.int32):
        text = f"got cos_sin with dtype {short(dtype)}"
        yield bad(f"table-{short(dtype)}", TypeError, text, cos_sin=good["cos_sin"].to(dtype))
    yield bad("table-1d", ValueError, r"expected \(positions, rotary_dim\)", cos_sin=good["cos_sin"][0])
    for width in (0, 63, 66):
        text = rf"got cos_sin with shape \(83, {width}\); expected rows of an even number .* at most 64"
        yield bad(f"table-{width}", ValueError, text, cos_sin=torch.zeros(83, width, device=device))
    for rotary in (0, 32, 65):
        text = f"rotary_dim is {rotary}; expected 64, the length of the rows of cos_sin"
        yield bad(f"rotary-dim-{rotary}", ValueError, text, rotary_dim=rotary)
    for name in ("positions", "slots"):
        for dtype in (torch.float32, torch.int16, torch.uint8):
            text = f"got {name} with dtype {short(dtype)}; expected int32 or int64"
            yield bad(f"{name}-{short(dtype)}", TypeError, text, **{name: good[name].to(dtype)})
        yield bad(f"{name}-2d", ValueError, f"got {name} with shape", **{name: good[name][None]})
        yield bad(f"{name}-device", ValueError, f"{name} is on meta", **{name: good[name].to("meta")})
    yield bad(
        "positions-few",
        ValueError,
        r"got positions with shape \(3,\); expected \(4,\)",
        positions=good["positions"][:3],
    )
    many = torch.arange(5, device=device)
    yield bad("slots-many", ValueError, r"got slots with shape \(5,\); expected \(S,\) with S at most 4", slots=many)
    for name, tensor in (("key_cache", keys), ("value_cache", values)):
        kind = name.split("_")[0]
        for dtype in (torch.float16, torch.float32, torch.float8_e5m2):
            text = f"got {name} with dtype {short(dtype)}; expected bfloat16 or float8_e4m3fn or uint8"
            yield bad(f"{kind}-{short(dtype)}", TypeError, text, **{name: tensor.to(dtype)})
        text = f"{name} is uint8, .*; pass {kind}_block_scale, or pass {name}.view"
        yield bad(f"{kind}-uint8", ValueError, text, **{name: tensor.to(torch.uint8)})
        yield bad(
            f"{kind}-3d",
            ValueError,
            rf"got {name} with shape .*; expected \(blocks, page, 2, 64\)",
            **{name: tensor[0]},
        )
        for shape in ((13, 5, 3, 64), (13, 5, 2, 32), (13, 5, 2, 80)):
            text = rf"got {name} with shape .*; expected \(13, 5, 2, 64\)"
            wrong_shape = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            yield bad(f"{kind}-shape-{list(shape)}", ValueError, text, **{name: wrong_shape})
        expanded = tensor[:1].expand(13, 5, 2, 64)
        yield bad(f"{kind}-expanded", ValueError, f"got {name} .* overlaps itself", **{name: expanded})
        odd = random_bytes(13, 5, 2, 65, dtype=torch.bfloat16, device=device)[..., :64]
        yield bad(f"{kind}-odd-strides", ValueError, f"got {name} .* multiples of 8", **{name: odd})
        last = random_bytes(13, 5, 64, 2, dtype=torch.bfloat16, device=device).transpose(2, 3)
        yield bad(f"{kind}-columns-first", ValueError, rf"got {name} .*stride\(-1\) == 1", **{name: last})
        yield bad(f"{kind}-device", ValueError, f"{name} is on meta", **{name: tensor.to("meta")})
        letter = kind[0]
        one = torch.ones(1, device=device)
        text = f"{letter}_scale is given and {name} has 16 bits"
        yield bad(f"{letter}-scale-16-bits", ValueError, text, **{f"{letter}_scale": one})
        scales = torch.zeros(13, 5, 2, 4, device=device).to(FP8)
        text = f"{kind}_block_scale is given and {name} is bfloat16"
        yield bad(f"{kind}-scales-16-bits", ValueError, text, **{f"{kind}_block_scale": scales})
        codes = torch.zeros(13, 5, 2, 32, dtype=torch.uint8, device=device)
        fp4 = {name: codes, f"{kind}_block_scale": scales}
        text = f"got {kind}_block_scale with dtype uint8"
        yield bad(f"{kind}-scales-uint8", TypeError, text, **{**fp4, f"{kind}_block_scale": scales.view(torch.uint8)})
        text = rf"got {kind}_block_scale with shape .*; expected \(13, 5, 2, 4\)"
        yield bad(f"{kind}-scales-shape", ValueError, text, **{**fp4, f"{kind}_block_scale": scales[..., :3]})
        eighth = torch.zeros(13, 5, 2, 34, dtype=torch.uint8, device=device)[..., :32]
        yield bad(f"{kind}-fp4-strides", ValueError, "multiples of 4", **{**fp4, name: eighth})
        fp8 = {name: tensor.to(FP8)}
        for shape in ((3,), (1, 2), (0,)):
            text = rf"got {letter}_scale with shape .*; expected one element or \(2,\)"
            wrong_scale = {f"{letter}_scale": torch.ones(shape, device=device)}
            yield bad(f"{letter}-scale-shape-{list(shape)}", ValueError, text, **fp8, **wrong_scale)
        half = {f"{letter}_scale": one.half()}
        yield bad(f"{letter}-scale-float16", TypeError, f"got {letter}_scale with dtype float16", **fp8, **half)
        if device.type == "cuda":
            count = tensor.numel()
            shifted = torch.zeros(count + 8, dtype=tensor.dtype, device=device)[1 : 1 + count].view(tensor.shape)
            yield replace(bad(f"{kind}-address", ValueError, f"{name} starts at", **{name: shifted}), is_address=True)
    yield bad("caches-differ", ValueError, r"got value_cache .*expected \(13, 5, 2, 64\)", value_cache=values[:12])
    yield bad("caches-equal", ValueError, "key_cache is updated in place and shares memory", value_cache=keys)
    half_way = random_bytes(26, 5, 2, 64, dtype=torch.bfloat16, device=device)
    crossing = {"key_cache": half_way[:13], "value_cache": half_way[1:14]}
    yield bad("caches-cross", ValueError, "shares memory with", **crossing)
    for name in ("q_norm", "k_norm"):
        text = f"got {name} with dtype float16; expected bfloat16 or float32"
        yield bad(f"{name}-float16", TypeError, text, **{name: weight(64, torch.float16, device)})
        text = rf"got {name} with shape \(128,\); expected \(64,\)"
        yield bad(f"{name}-shape", ValueError, text, **{name: weight(128, torch.float32, device)})
        yield bad(
            f"{name}-device",
            ValueError,
            f"{name} is on meta",
            **{name: weight(64, torch.float32, torch.device("meta"))},
        )
        grad = weight(64, torch.float32, device).requires_grad_()
        yield bad(f"{name}-requires-grad", ValueError, "no gradient", **{name: grad})
    for eps in (-1e-6, math.nan, math.inf):
        yield bad(f"eps-{eps}", ValueError, "eps is .*; expected a finite number of at least 0", eps=eps)
    for dtype in (torch.float16, torch.float32, torch.float8_e5m2):
        yield bad(f"q-{short(dtype)}", TypeError, f"q_dtype is {dtype}; expected torch.bfloat16", q_dtype=dtype)
    one = torch.ones(1, device=device)
    yield bad("q-scale-16-bits", ValueError, "q_scale is given; only q in FP8 has a scale", q_scale=one)
    text = r"got q_scale with shape \(2,\); expected one element or \(3,\)"
    yield bad("q-scale-shape", ValueError, text, q_scale=torch.ones(2, device=device), q_dtype=FP8)
    yield bad("qkv-requires-grad", ValueError, "no gradient", qkv=qkv.clone().requires_grad_())
    out = {"out": torch.zeros(4, 3, 64, dtype=torch.bfloat16, device=device)}
    yield from out_errors(tuple(good[each] for each in REQUIRED), {}, out, device)
