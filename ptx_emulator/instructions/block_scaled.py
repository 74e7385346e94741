"""Block-scaled MMAs of a warp (``mma.sync … block_scale``) in FP4 and FP8, for sm_120a."""

from __future__ import annotations

import re

import numpy as np

from ptx_emulator.decoder import Decoder, Step, effect, unknown
from ptx_emulator.instructions.products import accumulators, matrix_step, of_accumulators, whole_warps
from ptx_emulator.memory import EmulationError, Fault
from ptx_emulator.parser import Instruction, Operand, Vec
from ptx_emulator.values import E2M1, E4M3, E5M2, SCALES, TYPES, Array, of_each, positions

_FORM = re.compile(
    r"mma\.sync\.aligned\.kind::(mxf4|mxf4nvf4|mxf8f6f4)\.block_scale(?:\.scale_vec::([124])X)?"
    r"\.m16n8k(32|64)\.row\.col\.f32\.(e2m1|e4m3|e5m2)\.(e2m1|e4m3|e5m2)\.f32\.(ue4m3|ue8m0)"
)
_COUNTS = {
    ("mxf4", None, "ue8m0"): 2,
    ("mxf4", "2", "ue8m0"): 2,
    ("mxf4nvf4", "2", "ue8m0"): 2,
    ("mxf4nvf4", "4", "ue4m3"): 4,
    ("mxf8f6f4", None, "ue8m0"): 1,
    ("mxf8f6f4", "1", "ue8m0"): 1,
}
"""Number of scales per row, keyed by an MMA's kind, ``scale_vec`` and format of the scales."""


def _packed(words: Array) -> Array:
    """Decode the eight FP4 values in each word, along a new last axis."""
    codes = np.ascontiguousarray(words)[..., None].view(np.uint8)
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(*words.shape, 8)


def _of_bytes(words: Array, fmt: str) -> Array:
    """Decode the four values in the bytes of each word, along a new last axis. An FP4 code is in bits 2 to 5 of its
    byte."""
    codes = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if fmt != "e2m1":
        return (E4M3 if fmt == "e4m3" else E5M2)[codes]
    if (codes & 0b11000011).any():
        raise Fault(EmulationError, 0, "a byte with an FP4 code in which bits 0, 1, 6 and 7 are not zero")
    return E2M1[codes >> 2]


def _selectors(values: tuple[Array, ...]) -> list[int]:
    """Return the byte selectors and thread selectors of the scales, which must be equal in all lanes."""
    for value in values:
        different = positions(value != value.flat[0])
        if len(different):
            raise Fault(EmulationError, different[0], "a selector that differs between lanes")
    return [int(value.flat[0]) for value in values]


@effect("mma.sync.aligned.kind::mxf4 mma.sync.aligned.kind::mxf4nvf4 mma.sync.aligned.kind::mxf8f6f4")
def _mma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``(A * scales) @ (B * scales) + C``.

    Lane 4 g + t holds values of rows g and g + 8 of A, and of column g of B. For each of these rows and columns, the
    lane holds two words of n values. The first word starts at k = n t, and the second word starts half of K later. The
    scales of a row or column are bytes of one word, starting at the byte that a selector gives. A second selector s
    gives the lanes that hold these words: lanes 4 g + 2 s and 4 g + 2 s + 1 for rows g and g + 8, and lane 4 g + s for
    column g.
    """
    match = _FORM.fullmatch(ins.opcode)
    if match is None:
        raise unknown(ins)
    kind, k, formats, scale = match[1], int(match[3]), match.group(4, 5), match[6]
    count, in_bytes = _COUNTS.get((kind, match[2], scale), 0), kind == "mxf8f6f4"
    if not count or k != (32 if in_bytes else 64) or not (in_bytes or formats == ("e2m1", "e2m1")):
        raise unknown(ins)
    machine, numbers = d.machine, SCALES[scale]

    def decoded(words: Array, fmt: str) -> Array:
        return _of_bytes(words, fmt) if in_bytes else _packed(words)

    def run(threads: Array, *values: Array) -> Array:
        warps = whole_warps(machine, threads)
        words = np.stack([of_each(value, threads) for value in values[:12]]).reshape(-1, warps, 8, 4)
        a_byte, a_thread, b_byte, b_thread = _selectors(values[12:])
        if max(a_byte, b_byte) > 4 - count or (a_byte | b_byte) % count or a_thread > 1 or b_thread > 3:
            raise Fault(EmulationError, 0, f"selectors {a_byte}, {a_thread}, {b_byte}, {b_thread}")
        a, b, c, (a_scale, b_scale) = np.split(words, [4, 6, 10])
        # A's four registers are ordered by half of k, and within each half of k by half of the rows.
        left = decoded(a, formats[0]).reshape(2, 2, warps, 8, 4, k // 8)
        left = left.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, k)
        right = decoded(b, formats[1]).transpose(1, 2, 0, 3, 4).reshape(warps, 8, k)
        rows = np.concatenate([a_scale[:, :, 2 * a_thread], a_scale[:, :, 2 * a_thread + 1]], 1)

        def scales(word: Array, byte: int) -> Array:
            codes = np.ascontiguousarray(word)[..., None].view(np.uint8)[..., byte : byte + count]
            return np.repeat(numbers[codes], k // count, -1)

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
