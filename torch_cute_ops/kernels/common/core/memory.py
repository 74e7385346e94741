"""Loads and stores of 32-bit words, conversions between words and fp32 values, and prefetches into L2."""

import math
from typing import Final

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as primitives
import torch
from cutlass import Constexpr, Int32, Int64, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.pipeline import fence_async
from torch_cute_ops.runtime.argspec import Dim, TensorArg

DSL_DTYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.uint8: cutlass.Uint8,
}


def words_per(elements: int, dtype) -> int:
    """Return the number of 32-bit words that hold ``elements`` elements of the DSL type ``dtype``."""
    return elements * dtype.width // 32


def load_words(words: cute.Tensor) -> list:
    """Load a tensor of a few words, whose shape is static, with vector loads."""
    if (starts := _vectors(words)) is not None:
        return [word for at in starts for word in ptx.load_vector(words.iterator, starts.step, at)]
    fragment = cute.make_rmem_tensor(words.shape, Uint32)
    cute.autovec_copy(words, fragment)
    return [fragment[i] for i in range(cute.size(words))]


def store_words(words: list, destination: cute.Tensor) -> None:
    """Store words in a tensor of the same size, with vector stores."""
    if (starts := _vectors(destination)) is not None:
        for at in starts:
            ptx.store_vector(destination.iterator, words[at : at + starts.step], at)
        return
    fragment = cute.make_rmem_tensor((len(words),), Uint32)
    for i, word in enumerate(words):
        fragment[i] = word
    cute.autovec_copy(fragment, destination)


def _vectors(words: cute.Tensor) -> range | None:
    """Return the index of the first word of each vector, as a range whose step is the number of words per vector.
    Return None if the layout needs ``cute.autovec_copy``.

    ``cute.autovec_copy`` chooses the same vectors, and supports any layout. But it emits 50 operations instead of four,
    which takes a fifth of the time to compile a kernel.
    """
    shape, stride = words.layout.shape, words.layout.stride
    if isinstance(shape, tuple):
        if len(shape) != 1:
            return None
        (shape,), (stride,) = shape, stride
    at = words.iterator
    if not isinstance(shape, int) or stride != 1 or at.alignment < 4 or at.max_alignment != at.alignment:
        return None  # for example, swizzled addresses, whose alignment is reduced
    return range(0, shape, math.gcd(shape, at.alignment // 4, 8))


def store_byte(destination: cute.Tensor, byte) -> None:
    """Store a byte in a one-element tensor."""
    destination[0] = cutlass.Uint8(byte)


def unpack(words: list, dtype) -> list:
    """Return the fp32 values of packed elements of the DSL type ``dtype``, in memory order."""
    if dtype is cutlass.Float32:
        return [ptx.float_of(word) for word in words]
    if dtype is cutlass.BFloat16:
        halves = [(word << 16, word & Uint32(0xFFFF0000)) for word in words]
        return [ptx.float_of(half) for pair in halves for half in pair]
    return [ptx.unpack_f16(word, half) for word in words for half in range(2)]


def pack(values: list, dtype) -> list:
    """Round fp32 ``values`` to nearest even to the DSL type ``dtype`` and pack them into words."""
    if dtype is cutlass.Float32:
        return [ptx.bits_of(value) for value in values]
    name = _ptx_name(dtype)
    return [ptx.pack_16x2(low, high, name) for low, high in zip(values[0::2], values[1::2], strict=True)]


def add(a: list, b: list, dtype) -> list:
    """Add packed elements of the DSL type ``dtype``, rounding to nearest even."""
    if dtype is cutlass.Float32:
        return [ptx.bits_of(ptx.float_of(x) + ptx.float_of(y)) for x, y in zip(a, b, strict=True)]
    return [ptx.add_16x2(x, y, _ptx_name(dtype)) for x, y in zip(a, b, strict=True)]


def _ptx_name(dtype) -> str:
    return "bf16" if dtype is cutlass.BFloat16 else "f16"


def as_vectors(at: cute.Pointer, size: int) -> cute.Tensor:
    """View the ``size`` bytes that begin at ``at`` as a (size / 16, 4) tensor of words."""
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout((size // 16, 4), stride=(4, 1)))


@cute.jit
def clear(at: cute.Pointer, size: Constexpr[int], tid, threads: Constexpr[int]):
    """Set ``size`` bytes of shared memory to zero, with all threads of a CTA. After a barrier of the CTA, bulk copies
    may overwrite these bytes."""
    words = as_vectors(at, size)
    for i in range(tid, cute.size(words, mode=[0]), threads):
        store_words([Uint32(0)] * 4, words[i, None])
    fence_async()


PREFETCH_BYTES: Final = 8 << 20
"""Largest number of bytes to prefetch. On an H100, a layer of an 8B model was equally fast with prefetches of 6, 12 and
20 MB."""
REQUEST_BYTES: Final = 4096
"""Number of bytes that one prefetch request covers."""


def prefetch_argument() -> TensorArg:
    """Return the description of an argument for a matrix of bytes to prefetch, such as rows of a weight."""
    width = Dim("prefetch_bytes", divisibility=16)
    return TensorArg("Uint8", (Dim("prefetch_rows"), width), (width, 1), align=16)


@cute.jit
def prefetch(matrix: cute.Tensor, rank, count) -> None:
    """Prefetch this warp's share of the beginning of a matrix into L2: every ``count``-th request, starting with
    request ``rank``.

    A GEMM with few rows calls this function after its own loads, with a matrix that the next launch reads. All lanes of
    a converged warp must call it. Other kernels may write the matrix at the same time.
    """
    rows, width = matrix.shape
    total = cutlass.min(Int64(rows) * width, Int64(PREFETCH_BYTES)).to(Int32)
    with cute.arch.elect_one():
        for request in range(rank, cute.ceil_div(total, REQUEST_BYTES), count):
            at = cute.assume(request * REQUEST_BYTES, divby=REQUEST_BYTES)
            primitives.cp_async_bulk_prefetch(matrix.iterator + at, cutlass.min(total - at, Int32(REQUEST_BYTES)))
