"""mm_fp4: the GEMM of NVFP4 activations and an NVFP4 weight."""

from __future__ import annotations

from ..fp4_gemms import FP4Activations


class MmFp4(FP4Activations):
    op = "mm_fp4"


BENCHMARK = MmFp4()
