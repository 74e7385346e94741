"""``mm_fp8``, and ``grouped_mm_fp8`` with per-token scales: exact sums, promotion, NaN, tactics, backends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from samples._fp8_gemm import FP8, NAN, integers, powers
from samples.grouped_mm_fp8 import _tokens, contiguous, masked, with_token_scales
from samples.mm_fp8 import sample
from support.emulated import poisoned
from support.gemm_problems import BF16, FP16, FP32, HOPPER, backend_for, token_problem
from support.launch_model import launches  # noqa: F401  (a fixture)
from support.tactics import check_every_tactic

import torch_cute_ops
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.registry import OPS

N, K = 264, 1088
ROWS = (0, 1, 7, 9, 16, 33, 64, 65, 128, 129, 300)
SCALED_MM = torch._scaled_mm


def exact(a, b, a_scale, b_scale):
    """Compute ``a_scale · b_scale · (a @ b)`` for whole numbers and scales that are powers of two, so that no sum is
    rounded."""
    return (a.double() @ b.double()) * a_scale.double() * b_scale.double()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("fast_accum", [False, True])
def test_whole_numbers_are_exact(m, fast_accum, device):
    """Check that whole numbers give exact sums, whichever tactic is chosen for the number of rows."""
    one = sample("", m, N, K, torch.device(device), exact=True)
    got = torch_cute_ops.mm_fp8(*one.args, out_dtype=FP32, fast_accum=fast_accum)
    assert torch.equal(got, exact(*one.args).float())


@pytest.mark.parametrize("m", [1, 70])
def test_one_scale_of_a_matrix_is_repeated(m, device):
    """Check that one scale for a matrix gives the same result as equal scales for all its rows or columns."""
    one = sample("", m, N, K, torch.device(device), exact=True, one_a_scale=True, one_b_scale=True)
    a, b, a_scale, b_scale = one.args
    want = torch_cute_ops.mm_fp8(a, b, a_scale.expand(m, 1), b_scale.expand(N))
    for scales in ((a_scale, b_scale), (a_scale.expand(m, 1), b_scale), (a_scale, b_scale.expand(N).contiguous())):
        assert torch.equal(torch_cute_ops.mm_fp8(a, b, *scales), want)


@pytest.mark.parametrize("m", [5, 130])
def test_promotion_keeps_long_sums(m, device):
    """Check long sums of positive numbers. Tensor cores alone lose about a fifth of such sums. With promotion the error
    must stay below one hundredth (0.2 % was measured with other data)."""
    where, k = torch.device(device), 16_384
    a, b = (torch.rand(rows, k, device=where).to(FP8) for rows in (m, 128))
    ones = torch.ones(1, device=where)
    got = torch_cute_ops.mm_fp8(a, b.t(), ones, ones, out_dtype=FP32)
    want = a.double() @ b.double().t()
    assert ((got.double() - want).abs() / want).max() < 2.0**-7
    fast = torch_cute_ops.mm_fp8(a, b.t(), ones, ones, out_dtype=FP32, fast_accum=True)
    assert ((fast.double() - want).abs() / want).max() < (2.0**-24 * 4 if device == "cpu" else 0.5)


@pytest.mark.parametrize("m", [3, 140])
def test_nan_stays_where_it_is(m, device):
    """Check that NaN affects only its row or column, whether an element or a scale is NaN."""
    where = torch.device(device)
    a, b = integers(m, K, device=where), integers(N, K, device=where)
    a_scale, b_scale = powers(m, 1, device=where), powers(N, device=where)
    a.view(torch.uint8)[1, 300] = NAN
    b.view(torch.uint8)[7, 3] = NAN
    a_scale[2], b_scale[9] = torch.nan, torch.nan
    want = torch.zeros(m, N, dtype=torch.bool, device=where)
    want[1], want[2], want[:, 7], want[:, 9] = True, True, True, True
    for fast_accum in (False, True):
        got = torch_cute_ops.mm_fp8(a, b.t(), a_scale, b_scale, fast_accum=fast_accum)
        assert torch.equal(got.isnan(), want)


def test_a_row_does_not_depend_on_other_rows(device):
    """Check that neither the number of rows within a bucket nor the values of other rows change a row's bits."""
    one = sample("", 72, N, K, torch.device(device))
    a, b, a_scale, b_scale = one.args
    want = torch_cute_ops.mm_fp8(a, b, a_scale, b_scale)
    for rows in (slice(0, 65), slice(1, 72)):
        got = torch_cute_ops.mm_fp8(a[rows].contiguous(), b, a_scale[rows], b_scale)
        assert torch.equal(got, want[rows])


# The cases share kernels with each other and with the benchmark if possible, because compiling takes longer than
# running.
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wgmma", "tcgen05", "mma_sync", "scaled_mm"])
@pytest.mark.parametrize(
    ("m", "k", "fast_accum", "out_dtype"),
    [
        (1, 128, False, BF16),
        (9, 448, False, BF16),
        (9, 1088, True, BF16),
        (60, 2880, False, FP16),
        (70, 1088, True, FP32),
        (300, 1088, False, BF16),
        (300, 1088, True, BF16),
        (300, 1088, False, FP32),
    ],
)
def test_every_tactic(name, m, k, fast_accum, out_dtype):
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums. Calls with bfloat16 results use per-token and per-channel scales; other calls use one scale per matrix, and a
    bias."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if name == "wgmma" and not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    if name == "tcgen05" and not target.arch.has_tcgen05:
        pytest.skip("needs data-center Blackwell's tcgen05")
    is_by_tensor = out_dtype != BF16
    for n in (264, 272):
        scales = {"one_a_scale": is_by_tensor, "one_b_scale": is_by_tensor}
        one = sample("", m, n, k, target.device, exact=True, **scales)
        options = {"fast_accum": fast_accum, "out_dtype": out_dtype}
        if is_by_tensor:
            options["bias"] = torch.randint(-9, 10, (n,), device=target.device).to(out_dtype)
        check_every_tactic(OPS["mm_fp8"], name, one, options, target)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [9, 40])
def test_clusters_with_several_tiles(m):
    """Run a cluster over several tiles on few SMs. A CTA must send the partial sums of a tile only after the partial
    sums of the previous tile were read."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    one = sample("", m, 1032, 1408, target.device, exact=True)
    for _ in range(10):
        check_every_tactic(OPS["mm_fp8"], "wgmma", one, {}, replace(target, sms=6))


# torch's scaled GEMM


def meta(value):
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


@pytest.fixture
def scaled_mm(monkeypatch):
    """Replace torch's scaled GEMM by its checks followed by exact sums; return the list of calls."""
    calls = []

    def call(a, b, a_scale, b_scale, bias=None, *, out_dtype, use_fast_accum, out):
        options = {"bias": meta(bias), "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        made = SCALED_MM(*map(meta, (a, b, a_scale, b_scale)), **options)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        out.copy_(exact(a, b, a_scale, b_scale) + (0 if bias is None else bias))
        calls.append(SimpleNamespace(a_scale=a_scale.shape, out_dtype=out_dtype, fast_accum=use_fast_accum))

    monkeypatch.setattr(torch, "_scaled_mm", call)
    return calls


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("one_a", "one_b"), [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("n", [48, 40])
def test_calls_of_torch(n, one_a, one_b, has_bias, out_dtype, scaled_mm, monkeypatch):
    """Check the result, and how PyTorch computes each problem: by one scaled GEMM, from fp32 sums, or from decoded
    operands."""
    m, k, fast = 9, 192, n % 16 == 0 and one_a
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: (a.double() @ b.double()).to(out_dtype))
    a, b, a_scale, b_scale = sample("", m, n, k, torch.device("cpu"), exact=True).args
    a_scale, b_scale = (a_scale[0] if one_a else a_scale), (b_scale[:1] if one_b else b_scale)
    bias = torch.randint(-9, 10, (n,)).to(out_dtype) if has_bias else None
    problem = token_problem(n, k, out_dtype, out_dtype if has_bias else None, one_a, one_b, fast)
    out = poisoned(m, n, dtype=out_dtype)
    rows = a_scale.reshape(-1, 1).expand(m, 1)
    launch = backend_for("scaled_mm", problem).launcher(problem, (), HOPPER)
    launch(Operands(a, b, rows, b_scale, None, bias), out)
    want = exact(a, b, a_scale, b_scale) + (0 if bias is None else bias.double())
    assert torch.equal(out, want.to(out_dtype))
    assert len(scaled_mm) == (n % 16 == 0)
    for call in scaled_mm:
        by_row = out_dtype == BF16 and not (one_a and one_b)
        assert call.a_scale == ((m, 1) if by_row else (1,))
        assert call.out_dtype == (BF16 if out_dtype == BF16 else FP32) and call.fast_accum is fast


def test_torch_computes_float32_bias_of_bfloat16_from_sums(scaled_mm):
    """Check that a bias that PyTorch's GEMM would refuse is added to fp32 sums."""
    a, b, a_scale, b_scale = sample("", 5, 48, 192, torch.device("cpu"), exact=True).args
    problem, bias, out = token_problem(48, 192, BF16, FP32), torch.arange(48.0), poisoned(5, 48, dtype=BF16)
    launch = backend_for("scaled_mm", problem).launcher(problem, (), HOPPER)
    launch(Operands(a, b, a_scale, b_scale, None, bias), out)
    assert torch.equal(out, (exact(a, b, a_scale, b_scale) + bias).to(BF16))
    assert [call.out_dtype for call in scaled_mm] == [FP32]


# Experts


def exact_experts(one, counts, begins):
    """Return the exact results (rows, N) of experts' rows, and zeros in all other rows."""
    a, b, a_scale, b_scale, *_ = one.args
    rows, scales = a.reshape(-1, a.shape[-1]), a_scale.reshape(-1, 1).expand(a.shape[:-1].numel(), 1)
    want = torch.zeros(len(rows), b.shape[2], dtype=torch.float64, device=a.device)
    for expert, (begin, count) in enumerate(zip(begins, counts, strict=False)):
        own = slice(begin, begin + count)
        want[own] = exact(rows[own], b[expert], scales[own], b_scale[expert].reshape(-1))
    return want.view(*a.shape[:-1], -1)


@pytest.mark.parametrize("counts", [[0, 0, 300, 0], [1, 0, 64, 65], [129, 128, 7, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("one_scale", [False, True])
def test_rows_of_experts(counts, layout, one_scale, device):
    """Check exact results in experts' rows, and that no other row is written."""
    where = torch.device(device)
    if layout == "masked":
        one, begins = masked("", counts, 300, N, 704, where, exact=True), [0, 300, 600, 900]
    else:
        one = contiguous("", counts, N, 704, where, exact=True, alignment=128, spare=5)
        begins = one.args[4].tolist()
    one = with_token_scales(one, exact=True, one_a_scale=one_scale, one_b_scale=one_scale)
    want = exact_experts(one, counts, begins).float()
    out = torch.full(want.shape, 7e30, device=where)
    torch_cute_ops.grouped_mm_fp8(*one.args, **one.kwargs, out_dtype=FP32, out=out)
    if device == "cuda":
        offsets, given = one.args[4:] if layout == "contiguous" else (None, one.kwargs["counts"])
        used = used_rows(out.shape[:-1].numel(), offsets, given)
        assert (out.view(-1, N)[~used] == 7e30).all()
        out.view(-1, N)[~used] = 0
    assert torch.equal(out, want)


@pytest.mark.parametrize("alpha", [(), (1,), (1, 1), (3,), (3, N)])
@pytest.mark.parametrize("one_b_scale", [False, True])
def test_alpha_of_experts(alpha, one_b_scale, device):
    """Check that ``alpha``, in each of its shapes, multiplies the scales of the experts' weights."""
    where = torch.device(device)
    one = with_token_scales(
        contiguous("", [5, 3, 19], N, 256, where, exact=True, alignment=1), exact=True, one_b_scale=one_b_scale
    )
    factors = powers(*alpha, device=where)
    a, b, a_scale, b_scale, offsets, counts = one.args
    got = torch_cute_ops.grouped_mm_fp8(*one.args, alpha=factors, out_dtype=FP32)
    full = b_scale.reshape(3, -1) * (factors.reshape(3, -1) if factors.numel() > 1 else factors)
    want = exact_experts(replace(one, args=(a, b, a_scale, full)), counts.tolist(), offsets.tolist())
    assert torch.equal(got, want.float())


def test_one_expert_is_the_plain_gemm(device):
    one = sample("", 70, N, K, torch.device(device), exact=True)
    a, b, a_scale, b_scale = one.args
    counts = torch.tensor([70], dtype=torch.int32, device=device)
    got = torch_cute_ops.grouped_mm_fp8(a[None], b[None], a_scale[None], b_scale[None], counts=counts)
    assert torch.equal(got[0], torch_cute_ops.mm_fp8(*one.args))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("backend", ["wgmma", "mma_sync"])
def test_repeated_calls(backend):
    """Check that a repeated call, which passes its tensors to the compiled function without checks, gives the same
    result as the first. Scales must be expanded, flattened or refused as the compiled function requires."""
    where, made = torch.device("cpu"), 0
    plain = [sample("", 9, 136, 192, where, one_a_scale=one, one_b_scale=not one) for one in (False, True)]
    for op, given in (
        *(("mm_fp8", one) for one in plain),
        *(("grouped_mm_fp8", one) for one in _tokens(where) if one.args[0].numel() and one.args[1].numel()),
    ):
        kwargs = {**given.kwargs, "backend": backend}
        want = OPS[op].reference(*given.args, **given.kwargs)
        call = OPS[op].bind(*given.args, **kwargs)
        used = torch.ones(want.shape[:-1], dtype=torch.bool)
        if op == "grouped_mm_fp8":
            used = used_rows(used.numel(), call.offsets, call.counts).view(used.shape)
        for _ in range(2):
            got = OPS[op].cuda(*given.args, **kwargs)
            assert torch.equal(got[used].nan_to_num(), want[used].nan_to_num()), given.name
        made += 1
    assert made > 30
