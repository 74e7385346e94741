"""Find unquantised experts in models, check that ``QuantExperts`` computes the same function, and quantise them."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.nn._names import reason_bound
from torch_cute_ops.nn._trial import found_swiglu
from torch_cute_ops.nn.experts import FORMATS, QuantExperts, SwiGLU, stack


class FloatExperts(NamedTuple):
    """Experts of a layer that a module stores in the parameters ``gate_up_proj`` and ``down_proj``, as Hugging Face
    models do.

    Attributes:
        module: module that owns the parameters.
        experts: E.
        hidden: H.
        width: I.
        is_transposed: True if the parameters are (E, H, 2I) and (E, I, H) instead of (E, 2I, H) and (E, H, I).
        is_interleaved: True if rows of gate and up alternate; False if all gate rows come before all up rows.
        has_bias: True if the module also has ``gate_up_proj_bias`` (E, 2I) and ``down_proj_bias`` (E, H).
    """

    module: Any
    experts: int
    hidden: int
    width: int
    is_transposed: bool
    is_interleaved: bool
    has_bias: bool

    def halves(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Split dimension 0 of a tensor, which has length 2I, into gate and up."""
        return (both[0::2], both[1::2]) if self.is_interleaved else (both[: self.width], both[self.width :])

    def weights(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return gate (I, H), up (I, H) and down (H, I) of an expert."""
        both, down = (each[expert].detach() for each in (self.module.gate_up_proj, self.module.down_proj))
        if self.is_transposed:
            both, down = both.t(), down.t()
        return *self.halves(both), down

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of all experts: gate and up (E · 2I,), with each expert's gate first, and down (E · H,).
        Return None for both if the experts have no biases."""
        if not self.has_bias:
            return None, None
        both, down = self.module.gate_up_proj_bias.detach(), self.module.down_proj_bias.detach()
        return torch.cat(self.halves(both.t())).t().flatten(), down.flatten()

    def verified(self) -> SwiGLU | str:
        """Return the gate with which :class:`QuantExperts` computes the same as the module, or the reason why none was
        found.

        The module's forward is run on random tokens, so its code need not be known. The comparison covers the gate, the
        order of gate and up, biases, norms, factors, and the order of the arguments.
        """
        bound = next(filter(None, map(reason_bound, self.module.modules())), None)
        return bound or self._reason_more_parameters() or found_swiglu(self)

    def _reason_more_parameters(self) -> str | None:
        known = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if self.has_bias else set())
        more = [name for name, _ in self.module.named_parameters() if name not in known]
        return f"QuantExperts cannot hold its {', '.join(more)}" if more else None


def float_experts(module: nn.Module) -> FloatExperts | None:
    """Describe the experts in a module, or return None if the module stores no experts in this way."""
    found = experts_or_reason(module)
    return found if isinstance(found, FloatExperts) else None


def experts_or_reason(module: nn.Module) -> FloatExperts | str | None:
    """Describe the experts in a module. If the parameters have the expected names but an unknown layout, return a text
    that says why. Return None if the module lacks these parameters."""
    gate_up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return None
    experts, *sizes = down.shape
    shapes = f"gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)}"
    if gate_up.shape[0] != experts:
        return f"{shapes} differ in the number of experts"
    is_fitting = {
        is_transposed: gate_up.shape[1:] == ((hidden, 2 * width) if is_transposed else (2 * width, hidden))
        for is_transposed, (width, hidden) in ((False, sizes[::-1]), (True, sizes))
    }
    # Without the attribute, decide by the shapes. They fit only one orientation, because gate_up_proj contains two
    # matrices and down_proj one.
    is_transposed = bool(getattr(module, "is_transposed", is_fitting[True] and not is_fitting[False]))
    if not is_fitting[is_transposed]:
        return f"{shapes} fit no H and I"
    width, hidden = sizes if is_transposed else reversed(sizes)
    is_interleaved = not getattr(module, "is_concatenated", True)
    biases = [module._parameters.get(f"{name}_bias") for name in ("gate_up_proj", "down_proj")]
    has_bias = all(bias is not None for bias in biases)
    return FloatExperts(module, experts, hidden, width, is_transposed, is_interleaved, has_bias)


def topk_of(model: nn.Module, name: str) -> int | None:
    """Return the number of experts per token of the experts module ``name``, or None if unknown.

    The number is read from the parent module, the parent's router, or the model's configuration.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    config: Any = getattr(model, "config", None)
    found = [getattr(each, "top_k", None) for each in (parent, *parent.children())]
    found += [getattr(config, key, None) for key in ("num_experts_per_tok", "moe_topk")]
    return next((each for each in found if isinstance(each, int) and 1 <= each <= MAX_TOPK), None)


def linear_of(weight: Tensor) -> nn.Linear:
    """Wrap a weight (N, K) in a linear layer without bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def quantized_experts(
    given: FloatExperts,
    swiglu: SwiGLU,
    scheme: Literal["nvfp4", "mxfp4", "fp8_block", "fp8_channel", "mxfp8"],
    topk: int | None,
) -> QuantExperts:
    """Quantise the experts. In NVFP4, gate and up of an expert share a global scale, as serving engines require.

    Args:
        given: experts of sizes that ``reason_unsupported`` accepts.
        swiglu: result of ``given.verified()``.
        scheme: format of the weights.
        topk: as in :class:`QuantExperts`.
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
    return QuantExperts(
        stack(cls, given.hidden, parts[0], gate_up, device=device, bias=biases[0]),
        stack(cls, given.width, parts[1], down, device=device, bias=biases[1]),
        given.experts,
        swiglu=swiglu,
        topk=topk,
    )
