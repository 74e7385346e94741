"""moe_fc2_fp4: the second GEMM of an expert layer, with NVFP4 activations and NVFP4 weights."""

from __future__ import annotations

from typing import ClassVar

from ..expert_gemms import ExpertGemmBenchmark
from ..fp4_gemms import FP4_ACTIVATIONS_NOTE, FP4Activations


class MoeFc2Fp4(ExpertGemmBenchmark, FP4Activations):
    op = "moe_fc2_fp4"
    settings: ClassVar = {"activations": "NVFP4", **ExpertGemmBenchmark.settings}
    notes = (FP4_ACTIVATIONS_NOTE, *ExpertGemmBenchmark.notes)


BENCHMARK = MoeFc2Fp4()
