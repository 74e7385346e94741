"""Evaluate the host function of a kernel that CuTe DSL compiled, to find its launches and their parameters.

The DSL compiles the host function for the CPU. The host function computes grid and block, packs the parameters, and
calls the CUDA runtime. The emulator evaluates the function's MLIR (LLVM dialect) in a separate memory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptx_emulator.layout import Launch


def host_launches(module: Any, leaves: list[list[Any]], sizes: dict[str, list[int]]) -> list[tuple[str, Launch]]:
    """Return the launches of the host function in ``module``, as pairs of the kernel's name and a ``Launch``.

    Args:
        module: MLIR module of a compiled kernel.
        leaves: Values of each argument except the stream: a number, or an address with its dynamic sizes and strides.
        sizes: Sizes of each kernel's parameters in bytes, keyed by the kernel's name.
    """
    host = _Host(sizes)
    host.run(_host_function(module), leaves)
    return host.launches


@dataclass
class _Operation:
    """An operation of the host function, read from MLIR only once, because reading takes longer than evaluating.

    A value is identified by its hash (its address in MLIR), because the DSL overloads the comparison of values.
    ``types`` are the types of the operands.
    """

    name: str
    operands: list[int]
    types: list[Any]
    result: int | None
    type: Any
    attributes: Any
    successors: list[int]


@dataclass
class _Block:
    """A basic block. ``types`` are the types of its arguments."""

    arguments: list[int]
    types: list[Any]
    operations: list[_Operation]


_host_functions: dict[Any, list[_Block]] = {}


def forget() -> None:
    """Clear the cache of host functions that were read from MLIR."""
    _host_functions.clear()


def _host_function(module: Any) -> list[_Block]:
    """Return the basic blocks of the host function, which is the function that ``_mlir_ciface_<name>`` calls."""
    if module not in _host_functions:
        functions = {}
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks):
                functions[op.operation.attributes["sym_name"].value] = op.operation
        (name,) = [name for name in functions if f"_mlir_ciface_{name}" in functions]
        blocks = list(functions[name].regions[0].blocks)
        with module.context:  # reading a vector value creates DSL objects, which need a current context
            _host_functions[module] = [
                _Block(
                    [hash(argument) for argument in block.arguments],
                    [argument.type for argument in block.arguments],
                    [_read_operation(op.operation, blocks) for op in block.operations],
                )
                for block in blocks
            ]
    return _host_functions[module]


def _read_operation(op: Any, blocks: list[Any]) -> _Operation:
    operands, results = list(op.operands), list(op.results)
    has_result = len(results) == 1
    return _Operation(
        op.name.removeprefix("llvm."),
        [hash(operand) for operand in operands],
        [operand.type for operand in operands],
        hash(results[0]) if has_result else None,
        results[0].type if has_result else None,
        op.attributes,
        [blocks.index(block) for block in op.successors],
    )


def layout_of(type: Any) -> tuple[int, int]:
    """Return the size and the alignment of an LLVM type, in bytes."""
    text = str(type)
    if text.startswith("!llvm.ptr"):
        return 8, 8
    if text.startswith("!llvm.struct"):
        size, align = 0, 1
        for member in type.body:
            member_size, member_align = layout_of(member)
            size = -(-size // member_align) * member_align + member_size
            align = max(align, member_align)
        return -(-size // align) * align, align
    if text.startswith("!llvm.array"):
        count, element = _array(type)
        size, align = layout_of(element)
        return count * size, align
    if text.startswith("vector"):
        count, bits = re.fullmatch(r"vector<(\d+)x[if](\d+)>", text).groups()
        size = int(count) * int(bits) // 8
        return size, size
    bits = int(text.lstrip("if"))
    size = -(-bits // 8)
    return size, size


def _array(type: Any) -> tuple[int, Any]:
    from cutlass._mlir import ir

    text = str(type).removeprefix("!llvm.array<").removesuffix(">")
    count, element = text.split(" x ", 1)
    prefix = "!llvm." if element.startswith(("struct", "array", "ptr")) else ""
    return int(count), ir.Type.parse(prefix + element, type.context)


def _member(type: Any, index: int) -> tuple[int, Any]:
    """Return the offset and the type of a member of a struct or array."""
    if str(type).startswith("!llvm.array"):
        element = _array(type)[1]
        return index * layout_of(element)[0], element
    offset = 0
    for i, member in enumerate(type.body):
        size, align = layout_of(member)
        offset = -(-offset // align) * align
        if i == index:
            return offset, member
        offset += size
    raise IndexError(index)


_COMPARE: list[Callable[[int, int], bool]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
]
_CLUSTER_ATTRIBUTE = 4  # cudaLaunchAttributeClusterDimension
_OVERLAP_ATTRIBUTE = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
_INVALID_CONFIGURATION = 9  # cudaErrorInvalidConfiguration
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "ashr": lambda a, b: a >> b,
    "sdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "srem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "intr.smax": max,
    "intr.smin": min,
}
_UNSIGNED: dict[str, Callable[[int, int], int]] = {
    "udiv": lambda a, b: a // b,
    "urem": lambda a, b: a % b,
    "lshr": lambda a, b: a >> b,
    "intr.umax": max,
    "intr.umin": min,
}


class _Host:
    """Evaluator of one host function. Integers are signed. Structs are represented by their bytes."""

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.sizes = sizes
        self.memory = bytearray(64)
        self.globals: dict[str, int] = {}
        self.kernels: dict[int, str] = {}
        self.launches: list[tuple[str, Launch]] = []

    def run(self, blocks: list[_Block], leaves: list[list[Any]]) -> None:
        block = blocks[0]
        *parameters, stream = block.arguments
        if len(parameters) != len(leaves):
            raise TypeError(f"the host function takes {len(parameters)} arguments, not {len(leaves)}")
        values: dict[int, Any] = {stream: 0}
        for parameter, type, parts in zip(parameters, block.types, leaves, strict=False):
            values[parameter] = self._argument(type, parts)
        while True:
            for op in block.operations:
                following = self._evaluate(op, values)
                if following is not None:
                    number, passed = following
                    block = blocks[number]
                    values.update(zip(block.arguments, passed, strict=True))
                    break
            else:
                return

    def _argument(self, type: Any, parts: list[Any]) -> Any:
        """Build an argument of the host function: a scalar, or the bytes of a struct with the members ``parts``."""
        if not str(type).startswith("!llvm.struct"):
            (value,) = parts
            return value
        offsets: list[tuple[int, Any]] = []

        def walk(type: Any, start: int) -> None:
            if str(type).startswith("!llvm.struct"):
                for i in range(len(type.body)):
                    offset, member = _member(type, i)
                    walk(member, start + offset)
            else:
                offsets.append((start, type))

        walk(type, 0)
        if len(offsets) != len(parts):
            raise TypeError(f"{type} takes {len(offsets)} values, not {parts}")
        data = bytearray(layout_of(type)[0])
        for (offset, member), value in zip(offsets, parts, strict=True):
            encoded = self._encode(member, value)
            data[offset : offset + len(encoded)] = encoded
        return bytes(data)

    @staticmethod
    def _encode(type: Any, value: Any) -> bytes:
        text = str(type)
        if text in ("f32", "f64"):
            return struct.pack("<f" if text == "f32" else "<d", value)
        if isinstance(value, bytes):
            return value
        size = layout_of(type)[0]
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")

    def _decode(self, type: Any, data: bytes) -> Any:
        text = str(type)
        if text in ("f32", "f64"):
            return struct.unpack("<f" if text == "f32" else "<d", data)[0]
        if text.startswith(("!llvm.struct", "!llvm.array", "vector")):
            return data
        return self._wrap(type, int.from_bytes(data, "little"))

    @staticmethod
    def _bits(type: Any) -> int:
        text = str(type)
        return 64 if text.startswith("!llvm.ptr") else int(text[1:])

    def _wrap(self, type: Any, value: int) -> int:
        """Return ``value`` as a signed integer. Booleans and pointers stay unsigned."""
        bits = self._bits(type)
        value &= (1 << bits) - 1
        if bits == 1 or str(type).startswith("!llvm.ptr"):
            return value
        return value - (1 << bits) if value >> (bits - 1) else value

    def _allocate(self, size: int) -> int:
        start = -(-len(self.memory) // 16) * 16
        self.memory.extend(bytes(start + size - len(self.memory)))
        return start

    def _read(self, address: int, size: int) -> bytes:
        if address <= 0 or address + size > len(self.memory):
            raise IndexError(f"host address {address:#x}")
        return bytes(self.memory[address : address + size])

    def _evaluate(self, op: _Operation, values: dict[int, Any]) -> tuple[int, list[Any]] | None:
        """Evaluate one operation. For a branch, return the next block's number and the values of its arguments."""
        name, attributes, type = op.name, op.attributes, op.type
        operands = [values.get(operand) for operand in op.operands]
        result: Any = None
        if name in _BINARY:
            result = self._wrap(type, _BINARY[name](*operands))
        elif name in _UNSIGNED:
            mask = (1 << self._bits(type)) - 1
            result = self._wrap(type, _UNSIGNED[name](*(x & mask for x in operands)))
        elif name == "intr.ctlz":
            bits = self._bits(type)
            result = bits - (operands[0] & ((1 << bits) - 1)).bit_length()
        elif name == "icmp":
            result = self._compare(attributes["predicate"].value, op, *operands)
        elif name == "select":
            result = operands[1] if operands[0] else operands[2]
        elif name in ("zext", "ptrtoint", "inttoptr"):
            result = self._wrap(type, operands[0] & ((1 << self._bits(op.types[0])) - 1))
        elif name in ("sext", "trunc"):
            sign = op.types[0]
            value = -operands[0] if self._bits(sign) == 1 and name == "sext" else operands[0]
            result = self._wrap(type, value)
        elif name == "mlir.constant":
            result = self._constant(type, attributes["value"])
        elif name in ("mlir.zero", "mlir.undef", "mlir.poison"):
            result = self._decode(type, bytes(layout_of(type)[0]))
        elif name == "mlir.addressof":
            symbol = str(attributes["global_name"])
            if symbol not in self.globals:
                address = self.globals[symbol] = self._allocate(256)
                # The host function loads the kernel's handle from this address. Store the address itself as the handle.
                kernel = symbol.strip('@"').removeprefix("kernels_")
                if kernel in self.sizes:
                    self.kernels[address] = kernel
                    self.memory[address : address + 8] = struct.pack("<Q", address)
            result = self.globals[symbol]
        elif name == "alloca":
            result = self._allocate(int(operands[0]) * layout_of(attributes["elem_type"].value)[0])
        elif name == "getelementptr":
            result = self._element(op, operands)
        elif name == "load":
            result = self._decode(type, self._read(operands[0], layout_of(type)[0]))
        elif name == "store":
            data = self._encode(op.types[0], operands[0])
            self._read(operands[1], len(data))
            self.memory[operands[1] : operands[1] + len(data)] = data
        elif name == "extractvalue":
            result = self._extract(op.types[0], operands[0], list(attributes["position"]))
        elif name == "insertvalue":
            result = self._insert(op.types[0], *operands, list(attributes["position"]))
        elif name == "br":
            return op.successors[0], operands
        elif name == "cond_br":
            sizes = list(attributes["operandSegmentSizes"])
            taken = operands[1 : 1 + sizes[1]] if operands[0] else operands[1 + sizes[1] :]
            return op.successors[0 if operands[0] else 1], taken
        elif name == "call":
            result = self._call(attributes["callee"].value, operands)
        elif name != "return":
            raise NotImplementedError(f"host operation llvm.{name}")
        if type is not None:
            values[op.result] = result
        return None

    def _compare(self, predicate: int, op: Any, a: int, b: int) -> bool:
        if predicate > 5:
            mask = (1 << self._bits(op.types[0])) - 1
            return _COMPARE[predicate - 4](a & mask, b & mask)
        return _COMPARE[predicate](a, b)

    def _constant(self, type: Any, attribute: Any) -> Any:
        text = str(type)
        if text.startswith("!llvm.array"):
            data = attribute.value.encode("latin-1")
            return data.ljust(layout_of(type)[0], b"\0")
        if text.startswith("vector"):
            size = layout_of(type)[0] // len(attribute)
            return b"".join(int(value).to_bytes(size, "little", signed=True) for value in attribute)
        value = attribute.value
        return value if text in ("f32", "f64") else self._wrap(type, int(value))

    def _element(self, op: Any, operands: list[Any]) -> int:
        dynamic = iter(operands[1:])
        marker = -(1 << 31)
        indices = [next(dynamic) if i == marker else i for i in op.attributes["rawConstantIndices"]]
        type = op.attributes["elem_type"].value
        address = operands[0] + indices[0] * layout_of(type)[0]
        for index in indices[1:]:
            offset, type = _member(type, index)
            address += offset
        return address

    def _extract(self, type: Any, data: bytes, position: list[int]) -> Any:
        start = 0
        for index in position:
            offset, type = _member(type, index)
            start += offset
        return self._decode(type, data[start : start + layout_of(type)[0]])

    def _insert(self, type: Any, data: bytes, value: Any, position: list[int]) -> bytes:
        start = 0
        for index in position:
            offset, type = _member(type, index)
            start += offset
        encoded = self._encode(type, value)
        return data[:start] + encoded + data[start + len(encoded) :]

    def _call(self, callee: str, operands: list[Any]) -> int:
        """Evaluate a call of the CUDA runtime: record a launch, and return CUDA's status."""
        if callee != "_cudaLaunchKernelEx":
            raise NotImplementedError(f"host call of {callee}")
        config, handle, arguments = operands
        kernel = self.kernels[handle]
        sizes = self.sizes[kernel]
        words = struct.unpack("<6IQ", self._read(config, 32))
        attributes, count = struct.unpack("<QI", self._read(config + 40, 12))
        cluster, overlaps = (1, 1, 1), False
        for i in range(count):
            (number,) = struct.unpack("<I", self._read(attributes + 72 * i, 4))
            if number == _CLUSTER_ATTRIBUTE:
                cluster = struct.unpack("<3I", self._read(attributes + 72 * i + 8, 12))
            elif number == _OVERLAP_ATTRIBUTE:
                overlaps = struct.unpack("<i", self._read(attributes + 72 * i + 8, 4)) != (0,)
        pointers = struct.unpack(f"<{len(sizes)}Q", self._read(arguments, 8 * len(sizes)))
        params = [self._read(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        self.launches.append((kernel, Launch(words[:3], words[3:6], params, cluster, words[6], overlaps)))
        return _INVALID_CONFIGURATION if 0 in words[:3] else 0
