"""Checks of the ops' arguments. Each error message names the op and the argument, and gives the passed value, the
expected value, and if possible a fix."""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch

from torch_cute_ops.formats import (
    SCALE_LAYOUTS,
    FP4Format,
    FP8Format,
    ScaleLayout,
    resolve_fp4_format,
    resolve_fp8_format,
    resolve_scale_layout,
)
from torch_cute_ops.formats.experts import MAX_EXPERTS, MAX_TOPK
from torch_cute_ops.formats.fp8 import COLUMN, ROW, is_column_major, is_row_major
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.scale_layout import DEFAULT_SCALE_LAYOUT, reason_no_tiles
from torch_cute_ops.formats.shapes import Output
from torch_cute_ops.runtime.dispatch import PLAIN, is_proxy

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PACKED_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)
"""Dtypes of tensors with two FP4 codes per byte."""


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that ``tensor`` has one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"cute::{op}: got {name} with dtype {str(tensor.dtype).removeprefix('torch.')}; expected {_names(dtypes)}"
        )


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Check that ``tensor`` is a dense tensor with strides: neither sparse nor one of torch's quantised tensors."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        what = "quantised by torch" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"cute::{op}: {name} is {what}; expected a dense tensor")


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Check that ``tensor`` has ``shape``."""
    if tensor.shape != shape:
        raise ValueError(f"cute::{op}: got {name} with shape {tuple(tensor.shape)}; expected {tuple(shape)}, {meaning}")


def check_device(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """Check that ``tensor`` is on ``device``, the device of the argument named ``other``."""
    if tensor.device != device:
        raise ValueError(f"cute::{op}: {name} is on {tensor.device}, {other} on {device}; move them to one device")


def check_fp4_format(
    op: str, block_size: int, scale_format: str | None, scale_layout: str | None
) -> tuple[FP4Format, ScaleLayout]:
    """Return the FP4 format and the scale layout that the arguments name. The default layout is
    ``DEFAULT_SCALE_LAYOUT``."""
    name = DEFAULT_SCALE_LAYOUT if scale_layout is None else scale_layout
    try:
        return resolve_fp4_format(block_size, scale_format), resolve_scale_layout(name)
    except ValueError as error:
        raise ValueError(f"cute::{op}: {error}") from None


def check_fp4_scale(
    op: str,
    name: str,
    scale: torch.Tensor,
    matrix: tuple[int, ...],
    fmt: FP4Format,
    layout: ScaleLayout,
    given: str | None,
    follows: str | None = None,
) -> None:
    """Check that ``scale`` has the right shape for the block scales of a matrix, and is not a transposed view.

    Args:
        op: name of the op.
        name: name of the argument that holds the scales.
        scale: block scales.
        matrix: shape (..., K) of the unpacked tensor.
        fmt: FP4 format.
        layout: layout that the call names, or else the layout that was derived from the shape of the argument ``name``
            or ``follows``.
        given: argument ``scale_layout`` of the call. If it is not None, tiles may have another library's shape.
        follows: name of the argument from whose shape the layout was derived, if it is not ``name``.
    """
    lead, blocks = matrix[:-1], matrix[-1] // fmt.block_size
    expected = layout.shape(lead, blocks)
    if scale.shape == expected:
        check_not_transposed(op, name, scale, layout)
        return
    got, of = f"cute::{op}: got {name} with shape {tuple(scale.shape)}", name.removesuffix("_scale")
    if of == "scale":
        of = "y"
    if given is not None:
        if layout.is_linear:
            raise ValueError(f"{got}; expected {expected}, the linear scales of {of}")
        reason = reason_no_tiles(scale, lead, blocks, layout)
        if reason is not None:
            raise ValueError(f"{got}, which are not the {layout.name} scales of {of}: {reason}")
        check_not_transposed(op, name, scale, layout)
        return
    if follows is not None:
        shown = "linear scales" if layout.is_linear else "tiles"
        raise ValueError(
            f"{got}; expected {expected}, the {layout.name} scales of {of}, since {follows} has the shape of {shown}"
        )
    shapes = " or ".join(f"{each.shape(lead, blocks)} ({each.name})" for each in SCALE_LAYOUTS.values())
    raise ValueError(
        f"{got}; expected {shapes}, the scales of {of}. For tiles in another library's shape, name scale_layout, or "
        "pass torch_cute_ops.as_tiles(…)"
    )


def check_not_transposed(op: str, name: str, scale: torch.Tensor, layout: ScaleLayout) -> None:
    """Check that FP4 block scales do not have the strides of a transposed view."""
    if is_transposed_scale(scale, layout):
        raise ValueError(
            f"cute::{op}: got {name} with shape {tuple(scale.shape)} and strides {scale.stride()}, a transposed view; "
            f"expected block scales by row. If the view has the right order, pass {name}.contiguous()"
        )


def is_transposed_scale(scale: torch.Tensor, layout: ScaleLayout) -> bool:
    """Return True if block scales have the strides of a transposed view, which can have the same shape as correct
    scales.

    For tiled layouts, compare the strides of the two tile indices, and the strides of the last two dimensions.
    """
    is_swapped = scale.dim() > 1 and scale.stride(-2) == 1 and _is_transposed(scale, -2, -1)
    is_tiled = not layout.is_linear and scale.dim() == 2 + len(layout.tile)
    return is_swapped or (is_tiled and _is_transposed(scale, 0, 1))


def _is_transposed(tensor: torch.Tensor, outer: int, inner: int) -> bool:
    """Return True if the stride of the dimension ``outer`` is smaller than the stride of the dimension ``inner``.
    Return False if one of the two dimensions is expanded or has only one element."""
    # Compare strides before shapes: comparing a symbolic number of rows first would add a guard for it.
    return 0 < tensor.stride(outer) < tensor.stride(inner) and tensor.shape[outer] > 1 and tensor.shape[inner] > 1


def check_global_scale(
    op: str, global_scale: torch.Tensor | None, fmt: FP4Format, other: str, device: torch.device
) -> None:
    """Check that ``global_scale`` is None, or one fp32 element for a format that has a global scale."""
    if global_scale is None:
        return
    if not fmt.has_global_scale:
        raise ValueError(f"cute::{op}: global_scale is given; {fmt.name} takes none, so pass None")
    check_scalar(op, "global_scale", global_scale, other, device)


def check_fp8_format(
    op: str, granularity: str, scale_layout: str | None, scale_format: str | None
) -> tuple[FP8Format, ScaleLayout]:
    """Return the FP8 format and the scale layout that the arguments name."""
    try:
        return resolve_fp8_format(granularity, scale_layout, scale_format)
    except ValueError as error:
        raise ValueError(f"cute::{op}: {error}") from None


def check_interleaved_codes(op: str, interleaved: bool, fmt: FP8Format) -> None:
    """Check that the codes are not interleaved along k if the scales are block scales."""
    if interleaved and fmt.block_size:
        raise ValueError(
            f"cute::{op}: interleaved is True with granularity={fmt.granularity!r}; expected granularity='token' or "
            "'tensor', because no GEMM reads interleaved codes with block scales"
        )


def check_fp8_scale(op: str, scale: torch.Tensor | None, fmt: FP8Format, other: str, device: torch.device) -> None:
    """Check that ``scale`` is one fp32 element if the caller must pass the scale, and None if the op computes it."""
    if not fmt.is_static:
        if scale is not None:
            raise ValueError(
                f"cute::{op}: scale is given; granularity={fmt.granularity!r} computes its own, so pass None, "
                "or granularity='tensor'"
            )
    elif scale is None:
        raise ValueError(
            f"cute::{op}: scale is None; granularity={fmt.granularity!r} takes it as one float32 element on {device}; "
            "fp8_quantize_per_tensor computes the scale"
        )
    else:
        check_scalar(op, "scale", scale, other, device)


def check_scalar_or_heads(
    op: str, name: str, tensor: torch.Tensor, heads: int, other: str, device: torch.device
) -> None:
    """Check that ``tensor`` is one fp32 element, or a vector of one element per head, on ``device``."""
    check_dtype(op, name, tensor, (torch.float32,))
    fits = tensor.numel() == 1 or tuple(tensor.shape) == (heads,)
    _check_sizes(op, name, tensor, fits, f"one element or ({heads},), one for each head")
    check_device(op, name, tensor, other, device)


def check_scalar(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """Check that ``tensor`` is one fp32 element on ``device``, the device of the argument named ``other``."""
    check_dtype(op, name, tensor, (torch.float32,))
    _check_sizes(op, name, tensor, tensor.numel() == 1, "one element")
    check_device(op, name, tensor, other, device)


def _check_sizes(op: str, name: str, tensor: torch.Tensor, are_right: bool, expected: str) -> None:
    if not are_right:
        raise ValueError(f"cute::{op}: got {name} with shape {tuple(tensor.shape)}; expected {expected}")


def check_rows(
    op: str,
    name: str,
    tensor: torch.Tensor,
    fmt: FP4Format | FP8Format | None,
    dtypes: tuple[torch.dtype, ...],
    halves: bool = False,
) -> None:
    """Check that ``tensor`` is (..., K), or (..., 2K) with ``halves``, that its dtype is in ``dtypes``, and that K is a
    multiple of the block size."""
    multiple = 1 if fmt is None else fmt.width_multiple
    check_dtype(op, name, tensor, dtypes)
    if tensor.dim() == 0:
        raise ValueError(f"cute::{op}: {name} has no dimension; expected (..., {'2K' if halves else 'K'})")
    width = tensor.shape[-1]
    if width == 0 or width % (2 * multiple if halves else multiple) != 0:
        expected = "number of elements" if multiple == 1 else f"multiple of {multiple}"
        raise ValueError(
            f"cute::{op}: {name} has a last dimension of {width}; "
            f"expected {'two halves, each ' if halves else ''}a positive {expected}"
        )


def check_residual(op: str, residual: torch.Tensor, input: torch.Tensor, allows_fp32: bool = False) -> None:
    """Check that ``residual`` has the dtype, shape and device of ``input``, and that no two of its elements share
    memory. If ``allows_fp32``, the dtype may also be float32."""
    dtypes = (input.dtype, torch.float32) if allows_fp32 else (input.dtype,)
    check_dtype(op, "residual", residual, tuple(dict.fromkeys(dtypes)))
    check_shape(op, "residual", residual, input.shape, "the shape of input")
    check_device(op, "residual", residual, "input", input.device)
    if overlaps_itself(residual):
        raise ValueError(
            f"cute::{op}: got residual with shape {tuple(residual.shape)} and strides {residual.stride()}, by which it "
            "overlaps itself, and it is updated in place; pass residual.contiguous()"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements of the tensor may share memory, because a dimension's stride does not exceed the
    memory extent of the inner dimensions.

    Return False for symbolic sizes. Calls with real sizes are checked again.
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


def check_no_sharing(
    op: str,
    outputs: Mapping[str, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    updated: Collection[str],
    may_share: tuple[str, str] | None,
) -> None:
    """Check that no output, and no argument that is updated in place, shares memory with another tensor of the call.

    Four cases are allowed. An updated argument may be the same view as ``input``. An updated argument and ``input`` may
    be different columns of the same rows. The output and the argument that ``may_share`` names may be the same view.
    Two updated arguments may alternate in memory, as the keys and values of a cache often do.
    """
    updated = [name for name in updated if name in arguments]
    written = {**outputs, **{name: arguments[name] for name in updated}}
    others = {**arguments, **outputs}
    occupied = {name: _occupied(tensor) for name, tensor in others.items()} if written else {}
    for name, tensor in written.items():
        for other, read in others.items():
            if other == name or not _meet(occupied[name], occupied[other]):
                continue
            with_input = name in updated and other == "input"
            if (with_input or (name, other) == may_share) and _is_same_view(tensor, read):
                continue
            if with_input and _are_columns_apart(tensor, read):
                continue
            if name in updated and other in updated and _alternate(tensor, read):
                continue
            what = "is updated in place and shares" if name in updated else "shares"
            same = " without being the same view" if with_input else ""
            raise ValueError(f"cute::{op}: {name} {what} memory with {other}{same}; pass a tensor of its own as {name}")


def _place(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return a tensor's place as (identifier of the memory, first byte, end byte), or None for symbolic sizes.

    For tensors with addresses, the identifier is 0 and bytes are addresses.
    """
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())):
        return None
    space: int
    begin: int
    if type(tensor) in PLAIN and not tensor.is_meta:
        space, begin = 0, tensor.data_ptr()
    else:  # storages of meta and fake tensors have no addresses
        space, begin = tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size()
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return space, begin, begin + (int(last) + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the memory ranges of two tensors overlap. Return False for symbolic sizes."""
    return _meet(_occupied(one), _occupied(other))


def _occupied(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return a tensor's place, or None if it is empty or has symbolic sizes."""
    place = _place(tensor)
    return None if place is None or tensor.numel() == 0 else place


def _meet(mine: tuple[int, int, int] | None, others: tuple[int, int, int] | None) -> bool:
    """Return True if two places have bytes in common."""
    if mine is None or others is None:
        return False
    return mine[0] == others[0] and mine[1] < others[2] and others[1] < mine[2]


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two overlapping tensors contain the same elements at the same addresses. Strides of dimensions of
    size 1 are ignored."""
    steps = [
        [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
        for tensor in (one, other)
    ]
    return _place(one) == _place(other) and steps[0] == steps[1]


def _are_columns_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two overlapping tensors of equal shape are different columns of one buffer's rows, and so share no
    element. Tensors of different dtypes are not supported."""
    if one.dtype != other.dtype or one.dim() < 2 or one.stride() != other.stride() or one.stride(-1) != 1:
        return False
    steps = [stride for stride, extent in zip(one.stride()[:-1], one.shape[:-1], strict=True) if extent > 1]
    # If the smallest stride divides all other strides, an element's address modulo the smallest stride is its column.
    if not steps or min(steps) == 0 or any(step % min(steps) for step in steps):
        return False
    mine, others = _place(one), _place(other)
    assert mine is not None and others is not None
    pitch, width = (extent * one.element_size() for extent in (min(steps), one.shape[-1]))
    return width <= (others[1] - mine[1]) % pitch <= pitch - width


def _alternate(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors whose memory ranges overlap share no byte, because they alternate in memory: a stride
    of ``one`` divides all larger strides of both, and within this stride the inner dimensions of the two occupy
    different bytes."""
    mine, others = _place(one), _place(other)
    assert mine is not None and others is not None
    steps = [
        [(stride * tensor.element_size(), extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]
        for tensor in (one, other)
    ]
    steps = [[step for step in each if step[1] > 1] for each in steps]
    for pitch in {stride for stride, _ in steps[0] if stride > 0}:
        if any(stride % pitch for each in steps for stride, _ in each if stride >= pitch):
            continue
        reaches = [
            tensor.element_size() + sum(stride * (extent - 1) for stride, extent in each if stride < pitch)
            for tensor, each in zip((one, other), steps, strict=True)
        ]
        ahead = (others[1] - mine[1]) % pitch
        if reaches[0] <= ahead <= pitch - reaches[1]:
            return True
    return False


def check_output(op: str, name: str, tensor: torch.Tensor, expected: Output, device: torch.device) -> None:
    """Check that ``tensor`` has the dtype, shape, layout and device that ``expected`` describes."""
    if not isinstance(tensor, torch.Tensor):
        shown = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise TypeError(f"cute::{op}: {name} is {shown}; expected a tensor")
    check_dense(op, name, tensor)
    check_dtype(op, name, tensor, (expected.dtype,))
    check_shape(op, name, tensor, expected.shape, "the shape of the op's output")
    check_device(op, name, tensor, "the input", device)
    if expected.scale_layouts is not None:
        _check_scale_output(op, name, tensor, expected.scale_layouts)
    elif not tensor.is_contiguous():
        raise ValueError(f"cute::{op}: got {name} with strides {tensor.stride()}; expected a contiguous tensor")


def _check_scale_output(op: str, name: str, scale: torch.Tensor, layouts: Collection[str]) -> None:
    """Check that an output tensor for FP8 block scales has one of the named layouts, and that no two of its elements
    share memory."""
    is_in = {ROW.name: is_row_major, COLUMN.name: is_column_major}
    if any(is_in[layout](scale) for layout in layouts) and not overlaps_itself(scale):
        return
    named = " or ".join(f"{layout}-major" for layout in layouts)
    asked = f", as scale_layout={next(iter(layouts))!r} asks" if len(layouts) == 1 else ""
    raise ValueError(
        f"cute::{op}: got {name} with shape {tuple(scale.shape)} and strides {scale.stride()}; expected {named} "
        f"scales{asked}: stride(-1) is 1 by row, stride(-2) is 1 and stride(-1) at least the rows by column"
    )


def check_given_outputs(op: str, out: Any, names: tuple[str, ...]) -> Any:
    """Check that ``out`` is a tensor, or a tuple with one tensor per output, and return it."""
    if len(names) == 1:
        if not (isinstance(out, torch.Tensor) or is_proxy(out)):
            raise TypeError(f"cute::{op}: out is a {type(out).__name__}; expected a tensor")
        return out
    if not isinstance(out, (tuple, list)):  # not a union type, which Dynamo of torch 2.9 cannot trace
        raise TypeError(f"cute::{op}: out is a {type(out).__name__}; expected a tuple of {', '.join(names)}")
    check_number(op, tuple(out), names)
    for name, tensor in zip(names, out, strict=True):
        if not (isinstance(tensor, torch.Tensor) or is_proxy(tensor)):
            raise TypeError(f"cute::{op}: {name} of out is a {type(tensor).__name__}; expected a tensor")
    return out


def check_number(op: str, outputs: tuple[torch.Tensor, ...], names: tuple[str, ...]) -> None:
    """Check that the caller passed one tensor for each output of the op."""
    if len(outputs) != len(names):
        raise ValueError(f"cute::{op}: out has {len(outputs)} tensors; expected {len(names)}: {', '.join(names)}")


def check_matrix(op: str, name: str, tensor: torch.Tensor, expected: str) -> None:
    """Check that ``tensor`` has two dimensions."""
    if tensor.dim() != 2:
        fix = f"; pass {name}.flatten(0, -2)" if tensor.dim() > 2 and name in ("a", "input", "logits", "ids") else ""
        if name == "a":
            fix += interleaved_fix(tensor, 3)
        raise ValueError(f"cute::{op}: got {name} with shape {tuple(tensor.shape)}; expected {expected}{fix}")


def interleaved_fix(a: torch.Tensor, dimensions: int) -> str:
    """Return advice, for an error message, if ``a`` has this number of dimensions and could hold interleaved rows, or
    else an empty string."""
    if a.dim() != dimensions or a.shape[-1] != INTERLEAVED_K or a.dtype.itemsize != 1:
        return ""
    return "; if interleave_k wrote a, pass torch_cute_ops.deinterleave_k(a, K)"


def check_transposed(op: str, name: str, weight: torch.Tensor, stored: str) -> None:
    """Check that ``weight``, (..., K, N), is the transposed view of a row-major weight (N, K), so ``stride(-2)`` is 1.

    Args:
        op, name: names of the op and of the argument.
        weight: tensor with at least two dimensions.
        stored: dimensions of the row-major weight, such as ``"(N, K)"``.
    """
    if weight.stride(-2) != 1 and weight.shape[-2] != 1:
        raise ValueError(
            f"cute::{op}: got {name} with shape {tuple(weight.shape)} and strides {weight.stride()}; expected the "
            f"transposed view of a row-major weight, with stride(-2) == 1: pass {name}.mT if {name} is stored as "
            f"{stored}, or {name}.mT.contiguous().mT, a view of a copy, if it is stored transposed"
        )


def check_packed(op: str, name: str, tensor: torch.Tensor, fmt: FP4Format) -> None:
    """Check that ``tensor`` holds packed codes, (..., K/2), and that K is a multiple of the block size."""
    check_dtype(op, name, tensor, PACKED_DTYPES)
    if tensor.dim() == 0:
        raise ValueError(f"cute::{op}: {name} has no dimension; expected (..., K/2)")
    width = tensor.shape[-1] * 2
    if width == 0 or width % fmt.block_size != 0:
        raise ValueError(
            f"cute::{op}: {name} holds {width} elements per row; expected a positive multiple of {fmt.block_size}"
        )


def check_aligned(op: str, name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor starts at a multiple of 16 bytes, because kernels write it with vector stores."""
    if tensor.data_ptr() % 16:
        raise ValueError(
            f"cute::{op}: {name} starts at an address that is no multiple of 16 bytes; pass a fresh tensor"
        )


def check_topk(op: str, topk: int) -> None:
    """Check that ``topk`` is a valid number of experts per token."""
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"cute::{op}: topk is {topk}; expected 1 to {MAX_TOPK}")


def check_integers(op: str, name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """Check that ``tensor`` is int32, one-dimensional, and on ``device``, the device of the argument ``other``."""
    check_dtype(op, name, tensor, (torch.int32,))
    _check_sizes(op, name, tensor, tensor.dim() == 1, "one dimension")
    check_device(op, name, tensor, other, device)


def check_indices(op: str, name: str, indices: torch.Tensor, count: int, of: str) -> None:
    """Check that each element of a CPU tensor ``indices`` is -1 or less than ``count``. The message contains ``of``,
    the name of the indexed things."""
    wrong = index_out_of_range(indices, count)
    if wrong is not None:
        raise ValueError(f"cute::{op}: {name} holds {wrong}, out of range: there are {count} {of}")


def index_out_of_range(indices: torch.Tensor, count: int) -> int | None:
    """Return an element of ``indices`` that is not between -1 and ``count`` - 1, or None if all elements are."""
    if not indices.numel():
        return None
    least, largest = (int(each) for each in indices.aminmax())
    return largest if largest >= count else least if least < -1 else None


def check_ascending(op: str, offsets: torch.Tensor, rows: int, name: str) -> None:
    """Check that ``offsets``, a CPU tensor, ascends from at least 0 to at most ``rows``, the rows of argument
    ``name``."""
    values = offsets.tolist()
    if min(values) < 0 or max(values) > rows:
        wrong = min(values) if min(values) < 0 else max(values)
        raise ValueError(f"cute::{op}: offsets holds {wrong}, out of range; expected 0 to {rows}, the rows of {name}")
    for expert, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(
                f"cute::{op}: offsets descends from {begin} to {end} at expert {expert}; expected ascending numbers"
            )


def check_counts(op: str, counts: torch.Tensor, offsets: torch.Tensor | None, max_rows: int) -> None:
    """Check that no element of a CPU tensor ``counts`` is negative or exceeds the rows reserved for its expert.

    Args:
        op: name of the op.
        counts: (E,) int32, rows of each expert.
        offsets: (E + 1,) int32, already checked, or None if ``max_rows`` rows are reserved for each expert.
        max_rows: rows reserved for each expert, if there are no offsets.
    """
    room = [max_rows] * len(counts) if offsets is None else offsets.diff().tolist()
    for expert, (count, rows) in enumerate(zip(counts.tolist(), room, strict=True)):
        if not 0 <= count <= rows:
            raise ValueError(
                f"cute::{op}: counts holds {count} for expert {expert}, out of range; expected 0 to {rows}, the rows "
                "reserved for it"
            )


def check_rows_of_experts(
    op: str, name: str, rows: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None
) -> None:
    """Check the values of ``offsets`` and ``counts``, CPU tensors that locate experts' rows in argument ``name``."""
    if offsets is not None:
        check_ascending(op, offsets, rows.shape[0], name)
    if counts is not None:
        check_counts(op, counts, offsets, rows.shape[1])


def check_expert_rows(
    op: str, input: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None, name: str = "input"
) -> None:
    """Check that the shapes of the experts' rows, the offsets and the counts agree: rows are (R, K) with offsets, or
    (E, max_rows, K) with only counts."""
    if offsets is None and counts is None:
        raise ValueError(
            f"cute::{op}: neither offsets nor counts are given; pass offsets for {name} (R, K), counts for {name} "
            "(E, max_rows, K)"
        )
    expected = "(E, max_rows, K), as there are no offsets" if offsets is None else "(R, K), as there are offsets"
    if input.dim() != (3 if offsets is None else 2):
        raise ValueError(f"cute::{op}: got {name} with shape {tuple(input.shape)}; expected {expected}")
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


def check_out_dtype(op: str, out_dtype: torch.dtype | None) -> None:
    """Check that ``out_dtype`` is None or a dtype that a result can have."""
    if out_dtype is not None and out_dtype not in INPUT_DTYPES:
        raise TypeError(f"cute::{op}: out_dtype is {out_dtype}; expected {_names(INPUT_DTYPES)}")


def check_finite(op: str, name: str, value: float, limit: str = "", fits: bool = True) -> None:
    """Check that ``value`` is finite, and that ``fits``, the result of the caller's own check, is True. The error
    message contains ``limit``, a description of the caller's limit."""
    if not (math.isfinite(value) and fits):
        raise ValueError(f"cute::{op}: {name} is {value!r}; expected a finite number{limit}")


def check_gate(op: str, gate: str, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> None:
    """Check the name of a gate's activation function, and that only SiLU gets the parameters of SwiGLU."""
    if gate not in get_args(Gate):
        expected = ", ".join(map(repr, get_args(Gate)))
        raise ValueError(f"cute::{op}: gate is {gate!r}; expected one of {expected}")
    given = {"swiglu_alpha": (alpha, 1.0), "swiglu_beta": (beta, 0.0), "swiglu_limit": (limit, None)}
    for name, (value, usual) in given.items():
        if gate != "silu" and value != usual:
            raise ValueError(
                f"cute::{op}: {name} is {value} with gate={gate!r}; expected {usual}, because only gate='silu' takes "
                "parameters"
            )


def check_swiglu(op: str, alpha: float, beta: float, limit: float | None) -> None:
    """Check that the parameters of the gate are finite, and that its limit is positive."""
    check_finite(op, "swiglu_alpha", alpha)
    check_finite(op, "swiglu_beta", beta)
    if limit is not None:
        check_finite(op, "swiglu_limit", limit, " above 0", limit > 0)
