"""Device code for FP8 operands, and the classes from which FP8 GEMM kernels are composed."""
