"""``silu_mul_fp4quant``: SwiGLU's gate and FP4 quantisation of each row, in one pass."""

from torch import Tensor

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
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate each row of ``input`` as SwiGLU does and quantise it to FP4 blocks, in one pass over memory.

    ``g · σ(swiglu_alpha · g) · (u + swiglu_beta)`` with ``g = min(gate, swiglu_limit)`` and
    ``u = clip(up, -swiglu_limit, swiglu_limit)``, where ``gate`` is the first half of each row of ``input`` and ``up``
    the second, in fp32: by default ``silu(gate) · up`` (SwiGLU: Shazeer 2020, eq. 6); gpt-oss has alpha 1.702, beta 1
    and limit 7. Clamps keep NaN. Quantised as :func:`fp4_quantize` does, with no rounding to the input dtype in
    between.

    Args:
        input: (..., 2I), bfloat16, float16 or float32; I a multiple of ``block_size``. Rows may be strided; the kernel
            reads them in place where their addresses are multiples of 16 bytes and from a copy where not.
        global_scale, block_size, scale_format, scale_layout: as for :func:`fp4_quantize`.
        swiglu_alpha, swiglu_beta: the gate's parameters, finite.
        swiglu_limit: the gate's clamp, above 0; ``None``: none.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., I/2) uint8, packed as by :func:`fp4_quantize`.
        ``scale``: float8_e4m3fn (NVFP4) or uint8 (MXFP4), laid out as by :func:`fp4_quantize` for rows of I elements.

    Raises:
        ValueError: for a wrong shape, device, format or layout, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
