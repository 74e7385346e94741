"""``fp4_dequantize``: conversion of FP4 blocks to floating-point numbers."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import fitting_layouts
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned
from torch_cute_ops.ops._properties import Property, flag, size
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Call(NamedTuple):
    y: Tensor
    scale: Tensor
    global_scale: Tensor | None
    block_size: int
    scale_format: str | None
    scale_layout: str | None
    out_dtype: torch.dtype | None


class _Launcher(KernelLauncher[_Call]):
    """Launcher of ``fp4_dequantize``. It has no fast path, because a weight is decoded only once."""

    def launch(self, call: _Call, out: Tensor) -> None:
        from torch_cute_ops.kernels.fp4_dequant import CTAS_PER_SM

        hidden = out.shape[-1]
        packed = aligned(call.y.view(torch.uint8).reshape(-1, hidden // 2))
        blocks = hidden // self.config.fmt.block_size
        shape = self.config.layout.shape((packed.shape[0],), blocks)
        scales = aligned(call.scale.view(torch.uint8)).view(shape)
        factor = None if call.global_scale is None else call.global_scale.reshape(1)
        self.function(packed, scales, factor, out.view(-1, hidden), self.sms * CTAS_PER_SM)


class _Dequantize(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        formats = call.block_size, call.scale_format, self._formats(call)[1].name
        return call.y.shape[-1], call.global_scale is not None, *formats, call.out_dtype, device

    def _formats(self, call: _Call) -> tuple[FP4Format, ScaleLayout]:
        """Return the FP4 format and the scale layout. If the call names no layout, the shape of the scales determines
        it."""
        fmt, layout = _checks.check_fp4_format(self.op, call.block_size, call.scale_format, call.scale_layout)
        if call.scale_layout is not None:
            return fmt, layout
        lead, blocks = call.y.shape[:-1], call.y.shape[-1] * 2 // fmt.block_size
        fitting = fitting_layouts(call.scale.shape, lead, blocks)
        if len(fitting) > 1:
            names = " and ".join(each.name for each in fitting)
            raise ValueError(
                f"cute::{self.op}: got scale with shape {tuple(call.scale.shape)}, which {names} scales of y with "
                f"shape {tuple(call.y.shape)} both have; name scale_layout"
            )
        return fmt, fitting[0] if fitting else layout

    def check(self, call: _Call) -> None:
        op, y, scale = self.op, call.y, call.scale
        fmt, _ = _checks.check_fp4_format(op, call.block_size, call.scale_format, None)
        _checks.check_packed(op, "y", y, fmt)
        _, layout = self._formats(call)
        _checks.check_dtype(op, "scale", scale, fmt.scale_dtypes)
        matrix = *y.shape[:-1], y.shape[-1] * 2
        _checks.check_fp4_scale(op, "scale", scale, matrix, fmt, layout, call.scale_layout)
        _checks.check_device(op, "scale", scale, "y", y.device)
        _checks.check_global_scale(op, call.global_scale, fmt, "y", y.device)
        _checks.check_out_dtype(op, call.out_dtype)

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import fp4_dequant

        out_dtype, has_global_scale = call.out_dtype or torch.bfloat16, call.global_scale is not None
        config = fp4_dequant.plan(out_dtype, call.y.shape[-1] * 2, *self._formats(call), has_global_scale)
        return KernelSpec(fp4_dequant.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        return {
            "hidden": size(lambda call: call.y.shape[-1] * 2),
            "global_scale": flag(lambda call: call.global_scale is not None),
            **self.arguments_as_properties("block_size", "scale_format"),
            "scale_layout": replace(
                *self.arguments_as_properties("scale_layout").values(), of=lambda call: self._formats(call)[1].name
            ),
            **self.arguments_as_properties("out_dtype"),
        }

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        fmt, layout = _checks.check_fp4_format(self.op, given.block_size, given.scale_format, given.scale_layout)
        y, scale = fp4_shapes((1, given.hidden), fmt, layout)
        return {
            "y": torch.zeros(y, dtype=torch.uint8, device=device),
            "scale": torch.zeros(scale, dtype=torch.uint8, device=device).view(fmt.scale_dtype),
            "global_scale": torch.ones(1, dtype=torch.float32, device=device) if given.global_scale else None,
            **{name: getattr(given, name) for name in ("block_size", "scale_format", "scale_layout", "out_dtype")},
        }


@define(_Dequantize(), "out")
def fp4_dequantize(
    y: Tensor,
    scale: Tensor,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Convert FP4 blocks to floating-point numbers.

    The result is computed in fp32 and rounded once to ``out_dtype``::

        out = e2m1(code) · scale / global_scale

    Args:
        y: (..., K/2) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble.
        scale: block scales in the shape that :func:`fp4_quantize` returns: 128x4 (⌈M/128⌉, ⌈K/B/4⌉, 32, 4, 4) or 8x4
            (⌈M/8⌉, ⌈K/B/4⌉, 8, 4) for the M flattened rows, or linear (..., K/B), with B the block size. The dtype is
            float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
        global_scale: float32 tensor of one element by which the values were multiplied before they were encoded.
            ``None`` means 1.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the scales: ``"128x4"``, ``"8x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). If ``y`` has more than three dimensions, the shape may fit two
            layouts; the op then raises an error that asks for the layout's name.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        out: contiguous tensor to write the result into.

    Returns:
        (..., K) in ``out_dtype``. A block with a NaN scale is NaN.

    Raises:
        ValueError: If a shape, device, format or layout is wrong.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_dequantize
        >>> y = torch.tensor([[0x10, 0x32, 0x54, 0x76] * 2], dtype=torch.uint8)  # codes 0 to 7, twice
        >>> scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
        >>> fp4_dequantize(y, scale)[0, :8].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "Quantising to FP4".
    """
