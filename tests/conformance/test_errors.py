"""Error inputs of every op: each form of a call raises the expected error and launches nothing."""

import functools
import itertools

import pytest
import torch
from expected import raw
from samples import error_inputs, sample_inputs
from support.cases import (
    arguments,
    call,
    call_function,
    call_out,
    each_error,
    error_cases,
    fake_mode,
    faked,
    get_error,
    good_outputs_error,
    op_cases,
    overload,
    plain_sample,
    poisoned,
    updated,
)
from support.devices import DEVICES


def raises(op, error):
    return pytest.raises(error.error, match=rf"(?s)cute::{op.name}\b.*{error.match}")


@functools.cache
def good_outputs(op, device):
    """Return valid output tensors for a call that the op accepts. All checks share these tensors, so none may write to
    them."""
    return call(op, good_outputs_error(op, device))


@each_error(error_cases(*DEVICES))
def test_error(op, name, on):
    error = get_error(op, name, on)
    outputs = poisoned(good_outputs(op, on)) if error.out is None else error.out
    outputs = tuple(output.clone() if output.is_contiguous() and output._base is None else output for output in outputs)
    kept = [tensor for tensor in (*outputs, *updated(op, error)) if tensor.device.type != "meta"]
    before = [raw(tensor) for tensor in kept]
    if error.out is None:
        with raises(op, error):
            call(op, error)
        with raises(op, error):
            call_function(op, error)
    with raises(op, error):
        call_out(op, error, outputs)
    with raises(op, error):
        call_function(op, error, outputs)
    if on == "cuda":
        torch.cuda.synchronize()
    for tensor, expected in zip(kept, before, strict=True):
        assert torch.equal(raw(tensor), expected), "something was written"


@each_error(error_cases(*DEVICES, addresses=False))
def test_error_under_fake_tensors(op, name, on):
    error = get_error(op, name, on)
    mode = fake_mode()
    fake = faked(error, mode)
    outputs = good_outputs(op, on) if error.out is None else error.out
    outputs = tuple(map(mode.from_tensor, outputs))
    with mode:
        if error.out is None:
            with raises(op, error):
                call(op, fake)
        with raises(op, error):
            call_out(op, fake, outputs)


@pytest.mark.parametrize("op", op_cases())
def test_good_outputs_are_good(op, device):
    """Check that an error input whose outputs are wrong becomes valid if only the outputs are replaced."""
    outputs = good_outputs(op, device)
    call_out(op, good_outputs_error(op, device), poisoned(outputs))
    for error in error_inputs(op.name, device):
        if error.out is not None:
            wrong = [
                i
                for i, (got, want) in enumerate(zip(error.out, outputs, strict=True))
                if (got.shape, got.dtype, got.device, got.stride(), got.requires_grad)
                != (want.shape, want.dtype, want.device, want.stride(), False)
            ]
            unaligned = [i for i, got in enumerate(error.out) if got.device.type == "cuda" and got.data_ptr() % 16]
            assert len({*wrong, *unaligned}) == 1, error.name


@pytest.mark.parametrize("op", op_cases())
def test_inputs_that_require_grad_are_refused_by_name(op, device):
    """Check that each floating-point argument that requires grad is refused by name, with advice on how to avoid the
    error."""
    factors = ("global_scale", "scale", "alpha", "residual", "bias")
    plain = plain_sample(op, device)
    samples = itertools.chain([plain], sample_inputs(op.name, device))
    sample = next((sample for sample in samples if any(name in sample.kwargs for name in factors)), plain)
    given = arguments(op, sample)
    can = [k for k, v in given.items() if isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float32)]
    assert can or op.name == "moe_route_ids", "which takes integers alone"
    for key in can:
        call = {**given, key: given[key].detach().clone().requires_grad_()}
        with pytest.raises(ValueError, match=rf"cute::{op.name} has no gradient.*torch\.no_grad\(\)"):
            overload(op)(**call)
