"""Size of the table of experts' rows (``expert_rows``): no device code."""

from torch_cute_ops.formats.experts import MAX_EXPERTS

TABLE_BYTES = 4 * (2 * MAX_EXPERTS + 4)
"""For each expert two words, and one for all."""
