"""Helpers for your tests of code that calls the ops: compare quantised tensors, and call compiled kernels directly."""

from torch_cute_ops.testing._compare import GATE_ERROR, assert_fp4_close, assert_fp8_close
from torch_cute_ops.testing._raw import raw_call

__all__ = ["GATE_ERROR", "assert_fp4_close", "assert_fp8_close", "raw_call"]
