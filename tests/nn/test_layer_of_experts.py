"""Expert layers with their router compared with float64; on a GPU also in captured graphs."""

from __future__ import annotations

import copy
import math
from typing import get_args

import numpy as np
import pytest
import torch
from support import experts as support
from support.experts import GPT_OSS, Block, Experts, GptOssExperts, H, I, ops_of
from torch import nn

from torch_cute_ops import nvfp4_global_scale, silu_mul
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.nn import (
    ExpertLayer,
    GatedMLP,
    MXFP4Linear,
    NVFP4Linear,
    QuantizedRows,
    SwiGLU,
    merge,
    quantize_,
    warmup,
)
from torch_cute_ops.nn.experts import few_tokens

E, TOPK = 8, 3
FEW = few_tokens(I) * E // TOPK
"""Largest number of tokens for which this layer computes only routed pairs."""
SCORINGS = {
    "softmax": {},
    "softmax of all": {"renormalize": False, "scaling_factor": 0.5},
    "sigmoid": {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "scaling_factor": 2.5},
}
LEAST = {"16bit": 0.9999, "nvfp4": 0.98, "mxfp4": 0.96, "fp8": 0.998}
"""Smallest cosine similarity of the layer's result and the result with decoded weights, by the format of
activations."""
FEW_OPS = {
    "16bit": {"moe_route_dense", "moe_fc1_fp4_weight_only", "moe_fc2_fp4_weight_only"},
    "fp4": {"moe_route_dense", "fp4_quantize", "moe_fc1_fp4", "moe_fc2_fp4"},
}
by_scheme = pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
by_activations = pytest.mark.parametrize("activations", ["16bit", "fp4"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def shared_expert(scheme: str, width: int = 64, **given) -> GatedMLP:
    linears = nn.ModuleDict(
        {
            name: nn.Linear(*size, bias=False)
            for name, size in {"gate": (H, width), "up": (H, width), "down": (width, H)}.items()
        }
    )
    quantize_(linears.bfloat16(), scheme, **given)
    return GatedMLP(merge([linears["gate"], linears["up"]]), linears["down"])


def layer_of(
    form: type[nn.Module] = Experts,
    scheme: str = "nvfp4",
    scoring: str = "sigmoid",
    shared: bool = True,
    device: str = "cpu",
) -> ExpertLayer:
    experts = quantize_(Block(form(E)).bfloat16(), scheme).mlp.experts
    given = {"bias": torch.randn(E) / 4} if scoring == "sigmoid" else {"router_bias": torch.randn(E)}
    layer = ExpertLayer(
        torch.randn(E, H) / 16,
        experts,
        TOPK,
        shared=shared_expert(scheme) if shared else None,
        **given,
        **SCORINGS[scoring],
    )
    return layer.to(device)


def route_few(layer: ExpertLayer, activations: str) -> ExpertLayer:
    """Call `route_few_` with these activations, unless they are "many"; return the layer."""
    if activations == "many":
        return layer
    scales = {}
    if activations == "fp4" and layer.experts.scheme == "nvfp4":
        scale = nvfp4_global_scale(torch.tensor(5.0))
        scales = {"input_global_scale": scale, "hidden_global_scale": nvfp4_global_scale(torch.tensor(60.0)).expand(E)}
    layer.experts.route_few_(activations, **scales)
    return layer


def choice(layer: ExpertLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, computed for one token at a time in float64."""
    logits = x.double().cpu() @ layer.router.double().cpu().T
    if layer.router_bias is not None:
        logits = logits + layer.router_bias.double().cpu()
    bias = torch.zeros(E) if layer.bias is None else layer.bias.cpu()
    how, ids, weights = layer.scoring, [], []
    for row in logits.tolist():
        if how["scoring"] == "softmax":
            scores = [math.exp(each) / sum(map(math.exp, row)) for each in row]
        else:
            scores = [1 / (1 + math.exp(-each)) for each in row]
        ranks = [score + extra for score, extra in zip(scores, bias.tolist(), strict=True)]
        groups = [range(i, i + E // how["num_groups"]) for i in range(0, E, E // how["num_groups"])]
        if len(groups) > 1:
            groups.sort(key=lambda group: -sum(sorted(ranks[e] for e in group)[-2:]))
        usable = [e for group in groups[: how["topk_groups"]] for e in group]
        own = sorted(usable, key=lambda e: -ranks[e])[:TOPK]
        total = sum(scores[e] for e in own) if how["renormalize"] else 1.0
        ids.append(own)
        weights.append([scores[e] / total * how["scaling_factor"] for e in own])
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


def wanted(layer: ExpertLayer, x: torch.Tensor) -> np.ndarray:
    """Return the layer's expected result with decoded weights, in float64."""
    ids, weights = choice(layer, x)
    experts, biases = layer.experts, None
    if experts.down_proj.bias is not None:
        pair = experts.gate_up_proj.bias, experts.down_proj.bias
        biases = tuple(each.double().cpu().view(E, -1).numpy() for each in pair)
    decoded = support.decoded(experts)
    want = support.computed(x, ids, weights, *decoded, biases, experts.swiglu[:3], in_16_bits=True)
    if layer.shared is not None:
        gate_up, down = (
            each.dequantize().double().cpu() for each in (layer.shared.gate_up_proj, layer.shared.down_proj)
        )
        gate, up = (x.double().cpu() @ gate_up.T).chunk(2, -1)
        want = want + (nn.functional.silu(gate) * up @ down.T).numpy()
    return want


def cosine(got: torch.Tensor, want: np.ndarray) -> float:
    got = got.double().cpu().numpy().ravel()
    return float(got @ want.ravel() / np.linalg.norm(got) / np.linalg.norm(want))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shared", [True, False])
@by_activations
@by_scheme
@torch.no_grad()
def test_values(scheme, activations, shared, scoring):
    """Check that calls with few tokens and calls with many tokens each run the ops of their own path, and that results
    match float64."""
    form = Experts if scoring == "sigmoid" else GptOssExperts
    layer = route_few(layer_of(form, scheme, scoring, shared), activations)
    x = torch.randn(FEW + 1, H).bfloat16()
    want = wanted(layer, x)
    few, many = layer(x[1:]), layer(x)
    assert few.dtype == many.dtype == torch.bfloat16 and few.shape == (FEW, H)
    assert cosine(few, want[1:]) > LEAST["16bit" if activations == "16bit" else scheme]
    assert cosine(many, want) > LEAST["fp8"]
    for got, part in ((few, want[1:]), (many, want)):
        assert np.linalg.norm(got.double().numpy() - part) < 0.3 * np.linalg.norm(part)
    own = {"mm_fp4_weight_only", "silu_mul_mm_fp4_weight_only"} if shared else set()
    assert ops_of(layer, x[1:]) == FEW_OPS[activations] | own
    assert {"moe_route", "grouped_mm_fp8_fp4", "moe_finalize"} <= ops_of(layer, x)
    assert torch.equal(layer(x[1:].view(FEW, 1, H)), few.view(FEW, 1, H))


@torch.no_grad()
def test_other_calls():
    """Check calls without tokens, calls in dtypes that the path for few tokens does not support, and FP8 weights, for
    which this path does not exist."""
    layer = layer_of()
    for each in (layer, route_few(layer, "16bit"), route_few(layer, "fp4")):
        assert each(torch.zeros(0, H, dtype=torch.bfloat16)).shape == (0, H)
    x = torch.randn(4, H)
    want = wanted(layer, x)
    layer.shared = None  # the shared expert's layers do not support float32
    assert "moe_fc1_fp4" in ops_of(layer, x) and layer(x).dtype == torch.float32
    assert "moe_permute_fp8quant" in ops_of(route_few(layer, "16bit"), x)
    assert "moe_fc1_fp4_weight_only" in ops_of(layer, x.half())
    assert want.shape == x.shape
    in_fp8 = layer_of(scheme="fp8_block", shared=False)
    x = x.bfloat16()
    assert cosine(in_fp8(x), wanted(in_fp8, x)) > LEAST["fp8"]


@pytest.mark.parametrize("way", ["few, 16bit", "few, fp4", "many"])
@torch.no_grad()
def test_a_token_depends_on_no_other(way):
    """Check that a token's result is bitwise equal if the other tokens, and so the other experts, of the call
    differ."""
    layer = layer_of()
    if way != "many":
        route_few(layer, way.split()[1])
    x = torch.randn(9, H).bfloat16()
    first = layer(x)
    x[1:] = torch.randn(8, H) * 3
    assert torch.equal(layer(x)[0], first[0])


@by_activations
@torch.no_grad()
def test_state_dict(activations):
    """Check that a layer that loads another layer's state dict gives the other layer's result and allocates no buffers,
    and that the bias for the choice of experts is never cast."""
    one = route_few(layer_of(GptOssExperts), activations)
    torch.manual_seed(1)
    other = route_few(layer_of(GptOssExperts), activations)
    state = one.state_dict()
    names = {
        "router",
        "bias",
        "experts.gate_up_proj.weight",
        "shared.gate_up_proj.weight_scale",
        "shared.down_proj.weight",
    }
    assert names <= {*state} and not any("side_by_side" in name for name in state)
    x = torch.randn(5, H).bfloat16()
    want, held = one(x), other.experts.side_by_side.weight.data_ptr()
    assert not torch.equal(other(x), want)
    other.load_state_dict(state)
    assert torch.equal(other(x), want) and other.experts.side_by_side.weight.data_ptr() == held
    half = copy.deepcopy(other).half()
    assert half.bias.dtype == torch.float32 and half.router.dtype == torch.float16
    if activations == "fp4":
        assert half.experts.side_by_side.hidden_global_scale.dtype == torch.float32
    assert cosine(half(x.half()), want.double().numpy()) > 0.999
    assert cosine(half(x.half()), wanted(half, x.half())) > LEAST["16bit" if activations == "16bit" else "nvfp4"]


@pytest.mark.parametrize("way", ["16bit", "fp4", "many"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@torch.no_grad()
def test_compiled(way, scoring):
    layer = route_few(layer_of(scoring=scoring), way)
    x = torch.randn(6, H).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("activations", ["16bit", "fp8", "fp4", "fp4_token"])
@torch.no_grad()
def test_gated_mlp(activations):
    """Check results against float64 for all formats of activations and all gates, including gpt-oss's gate."""
    amax = {"input_amax": 64.0} if activations == "fp4" else {}
    layers = {
        name: NVFP4Linear.from_float(nn.Linear(*size, bias=False).bfloat16(), activations=activations, **amax)
        for name, size in (("gate", (H, 128)), ("up", (H, 128)), ("down", (128, H)))
    }
    x = torch.randn(2, 5, H).bfloat16() * 2
    for swiglu in (SwiGLU(), SwiGLU(*GPT_OSS), *(SwiGLU(gate=gate) for gate in ("gelu_tanh", "gelu", "relu2"))):
        mlp = GatedMLP(merge([layers["gate"], layers["up"]]), layers["down"], swiglu=swiglu)
        gate, up = (x.double() @ layers[name].dequantize().double().T for name in ("gate", "up"))
        if swiglu.limit is not None:
            gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
        if swiglu.gate == "silu":
            h = gate * torch.sigmoid(swiglu.alpha * gate) * (up + swiglu.beta)
        elif swiglu.gate == "relu2":
            h = gate.clamp(min=0) ** 2 * up
        else:
            h = nn.functional.gelu(gate, approximate="tanh" if swiglu.gate == "gelu_tanh" else "none") * up
        want = h @ layers["down"].dequantize().double().T
        assert mlp(x).shape == x.shape
        assert cosine(mlp(x), want.numpy()) > {"16bit": 0.9999, "fp8": 0.995}.get(activations, 0.97)


@torch.no_grad()
@pytest.mark.parametrize("cls", [NVFP4Linear, MXFP4Linear])
@pytest.mark.parametrize("gate", get_args(Gate))
def test_gate_and_up_in_one_op(gate, cls):
    """Check that, for any number of rows, a layer called with gate and up gives the same result as the two separate
    ops."""
    layers = [cls.from_float(nn.Linear(*size).bfloat16()) for size in ((H, 128), (H, 128), (128, H))]
    mlp, calls = GatedMLP(merge(layers[:2]), layers[2], swiglu=SwiGLU(gate=gate)), []
    mlp.down_proj.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
    for rows in (0, 1, 5, 40):
        x = torch.randn(rows, 2, H).bfloat16()
        got = mlp(x)
        assert calls.pop().gate == gate and not calls
        want = layers[2](silu_mul(mlp.gate_up_proj(x), gate=gate))
        assert torch.equal(got, want) and got.shape == (rows, 2, H)
        calls.clear()
    mlp.down_proj._forward_pre_hooks.clear()
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for rows in (1, 5, 40):
        x = torch.randn(rows, H).bfloat16()
        assert torch.equal(compiled(x), mlp(x))


@torch.no_grad()
def test_other_layers_refuse_gate_and_up():
    layer = NVFP4Linear.from_float(nn.Linear(64, H).bfloat16(), activations="fp8")
    rows = QuantizedRows((torch.zeros(3, 128).bfloat16(),), (3,), torch.bfloat16, "silu")
    with pytest.raises(
        ValueError, match="NVFP4Linear: the rows are gate and up, which a layer with activations='fp8' does not"
    ):
        layer(rows)
    text = r"silu_mul_mm_fp4_weight_only: got a with shape \(3, 128\); expected \(3, 512\)"
    with pytest.raises(ValueError, match=text):
        NVFP4Linear.from_float(nn.Linear(H, H).bfloat16())(rows)


@torch.no_grad()
def test_warmup_of_a_gated_mlp():
    """Check that `warmup` calls a gated MLP in every bucket on any GPU, because the MLP calls its fused op for any
    number of rows."""
    shared, counts = shared_expert("nvfp4"), []
    shared.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    warmup(nn.ModuleList([shared, shared_expert("nvfp4")]), (1, 5, 8, 40), fused=False)
    assert counts == [1, 8, 40]


def test_warmup():
    """Check that `warmup` calls the expert layer in each bucket and on each path, and does not call modules inside it
    separately."""
    layer, counts = route_few(layer_of(), "16bit"), []
    layer.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    layer.experts.register_forward_pre_hook(lambda *_: pytest.fail("experts were called"))
    warmup(nn.ModuleList([layer, route_few(layer_of(), "16bit")]), (1, 5, 8, FEW, FEW + 1))
    assert counts == [1, 8, FEW, FEW + 1]


def test_errors():
    layer = layer_of()
    experts, shared = layer.experts, layer.shared
    with pytest.raises(ValueError, match=r"ExpertLayer: got router with shape \(8, 64\); expected \(8, 256\)"):
        ExpertLayer(torch.zeros(8, 64), experts, 2)
    with pytest.raises(ValueError, match=r"ExpertLayer: got bias with shape \(4,\); expected \(8,\)"):
        ExpertLayer(layer.router, experts, 2, bias=torch.zeros(4))
    with pytest.raises(ValueError, match=r"ExpertLayer: topk is 9; expected 1 to 8"):
        ExpertLayer(layer.router, experts, 9)
    with pytest.raises(ValueError, match=r"GatedMLP: the layers are \(128, 256\) and \(128, 256\); expected"):
        GatedMLP(shared.gate_up_proj, shared.gate_up_proj)
    small = quantize_(nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(64, 64)}).bfloat16(), "nvfp4")
    with pytest.raises(ValueError, match="the shared expert's results have 64 columns; expected 256"):
        ExpertLayer(layer.router, experts, 2, shared=GatedMLP(small["up"], small["down"]))
    with pytest.raises(RuntimeError, match="call route_few_"), torch.no_grad():
        layer.forward_few(torch.zeros(1, H, dtype=torch.bfloat16), torch.zeros(1, E))
    with (
        pytest.raises(ValueError, match="moe_route: topk is 3, and a token has 2 experts to choose from"),
        torch.no_grad(),
    ):
        layer.scoring["num_groups"] = 8
        layer(torch.zeros(1, H, dtype=torch.bfloat16))


# On a GPU


def captured(call, *given):
    """Capture a call in a graph, after one call that compiles; return the graph and its result."""
    call(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*given)
    return graph, result


def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("few tokens are routed by Hopper's kernels")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["16bit", "fp4", "many"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@by_scheme
@torch.no_grad()
def test_a_captured_layer_follows_its_tokens(scheme, scoring, way):
    """Check that a graph replayed with other tokens, and so other experts, equals an eager call, even if one expert
    gets all tokens, and that results match the decoded weights."""
    hopper()
    layer = layer_of(scheme=scheme, scoring=scoring, device="cuda")
    if way != "many":
        route_few(layer, way)
        for name in ("input_global_scale", "hidden_global_scale"):
            scale = getattr(layer.experts.side_by_side, name)
            assert scale is None or scale.is_cuda
    x = torch.randn(17, H, device="cuda").bfloat16()
    # A single token may be off by more than many tokens on average.
    least = LEAST["16bit"] if way == "16bit" else LEAST[scheme if way == "fp4" else "fp8"] - 0.01
    graph, result = captured(layer, x)
    for step in range(4):
        x.copy_(torch.randn(17, H) if step < 3 else torch.randn(1, H).expand(17, H))
        graph.replay()
        assert torch.equal(result, layer(x)), step
        assert cosine(result, wanted(layer, x)) > least, step


@pytest.mark.gpu
@pytest.mark.slow
@by_activations
@torch.no_grad()
def test_captured_experts_follow_their_routing(activations):
    """Check that each replay of a graph routes other pairs (in one replay none, which gives 0), by a routing matrix and
    by ids."""
    hopper()
    experts = route_few(layer_of(GptOssExperts, device="cuda"), activations).experts
    x = torch.randn(12, H, device="cuda").bfloat16()
    routing = torch.rand(12, E, device="cuda")
    ids, weights = torch.zeros(12, TOPK, dtype=torch.int32, device="cuda"), torch.rand(12, TOPK, device="cuda")
    by_routing, by_ids = captured(experts.forward_dense, x, routing), captured(experts, x, ids, weights)
    for share in (0.4, 0.0, 1.0, 0.5):
        routing.copy_(torch.rand(12, E) * (torch.rand(12, E) < share))
        ids.copy_(torch.where(torch.rand(12, TOPK) < share, torch.rand(12, E).argsort(1)[:, :TOPK], -1))
        for (graph, result), call in (
            (by_routing, lambda: experts.forward_dense(x, routing)),
            (by_ids, lambda: experts(x, ids, weights)),
        ):
            result.fill_(torch.nan)
            graph.replay()
            assert torch.equal(result, call()), share
            assert result.isfinite().all() and bool(result.any()) == (share > 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["16bit", "fp4", "many"])
@torch.no_grad()
def test_a_token_depends_on_no_other_on_a_gpu(way):
    """Check on a GPU that, for a fixed number of tokens, a token's result is bitwise independent of the other
    tokens."""
    hopper()
    layer = route_few(layer_of(device="cuda"), way)
    x = torch.randn(40 if way == "many" else FEW, H, device="cuda").bfloat16()
    first = layer(x)
    for _ in range(3):
        x[1:] = torch.randn(len(x) - 1, H, device="cuda") * 3
        assert torch.equal(layer(x)[0], first[0])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["16bit", "fp4"])
@torch.no_grad()
def test_warm_layers_are_captured_at_once(way):
    """Check that after `warmup` with these numbers of tokens a capture compiles nothing, for few and for many
    tokens."""
    hopper()
    layer = route_few(layer_of(device="cuda"), way)
    warmup(layer, (4, FEW, FEW + 1))
    for count in (4, FEW, FEW + 1):
        x = torch.randn(count, H, device="cuda").bfloat16()
        torch.nn.functional.linear(x.float(), layer.router)  # cuBLAS must be initialised before a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x)
        graph.replay()
        assert torch.equal(result, layer(x))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["16bit", "fp4", "many"])
@torch.no_grad()
def test_compiled_on_a_gpu(way):
    hopper()
    layer = route_few(layer_of(device="cuda"), way)
    x = torch.randn(6, H, device="cuda").bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=2**-6, atol=2**-6)
