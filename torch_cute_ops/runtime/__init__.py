"""What every op needs and no op owns: GPU architectures, compiling and caching, capture guard, settings, errors."""
