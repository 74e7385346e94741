"""Number of operations that ``FlopCounterMode`` counts for the ops."""

import pytest
import torch
from support.cases import (
    arguments,
    call,
    call_function,
    call_out,
    each_sample,
    form_cases,
    get_sample,
    op_cases,
    out_for,
    sample_with,
)
from torch.utils.flop_counter import FlopCounterMode


def counted(function, *args):
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


@each_sample(case for case in form_cases() if case.values[0].has_backends)
def test_a_gemm_is_two_operations_a_product(op, name, device):
    """Check that a GEMM counts as 2·M·N·K operations. For expert GEMMs, every row of the experts' buffer or every
    expert counts, even if it is not used."""
    sample = get_sample(op, name, device)
    outputs = call(op, sample)
    a = arguments(op, sample)["a"]
    if a.dim() > outputs[0].dim():
        a = a.flatten(-2)[..., : 2 * arguments(op, sample)["b"].shape[-2]]  # k is interleaved
    k = a.shape[-1] * (2 if a.dtype in (torch.uint8, torch.float4_e2m1fn_x2) else 1)
    if op.path.prologue_gate:
        k //= 2
    w = arguments(op, sample).get("w")
    # A gate combines two weight rows into one column of the result.
    columns = w.shape[:-2].numel() * w.shape[-1] if w is not None else outputs[0].shape[-1]
    want = 2 * outputs[0].shape[:-1].numel() * columns * k
    assert counted(call, op, sample) == counted(call_function, op, sample) == want
    assert counted(call_out, op, sample, out_for(op, outputs)) == want


@pytest.mark.parametrize("op", [case for case in op_cases() if not case.values[0].has_backends])
def test_other_ops_are_no_gemms(op, device):
    assert counted(call, op, sample_with(op, device)) == 0
