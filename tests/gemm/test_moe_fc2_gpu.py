"""GEMMs that sum over experts on a GPU: every tactic, consecutive launches, captures with another routing."""

import pytest
import torch
from expected._moe_fc2 import results
from samples._moe_fc2 import dense_alpha, one_expert_alpha, top_alpha
from support.cases import arguments, named
from support.gemm_problems import backend_for
from support.routings import SKEWED, hot_alpha, powers, zipf_alpha
from test_fp4_gemm_gpu import check_first_rows
from test_moe_fc2 import SAMPLES, by_format, by_op, integer_call

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.select import target_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
by_backend = pytest.mark.parametrize("name", ["routed", "wgmma", "tcgen05"])

# (M, N, experts, width of an expert, routings): sizes around the boundaries of buckets and tiles, with a partial tile
# in every dimension
CALLS = [
    (1, 8, 1, 128, dense_alpha),
    (8, 200, 9, 256, top_alpha, zipf_alpha),
    (9, 72, 40, 128, top_alpha, SKEWED["zipf-of-16"]),
    (15, 136, 3, 384, dense_alpha),
    (17, 64, 512, 128, top_alpha),
    (33, 1160, 5, 512, one_expert_alpha, hot_alpha),
    (64, 72, 6, 640, dense_alpha),
    (129, 200, 16, 256, top_alpha, SKEWED["hot-of-16"], SKEWED["top-1"]),
    (257, 136, 7, 256, top_alpha, zipf_alpha),
    (513, 64, 4, 768, dense_alpha),
    (513, 72, 5, 640, top_alpha),
]


def prepared(op, name, m, n, experts, width, route, fmt, layout):
    """Return operands with exact sums and NaN in skipped activations, the expected result, the problem and the
    device."""
    device = gpu_target(op, name).device
    alpha = powers(route(m, experts, device)).t().contiguous().t()
    given = integer_call(op, m, n, experts, width, fmt, layout, device, alpha=alpha)
    has_a_scale = SAMPLES[op.name].has_a_scale
    if not has_a_scale:
        given["a"].view(m, experts, width)[alpha == 0] = torch.nan
    problem, operands = operands_of(op, given)
    return operands, results(given)[0], problem, device


def operands_of(op, given):
    """Return the problem of a call, and its operands as backends expect them."""
    sample = named(op, given)
    problem = op.path.problem(op.bind(*sample.args, **sample.kwargs))
    dtype = problem.b.format.scale_dtype
    a_scale = None if given.get("a_scale") is None else given["a_scale"].view(dtype)
    return problem, Operands(given["a"], given["w"], a_scale, given["w_scale"].view(dtype), given["alpha"])


def gpu_target(op, name):
    """Return the current GPU's target, or skip the test if the backend does not support it."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if name == "tcgen05":
        if not (target.arch.has_tcgen05 and SAMPLES[op.name].has_a_scale):
            pytest.skip("needs data-center Blackwell's tcgen05, and both operands in FP4")
    elif name == "wgmma" and not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    return target


@pytest.mark.slow
@by_op
@by_format
@by_backend
@pytest.mark.parametrize("sizes", CALLS, ids=lambda sizes: "-".join(map(str, sizes[:4])))
def test_every_tactic(op, fmt, name, sizes):
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned outputs with exactly these
    sums, in consecutive launches."""
    (m, _, _, width), routes = sizes[:4], sizes[4:]
    if name == "wgmma" and width % 256:
        return
    layout = "linear" if fmt == NVFP4 and width % 256 == 0 else "128x4"
    for route in routes:
        operands, want, problem, device = prepared(op, name, *sizes[:4], route, fmt, layout)
        target, backend = gpu_target(op, name), backend_for(name, problem)
        assert backend.reason_unsupported(problem, target) is None
        tactics = backend.tactics(problem, bucket(m), target)
        assert tactics
        for tactic in tactics:
            launch = backend.launcher(problem, tactic, target)
            for _ in range(5):
                out = torch.full(want.shape, torch.nan, device=device)
                launch(operands, out)
                assert torch.equal(out.cpu(), want), (route, tactic)


@by_op
@by_backend
def test_rows_do_not_depend_on_others(op, name):
    """Check that each tactic gives a row the same rounded sums alone, among other rows, and in a second call."""
    samples, target = SAMPLES[op.name], gpu_target(op, name)
    device = target.device
    alpha = top_alpha(100, 24, device, 6)
    sample = samples.sample("", 100, 200, 24 * 256, NVFP4, "128x4", device, alpha=alpha, out_dtype=torch.float32)
    problem, operands = operands_of(op, arguments(op, sample))
    backend = backend_for(name, problem)
    for tactic in backend.tactics(problem, 100, target):
        launch = backend.launcher(problem, tactic, target)

        def of_rows(rows, out, launch=launch):
            # The scales of the first rows are the first bytes of each tile of 128 rows.
            launch(operands._replace(a=operands.a[:rows], alpha=alpha[:rows]), out)

        check_first_rows(of_rows, 200, device, tactic)


@by_op
@by_backend
def test_a_captured_call_serves_other_routings(op, name):
    """Check that a graph replay uses the current ``alpha`` and operands."""
    (a, w, a_scale, w_scale, alpha, *_), *_ = prepared(op, name, 40, 136, 12, 256, top_alpha, NVFP4, "128x4")
    kwargs = {"out_dtype": torch.float32, "backend": name}
    args = (a, w, *(() if a_scale is None else (a_scale,)), w_scale, alpha)
    op.function(*args, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.function(*args, **kwargs)
    routes = dense_alpha, one_expert_alpha, top_alpha, zipf_alpha, hot_alpha
    for route in (*routes, lambda m, e, d: torch.zeros(m, e, device=d)):
        others, want, *_ = prepared(op, name, 40, 136, 12, 256, route, NVFP4, "128x4")
        for mine, other in zip((a, w, a_scale, w_scale, alpha), others, strict=False):
            if mine is not None:
                mine.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.cpu(), want)
