"""Gradients of frozen quantised modules (straight-through), compared with float64 and separately decoded weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import experts as support
from support import weights
from support.experts import Block, Experts, GptOssExperts, H
from support.layers import by_kind
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_cute_ops.nn import (
    ExpertLayer,
    FP8BlockLinear,
    FP8ChannelLinear,
    GatedMLP,
    NVFP4Linear,
    QuantExperts,
    SwiGLU,
    _straight_through,
    merge,
    merge_,
    quantize_,
)

by_scheme = pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8_block", "mxfp8"])
N, K = 136, 320  # neither is a multiple of a scale tile or of 128 elements
BF16 = torch.bfloat16


def layer_of(cls=NVFP4Linear, activations="auto", n=N, bias=True, device="cpu", dtype=BF16):
    given = {"input_amax": 4.0} if (cls, activations) == (NVFP4Linear, "fp4") else {}
    return cls.from_float(nn.Linear(K, n, bias=bias, dtype=dtype), activations=activations, **given).to(device)


def weight_of(layer) -> np.ndarray:
    """Return the decoded weight (N, K) of a layer in float64."""
    return weights.decoded({name: each.cpu() for name, each in layer.state_dict().items()}, layer.parts)


def close(got: torch.Tensor, want: np.ndarray, most: float) -> bool:
    return bool(np.linalg.norm(got.detach().double().cpu().numpy() - want) <= most * np.linalg.norm(want))


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


@by_kind
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_linear(cls, activations, dtype, device, monkeypatch):
    """Check that the gradient of the input is ``dy · W``, and that the gradient of the bias is the sum of the rows of
    ``dy``. The result must be the same with and without gradients, and the gradients must be correct for large and for
    small blocks of decoded rows. No tensor may be saved for the backward pass."""
    layer = merge([layer_of(cls, activations, n, dtype=dtype) for n in (256, N)]).to(device)
    layer.bias.requires_grad_()
    x, dy = torch.randn(2, 3, K, dtype=dtype, device=device), torch.randn(2, 3, 256 + N, dtype=dtype, device=device)
    want = dy.double().cpu().numpy() @ weight_of(layer)
    saved = []
    for elements in (2**24, 1):
        monkeypatch.setattr(_straight_through, "BLOCK_ELEMENTS", elements)
        given = with_gradient(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda each: each):
            y = layer(given)
        assert y.shape == dy.shape and y.dtype == dtype and not saved
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        layer.bias.grad = None
        y.backward(dy)
        assert given.grad.dtype == dtype and close(given.grad, want, 0.005 if dtype == BF16 else 0.001)
        assert close(layer.bias.grad, dy.double().sum((0, 1)).cpu().numpy(), 0.005)


@by_kind
def test_compiled_linear(cls, activations, device):
    """Check that one compiled graph, without a break, gives the eager result and gradient."""
    layer = layer_of(cls, activations).to(device)
    x, dy = torch.randn(5, K, dtype=BF16, device=device), torch.randn(5, N, dtype=BF16, device=device)
    eager, compiled = with_gradient(x), with_gradient(x)
    want = layer(eager)
    want.backward(dy)
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled)
    got.backward(dy)
    torch._dynamo.reset()
    assert torch.equal(got, want) and torch.equal(compiled.grad, eager.grad)
    assert close(eager.grad, dy.double().cpu().numpy() @ weight_of(layer), 0.005)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_autocast(reentrant, device):
    """Check that recomputed activations give the same gradient, and that ``torch.autocast`` casts the input as in
    ``nn.Linear``."""
    layer = layer_of(bias=False).to(device)
    x, dy = torch.randn(5, K, device=device), torch.randn(5, N, dtype=BF16, device=device)
    want = dy.double().cpu().numpy() @ weight_of(layer)
    given = with_gradient(x)
    with torch.autocast(device, dtype=BF16):
        y = checkpoint(layer, given, use_reentrant=reentrant)
    y.backward(dy)
    assert y.dtype == BF16 and given.grad.dtype == torch.float32 and close(given.grad, want, 0.005)
    with torch.no_grad(), torch.autocast(device, dtype=BF16):
        assert torch.equal(layer(x), layer(x.bfloat16())) and torch.equal(layer(x), y)


def test_what_has_no_gradient():
    """Check that weights and scales that require grad are refused by name, and that rows that require grad cannot be
    quantised in advance."""
    layer, x = layer_of(), torch.randn(2, K, dtype=BF16)
    for name, cls in (("weight_scale_2", NVFP4Linear), ("weight", FP8BlockLinear), ("weight_scale", FP8ChannelLinear)):
        frozen = layer_of(cls)
        frozen.get_buffer(name).requires_grad_()
        text = f"{cls.__name__}: {name} requires grad, and quantised weights have no gradient"
        for given in (with_gradient(x), x):
            with pytest.raises(ValueError, match=text):
                frozen(given)
        with torch.no_grad():
            frozen(x)
    with pytest.raises(ValueError, match="has no gradient, and a requires grad"):
        layer(layer.quantize(with_gradient(x)))
    with pytest.raises(ValueError, match="has no gradient, and input requires grad"):
        layer_of(activations="fp8").quantize(with_gradient(x))


def test_merged_projections():
    """Check that the gradients of all merged layers reach their common input."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(K, N, bias=False) for _ in range(2))

        def forward(self, x):
            return self.gate_proj(x) * 2 - self.up_proj(x)

    model = quantize_(nn.Sequential(Block()).bfloat16().requires_grad_(False))
    decoded = 2 * weight_of(model[0].gate_proj) - weight_of(model[0].up_proj)
    merge_(model)
    x, dy = torch.randn(4, K, dtype=BF16, requires_grad=True), torch.randn(4, N, dtype=BF16)
    model(x).backward(dy)
    assert close(x.grad, dy.double().numpy() @ decoded, 0.008)


# Experts


def exact_experts(x, ids, factors, gate_up, down, biases, swiglu):
    """Return the experts' weighted sums for float64 tensors, computed by torch so that they are differentiable."""
    total = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for token, own in enumerate(ids.tolist()):
        for j, expert in enumerate(own):
            if expert >= 0:
                both = gate_up[expert] @ x[token] + (0 if biases is None else biases[0][expert])
                hidden = SwiGLU(*swiglu).of(*both.chunk(2))
                result = down[expert] @ hidden + (0 if biases is None else biases[1][expert])
                total = total.index_add(0, torch.tensor([token]), factors[token, j] * result[None])
    return total


def expert_weights(experts: QuantExperts):
    gate_up, down = (torch.from_numpy(each) for each in support.decoded(experts))
    layers = experts.gate_up_proj, experts.down_proj
    biases = None
    if layers[0].bias is not None:
        biases = [layer.bias.detach().double().cpu().view(experts.experts, -1) for layer in layers]
    return gate_up, down, biases, experts.swiglu[:3]


def tokens_off_the_clamp(experts: QuantExperts, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens whose gate and up values are far enough from the clamp that rounding cannot move them across
    it. The gradient jumps at the clamp."""
    x, ids = torch.randn(400, H).bfloat16(), torch.rand(400, 4).argsort(1)[:, :2]
    gate_up, _, biases, (_, _, limit) = expert_weights(experts)
    if limit is None:
        return x[:count], ids[:count]
    both = torch.einsum("enh,mh->men", gate_up, x.double()) + biases[0]
    far = ((both.abs() - limit).abs() > 2.0**-8 * limit).all(2).gather(1, ids).all(1)
    assert far.sum() >= count and (both.abs() > limit).any()
    return x[far][:count], ids[far][:count]


@by_scheme
@pytest.mark.parametrize("form", [Experts, GptOssExperts])
@pytest.mark.parametrize("few", [False, True])
def test_experts(scheme, form, few, device):
    """Check that tokens and routing weights get the gradients of experts with the decoded weights, and that the result
    does not change."""
    experts = quantize_(Block(form()).bfloat16(), scheme).to(device).mlp.experts
    if few:
        if "fp8" in scheme or device == "cuda":
            return
        experts.route_few_()
    x, ids = (each.to(device) for each in tokens_off_the_clamp(experts, 7))
    ids[0, 1] = -1
    factors, dy = torch.rand(7, 2, device=device), torch.randn(7, H, device=device).bfloat16()
    given = with_gradient(x), with_gradient(factors)
    y = experts(given[0], ids, given[1])
    with torch.no_grad():
        assert torch.equal(y, experts(x, ids, factors))
    y.backward(dy)
    exact = [each.detach().double().cpu().requires_grad_() for each in (x, factors)]
    exact_experts(exact[0], ids, exact[1], *expert_weights(experts)).backward(dy.double().cpu())
    assert close(given[0].grad, exact[0].grad.numpy(), 0.02) and given[0].grad.dtype == BF16
    assert close(given[1].grad, exact[1].grad.numpy(), 0.02) and given[1].grad[0, 1] == 0


def test_experts_what_has_no_gradient():
    experts = quantize_(Block(GptOssExperts()).bfloat16(), "nvfp4").mlp.experts
    x, ids, factors = torch.randn(3, H).bfloat16(), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    experts.down_proj.bias.requires_grad_()
    with pytest.raises(ValueError, match=r"QuantExperts: down_proj\.bias requires grad, and quantised weights have no"):
        experts(x, ids, factors)
    experts.down_proj.bias.requires_grad_(False)
    experts.gate_up_proj.weight_scale_2.requires_grad_()
    with pytest.raises(ValueError, match=r"QuantExperts: gate_up_proj\.weight_scale_2 requires grad"):
        experts(with_gradient(x), ids, factors)


@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_layer_of_experts(activations):
    """Check the gradients of tokens, the router and an adapter of the shared expert against float64."""
    torch.manual_seed(0)
    experts = quantize_(Block(Experts()).bfloat16(), "nvfp4").mlp.experts
    shared = GatedMLP(
        NVFP4Linear.from_float(nn.Linear(H, 128, bias=False).bfloat16(), activations=activations),
        NVFP4Linear.from_float(nn.Linear(64, H, bias=False).bfloat16(), activations=activations),
    )
    router = (torch.randn(4, H) / 8).bfloat16().float()
    layer = ExpertLayer(router, experts, 2, shared=shared, scoring="sigmoid", scaling_factor=2.5)
    layer.router.requires_grad_()
    x, dy = torch.randn(6, H).bfloat16(), torch.randn(6, H).bfloat16()
    given = with_gradient(x)
    layer(given).backward(dy)
    exact = [each.detach().double().requires_grad_() for each in (x, router)]
    scores = (exact[0] @ exact[1].T).sigmoid()
    ids = scores.topk(2, 1).indices
    factors = scores.gather(1, ids)
    factors = factors / factors.sum(1, keepdim=True) * 2.5
    y = exact_experts(exact[0], ids, factors, *expert_weights(experts))
    gate_up, down = (torch.from_numpy(weight_of(each)) for each in (shared.gate_up_proj, shared.down_proj))
    y = y + SwiGLU().of(*(exact[0] @ gate_up.T).chunk(2, 1)) @ down.T
    y.backward(dy.double())
    assert close(given.grad, exact[0].grad.numpy(), 0.03)
    assert close(layer.router.grad, exact[1].grad.numpy(), 0.03)
    with torch.no_grad():
        assert close(layer(x), y.detach().numpy(), 0.2)


# Training of adapters


class Adapted(nn.Module):
    """Frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Module, k: int, n: int) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(k, 4, bias=False), nn.Linear(4, n, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


def losses_of(model: nn.Module, device: str) -> list[float]:
    """Train adapters of three frozen layers on a fixed target; return the loss of each step."""
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(32, 64, generator=generator).to(device) for _ in range(2))
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(adapters, lr=2e-2), []
    for _ in range(20):
        loss = (model(x.bfloat16()).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8_block", "fp8_channel", "mxfp8"])
def test_adapters_learn(scheme, device):
    """Check that, in 20 steps, adapters before and after quantised layers reduce the loss as with bf16 layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    model = nn.Sequential(*layers).bfloat16().requires_grad_(False).to(device)
    quantised = quantize_(copy.deepcopy(model), scheme)
    runs = []
    for each in (model, quantised):
        torch.manual_seed(1)
        adapted = nn.Sequential(*(Adapted(layer, 64, 64).to(device) for layer in each))
        runs.append(losses_of(adapted, device))
    plain, ours = runs
    assert all(type(layer).__name__ != "Linear" for layer in quantised)
    assert ours[-1] < 0.85 * ours[0]
    assert abs((ours[0] - ours[-1]) / (plain[0] - plain[-1]) - 1) < 0.1, (plain, ours)
