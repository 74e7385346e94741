"""Results under another default dtype. Model loaders set PyTorch's default dtype to the model's dtype; no result may
depend on this setting."""

import contextlib

import pytest
import torch
from expected import assert_same
from support.cases import each_sample, form_cases, get_sample, op_cases, properties_for, run
from support.gemm_problems import CPU, problem_id, problems
from support.results import results_of

from torch_cute_ops import registry
from torch_cute_ops.gemm.tune import Bench
from torch_cute_ops.runtime.tuner import Candidate

BF16 = torch.bfloat16


@contextlib.contextmanager
def bfloat16_by_default():
    torch.set_default_dtype(BF16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@each_sample(form_cases())
def test_same_bits(op, name, device):
    sample = get_sample(op, name, device)
    want = results_of(op, name, device)
    with bfloat16_by_default():
        got = run(op, sample)
    assert_same(got, want)


@pytest.mark.parametrize("op", op_cases())
def test_examples_are_calls(op):
    """Check that the example tensors made from static properties do not depend on the default dtype, so that they
    select the same kernels."""
    properties = properties_for(op)
    want = registry.kernels_of(op.name, "sm_90a", **properties)
    with bfloat16_by_default():
        assert registry.kernels_of(op.name, "sm_90a", **properties) == want != ()


@pytest.mark.parametrize("problem", [*problems()][::4], ids=problem_id)
def test_the_tuner_checks_in_fp32(problem):
    with bfloat16_by_default():
        assert Bench(problem, 24, CPU).check(Candidate("reference", ())) is None
