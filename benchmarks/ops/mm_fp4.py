"""mm_fp4: the product of NVFP4 activations and an NVFP4 weight."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..case import Tensors
from ..compositions import from_128x4, nvfp4_dequantize
from ..formulas import fp4_bytes
from ..products import ProductBenchmark, random_nvfp4


class MmFp4(ProductBenchmark):
    op = "mm_fp4"
    settings: ClassVar = {"activations": "NVFP4", **ProductBenchmark.settings}
    peer_note = "bfloat16 activations"
    notes = ("The peers have no FP4 activations on this GPU: theirs are the same numbers in bfloat16.",)

    def a_bytes(self, m: int, k: int) -> int:
        return fp4_bytes(m, k)

    def make_a(self, m: int, k: int, device: torch.device) -> Tensors:
        codes, scale = random_nvfp4(m, k, device)
        return {"a": codes, "a_scale": scale}

    def decoded_a(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        m, half = tensors["a"].shape
        return nvfp4_dequantize(tensors["a"], from_128x4(tensors["a_scale"], m, half // 8), dtype)


BENCHMARK = MmFp4()
