"""Hopper's warpgroup products with the weight decoded in registers: for any number of rows."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.mm_backends._base import Backend, Operands, Product, Tactic, Target
from torch_cute_ops.mm_backends._decode import reason_misaligned, reason_undecodable, sixteen_bit_dtype
from torch_cute_ops.mm_backends._model import LAUNCH_SECONDS, bytes_per_second, tensor_core_seconds
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_wgmma import Config

BALANCED = 0
SPLITS = (BALANCED, 1, 2, 3, 4, 6, 8)
"""CTAs for each tile of rows of the weight; ``BALANCED``: one for each SM, and all have as much to do."""
CLUSTERS = (1, 2)


class Wgmma(Backend):
    """A tactic is (rows of ``a`` of a tile, CTAs for each tile of rows of ``b``, CTAs that share activations)."""

    name = "wgmma"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        reason = reason_undecodable(product, target) or reason_misaligned(product)
        if reason is not None:
            return reason
        if target.arch is not None and target.arch.name != "sm_90a":
            return f"wgmma is of sm_90a; this is {target.arch.name}"
        if product.b_layout.is_linear and (product.fmt != NVFP4 or product.k % 256):
            return "in the linear layout scales have to be NVFP4's, and k a multiple of 256"
        return None

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        from torch_cute_ops.kernels import fp4_wgmma

        widest = next((tokens for tokens in fp4_wgmma.TILES if tokens >= m), max(fp4_wgmma.TILES))
        every = itertools.product((tokens for tokens in fp4_wgmma.TILES if tokens <= widest), SPLITS, CLUSTERS)
        return tuple(tactic for tactic in every if _is_possible(product, *tactic))

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        tokens, split, cluster = _tactic(tactic)
        sizes = _sizes(product, tokens, cluster)
        workers = _workers(sizes, split, target)
        tiles = -(-m // tokens)
        waves = -(-workers * tiles // target.sms)
        chunks = -(-sizes.row_tiles * sizes.chunks // workers)
        row = 128 + 256 // product.fmt.block_size
        busy = max(
            sizes.rows * row / (bytes_per_second(target) / target.sms),
            tensor_core_seconds(2 * sizes.rows * tokens * 256, target, sms=1),
        )
        seconds = 2 * LAUNCH_SECONDS + waves * (chunks * busy + 1e-6)
        if split != 1:
            # Sums where portions meet are written and read again.
            seconds += 1e-6 + 8 * workers * tiles * sizes.rows * tokens / bytes_per_second(target)
        return seconds

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        from torch_cute_ops.kernels import activation_tiles, fp4_wgmma

        arranged = activation_tiles.Config(sixteen_bit_dtype(product), product.fmt, product.a_layout, settings.PDL)
        return (
            Wanted(activation_tiles.KERNEL, arranged),
            Wanted(fp4_wgmma.KERNEL, _config(product, tactic, arch)),
        )

    def run(self, product: Product, tactic: Tactic, target: Target, operands: Operands) -> None:
        a, a_scale, b, b_scale, alpha, out = operands
        key = (product, tactic, target.device)
        launch = _launches.get(key)
        if launch is None:
            assert target.arch is not None
            arrange, multiply = (
                compile_kernel(kernel, target.arch) for kernel in self.kernels(product, tactic, target.arch)
            )
            tokens, split, cluster = _tactic(tactic)
            sizes = _sizes(product, tokens, cluster)
            launch = _launches[key] = _Launch(arrange, multiply, sizes, _workers(sizes, split, target), split)
        sizes, device = launch.sizes, a.device
        tiles = -(-a.shape[0] // sizes.tokens)
        arranged = torch.empty(tiles * sizes.tokens * sizes.chunks * 512, dtype=torch.uint8, device=device)
        slots = tiles * launch.workers if launch.split != 1 else 0
        partials = torch.empty(max(slots * sizes.rows * sizes.tokens, 4), dtype=torch.float32, device=device)
        flags = torch.empty(max(slots * sizes.rows // 64, 1), dtype=torch.uint32, device=device)
        launch.arrange(a, a_scale, arranged, flags)
        launch.multiply(arranged, b, b_scale, alpha, out, partials, flags, launch.workers, launch.split)


class _Sizes(NamedTuple):
    """Of a tile, and how many there are of the weight: whole clusters of tiles of rows, and chunks of k."""

    tokens: int
    rows: int
    row_tiles: int
    chunks: int


class _Launch(NamedTuple):
    """The two kernels of a product, and what does not change from call to call."""

    arrange: Callable[..., None]
    multiply: Callable[..., None]
    sizes: _Sizes
    workers: int
    split: int


_launches: dict[tuple[Product, Tactic, torch.device], _Launch] = {}


def _tactic(tactic: Tactic) -> tuple[int, int, int]:
    tokens, split, cluster = tactic
    return int(tokens), int(split), int(cluster)


def _is_possible(product: Product, tokens: int, split: int, cluster: int) -> bool:
    """Whether every worker has something to do, and the CTAs of a cluster the same."""
    sizes = _sizes(product, tokens, cluster)
    if cluster > 1 and (split == BALANCED or tokens // cluster % 8 or product.n <= sizes.rows):
        return False
    return split <= sizes.chunks


def _sizes(product: Product, tokens: int, cluster: int) -> _Sizes:
    from torch_cute_ops.kernels import fp4_wgmma

    rows = 64 * fp4_wgmma.TILES[tokens]
    return _Sizes(tokens, rows, -(-product.n // (rows * cluster)) * cluster, -(-product.k // 256))


def _workers(sizes: _Sizes, split: int, target: Target) -> int:
    """CTAs that share the weight."""
    return min(target.sms, sizes.row_tiles * sizes.chunks) if split == BALANCED else sizes.row_tiles * split


def _config(product: Product, tactic: Tactic, arch: Arch) -> "Config | None":
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    from torch_cute_ops.kernels import fp4_wgmma

    tokens, _, cluster = _tactic(tactic)
    return fp4_wgmma.plan(
        dtype=sixteen_bit_dtype(product),
        fmt=product.fmt,
        layout=product.b_layout,
        a_is_fp4=product.a_layout is not None,
        out_dtype=product.out_dtype,
        has_alpha=product.has_alpha,
        tokens=tokens,
        cluster=cluster,
        arch=arch,
        pdl=settings.PDL,
    )
