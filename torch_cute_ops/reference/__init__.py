"""Executable specification: each op in plain torch. The references are also the registered CPU kernels."""
