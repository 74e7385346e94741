"""The kernel that quantises blocks of 128 × 128 elements, executed in the PTX emulator and compared with the CPU
reference bit for bit."""

from typing import Any, NamedTuple

import pytest
import torch
from samples._rows import special_rows
from support.emulated import BLACKWELL, CONSUMER, CPU, HOPPER, equal, poisoned
from support.kernel_grid import BF16, FP16, FP32, MoeCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.kernels import fp8_square_blocks
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

reference = OPS["fp8_quantize_block128x128"].reference


class Run(NamedTuple):
    """Launch: dtype, format of the scales, shape of the input, architecture, and seed of the order of events."""

    dtype: torch.dtype
    scale_format: str | None
    shape: tuple[int, int, int]
    arch: str
    seed: int | None


RUNS = {
    "one-block": Run(BF16, None, (1, 128, 128), HOPPER, 0),
    "short-blocks": Run(FP32, None, (1, 150, 192), HOPPER, 1),
    "experts": Run(FP16, None, (3, 129, 64), BLACKWELL, 2),
    "powers": Run(BF16, "ue8m0", (2, 130, 320), BLACKWELL, None),
    "consumer": Run(FP32, "ue8m0", (1, 3, 384), CONSUMER, 1),
    "consumer-experts": Run(BF16, None, (2, 131, 192), CONSUMER, 0),
}


def execute(one: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on poisoned outputs; return codes and scales in the shapes of the op's outputs."""
    experts, n, k = x.shape
    y = poisoned(experts * n, k, dtype=torch.float8_e4m3fn)
    scale = poisoned(experts * -(-n // 128), -(-k // 128), dtype=FP32)
    kernel: Any = MoeCase("fp8_square_blocks", (one.dtype, one.scale_format), one.arch).kernel
    run_kernel(kernel, ARCHS[one.arch], *fp8_square_blocks.Arguments(x, y, scale), seed=one.seed)
    return y.view(x.shape), scale.view(experts, -1, scale.shape[1])


@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in RUNS.items()])
def test_blocks(one: Run) -> None:
    """Check codes and scales of random matrices whose rows are strided."""
    torch.manual_seed(0)
    experts, n, k = one.shape
    x = (torch.randn(experts, n, k + 64) * torch.rand(experts, n, 1)).to(one.dtype)[..., 32 : 32 + k]
    want = reference(x, one.scale_format)
    for name, got, expected in zip(("y", "scale"), execute(one, x), want, strict=True):
        equal(name, got, expected)


@pytest.mark.parametrize("scale_format", [None, "ue8m0"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_special_values(dtype: torch.dtype, scale_format: str | None) -> None:
    """Check blocks with NaN, infinities, zeros, subnormal and extreme values, each row of ``special_rows`` as a
    matrix."""
    x = special_rows(dtype, CPU, 128).unsqueeze(1)
    want = reference(x, scale_format)
    results = execute(Run(dtype, scale_format, tuple(x.shape), HOPPER, 0), x)
    for name, got, expected in zip(("y", "scale"), results, want, strict=True):
        equal(name, got, expected)
