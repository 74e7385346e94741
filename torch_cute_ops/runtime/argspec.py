"""Descriptions of a kernel's run-time arguments: hashable, printable, and independent of the DSL.

The compiler converts them to the DSL's fake tensors; the cache key contains them unchanged.
"""

from typing import NamedTuple


class Dim(NamedTuple):
    """Extent or stride that is known only at run time. Equal names within a signature mean equal values.

    Attributes:
        name: name in error messages.
        divisibility: divisor of every value.
        bits: 32 or 64.
    """

    name: str
    divisibility: int = 1
    bits: int = 32


class TensorArg(NamedTuple):
    """CUDA tensor.

    Attributes:
        dtype: DSL name of the element type, such as ``"BFloat16"``.
        shape: extents in elements.
        stride: strides in elements.
        align: alignment of the first element's address, bytes.
    """

    dtype: str
    shape: tuple[int | Dim, ...]
    stride: tuple[int | Dim, ...]
    align: int


class ScalarArg(NamedTuple):
    """Number. ``dtype`` is the DSL name of its type, such as ``"Float32"``."""

    dtype: str


Argument = TensorArg | ScalarArg | None
