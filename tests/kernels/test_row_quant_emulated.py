"""Kernels that process rows, executed in the PTX emulator and compared with the CPU references."""

import dataclasses
import itertools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from samples._rows import special_rows
from support.emulated import ACQUIRE, BLACKWELL, CONSUMER, CPU, HOPPER, PASSED, WAIT, changed, equal, poisoned
from support.kernel_grid import (
    BF16,
    DYNAMIC_TENSOR,
    FP8_TARGETS,
    FP16,
    FP32,
    POWER_TARGETS,
    ROUNDED,
    SIX_TARGETS,
    WHAT,
    Case,
)

from ptx_emulator import EmulationError, Race
from ptx_emulator.adapter import run_kernel
from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.fp8 import COLUMN, FP8_DYNAMIC_TENSOR, FP8_TOKEN, ROW
from torch_cute_ops.formats.interleave import interleave_k
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.kernels import fp4_dequant, row_quant
from torch_cute_ops.reference.add_rmsnorm_fp4quant import add_rows
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.fp4_quantize_four_over_six import quantize_rows_four_over_six
from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing import GATE_ERROR, assert_fp4_close, assert_fp8_close

fp4_dequantize = OPS["fp4_dequantize"].reference

EPS = 1e-5
FLT_MAX = torch.finfo(torch.float32).max
GATE = (1.702, 1.0, 3.0)
"""Parameters of a gate. About half of the values of ``inputs`` are above its limit."""


class Outcome(NamedTuple):
    """Expected or actual outputs of a kernel; None for an output that it lacks."""

    y: torch.Tensor | None
    scale: torch.Tensor | None
    linear: torch.Tensor | None
    norm: torch.Tensor | None
    residual: torch.Tensor | None
    row_scale: torch.Tensor | None = None


def expected(spec: Any, x: torch.Tensor, residual: Any, weight: Any, factor: Any, bias: Any = None) -> Outcome:
    value = x.float()
    updated = None
    if spec.source == "add":
        updated = add_rows(x, residual.clone())
        value = updated.float()
    elif spec.source == "silu_mul":
        value = silu_mul_rows(x, *GATE) if spec.swiglu else silu_mul_rows(x, gate=spec.gate)
    if spec.normalises:
        given = torch.empty(0) if weight is None else weight, EPS, spec.weight_plus_one
        value = rmsnorm_rows(value, *given, bias_of(spec) if bias is None else bias, spec.subtracts_mean)
    norm = value.to(spec.dtype) if spec.writes_norm else None
    if spec.has_row_scale:
        y, scale, row_scale = quantize_rows_per_token(value, spec.layout.name)
        return Outcome(y, scale, None, norm, updated, row_scale)
    if isinstance(spec.fmt, FP4Format):
        if spec.four_over_six:
            y, linear = quantize_rows_four_over_six(value, factor, "linear")
        else:
            y, linear = quantize_rows(value, spec.fmt, factor, "linear")
        scale = linear if spec.layout.is_linear else from_linear(linear, spec.layout)
        return Outcome(y, scale, linear if spec.also_linear else None, norm, updated)
    if spec.fmt is None:
        return Outcome(None, None, None, norm, updated)
    given = None if spec.fmt == FP8_DYNAMIC_TENSOR else factor
    y, scale = quantize_fp8_rows(value, spec.fmt, given, spec.layout)
    return Outcome(y, scale, None, norm, updated)


def bias_of(spec: Any) -> torch.Tensor | None:
    """Return the bias of a norm, or None without one."""
    return torch.linspace(-2.0, 1.0, spec.width).to(spec.weight_dtype) if spec.has_bias else None


def execute(
    config: Any,
    arch: str,
    x: torch.Tensor,
    residual: Any,
    weight: Any,
    factor: Any,
    max_ctas: int,
    seed: int | None,
    edit: Any = None,
    bias: Any = None,
) -> Outcome:
    """Run the kernel on copies of the inputs and on poisoned outputs."""
    p = config.spec
    rows = x.shape[0]
    if isinstance(p.fmt, FP4Format):
        y = poisoned(rows, p.width // 2, dtype=torch.uint8)
    elif p.fmt is None:
        y = scale = None
    else:
        shape = (-(-p.width // 256), 256) if p.interleaved else (p.width,)
        y = poisoned(rows, *shape, dtype=torch.float8_e4m3fn)
        scales = p.fmt.scales_per_row(p.width)
        if p.layout == COLUMN:
            scale = poisoned(scales, rows, dtype=torch.float32).t()
        else:
            scale = poisoned(*((1,) if p.has_tensor_scale else (rows, scales)), dtype=torch.float32)
    if p.has_byte_scales:
        scale = poisoned(*p.layout.shape((rows,), config.blocks), dtype=p.fmt.scale_dtype)
    linear = poisoned(rows, config.blocks, dtype=p.fmt.scale_dtype) if p.also_linear else None
    norm = poisoned(rows, p.width, dtype=p.dtype) if p.writes_norm else None
    row_scale = poisoned(rows, dtype=torch.float32) if p.has_row_scale else None
    if p.fmt == FP8_DYNAMIC_TENSOR:
        factor = poisoned(config.tensor_ctas(rows, max_ctas), dtype=torch.float32)
    # Copy with the same strides, which clone() would not keep.
    residual = (
        None
        if residual is None
        else torch.empty_strided(residual.shape, residual.stride(), dtype=residual.dtype).copy_(residual)
    )
    kernel = row_quant.RowQuantKernel(config)
    alpha, beta, limit = GATE if p.swiglu else (None, None, None)
    arguments = row_quant.Arguments(
        input=x,
        residual=residual,
        weight=weight,
        bias=bias_of(p) if bias is None else bias,
        factor=factor,
        y=y,
        scale=scale,
        scale_linear=linear,
        norm=norm,
        row_scale=row_scale,
        offsets=None,
        counts=None,
        eps=EPS,
        swiglu_alpha=alpha,
        swiglu_beta=beta,
        swiglu_limit=limit,
        max_ctas=max_ctas,
    )
    # Not strict for clusters: a CTA overwrites partial sums in another CTA's shared memory. Only shuffles order the
    # other CTA's reads before the overwrite, and the emulator does not track this order.
    run_kernel(kernel, ARCHS[arch], *arguments, seed=seed, strict=not config.is_cluster, scoped=True, edit=edit)
    return Outcome(y, scale, linear, norm, residual, row_scale)


def check(spec: Any, got: Outcome, want: Outcome) -> None:
    """Check that ``got`` equals ``want`` bit for bit if the arithmetic is exact, and that it is close to ``want`` after
    a norm or a gate."""
    if not spec.normalises and spec.source == "rows":
        equal("y", got.y, want.y)
        equal("scale", got.scale, want.scale)
        equal("row_scale", got.row_scale, want.row_scale)
        return
    if spec.has_row_scale:
        limit = 1e-6 if spec.normalises else GATE_ERROR
        torch.testing.assert_close(got.row_scale, want.row_scale, rtol=limit, atol=0.0, equal_nan=True)
    if isinstance(spec.fmt, FP4Format):
        want_scale = want.scale.reshape(got.scale.shape)
        assert_fp4_close((got.y, got.scale), (want.y, want_scale), spec.fmt, spec.layout)
        if want.linear is not None:
            equal("linear", from_linear(got.linear, spec.layout), got.scale)
    elif spec.fmt is not None:
        allowance: dict[str, Any] = {"scale_error": GATE_ERROR} if spec.gate != "silu" else {}
        if spec.has_byte_scales:
            allowance["layout"] = spec.layout
        assert_fp8_close((got.y, got.scale), (want.y, want.scale), spec.fmt, **allowance)
    equal("residual", got.residual, want.residual)
    if want.norm is not None:
        check_rounded(spec, got.norm, want.norm)


def check_rounded(spec: Any, got: torch.Tensor, want: torch.Tensor) -> None:
    """Check that values differ from the expected values by at most one step of the dtype. In fp32, allow the error of a
    sum, a root and products, or of an exponential.

    The limit also applies to subnormal numbers.
    """
    info = torch.finfo(spec.dtype)
    steps = 3 if spec.dtype == FP32 else 1
    if spec.gate == "gelu":
        steps *= 2**10  # the last bit of a subnormal Phi is multiplied by gate and up
    limit = max(info.eps, 1e-6 if spec.normalises else GATE_ERROR)
    tiny = steps * info.smallest_normal * info.eps
    if spec.is_general:
        tiny = 1e-6 * max(1.0, float(want.float().nan_to_num(0.0, 0.0, 0.0).abs().max()))  # differences cancel
    torch.testing.assert_close(got, want, rtol=limit, atol=tiny, equal_nan=True)


def inputs(config: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    """Return input, residual, weight and factor. The rows of the input and the residual are strided."""
    torch.manual_seed(rows)
    p = config.spec

    def some(width: int) -> torch.Tensor:
        values = torch.randn(rows, width + 32) * 2.0 ** torch.randint(-5, 6, (rows, 1))
        # Make every fifth row so small that its row factor cannot be folded into the products.
        values[2::5] *= 2.0**-60
        return values.to(p.dtype)[:, :width]

    x = some(p.input_width)
    residual = some(p.width) if p.source == "add" else None
    if p.has_fp32_residual:
        wider = torch.empty_strided(residual.shape, residual.stride(), dtype=FP32)
        residual = wider.copy_(residual.float() * (1 + torch.rand(rows, 1)))
    return x, residual, *weight_and_factor(p)


def weight_and_factor(spec: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    weight = None
    if spec.normalises and spec.has_weight:
        weight = (torch.rand(spec.width) + (-0.5 if spec.weight_plus_one else 0.5)).to(spec.weight_dtype)
    factor = 37.5 if isinstance(spec.fmt, FP4Format) else 0.05
    return weight, torch.tensor([factor]) if spec.has_factor else None


class Run(NamedTuple):
    """Launch of a kernel, with ``changes`` to the planned configuration."""

    what: str
    dtypes: tuple[torch.dtype, torch.dtype]
    width: int
    target: tuple[str, str]
    arch: str
    rows: int
    max_ctas: int
    seed: int | None
    changes: dict[str, int]

    @property
    def case(self) -> Case:
        return Case(WHAT[self.what], self.dtypes, self.width, self.target, self.arch)

    @property
    def id(self) -> str:
        changes = "".join(f"-{name}={value}" for name, value in self.changes.items())
        return f"{self.case.id}-{self.rows}x{self.max_ctas}{changes}"

    @property
    def config(self) -> Any:
        config = dataclasses.replace(self.case.kernel.config, few_rows_config=None, **self.changes)
        assert config.reason_unsupported(ARCHS[self.arch]) is None
        return config


BF, HF, F, BFF = (BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)
NV, NVG, MX = (tuple(itertools.product([name], ("linear", "128x4", "8x4"))) for name in ("nvfp4", "nvfp4-g", "mxfp4"))
NVT = tuple(itertools.product(["nvfp4-t"], ("linear", "128x4", "8x4")))
FOUR_SIX, FOUR_SIX_G = SIX_TARGETS[:3], SIX_TARGETS[3:]
TENSOR, TOKEN, BLOCK, COLUMNS = FP8_TARGETS
POWERS, POWER_COLUMNS, *MX8 = POWER_TARGETS


def run(
    what: str, dtypes: Any, width: int, target: Any, arch: str, rows: int, max_ctas: int, seed: Any, **changes: int
):
    one = Run(what, dtypes, width, target, arch, rows, max_ctas, seed, changes)
    return pytest.param(one, id=one.id)


WARP_GROUPS = {"threads_per_row": 32, "groups": 3}
WIDE_GROUPS = {"threads_per_row": 64, "groups": 2}
CLUSTER = {"threads_per_row": 32, "groups": 2, "splits": 2}
FOUR_GROUPS = {"threads_per_row": 64, "groups": 4}
RUNS = [
    # One warp for several rows
    run("quantize", BF, 128, NV[1], HOPPER, 130, 2, 0),
    run("quantize", HF, 48, NVG[2], BLACKWELL, 19, 1, 1, groups=2),
    run("quantize", F, 96, MX[0], HOPPER, 3, 2, None, stages=1),
    run("norm", HF, 128, NVG[1], HOPPER, 131, 2, 0, groups=2),
    run("add-norm", BFF, 128, MX[2], BLACKWELL, 35, 1, 1, groups=2),
    run("silu", BF, 128, NV[0], HOPPER, 19, 1, 2, groups=2),
    run("swiglu", HF, 96, MX[2], BLACKWELL, 19, 1, 0, groups=2),
    run("quantize", HF, 48, TOKEN, HOPPER, 19, 1, 1, groups=2),
    # One warp per row. With tiled scales, the scales of four rows are stored together.
    run("quantize", F, 512, NVG[1], BLACKWELL, 1, 2, 0, **WARP_GROUPS),
    run("quantize", BF, 528, NV[2], HOPPER, 140, 3, 1, **WARP_GROUPS),
    run("norm", BF, 512, NV[2], BLACKWELL, 3, 1, 0, **WARP_GROUPS),
    run("norm-norm", BFF, 1056, MX[1], HOPPER, 132, 2, 1, **WARP_GROUPS, stages=1),
    run("add-linear", HF, 528, NV[1], BLACKWELL, 130, 3, 2, **WARP_GROUPS),
    run("add-linear-norm", BFF, 528, NVG[1], HOPPER, 130, 3, 1, **WARP_GROUPS),
    run("silu", HF, 1024, MX[1], BLACKWELL, 130, 2, 0, **WARP_GROUPS),
    run("swiglu", BF, 512, TENSOR, HOPPER, 9, 1, 1, **WARP_GROUPS),
    run("quantize", F, 528, TOKEN, HOPPER, 13, 2, 0, **WARP_GROUPS),
    run("quantize", HF, 512, TENSOR, BLACKWELL, 13, 1, 1, **WARP_GROUPS),
    run("norm", HF, 512, TOKEN, HOPPER, 13, 1, 0, **WARP_GROUPS),
    run("add", BF, 512, TENSOR, BLACKWELL, 13, 1, 1, **WARP_GROUPS),
    # Two warps per row
    run("norm-norm", F, 1024, NV[1], HOPPER, 131, 4, 0, **WIDE_GROUPS),
    run("norm", BF, 2032, NVG[0], BLACKWELL, 9, 1, 1, **WIDE_GROUPS, stages=1),
    run("add", F, 2048, MX[0], HOPPER, 9, 1, 2, **WIDE_GROUPS),
    run("add-norm", HF, 1024, NVG[2], BLACKWELL, 9, 1, None, **WIDE_GROUPS),
    run("norm", BFF, 1024, TOKEN, BLACKWELL, 13, 1, 0, **WIDE_GROUPS),
    run("silu", BF, 1152, COLUMNS, HOPPER, 9, 1, 1, **WIDE_GROUPS),
    run("silu", F, 1024, TOKEN, HOPPER, 9, 1, 1, **WIDE_GROUPS),
    run("swiglu", F, 1152, BLOCK, BLACKWELL, 9, 1, 2, **WIDE_GROUPS),
    run("add-linear-norm", F, 2112, MX[1], BLACKWELL, 9, 1, 0, **WIDE_GROUPS),
    run("quantize", BF, 1152, COLUMNS, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    # One of two warps processes one block more: the first warp in some groups, the second in others.
    run("norm", BF, 1536, NVG[1], HOPPER, 140, 1, 0, **FOUR_GROUPS),
    run("norm-norm", BFF, 2560, MX[1], HOPPER, 9, 1, 1, **FOUR_GROUPS, stages=1),
    run("silu", HF, 1296, NV[2], HOPPER, 9, 1, 2, **FOUR_GROUPS),
    run("swiglu", BF, 1296, NVG[1], HOPPER, 9, 1, 0, **FOUR_GROUPS),
    run("norm", BF, 2576, NV[0], HOPPER, 9, 2, 0, **FOUR_GROUPS | {"splits": 2}),
    # In the second CTA no warp processes a last block; in the first CTA three of four warps do.
    run("norm", BF, 2176, NV[1], HOPPER, 9, 2, 0, **FOUR_GROUPS | {"splits": 2}),
    run("norm-norm", HF, 7168, MX[1], HOPPER, 4, 1, 0, bulk_norm=False),
    # Two CTAs share a row. The second slice is shorter.
    run("quantize", BF, 2304, MX[1], BLACKWELL, 9, 4, 0, **CLUSTER),
    run("norm", HF, 1152, NV[1], HOPPER, 130, 8, 1, **CLUSTER),
    run("add-norm", BF, 2304, NVG[0], BLACKWELL, 9, 4, 0, **CLUSTER | WIDE_GROUPS),
    run("norm", BF, 1152, TOKEN, BLACKWELL, 9, 2, 2, **CLUSTER),
    run("add", HF, 1152, BLOCK, HOPPER, 9, 4, 1, **CLUSTER),
    run("add-linear-norm", HF, 2304, NV[1], BLACKWELL, 9, 4, 1, **CLUSTER),
    run("swiglu", HF, 2304, TOKEN, HOPPER, 9, 4, 0, **CLUSTER),
    # The CTAs exchange only the amax of the row.
    run("quantize", BF, 1152, TOKEN, HOPPER, 9, 4, 1, **CLUSTER),
    # Each NVFP4 row gets its own scale: with several rows per warp, one or two warps per row, warps that process one
    # block more than others, and two CTAs per row.
    run("quantize", BF, 48, NVT[1], HOPPER, 130, 2, 0, groups=2),
    run("norm", HF, 128, NVT[2], BLACKWELL, 19, 1, 1, groups=2),
    run("quantize", F, 528, NVT[1], BLACKWELL, 140, 3, 0, **WARP_GROUPS),
    run("norm", BF, 512, NVT[1], HOPPER, 130, 2, 1, **WARP_GROUPS, stages=1),
    run("add", BFF, 528, NVT[0], BLACKWELL, 13, 1, 0, **WARP_GROUPS),
    run("silu", HF, 1024, NVT[2], HOPPER, 13, 1, 1, **WARP_GROUPS),
    run("add", HF, 2048, NVT[1], HOPPER, 9, 1, 2, **WIDE_GROUPS),
    run("norm", F, 1024, NVT[0], HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("swiglu", F, 1152, NVT[1], BLACKWELL, 9, 1, 2, **WIDE_GROUPS),
    run("norm", BF, 1536, NVT[1], HOPPER, 20, 1, 0, **FOUR_GROUPS),
    run("swiglu", BF, 1296, NVT[0], HOPPER, 9, 1, 0, **FOUR_GROUPS),
    run("quantize", BF, 1152, NVT[1], HOPPER, 9, 4, 1, **CLUSTER),
    run("add", HF, 1152, NVT[2], BLACKWELL, 9, 4, 0, **CLUSTER),
    run("norm", BF, 2576, NVT[0], HOPPER, 9, 2, 0, **FOUR_GROUPS | {"splits": 2}),
    run("swiglu", HF, 2304, NVT[1], HOPPER, 9, 4, 0, **CLUSTER),
    run("quantize", BF, 528, NVT[1], CONSUMER, 13, 1, 1, **WARP_GROUPS),
    run("add", BF, 1152, NVT[0], CONSUMER, 9, 4, 0, **CLUSTER),
    # One scale that is computed from the tensor: with several rows per warp, one or two warps per row, and two CTAs per
    # row
    run("quantize", HF, 48, DYNAMIC_TENSOR, HOPPER, 19, 1, 1, groups=2),
    run("quantize", F, 528, DYNAMIC_TENSOR, BLACKWELL, 150, 3, 0, **WARP_GROUPS),
    run("quantize", BF, 1024, DYNAMIC_TENSOR, CONSUMER, 70, 40, 2, **WIDE_GROUPS),
    run("quantize", BF, 1152, DYNAMIC_TENSOR, HOPPER, 9, 4, 1, **CLUSTER),
    # The better of two scales per block
    run("quantize", BF, 48, FOUR_SIX_G[1], HOPPER, 130, 2, 0, groups=2),
    run("quantize", F, 528, FOUR_SIX[1], HOPPER, 140, 3, 1, **WARP_GROUPS),
    run("quantize", HF, 528, FOUR_SIX_G[2], BLACKWELL, 19, 2, 0, **WARP_GROUPS),
    run("quantize", F, 1024, FOUR_SIX_G[0], BLACKWELL, 9, 1, 2, **WIDE_GROUPS),
    run("quantize", BF, 1152, FOUR_SIX[0], CONSUMER, 9, 4, 1, **CLUSTER),
    # Block scales of 128 elements that are powers of two
    run("quantize", F, 1152, POWERS, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("quantize", BF, 320, POWER_COLUMNS, CONSUMER, 9, 1, 1, groups=2),
    run("norm", BF, 1152, POWER_COLUMNS, BLACKWELL, 13, 1, 0, **WIDE_GROUPS),
    run("add", HF, 1152, POWERS, HOPPER, 9, 4, 1, **CLUSTER),
    run("swiglu", F, 1152, POWER_COLUMNS, BLACKWELL, 9, 1, 2, **WIDE_GROUPS),
    run("layer", BF, 1152, POWERS, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    # MXFP8: with several rows per warp, one or two warps per row, and two CTAs per row
    run("quantize", BF, 96, MX8[1], HOPPER, 130, 2, 0, groups=2),
    run("quantize", F, 96, MX8[0], CONSUMER, 3, 2, None, stages=1),
    run("norm", HF, 128, MX8[2], BLACKWELL, 35, 1, 1, groups=2),
    run("quantize", BF, 1056, MX8[1], BLACKWELL, 140, 3, 1, **WARP_GROUPS),
    run("norm", BFF, 1056, MX8[1], HOPPER, 132, 2, 1, **WARP_GROUPS, stages=1),
    run("silu", HF, 1024, MX8[1], BLACKWELL, 130, 2, 0, **WARP_GROUPS),
    run("add", F, 2048, MX8[0], HOPPER, 9, 1, 2, **WIDE_GROUPS),
    run("swiglu", F, 2112, MX8[2], BLACKWELL, 9, 1, 0, **WIDE_GROUPS),
    run("layer", BF, 2048, MX8[1], HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("quantize", BF, 2304, MX8[1], CONSUMER, 9, 4, 0, **CLUSTER),
    run("norm", BF, 2304, MX8[0], BLACKWELL, 9, 4, 1, **CLUSTER),
    run("add", HF, 2304, MX8[1], HOPPER, 9, 4, 1, **CLUSTER),
    # The norm multiplies by 1 + weight.
    run("norm1", BF, 512, NVG[1], HOPPER, 130, 2, 0, **WARP_GROUPS),
    run("norm1", HF, 128, NVT[2], BLACKWELL, 19, 1, 1, groups=2),
    run("norm1", F, 1024, TOKEN, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("norm1-norm", BFF, 2560, MX[1], BLACKWELL, 9, 1, 1, **FOUR_GROUPS, stages=1),
    run("add1", BF, 1152, COLUMNS, BLACKWELL, 9, 4, 1, **CLUSTER),
    run("add1-linear-norm", BFF, 528, NV[1], HOPPER, 130, 3, 2, **WARP_GROUPS),
    run("norm1", BF, 528, ROUNDED, HOPPER, 9, 1, 1, **WARP_GROUPS),
    run("add1", HF, 2304, ROUNDED, BLACKWELL, 9, 4, 0, **CLUSTER | WIDE_GROUPS),
    # Gates with GELU
    run("gelu_tanh", BF, 512, NV[1], HOPPER, 130, 2, 0, **WARP_GROUPS),
    run("gelu", HF, 96, MX[2], BLACKWELL, 19, 1, 0, groups=2),
    run("gelu_tanh", F, 1152, BLOCK, BLACKWELL, 9, 1, 2, **WIDE_GROUPS),
    run("gelu", BF, 2880, COLUMNS, HOPPER, 5, 1, 1, **WIDE_GROUPS),
    run("gelu", F, 1296, NVT[1], HOPPER, 9, 1, 0, **FOUR_GROUPS),
    run("gelu_tanh", HF, 2304, TOKEN, HOPPER, 9, 4, 0, **CLUSTER),
    run("gelu", F, 1024, TENSOR, BLACKWELL, 9, 1, 1, **WIDE_GROUPS),
    run("gelu_tanh", F, 1296, ROUNDED, HOPPER, 9, 1, 1, **FOUR_GROUPS),
    run("gelu", F, 1296, ROUNDED, BLACKWELL, 9, 1, 1, **FOUR_GROUPS),
    run("relu2", HF, 512, NV[1], HOPPER, 130, 2, 0, **WARP_GROUPS),
    run("relu2", F, 1296, ROUNDED, HOPPER, 9, 1, 1, **FOUR_GROUPS),
    # LayerNorm, norms without a weight or with a bias: with several rows per warp, one or several warps per row, and
    # several CTAs per row
    run("layer", BF, 128, NVG[1], HOPPER, 131, 2, 0, groups=2),
    run("layer", HF, 96, MX[2], BLACKWELL, 19, 1, 1, groups=2),
    run("layer", BF, 48, TOKEN, HOPPER, 19, 1, 1, groups=2),
    run("layer", BFF, 1056, MX[1], HOPPER, 132, 2, 1, **WARP_GROUPS, stages=1),
    run("layer", BF, 2560, NV[1], HOPPER, 9, 1, 1, **FOUR_GROUPS),
    run("layer", F, 1024, ROUNDED, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("layer", BF, 1152, TOKEN, BLACKWELL, 9, 4, 2, **CLUSTER),
    run("layer", HF, 1152, NVT[1], HOPPER, 9, 4, 1, **CLUSTER),
    run("layer-norm", BFF, 2560, NVG[0], HOPPER, 9, 1, 1, **FOUR_GROUPS, stages=1),
    run("layer-bare", BF, 1152, COLUMNS, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("layer-bare", BF, 2304, ROUNDED, HOPPER, 9, 4, 0, **CLUSTER | WIDE_GROUPS),
    run("norm-bare", BF, 528, NV[2], HOPPER, 140, 3, 1, **WARP_GROUPS),
    run("norm-bare", F, 1152, TENSOR, BLACKWELL, 9, 4, 0, **CLUSTER),
    run("norm-bias", HF, 1024, NVT[0], HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("add-layer", BF, 528, NV[1], HOPPER, 130, 3, 2, **WARP_GROUPS),
    run("add-layer", HF, 1152, BLOCK, HOPPER, 9, 4, 1, **CLUSTER),
    # 16-bit rows are added to a float32 residual.
    run("add-wider", BF, 128, NV[1], HOPPER, 35, 1, 1, groups=2),
    run("add-wider", BFF, 1088, COLUMNS, HOPPER, 9, 1, 0, **WARP_GROUPS),
    run("add-wider", HF, 2304, TOKEN, BLACKWELL, 9, 4, 0, **CLUSTER),
    run("add-wider-linear-norm", HF, 528, NVG[1], HOPPER, 130, 3, 1, **WARP_GROUPS),
    run("add-wider-layer-norm", BF, 2304, NV[0], HOPPER, 9, 4, 0, **CLUSTER | WIDE_GROUPS),
    # Nothing is quantised.
    run("norm", BF, 128, ROUNDED, HOPPER, 19, 1, 0, groups=2),
    run("norm", F, 528, ROUNDED, BLACKWELL, 9, 1, 1, **WARP_GROUPS),
    run("norm", HF, 1152, ROUNDED, HOPPER, 9, 4, 1, **CLUSTER),
    run("add", BFF, 1056, ROUNDED, HOPPER, 9, 1, 2, **WIDE_GROUPS),
    run("add", HF, 2304, ROUNDED, BLACKWELL, 9, 4, 0, **CLUSTER | WIDE_GROUPS),
    run("silu", BF, 14_336, ROUNDED, HOPPER, 2, 4, 0),
    run("swiglu", F, 1296, ROUNDED, HOPPER, 9, 1, 1, **FOUR_GROUPS),
]


@pytest.mark.parametrize("one", RUNS)
def test_row_quant(one: Run) -> None:
    config = one.config
    given = inputs(config, one.rows)
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(config.spec, got, expected(config.spec, *given))


@pytest.mark.parametrize("row", range(14))
def test_special_values_with_one_scale(row: int) -> None:
    """Check tensors with NaN, infinities, zeros, subnormal and extreme values: each row of ``special_rows``."""
    one = Run("quantize", F, 192, DYNAMIC_TENSOR, HOPPER, 0, 1, 0, {})
    x = special_rows(FP32, CPU)[row : row + 1].repeat(3, 1)
    given = x, None, *weight_and_factor(one.config.spec)
    check(one.config.spec, execute(one.config, HOPPER, *given, 4, 0), expected(one.config.spec, *given))


@pytest.mark.parametrize("target", [FOUR_SIX[0], FOUR_SIX_G[0]], ids=["plain", "global scale"])
@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
def test_special_values_with_the_better_of_two_scales(arch: str, target: tuple[str, str]) -> None:
    """Check rows with NaN, infinities, zeros, ties, and blocks whose smaller scale rounds to zero."""
    one = Run("quantize", F, 192, target, arch, 0, 1, 0, {})
    tiny = torch.logspace(-11, -6, 30, base=2)[:, None] * torch.randn(30, 192)
    x = torch.cat((special_rows(FP32, CPU), tiny))
    given = x, None, *weight_and_factor(one.config.spec)
    check(one.config.spec, execute(one.config, arch, *given, 1, 0), expected(one.config.spec, *given))


@pytest.mark.parametrize("rows", [2, 129])
@pytest.mark.parametrize(("what", "target"), [("quantize", NVG[1]), ("silu", NV[0])], ids=["rows", "gate"])
def test_few_rows(what: str, target: tuple[str, str], rows: int) -> None:
    """Check calls with few rows, which are divided into two slices each, and calls with more than 128 rows, which are
    not divided. The second slice is shorter."""
    config = Case(WHAT[what], BF, 2064, target, HOPPER).kernel.config
    assert config.splits == 1 and config.few_rows_config.splits == 2
    given = inputs(config, rows)
    got = execute(config, HOPPER, *given, 4, 0)
    check(config.spec, got, expected(config.spec, *given))


INTERLEAVED = [
    # Several rows share a warp. A thread stores many blocks of zeros at the end of a row.
    (run("silu", HF, 48, TOKEN, HOPPER, 19, 1, 1, groups=2), 0),
    # The last five elements of a row are padding of the input. With a scale of zero, their codes would be NaN.
    (run("swiglu", F, 528, TENSOR, BLACKWELL, 9, 1, 0, **WARP_GROUPS), 5),
    (run("add", BF, 512, TENSOR, HOPPER, 13, 1, 1, **WARP_GROUPS), 0),
    # Two CTAs share a row. Only the second CTA stores zeros.
    (run("norm", BFF, 1152, TOKEN, BLACKWELL, 9, 2, 2, **CLUSTER), 0),
]


@pytest.mark.parametrize(("one", "unused"), [pytest.param(*p.values, unused, id=p.id) for p, unused in INTERLEAVED])
def test_interleaved_codes(one: Run, unused: int) -> None:
    """Check that interleaved codes, scales and sums are equal to the ordinary kernel's bit for bit, and that a row ends
    in zeros."""
    ordinary = one.config
    used = ordinary.spec.width - unused
    spec = dataclasses.replace(ordinary.spec, interleaved=True, norm_width=used)
    x, residual, weight, factor = inputs(ordinary, one.rows)
    if unused:
        x.unflatten(-1, (-1, ordinary.spec.width))[..., used:] = 0.0
        factor = torch.zeros(1)
    given = x, residual, weight, factor
    want = execute(ordinary, one.arch, *given, one.max_ctas, None)
    check(ordinary.spec, want, expected(ordinary.spec, *given))
    assert not unused or want.y[:, used:].isnan().all()
    got = execute(dataclasses.replace(ordinary, spec=spec), one.arch, *given, one.max_ctas, one.seed)
    equal("y", got.y, interleave_k(want.y[:, :used]))
    equal("scale", got.scale, want.scale)
    equal("residual", got.residual, want.residual)


@pytest.mark.parametrize("what", ["layer", "layer-bare", "add-layer"])
def test_mean_of_padded_rows(what: str) -> None:
    """Check that zeros beyond ``norm_width`` change neither the mean nor the variance, and that nothing is added to
    them."""
    config, used = Run(what, BF, 528, TOKEN, HOPPER, 13, 1, 1, WARP_GROUPS).config, 523
    x, residual, weight, _ = inputs(config, 13)
    bias = bias_of(config.spec)
    for tensor in (x, residual, weight, bias):
        if tensor is not None:
            tensor[..., used:] = 0.0
    spec = dataclasses.replace(config.spec, norm_width=used)
    got = execute(dataclasses.replace(config, spec=spec), HOPPER, x, residual, weight, None, 1, 1, bias=bias)
    narrow = dataclasses.replace(spec, width=used)
    given = [None if tensor is None else tensor[..., :used] for tensor in (x, residual, weight)]
    want = expected(narrow, *given, None, bias=None if bias is None else bias[:used])
    check(narrow, got._replace(y=got.y[:, :used], residual=None), want._replace(residual=None))
    assert not got.y[:, used:].view(torch.uint8).any()
    equal("sum", None if residual is None else got.residual[:, :used], want.residual)


@pytest.mark.parametrize("what", ["layer", "layer-bare"])
def test_constant_rows(what: str) -> None:
    """Check that the mean of a constant row is exact, so that LayerNorm gives the bias. A reciprocal of the width would
    not be exact."""
    config = Run(what, BF, 1008, ROUNDED, HOPPER, 3, 1, 0, WARP_GROUPS).config
    x = torch.tensor([200.0, 171.0, -135.0], dtype=BF16)[:, None].repeat(1, 1008)
    weight, _ = weight_and_factor(config.spec)
    got = execute(config, HOPPER, x, None, weight, None, 1, 0)
    bias = bias_of(config.spec)
    equal("norm", got.norm, torch.zeros_like(x) if bias is None else bias.expand(3, -1))


SHORT = [
    # The short block is the whole row, or the last of a few blocks. A warp processes several rows; half of the threads
    # of a short block process no elements.
    run("quantize", BF, 64, COLUMNS, HOPPER, 19, 2, 0, groups=2),
    run("norm", HF, 64, BLOCK, BLACKWELL, 13, 1, 1, groups=2),
    run("add", BFF, 64, COLUMNS, HOPPER, 13, 1, 2, groups=2),
    run("add", F, 192, BLOCK, HOPPER, 13, 1, 0, groups=2, threads_per_row=16),
    run("silu", F, 64, BLOCK, BLACKWELL, 13, 2, 0),
    run("swiglu", HF, 320, COLUMNS, HOPPER, 13, 1, 1, groups=2),
    # A thread processes several blocks. Some threads of a warp, or some warps, are idle at the end.
    run("quantize", F, 576, BLOCK, HOPPER, 9, 1, 0, **WARP_GROUPS),
    run("norm", BF, 960, COLUMNS, HOPPER, 9, 1, 1, **WARP_GROUPS),
    run("add", HF, 1088, BLOCK, BLACKWELL, 9, 1, 2, **WARP_GROUPS),
    run("add", BF, 1216, COLUMNS, HOPPER, 9, 1, 0, **WIDE_GROUPS),
    run("silu", BF, 2880, COLUMNS, HOPPER, 5, 1, 1, **WIDE_GROUPS),
    # Two CTAs share a row. The short block is in the second slice.
    run("norm", F, 1344, BLOCK, HOPPER, 5, 4, 0, **CLUSTER),
    run("add", BF, 2240, COLUMNS, BLACKWELL, 5, 4, 1, **CLUSTER | WIDE_GROUPS),
    run("swiglu", BF, 1344, BLOCK, HOPPER, 5, 4, None, **CLUSTER),
]
"""Rows with FP8 block scales whose last block is half a block."""


@pytest.mark.parametrize("one", SHORT)
def test_short_blocks(one: Run) -> None:
    """Check that the scale of a short block depends only on its own elements: elements before and after it are NaN."""
    config = one.config
    assert config.has_short_block
    x, residual, weight, factor = inputs(config, one.rows)
    x[1::2] = torch.nan
    # In some of the other rows the last block is tiny compared with the rest.
    x[2::4, -64:] *= 2.0**-12
    given = (x, residual, weight, factor)
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    want = expected(config.spec, *given)
    assert not want.scale[::2].isnan().any()
    check(config.spec, got, want)


def test_neighbours_read_before_a_sum_is_stored() -> None:
    """Check that without the barrier the emulator finds a race: a thread next to a short block reads a neighbour's
    elements before the neighbour overwrites them with the sum."""
    config = Run("add", BFF, 64, COLUMNS, HOPPER, 13, 1, 2, {"groups": 2}).config
    given = inputs(config, 13)
    with pytest.raises(Race, match=r"read unordered.*st\.shared"):
        execute(config, HOPPER, *given, 1, 2, edit=changed(r"bar\.warp\.sync", 3))


@pytest.mark.parametrize("target", [NVG[1], NVT[1], MX[0], TENSOR, TOKEN, COLUMNS])
@pytest.mark.parametrize("dtypes", [BF, F], ids=["bf16", "fp32"])
def test_special_gates(dtypes: Any, target: tuple[str, str]) -> None:
    """Check special values of gates with clamps.

    Clamps propagate NaN in gate and in up. Infinities become the limit, except a gate of minus infinity. Other values
    are on both sides of both limits.
    """
    config = Run("swiglu", dtypes, 192, target, HOPPER, 0, 2, 0, {}).config
    special = special_rows(dtypes[0], CPU, 32)
    plain = (torch.randn(special.shape) * 4).to(dtypes[0])
    x = torch.cat((torch.cat((special, plain), -1), torch.cat((plain, special), -1)))
    assert ((x.float() > GATE[2]).any(1) & (x.float() < -GATE[2]).any(1)).sum() > 20
    given = (x, None, *weight_and_factor(config.spec))
    got = execute(config, HOPPER, *given, 2, 0)
    want = expected(config.spec, *given)
    check(config.spec, got, want)
    by_row = dataclasses.replace(config.spec, fmt=FP8_TOKEN, layout=ROW, has_row_scale=False)
    rows = expected(by_row, x, None, None, None).scale.flatten()
    is_nan = torch.zeros(28, dtype=torch.bool)
    # One row with a gate of minus infinity, and rows with NaN in either half
    is_nan[[0, 2, 9, 14, 23]] = True
    assert torch.equal(rows.isnan(), is_nan)


@pytest.mark.parametrize("what", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize(
    ("dtypes", "target", "arch"),
    [(BF, NVG[1], HOPPER), (F, MX[0], BLACKWELL), (F, TOKEN, HOPPER), (HF, ROUNDED, BLACKWELL), (F, ROUNDED, HOPPER)],
)
def test_special_values_of_gelu(what: str, dtypes: Any, target: tuple[str, str], arch: str) -> None:
    """Check special values in gate and in up. Gates cover the range from results of zero to results that equal the
    gate; subnormal and small gates are multiplied by every special row. The kernel must halve a tiny gate exactly: the
    result is multiplied by up to 3e38, so any other rounding would change the scales."""
    config = Run(what, dtypes, 192, target, arch, 0, 2, 0, {}).config
    special = special_rows(dtypes[0], CPU, 32)
    plain = torch.randn(special.shape).to(dtypes[0])
    slope = torch.linspace(-110, 20, special.numel()).reshape(special.shape).to(dtypes[0])
    tiny = torch.cat([torch.cat((special[row].expand_as(special), special), -1) for row in (4, 8)])
    rows = (torch.cat((special, plain), -1), torch.cat((plain, special), -1), torch.cat((slope, plain), -1), tiny)
    given = (torch.cat(rows), None, *weight_and_factor(config.spec))
    got = execute(config, arch, *given, 2, 0)
    want = expected(config.spec, *given)
    check(config.spec, got, want)
    if target == ROUNDED:
        # A gate of minus infinity gives NaN, a gate of plus infinity does not.
        assert torch.equal(want.norm.isnan().any(1)[:3], torch.tensor([True, False, True]))


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
@pytest.mark.parametrize(
    ("what", "bounds"),
    [
        ("gelu_tanh", {-10: 2.0**-15, -6: 2.0**-17, -3: 2.0**-20, -1: 2.0**-22}),
        ("gelu", {-13: 2.0**-17, -6: 2.0**-19, -3: 2.0**-20, -1: 2.0**-21}),
    ],
)
def test_accuracy_of_gelu(what: str, bounds: dict[int, float], arch: str) -> None:
    """Check the largest relative errors that docs/numerics.md gives, compared with float64. There is one error for each
    interval of gates, from one key of ``bounds`` to the next."""
    one = Run(what, F, 2048, ROUNDED, arch, 0, 4, None, {})
    gate = torch.cat((torch.linspace(-13, 0, 2048 * 6), torch.linspace(0, 10, 2048 * 2))).reshape(-1, 2048)
    given = (torch.cat((gate, torch.ones_like(gate)), 1), None, None, None)
    got = execute(one.config, arch, *given, one.max_ctas, one.seed).norm
    x = gate.double()
    if what == "gelu":
        want = x * torch.special.erfc(-x * 0.5**0.5) / 2
    else:
        # This equals x · (1 + tanh(z)) / 2 without the cancellation.
        want = x / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        torch.testing.assert_close(want, torch.nn.functional.gelu(x, approximate="tanh"), rtol=0, atol=1e-14)
    error = ((got.double() - want) / want).abs().nan_to_num()  # 0 / 0 for a gate of zero
    for (least, bound), most in zip(bounds.items(), (*list(bounds)[1:], 11), strict=True):
        within = (x >= least) & (x < most)
        assert error[within].max() < bound, least


@pytest.mark.parametrize(("dtypes", "target"), [(BF, NV[1]), (HF, MX[1])], ids=["bf16-nvfp4", "fp16-mxfp4"])
def test_a_block_left_out_changes_no_bit(dtypes: Any, target: tuple[str, str]) -> None:
    """Check that results are bitwise equal whether warps without a last block skip the code for it (in a norm) or
    execute it (when they normalise a sum).

    In fp16, the results also show in which rows the norm's factor multiplies whole blocks instead of elements.
    """
    whats = ("norm-norm", "add-norm")
    norm, of_sum = (Run(what, dtypes, 2560, target, HOPPER, 9, 1, 0, FOUR_GROUPS).config for what in whats)
    assert norm.common_blocks < of_sum.common_blocks == norm.blocks_per_thread == of_sum.blocks_per_thread
    x, _, weight, factor = inputs(norm, 9)
    alone = execute(norm, HOPPER, x, None, weight, factor, 1, 0)
    # A residual of -0 keeps the sign of zeros in x.
    with_zeros = execute(of_sum, HOPPER, x, torch.full_like(x, -0.0), weight, factor, 1, 0)
    for name in ("y", "scale", "norm"):
        equal(name, getattr(alone, name), getattr(with_zeros, name))


@pytest.mark.parametrize("target", [NV[1], TOKEN, COLUMNS])
def test_a_configuration_from_another_process(target: tuple[str, str]) -> None:
    """Check a configuration whose formats and layouts are equal to, but not the same objects as, this process's."""
    one = Run("silu", BF, 512, target, HOPPER, 9, 1, 0, WARP_GROUPS)
    config = pickle.loads(pickle.dumps(one.config))
    given = inputs(config, one.rows)
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(one.config.spec, got, expected(one.config.spec, *given))


SPECIAL = [
    run("quantize", BF, 192, NV[1], HOPPER, 14, 2, 0),
    run("quantize", HF, 192, MX[2], BLACKWELL, 14, 2, 0),
    run("quantize", F, 192, NVG[0], HOPPER, 14, 2, 0),
    run("norm", BF, 192, NV[0], BLACKWELL, 14, 2, 0),
    run("add-norm", F, 192, MX[1], HOPPER, 14, 2, 0),
    run("norm-norm", F, 192, NV[1], HOPPER, 14, 2, 0),
    run("norm-norm", BF, 192, NV[0], HOPPER, 14, 2, 0),
    run("norm", BF, 192, TOKEN, HOPPER, 14, 2, 0),
    run("add", F, 192, TENSOR, BLACKWELL, 14, 2, 0),
    run("norm", BF, 192, MX[0], HOPPER, 14, 2, 0),
    run("norm", F, 768, BLOCK, HOPPER, 14, 2, 0),
    run("add", BF, 768, BLOCK, BLACKWELL, 14, 2, 0),
    run("quantize", BF, 192, TOKEN, HOPPER, 14, 2, 0),
    run("quantize", F, 192, TENSOR, BLACKWELL, 14, 2, 0),
    run("quantize", HF, 192, COLUMNS, HOPPER, 14, 2, 0),
    run("quantize", BF, 192, NVT[0], HOPPER, 14, 2, 0),
    run("quantize", HF, 192, NVT[1], BLACKWELL, 14, 2, 0),
    run("quantize", F, 192, NVT[2], HOPPER, 14, 2, 0),
    run("norm", BF, 192, NVT[1], BLACKWELL, 14, 2, 0),
    run("norm", F, 192, NVT[0], HOPPER, 14, 2, 0),
    run("add", HF, 768, NVT[1], HOPPER, 14, 2, 0),
    run("norm", BF, 192, ROUNDED, HOPPER, 14, 2, 0),
    run("add", F, 192, ROUNDED, BLACKWELL, 14, 2, 0),
    run("quantize", F, 768, POWERS, HOPPER, 14, 2, 0),
    run("norm", BF, 768, POWER_COLUMNS, BLACKWELL, 14, 2, 0),
    run("quantize", F, 192, MX8[1], HOPPER, 14, 2, 0),
    run("norm", BF, 192, MX8[0], BLACKWELL, 14, 2, 0),
    run("norm", F, 192, MX8[1], CONSUMER, 14, 2, 0),
    run("add", F, 192, MX8[2], HOPPER, 14, 2, 0),
]


@pytest.mark.parametrize("one", SPECIAL)
def test_special_values(one: Run) -> None:
    config = one.config
    x = special_rows(one.dtypes[0], CPU, config.spec.width // 6)
    residual = torch.zeros_like(x) if config.spec.source == "add" else None
    given = (x, residual, *weight_and_factor(config.spec))
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(config.spec, got, expected(config.spec, *given))


@pytest.mark.parametrize(("what", "arch"), [("quantize", HOPPER), ("quantize", BLACKWELL), ("silu", HOPPER)])
def test_row_scales_of_every_magnitude(what: str, arch: str) -> None:
    """Check rows of every order of magnitude of fp32, whose blocks are 1 to 2^-20 times the row's amax.

    The rows include the smallest and the largest row scale, the row scales at which rows are multiplied by a power of
    two, and rows whose scale is zero.
    """
    one = Run(what, F, 96, NVT[0], arch, 0, 3, 0, {})
    powers = torch.arange(-149, 128)
    torch.manual_seed(1)
    shape = (len(powers), 6, 16)
    rows = (torch.rand(shape) + 1) * torch.randn(shape).sign() * 2.0 ** -(4.0 * torch.arange(6)[:, None])
    x = torch.ldexp(rows.double(), powers[:, None, None]).clamp(-FLT_MAX, FLT_MAX).float().flatten(1)
    # Row scales next to the bounds: 2^-126, 2^-60 and 2^60.
    bounds = 2688 * torch.tensor([2.0**-126, 2.0**-60, 2.0**60], dtype=torch.float32)
    near = torch.stack(
        (bounds, bounds.nextafter(torch.tensor(0.0)), bounds.nextafter(torch.tensor(torch.inf)))
    ).flatten()
    x = torch.cat((x, torch.linspace(-1, 1, 96).float() * near[:, None]))
    if what == "silu":
        x = torch.cat((torch.full_like(x, 1.0), x), 1)  # silu(1) = 0.731
    given = (x, None, None, None)
    got = execute(one.config, arch, *given, one.max_ctas, one.seed)
    want = expected(one.config.spec, *given)
    check(one.config.spec, got, want)
    assert (want.row_scale == 0).sum() > 20 and (want.row_scale > 2.0**60).sum() > 20
    if what == "quantize":
        assert want.row_scale[-9] == 2.0**-126 and want.row_scale[-6] == 0 and want.row_scale[-3] > 2.0**-126


@pytest.mark.parametrize("target", [TENSOR, TOKEN, BLOCK])
def test_zeros_keep_their_sign(target: tuple[str, str]) -> None:
    one = Run("silu", BF, 512, target, HOPPER, 4, 1, 0, WARP_GROUPS)
    config = one.config
    x = torch.randn(4, 1024).to(BF16)
    x[:, ::7] *= 0.0
    given = (x, None, *weight_and_factor(config.spec))
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(config.spec, got, expected(config.spec, *given))


@pytest.mark.parametrize(
    ("dtype", "width", "target", "arch"),
    [(BF16, 128, NV[1], HOPPER), (FP16, 96, MX[2], BLACKWELL), (FP32, 48, NVG[0], HOPPER)],
)
def test_dequantize(dtype: torch.dtype, width: int, target: tuple[str, str], arch: str) -> None:
    """Check the dequantising kernel with every byte as codes, and with every byte as a scale."""
    torch.manual_seed(0)
    case = Case(WHAT["dequantize"], (dtype, dtype), width, target, arch)
    kernel = case.kernel
    c, rows = kernel.config, 131
    codes = torch.arange(rows * width // 2).to(torch.uint8).reshape(rows, -1)
    scale = torch.randint(256, c.layout.shape((rows,), c.blocks), dtype=torch.uint8)
    factor = torch.tensor([3.0]) if c.global_scale else None
    out = poisoned(rows, width, dtype=dtype)
    arguments = fp4_dequant.Arguments(y=codes, scale=scale, global_scale=factor, out=out, max_ctas=2)
    run_kernel(kernel, ARCHS[arch], *arguments, seed=0)
    want = fp4_dequantize(
        codes,
        scale.view(c.fmt.scale_dtype),
        factor,
        block_size=c.fmt.block_size,
        scale_layout=case.target[1],
        out_dtype=dtype,
    )
    equal("out", out, want)


def test_rows_of_a_warp_take_their_amax_again() -> None:
    """Check rows that share a warp, where the row factors of some rows cannot be folded into the products."""
    one = Run("norm", HF, 512, TOKEN, HOPPER, 13, 1, 0, {"groups": 2})
    config = one.config
    assert config.group_rows > 1
    given = inputs(config, one.rows)
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(config.spec, got, expected(config.spec, *given))


# Order of events


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(changed(r"bar\.sync\s+0"), id="barriers initialised"),
        pytest.param(changed(r"bar\.sync\s+%"), id="sums complete and buffer free"),
        pytest.param(changed(WAIT, 0, PASSED), id="weight complete"),
        pytest.param(changed(WAIT, 1, PASSED), id="row complete"),
        pytest.param(changed(r"mbarrier\.arrive\.expect_tx", -1), id="copy expected"),
        pytest.param(lambda ptx: ptx.replace("setp.lt.s32", "setp.le.s32"), id="one too many"),
    ],
)
def test_broken_kernels_are_noticed(edit: Any) -> None:
    """Check that a kernel without one of its barriers, or with another fault, is detected."""
    one = Run("norm", HF, 1024, NV[0], HOPPER, 9, 1, 0, WIDE_GROUPS)
    config = one.config
    given = inputs(config, one.rows)
    with pytest.raises((EmulationError, AssertionError)):
        got = execute(config, one.arch, *given, one.max_ctas, one.seed, edit=edit)
        check(config.spec, got, expected(config.spec, *given))


def test_sums_of_other_ctas_are_acquired() -> None:
    """Check that the threads of a cluster must acquire, at cluster scope, the sums that other CTAs send."""
    one = Run("norm", HF, 1152, NV[1], HOPPER, 5, 2, 0, CLUSTER)
    given = inputs(one.config, one.rows)
    got = execute(one.config, one.arch, *given, one.max_ctas, one.seed)
    check(one.config.spec, got, expected(one.config.spec, *given))
    with pytest.raises(Race, match="which an asynchronous copy wrote unordered"):
        execute(one.config, one.arch, *given, one.max_ctas, one.seed, edit=changed(ACQUIRE, None))


LOADED = [
    # Runs, with the index of the fence that is needed before rows are overwritten. The fence comes after the loads, or
    # after a second read of the row.
    (run("quantize", F, 1024, MX[1], HOPPER, 20, 1, 0, **WARP_GROUPS), 0),
    (run("quantize", BF, 512, NV[1], BLACKWELL, 20, 1, 0, **WARP_GROUPS), 0),
    (run("silu", BF, 512, TENSOR, HOPPER, 20, 1, 0, **WARP_GROUPS), 0),
    (run("add", HF, 512, TENSOR, HOPPER, 20, 1, 0, **WARP_GROUPS), 1),
    (run("norm", HF, 128, NVG[1], HOPPER, 131, 2, 0, groups=2), 0),
    (run("norm", BF, 1024, NVG[0], BLACKWELL, 9, 1, 1, **WIDE_GROUPS, stages=1), 0),
]


@pytest.mark.parametrize(("one", "fence"), [pytest.param(*p.values, fence, id=p.id) for p, fence in LOADED])
def test_loads_come_before_copies_of_the_next_rows(one: Run, fence: int) -> None:
    """Check that the fence is needed, because a barrier alone does not order loads before later copies."""
    config = one.config
    given = inputs(config, one.rows)
    got = execute(config, one.arch, *given, one.max_ctas, one.seed)
    check(config.spec, got, expected(config.spec, *given))
    with pytest.raises(Race, match="may not have loaded yet"):
        execute(config, one.arch, *given, one.max_ctas, one.seed, edit=changed(r"fence\.proxy\.async", fence))
