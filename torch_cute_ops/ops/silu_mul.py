"""``silu_mul``: SwiGLU of each row."""

from torch import Tensor

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant


@define(RowQuant("silu_mul"), "out")
def silu_mul(
    input: Tensor,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    gate: Gate = "silu",
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Apply a gate, by default SwiGLU's, to each row of ``input``.

    The gate is computed in fp32, and ``h`` is rounded once to the dtype of ``input``::

        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)

    ``gate`` is the first half of each row of ``input``, ``up`` the second half. By default ``h`` is ``silu(gate) · up``
    (SwiGLU). gpt-oss uses ``swiglu_alpha=1.702``, ``swiglu_beta=1`` and ``swiglu_limit=7``. Clamps propagate NaN. With
    ``gate="gelu_tanh"`` or ``gate="gelu"``, ``h`` is ``gelu(gate) · up``; with ``gate="relu2"``, ``max(gate, 0)² ·
    up``.

    Args:
        input: (..., 2I) bfloat16, float16 or float32. Rows may be strided. If they do not start at multiples of 16
            bytes, or I is not a multiple of 16, the op first copies them.
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        out: contiguous tensor to write the result into.

    Returns:
        (..., I) in the dtype of ``input``.

    Raises:
        ValueError: If a shape, device or gate parameter is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import silu_mul
        >>> gate, up = torch.tensor([[32.0, 20.0, 0.0]]), torch.tensor([[3.0, 0.5, 7.0]])
        >>> silu_mul(torch.cat([gate, up], 1)).tolist()  # silu(g) rounds to g from g = 17 on
        [[96.0, 10.0, 0.0]]
        >>> silu_mul(torch.cat([gate, up], 1), gate="gelu").tolist()  # gelu(g) rounds to g from g = 6 on
        [[96.0, 10.0, 0.0]]

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        Roundings and special values: docs/numerics.md, "Gate".
    """
