"""mm_fp4: the product of NVFP4 activations and an NVFP4 weight."""

from __future__ import annotations

from typing import ClassVar

from ..products import FP4Activations


class MmFp4(FP4Activations):
    op = "mm_fp4"
    settings: ClassVar = {"activations": "NVFP4", **FP4Activations.settings}
    peer_note = "bfloat16 activations"
    notes = ("The peers have no FP4 activations on this GPU: theirs are the same numbers in bfloat16.",)


BENCHMARK = MmFp4()
