"""Command line of the package: ``python -m torch_cute_ops``."""
