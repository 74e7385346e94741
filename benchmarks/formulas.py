"""Formulas for the bytes of the tensors of row-wise ops. For GEMMs, see `GemmProblem.bytes_moved`."""

from __future__ import annotations

from torch_cute_ops.formats import FP8_FORMATS, NVFP4
from torch_cute_ops.gemm.problem import Operand


def row_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of a dense (rows, columns) tensor."""
    return rows * columns * itemsize


def fp4_bytes(rows: int, columns: int) -> int:
    """Return the bytes of NVFP4 codes and scales. The zero padding of tiled scales is not counted, although ops write
    it."""
    return rows * Operand(NVFP4).row_bytes(columns)


def fp8_bytes(rows: int, columns: int, granularity: str) -> int:
    """Return the bytes of FP8 codes and float32 scales. With granularity "tensor", the single scale counts twice,
    because it is read and written."""
    if granularity == "tensor":
        return rows * columns + 2 * 4
    return rows * Operand(FP8_FORMATS[granularity]).row_bytes(columns)
