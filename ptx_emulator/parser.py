"""Parser of PTX text: entry functions with their parameters, variables, registers, labels and instructions."""

import bisect
import re
import struct
from dataclasses import dataclass, field
from typing import Any

WIDTHS = {"pred": 1} | {
    f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64) if (kind, bits) != ("f", 8)
}
"""Number of bits of each type that variables and registers may have."""


@dataclass(frozen=True)
class Reg:
    """A register. Its ``name`` is unique in the program, even if several scopes declare the same name."""

    name: str
    width: int
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A constant: an integer, or the bits of a float of ``float_width`` bits."""

    value: int
    float_width: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, a label or a special register. The name ``_`` stands for a result that is discarded."""

    name: str


@dataclass(frozen=True)
class Vec:
    """A vector operand ``{a, b}``, or a pair of operands ``a|b``."""

    items: tuple["Operand", ...]


@dataclass(frozen=True)
class Mem:
    """A memory operand ``[base + offset]``."""

    base: "Operand"
    offset: int


Operand = Reg | Imm | Symbol | Vec | Mem


@dataclass
class Instruction:
    """One instruction.

    ``source`` is the kernel's source line if the PTX contains line information. Instructions with the same text and
    registers share one ``statement`` object, even if they belong to different programs of a kernel.
    """

    opcode: str
    operands: list[Operand]
    guard: Reg | None
    text: str
    line: int
    source: str = ""
    statement: Any = None

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" + (f" ({self.source})" if self.source else "")


@dataclass
class Variable:
    """A variable in a state space. ``size`` is None if the launch determines it (dynamic shared memory)."""

    name: str
    size: int | None
    align: int
    initial: bytes = b""


@dataclass
class Program:
    """One entry function: its parameters, variables, registers, labels and instructions."""

    name: str
    params: list[Variable]
    variables: dict[str, list[Variable]] = field(default_factory=dict)  # variables by state space
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    decoded: Any = None  # cache of decoders
    flows: dict[tuple, Any] = field(default_factory=dict)  # cache of ``blocks.find_flow``


_VARIABLE = re.compile(
    r"\.(?P<space>shared|local|global|const|param)(?:\s+\.align\s+(?P<align>\d+))?(?:\s+\.ptr(?:\s+\.\w+)?)?"
    r"(?:\s+\.align\s+\d+)?\s+\.(?P<type>\w+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\d*\])*)"
    r"(?:\s*=\s*\{(?P<initial>[^}]*)\})?"
)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")


def parse(text: str) -> Program:
    """Parse a module that contains a single entry function, and return it."""
    (program,) = parse_all(text)
    return program


def parse_all(text: str) -> list[Program]:
    """Parse a module, and return its entry functions.

    Raises:
        ValueError: If the module contains no entry function.
        NotImplementedError: If the module contains device functions.
    """
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    entries = []
    at, outside = 0, ""
    while (entry := _ENTRY.search(text, at)) is not None:
        start = text.index("{", entry.end())
        outside += text[at : entry.start()]
        at = _closing(text, start)
        entries.append((entry, start + 1, at))
    outside += text[at:]
    if not entries:
        raise ValueError("no .entry in the PTX")
    if re.search(r"\.func\b", outside):
        raise NotImplementedError("device functions")
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    programs = []
    for entry, start, end in entries:
        params = [_variable(match) for match in _VARIABLE.finditer(entry[2] or "")]
        program = Program(entry[1], params)
        # Debug sections come last and contain no variables. Remove them, because their text looks like declarations.
        for match in _VARIABLE.finditer(re.split(r"\.section\b", outside)[0]):
            program.variables.setdefault(match["space"], []).append(_variable(match))
        _Body(program, files).parse(text, start, end)
        programs.append(program)
    return programs


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("unbalanced braces")


def _variable(match: re.Match) -> Variable:
    element = WIDTHS[match["type"]] // 8
    dims = re.findall(r"\[(\d*)\]", match["dims"] or "")
    count: int | None = 1
    for dim in dims:
        count = None if dim == "" or count is None else count * int(dim)
    size = None if count is None else count * element
    initial = b""
    if match["initial"]:
        values = [int(value, 0) for value in match["initial"].split(",")]
        initial = b"".join((value % (1 << 8 * element)).to_bytes(element, "little") for value in values)
    return Variable(match["name"], size, int(match["align"] or element), initial)


_Statement = tuple[str, list[Operand], Reg | None, str]
_statements: dict[tuple, dict[str, _Statement]] = {}
"""Cache of parsed statements (opcode, operands, guard, text). Programs that differ in few statements share all others.
The operands depend only on the key: the program's name, and the registers that each open scope declares."""


def forget() -> None:
    """Clear the cache of parsed statements."""
    _statements.clear()


class _Body:
    """Parser of a function's body. Scopes may be nested. Each scope renames the registers and labels that it
    declares."""

    def __init__(self, program: Program, files: dict[str, str]):
        self.program = program
        self.files = files
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_ids = [0]
        self.scope_count = 0
        self.declared: list[tuple] = [(program.name,)]  # program name, then the names that each open scope declares
        self.known: dict[str, _Statement] = {}
        self.vectors: dict[str, list[str]] = {}  # names of the registers of each vector register
        self.source = ""
        self.branches: list[tuple[Instruction, list[dict[str, str]]]] = []

    def parse(self, text: str, at: int, end: int) -> None:
        newlines = [match.start() for match in re.finditer("\n", text)]
        token = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$%]+)\s*:(?!:)|(?P<loc>\.(?:loc|file)\b[^\n]*)|;)")
        while True:
            match = token.match(text, at)
            if match is None:
                stop = text.find(";", at, end)
                if stop < 0:
                    break
                statement = text[at:stop]
                first = stop - len(statement.lstrip())
                self._statement(" ".join(statement.split()), bisect.bisect(newlines, first) + 1)
                at = stop + 1
                continue
            if match.start() >= end or match.end() > end:
                break
            if match["brace"] == "{":
                self.scope_count += 1
                self.scopes.append({})
                self.scope_ids.append(self.scope_count)
                self.declared.append(())
            elif match["brace"] == "}":
                self.scopes.pop()
                self.scope_ids.pop()
                if self.declared.pop():
                    self._look_up_known()
            elif match["label"]:
                name = self._declare(match["label"])
                self.program.labels[name] = len(self.program.instructions)
            elif match["loc"]:
                self._location(match["loc"])
            at = match.end()
        self._resolve_labels()

    def _location(self, text: str) -> None:
        numbers = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if numbers:
            name = self.files.get(numbers[1], numbers[1])
            self.source = f"{name.rsplit('/', 1)[-1]}:{numbers[2]}"

    def _declare(self, name: str) -> str:
        unique = name if len(self.scopes) == 1 else f"{name}@{self.scope_ids[-1]}"
        self.scopes[-1][name] = unique
        return unique

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            size, kind, names = re.fullmatch(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", text).groups()
            for name in names.split(","):
                many = re.fullmatch(r"([\w$%]+)<(\d+)>", name.strip())
                each = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
                for register in each:
                    members = [f"{register}.{member}" for member in "xyzw"[: int(size)]] if size else [register]
                    for member in members:
                        self.program.registers[self._declare(member)] = WIDTHS[kind]
                    if size:
                        self.vectors[self._declare(register)] = members
            self.declared[-1] += (self.scope_ids[-1], text)
            self._look_up_known()
        elif text.startswith("."):
            match = _VARIABLE.fullmatch(text)
            if match is not None:
                self.program.variables.setdefault(match["space"], []).append(_variable(match))
            elif not text.startswith(".pragma"):
                raise NotImplementedError(text)
        else:
            self._instruction(text, line)

    def _look_up_known(self) -> None:
        key = tuple(declared for declared in self.declared if declared)
        self.known = _statements.setdefault(key, {})

    def _instruction(self, text: str, line: int) -> None:
        if text not in self.known:
            match = re.fullmatch(r"(?:@(!?[\w$%]+)\s+)?([\w.:]+)\s*(.*)", text)
            if match is None:
                raise NotImplementedError(text)
            guard, opcode, rest = match.groups()
            operands = [self._operand(part) for part in _split(rest)] if rest else []
            register = self._operand(guard) if guard else None
            self.known[text] = opcode, operands, register, text.replace(f"{self.program.name}_param", "param")
        statement = opcode, operands, register, short = self.known[text]
        instruction = Instruction(opcode, [*operands], register, short, line, self.source, statement)
        self.program.instructions.append(instruction)
        if opcode.split(".")[0] == "bra":
            # The label may follow the branch, so record the open scopes now and look up the label in them at the end.
            self.branches.append((instruction, list(self.scopes)))

    def _resolve_labels(self) -> None:
        for instruction, scopes in self.branches:
            name = instruction.operands[0].name
            unique = next(scope[name] for scope in reversed(scopes) if name in scope)
            instruction.operands[0] = Imm(self.program.labels[unique])

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vec(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            address, *coordinates = _split(text[1:-1])
            if coordinates:
                # The operand consists of a tensor map and the coordinates of a box.
                return Vec((self._address(address), *self._operand(coordinates[0]).items))
            return self._address(address)
        if "|" in text:
            return Vec(tuple(self._operand(part) for part in text.split("|")))
        number = _number(text)
        if number is not None:
            return number
        name = text.lstrip("!")
        for scope in reversed(self.scopes):
            if name in scope and scope[name] in self.program.registers:
                return Reg(scope[name], self.program.registers[scope[name]], text.startswith("!"))
            if name in scope and scope[name] in self.vectors:
                return Vec(tuple(self._operand(member) for member in self.vectors[scope[name]]))
        return Symbol(name)

    def _address(self, text: str) -> Mem:
        match = re.fullmatch(r"\s*([\w$%.]+)\s*(?:\+\s*(-?\w+)|(-\s*\w+))?\s*", text)
        if match is None:
            raise NotImplementedError(f"address [{text}]")
        offset = match[2] or (match[3] or "0").replace(" ", "")
        base = self._operand(match[1])
        if isinstance(base, Imm):
            return Mem(Imm(0), base.value + int(offset, 0))
        return Mem(base, int(offset, 0))


def _split(text: str) -> list[str]:
    """Split a text at the commas that are outside of brackets."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",")]
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _number(text: str) -> Imm | None:
    if not text[:1].isdigit() and text[:1] != "-":
        return None
    match = re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text)
    if match:
        return Imm(int(match[2], 16), 32 if match[1] in "fF" else 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        text = text.rstrip("U")
        negative, digits = text.startswith("-"), text.lstrip("-")
        octal = re.fullmatch(r"0[0-7]+", digits)
        value = int(digits, 8) if octal else int(digits, 0)
        return Imm(-value if negative else value)
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None
