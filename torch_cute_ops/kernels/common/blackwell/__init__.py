"""Block-scaled tcgen05 MMAs."""
