"""silu_mul_mm_fp4_weight_only: the down projection of a SwiGLU layer, which gates bfloat16 rows of gate and up, and
multiplies by an NVFP4 weight. The column "apart" gives the time of silu_mul followed by mm_fp4_weight_only."""

from __future__ import annotations

from typing import ClassVar

import torch

import torch_cute_ops

from ..case import Tensors
from ..compositions import silu_mul
from ..prologue_gemms import DOWN, PrologueGemm


class SiluMulMmFp4WeightOnly(PrologueGemm):
    op = "silu_mul_mm_fp4_weight_only"
    weights = DOWN
    settings: ClassVar = {"gate and up": "bfloat16", **PrologueGemm.settings}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return silu_mul(tensors["a"]).to(dtype)

    def call_apart(self, given: Tensors, out: torch.Tensor) -> None:
        torch_cute_ops.mm_fp4_weight_only(**{**given, "a": torch_cute_ops.silu_mul(given["a"])}, out=out)


BENCHMARK = SiluMulMmFp4WeightOnly()
