"""Descriptions of a kernel's run-time arguments: hashable, printable, and independent of the DSL.

The compiler turns them into the DSL's fake tensors; the cache key holds them as they are.
"""

from typing import NamedTuple


class Dim(NamedTuple):
    """An extent or stride known only at run time. One name in several places of a signature means one value.

    Attributes:
        name: the name that error messages show.
        divisibility: what every value is a multiple of.
        bits: 32 or 64.
    """

    name: str
    divisibility: int = 1
    bits: int = 32


class TensorArg(NamedTuple):
    """A CUDA tensor.

    Attributes:
        dtype: the DSL's name of the element type, such as ``"BFloat16"``.
        shape: extents in elements.
        stride: strides in elements.
        align: bytes that the first element's address is a multiple of.
    """

    dtype: str
    shape: tuple[int | Dim, ...]
    stride: tuple[int | Dim, ...]
    align: int


class ScalarArg(NamedTuple):
    """A number; ``dtype`` is the DSL's name of its type, such as ``"Float32"``."""

    dtype: str


Argument = TensorArg | ScalarArg | None
