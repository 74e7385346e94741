"""What configurations have in common whose stages have whole lines of codes: no device code."""

from typing import ClassVar, Final

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.kernels.common.fp8.layouts import BLOCK
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import FP4WeightConfig

SPAN: Final = 2
"""K blocks of a stage: 128 bytes of codes of a row, which is what L2 reads at once."""


class LinesConfig(FP4WeightConfig):
    """Everything static about a kernel whose stages have whole lines of codes."""

    fmt: ClassVar[FP4Format]
    stage_counts = (8, 6, 4)
    """Multiples of the teams, so that a stage is the same team's in every round of the ring."""
    span = SPAN
    line = SPAN * BLOCK // 2
    scales_ahead = 1
    helpers = SPAN
    teams = 2
