"""``moe_fc2_fp4_weight_only``: second GEMM of an expert layer for 16-bit activations and FP4 weights, summed over the
experts."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp4_gemm import ExpertFP4Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(ExpertFP4Gemm("16-bit"), "out")
def moe_fc2_fp4_weight_only(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: WeightScaleLayout | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the down projections of each token's experts and their weighted sum, from 16-bit activations.

    With k over the columns of expert e::

        out[m, n] = Σ_e alpha[m, e] · (Σ_k a[m, k] · w[k, n] + bias[e, n])

    A row of ``a`` contains a token's activations for every expert, one expert after another. A column of ``w`` contains
    the experts' weights in the same order. Both have E·I elements, for E experts of width I. The shapes determine E and
    I. Each expert's sum is accumulated in fp32, its bias is added, and the result, times ``alpha``, is added to an fp32
    accumulator, which is rounded once. The FP4 weight is decoded exactly and without its global scale. With an MXFP4
    weight, float16 activations are first rounded to bfloat16, because MXFP4 scales exceed the range of float16.

    Args:
        a: (M, E·I) bfloat16 or float16. I is a multiple of 64.
        w: (E·I/2, N) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed
            view ``weight.mT`` of a row-major (N, E·I/2). :func:`moe_fc2_weight` builds it from stacked weights. A
            row-major tensor is refused. A square weight that is stored transposed, or a stack that was reshaped without
            :func:`moe_fc2_weight`, cannot be detected.
        w_scale: block scales of ``w`` as an (N, E·I) matrix: 128x4 (⌈N/128⌉, ⌈E·I/B/4⌉, 32, 4, 4) as
            :func:`fp4_quantize` writes them, or linear (N, E·I/B), with B the block size. The dtype is float8_e4m3fn
            (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
        alpha: (M, E) float32 with any strides: the routing weight of each token for each expert, as
            :func:`moe_route_dense` writes it. If the expert's weight has the global scale ``g_w``, pass the routing
            weight times ``1 / g_w``. Pairs of a token and an expert for which ``alpha`` is 0 or -0 are skipped, even if
            the pair's elements or scales are NaN or uninitialised. If M = E, a transposed ``alpha`` cannot be detected.
        bias: (E, N) float32 or the dtype of the result, added to each expert's sum before the multiplication by
            ``alpha``. If ``alpha`` contains a factor that divides out global scales, divide the bias by this factor.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means the dtype of ``a``.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the weight's scales: ``"128x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``w`` and ``w_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``; 0 for tokens without experts. A NaN in ``alpha`` makes the token's row NaN. A NaN scale
        of ``w`` gives a column of NaN; skipped pairs have no effect.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if the backend is unknown or cannot compute the call
            (the message gives the reason); or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, moe_fc2_fp4_weight_only
        >>> x = torch.full((2, 128), 6.0).bfloat16()
        >>> w, w_scale = fp4_quantize(6 * torch.eye(8, 64).repeat(1, 2))  # 2 experts, 64 columns each
        >>> alpha = torch.tensor([[0.5, 0.25], [1.0, 0.0]])  # token 1 is routed to expert 0 only
        >>> moe_fc2_fp4_weight_only(x, w.mT, w_scale, alpha)[:, :2].tolist()
        [[27.0, 27.0], [36.0, 36.0]]

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Experts over k".
    """
