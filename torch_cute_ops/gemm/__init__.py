"""GEMMs in any format: description of a GEMM, backends that compute it, and choice, tuning and timing of a backend."""
