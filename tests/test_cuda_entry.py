"""The ops' CUDA entries on CPU tensors, with a model of the compiled kernels: the way of a call, without a GPU."""

import contextlib

import pytest
import torch
from cases import error_cases, get_error, get_sample, op_cases, poisoned, run, sample_cases, tensors_in
from expected import assert_same, raw
from launch_model import launches  # noqa: F401  (a fixture)

from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.testing import Sample

pytestmark = pytest.mark.usefixtures("launches")

by_sample = pytest.mark.parametrize(("op", "name"), sample_cases())


def entry(op, sample, outputs=None):
    """Call the CUDA entry, of the op or of its ``.out``."""
    if outputs is None:
        return as_tuple(op.cuda(*sample.args, **sample.kwargs))
    return op.cuda_out(*sample.args, **sample.kwargs, **dict(zip(op.outputs, outputs, strict=True)))


@by_sample
def test_result(op, name, launches):  # noqa: F811
    """On the first call, which makes the launcher, and on the next, which finds it."""
    sample = get_sample(op, name, "cpu")
    want = run(op, sample)
    for _ in range(2):
        got = entry(op, sample)
        assert_same(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    outputs = poisoned(want)
    versions = [output._version for output in outputs]
    assert entry(op, sample, outputs) is None
    assert_same(outputs, want)
    assert all(output._version > version for output, version in zip(outputs, versions, strict=True))
    empty = not any(output.numel() for output in want)
    assert len(launches.calls) == (0 if empty else 3)


@by_sample
def test_inputs_are_untouched(op, name):
    sample = get_sample(op, name, "cpu")
    before = [(raw(tensor), tensor._version) for tensor in tensors_in(sample)]
    entry(op, sample)
    for tensor, (data, version) in zip(tensors_in(sample), before, strict=True):
        assert torch.equal(raw(tensor), data)
        assert tensor._version == version


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(("op", "name"), sample_cases("nvfp4-linear-bfloat16", "nvfp4-3d-tiled", "empty-linear"))
def test_without_gradients(op, name, mode):
    sample = get_sample(op, name, "cpu")
    want = run(op, sample)
    for tensor in tensors_in(sample):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.requires_grad_()
    with mode():
        assert_same(entry(op, sample), want)
        outputs = poisoned(want)
        entry(op, sample, outputs)
    assert_same(outputs, want)


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "later-call"])
@pytest.mark.parametrize(("op", "name"), error_cases("cpu"))
def test_error(op, name, warm, launches):  # noqa: F811
    """The same errors as on the CPU, and no launch, whether or not a launcher for these facts is there."""
    error = get_error(op, name, "cpu")
    good = next(error for error in op.error_inputs("cpu") if error.out is not None)
    outputs = poisoned(entry(op, Sample("good", good.args, good.kwargs)))
    if warm:
        # For the facts of this very call, where they are such that one can be made.
        with torch.no_grad(), contextlib.suppress(ValueError, TypeError):
            entry(op, error)
    launches.calls.clear()
    match = rf"(?s)cute::{op.name}\b.*{error.match}"
    if error.out is None:
        with pytest.raises(error.error, match=match):
            entry(op, error)
    else:
        outputs = error.out
    before = [raw(output) for output in outputs if output.device.type == "cpu"]
    with pytest.raises(error.error, match=match):
        entry(op, error, outputs)
    assert not launches.calls
    for output, expected in zip((o for o in outputs if o.device.type == "cpu"), before, strict=True):
        assert torch.equal(raw(output), expected)


IN_PLACE = ("row-strided", "row-strided-float32", "every-other-row", "offset-in-storage", "rows-expanded")
COPIED = ("row-stride-not-16-bytes", "column-offset", "column-step", "columns-first")


# Weights are decoded once, so the inputs of fp4_dequantize may be copied.
QUANTISING = [case for case in sample_cases(*IN_PLACE, *COPIED) if case.values[0].name != "fp4_dequantize"]


@pytest.mark.parametrize(("op", "name"), QUANTISING)
def test_copies(op, name, launches):  # noqa: F811
    """Strided rows are read where they are, and copied only where the kernel cannot read them."""
    sample = get_sample(op, name, "cpu")
    entry(op, sample)
    ((_, args),) = launches.calls
    assert (args[0].data_ptr() == sample.args[0].data_ptr()) == (name in IN_PLACE)


@pytest.mark.parametrize("op", op_cases())
def test_one_kernel_serves_every_number_of_rows(op, launches):  # noqa: F811
    """M is in no key: after the first call, nothing is compiled."""
    sample = get_sample(op, "nvfp4-linear-bfloat16", "cpu")
    for rows in (5, 4, 3, 2, 1, 0):
        args = tuple(value[:rows] if value.dim() == 2 else value for value in sample.args)
        entry(op, Sample("", args, sample.kwargs))
    assert len(launches.compiled) == 1
    assert len(launches.calls) == 5


@pytest.mark.parametrize("op", op_cases())
def test_launchers_are_not_confused(op, launches):  # noqa: F811
    """All samples, in any order, with the launchers of the others there: each finds its own."""
    samples = list(op.sample_inputs("cpu"))
    for i in torch.randperm(len(samples)).tolist():
        assert_same(entry(op, samples[i]), run(op, samples[i]))
    assert len(launches.compiled) < len(launches.calls)
