"""``torch.compile`` of every op: full graphs, equal results, and few compilations."""

import pytest
import torch
from cases import arguments, get_sample, op_cases, overload, poisoned, run, run_function, sample_cases
from expected import assert_same
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._triton import has_triton

from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.testing import Sample


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("op", "name"), sample_cases())
def test_compiled_is_eager(op, name, device):
    """The op, its Python function, and the function with ``out=`` in one graph."""
    sample = get_sample(op, name, device)
    want = run(op, sample)
    outputs = poisoned(want)

    def program(args, kwargs, outputs):
        as_op = as_tuple(overload(op)(*args, **kwargs))
        as_function = as_tuple(run_function(op, Sample("", args, kwargs)))
        run_function(op, Sample("", args, kwargs), outputs)
        return as_op, as_function

    counter = CompileCounterWithBackend("aot_eager")
    as_op, as_function = torch.compile(program, backend=counter, fullgraph=True)(sample.args, sample.kwargs, outputs)
    assert counter.frame_count == 1
    for got in (as_op, as_function, outputs):
        assert_same(got, want)
    facts = [(t.stride(), t.device) for t in want]
    assert [(t.stride(), t.device) for t in as_op] == facts


INDUCTOR = ("nvfp4-128x4-bfloat16", "leading-transposed")


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), sample_cases(*INDUCTOR))
def test_inductor(op, name, device):
    """Between operations of the program, which Inductor fuses and whose buffers it plans."""
    if device == "cuda" and not has_triton():
        pytest.skip("Inductor needs Triton on a GPU")
    sample = get_sample(op, name, device)

    def program(args, kwargs):
        first = args[0].clone() if args[0].dtype == torch.uint8 else args[0] * 2
        outputs = as_tuple(overload(op)(first, *args[1:], **kwargs))
        return outputs, tuple(
            output.view(torch.uint8) + 1 if output.dtype.itemsize == 1 else output * 2 for output in outputs
        )

    want = program(sample.args, sample.kwargs)
    got = torch.compile(program, fullgraph=True)(sample.args, sample.kwargs)
    for i in range(2):
        assert_same(got[i], want[i])
    assert [t.stride() for t in got[0]] == [t.stride() for t in want[0]]


# Compilations

ROWS = (1, 2, 3, 7, 16, 33, 128, 129, 300)


def rows_of(op, device, rows, layout, lead=()):
    """Arguments of a call with this many rows, and the name of the argument that has them."""
    given = arguments(op, get_sample(op, "nvfp4-linear-bfloat16", device))
    given["scale_layout"] = layout
    if "input" in given:
        given["input"] = torch.randn(*lead, rows, 80, dtype=torch.bfloat16, device=device)
        return given, "input"
    given["y"] = torch.randint(0, 256, (*lead, rows, 40), dtype=torch.uint8, device=device)
    shape = (*lead, rows, 5) if layout == "linear" else (-(-given["y"][..., 0].numel() // 128) * 128, 8)
    given["scale"] = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return given, "y"


def compilations(op, device, sequence, layout, dynamic=None, lead=()):
    """How many graphs a program with the op is compiled to for this sequence of M; its results are the op's.

    Kept graphs are counted, not calls of the backend: with ``dynamic=True`` PyTorch makes a float argument symbolic,
    and starts again when it finds that the op wants a number.
    """

    def program(tensors):
        return as_tuple(op.function(**tensors, **fixed))

    fixed = {k: v for k, v in rows_of(op, device, 1, layout)[0].items() if not isinstance(v, torch.Tensor)}
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in sequence:
        given, _ = rows_of(op, device, rows, layout, lead)
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        assert_same(compiled(tensors), as_tuple(overload(op)(**given)))
    graphs = len(_debug_get_cache_entry_list(program.__code__))
    assert graphs > 0
    return graphs


by_op_and_layout = pytest.mark.parametrize(
    ("op", "layout"),
    [
        pytest.param(*case.values, layout, id=f"{case.id}-{layout}")
        for case in op_cases()
        for layout in ("linear", "128x4")
        # The caller passes the tiled scale matrix, whose extent PyTorch takes for fixed until it has seen a second one.
        if not (case.id == "fp4_dequantize" and layout == "128x4")
    ],
)


@by_op_and_layout
@pytest.mark.parametrize("lead", [(), (2,)], ids=["2d", "3d"])
def test_compiles_twice_at_most(op, layout, lead, device):
    """Once for the first M, once with M symbolic."""
    assert compilations(op, device, ROWS, layout, lead=lead) <= 2


@by_op_and_layout
def test_compiles_twice_at_most_in_any_order(op, layout, device):
    """With ``dynamic=True``: one graph for M = 1, which PyTorch always specialises, and one for all others."""
    order = torch.randperm(len(ROWS)).tolist()
    assert compilations(op, device, [ROWS[i] for i in order], layout, dynamic=True) <= 2


@by_op_and_layout
def test_no_rows_after_some(op, layout, device):
    """M = 0 is a case of its own to PyTorch."""
    assert compilations(op, device, (5, 6, 0, 7, 0), layout) <= 3


@pytest.mark.parametrize("op", op_cases())
def test_export(op, device):
    """``torch.export`` with a symbolic number of rows gives the op's results for other numbers."""

    class Program(torch.nn.Module):
        def forward(self, tensors):
            return as_tuple(overload(op)(**tensors, **fixed))

    def call(rows):
        given, batched = rows_of(op, device, rows, "linear")
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        return tensors, {key: value for key, value in given.items() if key not in tensors}, batched

    tensors, fixed, batched = call(5)
    rows = torch.export.Dim("rows", max=512)
    shapes = {key: {0: rows} if key in (batched, "scale") else None for key in tensors}
    program = torch.export.export(Program(), (tensors,), dynamic_shapes=({**shapes},)).module()
    for count in (2, 9, 300):
        tensors, _, _ = call(count)
        assert_same(program(tensors), as_tuple(overload(op)(**tensors, **fixed)))
