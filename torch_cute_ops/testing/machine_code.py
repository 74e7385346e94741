"""Tensor-core instructions of compiled kernels, read from their machine code without a GPU or a disassembler.

NVIDIA does not document the encoding. An instruction has 16 bytes; the low 12 bits name its operation, and higher bits
modify it. The entries of the table were read from the output of nvdisasm 13 with ``-hex``.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Final

INSTRUCTION_BYTES: Final = 16
OPERATION_BITS: Final = 0xFFF
OPERATIONS: Final = {
    **{0x23C: "HMMA", 0x27A: "QMMA", 0x47A: "QMMA.SF", 0x47F: "OMMA"},
    **{0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x9F3: "QGMMA", 0xDF3: "QGMMA"},
}
"""Names of warp-level MMAs of 16 bits, FP8, FP8 with block scales, and FP4 with block scales, and of warpgroup MMAs of
16 bits and FP8, keyed by the operation. A warpgroup MMA has two operations: one for operands in shared memory, and one
for an operand in registers."""
UTC_MMAS: Final = (0x5EA, 0x9EA, 0xDEA)
"""Operations of MMAs of ``tcgen05``, ``UTC*MMA``. The second reads the operand on the M side from tensor memory. The
third is an FP8, FP6 or FP4 MMA with block scales (``kind::mxf8f6f4``)."""
UTC_KINDS: Final = {(0, False): "UTCHMMA", (3, False): "UTCQMMA", (0, True): "UTCOMMA"}
"""Names of ``UTC*MMA`` (16 bits; FP8, FP6 and FP4; FP4 with block scales), keyed by bits 72 and 73 and by bit 63, which
is set if scales are in tensor memory."""


def tensor_core_instructions(cubin: bytes) -> Counter[str]:
    """Count the tensor-core instructions of a cubin by name.

    Raises:
        NotImplementedError: if the table lacks the kind of a ``UTC*MMA`` instruction.
    """
    names = (_name(*instruction) for code in _code_sections(cubin) for instruction in struct.iter_unpack("<QQ", code))
    return Counter(name for name in names if name is not None)


def _name(low: int, high: int) -> str | None:
    """Return the name of an instruction if it multiplies on tensor cores, else None."""
    operation = low & OPERATION_BITS
    if operation not in UTC_MMAS:
        return OPERATIONS.get(operation)
    kind = high >> 8 & 3, bool(low >> 63)
    if kind not in UTC_KINDS:
        raise NotImplementedError(f"UTC*MMA of kind {kind}")
    return UTC_KINDS[kind]


def _code_sections(cubin: bytes) -> Iterator[bytes]:
    """Yield the contents of the sections of an ELF file that contain code: ``.text.`` and a kernel's name."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("expected an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = headers[names][4]
    for name, _type, _flags, _address, offset, length in headers:
        text = cubin[start + name : cubin.index(b"\0", start + name)]
        if text.startswith(b".text."):
            yield cubin[offset : offset + length]
