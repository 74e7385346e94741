"""Kernels that are prepared before calls: ``warmup``, ``precompile``, and the error if a capture needs a kernel that is
not loaded."""

import inspect
import random
import sys

import pytest
import torch
from support.cases import forget, get_sample, op_cases, plain_sample, properties_for, sample_cases

import torch_cute_ops
from torch_cute_ops import registry
from torch_cute_ops.ops import _call
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.capture import forbid_in_capture

by_op = pytest.mark.parametrize("op", op_cases())


def test_warmup_of_an_unknown_op():
    with pytest.raises(ValueError, match=r"'fp4_quantise' is no op; the ops are .*fp4_quantize"):
        torch_cute_ops.warmup("fp4_quantise", hidden=64)


@by_op
def test_warmup_without_a_gpu(op, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=rf"warmup\('{op.name}'\) needs a CUDA device"):
        torch_cute_ops.warmup(op.name, **properties_for(op))


def properties_of_call(op, sample) -> dict:
    """Return the static properties of a sample's call, for an op that quantises or dequantises rows."""
    given = inspect.signature(op.function).bind(*sample.args, **sample.kwargs)
    given.apply_defaults()
    given = given.arguments
    choices = ("block_size", "scale_format", "scale_layout", "granularity", "interleaved", "weight_plus_one", "gate")
    choices += ("subtract_mean",)
    found = {name: given[name] for name in choices if name in given}
    if "group" in given:
        found |= {"group": given["group"], "ranks": 1}
    if "residual" in given and "subtract_mean" in given:
        found["residual_dtype"] = given["residual"].dtype
    if "global_scale" in given:
        found["global_scale"] = given["global_scale"] is not None
    if "out_dtype" in given:
        found["scale_layout"] = {5: "128x4", 4: "8x4"}.get(given["scale"].dim(), "linear")
        return {**found, "hidden": given["y"].shape[-1] * 2, "out_dtype": given["out_dtype"]}
    found |= {"hidden": given["input"].shape[-1], "dtype": given["input"].dtype}
    return {**found, "weight_dtype": given["weight"].dtype} if "weight" in given else found


by_row_op = pytest.mark.parametrize(
    ("op", "name"),
    sample_cases(
        *("nvfp4-128x4-float32", "mxfp4-8x4-float16", "nvfp4-linear-bfloat16", "mxfp4-128x4-bfloat16"),
        *("tensor-row-float32", "token-row-float16", "block128-column-bfloat16"),
        *("block128-ue8m0-column-float16", "block32-128x4-bfloat16"),
    ),
)
PLAIN = pytest.mark.parametrize(("op", "name"), sample_cases("nvfp4-128x4-bfloat16", "token-row-bfloat16"))


class Capture:
    """Simulated CUDA-graph capture, which ``is_on`` starts and ends."""

    def __init__(self, monkeypatch):
        self.is_on = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_on)


@pytest.fixture
def capture(launches, monkeypatch):
    """Return a simulated capture on the launch model, which ``warmup`` accepts as a GPU."""
    monkeypatch.setattr(_call, "forbid_in_capture", forbid_in_capture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_cute_ops.ops.") and hasattr(module, "cuda_device"):
            monkeypatch.setattr(module, "cuda_device", lambda device: torch.device("cpu"))
    return Capture(monkeypatch)


def advised(error: Exception) -> str:
    """Extract the ``warmup`` call that an error recommends."""
    message = str(error)
    return message[message.index("torch_cute_ops.warmup(") :]


def samples_by_kernel(op):
    """Return the plain sample and 40 random samples, which are enough to cover all kernels, launchers and
    properties."""
    names = [case.values[1] for case in sample_cases() if case.values[0] is op]
    random.shuffle(names)
    return [plain_sample(op, "cpu"), *(get_sample(op, name, "cpu") for name in names[:40])]


@by_op
def test_the_advice_of_a_capture_helps(op, capture, launches):
    """Check that a captured call whose kernel is missing launches and compiles nothing, and that its error recommends a
    valid ``warmup`` call after which the call succeeds."""
    helped = 0
    for sample in samples_by_kernel(op):
        forget(op)
        launches.forget()
        capture.is_on = True
        try:
            op.cuda(*sample.args, **sample.kwargs)
        except RuntimeError as error:
            raised = error
        except ValueError:
            assert op.has_backends  # only a GEMM may lack a backend for the call on Hopper
            continue
        else:
            assert not launches.compiled  # a call without rows, for example, needs no kernel
            continue
        helped += 1
        assert not launches.compiled and not launches.calls
        assert str(raised).startswith(f"cute::{op.name} needs a kernel that is not loaded")
        capture.is_on = False
        eval(advised(raised), {"torch_cute_ops": torch_cute_ops, "torch": torch})
        compiled = len(launches.compiled)
        assert compiled, sample.name
        capture.is_on = True
        op.cuda(*sample.args, **sample.kwargs)
        assert len(launches.compiled) == compiled, sample.name
    assert helped > 10


@by_row_op
def test_the_advice_has_every_property(op, name, capture):
    """Check that the recommended ``warmup`` call names every property of the failed call, and no other property."""
    sample = get_sample(op, name, "cpu")
    with pytest.raises(RuntimeError) as raised:
        op.cuda(*sample.args, **sample.kwargs)
    expected = properties_of_call(op, sample)
    assert all(repr(value) in str(raised.value) for value in expected.values())
    said = eval(advised(raised.value).replace("torch_cute_ops.warmup(", "dict(op="), {"torch": torch})
    assert said == {"op": op.name, "device": 0, **expected}


@pytest.mark.gpu
@by_row_op
def test_warmup_makes_ready(op, name, monkeypatch):
    """Check that a call after ``warmup`` compiles nothing."""
    sample = get_sample(op, name, "cuda")
    torch_cute_ops.warmup(op.name, **properties_of_call(op, sample))
    monkeypatch.setattr(compiler, "trace_and_compile", lambda *args: pytest.fail("compiled after warmup"))
    op.function(*sample.args, **sample.kwargs)


@by_row_op
def test_precompile(op, name, monkeypatch):
    """Check that ``precompile`` compiles the kernel of the call for the architecture, without using a device."""
    sample = get_sample(op, name, "cpu")
    compiled = []
    record = lambda kernel, arch: compiled.append((kernel, arch))  # noqa: E731
    monkeypatch.setattr(registry, "keep", record)
    torch_cute_ops.precompile(op.name, "sm_100a", **properties_of_call(op, sample))
    ((kernel, target),) = compiled
    assert target.name == "sm_100a"
    assert kernel.config == op.kernels(target, *sample.args, **sample.kwargs)[0].config


BAD_PROPERTIES = {"hidden": 0, "scale_layout": "tiled", "block_size": 8, "granularity": "row"}
BAD_CASES = [
    pytest.param(*case.values, bad, id=f"{case.id}-{bad}")
    for case in sample_cases("nvfp4-128x4-bfloat16", "token-row-bfloat16")
    for bad in BAD_PROPERTIES
    if bad == "hidden" or bad in inspect.signature(case.values[0].function).parameters
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name", "bad"), BAD_CASES)
def test_warmup_refuses(op, name, bad):
    properties = properties_of_call(op, get_sample(op, name, "cuda"))
    with pytest.raises(ValueError, match=f"cute::{op.name}"):
        torch_cute_ops.warmup(op.name, **{**properties, bad: BAD_PROPERTIES[bad]})


@pytest.mark.parametrize(("op", "name", "bad"), BAD_CASES)
def test_precompile_refuses(op, name, bad):
    properties = properties_of_call(op, get_sample(op, name, "cpu"))
    with pytest.raises(ValueError, match=f"cute::{op.name}"):
        torch_cute_ops.precompile(op.name, "sm_90a", **{**properties, bad: BAD_PROPERTIES[bad]})


def test_precompile_keeps_or_fails(monkeypatch, tmp_path):
    """Check that ``precompile`` raises an error if the kernel cannot be stored on disk."""
    properties = {"hidden": 16, "dtype": torch.bfloat16}
    monkeypatch.setattr(settings, "CACHE", False)
    with pytest.raises(RuntimeError, match="TORCH_CUTE_OPS_CACHE=0"):
        torch_cute_ops.precompile("fp4_quantize", "sm_90a", **properties)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(settings, "CACHE", True)
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path / "file")
    with pytest.raises(RuntimeError, match="cannot be kept in"):
        torch_cute_ops.precompile("fp4_quantize", "sm_90a", **properties)


@pytest.mark.parametrize(
    ("op", "properties"),
    [("rmsnorm_fp8quant", {"global_scale": True}), ("silu_mul_fp4quant", {"weight_dtype": torch.float32})],
)
def test_properties_that_an_op_lacks(op, properties):
    with pytest.raises(TypeError, match=f"cute::{op} has no "):
        torch_cute_ops.precompile(op, "sm_90a", hidden=64, dtype=torch.bfloat16, **properties)


def test_precompile_for_an_unknown_architecture():
    with pytest.raises(ValueError, match=r"'sm_80' is no architecture; use one of sm_90a"):
        torch_cute_ops.precompile("fp4_quantize", "sm_80", hidden=64, dtype=torch.bfloat16)


@PLAIN
def test_warmup_takes_no_unknown_property(op, name):
    """Check that ``warmup`` refuses the number of rows by name, even without a GPU."""
    with pytest.raises(TypeError, match="rows"):
        torch_cute_ops.warmup(op.name, **properties_of_call(op, get_sample(op, name, "cpu")), rows=5)
