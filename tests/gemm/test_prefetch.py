"""Prefetches into L2 by GEMMs: tensors that are refused, and the number of bytes that are prefetched."""

import pytest
import torch
from samples import mm_fp4_weight_only
from samples._fp4_gemm import random_matrix
from support.cases import arguments, expected_of
from support.emulated import CPU, check_prefetched, poisoned
from support.kernel_grid import BF16, FP16, FP32, WgmmaCase
from support.launch_model import Launches, launches  # noqa: F401  (a fixture)

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels import fp4_wgmma
from torch_cute_ops.kernels.common.core import memory
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

OP = OPS["mm_fp4_weight_only"]


@pytest.mark.parametrize("backend", ["wgmma", "mma_sync"])
def test_calls_after_a_good_one(backend, launches: Launches):  # noqa: F811
    """Check that wrong tensors are refused even after a valid call, whether or not the kernel uses ``prefetch``.

    Empty tensors, and tensors that share memory with the result, are accepted.
    """
    sample = mm_fp4_weight_only.SAMPLES.sample("", 4, 136, 512, NVFP4, "128x4", CPU, dtype=BF16, backend=backend)
    given = arguments(OP, sample)
    good = torch.zeros(40, 48, dtype=torch.uint8)
    (want,) = expected_of(OP).results(given)
    out = torch.empty_like(want)
    bytes_of_out = out.view(torch.uint8)[:, :256].contiguous()
    for taken in (good, good[:0], good[:, :0], good.view(torch.float8_e4m3fn), bytes_of_out, good):
        result = OP.cuda(**{**given, "prefetch": taken})
        expected_of(OP).assert_results((result,), (want,), given)
    wide = torch.empty(4, 272, dtype=torch.uint8)
    torch.ops.cute.mm_fp4_weight_only.out(**{**given, "prefetch": wide}, out=wide.view(BF16))
    expected_of(OP).assert_results((wide.view(BF16),), (want,), given)
    for wrong, error in (
        (good.float(), TypeError),
        (good[0], ValueError),
        (good.t(), ValueError),
        (good[:, :24].contiguous(), ValueError),
        (good.to("meta"), ValueError),
        (3, TypeError),
    ):
        for _ in range(2):
            with pytest.raises(error, match="prefetch"):
                OP.cuda(**{**given, "prefetch": wrong})


def test_no_more_than_the_first_bytes(monkeypatch):
    """Check that each byte up to the limit is prefetched exactly once. The limit is larger than one request."""
    most = 4112
    monkeypatch.setattr(memory, "PREFETCH_BYTES", most)
    case = WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32), 2, prefetches=True, tile_n=160)
    b, scale = random_matrix(328, 512, NVFP4, "128x4", CPU)
    matrix, out = poisoned(9, 1040, dtype=torch.uint8), poisoned(9, 328, dtype=FP32)
    a = torch.randn(9, 512).half()
    given = fp4_wgmma.Arguments(a, None, b.t(), scale, None, None, None, out, None, matrix, 0, 0)
    # The kernel is compiled with this limit, which is not part of the key in the cache of kernels. So use a
    # configuration that no other test uses.
    machines = run_kernel(fp4_wgmma.FP4WgmmaKernel(case.kernel.config), ARCHS["sm_90a"], *given, strict=True)
    check_prefetched(machines, matrix.view(-1)[:most])
