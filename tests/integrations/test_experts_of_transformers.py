"""All classes of experts in transformers: each is replaced without changing results, or stays for a stated reason."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from torch_cute_ops import checkpoint
from torch_cute_ops.integrations import transformers as integration
from torch_cute_ops.nn import QuantExperts, SwiGLU, quantize_, summary
from torch_cute_ops.nn.float_experts import float_experts

VERSION = "5.24"
"""Version of transformers to which the table of classes belongs."""
E, H, I, TOPK = 4, 64, 64, 2  # noqa: E741
SIZES = dict.fromkeys(("hidden_size", "moe_hidden_size"), H)
SIZES |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), I)
SIZES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
SIZES |= {"moe_latent_size": None, "n_shared_experts": 2}

MORE = {
    "Ernie4_5_VLMoeMoeExperts": {"intermediate_size": I},
    "NllbMoeSparseMLP": {"ffn_dim": I},
    "ZayaSparseMoeBlock": {"layer_idx": 1},
}
"""Additional arguments of constructors, keyed by class."""

SILU = SwiGLU()
GPT_OSS = SwiGLU(1.702, 1.0, 7.0)
OTHER = "computes something else than experts with SwiGLU"
UNKNOWN = "is neither nn.Linear nor experts with gate_up_proj and down_proj"
EXPERTS = {
    "afmoe.AfmoeExperts": SILU,
    "aria.AriaExperts": SILU,
    "axk1.AXK1Experts": SILU,
    "axk2.AXK2Experts": SILU,
    "bailing_hybrid.BailingHybridExperts": SILU,
    "beam.BeamExperts": SILU,
    "cohere2_moe.Cohere2MoeExperts": SILU,
    "deepseek_ocr2.DeepseekOcr2TextExperts": SILU,
    "deepseek_v2.DeepseekV2Experts": SILU,
    "deepseek_v3.DeepseekV3Experts": SILU,
    "deepseek_v32.DeepseekV32Experts": SILU,
    "deepseek_v4.DeepseekV4Experts": SwiGLU(limit=10.0),
    "diffusion_gemma.DiffusionGemmaTextExperts": SwiGLU(gate="gelu_tanh"),
    "dots1.Dots1Experts": SILU,
    "dots3_note.Dots3NoteExperts": SILU,
    "ernie4_5_moe.Ernie4_5_MoeExperts": SILU,
    "ernie4_5_vl_moe.Ernie4_5_VLMoeMoeExperts": SILU,
    "exaone_moe.ExaoneMoeExperts": SILU,
    "flex_olmo.FlexOlmoExperts": SILU,
    "flint.FlintExperts": SILU,
    "gemma4.Gemma4TextExperts": SwiGLU(gate="gelu_tanh"),
    "glm4_moe.Glm4MoeExperts": SILU,
    "glm4_moe_lite.Glm4MoeLiteExperts": SILU,
    "glm4v_moe.Glm4vMoeTextExperts": SILU,
    "glm5_next.Glm5NextTextExperts": SwiGLU(limit=10.0),
    "glm_moe_dsa.GlmMoeDsaExperts": SILU,
    "gpt_oss.GptOssExperts": GPT_OSS,
    "granitemoe.GraniteMoeExperts": SILU,
    "granitemoe_swa.GraniteMoeSWAExperts": SILU,
    "granitemoehybrid.GraniteMoeHybridExperts": SILU,
    "granitemoeshared.GraniteMoeSharedExperts": SILU,
    "hunyuan_v1_moe.HunYuanMoEV1Experts": SILU,
    "hy_v3.HYV3Experts": SILU,
    "hy_v4.HYV4Experts": SwiGLU(limit=10.0),
    "hy_v4_vl.HYV4VLExperts": SwiGLU(limit=10.0),
    "inkling.InklingExperts": SILU,
    "inkling.InklingSharedExperts": UNKNOWN,
    "inkling2.Inkling2Experts": OTHER,  # soft caps
    "inkling2_loop.Inkling2LoopExperts": OTHER,
    "jamba.JambaExperts": SILU,
    "jetmoe.JetMoeParallelExperts": UNKNOWN,
    "kimi_linear.KimiLinearExperts": SILU,
    "kolibri1.Kolibri1Experts": SILU,
    "laguna.LagunaExperts": SILU,
    "lara_mini.LaraMiniExperts": SILU,
    "lfm2_moe.Lfm2MoeExperts": SILU,
    "llama4.Llama4TextExperts": r"its forward refuses tokens, expert ids and weights: TypeError: .*takes 2 positional",
    "longcat_flash.LongcatFlashExperts": "differ in the number of experts",  # some experts have no weights
    "mellum.MellumExperts": SILU,
    "mimo_v2_flash.MiMoV2FlashExperts": SILU,
    "minimax.MiniMaxExperts": SILU,
    "minimax_m2.MiniMaxM2Experts": SILU,
    "minimax_m3_vl.MiniMaxM3VLExperts": GPT_OSS,
    "mistral4.Mistral4Experts": SILU,
    "mistral_large4.MistralLarge4TextExperts": SILU,
    "mixtral.MixtralExperts": SILU,
    "muse_spark.MuseSparkExperts": r"QuantExperts cannot hold its post_expert_norm\.weight",
    "nemotron_h.NemotronHExperts": UNKNOWN,  # has no gate
    "olmoe.OlmoeExperts": SILU,
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": GPT_OSS,
    "phimoe.PhimoeExperts": SILU,
    "qwen2_moe.Qwen2MoeExperts": SILU,
    "qwen3_5_moe.Qwen3_5MoeExperts": SILU,
    "qwen3_moe.Qwen3MoeExperts": SILU,
    "qwen3_next.Qwen3NextExperts": SILU,
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": SILU,
    "qwen3_omni_moe.Qwen3OmniMoeThinkerTextExperts": SILU,
    "qwen3_vl_moe.Qwen3VLMoeTextExperts": SILU,
    "qwen4_exp.Qwen4ExpTextExperts": SILU,
    "solar_open.SolarOpenExperts": SILU,
    "step3p7.Step3p7Experts": SILU,  # without a limit
    "unlimited_ocr.UnlimitedOcrTextExperts": SILU,
    "zaya.ZayaExperts": SILU,
}
"""Gate of each class with the limits of its default configuration, or the reason that the class is not replaced."""


def classes_of_experts() -> list[str]:
    """Return all classes in transformers that own parameters and whose names contain "Experts"."""
    found = []
    for path in sorted((Path(transformers.__path__[0]) / "models").glob("*/modeling_*.py")):
        for each in re.finditer(
            r"^class (\w*Experts\w*)\(.*?(?=^\S)", path.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            if "nn.Parameter(" in each[0]:
                found.append(f"{path.parent.name}.{each[1]}")
    return found


def test_the_table_is_complete():
    if not transformers.__version__.startswith(VERSION):
        pytest.skip(f"transformers is {transformers.__version__}, the table lists {VERSION}")
    assert sorted(EXPERTS) == sorted(classes_of_experts()) and len(EXPERTS) == 73


def built(name: str, **settings: object) -> nn.Module:
    """Return a module of experts in float64, with small sizes, and weights that MXFP4 represents exactly."""
    folder, _, kind = name.partition(".")
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {folder}")
    cls = functools.partial(getattr(module, kind), **MORE.get(kind, {}))
    experts = cls(E, H, I) if kind == "JetMoeParallelExperts" else cls(configuration(module, kind, **settings))
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 16
    for parameter in experts.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data = signs * magnitudes[torch.randint(0, 8, parameter.shape, generator=generator)]
    return experts.double().eval()


def configuration(module: object, kind: str, **settings: object):
    """Return the default configuration of a class of experts, changed to small sizes."""
    configs = [each for name, each in vars(module).items() if name.endswith("Config") and isinstance(each, type)]

    def like(config: type) -> int:
        prefix = config.__name__.removesuffix("Config")
        return len(prefix) if kind.startswith(prefix) else 0

    for each in sorted(configs, key=like, reverse=True):
        config = each()
        for name, value in {**SIZES, **settings}.items():
            if hasattr(config, name) or name in settings:
                setattr(config, name, [value] * 2 if isinstance(getattr(config, name, None), list) else value)
        try:
            getattr(module, kind)(config, **MORE.get(kind, {}))
        except AttributeError:  # this configuration describes several models, so try another class
            continue
        return config
    raise AssertionError(f"no configuration for {kind} in {[each.__name__ for each in configs]}")


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, expert ids and routing weights. Some gate and up values exceed all limits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, H, generator=generator) * torch.tensor([0.3, 1, 3, 6, 12, 25, 50, 100, 200])[:, None]
    ids = torch.stack([torch.randperm(E, generator=generator)[:TOPK] for _ in range(len(x))])
    return x.bfloat16(), ids, torch.rand(len(x), TOPK, generator=generator)


def quantised(experts: nn.Module) -> nn.ModuleDict:
    return quantise_without_warnings(nn.ModuleDict({"experts": experts}), "mxfp4")


def quantise_without_warnings(model: nn.ModuleDict, scheme: str) -> nn.ModuleDict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_(model, scheme)


@torch.no_grad()
def assert_equal_results(experts: nn.Module, swiglu: SwiGLU) -> None:
    """Check that quantised experts with exact weights and 16-bit activations give the same results as the module."""
    x, ids, weights = routed()
    want = experts(x.double(), ids, weights.double())
    new = quantised(experts.bfloat16()).experts
    assert isinstance(new, QuantExperts) and new.swiglu == swiglu
    got = new.route_few_()(x, ids, weights).double()
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.amax() < 0.008, errors


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    experts, expected = built(name), EXPERTS[name]
    if len(inspect.signature(type(experts).forward).parameters) != 4:  # self, tokens, ids, weights
        pytest.skip(f"in transformers {transformers.__version__} its forward takes other arguments")
    if isinstance(expected, SwiGLU):
        assert_equal_results(experts, expected)
        return
    model = quantised(experts.bfloat16())
    assert model.experts is experts and re.search(expected, summary(model).left["experts"])


@pytest.mark.parametrize(
    ("name", "settings", "swiglu"),
    [
        ("deepseek_v4.DeepseekV4Experts", {"swiglu_limit": 25.0}, SwiGLU(limit=25.0)),
        ("hy_v4.HYV4Experts", {"swiglu_limit": 3.0}, SwiGLU(limit=3.0)),
        ("minimax_m3_vl.MiniMaxM3VLExperts", {"swiglu_limit": 20.0, "swiglu_alpha": 1.5}, SwiGLU(1.5, 1.0, 20.0)),
        ("gpt_oss.GptOssExperts", {"swiglu_limit": 50.0, "swiglu_alpha": 1.0}, SwiGLU(1.0, 1.0, 50.0)),
        ("longcat_flash.LongcatFlashExperts", {"zero_expert_num": 0}, SILU),
    ],
)
def test_other_settings(name, settings, swiglu):
    if not transformers.__version__.startswith(VERSION):
        pytest.skip(f"transformers is {transformers.__version__}; {VERSION} reads these settings")
    assert_equal_results(built(name, **settings), swiglu)


def test_a_clamp_after_the_activation_is_no_swiglu():
    """Check that Step-3.7's gate is not mistaken for a SwiGLU. Step-3.7 clamps silu(gate), but SwiGLU clamps the gate.
    At a limit of 7 the results differ by 0.1 %."""
    experts = built("step3p7.Step3p7Experts")
    experts.limit = 7.0
    assert OTHER in float_experts(experts).verified()


@pytest.mark.parametrize("name", ["deepseek_v4.DeepseekV4Experts", "gpt_oss.GptOssExperts", "gemma4.Gemma4TextExperts"])
def test_experts_on_meta(name):
    """Check that the trial gives the same answer for modules on the meta device."""
    experts = built(name).to("meta")
    found = float_experts(experts).verified()
    assert found == EXPERTS[name] if isinstance(EXPERTS[name], SwiGLU) else EXPERTS[name] in found


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_implementations(implementation):
    """Check that experts with any of transformers' own implementations are replaced, and that experts with a registered
    implementation are not replaced, because it computes another function."""
    experts = built("mixtral.MixtralExperts")
    experts.config._experts_implementation = implementation
    assert float_experts(experts).verified() == SILU
    ALL_EXPERTS_FUNCTIONS.register(
        "doubled", lambda self, x, ids, weights: 2 * type(self).forward.__wrapped__(self, x, ids, weights)
    )
    experts.config._experts_implementation_internal = "doubled"
    assert OTHER in float_experts(experts).verified()


# Routers

ROUTERS = {
    "afmoe.AfmoeSparseMoeBlock": {"router.gate"},
    "dbrx.DbrxFFN": {"router.layer"},
    "diffusion_gemma.DiffusionGemmaTextRouter": {"proj"},
    "doge.DogeCDMoE": {"router_gate"},
    "gemma3n.Gemma3nTextAltUp": {"modality_router"},
    "gemma4.Gemma4TextRouter": {"proj"},
    "hunyuan_v1_moe.HunYuanMoEV1Moe": {"gate.wg"},
    "jetmoe.JetMoeMoE": {"router.layer"},
    "longcat_flash.LongcatFlashMoE": {"router.classifier"},
    "nllb_moe.NllbMoeSparseMLP": {"router.classifier"},
    "qwen2_moe.Qwen2MoeSparseMoeBlock": {"shared_expert_gate"},
    "qwen3_5_moe.Qwen3_5MoeSparseMoeBlock": {"shared_expert_gate"},
    "qwen3_next.Qwen3NextSparseMoeBlock": {"shared_expert_gate"},
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextSparseMoeBlock": {"shared_expert_gate"},
    "qwen4_exp.Qwen4ExpTextSparseMoeBlock": {"shared_expert_gate"},
    "switch_transformers.SwitchTransformersSparseMLP": {"router.classifier"},
    "zaya.ZayaSparseMoeBlock": {f"gate.{each}" for each in ("down_proj", "router_mlp.fc1", "router_mlp.fc2")}
    | {"gate.router_mlp.out_proj"},
}
"""Linear layers that take part in choosing experts, keyed by the class of the module that contains them."""


def test_the_table_of_routers_is_complete():
    """Check that the table lists each class with a linear layer that routes to experts or gates a shared expert."""
    if not transformers.__version__.startswith(VERSION):
        pytest.skip(f"transformers is {transformers.__version__}, the table lists {VERSION}")
    linear = re.compile(
        r"nn\.Linear\([^)]*(num_experts|n_routed_experts|num_local_experts)"
        r"|(router|shared_expert)\w*_?gate\w* = \S*nn.Linear|\w*router = nn.Linear"
    )
    folders = {
        path.parent.name
        for path in (Path(transformers.__path__[0]) / "models").glob("*/modeling_*.py")
        if linear.search(path.read_text("utf-8"))
    }
    assert folders == {name.partition(".")[0] for name in ROUTERS}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    folder, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        config = configuration(module, kind, shared_expert_intermediate_size=I)
        model = nn.ModuleDict({"mlp": getattr(module, kind)(config, **MORE.get(kind, {}))})
    linears = {key: type(each) for key, each in model.named_modules() if isinstance(each, nn.Linear)}
    routers = {f"mlp.{each}" for each in ROUTERS[name]}
    assert routers <= linears.keys()
    model = quantise_without_warnings(model, "fp8_channel")
    stayed = {key for key, each in model.named_modules() if isinstance(each, nn.Linear)}
    left = summary(model).left
    # In T5 and NLLB, the input of second layers is converted to the dtype of their weight, so these layers stay.
    assert routers == {key for key in stayed if "reads its weight" not in left[key]}
    assert all(left[key] == "it is a router" for key in routers)


# Whole models

SMALL = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 0,
}


def on_meta(config: object) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_conv1d_of_gpt2():
    model = on_meta(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64))
    with pytest.warns(UserWarning) as warned:
        quantize_(model)
    names = [
        f"transformer.h.{i}.{each}"
        for i in range(2)
        for each in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    reason = "Conv1D is neither nn.Linear nor experts with gate_up_proj and down_proj"
    assert str(warned[0].message) == f"quantize_: modules stay unchanged. {', '.join(names)}: {reason}"
    assert "nothing was replaced in this GPT2LMHeadModel" in str(warned[1].message)


def test_llama_4():
    config = transformers.Llama4TextConfig(**SMALL, num_local_experts=8, intermediate_size_mlp=I, head_dim=16)
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.feed_forward\.experts: its forward refuses tokens"):
        model = quantize_(on_meta(config))
    assert summary(model).left["model.layers.0.feed_forward.router"] == "it is a router"


def test_a_config_of_an_odd_size():
    """Check that layers of unsupported sizes are named, and that the summary's bytes include them unquantised."""
    config = transformers.LlamaConfig(**{**SMALL, "intermediate_size": 500})
    names = ", ".join(f"model.layers.0.mlp.{each}_proj" for each in ("gate", "up"))
    with pytest.warns(
        UserWarning, match=rf"from_config: .* {re.escape(names)}: out_features is 500; expected a positive"
    ):
        model = integration.from_config(config, device="cpu", merge=False)
    found = summary(model)
    assert "in_features is 500" in found.left["model.layers.0.mlp.down_proj"]
    assert {*found.replaced} == {f"model.layers.0.self_attn.{each}_proj" for each in "qkvo"}
    assert found.function == "from_config"
    # Four layers of an attention block are quantised. Each layer consists of codes, scales (64 rows padded to a tile of
    # 128) and a global scale.
    assert found.bytes_before - found.bytes_after == 4 * H * H * 2 - 4 * (H * H // 2 + 128 * H // 16 + 4)


def test_summary_of_loaded_checkpoints(tmp_path, caplog):
    """Check that our ``from_pretrained`` and transformers' own record what was replaced, and the sizes in bytes before
    and after."""
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
    model = quantise_without_warnings(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), "nvfp4"
    )
    checkpoint.save(model, tmp_path, "modelopt")
    replaced = summary(model).replaced
    with caplog.at_level(logging.INFO, logger="torch_cute_ops"):
        loaded = integration.from_pretrained(tmp_path, device="cpu", progress=False, merge=False)
    integration.register(merge=False)
    try:
        registered = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        integration.unregister()
    for each, name in ((loaded, "load_"), (registered, "register")):
        found = summary(each)
        assert found.replaced == replaced and found.left == {"lm_head": "the checkpoint does not quantise it"}
        assert (found.function, found.bytes_before) == (name, summary(model).bytes_before)
        assert found.bytes_after == summary(model).bytes_after < 0.7 * found.bytes_before
    assert (
        sum(
            message.startswith("load_: 5 replaced (4 by NVFP4Linear, 1 by QuantExperts), 1 unchanged; ")
            for message in caplog.messages
        )
        == 1
    )
