"""Layers of routed experts of checkpoints, with their results in float64, for tests of the adapters for serving
engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support import checkpoints, weights
from support.engine_layers import stored_layer
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.nn.experts import SwiGLU

E, TOPK = 4, 2
GPT_OSS = LayerScheme("mxfp4", "gpt-oss", "16bit")
BOUNDS = {"16bit": 0.01, "fp8": 0.12, "fp4": 0.5}
"""Largest relative error, by the format of activations."""


class Stored:
    """Random experts: their tensors as a checkpoint stores them, and their weights in float64.

    Args:
        scheme: format.
        hidden, width: H and I.
        count: number of experts.
    """

    def __init__(self, scheme: LayerScheme, hidden: int, width: int, count: int = E) -> None:
        self.scheme, self.count = scheme, count
        self.gate_up_bias, self.down_bias = np.zeros((count, 2 * width)), np.zeros((count, hidden))
        if scheme is GPT_OSS:
            self.tensors = checkpoints.gpt_oss_experts(count, hidden, width, name="x", scales=(118, 122))
            both, down = (
                np.stack([weights.fp4(*pair) for pair in zip(
                    self.tensors[f"x.{part}_blocks"].flatten(2), self.tensors[f"x.{part}_scales"], strict=True
                )])
                for part in ("gate_up_proj", "down_proj")
            )  # fmt: skip
            bias = self.tensors["x.gate_up_proj_bias"].double().numpy()
            self.gate, self.up, self.down = both[:, 0::2], both[:, 1::2], down
            self.gate_up_bias = np.concatenate((bias[:, 0::2], bias[:, 1::2]), 1)
            self.down_bias = self.tensors["x.down_proj_bias"].double().numpy()
            return
        sizes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        self.experts = [{shard: stored_layer(scheme, *size) for shard, size in sizes.items()} for _ in range(count)]
        self.gate, self.up, self.down = (
            np.stack([each[shard][1] for each in self.experts]) for shard in ("w1", "w3", "w2")
        )

    def load(self, layer: Any, **options: Any) -> None:
        """Load the tensors in the same way as an engine.

        Args:
            layer: layer of the experts.
            options: further arguments of the engine's loader.
        """
        if self.scheme is GPT_OSS:
            self._load_gpt_oss(layer)
            return
        for expert, shards in enumerate(self.experts):
            for shard, (tensors, _) in shards.items():
                for name, tensor in tensors.items():
                    stored = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
                    parameter = getattr(layer, stored)
                    parameter.weight_loader(parameter, tensor, stored, shard_id=shard, expert_id=expert, **options)

    def _load_gpt_oss(self, layer: Any) -> None:
        moe = layer.moe_config
        block, ranks = 32, moe.tp_size
        most = -(-moe.intermediate_size // block // ranks) * block
        begin, end = moe.tp_rank * most, min((moe.tp_rank + 1) * most, moe.intermediate_size)
        codes = {part: self.tensors[f"x.{part}_blocks"].flatten(2) for part in ("gate_up_proj", "down_proj")}
        down_bias = self.tensors["x.down_proj_bias"] * (moe.tp_rank == 0)
        parts = {
            "w13_weight": codes["gate_up_proj"][:, 2 * begin : 2 * end],
            "w13_weight_scale": self.tensors["x.gate_up_proj_scales"][:, 2 * begin : 2 * end],
            "w13_bias": self.tensors["x.gate_up_proj_bias"][:, 2 * begin : 2 * end],
            "w2_weight": codes["down_proj"][..., begin // 2 : end // 2],
            "w2_weight_scale": self.tensors["x.down_proj_scales"][..., begin // block : end // block],
            "w2_bias": down_bias,
        }
        for name, tensor in parts.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, tensor, weight_name=name, shard_id=None, expert_id=None)

    def hidden(self, expert: int, row: np.ndarray, swiglu: SwiGLU) -> np.ndarray:
        """Compute an expert's activations between its two layers, (I,)."""
        gate_bias, up_bias = np.split(self.gate_up_bias[expert], 2)
        gate, up = self.gate[expert] @ row + gate_bias, self.up[expert] @ row + up_bias
        if swiglu.gate == "gelu_tanh":
            return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        if swiglu.limit is not None:
            gate, up = np.minimum(gate, swiglu.limit), np.clip(up, -swiglu.limit, swiglu.limit)
        return gate * (1 + np.tanh(swiglu.alpha * gate / 2)) / 2 * (up + swiglu.beta)

    def __call__(self, x: np.ndarray, ids: np.ndarray, factors: np.ndarray, swiglu: SwiGLU) -> np.ndarray:
        """Compute the weighted sum of each token's experts in float64."""
        y = np.zeros((len(x), self.down.shape[1]))
        for token, (row, chosen, given) in enumerate(zip(x, ids, factors, strict=True)):
            for expert, factor in zip(chosen, given, strict=True):
                h = self.hidden(expert, row, swiglu)
                y[token] += factor * (self.down[expert] @ h + self.down_bias[expert])
        return y


def routed(tokens: int, hidden: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random tokens, experts and weights."""
    ids = torch.rand(tokens, E, device=device).argsort(1)[:, :TOPK].to(torch.int32)
    return torch.randn(tokens, hidden, device=device).bfloat16(), ids, torch.rand(tokens, TOPK, device=device) + 0.1


def check(
    stored: Stored, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, got: Any, swiglu: SwiGLU, bound: float
) -> None:
    """Check that the overall relative error is below ``bound``, and the relative error of each token below twice
    ``bound``."""
    given = (each.cpu().numpy() for each in (x.double(), ids, factors.double()))
    want = stored(*given, swiglu)
    apart = got.double().cpu().numpy()[:, : want.shape[1]] - want
    assert np.linalg.norm(apart) < bound * np.linalg.norm(want)
    errors = np.linalg.norm(apart, axis=1) / np.linalg.norm(want, axis=1)
    assert errors.max() < 2 * bound, errors
