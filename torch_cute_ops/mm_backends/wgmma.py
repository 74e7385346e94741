"""Hopper's warpgroup products with the weight decoded in registers: for any number of rows."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_cute_ops.kernels.activation_tiles.config import CHUNK
from torch_cute_ops.mm_backends._base import Backend, Launcher, Product, Tactic, Target
from torch_cute_ops.mm_backends._decode import (
    reason_misaligned,
    reason_not_linear,
    reason_undecodable,
    sixteen_bit_dtype,
)
from torch_cute_ops.mm_backends._model import (
    LAUNCH_SECONDS,
    bytes_per_second,
    overlapped,
    places,
    smallest_tile,
    tensor_core_seconds,
    weight_seconds,
)
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_wgmma import Config

BALANCED = 0
"""In place of CTAs for each tile of rows of the weight: one for each SM, and all have as much to do."""
EXPERT_SPLITS = (1, 2, 3, 4)
"""CTAs for each tile of rows of the weight where there are experts."""
DECODE_CLOCKS = 0.0272
"""Of an SM for each weight (measured on an H200, with an eighth of the tensor cores' work or less)."""
MOST_LEFT = 2**28
"""Bytes of sums that CTAs of a call may leave for others."""
RAMP_SECONDS = 1.2e-6
"""Until the first chunk is multiplied, and from the last one on (measured on an H200)."""
ARRANGE_SECONDS = 2.7e-6
"""Of the kernel that puts activations in order (measured on an H200)."""
ARRANGE_FP4_SECONDS, ARRANGE_16_BIT_SECONDS = 5e-8, 9e-8
"""For a chunk of a token that a CTA puts in order itself, in FP4 or of 16 bits (measured on an H200)."""
EXPERT_CLOCKS = 0.03
"""Of an SM to add an expert's sum of a token and row to the total (measured on an H200)."""
CLUSTER_BYTES_PER_SECOND = 1.5e11
"""At which a CTA of a cluster leaves and adds up sums (measured on an H200)."""
COLLECT_BYTES_PER_SECOND = 4e10
"""At which a CTA adds up what others have left in memory (measured on an H200)."""


class Wgmma(Backend):
    """A tactic is (rows of ``a`` of a tile, CTAs for each tile of rows of ``b``). These CTAs are a cluster, but in
    products with experts; with few rows they put the activations in order themselves."""

    name = "wgmma"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        reason = reason_undecodable(product, target) or reason_misaligned(product)
        if reason is not None:
            return reason
        width = _width(product)
        if width is not None and width % CHUNK:
            return f"an expert's width is {width}; it has to be a multiple of {CHUNK}"
        if target.arch is not None and target.arch.name != "sm_90a":
            return f"wgmma is of sm_90a; this is {target.arch.name}"
        return reason_not_linear(product, product.k, "k")

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        from torch_cute_ops.kernels import fp4_wgmma

        sizes = tuple(fp4_wgmma.TILES) if product.experts is None else fp4_wgmma.EXPERT_TILES
        widest = smallest_tile(sizes, m)
        tiles = [tokens for tokens in sizes if tokens <= widest]
        every = [(tokens, split) for tokens in tiles for split in _splits(product, tokens)]
        return tuple(tactic for tactic in every if _is_useful(product, m, tactic, target))

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        tokens, split = _tactic(tactic)
        parts = _parts(product, tactic, target)
        tiles = -(-m // tokens)
        waves = -(-parts.workers * tiles // places(target.sms, split if parts.clusters else 1))
        chunks = -(-parts.row_tiles * parts.chunks // parts.workers)
        weights = parts.rows * CHUNK
        # Of a chunk: decode and products alternate in a warpgroup, and the other fills half of the gaps.
        computed = overlapped(
            weight_seconds(weights, DECODE_CLOCKS),
            tensor_core_seconds(2 * weights * tokens, target, sms=1),
            order=2,
        )
        if parts.arranges:
            arranged = ARRANGE_16_BIT_SECONDS if product.a_layout is None else ARRANGE_FP4_SECONDS
            computed = overlapped(computed, arranged * tokens, order=8)
        width = _width(product)
        if width is not None:
            computed += weight_seconds(parts.rows * tokens, EXPERT_CLOCKS) * CHUNK / width
        read = weights * (0.5 + 1 / product.fmt.block_size) / (bytes_per_second(target) / target.sms)
        # Each wave starts anew.
        wave = RAMP_SECONDS + chunks * overlapped(computed, read, order=8) + LAUNCH_SECONDS / 2
        seconds = LAUNCH_SECONDS + waves * wave
        if not parts.arranges:
            seconds += ARRANGE_SECONDS
        if parts.clusters:
            seconds += waves * 2 * parts.sum_bytes / CLUSTER_BYTES_PER_SECOND if split > 1 else 0.0
        elif parts.shares:
            # Sums where portions meet are written, waited for, and read again, one worker's after the other's.
            others = max(1.0, parts.workers / max(1, parts.row_tiles) - 1)
            seconds += LAUNCH_SECONDS + waves * others * parts.sum_bytes / COLLECT_BYTES_PER_SECOND
        return seconds

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        from torch_cute_ops.kernels import fp4_wgmma

        return (Wanted(fp4_wgmma.KERNEL, _config(product, tactic, arch)),)

    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        assert target.arch is not None
        (kernel,) = self.kernels(product, tactic, target.arch)
        config: Config = kernel.config
        function = compile_kernel(kernel, target.arch)
        if config.arranges:
            return lambda a, a_scale, b, b_scale, alpha, out: function(a, a_scale, b, b_scale, alpha, out, None, 0, 0)
        parts = _parts(product, tactic, target)
        tokens, workers, shares = config.tokens, parts.workers, int(parts.shares)
        tile_bytes = config.workspace_bytes(product.k, workers, shares=parts.shares)

        def multiply(
            a: torch.Tensor,
            a_scale: torch.Tensor | None,
            b: torch.Tensor,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            workspace = allocator(a.device)((-(-a.shape[0] // tokens) * tile_bytes,), (1,), torch.uint8)
            function(a, a_scale, b, b_scale, alpha, out, workspace, workers, shares)

        return multiply

    def refuses(self, product: Product) -> bool:
        return True


class _Parts(NamedTuple):
    """How the work on a tile of rows of ``a`` is shared out.

    Attributes:
        rows: of ``b`` in a tile.
        row_tiles, chunks: tiles of rows of ``b``, and chunks of k.
        workers: CTAs.
        clusters: whether those of a tile of rows are a cluster.
        arranges: whether they put the activations in order themselves.
        sum_bytes: of a CTA's sums of a tile.
        shares: whether CTAs leave sums in memory for others.
    """

    rows: int
    row_tiles: int
    chunks: int
    workers: int
    clusters: bool
    arranges: bool
    sum_bytes: int
    shares: bool


def _parts(product: Product, tactic: Tactic, target: Target) -> _Parts:
    from torch_cute_ops.kernels import fp4_wgmma

    tokens, split = _tactic(tactic)
    rows, chunks = fp4_wgmma.rows_of(tokens), -(-product.k // CHUNK)
    arranges, clusters = _arranges(product, tactic), _clusters(product, tactic)
    row_tiles = -(-product.n // rows)
    # Each has a chunk at least: the kernel waits for every worker's sums.
    workers = max(1, min(target.sms, row_tiles * chunks) if split == BALANCED else row_tiles * split)
    shares = not clusters and workers != row_tiles
    return _Parts(rows, row_tiles, chunks, workers, clusters, arranges, 4 * rows * tokens, shares)


def _tactic(tactic: Tactic) -> tuple[int, int]:
    tokens, split = tactic
    return int(tokens), int(split)


def _width(product: Product) -> int | None:
    """Elements of k of an expert; ``None``: there are no experts."""
    return None if product.experts is None else product.k // product.experts


def _arranges(product: Product, tactic: Tactic) -> bool:
    """Whether the CTAs that multiply put the activations in order themselves."""
    from torch_cute_ops.kernels import fp4_wgmma

    return product.experts is None and fp4_wgmma.arranges(*_tactic(tactic))


def _clusters(product: Product, tactic: Tactic) -> bool:
    """Whether the CTAs of a tile of rows are a cluster, which may be of one CTA that puts the activations in order."""
    return _arranges(product, tactic) or (product.experts is None and _tactic(tactic)[1] > 1)


def _splits(product: Product, tokens: int) -> tuple[int, ...]:
    from torch_cute_ops.kernels import fp4_wgmma

    if product.experts is not None:
        return (BALANCED, *EXPERT_SPLITS)
    return (BALANCED, *fp4_wgmma.SPLITS) if tokens <= fp4_wgmma.CLUSTER_TOKENS else (BALANCED, 1)


def _is_useful(product: Product, m: int, tactic: Tactic, target: Target) -> bool:
    """Whether every worker has something to do, and the sums that it leaves are no burden on memory."""
    tokens, split = _tactic(tactic)
    parts = _parts(product, tactic, target)
    left_bytes = -(-m // tokens) * parts.workers * parts.sum_bytes if parts.shares else 0
    return split <= parts.chunks and left_bytes <= MOST_LEFT


def _config(product: Product, tactic: Tactic, arch: Arch) -> "Config | None":
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    from torch_cute_ops.kernels import fp4_wgmma

    tokens, split = _tactic(tactic)
    return fp4_wgmma.plan(
        dtype=sixteen_bit_dtype(product),
        fmt=product.fmt,
        layout=product.b_layout,
        a_layout=product.a_layout,
        out_dtype=product.out_dtype,
        has_alpha=product.has_alpha,
        width=_width(product),
        tokens=tokens,
        splits=split if _clusters(product, tactic) else 0,
        arch=arch,
        pdl=settings.PDL,
    )
