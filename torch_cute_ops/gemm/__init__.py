"""GEMMs in all formats: the description of a GEMM, the backends that compute it, and the choice and tuning of a
backend."""
