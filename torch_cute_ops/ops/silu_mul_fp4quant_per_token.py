"""``silu_mul_fp4quant_per_token``: SwiGLU's gate and NVFP4 quantisation with a scale per row, in one pass."""

from torch import Tensor

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout


@define(RowQuant("silu_mul", block_size=16), "y", "scale", "row_scale")
def silu_mul_fp4quant_per_token(
    input: Tensor,
    scale_layout: FP4ScaleLayout = "128x4",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    gate: Gate = "silu",
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply a gate, by default SwiGLU's, to each row of ``input`` and quantise the result to NVFP4 with a scale per
    row.

    The gate is computed in fp32::

        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)

    ``gate`` is the first half of each row of ``input``, ``up`` the second half. By default ``h`` is ``silu(gate) · up``
    (SwiGLU). gpt-oss uses ``swiglu_alpha=1.702``, ``swiglu_beta=1`` and ``swiglu_limit=7``. Clamps propagate NaN. With
    ``gate="gelu_tanh"`` or ``gate="gelu"``, ``h`` is ``gelu(gate) · up``; with ``gate="relu2"``, ``max(gate, 0)² ·
    up``. ``h`` is quantised as in :func:`fp4_quantize_per_token`, without being rounded to the dtype of ``input``
    first.

    Args:
        input: (..., 2I) bfloat16, float16 or float32; I is a multiple of 16. Rows may be strided. If they do not start
            at multiples of 16 bytes, the op first copies them.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        out: contiguous tensors to write ``(y, scale, row_scale)`` into.

    Returns:
        ``y``: (..., I/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn. The shape depends on the layout. For M flattened rows: 128x4 (⌈M/128⌉, ⌈I/64⌉, 32, 4,
        4), 8x4 (⌈M/8⌉, ⌈I/64⌉, 8, 4), linear (..., I/16). Padding is zero.
        ``row_scale``: (M,) float32, one scale for each of the M flattened rows.

    Raises:
        ValueError: If a shape, device, layout or gate parameter is wrong, or if an input requires grad while gradients
            are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize, silu_mul_fp4quant_per_token
        >>> gate = torch.full((1, 16), 32.0)  # silu(32) rounds to 32
        >>> up = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2])
        >>> y, scale, row_scale = silu_mul_fp4quant_per_token(torch.cat([gate, up], 1))
        >>> assert torch.allclose(fp4_dequantize(y, scale) * row_scale, 32 * up)

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
        Roundings and special values: docs/numerics.md, "Gate" and "A scale per row".
    """
