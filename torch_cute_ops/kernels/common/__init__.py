"""Device code that kernels share, so that each instruction, conversion and address formula is written only once."""
