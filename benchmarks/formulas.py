"""Formulas for the sizes, in bytes, of the tensors that row-wise ops read and write. For GEMMs, see
`GemmProblem.bytes_moved`."""

from __future__ import annotations

from torch_cute_ops.formats import FP8_FORMATS, NVFP4
from torch_cute_ops.gemm.problem import Operand


def row_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the size of a dense (rows, columns) tensor in bytes."""
    return rows * columns * itemsize


def fp4_bytes(rows: int, columns: int) -> int:
    """Return the size of NVFP4 codes and scales in bytes. The zero padding of tiled scales is not counted, although ops
    write it."""
    return rows * Operand(NVFP4).row_bytes(columns)


def fp8_bytes(rows: int, columns: int, granularity: str) -> int:
    """Return the size of FP8 codes and float32 scales in bytes. With granularity "tensor", the single scale counts
    twice, because it is both read and written."""
    if granularity == "tensor":
        return rows * columns + 2 * 4
    return rows * Operand(FP8_FORMATS[granularity]).row_bytes(columns)
