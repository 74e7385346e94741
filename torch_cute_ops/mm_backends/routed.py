"""Products over experts that skip what routing left out."""

import functools
import math
from typing import TYPE_CHECKING

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
    bytes_per_second,
    overlapped,
    smallest_tile,
    weight_seconds,
)
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_experts import Config

DECODE_CLOCKS = 0.0275
"""Of an SM for each weight (measured on an H200)."""
TOKEN_CLOCKS = 0.0006
"""And for each token of a unit beyond eight (measured on an H200)."""
HALVED = 1.2
"""How much longer an SM takes where a chunk is half as wide (measured on an H200)."""
PARTED = 1.3
"""How much longer an SM takes where its warps share the k of a unit (measured on an H200)."""
FIXED_SECONDS = 6e-6
"""Of the two kernels of a call, with next to nothing to do (measured on an H200)."""
SHARED_SECONDS = 3e-6
"""To leave sums for another CTA and to add up what others left, but for ``SHARED_PASSES`` over these (measured on an
H200)."""
SHARED_PASSES = 4


class Routed(Backend):
    """A tactic is (tokens of a unit, tokens of a tile, classes of experts that work is shared out by)."""

    name = "routed"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        if product.experts is None:
            return "computes products with experts alone"
        reason = reason_undecodable(product, target) or reason_misaligned(product)
        if reason is not None:
            return reason
        if target.arch is not None and target.arch.name != "sm_90a":
            return f"routed is of sm_90a; this is {target.arch.name}"
        from torch_cute_ops.kernels import fp4_experts

        if product.experts > fp4_experts.MAX_EXPERTS:
            return f"there are {product.experts} experts; routed takes at most {fp4_experts.MAX_EXPERTS}"
        width = product.k // product.experts
        reason = reason_not_linear(product, width, "an expert's width")
        if reason is not None:
            return reason
        # Scales lie in tiles of four blocks.
        if width % (4 * product.fmt.block_size):
            return f"an expert's width is {width}; it has to be a multiple of {4 * product.fmt.block_size}"
        return None

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        from torch_cute_ops.kernels import fp4_experts

        widest = smallest_tile(fp4_experts.TILES, m)
        # Sums of 512 tokens leave room for less else: two tiles of 256 may be better.
        tiles = [tokens for tokens in (256, widest) if tokens <= widest] if widest > 256 else [widest]
        every = [
            (group, tokens, classes)
            for tokens in tiles
            for group in fp4_experts.GROUPS
            for classes in _classes(product, target)
            if group <= max(m, 8)
        ]
        return tuple(
            tactic for tactic in every if target.arch is None or _config(product, tactic, target.arch) is not None
        )

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        from torch_cute_ops.kernels import fp4_experts

        assert product.experts is not None and target.arch is not None
        group, tokens, classes = _tactic(tactic)
        config = _config(product, tactic, target.arch)
        assert config is not None
        width, rows = product.k // product.experts, fp4_experts.ROWS
        share = product.routed / product.experts
        tiles = -(-m // tokens)
        tile_tokens = min(m, tokens)
        touched = product.experts * (1 - (1 - share) ** tile_tokens)
        units = product.experts * _mean_units(tile_tokens, share, group)
        # Of the classes of a slice, the most that a worker has
        slices, workers = -(-product.n // rows), config.workers(product.n, target.sms)
        most = -(-slices * classes // workers) / classes
        waves = -(-workers * tiles // target.sms)
        weights = rows * width
        computed = weight_seconds(int(weights * units), DECODE_CLOCKS + TOKEN_CLOCKS * (group - 8))
        computed *= (HALVED if config.chunk < CHUNK else 1.0) * (PARTED if config.parts > 1 else 1.0)
        read = tiles * slices * touched * weights * (0.5 + 1 / product.fmt.block_size) / bytes_per_second(target)
        seconds = FIXED_SECONDS + overlapped(waves * most * computed, read, order=8)
        if classes > 1:
            seconds += SHARED_SECONDS + SHARED_PASSES * tiles * workers * rows * tokens * 4 / bytes_per_second(target)
        return seconds

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        from torch_cute_ops.kernels import fp4_experts

        return (Wanted(fp4_experts.KERNEL, _config(product, tactic, arch)),)

    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        assert target.arch is not None and product.experts is not None
        (kernel,) = self.kernels(product, tactic, target.arch)
        config: Config = kernel.config
        function = compile_kernel(kernel, target.arch)
        experts, workers = product.experts, config.workers(product.n, target.sms)

        def multiply(
            a: torch.Tensor,
            a_scale: torch.Tensor | None,
            b: torch.Tensor,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            size = config.workspace_bytes(a.shape[0], experts, workers)
            workspace = allocator(a.device)((size,), (1,), torch.uint8)
            function(a, a_scale, b, b_scale, alpha, out, workspace, workers)

        return multiply

    def refuses(self, product: Product) -> bool:
        return True


@functools.cache
def _mean_units(tokens: int, share: float, group: int) -> float:
    """Units of ``group`` tokens that an expert has on average, if each of ``tokens`` is routed to it with a chance of
    ``share``: the mean of ceil(X / group), where X has the binomial distribution."""
    if share >= 1:
        return float(-(-tokens // group))
    odds = math.log(share) - math.log1p(-share)
    ways = [math.lgamma(tokens + 1) - math.lgamma(k + 1) - math.lgamma(tokens - k + 1) for k in range(tokens + 1)]
    chances = [math.exp(way + k * odds + tokens * math.log1p(-share)) for k, way in enumerate(ways)]
    return sum(chance * -(-k // group) for k, chance in enumerate(chances))


def _tactic(tactic: Tactic) -> tuple[int, int, int]:
    group, tokens, classes = tactic
    return int(group), int(tokens), int(classes)


def _classes(product: Product, target: Target) -> tuple[int, ...]:
    """Into how many classes experts may be parted: into more than one where that gives more SMs something to do."""
    from torch_cute_ops.kernels import fp4_experts

    parted = (product.experts or 1) >= fp4_experts.CLASSES and -(-product.n // fp4_experts.ROWS) < target.sms
    return (1, fp4_experts.CLASSES) if parted else (1,)


def _config(product: Product, tactic: Tactic, arch: Arch) -> "Config | None":
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    from torch_cute_ops.kernels import fp4_experts

    assert product.experts is not None
    group, tokens, classes = _tactic(tactic)
    return fp4_experts.plan(
        dtype=sixteen_bit_dtype(product),
        fmt=product.fmt,
        layout=product.b_layout,
        a_layout=product.a_layout,
        out_dtype=product.out_dtype,
        width=product.k // product.experts,
        group=group,
        tokens=tokens,
        classes=classes,
        arch=arch,
        pdl=settings.PDL,
    )
