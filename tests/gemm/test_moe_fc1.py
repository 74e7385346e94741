"""Expert GEMMs with a gate: exact sums, skipped and unwritten results, independence of rows, and a whole layer."""

import numpy as np
import pytest
import torch
from expected import _moe_fc1 as expected
from expected import assert_same
from hypothesis import given as given_by
from hypothesis import strategies as st
from samples import moe_fc1_fp4, moe_fc1_fp4_weight_only
from samples._fp4_gemm import POWERS
from samples._moe_fc2 import top_alpha
from samples._silu_mul import GPT_OSS
from support import spec
from support.cancelling import cancelling_matrix
from support.cases import arguments, call_out, named, op_cases, poisoned, run
from support.routings import SKEWED, every_alpha, hot_alpha
from test_fp4_gemm import backends_of
from test_moe_fc2 import ROUTINGS

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.scale_layout import from_linear, to_linear, weight_layout

SAMPLES = {"moe_fc1_fp4": moe_fc1_fp4.SAMPLES, "moe_fc1_fp4_weight_only": moe_fc1_fp4_weight_only.SAMPLES}
by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.values[0].name in SAMPLES])
by_format = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
by_half = pytest.mark.parametrize("half", ["gate", "up"])
CPU = torch.device("cpu")


def by_backend(op, given, device):
    """Return the results of a call for each backend that supports it, keyed by the backend's name."""
    names = backends_of(op, named(op, given), device)
    assert "reference" in names
    return {name: run(op, named(op, given | {"backend": name})) for name in names}


def linear_call(op, half, fmt, layout, device, sizes=None, route=top_alpha):
    """Return arguments for which the gate is linear in ``half``, and the expected values (M, E, I) in float64.

    silu(g) equals g for g >= 32. The other half gets a zero weight and a bias of 1 (if it is up) or 32 (if it is the
    gate). The values are therefore the sums of ``half``, multiplied by 32 if ``half`` is up.

    Args:
        sizes: M, number of experts, width of an expert, K.
    """
    m, experts, width, k = sizes or (19, 3, 64, 96 if fmt == MXFP4 else 80)
    samples, device = SAMPLES[op.name], torch.device(device)
    bias = torch.randint(-9, 10, (experts, 2 * width), device=device).float()
    routing = route(m, experts, device)
    routing[::4, experts // 2] = 0
    alpha = 2.0 ** torch.randint(-2, 3, (experts, 2), device=device)
    given = arguments(
        op,
        samples.sample(
            *("", m, experts * width, k, fmt, layout, device),
            experts=experts,
            scales=POWERS[fmt.scale_format],
            bias=bias,
            alpha=alpha,
            routing=routing,
        ),
    )
    if not samples.has_a_scale:
        given["a"].copy_(torch.randint(-8, 9, (m, k)))
    first, second = slice(0, width), slice(width, None)
    own, other = (first, second) if half == "gate" else (second, first)
    given["w"][..., other] = 0
    bias[:, other] = 1 if half == "gate" else 32
    if half == "gate":
        bias[:, own] += 32768
    a, w = expected.operands(given)
    factors = alpha[:, 0 if half == "gate" else 1].cpu().double().numpy()
    sums = np.einsum("mk,enk->men", a, w[:, own]) * factors[:, None] + bias[:, own].cpu().double().numpy()
    value = torch.from_numpy(sums if half == "gate" else 32 * sums)
    value = torch.where((routing != 0).cpu()[..., None], value, 0.0)
    assert value.abs().max() > 100 or not routing.any()
    assert torch.equal(value.float().double(), value)
    return given, value


def cancelling_call(op, device, m, experts, width, k, fmt, layout, route, power=5):
    """Return arguments whose results depend on the order of the sums over K; see ``cancelling_matrix``."""
    device, ways = torch.device(device), SCALE_LAYOUTS[layout]
    a, a_scale = cancelling_matrix(m, k, fmt, power, takes_away=False, device=device)
    w, w_scale = cancelling_matrix(experts * 2 * width, k, fmt, power, takes_away=True, device=device)
    finish = {
        # Scale the remainder of the cancelled products to a few units.
        "alpha": torch.full((experts, 2), 2.0 ** (2 * power - 6), device=device),
        "bias": torch.randn(experts, 2 * width, device=device),
        "routing": route(m, experts, device),
    }
    sizes = (m, experts * width, k, fmt, layout, device)
    given = arguments(op, SAMPLES[op.name].sample("", *sizes, experts=experts, **finish))
    given["w"].mT.copy_(w.view(given["w"].mT.shape))
    given["w_scale"].view(torch.uint8).copy_(from_linear(w_scale, weight_layout(ways)).view(given["w_scale"].shape))
    if "a_scale" in given:
        given["a"].copy_(a)
        given["a_scale"].view(torch.uint8).copy_(from_linear(a_scale, ways))
    else:
        scales = a_scale.view(fmt.scale_dtype)
        given["a"] = torch_cute_ops.fp4_dequantize(a, scales, block_size=fmt.block_size, scale_layout="linear")
    return given


def bits(results):
    """Return the results as bytes on the CPU."""
    return [each.contiguous().view(torch.uint8).cpu() for each in results]


def exact_results(given, value):
    """Return the results of an op for the exact values (M, E, I), on the CPU. Elements that the op does not write are
    zero."""
    flat = value.flatten(1).float()
    if "a_scale" not in given:
        return (flat.to(torch.bfloat16),)
    codes, scale = torch_cute_ops.fp4_quantize(flat, None, given["block_size"], scale_layout="linear")
    layout = spec.layout_named(None, given["a_scale"])
    if layout == "linear":
        return codes, scale
    blocks = torch_cute_ops.convert_scales(scale, len(flat), flat.shape[1], "linear", layout)
    return codes, blocks


# Values


@by_op
@by_half
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@by_format
def test_exact_sums(op, fmt, layout, half, device):
    """Use inputs whose results are exact, and check every column of gate and up. Each column has a separate factor and
    bias."""
    if layout not in SAMPLES[op.name].layouts:
        return
    given, value = linear_call(op, half, fmt, layout, device)
    for results in by_backend(op, given, device).values():
        assert_same(results, exact_results(given, value))


@by_op
@pytest.mark.parametrize(("m", "half"), [(24, "gate"), (45, "up")])
def test_exact_results_of_skewed_routings(op, m, half, device):
    """Check that results are exact if some experts get all or most of the tokens, and others get one token or none.

    The numbers of tokens are below and above the limit up to which each CTA itself searches for its expert's tokens.
    """
    for routing, route in SKEWED.items():
        given, value = linear_call(op, half, NVFP4, "128x4", device, (m, 20, 64, 80), route)
        want = exact_results(given, value)
        for name, results in by_backend(op, given, device).items():
            assert all(map(torch.equal, bits(results), bits(want))), (routing, name)


@by_op
def test_exact_results_of_512_experts_with_tokens(op, device):
    """Check the largest number of experts, 512, when all of them get tokens. Each token is routed to 16 experts."""
    given, value = linear_call(op, "up", NVFP4, "128x4", device, (41, 512, 64, 32), every_alpha)
    routed = given["routing"] != 0
    assert routed.any(0).all() and (routed.sum(1) == 16).any()
    for results in by_backend(op, given, device).values():
        assert_same(results, exact_results(given, value))


@by_op
@given_by(data=st.data())
def test_any_size_and_routing(op, data):
    """Check random M, H, E and I, formats, layouts, routings and gates."""
    samples = SAMPLES[op.name]
    fmt = data.draw(st.sampled_from([NVFP4, MXFP4]))
    layout = data.draw(st.sampled_from(samples.layouts))
    m, k = data.draw(st.integers(0, 12)), 32 * data.draw(st.integers(1, 4))
    experts, width = data.draw(st.integers(1, 6)), 64 * data.draw(st.integers(1, 3))
    routing = ROUTINGS[data.draw(st.sampled_from(sorted(ROUTINGS)))](m, experts, CPU)
    more = GPT_OSS if data.draw(st.booleans()) else {}
    if data.draw(st.booleans()):
        more = more | {"bias": torch.randn(experts, 2 * width)}
    sample = samples.sample("", m, experts * width, k, fmt, layout, CPU, experts=experts, routing=routing, **more)
    given = arguments(op, sample)
    results = run(op, named(op, given))
    expected.assert_results(results, expected.results(given), given)


# Skipped results


@by_op
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@by_format
def test_unrouted_results_are_not_written(op, fmt, layout, device):
    """Check that nothing is written for pairs with a routing weight of 0 or -0, and that padding of scales becomes
    zero."""
    samples = SAMPLES[op.name]
    if layout not in samples.layouts:
        return
    sample = samples.poisoned("", 9, 3 * 64, 128, fmt, layout, torch.device(device))
    given = arguments(op, sample)
    routed = (given["routing"] != 0).cpu()
    assert not routed.all(1).any() and not routed[4].any() and routed.any()
    for name, results in by_backend(op, given, device).items():
        want = expected.results(given)
        expected.assert_results(results, want, given)
        outputs = poisoned(results)
        before = [output.clone() for output in outputs]
        call_out(op, named(op, given | {"backend": name}), outputs)
        y, poison = (each.view(torch.uint8).cpu().unflatten(1, (3, -1)) for each in (outputs[0], before[0]))
        assert torch.equal(y[~routed], poison[~routed]), name
        assert torch.equal(y[routed], results[0].view(torch.uint8).cpu().unflatten(1, (3, -1))[routed]), name
        if len(outputs) == 2:
            blocks = 3 * 64 // fmt.block_size
            scale = outputs[1].cpu()
            linear = to_linear(scale, SCALE_LAYOUTS[layout], 9, blocks).view(torch.uint8).unflatten(1, (3, -1))
            assert (linear[~routed] == 0xAA).all() and (linear[routed] != 0xAA).any(), name
            # Only bytes of pairs that are not routed keep the poison; padding is zero.
            kept = int((scale.view(torch.uint8) == 0xAA).sum()) - int((linear[routed] == 0xAA).sum())
            assert kept == int((~routed).sum()) * blocks // 3, name


@by_op
def test_a_reference_that_computes_every_row_gives_the_same(op, monkeypatch):
    """Check that the reference ignores NaN of pairs that are not routed even if it computes every row, as on a GPU.

    On a GPU the reference does not select the routed rows, because the host would need to wait for the routing.
    """
    given, terms = call_with_terms(op, "half", CPU)
    given |= {name: changed_at(term, 0, torch.nan) for name, term in terms.items() if name != "global_scale"}
    want = op.reference(**given)
    monkeypatch.setattr("torch_cute_ops.reference.moe_fc1_fp4.rows_of", lambda routed: slice(None))
    got = op.reference(**given)
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@by_op
@pytest.mark.parametrize("alpha", ["expert", "half"])
def test_terms_of_an_expert_without_tokens_may_be_anything(op, alpha, device):
    """Check that the factor, bias, global scale and weight scales of an expert without tokens may be NaN.

    The results equal the results of a call with ones instead of NaN.
    """
    given, terms = call_with_terms(op, alpha, device)
    poison, clean = ({name: changed_at(term, 0, value) for name, term in terms.items()} for value in (torch.nan, 1.0))
    assert not given["routing"][:, 0].any() and all(term[0].isnan().all() for term in poison.values())
    want = expected.results(given | clean)
    of_clean = by_backend(op, given | clean, device)
    for name, results in by_backend(op, given | poison, device).items():
        expected.assert_results(results, want, given | clean)
        assert all(map(torch.equal, bits(results), bits(of_clean[name]))), name


@by_op
@pytest.mark.parametrize("alpha", ["expert", "half"])
def test_nan_terms_stay_with_their_expert(op, alpha, device):
    """Check that a NaN factor, bias or global scale of an expert affects all results routed to it, and no other
    results."""
    given, terms = call_with_terms(op, alpha, device)
    routed = (given["routing"] != 0).cpu()
    for which in terms:
        for name, results in by_backend(op, given | {which: changed_at(terms[which], 1, torch.nan)}, device).items():
            if "a_scale" in given:
                layout = SCALE_LAYOUTS[spec.layout_named(None, given["a_scale"])]
                scale = to_linear(results[1].cpu(), layout, 9, 3 * 64 // 16)
                nan = (scale.view(torch.uint8) == 0x7F).unflatten(1, (3, -1))
            else:
                nan = results[0].isnan().cpu().unflatten(1, (3, -1))
            assert nan[routed[:, 1], 1].all() and not nan[~routed[:, 1], 1].any(), (which, name)
            assert not nan[:, [0, 2]].any(), (which, name)


def call_with_terms(op, alpha, device):
    """Return a call whose first expert gets no tokens, and its factors, biases and global scales by name.

    The scales of the first expert's weight are NaN.
    """
    (m, n, k), device = (9, 3 * 64, 128), torch.device(device)
    terms = {
        "alpha": torch.rand((3,) if alpha == "expert" else (3, 2), device=device) / 64 + 2.0**-7,
        "bias": torch.randn(3, 128, device=device),
    }
    if SAMPLES[op.name].has_a_scale:
        terms["global_scale"] = torch.rand(3, device=device) * 40 + 1
    given = arguments(op, SAMPLES[op.name].poisoned("", m, n, k, NVFP4, "128x4", device, **terms))
    given["routing"][0, 1:] = 0.5  # a token for each of the other two experts
    return given, terms


def changed_at(terms, expert, value):
    """Return a copy of ``terms`` with ``value`` for the expert."""
    terms = terms.clone()
    terms[expert] = value
    return terms


@by_op
def test_a_nan_of_the_routing_is_routed(op, device):
    """Check that NaN in the routing counts as routed, and does not change the results."""
    given = arguments(op, SAMPLES[op.name].sample("", 5, 128, 64, NVFP4, "128x4", torch.device(device)))
    given["routing"] = torch.ones(5, 2, device=device)
    for name, want in by_backend(op, given, device).items():
        nan = given | {"routing": torch.full((5, 2), torch.nan, device=device), "backend": name}
        for got, one in zip(run(op, named(op, nan)), want, strict=True):
            assert torch.equal(got.view(torch.uint8), one.view(torch.uint8)), name


# Rows


@by_op
@by_format
def test_rows_do_not_see_each_other(op, fmt, device):
    """Check, with several k tiles, that a row gives the same bits alone and among rows that share its experts.

    Every expert gets at least 9 tokens, and one expert gets all of them.
    """
    power = 5 if fmt == NVFP4 else 13
    given = cancelling_call(op, device, 64, 3, 64, 1024, fmt, "linear", hot_alpha, power)
    tokens = (given["routing"] != 0).sum(0)
    assert tokens.max() == 64 and tokens.min() > 8
    for name, results in by_backend(op, given, device).items():
        assert results[0].view(torch.uint8).unique().numel() > 50
        for row in (0, 20, 63):
            own = {key: given[key][row : row + 1] for key in ("a", "a_scale", "routing") if key in given}
            alone = run(op, named(op, given | own | {"backend": name}))
            assert all(map(torch.equal, bits(alone), bits(each[row : row + 1] for each in results))), (name, row)


# The layer


@pytest.mark.parametrize("swiglu", [{}, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("activations", ["fp4", "16-bit"])
def test_both_gemms_are_a_layer(activations, swiglu, device):
    """Call the router and both expert GEMMs, and compare the result with a float64 computation of the layer on the
    decoded weights.

    Each expert's bias and global scale are different. Results of pairs that are not routed keep their poison, so the
    test fails if the second GEMM reads them.
    """
    m, hidden, experts, width, topk = 12, 128, 6, 64, 2
    x = torch.randn(m, hidden).bfloat16()
    logits = torch.randn(m, experts)
    up, down = torch.randn(experts, 2 * width, hidden) / hidden**0.5, torch.randn(hidden, experts, width) / width**0.5
    biases = torch.randn(experts, 2 * width) / 4, torch.randn(experts, hidden) / 4
    up_factor = torch_cute_ops.nvfp4_global_scale(up.abs().amax())
    down_factor = torch_cute_ops.nvfp4_global_scale(down.abs().amax())
    up_codes, up_scale = torch_cute_ops.fp4_quantize(up, up_factor)
    down_codes, down_scale = torch_cute_ops.fp4_quantize(down.flatten(1), down_factor)
    decoded = torch_cute_ops.fp4_dequantize(up_codes.flatten(0, 1), up_scale, up_factor, out_dtype=torch.float32)
    w1 = decoded.view(experts, 2 * width, hidden).double()
    decoded = torch_cute_ops.fp4_dequantize(down_codes, down_scale, down_factor, out_dtype=torch.float32)
    w2 = decoded.view(hidden, experts, width).double()
    weights = torch.zeros(m, experts, dtype=torch.float64)
    best = logits.double().topk(topk, 1)
    weights.scatter_(1, best.indices, best.values.softmax(1))
    gate, value = (torch.einsum("mh,eih->mei", x.double(), w1) + biases[0].double()).chunk(2, 2)
    alpha, beta, limit = swiglu.values() if swiglu else (1.0, 0.0, None)
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    hiddens = gate * torch.sigmoid(alpha * gate) * (value + beta)
    want = torch.einsum("mei,hei,me->mh", hiddens, w2, weights) + weights @ biases[1].double()

    def on(*tensors):
        return [tensor.to(device) for tensor in tensors]

    h_factor = 2688 / hiddens.abs().amax((0, 2)).float()
    if activations == "16-bit":
        h_factor = torch.ones(experts)
    factor = 1 / (h_factor * down_factor)
    routing = torch_cute_ops.moe_route_dense(*on(logits), topk, expert_factor=factor.to(device))
    second_bias = (biases[1] / factor[:, None]).to(device)
    up_codes, up_scale, down_codes, down_scale, first_bias = on(up_codes, up_scale, down_codes, down_scale, biases[0])
    up, down = up_codes.mT, down_codes.mT
    backend = "auto" if device == "cuda" and torch.cuda.get_device_capability() == (9, 0) else "reference"
    given = {**swiglu, "bias": first_bias, "backend": backend}
    if activations == "fp4":
        x_factor = torch_cute_ops.nvfp4_global_scale(x.abs().amax().float())
        a, a_scale = torch_cute_ops.fp4_quantize(*on(x, x_factor))
        given["alpha"] = (1 / (x_factor * up_factor)).expand(experts).contiguous().to(device)
        outputs = poisoned(torch_cute_ops.moe_fc1_fp4(a, up, a_scale, up_scale, routing, **given))
        h, h_scale = torch_cute_ops.moe_fc1_fp4(
            *(a, up, a_scale, up_scale, routing), global_scale=h_factor.to(device), out=outputs, **given
        )
        got = torch_cute_ops.moe_fc2_fp4(
            h, down, h_scale, down_scale, routing, second_bias, torch.float32, backend=backend
        )
    else:
        given["alpha"] = (1 / up_factor).expand(experts).contiguous().to(device)
        (x,) = on(x)
        (h,) = poisoned([torch_cute_ops.moe_fc1_fp4_weight_only(x, up, up_scale, routing, **given)])
        torch_cute_ops.moe_fc1_fp4_weight_only(x, up, up_scale, routing, out=h, **given)
        got = torch_cute_ops.moe_fc2_fp4_weight_only(
            h, down, down_scale, routing, second_bias, torch.float32, backend=backend
        )
    cosine = torch.nn.functional.cosine_similarity(got.double().cpu().flatten(), want.flatten(), 0)
    assert cosine >= (0.98 if activations == "fp4" else 0.9999)


# Calls


@by_op
def test_the_example_is_a_call(op):
    """Check that the example call that ``warmup`` makes has the requested properties."""
    given = {"n": 192, "k": 96, "m": 3, "experts": 3, "block_size": 32, "alpha": "expert_half", "swiglu": True}
    kwargs = op.path.example(**given, bias_dtype=torch.float32, device="cpu")
    sample = op.bind(**kwargs)
    assert sample.routing.shape == (3, 3) and sample.alpha.shape == (3, 2) and sample.bias.shape == (3, 128)
    assert op.path.properties(sample).items() >= given.items()
    out = op.function(**kwargs)
    first = out[0] if isinstance(out, tuple) else out
    assert first.shape[0] == 3 and first.numel() == 3 * 192 // (2 if isinstance(out, tuple) else 1)
