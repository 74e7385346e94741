"""What configurations have in common whose stages have whole lines of codes: no device code."""

from typing import ClassVar, Final, TypeVar

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.kernels.common.epilogue import Epilogue
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.kernels.common.fit import first_fit
from torch_cute_ops.kernels.common.fp8_stages import BLOCK
from torch_cute_ops.kernels.fp8_fp4_wgmma.weights_config import COLUMNS, FP4WeightConfig
from torch_cute_ops.runtime.arch import Arch

SPAN: Final = 2
"""K blocks of a stage: 128 bytes of codes of a row, which is what L2 reads at once."""
STAGES: Final = (8, 6, 4)
"""Multiples of the teams, so that a stage is the same team's in every round of the ring."""


class LinesConfig(FP4WeightConfig):
    """Everything static about a kernel whose stages have whole lines of codes."""

    fmt: ClassVar[FP4Format]
    span = SPAN
    line = SPAN * BLOCK // 2
    scales_ahead = 1
    helpers = SPAN
    teams = 2


AnyConfig = TypeVar("AnyConfig", bound=LinesConfig)


def plan(
    kind: type[AnyConfig],
    *,
    layout: ScaleLayout,
    rows: ExpertLayout,
    epilogue: Epilogue,
    tokens: int,
    splits: int = 1,
    arch: Arch,
    pdl: bool,
    static_weight: bool = False,
) -> AnyConfig | None:
    """The configuration with the most stages that fit into an SM of ``arch``; ``None`` if it cannot run this."""
    ahead = static_weight and kind.reads_ahead(rows, tokens, pdl)
    sizes = tokens, COLUMNS, splits
    return first_fit((kind(rows, epilogue, *sizes, stages, pdl, ahead, layout) for stages in STAGES), arch)
