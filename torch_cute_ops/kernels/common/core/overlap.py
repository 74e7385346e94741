"""Host code: refuse a launch where a tensor that the kernel writes shares memory with another tensor of the call.

This is a part of the compiled host function, some hundred integer instructions, so the fast path of a call need not
look at addresses in Python. A refused call launches a grid of no CTAs. CUDA answers that with an error before anything
runs, the compiled function raises, and the op's thorough checks then say which tensors overlap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from torch_cute_ops.kernels.common.core import ptx

Tensors = Sequence[cute.Tensor | None]


def ctas_unless_overlapping(
    ctas: Int32, written: Tensors, read: Tensors = (), may_alias: Sequence[tuple[cute.Tensor, cute.Tensor]] = ()
) -> Int32:
    """``ctas``, or 0 if a written tensor overlaps another tensor of the call, or if the rows of a written one overlap.

    Call it in the host function (``__call__``) and launch with the result as one extent of the grid. A tensor extends
    from its first to its last element, with what lies between its rows; an empty one overlaps nothing.

    Args:
        ctas: CTAs of the launch.
        written: tensors that the kernel writes; they may not overlap each other either.
        read: tensors that it only reads.
        may_alias: pairs of matrices of one shape, found in ``written`` and ``read``, that may be the same view of
            memory, or different columns of one matrix: equal row strides, and no element in common.

    ``None`` in ``written`` and ``read`` stands for a tensor that the kernel was compiled without.

    Raises:
        ValueError: while tracing, for a pair that is not among the tensors.
    """
    outputs, inputs = ([_memory_of(tensor) for tensor in some if tensor is not None] for some in (written, read))
    allowed = {frozenset(map(id, pair)) for pair in may_alias}
    overlaps = Boolean(False)
    for i, output in enumerate(outputs):
        if len(output.tensor.shape) == 2:
            overlaps |= _rows_overlap(output.tensor)
        for other in (*outputs[i + 1 :], *inputs):
            intersects = (output.begin < other.end) & (other.begin < output.end)
            intersects &= output.is_occupied & other.is_occupied
            pair = frozenset((id(output.tensor), id(other.tensor)))
            if pair in allowed:
                allowed.remove(pair)
                intersects &= ~(_are_same_view(output, other) | _are_columns(output, other))
            overlaps |= intersects
    if allowed:
        raise ValueError("a pair in may_alias is not among the tensors")
    return ptx.select(overlaps, Int32(0), Int32(ctas))


class _Memory(NamedTuple):
    """Where a tensor lies: addresses of its first byte and behind its last, and whether it has elements."""

    tensor: cute.Tensor
    begin: Int64
    end: Int64
    is_occupied: Boolean


def _memory_of(tensor: cute.Tensor) -> _Memory:
    last, is_occupied = Int64(0), Boolean(True)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        last += (Int64(extent) - 1) * Int64(stride)
        is_occupied &= Int64(extent) > 0
    begin = Int64(tensor.iterator.toint())
    return _Memory(tensor, begin, begin + (last + 1) * _itemsize(tensor), is_occupied)


def _itemsize(tensor: cute.Tensor) -> int:
    return tensor.element_type.width // 8


def _row_bytes(tensor: cute.Tensor) -> Int64:
    return Int64(tensor.shape[1]) * _itemsize(tensor)


def _pitch(tensor: cute.Tensor) -> Int64:
    """Bytes from a row to the next."""
    return Int64(tensor.stride[0]) * _itemsize(tensor)


def _rows_overlap(tensor: cute.Tensor) -> Boolean:
    return (Int64(tensor.shape[0]) > 1) & (_pitch(tensor) < _row_bytes(tensor))


def _are_same_view(a: _Memory, b: _Memory) -> Boolean:
    # The stride of a single row means nothing.
    is_same_stride = (Int64(a.tensor.shape[0]) <= 1) | (_pitch(a.tensor) == _pitch(b.tensor))
    return (a.begin == b.begin) & is_same_stride


def _are_columns(a: _Memory, b: _Memory) -> Boolean:
    pitch = _pitch(a.tensor)
    # A single row may have stride 0.
    divisor = cutlass.max(pitch, Int64(1))
    ahead = ((b.begin - a.begin) % divisor + divisor) % divisor
    are_apart = (_row_bytes(a.tensor) <= ahead) & (ahead + _row_bytes(b.tensor) <= pitch)
    return (pitch == _pitch(b.tensor)) & are_apart
