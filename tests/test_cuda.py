"""What only a GPU can show: graphs, streams, sizes, and kernels that follow each other."""

import math
import threading

import pytest
import torch
from cases import (
    arguments,
    expected_of,
    get_sample,
    op_cases,
    overload,
    poisoned,
    run,
    run_function,
    run_out,
    sample_cases,
    tensors_in,
)
from expected import assert_same
from expected.rmsnorm_fp4quant_with_norm import assert_norm_close
from torch.utils._triton import has_triton

import torch_cute_ops
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.testing import assert_fp4_close

pytestmark = pytest.mark.gpu

by_sample = pytest.mark.parametrize(("op", "name"), sample_cases())
by_op = pytest.mark.parametrize("op", op_cases())
PLAIN = "nvfp4-128x4-bfloat16"
QUANTISING = [case for case in op_cases() if case.id != "fp4_dequantize"]


def needs_memory(gigabytes):
    """Skip on a GPU that is too small for the test."""
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    if total < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, there are {total:.0f}")


def refill(sample, source):
    """Write the data of another sample of the same name into this one's storage, views and overlaps as they are."""
    for ours, theirs in zip(tensors_in(sample), tensors_in(source), strict=True):
        ours.untyped_storage().copy_(theirs.untyped_storage())


@by_sample
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_captured_is_eager(op, name):
    """A replay computes from what the inputs hold then, for the op, for its Python function and for ``out=``."""
    sample = get_sample(op, name, "cuda")
    outputs = poisoned(run(op, sample))
    run_out(op, sample, outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        as_op = run(op, sample)
        as_function = as_tuple(run_function(op, sample))
        run_out(op, sample, outputs)
    for _ in range(2):
        refill(sample, get_sample(op, name, "cuda"))
        want = run(op, sample)
        for tensor in (*as_op, *as_function, *outputs):
            tensor.view(torch.uint8).fill_(0xAA)
        graph.replay()
        for got in (as_op, as_function, outputs):
            assert_same(got, want)


@by_op
def test_capture_of_a_kernel_that_is_not_ready(op):
    """The error names op and key; after the call of warmup that it tells, the capture works."""
    given = arguments(op, get_sample(op, PLAIN, "cuda"))
    blocks = torch.randint(1000, 2000, ()).item()
    if "input" in given:
        given["input"] = torch.randn(3, blocks * 16, dtype=torch.bfloat16, device="cuda")
        if "weight" in given:
            given["weight"] = torch.randn(blocks * 16, device="cuda")
    else:
        given["y"] = torch.zeros(3, blocks * 8, dtype=torch.uint8, device="cuda")
        scale = torch.zeros(128, math.ceil(blocks / 4) * 4, dtype=torch.uint8, device="cuda")
        given["scale"] = scale.view(torch.float8_e4m3fn)
    with (
        pytest.raises(RuntimeError, match=rf"cute::{op.name} .*{blocks * 16}.*torch_cute_ops\.warmup\(.*\)") as raised,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        overload(op)(**given)
    call = str(raised.value)[str(raised.value).index("torch_cute_ops.warmup(") :]
    eval(call, {"torch_cute_ops": torch_cute_ops, "torch": torch})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = as_tuple(overload(op)(**given))
    graph.replay()
    assert_same(got, as_tuple(overload(op)(**given)))


@by_op
def test_runs_on_the_current_stream(op):
    """The input is written late on a side stream; the op, on that stream, must wait for it, and only on that one."""
    sample, data = get_sample(op, PLAIN, "cuda"), get_sample(op, PLAIN, "cuda")
    want = run(op, data)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        refill(sample, data)
        got = run(op, sample)
        outputs = poisoned(want)
        run_out(op, sample, outputs)
    stream.synchronize()
    assert_same(got, want)
    assert_same(outputs, want)


@by_op
def test_many_streams_and_threads(op):
    """Calls from several threads on streams of their own."""
    samples = [get_sample(op, PLAIN, "cuda") for _ in range(8)]
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
def test_kernels_that_follow_each_other(captured):
    """With programmatic dependent launch a kernel starts before the one ahead of it has ended: each step reads what the
    step before wrote, and overwrites what the step before read."""
    start = torch.randn(257, 2048, dtype=torch.bfloat16, device="cuda")
    weight = torch.rand(2048, dtype=torch.bfloat16, device="cuda") + 0.5
    y, scale = torch_cute_ops.rmsnorm_fp4quant(start, weight, scale_layout="128x4")

    def steps(pause):
        x = start.clone()
        for _ in range(24):
            torch_cute_ops.rmsnorm_fp4quant(x, weight, scale_layout="128x4", out=(y, scale))
            pause()
            torch_cute_ops.fp4_dequantize(y, scale, scale_layout="128x4", out=x)
            pause()
        return x

    want = steps(torch.cuda.synchronize)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = steps(lambda: None)
        graph.replay()
    else:
        got = steps(lambda: None)
    assert_same([got], [want])


@by_op
@pytest.mark.slow
def test_cuda_graph_trees(op):
    """``torch.compile(mode="reduce-overhead")`` captures the op; results of calls do not overwrite each other."""
    if not has_triton():
        pytest.skip("Inductor needs Triton for CUDA graphs")
    torch._dynamo.reset()
    sample = get_sample(op, PLAIN, "cuda")
    program = torch.compile(
        lambda *args, **kw: as_tuple(op.function(*args, **kw)), mode="reduce-overhead", fullgraph=True
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        refill(sample, get_sample(op, PLAIN, "cuda"))
        assert_same(program(*sample.args, **sample.kwargs), run(op, sample))
    torch._dynamo.reset()


# Sizes


@pytest.mark.parametrize(("rows", "width"), [(20_000, 1024), (8192, 4096), (3000, 2880), (300, 16_384), (140, 65_536)])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("op", QUANTISING)
def test_many_rows(op, rows, width, layout):
    """Sizes that fill the GPU several times, against the reference; and rows alone give the same."""
    given = arguments(op, get_sample(op, PLAIN, "cuda"))
    given["input"] = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    if "weight" in given:
        given["weight"] = torch.randn(width, device="cuda")
    given["scale_layout"] = layout
    outputs = as_tuple(overload(op)(**given))
    want = as_tuple(op.reference(**given))
    if "weight" in given:
        assert_fp4_close(outputs[:2], want[:2], NVFP4, SCALE_LAYOUTS[layout])
    else:
        assert all(
            torch.equal(got.view(torch.uint8), t.view(torch.uint8)) for got, t in zip(outputs, want, strict=True)
        )
    if len(outputs) > 2:
        value = given["input"].double()
        exact = value * (value.square().mean(-1, keepdim=True) + given["eps"]).rsqrt() * given["weight"].double()
        assert_norm_close(outputs[2], exact)
    for m in (0, rows // 2, rows - 1):
        alone = as_tuple(overload(op)(**{**given, "input": given["input"][m : m + 1]}))
        assert_same([alone[0], *alone[2:]], [outputs[0][m : m + 1], *(norm[m : m + 1] for norm in outputs[2:])])


@pytest.mark.slow
@pytest.mark.parametrize("op", [OPS["fp4_quantize"], OPS["rmsnorm_fp4quant_with_norm"]], ids=lambda op: op.name)
def test_more_than_2_31_elements(op):
    needs_memory(32)
    rows, width = 65_536 + 5, 32_768
    given = arguments(op, get_sample(op, PLAIN, "cuda"))
    given["input"] = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    if "weight" in given:
        given["weight"] = torch.randn(width, dtype=torch.bfloat16, device="cuda")
    given["scale_layout"] = "linear"
    outputs = as_tuple(overload(op)(**given))
    for m in (0, 32_767, 65_535, rows - 1):
        alone = as_tuple(overload(op)(**{**given, "input": given["input"][m : m + 1].clone()}))
        assert_same(alone, [output[m : m + 1] for output in outputs])


@pytest.mark.slow
def test_dequantize_more_than_2_31_elements():
    needs_memory(32)
    rows, width = 65_536 + 5, 32_768
    y = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0, 0x7F, (rows, width // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    values = torch_cute_ops.fp4_dequantize(y, scale)
    for m in (0, 32_767, 65_535, rows - 1):
        assert_same([torch_cute_ops.fp4_dequantize(y[m : m + 1], scale[m : m + 1])], [values[m : m + 1]])


@pytest.mark.slow
@pytest.mark.parametrize("op", QUANTISING)
def test_rows_further_apart_than_2_31(op):
    """Strides of 2^31 elements and more, read in place."""
    needs_memory(32)
    given = arguments(op, get_sample(op, PLAIN, "cuda"))
    storage = torch.empty(2**32 + 2**31 + 80, dtype=torch.bfloat16, device="cuda")
    rows = storage.as_strided((4, 80), (2**31, 1))
    rows.copy_(torch.randn(4, 80))
    given["input"] = rows
    got = as_tuple(overload(op)(**given))
    assert_same(got, as_tuple(overload(op)(**{**given, "input": rows.contiguous()})))


@by_op
def test_another_device(op):
    """The tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        sample = get_sample(op, PLAIN, "cuda:1")
        given = arguments(op, sample)
        got = run(op, sample)
    assert all(output.device == torch.device("cuda:1") for output in got)
    expected_of(op).assert_results(got, expected_of(op).results(given), given)


def test_strided_rows_are_read_in_place():
    """Rows at a stride of a multiple of 16 bytes take no copy: nothing but the outputs is allocated."""
    rows = torch.randn(64, 8192, dtype=torch.bfloat16, device="cuda")[:, 2048:6144]
    outputs = torch_cute_ops.fp4_quantize(rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch_cute_ops.fp4_quantize(rows, out=outputs)
    assert torch.cuda.max_memory_allocated() == before
