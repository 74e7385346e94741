"""Block-scaled MMAs of a warp (``mma.sync … block_scale``) in FP4, for sm_120a."""

from __future__ import annotations

import re

import numpy as np

from ptx_emulator.decoder import Decoder, Step, effect, unknown
from ptx_emulator.instructions.products import accumulators, matrix_step, of_accumulators, whole_warps
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.parser import Instruction, Operand, Vec
from ptx_emulator.values import E2M1, SCALES, TYPES, Array, of_each, positions

_FORM = re.compile(
    r"mma\.sync\.aligned\.kind::(mxf4|mxf4nvf4)\.block_scale\.scale_vec::([24])X"
    r"\.m16n8k64\.row\.col\.f32\.e2m1\.e2m1\.f32\.(ue4m3|ue8m0)"
)
_KINDS = (("mxf4", 2, "ue8m0"), ("mxf4nvf4", 2, "ue8m0"), ("mxf4nvf4", 4, "ue4m3"))
K = 64


def _numbers(words: Array) -> Array:
    """Decode the eight FP4 values in each word, along a new last axis."""
    codes = np.ascontiguousarray(words)[..., None].view(np.uint8)
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(*words.shape, 8)


def _selectors(values: tuple[Array, ...]) -> list[int]:
    """Return the byte selectors and thread selectors of the scales, which must be equal in all lanes."""
    for value in values:
        different = positions(value != value.flat[0])
        if len(different):
            raise Fault(EmulationError, different[0], "a selector that differs between lanes")
    return [int(value.flat[0]) for value in values]


@effect("mma.sync.aligned.kind::mxf4 mma.sync.aligned.kind::mxf4nvf4")
def _mma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``(A * scales) @ (B * scales) + C``.

    Lane 4 g + t holds values of rows g and g + 8 of A, and of column g of B. Of each of these rows and columns, the
    lane holds eight values from k = 8 t on, and eight values from k = 32 + 8 t on. The scales of a row or column are
    bytes of one word, starting at the selected byte. If thread s is selected, lanes 4 g + 2 s and 4 g + 2 s + 1 hold
    the words of rows g and g + 8, and lane 4 g + s holds the word of column g.
    """
    match = _FORM.fullmatch(ins.opcode)
    if match is None:
        raise unknown(ins)
    kind, count, scale = match[1], int(match[2]), match[3]
    if (kind, count, scale) not in _KINDS:
        raise unknown(ins)
    machine, numbers = d.machine, SCALES[scale]

    def run(threads: Array, *values: Array) -> Array:
        warps = whole_warps(machine, threads)
        words = np.stack([of_each(value, threads) for value in values[:12]]).reshape(-1, warps, 8, 4)
        a_byte, a_thread, b_byte, b_thread = _selectors(values[12:])
        if max(a_byte, b_byte) > 4 - count or (a_byte | b_byte) % count or a_thread > 1 or b_thread > 3:
            raise Fault(EmulationError, 0, f"selectors {a_byte}, {a_thread}, {b_byte}, {b_thread}")
        a, b, c, (a_scale, b_scale) = np.split(words, [4, 6, 10])
        # A's four registers are ordered by half of k, and within each half of k by half of the rows.
        left = _numbers(a).reshape(2, 2, warps, 8, 4, 8).transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, K)
        right = _numbers(b).transpose(1, 2, 0, 3, 4).reshape(warps, 8, K)
        rows = np.concatenate([a_scale[:, :, 2 * a_thread], a_scale[:, :, 2 * a_thread + 1]], 1)

        def scales(word: Array, byte: int) -> Array:
            codes = np.ascontiguousarray(word)[..., None].view(np.uint8)[..., byte : byte + count]
            return np.repeat(numbers[codes], K // count, -1)

        left, right = left * scales(rows, a_byte), right * scales(b_scale[:, :, b_thread], b_byte)
        return of_accumulators(left @ right.swapaxes(1, 2) + accumulators(c))

    target, a, b, c, a_scale, a_ids, b_scale, b_ids = ins.operands
    if [len(one.items) for one in (a, b, c)] != [4, 2, 4]:
        raise unknown(ins)
    sources = [d.source(item, TYPES["b32"]) for one in (a, b, c, a_scale, b_scale) for item in _items(one)]
    sources += [d.source(item, TYPES["u16"]) for one in (a_ids, b_ids) for item in one.items]
    return matrix_step(d, ins, sources, [d.target(item, TYPES["f32"]) for item in target.items], run, "error")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)
