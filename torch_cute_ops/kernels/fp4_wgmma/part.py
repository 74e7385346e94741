"""What the roles of a CTA share: its part of the GEMM, which it goes through in *segments*, chunks of one tile of rows;
and its shared memory."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from torch_cute_ops.kernels.common.core.pipeline import Pipeline
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES
from torch_cute_ops.kernels.fp4_wgmma.config import Config


class Workspace(NamedTuple):
    """The parts of the workspace, with sizes as in ``Config.workspace_bytes``.

    Attributes:
        tiles: rearranged activations.
        factors: over experts (tokens of a tile, experts, tiles of tokens); else ``None``.
        partials: partial sums of workers.
        flags: whether they are complete, for each worker and warpgroup.
    """

    tiles: cute.Tensor
    factors: cute.Tensor | None
    partials: cute.Tensor
    flags: cute.Tensor


class Part(NamedTuple):
    """A CTA's part of the GEMM, and the operands.

    Attributes:
        n, m: sizes of the result.
        chunks, blocks: of a row of the weight.
        token_tile, token_tiles: the CTA's tile of tokens, and how many there are.
        worker, workers: the CTA among those of its tile of tokens; their number.
        begin, end: its units. Unit ``u`` is chunk ``u % chunks`` of tile of rows ``u // chunks``.
        units: how many there are.
        a, a_scale: the activations; their scales, if they are in FP4.
        alpha, bias: operands of the epilogue, if it has them.
        out: the result.
        workspace: ``None`` where the CTAs rearrange the activations.
        prefetch: what is brought into L2, or ``None``.
    """

    n: Int32
    m: Int32
    chunks: Int32
    blocks: Int32
    token_tile: Int32
    token_tiles: Int32
    worker: Int32
    workers: Int32
    begin: Int32
    end: Int32
    units: Int64
    a: cute.Tensor
    a_scale: cute.Tensor | None
    alpha: cute.Tensor | None
    bias: cute.Tensor | None
    out: cute.Tensor
    workspace: Workspace | None
    prefetch: cute.Tensor | None


@dataclass(frozen=True)
class Smem:
    """Shared memory: the stages of codes, scales, activations (``tokens``) and factors; sums that the CTAs of the
    cluster have sent; the barriers of both rings, of which a stage's are full, or free, and the one of the sums."""

    codes: cute.Pointer
    tokens: cute.Pointer
    scales: cute.Pointer
    factors: cute.Pointer
    received: cute.Pointer
    weight_pipeline: Pipeline
    a_pipeline: Pipeline
    sums_full: cute.Pointer


def segment_before(unit, part: Part) -> tuple:
    """The segment of this worker that ends before ``unit``: its tile of rows, first chunk, and number of chunks."""
    tile = (unit - 1) // part.chunks
    first = cutlass.max(part.begin, tile * part.chunks)
    return tile, first - tile * part.chunks, unit - first


def existing(config: Config, part: Part) -> tuple[Int32, Int32]:
    """Tokens and rows of the tile of a cluster that exist."""
    first_row = part.begin // part.chunks * config.rows
    tokens = cutlass.min(part.m - part.token_tile * config.tokens, Int32(config.tokens))
    return tokens, cutlass.min(part.n - first_row, Int32(config.rows))


def tokens_at(config: Config, stage, smem: Smem) -> cute.Pointer:
    """Where a stage of activations begins."""
    size = config.token_bytes
    return smem.tokens + cute.assume(stage * size, divby=math.gcd(size, ATOM_BYTES))
