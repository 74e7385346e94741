"""Warp-level tensor-core products with the weight decoded in registers: for few rows, where its bytes take the time."""

import itertools
from typing import TYPE_CHECKING

import torch

from torch_cute_ops.mm_backends._base import Backend, Launcher, Product, Tactic, Target
from torch_cute_ops.mm_backends._decode import (
    decoded,
    decoding_kernel,
    reason_experts,
    reason_misaligned,
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
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel

if TYPE_CHECKING:
    from torch_cute_ops.kernels.fp4_mma import Config

SPLITS = (1, 2, 3, 4, 6, 8)
CTAS_PER_SM = (1, 2)
EFFICIENCY = 0.25
"""Of the tensor cores over what a good product reaches: every warp reads all activations of its CTA (measured on an
H200: 180 TFLOP/s with 64 tokens)."""
DECODE_CLOCKS = 0.035
"""Of an SM for each weight (measured on an H200)."""
WAVE_SECONDS = 1.5e-6
"""Of a CTA but for its chunks: the first copies, the last sums (measured on an H200)."""
DECODE_SECONDS = 5e-6
"""Of the op that decodes FP4 activations, with the launch of another kernel after it (measured on an H200)."""


class MmaSync(Backend):
    """A tactic is (rows of ``a`` of a CTA, CTAs that share a sum, CTAs of an SM)."""

    name = "mma_sync"

    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        reason = reason_undecodable(product, target) or reason_experts(product) or reason_misaligned(product)
        if reason is not None:
            return reason
        blocks = product.k // product.fmt.block_size
        if product.b_layout.is_linear and blocks % 4:
            return f"b has {blocks} scales a row; in the linear layout they have to be a multiple of 4"
        return None

    def tactics(self, product: Product, m: int, target: Target) -> tuple[Tactic, ...]:
        from torch_cute_ops.kernels import fp4_mma

        chunks = -(-product.k // fp4_mma.CHUNK)
        widest = smallest_tile(fp4_mma.TOKEN_TILES, m)
        every = itertools.product(fp4_mma.TOKEN_TILES, SPLITS, CTAS_PER_SM)
        tactics = [tactic for tactic in every if tactic[0] <= widest and tactic[1] <= chunks]
        return tuple(
            tactic for tactic in tactics if target.arch is None or _config(product, tactic, target.arch) is not None
        )

    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        from torch_cute_ops.kernels import fp4_mma

        tokens, splits, ctas_per_sm = _sizes(tactic)
        ctas = -(-product.n // fp4_mma.ROWS) * -(-m // tokens) * splits
        slots = places(target.sms * ctas_per_sm, splits)
        waves = -(-ctas // slots)
        # In a wave every CTA takes as long as in a full one: it reads at its share of the memory's rate.
        codes = fp4_mma.ROWS * product.k * (0.5 + 1 / product.fmt.block_size)
        activations = 0.5 * 2 * tokens * product.k  # from L2, at some twice the rate of memory
        read = (codes + activations) / splits
        flops = 2 * fp4_mma.ROWS * tokens * product.k // splits
        computed = overlapped(
            weight_seconds(fp4_mma.ROWS * product.k // splits * ctas_per_sm, DECODE_CLOCKS),
            tensor_core_seconds(flops * ctas_per_sm, target, sms=1) / EFFICIENCY,
            order=2,
        )
        busy = overlapped(computed, read / (bytes_per_second(target) / slots), order=4)
        return LAUNCH_SECONDS + waves * (busy + WAVE_SECONDS) + DECODE_SECONDS * (product.a_layout is not None)

    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        wanted = [_kernel(product, tactic, arch)]
        if product.a_layout is not None:
            wanted.append(decoding_kernel(product, product.a_layout, sixteen_bit_dtype(product)))
        return tuple(wanted)

    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        assert target.arch is not None
        function = compile_kernel(_kernel(product, tactic, target.arch), target.arch)
        layout = product.a_layout
        if layout is None:
            return lambda a, a_scale, b, b_scale, alpha, out: function(a, b, b_scale, alpha, out)

        def decode_and_multiply(
            a: torch.Tensor,
            a_scale: torch.Tensor | None,
            b: torch.Tensor,
            b_scale: torch.Tensor,
            alpha: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:
            assert a_scale is not None
            numbers = decoded(a, a_scale, product.fmt, layout, sixteen_bit_dtype(product))
            function(numbers, b, b_scale, alpha, out)

        return decode_and_multiply

    def refuses(self, product: Product) -> bool:
        return product.a_layout is None


def _sizes(tactic: Tactic) -> tuple[int, int, int]:
    tokens, splits, ctas_per_sm = tactic
    return int(tokens), int(splits), int(ctas_per_sm)


def _config(product: Product, tactic: Tactic, arch: Arch) -> "Config | None":
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    from torch_cute_ops.kernels import fp4_mma

    tokens, splits, ctas_per_sm = _sizes(tactic)
    return fp4_mma.plan(
        dtype=sixteen_bit_dtype(product),
        fmt=product.fmt,
        layout=product.b_layout,
        out_dtype=product.out_dtype,
        has_alpha=product.has_alpha,
        tokens=tokens,
        splits=splits,
        ctas_per_sm=ctas_per_sm,
        arch=arch,
        pdl=settings.PDL,
    )


def _kernel(product: Product, tactic: Tactic, arch: Arch) -> Wanted:
    from torch_cute_ops.kernels import fp4_mma

    return Wanted(fp4_mma.KERNEL, _config(product, tactic, arch))
