"""What every op needs and no op owns: architecture facts, compiling and caching, capture guard, settings, errors."""
