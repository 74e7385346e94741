"""Block-scaled MMAs of data-center Blackwell (``tcgen05.mma``)."""
