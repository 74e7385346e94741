"""Size of the lists of ``kernels.common.experts.expert_units`` in shared memory: no device code."""

from typing import Final

from torch_cute_ops.formats.experts import MAX_EXPERTS

SCANNED: Final = 32
"""Most tokens of a tile for which every CTA scans the factors itself, and so starts to copy weights before the lists of
tokens are there. That is safe: the kernel that lists them lets this one start only when it has waited for all kernels
before it."""
LIST_BYTES: Final = 12 * (MAX_EXPERTS + 8)
