"""Compare FP4 and FP8 results of two implementations whose fp32 arithmetic may round differently."""

from collections.abc import Callable
from functools import cache

import torch

from torch_cute_ops.formats import FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.fp4 import E4M3_NAN, MXFP4, NVFP4, UE8M0_NAN, unpack_e2m1
from torch_cute_ops.formats.scale_layout import from_linear, to_linear

NAN_BYTE = {NVFP4: E4M3_NAN, MXFP4: UE8M0_NAN}
SCALE_ERROR = 2.0**-20
"""Allowed relative error of a computed fp32 scale: a few ulps, from the sum, the root and the products."""
GATE_ERROR = 2.0**-17
"""Allowed relative error of a scale after ``silu(a)``. Rounding the exponent ``a · log2(e)`` adds |a| · 2^-24, for a >
-89."""
SMALLEST = 2.0**-149
E4M3_STEPS_TO_DOUBLE = 8
"""Number of e4m3 steps from a number to its double. The codes of a value with two neighbouring power-of-two scales
differ by this number of steps, apart from rounding."""


def assert_fp4_close(
    actual: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    fmt: FP4Format,
    layout: ScaleLayout,
    boundary: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> None:
    """Assert that two ``(y, scale)`` pairs agree except for the rounding of a row reduction.

    At most one scale in 1,000 may differ, by one ulp, and at most one element in 1,000, by one e2m1 step. Both limits
    are rounded up. All elements of one block with a different scale may differ, because even a small tensor may contain
    a value on a rounding boundary. Equal rows are counted once. If a ue8m0 scale differs (by a factor of two), the
    block's elements may differ by two steps. NaN scales, signs and padding must be equal.

    Args:
        actual: codes and scales to check.
        expected: codes and scales that are correct.
        fmt: format of both pairs.
        layout: layout of both scales.
        boundary: function that returns masks of scales (rows, blocks) and of elements (rows, K) that do not count,
            because their exact values lie halfway between two numbers of their format. Inputs with few significant bits
            produce many of them. If a scale does not count, the elements of its block do not count either. The function
            is called only if too many scales or elements differ.

    Raises:
        AssertionError: if the pairs disagree; the message names the elements and the largest difference.
    """
    (y, scale), (want_y, want_scale) = actual, expected
    _same_kind(actual, expected)
    rows, width = y.shape[:-1].numel(), y.shape[-1] * 2
    blocks = width // fmt.block_size

    got_byte, want_byte = (_scale_bytes(s, layout, rows, blocks) for s in (scale, want_scale))
    nan = (got_byte == NAN_BYTE[fmt]) | (want_byte == NAN_BYTE[fmt])
    off = (got_byte - want_byte).abs()
    _report("scales that differ by more than one ulp, or in being NaN", (off > 1) | (nan & (off > 0)), off)
    masks = None if boundary is None else cache(lambda: _masks(boundary(), fmt, got_byte.device))
    _limit("scales", got_byte, want_byte, excused=masks and (lambda: masks()[0]))
    _report("padding that is not zero", _padding(scale, layout, rows, blocks) != 0, None)

    got_code, want_code = (unpack_e2m1(t).reshape(rows, blocks, fmt.block_size).to(torch.int16) for t in (y, want_y))
    steps = ((got_code & 7) - (want_code & 7)).abs()
    moved = (off > 0).unsqueeze(-1)
    allowed_steps = torch.where(moved, 2 if fmt == MXFP4 else 1, 1)
    _report("elements that differ in sign", (got_code ^ want_code) >= 8, steps)
    _report("elements that differ by more than one step", steps > allowed_steps, steps)
    at_least = fmt.block_size if bool(moved.any()) else 0
    _limit("elements", got_code, want_code, at_least, masks and (lambda: masks()[1]))


def _masks(
    boundary: tuple[torch.Tensor, torch.Tensor], fmt: FP4Format, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of scales (rows, blocks) and of elements (rows, blocks, block size) that do not count."""
    scales, elements = (mask.to(device) for mask in boundary)
    return scales, elements.unflatten(-1, (-1, fmt.block_size)) | scales.unsqueeze(-1)


def assert_fp8_close(
    actual: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    fmt: FP8Format,
    boundary: Callable[[], torch.Tensor] | None = None,
    scale_error: float = SCALE_ERROR,
    layout: ScaleLayout | None = None,
) -> None:
    """Assert that two ``(y, scale)`` pairs agree except for the rounding of a row reduction or an exponential.

    At most one element in 1,000 (rounded up) may differ: by one e4m3 step, with the same sign. Equal rows are counted
    once. Computed scales may differ by the relative error ``scale_error``; NaN, zero and given scales must be equal.

    If scales are powers of two, at most one scale in 1,000 (rounded up) may differ, by a factor of two. All elements of
    one block with a different scale may differ, by as many steps as the factor explains. Padding must be equal.

    Args:
        actual: codes and scales to check.
        expected: codes and scales that are correct.
        fmt: format of both pairs.
        boundary: function that returns a mask (rows, K) of elements to ignore, because their exact values lie halfway
            between two e4m3 numbers. Inputs with few significant bits produce many such elements. The function is
            called only if too many elements differ.
        scale_error: ``SCALE_ERROR``, or ``GATE_ERROR`` after a gate.
        layout: layout of both scales if they are bytes (MXFP8), else None.

    Raises:
        AssertionError: if the pairs disagree; the message names the elements and the largest difference.
    """
    (y, scale), (want_y, want_scale) = actual, expected
    _same_kind(actual, expected)
    rows, at_least, allowed_steps = y.shape[:-1].numel(), 0, torch.ones((), device=y.device)
    if fmt.scale_format == "ue8m0":
        moved = _check_powers(scale, want_scale, rows, fmt.scales_per_row(y.shape[-1]), layout)
        at_least = fmt.block_size if bool(moved.any()) else 0
        of_elements = moved.repeat_interleave(fmt.block_size, 1)[:, : y.shape[-1]]
        allowed_steps = torch.where(of_elements, E4M3_STEPS_TO_DOUBLE + 1, 1)
    else:
        _report("scales that differ in being NaN", scale.isnan() != want_scale.isnan(), None)
        _report("scales that differ in being zero", (scale == 0) != (want_scale == 0), None)
        off = (scale.double() - want_scale.double()).abs()
        limit = 0.0 if fmt.is_static else want_scale.double().abs() * scale_error + 2 * SMALLEST
        _report("scales that differ by more than their computation explains", off > limit, None)

    got_code, want_code = (t.view(torch.uint8).reshape(rows, y.shape[-1]).to(torch.int16) for t in (y, want_y))
    steps = ((got_code & 0x7F) - (want_code & 0x7F)).abs()
    nan = ((got_code & 0x7F) == E4M3_NAN) | ((want_code & 0x7F) == E4M3_NAN)
    _report("elements that differ in sign", (got_code ^ want_code) >= 0x80, steps)
    wrong = (steps > allowed_steps) | (nan & (steps > 0))
    _report("elements that differ by more than one step, or in being NaN", wrong, steps)
    _limit("elements", got_code, want_code, at_least, excused=boundary)


def _check_powers(
    scale: torch.Tensor, want: torch.Tensor, rows: int, blocks: int, layout: ScaleLayout | None
) -> torch.Tensor:
    """Compare scales that are powers of two: bytes in ``layout``, or fp32 numbers if it is None. Return a mask (rows,
    blocks) of the scales that differ."""
    if layout is not None:
        _report("padding that is not zero", _padding(scale, layout, rows, blocks) != 0, None)
        got_byte, want_byte = (_scale_bytes(each, layout, rows, blocks) for each in (scale, want))
    else:
        bits, want_bits = (each.contiguous().view(torch.int32).view(rows, blocks) for each in (scale, want))
        fraction = bits & 0x7FFFFF
        is_power = (fraction == 0) | (bits == 0x400000) | scale.isnan().view(rows, blocks)
        # Rows that are only padding have the scale 0.
        is_wrong = (bits < 0) & (fraction == 0) | ((bits == 0) != (want_bits == 0))
        _report("scales that are no powers of two", ~is_power | is_wrong, None)
        got_byte, want_byte = ((each >> 23) & 0xFF for each in (bits, want_bits))
    off = (got_byte - want_byte).abs()
    nan = (got_byte == UE8M0_NAN) | (want_byte == UE8M0_NAN)
    _report("scales that differ by more than a factor of two, or in being NaN", (off > 1) | (nan & (off > 0)), off)
    _limit("scales", got_byte, want_byte)
    return off > 0


def _same_kind(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, got, want in zip(("y", "scale"), actual, expected, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype, (
            f"{name}: {got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
        )


def _scale_bytes(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    return to_linear(scale.view(torch.uint8), layout, rows, blocks).to(torch.int16)


def _padding(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    """Return the bytes of tiled scales that belong to no block."""
    raw = scale.view(torch.uint8)
    return raw[from_linear(raw.new_ones(rows, blocks), layout).view(raw.shape) == 0]


def _report(what: str, where: torch.Tensor, amount: torch.Tensor | None) -> None:
    if not bool(where.any()):
        return
    places = where.nonzero()[:5].tolist()
    worst = "" if amount is None else f", by at most {int(amount[where].max())}"
    raise AssertionError(f"{int(where.sum())} of {where.numel()} {what}{worst}; the first at {places}")


def _limit(
    what: str,
    got: torch.Tensor,
    want: torch.Tensor,
    at_least: int = 0,
    excused: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Assert that at most one element in 1,000 (rounded up) differs, or ``at_least`` elements if that is more.

    If too many differ, the elements in the mask ``excused`` are ignored, and repeated rows are counted once.
    """
    allowance = max(-(-got.numel() // 1000), at_least)
    if excused is not None and int((got != want).sum()) > allowance:
        got = torch.where(excused().to(got.device), want, got)
    if int((got != want).sum()) > allowance:
        got, want = torch.stack((got, want), 1).unique(dim=0).unbind(1)
    where = got != want
    count = int(where.sum())
    if count > allowance:
        raise AssertionError(
            f"{count} of {where.numel()} {what} differ; at most {allowance} may; "
            f"the first at {where.nonzero()[:5].tolist()}"
        )
