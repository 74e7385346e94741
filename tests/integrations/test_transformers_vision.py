"""Vision-language models of transformers, whose checkpoints name tensors differently from the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from support.decoded_models import decode_layers
from transformers import AutoModelForImageTextToText, Gemma3Config, Mistral3Config

from torch_cute_ops import checkpoint
from torch_cute_ops.integrations import transformers as integration
from torch_cute_ops.nn import QuantLinear, quantize_

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CONFIGS = {
    "gemma-3": Gemma3Config(
        text_config=TEXT, vision_config=VISION, image_token_index=90, boi_token_index=91, eoi_token_index=92,
        mm_tokens_per_image=4,
    ),
    "mistral-3": Mistral3Config(
        text_config={"model_type": "mistral", **TEXT}, image_token_index=90,
        vision_config={"model_type": "pixtral", **VISION, "head_dim": 32},
    ),
}  # fmt: skip
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.randint(1, 80, (2, 9), generator=torch.Generator().manual_seed(0))
PATTERNS = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def published(name: str) -> str:
    """Return a tensor's name in the published checkpoints of these models, which llm-compressor and ModelOpt also
    use."""
    return next((name.replace(*each, 1) for each in PATTERNS.items() if name.startswith(each[0])), name)


def saved(config, path: Path, style: str) -> nn.Module:
    """Save a checkpoint with published names and a quantised language model; return the model with the decoded
    weights."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    quantize_(model, "nvfp4", ignore=("lm_head", "*vision*", "*multi_modal*"))
    checkpoint.save(model, path, style)
    decode_layers(model, torch.bfloat16)
    file = path / "model.safetensors"
    save_file({published(name): each for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    document = json.loads((path / "config.json").read_text())
    quantization = document["quantization_config"]
    quantization["ignore"] = [published(f"{name}.")[:-1] for name in quantization["ignore"]]
    (path / "config.json").write_text(json.dumps(document))
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits.float()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.9999


@by_config
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
def test_published_names(config, style, tmp_path):
    """Check that our and transformers' ``from_pretrained`` load models that give the logits of the decoded weights."""
    want = logits(saved(config, tmp_path / "x", style))
    model = integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 2 * 4
    assert_near(logits(model), want)
    integration.register()
    try:
        registered, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "x", output_loading_info=True)
    finally:
        integration.unregister()
    assert not any(info.values()), info
    assert torch.equal(logits(registered), logits(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), registered.state_dict()[name].view(torch.uint8)), name
    original = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():  # position ids, frequencies, and scales of embeddings
        if "vision" in name or "rotary" in name or "embed_scale" in name:
            assert torch.equal(buffer, original.get_buffer(name)), name


@by_config
def test_messages_name_the_checkpoint(config, tmp_path):
    """Check that an error about a missing tensor of a quantised layer uses the checkpoint's name."""
    saved(config, tmp_path / "x", "modelopt")
    file = tmp_path / "x" / "model.safetensors"
    lost = "language_model.model.layers.1.mlp.up_proj.weight_scale_2"
    save_file({name: each for name, each in load_file(file).items() if name != lost}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"contains no \S*language_model\.\S*layers\.1\.mlp\.up_proj\.weight_scale_2"):
        integration.from_pretrained(tmp_path / "x", device="cpu", progress=False)


@by_config
def test_random_weights(config):
    model = integration.from_config(config, device="cpu", ignore=("lm_head", "*vision*", "*multi_modal*"))
    assert logits(model).isfinite().all()
