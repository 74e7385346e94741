"""Behaviour that only a GPU can show: graphs, streams, large sizes, and consecutive kernels."""

import fcntl
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from expected import assert_same
from support.cases import (
    all_choices_of,
    arguments,
    call,
    call_function,
    call_out,
    choices_of,
    copy_updated,
    defined,
    each_sample,
    expected_of,
    forget,
    form_cases,
    get_sample,
    make_call,
    named,
    new_sample,
    op_cases,
    out_for,
    plain_sample,
    poisoned,
    quantises_rows,
    run,
    run_out,
    tensors_in,
    updated,
)
from torch.utils._triton import has_triton

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.registry import OPS

pytestmark = pytest.mark.gpu

by_form = each_sample(form_cases())
by_op = pytest.mark.parametrize("op", op_cases())
QUANTISING = [case for case in op_cases() if quantises_rows(*case.values)]
LAID_OUT = [
    pytest.param(*case.values, choices, id="-".join((case.id, *choices.values())))
    for case in QUANTISING
    for choices in all_choices_of(*case.values)
]


@pytest.fixture
def needs_memory():
    """Return a function that skips the test if the GPU has less than the given memory in GB. Tests that use this
    function run one at a time, even if several processes share the GPU, and free all memory afterwards."""

    def needs(gigabytes):
        total = torch.cuda.get_device_properties(0).total_memory / 1e9
        if total < gigabytes:
            pytest.skip(f"needs {gigabytes} GB of GPU memory, there are {total:.0f}")

    with Path(tempfile.gettempdir(), "torch_cute_ops-large-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield needs
        torch.cuda.empty_cache()


def refill(sample, source):
    """Copy the data of another sample into this sample's storages, so that views and overlaps stay as they are."""
    for ours, theirs in zip(tensors_in(sample), tensors_in(source), strict=True):
        ours.untyped_storage().copy_(theirs.untyped_storage())


@by_form
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_captured_is_eager(op, name):
    """Check that a graph replay uses the current content of the inputs, for the op, its Python function and
    ``out=``."""
    sample = get_sample(op, name, "cuda")
    outputs = out_for(op, run(op, sample))
    run_out(op, sample, outputs)
    samples = [copy_updated(op, sample) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        as_op = call(op, samples[0])
        as_function = call_function(op, samples[1])
        call_out(op, samples[2], outputs)
    for _ in range(2):
        source = new_sample(op, name, "cuda")
        for each in samples:
            refill(each, source)
        want = run(op, source)
        written = (*as_op, *as_function, *outputs)
        for tensor, garbage in zip(written, poisoned(written), strict=True):
            tensor.copy_(garbage)
        graph.replay()
        for got, each in zip((as_op, as_function, outputs), samples, strict=True):
            assert_same((*defined(op, each, got), *updated(op, each)), want)


@by_op
def test_capture_of_a_kernel_that_is_not_ready(op):
    """Check that capturing a kernel that is not loaded raises an error that names the op and the key, and that the
    capture works after the ``warmup`` call in the error."""
    width = torch.randint(1000, 2000, ()).item() * 16
    forget(op)
    sample = named(op, make_call(op, 3, width, device="cuda"))
    with (
        pytest.raises(RuntimeError, match=rf"cute::{op.name} .*torch_cute_ops\.warmup\('{op.name}', .*\)") as raised,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call(op, sample)
    told = str(raised.value)[str(raised.value).index("torch_cute_ops.warmup(") :]
    eval(told, {"torch_cute_ops": torch_cute_ops, "torch": torch})
    captured = copy_updated(op, sample)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(op, captured)
    graph.replay()
    assert_same((*defined(op, captured, got), *updated(op, captured)), run(op, sample))


@by_op
def test_runs_on_the_current_stream(op):
    """Check that the op waits for work on the current stream and on no other stream. The op's input is written late, on
    a side stream."""
    data = plain_sample(op, "cuda")
    samples = [copy_updated(op, plain_sample(op, "cuda")) for _ in range(2)]
    want = run(op, data)
    outputs = out_for(op, want)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for each in samples:
            refill(each, data)
        got = call(op, samples[0])
        call_out(op, samples[1], outputs)
    stream.synchronize()
    assert_same((*defined(op, samples[0], got), *updated(op, samples[0])), want)
    assert_same((*defined(op, samples[1], outputs), *updated(op, samples[1])), want)


@by_op
def test_many_streams_and_threads(op):
    """Check calls from several threads, each on a separate stream."""
    samples = [plain_sample(op, "cuda") for _ in range(8)]
    wants = [run(op, sample) for sample in samples]
    torch.cuda.synchronize()
    gots: dict[int, tuple[torch.Tensor, ...]] = {}

    def work(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                gots[i] = run(op, samples[i])
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(samples))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(wants):
        assert_same(gots[i], want)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_kernels_that_follow_each_other(captured, adds):
    """Check programmatic dependent launches, in which a kernel starts before the previous kernel ends. Each step reads
    the results of the previous step and overwrites the inputs of the previous step."""
    start = torch.randn(257, 2048, dtype=torch.bfloat16, device="cuda")
    weight = torch.rand(2048, dtype=torch.bfloat16, device="cuda") + 0.5
    y, scale = torch_cute_ops.rmsnorm_fp4quant(start, weight, scale_layout="128x4")

    def steps(pause):
        x = start.clone()
        residual = start.clone()
        for _ in range(24):
            if adds:
                torch_cute_ops.add_rmsnorm_fp4quant(x, residual, weight, scale_layout="128x4", out=(y, scale))
            else:
                torch_cute_ops.rmsnorm_fp4quant(x, weight, scale_layout="128x4", out=(y, scale))
            pause()
            torch_cute_ops.fp4_dequantize(y, scale, scale_layout="128x4", out=x)
            pause()
        return x, residual

    want = steps(torch.cuda.synchronize)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = steps(lambda: None)
        graph.replay()
    else:
        got = steps(lambda: None)
    assert_same(got, want)


@by_op
@pytest.mark.slow
def test_cuda_graph_trees(op):
    """Check that ``torch.compile(mode="reduce-overhead")`` captures the op in a graph, and that a call does not
    overwrite the results of an earlier call."""
    if not has_triton():
        pytest.skip("Inductor needs Triton for CUDA graphs")
    torch._dynamo.reset()
    sample = plain_sample(op, "cuda")
    program = torch.compile(
        lambda *args, **kw: as_tuple(op.function(*args, **kw)), mode="reduce-overhead", fullgraph=True
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        refill(sample, plain_sample(op, "cuda"))
        want = run(op, sample)
        got = defined(op, sample, program(*sample.args, **sample.kwargs))
        assert_same((*got, *updated(op, sample)), want)
    torch._dynamo.reset()


# Large sizes


SIZES = [(20_000, 1024), (8192, 4096), (3000, 2880), (3000, 7168), (300, 16_384), (140, 65_536)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize(("op", "choices"), LAID_OUT)
def test_many_rows(op, choices, rows, width):
    """Check sizes that fill the GPU several times: the batch against the reference, and single rows against the
    batch."""
    if choices.get("granularity") == "block128" and width % 128:
        pytest.skip("no whole blocks of 128")
    given = make_call(op, rows, width, device="cuda", **choices)
    sample = named(op, given)
    outputs = run(op, sample)
    expected = copy_updated(op, sample)
    want = [*as_tuple(op.reference(**expected.kwargs)), *updated(op, expected)]
    is_rounded = isinstance(op.path, RowQuant) and not op.path.quantises
    if is_rounded and not op.path.normalises:
        want[0] = op.reference(**{**given, "input": given["input"].float()})
    elif is_rounded or "norm" in op.outputs:
        value = (updated(op, expected) or (given["input"],))[0].double()
        exact = value * (value.square().mean(-1, keepdim=True) + given["eps"]).rsqrt() * given["weight"].double()
        want[op.outputs.index("out" if is_rounded else "norm")] = exact
    expected_of(op).assert_results(outputs, tuple(want), given)
    for m in (0, rows // 2, rows - 1):
        alone = {name: given[name][m : m + 1] for name in ("input", *op.updated)}
        got = run(op, named(op, {**given, **alone}))
        for name, result, output in zip((*op.outputs, *op.updated), got, outputs, strict=True):
            if not name.startswith("scale"):
                assert_same([result], [output[m : m + 1]])


WIDE = ("fp4_quantize", "rmsnorm_fp4quant_with_norm", "add_rmsnorm_fp4quant_with_norm", "silu_mul_fp8quant")


@pytest.mark.slow
@pytest.mark.parametrize("op", [OPS[name] for name in WIDE], ids=lambda op: op.name)
def test_more_than_2_31_elements(op, needs_memory):
    needs_memory(40)
    rows, width = 65_536 + 5, 32_768
    given = make_call(op, rows, width, device="cuda", **choices_of(op)[0])
    some = (0, 32_767, 65_535, rows - 1)
    alone = [{name: given[name][m : m + 1].clone() for name in ("input", *op.updated)} for m in some]
    outputs = (*call(op, named(op, given)), *(given[name] for name in op.updated))
    for m, row in zip(some, alone, strict=True):
        assert_same(run(op, named(op, {**given, **row})), [output[m : m + 1] for output in outputs])


@pytest.mark.slow
def test_dequantize_more_than_2_31_elements(needs_memory):
    needs_memory(32)
    rows, width = 65_536 + 5, 32_768
    y = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 0x7F, (rows, width // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    values = torch_cute_ops.fp4_dequantize(y, scale, scale_layout="linear")
    for m in (0, 32_767, 65_535, rows - 1):
        row = torch_cute_ops.fp4_dequantize(y[m : m + 1], scale[m : m + 1], scale_layout="linear")
        assert_same([row], [values[m : m + 1]])


@pytest.mark.slow
@pytest.mark.parametrize("op", QUANTISING)
def test_rows_further_apart_than_2_31(op, needs_memory):
    """Check that rows are read in place even if their stride is 2^31 elements or more."""
    needs_memory(32)
    given = make_call(op, 4, 80, device="cuda", **choices_of(op)[0])
    want = run(op, named(op, given))
    storage = torch.empty(2**32 + 2**31 + 2**30, dtype=torch.bfloat16, device="cuda")
    for i, name in enumerate(("input", *op.updated)):
        rows = storage.as_strided(given[name].shape, (2**31, 1), i * 2**20)
        given[name] = rows.copy_(given[name])
    assert_same((*call(op, named(op, given)), *(given[name] for name in op.updated)), want)


@by_op
def test_another_device(op):
    """Check that a call runs on its tensors' device, even if another device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        sample = plain_sample(op, "cuda:1")
        given = arguments(op, sample)
        got = run(op, sample)
    assert all(output.device == torch.device("cuda:1") for output in got)
    expected_of(op).assert_results(got, expected_of(op).results(given), given)


@pytest.mark.parametrize("op", QUANTISING)
def test_strided_rows_are_read_in_place(op):
    """Check that rows and residuals are read in place if their strides are multiples of 16 bytes: only outputs are
    allocated."""
    given = make_call(op, 64, 2048, device="cuda", **choices_of(op)[0])
    for name in ("input", *op.updated):
        storage = torch.randn(64, 3 * 4096, dtype=torch.bfloat16, device="cuda")
        given[name] = storage[:, 4096 : 4096 + given[name].shape[1]]
    sample = named(op, given)
    outputs = call(op, sample)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call_function(op, sample, outputs)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", [512, 4096, 7168])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("fp4_quantize", {}),
        ("fp4_quantize", {"block_size": 32}),
        ("silu_mul_fp4quant", {}),
        ("silu_mul_fp4quant", {"block_size": 32}),
        ("silu_mul_fp8quant", {"granularity": "block128"}),
        ("silu_mul_fp8quant", {"granularity": "token"}),
        ("rmsnorm_fp4quant", {}),
        ("rmsnorm_fp4quant", {"block_size": 32}),
        ("rmsnorm_fp8quant", {"granularity": "block128"}),
    ],
    ids=str,
)
def test_rows_in_l2_give_the_same_every_time(name, kwargs, width, dtype):
    """Check repeatedly, with rows in L2, that a copy that arrives early does not overwrite rows that are still being
    read."""
    op = OPS[name]
    rows = torch.randn(1200, 2 * width if name.startswith("silu") else width, device="cuda", dtype=dtype)
    weight = (torch.rand(width, device="cuda", dtype=dtype),) if name.startswith("rmsnorm") else ()

    def all_bytes():
        # Copy column-major block scales to row-major order, because only contiguous tensors can be viewed as bytes.
        return [output.contiguous().view(torch.uint8) for output in as_tuple(op.function(rows, *weight, **kwargs))]

    first = [each.clone() for each in all_bytes()]
    for _ in range(60):
        assert all(torch.equal(a, b) for a, b in zip(first, all_bytes(), strict=True))
