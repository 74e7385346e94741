"""Executable specifications of the ops in plain torch. They are also the ops' CPU implementations."""
