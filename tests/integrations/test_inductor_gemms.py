"""The Inductor pass and GEMMs: prologues that compute activations, and prefetches of the next weight."""

import functools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from support.inductor_graphs import (
    EPS,
    H,
    assert_equal,
    by_norm,
    compiled,
    fresh,  # noqa: F401  (a fixture)
    llama_norm,
    numbers,
)
from torch import fx
from torch._subclasses import FakeTensorMode

import torch_cute_ops as tco
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.integrations import inductor
from torch_cute_ops.integrations._inductor_graph import call_op, named_arguments
from torch_cute_ops.ops._with_gemm import gates_with_gemm, prefetches_with_gemm, quantises_with_gemm
from torch_cute_ops.runtime.arch import ARCHS

# Prologues


def gate_and_weight(*lead, dtype=torch.bfloat16, device="cpu"):
    """Return rows of gate and up, and a weight (24, H)."""
    return numbers(*lead, 2 * H, dtype=dtype, device=device), *tco.fp4_quantize(numbers(24, H, device=device))


@by_norm
def test_norm_before_a_gemm(norm, device):
    """Check that our op computes the RMSNorm before a GEMM, for several leading dimensions, even if a router also reads
    the normalised rows."""
    x, weight = numbers(2, 3, H, device=device), numbers(H, device=device)
    codes, scale = tco.fp4_quantize(numbers(32, H, device=device))

    def layer(x, weight, codes, scale):
        y = norm(x, weight)
        return tco.mm_fp4_weight_only(y.flatten(0, 1), codes.t(), scale), y.sum(-1)

    got, compiler = compiled(layer, x, weight, codes, scale)
    y = tco.rmsnorm(x, weight, EPS)
    assert_equal(got, (tco.mm_fp4_weight_only(y.flatten(0, 1), codes.t(), scale), y.sum(-1)))
    assert compiler.ours() == {"rmsnorm": 1, "mm_fp4_weight_only": 1} and "aten.rsqrt" not in compiler.calls()


def test_norm_in_another_dtype_before_a_gemm():
    """Check that a norm of float32 rows before a GEMM is not replaced, because our op would return float32."""
    x, weight, (codes, scale) = numbers(4, H, dtype=torch.float32), numbers(H), tco.fp4_quantize(numbers(32, H))

    def layer(x, weight, codes, scale):
        return (tco.mm_fp4_weight_only(llama_norm(x, weight).bfloat16(), codes.t(), scale),)

    got, compiler = compiled(layer, x, weight, codes, scale)
    assert_equal(got, layer(x, weight, codes, scale))
    assert compiler.ours() == {"mm_fp4_weight_only": 1}


def test_sum_before_gemms(device):
    """Check a sum that is also a result, and whose norm three GEMMs read. The gate before the last GEMM is not fused,
    because there are many rows."""
    x, weight = numbers(9, H, device=device), numbers(H, device=device)
    codes, scale = tco.fp4_quantize(numbers(2 * H, H, device=device))

    def layer(x, weight, codes, scale):
        total = x * 2 + x
        y = llama_norm(total, weight)
        q, k, both = (tco.mm_fp4_weight_only(y, codes.t(), scale) for _ in range(3))
        gate, up = both.chunk(2, -1)
        return q, k, total, tco.mm_fp4_weight_only(F.silu(gate) * up, codes.t(), scale)

    got, compiler = compiled(layer, x, weight, codes, scale)
    total = x * 2 + x
    both = tco.mm_fp4_weight_only(tco.rmsnorm(total, weight, EPS), codes.t(), scale)
    assert_equal(got[:3], (both, both, total))
    want = tco.mm_fp4_weight_only(tco.silu_mul(both), codes.t(), scale)
    assert F.cosine_similarity(got[3].double().flatten(), want.double().flatten(), 0) > 0.9999
    ours = compiler.ours()
    assert ours.pop("mm_fp4_weight_only") in (2, 4)  # the compiler may merge equal GEMMs
    assert ours == {"add_rmsnorm": 1}
    assert not any("clone" in name or "copy" in name for name in compiler.calls())


by_gate = pytest.mark.parametrize("gate", get_args(Gate))
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


@by_gate
@pytest.mark.parametrize(("lead", "dtype"), [((1,), torch.bfloat16), ((1, 1), torch.float16)])
def test_gate_before_a_gemm(lead, dtype, gate, device):
    """Check that for one row a gate and a GEMM become one op, for any other arguments of the GEMM."""
    both, codes, scale = gate_and_weight(*lead, dtype=dtype, device=device)
    bias = torch.randn(24, device=device)

    def layer(both, codes, scale, bias):
        first, up = both.chunk(2, -1)
        rows = (ACTIVATIONS[gate](first) * up).flatten(0, -2)
        return tco.mm_fp4_weight_only(rows, codes.t(), scale, None, bias, torch.float32, static_weight=True).exp()

    got, compiler = compiled(layer, both, codes, scale, bias)
    want = tco.silu_mul_mm_fp4_weight_only(
        both.flatten(0, -2), codes.t(), scale, None, bias, torch.float32, static_weight=True, gate=gate
    )
    assert_equal((got,), (want.exp(),))
    assert compiler.ours() == {"silu_mul_mm_fp4_weight_only": 1} and "aten.mul.Tensor" not in compiler.calls()


@pytest.mark.parametrize("left", ["many rows", "symbolic", "read", "float32", "strided", "swapped", "Blackwell"])
def test_gates_that_stay_before_a_gemm(left, monkeypatch):
    """Check that these are not fused into a GEMM: gates of many rows or of a symbolic number of rows, on another GPU,
    with another reader of the result, in another dtype, of strided rows, or with up before gate."""
    both, codes, scale = gate_and_weight(2 if left in ("many rows", "symbolic") else 1)
    both = both.repeat_interleave(2, 1)[:, ::2] if left == "strided" else both
    both = both.float() if left == "float32" else both
    if left == "symbolic":
        torch._dynamo.mark_dynamic(both, 0)
    if left == "Blackwell":
        monkeypatch.setattr(inductor, "gates_with_gemm", lambda rows, device: False)

    def layer(both, codes, scale):
        gate, up = both.chunk(2, -1)[:: -1 if left == "swapped" else 1]
        rows = (F.silu(gate) * up).bfloat16()
        return tco.mm_fp4_weight_only(rows, codes.t(), scale), rows.sum() if left == "read" else None

    got, compiler = compiled(layer, both, codes, scale)
    in_order = both.roll(H, 1) if left == "swapped" else both
    want = tco.silu_mul_mm_fp4_weight_only(in_order.bfloat16(), codes.t(), scale)
    assert F.cosine_similarity(got[0].double().flatten(), want.double().flatten(), 0) > 0.999
    assert compiler.ours() == {"mm_fp4_weight_only": 1}


@pytest.mark.parametrize("global_scale", [None, 3.0])
@pytest.mark.parametrize("gate", [None, *get_args(Gate)])
@pytest.mark.parametrize(("lead", "dtype"), [((1,), torch.bfloat16), ((1, 1), torch.float16), ((8,), torch.bfloat16)])
def test_quantisation_before_a_gemm(lead, dtype, gate, global_scale, device):
    """Check that for few rows a quantisation and a GEMM become one op with the same bits, for any other arguments. For
    one row the op also includes the gate."""
    both, codes, scale = gate_and_weight(*lead, dtype=dtype, device=device)
    bias, alpha = torch.randn(24, device=device), torch.rand(24, device=device)
    given = None if global_scale is None else torch.full((1,), global_scale, device=device)

    def layer(both, codes, scale, bias, alpha, given):
        first, up = both.chunk(2, -1)
        rows = (both[..., :H].contiguous() if gate is None else ACTIVATIONS[gate](first) * up).flatten(0, -2)
        a, a_scale = tco.fp4_quantize(rows, given, scale_layout="8x4")
        return tco.mm_fp4(a, codes.t(), a_scale, scale, alpha, bias, scale_layout="8x4", static_weight=True).exp()

    got, compiler = compiled(layer, both, codes, scale, bias, alpha, given)
    rows = both[..., :H].flatten(0, -2) if gate is None else both.flatten(0, -2)
    name, quantise, named = "fp4quant_mm_fp4", tco.fp4_quantize, {}
    if gate is not None:
        name, quantise, named = "silu_mul_fp4quant_mm_fp4", tco.silu_mul_fp4quant, {"gate": gate}
    want = getattr(tco, name)(rows, codes.t(), scale, given, alpha, bias, torch.bfloat16, static_weight=True, **named)
    a, a_scale = quantise(rows, given, **named)
    assert got.dtype == torch.bfloat16
    assert_equal((want,), (tco.mm_fp4(a, codes.t(), a_scale, scale, alpha, bias, static_weight=True),))
    assert_equal((got,), (want.exp(),))
    parts = {"silu_mul_fp4quant": 1, "mm_fp4": 1} if gate is not None and lead == (8,) else {name: 1}
    assert compiler.ours() == parts and "aten.mul.Tensor" not in compiler.calls()


@pytest.mark.parametrize("left", ["many rows", "symbolic", "read", "two GEMMs", "float32", "MXFP4", "clamped"])
def test_quantisations_that_stay_before_a_gemm(left):
    """Check that these are not fused into a GEMM: quantisations of many rows or of a symbolic number of rows, with
    another reader of the codes, in another dtype or format, or after a gate other than SiLU."""
    both, *_ = gate_and_weight(2 if left in ("many rows", "symbolic") else 1)
    block_size = 32 if left == "MXFP4" else 16
    codes, scale = tco.fp4_quantize(numbers(24, H), block_size=block_size)
    both = both.float() if left == "float32" else both
    if left == "symbolic":
        torch._dynamo.mark_dynamic(both, 0)

    def layer(both, codes, scale):
        limit = 7.0 if left == "clamped" else None
        a, a_scale = tco.silu_mul_fp4quant(both, block_size=block_size, swiglu_limit=limit)
        results = [tco.mm_fp4(a, codes.t(), a_scale, scale, block_size=block_size)]
        if left == "two GEMMs":
            results.append(tco.mm_fp4(a, codes.t(), a_scale, scale, block_size=block_size, out_dtype=torch.float32))
        return [*results, a + 1] if left == "read" else results

    got, compiler = compiled(layer, both, codes, scale)
    assert_equal(got, layer(both, codes, scale))
    assert compiler.ours() == {"silu_mul_fp4quant": 1, "mm_fp4": 2 if left == "two GEMMs" else 1}


# Prefetch of the next weight


def prefetched(compiler):
    """Return, for each of our GEMMs in order, the op, the node of its weight, and the node of the weight that it
    prefetches."""
    for node in compiler.graphs[-1].graph.nodes:
        if str(node.target).startswith("cute.") and "mm_fp" in str(node.target):
            named = named_arguments(node)
            yield node.target._schema.name.removeprefix("cute::"), named["b"].args[0], named["prefetch"]


def test_a_row_scale_stays_with_its_gemm():
    """Check that a GEMM with a row scale is not fused with the quantisation, because the fused op takes no row
    scale."""
    both, codes, scale = gate_and_weight(1)
    factors = torch.full((1,), 3.0)

    def layer(both, codes, scale, factors):
        a, a_scale = tco.fp4_quantize(both[..., :H].contiguous())
        return tco.mm_fp4(a, codes.t(), a_scale, scale, row_scale=factors)

    got, compiler = compiled(layer, both, codes, scale, factors)
    assert torch.equal(got, layer(both, codes, scale, factors))
    assert compiler.ours() == {"fp4_quantize": 1, "mm_fp4": 1}


def four_gemms(x, y, first, first_scale, second, second_scale, other):
    """Compute a projection and a gated projection, twice. Only the last projection uses the weight ``other``."""
    for weight, scale in ((second, second_scale), (other, second_scale)):
        x = tco.mm_fp4_weight_only(x, first.t(), first_scale)
        a, a_scale = tco.silu_mul_fp4quant(x)
        x = tco.mm_fp4(a, weight.t(), a_scale, scale) + y
    return x


def operands_of_four_gemms(rows):
    x = numbers(rows, 64)
    first, second = (tco.fp4_quantize(numbers(*shape)) for shape in ((256, 64), (64, 128)))
    return x, x + 1, *first, *second, second[0].flip(0).contiguous()


@pytest.mark.parametrize("rows", [1, 16])
def test_a_gemm_prefetches_the_next_weight(rows):
    """Check that every GEMM except the last prefetches the next weight, and that nothing else changes."""
    operands = operands_of_four_gemms(rows)
    got, compiler = compiled(four_gemms, *operands)
    names = ["mm_fp4_weight_only", "silu_mul_fp4quant_mm_fp4" if rows == 1 else "mm_fp4"] * 2
    found, weights, next_weights = zip(*prefetched(compiler), strict=True)
    assert [*found] == names and next_weights == (*weights[1:], None)
    assert weights[0] is weights[2] and len({*weights}) == 3 and {node.op for node in weights} == {"placeholder"}
    assert torch.equal(got, four_gemms(*operands))


@pytest.mark.parametrize("rows", [1, 16, 64, 65])
def test_an_fp8_gemm_prefetches_the_next_weight(rows):
    """Check that GEMMs with FP8 activations prefetch the next weight, for up to 64 rows if their own weight is FP8, and
    for up to 16 rows if it is FP4."""
    x, (codes, scale) = numbers(rows, 128), tco.fp4_quantize(numbers(128, 128))
    first, second = torch.randn(2, 128, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 1, 1)

    def layer(x, first, second, codes, scales, scale):
        for multiply, weight, weight_scale, granularity in (
            (tco.mm_fp8_block, first, scales[0], "block128"),
            (tco.mm_fp8_fp4, codes, scale, "block128"),
            (tco.mm_fp8, second, scales[1].flatten(), "token"),
            (tco.mm_fp8_block, first, scales[0], "block128"),
        ):
            a, a_scale = tco.fp8_quantize(x, granularity=granularity)
            x = multiply(a, weight.t(), a_scale, weight_scale)
        return x

    operands = x, first, second, codes, scales, scale
    got, compiler = compiled(layer, *operands)
    names, weights, found = zip(*prefetched(compiler), strict=True)
    assert names == ("mm_fp8_block", "mm_fp8_fp4", "mm_fp8", "mm_fp8_block") and len({*weights}) == 3
    own = weights[1] if rows <= 64 else None, weights[2] if rows <= 16 else None, weights[3] if rows <= 64 else None
    assert found == (*own, None)
    assert torch.equal(got, layer(*operands))


@pytest.mark.parametrize("left", ["many rows", "symbolic", "Blackwell", "computed", "given"])
def test_cases_without_prefetch(left, monkeypatch):
    """Check that GEMMs of many rows, of a symbolic number of rows and on other GPUs do not prefetch, and that no GEMM
    prefetches a weight that the graph computes. A prefetch that the program itself requests is not replaced."""
    x, _, first, first_scale, second, second_scale, other = operands_of_four_gemms(17 if left == "many rows" else 2)
    if left == "symbolic":
        torch._dynamo.mark_dynamic(x, 0)
    if left == "Blackwell":
        monkeypatch.setattr(inductor, "prefetches_with_gemm", lambda *_, **__: False)

    def layer(x, first, second, other):
        x = tco.mm_fp4_weight_only(x, first.t(), first_scale, prefetch=other if left == "given" else None)
        weight = second ^ 0x88 if left == "computed" else second
        return tco.mm_fp4_weight_only(x[:, :128].contiguous(), weight.t(), second_scale)

    got, compiler = compiled(layer, x, first, second, other)
    assert torch.equal(got, layer(x, first, second, other))
    _, weights, (found, last) = zip(*prefetched(compiler), strict=True)
    assert last is None and found not in weights
    assert (found is not None and found.op == "placeholder") == (left == "given")


def test_a_weight_on_another_device_is_not_prefetched(monkeypatch):
    """Check that a weight on another device (here meta) is not prefetched, because a graph can use several devices."""
    x, _, first, first_scale, *_ = operands_of_four_gemms(2)
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        nodes = []
        for name, value in (("x", x), ("b", first), ("scale", first_scale)):
            for where in ("cpu", "meta"):
                node = graph.placeholder(f"{name}_{where}")
                node.meta["val"] = mode.from_tensor(value).to(where)
                nodes.append(node)
        results = []
        for rows, weight, scale in (nodes[::2], nodes[1::2]):
            b = graph.call_function(torch.ops.aten.permute.default, (weight, [1, 0]))
            b.meta["val"] = weight.meta["val"].permute(1, 0)
            results.append(call_op(graph, "mm_fp4_weight_only", a=rows, b=b, b_scale=scale))
        graph.output(tuple(results))
        inductor.FuseQuantization()(graph)
    gemms = [node for node in graph.nodes if "mm_fp4" in str(node.target)]
    assert len(gemms) == 2 and not any(named_arguments(node)["prefetch"] for node in gemms)


# Supported GPUs


def test_gpus_that_fuse_gates(monkeypatch):
    """Check that gates are fused into GEMMs on GPUs whose kernels can compute gates, such as Hopper."""
    cuda = torch.device("cuda", 0)
    for name, arch in ARCHS.items():
        monkeypatch.setattr(select, "target_of", lambda device, arch=arch: Target(device, arch, 132))
        assert [gates_with_gemm(rows, cuda) for rows in (1, 2)] == [name == "sm_90a", False]
        assert [prefetches_with_gemm(rows, cuda) for rows in (1, 16, 17)] == [*[name == "sm_90a"] * 2, False]
        of_fp8 = [prefetches_with_gemm(rows, cuda, has_fp8_weight=True) for rows in (17, 64, 65)]
        assert of_fp8 == [*[name == "sm_90a"] * 2, False]
        for size in (16, 32):
            quantised = [quantises_with_gemm(rows, cuda, size) for rows in (1, 8, 9)]
            assert quantised == [*[name == "sm_90a" and size == 16] * 2, False]
            gated = [quantises_with_gemm(rows, cuda, size, gated=True) for rows in (1, 2)]
            assert gated == [quantised[0], False]
    assert [gates_with_gemm(rows, torch.device("cpu")) for rows in (1, 2)] == [True, False]
    assert not gates_with_gemm(1, torch.device("meta"))
