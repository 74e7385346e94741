"""Samples and error inputs of the GEMMs' arguments ``alpha`` and ``bias``."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._row_errors import scalar_errors
from samples._rows import short

Epilogue = dict[str, Any]


def _columns(n: int, experts: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor with one element per column, or one per column of each expert."""
    return (n,) if experts is None else (experts, n)


def epilogues(
    n: int, out_dtype: torch.dtype, device: torch.device, experts: int | None = None
) -> Iterator[tuple[str, Epilogue]]:
    """Yield ``alpha`` and ``bias`` in each shape and dtype that GEMMs accept, with a name."""
    shape = _columns(n, experts)
    alpha, bias = torch.rand(shape, device=device) + 0.5, torch.randn(shape, device=device) * 8
    yield "alpha-column", {"alpha": alpha}
    yield "bias-float32", {"bias": bias}
    yield "bias", {"bias": bias.to(out_dtype)}
    yield "alpha-column-bias", {"alpha": alpha, "bias": bias.to(out_dtype)}
    yield "alpha-bias-float32", {"alpha": torch.rand(1, device=device) + 0.5, "bias": bias}
    if experts is not None:
        yield "alpha", {"alpha": torch.rand(1, device=device) + 0.5}
        yield "alpha-expert", {"alpha": torch.rand(experts, device=device) + 0.5}
        yield "alpha-expert-bias", {"alpha": torch.rand(experts, device=device) + 0.5, "bias": bias.to(out_dtype)}


def exact_epilogue(n: int, device: torch.device, experts: int | None = None) -> Epilogue:
    """Return an ``alpha`` of powers of two and a ``bias`` of small integers, with which exact sums stay exact."""
    shape = _columns(n, experts)
    alpha = torch.randint(-2, 3, shape, device=device).float().exp2()
    return {"alpha": alpha, "bias": torch.randint(-9, 10, shape, device=device).float()}


def special_epilogues(n: int, device: torch.device, experts: int | None = None) -> Iterator[tuple[str, Epilogue]]:
    """Yield special values (zeros, NaN, infinities, large numbers) and unusual strides, with a name."""
    shape = _columns(n, experts)
    values = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e38, 1.0], device=device)
    special = values.repeat(-(-n // len(values)))[:n].expand(shape).contiguous()
    yield "alpha-column-special", {"alpha": special}
    yield "bias-special", {"bias": special}
    wide = torch.randn(*shape[:-1], 2 * n + 1, device=device)
    for name, value in {
        "strided": wide[..., 1::2],
        "unaligned": wide[..., 1 : n + 1],
        "expanded": wide[..., :1].expand(shape),
    }.items():
        yield f"epilogue-{name}", {"alpha": value, "bias": value}


def epilogue_errors(n: int, device: torch.device, experts: int | None = None) -> Iterator[ErrorInput]:
    """Yield wrong values of ``alpha`` and ``bias``, without other arguments, for a bfloat16 result."""
    shape = _columns(n, experts)
    for error in scalar_errors("alpha", torch.zeros(1, device=device)):
        yield ErrorInput(error.name, (), error.kwargs, error.error, error.match)

    def bad(name: str, error: type[Exception], match: str, **given: Any) -> ErrorInput:
        return ErrorInput(name, (), given, error, match)

    for count in (n - 1, n + 1):
        wrong = torch.ones(*shape[:-1], count, device=device)
        text = "got alpha with shape .*; expected one element, or"
        yield bad(f"alpha-{count}-columns", ValueError, text, alpha=wrong)
        yield bad(f"bias-{count}-columns", ValueError, "got bias with shape .*, one element per column", bias=wrong)
    bias = torch.ones(shape, device=device)
    for name, value in {"0d": bias.sum(), "dimension": bias[None], "column": bias[..., None]}.items():
        yield bad(
            f"bias-{name}", ValueError, "got bias with shape .*, one element per column of the result", bias=value
        )
    yield bad("alpha-dimension", ValueError, "got alpha with shape .*; expected one element, or", alpha=bias[None])
    for dtype in (torch.float16, torch.float64, torch.int32):
        text = f"got bias with dtype {short(dtype)}; expected float32 or bfloat16"
        yield bad(f"bias-{short(dtype)}", TypeError, text, bias=bias.to(dtype))
    text = "got bias with dtype bfloat16; expected float32 or float16"
    yield bad("bias-not-of-result", TypeError, text, bias=bias.bfloat16(), out_dtype=torch.float16)
    yield bad("bias-device", ValueError, "bias is on meta, a on", bias=bias.to("meta"))
    if device.type == "cuda":
        yield bad("bias-cpu", ValueError, "bias is on cpu, a on", bias=bias.cpu())
    yield bad("bias-requires-grad", ValueError, "no gradient", bias=bias.clone().requires_grad_())
