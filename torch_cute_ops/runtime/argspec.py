"""Descriptions of a kernel's run-time arguments: hashable, printable, and independent of the DSL.

``compiler.py`` converts the descriptions to the DSL's fake tensors. The cache key contains the descriptions unchanged.
"""

from typing import NamedTuple


class Dim(NamedTuple):
    """Extent or stride that is known only at run time. Dimensions of one signature that have the same name are equal.

    Attributes:
        name: name in error messages.
        divisibility: divisor of every value.
        bits: 32 or 64.
    """

    name: str
    divisibility: int = 1
    bits: int = 32


class TensorArg(NamedTuple):
    """Description of a CUDA tensor argument.

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
    """Description of a scalar argument. ``dtype`` is the DSL's name for the argument's type, such as ``"Float32"``."""

    dtype: str


Argument = TensorArg | ScalarArg | None
