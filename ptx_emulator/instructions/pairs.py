"""Arithmetic on pairs of fp32 values in 64 bits (``f32x2``)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_emulator.decoder import Decoder, Step, effect
from ptx_emulator.parser import Instruction
from ptx_emulator.values import TYPES, Array, canonical, flush, fma_f32, of_each

_FUNCTIONS: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma_f32}


@effect(" ".join(f"{name}{mods}.f32x2" for name in _FUNCTIONS for mods in ("", ".rn", ".ftz", ".rn.ftz")))
def _pairs(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    function, flushes = _FUNCTIONS[ins.opcode.split(".")[0]], ".ftz" in ins.opcode

    def run(threads: Array, *values: Array) -> tuple:
        numbers = [np.ascontiguousarray(of_each(value, threads)).view(np.float32) for value in values]
        if flushes:
            numbers = [flush(one) for one in numbers]
        result = canonical(function(*numbers).astype(np.float32))
        return (np.ascontiguousarray(flush(result) if flushes else result).view(np.uint64),)

    b64 = TYPES["b64"]
    sources = [d.source(operand, b64) for operand in ins.operands[1:]]
    return Step(ins, sources, [d.target(ins.operands[0], b64)], run, undefined="pass")
