"""Run a kernel of the DSL: compile it, evaluate its host function, execute the launches.

The host function is what the DSL compiled for the CPU: it computes grid and block, packs the parameters and calls the
CUDA runtime. It is evaluated from its MLIR (LLVM dialect), in a memory of its own.
"""

from __future__ import annotations

import functools
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from ptx_emulator import parser
from ptx_emulator.layout import GlobalMemory, Launch
from ptx_emulator.machine import Machine
from ptx_emulator.parser import Program, parse_all
from ptx_emulator.values import Array
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Dim, TensorArg
from torch_cute_ops.runtime.compiler import key_of, trace_and_compile
from torch_cute_ops.testing import resources
from torch_cute_ops.testing.resources import Resources


@dataclass
class Compiled:
    """A kernel's device programs, by name, the module with its host function, and what ptxas says about the programs;
    nothing where lines are asked for."""

    programs: dict[str, Program]
    ptx: str
    module: Any
    resources: list[Resources]


_compiled: dict[Any, Compiled] = {}


def compile_ptx(kernel: Any, arch: Arch) -> Compiled:
    """Compile once and keep."""
    key = key_of(kernel, arch)
    if key not in _compiled:
        with tempfile.TemporaryDirectory() as folder:

            def keep_ptx(kernel: Any, arch: Arch, options: str = "") -> Any:
                return trace_and_compile(kernel, arch, f"{options} --keep-ptx --dump-dir={folder}")

            if os.environ.get("CUTE_DSL_LINEINFO"):  # which compile_for leaves out
                compiled, found = keep_ptx(kernel, arch), []
            else:
                with mock.patch.object(resources, "trace_and_compile", keep_ptx):
                    compiled, found = resources.compile_for(kernel, arch)
            ptx = compiled.artifacts.PTX
        _compiled[key] = Compiled(programs_of(ptx), ptx, compiled.ir_module, found)
    return _compiled[key]


def forget() -> None:
    """Drop all that was compiled."""
    _compiled.clear()
    _host_functions.clear()
    programs_of.cache_clear()
    parser.forget()


@functools.lru_cache(maxsize=2)
def programs_of(ptx: str) -> dict[str, Program]:
    """The programs, by name. Tests run one edit of PTX after the other, each in several orders of events."""
    return {program.name: program for program in parse_all(ptx)}


def run_kernel(
    kernel: Any,
    arch: Arch,
    *arguments: Any,
    seed: int | None = 0,
    max_steps: int = 1_000_000,
    strict: bool = False,
    lenient: bool = False,
    edit: Callable[[str], str] | None = None,
    written_before: Mapping[int, torch.Tensor] | None = None,
    held: Collection[int] = (),
    starved: Collection[int] = (),
) -> list[Machine]:
    """Execute a kernel's launches on CPU tensors, which get the results.

    Args:
        kernel: has ``config``, ``arguments()`` and ``__call__``, as ``runtime.compiler.Kernel`` says.
        arch: what to compile for.
        arguments: for each of ``kernel.arguments()`` a tensor, a number or ``None``; grid and block are what the host
            function makes of them.
        seed: of the order in which warps and copies proceed; ``None``: warps in step, copies as late as possible.
        max_steps: instructions after which a launch is given up.
        strict: whether only ``bar.warp.sync`` orders memory within a warp; see ``Machine``.
        lenient: for others' kernels; see ``Machine``.
        edit: changes the PTX first, for tests of tests.
        written_before: what the kernel before writes, as late as it can (see ``Machine``), to some arguments, by their
            numbers: tensors like these. What launches of the kernel's own write is then as late for those behind them,
            which may write at once what the one before does not access. ``None``: each starts when the one before has
            ended.
        held: bulk copies of each launch that are as late as they can be; see ``Machine``.
        starved: warps of each launch that are.

    Returns:
        The machine of each launch.

    Raises:
        EmulationError: see ``ptx_emulator.memory``.
        TypeError, ValueError: for arguments that are not as ``kernel.arguments()`` says, and for a launch of no CTAs.
    """
    compiled = compile_ptx(kernel, arch)
    programs = compiled.programs
    if edit:
        programs = programs_of(edit(compiled.ptx))
        for name, program in programs.items():
            program.decoded = compiled.programs[name].decoded
    memory = GlobalMemory()
    leaves, tensors = _flatten(kernel.arguments(), arguments, memory)
    machines: list[Machine] = []
    accessed = None

    started = memory.copies()
    for number, tensor in (written_before or {}).items():
        address, given = tensors[number]
        if (tensor.shape, tensor.stride(), tensor.dtype) != (given.shape, given.stride(), given.dtype):
            raise TypeError(f"argument {number}: written as {tensor.dtype}{tuple(tensor.shape)}")
        contents, _ = _bytes_of(tensor)
        memory.contents(address, len(contents))[:] = contents
    sizes = {name: [param.size for param in program.params] for name, program in programs.items()}
    for name, launch in host_launches(compiled.module, leaves, sizes):
        if 0 in launch.grid:
            raise ValueError(f"{name}: a launch of no CTAs, {launch.grid}, which CUDA refuses")
        # The one before has released its dependents behind its own wait: what was before that is complete.
        complete = memory.copies()
        late = memory.take_back(started) if launch.overlaps and written_before is not None else None
        machine = Machine(
            programs[name], launch, memory, seed, max_steps, strict, lenient, late, accessed, held, starved
        )
        machines.append(machine)
        machine.run()
        started, accessed = complete, machine.accessed
    for address, tensor in tensors.values():
        _copy_back(memory, address, tensor)
    return machines


def _flatten(
    specs: tuple, arguments: tuple, memory: GlobalMemory
) -> tuple[list[list[Any]], dict[int, tuple[int, torch.Tensor]]]:
    """The values that the host function takes for each argument, and where the tensors are, by their numbers."""
    if len(specs) != len(arguments):
        raise TypeError(f"{len(arguments)} arguments, not {len(specs)}")
    leaves: list[list[Any]] = []
    tensors = {}
    dims: dict[Dim, int] = {}
    for i, (spec, value) in enumerate(zip(specs, arguments, strict=True)):
        if (spec is None) != (value is None):
            raise TypeError(f"argument {i}: {value} for {spec}")
        if spec is None:
            continue
        if not isinstance(spec, TensorArg):
            leaves.append([value])
            continue
        sizes, strides = tuple(value.shape), tuple(value.stride())
        if len(sizes) != len(spec.shape) or value.dtype.itemsize != _itemsize(spec.dtype):
            raise TypeError(f"argument {i}: {value.dtype}{sizes} for {spec}")
        dynamic = []
        for wanted, found, extent in zip((*spec.shape, *spec.stride), (*sizes, *strides), sizes * 2, strict=True):
            if isinstance(wanted, Dim):
                if found % wanted.divisibility or dims.setdefault(wanted, found) != found:
                    raise ValueError(f"argument {i}: {wanted.name} is {found}, for {spec}")
                dynamic.append(found)
            elif wanted != found and extent > 1:
                raise ValueError(f"argument {i}: sizes {sizes} and strides {strides} for {spec}")
        contents, accessible = _bytes_of(value)
        address = memory.allocate(f"argument {i}", contents, spec.align, accessible)
        leaves.append([address, *dynamic])
        tensors[i] = address, value
    return leaves, tensors


def _itemsize(dtype: str) -> int:
    import cutlass

    return getattr(cutlass, dtype).width // 8


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _raw(tensor: torch.Tensor) -> Array:
    """The bytes that a tensor spans, shared with it."""
    flat = torch.as_strided(tensor, (_span(tensor) // tensor.dtype.itemsize,), (1,))
    return flat.view(torch.uint8).numpy()


def _of_elements(tensor: torch.Tensor, raw: Array) -> Array:
    """A view of ``raw`` with the bytes of each element."""
    size = tensor.dtype.itemsize
    strides = tuple(stride * size for stride in tensor.stride())
    return np.lib.stride_tricks.as_strided(raw, (*tensor.shape, size), (*strides, 1))


def _bytes_of(tensor: torch.Tensor) -> tuple[Array, Array]:
    """The bytes that a tensor spans, and which of them are its elements'."""
    if tensor.numel() == 0:
        return np.zeros(0, np.uint8), np.zeros(0, bool)
    raw = _raw(tensor)
    accessible = np.zeros(len(raw), bool)
    _of_elements(tensor, accessible)[...] = True
    return raw, accessible


def _copy_back(memory: GlobalMemory, address: int, tensor: torch.Tensor) -> None:
    if tensor.numel():
        raw = _raw(tensor)
        contents = memory.contents(address, len(raw))
        _of_elements(tensor, raw)[...] = _of_elements(tensor, contents)


# The host function


def host_launches(module: Any, leaves: list[list[Any]], sizes: dict[str, list[int]]) -> list[tuple[str, Launch]]:
    """The launches of the host function in ``module``, each with the kernel's name.

    ``leaves`` are the values of each argument but the stream; ``sizes`` are of the kernels' parameters.
    """
    host = _Host(sizes)
    host.run(_host_function(module), leaves)
    return host.launches


@dataclass
class _Operation:
    """An operation of the host function, read from MLIR once, because that takes longer than to evaluate it. Values are
    known by their hash, which is an address: the DSL overloads their comparison. ``types`` are the operands'."""

    name: str
    operands: list[int]
    types: list[Any]
    result: int | None
    type: Any
    attributes: Any
    successors: list[int]


@dataclass
class _Block:
    """Operations that follow each other; ``types`` are the arguments'."""

    arguments: list[int]
    types: list[Any]
    operations: list[_Operation]


_host_functions: dict[Any, list[_Block]] = {}


def _host_function(module: Any) -> list[_Block]:
    """The function that others wrap: _mlir_ciface_<name> calls it."""
    if module not in _host_functions:
        functions = {}
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and len(op.operation.regions[0].blocks):
                functions[op.operation.attributes["sym_name"].value] = op.operation
        (name,) = [name for name in functions if f"_mlir_ciface_{name}" in functions]
        blocks = list(functions[name].regions[0].blocks)
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
    """Size and alignment of an LLVM type."""
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
    """Offset and type of a member of a struct or array."""
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
    """Evaluates one function. Integers are signed; a struct is its bytes."""

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
        """A scalar, or a struct whose members, in order, are ``parts``."""
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
        if text.startswith(("!llvm.struct", "!llvm.array")):
            return data
        return self._wrap(type, int.from_bytes(data, "little"))

    @staticmethod
    def _bits(type: Any) -> int:
        text = str(type)
        return 64 if text.startswith("!llvm.ptr") else int(text[1:])

    def _wrap(self, type: Any, value: int) -> int:
        """As a signed integer; booleans and pointers as they are."""
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
        """Evaluate one operation; the result of a branch is the number of a block, and which values it is given."""
        name, attributes, type = op.name, op.attributes, op.type
        operands = [values.get(operand) for operand in op.operands]
        result: Any = None
        if name in _BINARY:
            result = self._wrap(type, _BINARY[name](*operands))
        elif name in _UNSIGNED:
            mask = (1 << self._bits(type)) - 1
            result = self._wrap(type, _UNSIGNED[name](*(x & mask for x in operands)))
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
                # A kernel's handle, which the host function takes from here, is its address here.
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
        """Note a launch; what CUDA returns."""
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
