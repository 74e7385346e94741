"""Bytes by formula, of the parts that row-wise ops share; those of a GEMM are `GemmProblem.bytes_moved`."""

from __future__ import annotations

from torch_cute_ops.formats import FP8_FORMATS, NVFP4
from torch_cute_ops.gemm.problem import Operand


def row_bytes(rows: int, columns: int, itemsize: int) -> int:
    """A dense (rows, columns) tensor."""
    return rows * columns * itemsize


def fp4_bytes(rows: int, columns: int) -> int:
    """NVFP4 data and scales of the real rows and columns: the zero padding of a tiled scale layout is written too,
    but not counted."""
    return rows * Operand(NVFP4).row_bytes(columns)


def fp8_bytes(rows: int, columns: int, granularity: str) -> int:
    """FP8 data and float32 scales. The one scale of granularity "tensor" is given: it is read and written."""
    if granularity == "tensor":
        return rows * columns + 2 * 4
    return rows * Operand(FP8_FORMATS[granularity]).row_bytes(columns)
