"""GEMM backends. Each has its own file."""
