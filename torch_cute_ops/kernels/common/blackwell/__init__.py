"""Device code and configurations of GEMMs that multiply with ``tcgen05.mma``, on data-center Blackwell."""
