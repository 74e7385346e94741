"""Modules that store experts in two parameters, as Hugging Face models do, and expected results of experts in
float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support import layers, spec, weights
from torch_cute_ops.nn import QuantExperts

E, H, I, TOPK = 4, 256, 128, 2  # noqa: E741
GPT_OSS = (1.702, 1.0, 7.0)


class _Forward(nn.Module):
    """Base class with the forward of experts: a loop over tokens and their experts, in the dtype of the weights."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden_states)
        for token, (experts, factors) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
            for expert, factor in zip(experts, factors, strict=True):
                if 0 <= expert < len(self.down_proj):
                    total[token] += (factor * self.expert(hidden_states[token], expert)).to(total.dtype)
        return total


class Experts(_Forward):
    """Experts whose gate rows come before their up rows."""

    def __init__(self, experts: int = E, hidden: int = H, width: int = I, act_fn: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) / 8)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) / 8)
        self.act_fn = act_fn or nn.SiLU()

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the result of one expert for one token (H,)."""
        gate, up = (self.gate_up_proj[expert] @ x).chunk(2)
        return self.down_proj[expert] @ (self.act_fn(gate) * up)


class GptOssExperts(_Forward):
    """Experts as in gpt-oss: transposed parameters, alternating gate and up rows, biases, and a modified gate."""

    def __init__(self, experts: int = E, hidden: int = H, width: int = I) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, hidden, 2 * width) / 4)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / 8)
        self.down_proj_bias = nn.Parameter(torch.randn(experts, hidden))
        self.is_transposed, self.is_concatenated = True, False
        self.alpha, _, self.limit = GPT_OSS

    def expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the result of one expert for one token (H,)."""
        both = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
        gate, up = both[::2].clamp(max=self.limit), both[1::2].clamp(-self.limit, self.limit)
        hidden = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        return hidden @ self.down_proj[expert] + self.down_proj_bias[expert]


class Block(nn.Module):
    """A router and experts between two linear layers."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate = SimpleNamespaceModule(top_k=TOPK)
        self.mlp.experts = experts
        self.o_proj = nn.Linear(H, H, bias=False)
        self.config = SimpleNamespace()


class SimpleNamespaceModule(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def ops_of(experts: QuantExperts, *given: torch.Tensor) -> set[str]:
    """Call the experts and return the names of this package's ops that ran."""
    called: set[str] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "cute":
                called.add(func.__name__.removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with Seen():
        experts(*given)
    return called


def decoded(experts: QuantExperts) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights (E, 2I, H) and (E, H, I), decoded from the state dict."""
    count = experts.experts
    stacks = ((layer.tensors(), layer.parts) for layer in (experts.gate_up_proj, experts.down_proj))
    gate_up, down = (
        weights.decoded({name: each.cpu() for name, each in tensors.items()}, parts) for tensors, parts in stacks
    )
    return gate_up.reshape(count, -1, gate_up.shape[1]), down.reshape(count, -1, down.shape[1])


def multiplied(experts: QuantExperts) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights (E, 2I, H) and (E, H, I) by which FP8 activations are multiplied: FP4 weights are re-encoded
    in FP8."""
    if "fp8" in experts.scheme:
        return decoded(experts)
    gate_up, down = (
        layers.recoded({name: each.cpu() for name, each in layer.tensors().items()}, layer, experts.has_token_scales)
        for layer in (experts.gate_up_proj, experts.down_proj)
    )
    return gate_up.reshape(experts.experts, -1, gate_up.shape[1]), down.reshape(experts.experts, -1, down.shape[1])


def computed(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    gate_up: np.ndarray,
    down: np.ndarray,
    biases: tuple[np.ndarray, np.ndarray] | None = None,
    swiglu: tuple[float, float, float | None] = (1.0, 0.0, None),
    *,
    in_16_bits: bool = False,
    granularity: str = "block128",
) -> np.ndarray:
    """Return the expected weighted sum of each token's experts, (M, H), with FP8 activations of this granularity, or
    with 16-bit activations. Results are rounded as by the ops: after both GEMMs with FP8, and before the second GEMM
    with 16 bits."""
    alpha, beta, limit = swiglu
    rows = x.double().cpu().numpy() if in_16_bits else in_fp8(x.float().cpu().numpy(), granularity)
    total = np.zeros((len(rows), down.shape[1]))
    for token, (own, own_factors) in enumerate(zip(ids.tolist(), factors.double().tolist(), strict=True)):
        for expert, factor in zip(own, own_factors, strict=True):
            if not 0 <= expert < len(down):
                continue
            both = gate_up[expert] @ rows[token] + (0 if biases is None else biases[0][expert])
            both = both if in_16_bits else rounded(both, x.dtype)
            gate, up = np.split(both, 2)
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
            hidden = rounded(hidden, x.dtype) if in_16_bits else in_fp8(hidden.astype(np.float32)[None], granularity)[0]
            result = down[expert] @ hidden + (0 if biases is None else biases[1][expert])
            total[token] += factor * (result if in_16_bits else rounded(result, x.dtype))
    return total


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).double().numpy()


def in_fp8(rows: np.ndarray, granularity: str = "block128") -> np.ndarray:
    """Round float64 rows to FP8, with one scale per 128 elements, per row (``"token"``), or per 32 elements in MXFP8
    (``"block32"``), and decode them."""
    elements, scales = spec.quantise_fp8(rows, granularity, None)
    numbers = spec.scale_value(elements, "e4m3").astype(np.float64)
    if granularity == "token":
        return numbers * scales.astype(np.float64)
    if granularity == "block32":
        return numbers * spec.scale_value(scales, "ue8m0").astype(np.float64).repeat(32, 1)
    return numbers * scales.astype(np.float64).repeat(128, 1)[:, : rows.shape[1]]
