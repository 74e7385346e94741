"""FP8 operands on the device, and the frame of the FP8 GEMMs."""
