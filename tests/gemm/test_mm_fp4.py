"""The FP4 products: exact sums, float64, what does not depend on M, backends and the choice among them."""

import dataclasses
import inspect

import pytest
import torch
from expected._fp4_product import results
from hypothesis import given as given_by
from hypothesis import strategies as st
from support.cases import arguments, op_cases, run
from support.launch_model import launches  # noqa: F401  (a fixture)

import torch_cute_ops
from torch_cute_ops import mm_backends
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.mm_backends import BACKENDS, Product, Target
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._fp4_product import FP4Product
from torch_cute_ops.reference.mm_fp4 import product as product_reference
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.samples import mm_fp4, mm_fp4_weight_only
from torch_cute_ops.testing.samples._fp4_product import POWERS

PRODUCTS = {"mm_fp4": mm_fp4.PRODUCT, "mm_fp4_weight_only": mm_fp4_weight_only.PRODUCT}
by_op = pytest.mark.parametrize("op", [case for case in op_cases() if case.id in PRODUCTS])
HOPPER = Target(torch.device("cuda"), ARCHS["sm_90a"], 132)


def backends_of(op, sample, device):
    """Names of the backends that can compute a call."""
    given = arguments(op, sample)
    reasons = op.backends(torch.device(device), *(value for name, value in given.items()))
    return [name for name, reason in reasons.items() if reason is None]


@by_op
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_exact_sums(op, fmt, layout, device):
    """Where every partial sum is a float32, every backend gives the sum."""
    samples = PRODUCTS[op.name]
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
    """Row i of ``a`` is the i-th unit vector, so row i of the product is what row i of ``b`` decodes to."""
    k, n = 96, 40
    sample = PRODUCTS[op.name].sample("", k, n, k, fmt, "linear", torch.device(device), out_dtype=torch.float32)
    given = arguments(op, sample)
    if "a_scale" in given:
        codes = torch.zeros(k, k, dtype=torch.uint8)
        codes.fill_diagonal_(2)  # e2m1 of 1
        given["a"].copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        given["a_scale"].view(torch.uint8).fill_(0x38 if fmt == NVFP4 else 127)
    else:
        given["a"].copy_(torch.eye(k))
    scale, layout = given["b_scale"], given["scale_layout"]
    weight = torch_cute_ops.fp4_dequantize(
        given["b"].t(), scale, block_size=fmt.block_size, scale_layout=layout, out_dtype=torch.float32
    )
    assert torch.equal(op.function(**given), weight.t())


@by_op
@given_by(data=st.data())
def test_any_size(op, data):
    """Any M, N and K, format, layout and output; within what fp32 accumulation may lose."""
    samples = PRODUCTS[op.name]
    fmt = data.draw(st.sampled_from((NVFP4, MXFP4)))
    m, n = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 70))
    k = data.draw(st.integers(1, 12)) * fmt.block_size
    layout = data.draw(st.sampled_from(samples.layouts))
    out_dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    sample = samples.sample("", m, n, k, fmt, layout, torch.device("cpu"), out_dtype=out_dtype)
    given = arguments(op, sample)
    (got,), (want,) = run(op, sample), results(given)
    assert got.shape == (m, n)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(out_dtype).eps, atol=1e-6)


def test_rows_of_the_reference_do_not_depend_on_their_number():
    """Where large terms cancel, the order of the sum shows: it is the same for a row alone and among others."""
    layout = SCALE_LAYOUTS["linear"]
    for _ in range(300):
        codes = torch.randint(0, 256, (29, 48), dtype=torch.uint8)
        scale = torch.randint(60, 190, (29, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        a, a_scale, b, b_scale = codes[:5], scale[:5], codes[5:], scale[5:]
        every = product_reference(a, a_scale, b, b_scale, None, torch.float32, MXFP4, layout, layout)
        alone = product_reference(a[2:3], a_scale[2:3], b, b_scale, None, torch.float32, MXFP4, layout, layout)
        assert torch.equal(every[2:3], alone)


@by_op
def test_a_weight_as_it_is_trained(op, device):
    """Quantised by the package's own op: the product is that of the numbers that the codes stand for."""
    x, weight = torch.randn(9, 256, device=device), torch.randn(72, 256, device=device)
    g = 2688 / weight.abs().amax().reshape(1)
    codes, scale = torch_cute_ops.fp4_quantize(weight, g, scale_layout="128x4")
    decoded = torch_cute_ops.fp4_dequantize(codes, scale, g, scale_layout="128x4", out_dtype=torch.float32)
    if op.name == "mm_fp4":
        a, a_scale = torch_cute_ops.fp4_quantize(x, scale_layout="128x4")
        x = torch_cute_ops.fp4_dequantize(a, a_scale, scale_layout="128x4", out_dtype=torch.float32)
        got = torch_cute_ops.mm_fp4(a, codes.t(), a_scale, scale, 1 / g, torch.float32)
    else:
        x = x.bfloat16().float()
        got = torch_cute_ops.mm_fp4_weight_only(x.bfloat16(), codes.t(), scale, 1 / g, torch.float32)
    want = x.double() @ decoded.double().t()
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


# The choice


def product_of(k=7168, n=4096, fmt=NVFP4, a_dtype=torch.uint8, out_dtype=torch.bfloat16):
    layout = SCALE_LAYOUTS["128x4"]
    return Product(n, k, fmt, a_dtype, layout if a_dtype == torch.uint8 else None, layout, False, out_dtype)


def test_bucket():
    """Step 8 to 128, 16 to 256, 32 to 512, and a sixteenth of the next power of two above; never fewer rows than M."""
    assert [mm_backends.bucket(m) for m in (0, 1, 8, 9, 127, 128, 129, 256, 257, 512, 513, 1025, 16_384)] == [
        *(8, 8, 8, 16, 128, 128, 144, 256, 288, 512, 576, 1152, 16_384)
    ]
    for m in range(1, 5000):
        planned = mm_backends.bucket(m)
        assert m <= planned == mm_backends.bucket(planned) <= max(8, m * 1.13 + 8)


def test_auto_prefers_the_backend_that_is_fast():
    """On a GPU anything is faster than the reference."""
    for m in (1, 64, 4096):
        assert mm_backends.choose(product_of(), m, HOPPER).backend.name != "reference"


def test_auto_takes_no_reference_on_a_gpu():
    """It would be slow without a reason: what no other backend can is refused, with what helps."""
    product = product_of(fmt=MXFP4, a_dtype=torch.float16, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"cublas: the numbers of MXFP4 exceed float16.*pass a as bfloat16"):
        mm_backends.choose(product, 8, HOPPER)
    assert mm_backends.choose(product, 8, HOPPER, "reference").backend.name == "reference"


def test_no_backend_left_tells_every_reason(monkeypatch):
    monkeypatch.setattr(type(BACKENDS["reference"]), "reason_unsupported", lambda *args: "is being tested")
    cpu = Target(torch.device("cpu"), None, 1)
    told = r"no backend: wgmma: needs a CUDA device; .*; mma_sync: needs .*; reference: is being tested"
    with pytest.raises(ValueError, match=told):
        mm_backends.choose(product_of(), 8, cpu)


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_answer(name):
    """Every backend's tactics have an estimate, more rows take no less time, and its kernels are those it wants."""
    backend = BACKENDS[name]
    for product in (product_of(), product_of(a_dtype=torch.bfloat16), product_of(fmt=MXFP4, out_dtype=torch.float32)):
        if name == "routed":
            product = dataclasses.replace(product, experts=product.k // 128)
        assert backend.reason_unsupported(product, HOPPER) is None
        for tactic in backend.tactics(product, 64, HOPPER):
            few, many = (backend.estimate(product, m, tactic, HOPPER) for m in (1, 4096))
            assert 0 < few < many
            assert all(kernel.make().config is not None for kernel in backend.kernels(product, tactic, HOPPER.arch))


def test_bytes_and_flops():
    """By hand: 4-bit codes and a byte a block; 16-bit results."""
    product = product_of(k=64, n=24)
    assert product.bytes_moved(10) == (24 + 10) * (32 + 4) + 10 * 24 * 2
    assert product_of(k=64, n=24, a_dtype=torch.bfloat16).bytes_moved(10) == 24 * 36 + 10 * 128 + 480
    assert product.flops(10) == 2 * 10 * 24 * 64


# What users ask


@by_op
def test_backends_are_told(op):
    no_gpu = "needs a CUDA device; the tensors are on cpu"
    facts = torch_cute_ops.backends(op.name, n=64, k=128, device="cpu")
    routed = "computes products with experts alone"
    assert facts == {"wgmma": no_gpu, "mma_sync": no_gpu, "routed": routed, "cublas": no_gpu, "reference": None}


def test_backends_of_an_op_without():
    with pytest.raises(ValueError, match=r"'fp4_quantize' has one implementation .* mm_fp4, mm_fp4_weight_only"):
        torch_cute_ops.backends("fp4_quantize", hidden=64)


@by_op
@pytest.mark.parametrize("backend", ["mma_sync", "cublas"])
def test_precompile_keeps_every_kernel(op, backend, monkeypatch):
    """The product's, and one for each layout of what is decoded in memory."""
    kept = []
    monkeypatch.setattr("torch_cute_ops.registry.keep", lambda kernel, arch: kept.append((kernel, arch.name)))
    layout = "8x4" if op.name == "mm_fp4" else "128x4"
    torch_cute_ops.precompile(op.name, "sm_90a", n=64, k=128, alpha=True, scale_layout=layout, backend=backend)
    assert {arch for _, arch in kept} == {"sm_90a"}
    configs = [kernel.config for kernel, _ in kept]
    products = [config for config in configs if hasattr(config, "splits")]
    decoded = {config.layout.name for config in configs if config not in products}
    assert len(products) == (backend == "mma_sync")
    assert all(config.has_alpha and config.layout.name == "128x4" for config in products)
    activations = {"8x4"} if op.name == "mm_fp4" else set()
    assert decoded == activations | ({"128x4"} if backend == "cublas" else set())


@by_op
def test_the_example_is_a_call(op):
    """What ``warmup`` calls has the sizes and dtypes of the facts."""
    args, kwargs = op.example(n=48, k=64, m=3, alpha=True, block_size=32, out_dtype=torch.float32, device="cpu")
    given = inspect.signature(op.function).bind(*args, **kwargs)
    assert given.arguments["alpha"].shape == (1,)
    out = op.function(*args, **kwargs)
    assert out.shape == (3, 48) and out.dtype == torch.float32 and not out.any()


def test_products_are_in_the_registry():
    experts = {"moe_fc2_fp4", "moe_fc2_fp4_weight_only"}
    assert {name for name, op in OPS.items() if op.backends is not None} == {*PRODUCTS, *experts}


@by_op
def test_every_call_has_kernels(op):
    """On a GPU; also a product without columns, which nothing computes."""
    for sample in op.sample_inputs(torch.device("cpu")):
        given = arguments(op, sample) | {"backend": "auto"}
        if given["scale_layout"] == "linear" and given["b"].shape[0] * 2 // given["block_size"] % 4:
            continue  # for cublas alone, whose kernel follows K
        kernels = op.kernels(ARCHS["sm_90a"], **given)
        assert kernels and all(kernel.make().config is not None for kernel in kernels), sample.name


# What calls share


@pytest.mark.usefixtures("launches")
def test_a_call_after_a_capture_is_tuned(monkeypatch):
    """In a capture nothing is; what was taken there is not kept for calls outside of it."""
    op = OPS["mm_fp4_weight_only"]
    tuned, capturing = [], False
    monkeypatch.setattr("torch_cute_ops.ops._fp4_product._tune", lambda *args: tuned.append(args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    sample = PRODUCTS[op.name].sample("", 64, 512, 1024, NVFP4, "128x4", torch.device("cpu"))
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
def test_usual_calls_are_not_checked_again(monkeypatch):
    """The second call of the same shapes finds what computes it; another alpha, layout or dtype is another call."""
    op = OPS["mm_fp4_weight_only"]
    checked = []
    check = FP4Product.check
    monkeypatch.setattr(FP4Product, "check", lambda self, given: checked.append(given) or check(self, given))
    sample = PRODUCTS[op.name].sample("", 64, 512, 1024, NVFP4, "128x4", torch.device("cpu"))
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
    assert len(checked) == 4  # the last lies as the first
    for wrong in ((a.t().contiguous().t(), b, b_scale), (a, b, b_scale.t().contiguous().t())):
        op.cuda(*wrong, **kwargs)  # copied
    assert len(checked) == 6


@by_op
def test_an_output_that_is_an_input_is_refused(op, device):
    """CTAs would write what others still read."""
    sample = PRODUCTS[op.name].sample("", 64, 64, 64, NVFP4, "128x4", torch.device(device), out_dtype=torch.bfloat16)
    given = arguments(op, sample)
    storage = torch.zeros(64 * 64 * 2 + 16, dtype=torch.uint8, device=device)
    a = given["a"]
    given["a"] = storage[: a.numel() * a.element_size()].view(a.dtype).view(a.shape)
    out = storage[: 64 * 64 * 2].view(torch.bfloat16).view(64, 64)
    if device == "cuda":
        with pytest.raises(ValueError, match=rf"cute::{op.name}: out shares memory with a"):
            op.function(**given, out=out)
    with pytest.raises(ValueError, match=r"cute::op: out shares memory with a"):
        _checks.check_apart("op", "out", out, "a", given["a"])
    _checks.check_apart("op", "out", out, "a", storage[64 * 64 * 2 :])


def check_told_warmup(op, sample, monkeypatch):
    """A call that meets a kernel that is not ready tells a warm-up, whose example has every fact of the call."""
    with pytest.raises(RuntimeError, match=rf"cute::{op.name} met a kernel that is not ready") as raised:
        op.cuda(*sample.args, **sample.kwargs)
    told = str(raised.value)[str(raised.value).index("torch_cute_ops.warmup(") :]
    calls = []
    monkeypatch.setattr(torch_cute_ops, "warmup", lambda *args, **kwargs: calls.append((args, kwargs)))
    eval(told, {"torch_cute_ops": torch_cute_ops, "torch": torch})
    ((name,), facts) = calls[0]
    args, kwargs = op.example(**{**facts, "device": "cpu"})
    given, want = inspect.signature(op.function).bind(*args, **kwargs), arguments(op, sample)
    assert name == op.name
    for key, value in given.arguments.items():
        if isinstance(value, torch.Tensor):
            facts_of = [(t.shape, t.dtype, t.stride()) for t in (value, want[key])]
            assert facts_of[0] == facts_of[1], key
        else:
            assert value == want[key], key


@by_op
def test_capture_tells_the_warmup(op, monkeypatch):
    """Its call has every fact of this one, and is one that the op takes."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(mm_backends, "target_of", lambda device: HOPPER)
    sample = PRODUCTS[op.name].sample("", 3, 48, 96, NVFP4, "linear", torch.device("cpu"), out_dtype=torch.float32)
    check_told_warmup(op, sample, monkeypatch)
