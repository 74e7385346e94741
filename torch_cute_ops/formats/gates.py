"""Gates: functions of the two halves of a row, gate and up, between the two layers of an MLP or of an expert."""

from typing import Literal

Gate = Literal["silu", "gelu_tanh", "gelu", "relu2"]
"""Activation functions of a gate, whose result is multiplied by up. Only SiLU takes the parameters of the general
SwiGLU."""
GemmGate = Literal[Gate, "swiglu"]
"""Gates of a GEMM's epilogue. ``"swiglu"`` is the general SwiGLU, whose parameters calls pass."""
