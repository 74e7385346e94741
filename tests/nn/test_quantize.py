"""``quantize_`` and ``warmup`` on small models."""

from __future__ import annotations

import copy
import inspect
import tokenize

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.nn import (
    FP8BlockLinear,
    MXFP4Linear,
    MXFP8Linear,
    NVFP4Linear,
    QuantLinear,
    fp4_linear,
    fp8_linear,
    prefetch_,
    quantize_,
    warmup,
)
from torch_cute_ops.nn._base import following_of

H = 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(H, H), nn.Linear(H, 32), nn.Linear(H, 32)
        self.o_proj = nn.Linear(H, H, bias=False)
        self.k_proj.weight.data *= 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + torch.cat((k, v), -1))


class Model(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, H)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.narrow = nn.Linear(H, 4, bias=False)
        self.lm_head = nn.Linear(H, 128, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x)


def model_of(**given) -> Model:
    return Model(**given).bfloat16().eval()


def run(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(24).view(2, 12))


def names(model: nn.Module, kind: type) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is kind}


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> bool:
    return bool((got - want).norm() <= limit * want.norm())


ATTENTION = {f"layers.{i}.{name}_proj" for i in range(2) for name in "qkvo"}


@pytest.mark.parametrize(
    ("scheme", "cls", "activations"),
    [
        ("nvfp4", NVFP4Linear, "auto"),
        ("nvfp4", NVFP4Linear, "fp4"),
        ("mxfp4", MXFP4Linear, "16bit"),
        ("mxfp4", MXFP4Linear, "fp4"),
        ("fp8_block", FP8BlockLinear, "auto"),
        ("mxfp8", MXFP8Linear, "auto"),
    ],
)
@torch.no_grad()
def test_quantize(scheme, cls, activations):
    model = model_of()
    with pytest.warns(UserWarning, match=r"narrow: out_features is 4; expected a positive multiple of 8") as warned:
        got = quantize_(model, scheme, activations=activations, calibrate=run)
    assert got is model and len(warned) == 1
    assert names(model, cls) == ATTENTION and names(model, nn.Linear) == {"narrow", "lm_head"}
    assert not any(module.training for module in model.modules())
    twin = copy.deepcopy(model)
    for name in ATTENTION:
        layer = model.get_submodule(name)
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.load_state_dict({"weight": layer.dequantize()} | ({} if layer.bias is None else {"bias": layer.bias}))
        twin.set_submodule(name, linear.bfloat16())
    assert close(run(model), run(twin), {"fp4": 0.3, "fp8": 0.05, "16bit": 0.01}[layer.activations])


def test_parts_share_a_global_scale():
    model = model_of()
    want = {name: module.weight.abs().amax().float() for name, module in model.named_modules() if name in ATTENTION}
    quantize_(model, ignore=("lm_head", "narrow"))
    for i in range(2):
        got = [model.layers[i].get_submodule(f"{name}_proj").weight_scale_2.item() for name in "qkvo"]
        qkv = max(want[f"layers.{i}.{name}_proj"].item() for name in "qkv") / 2688
        assert got == pytest.approx([qkv, qkv, qkv, want[f"layers.{i}.o_proj"].item() / 2688], rel=1e-6)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (("lm_head", "layers.0.*"), {f"layers.0.{name}_proj" for name in "qkvo"} | {"lm_head"}),
        (("o_proj",), {"layers.0.o_proj", "layers.1.o_proj"}),
        (
            (r"re:.*\.[qk]_proj$", "lm_head"),
            {f"layers.{i}.{name}_proj" for i in range(2) for name in "qk"} | {"lm_head"},
        ),
        ((), set()),
    ],
)
def test_ignore(ignore, left):
    model = quantize_(model_of(), ignore=(*ignore, "narrow"))
    assert names(model, nn.Linear) == left | {"narrow"}


def test_one_pattern_to_ignore():
    assert names(quantize_(model_of(), ignore="re:narrow|lm_head"), nn.Linear) == {"narrow", "lm_head"}


def test_tied_embeddings_stay():
    model = model_of(is_tied=True)
    before = model.embed.weight.clone()
    quantize_(model, ignore=("narrow",))
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, before)


def test_a_shared_layer_stays_shared():
    model = model_of()
    model.layers[1].o_proj = model.layers[0].o_proj
    quantize_(model, ignore=("narrow",))
    assert isinstance(model.layers[0].o_proj, NVFP4Linear) and model.layers[1].o_proj is model.layers[0].o_proj


def test_subclasses_of_linear_stay():
    class Mine(nn.Linear):
        pass

    model = model_of()
    model.layers[0].o_proj = Mine(H, H)
    quantize_(model, ignore=("narrow",))
    assert type(model.layers[0].o_proj) is Mine


@torch.no_grad()
def test_calibration():
    """Check that the input scale covers the largest input over all calls of the calibration."""
    model = model_of()
    inputs = {}
    for name in ATTENTION:

        def hook(module, args, name=name):
            inputs[name] = max(inputs.get(name, 0.0), args[0].abs().max().item())

        model.get_submodule(name).register_forward_pre_hook(hook)

    def calibrate(given: nn.Module) -> None:
        for begin in (0, 40, 80):
            given(torch.arange(begin, begin + 40).view(2, 20))

    calibrate(model)
    for name in ATTENTION:
        model.get_submodule(name)._forward_pre_hooks.clear()
    quantize_(model, activations="fp4", calibrate=calibrate, ignore=("lm_head", "narrow"))
    for name in ATTENTION:
        assert model.get_submodule(name).input_scale.item() == pytest.approx(inputs[name] / 2688, rel=1e-6)


class ByKeyword(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self:
            x = linear(input=x)
        return x


@torch.no_grad()
def test_calibration_of_layers_that_are_called_by_keyword():
    model, x = ByKeyword(nn.Linear(H, H), nn.Linear(H, H)).bfloat16(), torch.randn(3, H).bfloat16()
    quantize_(model, activations="fp4", calibrate=lambda given: given(x))
    assert model[0].input_scale.item() == pytest.approx(x.abs().max().item() / 2688, rel=1e-6)
    assert model(x).isfinite().all()
    with pytest.raises(
        TypeError, match=r"in the calibration the layer '1' was called with 0 arguments and other; expected a tensor"
    ):
        quantize_(
            nn.Sequential(nn.SiLU(), nn.Linear(H, H)), activations="fp4", calibrate=lambda given: given[1](other=x)
        )


def test_errors():
    with pytest.raises(ValueError, match="scheme is 'int4'; expected one of 'nvfp4', 'mxfp4', 'fp8_block'"):
        quantize_(model_of(), "int4")
    with pytest.raises(ValueError, match="calibrate is None"):
        quantize_(model_of(), activations="fp4")
    with pytest.raises(ValueError, match="activations is 'int8'"):
        quantize_(model_of(), activations="int8")
    with pytest.raises(ValueError, match=r"use NVFP4Linear.from_float\(model\)"):
        quantize_(nn.Linear(H, H))
    model = model_of()
    with pytest.raises(ValueError, match=r"in the calibration the layer 'lm_head' was not called"):
        quantize_(
            model,
            activations="fp4",
            calibrate=lambda m: m.layers[1](m.layers[0](torch.randn(2, H).bfloat16())),
            ignore=("narrow",),
        )
    model.embed.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"the layer 'layers.0.q_proj' received an input that is not finite"):
        quantize_(model, activations="fp4", calibrate=run, ignore=("lm_head", "narrow"))
    assert not names(model, NVFP4Linear)


# Warm-up


class Calls(TorchDispatchMode):
    """Dispatch mode that records each call of our ops: its name, and the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute":
            tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            self.every.append((func._opname, *((tuple(each.shape), each.dtype) for each in tensors)))
        return func(*args, **(kwargs or {}))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return (rows, columns) of the result of each recorded GEMM."""
        gemms = [call for call in self.every if "mm_" in call[0]]
        return [(a[0], b[1]) for _, (a, _), (b, _), *_ in gemms]

    @property
    def fused(self) -> list[tuple]:
        """Return the recorded calls that are neither GEMMs nor plain quantisations."""
        return [call for call in self.every if "mm_" not in call[0] and "_quantize" not in call[0]]


def test_warmup_calls_each_form_once():
    model = quantize_(model_of(), ignore=("lm_head", "narrow"))
    with Calls() as calls:
        warmup(model, rows=(1, 3, 40, 8))
    # Sizes of q and k (v is like k), and of o, which has no bias. 3 and 8 rows are in one bucket. Calls with few rows
    # are repeated with a prefetch.
    assert set(calls.sizes) == {(m, n) for m in (1, 8, 40) for n in (64, 32)}
    with Calls() as calls:
        warmup(model, rows=(1, 3, 40, 8), fused=False)
    assert sorted(calls.sizes) == sorted((m, n) for m in (1, 8, 40) for n in (64, 32, 64))
    with Calls() as calls:
        warmup(nn.Linear(H, H))
    assert not calls.sizes
    with pytest.raises(ValueError, match="rows contains 0"):
        warmup(model, rows=(4, 0))


class FusedBlock(nn.Module):
    """Block of modules that the pass of ``integrations.inductor`` would fuse. These tests do not run the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.RMSNorm(H), nn.LayerNorm((2, H))
        self.gate_up_proj, self.down_proj = nn.Linear(H, 4 * H), nn.Linear(2 * H, H)


BF16_ROW, FP32_ROW = ((1, H), torch.bfloat16), ((1, H), torch.float32)
NORM = ((H,), torch.bfloat16)
CALLS_OF_A_NORM = [
    ("rmsnorm", BF16_ROW, NORM),
    ("add_rmsnorm", BF16_ROW, BF16_ROW, NORM),
    ("add_rmsnorm", BF16_ROW, FP32_ROW, NORM),
]


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        ("16bit", CALLS_OF_A_NORM),
        (
            "fp8",
            [
                ("rmsnorm_fp8quant", BF16_ROW, NORM),
                ("add_rmsnorm_fp8quant", BF16_ROW, BF16_ROW, NORM),
                ("add_rmsnorm_fp8quant", BF16_ROW, FP32_ROW, NORM),
                ("silu_mul_fp8quant", ((1, 4 * H), torch.bfloat16)),
            ],
        ),
        (
            "fp4",
            [
                ("rmsnorm_fp4quant", BF16_ROW, NORM, ((1,), torch.float32)),
                ("add_rmsnorm_fp4quant", BF16_ROW, BF16_ROW, NORM, ((1,), torch.float32)),
                ("add_rmsnorm_fp4quant", BF16_ROW, FP32_ROW, NORM, ((1,), torch.float32)),
                ("silu_mul_fp4quant", ((1, 4 * H), torch.bfloat16), ((1,), torch.float32)),
            ],
        ),
    ],
)
def test_warmup_calls_fused_ops(activations, expected):
    block = FusedBlock().bfloat16()
    samples = torch.randn(4, H, dtype=torch.bfloat16)
    quantize_(
        block,
        activations=activations,
        calibrate=None if activations != "fp4" else lambda _: block.down_proj(block.gate_up_proj(samples)[:, : 2 * H]),
    )
    with Calls() as calls:
        warmup(block, rows=(1, 40))
    assert calls.fused == expected
    with Calls() as calls:
        warmup(block, rows=(1, 40), fused=False)
    assert calls.sizes and not calls.fused


class NormWithBias(nn.Module):
    """RMSNorm with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return nn.functional.rms_norm(x, self.weight.shape) * self.weight + self.bias


@pytest.mark.parametrize(
    ("norm", "vectors", "subtract_mean"),
    [
        (nn.LayerNorm(H), 2, True),
        (nn.LayerNorm(H, bias=False), 1, True),
        (nn.LayerNorm(H, elementwise_affine=False), 0, True),
        (nn.RMSNorm(H, elementwise_affine=False), 0, False),
        (NormWithBias(H), 2, False),
    ],
    ids=["LayerNorm", "weight", "LayerNorm without weight", "RMSNorm without weight", "RMSNorm with bias"],
)
def test_warmup_calls_norms_of_torch(norm, vectors, subtract_mean, monkeypatch):
    """Check that `warmup` also calls the ops for LayerNorm, and for norms with a bias or without a weight, and that it
    calls them with a residual of 16 bits and of 32 bits."""
    block = FusedBlock()
    block.norm, seen = norm, []
    quantize_(block.bfloat16(), "fp8_channel")
    for name in ("rmsnorm_fp8quant", "add_rmsnorm_fp8quant"):
        monkeypatch.setattr(torch.ops.cute, name, lambda *args, **named: seen.append((*args, named)))
    warmup(block, rows=(1,))
    dtypes = [tuple(str(each.dtype).removeprefix("torch.") for each in args) for *args, _ in seen]
    bf16, fp32 = "bfloat16", "float32"
    # The weight without elements that the Inductor pass inserts has the dtype of the norm's input.
    assert dtypes == [(bf16, bf16), (bf16, bf16, bf16)] + (
        [(bf16, fp32, bf16)] if vectors else [(fp32, fp32), (bf16, fp32, fp32)]
    )
    for *_, weight, named in seen:
        assert weight.shape == ((H,) if vectors else (0,)) and ("bias" in named) == (vectors == 2)
        assert named["weight_plus_one"] is False and named["subtract_mean"] == subtract_mean


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(H), nn.GroupNorm(2, H), nn.InstanceNorm1d(H, affine=True)])
def test_warmup_calls_no_op_for_norms_over_other_dimensions(norm, monkeypatch):
    block, seen = FusedBlock(), []
    block.norm = norm
    quantize_(block.bfloat16(), "fp8_channel")
    for name in ("rmsnorm_fp8quant", "add_rmsnorm_fp8quant"):
        monkeypatch.setattr(torch.ops.cute, name, lambda *args, **named: seen.append(named))
    warmup(block, rows=(1,))
    assert seen == []


def test_warmup_calls_norms_of_gemma():
    """Check that `warmup` also calls the ops with 1 + weight if the source code of a norm adds 1."""
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    block = FusedBlock()
    block.norm = gemma.Gemma3RMSNorm(H)
    quantize_(block.bfloat16(), activations="16bit")
    with Calls() as calls:
        warmup(block, rows=(1,))
    assert sorted(calls.fused, key=str) == sorted(2 * CALLS_OF_A_NORM, key=str)


class NormPlusOne(nn.RMSNorm):
    """Norm whose factor is 1 + weight, as a subclass of torch's norm."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def test_warmup_calls_norms_that_add_one_in_a_subclass():
    block = FusedBlock()
    block.norm = NormPlusOne(H)
    quantize_(block.bfloat16(), activations="16bit")
    with Calls() as calls:
        warmup(block, rows=(1,))
    assert sorted(calls.fused, key=str) == sorted(2 * CALLS_OF_A_NORM, key=str)


class SquaredReLU(nn.Module):
    """Gate that squares ReLU without a module of its own."""

    def forward(self, gate, up):
        return nn.functional.relu(gate) ** 2 * up


@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.GELU(), "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu2", "relu2"),
        (nn.ReLU(), "relu2"),
        (SquaredReLU(), "relu2"),
    ],
)
def test_warmup_calls_other_gates(activation, gate, monkeypatch):
    """Check that `warmup` also calls the gates of a model's activation functions, with GELU or squared ReLU."""
    if isinstance(activation, str):
        activation = pytest.importorskip("transformers.activations").ACT2FN[activation]
    block = FusedBlock()
    block.act_fn = activation
    quantize_(block.bfloat16(), "fp8_channel")
    seen = []
    monkeypatch.setattr(torch.ops.cute, "silu_mul_fp8quant", lambda *args, gate, **named: seen.append(gate))
    warmup(block, rows=(1,))
    assert seen == sorted(["silu", gate])


@pytest.mark.parametrize(
    ("source", "is_squared"),
    [
        ("return self.down(gate.relu().square() * up)", True),
        ("return torch.pow(F.relu(gate), 2) * up", True),
        ("return F.relu(gate).pow(2) * up", True),
        ("return F.relu(gate) * up * 2", False),
        ("return torch.sin(gate) ** 2 * up", False),
    ],
)
def test_warmup_reads_squares_in_sources(source, is_squared, monkeypatch):
    block, seen = quantize_(FusedBlock().bfloat16(), "fp8_channel"), []
    monkeypatch.setattr(inspect, "getsource", lambda forward: source if forward is FusedBlock.forward else "")
    monkeypatch.setattr(torch.ops.cute, "silu_mul_fp8quant", lambda *args, gate, **named: seen.append(gate))
    warmup(block, rows=(1,))
    assert seen == (["relu2", "silu"] if is_squared else ["silu"])


@pytest.mark.parametrize("error", [OSError, TypeError, SyntaxError, tokenize.TokenError])
def test_warmup_without_sources(error, monkeypatch):
    """Check that `warmup` works if the source of a module cannot be read, or changed after its import."""
    block = quantize_(FusedBlock().bfloat16(), "fp8_channel")

    def unreadable(forward):
        raise error

    monkeypatch.setattr(inspect, "getsource", unreadable)
    with Calls() as calls:
        warmup(block, rows=(1,))
    assert {"add_rmsnorm_fp8quant", "silu_mul_fp8quant"} <= {call[0] for call in calls.fused}


@pytest.mark.parametrize(
    ("activation", "gates"),
    [(None, ["silu"]), (nn.GELU("tanh"), ["gelu_tanh", "silu"]), (nn.ReLU(), ["relu2", "silu"])],
    ids=["silu", "gelu_tanh", "relu2"],
)
def test_warmup_calls_gates_with_gemms(activation, gates, monkeypatch):
    """Check that `warmup` also calls GEMMs that gate in their prologue, for one row and 16-bit activations, with the
    gates of the model's activation functions."""
    block = quantize_(FusedBlock().bfloat16())
    if activation is not None:
        block.act_fn = activation
    seen = []
    real = fp4_linear.silu_mul_mm_fp4_weight_only
    monkeypatch.setattr(
        fp4_linear,
        "silu_mul_mm_fp4_weight_only",
        lambda *args, gate, **named: seen.append(gate) or real(*args, gate=gate, **named),
    )
    with Calls() as calls:
        warmup(block, rows=(1, 3, 8, 40))
    gated = [call[1:3] for call in calls.every if call[0] == "silu_mul_mm_fp4_weight_only"]
    # Twice for each gate, because one call prefetches
    assert gated == [(((1, 4 * H), torch.bfloat16), ((H, H), torch.uint8))] * 2 * len(gates)
    assert seen == [gate for gate in gates for _ in range(2)]
    with Calls() as calls:
        warmup(block, rows=(1,), fused=False)
        warmup(quantize_(FusedBlock().bfloat16(), activations="fp8"), rows=(1,))
    assert not any(call[0].startswith("silu_mul_mm") for call in calls.every)


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_warmup_prefetches_with_few_rows(activations):
    """Check that `warmup` calls layers with and without a prefetch, as compiled models do, and does not change which
    layer they prefetch."""
    block = quantize_(FusedBlock().bfloat16(), "nvfp4" if activations == "16bit" else "mxfp4", activations=activations)
    for fused in (True, False):
        with Calls() as calls:
            warmup(block, rows=(1, 16, 40), fused=fused)
        rows: dict[bool, set[int]] = {False: set(), True: set()}
        for _, (a, _), (b, dtype), *others in (call for call in calls.every if "mm_fp4" in call[0]):
            rows[others[-1] == (b[::-1], dtype)].add(a[0])
        assert rows == {False: {1, 16, 40}, True: {1, 16} if fused else set()}
    assert not any(following_of(each) for each in block.modules() if isinstance(each, QuantLinear))


@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_warmup_of_layers_that_prefetch(activations):
    """Check that, if only some of several equal layers prefetch, `warmup` calls layers of this size with and without a
    prefetch, for any number of rows."""
    layers = nn.ModuleList([nn.Linear(H, H).bfloat16() for _ in range(3)])
    layers = quantize_(layers, "nvfp4", activations=activations)
    prefetch_(layers)
    with Calls() as calls:
        warmup(layers, rows=(1, 40), fused=False)
    gemms = [call[1:] for call in calls.every if "mm_" in call[0]]
    warm = {(a[0], others[-1] == (b[::-1], dtype)) for (a, _), (b, dtype), *others in gemms}
    assert warm == {(rows, prefetches) for rows in (1, 40) for prefetches in (False, True)}
    assert [following_of(layer) for layer in layers] == [layers[1], layers[2], None]


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel"])
def test_warmup_calls_layers_without_prefetch_once(scheme, monkeypatch):
    """Check that `warmup` calls layers of torch's GEMM, which never prefetches, only once per number of rows."""
    odd = H + 16
    layers = quantize_(nn.ModuleList([nn.Linear(odd, odd).bfloat16() for _ in range(3)]), scheme)
    prefetch_(layers)
    rows = []
    monkeypatch.setattr(fp8_linear, "scaled_mm", lambda a, *_: rows.append(len(a)) or torch.zeros(len(a), odd))
    for fused in (True, False):
        warmup(layers, rows=(1, 40), fused=fused)
        assert rows == [1, 40]
        rows.clear()


def test_warmup_does_not_change_layers():
    model = quantize_(model_of(), ignore=("lm_head", "narrow"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    warmup(model, rows=(2,))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
    assert all(isinstance(model.get_submodule(name), QuantLinear) for name in ATTENTION)
