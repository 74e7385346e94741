"""``rmsnorm_fp4quant_with_norm``: as ``rmsnorm_fp4quant``, with the normalised rows besides (an MoE router reads
them)."""

from typing import cast

import torch

from torch_cute_ops.fake import rmsnorm_fp4quant_with_norm as fake
from torch_cute_ops.ops._row_quant import NORM_ARGUMENTS, NormQuant
from torch_cute_ops.ops._spec import OpSpec
from torch_cute_ops.reference import rmsnorm_fp4quant_with_norm as reference
from torch_cute_ops.runtime.dispatch import is_plain_eager

_norm_quant = NormQuant("rmsnorm_fp4quant_with_norm", returns_norm=True)


def rmsnorm_fp4quant_with_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS-normalise each row of ``input``, quantise it to FP4 blocks, and return the norm too, in one pass over memory.

    ``y`` and ``scale`` are those of :func:`rmsnorm_fp4quant`, whose docstring describes every argument; they are made
    from the norm in fp32, not from the rounded one.

    Args:
        input: (..., H), bfloat16, float16 or float32; H a multiple of ``block_size``.
        weight: (H,), in the input dtype or float32.
        global_scale: one float32 element, or ``None``; NVFP4 only.
        eps: added to the mean square.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``.
        out: tensors to write ``(y, scale, norm)`` into.

    Returns:
        ``y`` (..., H/2) uint8, ``scale``, and ``norm`` (..., H) in the input dtype.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    args = (input, weight, global_scale, eps, block_size, scale_format, scale_layout)
    if is_plain_eager(input, weight, global_scale):
        return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], _norm_quant.run(*args, out))
    if out is None:
        return torch.ops.cute.rmsnorm_fp4quant_with_norm.default(*args)
    torch.ops.cute.rmsnorm_fp4quant_with_norm.out(*args, y=out[0], scale=out[1], norm=out[2])
    return out


OP = OpSpec(
    name="rmsnorm_fp4quant_with_norm",
    arguments=NORM_ARGUMENTS,
    outputs=("y", "scale", "norm"),
    check=_norm_quant.check_call,
    reference=reference.rmsnorm_fp4quant_with_norm,
    fake=fake.rmsnorm_fp4quant_with_norm,
    cuda=_norm_quant.cuda,
    cuda_out=_norm_quant.cuda_out,
    function=rmsnorm_fp4quant_with_norm,
    warmup=_norm_quant.warmup,
)
