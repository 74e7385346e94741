"""Fixtures of the tests of ops: the launch model, and a fresh compiler."""

from support.compiling import fresh_compiler
from support.launch_model import launches

__all__ = ["fresh_compiler", "launches"]
