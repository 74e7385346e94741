"""GEMMs of FP4 operands with cuBLAS, which multiplies either decoded operands or FP4 codes.

The first tactic decodes the operands to 16 bits in memory, and then multiplies them. With many rows, decoding takes
little of the total time. The second tactic lets cuBLASLt multiply NVFP4 codes, which needs FP4 tensor cores. No GPU
with FP4 tensor cores was available, so the second tactic was tested only up to PyTorch's argument checks, and its
estimates come from data sheets.
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
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

DECODING_EFFICIENCY = 0.45
"""Bandwidth of the decoding kernel, divided by the bandwidth of a copy (measured on an H200)."""
DECODED: Final[Tactic] = ()
BLOCK_SCALED: Final[Tactic] = ("block_scaled",)
BLOCK_SCALED_N: Final = 16
BLOCK_SCALED_K: Final = 32
"""Divisors that N and K must have in PyTorch's block-scaled GEMM."""
BLOCK_SCALED_TILE: Final = 128
"""Number of rows and of columns of a CTA's tile in a block-scaled GEMM. Pairs of CTAs double both (an assumption)."""
RAMP_SECONDS: Final = 1.5e-6
"""Time in seconds to fill the pipeline and to run the last epilogue of a block-scaled GEMM (an assumption)."""
L2_RATE: Final = 2
"""Bandwidth of L2, divided by the bandwidth of memory (an assumption)."""
FIRST_CUDA: Final = (12, 8)
"""First CUDA toolkit whose cuBLASLt multiplies FP4."""
HAS_TWO_LEVELS: Final = hasattr(torch.nn.functional, "scaled_mm")
"""True if PyTorch (2.10 or later) accepts a scale of the whole tensor together with block scales. PyTorch can then
apply ``alpha``."""

Tensor = torch.Tensor


class Cublas(FP4Backend):
    """Backend that calls cuBLAS. A tactic is ``DECODED`` or ``BLOCK_SCALED``.

    16-bit numbers represent the decoded operands exactly. Sums are computed in fp32, and are rounded once, after the
    epilogue.
    """

    name = "cublas"

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_kernel(target)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        return (DECODED, BLOCK_SCALED) if _multiplies_codes(problem, target) else (DECODED,)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        acc_bytes = 4 * m * problem.n
        if tactic == BLOCK_SCALED:
            seconds = _block_scaled_seconds(problem, m, target)
            if not _is_one_call(problem):  # other kernels read and write the fp32 result
                return seconds + memory_seconds(2 * acc_bytes, 1, target)
            # With ``alpha``, PyTorch first multiplies the two per-tensor factors in a separate launch.
            return seconds + LAUNCH_SECONDS * (problem.epilogue.alpha is not None)
        # The decoded operands and the fp32 result are written to memory and read again.
        size = 2 * problem.k * (problem.n + (m if problem.a.is_fp4 else 0))
        decoding = memory_seconds(size + problem.bytes_moved(m), 1, target) / DECODING_EFFICIENCY
        multiplying = max(memory_seconds(size + acc_bytes, 1, target), tensor_core_seconds(problem.flops(m), target))
        return decoding + multiplying + memory_seconds(2 * acc_bytes, 1, target)

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
        decode_a = None if layout is None else decoder(problem, layout, dtype, target)

        def launch(given: Operands, out: Tensor) -> None:
            weight = decode_b(given.b.t(), given.b_scale)
            if decode_a is None:
                a = given.a.to(dtype)
            else:
                assert given.a_scale is not None
                a = decode_a(given.a, given.a_scale)
            finish(accumulate(a, weight), given, out)

        return launch


def _dtype(problem: GemmProblem) -> torch.dtype:
    """Return the dtype to which operands are decoded: the dtype of 16-bit activations if it represents the weight
    exactly, else bfloat16."""
    return torch.bfloat16 if problem.a.is_fp4 else sixteen_bit_dtype(problem)


def accumulate(a: Tensor, weight: Tensor) -> Tensor:
    """Return ``a @ weight.T`` in fp32, because for a 16-bit result cuBLAS might round partial sums to 16 bits."""
    return torch.mm(a, weight.t(), out_dtype=torch.float32)


def finish(acc: Tensor, given: Operands, out: Tensor) -> None:
    """Apply the epilogue to fp32 sums and store the result in ``out``. ``acc`` is overwritten."""
    if given.row_scale is not None:
        acc = acc.mul_(given.row_scale[:, None])
    if given.alpha is not None:
        acc = acc.mul_(given.alpha)
    if given.bias is not None:
        acc = acc.add_(given.bias)
    if acc is not out:
        out.copy_(acc)


# GEMMs that multiply FP4 codes without decoding them first


@functools.cache
def _cuda_multiplies_codes() -> bool:
    """Return True if the CUDA toolkit of PyTorch contains block-scaled FP4 GEMMs.

    A PyTorch without CUDA can only plan for other machines. The CUDA toolkits of these machines are assumed to contain
    block-scaled FP4 GEMMs.
    """
    return torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) >= FIRST_CUDA


def _multiplies_codes(problem: GemmProblem, target: Target) -> bool:
    """Return True if cuBLASLt can multiply the codes of both operands: NVFP4 codes with 128x4 scales, on FP4 tensor
    cores."""
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
    """Return True if cuBLASLt applies the whole epilogue: no bias, no row scales, and at most one ``alpha``, applied in
    fp32 before the rounding.

    cuBLASLt takes a bias only in the dtype of the result, which is not precise enough.
    """
    epilogue = problem.epilogue
    if epilogue.has_row_scale:
        return False
    return epilogue.bias_dtype is None and epilogue.alpha in ((None, "one") if HAS_TWO_LEVELS else (None,))


def _block_scaled_seconds(problem: GemmProblem, m: int, target: Target) -> float:
    """Estimate the time of cuBLASLt's kernel from its tiles and waves."""
    assert target.arch is not None
    row_bytes = problem.b.row_bytes(problem.k)
    every = []
    for ctas in (1, 2) if target.arch.has_tcgen05 else (1,):
        side = BLOCK_SCALED_TILE * ctas
        row_tiles, column_tiles = -(-m // side), -(-problem.n // side)
        waves = -(-row_tiles * column_tiles // (target.sms // ctas))
        # Bytes that one CTA reads, as bytes from memory: a byte from L2 counts as 1 / L2_RATE. Row tiles that run at
        # the same time share one read of the weight from memory. Activations count as read from L2.
        weight_bytes = BLOCK_SCALED_TILE * row_bytes / min(row_tiles, L2_RATE)
        activation_bytes = min(m, side) // ctas * row_bytes / L2_RATE
        read = (weight_bytes + activation_bytes) / (bytes_per_second(target) / target.sms)
        computed = fp4_tensor_core_seconds(2 * side * side // ctas * problem.k, target, sms=1)
        every.append(waves * overlapped(computed, read, order=8))
    return LAUNCH_SECONDS + RAMP_SECONDS + min(every)


def _block_scaled_launcher(problem: GemmProblem) -> Launch:
    one_call, needs_alpha = _is_one_call(problem), problem.epilogue.alpha is not None
    multiply_codes = _multiplier(torch.float32 if not one_call else problem.out_dtype)
    in_place = problem.out_dtype == torch.float32

    def launch(given: Operands, out: Tensor) -> None:
        assert given.a_scale is not None
        codes = given.a.view(torch.float4_e2m1fn_x2), given.b.view(torch.float4_e2m1fn_x2)
        operands = *codes, given.a_scale, given.b_scale
        if one_call:
            multiply_codes(*operands, given.alpha if needs_alpha else None, out)
        else:
            acc = out if in_place else torch.empty_like(out, dtype=torch.float32)
            multiply_codes(*operands, None, acc)
            finish(acc, given, out)

    return launch


def _multiplier(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], Any]:
    """Return a function that multiplies FP4 codes. The function's arguments are the codes of both operands, the block
    scales of both operands, a factor or None, and the result in ``dtype``."""
    if not HAS_TWO_LEVELS:
        return lambda a, b, a_scale, b_scale, factor, out: torch._scaled_mm(
            a, b, a_scale, b_scale, out_dtype=dtype, out=out
        )
    from torch.nn.functional import ScalingType, SwizzleType

    # Call the private function, because ``torch.nn.functional.scaled_mm``, which calls it, takes no output.
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
                one = unit  # do not cache ``one`` in a graph capture: a captured tensor is written only in replays
        call(a, b, [a_scale, factor], *both, [b_scale, unit], *both, None, dtype, out=out)

    return multiply
