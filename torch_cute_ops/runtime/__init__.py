"""Infrastructure shared by all ops: GPU architectures, compiling and caching, tuning, capture guard, settings."""
