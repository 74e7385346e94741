"""Expert GEMMs with a gate on a GPU: every tactic, consecutive launches, captures with another routing."""

import itertools

import pytest
import torch
from expected import assert_same
from samples._moe_fc2 import dense_alpha, one_expert_alpha, top_alpha
from support.cases import defined, named, poisoned, run
from support.gemm_problems import backend_for
from support.routings import SKEWED, hot_alpha, zipf_alpha
from test_moe_fc1 import by_op, cancelling_call, exact_results, linear_call

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import to_linear
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.select import target_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

# (M, experts, width of an expert, K, routings): sizes around the boundaries of buckets and tiles, with a partial tile
# in every dimension
CALLS = [
    (1, 1, 64, 256, dense_alpha),
    (8, 9, 256, 1024, top_alpha, zipf_alpha),
    (9, 40, 64, 288, top_alpha, SKEWED["zipf-of-16"]),
    (17, 512, 64, 512, top_alpha),
    (33, 5, 320, 2048, one_expert_alpha, hot_alpha),
    (64, 6, 64, 320, dense_alpha),
    (129, 16, 128, 1280, top_alpha, SKEWED["hot-of-16"], SKEWED["top-1"]),
    (513, 4, 192, 768, top_alpha, zipf_alpha),
]
KINDS = list(itertools.product((NVFP4, MXFP4), ("gate", "up"))) * 2
"""Format of the weight, and the half of the weight on which the results depend, for successive calls."""


def gpu_target():
    """Return the current GPU's target."""
    return target_of(torch.device("cuda", torch.cuda.current_device()))


def operands_of(op, given):
    """Return the problem of a call, and its operands as backends expect them."""
    sample = named(op, given)
    problem = op.path.problem(op.bind(*sample.args, **sample.kwargs))
    dtype = problem.b.format.scale_dtype
    a_scale = None if given.get("a_scale") is None else given["a_scale"].view(dtype)
    scales = a_scale, given["w_scale"].view(dtype)
    return problem, GatedOperands(
        given["a"], given["w"], *scales, given["alpha"], given["bias"], given["routing"], global_scale=None
    )


@pytest.mark.slow
@by_op
@pytest.mark.parametrize(
    ("fmt", "half", "sizes"),
    [(*kind, sizes) for kind, sizes in zip(KINDS, CALLS, strict=True)],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, tuple) else "-".join(map(str, value[:4])),
)
def test_every_tactic(op, fmt, half, sizes):
    """Use inputs whose results are exact, and check that every tactic overwrites the poisoned outputs with these
    results, in consecutive launches on data in L2."""
    target = gpu_target()
    shape, routes = sizes[:4], sizes[4:]
    for route in routes:
        given, value = linear_call(op, half, fmt, "128x4", target.device, shape, route)
        sample, want = named(op, given), exact_results(given, value)
        problem, operands = operands_of(op, given)
        backend = backend_for("routed", problem)
        assert backend.reason_unsupported(problem, target) is None
        tactics = backend.tactics(problem, bucket(shape[0]), target)
        assert tactics
        like = run(op, sample)
        for tactic in tactics:
            launch = backend.launcher(problem, tactic, target)
            for _ in range(20 // len(routes)):
                outputs = poisoned(like)
                launch(operands, outputs if len(outputs) == 2 else (*outputs, None))
                assert_same(defined(op, sample, outputs), want)


@by_op
def test_rows_do_not_depend_on_others(op):
    """Check that each tactic gives a row the same bits alone, among other rows, and in a second call.

    The sums are rounded, so tactics that add in another order give other bits. The sizes are the same as in
    ``test_every_tactic``, so that no other kernels are compiled.
    """
    target = gpu_target()
    m, experts, width, k = CALLS[6][:4]
    given = cancelling_call(op, target.device, m, experts, width, k, MXFP4, "128x4", hot_alpha)
    problem, operands = operands_of(op, given)
    a_scale = operands.a_scale
    backend = backend_for("routed", problem)
    like, layout = run(op, named(op, given)), SCALE_LAYOUTS["128x4"]
    sums = set()
    for tactic in backend.tactics(problem, bucket(m), target):
        launch = backend.launcher(problem, tactic, target)
        every = []
        for rows in (m, m, 33, 1):
            # The scales of the first rows are in the first scale tile.
            tiles = -(-rows // layout.tile_rows)
            outputs = poisoned([like[0][:rows], *(scale[:tiles] for scale in like[1:])])
            first = operands._replace(
                a=operands.a[:rows],
                a_scale=None if a_scale is None else a_scale[:tiles],
                routing=operands.routing[:rows],
            )
            launch(first, outputs if len(outputs) == 2 else (*outputs, None))
            y, *scales = (output.view(torch.uint8) for output in outputs)
            every.append([y, *(to_linear(scale, layout, rows, experts * width // 32) for scale in scales)])
        for whole, again, some, one in zip(*every, strict=True):
            assert torch.equal(whole, again), tactic
            assert torch.equal(whole[:33], some) and torch.equal(whole[:1], one), tactic
        sums.add(b"".join(each.cpu().numpy().tobytes() for each in every[0]))
    assert len(sums) > 1


@by_op
def test_a_captured_call_serves_other_routings(op):
    """Check that a graph replay uses the current routing and operands."""
    target, shape = gpu_target(), (40, 12, 128, 512)
    mine, _ = linear_call(op, "up", NVFP4, "128x4", target.device, shape)
    op.function(**mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.function(**mine)
    out = out if isinstance(out, tuple) else (out,)
    routes = dense_alpha, one_expert_alpha, top_alpha, zipf_alpha, hot_alpha
    for route in (*routes, lambda m, e, d: torch.zeros(m, e, device=d)):
        other, value = linear_call(op, "up", NVFP4, "128x4", target.device, shape, route)
        for name, tensor in mine.items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(other[name])
        for tensor, poison in zip(out, poisoned(out), strict=True):
            tensor.copy_(poison)
        graph.replay()
        assert_same(defined(op, named(op, mine), out), exact_results(mine, value))
