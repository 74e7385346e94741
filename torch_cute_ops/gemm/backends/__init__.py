"""Backends of GEMMs, one per file."""
