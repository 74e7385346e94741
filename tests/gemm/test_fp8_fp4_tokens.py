"""GEMMs of FP8 activations with per-token scales and an FP4 weight: call path, backends, tuning and error bounds on a
CPU."""

import itertools

import pytest
import torch
from expected._fp8_fp4 import in_order, weight_of_tokens
from samples import grouped_mm_fp8_fp4, mm_fp8_fp4
from samples._fp8_fp4_tokens import with_tokens
from support.cases import arguments
from support.gemm_problems import CPU, HOPPER

import torch_cute_ops
from torch_cute_ops import interleave_k, prepare_scales
from torch_cute_ops import mm_fp8_fp4 as multiply
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import error_bounds, select, tune
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.gemm.select import Choice
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.tuner import Candidate

ON_CPU = torch.device("cpu")
HOW = [
    {"prepared": prepared, "interleaved": interleaved} for prepared, interleaved in itertools.product((0, 1), (0, 1))
]


def calls():
    """Yield calls of both ops with each form of scales and activations."""
    for i, (fmt, how) in enumerate(itertools.product((NVFP4, MXFP4), HOW)):
        epilogue = {"alpha": torch.rand(24) + 0.5, "bias": torch.randn(24)} if i % 2 else {}
        one = mm_fp8_fp4.sample("", 9, 24, 576, fmt, ("128x4", "linear")[i % 2], ON_CPU, fast_accum=i > 3, **epilogue)
        yield "mm_fp8_fp4", with_tokens(one, **how, one_a_scale=i % 3 == 1)
        epilogue = {"alpha": torch.rand(3, 24) + 0.5, "bias": torch.randn(3, 24)} if i % 2 else {}
        one = grouped_mm_fp8_fp4.contiguous("", fmt, "128x4", [5, 0, 19], 24, 320, ON_CPU, **epilogue)
        yield "grouped_mm_fp8_fp4", with_tokens(one, **how)
        one = grouped_mm_fp8_fp4.masked("masked", fmt, "linear", [5, 0, 8], 8, 24, 320, ON_CPU, fast_accum=True)
        yield "grouped_mm_fp8_fp4", with_tokens(one, **how, one_a_scale=i % 3 == 0)


def bound(op, sample):
    given = arguments(OPS[op], sample)
    return given, OPS[op].bind(**given)


def test_launches():
    """Check that the launcher passes the operands that backends expect. With them the reference backend returns the
    op's result bit for bit."""
    for op, sample in calls():
        given, call = bound(op, sample)
        path, want = OPS[op].path, getattr(torch_cute_ops, op)(**given)
        problem = path.problem(call)
        assert problem.fast_accum == given["fast_accum"] and problem.k == 2 * given["b"].shape[-2]
        launcher = path.ready_launcher(problem, Choice(Reference(), ()), (), CPU, is_kept=True)
        out = torch.full_like(want, torch.nan)
        launcher.launch(call, out)
        assert torch.equal(out, want)
        assert path.rows(call) == (8 if "masked" in sample.name else given["a"].shape[0])


def test_keys():
    """Check that the keys of calls differ if the calls need different kernels, and do not depend on the number of rows
    within a bucket."""
    path = OPS["mm_fp8_fp4"].path
    one = mm_fp8_fp4.sample("", 9, 24, 256, NVFP4, "linear", ON_CPU)
    forms = [one, *(with_tokens(one, **how, one_a_scale=a) for how in HOW for a in (False, True))]
    keys = {path.key(bound("mm_fp8_fp4", form)[1], 0) for form in forms}
    assert len(keys) == len(forms)
    for how in HOW:
        made = [with_tokens(mm_fp8_fp4.sample("", m, 24, 256, NVFP4, "linear", ON_CPU), **how) for m in (9, 10, 300)]
        near, same, far = (path.key(bound("mm_fp8_fp4", form)[1], 0) for form in made)
        assert near == same != far


def test_properties_name_the_call():
    """Check that an example made from the properties of a call describes the same problem and number of rows."""
    for op, sample in calls():
        _, call = bound(op, sample)
        path = OPS[op].path
        properties = path.properties(call)
        example = OPS[op].bind(**path.example(device="meta", **properties))
        assert path.problem(example) == path.problem(call) and path.rows(example) == path.rows(call)
        assert path.properties(example) == properties


def test_backends():
    """Check that kernels for block scales do not handle per-token scales, and that the reference does."""
    for op, sample in calls():
        problem = OPS[op].path.problem(bound(op, sample)[1])
        names = set(select.candidates(problem))
        assert names == {"reference", "wgmma", "recode", "tcgen05", "mma_sync"}
        assert select.choose(problem, 9, CPU).backend.name == "reference"
        assert select.choose(problem, 9, HOPPER, "reference").backend.name == "reference"
    blocks = OPS["mm_fp8_fp4"].path.problem(bound("mm_fp8_fp4", mm_fp8_fp4.call(9, 24, device=ON_CPU))[1])
    assert {"wgmma_ss", "wgmma_rs", "recode", "mma_sync", "reference"} <= set(select.candidates(blocks))
    assert not blocks.fast_accum


def test_tuning_checks_results():
    """Check the operands and the bounds with which tuning checks candidates, against the formulas of the expected
    results."""
    for op, sample in calls():
        problem = OPS[op].path.problem(bound(op, sample)[1])
        bench = tune.Bench(problem, 24, CPU)
        assert bench.check(Candidate("reference", ())) is None
        operands, (out,) = bench._exact
        want, allowed = error_bounds.expected(problem, operands, out.numel() // problem.n)
        assert want.isfinite().all() and want.abs().max() > 1
        assert error_bounds.difference(out.reshape(want.shape).float() + 2 * allowed, want, allowed) is not None
        if problem.grouping.over == "none":
            given = {"a": operands.a, "b": operands.b, "a_scale": operands.a_scale, "b_scale": operands.b_scale}
            layout = None if problem.b.is_prepared else problem.b.scale_layout.name
            a = in_order(given)["a"].double()
            weight = weight_of_tokens(operands.b.t(), operands.b_scale, layout, problem.b.format.block_size)
            decoded = torch.from_numpy(weight.numbers * weight.factors).double()
            total = (a @ decoded.t()) * operands.a_scale.double()
            total *= 1 if operands.alpha is None else operands.alpha.double()
            total += 0 if operands.bias is None else operands.bias.double()
            assert torch.equal(want.double(), total)


def test_mxfp4_is_exact_near_the_largest_scale():
    """Check that one-hot rows of ``a`` give the weight itself in blocks whose scale is at least 2^-14 times the row's
    largest scale. In other blocks the error is at most 2^-16 times the row's largest scale."""
    n, k = 16, 512
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    top = torch.randint(20, 240, (n, 1))
    off = torch.randint(0, 20, (n, k // 32))
    off[:, 0] = 0
    scale = (top - off).to(torch.uint8)
    weight = torch_cute_ops.fp4_dequantize(codes, scale, block_size=32, out_dtype=torch.float32, scale_layout="linear")
    a, ones = torch.eye(k).to(torch.float8_e4m3fn), torch.ones(k, 1)
    for given in (scale, prepare_scales(scale, n, k, block_size=32)):
        got = multiply(a, codes.t(), ones, given, block_size=32, out_dtype=torch.float32).t()
        near = (off <= 14).repeat_interleave(32, 1)
        assert torch.equal(got[near], weight[near])
        assert ((got - weight).abs() <= 2.0**-10 * (top - 127 - 6).double().exp2()).all()


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_forms_give_the_same_bits(fmt):
    """Check that prepared and interleaved calls equal the ordinary call bit for bit, and that for K up to 128 calls
    with per-token scales equal calls with block scales."""
    for k in (64, 128, 832):
        blocks = mm_fp8_fp4.sample("", 19, 72, k, fmt, "128x4", ON_CPU, out_dtype=torch.float32)
        one = with_tokens(blocks)
        a, b, a_scale, b_scale = one.args
        prepared = prepare_scales(b_scale, 72, k, block_size=fmt.block_size)
        want = multiply(*one.args, **one.kwargs)
        for left, right in itertools.product((a, interleave_k(a)), (b_scale, prepared)):
            for fast_accum in (False, True):
                got = multiply(left, b, a_scale, right, fast_accum=fast_accum, **one.kwargs)
                assert torch.equal(got, want)


def test_other_gemms_refuse_interleaved_rows():
    """Check that GEMMs that refuse interleaved activations name the inverse of ``interleave_k`` in the error."""
    text = r"got a with shape \(4, 1, 256\); .*; if interleave_k wrote a, pass torch_cute_ops.deinterleave_k\(a, K\)"
    a = interleave_k(torch.ones(4, 256).to(torch.float8_e4m3fn))
    b, ones = torch.ones(8, 256).to(torch.float8_e4m3fn).t(), torch.ones(1)
    with pytest.raises(ValueError, match=f"cute::mm_fp8: {text}"):
        torch_cute_ops.mm_fp8(a, b, ones, ones)
    with pytest.raises(ValueError, match=f"cute::mm_fp8_block: {text}"):
        torch_cute_ops.mm_fp8_block(a, b, torch.ones(4, 2), torch.ones(1, 2))
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"cute::grouped_mm_fp8: {text}"):
        torch_cute_ops.grouped_mm_fp8(a, b[None], ones, ones, offsets)
    with pytest.raises(ValueError, match=r"pass torch_cute_ops\.deinterleave_k\(a, K\)"):
        torch_cute_ops.grouped_mm_fp8(a[None], b[None], ones, ones, counts=offsets[1:])
    codes, scale = torch_cute_ops.fp4_quantize(torch.randn(8, 256))
    with pytest.raises(ValueError, match=f"cute::mm_fp4: {text}"):
        torch_cute_ops.mm_fp4(a.view(torch.uint8), codes.t(), scale, scale)


def test_compiled():
    """Check a compiled layer with several numbers of rows and each form of operands, without a graph break."""

    def layer(a, b, a_scale, b_scale, prepared):
        ordinary = multiply(a, b, a_scale, b_scale)
        return ordinary, multiply(interleave_k(a), b, a_scale, prepared, fast_accum=True)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (7, 19):
        one = with_tokens(mm_fp8_fp4.sample("", m, 24, 576, NVFP4, "128x4", ON_CPU))
        args = *one.args, prepare_scales(one.args[3], 24, 576)
        for got, want in zip(compiled(*args), layer(*args), strict=True):
            assert torch.equal(got, want)
