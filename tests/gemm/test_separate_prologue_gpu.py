"""GEMMs whose prologue is a gate or a quantisation, on a GPU: every tactic compared with two ops, and overlapping
launches."""

import importlib
from dataclasses import replace

import pytest
import torch

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends.separate_prologue import SEPARATE
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.registry import OPS

pytestmark = pytest.mark.gpu

GATE, QUANTISE, BOTH = "silu_mul_mm_fp4_weight_only", "fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4"
by_op = pytest.mark.parametrize("name", [GATE, QUANTISE, BOTH])


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def call(name, m, n, k, fmt, dtype, layout="128x4", **kwargs):
    """Return a sample of an op with positional arguments."""
    samples = importlib.import_module(f"samples.{name}").SAMPLES
    return samples.sample("", m, n, k, fmt, layout, device(), dtype=dtype, **kwargs)


def activations(name, rows, fmt, layout, global_scale, gate="silu"):
    """Compute the activations with the op that is the prologue, and their scales if they are FP4."""
    if name == GATE:
        return torch_cute_ops.silu_mul(rows, gate=gate), None
    named = {"block_size": fmt.block_size, "scale_layout": layout}
    if name == QUANTISE:
        codes, scale = torch_cute_ops.fp4_quantize(rows, global_scale, **named)
    else:
        codes, scale = torch_cute_ops.silu_mul_fp4quant(rows, global_scale, **named, gate=gate)
    return codes, scale.view(fmt.scale_dtype)


def some(tactics, step):
    """Return every ``step``-th tactic with one launch, and fewer tactics with two launches, whose kernels other tests
    cover."""
    one, two = ([each for each in tactics if (each[:1] == (SEPARATE,)) == apart] for apart in (False, True))
    return [*one[::step], *two[:: max(step, 4)]]


SIZES = [(1, 264, 2080), (8, 1000, 4640), (130, 256, 1056)]
SIZES_OF_A_GATE = [(9, 136, 288), (33, 328, 800)]


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "dtype"), [(NVFP4, torch.bfloat16), (NVFP4, torch.float16), (MXFP4, torch.float16)])
@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        *((name, *sizes) for name in (GATE, QUANTISE, BOTH) for sizes in SIZES),
        *((GATE, *sizes) for sizes in SIZES_OF_A_GATE),
    ],
)
def test_every_tactic(fmt, dtype, name, m, n, k):
    """Check that each tactic, in one launch or two, gives the same bits as two ops whose GEMM uses the same tactic.

    A selection of tactics also runs with a static weight, and with linear scales and a global scale.
    """
    op, target = OPS[name], select.target_of(device())
    # Linear scales require whole k tiles.
    forms = [("128x4", k, False, 1), ("128x4", k, True, 4), ("linear", k // 256 * 256, False, 4)]
    for layout, width, static, step in forms if m <= 64 else [("128x4", k, False, 8)]:
        if layout == "linear" and fmt == MXFP4:
            continue
        sample = call(name, m, n, width, fmt, dtype, layout)
        rows, b, b_scale = sample.args
        scale, g = b_scale.view(fmt.scale_dtype), None
        if layout == "linear" and name != GATE:
            g = torch.full((1,), 3.7, device=device())
        a, a_scale = activations(name, rows, fmt, layout, g)
        problem = op.path.problem(op.bind(*sample.args, *([] if g is None else [g]), **sample.kwargs))
        problem, compared = replace(problem, static_weight=static), 0
        plain = problem.without_prologue
        for which, backend in select.candidates(problem).items():
            if which == "reference" or backend.reason_unsupported(problem, target) is not None:
                continue
            for tactic in some(backend.tactics(problem, bucket(m), target), step):
                _, own = backend._multiplied(problem, tactic)
                got, want = (torch.full((m, n), torch.nan, dtype=dtype, device=device()) for _ in range(2))
                backend.launcher(problem, tactic, target)(Operands(rows, b, g, scale), got)
                launch = select.candidates(plain)[which].launcher(plain, own, target)
                launch(Operands(a, b, a_scale, scale), want)
                assert torch.equal(got, want) and want.isfinite().all(), (which, tactic)
                compared += 1
        assert compared > 3


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["gelu_tanh", "gelu", "relu2"])
@pytest.mark.parametrize(("fmt", "dtype"), [(NVFP4, torch.bfloat16), (MXFP4, torch.float16)])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("name", [GATE, BOTH])
def test_tactics_with_other_gates(name, m, n, k, fmt, dtype, gate):
    """Check that a selection of tactics gives the same bits with other gates than SiLU as two ops whose GEMM uses the
    same tactic."""
    op, target = OPS[name], select.target_of(device())
    sample = call(name, m, n, k, fmt, dtype, gate=gate)
    rows, b, b_scale = sample.args
    scale, (a, a_scale) = b_scale.view(fmt.scale_dtype), activations(name, rows, fmt, "128x4", None, gate)
    problem = op.path.problem(op.bind(*sample.args, **sample.kwargs))
    assert problem.prologue_gate == gate
    plain, compared = problem.without_prologue, 0
    for which, backend in select.candidates(problem).items():
        if which == "reference" or backend.reason_unsupported(problem, target) is not None:
            continue
        for tactic in some(backend.tactics(problem, bucket(m), target), 4):
            _, own = backend._multiplied(problem, tactic)
            got, want = (torch.full((m, n), torch.nan, dtype=dtype, device=device()) for _ in range(2))
            backend.launcher(problem, tactic, target)(Operands(rows, b, None, scale), got)
            launch = select.candidates(plain)[which].launcher(plain, own, target)
            launch(Operands(a, b, a_scale, scale), want)
            assert torch.equal(got, want) and want.isfinite().all() and want.any(), (which, tactic)
            compared += 1
    assert compared > 3


def layer_of(name, dtype, static):
    """Return a layer that consists of a norm and two projections. The op computes the second projection.

    The layer is a function of the rows and of a callback that runs after each launch.
    """
    hidden, width = 512, 1536
    norm_weight = torch.ones(hidden, dtype=dtype, device=device())
    alpha, g = torch.full((1,), 2.0**-6, device=device()), torch.full((1,), 2.0, device=device())
    given = {"alpha": alpha, "static_weight": static}

    def weight(n, k):
        return call(GATE, 1, n, k, NVFP4, dtype).args[1:]

    def normed(x, weights, behind_each):
        """Compute the RMSNorm and the first projection, whose activations have the same format as the activations of
        the op."""
        if name == BOTH:
            a, a_scale = torch_cute_ops.rmsnorm_fp4quant(x, norm_weight, g)
            behind_each()
            return torch_cute_ops.mm_fp4(a, weights[0], a_scale, weights[1], out_dtype=dtype, **given)
        x = torch_cute_ops.rmsnorm(x, norm_weight)
        behind_each()
        if name == GATE:
            return torch_cute_ops.mm_fp4_weight_only(x, *weights, **given)
        return torch_cute_ops.fp4quant_mm_fp4(x, *weights, g, **given)

    first, second = weight(width * (1 if name == QUANTISE else 2), hidden), weight(hidden, width)
    scale = () if name == GATE else (g,)

    def layer(x, behind_each):
        rows = normed(x, first, behind_each)
        behind_each()
        x = OPS[name].function(rows, *second, *scale, **given)
        behind_each()
        return x

    return layer


@by_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("static", [False, True])
def test_a_chain_gives_the_same_every_time(name, m, static, dtype):
    """Check chains of layers in a captured graph, in which each op reads rows that the previous launch has just
    written.

    The data stays in L2, so that launches overlap as much as possible. Each replay uses other rows.
    """
    layers = [layer_of(name, dtype, static) for _ in range(4)]

    def chain(x, behind_each=lambda: None):
        for layer in layers:
            x = layer(x, behind_each)
        return x

    inputs = [torch.randn(m, 512, dtype=dtype, device=device()) for _ in range(8)]
    want = [chain(x, torch.cuda.synchronize) for x in inputs]
    assert all(each.isfinite().all() and each.any() for each in want)
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    for i in range(2000):
        x.copy_(inputs[i % 8])
        graph.replay()
        wrong += (got != want[i % 8]).sum()
    assert wrong.item() == 0


@by_op
def test_one_row_is_one_launch(name):
    """Check that, for one row on GPUs with wgmma, the cost model chooses a single launch."""
    if not select.target_of(device()).arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    k = 4096 if name == QUANTISE else 14336
    sample = call(name, 1, 4096, k, NVFP4, torch.bfloat16)
    op = OPS[name]
    got = op.function(*sample.args, **sample.kwargs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op.function(*sample.args, **sample.kwargs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([each for each in names if "cutlass" in each]) == 1, names
    rows, b, b_scale = sample.args
    a, a_scale = activations(name, rows, NVFP4, "128x4", None)
    if name == GATE:
        want = torch_cute_ops.mm_fp4_weight_only(a, b, b_scale)
    else:
        want = torch_cute_ops.mm_fp4(a, b, a_scale, b_scale)
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=want.float().abs().max().item() * 2**-7)
