"""``moe_fc1_fp4``: first GEMM of an expert layer for FP4 activations and weights, with gate and FP4 quantisation."""

from torch import Tensor

from torch_cute_ops.formats.gates import Gate
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
    scale_layout: FP4ScaleLayout | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    row_scale: Tensor | None = None,
    gate: Gate = "silu",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gate and up projections of each token's experts, SwiGLU and FP4 quantisation, from FP4 operands.

    For each routed pair of a token m and an expert e, in fp32 and without rounding to 16 bits::

        gate = alpha[e] · row_scale[m] · Σ_k a[m, k] · w[e, k, i] + bias[e, i]
        up = alpha[e] · row_scale[m] · Σ_k a[m, k] · w[e, k, I + i] + bias[e, I + i]
        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)
        y, scale = fp4_quantize(h, global_scale)

    ``i`` is a column of the expert. By default ``h`` is ``silu(gate) · up`` (SwiGLU); clamps propagate NaN. Operands
    are decoded without their global scales, which ``alpha`` divides out. The results are operands of
    :func:`moe_fc2_fp4`.

    Args:
        a: (M, H/2) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble.
        w: (E, H/2, 2·I) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed
            view ``weight.mT`` of weights stacked row-major, (E, 2·I, H/2). E is 1 to 1,024. Each expert's rows of gate
            precede its rows of up. I is a multiple of 64. A row-major tensor is refused. Square weights (H/2 = 2·I)
            that are stored transposed cannot be detected.
        a_scale: block scales of ``a`` as an (M, H) matrix: 128x4 (⌈M/128⌉, ⌈H/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉, ⌈H/B/4⌉, 8,
            4) or linear (M, H/B), as :func:`fp4_quantize` writes them, with B the block size. The dtype is
            float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
        w_scale: block scales of ``w``: linear (E, 2·I, H/B) if ``a_scale`` is linear, otherwise 128x4 tiles over the
            rows of all experts, (⌈(E·2·I)/128⌉, ⌈H/B/4⌉, 32, 4, 4), as :func:`fp4_quantize` of the weight (E, 2·I, H)
            writes them. The dtypes are as for ``a_scale``.
        routing: (M, E) float32 with any strides: a pair of a token and an expert is computed if the pair's element is
            not 0 (NaN is not 0). Normally this is the ``alpha`` of :func:`moe_fc2_fp4`. If an element is 0 or -0,
            nothing is computed or written for the pair. The weight of an expert without tokens is not read.
        alpha: float32 (E,), one factor per expert; or (E, 2), separate factors for gate and up. To divide out the
            global scales of ``a`` and of the expert's weight, ``g_a`` and ``g_w``, pass ``1 / (g_a · g_w)``. ``None``
            means 1.
        bias: (E, 2·I) float32 or bfloat16, added after ``alpha``, before the gate.
        global_scale: float32 tensor of one element, or (E,), by which results are multiplied before they are encoded.
            NVFP4 only. ``None`` means 1.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the scales: ``"128x4"``, ``"8x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales. Tiles of ``w_scale`` that are padded expert by expert are accepted if
            ``scale_layout`` is given and each expert has a multiple of 128 rows.
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``w`` and ``w_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        row_scale: (M,) float32: factors of the rows of ``a``, as :func:`fp4_quantize_per_token` returns them. Gate and
            up are multiplied by them before ``alpha``. ``None`` means 1.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (M, E·I/2) uint8, a token's codes for every expert, one expert after another.
        ``scale``: block scales of ``y`` as an (M, E·I) matrix, in the layout of ``a_scale``: float8_e4m3fn (NVFP4) or
        uint8 (MXFP4). Padding is zero. For pairs that are not routed, ``y`` and ``scale`` keep the previous content of
        the memory.

    Raises:
        ValueError: If a shape, device, format, layout or gate parameter is wrong; if the backend is unknown or cannot
            compute the call (the message gives the reason); or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize, fp4_quantize, moe_fc1_fp4
        >>> a, a_scale = fp4_quantize(torch.full((1, 64), 6.0))
        >>> weight = 6 * torch.eye(64).repeat(2, 2, 1)  # 2 experts, 64 rows of gate and 64 of up
        >>> w, w_scale = fp4_quantize(weight)
        >>> routing = torch.tensor([[1.0, 0.0]])  # expert 0 only
        >>> alpha = torch.tensor([[1.0, 1 / 36]] * 2)  # factors of gate and up
        >>> y, scale = moe_fc1_fp4(a, w.mT, a_scale, w_scale, routing, alpha)
        >>> fp4_dequantize(y, scale)[0, :4].tolist()  # silu(36) · 1, in columns of expert 0
        [36.0, 36.0, 36.0, 36.0]

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Experts over n, with a gate".
    """
