"""Launches: a check for overlapping tensors, programmatic dependent launch, and the order in which tiles are computed.

The overlap check is host code that is compiled into the launching function. It takes about a hundred integer
instructions, less time than a comparison of addresses in Python for each call. If tensors overlap, the function
launches a grid of no CTAs. CUDA then reports an error before anything runs, and the compiled function raises an
exception. The op catches the exception and checks its tensors again, to name the tensors that overlap.

Programmatic dependent launch (PDL): a kernel starts when every CTA of the previous kernel has either called
``griddepcontrol.launch_dependents`` ("released its dependents") or ended. Each kernel of this package first waits for
the previous kernel and only then releases its dependents. The wait returns when the previous kernel is complete and its
stores are visible. Therefore, until a kernel's wait returns, at most one other kernel runs at the same time: the
previous kernel. Before its wait, a kernel may read data that was complete before the previous kernel was launched. The
kernel must not write before its wait, because the previous kernel may still read the memory.

Exception: the second kernel of an op may write, before its wait, to memory that the op's first kernel does not touch.
All kernels before the first kernel are complete at that time, because the first kernel's wait has returned. For
example, ``fp4_gated_experts`` zeroes the padding of scales before its wait.

``static_weight`` promises that the weight and its scales were complete before the previous launch. A weight that the
previous launch writes is not static. The second kernel of an op may read the op's inputs before the first kernel ends,
because the inputs were complete before the first kernel passed its wait.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import RASTER_WIDTH

Tensors = Sequence[cute.Tensor | None]
_TILES = frozenset(layout.tile for layout in SCALE_LAYOUTS.values() if not layout.is_linear)


def ctas_unless_overlapping(
    ctas: Int32, written: Tensors, read: Tensors = (), may_alias: Sequence[tuple[cute.Tensor, cute.Tensor]] = ()
) -> Int32:
    """Return ``ctas``, or 0 to refuse the launch. The launch is refused if a written tensor overlaps another tensor, if
    rows of a written tensor overlap each other, or if rows of scale tiles are not contiguous. TVM-FFI checks none of
    these conditions.

    Call this function in the host function (``__call__``), and launch with the result as one extent of the grid. The
    memory of a tensor is the range from its first to its last element, including gaps between rows. An empty tensor
    overlaps nothing.

    Args:
        ctas: number of CTAs of the launch.
        written: tensors that the kernel writes. They must not overlap each other. An entry is None if the kernel was
            compiled without the tensor.
        read: tensors that the kernel only reads. Entries may be None.
        may_alias: pairs of matrices of the same shape, taken from ``written`` and ``read``. The matrices of a pair may
            be the same view of memory. The matrices may also be different columns of one matrix: equal row strides and
            no common element.

    Raises:
        ValueError: if a matrix of a pair is not among the tensors. The error is raised while the kernel is traced.
    """
    outputs, inputs = ([_memory_of(tensor) for tensor in some if tensor is not None] for some in (written, read))
    allowed = {frozenset(map(id, pair)) for pair in may_alias}
    overlaps = Boolean(False)
    for memory in (*outputs, *inputs):
        if _are_tiles(memory.tensor):
            overlaps |= _have_gaps(memory.tensor)
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


def ctas_if_adjacent(ctas: Int32, *stacks: cute.Tensor) -> Int32:
    """Return ``ctas``, or 0 to refuse the launch if the matrices of a stack (E, rows, columns) are not adjacent in
    memory.

    The matrices may be row-major or column-major. Kernels that read a stack as one matrix need this check. Use the
    result like the result of ``ctas_unless_overlapping``.
    """
    are_apart = Boolean(False)
    for stack in stacks:
        experts, rows, columns = stack.shape
        are_apart |= (Int32(experts) > 1) & (Int64(stack.stride[0]) != Int64(rows) * Int64(columns))
    return ptx.select(are_apart, Int32(0), Int32(ctas))


class _Memory(NamedTuple):
    """Range of memory that a tensor spans.

    Attributes:
        tensor: the tensor.
        begin, end: address of the tensor's first byte, and address after its last byte.
        is_occupied: True if the tensor is not empty.
    """

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


def _are_tiles(tensor: cute.Tensor) -> bool:
    """Return True if a tensor has the shape of tiled FP4 scales: all dimensions after the first two form a scale
    tile."""
    tile = tuple(tensor.shape[2:])
    return all(isinstance(extent, int) for extent in tile) and tile in _TILES


def _have_gaps(tiles: cute.Tensor) -> Boolean:
    """Return True if a gap in memory separates rows of scale tiles."""
    is_apart = Int64(tiles.stride[0]) != Int64(tiles.shape[1]) * Int64(tiles.stride[1])
    return is_apart & (Int64(tiles.shape[0]) > 1)


def _itemsize(tensor: cute.Tensor) -> int:
    return tensor.element_type.width // 8


def _row_bytes(tensor: cute.Tensor) -> Int64:
    return Int64(tensor.shape[1]) * _itemsize(tensor)


def _pitch(tensor: cute.Tensor) -> Int64:
    """Return the distance in bytes between neighbouring rows of a matrix."""
    return Int64(tensor.stride[0]) * _itemsize(tensor)


def _rows_overlap(tensor: cute.Tensor) -> Boolean:
    """Return True if rows of a matrix overlap. For a column-major matrix, check the columns instead of the rows."""
    if isinstance(tensor.stride[0], int) and tensor.stride[0] == 1:
        (rows, columns), pitch = tensor.shape, Int64(tensor.stride[1])
        return (Int64(columns) > 1) & (pitch < Int64(rows))
    return (Int64(tensor.shape[0]) > 1) & (_pitch(tensor) < _row_bytes(tensor))


def _are_same_view(a: _Memory, b: _Memory) -> Boolean:
    # Ignore the stride of a single row, because it is arbitrary.
    is_same_stride = (Int64(a.tensor.shape[0]) <= 1) | (_pitch(a.tensor) == _pitch(b.tensor))
    return (a.begin == b.begin) & is_same_stride


def _are_columns(a: _Memory, b: _Memory) -> Boolean:
    pitch = _pitch(a.tensor)
    # Avoid a division by zero: a single row may have stride 0.
    divisor = cutlass.max(pitch, Int64(1))
    ahead = ((b.begin - a.begin) % divisor + divisor) % divisor
    are_apart = (_row_bytes(a.tensor) <= ahead) & (ahead + _row_bytes(b.tensor) <= pitch)
    return (pitch == _pitch(b.tensor)) & are_apart


def pdl_start(pdl: bool) -> None:
    """If ``pdl`` is True, wait for the previous kernels, then allow the next kernel to start.

    After the wait, all earlier kernels are complete. So the next kernel overlaps no kernel except this kernel.
    """
    if pdl:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


def raster_tile(number, n_tiles, m_tiles, raster: int = RASTER_WIDTH) -> tuple:
    """Return the position of tile ``number`` in raster order: the tile's index along N and its index along M.

    The raster divides the tiles into strips of up to ``raster`` tiles along M. All tiles of a strip come before the
    next strip, and within a strip the order runs along N. CTAs that run at the same time then share both operands in
    L2.
    """
    strip = number // (n_tiles * raster)
    width = cutlass.min(m_tiles - strip * raster, Int32(raster))
    place = number - strip * (n_tiles * raster)
    return place // width, strip * raster + place % width
