"""``moe_fc2_fp4``: second GEMM of an expert layer for FP4 activations and weights, summed over the experts."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp4_gemm import ExpertFP4Gemm
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(ExpertFP4Gemm("fp4"), "out")
def moe_fc2_fp4(
    a: Tensor,
    w: Tensor,
    a_scale: Tensor,
    w_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the down projections of each token's experts and their weighted sum, from FP4 operands.

    With k over the columns of expert e::

        out[m, n] = Σ_e alpha[m, e] · (Σ_k a[m, k] · w[k, n] + bias[e, n])

    A row of ``a`` contains a token's activations for every expert, one expert after another. A column of ``w`` contains
    the experts' weights in the same order. Both have E·I elements, for E experts of width I. The shapes determine E and
    I. Each expert's sum is accumulated in fp32, its bias is added, and the result, times ``alpha``, is added to an fp32
    accumulator, which is rounded once. Operands are decoded without their global scales.

    Args:
        a: (M, E·I/2) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble. I is a multiple
            of 64.
        w: (E·I/2, N) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed
            view ``weight.mT`` of a row-major (N, E·I/2). :func:`moe_fc2_weight` builds it from stacked weights. A
            row-major tensor is refused. A square weight that is stored transposed, or a stack that was reshaped without
            :func:`moe_fc2_weight`, cannot be detected.
        a_scale: block scales of ``a`` as an (M, E·I) matrix: 128x4 (⌈M/128⌉, ⌈E·I/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉,
            ⌈E·I/B/4⌉, 8, 4) or linear (M, E·I/B), as :func:`fp4_quantize` writes them, with B the block size. The dtype
            is float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
        w_scale: block scales of ``w`` as an (N, E·I) matrix: linear (N, E·I/B) if ``a_scale`` is linear, otherwise
            128x4 (⌈N/128⌉, ⌈E·I/B/4⌉, 32, 4, 4). The dtypes are as for ``a_scale``.
        alpha: (M, E) float32 with any strides: the routing weight of each token for each expert, as
            :func:`moe_route_dense` writes it. If the expert's activations and weight have the global scales ``g_a`` and
            ``g_w``, pass the routing weight times ``1 / (g_a · g_w)``. Pairs of a token and an expert for which
            ``alpha`` is 0 or -0 are skipped, even if the pair's elements or scales are NaN or uninitialised. If M = E,
            a transposed ``alpha`` cannot be detected.
        bias: (E, N) float32 or the dtype of the result, added to each expert's sum before the multiplication by
            ``alpha``. If ``alpha`` contains a factor that divides out global scales, divide the bias by this factor.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the scales: ``"128x4"``, ``"8x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``w`` and ``w_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``; 0 for tokens without experts. A NaN in ``alpha`` makes the token's row NaN. Elements
        that are computed with a NaN scale are NaN; skipped pairs have no effect.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if the backend is unknown or cannot compute the call
            (the message gives the reason); or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, moe_fc2_fp4
        >>> a, a_scale = fp4_quantize(torch.full((2, 128), 6.0))
        >>> w, w_scale = fp4_quantize(6 * torch.eye(8, 64).repeat(1, 2))  # 2 experts, 64 columns each
        >>> alpha = torch.tensor([[0.5, 0.25], [1.0, 0.0]])  # token 1 is routed to expert 0 only
        >>> moe_fc2_fp4(a, w.mT, a_scale, w_scale, alpha)[:, :2].tolist()
        [[27.0, 27.0], [36.0, 36.0]]

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Experts over k".
    """
