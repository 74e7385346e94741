"""Size of the lists of ``kernels.common.expert_units`` in shared memory: no device code."""

from typing import Final

from torch_cute_ops.formats.experts import MAX_EXPERTS

SCANNED: Final = 32
"""Most tokens of a tile for which every CTA scans the factors itself, and so starts to read weights before the lists of
tokens are there."""
LIST_BYTES: Final = 12 * (MAX_EXPERTS + 8)
