"""The products over experts on a GPU: every tactic, launches behind each other, captures with another routing."""

import dataclasses

import pytest
import torch
from expected._moe_fc2 import results
from test_moe_fc2_fp4 import PRODUCTS, by_format, by_op, integer_call, product_of

from torch_cute_ops import mm_backends
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import BACKENDS
from torch_cute_ops.testing.samples._moe_fc2 import dense_alpha, one_expert_alpha, top_alpha

pytestmark = pytest.mark.gpu
by_backend = pytest.mark.parametrize("name", ["routed", "wgmma"])

# M, N, experts, their width, and how tokens are routed: around every bucket's and tile's boundary, with tails of all
CALLS = [
    (1, 8, 1, 128, dense_alpha),
    (8, 200, 9, 256, top_alpha),
    (9, 72, 40, 128, top_alpha),
    (15, 136, 3, 384, dense_alpha),
    (17, 64, 512, 128, top_alpha),
    (33, 1160, 5, 512, one_expert_alpha),
    (64, 72, 6, 640, dense_alpha),
    (129, 200, 16, 256, top_alpha),
    (257, 136, 7, 256, top_alpha),
    (513, 64, 4, 768, dense_alpha),
    (513, 72, 5, 640, top_alpha),
]


def powers(alpha):
    """Factors that are powers of two, where they are not zero."""
    return torch.where(alpha == 0, alpha, torch.exp2(torch.randint_like(alpha, -2, 3)))


def prepared(op, m, n, experts, width, route, fmt, layout):
    """Operands of a call whose sums are exact, poison where nothing is computed; what they give; and the product."""
    device = torch.device("cuda", torch.cuda.current_device())
    alpha = powers(route(m, experts, device)).t().contiguous().t()
    given = integer_call(op, m, n, experts, width, fmt, layout, device, alpha=alpha)
    has_a_scale = PRODUCTS[op.name].has_a_scale
    if not has_a_scale:
        given["a"].view(m, experts, width)[alpha == 0] = torch.nan
    product = dataclasses.replace(
        product_of(experts, torch.uint8 if has_a_scale else given["a"].dtype, n, width, torch.float32),
        fmt=fmt,
        a_layout=SCALE_LAYOUTS[layout] if has_a_scale else None,
        b_layout=SCALE_LAYOUTS[layout],
    )
    a_scale = given["a_scale"].view(fmt.scale_dtype) if has_a_scale else None
    operands = given["a"], a_scale, given["w"].t(), given["w_scale"].view(fmt.scale_dtype), alpha
    return operands, results(given)[0], product, device


def target_of(device):
    target = mm_backends.target_of(device)
    if target.arch.name != "sm_90a":
        pytest.skip("these backends are of sm_90a")
    return target


@by_op
@by_format
@by_backend
@pytest.mark.parametrize("sizes", CALLS, ids=lambda sizes: "-".join(map(str, sizes[:4])))
def test_every_tactic(op, fmt, name, sizes):
    """Each gives the sums bit for bit, in an output that was poisoned, launch after launch."""
    width = sizes[3]
    if name == "wgmma" and width % 256:
        return
    layout = "linear" if fmt == NVFP4 and width % 256 == 0 else "128x4"
    operands, want, product, device = prepared(op, *sizes, fmt, layout)
    target, backend = target_of(device), BACKENDS[name]
    assert backend.reason_unsupported(product, target) is None
    tactics = backend.tactics(product, mm_backends.bucket(sizes[0]), target)
    assert tactics
    for tactic in tactics:
        launch = backend.launcher(product, tactic, target)
        for _ in range(5):
            out = torch.full(want.shape, torch.nan, device=device)
            launch(*operands, out)
            assert torch.equal(out.cpu(), want), tactic


@by_op
@by_backend
def test_rows_do_not_depend_on_others(op, name):
    """On one tactic, with sums that are rounded; nor do they change from call to call."""
    samples, device = PRODUCTS[op.name], torch.device("cuda", torch.cuda.current_device())
    alpha = top_alpha(100, 24, device, 6)
    sample = samples.sample("", 100, 200, 24 * 256, NVFP4, "128x4", device, alpha=alpha, out_dtype=torch.float32)
    target = target_of(device)
    a, w, *scales = sample.args
    a_scale, w_scale = scales if samples.has_a_scale else (None, scales[0])
    product = product_of(24, torch.uint8 if samples.has_a_scale else a.dtype, 200, 256, torch.float32)
    for tactic in BACKENDS[name].tactics(product, 100, target):
        launch = BACKENDS[name].launcher(product, tactic, target)
        every = []
        for rows in (100, 100, 33, 1):
            out = torch.full((rows, 200), torch.nan, device=device)
            # The scales of the first rows come first in each tile of 128.
            launch(a[:rows], a_scale, w.t(), w_scale, alpha[:rows], out)
            every.append(out)
        assert torch.equal(every[0], every[1]), tactic
        assert torch.equal(every[0][:33], every[2]) and torch.equal(every[0][:1], every[3]), tactic


@by_op
@by_backend
def test_a_captured_call_serves_other_routings(op, name):
    """A graph gives what ``alpha`` and the operands hold when it is replayed."""
    (a, a_scale, w, w_scale, alpha), _, _, device = prepared(op, 40, 136, 12, 256, top_alpha, NVFP4, "128x4")
    target_of(device)
    kwargs = {"out_dtype": torch.float32, "backend": name}
    args = (a, w.t(), *(() if a_scale is None else (a_scale,)), w_scale, alpha)
    op.function(*args, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.function(*args, **kwargs)
    for route in (dense_alpha, one_expert_alpha, top_alpha, lambda m, e, d: torch.zeros(m, e, device=d)):
        others, want, *_ = prepared(op, 40, 136, 12, 256, route, NVFP4, "128x4")
        for mine, other in zip((a, a_scale, w, w_scale, alpha), others, strict=True):
            if mine is not None:
                mine.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.cpu(), want)
