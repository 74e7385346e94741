"""Matrix instructions of warps (``ldmatrix``, ``stmatrix``, ``movmatrix``, ``mma``) and of warpgroups (``wgmma``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.decoder import Decoder, Source, Step, acts, effect, modifiers, unknown
from ptx_emulator.instructions.accesses import split_space
from ptx_emulator.instructions.warps import warp_step
from ptx_emulator.memory import RANK_SHIFT, EmulationError, Fault, Misaligned
from ptx_emulator.parser import Imm, Instruction, Vec
from ptx_emulator.values import TINY, TYPES, Array, any_true, canonical, from_bf16, of_each, positions

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def whole_warps(machine: Machine, threads: Array) -> int:
    """Check that all 32 lanes of every warp take part, and return the number of warps."""
    partial = positions(machine.warp_mask[threads] != 0xFFFFFFFF)
    if len(partial):
        raise Fault(EmulationError, partial[0], "a warp of fewer than 32 threads")
    return len(threads) // 32


def matrix_step(
    d: Decoder, ins: Instruction, sources: list[Source], targets: list, run: Callable, undefined: Any
) -> Step:
    """Return a step that all lanes of a warp execute together. It does not order the lanes' memory accesses."""
    step = warp_step(d, ins, sources, targets, run, Imm(-1))
    step.undefined, step.orders = undefined, False
    return step


@effect("ldmatrix.sync.aligned")
def _ldmatrix(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode a load of matrices of 8 rows of 16 bytes.

    ``m8n16…b8x16.b4x16_p64`` reads 16 codes of 4 bits, which are the first 8 bytes of a row, and extends each code by
    zeros to a byte.
    """
    space, rest = split_space(parts)
    mods, types = modifiers(ins, rest, "m8n8 m8n16 x1 x2 x4 trans b8x16 b4x16_p64")
    first = ins.operands[0]
    items = first.items if isinstance(first, Vec) else (first,)
    count, extends = len(items), "m8n16" in mods
    if extends:
        known = mods == {"m8n16", f"x{count}", "b8x16", "b4x16_p64"} and not types
    else:
        known = types == [TYPES["b16"]] and {"m8n8", f"x{count}"} <= mods and not mods & {"b8x16", "b4x16_p64"}
    if not known:
        raise unknown(ins)
    machine = d.machine

    def run(threads: Array, address: Array) -> list[Array]:
        warps = whole_warps(machine, threads)

        def spread(words: list[Array]) -> list[Array]:
            """Distribute matrices to lanes: lane 4 i + j receives word j of row i (or of column i) of each matrix."""
            rows = np.stack(words, -1).reshape(warps, count, 8, 4)
            if "trans" in mods:
                rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
            return [rows[:, i].reshape(-1) for i in range(count)]

        # Lane 8 i + j holds the address of row j of matrix i.
        at = positions(machine.lane[threads] < 8 * count)
        address = of_each(address, threads)[at]
        words = machine.checked(at, machine.load, space, threads[at], address, 4, 2 if extends else 4)
        if extends:
            if any_true(address % 16 != 0):
                raise Fault(Misaligned, at[0], "a row of ldmatrix")
            words = _extended(words)
            if machine.unwritten is not None:
                machine.unwritten = [which for which in machine.unwritten for _ in range(2)]
        if machine.unwritten is not None:
            marks = [np.where(which, np.uint32(0xFFFFFFFF), np.uint32(0)) for which in machine.unwritten]
            machine.unwritten = [mark != 0 for mark in spread(marks)]
        return spread(words)

    targets = [d.target(item, TYPES["b32"]) for item in items]
    return matrix_step(d, ins, [d.address(ins.operands[1])], targets, run, "load")


def _extended(words: list[Array]) -> list[Array]:
    """Extend eight codes of 4 bits in each word by zeros to bytes in two words."""
    codes = np.stack(words, -1).view(np.uint8)
    return list(np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).view(np.uint32).T)


@effect("stmatrix.sync.aligned")
def _stmatrix(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    space, rest = split_space(parts)
    mods, types = modifiers(ins, rest, "m8n8 x1 x2 x4 trans")
    first = ins.operands[1]
    items = first.items if isinstance(first, Vec) else (first,)
    count = len(items)
    if types != [TYPES["b16"]] or not {"m8n8", f"x{count}"} <= mods:
        raise unknown(ins)
    machine = d.machine

    def run(threads: Array, address: Array, *words: Array) -> tuple:
        warps = whole_warps(machine, threads)
        # Lane 4 i + j holds word j of row i (or of column i) of each matrix. Lane 8 i + j holds the address of row j of
        # matrix i.
        rows = np.stack([of_each(word, threads) for word in words]).reshape(count, warps, 8, 4)
        if "trans" in mods:
            rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
        rows = rows.swapaxes(0, 1).reshape(-1, 4)
        at = positions(machine.lane[threads] < 8 * count)
        address = of_each(address, threads)[at]
        machine.checked(at, machine.store, space, threads[at], address, 4, list(np.ascontiguousarray(rows.T)))
        return ()

    sources = [d.address(ins.operands[0]), *(d.source(item, TYPES["b32"]) for item in items)]
    return matrix_step(d, ins, sources, [], run, "error")


def _numbers(kind: str, words: Array) -> Array:
    """Decode the two or four values in each word, along a new last axis."""
    words = np.ascontiguousarray(words)[..., None]
    if kind == "e4m3":
        return TINY["e4m3x2"].decode(words.view(np.uint8)).astype(np.float64)
    halves = words.view(np.uint16)
    return (halves.view(np.float16) if kind == "f16" else from_bf16(halves)).astype(np.float64)


# Arrays of operand and accumulator registers have the axes (register, warp, g, t). Each register holds a group of
# neighbouring elements of a row of A or of the accumulator. In lane 4 g + t, the first register holds group t of row g,
# and the second register holds group t of row g + 8. The next two registers hold elements of the same two rows, 8
# columns to the right (16 columns for bytes).


def _rows(kind: str, words: Array) -> Array:
    """Assemble A, (warps, 16, k), from its registers."""
    blocks, warps = len(words) // 2, words.shape[1]
    numbers = _numbers(kind, words).reshape(blocks, 2, warps, 8, 4, -1)
    return numbers.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)


def accumulators(words: Array) -> Array:
    """Assemble C, (warps, 16, columns), from its registers."""
    blocks, warps = len(words) // 4, words.shape[1]
    numbers = np.ascontiguousarray(words).view(np.float32).reshape(blocks, 2, 2, warps, 8, 4)
    return numbers.transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, 8 * blocks)


def of_accumulators(sums: Array) -> Array:
    """Round accumulators to float32, and distribute them to registers."""
    warps, _, columns = sums.shape
    rounded = canonical(sums.astype(np.float32)).reshape(warps, 2, 8, columns // 8, 4, 2)
    return rounded.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, 32 * warps)


_MMA = {f"m16n8k{k}.row.col.f32.{half}.{half}.f32": (k, half) for k in (8, 16) for half in ("f16", "bf16")}
_MMA |= {f"m16n8k{k}.row.col.f32.e4m3.e4m3.f32": (k, "e4m3") for k in (16, 32)}


@effect("mma.sync.aligned")
def _mma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``A @ B + C``.

    Lane 4 g + t holds two elements, 2 t and 2 t + 1, of row g of A and C, and of column g of B. If elements are bytes,
    the lane holds elements 4 t to 4 t + 3 of A and B. NVIDIA documents neither the order of additions nor intermediate
    rounding. The emulator adds the exact products and C in float64, and rounds the sum once.
    """
    if ".".join(parts) not in _MMA:
        raise unknown(ins)
    k, kind = _MMA[".".join(parts)]
    blocks = k // (16 if kind == "e4m3" else 8)
    machine = d.machine

    def run(threads: Array, *registers: Array) -> Array:
        warps = whole_warps(machine, threads)
        words = np.stack([of_each(register, threads) for register in registers])
        # The axes are: register, warp, g, t, and part of the word. Registers run over the columns first, then continue
        # 8 rows further down.
        words = words.reshape(-1, warps, 8, 4)
        a, b, c = np.split(words, [2 * blocks, 3 * blocks])
        b = _numbers(kind, b).transpose(1, 0, 3, 4, 2).reshape(warps, k, 8)
        return of_accumulators(_rows(kind, a) @ b + accumulators(c))

    target, *operands = (operand.items for operand in ins.operands)
    if [len(items) for items in operands] != [2 * blocks, blocks, 4]:
        raise unknown(ins)
    sources = [d.source(item, TYPES["b32"]) for items in operands for item in items]
    return matrix_step(d, ins, sources, [d.target(item, TYPES["f32"]) for item in target], run, "nan")


_WGMMA = re.compile(r"m64n(\d+)(?:k16\.f32\.(f16|bf16)\.(f16|bf16)|k32\.f32\.(e4m3)\.(e4m3))")


@lru_cache(4096)
def _operand_rows(descriptor: int, rows: int) -> Array:
    """Return the shared-memory addresses of the 32 bytes of each row, as two 16-byte pieces: (rows, 2).

    The operand is K-major and has the 128-byte swizzle (PTX ISA, "Matrix-descriptor").
    """
    start, pitch = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 != 1:
        raise NotImplementedError(f"an operand without the 128-byte swizzle: {descriptor:#x}")
    row = np.arange(rows)[:, None]
    addresses = swizzled(start + row // 8 * pitch + row % 8 * 128 + np.array([0, 16]))
    addresses.setflags(write=False)
    return addresses


def swizzled(address: Array, bits: int = 3) -> Array:
    """Apply a swizzle to shared-memory addresses: 128 bytes for 3 ``bits``, 64 bytes for 2, 32 bytes for 1, none for
    0."""
    return address ^ (address >> 7 & (1 << bits) - 1) << 4


@effect("wgmma.mma_async.sync.aligned")
def _wgmma(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``wgmma``: ``A @ B + D`` or ``A @ B``, with A in registers or in shared memory.

    Each of the four warps computes a quarter of the product, independently of the other warps. The emulator stores the
    result at once, but counts the operands' shared memory as being read until the warp has waited for the MMA's group.
    The emulator does not detect if a thread uses registers before the MMA has ended.
    """
    match = _WGMMA.fullmatch(".".join(parts))
    target, a, descriptor, predicate, *signs = ins.operands
    if match is None:
        raise unknown(ins)
    columns, kinds = int(match[1]), [kind for kind in match.groups()[1:] if kind]
    in_registers = isinstance(a, Vec)
    # The last operands are the signs of A and B and, for 16-bit types, a transposition flag for each operand in shared
    # memory.
    wanted = [1, 1] + ([] if kinds[0] == "e4m3" else [0] * (1 if in_registers else 2))
    if kinds[0] != kinds[1] or [sign.value for sign in signs] != wanted:
        raise unknown(ins)
    kind = kinds[0]
    a_words = len(a.items) if in_registers else 0
    machine = d.machine

    def read(threads: Array, parts: list[tuple[int, int, Array]]) -> list[tuple[Array, Array]]:
        """Load rows of an operand from shared memory. Return the rows, and masks of the rows with uninitialised bytes.

        ``threads`` contains one thread per warp. ``parts`` contains, for each warp, its first thread, a descriptor and
        addresses.
        """
        if not parts:
            return []
        readers = np.repeat([thread for thread, _, _ in parts], [address.size for _, _, address in parts])
        address = np.concatenate([address.reshape(-1) for _, _, address in parts])
        address = address + (machine.rank[readers].astype(np.int64) << RANK_SHIFT)  # descriptors lack the CTA's rank
        try:
            words = np.stack(machine.load("shared", readers, address, 4, 4), -1).reshape(-1, 8)
        except Fault as fault:
            place = int(np.searchsorted(threads, readers[fault.position]))
            raise Fault(fault.kind, place, fault.message) from None
        missing = np.zeros(len(words), bool)
        if machine.unwritten is not None:
            missing = np.logical_or.reduce(machine.unwritten).reshape(-1, 2).any(1)
        known: dict[tuple[int, int, int], Array] = {}  # the warps of a warpgroup share an operand
        found, end = [], 0
        for thread, descriptor, address in parts:
            first = int(address[0, 0])
            machine.under_way.product_reads(thread, first & ~1023, len(address) * 128)
            rows = slice(end, end := end + len(address))
            key = int(machine.cta[thread]), descriptor, first
            if key not in known:
                known[key] = _numbers(kind, words[rows]).reshape(len(address), -1)
            found.append((known[key], missing[rows]))
        return found

    def run(threads: Array, accumulates: Array, *registers: Array) -> Array:
        warps = whole_warps(machine, threads)
        descriptors = [of_each(one, threads) for one in registers[: 1 if in_registers else 2]]
        words = np.stack([of_each(register, threads) for register in registers[len(descriptors) :]])
        # The axes are: register, warp, g, t, for lane 4 g + t.
        words = words.reshape(-1, warps, 8, 4)
        products, missing = np.zeros((warps, 16, columns)), np.zeros((warps, 16, columns), bool)
        rows = _rows(kind, words[:a_words]) if in_registers else None
        leaders, starts = threads[::32].tolist(), [one[::32].tolist() for one in descriptors]
        multiplied = [warp for warp in range(warps) if all(one[warp] for one in starts)]
        if rows is not None:
            # If a warp has no descriptor, multiply its A by zeros, so that NaN in A's registers reach the result.
            for warp in set(range(warps)).difference(multiplied):
                products[warp] = rows[warp] @ np.zeros((rows.shape[2], columns))
            lefts = [(rows[warp], np.zeros(16, bool)) for warp in multiplied]
        else:
            quarters = [int(machine.tid[leaders[warp]]) // 32 % 4 * 16 for warp in multiplied]
            lefts = read(
                threads,
                [
                    (leaders[warp], starts[0][warp], _operand_rows(starts[0][warp], 64)[first : first + 16])
                    for warp, first in zip(multiplied, quarters, strict=True)
                ],
            )
        rights = read(threads, [(leaders[w], starts[-1][w], _operand_rows(starts[-1][w], columns)) for w in multiplied])
        for warp, (left, missing_rows), (right, missing_columns) in zip(multiplied, lefts, rights, strict=True):
            products[warp] = left @ right.T
            missing[warp] = missing_rows[:, None] | missing_columns
        machine.unwritten = None
        if missing.any():
            machine.unwritten = [mark != 0 for mark in of_accumulators(missing.astype(np.float64))]
        adds = of_each(accumulates, threads).reshape(warps, 32)[:, :1, None]
        return of_accumulators(products + np.where(adds, accumulators(words[a_words:]), 0.0))

    if len(target.items) != columns // 2 or (in_registers and a_words != 4):
        raise unknown(ins)
    operands = [descriptor] if in_registers else [a, descriptor]
    sources = [
        d.source(predicate, TYPES["pred"]),
        *(d.source(one, TYPES["b64"]) for one in operands),
        *(d.source(item, TYPES["b32"]) for item in (*(a.items if in_registers else ()), *target.items)),
    ]
    return matrix_step(d, ins, sources, [d.target(item, TYPES["f32"]) for item in target.items], run, "nan")


@effect("wgmma.commit_group.sync.aligned")
def _wgmma_commit(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [], d.machine.under_way.commit_products)


@effect("wgmma.wait_group.sync.aligned")
def _wgmma_wait(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    return acts(ins, [], partial(d.machine.under_way.wait_for_products, most=ins.operands[0].value))


@effect("movmatrix.sync.aligned.m8n8.trans.b16")
def _movmatrix(d: Decoder, ins: Instruction, parts: list[str]) -> Step:
    """Decode ``movmatrix``, which transposes a matrix. Lane 4 i + j passes elements 2 j and 2 j + 1 of row i, and
    receives elements 2 j and 2 j + 1 of column i."""
    machine = d.machine

    def run(threads: Array, word: Array) -> list[Array]:
        warps = whole_warps(machine, threads)
        halves = np.ascontiguousarray(of_each(word, threads)).view(np.uint16).reshape(warps, 8, 8)
        return [np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1)]

    target, source = ins.operands
    sources, targets = [d.source(source, TYPES["b32"])], [d.target(target, TYPES["b32"])]
    return matrix_step(d, ins, sources, targets, run, "shuffle")
