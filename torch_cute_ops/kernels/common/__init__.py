"""Device code that kernels share: each instruction, conversion and address formula once."""
