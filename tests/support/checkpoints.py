"""Write checkpoints of random numbers in the formats of various producers, and compute the weights to which they
decode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from support import weights
from torch_cute_ops.checkpoint._files import Files

Tensors = dict[str, torch.Tensor]

FP4_WEIGHT = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
NVFP4_WEIGHT = {**FP4_WEIGHT, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
MXFP4_WEIGHT = {**FP4_WEIGHT, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8_WEIGHT = {**FP4_WEIGHT, "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FP8_WEIGHT = {
    "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "block",
    "block_structure": [128, 128],
}  # fmt: skip
FP8_INPUT = {
    "num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group", "group_size": 128
}  # fmt: skip
FP8_TENSOR_WEIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
FP8_CHANNEL_WEIGHT = {**FP8_TENSOR_WEIGHT, "strategy": "channel"}
FP8_TENSOR_INPUT = {**FP8_TENSOR_WEIGHT}
FP8_TOKEN_INPUT = {**FP8_TENSOR_WEIGHT, "strategy": "token", "dynamic": True}


def compressed(fmt: str, weight: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weight, "input_activations": inputs}},
        "ignore": ["lm_head"],
        **more,
    }


class Kind(NamedTuple):
    """One way in which a producer quantises a checkpoint.

    Attributes:
        scheme: scheme of the layers, as the modules name it.
        quantization: quantisation section of ``config.json``.
        style: name of the producer, which determines the names of tensors.
        has_input_scale: True if the checkpoint contains scales of activations.
    """

    scheme: str
    style: str
    quantization: dict[str, Any]
    has_input_scale: bool = False


KINDS = {
    "modelopt W4A4": Kind(
        "nvfp4", "modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, True
    ),
    "modelopt W4A16": Kind(
        "nvfp4", "modelopt", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}
    ),
    "compressed-tensors NVFP4": Kind(
        "nvfp4",
        "compressed-tensors",
        compressed("nvfp4-pack-quantized", NVFP4_WEIGHT, {**NVFP4_WEIGHT, "dynamic": "local"}),
        True,
    ),
    "compressed-tensors NVFP4A16": Kind(
        "nvfp4", "compressed-tensors", compressed("nvfp4-pack-quantized", NVFP4_WEIGHT, None, transform_config={})
    ),
    "compressed-tensors MXFP4": Kind(
        "mxfp4",
        "compressed-tensors",
        compressed("mxfp4-pack-quantized", MXFP4_WEIGHT, {**MXFP4_WEIGHT, "dynamic": True}),
    ),
    "compressed-tensors FP8": Kind(
        "fp8_block", "compressed-tensors", compressed("float-quantized", FP8_WEIGHT, FP8_INPUT)
    ),
    "modelopt FP8 tensor": Kind(
        "fp8_tensor", "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, True
    ),
    "modelopt FP8 channel": Kind(
        "fp8_channel",
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
    ),
    "compressed-tensors FP8 tensor": Kind(
        "fp8_tensor",
        "compressed-tensors",
        compressed("float-quantized", FP8_TENSOR_WEIGHT, FP8_TENSOR_INPUT),
        True,
    ),
    "compressed-tensors FP8 channel": Kind(
        "fp8_channel", "compressed-tensors", compressed("float-quantized", FP8_CHANNEL_WEIGHT, FP8_TOKEN_INPUT)
    ),
    "DeepSeek FP8": Kind(
        "fp8_block",
        "deepseek",
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    # NVIDIA/Model-Optimizer, pull request 736; vLLM reads its scales as uint8 (N, K/32).
    "modelopt MXFP8": Kind(
        "mxfp8", "modelopt", {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
    ),
    # vllm-project/compressed-tensors, pull request 630
    "compressed-tensors MXFP8": Kind(
        "mxfp8", "compressed-tensors", compressed("mxfp8-quantized", MXFP8_WEIGHT, {**MXFP8_WEIGHT, "dynamic": True})
    ),
    # MiniMaxAI/MiniMax-M3-MXFP8, as the tests of lightseekorg/tokenspeed's loader describe it: scales in uint8, with
    # DeepSeek-V3's name
    "MiniMax MXFP8": Kind(
        "mxfp8",
        "deepseek",
        {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
            "ignored_layers": ["lm_head", "model.embed_tokens"],
        },
    ),
}


def random_layer(kind: Kind, n: int, k: int) -> tuple[Tensors, np.ndarray]:
    """Return a random layer (N, K): its tensors, keyed by the last component of their names, and its decoded weight in
    float64."""
    one = torch.rand(1) + 0.5
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    if kind.scheme == "fp8_block":
        elements = torch.randn(n, k).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
        if kind.style == "deepseek":
            return {"weight": elements, "weight_scale_inv": scale}, weights.fp8_blocks(elements, scale)
        return {"weight": elements, "weight_scale": scale.bfloat16()}, weights.fp8_blocks(elements, scale.bfloat16())
    if kind.scheme == "mxfp8":
        elements = torch.randn(n, k).to(torch.float8_e4m3fn)
        scale = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8)
        name = "weight_scale_inv" if kind.style == "deepseek" else "weight_scale"
        return {"weight": elements, name: scale}, weights.mxfp8(elements, scale)
    if kind.scheme in ("fp8_tensor", "fp8_channel"):
        elements = torch.randn(n, k).mul(50).to(torch.float8_e4m3fn)
        scale = (torch.rand(1 if kind.scheme == "fp8_tensor" else n) + 0.5) / 50
        if kind.style == "modelopt":
            tensors = {"weight": elements, "weight_scale": scale.squeeze()}
        else:
            scale = scale.bfloat16()
            tensors = {"weight": elements, "weight_scale": scale if len(scale) == 1 else scale.unsqueeze(1)}
        if kind.has_input_scale:
            tensors["input_scale"] = torch.tensor(0.01).to(scale).reshape(() if kind.style == "modelopt" else 1)
        return tensors, weights.fp8_rows(elements, scale)
    if kind.scheme == "mxfp4":
        scale = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8)
        return {"weight_packed": codes, "weight_scale": scale}, weights.fp4(codes, scale)
    scale = (torch.rand(n, k // 16) + 0.1).to(torch.float8_e4m3fn)
    if kind.style == "modelopt":
        tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": one.reshape(()) / 8}
        if kind.has_input_scale:
            tensors["input_scale"] = torch.tensor(0.01)
        return tensors, weights.fp4(codes, scale, one.double().numpy() / 8)
    tensors = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": one * 8}
    if kind.has_input_scale:
        tensors["input_global_scale"] = torch.tensor([100.0])
    return tensors, weights.fp4(codes, scale, 1 / (one.double().numpy() * 8))


def write(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Any, shards: int = 1) -> None:
    """Write these tensors as a checkpoint, with ``quantization`` in its ``config.json``."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "test"} | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mine = dict(sorted(tensors.items())[i::shards])
        save_file(mine, folder / file)
        where |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def gpt_oss_experts(
    experts: int, hidden: int, width: int, *, name: str = "mlp.experts", scales: tuple[int, int] = (118, 124)
) -> Tensors:
    """Return random tensors of the experts ``name`` as gpt-oss stores them, with scale bytes from
    ``range(*scales)``."""
    tensors = {}
    for part, n, k in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        rows = experts, n, k // 32
        tensors[f"{name}.{part}_blocks"] = torch.randint(256, (*rows, 16), dtype=torch.uint8)
        tensors[f"{name}.{part}_scales"] = torch.randint(*scales, rows, dtype=torch.uint8)
        tensors[f"{name}.{part}_bias"] = torch.randn(experts, n).bfloat16()
    return tensors


def note_reads(read: list[object]) -> None:
    """Append to ``read`` each tensor or slice that this process reads from a checkpoint from now on."""
    whole, part = Files.read, Files.read_slice
    Files.read = lambda files, name: read.append(name) or whole(files, name)
    Files.read_slice = lambda files, *which: read.append(which) or part(files, *which)
