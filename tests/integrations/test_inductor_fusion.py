"""Norms and gates that the Inductor pass fuses with quantisations, and norms and gates that it must not change."""

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from support.inductor_graphs import (
    EPS,
    Compiler,
    H,
    assert_equal,
    by_norm,
    compiled,
    fresh,  # noqa: F401  (a fixture)
    late_norm,
    llama_norm,
    numbers,
    torch_norm,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_cute_ops as tco
from torch_cute_ops.integrations import inductor

aten = torch.ops.aten


def kind(op, suffix, scalar=None, **named):
    """Return a quantisation ``(x, g) → codes and scales``, the suffix of the fused ops, and their arguments.

    Args:
        op: op that quantises.
        suffix: suffix of the fused ops.
        scalar: name of the argument that ``g`` becomes, or None if the op does not take ``g``.
        named: other arguments.
    """

    def arguments(g):
        return named if scalar is None else {scalar: g, **named}

    return lambda x, g: op(x, **arguments(g)), suffix, arguments


QUANTISE = {
    "nvfp4": kind(tco.fp4_quantize, "fp4quant", "global_scale"),
    "mxfp4 linear": kind(tco.fp4_quantize, "fp4quant", block_size=32, scale_layout="linear"),
    "nvfp4 row": kind(tco.fp4_quantize_per_token, "fp4quant_per_token"),
    "nvfp4 row linear": kind(tco.fp4_quantize_per_token, "fp4quant_per_token", scale_layout="linear"),
    "fp8 row": kind(tco.fp8_quantize, "fp8quant"),
    "fp8 interleaved": kind(tco.fp8_quantize, "fp8quant", interleaved=True),
    "fp8 static": kind(tco.fp8_quantize, "fp8quant", "scale", granularity="tensor"),
    "fp8 block": kind(tco.fp8_quantize, "fp8quant", granularity="block128"),
    "fp8 powers": kind(tco.fp8_quantize, "fp8quant", granularity="block128", scale_format="ue8m0"),
    "mxfp8 tiles": kind(tco.fp8_quantize, "fp8quant", granularity="block32"),
    "mxfp8 linear": kind(tco.fp8_quantize, "fp8quant", granularity="block32", scale_layout="linear"),
}
by_format = pytest.mark.parametrize("kind", QUANTISE.values(), ids=QUANTISE)


# Fused patterns


@by_norm
def test_norm(norm, device):
    """Check that norms are fused for rows with several leading dimensions, which linear layers flatten."""
    x, weight, g = numbers(2, 3, H, device=device), numbers(H, device=device), torch.full((1,), 3.0, device=device)
    got, compiler = compiled(lambda x, weight, g: tco.fp4_quantize(norm(x, weight).flatten(0, 1), g), x, weight, g)
    assert_equal(got, tco.rmsnorm_fp4quant(x.flatten(0, 1), weight, g, EPS))
    assert compiler.quantising() == {"rmsnorm_fp4quant": 1} and "aten.rsqrt" not in compiler.calls()


@pytest.mark.parametrize(("dtype", "result"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_norm_in_another_dtype_that_is_read(dtype, result):
    """Check that a norm is not fused if another node reads it in another dtype than the dtype of the input, in which
    our op would return it."""
    x, weight = numbers(4, H, dtype=dtype), numbers(H, dtype=torch.float32)

    def layer(x, weight):
        y = late_norm(x.float(), weight).to(result)
        return *tco.fp4_quantize(y), y

    got, compiler = compiled(layer, x, weight)
    assert_equal(got, layer(x, weight))
    assert compiler.ours() == {"fp4_quantize": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_gemma(dtype, device):
    """Check that the RMSNorm of Gemma 3, which multiplies by 1 + weight, becomes one op, with and without a
    residual."""
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    norm = gemma.Gemma3RMSNorm(H, EPS).to(device, dtype)
    norm.weight.data.normal_()
    x = numbers(4, H, device=device, dtype=dtype)

    def layer(x):
        total = x * 2 + x
        return *tco.fp4_quantize(norm(x)), *tco.fp8_quantize(norm(total))

    got, compiler = compiled(layer, x)
    named = {"eps": EPS, "weight_plus_one": True}
    weight = norm.weight.data
    assert_equal(got, (*tco.rmsnorm_fp4quant(x, weight, **named), *tco.rmsnorm_fp8quant(x * 2 + x, weight, **named)))
    assert compiler.quantising() == {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp8quant": 1}
    assert "aten.add.Tensor" not in compiler.calls() and "aten.add.Scalar" not in compiler.calls()
    info = torch.finfo(dtype)
    torch.testing.assert_close(
        tco.rmsnorm(x, weight, **named), norm(x).detach(), rtol=max(info.eps, 1e-6), atol=info.tiny
    )


@pytest.mark.parametrize(("approximate", "gate"), [("tanh", "gelu_tanh"), ("none", "gelu")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu(approximate, gate, dtype, device):
    """Check that a gate with GELU and the quantisation after it are fused."""
    x = numbers(4, 2 * H, device=device, dtype=dtype)

    def layer(x):
        first, up = x.chunk(2, -1)
        gated = F.gelu(first, approximate=approximate) * up
        return *tco.fp4_quantize(gated), *tco.fp8_quantize(gated)

    got, compiler = compiled(layer, x)
    assert_equal(got, (*tco.silu_mul_fp4quant(x, gate=gate), *tco.silu_mul_fp8quant(x, gate=gate)))
    assert compiler.ours() == {"silu_mul_fp4quant": 1, "silu_mul_fp8quant": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_without_weight(dtype, device):
    """Check that an RMSNorm without a weight becomes one op, with and without a residual, and before a 16-bit GEMM."""
    x, residual = (numbers(4, H, device=device, dtype=dtype) for _ in range(2))
    codes, scale = tco.fp4_quantize(numbers(H, H, device=device))

    def layer(x, residual):
        total = x * 2 + residual
        results = *tco.fp4_quantize(F.rms_norm(x, (H,), None, EPS)), *tco.fp8_quantize(F.rms_norm(total, (H,), eps=EPS))
        if dtype == torch.float32:
            return results
        return *results, tco.mm_fp4_weight_only(F.rms_norm(residual, (H,), None, EPS), codes.t(), scale)

    got, compiler = compiled(layer, x, residual)
    nothing = x.new_empty(0)
    want = *tco.rmsnorm_fp4quant(x, nothing, eps=EPS), *tco.rmsnorm_fp8quant(x * 2 + residual, nothing, eps=EPS)
    ours = {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp8quant": 1}
    if dtype == torch.bfloat16:
        want = *want, tco.mm_fp4_weight_only(tco.rmsnorm(residual, nothing, EPS), codes.t(), scale)
        ours |= {"rmsnorm": 1, "mm_fp4_weight_only": 1}
    assert_equal(got, want)
    assert compiler.ours() == ours and "aten.rsqrt" not in compiler.calls()


def plus_one_norm(x, weight):
    """Compute RMSNorm as Gemma does, with the factor 1 + weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())).to(x.dtype)


NORMS_WITH_BIAS = {
    "llama": lambda x, weight, bias: llama_norm(x, weight) + bias,
    "bias first": lambda x, weight, bias: bias + torch_norm(x, weight),
    "one rounding": lambda x, weight, bias: (late_norm(x.float(), weight.float()) + bias.float()).to(x.dtype),
    "plus one": lambda x, weight, bias: plus_one_norm(x, weight) + bias,
}


@pytest.mark.parametrize("form", NORMS_WITH_BIAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_with_bias(form, dtype, device):
    """Check that RMSNorm with a bias becomes one op, with and without a residual, with another reader, and before a
    16-bit GEMM, and that the op computes the norm of float64."""
    x, residual = (numbers(4, H, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (numbers(H, device=device, dtype=dtype) for _ in range(2))
    codes, scale = tco.fp4_quantize(numbers(H, H, device=device))
    norm = NORMS_WITH_BIAS[form]

    def layer(x, residual, weight, bias):
        total, read = x * 2 + residual, norm(residual, weight, bias)
        results = (
            *tco.fp4_quantize(norm(x, weight, bias)), *tco.fp8_quantize(norm(total, weight, bias)),
            *tco.fp4_quantize(read), read, total,
        )  # fmt: skip
        if dtype == torch.float32:
            return results
        return *results, tco.mm_fp4_weight_only(norm(x * 3, weight, bias), codes.t(), scale)

    got, compiler = compiled(layer, x, residual, weight, bias)
    named = {"weight": weight, "bias": bias, "eps": EPS, "weight_plus_one": form == "plus one"}
    want = (
        *tco.rmsnorm_fp4quant(x, **named), *tco.rmsnorm_fp8quant(x * 2 + residual, **named),
        *tco.rmsnorm_fp4quant_with_norm(residual, **named), x * 2 + residual,
    )  # fmt: skip
    ours = {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp8quant": 1, "rmsnorm_fp4quant_with_norm": 1}
    if dtype == torch.bfloat16:
        want = *want, tco.mm_fp4_weight_only(tco.rmsnorm(x * 3, **named), codes.t(), scale)
        ours |= {"rmsnorm": 1, "mm_fp4_weight_only": 1}
    assert_equal(got, want)
    assert compiler.ours() == ours and "aten.rsqrt" not in compiler.calls()
    exact = residual.double() / (residual.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    product = exact * (weight.double() + (form == "plus one"))
    error = (got[6].double() - product - bias.double()).abs()
    # One rounding to the dtype, and rounding errors of float32 before the bias, which may cancel most of the product
    assert (error <= 2**-18 * product.abs() + torch.finfo(dtype).eps / 2 * (product + bias.double()).abs()).all()


def test_values_of_a_norm_with_bias(device):
    """Check codes of a norm with a bias that are known: rows of ±2 have the norm ±1, weights are 2 and 3, and the bias
    1 makes the sums 3, -1, 4 and -2."""
    x = torch.tensor([2.0, -2.0]).repeat(1, H // 2).bfloat16().to(device)
    weight = torch.tensor([2.0, 2.0, 3.0, 3.0]).repeat(H // 4).bfloat16().to(device)
    bias, one = torch.ones_like(weight), torch.ones(1, device=device)
    (codes, _), compiler = compiled(
        lambda x: tco.fp8_quantize(llama_norm(x, weight) + bias, one, granularity="tensor"), x
    )
    assert compiler.ours() == {"rmsnorm_fp8quant": 1}
    assert codes[0].float().tolist() == [3.0, -1.0, 4.0, -2.0] * (H // 4)


@pytest.mark.parametrize(
    ("dtypes", "name"),
    [
        ((torch.float32, torch.float32), "add_rmsnorm_fp8quant"),
        ((torch.bfloat16, torch.float32), "fp8_quantize"),
        ((torch.float32, torch.bfloat16), "fp8_quantize"),
    ],
)
def test_dtypes_of_a_bias(dtypes, name):
    """Check a weight and a bias of float32, or of two dtypes, which the ops do not take, after the addition of 16-bit
    rows to a float32 residual."""
    x, residual = numbers(4, H), numbers(4, H, dtype=torch.float32)
    weight, bias = (numbers(H, dtype=dtype) for dtype in dtypes)

    def layer(x, residual):
        total = residual * 2 + x
        return *tco.fp8_quantize((weight * F.rms_norm(total, (H,), None, EPS) + bias).bfloat16()), total

    got, compiler = compiled(layer, x, residual)
    assert compiler.quantising() == {name: 1}
    if name == "fp8_quantize":
        assert_equal(got, layer(x, residual))
        return
    total = residual * 2
    assert_equal(got, (*tco.add_rmsnorm_fp8quant(x, total, weight, eps=EPS, bias=bias), total))


def test_a_bias_that_is_widened():
    """Check a 16-bit bias next to a float32 weight, both of which the model converts to float32."""
    x, weight, bias = numbers(4, H), numbers(H, dtype=torch.float32), numbers(H)
    got, compiler = compiled(lambda x: tco.fp8_quantize((late_norm(x.float(), weight) + bias.float()).bfloat16()), x)
    assert_equal(got, tco.rmsnorm_fp8quant(x, weight, eps=EPS, bias=bias.float()))
    assert compiler.ours() == {"rmsnorm_fp8quant": 1}


@pytest.mark.parametrize("converts", [False, True], ids=["promoted", "converted"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, None])
@pytest.mark.parametrize("read", ["codes", "bfloat16", "float32", "GEMM"])
def test_a_float32_residual(read, weight_dtype, converts, device):
    """Check that 16-bit rows, their addition to a float32 residual and the norm become one op, unless another node
    reads the norm in float32, in which the op would not return it."""
    x, residual = numbers(4, H, device=device), numbers(4, H, device=device, dtype=torch.float32)
    weight = None if weight_dtype is None else numbers(H, device=device, dtype=weight_dtype)
    codes, scale = tco.fp4_quantize(numbers(H, H, device=device))

    def layer(x, residual):
        total = residual * 2 + (x.float() if converts else x)
        norm = F.rms_norm(total, (H,), None, EPS)
        norm = norm if weight is None else weight * norm
        if read == "GEMM":
            return tco.mm_fp4_weight_only(norm.bfloat16(), codes.t(), scale), total
        norm = norm if read == "float32" else norm.bfloat16()
        return *tco.fp4_quantize(norm), total, *([] if read == "codes" else [norm])

    got, compiler = compiled(layer, x, residual)
    if read == "float32" and not (converts and weight_dtype != torch.bfloat16):
        assert not any("add_" in name for name in compiler.ours())
        assert got[-1].dtype == torch.float32
        torch.testing.assert_close(got[-1], layer(x, residual)[-1])
        return
    total = residual * 2
    given = x.float() if read == "float32" else x
    gain = given.new_empty(0) if weight is None else weight
    if read == "GEMM":
        want = tco.mm_fp4_weight_only(tco.add_rmsnorm(given, total, gain, EPS), codes.t(), scale), total
        ours = {"add_rmsnorm": 1, "mm_fp4_weight_only": 1}
    else:
        *want, norm = tco.add_rmsnorm_fp4quant_with_norm(given, total, gain, eps=EPS)
        want = *want, total, *([] if read == "codes" else [norm])
        ours = {"add_rmsnorm_fp4quant" + ("" if read == "codes" else "_with_norm"): 1}
    assert_equal(got, want)
    assert compiler.ours() == ours and "aten.add.Tensor" not in compiler.calls()


@pytest.mark.parametrize("terms", ["weight and bias", "weight", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm(terms, dtype, device):
    """Check that LayerNorm becomes one op, with and without a residual, and before a 16-bit GEMM."""
    x, residual = (numbers(4, H, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (numbers(H, device=device, dtype=dtype) for _ in range(2))
    weight, bias = weight if "weight" in terms else None, bias if "bias" in terms else None

    def layer(x, residual):
        total = x * 2 + residual
        return *tco.fp4_quantize(F.layer_norm(x, (H,), weight, bias, EPS)), *tco.fp8_quantize(
            F.layer_norm(total, (H,), weight, bias, EPS)
        )

    got, compiler = compiled(layer, x, residual)
    named = {"eps": EPS, "subtract_mean": True, "bias": bias}
    gain = x.new_empty(0) if weight is None else weight
    want = *tco.rmsnorm_fp4quant(x, gain, **named), *tco.rmsnorm_fp8quant(x * 2 + residual, gain, **named)
    assert_equal(got, want)
    assert compiler.quantising() == {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp8quant": 1}
    assert not {"aten.var_mean.correction", "aten.rsqrt"} & {*compiler.calls()}


def test_layer_norm_before_a_gemm(device):
    """Check that LayerNorm before a GEMM with 16-bit activations becomes ``rmsnorm``."""
    x, weight, bias = numbers(4, H, device=device), numbers(H, device=device), numbers(H, device=device)
    codes, scale = tco.fp4_quantize(numbers(H, H, device=device))

    def layer(x):
        return tco.mm_fp4_weight_only(F.layer_norm(x, (H,), weight, bias, EPS), codes.t(), scale)

    got, compiler = compiled(layer, x)
    norm = tco.rmsnorm(x, weight, EPS, bias=bias, subtract_mean=True)
    assert_equal((got,), (tco.mm_fp4_weight_only(norm, codes.t(), scale),))
    assert compiler.ours() == {"rmsnorm": 1, "mm_fp4_weight_only": 1}


@pytest.mark.parametrize("square", [lambda x: x.square(), lambda x: x * x], ids=["square", "product"])
def test_squared_relu(square, device):
    """Check that a gate with squared ReLU is fused with the quantisation after it."""
    x = numbers(4, 2 * H, device=device)

    def layer(x):
        gate, up = x.chunk(2, -1)
        return tco.fp4_quantize(square(F.relu(gate)) * up)

    got, compiler = compiled(layer, x)
    assert_equal(got, tco.silu_mul_fp4quant(x, gate="relu2"))
    assert compiler.ours() == {"silu_mul_fp4quant": 1}


def test_one_added_in_bfloat16():
    """Check that a sum 1 + weight that is rounded to bfloat16 is not fused."""
    x, weight = numbers(4, H), numbers(H) * 0.01

    def layer(x, weight):
        return tco.fp8_quantize(llama_norm(x, 1 + weight))

    got, compiler = compiled(layer, x, weight)
    assert_equal(got, tco.rmsnorm_fp8quant(x, 1 + weight, eps=EPS))
    assert compiler.quantising() == {"rmsnorm_fp8quant": 1}


@by_format
def test_formats(kind, device):
    """Check that an addition, a norm and a quantisation are fused, and so is the gate of a merged layer."""
    quantise, suffix, arguments = kind
    x, weight, g = numbers(2, 5, H, device=device), numbers(H, device=device), torch.full((1,), 0.5, device=device)

    def layer(x, weight, g):
        residual = x * 2
        total = residual + x
        both = torch.cat((total, -total), -1)
        gate, up = both.split(H, -1)
        return *quantise(llama_norm(total, weight).flatten(0, 1), g), *quantise(F.silu(gate) * up, g)

    got, compiler = compiled(layer, x, weight, g)
    total = x * 2 + x
    both = torch.cat((total, -total), -1)
    norm_op, gate_op = getattr(tco, f"rmsnorm_{suffix}"), getattr(tco, f"silu_mul_{suffix}")
    want = (*norm_op(total.flatten(0, 1), weight, eps=EPS, **arguments(g)), *gate_op(both, **arguments(g)))
    assert_equal(got, want)
    assert compiler.quantising() == {f"add_rmsnorm_{suffix}": 1, f"silu_mul_{suffix}": 1}
    assert not any("clone" in name or "copy" in name for name in compiler.calls())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    x, weight = numbers(4, 2 * H, dtype=dtype), numbers(2 * H, dtype=torch.float32)

    def layer(x, weight):
        gate, up = x[..., :H], x[..., H:]
        return *tco.fp8_quantize(torch_norm(x, weight.to(x.dtype))), *tco.fp8_quantize(gate * torch.sigmoid(gate) * up)

    got, compiler = compiled(layer, x, weight)
    assert_equal(got, (*tco.rmsnorm_fp8quant(x, weight.to(dtype), eps=EPS), *tco.silu_mul_fp8quant(x)))
    assert compiler.quantising() == {"rmsnorm_fp8quant": 1, "silu_mul_fp8quant": 1}


def test_a_norm_that_is_read_elsewhere():
    """Check a norm with another reader, such as a router: the fused FP4 op also writes the normalised rows."""
    x, weight = numbers(4, H), numbers(H)

    def layer(x, weight):
        residual = x * 2
        total = residual + x
        norm = llama_norm(total, weight)
        return norm.sum(-1), *tco.fp4_quantize(norm), total

    got, compiler = compiled(layer, x, weight)
    total = x * 2 + x
    codes, scale, norm = tco.rmsnorm_fp4quant_with_norm(total, weight, eps=EPS)
    assert_equal(got, (norm.sum(-1), codes, scale, total))
    assert compiler.quantising() == {"add_rmsnorm_fp4quant_with_norm": 1}


def test_scales_of_one_norm_that_differ():
    """Check that quantisations of one norm with different scales, as for unmerged q and k, become separate ops. The
    first op writes the sum, and the norms of the other ops read it."""
    x, weight, g, other = numbers(4, H), numbers(H), torch.full((1,), 0.5), torch.full((1,), 2.0)

    def layer(x, weight, g, other):
        total = x * 2 + x
        norm = llama_norm(total, weight)
        return *tco.fp4_quantize(norm, g), *tco.fp4_quantize(norm, other), total

    got, compiler = compiled(layer, x, weight, g, other)
    total = x * 2 + x
    want = [tco.rmsnorm_fp4quant(total, weight, each, EPS) for each in (g, other)]
    assert_equal(got, (*want[0], *want[1], total))
    assert compiler.quantising() == {"add_rmsnorm_fp4quant": 1, "rmsnorm_fp4quant": 1}


def test_equal_quantisations():
    """Check that equal quantisations of a tensor are merged, even if they reshape the tensor differently, and that
    quantisations with other scales or layouts stay separate."""
    x, g = numbers(2, 3, H), torch.full((1,), 0.5)

    def layers(x, g):
        y = x * 2
        return (
            *tco.fp4_quantize(y.flatten(0, 1), g), *tco.fp4_quantize(y.flatten(0, 1), g), *tco.fp4_quantize(y, g),
            *tco.fp4_quantize(y, g, scale_layout="linear"), *tco.fp4_quantize(y), *tco.fp8_quantize(y),
            *tco.fp8_quantize(y), *tco.rmsnorm_fp8quant(y, y[0, 0]), *tco.rmsnorm_fp8quant(y, y[0, 0]),
        )  # fmt: skip

    got, compiler = compiled(layers, x, g)
    assert_equal(got, layers(x, g))
    # Two slices of one weight are different tensors.
    assert compiler.quantising() == {"fp4_quantize": 4, "fp8_quantize": 1, "rmsnorm_fp8quant": 2}


def test_symbolic_sizes():
    def layer(x, weight):
        total = x * 2 + x
        return tco.fp8_quantize(llama_norm(total, weight).flatten(0, 1))

    weight, compiler = numbers(H), Compiler()
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        run = torch.compile(layer, backend=compiler, fullgraph=True)
        for shape in ((2, 3, H), (5, 7, H)):
            x = numbers(*shape)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            assert_equal(run(x, weight), tco.rmsnorm_fp8quant((x * 2 + x).flatten(0, 1), weight, eps=EPS))
    assert len(compiler.graphs) == 1 and compiler.quantising() == {"add_rmsnorm_fp8quant": 1}


# Patterns that are not fused


def total_of_inputs(x, weight):
    return tco.fp8_quantize(llama_norm(x + weight.expand_as(x), weight))


def residual_read_later(x, weight):
    a, b = (x * 2), (x * -4)
    y = tco.fp8_quantize(llama_norm(a + b, weight))
    return *y, a * 2, b * 3


def residual_viewed_later(x, weight):
    both = x * 2
    a, b = both[:2], both[2:]
    y = tco.fp8_quantize(llama_norm(a + b, weight))
    return *y, both.sum(-1)


def broadcast_sum(x, weight):
    return tco.fp8_quantize(llama_norm((x * 2) + (weight * 2), weight))


def residual_of_other_strides(x, weight):
    a, b = x * 2, (x * -4).t().contiguous().t()
    y = tco.fp8_quantize(llama_norm(a + b, weight))
    return *y, a * 3


@pytest.mark.parametrize(
    "layer", [total_of_inputs, residual_of_other_strides, residual_read_later, residual_viewed_later, broadcast_sum]
)
def test_sums_that_are_not_in_place(layer):
    x, weight = numbers(4, H), numbers(H)
    before = x.clone(), weight.clone()
    got, compiler = compiled(layer, x, weight)
    want = layer(x, weight)
    assert compiler.quantising() == {"rmsnorm_fp8quant": 1}
    assert_equal(got[2:], want[2:])
    assert_equal((x, weight), before)
    decoded, expected = (each[0].float() * each[1] for each in (got, want))
    assert (decoded - expected).norm() < 0.05 * expected.norm()  # the norm's rounding can change a code


def test_rows_in_the_memory_of_the_residual():
    """Check that a sum does not overwrite the residual if the rows are a view of it in another dtype."""
    x, weight = numbers(4, H, dtype=torch.float32), numbers(H, dtype=torch.float32)

    def layer(x):
        base = x * 2
        total = base + base.view(torch.bfloat16)[:, :H].float()
        return *tco.fp8_quantize(F.rms_norm(total, (H,), weight, EPS).bfloat16()), total

    got, compiler = compiled(layer, x)
    *_, total = layer(x)
    assert_equal(got, (*tco.rmsnorm_fp8quant(total, weight, eps=EPS), total))
    assert compiler.quantising() == {"rmsnorm_fp8quant": 1}


def test_a_root_of_a_scalar():
    """Check rows times the reciprocal root of one number, which resembles a norm."""

    def layer(x, number):
        return tco.fp8_quantize(x * torch.rsqrt(number.square().mean(-1, keepdim=True) + EPS))

    given = numbers(4, H, dtype=torch.float32), torch.tensor(3.0)
    got, compiler = compiled(layer, *given)
    assert_equal(got, layer(*given))
    assert compiler.quantising() == {"fp8_quantize": 1}


@pytest.mark.parametrize("split", [lambda x: x.chunk(2, -1), lambda x: x.tensor_split(2, -1)], ids=["chunk", "slices"])
def test_a_gate_of_symbolic_width(split):
    """Check that a gate compiles if the width of the rows is symbolic. It is not fused."""

    def layer(x):
        gate, up = split(x)
        return tco.fp8_quantize(F.silu(gate) * up)

    x, compiler = numbers(4, 2 * H), Compiler()
    torch._dynamo.mark_dynamic(x, 1)
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        y, scale = torch.compile(layer, backend=compiler, fullgraph=True)(x)
    want, want_scale = layer(x)
    error = (y.float() * scale - want.float() * want_scale).norm() / want.float().mul(want_scale).norm()
    assert error < 0.02 and compiler.quantising() == {"fp8_quantize": 1}


@pytest.mark.parametrize("combine", [torch.add, torch.mul], ids=["sum", "product"])
def test_a_symbolic_size_next_to_rows(combine):
    """Check that rows compile if the number of rows, which is symbolic, is added to them or multiplies them."""

    def layer(x):
        return tco.fp8_quantize(combine(torch_norm(x, None), x.shape[0]))

    x, compiler = numbers(4, H), Compiler()
    torch._dynamo.mark_dynamic(x, 0)
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        y, scale = torch.compile(layer, backend=compiler, fullgraph=True)(x)
    want, want_scale = layer(x)
    error = (y.float() * scale - want.float() * want_scale).norm() / want.float().mul(want_scale).norm()
    assert error < 0.02 and compiler.quantising() == {"fp8_quantize": 1}


def norm_read_by_another(x, weight):
    norm = llama_norm(x, weight)
    return *tco.fp8_quantize(norm), norm.sum(-1)


def scale_of_the_norm(x, weight):
    norm = llama_norm(x, weight)
    return tco.fp4_quantize(norm, 2688 / norm.abs().amax().float().view(1))


def up_first(x, weight):
    up, gate = x.chunk(2, -1)
    return tco.fp8_quantize(F.silu(gate) * up)


def unequal_parts(x, weight):
    gate, up, _ = x.split([16, 16, 32], -1)
    return tco.fp8_quantize(F.silu(gate) * up)


def halves_of_two(x, weight):
    return tco.fp8_quantize(F.silu(x[:, : H // 2]) * (x * 2)[:, H // 2 :])


def halves_of_the_rows(x, weight):
    return tco.fp8_quantize(F.silu(x[:2]) * x[2:])


def gelu_of_up(x, weight):
    gate, up = x.chunk(2, -1)
    return tco.fp8_quantize(F.gelu(up) * gate)


def squared_relu_of_up(x, weight):
    gate, up = x.chunk(2, -1)
    return tco.fp8_quantize(F.relu(up).square() * gate)


def layer_norm_of_columns(x, weight):
    wide = x.float()
    variance, mean = torch.var_mean(wide, 0, correction=0, keepdim=True)
    return tco.fp8_quantize(((wide - mean) * torch.rsqrt(variance + EPS) * weight).bfloat16())


def norm_of_columns(x, weight):
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPS))).bfloat16())


def norm_by_another(x, weight):
    """Scale rows by the reciprocal RMS of another tensor."""
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.cos().pow(2).mean(-1, keepdim=True) + EPS))).bfloat16())


def doubled_bias(x, weight):
    return tco.fp8_quantize(torch.add(llama_norm(x, weight), weight, alpha=2))


def bias_of_rows(x, weight):
    return tco.fp8_quantize(llama_norm(x, weight) + weight[:4].unsqueeze(1))


def biased_before_the_weight(x, weight):
    return tco.fp8_quantize((torch_norm(x, None) + weight) * weight)


def without_eps(x, weight):
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)))).bfloat16())


LEFT = [
    norm_read_by_another, scale_of_the_norm, up_first, unequal_parts, halves_of_two, halves_of_the_rows,
    gelu_of_up, squared_relu_of_up,
    layer_norm_of_columns, norm_of_columns, norm_by_another, without_eps,
    doubled_bias, bias_of_rows, biased_before_the_weight,
]  # fmt: skip


@pytest.mark.parametrize("layer", LEFT)
def test_patterns_that_stay(layer):
    x, weight = numbers(4, H), numbers(H)
    got, compiler = compiled(layer, x, weight)
    assert sum(compiler.quantising().values()) == 1 and {*compiler.quantising()} <= {"fp4_quantize", "fp8_quantize"}
    for a, b in zip(got, layer(x, weight), strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()  # Inductor's decompositions round differently


def test_counters(device):
    """Check that equal additions to counters are merged, and that every counter is updated in place. The fourth counter
    is read afterwards, the fifth contains one dimension, the sixth is a float, and the last grows by another number."""

    def step(*counters):
        positions = torch.arange(3, device=device) + counters[0]
        for each in counters[:-1]:
            each.add_(1)
        counters[-1].add_(2)
        return positions + counters[3]

    def given():
        return [torch.tensor(value, device=device) for value in (3, 5, 8, 2, [9], 2.0, 4)]

    args, expected = given(), given()
    (got, compiler), want = compiled(step, *args), step(*expected)
    assert torch.equal(got, want) and all(map(torch.equal, args, expected))
    (merged,) = (node for node in compiler.graphs[0].graph.nodes if "_foreach_add" in str(node.target))
    assert len(merged.args[0]) == 3 and merged.args[1] == 1
    assert compiler.calls().count("aten.add.Tensor") == 2 + 4


def test_a_counter_with_two_additions():
    """Check that a counter with two additions stays apart when the additions to other counters are merged."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    counters = [graph.placeholder(f"counter_{i}") for i in range(3)]
    values = [torch.tensor(i) for i in range(3)]
    for counter, value in zip(counters, values, strict=True):
        counter.meta["val"] = mode.from_tensor(value)
    for counter in (*counters, counters[0]):
        total = graph.call_function(aten.add.Tensor, (counter, 1))
        total.meta["val"] = counter.meta["val"].clone()
        graph.call_function(aten.copy_.default, (counter, total))
    graph.output(())
    assert inductor._count_at_once(graph)
    (merged,) = (node for node in graph.nodes if node.target is aten._foreach_add.Scalar)
    assert merged.args == (counters[1:], 1)
    torch.fx.GraphModule({}, graph)(*values)
    assert [int(value) for value in values] == [2, 2, 3]
