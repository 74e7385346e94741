"""Host code that refuses caches whose elements share memory. TVM-FFI does not check this."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from torch_cute_ops.kernels.common.core import ptx


def ctas_if_caches_are_apart(ctas: Int32, *caches: cute.Tensor | None) -> Int32:
    """Return ``ctas``, or 0 to refuse the launch if two elements of the caches may share memory.

    Two caches may alternate in memory, as the keys and values of one tensor (blocks, 2, …) do. Use the result like the
    result of ``ctas_unless_overlapping``. Entries may be None.
    """
    given = [cache for cache in caches if cache is not None]
    overlaps = Boolean(False)
    for i, cache in enumerate(given):
        overlaps |= _overlaps_itself(cache)
        for other in given[i + 1 :]:
            overlaps |= ~_are_apart(cache, other)
    return ptx.select(overlaps, Int32(0), Int32(ctas))


def _steps(cache: cute.Tensor) -> list[tuple[Int64, Int64]]:
    """Return (stride in bytes, extent) of each dimension. The stride of a dimension of one element is 0."""
    size = cache.element_type.width // 8
    steps = []
    for stride, extent in zip(cache.stride, cache.shape, strict=True):
        extent = Int64(extent)
        steps.append((ptx.select(extent > 1, Int64(stride) * size, Int64(0)), extent))
    return steps


def _reach(cache: cute.Tensor, pitch: Int64) -> Int64:
    """Return the number of bytes that the dimensions with strides below ``pitch`` span."""
    reach = Int64(cache.element_type.width // 8)
    for stride, extent in _steps(cache):
        reach += ptx.select(stride < pitch, stride * (extent - 1), Int64(0))
    return reach


def _overlaps_itself(cache: cute.Tensor) -> Boolean:
    """Return True if a stride is smaller than the span of the dimensions with smaller strides, or equals another
    stride."""
    overlaps = Boolean(False)
    steps = _steps(cache)
    for i, (stride, extent) in enumerate(steps):
        overlaps |= (extent > 1) & (stride < _reach(cache, stride))
        for other, _ in steps[i + 1 :]:
            overlaps |= (extent > 1) & (stride == other)
    return overlaps


@cute.jit
def _are_apart(one: cute.Tensor, other: cute.Tensor) -> Boolean:
    """Return True if no element of ``one`` shares memory with an element of ``other``."""
    begin, begin_other = Int64(one.iterator.toint()), Int64(other.iterator.toint())
    whole = Int64(2**62)
    is_occupied = Boolean(True)
    for _, extent in (*_steps(one), *_steps(other)):
        is_occupied &= extent > 0
    crosses = (begin < begin_other + _reach(other, whole)) & (begin_other < begin + _reach(one, whole))
    are_apart = Boolean(True)
    if crosses & is_occupied:
        # The divisions below take time, so skip them if the ranges of memory do not cross.
        are_apart = _alternate(one, other, begin_other - begin)
    return are_apart


def _alternate(one: cute.Tensor, other: cute.Tensor, distance: Int64) -> Boolean:
    """Return True if a stride of ``one`` divides all larger strides of both tensors, and the inner dimensions of the
    two tensors do not overlap within this stride. ``distance`` is the number of bytes from ``one`` to ``other``."""
    alternate = Boolean(False)
    for stride, _ in _steps(one):
        pitch = cutlass.max(stride, Int64(1))
        divides = stride > 0
        for larger, _ in (*_steps(one), *_steps(other)):
            divides &= (larger < pitch) | (larger % pitch == 0)
        ahead = (distance % pitch + pitch) % pitch
        alternate |= divides & (_reach(one, pitch) <= ahead) & (ahead + _reach(other, pitch) <= pitch)
    return alternate
