"""Host side of the epilogue with a gate. No device code."""

from dataclasses import dataclass
from typing import Literal

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.gates import GemmGate


@dataclass(frozen=True)
class GatedEpilogue:
    """Epilogue of a GEMM over experts with a gate.

    The epilogue computes ``g = gate · row_scale · alpha + bias`` and ``u = up · row_scale · alpha + bias`` in fp32, and
    rounds after each operation. Then it applies the gate in fp32, and rounds to 16 bits or quantises blocks.

    Attributes:
        out: dtype of the result, or FP4 format of its codes.
        out_layout: layout of the block scales, or None for 16 bits.
        alpha: kind of the factors: one per expert, two per expert (for gate and up), or None.
        bias_dtype: dtype of the biases, or None without biases.
        global_scale: kind of the encode scale of the result: one for all experts, one per expert, or None.
        gate: ``"silu"``, ``"gelu_tanh"``, ``"gelu"`` or ``"relu2"``, applied to gate and multiplied by up, or
            ``"swiglu"`` for the general SwiGLU with ``swiglu_alpha``, ``swiglu_beta`` and ``swiglu_limit``.
        has_row_scale: True if each row of the activations has a factor.
    """

    out: torch.dtype | FP4Format
    out_layout: ScaleLayout | None = None
    alpha: Literal["expert", "expert_half"] | None = None
    bias_dtype: torch.dtype | None = None
    global_scale: Literal["one", "expert"] | None = None
    gate: GemmGate = "silu"
    has_row_scale: bool = False

    @property
    def has_gate_parameters(self) -> bool:
        """True if the launch passes the parameters of the gate."""
        return self.gate == "swiglu"

    @property
    def block(self) -> int:
        """Number of columns that a thread stores together: a block of FP4 codes, or 16 bytes of 16-bit values."""
        return self.out.block_size if isinstance(self.out, FP4Format) else 8

    def reason_unsupported(self) -> str | None:
        """Return the reason that this epilogue is not supported, or None."""
        if isinstance(self.out, FP4Format) and self.out_layout is None:
            return f"a result in {self.out} needs a scale layout"
        if not isinstance(self.out, FP4Format) and self.out_layout is not None:
            return f"a result in {self.out} takes no scale layout; got {self.out_layout}"
        if self.global_scale is not None and not (isinstance(self.out, FP4Format) and self.out.has_global_scale):
            return f"a result in {self.out} has no global scale"
        return None
