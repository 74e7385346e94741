"""How threads share rows that become FP8: no device code."""

from torch_cute_ops.formats.fp8 import FP8_BLOCK128

FP8_UNIT = 16
"""Elements that a thread takes at once: their codes fill a vector store. Rows are multiples of it."""
SCALE_THREADS = FP8_BLOCK128.block_size // FP8_UNIT
"""Neighbouring threads whose elements share a scale of a block."""
