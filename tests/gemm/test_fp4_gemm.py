"""``mm_fp4`` and ``mm_fp4_weight_only``: exact sums, comparison with float64, independence of M, and the call path."""

import inspect

import pytest
import torch
from expected._fp4_gemm import results
from hypothesis import given as given_by
from hypothesis import strategies as st
from samples import mm_fp4, mm_fp4_weight_only, sample_inputs
from samples._fp4_gemm import POWERS
from support import spec
from support.cases import arguments, op_cases, run
from support.launch_model import forget_all, launches  # noqa: F401  (a fixture)

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

SAMPLES = {"mm_fp4": mm_fp4.SAMPLES, "mm_fp4_weight_only": mm_fp4_weight_only.SAMPLES}
by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.id in SAMPLES])


def backends_of(op, sample, device):
    """Return the names of the backends that support a call."""
    given = arguments(op, sample)
    reasons = op.backends(torch.device(device), **given)
    return [name for name, reason in reasons.items() if reason is None]


@by_op
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_exact_sums(op, fmt, layout, device):
    """Check that every backend returns the exact sum if every partial sum is exact in float32."""
    samples = SAMPLES[op.name]
    if layout not in samples.layouts:
        return
    scales = POWERS[fmt.scale_format]
    sample = samples.sample("", 37, 56, 320, fmt, layout, torch.device(device), scales=scales, out_dtype=torch.float32)
    if not samples.has_a_scale:
        sample.args[0].copy_(torch.randint(-8, 9, (37, 320)))
    (want,) = results(arguments(op, sample))
    assert want.abs().max() > 0
    for backend in backends_of(op, sample, device):
        sample.kwargs["backend"] = backend
        assert torch.equal(run(op, sample)[0].cpu(), want), backend


@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_one_hot_rows_give_columns_of_the_weight(op, fmt, device):
    """Check that, if row i of ``a`` is the i-th unit vector, row i of the result is the decoded row i of ``b``."""
    k, n = 96, 40
    sample = SAMPLES[op.name].sample("", k, n, k, fmt, "linear", torch.device(device), out_dtype=torch.float32)
    given = arguments(op, sample)
    if "a_scale" in given:
        codes = torch.zeros(k, k, dtype=torch.uint8)
        codes.fill_diagonal_(2)  # the e2m1 code of 1
        given["a"].copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        given["a_scale"].view(torch.uint8).fill_(0x38 if fmt == NVFP4 else 127)
    else:
        given["a"].copy_(torch.eye(k))
    weight = torch_cute_ops.fp4_dequantize(
        given["b"].t(), given["b_scale"], block_size=fmt.block_size, out_dtype=torch.float32
    )
    assert torch.equal(op.function(**given), weight.t())


def drawn_choices(data, layouts):
    """Draw a format, a scale layout and the result's dtype."""
    fmt, layout = data.draw(st.sampled_from((NVFP4, MXFP4))), data.draw(st.sampled_from(layouts))
    return fmt, layout, data.draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))


@by_op
@given_by(data=st.data())
def test_any_size(op, data):
    """Check random M, N and K, formats, layouts and output dtypes, within the error of fp32 accumulation."""
    fmt, layout, out_dtype = drawn_choices(data, SAMPLES[op.name].layouts)
    m, n = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 70))
    k = data.draw(st.integers(1, 12)) * fmt.block_size
    sample = SAMPLES[op.name].sample("", m, n, k, fmt, layout, torch.device("cpu"), out_dtype=out_dtype)
    given = arguments(op, sample)
    (got,), (want,) = run(op, sample), results(given)
    assert got.shape == (m, n)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(out_dtype).eps, atol=1e-6)


def test_rows_of_the_reference_do_not_depend_on_their_number():
    """Check that the reference sums a row in the same order alone and among other rows. Large terms that cancel make
    the order visible."""
    layout = SCALE_LAYOUTS["linear"]
    for _ in range(300):
        codes = torch.randint(0, 256, (29, 48), dtype=torch.uint8)
        scale = torch.randint(60, 190, (29, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        a, a_scale, b, b_scale = codes[:5], scale[:5], codes[5:], scale[5:]
        every = fp4_gemm(a, a_scale, b, b_scale, None, None, torch.float32, MXFP4, layout, layout)
        alone = fp4_gemm(a[2:3], a_scale[2:3], b, b_scale, None, None, torch.float32, MXFP4, layout, layout)
        assert torch.equal(every[2:3], alone)


@by_op
def test_a_weight_as_it_is_trained(op, device):
    """Check the GEMM with a weight that the package quantised in the default layout, against the decoded weight."""
    x, weight = torch.randn(9, 256, device=device), torch.randn(72, 256, device=device)
    g = torch_cute_ops.nvfp4_global_scale(weight.abs().amax())
    codes, scale = torch_cute_ops.fp4_quantize(weight, g)
    decoded = torch_cute_ops.fp4_dequantize(codes, scale, g, out_dtype=torch.float32)
    if op.name == "mm_fp4":
        a, a_scale = torch_cute_ops.fp4_quantize(x)
        x = torch_cute_ops.fp4_dequantize(a, a_scale, out_dtype=torch.float32)
        got = torch_cute_ops.mm_fp4(a, codes.t(), a_scale, scale, 1 / g, out_dtype=torch.float32)
    else:
        x = x.bfloat16().float()
        got = torch_cute_ops.mm_fp4_weight_only(x.bfloat16(), codes.t(), scale, 1 / g, out_dtype=torch.float32)
    want = x.double() @ decoded.double().t()
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


# Kernels and example calls


@by_op
@pytest.mark.parametrize("backend", ["mma_sync", "cublas"])
def test_precompile_keeps_every_kernel(op, backend, monkeypatch):
    """Check that ``precompile`` stores the GEMM's kernel, and a decoding kernel for each layout that must be
    decoded."""
    kept = []
    monkeypatch.setattr("torch_cute_ops.registry.keep", lambda kernel, arch: kept.append((kernel, arch.name)))
    layout = "8x4" if op.name == "mm_fp4" else "128x4"
    torch_cute_ops.precompile(
        op.name, "sm_90a", n=64, k=128, alpha="column", bias_dtype=torch.float32, scale_layout=layout, backend=backend
    )
    assert {arch for _, arch in kept} == {"sm_90a"}
    configs = [kernel.config for kernel, _ in kept]
    gemms = [config for config in configs if hasattr(config, "split_k")]
    decoded = {config.layout.name for config in configs if config not in gemms}
    assert len(gemms) == (backend == "mma_sync")
    assert all(config.epilogue.alpha == "column" and config.epilogue.bias_dtype == torch.float32 for config in gemms)
    activations = {"8x4"} if op.name == "mm_fp4" else set()
    assert decoded == activations | ({"128x4"} if backend == "cublas" else set())


@by_op
def test_the_example_is_a_call(op):
    """Check that the example call that ``warmup`` makes has the requested properties."""
    kwargs = op.path.example(n=48, k=64, m=3, alpha="column", block_size=32, out_dtype=torch.float32, device="cpu")
    given = inspect.signature(op.function).bind(**kwargs)
    assert given.arguments["alpha"].shape == (48,)
    out = op.function(**kwargs)
    assert out.shape == (3, 48) and out.dtype == torch.float32 and not out.any()


@by_op
def test_every_call_has_kernels(op):
    """Check that kernels can be planned on a GPU for every sample, even for a sample without columns, which launches no
    kernel."""
    for sample in sample_inputs(op.name, torch.device("cpu")):
        given = arguments(op, sample) | {"backend": "auto"}
        is_linear = spec.layout_named(given["scale_layout"], given["b_scale"]) == "linear"
        if is_linear and given["b"].shape[0] * 2 // given["block_size"] % 4:
            continue  # skip cublas, whose kernel depends on K
        kernels = op.kernels(ARCHS["sm_90a"], **given)
        assert kernels and all(kernel.make().config is not None for kernel in kernels), sample.name


# Reuse between calls


@pytest.mark.usefixtures("launches")
def test_a_call_after_a_capture_is_tuned(monkeypatch):
    """Check that a call in a capture is not tuned, and that later calls do not reuse its untuned choice."""
    op = OPS["mm_fp4_weight_only"]
    tuned, capturing = [], False
    monkeypatch.setattr("torch_cute_ops.gemm.tune.tune", lambda *args: tuned.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    sample = SAMPLES[op.name].sample("", 64, 512, 1024, NVFP4, "128x4", torch.device("cpu"))
    op.cuda(*sample.args, **sample.kwargs)
    with torch_cute_ops.autotune():
        capturing = True
        op.cuda(*sample.args, **sample.kwargs)
        assert not tuned
        capturing = False
        op.cuda(*sample.args, **sample.kwargs)
        op.cuda(*sample.args, **sample.kwargs)
    assert len(tuned) == 1


@pytest.mark.usefixtures("launches")
def test_calls_of_the_same_kind_are_not_checked_again(monkeypatch):
    """Check that a second call with the same shapes reuses its launcher without checks, and that a new alpha, layout or
    dtype is checked."""
    op = OPS["mm_fp4_weight_only"]
    checked = []
    check = Gemm.check
    monkeypatch.setattr(Gemm, "check", lambda self, call: checked.append(call) or check(self, call))
    sample = SAMPLES[op.name].sample("", 64, 512, 1024, NVFP4, "128x4", torch.device("cpu"))
    a, b, b_scale = sample.args
    kwargs = {**sample.kwargs, "backend": "wgmma"}
    for expected in (1, 1):
        op.cuda(a, b, b_scale, **kwargs)
        assert len(checked) == expected
    for args in (
        (a[:63], b, b_scale),
        (a, b, b_scale, torch.ones(1)),
        (a.half(), b, b_scale),
        (a[:, ::1].t().t(), b, b_scale),
    ):
        op.cuda(*args, **kwargs)
    assert len(checked) == 3  # no check for rows of the same bucket, nor for the same layout in memory
    padded = torch.zeros(*b_scale.shape[:-1], 8, dtype=b_scale.dtype)[..., :4].copy_(b_scale)
    for strided in ((a.t().contiguous().t(), b, b_scale), (a, b, padded)):
        op.cuda(*strided, **kwargs)  # copied
    assert len(checked) == 5


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_block_scaled_mma_takes_codes(launches, fmt, layout, monkeypatch):  # noqa: F811
    """Check that GPUs with block-scaled MMAs multiply codes in one launch. On other GPUs a first launch decodes
    ``a``."""
    op = OPS["mm_fp4"]
    sample = SAMPLES["mm_fp4"].sample("", 21, 136, 512, fmt, layout, torch.device("cpu"), out_dtype=torch.float32)
    (want,) = results(arguments(op, sample))
    for arch, names in (("sm_120a", ["FP4MmaKernel"]), ("sm_100a", ["FP4DequantKernel", "FP4MmaKernel"])):
        target = Target(torch.device("cuda", 0), ARCHS[arch], ARCHS[arch].gpus[0].sms)
        monkeypatch.setattr(select, "target_of", lambda device, target=target: target)
        forget_all()
        launches.forget()
        got = op.cuda(*sample.args, **sample.kwargs, backend="mma_sync")
        assert [type(kernel).__name__ for kernel, _ in launches.calls] == names
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
