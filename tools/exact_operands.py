"""Random operands of GEMMs whose partial sums are exact in fp32 in any order, for ``calibrate_ptx.py``."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ptx_emulator.values import E2M1

FP8 = {"Float8E4M3FN": torch.float8_e4m3fn, "Float8E5M2": torch.float8_e5m2}
HALVES = {"BFloat16": torch.bfloat16, "Float16": torch.float16}
BITS = {"Float32": torch.int32, "BFloat16": torch.int16, "Float16": torch.int16}
NAN = {"Float8E4M3FN": 0x7F, "Float8E8M0FNU": 0xFF}
"""NaN code of each scale format. It is stored in padding, which a kernel must not use."""


class Problem(NamedTuple):
    """Sizes (m, n, k) of a GEMM, its buffers (the last is the result), and the expected bits of the result."""

    sizes: tuple[int, int, int]
    buffers: list[Any]
    expected: Any


class Operand(NamedTuple):
    """A matrix as bytes of codes and scales, and its decoded numbers."""

    data: Any
    scales: Any
    numbers: Any


def in_blocks(scales: Any, nan: int) -> Any:
    """Return scales in the 128x4 layout: 512 bytes per 128 rows × 4 scales. Padding rows are filled with the code
    ``nan``, padding columns with 0."""
    rows, columns = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), np.uint8)
    padded[rows:] = nan
    padded[:rows, :columns] = scales
    tiles = padded.reshape(len(padded) // 128, 4, 32, -1, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4))


def matrix(dtype: Any, rows: int, k: int, random: np.random.Generator) -> Operand:
    """Return a matrix of small integers in a DSL type of 8 or 16 bits, or of all FP4 codes in ``Float4E2M1FN``."""
    name = dtype.__name__
    if name == "Float4E2M1FN":
        codes = random.integers(0, 16, (rows, k), dtype=np.uint8)
        return Operand(codes[:, ::2] | codes[:, 1::2] << 4, None, E2M1[codes])
    numbers = random.integers(-4, 5, (rows, k)).astype(np.float64)
    return Operand(encoded(numbers, dtype), None, numbers)


def encoded(numbers: Any, dtype: Any) -> Any:
    """Encode numbers in a DSL type; return unsigned or signed integers of its width."""
    name = dtype.__name__
    exact = torch.from_numpy(np.ascontiguousarray(numbers)).to({**FP8, **HALVES, "Float32": torch.float32}[name])
    return exact.view(torch.uint8 if name in FP8 else BITS[name]).numpy()


def scaled(dtype: Any, scale: Any, block: int, rows: int, k: int, random: np.random.Generator) -> Operand:
    """Return a matrix with one scale of the DSL type ``scale`` per ``block`` elements of a row. All scales are powers
    of two."""
    plain = matrix(dtype, rows, k, random)
    exponents = random.integers(-2, 3, (rows, k // block))
    if scale.__name__ == "Float8E8M0FNU":
        codes = (exponents + 127).astype(np.uint8)
    else:
        codes = torch.from_numpy(np.exp2(exponents)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    numbers = plain.numbers * np.repeat(np.exp2(exponents), block, 1)
    return Operand(plain.data, in_blocks(codes, NAN[scale.__name__]), numbers)


def check_exact(left: Any, right: Any, quantum: float) -> None:
    """Check that all partial sums of ``left @ right.T`` are multiples of ``quantum`` that fp32 represents."""
    assert (np.abs(left) @ np.abs(right).T).max() < 2**24 * quantum


def bits_of(result: Any, dtype: Any) -> Any:
    """Round float64 results to a DSL type once, and return the bits."""
    return encoded(torch.from_numpy(np.ascontiguousarray(result)).float().numpy(), dtype)


def unwritten(expected: Any) -> Any:
    """Return a result buffer that is filled with a pattern which no kernel computes."""
    return np.full_like(expected, -0x1112)
