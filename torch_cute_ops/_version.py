"""Version of the package, which the build reads without importing torch."""

__version__ = "0.2.0"
