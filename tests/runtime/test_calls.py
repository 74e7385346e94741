"""Log of calls, and errors of failed launches."""

import re

import pytest
import torch
from support.cases import compiled_op_cases, plain_sample
from support.interpreters import forked, python_in_each
from support.launch_model import COMPILING, Launches, launches  # noqa: F401  (a fixture)
from torch._subclasses import FakeTensorMode

import torch_cute_ops
from torch_cute_ops.runtime import calls

PROGRAM = (
    "import torch, torch_cute_ops\n"
    "x = torch.randn(4, 64)[:, :32]\n"
    "torch_cute_ops.fp4_quantize(x)\n"
    "torch.ops.cute.fp4_quantize.default(x.bfloat16(), block_size=32)\n"
)


def test_calls_are_logged_before_they_run():
    """Check that at level debug calls of the op and of the Python function are logged before they run, with the
    properties of each tensor."""
    warns = PROGRAM + "import logging; logging.getLogger('torch_cute_ops').warning('seen')\n"
    levels = ({"TORCH_CUTE_OPS_LOG": level} for level in ("debug", "info", "loud"))
    debug, info, loud, unset = python_in_each(warns, *levels, {})
    lines = debug.stderr.splitlines()
    logged = [line.split(" DEBUG ")[1] for line in lines if " DEBUG " in line]
    assert logged == [
        "cute::fp4_quantize(float32[4, 32] strides (64, 1) on cpu)",
        "cute::fp4_quantize(bfloat16[4, 32] on cpu, None, 32)",
    ]
    assert all(f" {name} " in lines[0] for name in ("torch_cute_ops", "DEBUG"))
    for quiet in (unset, info):
        assert quiet.stderr.count("seen") == 1 and "cute::" not in quiet.stderr
    assert "TORCH_CUTE_OPS_LOG='loud'; use info or debug" in loud.stderr


def test_a_crash_leaves_a_trace():
    """Check that after a crash the last line of the log names the call."""
    code = (
        "import os, torch\n"
        "from torch_cute_ops.runtime import calls\n"
        "torch_cute_ops = __import__('torch_cute_ops')\n"
        "calls.logged('rmsnorm_fp4quant', lambda *args: os.abort())(torch.zeros(3, 64), 1e-6)\n"
    )
    done = forked(code, TORCH_CUTE_OPS_LOG="debug")
    assert done.returncode < 0
    assert done.stderr.splitlines()[-1].endswith("cute::rmsnorm_fp4quant(float32[3, 64] on cpu, 1e-06)")


class CudaError(Exception):
    """Exception that is not a ``RuntimeError``, like the DSL's exceptions."""


@pytest.mark.parametrize("op", compiled_op_cases())
def test_errors_of_launches_name_the_call(op, launches: Launches, monkeypatch):  # noqa: F811
    """Check that a failed launch raises an error that names the call, on the first call and on later calls."""
    sample = plain_sample(op, "cpu")
    failing = True
    compile_kernel = launches.compile_kernel

    def compile_and_fail(kernel, arch):
        function = compile_kernel(kernel, arch)

        def call(*args):
            function(*args)
            if failing:
                raise CudaError("CUDA_ERROR_LAUNCH_FAILED")

        return call

    for module in COMPILING:
        monkeypatch.setattr(module, "compile_kernel", compile_and_fail)
    first = next(value for value in sample.args if isinstance(value, torch.Tensor))
    shape = re.escape(str(list(first.shape)))
    for _ in range(2):
        text = rf"cute::{op.name}\(.*{shape}.*CudaError: CUDA_ERROR_LAUNCH_FAILED"
        with pytest.raises(RuntimeError, match=text) as raised:
            op.cuda(*sample.args, **sample.kwargs)
        assert isinstance(raised.value.__cause__, CudaError)
    failing = False
    op.cuda(*sample.args, **sample.kwargs)


def test_only_plain_tensors_bypass_the_dispatcher(monkeypatch, launches):  # noqa: F811
    """Check that only plain tensors bypass the dispatcher: fake tensors have the address 0, where a kernel would write,
    and a tracer would not see the op."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    rows, index, weights = torch.randn(4, 8), torch.arange(2, dtype=torch.int32).view(2, 1), torch.ones(2, 1)
    with FakeTensorMode():
        fake = torch.zeros(2, 8)
    out = torch.full((2, 8), torch.nan)
    assert torch_cute_ops.moe_finalize(rows, index, weights, out=out) is out
    assert torch.equal(out, rows[:2]) and torch.equal(torch_cute_ops.moe_finalize(rows, index, weights), out)
    assert len(launches.calls) == 2
    with pytest.raises(Exception, match="FakeTensor"):
        torch_cute_ops.moe_finalize(rows, index, weights, out=fake)
    assert len(launches.calls) == 2
    traced = torch.jit.trace(lambda x: torch_cute_ops.moe_finalize(x, index, weights), rows, check_trace=False)
    assert "cute::moe_finalize" in str(traced.graph)


def test_described():
    text = calls.described("op", (torch.zeros(2, 3, dtype=torch.float16).t(), None, "128x4"), {"out": 1.5})
    assert text == "cute::op(float16[3, 2] strides (1, 3) on cpu, None, '128x4', out=1.5)"
