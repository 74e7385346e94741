"""GEMMs in any format: the problem, the backends that compute it, how one is chosen, tuned and timed."""
