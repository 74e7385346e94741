"""``fp8_quantize_per_tensor``: FP8 quantisation with one scale that is computed from the whole tensor."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant


@define(RowQuant(reduces_tensor=True), "y", "scale")
def fp8_quantize_per_tensor(
    input: Tensor, interleaved: bool = False, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise ``input`` to FP8 with one scale, which the device computes from all elements ``v``.

    The host does not wait for the device.

    With ``amax = max |v|``, all steps are in fp32::

        scale = amax / 448
        y = e4m3(v / scale)

    Codes are rounded to nearest even and saturate. If ``input`` contains NaN or infinity, the scale is NaN and all
    codes are zero; if it contains only zeros, or no elements, the scale and the codes are zero. CPU and GPU results are
    equal bit for bit. The codes of a row depend on all other rows. To avoid this, use :func:`fp8_quantize`:
    by default it computes a scale per row, and with ``granularity="tensor"`` it takes a scale from calibration.

    Args:
        input: (..., K) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or K is not a multiple of 16, the op first copies them.
        interleaved: ``True`` to interleave k of ``y`` for ``mm_fp8_fp4``, as :func:`interleave_k` does.
        out: contiguous tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (..., K) float8_e4m3fn, or (..., ⌈K/256⌉, 256) with zeros beyond K if ``interleaved``.
        ``scale``: (1,) float32.

    Raises:
        ValueError: If a shape or device is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp8_quantize_per_tensor
        >>> y, scale = fp8_quantize_per_tensor(torch.tensor([[896.0, -448.0], [2.0, 0.0]]))
        >>> y.float().tolist(), scale.tolist()
        ([[448.0, -224.0], [1.0, 0.0]], [2.0])

    References:
        P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Roundings and special values: docs/numerics.md,
        "Quantising to FP8".
    """
