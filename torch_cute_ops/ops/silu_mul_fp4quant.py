"""``silu_mul_fp4quant``: SwiGLU's gate and FP4 quantisation of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(RowQuant("silu_mul"), "y", "scale")
def silu_mul_fp4quant(
    input: Tensor,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    gate: Gate = "silu",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply a gate, by default SwiGLU's, to each row of ``input`` and quantise the result to FP4 blocks, in one pass.

    The gate is computed in fp32::

        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)

    ``gate`` is the first half of each row of ``input``, ``up`` the second half. By default ``h`` is ``silu(gate) · up``
    (SwiGLU). gpt-oss uses ``swiglu_alpha=1.702``, ``swiglu_beta=1`` and ``swiglu_limit=7``. Clamps propagate NaN. With
    ``gate="gelu_tanh"`` or ``gate="gelu"``, ``h`` is ``gelu(gate) · up``; with ``gate="relu2"``, ``max(gate, 0)² ·
    up``. ``h`` is quantised as in :func:`fp4_quantize`, without being rounded to the dtype of ``input`` first.

    Args:
        input: (..., 2I) bfloat16, float16 or float32; I is a multiple of ``block_size``. Rows may be strided. If they
            do not start at multiples of 16 bytes, the op first copies them.
        global_scale: float32 tensor of one element: factor by which values are multiplied before they are encoded. For
            NVFP4 only; usually :func:`nvfp4_global_scale` of the tensor's amax. ``None`` means 1.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: memory layout of ``scale``: ``"128x4"`` (tiles of 128 rows by 4 blocks, as cuBLAS and tcgen05 read
            them), ``"8x4"`` or ``"linear"`` (row-major).
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., I/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4). The shape depends on the layout. For M flattened rows and
        blocks of B: 128x4 (⌈M/128⌉, ⌈I/B/4⌉, 32, 4, 4), 8x4 (⌈M/8⌉, ⌈I/B/4⌉, 8, 4), linear (..., I/B). Padding is zero.

    Raises:
        ValueError: If a shape, device, format, layout or gate parameter is wrong, or if an input requires grad while
            gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize, silu_mul_fp4quant
        >>> gate = torch.full((1, 16), 32.0)  # silu(32) rounds to 32
        >>> up = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2]) / 32
        >>> y, scale = silu_mul_fp4quant(torch.cat([gate, up], 1))
        >>> fp4_dequantize(y, scale)[0, :8].tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Gate" and "Quantising to FP4".
    """
