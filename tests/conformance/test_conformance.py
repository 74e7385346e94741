"""Requirements that every op must meet, checked over registry × samples × devices.

Tests that compile are in ``test_compile.py``, tests of wrong inputs in ``test_errors.py``, and tests of CUDA graphs and
streams in ``test_cuda.py``.
"""

import contextlib

import numpy as np
import pytest
import torch
from expected import assert_same, raw
from expected.fp4_dequantize import layout_of
from samples import error_inputs, sample_inputs
from support import spec
from support.cases import (
    arguments,
    call,
    call_function,
    call_out,
    copy_updated,
    defined,
    each_sample,
    expected_of,
    fake_mode,
    faked,
    form_cases,
    get_sample,
    is_for_experts,
    named,
    on_meta,
    only_updates,
    op_cases,
    out_for,
    overload,
    require_grad,
    run,
    run_function,
    run_out,
    sample_cases,
    tensors_in,
    updated,
)
from support.results import results_of
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

by_sample = each_sample(sample_cases())
by_form = each_sample(form_cases())
by_op = pytest.mark.parametrize("op", op_cases())


@by_op
def test_schema(op):
    """Check that the schemas equal the schemas promised to users. The promised schemas are parsed first, so that a
    different spelling of the same schema passes."""
    promised = expected_of(op)
    for name, schema in {"default": promised.SCHEMA, "out": promised.OUT_SCHEMA}.items():
        assert str(overload(op, name)._schema) == str(torch._C.parse_schema(schema))
    assert getattr(torch.ops.cute, op.name).overloads() == ["default", "out"]


@by_op
def test_samples_are_many_and_distinct(op, device):
    names = [sample.name for sample in sample_inputs(op.name, device)]
    errors = [error.name for error in error_inputs(op.name, device)]
    assert len(names) == len(set(names)) > 30
    assert len(errors) == len(set(errors)) > 20


# Results of samples


@by_sample
def test_result(op, name, device):
    """Check the results of the op, and of its reference. The reference runs on a GPU too, because users may compare
    with it there."""
    sample = get_sample(op, name, device)
    given = arguments(op, sample)
    expected = expected_of(op).results(given)
    copy = copy_updated(op, sample)
    outputs = defined(op, copy, as_tuple(op.reference(*copy.args, **copy.kwargs)))
    results, of_reference = results_of(op, name, device), (*outputs, *updated(op, copy))
    assert all(output.device.type == device for output in (*results, *of_reference))
    expected_of(op).assert_results(results, expected, given)
    if device == "cpu":  # there the op calls its reference
        assert_same(of_reference, results)
    else:
        expected_of(op).assert_results(of_reference, expected, given)


@by_sample
def test_deterministic_and_pure(op, name, device):
    first = results_of(op, name, device)
    sample = copy_updated(op, get_sample(op, name, device))
    torch.use_deterministic_algorithms(True)
    try:
        with only_updates(op, sample):
            second = call(op, sample)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same((*defined(op, sample, second), *updated(op, sample)), first)


DENSE_FP4 = ("mm_fp4", "mm_fp4_weight_only", "silu_mul_mm_fp4_weight_only")
DENSE_FP4 += ("fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4")


def ours(op, sample, device) -> bool:
    """Return True if one of our kernels can compute the GEMM."""
    reasons = op.backends(torch.device(device), *sample.args, **sample.kwargs)
    return any(reason is None for name, reason in reasons.items() if name not in ("cublas", "reference"))


@by_sample
def test_row_alone(op, name, device):
    """Check that row m of a batch is bitwise equal to the result of the row alone. Backends that use other kernels for
    a single row are exempt: cuBLAS, and dense FP4 GEMMs, for which ``test_fp4_gemm_gpu`` compares rows computed by the
    same tactic."""
    sample = get_sample(op, name, device)
    given = arguments(op, sample)
    outputs = results_of(op, name, device)
    if hasattr(expected_of(op), "rows_alone"):
        for alone, want in expected_of(op).rows_alone(given, outputs):
            assert_same(run(op, named(op, alone)), want)
        return
    if op.has_backends:
        for m in {0, len(given["a"]) // 3, len(given["a"]) - 1} if len(given["a"]) else ():
            alone = given | {"a": given["a"][m : m + 1]}
            if "a_scale" in given:
                width = given["a"].shape[1] * 2
                layout = spec.layout_named(given["scale_layout"], given["a_scale"])
                scale = row_of_scales(given["a_scale"], layout, len(given["a"]), width, given, m)
                alone["a_scale"] = scale[None] if layout == "linear" else scale
            if given.get("row_scale") is not None:
                alone["row_scale"] = given["row_scale"][m : m + 1]
            if is_for_experts(op):
                alone["alpha"] = given["alpha"][m : m + 1]
            row = run(op, named(op, alone))
            has_own_kernels = op.name in DENSE_FP4 and len(given["a"]) > 1
            if device == "cpu" or (ours(op, sample, device) and not has_own_kernels):
                assert_same(row, (outputs[0][m : m + 1],))
            else:
                expected_of(op).assert_results(row, expected_of(op).results(alone), alone)
        return
    batched = ["input", *op.updated] if "input" in given else ["y"]
    first = given[batched[0]]
    rows = first.shape[:-1].numel()
    for m in {0, rows // 3, rows - 1} if rows else ():
        alone = dict(given)
        for key in batched:
            alone[key] = given[key].flatten(0, -2)[m] if first.dim() > 1 else given[key]
        if batched == ["y"]:
            layout, width = layout_of(given), first.shape[-1] * 2
            alone["scale"] = row_of_scales(given["scale"], layout, rows, width, given, m)
        want = []
        for key, output in zip((*op.outputs, *op.updated), outputs, strict=True):
            if key.startswith("scale"):
                layout = key.removeprefix("scale_") if key != "scale" else given["scale_layout"]
                want.append(row_of_scales(output, layout, rows, outputs_width(outputs[0]), given, m))
            elif key == "row_scale":
                want.append(output[m : m + 1])
            else:
                want.append(output.reshape(rows, *output.shape[first.dim() - 1 :])[m])
        assert_same(run(op, named(op, alone)), want)


def outputs_width(y):
    """Return the number of elements in a row that is stored as codes ``y``."""
    return y.shape[-1] * (2 if y.dtype == torch.uint8 else 1)


def row_of_scales(scale, layout, rows, width, given, m):
    """Return the scales of row ``m`` of a batch, in the layout and shape for this row alone."""
    is_mxfp8 = given.get("granularity") == "block32"
    if "granularity" in given and not is_mxfp8:
        return scale if given["granularity"] == "tensor" else scale.reshape(rows, -1)[m]
    layout = layout or "128x4"
    # Collect the row's bytes from the batch's layout, then arrange them for a single row.
    all_bytes = scale.cpu().contiguous().view(torch.uint8).numpy()
    row = spec.collect(all_bytes, layout, rows, width // (32 if is_mxfp8 else given.get("block_size", 16)))[m]
    laid = torch.from_numpy(np.ascontiguousarray(spec.arrange(row[None], layout))).to(scale.device).view(scale.dtype)
    return laid[0] if layout == "linear" else laid


# Forms of a call


@by_form
def test_out_is_functional(op, name, device):
    sample = get_sample(op, name, device)
    want = results_of(op, name, device)
    given = [raw(tensor) for tensor in tensors_in(sample)]
    outputs = out_for(op, want)
    versions = [output._version for output in outputs]
    assert_same(run_out(op, sample, outputs), want)
    assert all(output._version > version for output, version in zip(outputs, versions, strict=True))
    for tensor, bytes_before in zip(tensors_in(sample), given, strict=True):
        assert torch.equal(raw(tensor), bytes_before)


@by_form
def test_function_is_op(op, name, device):
    sample = get_sample(op, name, device)
    want = results_of(op, name, device)
    assert_same(run_function(op, sample), want)
    outputs = out_for(op, want)
    returned = run_function(op, sample, outputs)
    assert all(a is b for a, b in zip(returned, outputs, strict=False))
    assert_same(returned, want)


@by_form
def test_without_gradients(op, name, device):
    """Check that in modes without gradients an input may require grad, and that the results are the same."""
    sample = get_sample(op, name, device)
    want = results_of(op, name, device)
    require_grad(sample)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            outputs = out_for(op, want)
            for got in (run(op, sample), run_function(op, sample), run_out(op, sample, outputs)):
                assert_same(got, want)
                assert not any(output.requires_grad for output in got[: len(op.outputs)])


# Fake tensors


def _facts(tensors):
    return [(tuple(map(int, t.shape)), t.dtype, tuple(map(int, t.stride())), t.device) for t in tensors]


@by_form
def test_fake_is_real(op, name, device):
    """Check that results computed with fake tensors have the shapes, dtypes, strides and devices of real results, with
    fixed and with symbolic sizes."""
    sample = get_sample(op, name, device)
    real = _facts(results_of(op, name, device)[: len(op.outputs)])
    for shapes in (None, ShapeEnv()):
        mode = fake_mode(shapes)
        fake = faked(sample, mode)
        with mode:
            assert _facts(call(op, fake)) == real
            assert _facts(call_function(op, fake)) == real
            outputs = [torch.empty_strided(size, step, dtype=dtype, device=on) for size, dtype, step, on in real]
            call_out(op, fake, outputs)


@by_form
def test_outputs_are_packed(op, name, device):
    """Check that outputs have the strides that fake tensors promise, for any strides of the arguments, because compiled
    programs rely on these strides.

    FP8 block scales are column-major over the flattened rows, or row-major if asked for. Other outputs are contiguous.
    """
    given = arguments(op, get_sample(op, name, device))
    for key in (each.name for each in op.signature.tensors if given[each.name] is not None):
        turned = given[key].view(torch.uint8) if given[key].itemsize == 1 else given[key]
        order = tuple(range(turned.dim()))[::-1]
        turned = turned.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
        with contextlib.suppress(ValueError):  # strides of the copy may show that a weight is not transposed
            outputs = call(op, named(op, {**given, key: turned.view(given[key].dtype)}))
            for label, output in zip(op.outputs, outputs, strict=True):
                blocks_first = (output.shape[-1], *output.shape[:-1]) if output.dim() else ()
                is_column = label == "scale" and has_column_scales(op, given)
                made = torch.empty(blocks_first if is_column else output.shape, device="meta")
                assert output.stride() == (made.movedim(0, -1) if is_column else made).stride()


def has_column_scales(op, given):
    """Return True if the call returns column-major FP8 block scales."""
    if op.name in ("moe_permute_fp8quant", "moe_swiglu_fp8quant"):
        return True
    return given.get("granularity") == "block128" and given["scale_layout"] != "row"


@by_form
def test_meta_is_real(op, name, device):
    sample = get_sample(op, name, device)
    real = [fact[:3] for fact in _facts(results_of(op, name, device))]
    # Move the sample to meta instead of drawing it there: torch's decompositions on meta would take ten times as long.
    outputs = run(op, on_meta(sample))
    assert [fact[:3] for fact in _facts(outputs)] == real
    assert all(output.device.type == "meta" for output in outputs)


# torch.library.opcheck

AOT = "test_aot_dispatch_dynamic"
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", AOT)
UNCHECKABLE = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def skip_if_opcheck_cannot_copy(sample):
    """Skip the test if torch cannot copy an argument, as opcheck does: torch 2.9 cannot copy FP4 tensors."""
    for tensor in tensors_in(sample):
        if tensor.dtype == torch.float4_e2m1fn_x2:
            try:
                tensor.clone()
            except NotImplementedError as error:
                pytest.skip(f"opcheck copies arguments: {error}")


def utils_for(op, name):
    """Return the opcheck tests to run. ``AOT`` takes a third of a second, so for each op it runs only on the form of a
    call with the most features. test_compiled_is_eager runs AOTAutograd with fixed sizes for all features of calls
    except strides of tensors that the op only reads, and test_fake_is_real covers all forms with symbolic sizes."""
    first = next(case for case in form_cases() if case.values[0] is op)
    return [util for util in UTILS if util != AOT or name == first.values[1]]


@by_form
def test_opcheck(op, name, device):
    sample = get_sample(op, name, device)
    skip_if_opcheck_cannot_copy(sample)
    utils = utils_for(op, name)
    if any(tensor.dtype in UNCHECKABLE for tensor in tensors_in(sample)):
        # Leave out opcheck's test_schema: it multiplies or copies arguments, which these dtypes do not support.
        # test_deterministic_and_pure compares bytes instead.
        utils.remove("test_schema")
    if op.defined is not None and AOT in utils:
        # Leave out AOT: it would compare elements of outputs whose values are unspecified.
        utils.remove(AOT)
    torch.library.opcheck(overload(op), sample.args, sample.kwargs, test_utils=utils)


@by_form
def test_opcheck_out(op, name, device):
    """Run opcheck on the ``.out`` overload, except test_schema, which cannot multiply a float8 output.
    test_out_is_functional compares bytes instead."""
    sample = get_sample(op, name, device)
    skip_if_opcheck_cannot_copy(sample)
    outputs = dict(zip(op.out_names, out_for(op, results_of(op, name, device)), strict=True))
    utils = [util for util in utils_for(op, name) if util != "test_schema"]
    torch.library.opcheck(overload(op, "out"), sample.args, {**sample.kwargs, **outputs}, test_utils=utils)


def test_every_op_has_a_python_function():
    import torch_cute_ops

    for name, op in OPS.items():
        assert getattr(torch_cute_ops, name) is op.function
        assert op.function.__name__ == name and op.function.__doc__
