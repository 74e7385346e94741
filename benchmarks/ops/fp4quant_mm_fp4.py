"""fp4quant_mm_fp4: the projection after attention, which quantises bfloat16 rows and multiplies by an NVFP4 weight. The
column "apart" gives the time of fp4_quantize followed by mm_fp4."""

from __future__ import annotations

from typing import ClassVar

import torch

import torch_cute_ops

from ..prologue_gemms import OUT, QuantisingPrologueGemm


class Fp4quantMmFp4(QuantisingPrologueGemm):
    op = "fp4quant_mm_fp4"
    weights = OUT
    settings: ClassVar = {"activations": "bfloat16", **QuantisingPrologueGemm.settings}
    quantise = staticmethod(torch_cute_ops.fp4_quantize)

    def value(self, a: torch.Tensor) -> torch.Tensor:
        return a.float()


BENCHMARK = Fp4quantMmFp4()
