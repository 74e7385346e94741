"""How a permuting kernel is built: no device code."""

from dataclasses import dataclass, replace

import torch

from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, ROW
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime.arch import Arch

FEW = 512
"""Tokens up to which one launch is faster."""
THREADS = 128
"""Of a CTA that stores the scales of more."""


@dataclass(frozen=True)
class Config:
    """Everything static about the kernels.

    Attributes:
        quantize: codes, and scales for each place.
        few: tokens up to which that is all; of more, scales are stored for each token first.
    """

    quantize: row_quant.Config
    few: int = FEW

    @property
    def quantize_tokens(self) -> row_quant.Config:
        """Codes, and scales for each token."""
        return replace(self.quantize, problem=replace(self.quantize.problem, layout=ROW))

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return self.quantize.problem.width // FP8_BLOCK128.block_size

    def workspace_shape(self, tokens: int) -> tuple[int, int] | None:
        """Of the tokens' scales, if a call needs them."""
        return (tokens, self.scales) if tokens > self.few else None


def plan(dtype: torch.dtype, width: int, topk: int, arch: Arch, pdl: bool = True) -> Config:
    """The configuration for tokens of ``width`` elements, each in at most ``topk`` places.

    Raises:
        ValueError: if there is none, saying why.
    """
    problem = row_quant.Problem(
        source="rows",
        dtype=dtype,
        weight_dtype=None,
        width=width,
        norm_width=width,
        fmt=FP8_BLOCK128,
        layout=COLUMN,
        rows="copies",
        copies=topk,
    )
    return Config(row_quant.plan(problem, arch, pdl))
