"""Conversions between the 32-bit words in memory and the fp32 values that kernels compute with."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Uint32

from torch_cute_ops.kernels.common.core import ptx

DSL_DTYPES = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.uint8: cutlass.Uint8,
}


def words_per(elements: int, dtype) -> int:
    """32-bit words that ``elements`` of the DSL type ``dtype`` fill."""
    return elements * dtype.width // 32


def load_words(words: cute.Tensor) -> list:
    """A short, statically shaped tensor of words as a list, by vector loads."""
    fragment = cute.make_rmem_tensor(words.shape, Uint32)
    cute.autovec_copy(words, fragment)
    return [fragment[i] for i in range(cute.size(words))]


def store_words(words: list, destination: cute.Tensor) -> None:
    """Store a list of words in a short tensor, by vector stores."""
    fragment = cute.make_rmem_tensor((len(words),), Uint32)
    for i, word in enumerate(words):
        fragment[i] = word
    cute.autovec_copy(fragment, destination)


def store_byte(destination: cute.Tensor, byte) -> None:
    """Store a byte in a one-element tensor."""
    destination[0] = cutlass.Uint8(byte)


def unpack(words: list, dtype) -> list:
    """The fp32 values of packed elements of the DSL type ``dtype``, in memory order."""
    if dtype is cutlass.Float32:
        return [ptx.float_of(word) for word in words]
    if dtype is cutlass.BFloat16:
        halves = [(word << 16, word & Uint32(0xFFFF0000)) for word in words]
        return [ptx.float_of(half) for pair in halves for half in pair]
    return [ptx.unpack_f16(word, half) for word in words for half in range(2)]


def pack(values: list, dtype) -> list:
    """Words that hold fp32 ``values`` rounded to nearest even to the DSL type ``dtype``."""
    if dtype is cutlass.Float32:
        return [ptx.bits_of(value) for value in values]
    name = _ptx_name(dtype)
    return [ptx.pack_16x2(low, high, name) for low, high in zip(values[0::2], values[1::2], strict=True)]


def add(a: list, b: list, dtype) -> list:
    """Words that hold the sums of packed elements, rounded to nearest even to the DSL type ``dtype``."""
    if dtype is cutlass.Float32:
        return [ptx.bits_of(ptx.float_of(x) + ptx.float_of(y)) for x, y in zip(a, b, strict=True)]
    return [ptx.add_16x2(x, y, _ptx_name(dtype)) for x, y in zip(a, b, strict=True)]


def _ptx_name(dtype) -> str:
    return "bf16" if dtype is cutlass.BFloat16 else "f16"
