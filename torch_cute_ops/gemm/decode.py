"""FP4 operands of a ``GemmProblem``: their formats, the limits of kernels, and decoding in memory."""

from collections.abc import Callable

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_dequant
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE, SCALE_TILE_ROWS, FP4Operands, WeightTile
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel


def fp4_format(problem: GemmProblem) -> FP4Format:
    """Return the format of a problem's FP4 weight. FP4 activations have the same format."""
    assert isinstance(problem.b.format, FP4Format)
    return problem.b.format


def weight_scales(problem: GemmProblem) -> ScaleLayout:
    """Return the scale layout of a problem's FP4 weight."""
    assert problem.b.scale_layout is not None
    return problem.b.scale_layout


def sixteen_bit_dtype(problem: GemmProblem) -> torch.dtype:
    """Return the 16-bit dtype to which operands are decoded.

    NVFP4 is decoded to the dtype of 16-bit activations or, if both operands are FP4, to float16, which represents NVFP4
    exactly. MXFP4 is decoded to bfloat16.
    """
    is_fp4 = problem.a.is_fp4 or problem.prologue_quant is not None
    return fp4_format(problem).operand_dtype(torch.float16 if is_fp4 else activation_dtype(problem))


def activation_dtype(problem: GemmProblem) -> torch.dtype:
    """Return the dtype of the tensor ``a``: uint8 for FP4 codes, otherwise a 16-bit dtype."""
    return problem.a.format if isinstance(problem.a.format, torch.dtype) else torch.uint8


def multiplies_codes(problem: GemmProblem, arch: Arch) -> bool:
    """Return True if ``mma.sync`` multiplies the FP4 codes of both operands on ``arch``, so that neither operand is
    decoded."""
    return problem.a.is_fp4 and arch.has_block_scaled_mma


def fp4_operands(problem: GemmProblem, *, by_codes: bool = False) -> FP4Operands:
    """Describe a problem's operands for the ``plan`` functions of kernels that decode the operands or, if ``by_codes``,
    multiply their codes."""
    return FP4Operands(
        activation_dtype(problem),
        torch.uint8 if by_codes else sixteen_bit_dtype(problem),
        fp4_format(problem),
        weight_scales(problem),
        problem.a.scale_layout,
        problem.prologue_gate,
        problem.prologue_quant,
    )


def reason_no_kernel(target: Target) -> str | None:
    """Return the reason why this package has no kernel for ``target``, or None if it has kernels."""
    if target.device.type != "cuda":
        return f"needs a CUDA device; the tensors are on {target.device}"
    if target.arch is None:
        return "there are no kernels for this architecture"
    return None


def reason_no_wgmma(target: Target) -> str | None:
    """Return the reason why wgmma kernels do not support ``target``, or None if they do."""
    reason = reason_no_kernel(target)
    if reason is None and target.arch is not None and not target.arch.has_wgmma:
        return f"needs Hopper's warpgroup MMA; this is {target.arch.name}"
    return reason


def reason_no_tcgen05(target: Target) -> str | None:
    """Return the reason why tcgen05 kernels do not support ``target``, or None if they do."""
    reason = reason_no_kernel(target)
    if reason is None and target.arch is not None and not target.arch.has_tcgen05:
        return f"needs data-center Blackwell's tcgen05; this is {target.arch.name}"
    return reason


def reason_misaligned(problem: GemmProblem) -> str | None:
    """Return the reason why the operands are not aligned enough for kernels, or None if kernels can load them."""
    if problem.n % 8 or problem.k % 32:
        return f"n={problem.n} and k={problem.k}: they have to be multiples of 8 and 32"
    return None


def reason_not_words(problem: GemmProblem) -> str | None:
    """Return the reason why kernels cannot load linear scales four at a time, or None if they can."""
    blocks = problem.k // fp4_format(problem).block_size
    if weight_scales(problem).is_linear and blocks % 4:
        return f"b has {blocks} scales a row; in the linear layout they have to be a multiple of 4"
    return None


def reason_not_linear(problem: GemmProblem, width: int, what: str) -> str | None:
    """Return the reason why TMA cannot copy linear scales one k tile at a time, or None if it can.

    Args:
        problem: problem with an FP4 weight.
        width: number of elements along K that must be a multiple of a k tile.
        what: name of ``width`` in the returned reason.
    """
    layout = weight_scales(problem)
    if not layout.is_linear:
        return None
    if width % K_TILE:
        return f"in the linear layout {what} has to be a multiple of {K_TILE}"
    return WeightTile(fp4_format(problem), layout, SCALE_TILE_ROWS).reason_not_copied


def decoding_kernel(problem: GemmProblem, layout: ScaleLayout, dtype: torch.dtype) -> KernelSpec:
    """Return the kernel that decodes an FP4 operand with this scale layout to ``dtype``."""
    return KernelSpec(fp4_dequant.KERNEL, fp4_dequant.plan(dtype, problem.k, fp4_format(problem), layout, False))


def decoder(
    problem: GemmProblem, layout: ScaleLayout, dtype: torch.dtype, target: Target
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that decodes FP4 codes (rows, K/2) and their scales to a matrix (rows, K) in ``dtype``, on a
    GPU."""
    assert target.arch is not None
    arch: Arch = target.arch
    function = compile_kernel(decoding_kernel(problem, layout, dtype), arch)
    device, k, max_ctas = target.device, problem.k, target.sms * fp4_dequant.CTAS_PER_SM

    def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        numbers = allocator(device)((codes.shape[0], k), (k, 1), dtype)
        function(codes, scale.view(torch.uint8), None, numbers, max_ctas)
        return numbers

    return decode
