"""A gate in front of a GEMM on a GPU: the bits of two ops, by every tactic, and in chains of overlapping launches."""

from dataclasses import replace

import pytest
import torch

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends.input_first import APART
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.registry import OPS
from torch_cute_ops.testing.samples import silu_mul_mm_fp4_weight_only

pytestmark = pytest.mark.gpu

OP = OPS["silu_mul_mm_fp4_weight_only"]
GEMM = torch_cute_ops.mm_fp4_weight_only


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def call(m, n, k, fmt, dtype, layout="128x4", **kwargs):
    """Arguments of the op, by position."""
    return silu_mul_mm_fp4_weight_only.SAMPLES.sample("", m, n, k, fmt, layout, device(), dtype=dtype, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "dtype"), [(NVFP4, torch.bfloat16), (NVFP4, torch.float16), (MXFP4, torch.float16)])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 264, 2080), (8, 1000, 4640), (9, 136, 288), (33, 328, 800), (130, 256, 4096)]
)
def test_every_tactic(fmt, dtype, m, n, k):
    """In one launch and in two, with the weight static or not: the bits of ``silu_mul``, and of the GEMM without the
    gate by the same tactic."""
    sample = call(m, n, k, fmt, dtype)
    a, b, b_scale = sample.args
    rows = torch_cute_ops.silu_mul(a)
    target = select.target_of(device())
    scale = b_scale.view(fmt.scale_dtype)
    for static in (False, True):
        problem = replace(OP.path.problem(OP.bind(*sample.args, **sample.kwargs)), static_weight=static)
        plain = replace(problem, gates_input=False)
        compared = 0
        for name, backend in select.candidates(problem).items():
            if name == "reference" or backend.reason_unsupported(problem, target) is not None:
                continue
            for tactic in backend.tactics(problem, bucket(m), target):
                own = tactic[1:] if tactic[:1] == (APART,) else tactic
                got, want = (torch.full((m, n), torch.nan, dtype=dtype, device=device()) for _ in range(2))
                backend.launcher(problem, tactic, target)(a, b, None, scale, None, None, None, None, got)
                select.candidates(plain)[name].launcher(plain, own, target)(
                    *(rows, b, None, scale, None, None, None, None), want
                )
                assert torch.equal(got, want), (name, tactic)
                compared += 1
        assert compared > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("static", [False, True])
def test_a_chain_gives_the_same_every_time(m, static, dtype):
    """A norm, the projection of gate and up, and the gate and the one of down, whose operand the launch before has just
    written: captured, with data that stays in L2, and with other rows in each replay."""
    hidden, width, layers = 512, 1536, 4
    both = [call(1, 2 * width, hidden, NVFP4, dtype).args[1:] for _ in range(layers)]
    down = [call(1, hidden, width, NVFP4, dtype).args[1:] for _ in range(layers)]
    alpha, weight = torch.full((1,), 2.0**-6, device=device()), torch.ones(hidden, dtype=dtype, device=device())

    def chain(x, behind_each=lambda: None):
        for up, last in zip(both, down, strict=True):
            rows = GEMM(torch_cute_ops.rmsnorm(x, weight), *up, alpha, static_weight=static)
            behind_each()
            x = torch_cute_ops.silu_mul_mm_fp4_weight_only(rows, *last, alpha, static_weight=static)
            behind_each()
        return x

    inputs = [torch.randn(m, hidden, dtype=dtype, device=device()) for _ in range(8)]
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


def test_one_row_is_one_launch():
    """Where the GPU has a kernel for it, and the model chooses."""
    if not select.target_of(device()).arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    sample = call(1, 4096, 14336, NVFP4, torch.bfloat16)
    got = OP.function(*sample.args, **sample.kwargs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        OP.function(*sample.args, **sample.kwargs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if "cutlass" in name]) == 1, names
    want = GEMM(torch_cute_ops.silu_mul(sample.args[0]), *sample.args[1:])
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-6, atol=want.float().abs().max().item() * 2**-7)
