"""Model loaders set PyTorch's default dtype to the model's; nothing here may depend on it."""

import contextlib

import pytest
import torch
from expected import assert_same
from support.cases import facts_of, form_cases, get_sample, op_cases, run
from support.gemm_problems import CPU, products

from torch_cute_ops import registry
from torch_cute_ops.mm_backends import _tune
from torch_cute_ops.runtime.tuner import Candidate

BF16 = torch.bfloat16


@contextlib.contextmanager
def bfloat16_by_default():
    torch.set_default_dtype(BF16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("op", "name"), form_cases())
def test_same_bits(op, name, device):
    sample = get_sample(op, name, device)
    want = run(op, sample)
    with bfloat16_by_default():
        got = run(op, sample)
    assert_same(got, want)


@pytest.mark.parametrize("op", op_cases())
def test_facts_are_a_call(op):
    """Of the same kernels: what is made for a fact has the dtype that the op wants."""
    facts = facts_of(op)
    want = registry.kernels_of(op.name, "sm_90a", **facts)
    with bfloat16_by_default():
        assert registry.kernels_of(op.name, "sm_90a", **facts) == want != ()


@pytest.mark.parametrize(
    "product", [*products()][::4], ids=lambda product: "-".join(map(str, product.described().values()))
)
def test_the_tuner_checks_in_fp32(product):
    with bfloat16_by_default():
        assert _tune.Bench(product, 24, CPU).check(Candidate("reference", ())) is None
