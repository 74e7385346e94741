"""Cases of FP4 GEMMs by mma.sync and by wgmma, dense and over experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from support.epilogues import epilogues
from support.kernel_grid.common import (
    ARCHS,
    BF16,
    FP16,
    FP32,
    PER_COLUMN,
    KernelCase,
    epilogue_id,
    fp4_gemm_id,
    short,
    together,
)
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.experts import USUAL_EXPERTS
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.kernels import fp4_experts, fp4_gated_experts, fp4_mma, fp4_wgmma
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import FP4Operands, PrologueQuant
from torch_cute_ops.runtime.arch import ARCHS as GPU_ARCHS

DESKTOP = ("sm_120a", "sm_121a")

WARPGROUP_KINDS: tuple[tuple[Any, ...], ...] = (
    (FP16, NVFP4, "linear", None),
    (BF16, NVFP4, "128x4", None),
    (FP16, NVFP4, "128x4", "8x4"),
    (FP16, NVFP4, "linear", "linear"),
    (BF16, MXFP4, "128x4", None),
    (BF16, MXFP4, "128x4", "128x4"),
)
"""Operands that sm_90a supports: dtype of the MMAs, format, scale layouts of the weight and of FP4 activations."""


@dataclass(frozen=True)
class MmaCase(KernelCase):
    """An FP4 GEMM by mma.sync and the architecture to compile it for.

    The attributes are arguments of ``fp4_mma.plan``, with layouts given by name.
    """

    dtype: torch.dtype
    format: FP4Format
    layout: str
    tile_m: int
    split_k: int
    epilogue: Epilogue
    arch: str
    ctas_per_sm: int = 1
    a_layout: str | None = None

    @property
    def id(self) -> str:
        tile = f"{self.tile_m}x{self.split_k}x{self.ctas_per_sm}"
        return fp4_gemm_id("mma", self, *filter(None, (self.a_layout,)), tile, epilogue_id(self.epilogue))

    @property
    def role(self) -> Any:
        return type(self), self.tile_m, self.ctas_per_sm, self.arch, self.a_layout is None

    @property
    def kernel(self) -> Any:
        """Kernel as the backend builds it, or None if it does not fit the architecture."""
        config = fp4_mma.plan(
            dtype=self.dtype,
            fmt=self.format,
            layout=SCALE_LAYOUTS[self.layout],
            epilogue=self.epilogue,
            tile_m=self.tile_m,
            split_k=self.split_k,
            ctas_per_sm=self.ctas_per_sm,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            a_layout=SCALE_LAYOUTS[self.a_layout] if self.a_layout else None,
        )
        return None if config is None else fp4_mma.FP4MmaKernel(config)


QUANTISES: tuple[PrologueQuant, ...] = ("scaled", "plain")


def _a_dtype(case: WgmmaCase | ExpertsCase) -> torch.dtype:
    return torch.uint8 if case.a_layout is not None else case.a_dtype or case.dtype


def _operands(case: WgmmaCase | ExpertsCase) -> FP4Operands:
    a_layout = None if case.a_layout is None else SCALE_LAYOUTS[case.a_layout]
    prologue = (case.prologue_gate, case.prologue_quant) if isinstance(case, WgmmaCase) else ()
    return FP4Operands(_a_dtype(case), case.dtype, case.format, SCALE_LAYOUTS[case.layout], a_layout, *prologue)


def planned_experts(family: Any, case: ExpertsCase | GatedExpertsCase, **given: Any) -> Any:
    """Return the configuration that the backend would plan. ``given`` contains the arguments of ``plan`` that only this
    family has."""
    return family.plan(operands=_operands(case), arch=GPU_ARCHS[case.arch], pdl=True, **given)


def activations_id(case: WgmmaCase | ExpertsCase | GatedExpertsCase) -> str:
    return case.a_layout or short(_a_dtype(case))[0]


@dataclass(frozen=True)
class WgmmaCase(KernelCase):
    """An FP4 GEMM by wgmma. If a separate kernel rearranges the activations, the case includes it.

    Attributes:
        dtype, format, layout, a_layout: operands, as in ``WARPGROUP_KINDS``.
        tile_m, tile_n, split_k, expert_k, epilogue, static_weight, prefetches: arguments of ``fp4_wgmma.plan``.
        arch: architecture to compile for.
        a_dtype: dtype of 16-bit activations, or None for ``dtype``.
        prologue_gate, prologue_quant: fields of ``FP4Operands``.
    """

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    tile_m: int
    epilogue: Epilogue
    split_k: int = 0
    expert_k: int | None = None
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    static_weight: bool = False
    tile_n: int | None = None
    prologue_gate: Gate | None = None
    prologue_quant: PrologueQuant | None = None
    prefetches: bool = False

    @property
    def id(self) -> str:
        tile = f"{self.tile_m}by{self.split_k}" if self.expert_k is None else f"{self.tile_m}of{self.expert_k}"
        tile += "" if self.tile_n is None else f"x{self.tile_n}"
        quant = self.prologue_quant
        made = (*self.gate_id, *[f"quantised-{quant}"] * (quant is not None))
        hints = (*["static"] * self.static_weight, *["prefetching"] * self.prefetches)
        kind = "-".join(("wgmma", *hints, *made))
        return fp4_gemm_id(kind, self, activations_id(self), tile, epilogue_id(self.epilogue))

    @property
    def gate_id(self) -> list[str]:
        """Part of the id for a gate as prologue: empty without a gate, and without a name for SiLU."""
        gate = self.prologue_gate
        return [] if gate is None else ["gated" if gate == "silu" else f"gated-{gate}"]

    @property
    def role(self) -> Any:
        if self.static_weight or self.epilogue in PER_COLUMN:
            return self
        kind = self.dtype, self.format, self.layout, self.a_layout, self.a_dtype
        made = self.prologue_gate, self.prologue_quant, self.prefetches
        return type(self), kind, self.tile_m, self.split_k > 0, self.expert_k is None, self.tile_n, *made

    @property
    def kernel(self) -> Any:
        """Kernel as the backend builds it."""
        config = fp4_wgmma.plan(
            operands=_operands(self),
            epilogue=self.epilogue,
            expert_k=self.expert_k,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            split_k=self.split_k,
            arch=GPU_ARCHS[self.arch],
            pdl=True,
            static_weight=self.static_weight,
            prefetches=self.prefetches,
        )
        return fp4_wgmma.FP4WgmmaKernel(config)


def experts_id(case: Any) -> str:
    """Return an id part with the number of experts that the kernel's lists have room for, or an empty list for the
    usual number."""
    return "" if case.max_experts == USUAL_EXPERTS else f"with{case.max_experts}"


@dataclass(frozen=True)
class ExpertsCase(KernelCase):
    """FP4 GEMM over experts (``fp4_experts``). The attributes are arguments of its ``plan``, with layouts given by
    name."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    tile_m: int
    token_block: int
    out_dtype: torch.dtype
    classes: int = 1
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    max_experts: int = USUAL_EXPERTS

    @property
    def id(self) -> str:
        sizes = f"{self.tile_m}of{self.token_block}by{self.classes}{experts_id(self)}"
        bias = [] if self.bias_dtype is None else [f"bias_{short(self.bias_dtype)[0]}"]
        return fp4_gemm_id("experts", self, activations_id(self), sizes, *short(self.out_dtype), *bias)

    @property
    def role(self) -> Any:
        if self.arch != "sm_90a":
            return type(self), self.tile_m, self.arch, self.dtype == torch.uint8
        return type(self), self.tile_m, self.token_block, self.bias_dtype is None, self.a_dtype

    @property
    def kernel(self) -> Any:
        """Kernel for experts of two k tiles; the second k tile is partial. For MXFP4 without a bias, every second
        expert begins in the middle of a scale tile; in all other cases each expert begins with a scale tile."""
        return self.kernel_for(384 if self.format == MXFP4 and self.bias_dtype is None else 320)

    def kernel_for(self, expert_k: int) -> Any:
        """Return the kernel as the backend builds it for experts with ``expert_k`` elements of K, or None if it builds
        none."""
        sizes = {"expert_k": expert_k, "tile_m": self.tile_m, "token_block": self.token_block, "classes": self.classes}
        given = {"out_dtype": self.out_dtype, "bias_dtype": self.bias_dtype, "max_experts": self.max_experts, **sizes}
        config = planned_experts(fp4_experts, self, **given)
        return None if config is None else fp4_experts.FP4ExpertsKernel(config)


@dataclass(frozen=True)
class GatedExpertsCase(KernelCase):
    """Gated FP4 GEMM over experts (``fp4_gated_experts``). The attributes are arguments of its ``plan``; ``epilogue``
    contains arguments of ``GatedEpilogue``, and layouts are given by name."""

    dtype: torch.dtype
    format: FP4Format
    layout: str
    a_layout: str | None
    tile_n: int
    tile_m: int
    token_block: int
    epilogue: tuple[Any, ...]
    arch: str = "sm_90a"
    a_dtype: torch.dtype | None = None
    split_k: int = 1
    max_experts: int = USUAL_EXPERTS

    @property
    def id(self) -> str:
        sizes = f"{self.tile_n}by{self.tile_m}in{self.split_k}of{self.token_block}{experts_id(self)}"
        named = (getattr(each, "name", None) or str(each).removeprefix("torch.") for each in self.epilogue)
        return fp4_gemm_id("gated_experts", self, activations_id(self), sizes, *named)

    @property
    def role(self) -> Any:
        multiplies_codes = self.dtype == torch.uint8
        return type(self), self.tile_n if self.arch == "sm_90a" else self.arch, self.tile_m, multiplies_codes

    @property
    def kernel(self) -> Any:
        """Kernel for five k tiles, the last one partial; or for four k tiles with linear scales."""
        return self.kernel_for(1024 if self.layout == "linear" else 1088)

    def kernel_for(self, k: int) -> Any:
        """Return the kernel as the backend builds it for K = ``k``, or None if it builds none."""
        sizes = {"k": k, "tile_n": self.tile_n, "tile_m": self.tile_m, "split_k": self.split_k}
        sizes["max_experts"] = self.max_experts
        epilogue = fp4_gated_experts.GatedEpilogue(*self.epilogue)
        config = planned_experts(fp4_gated_experts, self, epilogue=epilogue, token_block=self.token_block, **sizes)
        return None if config is None else fp4_gated_experts.FP4GatedExpertsKernel(config)


def mma_cases(every: bool) -> list[MmaCase]:
    """Return cases with every tile and number of CTAs per SM for every architecture.

    If ``every``, each combination appears with all operand dtypes, and otherwise with one dtype, which alternates.
    Other parameters alternate, too.
    """
    kinds = ((FP16, NVFP4), (BF16, NVFP4), (BF16, MXFP4))
    split_k, finish = itertools.cycle((1, 2, 3, 4, 6, 8)), itertools.cycle(epilogues((None, "one", "column")))
    layouts = itertools.cycle(("linear", "128x4"))
    tiles = tuple(itertools.product((8, 16, 32, 64), (1, 2)))
    cases = []
    for (i, (tile_m, ctas_per_sm)), (j, arch), (k, kind) in itertools.product(*map(enumerate, (tiles, ARCHS, kinds))):
        if not every and k != (i + j) % len(kinds):
            continue
        case = MmaCase(*kind, next(layouts), tile_m, next(split_k), next(finish), arch, ctas_per_sm)
        if case.kernel is not None:
            cases.append(case)
    # Cases with FP4 activations, whose codes are multiplied without decoding
    kinds = ((NVFP4, "128x4"), (MXFP4, "linear"), (NVFP4, "linear"), (MXFP4, "8x4"))
    for i, (tile_m, ctas_per_sm) in enumerate(tiles):
        every_kind = tuple(itertools.product(DESKTOP, kinds))
        for arch, (fmt, a_layout) in every_kind if every else [every_kind[3 * i % len(every_kind)]]:
            layout = weight_layout(SCALE_LAYOUTS[a_layout]).name
            case = MmaCase(torch.uint8, fmt, layout, tile_m, next(split_k), next(finish), arch, ctas_per_sm, a_layout)
            if case.kernel is not None:
                cases.append(case)
    return cases


def wgmma_cases(every: bool) -> list[WgmmaCase]:
    """Return cases with all pairs of operands and tiles if ``every``, and otherwise with a third of them.

    Epilogues alternate from case to case, and each tile also appears with the epilogues of ``PER_COLUMN``.
    """
    light, heavy = itertools.cycle(epilogues((None, "one", "column"))), itertools.cycle(PER_COLUMN)
    tiles = [(tile_m, 0) for tile_m in (8, 16, 32, 64, 128, 256)]
    tiles += [(8, 1), (16, 8), (32, 3), (64, 3), (128, 8)]
    plain = [
        WgmmaCase(*kind, tile_m, next(heavy if kind in WARPGROUP_KINDS[:3] else light), split_k)
        for kind, (tile_m, split_k) in together(WARPGROUP_KINDS, tiles, every)
    ]
    # Cases whose activations are rounded to bfloat16, by a kernel before the GEMM or by the GEMM's CTAs
    rounded = [
        WgmmaCase(BF16, MXFP4, "128x4", None, tile_m, Epilogue(FP16), split_k, a_dtype=FP16)
        for tile_m, split_k in ((64, 0), (8, 2), (32, 1))
    ]
    static = [
        WgmmaCase(*kind, tile_m, epilogue, split_k, static_weight=True)
        for kind, (tile_m, split_k), epilogue in zip(
            (WARPGROUP_KINDS[1], WARPGROUP_KINDS[5]), ((8, 2), (32, 3)), PER_COLUMN[:2], strict=True
        )
    ]
    static += [
        WgmmaCase(*kind, tile_m, Epilogue(FP16), 2, prefetches=True, static_weight=tile_m < 16)
        for kind, tile_m in zip(WARPGROUP_KINDS[1:4], (1, 8, 16), strict=True)
        if tile_m > 1 or kind[1] is NVFP4
    ]
    row_kinds = [kind for kind in WARPGROUP_KINDS if kind[1] is NVFP4]
    static += [
        WgmmaCase(*kind, 1, next(heavy if n == 224 else light), 1 + n % 3, static_weight=n == 208, tile_n=n)
        for kind, n in together(row_kinds, fp4_wgmma.TILES_N[1], every)
    ]
    tiles = [(tile_m, tile_n) for tile_m, every_n in fp4_wgmma.TILES_N.items() for tile_n in every_n[1:] if tile_m > 1]
    fewer_columns = [
        WgmmaCase(*kind, tile_m, next(heavy if tile_n == 224 else light), 1 + tile_n % 3, tile_n=tile_n)
        for kind, (tile_m, tile_n) in together(WARPGROUP_KINDS, tiles, every)
    ]
    sixteen_bit = [kind for kind in WARPGROUP_KINDS if kind[3] is None]
    tiles = [(1, 2, 208), (8, 2, 256), (8, 2, 224), (16, 2, 192), (32, 3, 256), (64, 0, None), (128, 0, None)]
    gated = [
        WgmmaCase(*kind, tile_m, next(heavy if tile_n == 224 else light), split_k, tile_n=tile_n, prologue_gate="silu")
        for kind, (tile_m, split_k, tile_n) in together(sixteen_bit, tiles, every)
        if tile_m > 1 or kind[1] is NVFP4
    ]
    quantised = [
        WgmmaCase(FP16, NVFP4, layout, None, 1, next(heavy if n == 224 else light), split_k, tile_n=n, **given)
        for given, (layout, split_k, n) in together(
            [
                {"a_dtype": dtype, "prologue_gate": gate, "prologue_quant": quantises}
                for dtype in (BF16, FP16)
                for gate in ("silu", None)
                for quantises in QUANTISES
            ],
            (("128x4", 2, 208), ("linear", 1, 224), ("128x4", 3, 256)),
            every,
        )
    ]
    # Cases with another gate than SiLU: tiles of one row and of few rows, with and without a quantisation, and the
    # kernel before the GEMM
    kind = FP16, NVFP4, "128x4", None
    tiles = ((1, 2, 224, "scaled"), (1, 1, 208, None), (8, 2, 224, None), (32, 3, 256, None), (64, 0, None, None))
    other_gates = [
        WgmmaCase(
            *kind, tile_m, next(light), split_k, a_dtype=BF16 if quantises else FP16, tile_n=tile_n,
            prologue_gate=gate, prologue_quant=quantises,
        )
        for gate, (tile_m, split_k, tile_n, quantises) in together(("gelu_tanh", "gelu", "relu2"), tiles, every)
    ]  # fmt: skip
    outs, experts_k = itertools.cycle((BF16, FP16, FP32)), itertools.cycle((256, 1024, 512))
    return (
        plain
        + fewer_columns
        + rounded
        + static
        + gated
        + quantised
        + other_gates
        + [
            WgmmaCase(*kind, tile_m, Epilogue(next(outs)), expert_k=next(experts_k))
            for kind, tile_m in together(WARPGROUP_KINDS, (16, 32, 64, 128), every)
        ]
    )


def experts_cases(every: bool) -> list[ExpertsCase]:
    """Return cases with all pairs of operands and ``tile_m`` if ``every``, and otherwise with a third of them.

    Token blocks and other parameters alternate from case to case.
    """
    tiles = {8: (256, 16, 512), 16: (64, 512), 24: (512, 32, 128), 32: (256, 64, 128)}
    assert tuple(tiles) == fp4_experts.TILES_M
    assert {size for sizes in tiles.values() for size in sizes} == set(fp4_experts.TOKEN_BLOCKS)
    turns = {group: itertools.cycle(sizes) for group, sizes in tiles.items()}
    rest = itertools.cycle(((BF16, 1), (FP16, 8), (FP32, 1), (BF16, 8)))
    cases = [
        ExpertsCase(*kind, group, next(turns[group]), *next(rest))
        for kind, group in together(WARPGROUP_KINDS, tuple(turns), every)
    ]
    # Cases with a bias in either dtype, for every ``tile_m``
    biased = {case.tile_m: case for case in cases}
    cases += [replace(case, bias_dtype=FP32 if i % 2 else case.out_dtype) for i, case in enumerate(biased.values())]
    # A case that once spilled registers
    cases.append(ExpertsCase(BF16, MXFP4, "128x4", None, 24, 128, FP16, 8, bias_dtype=FP32))
    # Cases whose activations are rounded to bfloat16
    cases.append(ExpertsCase(BF16, MXFP4, "128x4", None, 16, 64, FP16, a_dtype=FP16))
    return [*cases, *without_wgmma(cases, every)]


def without_wgmma(cases: Sequence[Any], every: bool) -> list[Any]:
    """Return the cases that exist for GPUs without wgmma: all of them if ``every``, and otherwise one per role."""
    found = (_for_arch(case, arch) for arch in ARCHS if arch != "sm_90a" for case in cases)
    existing = [case for case in found if case.kernel is not None]
    return existing if every else list({case.role: case for case in existing}.values())


def _for_arch(case: Any, arch: str) -> Any:
    """Return a case for another architecture, with the dtype of the MMAs' operands that the backend chooses there."""
    multiplies_codes = arch in DESKTOP and case.a_layout is not None
    return replace(case, arch=arch, dtype=torch.uint8 if multiplies_codes else case.dtype)


def gated_experts_cases(every: bool) -> list[GatedExpertsCase]:
    """Return cases with all pairs of ``tile_n`` and ``tile_m``: with all kinds of operands if ``every``, and otherwise
    with one kind, which alternates.

    Other parameters alternate from case to case.
    """
    tiles = itertools.cycle(fp4_gated_experts.TOKEN_BLOCKS)
    alphas, scales = itertools.cycle(("expert_half", "expert", None)), itertools.cycle(("expert", "one", None))
    biases = itertools.cycle((FP32, "out", None, FP32))
    gates = itertools.cycle(("swiglu", "silu", "gelu_tanh", "swiglu", "gelu"))
    kinds = (*WARPGROUP_KINDS, (BF16, MXFP4, "128x4", "8x4"))
    cases = []
    shapes = itertools.product(fp4_gated_experts.TILES_N, fp4_gated_experts.TILES_M)
    for i, shape in enumerate(shapes):
        split_k = fp4_gated_experts.SPLIT_K[shape[0]]
        of_shape: list[GatedExpertsCase] = []
        for dtype, fmt, layout, a_layout in (*kinds[i % len(kinds) :], *kinds[: i % len(kinds)]):
            out = dtype if a_layout is None else fmt
            bias, scale = next(biases), next(scales)
            epilogue = (
                out,
                None if a_layout is None else SCALE_LAYOUTS[a_layout],
                next(alphas),
                dtype if bias == "out" else bias,
                scale if out == NVFP4 else None,
                next(gates),
            )
            sizes = *shape, next(tiles)
            case = GatedExpertsCase(
                dtype, fmt, layout, a_layout, *sizes, epilogue, split_k=split_k[(i + len(of_shape)) % len(split_k)]
            )
            if case.kernel is not None and (every or not of_shape):
                of_shape.append(case)
        cases += of_shape
    return [*cases, *without_wgmma(cases, every)]
