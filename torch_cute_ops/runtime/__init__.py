"""Infrastructure that no op owns: GPU architectures, compiling and caching, tuning, capture guard, settings."""
