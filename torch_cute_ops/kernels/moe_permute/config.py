"""How a permuting kernel is built: no device code."""

from dataclasses import dataclass, replace

import torch

from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, ROW
from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime.arch import Arch

FEW = 512
"""Tokens up to which one launch is faster."""
MANY = 4096
"""Tokens from which CTAs that end with their slice of a token are faster than CTAs that stay: 323 and 335 µs at 16,384
tokens of 7,168 elements (bfloat16, top-8, H200), 83.5 and 84.1 at 4,096; at 1,024 24.5 and 22.8."""
SLICE = 1024
"""Elements that such a CTA, of one warp, takes at most."""
THREADS = 128
"""Of a CTA that stores the scales of more."""


@dataclass(frozen=True)
class Config:
    """Everything static about the kernels.

    Attributes:
        quantize: codes, and scales for each place.
        slices: codes of many tokens, and scales for each token.
        few: tokens up to which ``quantize`` is all; of more, scales are stored for each token first.
        many: tokens from which that is by ``slices``.
    """

    quantize: row_quant.Config
    slices: row_quant.Config
    few: int = FEW
    many: int = MANY

    @property
    def quantize_tokens(self) -> row_quant.Config:
        """Codes, and scales for each token, by CTAs that stay."""
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
    slices = row_quant.plan(replace(problem, layout=ROW), arch, pdl, copied_width=SLICE)
    return Config(row_quant.plan(problem, arch, pdl), replace(slices, groups=1, stages=1))
