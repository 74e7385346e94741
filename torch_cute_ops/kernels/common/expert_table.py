"""Size of the table of experts' rows (``expert_rows``): no device code."""

from torch_cute_ops.formats.experts import MAX_EXPERTS

WARP = 32
SIZES = (MAX_EXPERTS, MAX_EXPERTS, 4, WARP)
"""Words of its parts: for each expert two, one for all, and one for each warp."""
TABLE_BYTES = 4 * sum(SIZES)
