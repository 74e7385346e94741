"""Every bad input gives its error, whatever form of the op it reaches, and nothing is launched."""

import pytest
import torch
from cases import arguments, error_cases, get_error, op_cases, overload, poisoned, run, run_function, run_out
from devices import DEVICES
from expected import raw
from torch._subclasses import FakeTensorMode

from torch_cute_ops.testing import Sample

# CUDA has bad inputs that the CPU has not, such as tensors on the CPU.
by_error = pytest.mark.parametrize(
    ("op", "name", "on"),
    [pytest.param(*case.values, on, id=f"{on}-{case.id}") for on in DEVICES for case in error_cases(on)],
)


def raises(op, error):
    return pytest.raises(error.error, match=rf"(?s)cute::{op.name}\b.*{error.match}")


def good_outputs(op, device):
    """Outputs of a call that the op would take."""
    error = next(error for error in op.error_inputs(device) if error.out is not None)
    return run(op, Sample("good", error.args, error.kwargs))


@by_error
def test_error(op, name, on):
    error = get_error(op, name, on)
    if error.out is None:
        with raises(op, error):
            run(op, error)
        with raises(op, error):
            run_function(op, error)
    outputs = poisoned(good_outputs(op, on)) if error.out is None else error.out
    outputs = tuple(output.clone() if output.is_contiguous() and output._base is None else output for output in outputs)
    before = [raw(output) for output in outputs if output.device.type != "meta"]
    with raises(op, error):
        run_out(op, error, outputs)
    with raises(op, error):
        run_function(op, error, outputs)
    if on == "cuda":
        torch.cuda.synchronize()
    for output, expected in zip((o for o in outputs if o.device.type != "meta"), before, strict=True):
        assert torch.equal(raw(output), expected), "an output was written to"


@by_error
def test_error_under_fake_tensors(op, name, on):
    error = get_error(op, name, on)
    mode = FakeTensorMode()

    def fake(value):
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    args = [fake(value) for value in error.args]
    kwargs = {key: fake(value) for key, value in error.kwargs.items()}
    outputs = good_outputs(op, on) if error.out is None else error.out
    outputs = {name: fake(output) for name, output in zip(op.outputs, outputs, strict=True)}
    with mode:
        if error.out is None:
            with raises(op, error):
                overload(op)(*args, **kwargs)
        with raises(op, error):
            overload(op, "out")(*args, **kwargs, **outputs)


@pytest.mark.parametrize("op", op_cases())
def test_good_outputs_are_good(op, device):
    """What the bad outputs are made of is right but for the one thing that is wrong about them."""
    error = next(error for error in op.error_inputs(device) if error.out is not None)
    outputs = good_outputs(op, device)
    run_out(op, error, poisoned(outputs))
    for error in op.error_inputs(device):
        if error.out is not None:
            wrong = [
                i
                for i, (got, want) in enumerate(zip(error.out, outputs, strict=True))
                if (got.shape, got.dtype, got.device, got.stride())
                != (want.shape, want.dtype, want.device, want.stride())
            ]
            unaligned = [i for i, got in enumerate(error.out) if got.device.type == "cuda" and got.data_ptr() % 16]
            assert len({*wrong, *unaligned}) == 1, error.name


@pytest.mark.parametrize("op", op_cases())
def test_inputs_that_require_grad_are_refused_by_name(op, device):
    """Any floating argument, and the message tells the way out."""
    sample = next(sample for sample in op.sample_inputs(device) if "global_scale" in sample.kwargs)
    given = arguments(op, sample)
    can = [k for k, v in given.items() if isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float32)]
    assert can
    for key in can:
        call = {**given, key: given[key].detach().clone().requires_grad_()}
        with pytest.raises(ValueError, match=rf"cute::{op.name} has no gradient.*torch\.no_grad\(\)"):
            overload(op)(**call)
