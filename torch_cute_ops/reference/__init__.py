"""The executable specification: each op in plain torch. These are also the registered CPU kernels."""
