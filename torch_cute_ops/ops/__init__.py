"""The ops. Each module defines one op: its typed Python function, its argument checks and its CUDA entry."""
