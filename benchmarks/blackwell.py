"""`python -m benchmarks blackwell`: modelled times of GEMMs with FP4 weights by tcgen05 on a B200. Nothing is measured.

No B200 was available. The compiled kernels give the sizes of shared memory, tensor memory and registers. Clocks and
times are computed from data sheets, as in `torch_cute_ops/gemm/cost.py` and the backends `fp4_tcgen05`,
`fp4_tcgen05_experts`, `fp4_tcgen05_gated_experts` and `fp4_weight_tcgen05`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.gemm import cost, select
from torch_cute_ops.gemm.backend import Backend, Target
from torch_cute_ops.gemm.backends.fp4_tcgen05 import FP4Tcgen05
from torch_cute_ops.gemm.backends.fp4_tcgen05_experts import DENSE, ROUTED, FP4Tcgen05Experts
from torch_cute_ops.gemm.problem import GemmProblem, Grouping, Operand, Tactic
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import K_TILE
from torch_cute_ops.runtime.arch import ARCHS, CLOCK_HZ
from torch_cute_ops.testing.resources import compile_for

from . import report

BACKEND, EXPERTS_BACKEND = FP4Tcgen05(), FP4Tcgen05Experts()
FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4)}
CHOICES = [name for name, arch in ARCHS.items() if arch.has_tcgen05]
FC2 = (7168, 65536)
"""N and K of DeepSeek-V3's second expert GEMM on one of eight GPUs, with all experts concatenated along K."""
FC2_EXPERTS = 256
SHAPES = {
    (16384, 16384): (1, 16, 64, 256, 2048),
    (28672, 4096): (1, 16, 64, 256, 2048),
    (4096, 14336): (1, 16, 64, 256, 2048),
    FC2: (32, 64, 128, 256, 512),
}
"""Numbers of rows M, keyed by (N, K)."""
PUBLISHED = {(FC2, 32): 52.0, (FC2, 64): 53.0, (FC2, 128): 54.0, (FC2, 256): 69.0, (FC2, 512): 101.0}
"""Times in µs that TensorRT-LLM's authors published for FC2 in NVFP4 on a B200 (pull requests 12686, 13833). The time
for 512 rows is a lower bound."""

LAYERS = {"32 experts": (32, 2048), "256 experts": (256, 256)}
"""Number of experts and columns of an expert of DeepSeek-V3's layers on one of eight GPUs: each GPU has 32 experts, or
an eighth of each expert."""
LAYER_HIDDEN = 7168
LAYER_ROWS = (1, 16, 64, 128, 256)

WEIGHT_ONLY_SHAPES = {
    (28672, 4096): (1, 64, 256, 4096),
    (8192, 8192): (1, 64, 256, 4096),
    (19968, 6656): (1, 64),
    (2048, 2048): (1, 64, 256),
}
"""Numbers of rows M of 16-bit activations, keyed by (N, K)."""
WEIGHT_ONLY_BACKENDS = ("tcgen05", "mma_sync", "cublas")

MODES = (None, DENSE, ROUTED)
"""None for a plain GEMM. For GEMMs with experts over K, `DENSE` computes all experts, and `ROUTED` only experts that a
token is routed to."""

ABOUT = """\
A MODEL, NOT A MEASUREMENT: {arch} with {sms} SMs. The rate of {pflops:.1f} PFLOP/s in FP4 comes from data sheets. The
bandwidth of {tbps:.1f} TB/s is the data sheets' bandwidth times the fraction that a copy reaches on an H200. Operands
are {fmt} with 128x4 scales, and results are bfloat16. "alpha" has either one element, or one element for each token and
each of {experts} experts. "dense" computes all experts. "routed" computes only the experts that some of the tokens are
routed to, with 8 experts per token. A tile is given as weight rows × activation rows. A pair of CTAs computes a tile
with 256 weight rows. "of k" is the number of CTAs that divide K of a tile; with experts, it is the number of classes of
experts, and a class is a work tile. The clocks are an SM's clock cycles for {chunk} elements of K of its tile: for
the MMAs, and for copying the bytes at the SM's share of the bandwidth if L2 contains none of them. "floor" is the
longer of two times: for the bytes at full bandwidth, and for the MMAs at full rate. "TensorRT-LLM" is a published time;
by default TensorRT-LLM folds the experts' factors into the activations' scales, and runs a plain GEMM."""

HEADER = (
    *("N × K", "alpha", "M", "tile", "of k", "stages", "KB in flight", "shared KB", "TMEM columns", "registers"),
    *("MMA clocks", "byte clocks", "µs", "floor", "TensorRT-LLM"),
)

LAYERS_ABOUT = """\
Layers of DeepSeek-V3 on one of eight GPUs: the first GEMM with its gate (`moe_fc1_fp4`), the second GEMM
(`moe_fc2_fp4`) and both, with the backend that "auto" chooses. Each token is routed to 8 experts of the GPU. All
numbers are of the same model."""

WEIGHT_ONLY_ABOUT = """\
bfloat16 activations by a weight with 128x4 scales (`mm_fp4_weight_only`), with each backend. All numbers are of the
same model, with the data sheets' {pflops:.1f} PFLOP/s in bfloat16."""

WEIGHT_ONLY_HEADER = ("N × K", "M", *(f"{name} µs" for name in WEIGHT_ONLY_BACKENDS), "floor", "auto")

LAYERS_HEADER = ("layer", "M", "first GEMM", "µs", "floor", "second GEMM", "µs", "floor", "both", "floor")


class Line(NamedTuple):
    """Estimates for one GEMM.

    Attributes:
        mode: Entry of ``MODES``.
        tactic, config: Tactic that the cost model chose, and the kernel's configuration.
        registers: Registers of a thread; 0 if the kernel was not compiled.
        mma_clocks, byte_clocks: Clock cycles that one SM needs for the MMAs of one k tile, and for its copies.
        us, floor_us: Estimated time of the chosen tactic, and a lower bound for the time of any kernel, in µs.
    """

    n: int
    k: int
    m: int
    mode: str | None
    tactic: Tactic
    config: Any
    registers: int
    mma_clocks: float
    byte_clocks: float
    us: float
    floor_us: float

    @property
    def rows(self) -> tuple[int, int]:
        """Return the number of weight rows and the number of activation rows that one tile covers."""
        config = self.config
        return (config.tile_n, config.tile_m) if self.mode is None else (config.tile_n, MMA_M)


def line(
    fmt: FP4Format,
    n: int,
    k: int,
    m: int,
    target: Target,
    registers: dict[Any, int] | None,
    mode: str | None = None,
) -> Line:
    """Estimate the GEMM with the tactic that the cost model chooses.

    `registers` caches register counts by configuration. If it is None, nothing is compiled.
    """
    operand = Operand(fmt, SCALE_LAYOUTS["128x4"])
    plain = GemmProblem(operand, operand, n, k, Epilogue(torch.bfloat16, "one", None))
    backend: Backend = BACKEND
    problem = plain
    if mode is not None:
        backend = EXPERTS_BACKEND
        problem = GemmProblem(operand, operand, n, k, Epilogue(torch.bfloat16), Grouping("k", FC2_EXPERTS))
    tactics = [tactic for tactic in backend.tactics(problem, m, target) if mode in (None, tactic[-1])]
    tactic = min(tactics, key=lambda each: backend.estimate(problem, m, each, target))
    arch = target.arch
    assert arch is not None
    (spec,) = backend.kernels(problem, tactic, arch)
    config: Any = spec.config
    if registers is not None and config not in registers:
        registers[config] = max(each.registers for each in compile_for(spec.make(), arch).resources)
    flops = 2 * MMA_M * config.stage.mma_n * K_TILE
    bytes_per_clock = cost.bytes_per_second(target) / target.sms / CLOCK_HZ
    peak = arch.fp4_flops_per_clock * target.sms * CLOCK_HZ
    # If all experts are computed, the bytes and operations are the same as in one plain GEMM over the concatenated K.
    least = problem if mode == ROUTED else plain
    floor = max(least.bytes_moved(m) / cost.bytes_per_second(target), least.flops(m) / peak)
    return Line(
        *(n, k, m, mode, tactic, config, 0 if registers is None else registers[config]),
        mma_clocks=flops / arch.fp4_flops_per_clock,
        byte_clocks=(MMA_M + config.stage.cta_mma_n) * operand.row_bytes(K_TILE) / bytes_per_clock,
        us=backend.estimate(problem, m, tactic, target) * 1e6,
        floor_us=floor * 1e6,
    )


def expert_gemms(fmt: FP4Format, experts: int, width: int) -> tuple[GemmProblem, GemmProblem]:
    """Return both GEMMs of a layer of experts with `width` columns each."""
    operand, bf16 = Operand(fmt, SCALE_LAYOUTS["128x4"]), torch.bfloat16
    global_scale = "one" if fmt.has_global_scale else None
    first = GemmProblem(
        *(operand, operand, experts * width, LAYER_HIDDEN, Epilogue(bf16, "expert"), Grouping("n", experts)),
        gate="silu",
        quantised=operand,
        global_scale=global_scale,
    )
    second = GemmProblem(operand, operand, LAYER_HIDDEN, experts * width, Epilogue(bf16), Grouping("k", experts))
    return first, second


def layer_cells(fmt: FP4Format, name: str, m: int, target: Target) -> list[str]:
    """Estimate a layer of `LAYERS`, and format the estimates as cells of a table row."""
    row, sums = [name, f"{m:,}"], [0.0, 0.0]
    for problem in expert_gemms(fmt, *LAYERS[name]):
        choice = select.choose(problem, m, target)
        us = choice.backend.estimate(problem, m, choice.tactic, target) * 1e6
        assert target.arch is not None
        peak = target.arch.fp4_flops_per_clock * target.sms * CLOCK_HZ
        floor = max(problem.bytes_moved(m) / cost.bytes_per_second(target), problem.flops(m) / peak) * 1e6
        row += [choice.backend.name, report.number(us), report.number(floor)]
        sums = [sums[0] + us, sums[1] + floor]
    return [*row, *map(report.number, sums)]


def weight_only_cells(fmt: FP4Format, n: int, k: int, m: int, target: Target) -> list[str]:
    """Estimate a GEMM of bfloat16 activations with each backend, and format the estimates as cells of a table row."""
    bf16 = torch.bfloat16
    problem = GemmProblem(Operand(bf16), Operand(fmt, SCALE_LAYOUTS["128x4"]), n, k, Epilogue(bf16, "one", None))
    least = {
        backend.name: min(backend.estimate(problem, m, each, target) for each in backend.tactics(problem, m, target))
        for backend in select.BACKENDS
        if backend.name in WEIGHT_ONLY_BACKENDS
        and backend.handles(problem)
        and backend.reason_unsupported(problem, target) is None
    }
    assert target.arch is not None
    peak = target.arch.flops_per_clock * target.sms * CLOCK_HZ
    floor = max(problem.bytes_moved(m) / cost.bytes_per_second(target), problem.flops(m) / peak)
    times = [*(least.get(name) for name in WEIGHT_ONLY_BACKENDS), floor]
    chosen = select.choose(problem, m, target).backend.name
    micro = [report.number(None if each is None else each * 1e6) for each in times]
    return [f"{n:,} × {k:,}", f"{m:,}", *micro, chosen]


def cells(one: Line) -> list[str]:
    """Format the estimates for one GEMM as cells of a table row."""
    config, published = one.config, PUBLISHED.get(((one.n, one.k), one.m))
    columns = config.tmem_columns
    return [
        f"{one.n:,} × {one.k:,}",
        one.mode or "one",
        f"{one.m:,}",
        "{} × {}".format(*one.rows),
        str(config.split_k if one.mode is None else config.classes),
        str(config.stages),
        f"{config.stages * config.stage.size_bytes / 1024:.0f}",
        f"{config.smem_bytes / 1024:.0f}",
        str(columns),
        str(one.registers or "–"),
        f"{one.mma_clocks:,.0f}",
        f"{one.byte_clocks:,.0f}",
        report.number(one.us),
        report.number(one.floor_us),
        report.number(published),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks blackwell", description=__doc__)
    parser.add_argument("--arch", choices=CHOICES, default="sm_100a")
    parser.add_argument("--format", choices=FORMATS, default=NVFP4.name)
    parser.add_argument("--no-registers", action="store_true", help="compile no kernels, to save seconds per kernel")
    options = parser.parse_args(arguments)
    arch, fmt = ARCHS[options.arch], FORMATS[options.format]
    (target,) = cost.usual_targets(arch)
    registers: dict[Any, int] | None = None if options.no_registers else {}
    lines = [
        line(fmt, n, k, m, target, registers, mode)
        for (n, k), rows in SHAPES.items()
        for mode in (MODES if (n, k) == FC2 else MODES[:1])
        for m in rows
    ]
    tbps = cost.bytes_per_second(target) / 1e12
    pflops = arch.fp4_flops_per_clock * target.sms * CLOCK_HZ / 1e15
    rates = {"tbps": tbps, "pflops": pflops}
    print(ABOUT.format(arch=arch.name, sms=target.sms, fmt=fmt.name, chunk=K_TILE, experts=FC2_EXPERTS, **rates))
    print()
    print(report.table(HEADER, [cells(one) for one in lines]))
    print()
    gemms = [(n, k, m) for (n, k), rows in WEIGHT_ONLY_SHAPES.items() for m in rows]
    print(WEIGHT_ONLY_ABOUT.format(pflops=arch.flops_per_clock * target.sms * CLOCK_HZ / 1e15))
    print()
    print(report.table(WEIGHT_ONLY_HEADER, [weight_only_cells(fmt, *sizes, target) for sizes in gemms]))
    print()
    print(LAYERS_ABOUT)
    print()
    print(report.table(LAYERS_HEADER, [layer_cells(fmt, name, m, target) for name in LAYERS for m in LAYER_ROWS]))
    return 0
