"""What tests and benchmarks need to know about each op: sample inputs, bad inputs, how close results must be.

``samples/<op>.py`` binds ``sample_inputs(device)`` and ``error_inputs(device)`` for the op of that name; reach them
through the registry: ``OPS[name].sample_inputs("cpu")``. Data comes from torch's default generators.
"""

from torch_cute_ops.testing._compare import GATE_ERROR, assert_fp4_close, assert_fp8_close
from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing._raw import raw_call

__all__ = ["GATE_ERROR", "ErrorInput", "Sample", "assert_fp4_close", "assert_fp8_close", "raw_call"]
