"""Tensors that are derived from the weights of a :class:`QuantExperts`, as modules that its state dicts leave out."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats.expert_weights import moe_fc2_weight
from torch_cute_ops.formats.prepared_scales import prepare_scales
from torch_cute_ops.nn._base import moved

if TYPE_CHECKING:
    from torch_cute_ops.nn.experts import QuantExperts

FewActivations = Literal["16bit", "fp4", "fp4_token"]
"""Formats of the activations for ``QuantExperts.route_few_``."""
_SMALLEST_FACTOR: Final = 2.0**-100
"""Smallest factor of an expert with a bias. The bias is divided by the factor; a smaller divisor could overflow."""


class PreparedScales(nn.Module):
    """Prepared weight scales of both layers of a :class:`QuantExperts`, used if activations are scaled per token.

    The buffers ``gate_up_scale`` and ``down_scale``, uint8 (E, slabs, N, 256/block size), are in no state dict.
    """

    gate_up_scale: Tensor
    down_scale: Tensor

    def __init__(self, experts: "QuantExperts") -> None:
        super().__init__()
        for name, value in self._derived(experts).items():
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def renew(self, experts: "QuantExperts") -> None:
        """Compute the buffers again after weights changed, in place, because CUDA graphs may read them."""
        for name, value in self._derived(experts).items():
            self.get_buffer(name).copy_(value)

    def _derived(self, given: "QuantExperts") -> dict[str, Tensor]:
        layers: dict[str, Any] = {"gate_up_scale": given.gate_up_proj, "down_scale": given.down_proj}
        return {
            name: prepare_scales(
                layer.weight_scale,
                layer.out_features // given.experts,
                layer.in_features,
                experts=given.experts,
                block_size=layer.format.block_size,
            )
            for name, layer in layers.items()
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(lambda tensor: moved(fn, tensor), recurse)
        return self


class SideBySide(nn.Module):
    """Operands of the ops that compute only routed pairs, derived from the weights of a :class:`QuantExperts`.

    State dicts contain none of these buffers:

    - ``weight``, uint8 (H, E · I/2): the codes of all down layers, side by side.
    - ``weight_scale``: the 128x4 block scales of this matrix (H, E · I).
    - ``input_global_scale`` (1,) and ``hidden_global_scale`` (E,), float32: global scales of NVFP4 activations. For
      other activations both are ``None``; if each token has its own global scale, the first is ``None``.
    - ``alpha`` (E,) and ``gate_up_alpha`` (E, 2) float32, which undo global scales of weights and activations, or
      ``None``.
    - ``gate_up_bias`` (E, 2I) and ``bias`` (E, H) float32, or ``None``. ``bias`` is divided by ``alpha``, because the
      op multiplies it by ``alpha``.
    """

    weight: Tensor
    weight_scale: Tensor
    input_global_scale: Tensor | None
    hidden_global_scale: Tensor | None
    alpha: Tensor | None
    gate_up_alpha: Tensor | None
    gate_up_bias: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        experts: "QuantExperts",
        activations: FewActivations,
        input_scale: Tensor | None,
        hidden_scale: Tensor | None,
    ) -> None:
        super().__init__()
        self.activations = activations
        self.register_buffer("input_global_scale", input_scale, persistent=False)
        self.register_buffer("hidden_global_scale", hidden_scale, persistent=False)
        for name, value in self._derived(experts).items():
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def renew(
        self, experts: "QuantExperts", input_scale: Tensor | None = None, hidden_scale: Tensor | None = None
    ) -> None:
        """Compute the buffers again after weights or global scales changed. Overwrite the buffers in place, because
        CUDA graphs may read them."""
        self._write({"input_global_scale": input_scale, "hidden_global_scale": hidden_scale})
        self._write(self._derived(experts))

    def _write(self, values: Mapping[str, Tensor | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self.get_buffer(name).copy_(value)

    def _derived(self, given: "QuantExperts") -> dict[str, Tensor | None]:
        down: Any = given.down_proj
        tensors, count = down.tensors(), given.experts
        codes = tensors["weight"].unflatten(0, (count, -1))
        gate_up_bias, bias = (
            None if each.bias is None else each.bias.detach().float().view(count, -1).clone()
            for each in (given.gate_up_proj, down)
        )
        alpha, gate_up_alpha = tensors.get("weight_scale_2"), None
        if alpha is not None:
            gate_up_alpha = given.gate_up_proj.tensors()["weight_scale_2"].view(count, 2).clone()
            if self.input_global_scale is not None:
                gate_up_alpha = gate_up_alpha / self.input_global_scale
            if self.hidden_global_scale is not None:
                alpha = alpha / self.hidden_global_scale
            # An expert with an all-zero weight has the factor 0. Set its codes to 0 and its factor to 1: with a factor
            # of 0, no pair would be routed to the expert, and its bias would be lost.
            is_zero = alpha.abs() <= (0.0 if bias is None else _SMALLEST_FACTOR)
            alpha = torch.where(is_zero, 1.0, alpha)
            codes = codes.masked_fill(is_zero[:, None, None], 0)
            bias = None if bias is None else bias / alpha.unsqueeze(1)
        scale = tensors["weight_scale"].view(down.format.scale_dtype).unflatten(0, (count, -1))
        weight, scale = moe_fc2_weight(codes, scale)
        return {
            "weight": weight.mT,
            "weight_scale": scale,
            "alpha": alpha,
            "gate_up_alpha": gate_up_alpha,
            "gate_up_bias": gate_up_bias,
            "bias": bias,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(lambda tensor: moved(fn, tensor), recurse)
        return self
