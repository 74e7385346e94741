"""What the benchmarks of row-wise ops share: sizes, marks and peers of (M, H) problems in bfloat16, NVFP4, 128x4."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from . import peers
from .case import Benchmark, Case, Mark, Row, Tensors, Variant, at_least, at_most

WIDTHS = (1536, 2048, 4096, 5120, 7168, 8192, 16384, 32768)
MARK_WIDTHS = (2048, 4096, 7168, 8192, 16384, 32768)
DECODE_WIDTH = 7168
LARGE = 2**26
"""M·H from which the copy mark applies."""
DTYPE = torch.bfloat16
EPS = 1e-6
POISON = 0x5A


STATIC = {(16384, 8192): "static", (32, DECODE_WIDTH): "static"}
"""Sizes (M, H) for which Inductor compiles the very shape: the one its mark names, and one decode step."""


def quick_cases() -> list[Case]:
    """The cases that the marks name, each row length's M·H ≥ 2^26 and four times that, and a few decode sizes."""
    sizes = [(m, h) for h in MARK_WIDTHS for m in (math.ceil(LARGE / h), 4 * math.ceil(LARGE / h))]
    sizes += [(m, DECODE_WIDTH) for m in (1, 8, 32, 128)]
    return _ordered(set(sizes) | set(STATIC), STATIC)


def full_cases() -> list[Case]:
    """M = 1 to 65,536 by powers of two at every width, and every quick case. Beside the static sizes Inductor compiles
    once per width, with symbolic rows, for three values of M (a fourth, of one row tile, would compile once more)."""
    sizes = {(2**k, h) for k in range(17) for h in WIDTHS}
    sizes |= {(case["M"], case["H"]) for case in quick_cases()}
    return _ordered(sizes, {(m, h): "dynamic" for m in (256, 2048, 16384) for h in WIDTHS} | STATIC)


def _ordered(sizes: set[tuple[int, int]], compiled: Mapping[tuple[int, int], str]) -> list[Case]:
    """By width, the largest M first: a symbolic compile then tunes itself at the largest M it serves."""
    ordered = sorted(sizes, key=lambda size: (size[1], -size[0]))
    return [Case({"M": m, "H": h}, compiled.get((m, h), "")) for m, h in ordered]


def ratio(row: Row, over: str, under: str) -> float | None:
    """Time of variant `over` / time of variant `under` in one row."""
    variants = row["variants"]
    return variants[over]["us"] / variants[under]["us"] if over in variants and under in variants else None


def copy_marks(rows: Sequence[Row], goal: float = 0.92) -> list[Mark]:
    """Per width: the smallest fraction of the same-bytes copy bandwidth over rows with M·H ≥ 2^26."""
    marks = []
    for width in MARK_WIDTHS:
        large = [r for r in rows if r["sizes"]["H"] == width and r["sizes"]["M"] * width >= LARGE]
        measured = [r["variants"]["ours"]["of_copy"] for r in large if "ours" in r["variants"]]
        marks.append(at_least(f"H={width}, M·H ≥ 2^26: of copy", min(measured, default=None), goal))
    return marks


def decode_mark(rows: Sequence[Row], goal: float = 1.15) -> Mark:
    """The largest time over QuACK's plain rmsnorm, over M ≤ 128 at H = 7168."""
    decode = [r for r in rows if r["sizes"]["H"] == DECODE_WIDTH and r["sizes"]["M"] <= 128]
    ratios = [x for x in (ratio(row, "ours", "quack") for row in decode) if x is not None]
    name = f"decode, M ≤ 128, H={DECODE_WIDTH}: time over QuACK's rmsnorm"
    return at_most(name, max(ratios, default=None), goal, " ×")


def inductor_mark(rows: Sequence[Row], goal: float = 5.0) -> Mark:
    """How many times faster than the Inductor composition at 16384 × 8192."""
    found = [ratio(r, "inductor", "ours") for r in rows if r["sizes"] == {"M": 16384, "H": 8192}]
    return at_least("16384×8192: faster than Inductor", found[0] if found else None, goal, " ×")


def scale_shape_128x4(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the 128x4 scale tensor of a (rows, columns) NVFP4 tensor."""
    return math.ceil(rows / 128) * 128, math.ceil(columns / 16 / 4) * 4


class RowBenchmark(Benchmark):
    """An (M, H) op: subclasses say the bytes, the call, the composition and, where it differs, the tensors."""

    settings: ClassVar = {"dtype": "bfloat16", "format": "NVFP4", "scale layout": "128x4", "global scale": "none"}
    tolerance = 1e-3
    weighted = True
    """Whether the op takes a weight (H,) in the input dtype."""
    has_norm = False
    """Whether the op also returns the normalised rows."""

    @abstractmethod
    def run(self, tensors: Tensors) -> None:
        """Our op on one buffer set, into its preallocated outputs."""

    @abstractmethod
    def composition(self) -> Callable[..., Any]:
        """The torch composition: a function of `arguments`."""

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """What the composition is called with."""
        return (tensors["input"], tensors["weight"], EPS) if self.weighted else (tensors["input"],)

    def outputs(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(tensors[name] for name in ("y", "scale", "norm") if name in tensors)

    def cases(self, sizes: str) -> list[Case]:
        return quick_cases() if sizes == "quick" else full_cases()

    def smallest(self, case: Case) -> Case:
        return Case({**case.sizes, "M": 1})

    def panel(self, case: Case) -> str:
        return f"H = {case['H']:,}"

    def make_set(self, case: Case, device: torch.device) -> Tensors:
        m, h = case["M"], case["H"]
        tensors = {"input": torch.randn(m, h, dtype=DTYPE, device=device)}
        if self.weighted:
            tensors["weight"] = torch.randn(h, dtype=DTYPE, device=device)
        tensors["y"] = torch.full((m, h // 2), POISON, dtype=torch.uint8, device=device)
        scale = torch.full(scale_shape_128x4(m, h), POISON, dtype=torch.uint8, device=device)
        tensors["scale"] = scale.view(torch.float8_e4m3fn)
        if self.has_norm:
            tensors["norm"] = torch.full((m, h), float("nan"), dtype=DTYPE, device=device)
        return tensors

    def ours(self, case: Case, sets: Sequence[Tensors]) -> Variant:
        def call(i: int) -> tuple[torch.Tensor, ...]:
            self.run(sets[i])
            return self.outputs(sets[i])

        return Variant(call, self.bytes_moved(case))

    def peer(self, name: str, case: Case, sets: Sequence[Tensors]) -> Variant | str:
        if name == "quack":
            norm = peers.quack_rmsnorm()
            if isinstance(norm, str):
                return norm
            m, h = case["M"], case["H"]
            size = DTYPE.itemsize * (2 * m * h + h)
            return Variant(lambda i: norm(sets[i]["input"], sets[i]["weight"], EPS), size, "norm only", checked=False)
        compiled = peers.inductor(self.composition(), case, [tensors["input"] for tensors in sets])
        if isinstance(compiled, str):
            return compiled
        return Variant(lambda i: compiled(*self.arguments(sets[i])), self.bytes_moved(case), case.inductor)

    def expected(self, case: Case, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(self.composition()(*self.arguments(tensors)))

    def marks(self, rows: Sequence[Row]) -> list[Mark]:
        marks = copy_marks(rows)
        if "quack" in self.peers:
            marks.append(decode_mark(rows))
        return [*marks, inductor_mark(rows)]
