"""Find unquantised experts in models, and quantise them."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.nn.experts import FORMATS, QuantExperts, SwiGLU, reason_unsupported, stack


class FloatExperts(NamedTuple):
    """Module with the experts of a layer in parameters ``gate_up_proj`` and ``down_proj``, as in Hugging Face models.

    Attributes:
        module: module that owns the parameters.
        experts: E.
        hidden: H.
        width: I.
        is_transposed: True if the parameters are (E, H, 2I) and (E, I, H) instead of (E, 2I, H) and (E, H, I).
        is_interleaved: True if rows of gate and up alternate; False if all gate rows come before all up rows.
        has_bias: True if the module also has ``gate_up_proj_bias`` (E, 2I) and ``down_proj_bias`` (E, H).
        swiglu: parameters of the gate, or ``None`` if the gate is not SwiGLU.
    """

    module: Any
    experts: int
    hidden: int
    width: int
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool
    swiglu: SwiGLU | None

    def halves(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Split a tensor of length 2I in dimension 0 into gate and up."""
        return (both[0::2], both[1::2]) if self.is_interleaved else (both[: self.width], both[self.width :])

    def weights(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate (I, H), up (I, H) and down (H, I) of an expert."""
        both, down = (each[expert].detach() for each in (self.module.gate_up_proj, self.module.down_proj))
        if self.is_transposed:
            both, down = both.t(), down.t()
        return *self.halves(both), down

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of the two stacks: (E · 2I,), each expert's gate first, and (E · H,); or None for both."""
        if not self.has_bias:
            return None, None
        both, down = self.module.gate_up_proj_bias.detach(), self.module.down_proj_bias.detach()
        return torch.cat(self.halves(both.t())).t().flatten(), down.flatten()

    def reason_unsupported(self, scheme: str) -> str | None:
        """Return the reason that the experts cannot be quantised, or None."""
        if self.swiglu is None:
            return "its gate is not SwiGLU"
        return reason_unsupported(scheme, self.experts, self.hidden, self.width)


def float_experts(module: nn.Module) -> FloatExperts | None:
    """Return the description of a module's experts, or None if the module contains no experts in this form."""
    gate_up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return None
    is_transposed = bool(getattr(module, "is_transposed", False))
    experts, *sizes = down.shape
    width, hidden = sizes if is_transposed else reversed(sizes)
    if gate_up.shape != ((experts, hidden, 2 * width) if is_transposed else (experts, 2 * width, hidden)):
        return None
    is_interleaved = not getattr(module, "is_concatenated", True)
    has_bias = module._parameters.get("gate_up_proj_bias") is not None
    swiglu = _swiglu_of(module, is_interleaved)
    return FloatExperts(module, experts, hidden, width, is_transposed, is_interleaved, has_bias, swiglu)


def topk_of(model: nn.Module, name: str) -> int | None:
    """Return the number of experts per token for the experts ``name``, or None if unknown.

    Read from the parent module, its router, or the model's configuration.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    config: Any = getattr(model, "config", None)
    found = [getattr(each, "top_k", None) for each in (parent, *parent.children())]
    found += [getattr(config, key, None) for key in ("num_experts_per_tok", "moe_topk")]
    return next((each for each in found if isinstance(each, int) and 1 <= each <= MAX_TOPK), None)


def _swiglu_of(module: Any, is_interleaved: bool) -> SwiGLU | None:
    """Return the SwiGLU parameters that reproduce a module's gate, or None.

    Modules do not describe their gate, so it is compared on numbers with each candidate.
    """
    alpha, limit = (getattr(module, key, None) for key in ("alpha", "limit"))
    with torch.device("cpu"):
        numbers = torch.linspace(-20, 20, 37, dtype=torch.float32)
        gate, up = (each.flatten() for each in torch.meshgrid(numbers, numbers, indexing="ij"))
        both = torch.stack((gate, up), -1).flatten() if is_interleaved else torch.cat((gate, up))
        if hasattr(module, "_apply_gate"):
            got = module._apply_gate(both.unsqueeze(0))[0]
        elif hasattr(module, "act_fn"):
            got = module.act_fn(gate) * up
        else:
            return None
    candidates = [SwiGLU()]
    if isinstance(limit, (int, float)):
        candidates.append(SwiGLU(limit=limit))
        if isinstance(alpha, (int, float)):
            candidates.append(SwiGLU(alpha, 1.0, limit))
    return next((each for each in candidates if _is_gate(each, gate, up, got)), None)


def _is_gate(swiglu: SwiGLU, gate: Tensor, up: Tensor, got: Tensor) -> bool:
    want = swiglu.of(gate, up)
    return got.shape == want.shape and torch.allclose(got.float(), want, rtol=1e-4, atol=1e-5)


def linear_of(weight: Tensor) -> nn.Linear:
    """Return a linear layer without bias with this weight (N, K)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def quantized_experts(given: FloatExperts, scheme: Literal["nvfp4", "mxfp4", "fp8_block"], topk: int | None) -> Any:
    """Quantise experts. In NVFP4, gate and up of an expert share a global scale.

    Args:
        given: experts that ``reason_unsupported`` accepts.
        scheme: format of the weights.
        topk: argument of :class:`QuantExperts`.
    """
    cls: Any = FORMATS[scheme]
    device = given.module.gate_up_proj.device

    def gate_up(i: int) -> dict[str, Tensor]:
        both = given.weights(i // 2)[:2]
        own = {"amax": torch.maximum(*(each.abs().amax() for each in both))} if scheme == "nvfp4" else {}
        tensors: dict[str, Tensor] = cls.from_float(linear_of(both[i % 2]), **own).tensors()
        return tensors

    def down(i: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = cls.from_float(linear_of(given.weights(i)[2])).tensors()
        return tensors

    biases = given.biases()
    parts = [given.width] * (2 * given.experts), [given.hidden] * given.experts
    assert given.swiglu is not None
    return QuantExperts(
        stack(cls, given.hidden, parts[0], gate_up, device=device, bias=biases[0]),
        stack(cls, given.width, parts[1], down, device=device, bias=biases[1]),
        given.experts,
        swiglu=given.swiglu,
        topk=topk,
    )
