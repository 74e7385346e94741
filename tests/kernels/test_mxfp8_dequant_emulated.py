"""The kernel that decodes MXFP8, executed in the PTX emulator and compared with float64 products."""

from typing import Any

import pytest
import torch
from support.emulated import BLACKWELL, CONSUMER, HOPPER, equal, poisoned
from support.kernel_grid import BF16, MoeCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels import mxfp8_dequant
from torch_cute_ops.runtime.arch import ARCHS


@pytest.mark.parametrize(
    ("rows", "width", "layout", "arch", "max_ctas", "seed"),
    [
        pytest.param(256, 8192, "linear", HOPPER, 64, None, id="every-code-by-every-scale"),
        pytest.param(37, 96, "linear", HOPPER, 1, 0, id="rows-of-a-cta"),
        pytest.param(3, 64, "128x4", BLACKWELL, 8, 1, id="short-rows"),
        pytest.param(150, 288, "128x4", HOPPER, 2, 1, id="tiled"),
        pytest.param(5, 2112, "linear", CONSUMER, 2, 2, id="part-of-the-threads"),
    ],
)
def test_decode(rows: int, width: int, layout: str, arch: str, max_ctas: int, seed: int | None) -> None:
    """Check the decoded numbers bit for bit. Row r has all codes and, in a matrix of 256 × 8,192, the scale byte r in
    each block, so that every code meets every scale: NaN, subnormal scales, and products that overflow."""
    codes = torch.arange(rows * width).to(torch.uint8).view(rows, width)
    scale = (torch.arange(rows)[:, None] + torch.arange(width // 32) * (rows != 256)).to(torch.uint8)
    out = poisoned(rows, width, dtype=BF16)
    kernel: Any = MoeCase("mxfp8_dequant", (width, layout), arch).kernel
    scales = from_linear(scale, SCALE_LAYOUTS[layout])
    given = mxfp8_dequant.Arguments(codes.view(torch.float8_e4m3fn), scales, out, max_ctas)
    run_kernel(kernel, ARCHS[arch], *given, seed=seed)
    powers = torch.where(scale == 255, torch.nan, torch.ldexp(torch.tensor(1.0).double(), scale.double() - 127))
    want = codes.view(torch.float8_e4m3fn).double() * powers.repeat_interleave(32, 1)
    equal("out", out, want.float().bfloat16())
