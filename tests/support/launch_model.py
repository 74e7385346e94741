"""A model of compiled kernels, with which the ops' CUDA entries run on CPU tensors.

It takes and refuses tensors as a function compiled through TVM-FFI does, by what the kernel's ``arguments()`` declare,
and computes with the reference. So the way of a call (look-up, checks, copies, allocation, errors) is tested without a
GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_cute_ops import mm_backends
from torch_cute_ops.formats import FP8_BLOCK128, FP4Format
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.mm_backends import Target, _decode, cublas, mma_sync, routed, wgmma
from torch_cute_ops.ops import _fp4_product, _fp8_product, _kernels, _row_quant, fp4_dequantize
from torch_cute_ops.reference.fp4_dequantize import fp4_dequantize as dequantize
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.grouped_mm_fp8 import grouped_mm_fp8
from torch_cute_ops.reference.mm_fp4 import product, row_sums
from torch_cute_ops.reference.mm_fp8_block import mm_fp8_block
from torch_cute_ops.reference.moe_fc2_fp4 import expert_product
from torch_cute_ops.reference.moe_finalize import moe_finalize
from torch_cute_ops.reference.moe_route import moe_route
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows
from torch_cute_ops.reference.rmsnorm_fp8quant import quantize_fp8_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg
from torch_cute_ops.runtime.compiler import Wanted

DSL_NAMES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.uint8: "Uint8",
    torch.int32: "Int32",
}


class Launches:
    """What was compiled, and what was launched: for each launch the kernel and its arguments."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def compile_kernel(self, wanted: Wanted, arch: Any) -> Any:
        kernel = wanted.make()
        self.compiled.append(kernel)

        def function(*args: Any) -> None:
            declared = kernel.arguments()
            assert len(args) == len(declared), "wrong number of arguments"
            dims: dict[Dim, int] = {}
            for i, (value, argument) in enumerate(zip(args, declared, strict=True)):
                fit(f"argument {i}", value, argument, dims)
            self.calls.append((kernel, args))
            compute(kernel, *args)

        return function


def fit(name: str, value: Any, argument: Argument, dims: dict[Dim, int]) -> None:
    """Raise as TVM-FFI does where ``value`` is not what is declared."""
    if argument is None:
        assert value is None, f"{name}: the kernel was made for None"
    elif isinstance(argument, ScalarArg):
        if not isinstance(value, int if argument.dtype.startswith("Int") else int | float):
            raise TypeError(f"{name} is no {argument.dtype}")
    else:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is no tensor")
        fit_tensor(name, value, argument, dims)


def fit_tensor(name: str, value: torch.Tensor, argument: TensorArg, dims: dict[Dim, int]) -> None:
    if value.device.type == "meta":
        raise RuntimeError("Cannot pack tensors on meta")  # from DLPack, before TVM-FFI sees the tensor
    # TVM-FFI tells integers by their size.
    if value.dtype is torch.int8 and argument.dtype == "Uint8":
        value = value.view(torch.uint8)
    if value.dtype is torch.uint32 and argument.dtype == "Int32":
        value = value.view(torch.int32)
    if DSL_NAMES.get(value.dtype) != argument.dtype:
        raise ValueError(f"{name}: dtype {value.dtype}, not {argument.dtype}")
    if value.dim() != len(argument.shape):
        raise ValueError(f"{name}: {value.dim()} dimensions")
    for what, actual, declared in (("shape", value.shape, argument.shape), ("stride", value.stride(), argument.stride)):
        for i, (got, want) in enumerate(zip(actual, declared, strict=True)):
            if what == "stride" and value.shape[i] == 1:
                continue
            if isinstance(want, Dim):
                if dims.setdefault(want, got) != got or got % want.divisibility:
                    raise ValueError(f"{name}: {what} {tuple(actual)}")
            elif got != want:
                raise ValueError(f"{name}: {what} {tuple(actual)}, not {declared}")
    if value.data_ptr() % argument.align:
        raise ValueError(f"{name}: alignment")


def compute(kernel: Any, *args: Any) -> None:
    """What the kernel would."""
    config = kernel.config
    if type(kernel).__name__ == "FP4DequantKernel":
        y, scale, g, out, _ = args
        scale = scale.view(config.fmt.scale_dtype)
        value = dequantize(y, scale, g, config.fmt.block_size, None, config.layout.name, config.out_dtype)
        write(out, value)
        return
    if type(kernel).__name__ == "FP4MmaKernel":
        a, b, scale, alpha, out = args
        write(out, product(a, None, b.t(), scale, alpha, config.out_dtype, config.fmt, None, config.layout))
        return
    if type(kernel).__name__ == "FP4WgmmaKernel":
        a, a_scale, b, scale, alpha, out, workspace, workers, shares = args
        tiles = -(-len(a) // config.tokens)
        assert config.arranges or workspace.numel() == tiles * config.workspace_bytes(
            2 * len(b), workers, shares=bool(shares)
        )
        layouts = config.a_layout, config.layout
        multiply = product if config.width is None else expert_product
        write(out, multiply(a, a_scale, b.t(), scale, alpha, config.out_dtype, config.fmt, *layouts))
        return
    if type(kernel).__name__ == "FP4ExpertsKernel":
        a, a_scale, b, scale, alpha, out, workspace, workers = args
        assert workspace.numel() == config.workspace_bytes(len(a), alpha.shape[1], workers)
        layouts = config.a_layout, config.layout
        write(out, expert_product(a, a_scale, b.t(), scale, alpha, config.out_dtype, config.fmt, *layouts))
        return
    if type(kernel).__name__ == "MoeFinalizeKernel":
        *given, out, _ = args
        write(out, moe_finalize(*given))
        return
    if type(kernel).__name__ in ("FP8WgmmaKernel", "FP8MmaKernel"):
        *operands, out, workers = args
        assert workers > 0
        # The kernel takes it that experts' rows follow each other.
        operands[0], out = as_if_contiguous(operands[0]), as_if_contiguous(out)
        if config.rows.is_plain:
            write(out, mm_fp8_block(*operands[:4], config.out_dtype))
            return
        used = used_rows(out.shape[:-1].numel(), *operands[4:]).view(out.shape[:-1])
        out.data[used] = grouped_mm_fp8(*operands, config.out_dtype)[used]
        return
    if type(kernel).__name__ == "MoeRouteKernel":
        logits, bias, *outputs, workspace, scaling, unit, sms = args
        words = config.workspace_words(len(logits), len(outputs[3]), sms)
        assert words == (0 if workspace is outputs[5] else len(workspace))
        room = {"max_rows": unit} if config.is_masked else {"alignment": unit}
        scoring = ("sigmoid" if config.is_sigmoid else "softmax", config.num_groups, config.topk_groups)
        results = moe_route(logits, config.topk, bias, *scoring, config.renormalize, scaling, **room)
        for output, result in zip(outputs, results, strict=True):
            write(output, result)
        return
    if type(kernel).__name__ == "MoePermuteKernel":
        x, y, scale, places, pairs, workspace = args
        kept = config.workspace_shape(len(x))
        assert kept is None or workspace.shape == kept
        write_copies(*quantize_fp8_rows(x.float(), FP8_BLOCK128, None, COLUMN), places, pairs, y, scale)
        return
    x, residual, weight, factor, y, scale, linear, norm, index, counts, eps, _ = args
    problem = config.problem
    if problem.rows == "experts":
        used = used_rows(len(x), index, counts)
        x = torch.where(used[:, None], x, 0.0)
        results = quantize_fp8_rows(silu_mul_rows(x), problem.fmt, None, problem.layout)
        y.data.view(torch.uint8)[used] = results[0].view(torch.uint8)[used]
        scale.data[:, used] = results[1][:, used]
        return
    if residual is not None:
        write(residual, x.float() + residual.float())
        x = residual
    if problem.source == "silu_mul":
        value = silu_mul_rows(x)
    elif weight is None:
        value = x.float()
    else:
        padding = (0, problem.width - problem.norm_width)
        within = slice(0, problem.norm_width)
        value = torch.nn.functional.pad(rmsnorm_rows(x[:, within], weight[within], eps), padding)
    if isinstance(problem.fmt, FP4Format):
        results = quantize_rows(value, problem.fmt, factor, problem.layout.name)
        if linear is not None:
            write(linear, quantize_rows(value, problem.fmt, factor, "linear")[1])
    else:
        results = quantize_fp8_rows(value, problem.fmt, factor, problem.layout)
    for output, result in zip((y, scale), results, strict=True):
        write(output, result)
    if norm is not None:
        write(norm, value)


def as_if_contiguous(tensor: Any) -> Any:
    """What a kernel finds that does not look at strides, from the first element on."""
    stride = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == stride else tensor.data.as_strided(tensor.shape, stride)


def write_copies(
    codes: torch.Tensor, scales: torch.Tensor, places: torch.Tensor, pairs: torch.Tensor, y: Any, scale: Any
) -> None:
    """Copies of rows of codes and columns of scales; codes by where pairs go, scales by where rows are from."""
    # Before torch 2.13 there is no indexing of FP8.
    y, codes = y.data.view(torch.uint8), codes.view(torch.uint8)
    for copies in places.t():
        exists = copies >= 0
        y[copies[exists].long()] = codes[exists]
    used = pairs >= 0
    scale.data[:, used] = scales[:, pairs[used].long() // places.shape[1]]


def write(output: torch.Tensor, value: torch.Tensor) -> None:
    """As a kernel writes: PyTorch does not notice."""
    output.data.copy_(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """CUDA entries that take CPU tensors; what was launched is recorded."""
    recorded = Launches()
    for module in (_fp8_product, _row_quant, _kernels, fp4_dequantize, mma_sync, routed, wgmma):
        monkeypatch.setattr(module, "compile_kernel", recorded.compile_kernel)
    for module in (_fp8_product, _row_quant, _kernels, fp4_dequantize):
        monkeypatch.setattr(module, "arch_of_device", lambda index: ARCHS["sm_90a"])
        monkeypatch.setattr(module, "sm_count", lambda index: 132)
        monkeypatch.setattr(module, "forbid_in_capture", lambda *args: None)
    monkeypatch.setattr(mm_backends, "target_of", lambda device: Target(torch.device("cuda"), ARCHS["sm_90a"], 132))
    monkeypatch.setattr(_decode.dequantize, "fp4_dequantize", fp4_dequantize._run)
    monkeypatch.setattr(_fp4_product, "forbid_in_capture", lambda *args: None)
    # In the reference's order, on which float64 sums depend where large terms cancel.
    monkeypatch.setattr(cublas, "_sums", lambda a, weight: row_sums(a.double(), weight.double()).float())
    make = _row_quant.RowQuant._make_launcher
    on_cpu = lambda self, facts: replace(make(self, facts._replace(device=0)), device=torch.device("cpu"))  # noqa: E731
    monkeypatch.setattr(_row_quant.RowQuant, "_make_launcher", on_cpu)
    # Launchers of the model must not outlive it, nor real ones be met in it.
    monkeypatch.setattr(fp4_dequantize, "_launchers", {})
    for op in OPS.values():
        for value in vars(sys.modules[op.function.__module__]).values():
            if isinstance(value, _fp4_product.FP4Product):
                monkeypatch.setattr(value, "_usual", {})
                monkeypatch.setattr(value, "_launchers", {})
                monkeypatch.setattr(value, "_ran", set())
            if isinstance(value, _kernels.Kernels):
                monkeypatch.setattr(value, "found", {})
            if isinstance(value, _fp8_product.FP8Product):
                monkeypatch.setattr(value, "_usual", {})
                monkeypatch.setattr(value, "_ran", {})
            if isinstance(value, _row_quant.RowQuant):
                for launchers in ("_launchers", "_padding_launchers"):
                    monkeypatch.setattr(value, launchers, {})
    return recorded
