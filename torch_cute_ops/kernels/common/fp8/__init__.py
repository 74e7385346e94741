"""Device code for FP8 operands, and the classes of which FP8 GEMM kernels are composed."""
