"""``moe_fc1_fp4_weight_only``: the first GEMM of an expert layer, 16-bit activations times FP4, with the gate behind
it."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gated_gemm import GatedGemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(GatedGemm("16-bit"), "out")
def moe_fc1_fp4_weight_only(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    routing: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: WeightScaleLayout = "128x4",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The gate and up projections of an expert layer, of 16-bit activations and an FP4 weight, and SwiGLU, of the
    experts that each token is routed to: what :func:`moe_fc2_fp4_weight_only` takes.

    Computes what :func:`moe_fc1_fp4` does, with one rounding to the dtype of ``a`` in place of the quantisation. The
    weight is decoded exactly and without its global scale. Float16 activations beside an MXFP4 weight, whose scales
    exceed float16's range, are rounded to bfloat16 first.

    Args:
        a: (M, H), bfloat16 or float16.
        w: (E, 2·I, H/2), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble, of 1 to 512
            experts; for each the rows of the gate before those of up. ``I`` is a multiple of 64.
        w_scale: scales of ``w`` as :func:`fp4_quantize` of the 3-D weight gives them, in ``scale_layout``: linear
            (E, 2·I, H/block), tiled over the flattened E·2·I rows; float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        routing: (M, E) float32 with any strides: a pair is computed where it is not 0; NaN is not. The ``alpha`` of
            :func:`moe_fc2_fp4_weight_only` serves. Where it is 0 or -0 nothing is computed or written, and no weight is
            read of an expert that no token is routed to.
        alpha: (E,) float32, an expert's ``1 / (global scale of w)``; or (E, 2), for gate and up.
        bias: (E, 2·I), float32 or in the dtype of ``a``, added behind ``alpha``, before the gate.
        block_size, scale_format: as for :func:`mm_fp4`.
        scale_layout: ``"linear"`` or ``"128x4"``; as for :func:`mm_fp4_weight_only`, another of the same shape is not
            detected.
        swiglu_alpha, swiglu_beta, swiglu_limit: as for :func:`silu_mul_fp4quant`.
        backend, static_weight: as for :func:`mm_fp4`.
        out: tensor (M, E·I) to write into.

    Returns:
        (M, E·I) in the dtype of ``a``: a token's columns for every expert, one expert after the other. Where
        ``routing`` is 0 it holds whatever was there.

    Raises:
        ValueError, TypeError: as :func:`moe_fc1_fp4`.
    """
