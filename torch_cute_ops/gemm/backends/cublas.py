"""cuBLAS: of FP4 operands decoded to 16 bits in memory, for many rows, where arithmetic takes the time; or, where the
GPU's tensor cores take FP4, of NVFP4 codes as they are.

No GPU of the latter kind was at hand: those calls have met PyTorch's checks alone; their estimates are by data sheet.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional

from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4Backend
from torch_cute_ops.gemm.cost import (
    LAUNCH_SECONDS,
    bytes_per_second,
    fp4_tensor_core_seconds,
    memory_seconds,
    overlapped,
    tensor_core_seconds,
)
from torch_cute_ops.gemm.decode import decoder, decoding_kernel, reason_no_kernel, sixteen_bit_dtype, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_EFFICIENCY = 0.45
"""Bandwidth of the decoding kernel, as a share of a copy's (measured on an H200)."""
DECODED: Final[Tactic] = ()
BLOCK_SCALED: Final[Tactic] = ("block_scaled",)
BLOCK_SCALED_N: Final = 16
BLOCK_SCALED_K: Final = 32
"""Multiples that PyTorch asks for of the columns, and of the elements of a sum, of a block-scaled GEMM."""
BLOCK_SCALED_TILE: Final = 128
"""Rows and columns of a CTA's tile of a block-scaled GEMM, of pairs of CTAs twice as many: an assumption."""
RAMP_SECONDS: Final = 1.5e-6
"""Pipeline fill and the last tile's epilogue of a block-scaled GEMM: an assumption."""
L2_SHARES: Final = 2
"""Bandwidth of L2, as a multiple of memory's: an assumption."""
FIRST_CUDA: Final = (12, 8)
"""The first CUDA toolkit whose cuBLASLt multiplies FP4."""
HAS_TWO_LEVELS: Final = hasattr(torch.nn.functional, "scaled_mm")
"""Whether PyTorch takes a scale of the whole tensor beside those of blocks (2.10), and so ``alpha``."""

Tensor = torch.Tensor


class Cublas(FP4Backend):
    """A tactic is ``DECODED`` or ``BLOCK_SCALED``.

    Decoded operands are exact in the 16-bit dtype; sums are in fp32, and rounded once, after the epilogue.
    """

    name = "cublas"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return (DECODED, BLOCK_SCALED) if _multiplies_codes(problem, target) else (DECODED,)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        sums = 4 * m * problem.n
        if tactic == BLOCK_SCALED:
            seconds = _block_scaled_seconds(problem, m, target)
            if not _is_one_call(problem):  # the fp32 result is written, and read again
                return seconds + memory_seconds(2 * sums, 1, target)
            # PyTorch multiplies the scales of both tensors before.
            return seconds + LAUNCH_SECONDS * (problem.epilogue.alpha is not None)
        # Decoded operands are written and read again, and so is the fp32 result.
        size = 2 * problem.k * (problem.n + (m if problem.a.is_fp4 else 0))
        decoding = memory_seconds(size + problem.bytes_moved(m), 1, target) / DECODING_EFFICIENCY
        multiplying = max(memory_seconds(size + sums, 1, target), tensor_core_seconds(problem.flops(m), target))
        return decoding + multiplying + memory_seconds(2 * sums, 1, target)

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        if tactic == BLOCK_SCALED:
            return ()
        layouts = dict.fromkeys(layout for layout in (weight_scales(problem), problem.a.scale_layout) if layout)
        return tuple(decoding_kernel(problem, layout, _dtype(problem)) for layout in layouts)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        if tactic == BLOCK_SCALED:
            return _block_scaled_launcher(problem)
        dtype, layout = _dtype(problem), problem.a.scale_layout
        decode_b = decoder(problem, weight_scales(problem), dtype, target)
        if layout is None:
            return lambda a, b, _, b_scale, alpha, bias, offsets, counts, prefetch, out: _finish(
                _sums(a.to(dtype), decode_b(b.t(), b_scale)), alpha, bias, out
            )
        decode_a = decoder(problem, layout, dtype, target)
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, out: _finish(
            _sums(decode_a(a, a_scale), decode_b(b.t(), b_scale)), alpha, bias, out
        )


def _dtype(problem: GemmProblem) -> torch.dtype:
    """What operands are decoded to: the dtype of ``a`` where that holds the weight, else bfloat16."""
    return torch.bfloat16 if problem.a.is_fp4 else sixteen_bit_dtype(problem)


def _sums(a: Tensor, weight: Tensor) -> Tensor:
    """``a @ weight.T`` in fp32: with a 16-bit result cuBLAS may round partial sums to it."""
    return torch.mm(a, weight.t(), out_dtype=torch.float32)


def _finish(sums: Tensor, alpha: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """The epilogue of fp32 sums, which are overwritten."""
    if alpha is not None:
        sums = sums.mul_(alpha)
    if bias is not None:
        sums = sums.add_(bias)
    if sums is not out:
        out.copy_(sums)


# Codes as they are


@functools.cache
def _cuda_multiplies_codes() -> bool:
    """Whether the CUDA toolkit that PyTorch was built with has block-scaled GEMMs of FP4; with none, as where kernels
    are compiled for another machine, one that has."""
    return torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) >= FIRST_CUDA


def _multiplies_codes(problem: GemmProblem, target: Target) -> bool:
    """Whether cuBLASLt takes the operands as they are. It takes NVFP4 with 128x4 scales; MXFP4 PyTorch leaves to
    another library."""
    layout = SCALE_LAYOUTS["128x4"]
    return (
        target.arch is not None
        and target.arch.fp4_flops_per_clock > 0
        and problem.a.format == problem.b.format == NVFP4
        and problem.a.scale_layout == problem.b.scale_layout == layout
        and problem.n % BLOCK_SCALED_N == 0
        and problem.k % BLOCK_SCALED_K == 0
        and _cuda_multiplies_codes()
    )


def _is_one_call(problem: GemmProblem) -> bool:
    """Whether cuBLASLt applies the whole epilogue: one ``alpha``, in fp32, before the rounding, and no bias, which it
    would only take in the dtype of the result."""
    epilogue = problem.epilogue
    return epilogue.bias_dtype is None and epilogue.alpha in ((None, "one") if HAS_TWO_LEVELS else (None,))


def _block_scaled_seconds(problem: GemmProblem, m: int, target: Target) -> float:
    """Time of cuBLASLt's kernel, by tiles and waves."""
    assert target.arch is not None
    line = problem.b.row_bytes(problem.k)
    every = []
    for ctas in (1, 2) if target.arch.has_tcgen05 else (1,):
        side = BLOCK_SCALED_TILE * ctas
        row_tiles, column_tiles = -(-m // side), -(-problem.n // side)
        waves = -(-row_tiles * column_tiles // (target.sms // ctas))
        # Of a CTA. Tiles that run side by side read the weight from memory once.
        weight = BLOCK_SCALED_TILE * line / min(row_tiles, L2_SHARES)
        activations = min(m, side) // ctas * line / L2_SHARES
        read = (weight + activations) / (bytes_per_second(target) / target.sms)
        computed = fp4_tensor_core_seconds(2 * side * side // ctas * problem.k, target, sms=1)
        every.append(waves * overlapped(computed, read, order=8))
    return LAUNCH_SECONDS + RAMP_SECONDS + min(every)


def _block_scaled_launcher(problem: GemmProblem) -> Launch:
    one_call, needs_alpha = _is_one_call(problem), problem.epilogue.alpha is not None
    multiply_codes = _multiplier(torch.float32 if not one_call else problem.out_dtype)
    in_place = problem.out_dtype == torch.float32

    def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *rest: Any) -> None:
        alpha, bias, _, _, _, out = rest
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
        if one_call:
            multiply_codes(a, b, a_scale, b_scale, alpha if needs_alpha else None, out)
        else:
            sums = out if in_place else torch.empty_like(out, dtype=torch.float32)
            multiply_codes(a, b, a_scale, b_scale, None, sums)
            _finish(sums, alpha, bias, out)

    return multiply


def _multiplier(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], Any]:
    """A function of codes, their scales, a factor of all sums, and the result in ``dtype``, which it writes."""
    if not HAS_TWO_LEVELS:
        return lambda a, b, a_scale, b_scale, factor, out: torch._scaled_mm(
            a, b, a_scale, b_scale, out_dtype=dtype, out=out
        )
    from torch.nn.functional import ScalingType, SwizzleType

    # What ``torch.nn.functional.scaled_mm`` calls, which takes no result to write.
    call = torch._scaled_mm_v2
    blocks, tiles = [ScalingType.BlockWise1x16.value], [SwizzleType.SWIZZLE_32_4_4.value]
    both = [*blocks, ScalingType.TensorWise.value], [*tiles, SwizzleType.NO_SWIZZLE.value]
    one: Tensor | None = None

    def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, factor: Tensor | None, out: Tensor) -> None:
        nonlocal one
        if factor is None:
            call(a, b, [a_scale], blocks, tiles, [b_scale], blocks, tiles, None, dtype, out=out)
            return
        unit = one
        if unit is None:
            unit = torch.ones_like(factor)
            if not (factor.is_cuda and torch.cuda.is_current_stream_capturing()):
                one = unit  # what is made in a capture exists in its replays alone
        call(a, b, [a_scale, factor], *both, [b_scale, unit], *both, None, dtype, out=out)

    return multiply
