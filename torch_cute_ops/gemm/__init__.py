"""GEMMs in all formats: how a GEMM is described, which backends compute it, and how a backend is chosen and tuned."""
