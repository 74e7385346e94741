"""LoRA adapters of PEFT on quantised models: adapters learn as on bf16 models, and can be saved and loaded."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from torch_cute_ops.integrations.peft import LoraQuantLinear, register
from torch_cute_ops.nn import NVFP4Linear, quantize_

IDS = torch.arange(32)[None] * 7 % 64
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**given):
    return register(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, **given))


def model_of() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()


def trained(model, device) -> tuple[PeftModel, list[float]]:
    """Train adapters for 20 steps on one sequence; return the model and the loss of each step."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Unsupported layer type")
        model = get_peft_model(model.to(device), config())
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses, ids = torch.optim.AdamW(adapters, lr=1e-2), [], IDS.to(device)
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8_block"])
def test_adapters_learn(scheme, device, tmp_path):
    """Check that the loss falls as with bf16, that only adapters change, and that a loaded adapter gives the same
    logits as before it was saved."""
    model = model_of()
    quantised = quantize_(copy.deepcopy(model), scheme)
    frozen = {name: each.clone() for name, each in quantised.state_dict().items()}
    _, plain = trained(copy.deepcopy(model), device)
    adapted, ours = trained(copy.deepcopy(quantised), device)
    assert plain[-1] < 0.75 * plain[0] and ours[-1] < 0.75 * ours[0]
    assert abs((ours[0] - ours[-1]) / (plain[0] - plain[-1]) - 1) < 0.1, (plain, ours)
    found = [each for each in adapted.modules() if isinstance(each, LoraQuantLinear)]
    assert len(found) == 2 * len(TARGETS)
    assert {each.dtype for each in adapted.parameters() if each.requires_grad} == {torch.float32}
    base = {name.replace("base_layer.", ""): each for name, each in adapted.unload().state_dict().items()}
    for name, each in frozen.items():
        assert torch.equal(base[name].cpu().view(torch.uint8), each.view(torch.uint8)), name


def test_saved_adapters(tmp_path):
    model = quantize_(model_of(), "nvfp4")
    adapted, _ = trained(copy.deepcopy(model), "cpu")
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path, config=register(LoraConfig.from_pretrained(tmp_path)))
    with torch.no_grad():
        want = adapted(input_ids=IDS).logits
        assert torch.equal(loaded(input_ids=IDS).logits, want)
        with adapted.disable_adapter():
            assert not torch.equal(adapted(input_ids=IDS).logits, want)


def test_refusals():
    """Check that adapters cannot be merged into quantised weights, and that variants that need the weight are
    refused."""
    model = quantize_(model_of(), "nvfp4")
    with pytest.raises(ValueError, match="LoraQuantLinear: use_dora needs the unquantised weight"):
        get_peft_model(copy.deepcopy(model), config(use_dora=True))
    adapted = get_peft_model(model, config())
    assert isinstance(adapted.get_base_model().model.layers[0].self_attn.q_proj.get_base_layer(), NVFP4Linear)
    with pytest.raises(NotImplementedError, match="adapters cannot be merged into a quantised weight"):
        adapted.merge_and_unload()
