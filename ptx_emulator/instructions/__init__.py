"""Decoders of all instructions except arithmetic, with one module per kind. Importing this package registers them.

To add an instruction that only computes, add a function to ``ptx_emulator.arithmetic``. For any other instruction, add
a function in this package and decorate it with ``effect``. The function takes a ``Decoder``, the ``Instruction`` and
its modifiers, and returns a ``Step``.
"""

from ptx_emulator.instructions import (
    accesses,
    barriers,
    block_scaled,
    copies,
    pairs,
    products,
    registers,
    tcgen05,
    tensor_maps,
    warps,
)

__all__ = [
    "accesses",
    "barriers",
    "block_scaled",
    "copies",
    "pairs",
    "products",
    "registers",
    "tcgen05",
    "tensor_maps",
    "warps",
]
