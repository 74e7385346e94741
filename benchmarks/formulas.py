"""Bytes by formula: sums of the parts that several ops share. All results are bytes, but that of `product_flops`."""

from __future__ import annotations


def row_bytes(rows: int, columns: int, itemsize: int) -> int:
    """A dense (rows, columns) tensor."""
    return rows * columns * itemsize


def fp4_bytes(rows: int, columns: int, block_size: int = 16) -> int:
    """FP4 data (two elements a byte) and one scale byte per block, of the real rows and columns only: the zero padding
    of a tiled scale layout is written too, but is no useful work and is not counted."""
    return rows * columns // 2 + rows * (columns // block_size)


def fp8_bytes(rows: int, columns: int, granularity: str) -> int:
    """FP8 data (a byte an element) and float32 scales: one a row ("token"), one per 128 elements of a row ("block128"),
    or one in all ("tensor"), which is given, so that it is read as well as written."""
    scales = {"token": rows, "block128": rows * (columns // 128), "tensor": 2}[granularity]
    return rows * columns + 4 * scales


def product_flops(m: int, n: int, k: int) -> int:
    """Multiplications and additions of an (m, k) by (k, n) product."""
    return 2 * m * n * k
