"""Checks at the ops' door. Each raises with the op, the argument, what it got, what it expects, and where it helps the
fix."""

import torch

from torch_cute_ops.formats import (
    FP4Format,
    FP8Format,
    ScaleLayout,
    resolve_fp4_format,
    resolve_fp8_format,
    resolve_scale_layout,
)
from torch_cute_ops.formats.experts import MAX_EXPERTS, MAX_TOPK

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """``tensor`` has one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"cute::{op}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}; expected {_names(dtypes)}"
        )


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """``tensor`` has ``shape``."""
    if tensor.shape != shape:
        raise ValueError(f"cute::{op}: {name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}, {meaning}")


def check_device(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """``tensor`` is on ``device``, where the argument named ``other`` is."""
    if tensor.device != device:
        raise ValueError(f"cute::{op}: {name} is on {tensor.device}, {other} on {device}; move them to one device")


def asks_for_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether gradients are on, and one of those that there are requires one."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def check_no_grad(op: str, *tensors: torch.Tensor | None) -> None:
    """No gradient is asked for: the ops are for inference and have no backward."""
    if asks_for_grad(*tensors):
        raise ValueError(
            f"cute::{op} has no gradient, and an input requires grad; "
            "call it under torch.no_grad() or torch.inference_mode(), or detach the input"
        )


def check_fp4_format(
    op: str, block_size: int, scale_format: str | None, scale_layout: str
) -> tuple[FP4Format, ScaleLayout]:
    """The format and layout that the arguments name."""
    try:
        return resolve_fp4_format(block_size, scale_format), resolve_scale_layout(scale_layout)
    except ValueError as error:
        raise ValueError(f"cute::{op}: {error}") from None


def check_global_scale(
    op: str, global_scale: torch.Tensor | None, fmt: FP4Format, other: str, device: torch.device
) -> None:
    """``global_scale`` is absent, or one fp32 element for a format that takes one."""
    if global_scale is None:
        return
    if not fmt.has_global_scale:
        raise ValueError(f"cute::{op}: global_scale is given; {fmt.name} takes none, so pass None")
    check_scalar(op, "global_scale", global_scale, other, device)


def check_fp8_format(op: str, granularity: str, scale_layout: str) -> tuple[FP8Format, ScaleLayout]:
    """The format and layout that the arguments name."""
    try:
        return resolve_fp8_format(granularity, scale_layout)
    except ValueError as error:
        raise ValueError(f"cute::{op}: {error}") from None


def check_fp8_scale(op: str, scale: torch.Tensor | None, fmt: FP8Format, other: str, device: torch.device) -> None:
    """``scale`` is one fp32 element for a static format, and absent for one whose scales are computed."""
    if not fmt.is_static:
        if scale is not None:
            raise ValueError(
                f"cute::{op}: scale is given; granularity={fmt.granularity!r} computes its own, so pass None, "
                "or granularity='tensor'"
            )
    elif scale is None:
        raise ValueError(
            f"cute::{op}: scale is None; granularity={fmt.granularity!r} takes it as one float32 element on {device}"
        )
    else:
        check_scalar(op, "scale", scale, other, device)


def check_scalar(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """``tensor`` is one fp32 element on ``device``, where the argument named ``other`` is."""
    check_dtype(op, name, tensor, (torch.float32,))
    if tensor.numel() != 1:
        raise ValueError(f"cute::{op}: {name} has shape {tuple(tensor.shape)}; expected one element")
    check_device(op, name, tensor, other, device)


def check_rows(
    op: str,
    name: str,
    tensor: torch.Tensor,
    fmt: FP4Format | FP8Format,
    dtypes: tuple[torch.dtype, ...],
    halves: bool = False,
) -> None:
    """``tensor`` is (..., K), or (..., 2K) with ``halves``, with K whole blocks and a dtype in ``dtypes``."""
    check_dtype(op, name, tensor, dtypes)
    if tensor.dim() == 0:
        raise ValueError(f"cute::{op}: {name} has no dimension; expected (..., {'2K' if halves else 'K'})")
    width = tensor.shape[-1]
    # Without blocks of its own, a row may have any length.
    block = fmt.block_size or 1
    if width == 0 or width % (2 * block if halves else block) != 0:
        expected = f"multiple of the block size, {block}" if fmt.block_size else "number of elements"
        raise ValueError(
            f"cute::{op}: {name} has a last dimension of {width}; "
            f"expected {'two halves, each ' if halves else ''}a positive {expected}"
        )


def check_residual(op: str, residual: torch.Tensor, input: torch.Tensor) -> None:
    """``residual`` is a tensor like ``input``, each element of which has a place of its own."""
    check_dtype(op, "residual", residual, (input.dtype,))
    check_shape(op, "residual", residual, input.shape, "the shape of input")
    check_device(op, "residual", residual, "input", input.device)
    if overlaps_itself(residual):
        raise ValueError(
            f"cute::{op}: residual has shape {tuple(residual.shape)} and strides {residual.stride()}, by which it "
            "overlaps itself, and it is updated in place; pass residual.contiguous()"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether, in some dimension, elements lie no further apart than the dimensions inside it reach.

    Sizes that are symbols are not asked about; the tensors that come in their place are.
    """
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride())) or tensor.is_contiguous():
        return False
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def check_overlap(op: str, name: str, written: torch.Tensor, other: str, read: torch.Tensor) -> None:
    """``written`` is ``read``, or shares no memory with it; for real tensors only.

    Columns of one matrix count as apart; of other views that reach into each other, some that are apart are refused.
    """
    if written.numel() == 0:
        return
    steps = [
        [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
        for tensor in (written, read)
    ]
    if written.data_ptr() == read.data_ptr() and steps[0] == steps[1]:
        return
    begins, ends = [], []
    for tensor in (written, read):
        begins.append(tensor.data_ptr())
        ends.append(tensor.data_ptr() + reach(tensor))
    if ends[0] <= begins[1] or ends[1] <= begins[0]:
        return
    if written.dim() == 2 and written.stride() == read.stride() and written.stride(1) == 1:
        pitch, width = (extent * written.element_size() for extent in (written.stride(0), written.shape[1]))
        if width <= (begins[1] - begins[0]) % pitch <= pitch - width:
            return
    raise ValueError(
        f"cute::{op}: {name} is updated in place and shares memory with {other} without being the same view; "
        f"pass {other}.clone()"
    )


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor that has any to behind its last."""
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()


def check_apart(op: str, name: str, written: torch.Tensor, other: str, read: torch.Tensor) -> None:
    """``written``, which is contiguous, and ``read`` share no memory; for real tensors only."""
    if not are_apart(written, read):
        raise ValueError(f"cute::{op}: {name} shares memory with {other}; pass another tensor as {name}")


def are_apart(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether ``read`` lies before ``written``, which is contiguous, or behind it; for real tensors only."""
    begin, end = read.data_ptr(), read.data_ptr() + reach(read)
    return not read.numel() or written.data_ptr() >= end or begin >= written.data_ptr() + written.nbytes


def check_output(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """``tensor`` can take an output: dtype, shape, device, contiguous."""
    check_dtype(op, name, tensor, (dtype,))
    check_shape(op, name, tensor, shape, "the shape of the op's output")
    check_device(op, name, tensor, "the input", device)
    if not tensor.is_contiguous():
        raise ValueError(f"cute::{op}: {name} has strides {tensor.stride()}; expected a contiguous tensor")
    if asks_for_grad(tensor):
        raise ValueError(f"cute::{op} has no gradient, and {name} requires grad; detach it, or call under no_grad()")


def check_number(op: str, outputs: tuple[torch.Tensor, ...], names: tuple[str, ...]) -> None:
    """There is a tensor for each output."""
    if len(outputs) != len(names):
        raise ValueError(f"cute::{op}: out has {len(outputs)} tensors; expected {len(names)}: {', '.join(names)}")


def check_matrix(op: str, name: str, tensor: torch.Tensor, expected: str) -> None:
    """``tensor`` has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"cute::{op}: {name} has shape {tuple(tensor.shape)}; expected {expected}")


def check_packed(op: str, name: str, tensor: torch.Tensor, fmt: FP4Format) -> None:
    """``tensor`` is (..., K/2) packed codes with K a multiple of the block."""
    check_dtype(op, name, tensor, (torch.uint8, torch.float4_e2m1fn_x2))
    if tensor.dim() == 0:
        raise ValueError(f"cute::{op}: {name} has no dimension; expected (..., K/2)")
    width = tensor.shape[-1] * 2
    if width == 0 or width % fmt.block_size != 0:
        raise ValueError(
            f"cute::{op}: {name} holds {width} elements a row; "
            f"expected a positive multiple of the block size, {fmt.block_size}"
        )


STORED_SINGLY = ("scale_linear", "scale_out")
"""Outputs that kernels store an element at a time, at any address."""


def check_aligned(op: str, name: str, tensor: torch.Tensor) -> None:
    """``tensor`` starts where a kernel can store 16 bytes at a time; for real tensors only."""
    if tensor.data_ptr() % 16:
        raise ValueError(
            f"cute::{op}: {name} starts at an address that is no multiple of 16 bytes; pass a fresh tensor"
        )


def check_topk(op: str, topk: int) -> None:
    """``topk`` is a number of experts that a token may have."""
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"cute::{op}: topk is {topk}; expected 1 to {MAX_TOPK}")


def check_integers(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """``tensor`` is int32 and one-dimensional, on ``device``, where the argument named ``other`` is."""
    check_dtype(op, name, tensor, (torch.int32,))
    if tensor.dim() != 1:
        raise ValueError(f"cute::{op}: {name} has shape {tuple(tensor.shape)}; expected one dimension")
    check_device(op, name, tensor, other, device)


def check_expert_rows(
    op: str, input: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None, name: str = "input"
) -> None:
    """``input`` is (R, K) with offsets, or (E, max_rows, K) with counts alone; all of the same number of experts."""
    if offsets is None and counts is None:
        raise ValueError(
            f"cute::{op}: neither offsets nor counts are given; pass offsets for {name} (R, K), counts for {name} "
            "(E, max_rows, K)"
        )
    expected = "(E, max_rows, K), as there are no offsets" if offsets is None else "(R, K), as there are offsets"
    if input.dim() != (3 if offsets is None else 2):
        raise ValueError(f"cute::{op}: {name} has shape {tuple(input.shape)}; expected {expected}")
    if offsets is None:
        experts = input.shape[0]
    else:
        check_integers(op, "offsets", offsets, name, input.device)
        experts = offsets.shape[0] - 1
    if not 1 <= experts <= MAX_EXPERTS:
        given = f"{name} has" if offsets is None else "offsets are of"
        raise ValueError(f"cute::{op}: {given} {experts} experts; expected 1 to {MAX_EXPERTS}")
    if counts is not None:
        check_integers(op, "counts", counts, name, input.device)
        check_shape(op, "counts", counts, (experts,), "one for each expert")


def check_row_outputs(
    op: str, outputs: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    """``outputs`` can take codes and scales as ``like`` has them; for real tensors only."""
    names = ("y", "scale")
    check_number(op, outputs, names)
    for name, tensor, want in zip(names, outputs, like, strict=True):
        check_output(op, name, tensor, tuple(want.shape), want.dtype, device)
    # Scales by columns are stored one by one.
    check_aligned(op, "y", outputs[0])
