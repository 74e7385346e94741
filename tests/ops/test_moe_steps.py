"""Ops before and after the GEMMs of an expert layer, called one after another: each op gets the results of the previous
op."""

import pytest
import torch
from expected import assert_same
from support.cases import defined, named
from torch.testing import assert_close

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    pytest.param({"alignment": 128}, id="contiguous"),
    pytest.param({"alignment": 8}, id="contiguous-8"),
    pytest.param({"alignment": 1}, id="packed"),
    pytest.param({"max_rows": 64}, id="masked"),
]
TOPK = 4


def logits_of(kind, m, experts, device):
    logits = torch.randn(m, experts, device=device)
    if kind == "one-expert":
        logits[:, -TOPK:] += 100
    if kind == "first-experts":
        logits[:, : experts // 2] += 100
    return logits


def whole_rows(m, width, device):
    """Return rows of small integers with a 448 in each block of 128, so that FP8 scales are 1 and codes are exact."""
    rows = torch.randint(-8, 9, (m, width), device=device).float()
    rows[:, ::128] = 448
    return rows.bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["random", "one-expert", "first-experts"])
@pytest.mark.parametrize("m", [0, 1, 50, 129])
def test_there_and_back(kind, m, layout, device):
    """Check that permuting tokens to the experts' order and back returns the tokens bit for bit, whatever the padding
    contains."""
    experts = 24
    _, ids, expanded, permuted, offsets, counts = torch_cute_ops.moe_route(
        logits_of(kind, m, experts, device), TOPK, **layout
    )
    x = whole_rows(m, 384, device)
    y, scale = torch_cute_ops.moe_permute_fp8quant(x, permuted, TOPK, expanded)
    rows = torch.where(permuted[:, None] < 0, torch.nan, y.float() * scale.repeat_interleave(128, 1))
    quarter = torch.full((m, TOPK), 0.25, device=device)
    # Each dropped pair removes one quarter of the result.
    kept = (expanded >= 0).float().mean(1, keepdim=True)
    assert torch.equal(torch_cute_ops.moe_finalize(rows, expanded, quarter), x.float() * kept)
    back = torch_cute_ops.moe_finalize(rows.bfloat16(), expanded, quarter, x)
    assert torch.equal(back, (x.float() * (1 + kept)).bfloat16())
    # The rows of each expert are its tokens, in the order of the tokens.
    for expert in range(experts):
        begin, count = int(offsets[expert]), int(counts[expert])
        tokens = permuted[begin : begin + count] // TOPK
        chosen = (ids == expert).any(1).nonzero()[:, 0]
        assert torch.equal(tokens, chosen[: layout.get("max_rows")].to(torch.int32))
    assert int((permuted >= 0).sum()) == int(counts.sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [0, 1, 50, 129, 600])
def test_order_of_given_ids(m, layout, device):
    """Check that, for the ids that ``moe_route`` chose, ``moe_route_ids`` gives the same order, and that pairs without
    an expert do not change the order of other pairs."""
    logits = torch.randn(m, 24, device=device)
    _, ids, *order = torch_cute_ops.moe_route(logits, TOPK, **layout)
    assert_same(torch_cute_ops.moe_route_ids(ids, 24, **layout), order)
    # Experts from 12 on are on another rank.
    lower = torch.where(ids < 12, ids, -1)
    rows, pairs, offsets, counts = torch_cute_ops.moe_route_ids(lower, 12, **layout)
    assert torch.equal(counts, order[3][:12]) and torch.equal(rows >= 0, (lower >= 0) & (order[0] >= 0))
    assert torch.equal(rows[rows >= 0], order[0][rows >= 0])
    used = pairs[pairs >= 0]
    assert torch.equal(used, order[1][order[1] >= 0][: len(used)]) and torch.equal(offsets, order[2][:13])


@pytest.mark.parametrize("m", [0, 1, 50, 129])
@pytest.mark.parametrize("scoring", [{}, {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2}])
def test_weights_as_a_matrix(m, scoring, device):
    """Check that the matrix contains the weights of ``moe_route``, bit for bit, times each expert's factor."""
    logits, factor = torch.randn(m, 24, device=device), torch.randn(24, device=device)
    given = {**scoring, "scaling_factor": 2.5}
    weights, ids, *_ = torch_cute_ops.moe_route(logits, TOPK, **given)
    want = torch.zeros(m, 24, device=device).scatter_(1, ids.long(), weights)
    assert torch.equal(torch_cute_ops.moe_route_dense(logits, TOPK, **given), want)
    want = torch.zeros(m, 24, device=device).scatter_(1, ids.long(), weights * factor[ids.long()])
    assert torch.equal(torch_cute_ops.moe_route_dense(logits, TOPK, **given, expert_factor=factor), want)


@pytest.mark.parametrize("m", [0, 7, 130])
def test_inverse(m, device):
    """Check that the op computes the row of each pair from the pair of each row if the caller does not pass it."""
    route = torch_cute_ops.moe_route(torch.randn(m, 20, device=device), TOPK, max_rows=30)
    x = torch.randn(m, 256, device=device)
    given = {"input": x, "permuted_to_expanded": route[3], "topk": TOPK}
    op = OPS["moe_permute_fp8quant"]
    results = [
        defined(op, named(op, given), torch_cute_ops.moe_permute_fp8quant(**given, expanded_to_permuted=inverse))
        for inverse in (route[2], None)
    ]
    assert_same(*results)


def test_result_must_not_overlap_rows(device):
    """Check that the result must not overlap rows that are still to be read, but may replace the residual."""
    rows, residual = torch.randn(12, 64, device=device), torch.randn(4, 64, device=device)
    index = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    given = rows, index, torch.rand(4, 2, device=device), residual
    want = torch_cute_ops.moe_finalize(*given)
    for out in (rows[:4], rows[8:]):
        with pytest.raises(ValueError, match="cute::moe_finalize: out shares memory with input"):
            torch_cute_ops.moe_finalize(*given, out=out)
    assert torch_cute_ops.moe_finalize(*given, out=residual) is residual
    assert torch.equal(residual, want)


def test_indices_out_of_range_on_a_cpu():
    """Check that indices out of range are refused by name and nothing is written, and that the last index and -1 are
    accepted."""
    rows, weights = torch.randn(12, 64), torch.ones(4, 2)
    pairs, places = torch.arange(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32).view(4, 2)

    def with_index(tensor, index):
        changed = tensor.clone()
        changed.view(-1)[3] = index
        return changed

    def finalize(index, out=None):
        torch_cute_ops.moe_finalize(rows, with_index(places, index), weights, out=out)

    def permute(pair=3, place=3, out=None):
        torch_cute_ops.moe_permute_fp8quant(rows[:4], with_index(pairs, pair), 2, with_index(places, place), out=out)

    for good in (-1, 7):
        permute(pair=good)
        permute(place=good)
    finalize(11)
    finalize(-1)
    sums, copies = torch.zeros(4, 64), (torch.zeros(8, 64, dtype=torch.float8_e4m3fn), torch.zeros(8, 1))
    for bad in (12, 2**31 - 1, -2, -(2**31)):
        for out in (None, sums):
            with pytest.raises(ValueError, match=f"cute::moe_finalize: expanded_to_permuted holds {bad}, out of range"):
                finalize(bad, out)
        for out in (None, copies):
            op = "cute::moe_permute_fp8quant"
            with pytest.raises(ValueError, match=f"{op}: permuted_to_expanded holds {bad}, out of range: .* 8 pairs"):
                permute(pair=bad, out=out)
            with pytest.raises(ValueError, match=f"{op}: expanded_to_permuted holds {bad}, out of range: .* 8 rows"):
                permute(place=bad, out=out)
    assert not any(tensor.float().any() for tensor in (sums, *copies))


OFFSETS = {
    "negative": ([-1, 0, 8], "offsets holds -1, out of range; expected 0 to 8"),
    "beyond": ([0, 9, 9], "offsets holds 9, out of range; expected 0 to 8"),
    "descending": ([4, 2, 8], "offsets descends from 4 to 2 at expert 0"),
}
COUNTS = {
    "negative": ([0, -1], "counts holds -1 for expert 1, out of range; expected 0 to"),
    "beyond": ([5, 0], "counts holds 5 for expert 0, out of range; expected 0 to 4"),
}


def calls_of_experts(device="cpu"):
    """Return a call of each op that takes offsets and counts, by name, for 8 rows or for 4 rows of each of 2
    experts."""
    lead = {True: (8,), False: (2, 4)}

    def zeros(*shape, dtype=torch.uint8):
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)

    def multiply(offsets, counts):
        a, b = zeros(*lead[offsets is not None], 128, dtype=FP8), zeros(2, 64, 128, dtype=FP8)
        a_scale, b_scale = (torch.ones(*size, 1, device=device) for size in (lead[offsets is not None], (2, 1)))
        return torch_cute_ops.grouped_mm_fp8(a, b.mT, a_scale, b_scale, offsets, counts)

    def multiply_fp4(offsets, counts):
        a, b = zeros(*lead[offsets is not None], 128, dtype=FP8), zeros(2, 64, 64)
        a_scale = torch.ones(*lead[offsets is not None], 1, device=device)
        b_scale = zeros(1, 2, 32, 4, 4, dtype=FP8)
        return torch_cute_ops.grouped_mm_fp8_fp4(a, b.mT, a_scale, b_scale, offsets, counts)

    def gate(offsets, counts):
        rows = torch.ones(*lead[offsets is not None], 128, device=device)
        return torch_cute_ops.moe_swiglu_fp8quant(rows, offsets, counts)

    return {"grouped_mm_fp8": multiply, "grouped_mm_fp8_fp4": multiply_fp4, "moe_swiglu_fp8quant": gate}


@pytest.mark.parametrize("op", calls_of_experts())
def test_rows_of_experts_out_of_range_on_a_cpu(op):
    """Check that offsets and counts that include other experts' rows are refused, and that the largest valid values are
    accepted."""
    call = calls_of_experts()[op]

    def numbers(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    for offsets, text in OFFSETS.values():
        for counts in (None, [0, 0]):
            with pytest.raises(ValueError, match=f"cute::{op}: {text}"):
                call(numbers(offsets), numbers(counts))
    for counts, text in COUNTS.values():
        for offsets in (None, [0, 4, 8]):
            with pytest.raises(ValueError, match=f"cute::{op}: {text}"):
                call(numbers(offsets), numbers(counts))
    for offsets, counts in (([0, 0, 8], None), ([8, 8, 8], [0, 0]), ([2, 6, 8], [4, 2]), (None, [4, 0])):
        call(numbers(offsets), numbers(counts))


def test_ids_out_of_range_on_a_cpu():
    """Check that the id of an expert that does not exist is refused, and that -1 means no expert."""
    for bad in (4, 2**31 - 1, -2, -(2**31)):
        text = f"cute::moe_route_ids: ids holds {bad}, out of range: there are 4 experts"
        with pytest.raises(ValueError, match=text):
            torch_cute_ops.moe_route_ids(torch.tensor([[0, bad]], dtype=torch.int32), 4)
    expanded, *_, counts = torch_cute_ops.moe_route_ids(torch.tensor([[3, -1]], dtype=torch.int32), 4)
    assert expanded.tolist() == [[0, -1]] and counts.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_of_both_layouts(layout, device):
    """Check that the gate gives the experts' rows the same codes and scales as ``silu_mul_fp8quant``, in the contiguous
    and in the masked layout."""
    _, _, _, permuted, offsets, counts = torch_cute_ops.moe_route(torch.randn(40, 12, device=device), 2, **layout)
    rows = torch.randn(len(permuted), 512, device=device).bfloat16()
    used = permuted >= 0
    want = torch_cute_ops.silu_mul_fp8quant(rows, granularity="block128")
    poisoned = torch.where(used[:, None], rows, torch.nan)
    got = torch_cute_ops.moe_swiglu_fp8quant(poisoned, offsets, counts)
    as_bytes = lambda y, scale: (y.view(torch.uint8)[used], scale[used])  # noqa: E731
    assert_same(as_bytes(*got), as_bytes(*want))
    if layout == {"alignment": 1}:
        # Offsets alone suffice if there is no padding.
        assert_same(as_bytes(*torch_cute_ops.moe_swiglu_fp8quant(poisoned, offsets)), as_bytes(*want))
    if "max_rows" in layout:
        y, scale = torch_cute_ops.moe_swiglu_fp8quant(poisoned.view(12, -1, 512), counts=counts)
        assert y.shape == (12, 64, 256) and scale.shape == (12, 64, 2)
        assert_same(as_bytes(y.view(got[0].shape), scale.view(got[1].shape)), as_bytes(*want))


def test_choice_is_deepseeks(device):
    """Compare the chosen experts and their weights with DeepSeek-V3's router, computed with torch ops."""
    logits, bias = torch.randn(60, 64, device=device), torch.rand(64, device=device)
    weights, ids, *_ = torch_cute_ops.moe_route(logits, 6, bias, "sigmoid", 8, 3, True, 2.5)
    scores = logits.sigmoid()
    choice = (scores + bias).view(60, 8, 8)
    best = choice.topk(2, dim=-1).values.sum(-1).topk(3, dim=-1).indices
    mask = torch.ones(60, 8, dtype=torch.bool, device=device).scatter_(1, best, False)
    want = choice.masked_fill(mask[..., None], -torch.inf).flatten(1).topk(6, dim=-1).indices
    assert (ids == want).float().mean() > 0.995
    own = scores.gather(1, ids.long())
    assert_close(weights, own / own.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("experts", [64, 768])
@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_with_a_bias_or_groups(renormalize, experts, device):
    """Compare the chosen experts and their weights with two formulas. In DeepSeek-V2's formula, a group counts by its
    best expert. In vLLM's formula with a bias, scores plus bias choose the experts, and the weights are the scores
    without the bias."""
    logits, bias = torch.randn(60, experts, device=device), torch.rand(experts, device=device)
    scores = logits.double().softmax(-1)
    best = scores.view(60, 8, -1).amax(-1).topk(3).indices
    in_best = torch.zeros(60, 8, dtype=torch.bool, device=device).scatter(1, best, True)
    of_groups = scores.where(in_best.repeat_interleave(experts // 8, 1), 0.0)
    for choice, given in ((of_groups, {"num_groups": 8, "topk_groups": 3}), (scores + bias, {"bias": bias})):
        weights, ids, *_ = torch_cute_ops.moe_route(logits, 20, renormalize=renormalize, scaling_factor=2.0, **given)
        assert (ids == choice.topk(20).indices).float().mean() > 0.995
        own = scores.gather(1, ids.long())
        want = own / own.sum(-1, keepdim=True) if renormalize else own
        assert_close(weights, 2 * want.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_rows_of_garbage_get_finite_weights(scoring, device):
    """Check that ``finite`` does not change rows with finite logits, and makes the weights of all other rows finite."""
    logits = torch.randn(8, 40, device=device)
    garbage = logits.clone()
    garbage[1], garbage[3, ::2], garbage[5], garbage[7] = torch.nan, torch.inf, -torch.inf, torch.nan
    garbage[7, ::3] = torch.inf
    for op in (torch_cute_ops.moe_route, torch_cute_ops.moe_route_dense):
        plain, of_garbage = (op(given, 4, scoring=scoring, finite=True) for given in (logits, garbage))
        plain, of_garbage = (got[0] if isinstance(got, tuple) else got for got in (plain, of_garbage))
        assert of_garbage.isfinite().all()
        assert torch.equal(of_garbage[::2], plain[::2])
        usual = op(garbage, 4, scoring=scoring)
        assert (usual[0] if isinstance(usual, tuple) else usual).isnan().any()
        assert torch.equal((usual[0] if isinstance(usual, tuple) else usual)[::2], plain[::2])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64, 65, 130, 300, 600, 5000, 20_011])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_many_tokens(m, layout):
    """Compare the ops with the references at the sizes of DeepSeek-V3 (with narrower rows for many tokens), and check
    that repeated calls give the same results."""
    width = 7168 if m <= 600 else 1024
    logits = torch.randn(m, 256, device="cuda").bfloat16()
    given = {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, **layout}
    route = torch_cute_ops.moe_route(logits, 8, **given)
    places = OPS["moe_route"].reference(logits, 8, **given)
    differing = (route[1] != places[1]).any(1)
    assert int(differing.sum()) <= 1 + m // 5000
    if not differing.any():
        assert_same(route[1:], places[1:])
    x = torch.randn(m, width, device="cuda").bfloat16()
    steps = {
        "moe_permute_fp8quant": {
            "input": x,
            "permuted_to_expanded": route[3],
            "topk": 8,
            "expanded_to_permuted": route[2],
        },
        "moe_swiglu_fp8quant": {
            "input": torch.randn(len(route[3]), 1024, device="cuda").bfloat16(),
            "offsets": route[4],
            "counts": route[5],
        },
        "moe_finalize": {
            "input": torch.randn(len(route[3]), width, device="cuda").bfloat16(),
            "expanded_to_permuted": route[2],
            "weights": route[0],
            "residual": x,
        },
    }
    for _ in range(20):
        assert_same(torch_cute_ops.moe_route(logits, 8, **given), route)
    for name, arguments in steps.items():
        op = OPS[name]
        first = defined(op, named(op, arguments), as_tuple(op.function(**arguments)))
        for _ in range(20):
            again = defined(op, named(op, arguments), as_tuple(op.function(**arguments)))
            assert_same(again, first)
        if name != "moe_swiglu_fp8quant":
            assert_same(first, as_tuple(op.reference(**arguments)))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "width"), [(1, 512), (40, 512), (130, 256), (300, 512), (300, 7168)])
def test_steps_in_a_graph(m, width):
    """Capture all ops of an expert layer in one graph, and replay it with another routing."""

    def steps(logits, x):
        weights, _, expanded, permuted, offsets, counts = torch_cute_ops.moe_route(logits, TOPK)
        y, scale = torch_cute_ops.moe_permute_fp8quant(x, permuted, TOPK, expanded)
        rows = (y.float() * scale.repeat_interleave(128, 1)).bfloat16()
        y, scale = torch_cute_ops.moe_swiglu_fp8quant(rows, offsets, counts)
        rows = (y.float() * scale.repeat_interleave(128, 1)).bfloat16()
        return torch_cute_ops.moe_finalize(rows, expanded, weights)

    inputs = [(torch.randn(m, 32, device="cuda"), torch.randn(m, width, device="cuda").bfloat16()) for _ in range(3)]
    held = [tensor.clone() for tensor in inputs[0]]
    want = [steps(*given) for given in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(*held)
    for given, result in zip(inputs, want, strict=True):
        for tensor, value in zip(held, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(got, result)
