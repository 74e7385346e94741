"""``moe_fc1_fp4``: the first GEMM of an expert layer, FP4 times FP4, with the gate and FP4 quantisation behind it."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gated_gemm import GatedGemm
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(GatedGemm("fp4"), "y", "scale")
def moe_fc1_fp4(
    a: Tensor,
    w: Tensor,
    a_scale: Tensor,
    w_scale: Tensor,
    routing: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gate and up projections of an expert layer, SwiGLU, and quantisation to FP4 blocks, of the experts that each
    token is routed to: what :func:`moe_fc2_fp4` takes.

    For each routed pair of a token m and an expert e, ``gate = alpha · Σ_k a[m, k] · w[e, i, k] + bias[e, i]`` and
    ``up`` likewise of row ``I + i``; then ``g · σ(swiglu_alpha · g) · (u + swiglu_beta)`` with
    ``g = min(gate, swiglu_limit)`` and ``u = clip(up, -swiglu_limit, swiglu_limit)``, as in :func:`silu_mul_fp4quant`;
    all in fp32, with no rounding to 16 bits in between. Operands are decoded without their global scales.

    Args:
        a: (M, H/2), uint8 or float4_e2m1fn_x2: two e2m1 codes a byte, element 0 in the low nibble.
        w: (E, 2·I, H/2), the same of 1 to 512 experts, for each the rows of the gate before those of up. ``I`` is a
            multiple of 64.
        a_scale: scales of ``a`` over (M, H), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        w_scale: scales of ``w`` as :func:`fp4_quantize` of the 3-D weight gives them, in ``scale_layout``, or in 128x4
            where that is 8x4: linear (E, 2·I, H/block), tiled over the flattened E·2·I rows.
        routing: (M, E) float32 with any strides: a pair is computed where it is not 0; NaN is not. The ``alpha`` of
            :func:`moe_fc2_fp4` serves. Where it is 0 or -0 nothing is computed or written, and no weight is read of an
            expert that no token is routed to.
        alpha: (E,) float32, an expert's ``1 / (global scale of a · global scale of w)``; or (E, 2), for gate and up.
        bias: (E, 2·I), float32 or bfloat16, added behind ``alpha``, before the gate.
        global_scale: encode scale of the result: one float32 element for all experts, or (E,); NVFP4 only. ``None``:
            1.
        block_size, scale_format: as for :func:`mm_fp4`, of ``a``, ``w`` and the result.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``, of ``a`` and the result. Scales in another layout whose
            shape is the same cannot be detected, and give wrong numbers.
        swiglu_alpha, swiglu_beta, swiglu_limit: as for :func:`silu_mul_fp4quant`.
        backend, static_weight: as for :func:`mm_fp4`.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (M, E·I/2) uint8, a token's codes for every expert, one expert after the other.
        ``scale``: over (M, E·I), in ``scale_layout``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). Bytes of padding are
        zero. Where ``routing`` is 0 both hold whatever was there.

    Raises:
        ValueError: for a wrong shape, device, format or layout; for a backend that is unknown or cannot compute the
            call, with its reason; or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
