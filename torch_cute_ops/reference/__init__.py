"""Executable specification of the ops in plain torch. These functions are also the ops' CPU implementations."""
