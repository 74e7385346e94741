"""``merge_``: layers with the same input are merged in modules whose ``forward`` calls them one by one."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_cute_ops.nn import QuantLinear, merge_, merging, quantize_

H = 128


class Attention(nn.Module):
    """Attention with a custom ``forward`` that normalises the query after its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(H, H), nn.Linear(H, 64), nn.Linear(H, 64)
        self.q_norm = nn.LayerNorm(H)
        self.scaling = 3.0

    def forward(self, hidden_states: torch.Tensor, *, other: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q_norm(self.q_proj(hidden_states)) * self.scaling
        k, v = self.k_proj(hidden_states if other is None else other), self.v_proj(hidden_states)
        return q + torch.cat((k, v), -1)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(H, 256), nn.Linear(H, 256), nn.Linear(256, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


def plain_model() -> nn.Sequential:
    return nn.Sequential(Attention(), MLP()).bfloat16().requires_grad_(False)


def model_of(scheme: str = "nvfp4") -> nn.Sequential:
    return quantize_(plain_model(), scheme)


def linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


X = torch.randn(5, H).bfloat16()


def test_layers_are_freed_as_they_are_merged(monkeypatch):
    """Check that each group of layers is freed when it has been merged, so that the model's weights never exist
    twice."""
    model = nn.Sequential(*(MLP() for _ in range(3))).bfloat16().requires_grad_(False)
    quantize_(model)
    old = [weakref.ref(mlp.gate_proj.weight) for mlp in model]
    alive, whole = [], merging.merge

    def counted(layers):
        alive.append(sum(ref() is not None for ref in old))
        return whole(layers)

    monkeypatch.setattr(merging, "merge", counted)
    merge_(model)
    assert alive == [3, 2, 1]
    assert all(ref() is None for ref in old)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8_tensor", "fp8_channel"])
def test_same_bits_by_fewer_layers(scheme):
    model = model_of(scheme)
    want, classes = model(X), [type(module) for module in model]
    assert merge_(model) is model
    assert linears(model) == {"0.qkv_proj", "1.gate_up_proj", "1.down_proj"}
    assert torch.equal(model(X), want)
    assert all(
        isinstance(module, cls) and type(module).__name__ == cls.__name__
        for module, cls in zip(model, classes, strict=True)
    )
    counter = CompileCounterWithBackend("aot_eager")
    assert torch.equal(torch.compile(model, backend=counter, fullgraph=True)(X), want)
    assert counter.frame_count == 1


class ByMethod(Attention):
    """Attention whose ``forward`` leaves a projection to another method, as WavLM's does."""

    def query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return next(self.q_proj(each) for each in (hidden_states,))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.query(hidden_states) + torch.cat((self.k_proj(hidden_states), self.v_proj(hidden_states)), -1)


class Counting(Attention):
    """Attention whose ``forward`` assigns an attribute, and reads it in the next call."""

    calls = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        q, k, v = (each(hidden_states) for each in (self.q_proj, self.k_proj, self.v_proj))
        return (q + torch.cat((k, v), -1)) * self.calls


class Inheriting(Attention):
    """Attention whose ``forward`` calls the ``forward`` of its base class."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.k_proj(hidden_states)[:, :1]


@pytest.mark.parametrize("cls", [ByMethod, Counting, Inheriting])
def test_layers_that_only_their_module_can_call_stay_separate(cls):
    model = quantize_(nn.Sequential(cls(), MLP()).bfloat16().requires_grad_(False), "mxfp4")
    separate = copy.deepcopy(model)
    want = [separate(X) for _ in range(2)]
    merge_(model)
    assert linears(model) == {"0.q_proj", "0.k_proj", "0.v_proj", "1.gate_up_proj", "1.down_proj"}
    assert all(torch.equal(model(X), each) for each in want)


class ByKeyword(Attention):
    """Attention that calls its layers with keywords and reads their attributes."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj, self.k_proj, self.v_proj
        assert [(each.in_features, each.out_features, len(each.weight)) for each in (q, k, v)] == [
            (H, H, H), (H, 64, 64), (H, 64, 64)
        ]  # fmt: skip
        parts = [each(input=hidden_states.to(each.bias.dtype)) - each.bias for each in (q, k, v)]
        return torch.cat(parts, -1)


def test_merged_layers_look_like_linear_layers():
    plain = ByKeyword().bfloat16().requires_grad_(False)
    model = quantize_(nn.Sequential(plain), "mxfp4")
    want = model(X)
    weights = [model[0].get_submodule(f"{name}_proj").weight for name in "qkv"]
    merge_(model)
    assert linears(model) == {"0.qkv_proj"} and torch.equal(model(X), want)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), want)
    seen = merging._WithOriginals(model[0], (("qkv_proj", ("q_proj", "k_proj", "v_proj")),))
    assert all(torch.equal(getattr(seen, f"{name}_proj").weight, w) for name, w in zip("qkv", weights, strict=True))


class Scales(Attention):
    """Attention that changes its input in place between two projections."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(hidden_states)
        hidden_states.mul_(2)
        return q + torch.cat((self.k_proj(hidden_states), self.v_proj(hidden_states)), -1)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_input_that_changes_in_place(with_gradients):
    """Check that a changed input is refused, because the merged result was computed from the old input."""
    model = merge_(quantize_(nn.Sequential(Scales()).bfloat16().requires_grad_(False)))
    text = "qkv_proj merges layers, and their input was changed in place"
    with torch.set_grad_enabled(with_gradients), pytest.raises(RuntimeError, match=text):
        model(X.clone())


def test_inference_tensors_that_change_in_place():
    """Check that changes of inference tensors are detected by their values, because torch does not count such
    changes."""
    plain = quantize_(nn.Sequential(Scales(), Attention()).bfloat16().requires_grad_(False))
    model = merge_(copy.deepcopy(plain))
    text = "qkv_proj merges layers, and their input was changed in place"
    with torch.inference_mode():
        x = X.clone()
        x[0, 0] = torch.nan
        assert x.is_inference()
        assert torch.equal(model[1](x).view(torch.uint8), plain[1](x).view(torch.uint8))
        with pytest.raises(RuntimeError, match=text):
            model[0](x)


def test_merging_twice_changes_nothing():
    model = merge_(model_of())
    want = model(X)
    found = [type(module) for module in model]
    assert torch.equal(merge_(model)(X), want)
    assert [type(module) for module in model] == found


def test_pickled_and_copied(tmp_path):
    model = merge_(model_of())
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        assert linears(other) == linears(model) and [*map(type, other)] == [*map(type, model)]
        assert torch.equal(other(X), model(X))
        other[0].qkv_proj.weight.zero_()
        assert model[0].qkv_proj.weight.any()


def test_layers_that_do_not_fit_stay_separate():
    model = model_of("fp8_block")  # k has 64 rows, less than an FP8 block of 128
    want = model(X)
    assert linears(merge_(model)) == {"0.q_proj", "0.k_proj", "0.v_proj", "1.gate_up_proj", "1.down_proj"}
    assert torch.equal(model(X), want)
    model = quantize_(plain_model(), ignore=["v_proj"])
    assert linears(merge_(model)) == {"0.q_proj", "0.k_proj", "1.gate_up_proj", "1.down_proj"}


def test_different_inputs_are_refused():
    """Check that different inputs, as in cross-attention, are refused, even if their values are equal."""
    attention = merge_(model_of())[0]
    attention(X, other=X)
    with pytest.raises(RuntimeError, match="qkv_proj merges layers that were called with different inputs"):
        attention(X, other=X.clone())


def test_concurrent_calls():
    """Check two threads that run ``forward`` of the same module at the same time."""
    attention = merge_(model_of())[0]
    inputs = [torch.randn(3, H).bfloat16() for _ in range(2)]
    want = [attention(x) for x in inputs]
    barrier, got = threading.Barrier(2, timeout=60), {}

    def meet(*_: object) -> None:
        barrier.wait()

    attention.q_norm.register_forward_hook(meet)

    def call(i: int) -> None:
        got[i] = attention(inputs[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], want[i]) for i in range(2))


def test_other_names():
    model = nn.Module()
    model.a, model.b = nn.Linear(H, 8), nn.Linear(H, 16)
    quantize_(model.bfloat16())
    parts = [model.a.tensors(), model.b.tensors()]
    merge_(model, {"ab": ("a", "b")})
    assert linears(model) == {"ab"} and model.ab.parts == (8, 16)
    for part, tensors in zip(model.ab.split(), parts, strict=True):
        for name, tensor in part.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name
