"""GEMMs that sum over experts: exact sums, special factors, skipped operands, independence of rows, calls."""

import inspect

import numpy as np
import pytest
import torch
from expected._moe_fc2 import assert_results, operands, results
from hypothesis import given as given_by
from hypothesis import strategies as st
from samples import Sample, moe_fc2_fp4, moe_fc2_fp4_weight_only
from samples._fp4_gemm import POWERS
from samples._moe_fc2 import dense_alpha, one_expert_alpha, top_alpha
from samples._weights import with_padding
from support.cases import arguments, is_for_experts, named, op_cases, run
from support.gemm_problems import HOPPER, fp4_problem
from support.routings import SKEWED, every_alpha, hot_alpha, powers, zipf_alpha
from test_fp4_gemm import backends_of, drawn_choices

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels import fp4_experts
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.reference.moe_fc2_fp4 import expert_gemm
from torch_cute_ops.registry import OPS, kernels_of
from torch_cute_ops.runtime.arch import ARCHS

SAMPLES = {"moe_fc2_fp4": moe_fc2_fp4.SAMPLES, "moe_fc2_fp4_weight_only": moe_fc2_fp4_weight_only.SAMPLES}
by_op = pytest.mark.parametrize("op", [case for case in op_cases() if is_for_experts(*case.values)])
by_format = pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
CPU = torch.device("cpu")


def by_backend(op, given, device):
    """Return the result of a call for each backend that supports it, keyed by the backend's name."""
    found = {
        name: run(op, named(op, given | {"backend": name}))[0] for name in backends_of(op, named(op, given), device)
    }
    assert "reference" in found
    return found


def integer_call(op, m, n, experts, width, fmt, layout, device, **kwargs):
    """Return arguments for which all sums are exact in float32, also after they are multiplied by powers of two."""
    samples = SAMPLES[op.name]
    sizes = (m, n, experts * width, fmt, layout, torch.device(device))
    sample = samples.sample("", *sizes, scales=POWERS[fmt.scale_format], out_dtype=torch.float32, **kwargs)
    if not samples.has_a_scale:
        sample.args[0].copy_(torch.randint(-8, 9, (m, experts * width)))
    return arguments(op, sample)


# Values


@by_op
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@by_format
def test_exact_sums(op, fmt, layout, device):
    """Check that every backend gives the exact result for inputs whose sums are exact in any order."""
    if layout not in SAMPLES[op.name].layouts:
        return
    alpha = 2.0 ** torch.randint(-1, 2, (37, 3), device=device) * torch.randint(-1, 2, (37, 3), device=device)
    given = integer_call(op, 37, 56, 3, 192, fmt, layout, device, alpha=alpha)
    (want,) = results(given)
    a, w, factor = operands(given)
    assert np.array_equal(want.double().numpy(), np.einsum("mei,nei,me->mn", a, w, factor.astype(float)))
    assert want.abs().max() > 100
    for name, got in by_backend(op, given, device).items():
        assert torch.equal(got.cpu(), want), name


@by_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_sums_with_biases(op, dtype, device):
    """Check that a bias is multiplied by the factor, and that the bias of an unused expert adds nothing, even if it is
    NaN."""
    alpha = 2.0 ** torch.randint(-1, 2, (37, 3), device=device) * torch.randint(-1, 2, (37, 3), device=device)
    alpha[:, 2] = 0
    bias = torch.randint(-64, 65, (3, 56), device=device).to(dtype)
    bias[2] = torch.nan
    given = integer_call(op, 37, 56, 3, 192, NVFP4, "128x4", device, alpha=alpha, bias=bias)
    given["out_dtype"] = torch.float32 if dtype == torch.float32 else torch.bfloat16
    a, w, factor = operands(given)
    sums = np.einsum("mei,nei->men", a, w)[:, :2] + bias[:2].cpu().double().numpy()
    want = torch.from_numpy(np.einsum("men,me->mn", sums, factor[:, :2].astype(float))).to(given["out_dtype"])
    for name, got in by_backend(op, given, device).items():
        assert torch.equal(got.cpu(), want), name


def test_backends_that_add_biases():
    """Check that each backend for GEMMs in which each expert owns a range of K either supports biases, or gives the
    lack of support as its reason to refuse."""
    kwargs = OPS["moe_fc2_fp4"].path.example(n=256, k=1024, experts=4, bias_dtype=torch.float32, device="meta")
    assert kwargs["bias"].shape == (4, 256)
    problem = OPS["moe_fc2_fp4"].path.problem(OPS["moe_fc2_fp4"].bind(**kwargs))
    hopper, blackwell = (select.reasons(problem, usual_targets(ARCHS[name])[0]) for name in ("sm_90a", "sm_100a"))
    assert hopper["routed"] is blackwell["tcgen05"] is None
    assert hopper["wgmma"] == "its kernel adds no bias to the sums of experts"


@by_op
def test_experts_as_wide_as_those_of_gpt_oss(op):
    """Check that on Hopper only ``routed`` supports GPT-OSS's experts, and that other backends give reasons.

    An expert is 2,880 columns wide: 22.5 tiles of four MXFP4 scales.
    """
    given = {"n": 2880, "k": 128 * 2880, "experts": 128, "block_size": 32, "bias_dtype": torch.float32}
    reasons = torch_cute_ops.backends(op.name, "sm_90a", **given)
    assert reasons.pop("routed") is reasons.pop("reference") is None and all(reasons.values())
    for m in (1, 64, 512):
        (kernel,) = kernels_of(op.name, "sm_90a", m=m, **given)
        assert kernel.kernel == fp4_experts.KERNEL and kernel.config.expert_k == 2880
        assert kernel.config.bias_dtype == torch.float32
    linear = torch_cute_ops.backends(op.name, "sm_90a", **given | {"scale_layout": "linear"})
    assert linear["routed"] == "in the linear layout an expert's width has to be a multiple of 256"
    problem = fp4_problem(k=8 * 96, experts=8)
    assert select.reasons(problem, HOPPER)["routed"] == "an expert's width is 96; it has to be a multiple of 64"


@by_op
@by_format
def test_one_hot_rows_give_columns_of_the_weight(op, fmt, device):
    """Check that, if rows of ``a`` are unit vectors, rows of the result are columns of the weight.

    Row m is a unit vector in each expert's range of K, and its token is routed to one expert. The result is a column of
    this expert's weight, multiplied by the factor.
    """
    experts, width, n = 3, 128, 40
    m = 2 * width
    alpha = torch.zeros(m, experts, device=device)
    expert = torch.arange(m) % experts
    alpha[torch.arange(m), expert] = 0.5
    sizes = (m, n, experts * width, fmt, "linear", torch.device(device))
    given = arguments(op, SAMPLES[op.name].sample("", *sizes, alpha=alpha, out_dtype=torch.float32))
    ones = torch.eye(width).repeat(2, experts)
    if "a_scale" in given:
        codes = (ones * 2).to(torch.uint8)  # the e2m1 code of 1
        given["a"].copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        given["a_scale"].view(torch.uint8).fill_(0x38 if fmt == NVFP4 else 127)
    else:
        given["a"].copy_(ones)
    weight = torch_cute_ops.fp4_dequantize(
        given["w"].mT.contiguous(),
        given["w_scale"],
        block_size=fmt.block_size,
        scale_layout="linear",
        out_dtype=torch.float32,
    )
    column = expert * width + torch.arange(m) % width
    for name, got in by_backend(op, given, device).items():
        assert torch.equal(got, 0.5 * weight[:, column.to(device)].t()), name


ROUTINGS = {
    "dense": dense_alpha,
    "top-2": top_alpha,
    "one-hot": lambda m, experts, device: top_alpha(m, experts, device, 1),
    "one-expert": one_expert_alpha,
    "zipf": zipf_alpha,
    "hot": hot_alpha,
    "none": lambda m, experts, device: torch.zeros(m, experts, device=device),
    "of-both-signs": lambda m, experts, device: torch.randn(m, experts, device=device),
    "powers": lambda m, experts, device: 2.0 ** torch.randint(-60, 60, (m, experts), device=device),
}


@by_op
@given_by(data=st.data())
def test_any_size_and_routing(op, data):
    """Check random M, N, E and I, formats, layouts, routings and output dtypes, within the error of fp32 arithmetic."""
    samples = SAMPLES[op.name]
    fmt, layout, out_dtype = drawn_choices(data, samples.layouts)
    m, n = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 40))
    experts, width = data.draw(st.integers(1, 9)), 64 * data.draw(st.integers(1, 5))
    alpha = ROUTINGS[data.draw(st.sampled_from(sorted(ROUTINGS)))](m, experts, CPU)
    sizes = (m, n, experts * width, fmt, layout, CPU)
    given = arguments(op, samples.sample("", *sizes, alpha=alpha, out_dtype=out_dtype))
    (got,) = run(op, named(op, given))
    assert got.shape == (m, n)
    assert_results((got,), results(given), given)


@by_op
@pytest.mark.parametrize("m", [24, 45])
def test_exact_sums_of_skewed_routings(op, m, device):
    """Check exact sums if some experts get all or most tokens, and others get one token or none.

    The numbers of tokens are below and above the limit up to which each CTA itself searches for its expert's tokens.
    """
    for routing, route in SKEWED.items():
        alpha = powers(route(m, 20, torch.device(device)))
        given = integer_call(op, m, 24, 20, 64, NVFP4, "128x4", device, alpha=alpha)
        (want,) = results(given)
        a, w, factor = operands(given)
        assert np.array_equal(want.double().numpy(), np.einsum("mei,nei,me->mn", a, w, factor.astype(float)))
        for name, got in by_backend(op, given, device).items():
            assert torch.equal(got.cpu(), want), (routing, name)


@by_op
def test_exact_sums_of_512_experts_with_tokens(op, device):
    """Check the largest number of experts, 512, when all of them get tokens. Each token is routed to 16 experts."""
    alpha = powers(every_alpha(41, 512, torch.device(device)))
    assert (alpha != 0).any(0).all() and ((alpha != 0).sum(1) == 16).all()
    given = integer_call(op, 41, 8, 512, 64, NVFP4, "128x4", device, alpha=alpha)
    (want,) = results(given)
    assert want.any(1).all()
    for name, got in by_backend(op, given, device).items():
        assert torch.equal(got.cpu(), want), name


def test_experts_are_added_in_ascending_order():
    """Check the order in which experts are added, with factors that cancel.

    All sums are 1. In float32, 2^24 + 1 - 2^24 is 0, but 2^24 - 2^24 + 1 is 1.
    """
    a = torch.zeros(2, 3 * 64, dtype=torch.bfloat16)
    a[:, ::64] = 1
    w, scale = torch.full((8, 3 * 32), 0x22, dtype=torch.uint8), torch.full((8, 12), 0x38, dtype=torch.uint8)
    alpha = torch.tensor([[2.0**24, 1, -(2.0**24)], [2.0**24, -(2.0**24), 1]])
    layout = SCALE_LAYOUTS["linear"]
    args = (a, None, w, scale.view(torch.float8_e4m3fn), alpha, None, torch.float32, NVFP4, None, layout)
    assert torch.equal(expert_gemm(*args), torch.tensor([[0.0], [1.0]]).expand(2, 8))


@by_op
@pytest.mark.parametrize("power", [-135, -100, 90])
def test_factors_of_any_size(op, power, device):
    """Check tiny and large factors, and a subnormal factor whose product with the sum is normal and exact."""
    alpha = torch.full((5, 2), 2.0**power, device=device)
    alpha[:, 1] *= -1
    given = integer_call(op, 5, 24, 2, 64, NVFP4, "linear", device, alpha=alpha)
    ones = given | {"alpha": alpha.sign()}
    (want,) = (result.double() * 2.0**power for result in results(ones))
    assert want.abs().max() > 0
    for name, got in by_backend(op, given, device).items():
        assert torch.equal(got.cpu().double(), want.float().double()), name


# Skipped operands


@by_op
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@by_format
def test_skipped_operands_may_be_anything(op, fmt, layout, device):
    """Check that NaN in operands that are skipped does not change the result.

    ``a`` or its scales are NaN for every pair with ``alpha`` 0 or -0, and the weight's scales are NaN for an expert
    without tokens.
    """
    samples, sizes = SAMPLES[op.name], (9, 24, 512)
    if layout not in samples.layouts:
        return
    given = arguments(op, samples.poisoned("", *sizes, fmt, layout, torch.device(device), out_dtype=torch.float32))
    for name, got in by_backend(op, given, device).items():
        assert_results((got,), results(given), given)
        assert got.isfinite().all() and got.abs().max() > 0, name
        for value in (0.0, 1.0):
            clean = dict(given)
            for key in ("a", "a_scale", "w_scale"):
                if key in clean and clean[key].dtype != torch.uint8:
                    clean[key] = torch.where(clean[key].float().isnan(), value, clean[key].float()).to(clean[key].dtype)
                elif key.endswith("scale") and key in clean:
                    clean[key] = torch.where(clean[key] == 0xFF, int(127 * value), clean[key]).to(torch.uint8)
            assert torch.equal(run(op, named(op, clean | {"backend": name}))[0], got), name


@by_op
def test_a_reference_that_computes_every_row_gives_the_same(op, monkeypatch):
    """Check that the reference ignores NaN of pairs that are not routed even if it computes every row, as on a GPU.

    On a GPU the reference cannot read ``alpha`` on the host to select rows.
    """
    given = arguments(op, SAMPLES[op.name].poisoned("", 9, 24, 512, NVFP4, "128x4", CPU))
    want = op.reference(**given)
    monkeypatch.setattr("torch_cute_ops.reference.moe_fc2_fp4.rows_of", lambda counts: slice(None))
    assert torch.equal(op.reference(**given), want) and want.abs().max() > 0


@by_op
def test_poison_that_counts_is_seen(op, device):
    """Check that NaN in an operand affects the result if ``alpha`` is not 0."""
    given = arguments(op, SAMPLES[op.name].poisoned("", 9, 24, 512, NVFP4, "linear", torch.device(device)))
    alpha = given["alpha"].clone()
    alpha[4, 0] = 2.0**-130
    for name, got in by_backend(op, given | {"alpha": alpha}, device).items():
        nan = got.isnan().all(1)
        assert nan.nonzero().tolist() == [[4]], name


@by_op
@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["zero", "negative-zero"])
def test_tokens_without_experts(op, zero, device):
    """Check that a token without experts gives +0 even if its activations and all weights are NaN."""
    given = arguments(op, SAMPLES[op.name].sample("", 4, 24, 192, NVFP4, "linear", torch.device(device)))
    given["w_scale"].view(torch.uint8).fill_(0x7F)
    if "a_scale" in given:
        given["a_scale"].view(torch.uint8).fill_(0x7F)
    else:
        given["a"].fill_(torch.nan)
    given["alpha"] = torch.full_like(given["alpha"], zero)
    for name, got in by_backend(op, given, device).items():
        assert not got.view(torch.uint8).any(), name


@by_op
def test_nan_factors_stay_in_their_row(op, device):
    given = arguments(op, SAMPLES[op.name].sample("", 6, 24, 320, NVFP4, "128x4", torch.device(device)))
    alpha = given["alpha"].clone()
    alpha[2, 1] = torch.nan
    for name, want in by_backend(op, given, device).items():
        got = run(op, named(op, given | {"alpha": alpha, "backend": name}))[0]
        assert got[2].isnan().all(), name
        others = [0, 1, 3, 4, 5]
        assert torch.equal(got[others], want[others]), name


# Rows


def cancelling_call(op, device):
    """Return a call whose result depends on every rounding, and so on the order of additions.

    The last block of each expert cancels the first. Both are so large that even float64 loses the two blocks between
    them.
    """
    m, n, experts = 7, 40, 3

    def matrix(rows, sign):
        codes = torch.randint(0, 256, (rows, experts, 64), dtype=torch.uint8)
        codes[..., 48:] = codes[..., :16] ^ sign
        scales = torch.tensor([127 + 26, 127, 127, 127 + 26], dtype=torch.uint8).repeat(rows, experts)
        return codes.flatten(1).to(device), scales.to(device)

    (a, a_scale), (w, w_scale) = matrix(m, 0), matrix(n, 0x88)
    choices = {"block_size": 32, "scale_layout": "linear", "out_dtype": torch.float32}
    if SAMPLES[op.name].has_a_scale:
        args = a, w.mT, a_scale, w_scale
    else:
        a = torch_cute_ops.fp4_dequantize(a, a_scale, block_size=32, scale_layout="linear")
        args = a, w.mT, w_scale
    return arguments(op, Sample("", (*args, torch.rand(m, experts, device=device) + 0.1), choices))


@by_op
def test_rows_do_not_see_each_other(op, device):
    """Check that a row gives the same bits alone, among rows of other experts, and among rows without experts."""
    for _ in range(5):
        given = cancelling_call(op, device)
        alpha = top_alpha(7, 3, torch.device(device))
        alone = {key: given[key][3:4] for key in ("a", "a_scale") if key in given}
        for name, want in by_backend(op, given | {"alpha": alpha}, device).items():
            with_name = given | {"backend": name}
            assert torch.equal(run(op, named(op, with_name | alone | {"alpha": alpha[3:4]}))[0], want[3:4]), name
            for routing in (dense_alpha, one_expert_alpha, ROUTINGS["none"]):
                others = routing(7, 3, alpha.device)
                others[3] = alpha[3]
                assert torch.equal(run(op, named(op, with_name | {"alpha": others}))[0][3], want[3]), name


# Calls


@by_op
def test_the_example_is_a_call(op):
    """Check that the example call that ``warmup`` makes has the requested properties."""
    kwargs = op.path.example(n=48, k=192, m=3, experts=3, block_size=32, out_dtype=torch.float32, device="cpu")
    given = inspect.signature(op.function).bind(**kwargs)
    assert given.arguments["alpha"].shape == (3, 3)
    out = op.function(**kwargs)
    assert out.shape == (3, 48) and out.dtype == torch.float32 and not out.any()


class Strict(Reference):
    """Backend that rejects wrong strides, as a compiled kernel does, and records its operands. It computes with the
    reference.

    Because it checks operands itself, the op does not check repeated calls.
    """

    name = "strict"

    def __init__(self):
        self.given = []

    def checks_operands(self, problem, tactic):
        return True

    def launcher(self, problem, tactic, target):
        launch = super().launcher(problem, tactic, target)

        def multiply(fields, out):
            given = Operands(*fields)
            a, b, alpha = given.a, given.b, given.alpha
            if not (a.is_contiguous() and b.t().is_contiguous() and given.b_scale.is_contiguous()):
                raise ValueError("strides")
            assert b.shape == (problem.k // 2, problem.n) and alpha.shape == (len(a), problem.experts)
            self.given.append((b, alpha))
            launch(given, out)

        return multiply


@pytest.fixture
def strict(monkeypatch):
    """Make ``Strict`` the only backend, and treat the CPU as a GPU."""
    backend = Strict()
    monkeypatch.setattr(select, "BACKENDS", [backend])
    monkeypatch.setattr(select, "target_of", lambda device: Target(CPU, None, 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for op in SAMPLES:
        monkeypatch.setattr(OPS[op].path, "launchers", {})
    return backend


@by_op
def test_calls_of_the_same_kind_are_not_checked_again(op, strict, monkeypatch):
    """Check that a second call with the same shapes reuses its launcher, even if ``alpha`` has other strides.

    Neither ``alpha`` nor the weight is copied.
    """
    checked = []
    check = Gemm.check
    monkeypatch.setattr(Gemm, "check", lambda self, call: checked.append(call) or check(self, call))
    given = arguments(op, SAMPLES[op.name].sample("", 6, 24, 128, NVFP4, "128x4", CPU))
    for i, alpha in enumerate(
        (given["alpha"], torch.rand(2, 6).t(), torch.rand(6, 1).expand(6, 2), torch.rand(6, 5)[:, ::4])
    ):
        call = given | {"alpha": alpha}
        for out in (None, torch.full((6, 24), torch.nan, dtype=torch.bfloat16)):
            got = op.cuda(**call) if out is None else (op.cuda_out(**call, out=out), out)[1]
            assert_results((got,), results(call), call)
            b, used = strict.given[-1]
            assert b.data_ptr() == given["w"].data_ptr() and (used.data_ptr(), used.stride()) == (
                alpha.data_ptr(),
                alpha.stride(),
            )
        assert len(checked) == 1, i
    strided = torch.rand(2, 6).t()
    other = given | {"w": with_padding(given["w"]), "alpha": strided}  # the padded weight is copied
    assert_results((op.cuda(**other),), results(other), other)
    assert len(checked) == 2 and strict.given[-1][1].data_ptr() == strided.data_ptr()
    one_expert = given | {"alpha": torch.rand(6, 1)}
    assert_results((op.cuda(**one_expert),), results(one_expert), one_expert)
    assert len(checked) == 3
