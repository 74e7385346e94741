"""GEMM problems of every kind, and targets that stand for absent GPUs."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, MXFP8, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.fp8 import COLUMN, FP8_TENSOR, FP8_TOKEN
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.problem import ALL_ROWS, GemmProblem, Grouping, Operand
from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.runtime.arch import ARCHS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = Target(torch.device("cpu"), None, 1, "GPU of test")
"""CPU target with a device name, for which the tuner stores choices as for a GPU."""
HOPPER = Target(torch.device("cuda"), ARCHS["sm_90a"], 132)
H100 = replace(HOPPER, bandwidth=3.35e12)
ROW_LAYOUTS = (ALL_ROWS, ExpertLayout(True), ExpertLayout(True, True), ExpertLayout(False, True))


def fp4_problem(
    n=4096, k=7168, fmt=NVFP4, a_dtype=None, layout="128x4", out_dtype=BF16, experts=None, alpha=None, bias_dtype=None
):
    """Return a GEMM problem with an FP4 weight. Activations are 16-bit if ``a_dtype`` is given; K is divided among
    experts if ``experts`` is given."""
    b_layout = SCALE_LAYOUTS["128x4" if layout == "8x4" else layout]
    a = Operand(fmt, SCALE_LAYOUTS[layout]) if a_dtype is None else Operand(a_dtype)
    grouping = Grouping() if experts is None else Grouping("k", experts)
    return GemmProblem(a, Operand(fmt, b_layout), n, k, Epilogue(out_dtype, alpha, bias_dtype), grouping)


def gated_problem(
    n=12 * 64,
    k=96,
    fmt=NVFP4,
    a_dtype=None,
    layout="128x4",
    experts=12,
    alpha=None,
    bias_dtype=None,
    gate="silu",
    global_scale=None,
):
    """Return a GEMM problem with a gate, in which each expert owns columns of the result. Activations and results are
    16-bit if ``a_dtype`` is given."""
    b_layout = SCALE_LAYOUTS["128x4" if layout == "8x4" else layout]
    a = Operand(fmt, SCALE_LAYOUTS[layout]) if a_dtype is None else Operand(a_dtype)
    return GemmProblem(
        *(a, Operand(fmt, b_layout), n, k, Epilogue(a_dtype or BF16, alpha, bias_dtype), Grouping("n", experts)),
        gate=gate,
        quantised=a if a_dtype is None else None,
        global_scale=global_scale,
    )


def fp8_problem(n=4096, k=7168, rows=ALL_ROWS, experts=1, out_dtype=BF16, alpha=None, bias_dtype=None):
    """Return a GEMM problem of FP8 matrices with block scales, grouped if there are several experts."""
    grouping = Grouping() if rows.is_plain else Grouping("rows", experts, rows)
    epilogue = Epilogue(out_dtype, alpha, bias_dtype)
    return GemmProblem(Operand(FP8_BLOCK128, COLUMN), Operand(FP8_BLOCK128), n, k, epilogue, grouping)


def mx_problem(n=4096, k=7168, out_dtype=BF16, alpha=None, bias_dtype=None, rows=ALL_ROWS, experts=1):
    """Return a GEMM problem of MXFP8 matrices, grouped if there are several experts."""
    grouping = Grouping() if rows.is_plain else Grouping("rows", experts, rows)
    return GemmProblem(Operand(MXFP8), Operand(MXFP8), n, k, Epilogue(out_dtype, alpha, bias_dtype), grouping)


def token_problem(
    n=4096,
    k=7168,
    out_dtype=BF16,
    bias_dtype=None,
    one_a_scale=False,
    one_b_scale=False,
    fast_accum=False,
    rows=ALL_ROWS,
    experts=1,
):
    """Return a GEMM problem of FP8 matrices with per-token and per-channel scales, or one scale per matrix, grouped if
    there are several experts."""
    a, b = (Operand(FP8_TENSOR if one else FP8_TOKEN) for one in (one_a_scale, one_b_scale))
    grouping = Grouping() if rows.is_plain else Grouping("rows", experts, rows)
    return GemmProblem(a, b, n, k, Epilogue(out_dtype, None, bias_dtype), grouping, fast_accum=fast_accum)


def fp8_fp4_problem(fmt=NVFP4, layout="128x4", **kwargs):
    """Return a GEMM problem of FP8 activations and an FP4 weight, grouped if there are several experts."""
    return replace(fp8_problem(**kwargs), b=Operand(fmt, SCALE_LAYOUTS[layout]))


def backend_for(name, problem):
    """Return the backend that has this name and handles the problem."""
    (found,) = (backend for backend in BACKENDS if backend.name == name and backend.handles(problem))
    return found


def check_needs_tcgen05(backend, problem):
    """Check that a backend supports a problem on all GPUs with tcgen05, and that it gives the reason on others."""
    for arch in ARCHS.values():
        reason = backend.reason_unsupported(problem, usual_targets(arch)[0])
        assert reason == (None if arch.has_tcgen05 else f"needs data-center Blackwell's tcgen05; this is {arch.name}")
    assert "needs a CUDA device" in backend.reason_unsupported(problem, CPU)


def problems():
    """Yield small GEMM problems of every kind without a gate."""
    for fmt in (NVFP4, MXFP4):
        for out_dtype in (BF16, FP16, FP32):
            alpha = {BF16: None, FP16: "column", FP32: "one"}[out_dtype]
            bias = {BF16: FP32, FP16: FP16, FP32: None}[out_dtype]
            for a_dtype, layout in ((None, "8x4"), (None, "linear"), (BF16, "128x4")):
                yield fp4_problem(40, 96, fmt, a_dtype, layout, out_dtype, alpha=alpha, bias_dtype=bias)
            yield fp4_problem(40, 12 * 64, fmt, a_dtype, layout, out_dtype, experts=12, bias_dtype=bias)
    yield fp4_problem(40, 96, MXFP4, FP16, out_dtype=FP32)
    for fmt, a_dtype in ((NVFP4, BF16), (MXFP4, FP16)):
        plain = fp4_problem(40, 96, fmt, a_dtype, out_dtype=FP32)
        for gate in ("silu", "gelu_tanh" if fmt == NVFP4 else "relu2"):
            yield replace(plain, prologue_gate=gate)
        for gate in (None, "gelu" if fmt == NVFP4 else "silu"):
            yield replace(plain, prologue_gate=gate, prologue_quant="plain")
    # Only NVFP4 has a global scale.
    for a_dtype, layout, gate in ((FP16, "linear", None), (BF16, "128x4", "silu"), (FP16, "128x4", "gelu_tanh")):
        plain = fp4_problem(40, 96, NVFP4, a_dtype, layout, alpha="column", bias_dtype=FP32)
        yield replace(plain, prologue_gate=gate, prologue_quant="scaled")
    for rows in ROW_LAYOUTS:
        alphas = (None, "one", "column") if rows.is_plain else (None, "one", "expert", "expert_column")
        for alpha, bias in zip(alphas, (None, FP32, BF16, None), strict=False):
            given = {"rows": rows, "experts": 1 if rows.is_plain else 3, "alpha": alpha, "bias_dtype": bias}
            yield fp8_problem(40, 192, **given)
            for fmt, layout in ((NVFP4, "128x4"), (MXFP4, "linear")) if alpha != "one" else ():
                yield fp8_fp4_problem(fmt, layout, n=40, k=192, **given)
    for i, out_dtype in enumerate((BF16, FP16, FP32)):
        bias = (None, FP16, FP32)[i]
        yield token_problem(40, 192, out_dtype, bias, one_a_scale=i == 1, one_b_scale=i > 0, fast_accum=i == 2)
        yield token_problem(48, 192, out_dtype, bias, one_a_scale=i != 1, one_b_scale=i != 2, fast_accum=i == 0)
        given = {"rows": ROW_LAYOUTS[i + 1], "experts": 3, "one_a_scale": i == 2, "one_b_scale": i == 0}
        yield token_problem(40, 192, out_dtype, bias, fast_accum=i == 1, **given)


def gated_problems():
    """Yield small GEMM problems of every kind with a gate."""
    for fmt in (NVFP4, MXFP4):
        for i, layout in enumerate(("linear", "128x4", "8x4")):
            alpha, scale = (None, "expert", "expert_half")[i], (None, "one", "expert")[i] if fmt == NVFP4 else None
            given = {"alpha": alpha, "bias_dtype": (FP32, None, BF16)[i], "gate": ("swiglu", "silu", "gelu_tanh")[i]}
            yield gated_problem(fmt=fmt, layout=layout, global_scale=scale, **given)
            if layout != "8x4":
                yield gated_problem(fmt=fmt, layout=layout, a_dtype=(BF16, FP16)[i], **given)


def problem_id(problem):
    """Return a short description of a problem without spaces, for test ids."""

    def leaves(value):
        return [leaf for each in value.values() for leaf in leaves(each)] if isinstance(value, dict) else [value]

    return "-".join(map(str, leaves(problem.described())))
