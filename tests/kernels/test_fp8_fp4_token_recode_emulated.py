"""The kernel that recodes an FP4 weight with prepared scales to FP8, executed in the PTX emulator."""

from typing import Any

import pytest
import torch
from test_fp8_fp4_token_gemm_emulated import E4M3, MAGNITUDES, interleaved, prepared, scale_of

from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.kernels import fp8_fp4_token_recode
from torch_cute_ops.runtime.arch import ARCHS

HOPPER = ARCHS["sm_90a"]


def kernel_for(fmt: Any, is_plain: bool) -> Any:
    config = fp8_fp4_token_recode.Config(fmt, is_plain, pdl=True)
    return fp8_fp4_token_recode.FP8FP4TokenRecodeKernel(config)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("experts", "n", "k"), [(None, 16, 576), (3, 8, 4352), (None, 8, 64)])
def test_numbers(fmt: Any, experts: int | None, n: int, k: int) -> None:
    """Check the numbers and units of weights with all indices of decoding tables, bit for bit, and that elements beyond
    K become zeros."""
    count, blocks = experts or 1, k // fmt.block_size
    codes = torch.randint(16, (count, n, k))
    index = torch.randint(156 if fmt == NVFP4 else 21, (count, n, blocks))
    index[torch.rand(index.shape) < 0.1] = 255  # NaN
    units = torch.exp2(torch.randint(-30, 31, (count, n)).float())
    numbers = MAGNITUDES.double()[codes % 8] * scale_of(index, fmt).repeat_interleave(fmt.block_size, 2)
    # Clamp, because torch 2.11 converts 480 to NaN, and torch 2.13 to 448.
    want = torch.where(codes > 7, -numbers, numbers).clamp(-448, 448).float().to(E4M3)
    want = interleaved(want.float().flatten(0, 1)).to(E4M3).view(count, n, -1)
    packed, scales = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), prepared(index, units, fmt.block_size)
    given = (packed.mT, scales) if experts else (packed[0].t(), scales[0])
    weight, got = torch.full(want.shape, 0x55, dtype=torch.uint8).view(E4M3), torch.full((count, n), torch.nan)
    kernel = kernel_for(fmt, experts is None)
    run_kernel(kernel, HOPPER, *given, weight, got, strict=True)
    assert torch.equal(got, units)
    assert torch.equal(weight.float().isnan(), want.float().isnan())
    same = weight.view(torch.uint8) == want.view(torch.uint8)
    assert (same | want.float().isnan()).all()
    (resources,) = compile_ptx(kernel, HOPPER).resources
    assert resources.spill_bytes == 0
