"""moe_fc2_fp4: products of NVFP4 activations and NVFP4 weights, added up over the experts of a token."""

from __future__ import annotations

from typing import ClassVar

from ..experts import ExpertBenchmark
from ..products import FP4Activations


class MoeFc2Fp4(ExpertBenchmark, FP4Activations):
    op = "moe_fc2_fp4"
    settings: ClassVar = {"activations": "NVFP4", **ExpertBenchmark.settings}
    notes = (
        "The peers have no FP4 activations on this GPU: theirs are the same numbers in bfloat16.",
        *ExpertBenchmark.notes,
    )


BENCHMARK = MoeFc2Fp4()
