"""What the ops that normalise rows and quantise them add to ``_rows``: weight and eps."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._rows import DTYPES, out_errors, random_rows, row_errors, row_samples


def random_weight(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A norm's weight: around one, some negative, some zero."""
    weight = torch.randn(width, device=device) * 0.5 + 1
    weight[::31] = 0
    return weight.to(dtype)


def norm_samples(device: torch.device) -> Iterator[Sample]:
    """``row_samples`` with weights, in the input dtype and float32 in turn, and what weight and eps may be."""
    for i, (name, rows, kwargs) in enumerate(row_samples(device)):
        dtype = torch.float32 if i % 2 else rows.dtype
        yield Sample(name, (rows, random_weight(rows.shape[-1], dtype, device)), kwargs)

    def sample(name: str, weight: torch.Tensor, rows: torch.Tensor | None = None, **kwargs: Any) -> Sample:
        rows = random_rows(5, 96, device=device) if rows is None else rows
        return Sample(name, (rows, weight), {"scale_layout": "128x4", **kwargs})

    for dtype in DTYPES:
        for weight_dtype in dict.fromkeys((dtype, torch.float32)):
            name = f"{str(dtype).removeprefix('torch.')}-weight-{str(weight_dtype).removeprefix('torch.')}"
            rows = random_rows(5, 96, dtype=dtype, device=device)
            yield sample(name, random_weight(96, weight_dtype, device), rows)
    yield sample("weight-strided", random_weight(192, torch.bfloat16, device)[::2])
    yield sample("weight-offset", random_weight(97, torch.float32, device)[1:])
    yield sample("weight-expanded", random_weight(2, torch.float32, device)[1:].expand(96))
    weight = random_weight(96, torch.float32, device)
    weight[5] = torch.nan
    weight[50] = torch.inf
    yield sample("weight-not-finite", weight)
    yield sample("weight-large", random_weight(96, torch.float32, device) * 2.0**50)
    yield sample("weight-small", random_weight(96, torch.float32, device) * 2.0**-50, block_size=32)
    for eps in (0.0, 1e-5, 1.0):
        yield sample(f"eps-{eps}", random_weight(96, torch.bfloat16, device), eps=eps)
    yield sample(
        "zeros-eps-0", random_weight(96, torch.bfloat16, device), torch.zeros_like(rows[:, :96]).bfloat16(), eps=0.0
    )
    yield sample("parameter", torch.nn.Parameter(random_weight(96, torch.bfloat16, device), requires_grad=False))
    positional = (random_rows(4, 64, device=device), random_weight(64, torch.bfloat16, device))
    yield Sample("positional", (*positional, torch.full((1,), 100.0, device=device), 1e-5, 16, "e4m3", "128x4"))


def norm_errors(device: torch.device, outputs: tuple[str, ...]) -> Iterator[ErrorInput]:
    """Bad inputs of an op with these outputs."""
    rows, weight = random_rows(4, 64, device=device), random_weight(64, torch.bfloat16, device)
    for error in row_errors(rows, device):
        (bad_rows,) = error.args
        fitting = random_weight(bad_rows.shape[-1] if bad_rows.dim() else 64, torch.bfloat16, device)
        yield replace(error, args=(bad_rows, fitting))

    def bad(name: str, error: type[Exception], match: str, weight: torch.Tensor) -> ErrorInput:
        return ErrorInput(f"weight-{name}", (rows, weight), {}, error, match)

    for dtype in (torch.float16, torch.float64, torch.int32):
        short = str(dtype).removeprefix("torch.")
        text = f"weight has dtype {short}; expected bfloat16 or float32"
        yield bad(short, TypeError, text, torch.ones(64, dtype=dtype, device=device))
    for shape in ((32,), (65,), (1,), (0,), (), (1, 64), (64, 1)):
        text = rf"weight has shape \({', '.join(map(str, shape))},?\); expected \(64,\)"
        yield bad(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, dtype=torch.bfloat16, device=device))
    yield bad("device", ValueError, "weight is on meta", weight.to("meta"))
    if device.type == "cuda":
        yield bad("cpu", ValueError, "weight is on cpu", weight.cpu())
    yield bad("requires-grad", ValueError, "no gradient", weight.clone().requires_grad_())
    yield bad("parameter-requires-grad", ValueError, "no gradient", torch.nn.Parameter(weight.clone()))

    good = {
        "y": torch.zeros(4, 32, dtype=torch.uint8, device=device),
        "scale": torch.zeros(8, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        "norm": torch.zeros(4, 64, dtype=torch.bfloat16, device=device),
    }
    yield from out_errors((rows, weight), {"scale_layout": "8x4"}, {name: good[name] for name in outputs}, device)
