"""The ops: for each its schema, its argument checks, its CUDA entry, and the typed Python function."""
