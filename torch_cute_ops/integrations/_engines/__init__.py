"""Code that the adapters for serving engines share. Nothing here imports an engine."""
