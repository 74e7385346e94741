"""vLLM's method for experts, with stubs of vLLM."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import vllm_stub
from support.engine_experts import BOUNDS, GPT_OSS, TOPK, E, Stored, check, routed
from support.engine_layers import Recorded, installed
from test_vllm import DEEPSEEK, MIXED, NVFP4, Reload, compressed

from torch_cute_ops import registry
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import experts, prepare
from torch_cute_ops.nn.experts import FORMATS, QuantExperts, SwiGLU
from torch_cute_ops.runtime.arch import ARCHS

SILU, SWIGLUOAI = SimpleNamespace(value="silu"), SimpleNamespace(value="swigluoai")


@pytest.fixture
def vllm(monkeypatch):
    """Replace vLLM by stubs, and return the integration's modules by name."""
    monkeypatch.setattr(vllm_stub, "VLLM_CONFIG", [None])
    with installed(vllm_stub, ("_config", "_experts", "_prepare"), monkeypatch) as modules:
        yield modules


def layer_of(hidden: int = 128, width: int = 64, **settings: Any) -> Any:
    """Return a layer of experts without weights."""
    count = settings.pop("experts", E)
    parallel = SimpleNamespace(enable_eplb=settings.pop("enable_eplb", False))
    given = {"num_local_experts": count, "activation": SILU, "in_dtype": torch.bfloat16, **settings}
    each = width // given.get("tp_size", 1)
    return vllm_stub.RoutedExperts(
        vllm_stub.FusedMoEConfig(
            num_experts=count, experts_per_token=TOPK, hidden_dim=hidden, intermediate_size=width,
            intermediate_size_per_partition=each, moe_parallel_config=parallel, **given,
        )
    )  # fmt: skip


# Choice of the method

CHECKPOINTS = [
    (compressed("nvfp4"), LayerScheme("nvfp4", "compressed-tensors", "16bit")),
    (compressed("mxfp4"), LayerScheme("mxfp4", "compressed-tensors", "16bit")),
    (compressed("nvfp4", ignore=["a.0.up"]), None),
    (compressed("nvfp4", transform_config={"config_groups": {}}), None),
    (NVFP4, LayerScheme("nvfp4", "modelopt", "fp4")),
    ({**NVFP4, "ignore": ["a"]}, None),
    ({**NVFP4, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, LayerScheme("fp8_channel", "modelopt", "fp8")),
    (DEEPSEEK, LayerScheme("fp8_block", "deepseek", "fp8")),
    ({**DEEPSEEK, "ignore": ["a"]}, None),
    ({**DEEPSEEK, "store_dtype": "mxfp4"}, None),
    (MIXED | {"quantized_layers": {"a": {"quant_algo": "NVFP4"}}}, LayerScheme("nvfp4", "modelopt", "fp4")),
    ({"quant_method": "mxfp4"}, GPT_OSS),
]  # fmt: skip


@pytest.mark.parametrize(("config", "scheme"), CHECKPOINTS)
def test_method_of_experts(config, scheme, vllm):
    made = vllm._config.CONFIGS[1].from_config(config)
    layer = layer_of(activation=SWIGLUOAI if scheme is GPT_OSS else SILU)
    method = made.get_quant_method(layer, "a")
    if scheme is None:
        assert method is None or isinstance(method, vllm_stub.OwnMethod)
    else:
        assert isinstance(method, vllm._experts.CuteExpertsMethod) and not method.supports_eplb
        assert (method.scheme, method.prefix, method.activations) == (scheme, "a", "fp4")
        assert method.preparation is made.preparation


def test_only_checkpoints_of_gpt_oss_itself(vllm):
    """Check that only gpt-oss checkpoints are accepted: other models with the same quant_method use another layout."""
    cls = vllm._config.CONFIGS[0]
    config = {"quant_method": "mxfp4"}
    for model, name in (("gpt_oss", cls.name), ("other", None)):
        assert cls.override_quantization_method(config, cls.name, SimpleNamespace(model_type=model)) == name
    assert cls.override_quantization_method(config, cls.name) is None


LEFT = [
    ("nvfp4", {"activation": SimpleNamespace(value="relu2")}, "activation function is relu2"),
    ("nvfp4", {"activation": SWIGLUOAI}, "activation function is swigluoai"),
    ("nvfp4", {"is_lora_enabled": True}, "LoRA"),
    ("nvfp4", {"enable_eplb": True}, "move between ranks"),
    ("nvfp4", {"dp_size": 2}, "ranks have different tokens"),
    ("nvfp4", {"width": 48, "tp_size": 2}, "share a block"),
    ("nvfp4", {"hidden": 136}, "hidden size is 136"),
    ("nvfp4", {"has_bias": True, "tp_size": 2, "width": 128}, "share a bias"),
    ("fp8_block", {"width": 384, "tp_size": 2}, "share a block"),
    ("fp8_tensor", {}, "no kernel"),
    ("nvfp4", {"experts": 2000}, "number of experts is 2000"),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "settings", "reason"), LEFT)
def test_experts_left_to_vllm(fmt, settings, reason, vllm, monkeypatch):
    scheme, said = LayerScheme(fmt, "modelopt", "fp8" if fmt == "fp8_block" else "16bit"), []
    assert reason in vllm._experts.reason_left(scheme, layer_of(**settings))
    checkpoints_module = importlib.import_module(f"{vllm_stub.OURS}._checkpoints")
    monkeypatch.setattr(checkpoints_module.logger, "warning_once", lambda text, *args: said.append(text % args))
    made = vllm._config.CONFIGS[0].from_config(NVFP4)
    monkeypatch.setattr(type(made), "scheme_of_experts", lambda self, layer, prefix: scheme)
    assert isinstance(made.get_quant_method(layer_of(**settings), "a"), vllm_stub.OwnMethod)
    assert len(said) == 1 and said[0].startswith("a: ") and reason in said[0]


# Loading and values


def loaded(vllm: Any, stored: Stored, layer: Any, activations: str = "auto", device: str = "cpu") -> Any:
    """Build a layer's method and load the stored experts as vLLM does; return the method."""
    scheme = stored.scheme
    assert vllm._experts.reason_left(scheme, layer) is None
    method = vllm._experts.CuteExpertsMethod(
        scheme, "model.experts", activations, prepare.Preparation(vllm._prepare.serving), layer
    )
    moe = layer.moe_config
    sizes = method.maybe_roundup_sizes(
        moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype, moe.moe_parallel_config
    )
    moe.hidden_dim, moe.intermediate_size_per_partition = sizes
    with torch.device(device):
        method.create_weights(
            layer, moe.num_local_experts, *sizes, moe.in_dtype, weight_loader=layer.weight_loader,
            global_num_experts=moe.num_experts,
        )  # fmt: skip
    method.reload = Reload(layer)
    stored.load(layer, return_success=True)
    method.process_weights_after_loading(layer)
    assert [*method.preparation.forms][-1] == method.form
    return method


def applied(method: Any, layer: Any, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Apply the method in the same way as vLLM, which pads tokens to the layer's hidden size."""
    moe = layer.moe_config
    padded = torch.nn.functional.pad(x, (0, moe.hidden_dim - x.shape[1]))
    with torch.no_grad():
        y = method.apply(layer, padded, factors, ids, None, None)
    assert y.shape == padded.shape and y.dtype == x.dtype
    assert not y[:, moe.hidden_dim_unpadded :].any()
    return y


FEW, MANY = 3, 40
"""Numbers of tokens of two calls: the first computes only routed pairs, the second permutes the tokens."""
FORMS = [
    ("nvfp4", "modelopt", "16bit", 128, 64), ("nvfp4", "compressed-tensors", "16bit", 128, 64),
    ("mxfp4", "compressed-tensors", "16bit", 128, 64), ("nvfp4", "modelopt", "fp4", 80, 48),
    ("fp8_block", "deepseek", "fp8", 128, 128), ("fp8_block", "modelopt", "fp8", 192, 64),
    ("fp8_channel", "compressed-tensors", "fp8", 128, 64), ("fp8_channel", "modelopt", "fp8", 72, 40),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "style", "stored_for", "hidden", "width"), FORMS)
def test_values(fmt, style, stored_for, hidden, width, vllm, device):
    """Check that each expert keeps its own scales, and that widths without a kernel are padded with zeros."""
    stored, layer = Stored(LayerScheme(fmt, style, stored_for), hidden, width), layer_of(hidden, width)
    method = loaded(vllm, stored, layer, device=device)
    has_few = fmt in ("nvfp4", "mxfp4")
    assert method.form.few == ("16bit" if has_few else None)
    for tokens in (FEW, MANY):
        x, *given = routed(tokens, hidden, device)
        is_few = has_few and tokens == FEW
        assert method.form.is_few(tokens) == is_few
        if not is_few:
            # Use powers of two, which FP8 represents exactly. With other numbers, sums of gate and up whose terms
            # cancel, times the large scales of some channels, would sometimes differ by more than the bound.
            x = x.sign() * torch.exp2(torch.randint_like(x, -2, 4))
        check(stored, x, *given, applied(method, layer, x, *given), SwiGLU(), BOUNDS["16bit" if is_few else "fp8"])


def test_values_of_gpt_oss(vllm, device):
    """Check experts of gpt-oss: rows of gate and up alternate in the checkpoint, and both use biases and a clamp."""
    stored, layer = Stored(GPT_OSS, 128, 64), layer_of(128, 64, activation=SWIGLUOAI, has_bias=True)
    method = loaded(vllm, stored, layer, device=device)
    for tokens, bound in ((FEW, BOUNDS["16bit"]), (MANY, BOUNDS["fp8"])):
        given = routed(tokens, 128, device)
        check(stored, *given, applied(method, layer, *given), SwiGLU(1.702, 1.0, 7.0), bound)


def module_of(stored: Stored, device: str) -> QuantExperts:
    """Return ``QuantExperts`` with the stored FP4 weights."""
    fmt, layers = stored.scheme.format, []
    for shards in (("w1", "w3"), ("w2",)):
        tensors = [each[shard][0] for each in stored.experts for shard in shards]
        codes = [each["weight"] if "weight" in each else each["weight_packed"] for each in tensors]
        scale = torch.cat([each["weight_scale"] for each in tensors])
        given = {"weight": torch.cat(codes), "weight_scale": scale}
        if fmt == "nvfp4":
            given["weight_scale_2"] = torch.stack([each["weight_scale_2"] for each in tensors])
        parts = tuple(len(each) for each in codes)
        cls: Any = FORMATS[fmt]
        layers.append(cls.from_tensors(**{name: each.to(device) for name, each in given.items()}, parts=parts))
    return QuantExperts(*layers, stored.count)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_fp4_activations_of_few_tokens(fmt, vllm, device):
    """Check that activations keep 16 bits if NVFP4 experts lack input scales. With input scales, results must equal
    ``QuantExperts`` bit for bit, for tokens with the largest input scale of all gate and up layers, and for each down
    layer with the expert's own input scale."""
    style = "modelopt" if fmt == "nvfp4" else "compressed-tensors"
    stored, layer = Stored(LayerScheme(fmt, style, "fp4"), 128, 64), layer_of()
    given = routed(24, 128, device)  # many tokens, because the error of a single token varies much
    if fmt == "nvfp4":  # calibrate
        for i, expert in enumerate(stored.experts):
            largest = max(abs(stored.hidden(i, row, SwiGLU())).max() for row in given[0].double().cpu().numpy())
            expert["w2"][0]["input_scale"].fill_(largest / (6 * 448))
            expert["w1"][0]["input_scale"].fill_(0.002 + 0.001 * i)
            expert["w3"][0]["input_scale"].fill_(0.004 - 0.001 * i)
    method = loaded(vllm, stored, layer, "fp4", device)
    y = applied(method, layer, *given)
    if device == "cpu":
        assert method.form.few == "fp4"
    check(stored, *given, y, SwiGLU(), BOUNDS[method.form.few])
    module, scales = module_of(stored, device), {}
    if fmt == "nvfp4" and method.form.few == "fp4":
        hidden = torch.tensor([float(each["w2"][0]["input_scale"]) for each in stored.experts], device=device)
        scales = {
            "input_global_scale": torch.tensor([1 / 0.005], device=device), "hidden_global_scale": 1 / hidden
        }  # fmt: skip
    module.route_few_(method.form.few, **scales)
    with torch.no_grad():
        assert torch.equal(y, module(*given))
    if fmt == "nvfp4":
        for expert in stored.experts:
            for tensors, _ in expert.values():
                tensors["input_scale"].zero_()
        assert loaded(vllm, stored, layer_of(), "fp4", device).form.few == "16bit"


def test_gate_with_gelu(vllm):
    stored = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64)
    layer = layer_of(128, 64, activation=SimpleNamespace(value="gelu_tanh"))
    method = loaded(vllm, stored, layer)
    for tokens, bound in ((FEW, BOUNDS["16bit"]), (MANY, BOUNDS["fp8"])):
        given = routed(tokens, 128)
        check(stored, *given, applied(method, layer, *given), SwiGLU(gate="gelu_tanh"), bound)


@pytest.mark.parametrize(("scheme", "width"), [(LayerScheme("nvfp4", "modelopt", "16bit"), 96), (GPT_OSS, 96)])
def test_tensor_parallel(scheme, width, vllm):
    """Check that the results of two ranks, which pad the width of their experts with zeros, add up to the result."""
    stored = Stored(scheme, 128, width)
    settings: Any = {"activation": SWIGLUOAI, "has_bias": True} if scheme is GPT_OSS else {}
    swiglu = SwiGLU(1.702, 1.0, 7.0) if scheme is GPT_OSS else SwiGLU()
    layers = [layer_of(128, width, tp_size=2, tp_rank=rank, **settings) for rank in range(2)]
    methods = [loaded(vllm, stored, layer) for layer in layers]
    assert [method.form.width for method in methods] == [64, 64]
    for tokens, bound in ((FEW, BOUNDS["16bit"]), (MANY, BOUNDS["fp8"])):
        given = routed(tokens, 128)
        parts = [applied(method, layer, *given).double() for method, layer in zip(methods, layers, strict=True)]
        check(stored, *given, sum(parts), swiglu, bound)


def test_expert_parallel(vllm):
    """Check that the results of two ranks with half of the experts each add up to the result. A rank ignores the
    factors of experts on the other rank."""
    stored, y = Stored(LayerScheme("nvfp4", "compressed-tensors", "16bit"), 128, 64), {FEW: 0.0, MANY: 0.0}
    given = {tokens: routed(tokens, 128) for tokens in y}
    for rank in range(2):
        layer = layer_of(128, 64, num_local_experts=E // 2)
        layer.expert_map = torch.full((E,), -1, dtype=torch.int32)
        layer.expert_map[rank * E // 2 : (rank + 1) * E // 2] = torch.arange(E // 2, dtype=torch.int32)
        method = loaded(vllm, stored, layer)
        for tokens in y:
            y[tokens] = y[tokens] + applied(method, layer, *given[tokens]).double()
    for tokens, bound in ((FEW, BOUNDS["16bit"]), (MANY, BOUNDS["fp8"])):
        check(stored, *given[tokens], y[tokens], SwiGLU(), bound)


def test_ids_that_name_no_expert(vllm, device):
    """Check that pairs with an id of at least E add nothing, like pairs with -1, whatever the id modulo E is."""
    stored, layer = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64), layer_of()
    method = loaded(vllm, stored, layer, device=device)
    x, ids, factors = routed(FEW, 128, device)
    wanted, given = ids.clone(), ids.clone()
    wanted[:, 1] = -1
    for dtype in (torch.int32, torch.int64):
        for each in (E, E + 1, 2 * E + 3, 2**31 - 1):
            given[:, 1] = each
            got = applied(method, layer, x, given.to(dtype), factors)
            assert torch.equal(got, applied(method, layer, x, wanted, factors))


def test_no_second_copy(vllm, device, monkeypatch):
    """Check that with ``few_tokens: False`` the down layers are not copied, and every call permutes its tokens."""
    config = SimpleNamespace(additional_config={"torch_cute_ops": {"few_tokens": False}})
    said: list[str] = []
    monkeypatch.setattr(vllm._experts.logger, "info_once", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(vllm._prepare, "serving", lambda: None)
    stored, layers = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64), [layer_of(), layer_of()]
    bytes_of = [0, 0]
    for i, layer in enumerate(layers):
        vllm_stub.VLLM_CONFIG[0] = config if i else None
        method = loaded(vllm, stored, layer, device=device)
        bytes_of[i] = sum(each.nbytes for name, each in layer.named_parameters() if name.startswith("few_weight"))
    # E matrices (H, I) of codes, with one scale per 16 elements. A scale tile contains 128 rows and 4 columns.
    assert bytes_of == [E * 128 * (64 // 2 + 64 // 16), 0]
    assert (
        len(said) == 1
        and "layer of 4 experts stores a second copy of its down layers" in said[0]
        and "0.0 MiB" in said[0]
    )
    given = routed(FEW, 128, device)
    assert method.form.few is None and not method.form.is_few(FEW)
    check(stored, *given, applied(method, layers[1], *given), SwiGLU(), BOUNDS["fp8"])


@pytest.mark.parametrize("given", [{"few_token": False}, {"few_tokens": 0}, False])
def test_unknown_settings(given, vllm):
    vllm_stub.VLLM_CONFIG[0] = SimpleNamespace(additional_config={"torch_cute_ops": given})
    with pytest.raises(ValueError, match=r'additional_config\["torch_cute_ops"\] is'):
        vllm._prepare.has_few_tokens()


@pytest.mark.parametrize(("width", "ranks"), [(64, 1), (128, 2), (192, 2)])
def test_gpt_oss_with_a_tensor_for_each_expert(width, ranks, vllm):
    """Check that ranks refuse these tensors if the width needs padding, because vLLM divides by the padded width."""
    stored = Stored(GPT_OSS, 128, width)
    for rank in range(ranks):
        layer = layer_of(128, width, activation=SWIGLUOAI, has_bias=True, tp_size=ranks, tp_rank=rank)
        method = vllm._experts.CuteExpertsMethod(
            GPT_OSS, "model.experts", "auto", prepare.Preparation(vllm._prepare.serving), layer
        )
        moe = layer.moe_config
        sizes = method.maybe_roundup_sizes(128, moe.intermediate_size_per_partition, moe.in_dtype, None)
        method.create_weights(layer, E, *sizes, moe.in_dtype, weight_loader=layer.weight_loader)
        for name, part, dim in (("w13", "gate_up_proj", 0), ("w2", "down_proj", 1)):
            parameter, tensor = getattr(layer, f"{name}_weight"), stored.tensors[f"x.{part}_blocks"][1]
            arguments: Any = (parameter, tensor, f"{name}_weight", f"gpt_oss_{name}", 1, True)
            if width == 192:
                with pytest.raises(ValueError, match="vLLM divides by 128 columns per rank instead of 96"):
                    parameter.weight_loader(*arguments)
                continue
            assert parameter.weight_loader(*arguments)
            assert torch.equal(parameter[1], tensor.flatten(1).chunk(ranks, dim)[rank])


def test_router_weights_on_the_input(vllm):
    """Check that with one expert per token the routing weight may multiply the token instead of the result."""
    stored, layer = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64), layer_of()
    layer.moe_config.experts_per_token, layer.apply_router_weight_on_input = 1, True
    method = loaded(vllm, stored, layer)
    x, ids, factors = (each[:, :1] if i else each for i, each in enumerate(routed(FEW, 128)))
    y = applied(method, layer, x, ids, factors)
    check(stored, (x * factors).bfloat16(), ids, torch.ones_like(factors), y, SwiGLU(), BOUNDS["16bit"])


def test_checkpoint_without_an_expert(vllm):
    stored, layer = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64), layer_of()
    del stored.experts[2]["w3"]
    with pytest.raises(ValueError, match=r"model\.experts: the checkpoint has no w13_weight_scale, or not for every"):
        loaded(vllm, stored, layer)


RELOADED = [
    (LayerScheme("nvfp4", "modelopt", "fp4"), False), (LayerScheme("nvfp4", "modelopt", "16bit"), True),
    (LayerScheme("fp8_block", "deepseek", "fp8"), False), (GPT_OSS, False),
]  # fmt: skip
"""Format, and whether the checkpoint contains no input scales."""


@pytest.mark.parametrize(("scheme", "is_uncalibrated"), RELOADED)
def test_reloaded_weights(scheme, is_uncalibrated, vllm):
    """Check that after a second load the experts keep their tensors and their form, and that their results equal the
    results of a new layer with the second checkpoint. Padding is written again."""
    settings = {"activation": SWIGLUOAI, "has_bias": True} if scheme is GPT_OSS else {}
    hidden, width = {"fp8_block": (384, 128), "nvfp4": (96, 48), "mxfp4": (96, 32)}[scheme.format]
    first, second = (Stored(scheme, hidden, width) for _ in range(2))
    for expert in [*first.experts, *second.experts] if is_uncalibrated else []:
        for tensors, _ in expert.values():
            del tensors["input_scale"]
    layer = layer_of(hidden, width, **settings)
    method = loaded(vllm, first, layer, "fp4")
    form, pointers = method.form, {name: each.data_ptr() for name, each in layer.named_parameters()}
    assert (
        form.few == {"fp8_block": None, "nvfp4": "16bit" if is_uncalibrated else "fp4", "mxfp4": "fp4"}[scheme.format]
    )
    given = routed(24, hidden)
    for stored in (second, first):
        method.reload(layer, method, lambda stored=stored: stored.load(layer))
        assert method.form == form and {name: each.data_ptr() for name, each in layer.named_parameters()} == pointers
        fresh = layer_of(hidden, width, **settings)
        want = applied(loaded(vllm, stored, fresh, "fp4"), fresh, *given)
        assert torch.equal(applied(method, layer, *given), want)
    kept = method.reload.made.values()
    assert all(each["weight_loader"].__self__ is layer for *_, each in kept)
    assert layer not in [cell.cell_contents for *_, each in kept for cell in each["weight_loader"].__closure__ or ()]


@pytest.mark.parametrize("arch", ARCHS)
def test_activations_of_few_tokens_on_every_gpu(arch):
    """Check that few tokens are routed on every GPU, in the format that the engine asks for."""
    for scheme, hidden, width in (("nvfp4", 7168, 256), ("mxfp4", 2880, 768)):
        for activations in ("16bit", "fp4"):
            assert experts.few_activations(scheme, 256, hidden, width, arch, activations) == activations


def test_forms_are_prepared_once_settings_are_known(monkeypatch):
    """Check that forms are prepared by the first run for which the engine's settings are known."""
    form = experts.ExpertForm("fp8_block", None, 4, 4, 128, 128, 2, SwiGLU(), torch.bfloat16, False)
    settings: list[Any] = [None]
    prepared: list[Any] = []
    monkeypatch.setattr(prepare, "jobs_of", lambda forms, *args: prepared.append([*forms]) or [])
    monkeypatch.setattr(prepare, "compile_ahead", lambda *args, **kwargs: None)
    monkeypatch.setattr(prepare, "arch_of_device", lambda index: None)
    preparation = prepare.Preparation(lambda: settings[0])
    preparation.add(form)
    device = torch.device("cuda", 0)
    preparation.run(device)
    assert not prepared
    settings[0] = prepare.Serving(8, (), 1)
    preparation.run(device)
    preparation.run(device)
    assert prepared == [[form], [form]]  # by the second run: once for all numbers of rows, once for captured numbers


@pytest.mark.parametrize(
    ("name", "scheme", "few", "swiglu", "has_bias", "count"),
    [
        ("sm_90a", "nvfp4", "16bit", SwiGLU(), False, 8), ("sm_90a", "nvfp4", "fp4", SwiGLU(), False, 8),
        ("sm_90a", "mxfp4", "16bit", SwiGLU(1.702, 1.0, 7.0), True, 8),
        ("sm_90a", "mxfp4", None, SwiGLU(1.702, 1.0, 7.0), True, 8),
        ("sm_90a", "fp8_block", None, SwiGLU(), False, 8),
        ("sm_90a", "fp8_channel", None, SwiGLU(limit=10.0), False, 8),
        ("sm_90a", "nvfp4", "16bit", SwiGLU(), False, 1), ("sm_100a", "nvfp4", "fp4", SwiGLU(), False, 8),
        ("sm_100a", "mxfp4", "16bit", SwiGLU(1.702, 1.0, 7.0), True, 8),
    ],
)  # fmt: skip
def test_prepared_kernels_are_those_of_the_calls(name, scheme, few, swiglu, has_bias, count):
    """Check that calls with any number of tokens need only kernels that were compiled in advance."""
    arch, most, hidden, width = ARCHS[name], 300, 256, 128
    form = experts.ExpertForm(
        scheme, few, count, count, hidden, width, min(2, count), swiglu, torch.bfloat16, has_bias
    )  # fmt: skip
    assert form.reason_unsupported is None
    jobs = prepare.jobs_of([form], most, arch.name)
    digest = {
        kernel.digest for job in jobs for kernel in registry.kernels_of(job.op, arch.name, **dict(job.properties))
    }
    cls: Any = FORMATS[scheme]
    parts = ((hidden, (width,) * (2 * count)), (width, (hidden,) * count))
    layers = [cls(k, sum(rows), parts=rows, bias=has_bias, device="meta").bfloat16() for k, rows in parts]
    module = QuantExperts(*layers, count, swiglu=swiglu)
    if few is not None:
        scales = {"input_global_scale": torch.ones(1), "hidden_global_scale": torch.ones(count)}
        module.route_few_(few, **(scales if few == "fp4" else {}))
    layer = SimpleNamespace(**experts._tensors_of(module))
    for m in (1, 2, 7, 16, 31, 64, 100, 129, most):
        ids = torch.zeros(m, form.topk, dtype=torch.int32, device="meta")
        with Recorded() as recorded:
            y = experts.compute(layer, form, torch.empty(m, hidden, dtype=form.dtype, device="meta"), ids, ids.float())
        assert y.shape == (m, hidden) and y.dtype == form.dtype
        assert [op for op, _, _ in recorded.calls] == [op for op, _ in form.calls(m)]
        for op, args, kwargs in recorded.calls:
            needed = {kernel.digest for kernel in registry.OPS[op].kernels(arch, *args, **kwargs)}
            assert needed <= digest, (op, m)


@pytest.mark.gpu
def test_captured_calls_follow_the_routing(vllm):
    """Check that a captured call compiles nothing, and that a replay computes the experts that its ids choose."""
    vllm_stub.VLLM_CONFIG[0] = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[FEW, MANY]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(local_world_size=1, data_parallel_size_local=1),
    )
    stored, layer = Stored(LayerScheme("nvfp4", "modelopt", "16bit"), 128, 64), layer_of()
    method = loaded(vllm, stored, layer, device="cuda")
    for tokens in (FEW, MANY):
        x, ids, factors = routed(tokens, 128, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = method.apply(layer, x, factors, ids, None, None)
        other = routed(tokens, 128, "cuda")
        for held, new in zip((x, ids, factors), other, strict=True):
            held.copy_(new)
        graph.replay()
        assert torch.equal(y, applied(method, layer, *other))
