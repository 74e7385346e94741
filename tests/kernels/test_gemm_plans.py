"""Configurations of GEMM kernels that are refused, with the reasons."""

import dataclasses

import pytest
import torch
from support.kernel_grid import BF16, FP16, FP32, ExpertsCase, FP8GemmCase, MmaCase, WgmmaCase

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

HOPPER, BLACKWELL = ARCHS["sm_90a"], ARCHS["sm_100a"]
MMA = MmaCase(FP16, NVFP4, "128x4", 16, 2, Epilogue(BF16), "sm_90a").kernel.config
WGMMA = WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(BF16)).kernel.config
OVER_EXPERTS = WgmmaCase(FP16, NVFP4, "128x4", None, 64, Epilogue(BF16), expert_k=256).kernel.config
EXPERTS = ExpertsCase(FP16, NVFP4, "128x4", None, 16, 64, BF16).kernel.config
FP8 = FP8GemmCase("fp8_wgmma", "plain", (16, 128, 1), Epilogue(BF16)).kernel.config
GROUPED = FP8GemmCase("fp8_wgmma", "counted", (16, 128, 1), Epilogue(BF16)).kernel.config
FP8_MMA = FP8GemmCase("fp8_mma", "plain", (16,), Epilogue(BF16)).kernel.config
GROUPED_MMA = FP8GemmCase("fp8_mma", "masked", (16,), Epilogue(BF16)).kernel.config
PLAIN, BY_EXPERT = (MMA, WGMMA, FP8, FP8_MMA), (GROUPED, GROUPED_MMA)


def reason(config, arch=HOPPER, **changes):
    return dataclasses.replace(config, **changes).reason_unsupported(arch)


@pytest.mark.parametrize("config", [WGMMA, OVER_EXPERTS, EXPERTS, FP8, GROUPED])
def test_wgmma_is_needed(config):
    assert config.reason_unsupported(HOPPER) is None
    assert config.reason_unsupported(BLACKWELL) == "sm_100a has no wgmma instructions"


def test_warps_multiply_experts_without_wgmma():
    """Check that a GPU without wgmma gets kernels whose warps issue the MMAs, whatever the number of tokens."""
    for arch in ARCHS.values():
        configs = [
            dataclasses.replace(ExpertsCase(FP16, NVFP4, "128x4", None, tile_m, 64, BF16), arch=arch.name).kernel.config
            for tile_m in (8, 16, 24, 32)
        ]
        assert [config.by_warp for config in configs] == [True, *[not arch.has_wgmma] * 3]
        assert all(reason(config, arch) is None for config in configs)


def test_codes_of_experts_need_block_scaled_mmas():
    """Check that kernels for experts multiply FP4 codes only on GPUs with block-scaled mma.sync, only if the
    activations are FP4, and only in whole MMAs."""
    case = ExpertsCase(torch.uint8, NVFP4, "128x4", "128x4", 16, 64, BF16, arch="sm_120a")
    config, desktop = case.kernel.config, ARCHS["sm_120a"]
    assert reason(config, desktop) is None
    assert reason(config, BLACKWELL) == "needs block-scaled mma.sync; this is sm_100a"
    assert reason(config, HOPPER, has_wgmma=True, tile_m=8) == "needs block-scaled mma.sync; this is sm_90a"
    assert (
        config.k_tile == 128 and reason(config, desktop, k_warps=4) == "4 warps cannot divide the 2 steps of a k tile"
    )
    operands = dataclasses.replace(config.operands, a_dtype=BF16, a_layout=None)
    assert "activations in torch.bfloat16 are not multiplied as torch.uint8" in reason(
        config, desktop, operands=operands
    )


@pytest.mark.parametrize("config", [MMA, FP8_MMA, GROUPED_MMA])
def test_mma_is_for_every_gpu(config):
    assert all(reason(config, arch, stages=3) is None for arch in ARCHS.values())


@pytest.mark.parametrize("config", [*PLAIN, *BY_EXPERT])
def test_dtype_of_the_bias(config):
    for dtype in (BF16, FP32):
        assert reason(config, epilogue=Epilogue(BF16, None, dtype)) is None
    assert "got bias with dtype torch.float16; expected float32 or " in reason(
        config, epilogue=Epilogue(BF16, None, FP16)
    )


@pytest.mark.parametrize("config", PLAIN)
def test_alpha_of_a_plain_gemm(config):
    assert all(reason(config, epilogue=Epilogue(FP32, alpha)) is None for alpha in (None, "one", "column"))
    for alpha in ("expert", "expert_column"):
        assert reason(config, epilogue=Epilogue(FP32, alpha)) == f"alpha is {alpha!r}, but the GEMM is not grouped"


@pytest.mark.parametrize("config", BY_EXPERT)
def test_alpha_of_a_grouped_gemm(config):
    for alpha in (None, "one", "expert", "expert_column"):
        assert reason(config, epilogue=Epilogue(FP32, alpha)) is None
    assert "'expert_column'" in reason(config, epilogue=Epilogue(FP32, "column"))


@pytest.mark.parametrize("epilogue", [Epilogue(BF16, "one"), Epilogue(BF16, "column"), Epilogue(BF16, None, BF16)])
def test_over_experts_there_is_no_epilogue(epilogue):
    assert reason(OVER_EXPERTS, epilogue=epilogue) == (
        "GEMMs over experts have no bias, and alpha has a factor per token and expert"
    )


def reason_of_operands(config, **changes):
    return reason(config, operands=dataclasses.replace(config.operands, **changes))


@pytest.mark.parametrize("config", [WGMMA, EXPERTS])
def test_dtypes_of_activations(config):
    """Check that float16 activations become bfloat16 for an MXFP4 weight, and that all other 16-bit activations keep
    their dtype."""
    codes, tiled = torch.uint8, SCALE_LAYOUTS["128x4"]
    assert reason_of_operands(config, a_dtype=codes, a_layout=tiled) is None
    assert reason_of_operands(config, a_dtype=FP16, dtype=BF16, fmt=MXFP4) is None
    assert reason_of_operands(config, a_dtype=BF16, dtype=BF16) is None
    assert "are not multiplied as torch.bfloat16 with nvfp4" in reason_of_operands(config, a_dtype=FP16, dtype=BF16)
    assert "are not multiplied as torch.float16 with nvfp4" in reason_of_operands(config, a_dtype=BF16)
    assert "with mxfp4" in reason_of_operands(config, a_dtype=FP16, fmt=MXFP4)
    assert "torch.uint8 with no scales" in reason_of_operands(config, a_dtype=codes)
    assert "torch.float16 with scales" in reason_of_operands(config, a_layout=tiled)


def test_width_of_an_expert():
    """Check the widths that an expert may have: multiples of half a scale tile of MXFP4, or of a scale tile of
    NVFP4."""
    assert reason(EXPERTS, expert_k=192) is None
    assert reason(EXPERTS, expert_k=96) == "an expert's width is 96; it has to be a multiple of 64"


def test_decoded_weights_exceed_float16():
    assert reason(MMA, fmt=MXFP4) == "decoded mxfp4 weights exceed float16"
    assert reason_of_operands(WGMMA, fmt=MXFP4, a_dtype=torch.uint8, a_layout=SCALE_LAYOUTS["128x4"]) == (
        "decoded mxfp4 weights exceed float16"
    )
