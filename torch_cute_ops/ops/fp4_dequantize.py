"""``fp4_dequantize``: FP4 blocks back to numbers."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_shapes
from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import aligned
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel
from torch_cute_ops.runtime.dispatch import is_plain_eager, mark_written

NAME = "fp4_dequantize"


def fp4_dequantize(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The numbers that FP4 blocks stand for: ``e2m1(code) · scale / global_scale``, in fp32, rounded once to
    ``out_dtype``.

    Args:
        y: (..., K/2), uint8 or float4_e2m1fn_x2: two e2m1 codes a byte, element 0 in the low nibble.
        scale: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4), in the shape that :func:`fp4_quantize` gives
            it.
        global_scale: the one float32 element that the values were multiplied with before encoding, or ``None``.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``.
        out_dtype: bfloat16, float16 or float32.
        out: tensor to write into.

    Returns:
        (..., K) in ``out_dtype``. A block with a NaN scale is NaN.

    Raises:
        ValueError: for a wrong shape, device, format or layout.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, y, scale, global_scale):
        return _run(y, scale, global_scale, block_size, scale_format, scale_layout, out_dtype, out)
    args = (y, scale, global_scale, block_size, scale_format, scale_layout, out_dtype)
    if out is None:
        return torch.ops.cute.fp4_dequantize.default(*args)
    torch.ops.cute.fp4_dequantize.out(*args, out=out)
    return out


def _check(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
) -> None:
    fmt, layout = _checks.check_fp4_format(NAME, block_size, scale_format, scale_layout)
    _checks.check_packed(NAME, "y", y, fmt)
    _checks.check_dtype(NAME, "scale", scale, scale_dtypes(fmt))
    _, shape = fp4_shapes(torch.Size((*y.shape[:-1], y.shape[-1] * 2)), fmt, layout)
    _checks.check_shape(NAME, "scale", scale, shape, f"the {layout.name} scales of y")
    _checks.check_device(NAME, "scale", scale, "y", y.device)
    _checks.check_global_scale(NAME, global_scale, fmt, "y", y.device)
    if out_dtype not in _checks.INPUT_DTYPES:
        raise TypeError(f"cute::{NAME}: out_dtype is {out_dtype}; expected bfloat16, float16 or float32")
    _checks.check_no_grad(NAME, scale, global_scale)


def scale_dtypes(fmt: FP4Format) -> tuple[torch.dtype, ...]:
    """The dtypes that a scale argument may have."""
    return (fmt.scale_dtype,) if fmt.scale_format == "e4m3" else (fmt.scale_dtype, torch.float8_e8m0fnu)


class _Facts(NamedTuple):
    hidden: int
    global_scale: bool
    block_size: int
    scale_format: str | None
    scale_layout: str
    out_dtype: torch.dtype
    device: int


class _Launcher(NamedTuple):
    function: Callable[..., None]
    max_ctas: int
    fmt: FP4Format
    layout: ScaleLayout


_launchers: dict[_Facts, _Launcher] = {}


def _run(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check, choose the kernel, launch. A weight is decoded once, so this path is plain rather than quick."""
    _check(y, scale, global_scale, block_size, scale_format, scale_layout, out_dtype)
    hidden = y.shape[-1] * 2
    given = out is not None
    if out is None:
        out = torch.empty((*y.shape[:-1], hidden), dtype=out_dtype, device=y.device)
    else:
        _checks.check_output(NAME, "out", out, (*y.shape[:-1], hidden), out_dtype, y.device)
        _checks.check_aligned(NAME, "out", out)
    facts = _Facts(hidden, global_scale is not None, block_size, scale_format, scale_layout, out_dtype, y.get_device())
    launcher = _launchers.get(facts)
    if launcher is None:
        launcher = _launchers[facts] = _make_launcher(facts)
    if out.numel():
        packed = aligned(y.view(torch.uint8).reshape(-1, hidden // 2))
        blocks = launcher.layout.padded_blocks(hidden // launcher.fmt.block_size)
        scales = aligned(scale.view(torch.uint8).reshape(-1, blocks))
        g = None if global_scale is None else global_scale.reshape(1)
        try:
            launcher.function(packed, scales, g, out.view(-1, hidden), launcher.max_ctas)
        except Exception as error:  # from CUDA
            raise launch_error(NAME, error, y, scale, global_scale, *facts[1:6]) from error
    if given:
        mark_written((out,))
    return out


def _make_launcher(facts: _Facts) -> _Launcher:
    call = ", ".join(f"{name}={value!r}" for name, value in facts._asdict().items())
    forbid_in_capture(NAME, str(facts), f"torch_cute_ops.warmup({NAME!r}, {call})")
    from torch_cute_ops.kernels.fp4_dequant import CTAS_PER_SM

    fmt = resolve_fp4_format(facts.block_size, facts.scale_format)
    layout = resolve_scale_layout(facts.scale_layout)
    kernel = kernel_for(facts.hidden, fmt, layout, facts.out_dtype, facts.global_scale)
    function = compile_kernel(kernel, arch_of_device(facts.device))
    return _Launcher(function, sm_count(facts.device) * CTAS_PER_SM, kernel.config.fmt, kernel.config.layout)


def kernel_for(
    hidden: int, fmt: FP4Format, layout: ScaleLayout, out_dtype: torch.dtype, global_scale: bool = False
) -> Wanted:
    """The kernel for rows of ``hidden`` elements."""
    from torch_cute_ops.kernels import fp4_dequant

    return Wanted(fp4_dequant.KERNEL, fp4_dequant.plan(out_dtype, hidden, fmt, layout, global_scale))


def _kernels(
    arch: Arch,
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Wanted, ...]:
    """The kernel that a call needs; it is the same source on every architecture."""
    _check(y, scale, global_scale, block_size, scale_format, scale_layout, out_dtype)
    fmt, layout = resolve_fp4_format(block_size, scale_format), resolve_scale_layout(scale_layout)
    return (kernel_for(y.shape[-1] * 2, fmt, layout, out_dtype, global_scale is not None),)


def _cuda_out(
    y: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor,
) -> None:
    _run(y, scale, global_scale, block_size, scale_format, scale_layout, out_dtype, out)


def _example(
    *,
    hidden: int,
    global_scale: bool = False,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | int | str | None = None,
) -> Call:
    """A call on one row with these static facts; ``hidden`` is K."""
    fmt, layout = _checks.check_fp4_format(NAME, block_size, scale_format, scale_layout)
    y, scale = fp4_shapes(torch.Size((1, hidden)), fmt, layout)
    target = cuda_device(device)
    tensors = (
        torch.zeros(y, dtype=torch.uint8, device=target),
        torch.zeros(scale, dtype=torch.uint8, device=target).view(fmt.scale_dtype),
        torch.ones(1, dtype=torch.float32, device=target) if global_scale else None,
    )
    return (*tensors, block_size, scale_format, scale_layout, out_dtype), {}


OP = OpSpec(
    name=NAME,
    arguments=(
        "Tensor y, Tensor scale, Tensor? global_scale=None, int block_size=16, str? scale_format=None, "
        'str scale_layout="linear", ScalarType out_dtype=bfloat16'
    ),
    outputs=("out",),
    check=_check,
    cuda=_run,
    cuda_out=_cuda_out,
    function=fp4_dequantize,
    example=_example,
    kernels=_kernels,
)
