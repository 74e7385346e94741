"""The kernel that folds MXFP8, executed in the PTX emulator and compared with float64 products."""

from typing import Any

import pytest
import torch
from support.emulated import BLACKWELL, CONSUMER, HOPPER, equal, poisoned
from support.kernel_grid import FP32, MoeCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.formats.fp4 import E4M3_NAN, UE8M0_NAN
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels import mxfp8_fold
from torch_cute_ops.runtime.arch import ARCHS

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "width", "layout", "arch", "max_ctas", "seed"),
    [
        pytest.param(256, 2048, "linear", HOPPER, 64, None, id="every-code-by-every-difference"),
        pytest.param(37, 96, "linear", HOPPER, 1, 0, id="rows-of-a-cta"),
        pytest.param(3, 64, "128x4", BLACKWELL, 8, 1, id="short-rows"),
        pytest.param(150, 288, "128x4", HOPPER, 2, 1, id="tiled"),
        pytest.param(5, 4160, "linear", CONSUMER, 2, 2, id="part-of-the-threads"),
    ],
)
@pytest.mark.parametrize("by_row", [False, True], ids=["groups", "by-row"])
def test_fold(rows: int, width: int, layout: str, arch: str, max_ctas: int, seed: int | None, by_row: bool) -> None:
    """Check the folded elements and the scales bit for bit. In a matrix of 256 × 2,048, the blocks of a row hold all
    codes, with the scale byte r in row r, and every fourth block of a row has the scale 255, 254, 100 or 40. So every
    code meets every difference of exponents. NaN becomes a NaN of either sign."""
    torch.manual_seed(rows)
    codes = torch.arange(rows * width).to(torch.uint8).view(rows, width)
    scale = torch.randint(90, 130, (rows, width // 32), dtype=torch.uint8)
    if rows == 256:
        scale = torch.arange(rows, dtype=torch.uint8)[:, None].repeat(1, width // 32)
        scale[:, ::4] = torch.tensor([254, 100, 40, 255], dtype=torch.uint8).repeat_interleave(4)
        codes = (torch.arange(width) + torch.arange(width) // 128 * 96).to(torch.uint8).repeat(rows, 1)
    groups, size = (1, width // 32) if by_row else (-(-width // 128), 4)
    y, y_scale = poisoned(rows, width, dtype=E4M3), poisoned(groups, rows, dtype=FP32)
    kernel: Any = MoeCase("mxfp8_fold", (width, layout, by_row), arch).kernel
    scales = from_linear(scale, SCALE_LAYOUTS[layout])
    given = mxfp8_fold.Arguments(codes.view(E4M3), scales, y, y_scale, max_ctas)
    run_kernel(kernel, ARCHS[arch], *given, seed=seed)
    padded = torch.nn.functional.pad(scale, (0, -(width // 32) % size)).view(rows, groups, size)
    largest = padded.amax(-1)
    below = (largest[..., None].int() - padded).flatten(1)[:, : width // 32].repeat_interleave(32, 1)
    want = torch.ldexp(codes.view(E4M3).double(), -below).float().to(E4M3)
    for folded in (y, want):
        folded.view(torch.uint8)[folded.isnan()] = E4M3_NAN
    equal("y", y.view(torch.uint8), want.view(torch.uint8))
    powers = torch.where(largest == UE8M0_NAN, torch.nan, torch.exp2(largest.double() - 127))
    equal("y_scale", y_scale, powers.float().t().contiguous())
