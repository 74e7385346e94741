"""Device code for FP8 operands, and the parts of which FP8 GEMMs are composed."""
