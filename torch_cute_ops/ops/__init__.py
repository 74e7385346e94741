"""Ops. Each module contains an op's typed Python function, argument checks and CUDA entry."""
