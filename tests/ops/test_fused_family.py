"""Ops that add to a residual: comparison with an addition followed by the op without the addition, updates in place,
and compiled stacks of layers."""

import re

import pytest
import torch
from expected import assert_same
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from support.cases import (
    arguments,
    call,
    call_function,
    call_out,
    each_sample,
    form_cases,
    get_sample,
    make_call,
    named,
    op_cases,
    out_for,
    overload,
    run,
    sample_cases,
    updated,
)
from support.strategies import KINDS, PLACES, generators, leads, placed, values
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils._triton import has_triton

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

ADDING = [case for case in op_cases() if "residual" in case.values[0].updated]
by_op = pytest.mark.parametrize("op", ADDING)
REDUCING = "all_reduce_"
by_compiled_op = pytest.mark.parametrize(
    "op", [case for case in ADDING if case.id == "all_reduce_add_rmsnorm_fp8quant" or not case.id.startswith(REDUCING)]
)
"""Ops for tests of compiled stacks, which take long. One of the ops that sum over ranks stands for all of them."""
ADDING_SAMPLES = [case for case in sample_cases() if "residual" in case.values[0].updated]


pytestmark = pytest.mark.usefixtures("fresh_compiler")

# Comparison with separate ops


def separately(op, given):
    """Compute ``residual += input`` and then the op without the addition; return its outputs and the residual."""
    others = {name: value for name, value in given.items() if name not in ("input", "residual", "group")}
    total = given["residual"].clone()
    total += given["input"]
    if op.name.endswith("_both_layouts"):
        plain = torch.ops.cute.rmsnorm_fp4quant
        y, tiled = plain(total, **others, scale_layout="128x4")
        again, linear = plain(total, **others, scale_layout="linear")
        assert_same([again], [y])
        norm = torch.ops.cute.rmsnorm_fp4quant_with_norm(total, **others)[2:] if "with_norm" in op.name else ()
        return y, tiled, linear, *norm, total
    return *as_tuple(overload(OPS[op.name.removeprefix(REDUCING).removeprefix("add_")])(total, **others)), total


@each_sample(ADDING_SAMPLES)
def test_sample_is_its_parts(op, name, device):
    sample = get_sample(op, name, device)
    given = arguments(op, sample)
    results, expected = run(op, sample), separately(op, given)
    if given["residual"].dtype == given["input"].dtype:
        assert_same(results, expected)
    else:  # the separate norm of a float32 sum is rounded to float32
        assert_same(results[-1:], expected[-1:])


# Use few combinations of static properties, so that most examples on a GPU find a compiled kernel.
COMBINATIONS = {
    "per_token": (
        (torch.bfloat16, torch.bfloat16, 96, {"scale_layout": "128x4"}, False),
        (torch.float16, torch.float32, 48, {"scale_layout": "8x4"}, False),
        (torch.float32, torch.float32, 64, {"scale_layout": "linear"}, False),
    ),
    "fp4": (
        (torch.bfloat16, torch.bfloat16, 96, {"scale_layout": "128x4"}, False),
        (torch.bfloat16, torch.float32, 64, {"scale_layout": "linear"}, True),
        (torch.float16, torch.float32, 48, {"scale_layout": "8x4"}, True),
        (torch.float32, torch.float32, 96, {"scale_layout": "8x4", "block_size": 32}, False),
    ),
    "fp8": (
        (torch.bfloat16, torch.bfloat16, 100, {"granularity": "token"}, False),
        (torch.bfloat16, torch.float32, 256, {"granularity": "block128"}, False),
        (torch.float16, torch.float16, 256, {"granularity": "block128", "scale_layout": "column"}, False),
        (torch.float32, torch.float32, 48, {"granularity": "tensor"}, True),
        (torch.bfloat16, torch.float32, 320, {"granularity": "block128", "scale_format": "ue8m0"}, False),
        (torch.float16, torch.float16, 96, {"granularity": "block32"}, False),
    ),
    "rounded": (
        (torch.bfloat16, torch.bfloat16, 96, {}, False),
        (torch.float16, torch.float32, 100, {}, False),
        (torch.float32, torch.float32, 48, {}, False),
    ),
}


@st.composite
def calls(draw, op):
    """Draw arguments by name, on the CPU, with random leading dimensions, values and memory layouts."""
    family = next((each for each in COMBINATIONS if each in op.name), "rounded")
    dtype, weight_dtype, width, choices, has_factor = draw(st.sampled_from(COMBINATIONS[family]))
    if op.name.endswith("_both_layouts"):
        choices = {name: value for name, value in choices.items() if name != "scale_layout"}
    generator = draw(generators())
    shape = [*draw(leads()), width]
    input, residual = (
        placed(values(draw(st.sampled_from(KINDS)), shape, dtype, generator), draw(st.sampled_from(PLACES)))
        for _ in range(2)
    )
    drawn = {
        "input": residual if draw(st.integers(0, 9)) == 0 else input,
        "residual": residual,
        "weight": torch.randn(width, generator=generator).to(weight_dtype),
        **choices,
    }
    if "group" in op.signature.names:
        drawn["group"] = ""
    if has_factor:
        name = "global_scale" if family == "fp4" else "scale"
        drawn[name] = torch.rand(1, generator=generator) * (400 if family == "fp4" else 0.1) + 0.001
    return drawn


@by_op
@settings(max_examples=60)
@given_by(data=st.data())
def test_call_is_its_parts(op, device, data):
    """Check that the op gives the same results as its separate steps, for random shapes, dtypes, layouts, strides and
    special values."""
    drawn = on_device(data.draw(calls(op)), device)
    assert_same(run(op, named(op, drawn)), separately(op, drawn))


def on_device(drawn, device):
    """Copy the arguments to a device, with the same strides. If residual and input are the same tensor, they stay the
    same tensor."""
    moved = {}
    for name, value in drawn.items():
        if name == "residual" and value is drawn["input"]:
            moved[name] = moved["input"]
        elif isinstance(value, torch.Tensor) and device != "cpu":
            storage = value.untyped_storage().to(device=device)
            empty = torch.empty(0, dtype=value.dtype, device=device)
            moved[name] = empty.set_(storage, value.storage_offset(), value.shape, value.stride())
        else:
            moved[name] = value
    return moved


@each_sample(case for case in form_cases() if case.id.startswith("add_rmsnorm_fp4quant-"))
def test_more_outputs_are_only_more(op, name, device):
    """Check that codes and scales do not change if the op also returns the normalised rows or a second scale layout."""
    sample = get_sample(op, name, device)
    y, scale, residual = run(op, sample)
    with_norm = OPS["add_rmsnorm_fp4quant_with_norm"]
    got = run(with_norm, sample)
    assert_same((*got[:2], got[3]), (y, scale, residual))
    given = arguments(op, sample)
    layout = given.pop("scale_layout")
    both = OPS["add_rmsnorm_fp4quant_both_layouts"]
    y_of_both, tiled, linear, residual_of_both = run(both, named(both, given))
    assert_same((y_of_both, residual_of_both), (y, residual))
    if layout != "8x4":
        assert_same([{"128x4": tiled, "linear": linear}[layout]], [scale])


# Updates in place


@by_op
@pytest.mark.parametrize("rows_of", ["contiguous", "rows apart", "columns apart", "off by one"])
def test_version_of_the_residual_moves(op, rows_of, device):
    """Check that each form of a call increments the residual's version counter, even if the kernel updates a copy or
    there are no rows."""
    for shape in ((5, 96), (2, 3, 96), (0, 96)):
        made = make_call(op, *shape, device=device)
        sample = named(op, {**made, "residual": placed(made["residual"], rows_of)})
        outputs = out_for(op, run(op, sample))
        compiled = torch.compile(lambda sample=sample: call(op, sample), backend="aot_eager", fullgraph=True)
        forms = {
            "op": lambda sample=sample: call(op, sample),
            "out": lambda sample=sample, outputs=outputs: call_out(op, sample, outputs),
            "function": lambda sample=sample: call_function(op, sample),
            "function with out": lambda sample=sample, outputs=outputs: call_function(op, sample, outputs),
            "compiled": compiled,
        }
        (residual,) = updated(op, sample)
        for name, form in forms.items():
            version, address = residual._version, residual.data_ptr()
            form()
            assert residual._version > version, name
            assert residual.data_ptr() == address, name


def test_autograd_notices_a_residual_that_was_saved(device):
    """Check that a backward pass that needs the old residual, which a product saved, fails after the op overwrote
    it."""
    made = make_call(OPS["add_rmsnorm_fp4quant"], 4, 64, device=device)
    factor = torch.ones(4, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    product = factor * made["residual"]
    torch_cute_ops.add_rmsnorm_fp4quant(**made)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# Compiled stacks

LAYERS = 4


def layers(op, x, residual, weights):
    """Compute several layers that pass a residual on, as in a transformer, with operations in between that the compiler
    may fuse."""
    results = []
    for weight in weights:
        y, *scales = as_tuple(op.function(x, residual, weight, *[""] * op.name.startswith(REDUCING)))
        results.append((y, *scales))
        if not scales:
            x = y * 0.5
        elif y.dtype == torch.uint8:
            x = torch_cute_ops.fp4_dequantize(y, scales[0]) * 0.5
        else:
            x = (y.float() * scales[0] * 0.5).to(x.dtype)
    return x, results


def stack_inputs(op, rows, device):
    x, residual = (torch.randn(rows, 64, device=device).bfloat16() for _ in range(2))
    return x, residual, [torch.rand(64, device=device).bfloat16() + 0.5 for _ in range(LAYERS)]


def flat(results):
    x, outputs = results
    return [x, *(tensor for layer in outputs for tensor in layer)]


def needs_inductor(device):
    if device == "cuda" and not has_triton():
        pytest.skip("Inductor needs Triton on a GPU")


@by_compiled_op
@pytest.mark.slow
def test_inductor_updates_the_residual_in_place(op, device):
    """Check that in generated code each call updates the program's residual in place, without copies."""
    needs_inductor(device)
    x, residual, weights = stack_inputs(op, 5, device)
    eager, address, version = residual.clone(), residual.data_ptr(), residual._version
    want = layers(op, x, eager, weights)
    got, (code,) = run_and_get_code(
        torch.compile(lambda *args: layers(op, *args), fullgraph=True), x, residual, weights
    )
    assert_same(flat(got), flat(want))
    assert_same([residual], [eager])
    assert residual.data_ptr() == address and residual._version > version
    body = code[code.index("def call(") : code.index("def get_args")]
    written = re.findall(rf"torch\.ops\.cute\.{op.name}\.default\(\w+, (\w+), ", body)
    assert len(written) == LAYERS
    (name,) = set(written)
    assert re.fullmatch(r"(arg|primals_)\d+(_1)?", name), f"the residual is {name}"
    others = [line for line in body.splitlines() if re.search(rf"\b{name}\b", line) and "torch.ops.cute" not in line]
    allowed = r"del |assert_size_stride\(|args\.clear|.* = args$|return \(|# "
    assert all(re.match(rf"\s*({allowed})", line) for line in others), others
    assert not re.search(r"\.copy_\(|clone", body)


@by_compiled_op
@pytest.mark.slow
def test_residual_inside_the_program(op, device):
    """Check a residual that the program creates, whose memory Inductor may plan. On a GPU, also capture and replay the
    program."""
    needs_inductor(device)
    x, residual, weights = stack_inputs(op, 5, device)

    def program(x, residual, weights):
        carried = residual * 2
        return *flat(layers(op, x, carried, weights)), carried

    compiled = torch.compile(program, fullgraph=True, mode="reduce-overhead" if device == "cuda" else None)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        fresh_x, fresh_residual, _ = stack_inputs(op, 5, device)
        x.copy_(fresh_x)
        residual.copy_(fresh_residual)
        want = program(x, residual, weights)
        assert_same(compiled(x, residual, weights), want)


@pytest.mark.slow
@pytest.mark.parametrize("op", [case for case in ADDING if case.id in ("add_rmsnorm_fp4quant", "add_rmsnorm_fp8quant")])
def test_stack_compiles_twice_at_most(op, device):
    """Check that a stack of layers compiles one graph for the first number of rows and one graph for all others. With
    tiled scales, a third graph is allowed for rows that fill a single tile."""
    needs_inductor(device)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda *args: layers(op, *args), backend=counter, fullgraph=True)
    for rows in (5, 6, 33, 128, 129, 300):
        x, residual, weights = stack_inputs(op, rows, device)
        eager = residual.clone()
        want = layers(op, x, eager, weights)
        assert_same(flat(compiled(x, residual, weights)), flat(want))
        assert_same([residual], [eager])
    assert counter.frame_count <= (3 if op.name == "add_rmsnorm_fp4quant" else 2)


@pytest.mark.gpu
@by_op
def test_captured_stack(op):
    """Check that a captured stack of layers passes its residual from replay to replay."""
    x, residual, weights = stack_inputs(op, 257, "cuda")
    start = residual.clone()
    layers(op, x, residual.clone(), weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(op, x, residual, weights)
    residual.copy_(start)
    eager = start.clone()
    for _ in range(3):
        graph.replay()
        want = layers(op, x, eager, weights)
        assert_same((*flat(got), residual), (*flat(want), eager))


def test_data_dependent_number_of_rows():
    """Check sizes that are known only at run time, with a residual that is a view of a larger tensor."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x, chosen, weight):
        rows = x[chosen.nonzero().squeeze(-1)]
        residual = torch.cat([rows, rows], 1)[:, :128]
        return torch_cute_ops.add_rmsnorm_fp4quant(rows, residual, weight)

    x, weight = torch.randn(5, 128).bfloat16(), torch.ones(128).bfloat16()
    chosen = torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = program(x, chosen, weight)
    assert_same(got, torch_cute_ops.rmsnorm_fp4quant(x[chosen] + x[chosen], weight))
