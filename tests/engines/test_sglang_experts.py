"""Real layers of routed experts of SGLang on a CPU, with this package's method: loading, ranks and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import quantization
from sglang.srt.layers.moe import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.runtime_context import (
    get_exec,
    get_flags,
    get_lora,
    get_parallel,
    publish,
    restore_context,
    snapshot_context,
)
from sglang.srt.server_args import ServerArgs
from support.engine_experts import BOUNDS, GPT_OSS, TOPK, E, Stored, check, routed
from test_sglang_layers import CHECKPOINTS, compressed
from torch import nn

import torch_cute_ops.nn
from torch_cute_ops import checkpoint
from torch_cute_ops.integrations import transformers as cute_transformers
from torch_cute_ops.integrations.sglang import METHODS, _checkpoints, register
from torch_cute_ops.integrations.sglang._experts import CuteExpertsMethod
from torch_cute_ops.nn.experts import SwiGLU

FEW, MANY = 3, 40
"""Numbers of tokens of two calls: the first computes only routed pairs, the second permutes the tokens."""
LIMIT = 7.0
SUPPORTED = [(config, scheme) for config, scheme, _ in CHECKPOINTS if scheme.format != "fp8_tensor"]
NVFP4, *_, MXFP4, CHANNEL, BLOCK = SUPPORTED


@pytest.fixture(autouse=True)
def server(tmp_path) -> Iterator[None]:
    """Set SGLang's settings, and restore them after the test."""
    before = snapshot_context()
    config = transformers.LlamaConfig(hidden_size=128, num_hidden_layers=1, vocab_size=512, num_attention_heads=4)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    publish(ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True, device="cpu"), role="scheduler")
    register()
    yield
    restore_context(before)


@contextlib.contextmanager
def rank(number: int = 0, tp: int = 1, ep: int = 1, **own: Any) -> Iterator[None]:
    """Build layers of a rank that stores a part of each expert, or some of the experts."""
    sizes = {
        "tp_size": tp * ep, "tp_rank": number, "moe_tp_size": tp, "moe_tp_rank": number % tp, "moe_ep_size": ep,
        "moe_ep_rank": number // tp, "attn_tp_size": tp * ep, "tp_group": None, **own,
    }  # fmt: skip
    with get_parallel().override(**sizes):
        yield


def layer_of(
    config: dict[str, Any], hidden: int, width: int, activations: str = "auto", experts: int = E, **settings: Any
) -> FusedMoE:
    """Return SGLang's layer of experts without weights."""
    made = quantization.get_quantization_config(METHODS[activations]).from_config(dict(config))
    return FusedMoE(
        experts, hidden, width, layer_id=0, top_k=TOPK, params_dtype=torch.bfloat16, quant_config=made,
        prefix="model.layers.0.mlp.experts", **settings,
    )  # fmt: skip


def load(layer: Any, stored: Stored) -> Any:
    """Load the stored experts with SGLang's loaders; return the layer's method."""
    assert type(layer.quant_method) is CuteExpertsMethod
    stored.load(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method


@torch.no_grad()
def applied(layer: Any, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Call SGLang's layer with the experts that its router would choose."""
    y: torch.Tensor = layer(x, StandardTopKOutput(factors, ids, x.new_empty(0)))
    assert y.shape == x.shape and y.dtype == x.dtype
    return y


def tokens_of(count: int, hidden: int, few: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random tokens. For FP8 activations, they are powers of two, which FP8 represents exactly."""
    x, ids, factors = routed(count, hidden)
    return x if few else x.sign() * torch.exp2(torch.randint_like(x, -2, 4)), ids, factors


@pytest.mark.parametrize(("config", "scheme"), SUPPORTED)
@pytest.mark.parametrize("width", [128, 96])
def test_values(config, scheme, width):
    """Check that each expert keeps its own scales, and that widths without a kernel are padded with zeros."""
    stored = Stored(scheme, 128, width)
    with rank():
        layer = layer_of(config, 128, width)
        assert layer.quant_method.scheme == scheme and not layer.should_fuse_routed_scaling_factor_in_topk
        method = load(layer, stored)
        assert method.form.width == 128
        for count in (FEW, MANY):
            is_few = method.form.is_few(count)
            assert is_few == (count == FEW and scheme.format in ("nvfp4", "mxfp4"))
            given = tokens_of(count, 128, is_few)
            check(stored, *given, applied(layer, *given), SwiGLU(), BOUNDS["16bit" if is_few else "fp8"])
        assert applied(layer, *(each[:0] for each in given)).shape == (0, 128)


@pytest.mark.parametrize(("config", "scheme"), [NVFP4, CHANNEL, BLOCK])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2)])
def test_two_ranks(config, scheme, tp, ep, monkeypatch):
    """Check that the sum over ranks is right if ranks divide each expert, and if each rank has half of the experts. A
    token without a second expert, which SGLang marks by -1, gets the first expert's result."""
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # SGLang's needs an accelerator
    stored = Stored(scheme, 128, 256)
    for count in (FEW, MANY):
        is_few = count == FEW and scheme.format == "nvfp4"
        x, ids, factors = tokens_of(count, 128, is_few)
        ids[0, 1] = -1
        total = torch.zeros(count, 128, dtype=torch.float64)
        for number in range(2):
            with rank(number, tp, ep):
                layer = layer_of(config, 128, 256)
                assert load(layer, stored).form.experts == E // ep
                total += applied(layer, x, ids, factors).double()
        factors[0, 1] = 0
        check(stored, x, ids.clamp(min=0), factors, total, SwiGLU(), BOUNDS["16bit" if is_few else "fp8"])


GATES: list[tuple[dict[str, Any], SwiGLU]] = [
    ({"activation": "gelu_tanh"}, SwiGLU(gate="gelu_tanh")),
    ({"swiglu_limit": LIMIT}, SwiGLU(limit=LIMIT)),
    ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": LIMIT, "gate_up_interleaved": False}, SwiGLU(1.702, 1.0, LIMIT)),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "swiglu"), GATES)
def test_gates_and_scaling(settings, swiglu):
    """Check gates, and the factor of the results of routed experts."""
    stored = Stored(MXFP4[1], 128, 64)
    # A limit far below the sums of gate and up would amplify their rounding errors. Their sizes are similar in all
    # experts, because MXFP4 has no scale per expert.
    size = np.abs(stored.up[0] @ np.ones(128)).mean()
    with rank():
        layer = layer_of(MXFP4[0], 128, 64, routed_scaling_factor=2.5, **settings)
        load(layer, stored)
        for count in (FEW, MANY):
            x, ids, factors = tokens_of(count, 128, count == FEW)
            x = x * float(2.0 ** round(np.log2(LIMIT / size)))
            bound = BOUNDS["16bit" if count == FEW else "fp8"]
            check(stored, x, ids, factors * 2.5, applied(layer, x, ids, factors), swiglu, bound)


def test_fused_shared_expert():
    """Check a layer to which SGLang appends the model's shared expert, which every token chooses."""
    stored = Stored(NVFP4[1], 128, 64, E + 1)
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(NVFP4[0]))
    with rank():
        layer = FusedMoE(
            E + 1, 128, 64, layer_id=0, top_k=TOPK + 1, num_fused_shared_experts=1, params_dtype=torch.bfloat16,
            quant_config=made, prefix="a",
        )  # fmt: skip
        load(layer, stored)
        for count in (FEW, MANY):
            x, ids, factors = tokens_of(count, 128, count == FEW)
            ids = torch.cat((ids, torch.full((count, 1), E, dtype=torch.int32)), 1)
            factors = torch.cat((factors, torch.ones(count, 1)), 1)
            bound = BOUNDS["16bit" if count == FEW else "fp8"]
            check(stored, x, ids, factors, applied(layer, x, ids, factors), SwiGLU(), bound)


@pytest.mark.parametrize(("width", "tp", "ep"), [(64, 1, 1), (96, 1, 1), (192, 2, 1), (160, 2, 1), (64, 1, 2)])
def test_gpt_oss(width, tp, ep, monkeypatch):
    """Check gpt-oss's experts, which SGLang's model loads: rows of gate and up alternate, ranks divide experts by
    blocks of scales (160 columns are divided into 96 and 64), and the first of these ranks adds the second bias."""
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # SGLang's needs an accelerator
    stored, total = Stored(GPT_OSS, 128, width), {FEW: 0.0, MANY: 0.0}
    given = {count: routed(count, 128) for count in total}
    gate: dict[str, Any] = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}
    for number in range(tp * ep):
        with rank(number, tp, ep):
            model: Any = nn.Module()
            model.x = layer_of({"quant_method": "mxfp4"}, 128, width, **gate)
            assert type(model.x.quant_method) is CuteExpertsMethod
            for parameter in model.parameters():
                parameter.data.view(torch.uint8).fill_(0x3C)  # columns that the loader does not write
            model.config = SimpleNamespace(intermediate_size=width, num_local_experts=E)
            names = GptOssForCausalLM._load_mxfp4_experts_weights(model, stored.tensors.items())
            assert names == {name for name, _ in model.named_parameters()}
            model.x.quant_method.process_weights_after_loading(model.x)
            for count in total:
                total[count] = total[count] + applied(model.x, *given[count]).double()
    for count, bound in ((FEW, BOUNDS["16bit"]), (MANY, BOUNDS["fp8"])):
        check(stored, *given[count], total[count], SwiGLU(1.702, 1.0, 7.0), bound)


def test_choice_for_gpt_oss(tmp_path):
    """Check that SGLang loads gpt-oss's checkpoints with our method if the user names it."""
    config = transformers.GptOssConfig(hidden_size=128, intermediate_size=64, num_local_experts=E, num_hidden_layers=1)
    config.architectures, config.quantization_config = ["GptOssForCausalLM"], {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path / "saved")
    made = get_quant_config(
        ModelConfig(model_path=str(tmp_path / "saved"), quantization=METHODS["auto"]), LoadConfig(), {}
    )
    assert type(made) is _checkpoints.CuteGptOssConfig
    assert made.get_name() == "mxfp4" and made.is_static_cfg()  # the model's loader depends on both


def test_router_weights_on_the_input():
    stored = Stored(NVFP4[1], 128, 64)
    with rank():
        made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(NVFP4[0]))
        layer = FusedMoE(
            E, 128, 64, layer_id=0, top_k=1, params_dtype=torch.bfloat16, quant_config=made, prefix="a",
            apply_router_weight_on_input=True,
        )  # fmt: skip
        load(layer, stored)
        x, ids, _ = routed(FEW, 128)
        factors = torch.full((FEW, 1), 0.5)  # exact in bfloat16
        want = (x * 0.5, ids[:, :1], torch.ones(FEW, 1))
        check(stored, *want, applied(layer, x, ids[:, :1], factors), SwiGLU(), BOUNDS["16bit"])


def test_fp4_activations_of_few_tokens():
    """Check that calibrated input scales of gate and up are both loaded, and the larger one is used."""
    stored = Stored(NVFP4[1], 128, 64)
    given = routed(24, 128)
    for i, expert in enumerate(stored.experts):
        largest = max(abs(stored.hidden(i, row, SwiGLU())).max() for row in given[0].double().numpy())
        expert["w2"][0]["input_scale"].fill_(largest / (6 * 448))
        expert["w1"][0]["input_scale"].fill_(0.002 + 0.001 * i)
        expert["w3"][0]["input_scale"].fill_(0.004 - 0.001 * i)
    with rank():
        layer = layer_of(NVFP4[0], 128, 64, "fp4")
        assert load(layer, stored).form.few == "fp4"
        assert layer.few_input_global_scale.item() == pytest.approx(1 / 0.005)
        check(stored, *given, applied(layer, *given), SwiGLU(), BOUNDS["fp4"])


def test_missing_scales():
    stored = Stored(NVFP4[1], 128, 64)
    del stored.experts[2]["w3"][0]["weight_scale_2"]
    with rank():
        layer = layer_of(NVFP4[0], 128, 64)
        with pytest.raises(ValueError, match=r"mlp\.experts: the checkpoint has no w13_weight_scale_2"):
            load(layer, stored)


LEFT: list[tuple[dict[str, Any], str]] = [
    ({"activation": "silu", "is_gated": False}, "the activation function is silu"),
    ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "the activation function"),
    ({"gemm1_clamp_limit": 7.0}, "the activation function"),
    ({"with_bias": True}, "have biases"),
    ({"no_combine": True}, "not added up"),
    ({"apply_router_weight_on_input": True}, "several weights"),
    ({"hidden": 144}, "hidden size is 144"),
    ({"width": 48, "tp": 2}, "share a block"),
    ({"experts": 2000}, "number of experts is 2000"),
]  # fmt: skip
SERVERS: list[tuple[Any, str]] = [
    (lambda: get_flags().moe.override(runner_backend=MoeRunnerBackend.TRITON), "--moe-runner-backend is triton"),
    (lambda: get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP), "--moe-a2a-backend is deepep"),
    (lambda: get_exec().moe.override(enable_eplb=True), "EPLB"),
    (lambda: get_exec().moe.override(kt_weight_path="x"), "KTransformers"),
    (lambda: rank(tp=2, attn_tp_size=1, attn_dp_size=2), "data parallelism"),
    (lambda: get_lora().override(enable_lora=True), "LoRA"),
    (lambda: get_exec().deterministic.override(enable_deterministic_inference=True), "depend on the batch"),
]


def chosen(monkeypatch: pytest.MonkeyPatch, setting: Any = contextlib.nullcontext, **settings: Any) -> list[str]:
    """Check which method the configuration chooses for a layer: ours, or SGLang's after a warning. Return warnings."""
    said: list[str] = []
    monkeypatch.setattr(_checkpoints, "warn", said.append)
    own = object()
    monkeypatch.setattr(_checkpoints.ModelOptFp4Config, "get_quant_method", lambda self, layer, prefix: own)
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(NVFP4[0]))
    sizes = [settings.pop(name, default) for name, default in (("experts", E), ("hidden", 128), ("width", 64))]
    with rank(tp=settings.pop("tp", 1)):
        layer = FusedMoE(*sizes, layer_id=0, top_k=TOPK, params_dtype=torch.bfloat16, **settings)
        with setting():
            method = made.get_quant_method(layer, "a")
    assert method is own if said else type(method) is CuteExpertsMethod
    return said


@pytest.mark.parametrize(("settings", "reason"), LEFT)
def test_experts_left_to_sglang(settings, reason, monkeypatch):
    (said,) = chosen(monkeypatch, **settings)
    assert said.startswith("a: ") and reason in said


@pytest.mark.parametrize(("setting", "reason"), SERVERS)
def test_servers_whose_experts_are_left_to_sglang(setting, reason, monkeypatch):
    assert not chosen(monkeypatch)
    (said,) = chosen(monkeypatch, setting)
    assert reason in said


IGNORED: list[dict[str, Any]] = [
    {**NVFP4[0], "ignore": ["model.layers.0.mlp.experts*"]},
    {**BLOCK[0], "ignored_layers": ["model.layers.0.mlp.experts"]},
    {**compressed("nvfp4", "nvfp4-pack-quantized"), "ignore": ["re:.*experts.*"]},
]


@pytest.mark.parametrize("config", IGNORED)
def test_experts_without_quantisation(config):
    with rank():
        assert type(layer_of(config, 128, 64).quant_method) is UnquantizedFusedMoEMethod


@pytest.mark.parametrize(
    ("scheme", "style"),
    [
        ("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"),
        ("fp8_block", "compressed-tensors"), ("fp8_channel", "compressed-tensors"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_saved_checkpoints(scheme, style, tmp_path):
    """Check that SGLang's configuration and loaders read experts that ``save`` wrote, with the tensors' names mapped as
    SGLang's models do, and that results equal the results in transformers, bit for bit."""
    count, hidden, width = 8, 256, 128
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_attention_heads": 4, "vocab_size": 512}
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(num_experts=count, num_experts_per_tok=TOPK, num_hidden_layers=1, **sizes)
    ).bfloat16()
    torch_cute_ops.nn.quantize_(model, scheme)
    checkpoint.save(model, tmp_path / "saved", style)
    chosen_model = ModelConfig(model_path=str(tmp_path / "saved"), quantization=METHODS["auto"])
    made, prefix = get_quant_config(chosen_model, LoadConfig(), {}), "model.layers.0.mlp.experts"
    want: Any = cute_transformers.from_pretrained(tmp_path / "saved").get_submodule(prefix)
    if scheme in ("nvfp4", "mxfp4"):
        want.route_few_()
    with rank():
        layer = FusedMoE(
            count, hidden, width, layer_id=0, top_k=TOPK, params_dtype=torch.bfloat16, quant_config=made, prefix=prefix
        )
        assert type(layer.quant_method) is CuteExpertsMethod
        names = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", count)
        for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items():
            for of_parameter, of_tensor, expert, shard in names:
                if of_tensor in name:
                    mapped = name.replace(of_tensor, of_parameter)
                    parameter = layer.get_parameter(mapped.removeprefix(f"{prefix}."))
                    parameter.weight_loader(parameter, tensor, mapped, shard_id=shard, expert_id=expert)
        layer.quant_method.process_weights_after_loading(layer)
        for tokens in (FEW, 100):
            x, ids = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, count).argsort(1)[:, :TOPK]
            factors = torch.rand(tokens, TOPK)
            assert torch.equal(applied(layer, x, ids.to(torch.int32), factors), want(x, ids, factors))
