"""Stages of a ring in shared memory, whatever it holds."""

from typing import Final

from cutlass import Int32

from torch_cute_ops.kernels.common.core import ptx

PIECE: Final = 16  # bytes that the swizzle moves together


def next_stage(stage, parity, stages: int) -> tuple:
    """The next stage of a ring and the parity of its barriers' next phase; for a constant stage, a constant."""
    if isinstance(stage, int):
        return (stage + 1, parity) if stage + 1 < stages else (0, parity ^ 1)
    wraps = stage + 1 == stages
    return ptx.select(wraps, Int32(0), stage + 1), ptx.select(wraps, parity ^ 1, parity)
