"""The pass for Inductor: what it fuses computes what the fused op computes, and it leaves what it must."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

import torch_cute_ops as tco
import torch_cute_ops.nn
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.integrations import inductor
from torch_cute_ops.integrations._inductor_graph import call_op, named_arguments
from torch_cute_ops.ops._with_gemm import gates_with_gemm, prefetches_with_gemm, quantises_with_gemm
from torch_cute_ops.runtime.arch import ARCHS

H = 64
EPS = 1e-5


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Compiler:
    """Inductor as far as the passes over the graph; then the graph is run as it is, which needs no C++ compiler."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module, inputs):
        return compile_fx(module, inputs, inner_compile=self.inner)

    def inner(self, graph, inputs, **_):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            _recursive_post_grad_passes(graph, is_inference=True)
        self.graphs.append(graph)

        def run(arguments):
            return graph(*arguments)

        run._boxed_call = True
        return run

    def calls(self, index: int = -1) -> list[str]:
        """The calls of a graph by name, but for views and the like."""
        nodes = self.graphs[index].graph.nodes
        return [str(node.target).removesuffix(".default") for node in nodes if node.op == "call_function"]

    def quantising(self, index: int = -1) -> dict[str, int]:
        """How often each of our ops is called that quantises."""
        return {name: count for name, count in self.ours(index).items() if "quant" in name}

    def ours(self, index: int = -1) -> dict[str, int]:
        """How often each of our ops is called."""
        names = [name for name in self.calls(index) if name.startswith("cute.")]
        return dict(collections.Counter(name.removeprefix("cute.") for name in names))


def compiled(function, *inputs):
    compiler = Compiler()
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()), torch.no_grad():
        results = torch.compile(function, backend=compiler, fullgraph=True)(*inputs)
    return results, compiler


def assert_equal(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def llama_norm(x, weight):
    """As in the models of Hugging Face."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def late_norm(x, weight):
    """As in gpt-oss: rounded once."""
    wide = x.to(torch.float32)
    return (weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS))).to(x.dtype)


def torch_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


NORMS = {"llama": llama_norm, "gpt-oss": late_norm, "torch": torch_norm}
QUANTISE = {
    "nvfp4": (lambda x, g: tco.fp4_quantize(x, g), "fp4quant", lambda g: {"global_scale": g}),
    "mxfp4 linear": (
        lambda x, g: tco.fp4_quantize(x, block_size=32, scale_layout="linear"),
        "fp4quant",
        lambda g: {"block_size": 32, "scale_layout": "linear"},
    ),
    "fp8 row": (lambda x, g: tco.fp8_quantize(x), "fp8quant", lambda g: {}),
    "fp8 static": (
        lambda x, g: tco.fp8_quantize(x, g, "tensor"),
        "fp8quant",
        lambda g: {"scale": g, "granularity": "tensor"},
    ),
    "fp8 block": (
        lambda x, g: tco.fp8_quantize(x, granularity="block128", scale_layout="column"),
        "fp8quant",
        lambda g: {"granularity": "block128", "scale_layout": "column"},
    ),
}
by_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
by_format = pytest.mark.parametrize("kind", QUANTISE.values(), ids=QUANTISE)


def numbers(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device=device)


# What is fused


@by_norm
def test_norm(norm, device):
    """Of rows under other leading dimensions, as linear layers flatten them."""
    x, weight, g = numbers(2, 3, H, device=device), numbers(H, device=device), torch.full((1,), 3.0, device=device)
    got, compiler = compiled(lambda x, weight, g: tco.fp4_quantize(norm(x, weight).flatten(0, 1), g), x, weight, g)
    assert_equal(got, tco.rmsnorm_fp4quant(x.flatten(0, 1), weight, g, EPS))
    assert compiler.quantising() == {"rmsnorm_fp4quant": 1} and "aten.rsqrt" not in compiler.calls()


@by_format
def test_formats(kind, device):
    """Addition, norm and quantisation; then the gate of a merged layer."""
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
    """As by a router. FP4 has an op that writes it too."""
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
    """As of q and k that are not merged: each reads the sum that the first has written."""
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
    """Of one tensor, whatever it is reshaped to; those under another scale or layout stay."""
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
    # A weight that is sliced twice is two tensors.
    assert compiler.quantising() == {"fp4_quantize": 4, "fp8_quantize": 1, "rmsnorm_fp8quant": 2}


@by_norm
def test_norm_before_a_gemm(norm, device):
    """Of rows under other leading dimensions, with a router that reads the norm too."""
    x, weight = numbers(2, 3, H, device=device), numbers(H, device=device)
    codes, scale = tco.fp4_quantize(numbers(32, H, device=device))

    def layer(x, weight, codes, scale):
        y = norm(x, weight)
        return tco.mm_fp4_weight_only(y.flatten(0, 1), codes.t(), scale), y.sum(-1)

    got, compiler = compiled(layer, x, weight, codes, scale)
    y = tco.rmsnorm(x, weight, EPS)
    assert_equal(got, (tco.mm_fp4_weight_only(y.flatten(0, 1), codes.t(), scale), y.sum(-1)))
    assert compiler.ours() == {"rmsnorm": 1, "mm_fp4_weight_only": 1} and "aten.rsqrt" not in compiler.calls()


def test_sum_before_gemms(device):
    """Three GEMMs of one norm, whose sum is read later; then that of a gate of many rows, which stays."""
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
    assert ours.pop("mm_fp4_weight_only") in (2, 4)  # with equal GEMMs merged, or not
    assert ours == {"add_rmsnorm": 1}
    assert not any("clone" in name or "copy" in name for name in compiler.calls())


@pytest.mark.parametrize(("lead", "dtype"), [((1,), torch.bfloat16), ((1, 1), torch.float16)])
def test_gate_before_a_gemm(lead, dtype, device):
    """Of one row: gate and GEMM are one op, whatever the GEMM's other arguments."""
    both, codes, scale = gate_and_weight(*lead, dtype=dtype, device=device)
    bias = torch.randn(24, device=device)

    def layer(both, codes, scale, bias):
        gate, up = both.chunk(2, -1)
        rows = (F.silu(gate) * up).flatten(0, -2)
        return tco.mm_fp4_weight_only(rows, codes.t(), scale, None, bias, torch.float32, static_weight=True).exp()

    got, compiler = compiled(layer, both, codes, scale, bias)
    want = tco.silu_mul_mm_fp4_weight_only(
        both.flatten(0, -2), codes.t(), scale, None, bias, torch.float32, static_weight=True
    )
    assert_equal((got,), (want.exp(),))
    assert compiler.ours() == {"silu_mul_mm_fp4_weight_only": 1} and "aten.mul.Tensor" not in compiler.calls()


def gate_and_weight(*lead, dtype=torch.bfloat16, device="cpu"):
    """Rows of gate and up, and a weight (24, H)."""
    return numbers(*lead, 2 * H, dtype=dtype, device=device), *tco.fp4_quantize(numbers(24, H, device=device))


@pytest.mark.parametrize("left", ["many rows", "symbolic", "read", "float32", "strided", "swapped", "Blackwell"])
def test_gates_that_stay_before_a_gemm(left, monkeypatch):
    """Of many rows or of a number that the graph does not say, on other GPUs, and where more than the GEMM reads the
    result, it has another dtype, or up comes first."""
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
@pytest.mark.parametrize("gated", [False, True], ids=["quantised", "gated"])
@pytest.mark.parametrize(("lead", "dtype"), [((1,), torch.bfloat16), ((1, 1), torch.float16), ((8,), torch.bfloat16)])
def test_quantisation_before_a_gemm(lead, dtype, gated, global_scale, device):
    """Of few rows: quantisation and GEMM are one op, and of one the gate too, whatever their other arguments, with the
    bits of two."""
    both, codes, scale = gate_and_weight(*lead, dtype=dtype, device=device)
    bias, alpha = torch.randn(24, device=device), torch.rand(24, device=device)
    given = None if global_scale is None else torch.full((1,), global_scale, device=device)

    def layer(both, codes, scale, bias, alpha, given):
        gate, up = both.chunk(2, -1)
        rows = (F.silu(gate) * up if gated else both[..., :H].contiguous()).flatten(0, -2)
        a, a_scale = tco.fp4_quantize(rows, given, scale_layout="8x4")
        return tco.mm_fp4(a, codes.t(), a_scale, scale, alpha, bias, scale_layout="8x4", static_weight=True).exp()

    got, compiler = compiled(layer, both, codes, scale, bias, alpha, given)
    rows = both.flatten(0, -2) if gated else both[..., :H].flatten(0, -2)
    name = "silu_mul_fp4quant_mm_fp4" if gated else "fp4quant_mm_fp4"
    want = getattr(tco, name)(rows, codes.t(), scale, given, alpha, bias, torch.bfloat16, static_weight=True)
    quantise = tco.silu_mul_fp4quant if gated else tco.fp4_quantize
    a, a_scale = quantise(rows, given)
    assert got.dtype == torch.bfloat16
    assert_equal((want,), (tco.mm_fp4(a, codes.t(), a_scale, scale, alpha, bias, static_weight=True),))
    assert_equal((got,), (want.exp(),))
    parts = {"silu_mul_fp4quant": 1, "mm_fp4": 1} if gated and lead == (8,) else {name: 1}
    assert compiler.ours() == parts and "aten.mul.Tensor" not in compiler.calls()


@pytest.mark.parametrize("left", ["many rows", "symbolic", "read", "two GEMMs", "float32", "MXFP4", "clamped"])
def test_quantisations_that_stay_before_a_gemm(left):
    """Of many rows or of a number that the graph does not say, where more than a GEMM reads the codes, in another dtype
    or format, and behind a gate that is not SiLU's."""
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


def prefetched(compiler):
    """Of each of our GEMMs in order: its op, its weight by rows, and what it brings into L2, nodes both."""
    for node in compiler.graphs[-1].graph.nodes:
        if str(node.target).startswith("cute.") and "mm_fp" in str(node.target):
            named = named_arguments(node)
            yield node.target._schema.name.removeprefix("cute::"), named["b"].args[0], named["prefetch"]


def four_gemms(x, y, first, first_scale, second, second_scale, other):
    """A projection and one with a gate, twice: the last weight is another tensor."""
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
    """Each but the last, and nothing else changes."""
    operands = operands_of_four_gemms(rows)
    got, compiler = compiled(four_gemms, *operands)
    names = ["mm_fp4_weight_only", "silu_mul_fp4quant_mm_fp4" if rows == 1 else "mm_fp4"] * 2
    found, weights, next_weights = zip(*prefetched(compiler), strict=True)
    assert [*found] == names and next_weights == (*weights[1:], None)
    assert weights[0] is weights[2] and len({*weights}) == 3 and {node.op for node in weights} == {"placeholder"}
    assert torch.equal(got, four_gemms(*operands))


@pytest.mark.parametrize("left", ["many rows", "symbolic", "Blackwell", "computed", "given"])
def test_what_is_not_prefetched(left, monkeypatch):
    """Beside many rows or a number that the graph does not say, on other GPUs; a weight that the graph computes; and
    nothing in place of what the call names."""
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
    """Where a graph has several; here one that has no memory."""
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


def test_where_gates_go_with_gemms(monkeypatch):
    """On GPUs whose kernel gates rows, which Hopper's does."""
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


def test_norm_in_another_dtype_before_a_gemm():
    """Of float32 rows: the op would write float32."""
    x, weight, (codes, scale) = numbers(4, H, dtype=torch.float32), numbers(H), tco.fp4_quantize(numbers(32, H))

    def layer(x, weight, codes, scale):
        return (tco.mm_fp4_weight_only(llama_norm(x, weight).bfloat16(), codes.t(), scale),)

    got, compiler = compiled(layer, x, weight, codes, scale)
    assert_equal(got, layer(x, weight, codes, scale))
    assert compiler.ours() == {"mm_fp4_weight_only": 1}


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


# What is left


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
    assert (decoded - expected).norm() < 0.05 * expected.norm()  # a rounding of the norm may change a code


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


def gelu(x, weight):
    gate, up = x.chunk(2, -1)
    return tco.fp8_quantize(F.gelu(gate) * up)


def layer_norm(x, weight):
    return tco.fp8_quantize(F.layer_norm(x, (H,), weight))


def norm_of_columns(x, weight):
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPS))).bfloat16())


def norm_by_another(x, weight):
    """Divided by the norm of another tensor."""
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.cos().pow(2).mean(-1, keepdim=True) + EPS))).bfloat16())


def without_eps(x, weight):
    wide = x.float()
    return tco.fp8_quantize((weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)))).bfloat16())


LEFT = [
    norm_read_by_another, scale_of_the_norm, up_first, unequal_parts, halves_of_two, halves_of_the_rows, gelu,
    layer_norm, norm_of_columns, norm_by_another, without_eps,
]  # fmt: skip


@pytest.mark.parametrize("layer", LEFT)
def test_left(layer):
    x, weight = numbers(4, H), numbers(H)
    got, compiler = compiled(layer, x, weight)
    assert sum(compiler.quantising().values()) == 1 and {*compiler.quantising()} <= {"fp4_quantize", "fp8_quantize"}
    for a, b in zip(got, layer(x, weight), strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()  # Inductor's own decompositions


# In Inductor


class Marks(CustomGraphPass):
    """Another's pass: negates what is multiplied by two."""

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 2:
                node.args = (node.args[0], -2)

    def uuid(self):
        return "marks"


def test_compiled_by_inductor(device):
    """As the option of one model: the whole compiler, with another's pass before ours."""
    x, weight = numbers(4, H, device=device), numbers(H, device=device)

    def layer(x, weight):
        return tco.fp8_quantize(llama_norm(x * 2, weight))

    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization(Marks())}
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True, options=options)(x, weight)
    assert_equal(got, tco.rmsnorm_fp8quant(x * -2, weight, eps=EPS))


@pytest.mark.slow
def test_a_residual_that_is_read_before(device):
    """A dimension of one element, to which Inductor has given some stride when the first op updates the residual."""
    weight, (codes, scale) = numbers(H, device=device), tco.fp4_quantize(numbers(H, H, device=device) / H**0.5)

    def layers(table, ids):
        residual = F.embedding(ids, table)
        y = torch.tanh(F.layer_norm(residual, (H,)))
        for _ in range(3):
            residual = residual + y
            norm = llama_norm(residual, weight).flatten(0, 1)
            y = tco.mm_fp4_weight_only(norm, codes.t(), scale).view(residual.shape)
        return residual + y

    given = numbers(8, H, device=device), torch.tensor([[3], [1], [4]], device=device)
    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization()}
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(layers, fullgraph=True, dynamic=False, options=options), *given)
    assert code.count("cute.add_rmsnorm.default(") == 3
    assert F.cosine_similarity(got.double().flatten(), layers(*given).double().flatten(), 0) > 0.999


@pytest.mark.gpu
def test_inductors_kernels_overlap_with_ours():
    """With ``triton.enable_pdl`` kernels of both start before those before them have ended: the same bits, captured
    and replayed, as without; weights are static, so that GEMMs read ahead."""
    width, layers, rows = 1024, 12, 3
    weights = [tco.fp4_quantize(numbers(width, width, device="cuda") / width**0.5) for _ in range(layers)]

    def chain(x, bias):
        total = x
        for codes, scale in weights:
            y = F.rms_norm(total * 0.5 + bias, (width,))  # no weight: it stays with Inductor
            y = tco.mm_fp4_weight_only(y, codes.t(), scale, static_weight=True)
            total = total + torch.sin(y.roll(1, -1))
        return total

    def captured(options):
        torch._dynamo.reset()
        run = torch.compile(chain, fullgraph=True, dynamic=False, options=options)
        x, bias = numbers(rows, width, device="cuda"), numbers(width, device="cuda")
        for _ in range(2):
            run(x, bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(x, bias)
        return graph, x, bias, result

    with torch.no_grad():
        plain, overlapping = captured({}), captured({"triton.enable_pdl": True})
        for _ in range(200):
            given = numbers(rows, width, device="cuda"), numbers(width, device="cuda")
            for graph, x, bias, _ in (plain, overlapping):
                x.copy_(given[0])
                bias.copy_(given[1])
                graph.replay()
            assert torch.equal(plain[3], overlapping[3]) and plain[3].isfinite().all()


def test_enable():
    ours, marks = inductor.FuseQuantization, Marks()

    def plain(graph):
        pass

    with inductor_config.patch(post_grad_custom_pre_pass=marks):
        inductor.enable()
        first = inductor_config.post_grad_custom_pre_pass
        inductor.enable()
        assert inductor_config.post_grad_custom_pre_pass is first
        assert isinstance(first, ours) and first.before == (marks,)
        inductor.disable()
        assert inductor_config.post_grad_custom_pre_pass is marks
        with pytest.raises(RuntimeError, match=r"post_grad_custom_pre_pass is .*Marks"):
            inductor.disable()
    with inductor_config.patch(post_grad_custom_pre_pass=None):
        inductor.enable()
        inductor.disable()
        inductor.disable()
        assert inductor_config.post_grad_custom_pre_pass is None
    assert ours().uuid() == ours().uuid() is not None
    assert ours(marks).uuid() == (*ours().uuid(), "marks")
    assert ours(plain).uuid() is None and ours([marks, plain]).uuid() is None


# Hugging Face's Llama


def small_llama(dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def llama():
    """With FP4 activations; q, k and v, and gate and up, are merged."""
    model = small_llama(torch.float32)
    ids = torch.randint(1, 96, (2, 7))
    tco.nn.quantize_(model, "nvfp4", activations="fp4", calibrate=lambda model: model(ids))
    return tco.nn.merge_(model), ids


# The first norm has no addition before it, and the input of o_proj no norm; lm_head is not quantised.
LLAMA_NODES = {"rmsnorm_fp4quant": 1, "add_rmsnorm_fp4quant": 3, "silu_mul_fp4quant": 2, "fp4_quantize": 2}


def assert_one_residual(graph):
    """All additions overwrite the embedding's result, and nothing copies it."""
    updated = [node.args[1] for node in graph.graph.nodes if "add_rmsnorm" in str(node.target)]
    assert len(updated) == 3 and len({*updated}) == 1 and "embedding" in str(updated[0].target)
    copying = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
    assert not any(user.target in copying for user in updated[0].users)


def test_llama_generates_the_same_tokens(llama):
    """In float32, where the fused ops leave no rounding out that decides about a code."""
    from transformers import CompileConfig

    model, ids = llama
    given = {"do_sample": False, "max_new_tokens": 6, "cache_implementation": "static"}
    want = model.generate(ids, **given, disable_compile=True)
    compiler = Compiler()
    # A function, because generate copies its configuration.
    whole = CompileConfig(fullgraph=True, backend=lambda *given: compiler(*given), mode=None)
    whole._compile_all_devices = True
    with inductor_config.patch(post_grad_custom_pre_pass=inductor.FuseQuantization()):
        got = model.generate(ids, **given, compile_config=whole)
    assert torch.equal(got, want)
    assert compiler.quantising() == LLAMA_NODES and len(compiler.graphs) == 1
    assert_one_residual(compiler.graphs[0])


def test_llama_with_16_bit_activations():
    """Norms of a model that is quantised for its weights alone."""
    model = small_llama(torch.bfloat16)
    tco.nn.merge_(tco.nn.quantize_(model, "nvfp4", activations="16bit"))
    ids = torch.randint(1, 96, (2, 7))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got, compiler = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    # The last norm is lm_head's, which is not quantised.
    assert compiler.ours() == {"rmsnorm": 1, "add_rmsnorm": 3, "mm_fp4_weight_only": 8}
    assert_one_residual(compiler.graphs[0])
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "activations"), [("nvfp4", "16bit"), ("fp8_block", "auto")])
def test_llama_decodes_by_inductor(scheme, activations, device):
    """The whole compiler: one token each of several sequences, so that a dimension of the residual has one element."""
    model = small_llama(torch.bfloat16)
    tco.nn.merge_(tco.nn.quantize_(model, scheme, activations=activations))
    model, ids = model.to(device), torch.randint(1, 96, (3, 1), device=device)
    options = {"post_grad_custom_pre_pass": inductor.FuseQuantization()}
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got = torch.compile(model, dynamic=False, options=options)(ids, use_cache=False).logits
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.99


def test_llama_in_bfloat16(llama):
    model, ids = llama
    model = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        got, compiler = compiled(lambda ids: model(ids, use_cache=False).logits, ids)
    assert compiler.quantising() == LLAMA_NODES
    assert_one_residual(compiler.graphs[0])
    assert F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.99


# The next weight of FP8 GEMMs


@pytest.mark.parametrize("rows", [1, 16, 64, 65])
def test_an_fp8_gemm_prefetches_the_next_weight(rows):
    """Each but the last, of up to 64 rows beside an FP8 weight, and of 16 beside one in FP4."""
    x, (codes, scale) = numbers(rows, 128), tco.fp4_quantize(numbers(128, 128))
    first, second = torch.randn(2, 128, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 1, 1)

    def layer(x, first, second, codes, scales, scale):
        for multiply, weight, weight_scale in (
            (tco.mm_fp8_block, first, scales[0]),
            (tco.mm_fp8_fp4, codes, scale),
            (tco.mm_fp8_block, second, scales[1]),
        ):
            a, a_scale = tco.fp8_quantize(x, granularity="block128", scale_layout="column")
            x = multiply(a, weight.t(), a_scale, weight_scale)
        return x

    operands = x, first, second, codes, scales, scale
    got, compiler = compiled(layer, *operands)
    names, weights, found = zip(*prefetched(compiler), strict=True)
    assert names == ("mm_fp8_block", "mm_fp8_fp4", "mm_fp8_block") and len({*weights}) == 3
    assert found == (weights[1] if rows <= 64 else None, weights[2] if rows <= 16 else None, None)
    assert torch.equal(got, layer(*operands))
