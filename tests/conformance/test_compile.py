"""``torch.compile`` of every op: full graphs, results equal to eager calls, and few compilations."""

import pytest
import torch
from expected import assert_same
from samples.grouped_mm_fp8 import contiguous
from support.cases import (
    arguments,
    choices_of,
    copy_updated,
    defined,
    dynamic_shapes,
    form_groups,
    form_of,
    get_sample,
    named,
    op_cases,
    out_for,
    overload,
    run,
    sample_cases,
    split_call,
    updated,
)
from support.results import results_of
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._triton import has_triton

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple

pytestmark = pytest.mark.usefixtures("fresh_compiler")


FORMS_PER_PROGRAM = 8


def without_strides_read(op, sample):
    """Return the features of a call's form, except the strides and alignments of tensors that the op only reads: only
    the numbers of their dimensions remain."""
    given = arguments(op, sample)
    read = {name for name, value in given.items() if isinstance(value, torch.Tensor) and name not in op.updated}
    return {
        each[:2] if len(each) > 2 and each[0] in read and isinstance(each[1], int) else each
        for each in form_of(op, sample)
    }


def backends_of_forms():
    """Return cases (op, names of samples, backend of ``torch.compile``) that together contain all forms of calls.

    AOTAutograd, which takes half of the time, does not read the strides of tensors that the op only reads. It therefore
    compiles only samples that together have all features except these strides. The remaining third of the samples
    differ only in these strides, which only Dynamo and the ops read.
    """
    cases = []
    for op, names in (case.values for case in form_groups(len(sample_cases()))):
        forms = {name: without_strides_read(op, get_sample(op, name, "cpu")) for name in names}
        by_aot = []
        while missing := set().union(*forms.values()).difference(*(forms[name] for name in by_aot)):
            by_aot.append(max(names, key=lambda name, missing=missing: len(forms[name] & missing)))
        for backend, some in (("aot_eager", by_aot), ("eager", [name for name in names if name not in by_aot])):
            for begin in range(0, len(some), FORMS_PER_PROGRAM):
                group = some[begin : begin + FORMS_PER_PROGRAM]
                cases.append(pytest.param(op, group, backend, id=f"{op.name}-{backend}-{begin}"))
    return cases


@pytest.mark.parametrize(("op", "names", "backend"), backends_of_forms())
def test_compiled_is_eager(op, names, backend, device):
    """Compare compiled and eager results of the Python function, of the function with ``out=``, and of the op. Several
    samples share one graph. The op is called for the first sample only, because in the graph each call of the function
    is a call of the op."""
    samples = [get_sample(op, name, device) for name in names]
    wanted = [results_of(op, name, device) for name in names]
    outputs = [out_for(op, want) for want in wanted]

    # Call the helpers of ``cases.py`` outside of the compiled program, because Dynamo would trace them for every call.
    as_op, as_function, returns_one = overload(op), op.function, len(op.outputs) == 1

    def program(first, calls, outputs):
        args, kwargs = first
        results = [as_op(*args, **kwargs)]
        for ((args, kwargs), (others, rest)), out in zip(calls, outputs, strict=True):
            results.append(as_function(*args, **kwargs))
            as_function(*others, **rest, out=out[0] if returns_one else out)
        return results

    first, *copies = (copy_updated(op, sample) for sample in (samples[0], *samples, *samples))
    own, others = copies[: len(samples)], copies[len(samples) :]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(program, backend=counter, fullgraph=True)
    calls = [[(each.args, each.kwargs) for each in pair] for pair in zip(own, others, strict=True)]
    of_op, *results = map(as_tuple, compiled((first.args, first.kwargs), calls, outputs))
    (graph,) = counter.graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(as_op) == 1 + len(samples)
    assert_same((*defined(op, first, of_op), *updated(op, first)), wanted[0])
    for i, name in enumerate(names):
        for tensors, each in ((results[i], own[i]), (outputs[i], others[i])):
            assert_same((*defined(op, each, tensors), *updated(op, each)), wanted[i])
        assert [(t.stride(), t.device) for t in results[i]] == [(t.stride(), t.device) for t in outputs[i]], name


INDUCTOR = (
    *("plain", "nvfp4-128x4-bfloat16", "block128-column-bfloat16", "block128-ue8m0-column-bfloat16"),
    *("block32-128x4-bfloat16", "leading-transposed"),
)


INDUCTOR_CASES = [case.values for case in sample_cases(*INDUCTOR)]
CALLS_PER_PROGRAM = 44
"""Number of calls that Inductor compiles together, because the C++ compiler takes a second for each program."""


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(INDUCTOR_CASES), CALLS_PER_PROGRAM))
def test_inductor(begin, device):
    """Check ops between other operations in programs that Inductor compiles. It fuses these operations."""
    if device == "cuda" and not has_triton():
        pytest.skip("Inductor needs Triton on a GPU")
    cases = INDUCTOR_CASES[begin : begin + CALLS_PER_PROGRAM]
    as_ops = [overload(op) for op, _ in cases]

    def program(calls):
        firsts = [args[0] for args, _ in calls]
        firsts = [t.clone() if t.dtype.itemsize == 1 else t * 2 if t.is_floating_point() else t - 1 for t in firsts]
        results = [
            as_tuple(as_op(first, *args[1:], **kwargs))
            for as_op, first, (args, kwargs) in zip(as_ops, firsts, calls, strict=True)
        ]
        change = lambda t: t.view(torch.uint8) + 1 if t.dtype.itemsize == 1 else t * 2  # noqa: E731
        return [(outputs, [change(t) for t in outputs]) for outputs in results]

    samples = [get_sample(op, name, device) for op, name in cases]
    eager, compiled = (
        [copy_updated(op, sample) for (op, _), sample in zip(cases, samples, strict=True)] for _ in range(2)
    )
    want = program([(each.args, each.kwargs) for each in eager])
    options = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    got = torch.compile(program, fullgraph=True, options=options)([(each.args, each.kwargs) for each in compiled])
    failures = []
    for i, (op, name) in enumerate(cases):
        try:
            for of_got, of_want in zip(got[i], want[i], strict=True):
                assert_same(defined(op, compiled[i], of_got), defined(op, eager[i], of_want))
            assert_same(updated(op, compiled[i]), updated(op, eager[i]))
            assert [t.stride() for t in got[i][0]] == [t.stride() for t in want[i][0]]
        except AssertionError as error:
            failures.append(f"{op.name}-{name}: {error}")
    assert not failures, "\n".join(failures)


# Number of compilations

ROWS = (1, 2, 3, 7, 16, 33, 128, 129, 300)


def compilations(op, device, sequence, choices, dynamic=None, lead=(), backend="eager"):
    """Compile a program that calls the op, call it for this sequence of M, and return the number of graphs after each
    call. Check that results equal the results of the op.

    Count the graphs that PyTorch stores, not the calls of the backend. With ``dynamic=True``, PyTorch first makes a
    float argument symbolic, and compiles again when the op asks for the argument's value.

    Dynamo makes the graphs and their guards. AOTAutograd, which takes as long again, runs the op's fake for the same
    symbols, so one test with the backend ``aot_eager`` shows that it adds no guards.
    """

    def program(tensors):
        return as_tuple(op.function(**tensors, **fixed))

    _, fixed = split_call(op, 1, device=device, **choices)
    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    graphs = []
    for rows in sequence:
        tensors, _ = split_call(op, *lead, rows, device=device, **choices)
        sample = named(op, {**tensors, **fixed})
        want = run(op, sample)
        assert_same((*defined(op, sample, compiled(tensors)), *(tensors[name] for name in op.updated)), want)
        graphs.append(len(_debug_get_cache_entry_list(program.__code__)))
    assert graphs[0] > 0
    return graphs


def most_graphs(op, choices):
    """Return the largest allowed number of graphs if the first call has one row, or if all calls are dynamic: two, or
    three with 128x4 scales or square blocks. PyTorch makes the third graph for rows that fill a single scale tile or
    block."""
    has_tiles = choices.get("scale_layout") == "128x4" or op.name.endswith(("both_layouts", "block128x128"))
    return 3 if has_tiles else 2


by_op_and_choices = pytest.mark.parametrize(
    ("op", "choices"),
    [
        pytest.param(*case.values, choices, id="-".join((case.id, *choices.values())))
        for case in op_cases()
        for choices in choices_of(*case.values)
    ],
)
by_op = pytest.mark.parametrize(
    ("op", "choices"),
    [pytest.param(*case.values, choices_of(*case.values)[0], id=case.id) for case in op_cases()],
)
"""Each op with its first choices of formats and layouts. The tests with this mark count graphs, and other layouts would
not change the number."""


@by_op_and_choices
def test_compiles_twice_at_most(op, choices, device):
    """Check that the first M compiles one graph, and all other M a second graph in which M is symbolic. M = 0, which
    PyTorch specialises, may compile one more graph. It must also work after other M."""
    most = most_graphs(op, choices)
    *_, before, after, end = compilations(op, device, (*ROWS, 0, 7), choices, backend="aot_eager")
    assert before <= most and after == end <= most + 1


@by_op
def test_compiles_twice_at_most_in_three_dimensions(op, choices, device):
    """Check that rows with an additional leading dimension, if the op accepts one, also compile to two graphs at
    most."""
    assert compilations(op, device, ROWS, choices, lead=(2,))[-1] <= most_graphs(op, choices)


@by_op
def test_compiles_twice_at_most_in_any_order(op, choices, device):
    """Check that calls with ``dynamic=True`` compile two graphs at most: one for M = 1, which PyTorch always
    specialises, and one for all other M.

    The first M, and its number of tiles, differ from all other sizes, because PyTorch treats equal sizes as one symbol.
    """
    tensors, _ = split_call(op, 1, device=device, **choices)
    sizes = {size for tensor in tensors.values() for size in tensor.shape}
    order = [ROWS[i] for i in torch.randperm(len(ROWS))]
    order.sort(key=lambda rows: rows in sizes or -(-rows // 128) in sizes - {1})
    assert compilations(op, device, order, choices, dynamic=True)[-1] <= most_graphs(op, choices)


@pytest.mark.parametrize(
    ("layout", "graphs"), [("128x4", [1, 2, 3, 4]), ("linear", [1, 2, 2, 3])], ids=["tiled", "linear"]
)
@pytest.mark.parametrize("rows", [(5, 2, 300, 1), (300, 200, 5, 1)], ids=["small-first", "large-first"])
def test_one_row_after_other_rows_compiles_one_more_graph(layout, graphs, rows, device):
    """Check the numbers of graphs in docs/models.md.

    There is one graph for the first M, which PyTorch treats as constant, one for symbolic M (with 128x4 scales two: up
    to 128 rows, and more), and one for M = 1.
    """
    assert compilations(torch_cute_ops.registry.OPS["mm_fp4"], device, rows, {"scale_layout": layout}) == graphs


@pytest.mark.parametrize("op", op_cases())
def test_export(op, device):
    """Export a program with a symbolic number of rows, and check that it returns the op's results for other numbers of
    rows."""

    class Program(torch.nn.Module):
        def forward(self, tensors):
            return as_tuple(overload(op)(**tensors, **fixed))

    choices = choices_of(op)[0]
    tensors, fixed = split_call(op, 5, device=device, **choices)
    # For ops with both layouts or square blocks, torch specialises on whether the rows fit into one tile of 128 rows.
    most = 128 if op.name.endswith(("both_layouts", "block128x128")) else 300
    rows = torch.export.Dim("rows", max=most)
    shapes = dynamic_shapes(op, tensors, rows)
    program = torch.export.export(Program(), (tensors,), dynamic_shapes=({**shapes},)).module()
    for count in (2, 9, most):
        tensors, _ = split_call(op, count, device=device, **choices)
        sample = named(op, {**tensors, **fixed})
        want = run(op, sample)
        assert_same((*defined(op, sample, program(tensors)), *(tensors[name] for name in op.updated)), want)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_computed_in_the_graph_stay_transposed_views(dynamic, device):
    """Check that Inductor keeps the strides of weights that the program computes: from a row-major matrix, from its
    transposed view, from copies of either, and from concatenated rows."""
    if device == "cuda" and not has_triton():
        pytest.skip("Inductor needs Triton on a GPU")
    one = contiguous("", [5, 7], 128, 128, torch.device(device), alignment=1)
    a, b, *rest = one.args
    rows = (b.view(torch.uint8) ^ 1).mT.contiguous()

    def program(a, rows, rest):
        weights = (
            (rows ^ 1).mT,
            rows.mT ^ 1,
            (rows.mT.contiguous() ^ 1).mT.contiguous().mT,
            torch.cat((rows[:1] ^ 1, rows[1:] ^ 1)).mT,
        )
        return [torch_cute_ops.grouped_mm_fp8(a, weight.view(a.dtype), *rest) for weight in weights]

    want = torch_cute_ops.grouped_mm_fp8(a, b, *rest)
    for got in torch.compile(program, fullgraph=True, dynamic=dynamic)(a, rows, rest):
        assert_same([got], [want])
