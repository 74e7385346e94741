"""``from_pretrained`` and ``from_config``: transformers models with quantised layers."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.decoded_models import decode_layers
from support.layers import as_multiplied
from torch import nn

pytest.importorskip("transformers")
from huggingface_hub.utils import filter_repo_objects
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DeepseekV3Config,
    GenerationConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from torch_cute_ops import checkpoint
from torch_cute_ops.integrations import transformers as integration
from torch_cute_ops.nn import NVFP4Linear, QuantExperts, QuantLinear, merge_, quantize_, warmup

Tensors = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=64),
    "qwen2": Qwen2Config(**SIZES),  # q, k and v with biases
    "qwen3": Qwen3Config(**SIZES, head_dim=64),  # norms of q and k
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(0))


def bf16_model(config) -> nn.Module:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def saved(config, path: Path, scheme: str = "nvfp4", style: str = "modelopt") -> nn.Module:
    """Save a quantised checkpoint; return the model with the decoded weights in bf16."""
    model = bf16_model(config)
    quantize_(model, scheme)
    checkpoint.save(model, path, style)
    for twin, layer in decode_layers(model, torch.bfloat16).items():
        twin.layer = layer
    return model


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a checkpoint by the function ``change``."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def round_activations(twin: nn.Module) -> None:
    """Make the unquantised model ``twin`` round activations in the same way as quantised layers."""

    def rounded(linear: nn.Linear, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = inputs
        return torch.from_numpy(as_multiplied(x, linear.layer)).to(x).view_as(x)

    for module in twin.modules():
        if hasattr(module, "layer"):
            module.register_forward_pre_hook(rounded)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS.to(model.device), use_cache=False).logits.float().cpu()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def tokens(model: nn.Module, **given) -> torch.Tensor:
    return model.generate(IDS.to(model.device), do_sample=False, max_new_tokens=8, **given).cpu()


@by_config
def test_logits_match_the_decoded_weights(config, tmp_path, device):
    twin = saved(config, tmp_path / "x")
    model = integration.from_pretrained(tmp_path / "x", device=device, progress=False)
    assert model.device.type == device and model.dtype == torch.bfloat16 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layer = model.model.layers[1]
    assert layer.self_attn.qkv_proj.parts == tuple(
        heads * layer.self_attn.head_dim for heads in (4, 2, 2)
    ) and layer.mlp.gate_up_proj.parts == (256, 256)
    assert cosine(logits(model), logits(twin)) > 0.9999
    if config.tie_word_embeddings:
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("scheme", "style"),
    [
        ("nvfp4", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
        ("fp8_block", "compressed-tensors"),
        ("fp8_tensor", "compressed-tensors"),
        ("fp8_channel", "modelopt"),
        ("mxfp8", "modelopt"),
        ("mxfp8", "compressed-tensors"),
    ],
)
def test_formats(scheme, style, tmp_path, device):
    twin = saved(CONFIGS["llama"], tmp_path / "x", scheme, style)
    model = integration.from_pretrained(tmp_path / "x", device=device, progress=False)
    want = logits(twin)
    lost = 1 - cosine(logits(model), want)
    # FP8 activations add an error, so round the twin's activations, too, by reference formulas.
    round_activations(twin)
    assert lost < 1e-4 + 2 * (1 - cosine(logits(twin), want))


def whole_graphs() -> tuple[CompileConfig, list[torch.fx.GraphModule]]:
    """Return a configuration with which ``generate`` compiles the decode step to full graphs, and the list of these
    graphs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    whole = CompileConfig(fullgraph=True, backend=keep, mode=None)
    whole._compile_all_devices = True
    return whole, graphs


def called_in(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@by_config
def test_merged_or_apart(config, tmp_path):
    """Check that merged and separate layers give bitwise equal results, and that with a static cache the compiled
    decode step generates the same tokens."""
    saved(config, tmp_path / "x")
    apart = integration.from_pretrained(tmp_path / "x", device="cpu", merge=False, progress=False)
    merged = integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)
    assert type(apart.model.layers[0].self_attn.q_proj).__name__ == "NVFP4Linear"
    assert torch.equal(logits(apart), logits(merged))
    assert torch.equal(tokens(merged), tokens(apart))
    torch._dynamo.reset()
    want = tokens(apart, cache_implementation="static", disable_compile=True)
    whole, graphs = whole_graphs()
    assert torch.equal(tokens(merged, cache_implementation="static", compile_config=whole), want)
    called = called_in(graphs[0])
    # Dynamo first treats a number in transformers' sliding-window cache as a constant, so it compiles again.
    assert len(graphs) == (2 if config.model_type == "mistral" else 1)
    assert sum("mm_fp4_weight_only" in name for name in called) == 2 * 4


@by_config
def test_frequencies_match_the_plain_model(config, tmp_path):
    saved(config, tmp_path / "x")
    model = integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)
    want = dict(bf16_model(config).named_buffers())
    got = {name: buffer for name, buffer in model.named_buffers() if "rotary" in name}
    assert got and all(torch.equal(buffer, want[name]) for name, buffer in got.items())


def test_saved_again(tmp_path):
    """Check that merged layers are saved separately, with equal bits, together with the generation configuration."""
    saved(CONFIGS["qwen2"], tmp_path / "x")
    model = integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    model.generation_config.update(eos_token_id=[3, 5], top_k=7, do_sample=True)
    with pytest.raises(ValueError, match=r"use torch_cute_ops.checkpoint.save"):
        model.save_pretrained(tmp_path / "y")
    checkpoint.save(model, tmp_path / "y", "modelopt")
    again = integration.from_pretrained(tmp_path / "y", device="cpu", progress=False, dtype="auto")
    for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    assert (again.generation_config.eos_token_id, again.generation_config.top_k) == ([3, 5], 7)
    assert again.config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_loaded_again(name, tmp_path):
    """Check that ``load_`` of another checkpoint overwrites every tensor of a merged model in place."""
    config = {**CONFIGS, **MOE}[name]
    for seed in (0, 1):
        random = integration.from_config(config, device="cpu", seed=seed)
        checkpoint.save(random, tmp_path / str(seed), "modelopt")
    model, want = (integration.from_pretrained(tmp_path / str(seed), device="cpu", progress=False) for seed in (0, 1))

    def places() -> dict[str, int]:
        return {key: tensor.data_ptr() for key, tensor in (*model.named_parameters(), *model.named_buffers())}

    before = places()
    assert not torch.equal(logits(model), logits(want))
    checkpoint.load_(model, tmp_path / "1")
    assert places() == before and torch.equal(logits(model), logits(want))


def test_transformers_refuses_to_save_quantised_models(tmp_path):
    """Check that ``save_pretrained`` refuses quantised models, their submodels and copies, and that a submodel without
    quantised layers can be saved."""
    model = bf16_model(CONFIGS["llama"])
    quantize_(model, ignore="*")
    model.save_pretrained(tmp_path / "plain")
    again = nn.ModuleDict({"decoder": quantize_(model)})
    for each in (model, model.model, again["decoder"], copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"save_pretrained: .* use torch_cute_ops.checkpoint.save\(model"):
            each.save_pretrained(tmp_path / "y")
    checkpoint.save(model, tmp_path / "y", "modelopt")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    integration._fill_buffers(empty)
    loaded = checkpoint.load_(empty, tmp_path / "y")
    with pytest.raises(ValueError, match=r"use torch_cute_ops.checkpoint.save"):
        loaded.save_pretrained(tmp_path / "z")


def test_settings(tmp_path, capsys):
    """Check that the checkpoint's generation configuration is kept, and that an explicit dtype, configuration and
    progress bar are used."""
    saved(CONFIGS["llama"], tmp_path / "x")
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path / "x")
    model = integration.from_pretrained(
        tmp_path / "x", device="cpu", dtype=torch.float16, attn_implementation="eager", activations="16bit"
    )
    assert model.generation_config.temperature == 0.25
    assert model.config._attn_implementation == "eager" and model.lm_head.weight.dtype == torch.float16
    assert "Loading: 100%" in capsys.readouterr().err
    warmup(model, rows=(1, 11), dtype=torch.float16)
    assert logits(model).isfinite().all()
    with pytest.raises(TypeError, match=r"LlamaConfig has no device_map, layers; use device$"):
        integration.from_pretrained(tmp_path / "x", device_map="cpu", layers=3)


def test_ignore(tmp_path):
    """Check a single pattern in ``ignore``, for ``from_config`` and for ``from_pretrained``."""
    model = integration.from_config(CONFIGS["llama"], device="cpu", ignore="up_proj")
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and isinstance(model.lm_head, NVFP4Linear)
    saved(CONFIGS["llama"], tmp_path / "x")
    rewrite(tmp_path / "x", lambda tensors: tensors | {"mtp.weight": torch.ones(3)})
    integration.from_pretrained(tmp_path / "x", device="cpu", progress=False, ignore="mtp.weight")


def test_float32(tmp_path):
    """Check that float32 is refused for layers with 16-bit activations, and supported for all others, including
    experts."""
    saved(CONFIGS["llama"], tmp_path / "x", "mxfp4", "compressed-tensors")
    given = {"device": "cpu", "dtype": torch.float32}
    for load in (
        lambda **more: integration.from_pretrained(tmp_path / "x", progress=False, **given, **more),
        lambda **more: integration.from_config(CONFIGS["llama"], "mxfp4", **given, **more),
    ):
        with pytest.raises(ValueError, match=r"dtype is torch\.float32, but \S+ takes 16-bit .*dtype=torch\.bfloat16"):
            load()
        assert logits(load(activations="fp8")).isfinite().all()
    integration.register()
    try:
        with pytest.raises(ValueError, match=r"dtype is torch\.float32, but \S+ takes 16-bit"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    finally:
        integration.unregister()
    experts = integration.from_config(MOE["mixtral"], "mxfp4", **given, ignore=("lm_head", "*.self_attn.*"))
    assert experts.dtype == torch.float32 and logits(experts).isfinite().all()


def test_a_name_is_fetched(tmp_path, monkeypatch):
    saved(CONFIGS["llama"], tmp_path / "x")
    fetched = []

    def fetch(name, **given):
        fetched.append((name, given))
        return str(tmp_path / "x")

    monkeypatch.setattr(integration.huggingface_hub, "snapshot_download", fetch)
    model = integration.from_pretrained("somebody/a-model", device="cpu", progress=False, revision="v2")
    assert [name for name, _ in fetched] == ["somebody/a-model"] and fetched[0][1].pop("revision") == "v2"
    published = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "README.md",
                 "original/model.safetensors"]  # fmt: skip
    assert [*filter_repo_objects(published, **fetched[0][1])] == published[:2]
    assert cosine(logits(model), logits(integration.from_pretrained(tmp_path / "x", device="cpu"))) > 0.9999


def test_paths_that_are_not_folders(tmp_path, monkeypatch):
    """Check that a path that is neither a folder nor a repository name never causes a request to the Hub."""
    monkeypatch.setattr(integration.huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    for path in ("./typo", "../typo", str(tmp_path / "typo"), tmp_path / "typo", Path("typo")):
        with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(path))} does not exist; expected a"):
            integration.from_pretrained(path)
    (tmp_path / "model.safetensors").touch()
    for path in ("model.safetensors", tmp_path / "model.safetensors"):
        with pytest.raises(NotADirectoryError, match=r"model\.safetensors is a file; expected a checkpoint"):
            integration.from_pretrained(path)


def test_bad_checkpoints(tmp_path):
    saved(CONFIGS["llama"], tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"contains no model\.layers\.2\.self_attn\.q_proj\.weight"):
        integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)
    config["quantization_config"]["quant_algo"] = "INT4_AWQ"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_algo is 'INT4_AWQ'"):
        integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)


# Experts

# Route each token to all experts, so that rounding cannot change the choice of experts.
ROUTED = {**SIZES, "num_experts_per_tok": 4}
MOE = {
    "mixtral": MixtralConfig(**{**ROUTED, "intermediate_size": 128}, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**ROUTED, head_dim=32, moe_intermediate_size=128, num_experts=4, norm_topk_prob=True),
    "gpt-oss": GptOssConfig(**{**ROUTED, "intermediate_size": 64}, head_dim=32, num_local_experts=4),
    "deepseek-v3": DeepseekV3Config(
        **{**ROUTED, "num_key_value_heads": 4}, moe_intermediate_size=128, n_routed_experts=4, n_group=2, topk_group=2,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=32,
    ),
}  # fmt: skip


def moe_saved(config, path: Path, scheme: str, style: str) -> nn.Module:
    """Save a quantised checkpoint with experts; return the model with the decoded weights in bf16."""
    model = bf16_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(std=0.1)
            elif ".experts." in name:
                parameter.mul_(4)
    twin = copy.deepcopy(model)
    if config.model_type == "gpt_oss":
        quantize_(model, scheme, ignore=("lm_head", "re:.*self_attn.*"))
    else:
        quantize_(model, scheme)
    for name, module in model.named_modules():
        if isinstance(module, QuantExperts):
            old = twin.get_submodule(name)
            gate_up, down = module.dequantize(torch.bfloat16)
            if config.model_type == "gpt_oss":
                half = gate_up.shape[1] // 2
                gate_up = torch.stack((gate_up[:, :half], gate_up[:, half:]), 2).flatten(1, 2).mT
                down = down.mT
            old.gate_up_proj.data.copy_(gate_up)
            old.down_proj.data.copy_(down)
        elif isinstance(module, QuantLinear) and ".experts." not in name:
            twin.get_submodule(name).weight.data.copy_(module.dequantize(torch.bfloat16))
    checkpoint.save(model, path, style)
    return twin


def as_gpt_oss(path: Path) -> None:
    """Convert a checkpoint with MXFP4 experts to gpt-oss's format."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    written = {}
    for name in [name for name in tensors if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        expert, part, kind = rest.split(".")
        written.setdefault(f"{prefix}.experts", {})[int(expert), part, kind] = tensors.pop(name)
    for prefix, of in written.items():
        for part, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for kind, suffix in (("weight_packed", "blocks"), ("weight_scale", "scales"), ("bias", "bias")):
                each = [torch.stack([of[e, source, kind] for source in sources], 1).flatten(0, 1) for e in range(4)]
                stacked = torch.stack(each)
                tensors[f"{prefix}.{part}_{suffix}"] = (
                    stacked.unflatten(-1, (-1, 16)) if suffix == "blocks" else stacked
                )
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "scheme", "style"),
    [
        ("mixtral", "nvfp4", "modelopt"),
        ("qwen3-moe", "mxfp4", "compressed-tensors"),
        ("gpt-oss", "mxfp4", "compressed-tensors"),
        ("deepseek-v3", "fp8_block", "compressed-tensors"),
    ],
)
def test_models_with_experts(name, scheme, style, tmp_path, device):
    twin = moe_saved(MOE[name], tmp_path / "x", scheme, style)
    if name == "gpt-oss":
        as_gpt_oss(tmp_path / "x")
    if name == "deepseek-v3":
        with_a_layer_for_further_tokens(tmp_path / "x")
    model = integration.from_pretrained(tmp_path / "x", device=device, progress=False)
    experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
    assert len(experts) == (1 if name == "deepseek-v3" else 2)
    assert all(module.topk == 4 and module.scheme == scheme for module in experts)
    assert cosine(logits(model), logits(twin)) > 0.99
    warmup(model, rows=(1, 22))
    if device == "cpu":
        generates_whole(model, "grouped_mm", 2 * len(experts))


def with_a_layer_for_further_tokens(path: Path) -> None:
    """Add a layer for multi-token prediction, as in DeepSeek-V3's checkpoints. transformers' model lacks it."""
    more = {"model.layers.61.eh_proj.weight": torch.zeros(128, 256).bfloat16()}
    rewrite(path, lambda tensors: tensors | more)


def generates_whole(model: nn.Module, op: str, count: int) -> None:
    """Check that with a static cache the decode step compiles to one graph with ``count`` calls of an op, and generates
    the same tokens as eager code."""
    torch._dynamo.reset()
    given = {"cache_implementation": "static", "do_sample": False, "max_new_tokens": 4}
    want = model.generate(IDS, disable_compile=True, **given)
    whole, graphs = whole_graphs()
    assert torch.equal(model.generate(IDS, compile_config=whole, **given), want)
    called = called_in(graphs[0])
    assert sum(op in name for name in called) == count
    assert not any("item" in name.split(".")[-2:] or "nonzero" in name for name in called)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_random_experts(name, device):
    model = integration.from_config(MOE[name], "mxfp4", device=device)
    assert sum(isinstance(module, QuantExperts) for module in model.modules()) > 0
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert logits(model).isfinite().all()


# from_pretrained of transformers


@pytest.fixture
def registered():
    integration.register()
    yield
    integration.unregister()


@pytest.mark.parametrize(
    ("name", "scheme", "style"),
    [
        ("llama-tied", "nvfp4", "modelopt"),
        ("qwen2", "fp8_channel", "compressed-tensors"),
        ("mixtral", "nvfp4", "compressed-tensors"),
        ("gpt-oss", "mxfp4", "compressed-tensors"),
    ],
)
def test_register(name, scheme, style, tmp_path, device, registered):
    """Check that, after ``register``, transformers' from_pretrained gives weights bitwise equal to our
    ``from_pretrained``."""
    make, config = (moe_saved, MOE[name]) if name in MOE else (saved, CONFIGS[name])
    make(config, tmp_path / "x", scheme, style)
    if name == "gpt-oss":
        as_gpt_oss(tmp_path / "x")
    want = integration.from_pretrained(tmp_path / "x", device=device, progress=False)
    got, info = AutoModelForCausalLM.from_pretrained(tmp_path / "x", output_loading_info=True)
    got.to(device)  # device_map would need accelerate
    assert not any(info.values()), info
    assert got.state_dict().keys() == want.state_dict().keys() and got.device.type == device
    for (key, tensor), other in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), key
    assert torch.equal(logits(got), logits(want))
    assert got.hf_quantizer.is_compileable and got.hf_quantizer.is_trainable


def test_register_errors(tmp_path, registered, caplog):
    from transformers.quantizers.auto import AutoQuantizationConfig

    saved(CONFIGS["llama"], tmp_path / "x")
    for methods in (["awq"], "awq"):
        with pytest.raises(ValueError, match=r"methods contains 'awq'; expected some of 'modelopt'"):
            integration.register(methods)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "y")
    assert "use torch_cute_ops.checkpoint.save" in caplog.text
    checkpoint.save(model, tmp_path / "z", "modelopt")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "z")), logits(model))
    # transformers' own quantizer, if one exists for the method, loads checkpoints that we do not support.
    theirs = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
    assert type(AutoQuantizationConfig.from_dict(dict(theirs))).__name__ == "FineGrainedFP8Config"
    assert "transformers' own FineGrainedFP8Config is used" in caplog.text
    with pytest.raises(ValueError, match="quant_algo is 'INT4_AWQ'"):
        AutoQuantizationConfig.from_dict({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"})
    ours = type(AutoQuantizationConfig.from_dict({**theirs, "weight_block_size": [128, 128]})).__name__
    integration.unregister()
    again = type(AutoQuantizationConfig.from_dict({**theirs, "weight_block_size": [128, 128]})).__name__
    assert (ours, again) == ("CuteConfig", "FineGrainedFP8Config")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
        {"quant_method": "compressed-tensors", "quantization_status": "frozen"},
    ],
    ids=["when it is used", "when it is read"],
)
def test_a_producer_that_is_missing(quantization, tmp_path, registered):
    """Check that the error about a missing package begins with our reason to refuse the checkpoint."""
    package = {"quark": "quark", "compressed-tensors": "compressed_tensors"}[quantization["quant_method"]]
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    saved(CONFIGS["llama"], tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    reason = "dtype is 'int4'; expected 'fp4'" if package == "quark" else "quantization_status is 'frozen'; expected"
    with pytest.raises(ImportError, match=rf"^config\.json: .*{reason}.*transformers' own quantizer failed too: "):
        AutoModelForCausalLM.from_pretrained(tmp_path / "x")


def test_device_maps():
    from torch_cute_ops.integrations._transformers_quantizer import _one_device

    given = {None: "cpu", 0: "cuda:0", "cuda:1": "cuda:1", torch.device("cpu"): "cpu"}
    for device_map, want in given.items():
        assert _one_device(device_map) == _one_device({"": device_map}) == torch.device(want)
    for device_map in ({"model": 0, "lm_head": 1}, {"model": "disk"}, {"model": "cpu", "lm_head": "disk"}):
        with pytest.raises(ValueError, match="expected one device"):
            _one_device(device_map)


def test_a_scale_that_is_missing(tmp_path, registered):
    saved(CONFIGS["llama"], tmp_path / "x")
    lost = "model.layers.1.mlp.up_proj.weight_scale_2"
    rewrite(tmp_path / "x", lambda tensors: {key: each for key, each in tensors.items() if key != lost})
    with pytest.raises(ValueError, match=r"contains no model\.layers\.1\.mlp\.up_proj\.weight_scale_2"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "x")


def quantised_head(path: Path) -> None:
    """Add a quantised ``lm_head`` to a checkpoint."""
    head = NVFP4Linear.from_float(nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False).bfloat16())
    own = {f"lm_head.{key}": each for key, each in head.state_dict().items()}
    rewrite(path, lambda tensors: tensors | own)


def test_a_quantised_head_of_a_tied_model(tmp_path, registered):
    """Check that a quantised head is refused if the model ties it to the embedding, and loaded otherwise."""
    for name in ("llama", "llama-tied"):
        saved(CONFIGS[name], tmp_path / name)
        rewrite(tmp_path / name, lambda tensors: {key: tensors[key] for key in tensors if key != "lm_head.weight"})
        quantised_head(tmp_path / name)
    for load in (AutoModelForCausalLM.from_pretrained, integration.from_pretrained):
        with pytest.raises(ValueError, match=r"lm_head\.\w+ in .* is quantised, but lm_head shares its weight"):
            load(tmp_path / "llama-tied")
        assert isinstance(load(tmp_path / "llama").lm_head, NVFP4Linear)


Q_PROJ = "model.layers.0.self_attn.q_proj"
loaders = pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, integration.from_pretrained])


def refused(load, path: Path, change: Callable[[Tensors], Tensors], message: str) -> None:
    kept = (path / "model.safetensors").read_bytes()
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        load(path)
    (path / "model.safetensors").write_bytes(kept)


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if not name.startswith(prefix)}


@loaders
def test_incomplete_checkpoints(load, tmp_path, registered):
    """Check that an incomplete checkpoint is refused, so that no weight stays random."""
    saved(CONFIGS["qwen2"], tmp_path / "x")
    for lost in (f"{Q_PROJ}.", "lm_head.", f"{Q_PROJ}.weight"):  # the last case leaves the bias
        refused(load, tmp_path / "x", without(lost), rf"contains no .*{re.escape(lost.rpartition('.')[0])}")
    moe_saved(MOE["mixtral"], tmp_path / "y", "nvfp4", "modelopt")
    refused(
        load, tmp_path / "y", without("model.layers.1.block_sparse_moe.experts."), r"contains no .*layers\.1\..*experts"
    )
    refused(load, tmp_path / "y", without("model.layers.1.block_sparse_moe.experts.2.w3."), r"experts\.2\.w3")


@loaders
def test_experts_of_llama_4(load, tmp_path, registered):
    """Check that ModelOpt's NVFP4 experts of Llama 4 are refused: Llama 4 calls them with one row per (expert, token)
    pair."""
    config = Llama4TextConfig(
        **SIZES, intermediate_size_mlp=256, num_local_experts=2, head_dim=32, interleave_moe_layer_step=1
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)

    def quantised(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            if ".experts." not in name:
                found[name] = tensor
                continue
            experts, k, n = tensor.shape
            found[name] = torch.randint(256, (experts, k // 2, n), dtype=torch.uint8)
            found[f"{name}_weight_scale"] = torch.ones(experts, k // 16, n).to(torch.float8_e4m3fn)
            found[f"{name}_weight_scale_2"] = torch.tensor(0.5)
            found[f"{name}_input_scale"] = torch.tensor(0.5)
        return found

    document = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "*shared_expert*"]}
    (tmp_path / "config.json").write_text(json.dumps({**document, "quantization_config": quantization}))
    refused(load, tmp_path, quantised, r"experts is quantised in .*, but cannot become QuantExperts: ")


@loaders
def test_surplus_tensors(load, tmp_path, registered):
    """Check that tensors are refused that the format of a layer does not define, or whose expert the model lacks."""
    saved(CONFIGS["llama"], tmp_path / "x")
    for name, message in (("pre_quant_scale", "is unknown to modelopt nvfp4"), ("lora.weight", "")):
        more = {f"{Q_PROJ}.{name}": torch.ones(128)}
        refused(load, tmp_path / "x", lambda tensors, more=more: tensors | more, rf"{re.escape(name)} in .*{message}")
    moe_saved(MOE["mixtral"], tmp_path / "y", "nvfp4", "modelopt")

    def with_a_fifth(tensors: Tensors) -> Tensors:
        return tensors | {name.replace(".experts.3.", ".experts.4."): each.clone() for name, each in tensors.items()}

    refused(load, tmp_path / "y", with_a_fifth, r"model does not use \S+experts\.4\.\S+ in .*safetensors")


@loaders
def test_scales_of_the_kv_cache(load, tmp_path, registered, caplog):
    saved(CONFIGS["llama"], tmp_path / "x")
    want = logits(load(tmp_path / "x"))
    names = ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_scale")
    rewrite(tmp_path / "x", lambda tensors: tensors | {name: torch.ones(()) for name in names})
    with pytest.warns(UserWarning, match=f"KV cache are not used: {', '.join(map(re.escape, names))}"):
        assert torch.equal(logits(load(tmp_path / "x")), want)
    assert not caplog.text


def test_names_that_transformers_changes(tmp_path, registered):
    """Load an unquantised layer whose name in the checkpoint differs from its name in the model."""
    saved(CONFIGS["llama"], tmp_path / "x")
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "x"))
    rewrite(
        tmp_path / "x",
        lambda tensors: {name.replace("lm_head", "model.lm_head"): each for name, each in tensors.items()},
    )
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "x")), want)


# Random weights


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "fp8_block"])
def test_random_weights(name, scheme, device):
    """Check that every linear layer except the last is random, that norms are ones, and that results depend on the
    seed."""
    config = CONFIGS[name]
    model = integration.from_config(config, scheme, device=device)
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert linears == {"lm_head"}
    assert all((module.weight == 1).all() for name, module in model.named_modules() if name.endswith("norm"))
    assert 0.015 < model.model.embed_tokens.weight.float().std() < 0.025
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings
    same, other = (integration.from_config(config, scheme, device=device, seed=seed) for seed in (0, 1))
    got = logits(model)
    assert got.isfinite().all() and torch.equal(got, logits(same))
    assert cosine(got, logits(other)) < 0.5


# Memory of a model


@pytest.mark.parametrize(
    ("layers", "limit", "sizes"),
    [
        (32, 6.3e9, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}),
        (80, 43.5e9, {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}),
    ],
    ids=["8B", "70B"],
)
def test_memory_of_llama_3(layers, limit, sizes):
    """Count the bytes of merged NVFP4 layers, including derived buffers. All layers of a model have the same size."""

    def held(count: int) -> int:
        config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, num_hidden_layers=count)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        merge_(quantize_(model, "nvfp4"))
        return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))

    first, second = held(1), held(2)
    hidden = sizes["hidden_size"]
    weights = hidden * (2 * hidden + 2 * 8 * 128 + 3 * sizes["intermediate_size"])
    # 4 bits per element, an 8-bit scale per 16 elements, norms, and one factor per column of merged layers.
    assert 0 < second - first - weights * 0.5625 < 0.001 * weights
    assert first + (layers - 1) * (second - first) < limit
