"""FP4 operands on the device: layouts, copies, codes, MMAs."""
