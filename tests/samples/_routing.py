"""Samples and error inputs of the ops that route tokens: logits, scoring, and orders of rows."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._rows import DTYPES, short

DEEPSEEK: dict[str, Any] = {"topk": 8, "scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}
"""Arguments with which DeepSeek-V3 chooses experts. DeepSeek-V3 uses 256 experts and a bias."""
GROUPS = ((1, 20, 1), (2, 20, 1), (3, 36, 2), (5, 20, 2), (8, 160, 3), (32, 32, 9), (32, 512, 4), (17, 510, 3))
"""(number of groups, number of experts, number of groups from which a token's experts come)"""


def choice_call(*shape: int, device: torch.device) -> Sample:
    """Return a call with M tokens (the product of all dimensions except the last) and ``experts_for(width)``
    experts."""
    logits = torch.randn(math.prod(shape[:-1]), experts_for(shape[-1]), device=device)
    return Sample("call", (logits, 7), {})


def experts_for(width: int) -> int:
    """Return the number of experts for calls of this width. No test uses this number of tokens."""
    return 17 + width // 16 % 487


def choice_sample(
    name: str, m: int, experts: int, topk: int, device: torch.device, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> Sample:
    """Return a call with random logits, and with a random bias if ``bias`` is True."""
    logits = torch.randn(m, experts, device=device).to(dtype)
    if kwargs.pop("bias", False):
        kwargs["bias"] = torch.randn(experts, device=device) * 0.1
    return Sample(name, (logits, topk), kwargs)


def choice_samples(device: torch.device) -> Iterator[Sample]:
    """Yield calls with logits and the arguments that say how experts are chosen."""

    def sample(name: str, m: int, experts: int, topk: int, *dtype: torch.dtype, **kwargs: Any) -> Sample:
        return choice_sample(name, m, experts, topk, device, *dtype, **kwargs)

    deepseek = {**DEEPSEEK}
    top = deepseek.pop("topk")
    yield sample("plain", 19, 64, 6, torch.bfloat16)
    for dtype in DTYPES:
        yield sample(f"softmax-{short(dtype)}", 33, 64, 4, dtype)
        yield sample(f"sigmoid-{short(dtype)}", 33, 64, 4, dtype, scoring="sigmoid", bias=True)
        yield sample(f"groups-{short(dtype)}", 33, 64, 4, dtype, scoring="sigmoid", num_groups=4, topk_groups=2)
    for m in (0, 1, 7, 64, 65, 200):
        yield sample(f"deepseek-{m}-tokens", m, 256, top, bias=True, **deepseek)
        yield sample(f"softmax-{m}-tokens", m, 128, 8, torch.bfloat16)
    for experts, topk in (
        (1, 1),
        (2, 1),
        (5, 5),
        (16, 16),
        (31, 3),
        (33, 16),
        (60, 4),
        (160, 6),
        (384, 8),
        (512, 16),
        (896, 22),
        (1024, 32),
    ):
        yield sample(f"top-{topk}-of-{experts}", 21, experts, topk)
        yield sample(f"top-{topk}-of-{experts}-sigmoid", 70, experts, topk, scoring="sigmoid", renormalize=False)
    for groups, experts, some in GROUPS:
        yield sample(
            f"{some}-of-{groups}-groups-of-{experts}",
            *(23, experts, 4, torch.float32),
            scoring="sigmoid",
            num_groups=groups,
            topk_groups=some,
            bias=groups % 2 == 0,
        )
        if groups in (2, 8, 17):
            for bias in (True, False):
                name = f"{some}-of-{groups}-groups-of-{experts}-softmax{'-bias' if bias else ''}"
                given = {"num_groups": groups, "topk_groups": some, "bias": bias, "renormalize": groups != 8}
                yield sample(name, 23, experts, 4, torch.float32, **given)
    yield sample("softmax-bias", 33, 64, 4, torch.bfloat16, bias=True)
    yield sample("softmax-bias-of-1024", 9, 1024, 23, torch.bfloat16, bias=True, renormalize=False)
    # The bias selects experts whose softmax rounds to zero.
    steep = torch.arange(24, device=device).float() * -40
    yield Sample("softmax-bias-of-zeros", (steep.expand(3, 24).contiguous(), 5), {"bias": -steep})
    yield sample("not-renormalised", 30, 64, 4, renormalize=False)
    yield sample("scaled", 30, 64, 4, scaling_factor=-0.3)
    yield sample("many-tokens", 3001, 40, 3, torch.bfloat16)

    base = torch.randn(20, 128, device=device)
    yield Sample("row-strided", (base[:, :64], 4))
    yield Sample("every-other-row", (base[::2], 4))
    yield Sample("offset-columns", (base[:, 3:67].bfloat16()[:, 1:], 4))
    yield Sample("column-step", (base[:, ::2], 4))
    yield Sample("columns-first", (base.t().contiguous().t(), 4))
    yield Sample("rows-expanded", (base[:1].expand(70, 128), 4))
    bias = torch.randn(256, device=device)[::2]
    yield Sample("bias-strided", (base, 4), {"scoring": "sigmoid", "bias": bias})
    for scoring in ("softmax", "sigmoid"):
        few = torch.randint(-2, 3, (33, 40)).to(torch.float32).to(device)
        yield Sample(f"ties-{scoring}", (few, 6), {"scoring": scoring})
        zeros = torch.where(torch.rand(5, 40, device=device) < 0.5, 0.0, -0.0)
        yield Sample(f"zeros-{scoring}", (zeros, 6), {"scoring": scoring})
        special = torch.randn(12, 40, device=device)
        special[0, 3], special[1, :38], special[2, 5] = torch.nan, torch.nan, torch.inf
        special[3, 7:9], special[4, 7], special[5] = torch.inf, -torch.inf, -torch.inf
        special[6], special[7] = torch.nan, 3e38
        special[8], special[9, ::2], special[10, 3::4] = -200.0, 200.0, -torch.inf
        for renormalize in (True, False):
            named = {"scoring": scoring, "renormalize": renormalize}
            kind = f"special-{scoring}-{'sum-1' if renormalize else 'as-they-are'}"
            yield Sample(kind, (special, 4), named)
            yield Sample(f"{kind}-finite", (special.bfloat16(), 4), {**named, "finite": True})
            if scoring == "softmax":
                yield Sample(f"{kind}-bias", (special, 4), {**named, "bias": special[11] * 0.1})
                of_groups = {"bias": special[11] * 0.1, "num_groups": 4, "topk_groups": 2, "finite": True}
                yield Sample(f"{kind}-finite-groups-bias", (special, 4), named | of_groups)
    grouped = {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2}
    yield Sample("special-groups", (special, 4), grouped)
    yield Sample("special-groups-bias", (special, 4), grouped | {"bias": special[4] * 1.0})
    yield Sample("ties-of-groups", (few, 6), grouped)


def choice_errors(device: torch.device) -> Iterator[ErrorInput]:
    """Yield wrong logits, and wrong values of the arguments that say how experts are chosen."""
    logits, bias = torch.randn(4, 16, device=device), torch.zeros(16, device=device)

    def bad(name: str, match: str, *args: Any, error: type[Exception] = ValueError, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, args, kwargs, error, match)

    for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn):
        text = f"got logits with dtype {short(dtype)}; expected bfloat16"
        yield bad(f"logits-{short(dtype)}", text, logits.to(dtype), 2, error=TypeError)
    yield bad("logits-1d", r"got logits with shape \(16,\); expected \(M, E\)", logits[0], 2)
    yield bad("logits-3d", r"expected \(M, E\)", logits[None], 2)
    for experts in (0, 1025):
        text = f"logits are of {experts} experts; expected 1 to 1024"
        yield bad(f"{experts}-experts", text, torch.zeros(2, experts, device=device), 1)
    for topk in (0, -1, 33):
        yield bad(f"topk-{topk}", f"topk is {topk}; expected 1 to 32", logits, topk)
    yield bad("topk-of-fewer", "topk is 5, and a token has 4 experts to choose from", logits[:, :4], 5)
    for scoring in ("", "Softmax", "relu"):
        text = f"scoring='{scoring}' is unknown; use one of 'softmax', 'sigmoid'"
        yield bad(f"scoring-{scoring}", text, logits, 2, scoring=scoring)
    sigmoid: dict[str, Any] = {"scoring": "sigmoid"}
    for dtype in (torch.bfloat16, torch.float64):
        text = f"got bias with dtype {short(dtype)}; expected float32"
        yield bad(f"bias-{short(dtype)}", text, logits, 2, error=TypeError, bias=bias.to(dtype), **sigmoid)
    for shape in ((15,), (16, 1), ()):
        text = r"got bias with shape .*expected \(16,\), one for each expert"
        yield bad(f"bias-shape-{list(shape)}", text, logits, 2, bias=torch.zeros(shape, device=device), **sigmoid)
    yield bad("bias-device", "bias is on meta", logits, 2, bias=bias.to("meta"), **sigmoid)
    if device.type == "cuda":
        yield bad("bias-cpu", "bias is on cpu", logits, 2, bias=bias.cpu(), **sigmoid)
    for groups in (0, -1, 3, 33):
        text = f"num_groups is {groups}; expected 1 to 32, a divisor of the 16 experts"
        yield bad(f"groups-{groups}", text, logits, 2, num_groups=groups, **sigmoid)
    for some in (0, 5):
        text = f"topk_groups is {some}; expected 1 to num_groups, 4"
        yield bad(f"topk-groups-{some}", text, logits, 2, num_groups=4, topk_groups=some, **sigmoid)
    text = "topk is 5, and a token has 4 experts to choose from"
    yield bad("topk-of-groups", text, logits, 5, num_groups=4, topk_groups=1, **sigmoid)
    for factor in (math.nan, math.inf):
        text = f"scaling_factor is {factor}; expected a finite number"
        yield bad(f"scaling-factor-{factor}", text, logits, 2, scaling_factor=factor)
    for name, tensor in {"logits": logits, "bias": bias}.items():
        given = {"logits": logits, "bias": bias} | {name: tensor.clone().requires_grad_()}
        yield bad(f"{name}-requires-grad", "no gradient", given["logits"], 2, bias=given["bias"], **sigmoid)


def order_errors(device: torch.device, *args: Any) -> Iterator[ErrorInput]:
    """Yield wrong values of the arguments that say how rows are ordered, for four tokens with two of 16 experts each.
    ``args`` are the preceding arguments of the call."""

    def bad(name: str, match: str, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, args, kwargs, ValueError, match)

    for alignment in (0, -8):
        text = f"alignment is {alignment}; expected a positive"
        yield bad(f"alignment-{alignment}", text, alignment=alignment)
    for rows in (0, -1):
        yield bad(f"max-rows-{rows}", f"max_rows is {rows}; expected a positive number, or None", max_rows=rows)
    yield bad("rows-masked", "there would be 2147483648 rows", max_rows=2**27)
    yield bad("rows-contiguous", "there would be 4294967296 rows", alignment=2**29)


def integer_outputs(device: torch.device, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return int32 outputs of these shapes, by name."""
    return {name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}


ORDER = {"expanded_to_permuted": (4, 2), "permuted_to_expanded": (64,), "offsets": (17,), "counts": (16,)}
"""Shapes of the row order for four tokens with two of 16 experts each, aligned to 8 rows."""


def bad_outputs(good: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ErrorInput]:
    """Yield calls in which one of these ``good`` outputs, int32 or float32, is replaced by a wrong output."""
    for name, tensor in good.items():

        def bad(what: str, error: type[Exception], match: str, value: torch.Tensor, name: str = name) -> ErrorInput:
            out = tuple({**good, name: value}.values())
            return ErrorInput(f"out-{name}-{what}", args, kwargs, error, rf"{name} {match}", out)

        for dtype in (torch.int64, torch.float16):
            yield bad(short(dtype), TypeError, f"with dtype {short(dtype)}; expected", tensor.to(dtype))
        if tensor.dtype.is_floating_point:
            yield bad("requires-grad", ValueError, "requires grad", tensor.clone().requires_grad_())
        else:
            yield bad("uint32", TypeError, "with dtype uint32; expected", tensor.view(torch.uint32))
        more = torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        yield bad("longer", ValueError, "with shape", more)
        yield bad("dimension", ValueError, "with shape", tensor[None])
        yield bad("device", ValueError, "is on meta", tensor.to("meta"))
        step = more.repeat_interleave(2, 0)[: 2 * len(tensor) : 2]
        yield bad("strided", ValueError, "with strides .* contiguous", step)
