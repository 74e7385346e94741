"""The call path without a GPU: the CUDA entries run on CPU tensors, with a model of the compiled kernels."""

import contextlib
import functools
import math
import re

import pytest
import torch
from expected import assert_same, raw
from samples import Sample
from support.cases import (
    arguments,
    compiled_op_cases,
    copy_updated,
    defined,
    each_error,
    each_sample,
    error_cases,
    form_cases,
    get_error,
    get_sample,
    good_outputs_error,
    make_call,
    named,
    only_updates,
    op_cases,
    out_for,
    poisoned,
    require_grad,
    run,
    sample_cases,
    tensors_in,
    updated,
    with_usable_backend,
)
from support.results import results_of

from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.ops import _call
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.registry import OPS

pytestmark = pytest.mark.usefixtures("launches")

by_sample = each_sample(sample_cases())
by_form = each_sample(form_cases())


def enter(op, sample, outputs=None):
    """Call the CUDA entry of the op or of its ``.out``. If gradients are enabled and a tensor requires grad, go through
    the gradient guard."""
    sample = with_usable_backend(op, sample, torch.device("cuda"))
    given = (*tensors_in(sample), *(outputs or ()))
    is_guarded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if outputs is None:
        return as_tuple((op.autograd if is_guarded else op.cuda)(*sample.args, **sample.kwargs))
    by_name = dict(zip(op.out_names, outputs, strict=True))
    return (op.autograd_out if is_guarded else op.cuda_out)(*sample.args, **sample.kwargs, **by_name)


def run_entry(op, sample, outputs=None):
    """Call the entry with copies of updated arguments; return the outputs and the final values of the copies."""
    sample = copy_updated(op, sample)
    returned = enter(op, sample, outputs)
    assert outputs is None or returned is None
    return *defined(op, sample, returned if outputs is None else outputs), *updated(op, sample)


@by_sample
def test_result(op, name, launches):
    """Check the first call, which makes the launcher, and a second call, which finds it. Only arguments that the op
    updates may change, and no launch may fail, so that a graph can capture the call."""
    sample = get_sample(op, name, "cpu")
    want = results_of(op, name, "cpu")
    for _ in range(2):
        given = copy_updated(op, sample)
        with only_updates(op, given):
            got = enter(op, given)
        got = *defined(op, given, got), *updated(op, given)
        assert_same(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    outputs = out_for(op, want)
    versions = [output._version for output in outputs]
    assert_same(run_entry(op, sample, outputs), want)
    assert all(output._version > version for output, version in zip(outputs, versions, strict=True))
    assert not launches.failed
    if not op.has_backends:
        assert len(launches.calls) == (3 if has_work(op, sample, want) else 0)


STRIDED = [
    case
    for case in sample_cases()
    if any(not tensor.is_contiguous() for tensor in tensors_in(get_sample(*case.values, "cpu")))
]


@each_sample(STRIDED)
def test_result_after_contiguous(op, name, launches):
    """Check that a call with unusual strides is correct after a contiguous call with the same shapes."""
    sample = get_sample(op, name, "cpu")
    want = results_of(op, name, "cpu")
    packed = {key: contiguous(value) for key, value in arguments(op, sample).items()}
    with contextlib.suppress(ValueError):  # a residual may no longer be the input's view
        enter(op, named(op, packed))
    launches.failed.clear()
    assert_same(run_entry(op, sample), want)
    assert not launches.failed


def contiguous(value):
    """Return a contiguous tensor with the same values."""
    if not isinstance(value, torch.Tensor):
        return value
    return raw(value).clone(memory_format=torch.contiguous_format).view(value.dtype).view(value.shape)


@pytest.mark.parametrize("op", [case for case in op_cases() if len(case.values[0].outputs) > 1])
@pytest.mark.parametrize("more", [-1, 1])
def test_wrong_number_of_outputs(op, more, monkeypatch):
    """Check that a wrong number of outputs is refused, on the first call, on later calls, and on a CPU."""
    error = good_outputs_error(op, "cpu")
    outputs = poisoned(enter(op, error))
    outputs = outputs[:more] if more < 0 else (*outputs, outputs[0].clone())
    versions = [output._version for output in outputs]
    entry = lambda: op.function(*error.args, **error.kwargs, out=outputs)  # noqa: E731
    with pytest.raises(ValueError):
        entry()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    with pytest.raises(ValueError, match=rf"cute::{op.name}: out has {len(outputs)} tensors; expected"):
        entry()
    assert [output._version for output in outputs] == versions


def test_launchers_may_change_during_a_lookup(monkeypatch, launches):
    """Check a lookup during which the dict of launchers changes, as another thread might change it."""
    op = OPS["fp4_quantize"]
    sample = get_sample(op, "nvfp4-128x4-bfloat16", "cpu")
    enter(op, Sample("", sample.args, {**sample.kwargs, "scale_layout": "linear"}))
    enter(op, sample)
    kernel = RowQuant.kernel

    def plan_slowly(self, call, arch):
        key, launcher = next(iter(self.launchers.items()))
        self.launchers[(torch.rand(1).item(), *key[1:])] = launcher
        return kernel(self, call, arch)

    monkeypatch.setattr(RowQuant, "kernel", plan_slowly)
    enter(op, Sample("", sample.args, {**sample.kwargs, "scale_layout": "8x4"}))
    enter(op, Sample("", sample.args, {**sample.kwargs, "scale_layout": "8x4"}))
    assert len(launches.calls) == 4 and len(launches.compiled) == 3


def test_overlap_with_wide_scales_is_found(launches):
    """Check that an overlap of an output with scales that have gaps is found, even after a valid call with the same
    shapes."""
    op = OPS["mm_fp8_block"]
    a, b = (torch.zeros(n, 256, dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (4, 8))
    storage = torch.ones(4096)
    a_scale = storage.as_strided((4, 2), (1, 1000))
    out = storage[512:544].view(4, 8)
    given = {"a": a, "b": b.t(), "b_scale": torch.ones(1, 2), "out_dtype": torch.float32}
    op.cuda(**given, a_scale=a_scale.contiguous())
    for _ in range(2):
        with pytest.raises(ValueError, match="cute::mm_fp8_block: out shares memory with a_scale"):
            op.cuda_out(**given, a_scale=a_scale, out=out)
    assert len(launches.calls) == 1


RECODED = [
    case
    for case in sample_cases()
    if case.values[0].name in ("mm_fp8_fp4", "grouped_mm_fp8_fp4")
    and re.search("exact|scales|no-", case.values[1])
    and not case.values[1].startswith("tokens")
]


@each_sample(RECODED)
def test_a_recoded_weight(op, name, launches):
    """Check that two kernels run, and that the FP8 weight is passed from the first to the second."""
    sample = get_sample(op, name, "cpu")
    want = results_of(op, name, "cpu")
    given = arguments(op, sample) | {"backend": "recode"}
    assert_same(run_entry(op, named(op, given)), want)
    kernels = [type(kernel).__name__ for kernel, _ in launches.calls]
    assert kernels == (["RecodeWeightKernel", "FP8FP4RecodeKernel"] if has_work(op, sample, want) else [])


def test_recode_refuses_a_result_in_the_weight(launches):
    """Check that a result that overlaps the FP4 weight is refused. The GEMM's kernel cannot notice this, because it
    never sees the FP4 weight."""
    op = OPS["mm_fp8_fp4"]
    sample = get_sample(op, "nvfp4-128x4-to-bfloat16-exact", "cpu")
    given = arguments(op, sample) | {"backend": "recode"}
    b = given["b"]
    held = torch.empty(len(given["a"]) * b.shape[1] + b.numel(), dtype=torch.bfloat16)
    out = held[: len(given["a"]) * b.shape[1]].view(-1, b.shape[1])
    given["b"] = held.view(torch.uint8)[: b.numel()].view(b.shape[1], -1).copy_(b.t()).t()
    for _ in range(2):
        with pytest.raises(ValueError, match="out shares memory with b"):
            op.cuda_out(**given, out=out)
        assert not launches.calls


def test_result_must_not_overlap_rows(launches):
    """Check that a result that overlaps the input rows is refused on the first call and on later calls."""
    op = OPS["moe_finalize"]
    rows, index = torch.randn(12, 64), torch.arange(8, dtype=torch.int32).view(4, 2)
    given = rows, index, torch.rand(4, 2)
    for later in (False, True):
        if later:
            op.cuda(*given)
        with pytest.raises(ValueError, match="cute::moe_finalize: out shares memory with input"):
            op.cuda_out(*given, out=rows[:4])
        assert len(launches.calls) == later


def test_launchers_are_kept_up_to_a_number(monkeypatch):
    """Check that the oldest launcher is dropped at the limit, and that storing a launcher again does not count
    twice."""
    monkeypatch.setattr(_call, "MOST_LAUNCHERS", 3)
    path = OPS["fp4_quantize"].path
    for i in (0, 1, 2, 2, 3, 4):
        path._keep((i,), -i)
    assert path.launchers == {(2,): -2, (3,): -3, (4,): -4}


def has_work(op, sample, want) -> bool:
    """Return True if a call launches a kernel. A call whose outputs or whose input are empty launches none."""
    if op.name in ("moe_route", "moe_route_ids"):  # offsets and counts are never empty
        return True
    reads_others = op.name == "moe_finalize"  # a token without rows may have a residual
    return want[0].numel() > 0 and (tensors_in(sample)[0].numel() > 0 or reads_others)


@by_form
def test_without_gradients(op, name, launches):
    sample = get_sample(op, name, "cpu")
    want = results_of(op, name, "cpu")
    require_grad(sample)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_same(run_entry(op, sample), want)
            assert_same(run_entry(op, sample, out_for(op, want)), want)


def key_of(op, sample):
    """Return the static key of a call, or None if the call has none."""
    sample = with_usable_backend(op, sample, torch.device("cuda"))
    try:
        return op.path.key(op.bind(*sample.args, **sample.kwargs), -1)
    except Exception:  # arguments of wrong types
        return None


@functools.cache
def samples_by_key(op):
    """Return the name of an accepted call for each static key."""
    names = [case.values[1] for case in sample_cases() if case.values[0] is op]
    found = {key_of(op, get_sample(op, name, "cpu")): name for name in names}
    found.pop(None, None)
    return found


@each_error(case for case in error_cases("cpu") if not case.id.endswith("backend-on-cpu"))
def test_error(op, name, on, launches):
    """Check that errors are the same as on a CPU, and that nothing is launched, both on a first call and after an
    accepted call with the same static key has created a launcher."""
    error = get_error(op, name, on)
    outputs = poisoned(enter(op, good_outputs_error(op, "cpu")))
    outputs = outputs if error.out is None else error.out
    match = rf"(?s)cute::{op.name}\b.*{error.match}"
    for is_first in (True, False):
        if not is_first:
            accepted = samples_by_key(op).get(key_of(op, error))
            if accepted is None:
                return
            run_entry(op, get_sample(op, accepted, "cpu"))
        launches.calls.clear()
        kept = [tensor for tensor in (*outputs, *updated(op, error)) if tensor.device.type == "cpu"]
        before = [raw(tensor) for tensor in kept]
        if error.out is None:
            with pytest.raises(error.error, match=match):
                enter(op, error)
        with pytest.raises(error.error, match=match):
            enter(op, error, outputs)
        assert not launches.calls
        for tensor, expected in zip(kept, before, strict=True):
            assert torch.equal(raw(tensor), expected)


IN_PLACE = ("row-strided", "row-strided-float32", "every-other-row", "offset-in-storage", "rows-expanded")
COPIED = ("row-stride-not-16-bytes", "column-offset", "column-step", "columns-first")


# Ops that may copy strided tensors, because weights are decoded only once, and ids are small.
COPYING = ("fp4_dequantize", "moe_route_ids")
QUANTISING = [case for case in sample_cases(*IN_PLACE, *COPIED) if case.values[0].name not in COPYING]


@each_sample(QUANTISING)
def test_copies(op, name, launches):
    """Check that strided rows and residuals are copied only if the kernel cannot read them in place."""
    sample = copy_updated(op, get_sample(op, name, "cpu"))
    enter(op, sample)
    ((_, args),) = launches.calls
    assert (args[0].data_ptr() == sample.args[0].data_ptr()) == (name in IN_PLACE)
    if "residual" in op.updated:
        (target,) = updated(op, sample)
        assert (args[1].data_ptr() == target.data_ptr()) == (name in IN_PLACE)


@each_sample(sample_cases(*(f"residual-{name}" for name in (*IN_PLACE, *COPIED, "beside-input", "in-a-stack"))))
def test_copies_of_residuals(op, name, launches):
    """Check that a residual is updated without a copy if the kernel supports its strides and alignment."""
    sample = copy_updated(op, get_sample(op, name, "cpu"))
    enter(op, sample)
    ((_, args),) = launches.calls
    (target,) = updated(op, sample)
    assert (args[1].data_ptr() == target.data_ptr()) == (name.removeprefix("residual-") not in COPIED)


@pytest.mark.parametrize("op", [case for case in op_cases() if "residual" in case.values[0].updated])
@pytest.mark.parametrize("columns", [0, 8, 16, 80], ids=lambda columns: f"{columns}-columns-on")
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_residual_overlapping_the_input(op, rows, columns, launches):
    """Check that a residual may be the same view as the input, or other columns of the same rows, and that other
    overlaps are refused."""
    given = make_call(op, 5, 80, device="cpu")
    storage = torch.randn(10, 160, dtype=torch.bfloat16)
    given["input"] = storage[:5, :80]
    given["residual"] = storage[rows : rows + 5, columns : columns + 80]
    sample = named(op, given)
    if (rows, columns) == (0, 0) or rows == 5 or columns == 80:
        assert_same(run_entry(op, sample), run(op, sample))
        assert len(launches.calls) == 1
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"cute::{op.name}: residual .* shares memory with input"):
                enter(op, sample)
        assert not launches.calls


@pytest.mark.parametrize("op", [case for case in op_cases() if "residual" in case.values[0].updated])
@pytest.mark.parametrize(("columns", "is_good"), [(64, True), (8, False), (160, False)])
@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (2, 3, 5)], ids=str)
def test_residuals_side_by_side_in_many_dimensions(op, shape, columns, is_good, launches):
    """Check residuals that are other columns of the input's rows, in tensors of more dimensions. The rows are adjacent,
    or other rows lie between them. Overlaps are refused."""
    given = make_call(op, 5, 64, device="cpu")
    for spare in (0, 2):
        rows = (*shape[:-1], shape[-1] + spare)
        strides = torch.empty(*rows, 192, device="meta").stride()
        buffer = torch.randn(math.prod(rows) + 1, 192, dtype=torch.bfloat16)
        given["input"] = buffer.as_strided((*shape, 64), strides)
        given["residual"] = buffer.as_strided((*shape, 64), strides, columns)  # column 160 reaches into the next row
        if is_good:
            assert_same(run_entry(op, named(op, given)), run(op, named(op, given)))
            continue
        with pytest.raises(ValueError, match=rf"cute::{op.name}: residual .* shares memory with input"):
            enter(op, named(op, given))


@pytest.mark.parametrize("op", compiled_op_cases())
def test_one_kernel_serves_every_number_of_rows(op, launches):
    """Check that only the first call compiles, because no static key contains M. (A single row that is first gated or
    quantised uses a separate kernel.)"""
    for rows in (5, 4, 3, 2, 1, 0):
        enter(op, named(op, make_call(op, rows, 80, device="cpu")))
    compiled = {"silu_mul_mm_fp4_weight_only": 2, "fp4quant_mm_fp4": 2, "silu_mul_fp4quant_mm_fp4": 2}
    assert len(launches.compiled) == compiled.get(op.name, 1)
    # Expected launches. A GEMM of two FP4 operands takes one more launch for decoding, unless K is a multiple of 32, as
    # it always is after a gate. A quantisation takes one more launch, except for few rows with wgmma. The routing ops
    # launch a kernel even without rows, because they write offsets.
    made = {"mm_fp4": 10, "fp4quant_mm_fp4": 15, "moe_route": 6, "moe_route_ids": 6}
    assert len(launches.calls) == made.get(op.name, 5)


@pytest.mark.parametrize("op", compiled_op_cases())
def test_launchers_are_not_confused(op, launches):
    """Check that each sample finds its own launcher if all other launchers exist, in random order."""
    names = [case.values[1] for case in sample_cases() if case.values[0] is op]
    for i in torch.randperm(len(names)).tolist():
        assert_same(run_entry(op, get_sample(op, names[i], "cpu")), results_of(op, names[i], "cpu"))
    assert len(launches.compiled) < len(launches.calls)


@pytest.mark.parametrize("op", [case for case in op_cases() if isinstance(case.values[0].path, Gemm)])
def test_a_call_finds_the_launcher_of_its_key(op, monkeypatch):
    """Check that a GEMM call, which computes its static key inline, finds the launcher stored under ``key``, and passes
    the call's tensors to it."""
    sample = named(op, make_call(op, 4, 80, device="cpu"))
    call = op.bind(*sample.args, **sample.kwargs)
    found, result = [], torch.zeros(1)

    class Found:
        @staticmethod
        def run(given, out):
            found.extend(given)
            return result

    monkeypatch.setattr(op.path, "launchers", {op.path.key(call, call.a.get_device()): Found})
    assert op.path.run(None, None, *call) is result
    assert all(one is other for one, other in zip(found, call[: len(Operands._fields)], strict=True))


@pytest.mark.parametrize(
    "op",
    [
        case
        for case in op_cases()
        if isinstance(case.values[0].path, RowQuant) and "scale_format" in case.values[0].signature.names
    ],
)
def test_a_format_by_another_name(op, launches):
    """Check that naming the default format of a block size compiles no other kernel."""
    is_fp8 = "granularity" in op.signature.names
    sample = get_sample(op, "block32-128x4-bfloat16" if is_fp8 else "nvfp4-128x4-bfloat16", "cpu")
    want = enter(op, copy_updated(op, sample))
    named = {"scale_format": "ue8m0" if is_fp8 else "e4m3"}
    got = enter(op, copy_updated(op, Sample("named", sample.args, {**sample.kwargs, **named})))
    assert_same(got, want)
    assert len(launches.compiled) == 1


def test_stride_of_a_single_row_is_ignored(launches):
    """Check that the stride of a dimension of size 1 is ignored."""
    op = OPS["add_rmsnorm_fp4quant"]
    memory, weight = torch.randn(1, 64).bfloat16(), torch.ones(64).bfloat16()
    row, other = memory.as_strided((1, 64), (999, 1)), memory.as_strided((1, 64), (64, 1))
    want = memory + memory
    op.cuda(row, other, weight)
    assert torch.equal(memory, want)


NUMBERS = {
    "eps": (1e-5, (-1e-6, torch.nan, torch.inf)),
    "scaling_factor": (2.5, (torch.nan, -torch.inf)),
    "swiglu_alpha": (1.7, (torch.nan, torch.inf)),
    "swiglu_beta": (1.0, (torch.nan, -torch.inf)),
    "swiglu_limit": (7.0, (0.0, -1.0, torch.nan, torch.inf)),
}
"""Number arguments that are not part of a static key: a valid value, and invalid values."""


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op in OPS.values()
        for name in NUMBERS
        if name in op.signature.names
    ],
)
def test_numbers_are_checked_on_later_calls(op, name, launches):
    """Check that invalid numbers are refused even if a launcher for such calls exists."""
    good, bad = NUMBERS[name]
    given = make_call(op, 5, 80, device="cpu") | {name: good}
    enter(op, named(op, given))
    assert any(op.path.key(op.bind(**given), -1) == key for key in op.path.launchers)
    launches.calls.clear()
    for value in bad:
        with pytest.raises(ValueError, match=rf"cute::{op.name}: {name} is "):
            enter(op, named(op, given | {name: value}))
    assert not launches.calls


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_unaligned_scales_of_mxfp8(layout):
    """Check that MXFP8's scales must be aligned, unlike fp32 scales, because the kernel stores 16 bytes at once."""
    op, x = OPS["fp8_quantize"], torch.randn(8, 256)
    y, scale = op.cuda(x, granularity="block32", scale_layout=layout)
    memory = torch.zeros(scale.numel() + 32, dtype=torch.uint8)
    first = -memory.data_ptr() % 16 + 4
    wrong = memory[first : first + scale.numel()].view(scale.shape)
    for _ in range(2):
        with pytest.raises(ValueError, match="scale_out starts at an address that is no multiple of 16 bytes"):
            op.cuda_out(x, granularity="block32", scale_layout=layout, y=y, scale_out=wrong)
