"""Samples and error inputs of the ops that add rows to a residual: the inputs in ``_norm``, plus residuals."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, norm_out_errors, norm_samples, random_weight
from samples._rows import DTYPES, Family, random_rows, short, special_rows, views


def residual_for(rows: torch.Tensor) -> torch.Tensor:
    """Return a random residual with the shape and strides of ``rows``. If a stride is 0, the residual is contiguous."""
    data = random_rows(*rows.shape, dtype=rows.dtype, device=rows.device)
    if 0 in rows.stride() or not rows.numel():
        return data
    reach = sum(stride * (extent - 1) for stride, extent in zip(rows.stride(), rows.shape, strict=True))
    storage = random_rows(int(rows.storage_offset() + reach) + 1, dtype=rows.dtype, device=rows.device)
    return storage.as_strided(rows.shape, rows.stride(), rows.storage_offset()).copy_(data)


def add_norm_samples(family: Family, device: torch.device, only_rms: bool = False) -> Iterator[Sample]:
    """Yield ``norm_samples`` with residuals, and residuals with other memory layouts and special values. Unless
    ``only_rms``, also yield float32 residuals for 16-bit rows."""
    for name, (rows, *others), kwargs in map(_parts, norm_samples(family, device, only_rms)):
        residual = torch.zeros_like(rows) if name == "layer-constant" else residual_for(rows)
        yield Sample(name, (rows, residual, *others), kwargs)

    def sample(name: str, rows: torch.Tensor, residual: torch.Tensor, **kwargs: Any) -> Sample:
        weight = random_weight(rows.shape[-1], torch.float32, device)
        return Sample(f"residual-{name}", (rows, residual, weight), {**family.plain, **kwargs})

    if not only_rms:
        yield from (sample(*rows) for rows in _wider(device))
    for name, residual in views(32, device):
        if 0 not in residual.stride():
            yield sample(name, random_rows(*residual.shape, dtype=residual.dtype, device=device), residual)
    yield from (sample(*rows) for rows in _shared(device))
    yield from (sample(*rows, **family.small) for rows in _values(device))


def _parts(sample: Sample) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return sample.name, sample.args, sample.kwargs


def _wider(device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield 16-bit rows and float32 residuals."""
    for dtype in DTYPES[:2]:
        for shape in ((5, 96), (2, 3, 4096), (0, 96), (96,)):
            rows = random_rows(*shape, dtype=dtype, device=device)
            yield f"wider-{short(dtype)}-{list(shape)}", rows, random_rows(*shape, dtype=torch.float32, device=device)
        special = special_rows(dtype, device)
        plain = random_rows(*special.shape, dtype=torch.float32, device=device)
        yield f"wider-special-{short(dtype)}", special, plain
    yield (
        "wider-strided",
        random_rows(5, 96, device=device),
        random_rows(5, 192, dtype=torch.float32, device=device)[:, :96],
    )


def _shared(device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield rows and residuals that lie in one storage, or whose strides differ."""
    for name, rows in views(32, device):
        if name in ("row-strided", "column-offset", "column-step", "columns-first", "leading-transposed"):
            yield f"is-input-{name}", rows, rows
    for dtype in DTYPES:
        rows = random_rows(5, 96, dtype=dtype, device=device)
        yield f"is-input-{short(dtype)}", rows, rows
    rows = random_rows(96, device=device)
    yield "is-input-1d", rows, rows
    rows = random_rows(2, 4, 96, device=device)
    yield "is-a-view-of-input", rows, rows.view(2, 4, 96)
    layers = random_rows(3, 7, 96, device=device)
    yield "in-a-stack", layers[0], layers[1]
    sides = random_rows(7, 192, device=device)
    yield "beside-input", sides[:, 96:], sides[:, :96]
    yield "of-rows-expanded", random_rows(1, 96, device=device).expand(5, 96), random_rows(5, 96, device=device)
    rows = random_rows(6, 2, 96, device=device)
    yield "contiguous-of-transposed", rows.transpose(0, 1), random_rows(2, 6, 96, device=device)
    yield "one-row-of-many", rows[:1, 0], random_rows(6, 96, device=device)[3:4]


def _values(device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for dtype in DTYPES:
        special = special_rows(dtype, device)
        plain = random_rows(*special.shape, dtype=dtype, device=device)
        yield f"special-{short(dtype)}", plain, special.clone()
        # Add every pair of special numbers: infinities that cancel, sums that overflow, sums of subnormals.
        pairs = torch.cartesian_prod(*2 * [torch.arange(len(special), device=device)])
        yield f"special-sums-{short(dtype)}", special[pairs[:, 0]], special[pairs[:, 1]]
        yield f"cancels-{short(dtype)}", plain, -plain
        # Include sums halfway between two numbers of the dtype, which must round to the even number, and sums next to
        # them.
        eps = torch.finfo(dtype).eps
        steps = torch.arange(1, 193, device=device).to(torch.float64) * eps / 2
        near = torch.stack((steps, steps * (1 + eps), steps * (1 - eps / 2))).to(dtype)
        yield f"ties-{short(dtype)}", torch.ones_like(near), near
        yield f"small-beside-large-{short(dtype)}", plain, (plain * eps).to(dtype)


def add_norm_errors(errors: Iterable[ErrorInput]) -> Iterator[ErrorInput]:
    """Yield these error inputs of an op that normalises rows, each with a residual added."""
    for error in errors:
        rows, weight = error.args
        residual = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        yield replace(error, args=(rows, residual, weight))


def add_norm_error_inputs(
    family: Family, device: torch.device, returns_norm: bool = False, only_rms: bool = False
) -> Iterator[ErrorInput]:
    """Yield all error inputs of an op that adds rows to a residual and normalises the sum."""
    yield from add_norm_errors(norm_errors(family, device, only_rms))
    yield from residual_errors(device, only_rms)
    yield from add_norm_errors(norm_out_errors(family, device, returns_norm=returns_norm))


def residual_errors(device: torch.device, only_rms: bool = False) -> Iterator[ErrorInput]:
    """Yield calls with wrong residuals. If ``only_rms``, the residual must have the dtype of the rows."""
    rows, weight = random_rows(4, 128, device=device), random_weight(128, torch.bfloat16, device)

    def bad(name: str, error: type[Exception], match: str, residual: torch.Tensor) -> ErrorInput:
        return ErrorInput(f"residual-{name}", (rows, residual, weight), {}, error, match)

    for dtype in (torch.float16, torch.float64, torch.int16, *([torch.float32] if only_rms else [])):
        text = f"got residual with dtype {short(dtype)}; expected bfloat16"
        yield bad(short(dtype), TypeError, text, torch.zeros(4, 128, dtype=dtype, device=device))
    for shape in ((3, 128), (4, 64), (128,), (512,), (), (0, 128), (1, 4, 128), (4, 1), (1, 128)):
        text = rf"got residual with shape \({', '.join(map(str, shape))},?\); expected \(4, 128\), the shape of input"
        yield bad(f"shape-{list(shape)}", ValueError, text, torch.zeros(shape, dtype=torch.bfloat16, device=device))
    storage = random_rows(4 * 128, device=device)
    for name, strides in {"rows": (0, 1), "columns": (1, 0), "everywhere": (0, 0), "windows": (1, 1)}.items():
        text = (
            rf"got residual with shape \(4, 128\) and strides \({strides[0]}, "
            rf"{strides[1]}\), by which it overlaps itself"
        )
        yield bad(f"overlaps-{name}", ValueError, text, storage.as_strided((4, 128), strides))
    yield bad("overlaps-half", ValueError, "overlaps itself", storage.as_strided((4, 128), (64, 1)))
    overlapping = rows[:1].expand(4, 128)
    yield ErrorInput("residual-is-input-expanded", (overlapping, overlapping, weight), {}, ValueError, "overlaps")
    if not only_rms:
        wider = random_rows(4, 192, dtype=torch.float32, device=device)
        for name, first in (("same", 0), ("beside", 256)):
            inside = wider.view(torch.bfloat16)[:, first : first + 128]
            args = inside, wider[:, :128], weight
            yield ErrorInput(f"residual-wider-{name}", args, {}, ValueError, "residual is updated in place and shares")
    yield bad("device", ValueError, "residual is on meta, input on", torch.zeros_like(rows, device="meta"))
    if device.type == "cuda":
        yield bad("cpu", ValueError, "residual is on cpu, input on", rows.cpu())
    yield bad("requires-grad", ValueError, "no gradient", rows.clone().requires_grad_())
    yield bad("view-requires-grad", ValueError, "no gradient", (rows.clone().requires_grad_() * 1)[:])
