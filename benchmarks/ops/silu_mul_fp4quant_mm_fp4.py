"""silu_mul_fp4quant_mm_fp4: the down projection of a SwiGLU layer, which gates and quantises bfloat16 rows of gate and
up, and multiplies by an NVFP4 weight. The column "apart" gives the time of silu_mul_fp4quant followed by mm_fp4."""

from __future__ import annotations

from typing import ClassVar

import torch

import torch_cute_ops

from ..compositions import silu_mul_fp32
from ..prologue_gemms import DOWN, QuantisingPrologueGemm


class SiluMulFp4quantMmFp4(QuantisingPrologueGemm):
    op = "silu_mul_fp4quant_mm_fp4"
    weights = DOWN
    settings: ClassVar = {"gate and up": "bfloat16", **QuantisingPrologueGemm.settings}
    quantise = staticmethod(torch_cute_ops.silu_mul_fp4quant)

    def value(self, a: torch.Tensor) -> torch.Tensor:
        return silu_mul_fp32(a)


BENCHMARK = SiluMulFp4quantMmFp4()
