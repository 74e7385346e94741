"""Modules that ``quantize_`` and the loaders replace, modules that they leave unchanged, and the summary of both."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from support.experts import Block, E, Experts, GptOssExperts, H, I
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from torch_cute_ops import checkpoint
from torch_cute_ops.nn import (
    NVFP4Linear,
    QuantExperts,
    QuantLinear,
    SwiGLU,
    _trial,
    merge_,
    quantize_,
    random_,
    summary,
)
from torch_cute_ops.nn.float_experts import float_experts

K = 128


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def left_by(model: nn.Module, **given) -> dict[str, str]:
    """Quantise a model without warnings; return the reasons for the modules that stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(summary(quantize_(model, **given)).left)


# Linear layers


def nothing(*args: object) -> None:
    return None


HOOKS: dict[str, Callable[[nn.Linear], object]] = {
    "forward hook": lambda linear: linear.register_forward_hook(lambda module, args, out: out * 2),
    "forward pre-hook": lambda linear: linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward hook": lambda linear: linear.register_full_backward_hook(nothing),
    "backward pre-hook": lambda linear: linear.register_full_backward_pre_hook(nothing),
    "state-dict hook": lambda linear: linear._register_state_dict_hook(nothing),
    "state-dict pre-hook": lambda linear: linear.register_state_dict_pre_hook(nothing),
    "load_state_dict pre-hook": lambda linear: linear.register_load_state_dict_pre_hook(nothing),
    "load_state_dict post-hook": lambda linear: linear.register_load_state_dict_post_hook(nothing),
}


@pytest.mark.parametrize("kind", HOOKS)
@torch.no_grad()
def test_hooks(kind):
    """Check that a layer with a hook is not replaced, and that loaders refuse it."""
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)).bfloat16()
    HOOKS[kind](model[0])
    x, old = torch.randn(3, K).bfloat16(), model[0]
    want = old(x)
    assert left_by(model) == {"0": f"a {kind} is registered on it"}
    assert model[0] is old and isinstance(model[1], NVFP4Linear)
    assert torch.equal(model[0](x), want)


@torch.no_grad()
def test_a_replaced_forward():
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)).bfloat16()
    model[0].forward = lambda x: x * 3
    assert left_by(model) == {"0": "its forward was replaced"}
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(model[0](x), x * 3)


class Attributes(nn.Module):
    """Model that reads an attribute, or a buffer, that was set on its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.other = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.proj.factor


@torch.no_grad()
def test_attributes_of_a_layer(tmp_path):
    """Check that plain attributes of a layer are copied to its replacement, also after loading and calibration."""
    model, x = Attributes().bfloat16(), torch.randn(3, K).bfloat16()
    model.proj.factor, model.proj.notes = 3.0, {"source": "test"}
    notes = model.proj.notes
    want = quantize_(copy.deepcopy(model).requires_grad_(False)).proj.dequantize(torch.float64)
    assert left_by(model) == {}
    assert model.proj.factor == 3.0 and model.proj.notes is notes and not hasattr(model.other, "factor")
    exact = 3 * (x.double() @ want.T + model.proj.bias.double())
    assert torch.allclose(model(x).double(), exact, rtol=2**-7, atol=2**-7)
    checkpoint.save(model, tmp_path, "modelopt")
    loaded = Attributes().bfloat16()
    loaded.proj.factor = 3.0
    checkpoint.load_(loaded, tmp_path)
    assert isinstance(loaded.proj, NVFP4Linear) and torch.equal(loaded(x), model(x))


HOLDS: dict[str, Callable[[nn.Linear], object]] = {
    "a quantised layer cannot hold its buffer factor": lambda layer: layer.register_buffer("factor", torch.tensor(3.0)),
    "a quantised layer cannot hold its parameter factor": lambda layer: layer.register_parameter(
        "factor", nn.Parameter(torch.tensor(3.0))
    ),
    "a quantised layer cannot hold its module factor": lambda layer: layer.add_module("factor", nn.Linear(1, 1)),
    "a quantised layer has another attribute parts": lambda layer: setattr(layer, "parts", (1, 2)),
    "a quantised layer has another attribute weight_scale": lambda layer: setattr(layer, "weight_scale", 3.0),
    "a quantised layer has another attribute scheme": lambda layer: setattr(layer, "scheme", "own"),
}


@pytest.mark.parametrize("reason", HOLDS)
@torch.no_grad()
def test_layers_that_hold_more(reason, tmp_path):
    """Check that ``quantize_`` and loaders refuse a layer to which a buffer, parameter or module was added, or whose
    attribute has the name of an attribute of the quantised layer."""
    model = Attributes().bfloat16()
    checkpoint.save(quantize_(Attributes().bfloat16()), tmp_path, "modelopt")
    HOLDS[reason](model.proj)
    old, held = model.proj, {**vars(model.proj)}
    with pytest.raises(ValueError, match=rf"proj is quantised in .*{reason}"):
        checkpoint.load_(copy.deepcopy(model), tmp_path)
    with pytest.warns(UserWarning, match=rf"quantize_: modules stay unchanged\. proj: {reason}"):
        quantize_(model)
    assert summary(model).left["proj"] == reason
    assert model.proj is old and vars(old).keys() == held.keys() and isinstance(model.other, NVFP4Linear)


def prune_(linear: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(linear, "weight", 0.5)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (parametrizations.weight_norm, "it is parametrized"),
        (parametrizations.orthogonal, "it is parametrized"),
        (weight_norm, "a forward pre-hook is registered on it"),
        (prune_, "a forward pre-hook is registered on it"),
        (lambda linear: Doubled(K, K), "Doubled is a subclass of nn.Linear"),
        (lambda linear: linear.double(), r"its weight is torch.float64"),
    ],
)
@torch.no_grad()
def test_layers_that_compute_something_else(change, reason):
    model = nn.Sequential(change(nn.Linear(K, K)), nn.Linear(K, K))
    x = torch.randn(3, K, dtype=next(model[0].parameters()).dtype)
    old, want = model[0], model[0](x)
    assert left_by(model)["0"] == reason
    assert model[0] is old and torch.equal(model[0](x), want)
    assert isinstance(model[1], NVFP4Linear)


class Converting(nn.Module):
    """Model that converts the input of ``wo`` to the dtype of its weight, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(K, K), nn.Linear(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.wi(x))
        if x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


@pytest.mark.parametrize("make", [Converting, lambda: nn.TransformerEncoderLayer(K, 4, K, batch_first=True)])
@torch.no_grad()
def test_layers_whose_weight_is_read(make):
    model = make().bfloat16().eval()
    twin, x = copy.deepcopy(model), torch.randn(2, 3, K).bfloat16()
    names = {"wo"} if isinstance(model, Converting) else {"linear1", "linear2"}
    found = left_by(model)
    assert {name for name, reason in found.items() if "reads its weight" in reason} == names
    got, want = model(x).float(), twin(x).float()
    assert (got - want).norm() < 0.12 * want.norm()


def test_shared_weights():
    """Check that layers with a common weight stay tied, and that a layer that occurs twice is replaced in both
    places."""
    model = nn.ModuleDict({"a": nn.Linear(K, K), "b": nn.Linear(K, K), "c": nn.Linear(K, K)})
    model["b"].weight, model["again"] = model["a"].weight, model["c"]
    with pytest.warns(UserWarning, match=r"a: it shares a parameter with b; b: it shares a parameter with a"):
        quantize_(model)
    assert model["a"].weight is model["b"].weight and model["again"] is model["c"]
    assert isinstance(model["c"], NVFP4Linear)


def test_compiled_layers():
    """Check that a layer wrapped by torch.compile stays, because the wrapper would still call the old layer, and that
    layers inside a compiled model are replaced."""
    layer = nn.Linear(K, K)
    left = left_by(nn.ModuleList([torch.compile(layer), nn.Linear(K, K)]))
    assert {*left} == {"0._orig_mod"} and left["0._orig_mod"].startswith("torch.compile wraps it")
    model = torch.compile(nn.Sequential(layer))
    assert left_by(model) == {} and isinstance(model._orig_mod[0], NVFP4Linear)


def test_adapters():
    """Check that PEFT's adapters stay trainable, and that the layer below them is quantised."""
    adapters = {f"lora_{each}": nn.ModuleDict({"default": nn.Linear(K, K)}) for each in "AB"}
    model = nn.ModuleDict({"q_proj": nn.ModuleDict({"base_layer": nn.Linear(K, K), **adapters})})
    assert left_by(model) == dict.fromkeys(("q_proj.lora_A.default", "q_proj.lora_B.default"), "it is a LoRA adapter")
    assert isinstance(model["q_proj"]["base_layer"], NVFP4Linear)


class Conv1D(nn.Module):
    """Layer with a transposed weight, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, K))


def test_other_modules_are_named():
    """Check that the warning names modules with a weight matrix, but not embeddings, convolutions and small
    parameters."""
    quiet = {"embedding": nn.Embedding(K, K), "convolution": nn.Conv2d(64, 64, 64)}
    model = nn.ModuleDict({**quiet, "c_attn": Conv1D(), "linear": nn.Linear(K, K)})
    with pytest.warns(UserWarning) as warned:
        quantize_(model)
    assert [str(each.message) for each in warned] == [
        "quantize_: modules stay unchanged. c_attn: Conv1D is neither nn.Linear nor experts with gate_up_proj and "
        "down_proj"
    ]
    assert summary(model).left.keys() == {*quiet, "c_attn"} and summary(model).replaced == {"linear": "NVFP4Linear"}


def test_nothing_to_quantise():
    with pytest.warns(UserWarning, match=r"nothing was replaced in this Sequential \(no linear layers and no experts"):
        quantize_(nn.Sequential(nn.ReLU(), nn.LayerNorm(K)))
    with pytest.warns(UserWarning, match=r"nothing was replaced in this Sequential \(0: it is in ignore\)"):
        quantize_(nn.Sequential(nn.Linear(K, K)), ignore="*")
    with pytest.warns(UserWarning, match=r"random_: .* in_features is 100"):
        random_(nn.Sequential(nn.Linear(100, K)))


def test_filter_fn():
    model = nn.ModuleDict({"a": nn.Linear(K, K), "b": nn.Linear(K, 2 * K), "norm": nn.LayerNorm(K)})
    seen = []

    def is_wide(module: nn.Module, name: str) -> bool:
        seen.append((module, name))
        return module.out_features > K

    want = [(model["a"], "a"), (model["b"], "b")]
    quantize_(model, filter_fn=is_wide)
    assert seen == want and type(model["a"]) is nn.Linear and isinstance(model["b"], NVFP4Linear)
    assert summary(model).left == {"a": "filter_fn returned False"}


@pytest.mark.parametrize("replace", [quantize_, random_])
def test_ignore_that_matches_nothing(replace):
    layers = nn.ModuleDict({"q": nn.Linear(K, K), "k": nn.Linear(K, K)})
    model = nn.ModuleDict({"attn": layers, "lm_head": nn.Linear(K, K)})
    with pytest.warns(
        UserWarning,
        match=r"ignore contains 'atn.*', which matches no layer; because ignore was given, its default \('lm_head',\) "
        "does not apply, and lm_head changes",
    ):
        replace(copy.deepcopy(model), ignore="atn.*")
    with pytest.warns(UserWarning, match=r"'attn', which matches no .* inside that module, write 'attn\.\*'$"):
        replace(copy.deepcopy(model), ignore=("attn", "lm_head"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(copy.deepcopy(model), ignore=("attn.q", "re:.*head"))
        replace(layers)  # this model has no lm_head


def test_summary(caplog):
    """Check the names, reasons and sizes in the summary, and its single line in the log."""
    model = nn.ModuleDict({"a": nn.Linear(K, K, bias=False), "lm_head": nn.Linear(K, K, bias=False)}).bfloat16()
    with pytest.raises(ValueError, match="summary: no function of this package replaced modules of this ModuleDict"):
        summary(model)
    with caplog.at_level(logging.INFO, logger="torch_cute_ops"):
        quantize_(model)
    found = summary(model)
    assert found.replaced == {"a": "NVFP4Linear"} and found.left == {"lm_head": "it is in ignore"}
    # 4-bit codes, one scale byte per 16 codes, and one float32 global scale
    assert (found.bytes_before, found.bytes_after) == (4 * K * K, 2 * K * K + K * K // 2 + K * K // 16 + 4)
    line = "quantize_: 1 replaced (1 by NVFP4Linear), 1 unchanged; 65,536 bytes before, 41,988 after"
    assert caplog.messages == [line]
    assert str(found) == f"{line}\n  NVFP4Linear: a\n  unchanged: lm_head: it is in ignore"


# Routers


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(K, 16)


def test_routers():
    """Check that routers stay, whether they are recognised by class, by name or by the experts next to them, and that
    other gates are replaced."""
    experts = nn.ModuleList(nn.Linear(K, K) for _ in range(16))
    moe = {"experts": experts, "gate": nn.Linear(K, 16), "shared_expert_gate": nn.Linear(K, 8), "route": TopKRouter()}
    hunyuan = {"shared_experts": nn.Linear(K, K), "gate": nn.ModuleDict({"wg": nn.Linear(K, 16)})}
    model = nn.ModuleDict(
        {
            "moe": nn.ModuleDict(moe),
            "hunyuan": nn.ModuleDict(hunyuan),
            "modality_router": nn.Linear(K, 16),
            "shared": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(K, K)]), "gate": nn.Linear(K, 64)}),
            "gated": nn.ModuleDict({"gate": nn.Linear(K, 16), "output_gate": nn.Linear(K, K)}),
        }
    )
    assert left_by(model, scheme="fp8_channel") == dict.fromkeys(
        ("moe.gate", "moe.shared_expert_gate", "moe.route.classifier", "hunyuan.gate.wg", "modality_router"),
        "it is a router",
    )


class MixtureOfExperts(nn.Module):
    """Sum of the experts' results, weighted by the softmax of a router's outputs.

    Args:
        router: name of the router.
        experts: name of the list of experts.
        layers: module of the router.
        count: number of experts.
    """

    def __init__(self, router: str, experts: str, layers: nn.Module, count: int = 16) -> None:
        super().__init__()
        self.names = router, experts
        self.add_module(experts, nn.ModuleList(nn.Linear(K, K, bias=False) for _ in range(count)))
        self.add_module(router, layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router, experts = map(self.get_submodule, self.names)
        results = torch.stack([expert(x) for expert in experts.children()], -1)
        return (results * router(x).softmax(-1).unsqueeze(-2)).sum(-1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, 64), nn.SiLU(), nn.Linear(64, 16))


@pytest.mark.parametrize(
    ("router", "experts", "make"),
    [
        *((name, "experts", lambda: nn.Linear(K, 16)) for name in ("classifier", "score", "dispatch")),
        ("score", "feed_forwards", lambda: nn.Linear(K, 16)),
        ("dispatch", "experts", two_layers),
    ],
)
@torch.no_grad()
def test_a_router_with_any_name(router, experts, make):
    """Check that a layer stays if it returns one output per expert of a list next to it: it is a router."""
    model = nn.ModuleDict({"moe": MixtureOfExperts(router, experts, make()), "head": nn.Linear(K, 16)})
    x = torch.randn(5, K)
    want = model["moe"].get_submodule(router)(x)
    left = left_by(model, scheme="fp8_channel")
    layers = [f"moe.{router}.0", f"moe.{router}.2"] if make is two_layers else [f"moe.{router}"]
    assert left == dict.fromkeys(layers, "it is a router")
    assert torch.equal(model["moe"].get_submodule(router)(x), want)
    assert all(isinstance(expert, QuantLinear) for expert in model["moe"].get_submodule(experts))


def test_a_router_next_to_stacked_experts():
    """Check that a router with any name stays if it is next to experts in two parameters, even in several successive
    blocks."""
    blocks = []
    for _ in range(2):
        stacked = Experts()
        stacked.gate_up_proj = nn.Parameter(torch.randn(16, 2 * I, H))
        stacked.down_proj = nn.Parameter(torch.randn(16, H, I))
        blocks.append(nn.ModuleDict({"ffn": stacked, "proj": nn.Linear(H, H), "classifier": nn.Linear(H, 16)}))
    reasons = left_by(nn.Sequential(*blocks))
    assert {name for name, why in reasons.items() if why == "it is a router"} == {"0.classifier", "1.classifier"}


def owner_of(**held: torch.Tensor | nn.Module) -> nn.Module:
    """Return a module that owns the given tensors as parameters, and the given modules."""
    module = nn.Module()
    for name, each in held.items():
        setattr(module, name, nn.Parameter(each) if isinstance(each, torch.Tensor) else each)
    return module


STACK = {"w1": torch.randn(16, I, K), "w2": torch.randn(16, K, I)}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("proj", {"ffn": owner_of(**STACK)}),
        ("score", {"ffn": owner_of(up=owner_of(weight=STACK["w1"]), down=owner_of(weight=STACK["w2"]))}),
        ("proj", STACK),
        ("proj", {"weights": nn.ParameterList([*STACK["w1"]])}),
        ("dispatch", {"moe": owner_of(experts=nn.ModuleList(nn.Linear(K, K) for _ in range(16)))}),
        ("classifier", {"experts": owner_of(w=torch.randn(16 * I, K))}),  # number of experts unknown
    ],
    ids=("stack", "inner-stacks", "own", "list", "inner", "name"),
)
def test_a_router_next_to_experts_in_other_forms(name, others):
    """Check that a router stays if the experts next to it are parameters with any names, or in a module next to it."""
    model = nn.Sequential(owner_of(**{name: nn.Linear(K, 16)}, **others))
    assert left_by(model, scheme="fp8_channel")[f"0.{name}"] == "it is a router"


def test_layers_that_are_no_routers():
    """Check that layers whose number of outputs is not the number of experts, shared experts, and heads next to other
    lists are replaced."""
    shared = nn.Sequential(nn.Linear(K, 64), nn.Linear(64, 16))
    others = nn.ModuleList(nn.Linear(64, K) for _ in range(16))
    model = nn.ModuleDict(
        {
            "moe": nn.ModuleDict(
                {"mix": MixtureOfExperts("score", "experts", nn.Linear(K, 8)), "shared": nn.Linear(K, K)}
            ),
            "shared": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(K, K)] * 1), "shared_expert": shared}),
            "head": nn.ModuleDict({"branches": others, "score": nn.Linear(K, 16)}),
            "kernel": nn.ModuleDict({"conv": nn.Conv1d(K, 16, 3), "proj": nn.Linear(K, 16)}),
            "wide": owner_of(w=torch.randn(16, 64, 64), proj=nn.Linear(K, 16)),
        }
    )
    assert {name: why for name, why in left_by(model, scheme="fp8_channel").items() if why == "it is a router"} == {}
    assert isinstance(model.kernel.proj, QuantLinear) and isinstance(model.wide.proj, QuantLinear)


# Experts


class UpBeforeGate(Experts):
    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        up, gate = (self.gate_up_proj[expert] @ x).chunk(2)
        return self.down_proj[expert] @ (self.act_fn(gate) * up)


class ClampedGate(Experts):
    """Experts with a clamp that no attribute reveals."""

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = (self.gate_up_proj[expert] @ x).chunk(2)
        return self.down_proj[expert] @ (self.act_fn(gate.clamp(max=5000.0)) * up)


class Tripled(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x, ids, weights)


class Normalised(Experts):
    """Experts that normalise the weights of a token's experts once more."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, weights / weights.sum(-1, keepdim=True))


class WithNorm(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H, elementwise_affine=False)

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.norm(super().expert(x, expert))


class Swapped(Experts):
    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, weights)


class OneMore(Experts):
    """Experts in which expert i returns the result of expert i + 1."""

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return super().expert(x, (expert + 1) % E)


class Interleaved(Experts):
    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        both = self.gate_up_proj[expert] @ x
        return self.down_proj[expert] @ (self.act_fn(both[::2]) * both[1::2])


class Scaled(Experts):
    """Experts with an additional parameter, a factor that is initially 1."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x, ids, weights)


class Buffered(Experts):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.factor * super().forward(x, ids, weights)


class Capacity(Experts):
    """Experts that compute at most ``factor`` times the average number of pairs, and at least ``least``. Further pairs
    are dropped."""

    def __init__(self, factor: float, least: int = 0, training_only: bool = False) -> None:
        super().__init__()
        self.factor, self.least, self.training_only = factor, least, training_only

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.training_only and not self.training:
            return super().forward(x, ids, weights)
        capacity = max(self.least, int(self.factor * ids.numel() / E))
        place = (ids.flatten()[:, None] == torch.arange(E)).cumsum(0).gather(1, ids.reshape(-1, 1))
        return super().forward(x, ids, weights * (place.view(ids.shape) <= capacity))


class TrainingFactor(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, weights) * (2 if self.training else 1)


class WithDropout(Experts):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.dropout(super().expert(x, expert))


class ByDtype(Experts):
    """Experts in which gate and up are swapped if the dtype has 16 bits."""

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        both = self.gate_up_proj[expert] @ x
        gate, up = both.chunk(2) if x.dtype.itemsize > 2 else both.chunk(2)[::-1]
        return self.down_proj[expert] @ (self.act_fn(gate) * up)


class OneDoubled(Experts):
    """Experts that double the routing weight of expert 1."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, torch.where(ids == 1, 2 * weights, weights))


class WithThreshold(Experts):
    """Experts that skip pairs with a small routing weight."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, torch.where(weights < 0.01, 0, weights))


class SingleDoubled(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, weights) * (2 if len(x) == 1 else 1)


class FirstTwo(Experts):
    """Experts that ignore all but the first two experts of a token."""

    def __init__(self, top_k: int | None = None) -> None:
        super().__init__()
        self.top_k = top_k

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids[:, :2], weights[:, :2])


class ExactlyTwo(Experts):
    """Experts that fail for another number of experts per token than 2."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids.view(len(x), 2), weights.view(len(x), 2))


class InPlace(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = super().forward(x, ids, weights)
        x.copy_(y)
        return y


OTHER = "computes something else than experts with SwiGLU"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (UpBeforeGate, OTHER),
        (ClampedGate, OTHER),
        (Tripled, OTHER),
        (Normalised, OTHER),
        (WithNorm, OTHER),
        (OneMore, OTHER),
        (Interleaved, OTHER),
        (lambda: Buffered(2.0), OTHER),
        (lambda: Experts(act_fn=nn.ReLU()), OTHER),
        (lambda: Capacity(1.25), OTHER),
        (lambda: Capacity(1.25, 48), rf"{OTHER} for 256 tokens of the same experts in float32: "),
        (
            lambda: Capacity(1.25, 48, True),
            rf"{OTHER} for 256 tokens of the same experts in float32 in training mode: ",
        ),
        (TrainingFactor, rf"{OTHER} for 8 tokens in bfloat16 in training mode: "),
        (lambda: WithDropout(0.1), rf"{OTHER} for 8 tokens in bfloat16 in training mode: "),
        (ByDtype, rf"{OTHER} for 8 tokens in bfloat16: "),
        (OneDoubled, rf"{OTHER} for 2 tokens of different experts in float32: "),
        (WithThreshold, rf"{OTHER} for 2 tokens of different experts in float32: "),
        (FirstTwo, rf"{OTHER} for 2 tokens of different experts in float32: "),
        (SingleDoubled, rf"{OTHER} for 1 token in bfloat16: "),
        (InPlace, "its forward changes its arguments in place"),
        (Swapped, "its forward refuses tokens, expert ids and weights: "),
        (Scaled, "QuantExperts cannot hold its factor"),
    ],
)
@torch.no_grad()
def test_experts_that_compute_something_else(make, reason):
    block = Block(make()).bfloat16().eval()
    old = block.mlp.experts
    given = torch.randn(2, H).bfloat16(), torch.tensor([[0, 1], [3, 2]]), torch.rand(2, 2)
    want = None if isinstance(old, Swapped) else old(*map(torch.clone, given))
    for scheme in ("nvfp4", "fp8_block"):
        with pytest.warns(UserWarning, match=rf"quantize_: modules stay unchanged\. mlp\.experts: .*{reason}"):
            quantize_(block, scheme)
        assert block.mlp.experts is old
    assert want is None or torch.equal(old(*map(torch.clone, given)), want)


def test_an_unknown_buffer():
    """Check that experts that use a buffer on the meta device stay, because its values are unknown."""
    experts, before = Buffered(1.0).to("meta"), torch.get_rng_state()
    assert OTHER in float_experts(experts).verified()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "make",
    [
        Experts,
        GptOssExperts,
        lambda: Experts(experts=1),
        lambda: Experts(experts=2),
        lambda: Capacity(E),  # drops nothing
        lambda: WithDropout(0.0),
        lambda: FirstTwo(top_k=2),
        ExactlyTwo,
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_that_are_replaced(make, dtype):
    for experts in (make().to(dtype), make().to("meta", dtype)):
        want = SwiGLU(1.702, 1.0, 7.0) if isinstance(experts, GptOssExperts) else SwiGLU()
        assert float_experts(experts).verified() == want


def test_experts_with_hooks_or_shared_weights():
    hooked, replaced, first, second, within = (Experts() for _ in range(5))
    within.act_fn.register_forward_hook(nothing)
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    replaced.forward = lambda *given: given[0]
    second.down_proj = first.down_proj
    left = left_by(nn.ModuleList([hooked, replaced, first, second, within, Experts()]))
    assert left == {
        "0": "a forward hook is registered on it",
        "1": "its forward was replaced",
        "2": "it shares a parameter with 3",
        "3": "it shares a parameter with 2",
        "4": "a forward hook is registered on it",
    }


class Wrapped(torch.Tensor):
    """Tensor subclass, such as a DTensor."""


def test_experts_of_other_dtypes():
    double, wrapped = Experts().double(), Experts()
    wrapped.down_proj = nn.Parameter(wrapped.down_proj.detach().as_subclass(Wrapped))
    linear = nn.Linear(K, K)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))
    assert left_by(nn.ModuleList([double, wrapped, linear, Experts()])) == {
        "0": "its gate_up_proj is torch.float64",
        "1": "its down_proj is a Wrapped",
        "2": "its weight is a Wrapped",
    }


def test_shapes_that_fit_no_experts():
    more, narrow = Experts(), Experts()
    more.gate_up_proj = nn.Parameter(torch.zeros(E + 1, 2 * I, H))
    narrow.down_proj = nn.Parameter(torch.zeros(E, H, I // 2))
    left = left_by(nn.ModuleList([more, narrow, Experts()]))
    assert left == {
        "0": f"gate_up_proj {(E + 1, 2 * I, H)} and down_proj {(E, H, I)} differ in the number of experts",
        "1": f"gate_up_proj {(E, 2 * I, H)} and down_proj {(E, H, I // 2)} fit no H and I",
    }


def test_each_trial_depends_on_the_whole_module(monkeypatch):
    """Check that equal modules share one trial run, and that a module with another attribute, activation, buffer or
    method gets another trial run."""
    experts = GptOssExperts()
    assert float_experts(experts).verified() == SwiGLU(1.702, 1.0, 7.0)
    experts.limit, other = 9.0, Experts()
    assert float_experts(experts).verified() == SwiGLU(1.702, 1.0, 9.0)
    assert float_experts(other).verified() == SwiGLU()
    other.act_fn = nn.GELU()
    assert float_experts(other).verified() == SwiGLU(gate="gelu")
    other.act_fn = nn.ReLU()
    assert OTHER in float_experts(other).verified()
    assert float_experts(Buffered(1.0)).verified() == SwiGLU() and OTHER in float_experts(Buffered(2.0)).verified()
    assert float_experts(Experts()).verified() == SwiGLU()
    monkeypatch.setattr(Experts, "expert", UpBeforeGate.expert)
    assert OTHER in float_experts(Experts()).verified()


SCALE = 1.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class WithGlobals(Experts):
    factor = 1.0

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return scaled(super().forward(x, ids, weights)) * self.factor


def test_each_trial_depends_on_globals(monkeypatch):
    """Check that another value of a class attribute or of a global variable, or another dtype, leads to another trial
    run."""
    assert float_experts(WithGlobals()).verified() == SwiGLU()
    monkeypatch.setattr(WithGlobals, "factor", 2.0)
    assert OTHER in float_experts(WithGlobals()).verified()
    monkeypatch.undo()
    assert float_experts(WithGlobals()).verified() == SwiGLU()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert OTHER in float_experts(WithGlobals()).verified()
    assert float_experts(ByDtype()).verified() == SwiGLU() and OTHER in float_experts(ByDtype().half()).verified()


class Gathered(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("mkfh,mh->mkf", self.gate_up_proj[ids], x).chunk(2, -1)
        y = torch.einsum("mkhi,mki->mkh", self.down_proj[ids], self.act_fn(gate) * up)
        return (y * weights[..., None]).sum(1)


class Dense(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("mh,enh->men", x, self.gate_up_proj).chunk(2, -1)
        y = torch.einsum("mei,ehi->meh", self.act_fn(gate) * up, self.down_proj)
        return (y.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)


def test_modules_that_read_all_experts(monkeypatch):
    """Check that a trial runs small modules even if they multiply all experts at once, but large modules only if they
    read one expert at a time. A trial thus never copies the weights of all experts of a large module."""
    assert float_experts(Dense()).verified() == SwiGLU()
    assert float_experts(Gathered()).verified() == SwiGLU()
    monkeypatch.setattr(_trial, "LARGEST", E * 2 * I * H - 1)
    monkeypatch.setattr(_trial, "_FOUND", {})
    for cls in (Dense, Gathered):
        assert "MemoryError: the trial is limited to modules that read" in float_experts(cls()).verified()
    assert float_experts(Experts()).verified() == SwiGLU()
    monkeypatch.setattr(_trial, "CROWD", (64, 64))
    monkeypatch.setattr(_trial, "SPREAD_WORK", 0)
    monkeypatch.setattr(_trial, "LARGEST", 2 * I * H - 1)  # a single expert is always allowed
    monkeypatch.setattr(_trial, "_FOUND", {})
    assert float_experts(Experts()).verified() == SwiGLU()


def test_a_trial_changes_nothing():
    """Check that a trial neither draws from the global generator nor runs the module itself."""
    experts = GptOssExperts()
    before, state = {key: each.clone() for key, each in experts.state_dict().items()}, torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert isinstance(float_experts(experts).verified(), SwiGLU)
    assert torch.equal(torch.get_rng_state(), state) and experts.training
    assert all(torch.equal(experts.state_dict()[key], each) for key, each in before.items())


# Loading checkpoints


def test_load_refuses_what_it_would_drop(tmp_path):
    """Check that a quantised checkpoint is not loaded into a module that would lose a hook or a similar addition."""

    def blank() -> nn.Module:
        with torch.device("meta"):
            return Block(Experts()).bfloat16()

    checkpoint.save(quantize_(Block(Experts()).bfloat16()), tmp_path / "x", "modelopt")
    changes: list[tuple[str, str, Callable[[nn.Module], object]]] = [
        ("o_proj", "a forward hook is registered on it", lambda block: block.o_proj.register_forward_hook(nothing)),
        ("o_proj", "its forward was replaced", lambda block: setattr(block.o_proj, "forward", nothing)),
        (
            "mlp.experts",
            "a forward hook is registered on it",
            lambda block: block.mlp.experts.register_forward_hook(nothing),
        ),
        ("mlp.experts", OTHER, lambda block: setattr(block.mlp.experts, "act_fn", nn.ReLU())),
    ]
    for name, reason, change in changes:
        block = blank()
        change(block)
        with pytest.raises(ValueError, match=rf"{name} is quantised in .*, but cannot become .*: .*{reason}"):
            checkpoint.load_(block, tmp_path / "x")
    assert isinstance(checkpoint.load_(blank(), tmp_path / "x").mlp.experts, QuantExperts)


def test_merge_keeps_hooks():
    """Check that quantised layers with hooks are not merged."""
    model = nn.ModuleDict({"attn": nn.ModuleDict({f"{name}_proj": nn.Linear(K, K) for name in "qkv"})}).bfloat16()
    quantize_(model)
    model.attn.k_proj.register_forward_hook(nothing)
    merge_(model)
    assert {*model.attn} == {"q_proj", "k_proj", "v_proj"}
    model.attn.k_proj._forward_hooks.clear()
    merge_(model)
    assert {*model.attn} == {"qkv_proj"} and isinstance(model.attn.qkv_proj, QuantLinear)
