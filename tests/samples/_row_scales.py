"""Samples and error inputs of the argument ``row_scale`` of GEMMs."""

from collections.abc import Callable, Iterator

import torch

from samples._inputs import ErrorInput
from samples._rows import short


def row_scales(m: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and scales of ``m`` rows: in each memory layout, and with special values."""
    scale = torch.rand(2 * m + 1, device=device) + 0.5
    yield "plain", scale[:m].clone()
    yield "strided", scale[1::2]
    yield "unaligned", scale[1 : m + 1]
    yield "expanded", scale[:1].expand(m)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3e38, 1e-40, -2.0], device=device)
    yield "special", special.repeat(-(-m // len(special)))[:m]


def row_scale_errors(bad: Callable[..., ErrorInput], m: int, device: torch.device) -> Iterator[ErrorInput]:
    """Yield wrong values of ``row_scale`` for ``m`` rows. ``bad`` is a function made by ``error_maker``."""
    good = torch.ones(m, device=device)

    def wrong(name: str, error: type[Exception], match: str, value: torch.Tensor) -> ErrorInput:
        return bad(f"row-scale-{name}", error, match, {"row_scale": value})

    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        text = f"got row_scale with dtype {short(dtype)}; expected float32"
        yield wrong(short(dtype), TypeError, text, good.to(dtype))
    for shape in ((m - 1,), (m + 1,), (1,), (), (m, 1), (1, m)):
        text = (
            rf"got row_scale with shape \({', '.join(map(str, shape))},?\); expected \({m},\), one element per row of a"
        )
        yield wrong(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, device=device))
    yield wrong("device", ValueError, "row_scale is on meta, a on", good.to("meta"))
    if device.type == "cuda":
        yield wrong("cpu", ValueError, "row_scale is on cpu, a on", good.cpu())
    yield wrong("requires-grad", ValueError, "no gradient", good.clone().requires_grad_())
