"""Host side of GEMMs over experts with a gate: their arguments and epilogue. No device code."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Literal

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.gates import GemmGate


class Arguments(
    namedtuple(
        "Arguments",
        "a a_scale b b_scale routing alpha bias global_scale row_scale "
        "swiglu_alpha swiglu_beta swiglu_limit y scale workspace num_ctas",
    )
):
    """Run-time arguments of a kernel, in order, for M rows of activations, H elements of k in blocks of B, and E
    experts with I columns each.

    Attributes:
        a: (M, H/2) uint8 FP4 codes, or (M, H) in 16 bits.
        a_scale: block scales of ``a``, linear (M, H/B) or tiled, or None for 16 bits.
        b: (E, H / 2, 2 · I) uint8 FP4 codes, the transposed view of a stack of row-major weights. In each expert, the
            columns of the gate precede the columns of up.
        b_scale: block scales of ``b``: linear (E, 2 · I, H / B), contiguous, or tiled over (E · 2 · I, H).
        routing: (M, E) float32 factors with any strides. Pairs with a factor of zero are not written.
        alpha: (E,) float32 factors, or (E, 2) for gate and up, or None.
        bias: (E, 2 · I) in float32 or 16 bits, added after the multiplication by ``alpha``, or None.
        global_scale: (1,) or (E,) float32 encode scale of the result, or None.
        row_scale: (M,) float32 factors of the rows, or None.
        swiglu_alpha, swiglu_beta, swiglu_limit: float32 parameters of the general gate, or None. A limit of +inf means
            no limit.
        y: (M, E · I) in 16 bits, or (M, E · I / 2) uint8 FP4 codes, written for routed pairs.
        scale: block scales of ``y``, or None for 16 bits. The scales of routed pairs are written, and all padding is
            zeroed.
        workspace: ``Config.workspace_bytes`` uint8, written.
        num_ctas: int32, number of CTAs of the GEMM, per token block if the kernel's grid has token blocks.
    """


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
