"""LoRA adapters on quantised layers in vLLM on a CPU, compared with PEFT, and layer by layer with float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import serving
import torch
from safetensors.torch import load_file, save_file
from serving import PROMPTS, differences, save, serve
from support import weights
from vllm.lora.layers import LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.request import LoRARequest

from torch_cute_ops.integrations import transformers as cute_transformers
from torch_cute_ops.integrations.peft import register
from torch_cute_ops.integrations.vllm import METHODS
from torch_cute_ops.integrations.vllm._linear import CuteLinearMethod

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
"""On a CPU, vLLM applies the last adapter slot to tokens without an adapter, so the third slot stays empty."""
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = ("q_proj", "v_proj", "up_proj")


def adapter(folder: Path, checkpoint: Path, rank: int, targets: tuple[str, ...]) -> Path:
    """Save a random adapter in PEFT's form, whose results are about as large as the layers' results."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        lead, _, last = name.rpartition(".")
        if lead.rpartition(".")[2] in targets and last in ("weight", "weight_packed"):
            n, k = tensor.shape[0], tensor.shape[1] * (2 if tensor.dtype == torch.uint8 else 1)
            tensors[f"base_model.model.{lead}.lora_A.weight"] = torch.randn(rank, k) / k**0.5
            tensors[f"base_model.model.{lead}.lora_B.weight"] = torch.randn(n, rank) / rank**0.5 / 2
    folder.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [*targets]}))
    return folder


def adapters(folder: Path, checkpoint: Path, some: tuple[str, ...] = SOME) -> list[LoRARequest]:
    """Save an adapter of all layers, and an adapter of some layers with another rank."""
    saved = (
        adapter(folder / "all", checkpoint, 8, ALL),
        adapter(folder / "some", checkpoint, 16, some),
    )
    return [LoRARequest(path.name, i, str(path)) for i, path in enumerate(saved, 1)]


@pytest.mark.parametrize(("scheme", "style", "of", "some"), [
    ("nvfp4", "modelopt", {"vocab_size": 504, "ignore": ()}, (*SOME, "lm_head")),
    ("mxfp4", "compressed-tensors", {"kind": "Qwen2"}, SOME),
])  # fmt: skip
def test_adapters(scheme, style, of, some, tmp_path, monkeypatch):
    """Check answers to prompts with two adapters and without an adapter, all in one batch: with a quantised and adapted
    output head, and with biases."""
    folder = save(tmp_path / "model", scheme, style, **of)
    requests = adapters(tmp_path, folder, some)
    served = serve(folder, adapters=[*requests, None], **OPTIONS)
    assert [*served.methods] == [CuteLinearMethod.__name__]
    for i, request in enumerate([*requests, None]):
        answers = served.answers[i : i + 1]
        monkeypatch.setattr(serving, "PROMPTS", PROMPTS[i : i + 1])
        base = model = cute_transformers.from_pretrained(folder, merge=False)
        if request is not None:
            wrong, apart = differences(base, answers)
            assert wrong > 1 and apart > 0.1, (wrong, apart)
            config = register(peft.LoraConfig.from_pretrained(request.lora_path))
            model = peft.PeftModel.from_pretrained(base, request.lora_path, config=config)
        wrong, apart = differences(model, answers)
        assert wrong == 0 and apart < 0.03, (request, wrong, apart)


class LayersAgree:
    """Check that each adapted layer computes ``x·Wᵀ + scaling·x·Aᵀ·Bᵀ``, where W is decoded in float64.

    Args:
        checkpoint: checkpoint of the model.
        requests: adapters 1 and 2.
        bound: largest relative error.
    """

    def __init__(self, checkpoint: Path, requests: list[LoRARequest], bound: float) -> None:
        self.tensors = load_file(checkpoint / "model.safetensors")
        self.adapters = [load_file(Path(each.lora_path) / "adapter_model.safetensors") for each in requests]
        self.bound, self.count = bound, 0

    @torch.no_grad()
    def __call__(self, model: Any) -> None:
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseLinearLayerWithLoRA):
                continue
            assert isinstance(layer.base_layer.quant_method, CuteLinearMethod), name
            lead, _, last = name.rpartition(".")
            names = [f"{lead}.{part}" for part in MERGED.get(last, (last,))]
            x = torch.randn(6, layer.input_size).bfloat16()
            rows, tokens = x.double().numpy(), (0, 1, 2, 1, 2, 2)  # adapter of each token; 0 for none
            for is_prefill in (False, True):
                mapping = (0, 1, 1, 2, 2, 2) if is_prefill else tokens  # a prompt's tokens follow each other
                sequences = (0, 1, 2) if is_prefill else mapping
                model.lora_manager.set_adapter_mapping(LoRAMapping(mapping, sequences, is_prefill=is_prefill))
                got = layer.apply(x).double().numpy()
                want = np.concatenate([self.expected(rows, mapping, part) for part in names], 1)
                assert np.linalg.norm(got - want) < self.bound * np.linalg.norm(want), (name, is_prefill)
            self.count += 1

    def expected(self, x: np.ndarray, mapping: tuple[int, ...], name: str) -> np.ndarray:
        """Return the result of a layer of the checkpoint with each row's adapter."""
        result: np.ndarray = x @ self.weight(name).T
        for row, number in enumerate(mapping):
            given = self.adapters[number - 1] if number else {}
            down, up = (given.get(f"base_model.model.{name}.lora_{each}.weight") for each in "AB")
            if down is not None and up is not None:
                result[row] += 2 * (up.double() @ (down.double() @ torch.from_numpy(x[row]))).numpy()
        return result

    def weight(self, name: str) -> np.ndarray:
        """Decode a weight of the checkpoint."""
        tensors = {
            key.removeprefix(f"{name}."): tensor for key, tensor in self.tensors.items() if key.startswith(f"{name}.")
        }
        scale = tensors["weight_scale"]
        if "weight_packed" in tensors:
            return weights.fp4(tensors["weight_packed"], scale)
        if tensors["weight"].dtype == torch.uint8:
            return weights.fp4(tensors["weight"], scale, float(tensors["weight_scale_2"]))
        is_block = scale.dim() == 2 and scale.shape[1] > 1
        return (weights.fp8_blocks if is_block else weights.fp8_rows)(tensors["weight"], scale)


@pytest.mark.parametrize(("scheme", "style", "activations", "width", "bound"), [
    ("nvfp4", "modelopt", "auto", 512, 2**-7), ("mxfp4", "compressed-tensors", "fp8", 512, 0.05),
    ("fp8_block", "compressed-tensors", "auto", 512, 0.05), ("fp8_channel", "compressed-tensors", "auto", 500, 0.05),
])  # fmt: skip
def test_layers(scheme, style, activations, width, bound, tmp_path):
    """Check each layer, also a layer of width 500, which is decoded when it is loaded."""
    folder = save(tmp_path / "model", scheme, style, intermediate_size=width)
    requests = adapters(tmp_path, folder)
    check = LayersAgree(folder, requests, bound)
    serve(folder, METHODS[activations], check, adapters=[*requests, None], **OPTIONS)
    assert check.count == 8
