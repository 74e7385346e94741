"""Adapters to other libraries. Each module needs its library, so import it explicitly."""
