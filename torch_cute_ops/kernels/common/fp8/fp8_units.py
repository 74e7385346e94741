"""How threads share rows that are quantised to FP8: no device code."""

from torch_cute_ops.formats.fp8 import FP8_BLOCK128

FP8_UNIT = 16
"""Elements that a thread processes at once: their codes fill a 16-byte store. Rows are multiples of it."""
SCALE_THREADS = FP8_BLOCK128.block_size // FP8_UNIT
"""Neighbouring threads that share a block of 128 elements, and its scale."""
