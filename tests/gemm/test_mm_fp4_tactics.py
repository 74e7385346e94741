"""The FP4 products on a GPU: every tactic of every backend, rows, captures, launches behind each other, streams."""

import dataclasses

import pytest
import torch
from expected._fp4_product import results
from support.cases import arguments
from test_mm_fp4 import PRODUCTS, by_op, product_of

import torch_cute_ops
from torch_cute_ops import mm_backends
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import BACKENDS
from torch_cute_ops.testing.samples._fp4_product import POWERS

pytestmark = pytest.mark.gpu

# M, N, K; the result's dtype, whether there is an alpha, and the dtype of activations that are not in FP4
CALLS = [
    (1, 64, 64, torch.float32, False, torch.bfloat16),
    (9, 136, 288, torch.bfloat16, True, torch.float16),
    (65, 384, 1088, torch.float16, True, torch.bfloat16),
    (130, 256, 4096, torch.bfloat16, False, torch.float16),
]
LARGE = (513, 776, 2048, torch.bfloat16, True, torch.bfloat16)
PLAIN = [name for name in BACKENDS if name != "routed"]
TACTICS = [(name, call) for name in PLAIN for call in (*CALLS, *([LARGE] if name == "wgmma" else []))]


def gpu_target(name):
    """The GPU, where the backend can compute there."""
    target = mm_backends.target_of(torch.device("cuda", torch.cuda.current_device()))
    if name == "wgmma" and target.arch.name != "sm_90a":
        pytest.skip("wgmma is of sm_90a")
    return target


def exact_call(op, target, m, n, k, fmt, layout, out_dtype, a_dtype=torch.bfloat16, **kwargs):
    """Arguments whose partial sums are all float32 numbers."""
    samples = PRODUCTS[op.name]
    powers = POWERS[fmt.scale_format]
    given = arguments(
        op, samples.sample("", m, n, k, fmt, layout, target.device, scales=powers, out_dtype=out_dtype, **kwargs)
    )
    if not samples.has_a_scale:
        given["a"] = torch.randint(-8, 9, (m, k), device=target.device).to(a_dtype)
    return given


@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("name", "sizes"), TACTICS, ids=str)
def test_every_tactic(op, fmt, name, sizes):
    """Each tactic gives the sums bit for bit, where they are exact, in an output that was poisoned."""
    m, n, k, out_dtype, has_alpha, a_dtype = sizes
    target = gpu_target(name)
    # wgmma takes linear scales of NVFP4 only; float16 does not hold the numbers of MXFP4.
    layout = "linear" if m % 2 == 0 and (name != "wgmma" or fmt == NVFP4) else "128x4"
    a_dtype = a_dtype if fmt == NVFP4 else torch.bfloat16
    alpha = torch.full((1,), -0.75, device=target.device) if has_alpha else None
    given = exact_call(op, target, m, n, k, fmt, layout, out_dtype, a_dtype, alpha=alpha)
    (want,) = results(given)
    has_a_scale = PRODUCTS[op.name].has_a_scale
    product = dataclasses.replace(
        product_of(k, n, fmt, torch.uint8 if has_a_scale else a_dtype, out_dtype),
        a_layout=SCALE_LAYOUTS[layout] if has_a_scale else None,
        b_layout=SCALE_LAYOUTS[layout],
        has_alpha=has_alpha,
    )
    backend = BACKENDS[name]
    assert backend.reason_unsupported(product, target) is None
    a_scale = given["a_scale"].view(fmt.scale_dtype) if has_a_scale else None
    for tactic in backend.tactics(product, mm_backends.bucket(m), target):
        out = torch.full((m, n), torch.nan, dtype=out_dtype, device=target.device)
        launch = backend.launcher(product, tactic, target)
        launch(given["a"], a_scale, given["b"], given["b_scale"].view(fmt.scale_dtype), alpha, out)
        assert torch.equal(out.cpu(), want), tactic


@by_op
@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_a_row_does_not_depend_on_the_number_of_rows(op, name):
    """On one tactic, with numbers whose sums are rounded; nor does it change from call to call."""
    samples, target = PRODUCTS[op.name], gpu_target(name)
    device = target.device
    sample = samples.sample("", 100, 392, 2560, NVFP4, "128x4", device, out_dtype=torch.float32)
    given = arguments(op, sample)
    product = product_of(2560, 392, NVFP4, torch.uint8 if samples.has_a_scale else torch.bfloat16, torch.float32)
    backend = BACKENDS[name]
    for tactic in backend.tactics(product, 16, target):
        launch = backend.launcher(product, tactic, target)
        every = []
        for rows in (100, 100, 33, 1):
            out = torch.full((rows, 392), torch.nan, device=device)
            # The scales of the first rows come first in each tile of 128.
            launch(given["a"][:rows], given.get("a_scale"), given["b"], given["b_scale"], None, out)
            every.append(out)
        assert torch.equal(every[0], every[1]), tactic
        assert torch.equal(every[0][:33], every[2]) and torch.equal(every[0][:1], every[3]), tactic


@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_the_same_sums_every_time(op, fmt, name):
    """Launch after launch: chunks that are in L2 come soon after they are asked for, and must not come too soon."""
    samples, target = PRODUCTS[op.name], gpu_target(name)
    given = exact_call(op, target, 40, 1296, 2048, fmt, "128x4", torch.float32)
    (want,) = results(given)
    want = want.to(target.device)
    product = product_of(2048, 1296, fmt, torch.uint8 if samples.has_a_scale else torch.bfloat16, torch.float32)
    a_scale = given["a_scale"].view(fmt.scale_dtype) if samples.has_a_scale else None
    operands = given["a"], a_scale, given["b"], given["b_scale"].view(fmt.scale_dtype), None
    backend = BACKENDS[name]
    for tactic in backend.tactics(product, 40, target):
        launch = backend.launcher(product, tactic, target)
        outs = torch.full((100, 40, 1296), torch.nan, device=target.device)
        for out in outs:
            launch(*operands, out)
        wrong = [i for i, out in enumerate(outs) if not torch.equal(out, want)]
        assert not wrong, tactic


@by_op
@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_a_captured_product_serves_other_operands(op, name):
    """A graph gives the sums of what its operands hold when it is replayed, the weight written just before."""
    target = gpu_target(name)
    used, *others = (exact_call(op, target, 24, 776, 1312, NVFP4, "128x4", torch.float32) for _ in range(4))
    tensors = [key for key, value in used.items() if isinstance(value, torch.Tensor)]
    sources = {key: used[key].clone() for key in tensors}
    used["backend"] = name
    op.function(**used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for key in tensors:
            used[key].copy_(sources[key])
        out = op.function(**used)
    for given in others:
        for key in tensors:
            sources[key].copy_(given[key])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.cpu(), results(given)[0])


@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_products_behind_each_other(name):
    """A product's operands may come from the launch before it: another product, or the quantisation of its weight."""
    device = gpu_target(name).device
    weights = torch.randn(6, 512, 512, device=device)
    a = torch.randn(20, 512, device=device, dtype=torch.bfloat16)
    codes, scale = torch_cute_ops.fp4_quantize(weights[0], scale_layout="128x4")

    def chain(between):
        value, every = a, []
        for weight in (*weights, *weights):
            torch_cute_ops.fp4_quantize(weight, scale_layout="128x4", out=(codes, scale))
            between()
            for _ in range(2):
                value = torch_cute_ops.mm_fp4_weight_only(value, codes.t(), scale, backend=name)
                value = value / value.abs().amax()
                between()
                every.append(value)
        return torch.stack(every)

    want = chain(torch.cuda.synchronize)
    assert want.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(lambda: None), want)


@by_op
@pytest.mark.parametrize("name", ["wgmma", "mma_sync"])
def test_products_on_several_streams(op, name):
    """Calls that run at the same time do not meet in a workspace."""
    target = gpu_target(name)
    calls = [exact_call(op, target, 24, 776, 4096, NVFP4, "128x4", torch.float32) | {"backend": name} for _ in range(3)]
    wants = [results(given)[0] for given in calls]
    op.function(**calls[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    outs = [[] for _ in calls]
    for _ in range(10):
        for given, stream, every in zip(calls, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                every.append(op.function(**given))
    torch.cuda.synchronize()
    for every, want in zip(outs, wants, strict=True):
        assert all(torch.equal(out.cpu(), want) for out in every)
