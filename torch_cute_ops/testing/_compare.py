"""How close FP4 results must be where the sum behind them may be ordered differently."""

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.fp4 import E4M3_NAN, MXFP4, NVFP4, UE8M0_NAN, unpack_e2m1
from torch_cute_ops.formats.scale_layout import from_linear, to_linear

NAN_BYTE = {NVFP4: E4M3_NAN, MXFP4: UE8M0_NAN}


def assert_fp4_close(
    actual: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    fmt: FP4Format,
    layout: ScaleLayout,
) -> None:
    """Assert that ``(y, scale)`` pairs agree as behind a row reduction they must.

    At most one scale in 1,000 differs, each by one ulp, and at most one element in 1,000, each by one e2m1 step. Both
    allowances are rounded up, and one block whose scale differs may differ in all its elements: a small tensor may hold
    something that lies on a boundary too. Where a ue8m0 scale differs, which is by a factor of two, the block's
    elements may differ by two steps. NaN scales, signs and padding are equal.

    Raises:
        AssertionError: saying what differs, where, and by how much.
    """
    (y, scale), (want_y, want_scale) = actual, expected
    for name, got, want in (("y", y, want_y), ("scale", scale, want_scale)):
        assert got.shape == want.shape and got.dtype == want.dtype, (
            f"{name}: {got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
        )
    rows, width = y.shape[:-1].numel(), y.shape[-1] * 2
    blocks = width // fmt.block_size

    got_byte, want_byte = (_scale_bytes(s, layout, rows, blocks) for s in (scale, want_scale))
    nan = (got_byte == NAN_BYTE[fmt]) | (want_byte == NAN_BYTE[fmt])
    off = (got_byte - want_byte).abs()
    _report("scales that differ by more than one ulp, or in being NaN", (off > 1) | (nan & (off > 0)), off)
    _limit("scales", off > 0, _allowance(off.numel()))
    _report("padding that is not zero", _padding(scale, layout, rows, blocks) != 0, None)

    got_code, want_code = (unpack_e2m1(t).reshape(rows, blocks, fmt.block_size).to(torch.int16) for t in (y, want_y))
    steps = ((got_code & 7) - (want_code & 7)).abs()
    moved = (off > 0).unsqueeze(-1)
    allowed_steps = torch.where(moved, 2 if fmt is MXFP4 else 1, 1)
    differs = got_code != want_code
    _report("elements that differ in sign", (got_code ^ want_code) >= 8, steps)
    _report("elements that differ by more than one step", steps > allowed_steps, steps)
    _limit("elements", differs, max(_allowance(differs.numel()), fmt.block_size if bool(moved.any()) else 0))


def _allowance(count: int) -> int:
    return -(-count // 1000)


def _scale_bytes(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    return to_linear(scale.view(torch.uint8), layout, rows, blocks).to(torch.int16)


def _padding(scale: torch.Tensor, layout: ScaleLayout, rows: int, blocks: int) -> torch.Tensor:
    """The bytes of ``scale`` that belong to no block."""
    raw = scale.view(torch.uint8)
    return raw[from_linear(raw.new_ones(rows, blocks), layout).view(raw.shape) == 0]


def _report(what: str, where: torch.Tensor, amount: torch.Tensor | None) -> None:
    if not bool(where.any()):
        return
    places = where.nonzero()[:5].tolist()
    worst = "" if amount is None else f", by at most {int(amount[where].max())}"
    raise AssertionError(f"{int(where.sum())} of {where.numel()} {what}{worst}; the first at {places}")


def _limit(what: str, where: torch.Tensor, allowance: int) -> None:
    count = int(where.sum())
    if count > allowance:
        raise AssertionError(
            f"{count} of {where.numel()} {what} differ; at most {allowance} may; "
            f"the first at {where.nonzero()[:5].tolist()}"
        )
