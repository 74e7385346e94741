"""Size of the table of experts' rows (``expert_rows``): no device code."""

from torch_cute_ops.formats.experts import MAX_EXPERTS

WARP = 32
SIZES = (MAX_EXPERTS, MAX_EXPERTS, 4, WARP)
"""Words of its parts, in the order of ``ExpertRows``."""
TABLE_BYTES = 4 * sum(SIZES)
