"""A model of compiled kernels, to run the ops' CUDA implementations on CPU tensors.

Like a function compiled through TVM-FFI, the model of a kernel checks its tensors against the kernel's ``arguments()``.
Then it computes the result with the reference. In this way, the host side of a call (cache look-up, checks, copies,
allocation, errors) is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.cases import forget
from torch_cute_ops.formats import FP8_BLOCK128, SCALE_LAYOUTS, FP4Format, resolve_fp8_format
from torch_cute_ops.formats import interleave as formats_interleave
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.formats.fp4 import decode_ue8m0
from torch_cute_ops.formats.fp8 import FP8_DYNAMIC_TENSOR
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.gemm import decode, select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends import _fp4, _fp8, cublas, mxfp8_wgmma, separate_prologue
from torch_cute_ops.gemm.backends import fp8_fp4_recode as recoded
from torch_cute_ops.gemm.backends import fp8_fp4_token_recode as recoded_tokens
from torch_cute_ops.gemm.backends import fp8_fp4_token_wgmma as tokens
from torch_cute_ops.kernels import (
    fp4_experts,
    fp4_gated_experts,
    fp4_mma,
    fp4_weight_tcgen05,
    fp8_fp4_recode,
    fp8_fp4_tcgen05,
    fp8_fp4_token_recode,
    fp8_fp4_token_wgmma,
    fp8_square_blocks,
    fp8_token_wgmma,
    fp8_wgmma,
    interleave_k,
    moe_finalize,
    moe_permute,
    moe_route,
    moe_route_dense,
    moe_route_ids,
    mxfp8_fold,
    mxfp8_tcgen05,
    qkv_rope,
    row_quant,
)
from torch_cute_ops.kernels import fp4_wgmma as fp4_wgmma_kernel
from torch_cute_ops.kernels import mxfp8_wgmma as mxfp8_wgmma_kernel
from torch_cute_ops.ops import _call, _checks
from torch_cute_ops.reference.fp4_quantize import quantize_rows
from torch_cute_ops.reference.fp4_quantize_four_over_six import quantize_rows_four_over_six
from torch_cute_ops.reference.fp4_quantize_per_token import quantize_rows_per_token
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows
from torch_cute_ops.reference.grouped_mm_fp8 import grouped_gemm, grouped_mxfp8_gemm, grouped_token_gemm
from torch_cute_ops.reference.mm_fp4 import fp4_gemm, matmul_rows
from torch_cute_ops.reference.mm_fp8 import scaled_gemm
from torch_cute_ops.reference.mm_fp8_block import block_scaled_gemm, factors_of_columns, fold_mxfp8, mxfp8_gemm
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight, prepared_weight
from torch_cute_ops.reference.moe_fc1_fp4 import gated_experts, quantize_experts, written_parts
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.reference.rmsnorm_fp4quant import rmsnorm_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import allocate
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import Argument, Dim, ScalarArg, TensorArg
from torch_cute_ops.runtime.compiler import KernelSpec

dequantize = OPS["fp4_dequantize"].reference
finalize = OPS["moe_finalize"].reference
quantize_square_blocks = OPS["fp8_quantize_block128x128"].reference
route = OPS["moe_route"].reference
route_dense = OPS["moe_route_dense"].reference
route_ids = OPS["moe_route_ids"].reference
qkv_norm_rope_append = OPS["qkv_norm_rope_append"].compute

DSL_NAMES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.uint8: "Uint8",
    torch.int32: "Int32",
    torch.int64: "Int64",
}


COMPILING = (_call, decode, _fp4, _fp8, mxfp8_wgmma, recoded, recoded_tokens, separate_prologue, tokens)
"""Modules that call ``compile_kernel``, which the model replaces."""


class Launches:
    """Record of the kernels that were compiled, and of their launches.

    Attributes:
        compiled: kernels, in the order of compilation.
        calls: (kernel, arguments) of each launch.
        failed: errors of launches without CTAs. On a GPU, such an error would end the capture of a graph.
    """

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.failed: list[LaunchFailed] = []
        self._functions: dict[tuple[KernelSpec, Any], Any] = {}

    def forget(self) -> None:
        """Delete all records and compiled functions."""
        self.compiled.clear()
        self.calls.clear()
        self.failed.clear()
        self._functions.clear()

    def anew(self) -> None:
        """Delete all records, and make all ops forget their launchers. ``chunks`` calls this method before each
        case."""
        self.forget()
        forget_all()

    def compile_kernel(self, spec: KernelSpec, arch: Any) -> Any:
        found = self._functions.get((spec, arch))
        if found is not None:
            return found
        kernel = spec.make()
        self.compiled.append(kernel)

        def function(*args: Any) -> None:
            declared = kernel.arguments()
            assert len(args) == len(declared), "wrong number of arguments"
            dims: dict[Dim, int] = {}
            for i, (value, argument) in enumerate(zip(args, declared, strict=True)):
                fit(f"argument {i}", value, argument, dims)
            try:
                refuse_overlap(kernel, args)
                refuse_scale_rows(kernel, args)
                refuse_stacks_apart(kernel, args)
                refuse_gaps(args)
            except LaunchFailed as error:
                self.failed.append(error)
                raise
            self.calls.append((kernel, args))
            COMPUTE[type(kernel).__name__](kernel.config, *args)

        self._functions[spec, arch] = function
        return function


def fit(name: str, value: Any, argument: Argument, dims: dict[Dim, int]) -> None:
    """Raise the error that TVM-FFI would raise if ``value`` does not match its declaration."""
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
        raise RuntimeError("Cannot pack tensors on meta")  # raised by DLPack, before TVM-FFI sees the tensor
    # TVM-FFI does not distinguish signed from unsigned integers.
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


class LaunchFailed(Exception):
    """Error that CUDA reports for a grid without CTAs."""


ROUTE_OUTPUTS = ("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
CACHES = ("key_cache", "value_cache", "key_block_scale", "value_block_scale")
WRITTEN = {
    "RowQuantKernel": ("residual", "y", "scale", "scale_linear", "norm", "row_scale"),
    "MoeRouteKernel": ROUTE_OUTPUTS,
    "MoeRouteIdsKernel": ROUTE_OUTPUTS[2:],
    "MoePermuteKernel": ("y", "scale"),
    "FP8SquareBlocksKernel": ("y", "scale"),
    "FP4GatedExpertsKernel": ("y", "scale"),
    "RecodeWeightKernel": ("weight", "notes"),
    "FP8FP4TokenRecodeKernel": ("weight", "units"),
    "QkvRopeKernel": ("q", *CACHES),
}
"""Fields of ``Arguments`` that a kernel writes, for kernels that write more than ``out``. Workspaces are not listed,
because each call allocates a new one."""
MAY_SHARE = {"RowQuantKernel": ("residual", "input"), "MoeFinalizeKernel": ("out", "residual")}
"""For each kernel class, a (written field, read field) that may share memory."""


def refuse_overlap(kernel: Any, args: tuple[Any, ...]) -> None:
    """Fail if tensors overlap. A real host function would then launch a grid without CTAs, which is an error."""
    name, fields = type(kernel).__name__, kernel.arguments()._fields
    tensors = {field: value for field, value in zip(fields, args, strict=True) if isinstance(value, torch.Tensor)}
    for unread in ("workspace", "prefetch"):
        tensors.pop(unread, None)
    written = [field for field in WRITTEN.get(name, ("out",)) if field in tensors]
    may_share = MAY_SHARE.get(name)
    if may_share is not None and may_share[0] in written and may_share[1] in tensors:
        one, other = (tensors[field] for field in may_share)
        if _checks._is_same_view(one, other) or _checks._are_columns_apart(one, other):
            tensors.pop(may_share[1])
    outputs = {field: tensors.pop(field) for field in written}
    updated = [field for field in CACHES if field in outputs]
    try:
        _checks.check_no_sharing("model", outputs, outputs | tensors, updated, None)
    except ValueError as error:
        raise LaunchFailed(str(error)) from None
    residual = outputs.get("residual")
    if residual is not None and _checks.overlaps_itself(residual):
        raise LaunchFailed("rows of the residual overlap")
    for cache in CACHES:
        if cache in outputs and _checks.overlaps_itself(outputs[cache]):
            raise LaunchFailed(f"{cache} overlaps itself")


def refuse_scale_rows(kernel: Any, args: tuple[Any, ...]) -> None:
    """Fail if the number of scale rows does not match the tiles. A real host function would then launch a grid without
    CTAs."""
    if type(kernel).__name__ == "RowQuantKernel" and not kernel.config.spec.layout.is_linear:
        call = row_quant.Arguments(*args)
        if len(call.scale) != -(-len(call.input) // kernel.config.spec.layout.tile_rows):
            raise LaunchFailed(f"{len(call.scale)} rows of tiles")


def refuse_gaps(args: tuple[Any, ...]) -> None:
    """Fail if rows of scale tiles are not adjacent. A real host function would then launch a grid without CTAs."""
    for value in args:
        if isinstance(value, torch.Tensor) and value.shape[2:] in ((32, 4, 4), (8, 4)) and not value.is_contiguous():
            raise LaunchFailed("rows of tiles have gaps")


def refuse_stacks_apart(kernel: Any, args: tuple[Any, ...]) -> None:
    """Fail, as a real launch would, if the experts' weights or linear scales are not adjacent in memory."""
    if type(kernel).__name__ == "FP4GatedExpertsKernel":
        call = fp4_gated_experts.Arguments(*args)
        for stack in (call.b, call.b_scale):
            if stack.dim() == 3 and len(stack) > 1 and stack.stride(0) != stack[0].numel():
                raise LaunchFailed("experts are apart")


# Results of the kernels, computed with the references


def compute_dequantize(config: Any, y: Any, scale: Any, factor: Any, out: Any, max_ctas: int) -> None:
    scale = scale.view(config.fmt.scale_dtype)
    write(out, dequantize(y, scale, factor, config.fmt.block_size, None, config.layout.name, config.out_dtype))


def compute_fp4_mma(config: Any, *args: Any) -> None:
    a, a_scale, b, scale, alpha, bias, row_scale, out = fp4_mma.Arguments(*args)
    layouts = config.a_layout, config.layout
    write(out, fp4_gemm(a, a_scale, b.t(), scale, alpha, bias, out.dtype, config.fmt, *layouts, row_scale))


def compute_fp4_wgmma(config: Any, *args: Any) -> None:
    call = fp4_wgmma_kernel.Arguments(*args)
    a, b, out = call.a, call.b, call.out
    tiles = -(-len(a) // config.tile_m)
    assert config.rearranges or call.workspace.numel() == tiles * config.workspace_bytes(
        2 * len(b), call.num_ctas, has_partial_sums=bool(call.has_partial_sums)
    )
    operands, a_scale, a_layout = config.operands, call.a_scale, config.operands.a_layout
    if operands.prologue_quant is not None:
        gate, a_layout = operands.prologue_gate, operands.layout
        value = a.float() if gate is None else silu_mul_rows(a, gate=gate)
        a, a_scale = quantize_rows(value, operands.fmt, a_scale, a_layout.name)
    elif operands.prologue_gate is not None:
        a = silu_mul_rows(a, gate=operands.prologue_gate).to(a.dtype)
    given = a, a_scale, b.t(), call.b_scale, call.alpha, call.bias, out.dtype, operands.fmt, a_layout, operands.layout
    write(out, fp4_gemm(*given, call.row_scale) if config.expert_k is None else expert_gemm(*given))


def compute_fp4_experts(config: Any, *args: Any) -> None:
    call = fp4_experts.Arguments(*args)
    assert call.workspace.numel() == config.workspace_bytes(len(call.a), call.alpha.shape[1], call.num_ctas)
    formats = config.operands.fmt, config.operands.a_layout, config.operands.layout
    rest = call.bias, config.out_dtype, *formats
    write(call.out, expert_gemm(call.a, call.a_scale, call.b.t(), call.b_scale, call.alpha, *rest))


def compute_gated_experts(config: Any, *args: Any) -> None:
    call = fp4_gated_experts.Arguments(*args)
    assert (
        call.workspace.numel() == config.workspace_bytes(len(call.a), len(call.b), call.num_ctas) and call.num_ctas > 0
    )
    gate = call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit
    fmt, *layouts = config.operands.fmt, config.operands.a_layout, config.operands.layout
    # The real kernel ignores the strides between experts, and so does the model.
    weight = as_if_contiguous(call.b.mT), as_if_contiguous(call.b_scale)
    given = call.a, call.a_scale, *weight, call.routing, call.alpha, call.bias
    kind = config.epilogue.gate
    gate = (*gate, "silu") if kind == "swiglu" else (1.0, 0.0, None, kind)
    value = gated_experts(*given, gate, fmt, *layouts, call.row_scale)
    routed = call.routing != 0
    if call.scale is None:
        written = routed.repeat_interleave(value.shape[1] // len(call.b), 1)
        call.y.data[written] = value.to(call.y.dtype)[written]
        return
    layout = config.epilogue.out_layout
    results = quantize_experts(value, len(call.b), call.global_scale, fmt, layout)
    masks = written_parts((call.y, call.scale), call.routing, fmt, layout)
    for output, result, mask in zip((call.y, call.scale), results, masks, strict=True):
        output.data.view(torch.uint8)[mask] = result.view(torch.uint8)[mask]


def compute_fp4_weight(config: Any, *args: Any) -> None:
    call = fp4_weight_tcgen05.Arguments(*args)
    assert call.max_ctas > 0 and call.a_scale is None
    assert config.workspace_bytes(len(call.a), call.max_ctas) == (
        0 if call.workspace is None else call.workspace.numel()
    )
    given = call.a, None, call.b.t(), call.b_scale, call.alpha, call.bias
    write(call.out, fp4_gemm(*given, call.out.dtype, config.fmt, None, config.layout))


def compute_fp8(config: Any, *args: Any) -> None:
    call = fp8_wgmma.Arguments(*args)
    assert call.max_ctas > 0
    # The real kernel ignores the strides between experts, and so does the model.
    a, out = as_if_contiguous(call.a), as_if_contiguous(call.out)
    weight = call.b.mT
    if isinstance(config, fp8_fp4_recode.Config):
        factors = exponents_of(call.b_scale, weight.shape).float().exp2()
    elif getattr(config, "is_mx", False) or isinstance(config, mxfp8_wgmma_kernel.Config):
        blocks = call.a.shape[-1] // 32
        if isinstance(config, mxfp8_wgmma_kernel.Config):
            a, a_scale = unfolded(a, call.a_scale)
            scales = [a_scale, call.b_scale.data.view(torch.uint8)[..., :blocks]]
        else:
            scales = [each.data.contiguous().view(torch.uint8)[..., :blocks] for each in (call.a_scale, call.b_scale)]
        multiply_mxfp8(config, call, a, weight, scales, call.alpha, out)
        return
    elif getattr(config, "weight_scales", "blocks") == "alpha":
        a, a_scale = unfolded(a, call.a_scale)
        powers = decode_ue8m0(FOLDED[weight.data_ptr()][1].view(torch.uint8)).view(*weight.shape[:-1], -1).amax(-1)
        weight, b_scale = unfolded(weight, powers)
        multiply_mxfp8(config, call, a, weight, [a_scale, b_scale], call.alpha / powers, out)
        return
    elif hasattr(config, "fmt"):
        weight, factors = fp8_weight(weight, call.b_scale, config.fmt, config.layout)
    else:
        factors = factors_of_columns(call.b_scale, weight.shape[-2])
    operands = a, weight, call.a_scale, factors
    if config.rows.is_plain:
        write(out, block_scaled_gemm(*operands, call.alpha, call.bias, out.dtype))
        return
    used = used_rows(out.shape[:-1].numel(), call.offsets, call.counts).view(out.shape[:-1])
    out.data[used] = grouped_gemm(*operands, call.offsets, call.counts, call.alpha, call.bias, out.dtype)[used]


def multiply_mxfp8(config: Any, call: Any, a: Any, weight: Any, scales: list, alpha: Any, out: Any) -> None:
    if config.rows.is_plain:
        write(out, mxfp8_gemm(a, weight, *scales, alpha, call.bias, out.dtype))
        return
    used = used_rows(out.shape[:-1].numel(), call.offsets, call.counts).view(out.shape[:-1])
    rows, epilogue = (call.offsets, call.counts), (alpha, call.bias, out.dtype)
    out.data[used] = grouped_mxfp8_gemm(a, weight, *scales, *rows, *epilogue)[used]


def compute_fp8_token(config: Any, *args: Any) -> None:
    call = fp8_token_wgmma.Arguments(*args)
    assert call.max_ctas > 0 and call.b_scale is None
    if config.rows.is_plain:
        write(call.out, scaled_gemm(call.a, call.b.t(), call.a_scale, call.alpha, call.bias, call.out.dtype))
        return
    a, out = as_if_contiguous(call.a), as_if_contiguous(call.out)
    assert call.a_scale.shape == (a.shape[:-1].numel(), 1)
    used = used_rows(out.shape[:-1].numel(), call.offsets, call.counts).view(out.shape[:-1])
    rest = call.offsets, call.counts, None, call.bias, out.dtype
    out.data[used] = grouped_token_gemm(a, call.b.mT, call.a_scale, call.alpha, *rest)[used]


def compute_interleaved(config: Any, *args: Any) -> None:
    call = interleave_k.Arguments(*args)
    write(call.out, formats_interleave.interleave_k(call.a.data).flatten(1))


def compute_recoded_tokens(config: Any, *args: Any) -> None:
    call = fp8_fp4_token_recode.Arguments(*args)
    codes, scale = (call.b.mT, call.b_scale) if not config.is_plain else (call.b.mT[None], call.b_scale[None])
    for expert, (own, prepared) in enumerate(zip(codes.data, scale.data, strict=True)):
        weight, powers = prepared_weight(own, prepared, config.fmt)
        write(call.weight[expert], formats_interleave.interleave_k(weight.to(torch.float8_e4m3fn)).flatten(1))
        write(call.units[expert], powers)


def compute_fp8_fp4_token(config: Any, *args: Any) -> None:
    call = fp8_fp4_token_wgmma.Arguments(*args)
    a = as_if_contiguous(call.a).unflatten(-1, (-1, fp8_fp4_token_wgmma.SPAN_K))
    compute_prepared(config, call._replace(a=formats_interleave.deinterleave_k(a, 2 * call.b.shape[-2])))


def compute_prepared(config: Any, call: Any) -> None:
    """Compute the result of a GEMM with per-token scales and prepared scales of the weight. ``call`` is a kernel's
    ``Arguments``, in which ``a`` is not interleaved."""
    assert call.max_ctas > 0
    a, out, codes = as_if_contiguous(call.a), as_if_contiguous(call.out), call.b.mT
    weight, powers = prepared_weight(codes, call.b_scale, config.fmt)
    if config.rows.is_plain:
        factor = powers if call.alpha is None else powers * call.alpha
        write(out, scaled_gemm(a, weight, call.a_scale, factor, call.bias, out.dtype))
        return
    used = used_rows(out.shape[:-1].numel(), call.offsets, call.counts).view(out.shape[:-1])
    rest = call.offsets, call.counts, call.alpha, call.bias, out.dtype
    out.data[used] = grouped_token_gemm(a, weight, call.a_scale, powers, *rest)[used]


def compute_fp8_of_scales(config: Any, *args: Any) -> None:
    (compute_fp8 if config.has_blocks else compute_fp8_token)(config, *args)


def compute_mxfp8(config: Any, *args: Any) -> None:
    call = mxfp8_tcgen05.Arguments(*args)
    assert call.max_ctas > 0
    a, weight, tiled = as_if_contiguous(call.a), call.b.mT, SCALE_LAYOUTS["128x4"]
    a_scale, b_scale = (
        to_linear(scale.data, tiled, rows.shape[0], rows.shape[1] // 32)
        for scale, rows in ((call.a_scale, a), (call.b_scale, weight))
    )
    write(as_if_contiguous(call.out), mxfp8_gemm(a, weight, a_scale, b_scale, call.alpha, call.bias, call.out.dtype))


def compute_fp8_fp4(config: Any, *args: Any) -> None:
    if config.has_blocks:
        return compute_fp8(config, *args)
    if getattr(config, "is_interleaved", False):
        return compute_fp8_fp4_token(config, *args)
    return compute_prepared(config, fp8_fp4_tcgen05.Arguments(*args))


def compute_recoded_weight(config: Any, *args: Any) -> None:
    call = fp8_fp4_recode.WeightArguments(*args)
    if config.overlaps_gemm:
        assert call.max_ctas > 0
        return  # nothing to do, because the launch before the GEMM has already written the whole weight
    weight, factors = fp8_weight(call.b.mT, call.b_scale, config.fmt, config.layout)
    write(call.weight, weight.view(call.weight.shape))
    held = held_exponents(call.notes, *call.weight.shape)
    exponents = torch.zeros(held.shape[0], held.shape[1] * held.shape[3], held.shape[2])
    exponents[:, : call.weight.shape[1]] = factors.log2().view(len(call.weight), -1, factors.shape[-1])
    held.copy_(exponents.view(held.shape[0], held.shape[1], held.shape[3], -1).transpose(2, 3))


def exponents_of(words: Any, shape: torch.Size) -> torch.Tensor:
    """Read the exponents of a re-encoded weight from the kernel's workspace: (..., N, blocks of K)."""
    *experts, n, k = shape
    held = held_exponents(words, *experts or (1,), n, k)
    return held.transpose(2, 3).flatten(1, 2)[:, :n].reshape(*experts, n, -1)


def held_exponents(words: Any, experts: int, n: int, k: int) -> torch.Tensor:
    """Return a view of the exponents in the kernel's workspace, as int16 (E, tiles, blocks of K, rows of a tile)."""
    tiles, blocks = -(-n // fp8_fp4_recode.NOTE_ROWS), -(-k // FP8_BLOCK128.block_size)
    begin, end = fp8_fp4_recode.Notes.exponents(blocks, 1), fp8_fp4_recode.Notes.done(blocks)
    notes = words.data.view(experts, tiles, -1)[..., begin:end]
    return notes.view(torch.int16).unflatten(-1, (blocks, fp8_fp4_recode.NOTE_ROWS))


def compute_finalize(config: Any, *args: Any) -> None:
    *given, out, _ = moe_finalize.Arguments(*args)
    write(out, finalize(*given))


def compute_route(config: Any, *args: Any) -> None:
    call = moe_route.Arguments(*args)
    outputs = [getattr(call, name) for name in ROUTE_OUTPUTS]
    words = config.workspace_words(len(call.logits), len(call.permuted_to_expanded), call.sms)
    assert words == (0 if call.workspace is call.counts else len(call.workspace))
    room = {"max_rows": call.row_multiple} if config.is_masked else {"alignment": call.row_multiple}
    scoring = ("sigmoid" if config.is_sigmoid else "softmax", config.num_groups, config.topk_groups)
    rest = config.renormalize, call.scaling_factor
    results = route(call.logits, config.topk, call.bias, *scoring, *rest, finite=config.is_finite, **room)
    for output, result in zip(outputs, results, strict=True):
        write(output, result)


def compute_route_ids(config: Any, *args: Any) -> None:
    call = moe_route_ids.Arguments(*args)
    words = config.workspace_words(call.ids.numel(), len(call.permuted_to_expanded), call.sms)
    assert words == (0 if call.workspace is call.counts else len(call.workspace))
    room = {"max_rows": call.row_multiple} if config.is_masked else {"alignment": call.row_multiple}
    outputs = [getattr(call, name) for name in ROUTE_OUTPUTS[2:]]
    for output, result in zip(outputs, route_ids(call.ids, config.experts, **room), strict=True):
        write(output, result)


def compute_route_dense(config: Any, *args: Any) -> None:
    call = moe_route_dense.Arguments(*args)
    scoring = ("sigmoid" if config.is_sigmoid else "softmax", config.num_groups, config.topk_groups)
    rest = config.renormalize, call.scaling_factor, call.expert_factor
    write(call.out, route_dense(call.logits, config.topk, call.bias, *scoring, *rest, finite=config.is_finite))


def compute_permute(config: Any, *args: Any) -> None:
    x, y, scale, places, pairs, workspace = moe_permute.Arguments(*args)
    kept = config.workspace_shape(len(x))
    assert kept is None or workspace.shape == kept
    fmt, layout = resolve_fp8_format("block128", None, config.scale_format)
    write_copies(*quantize_fp8_rows(x.float(), fmt, None, layout), places, pairs, y, scale)


def compute_square_blocks(config: Any, *args: Any) -> None:
    x, y, scale = fp8_square_blocks.Arguments(*args)
    codes, scales = quantize_square_blocks(x, config.scale_format)
    write(y, codes.view(y.shape))
    write(scale, scales.view(scale.shape))


def compute_folded_mxfp8(config: Any, *args: Any) -> None:
    codes, scale, y, y_scale, _ = mxfp8_fold.Arguments(*args)
    assert codes.shape[1] == config.width
    linear = to_linear(scale, config.layout, len(codes), config.blocks)
    folded, powers = fold_mxfp8(codes, linear, config.by_row)
    write(y, folded)
    write(y_scale, powers.t())
    FOLDED[y.data_ptr()] = codes, linear


FOLDED: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""MXFP8 matrices and their linear scales before folding, keyed by the address of the folded elements."""


def unfolded(a: torch.Tensor, a_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix and the scales from which a launch made ``a`` and ``a_scale``, so that a GEMM's sums equal the
    reference's bit for bit. Scales of rows have one dimension less than ``a``."""
    codes, linear = FOLDED[a.data_ptr()]
    folded, powers = fold_mxfp8(codes, linear, by_row=a_scale.ndim < a.ndim)
    assert torch.equal(a.data.view(torch.uint8), folded.view(torch.uint8).view(a.shape))
    assert torch.equal(a_scale.data.nan_to_num(), powers.view(a_scale.shape).nan_to_num())
    return codes.view(a.shape), linear.view(*a.shape[:-1], -1)


def compute_qkv_rope(config: Any, *args: Any) -> None:
    call, spec = qkv_rope.Arguments(*args), config.spec
    given = call._asdict()
    out = given.pop("q")
    assert len(call.slots) <= len(call.qkv)
    given |= {name: given[name].data for name in CACHES if given[name] is not None}  # keep the version counters
    given |= {"q_heads": spec.q_heads, "kv_heads": spec.kv_heads, "rotary_dim": None, "q_dtype": spec.q_dtype}
    given |= {"norm_plus_one": spec.norm_plus_one, "interleaved": spec.interleaved}
    write(out, qkv_norm_rope_append(given))


def compute_rows(config: Any, *args: Any) -> None:
    call = row_quant.Arguments(*args)
    x, spec = call.input, config.spec
    gate = (call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit) if spec.swiglu else ()
    if spec.rows == "experts":
        used = used_rows(len(x), call.offsets, call.counts)
        x = torch.where(used[:, None], x, 0.0)
        results = quantize_fp8_rows(silu_mul_rows(x, *gate, gate=spec.gate), spec.fmt, None, spec.layout)
        call.y.data.view(torch.uint8)[used] = results[0].view(torch.uint8)[used]
        call.scale.data[used] = results[1][used]
        return
    if call.residual is not None:
        write(call.residual, x.float() + call.residual.float())
        x = call.residual
    if spec.source == "silu_mul":
        value = silu_mul_rows(x, *gate, gate=spec.gate)
    elif not spec.normalises:
        value = x.float()
    else:
        padding = (0, spec.width - spec.norm_width)
        within = slice(0, spec.norm_width)
        weight = torch.empty(0) if call.weight is None else call.weight[within]
        bias = None if call.bias is None else call.bias[within]
        assert (call.weight is None, bias is not None) == (not spec.has_weight, spec.has_bias)
        norm = rmsnorm_rows(x[:, within], weight, call.eps, spec.weight_plus_one, bias, spec.subtracts_mean)
        value = torch.nn.functional.pad(norm, padding)
    if spec.has_row_scale:
        *results, row_scale = quantize_rows_per_token(value, spec.layout.name)
        write(call.row_scale, row_scale)
    elif spec.four_over_six:
        results = quantize_rows_four_over_six(value, call.factor, spec.layout.name)
    elif isinstance(spec.fmt, FP4Format):
        results = quantize_rows(value, spec.fmt, call.factor, spec.layout.name)
        if call.scale_linear is not None:
            write(call.scale_linear, quantize_rows(value, spec.fmt, call.factor, "linear")[1])
    elif spec.fmt is not None:
        factor = None if spec.fmt == FP8_DYNAMIC_TENSOR else call.factor  # otherwise a workspace
        results = quantize_fp8_rows(value, spec.fmt, factor, spec.layout)
        if spec.interleaved:
            results = formats_interleave.interleave_k(results[0][:, : spec.norm_width]), results[1]
    if spec.fmt is not None:
        for output, result in zip((call.y, call.scale), results, strict=True):
            write(output, result)
    if call.norm is not None:
        write(call.norm, value)


COMPUTE: dict[str, Callable[..., None]] = {
    "FP4DequantKernel": compute_dequantize,
    "FP4MmaKernel": compute_fp4_mma,
    "FP4WgmmaKernel": compute_fp4_wgmma,
    "FP4WeightTcgen05Kernel": compute_fp4_weight,
    "FP4ExpertsKernel": compute_fp4_experts,
    "FP4GatedExpertsKernel": compute_gated_experts,
    "FP8WgmmaKernel": compute_fp8,
    "FP8TokenWgmmaKernel": compute_fp8_token,
    "FP8FP4TokenWgmmaKernel": compute_fp8_fp4_token,
    "InterleaveKKernel": compute_interleaved,
    "FP8FP4WgmmaSSKernel": compute_fp8,
    "FP8FP4WgmmaCodesKernel": compute_fp8,
    "FP8FP4WgmmaRSKernel": compute_fp8,
    "RecodeWeightKernel": compute_recoded_weight,
    "FP8FP4TokenRecodeKernel": compute_recoded_tokens,
    "FP8FP4RecodeKernel": compute_fp8,
    "FP8MmaKernel": compute_fp8_of_scales,
    "FP8FP4MmaKernel": compute_fp8_fp4,
    "FP8Tcgen05Kernel": compute_fp8_of_scales,
    "FP8FP4Tcgen05Kernel": compute_fp8_fp4,
    "FP8MXFP4Tcgen05Kernel": compute_fp8_fp4,
    "MXFP8Tcgen05Kernel": compute_mxfp8,
    "MoeFinalizeKernel": compute_finalize,
    "MoeRouteKernel": compute_route,
    "MoeRouteIdsKernel": compute_route_ids,
    "MoeRouteDenseKernel": compute_route_dense,
    "MoePermuteKernel": compute_permute,
    "FP8SquareBlocksKernel": compute_square_blocks,
    "MXFP8WgmmaKernel": compute_fp8,
    "MXFP8FoldKernel": compute_folded_mxfp8,
    "RowQuantKernel": compute_rows,
    "QkvRopeKernel": compute_qkv_rope,
}


def as_if_contiguous(tensor: Any) -> Any:
    """Return the contiguous tensor that a kernel would read if it ignored strides, starting at the first element."""
    stride = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == stride else tensor.data.as_strided(tensor.shape, stride)


def write_copies(
    codes: torch.Tensor, scales: torch.Tensor, places: torch.Tensor, pairs: torch.Tensor, y: Any, scale: Any
) -> None:
    """Copy rows of codes to the rows ``places`` of ``y``, and scales from the tokens of ``pairs``."""
    # View FP8 as bytes, because torch before 2.13 cannot index FP8 tensors.
    y, codes = y.data.view(torch.uint8), codes.view(torch.uint8)
    for copies in places.t():
        exists = copies >= 0
        y[copies[exists].long()] = codes[exists]
    used = pairs >= 0
    scale.data[used] = scales[pairs[used].long() // places.shape[1]]


def write(output: torch.Tensor, value: torch.Tensor) -> None:
    """Write an output as a kernel does: without changing the tensor's version counter."""
    output.data.copy_(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Make the ops' CUDA implementations accept CPU tensors and use the model, and record their launches."""
    recorded = Launches()
    for module in COMPILING:
        monkeypatch.setattr(module, "compile_kernel", recorded.compile_kernel)
    monkeypatch.setattr(_call, "arch_of_device", lambda index: ARCHS["sm_90a"])
    monkeypatch.setattr(_call, "sm_count", lambda index: 132)
    monkeypatch.setattr(_call, "forbid_in_capture", lambda *args: None)
    target = Target(torch.device("cuda", 0), ARCHS["sm_90a"], 132)
    monkeypatch.setattr(select, "target_of", lambda device: target)
    # Device 0 is the CPU.
    empty = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(allocate, "_empty_strided_cuda", empty)
    monkeypatch.setattr(allocate, "_current_device", lambda: 0)
    # Add in the reference's order, because even float64 sums depend on the order if large terms cancel.
    monkeypatch.setattr(cublas, "accumulate", lambda a, weight: matmul_rows(a.double(), weight.double()).float())
    # Forget all launchers before and after the test, because neither real launchers may be used with the model nor the
    # model's launchers without it.
    forget_all()
    yield recorded
    forget_all()


def forget_all() -> None:
    """Make all ops forget their launchers."""
    for op in OPS.values():
        forget(op)
