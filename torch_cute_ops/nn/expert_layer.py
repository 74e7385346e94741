"""Mixture-of-experts layer: router, experts, and an optional shared expert."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.nn._base import QuantizedRows, QuantLinear, moved
from torch_cute_ops.nn._straight_through import needs_gradient
from torch_cute_ops.nn._tracing import one_node
from torch_cute_ops.nn.experts import QuantExperts, SwiGLU
from torch_cute_ops.ops._signature import Scoring
from torch_cute_ops.ops.moe_route import moe_route
from torch_cute_ops.ops.moe_route_dense import moe_route_dense
from torch_cute_ops.ops.silu_mul_fp4quant import silu_mul_fp4quant
from torch_cute_ops.ops.silu_mul_fp4quant_per_token import silu_mul_fp4quant_per_token
from torch_cute_ops.ops.silu_mul_fp8quant import silu_mul_fp8quant
from torch_cute_ops.reference.moe_route import choose_experts
from torch_cute_ops.runtime.dispatch import is_proxy

_GATES: Final[Mapping[str, Callable[..., tuple[Tensor, ...]]]] = {
    "fp4": silu_mul_fp4quant,
    "fp4_token": silu_mul_fp4quant_per_token,
    "fp8": silu_mul_fp8quant,
}
"""Op that gates and quantises rows, keyed by ``Quantization.to``."""


class GatedMLP(nn.Module):
    """Gated MLP of two quantised linear layers with a gate between them, such as a shared expert.

    If the second layer quantises its activations to FP4 or FP8, one op computes the gate and quantises. If the second
    layer multiplies 16-bit activations by an FP4 weight, and the gate has no parameters of SwiGLU, its GEMM computes
    the gate in the prologue.

    Args:
        gate_up_proj: layer with a weight (2I, H): the gate's rows, then up's rows, as :func:`torch_cute_ops.nn.merge`
            returns.
        down_proj: layer with a weight (H, I).
        swiglu: activation function of the gate, and parameters of SwiGLU. A Gemma layer needs
            ``SwiGLU(gate="gelu_tanh")``.

    Raises:
        ValueError: for layers of inconsistent sizes.
    """

    def __init__(
        self,
        gate_up_proj: QuantLinear,
        down_proj: QuantLinear,
        *,
        swiglu: SwiGLU = SwiGLU(),  # noqa: B008  an immutable tuple
    ) -> None:
        super().__init__()
        hidden, width = gate_up_proj.in_features, down_proj.in_features
        got = gate_up_proj.out_features, down_proj.out_features
        if got != (2 * width, hidden):
            raise ValueError(
                f"GatedMLP: the layers are ({got[0]}, {hidden}) and ({got[1]}, {width}); expected (2 · I, H) and (H, I)"
            )
        swiglu.check()
        self.gate_up_proj, self.down_proj, self.swiglu = gate_up_proj, down_proj, swiglu

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``down_proj(swiglu(gate_up_proj(x)))`` of ``x`` (..., H). The result has the same shape.

        Raises the same errors as :class:`QuantLinear`.
        """
        if is_proxy(x):
            return one_node(self, x)
        both = self.gate_up_proj(x)
        if needs_gradient(both):  # the fused ops have no backward
            return self.down_proj(self._gated(both))
        lead, quantization, rows = (*x.shape[:-1],), self.down_proj.quantization(), both.reshape(-1, both.shape[-1])
        if not self.swiglu.is_general and self.down_proj.prologue_gates(rows):
            return self.down_proj(QuantizedRows((rows,), lead, x.dtype, self.swiglu.gate))
        if quantization is None:
            return self.down_proj(self._gated(both))
        quantise = _GATES[quantization.to]
        operands = quantise(rows, **quantization.arguments, **self.swiglu.arguments())
        return self.down_proj(QuantizedRows(tuple(operands), lead, x.dtype))

    def _gated(self, both: Tensor) -> Tensor:
        """Compute the gate of rows (M, 2I) in fp32 and round once."""
        return self.swiglu.of(*both.float().chunk(2, -1)).to(both.dtype)

    def extra_repr(self) -> str:
        """Return the settings that ``print(layer)`` shows."""
        return str(self.swiglu)


class ExpertLayer(nn.Module):
    """A layer of experts: a router, experts, and an optional shared expert for all tokens.

    Logits are ``x · routerᵀ + router_bias`` in fp32. If :meth:`QuantExperts.route_few_` applies to a call,
    ``moe_route_dense`` writes the routing in one launch and the shared expert's result is added last. Otherwise
    ``moe_route`` orders rows by expert, and the shared expert's result is added in the last op, before its single
    rounding. The host never waits for the device, and no shape depends on the routing. Calls can therefore be captured,
    and a replay uses the current routing.

    A token's result is bitwise independent of the other tokens and their experts, as with ``route_few_``. It can depend
    on the number of tokens, which selects the ops, the GEMMs' tactics, and cuBLAS's algorithm for the router.

    The state dict contains ``router``, ``router_bias`` and ``bias`` if given, ``experts`` and ``shared``. Call
    ``layer.experts.route_few_()`` to speed up calls with few tokens.

    Args:
        router: (E, H), any floating-point dtype. A float32 router needs no conversion in each call.
        experts: module of E experts.
        topk: number of experts per token, at most 32.
        shared: module with inputs and results of width H, or ``None``.
        router_bias: (E,), added to the logits, as in gpt-oss; or ``None``.
        bias: (E,), stored in float32, added to the scores only for the choice of experts, as in DeepSeek-V3; or
            ``None``.
        scoring, num_groups, topk_groups, renormalize, scaling_factor: as in ``moe_route``.

    Raises:
        ValueError: for tensors or layers of inconsistent sizes, or a ``topk`` out of range.
    """

    router: Tensor
    router_bias: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        router: Tensor,
        experts: QuantExperts,
        topk: int,
        *,
        shared: nn.Module | None = None,
        router_bias: Tensor | None = None,
        bias: Tensor | None = None,
        scoring: Scoring = "softmax",
        num_groups: int = 1,
        topk_groups: int = 1,
        renormalize: bool = True,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        count, hidden = experts.experts, experts.hidden_size
        expected = {"router": (count, hidden), "router_bias": (count,), "bias": (count,)}
        for name, tensor in (("router", router), ("router_bias", router_bias), ("bias", bias)):
            if tensor is not None and tensor.shape != expected[name]:
                got = f"got {name} with shape {tuple(tensor.shape)}"
                raise ValueError(f"ExpertLayer: {got}; expected {expected[name]}, to match the experts")
        if not 1 <= topk <= min(count, MAX_TOPK):
            raise ValueError(f"ExpertLayer: topk is {topk}; expected 1 to {min(count, MAX_TOPK)}")
        if isinstance(shared, GatedMLP) and shared.down_proj.out_features != hidden:
            got = f"the shared expert's results have {shared.down_proj.out_features} columns"
            raise ValueError(f"ExpertLayer: {got}; expected {hidden}, to match the experts")
        for name, tensor in (("router", router), ("router_bias", router_bias)):
            value = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
            self.register_parameter(name, value)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.experts, self.shared, self.topk = experts, shared, topk
        if experts.topk is None:
            experts.topk = topk
        self.scoring: dict[str, Any] = {
            "scoring": scoring,
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "renormalize": renormalize,
            "scaling_factor": scaling_factor,
        }

    def forward(self, x: Tensor) -> Tensor:
        """Route each token to its experts and return the weighted sum of their results, plus the shared expert's
        result.

        Args:
            x: (M, H) or (..., H), bfloat16, float16 or float32, if the experts and the shared expert support the dtype.

        If ``x``, the router or the shared expert's parameters require grad, they get gradients as if the weights were
        decoded and activations were not rounded; see :meth:`QuantExperts.forward`.

        Returns:
            The result in the shape and dtype of ``x``.

        Raises:
            ValueError, TypeError: as the ops, for a wrong shape, dtype or device.
        """
        if is_proxy(x):
            return one_node(self, x)
        tokens = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and needs_gradient(x, *self.parameters()):
            return self._forward_with_gradient(tokens).view(x.shape)
        is_few = self.experts.are_routed(len(tokens), self.topk, x.dtype)
        compute = self.forward_few if is_few else self.forward_many
        return compute(tokens, self.logits(tokens)).view(x.shape)

    def _forward_with_gradient(self, x: Tensor) -> Tensor:
        """Compute :meth:`forward` for tokens (M, H). The experts are chosen in plain torch, because ``moe_route`` has
        no gradient."""
        weights, ids = choose_experts(self.logits(x), self.topk, bias=self.bias, finite=False, **self.scoring)
        y = self.experts(x, ids, weights)
        return y if self.shared is None else y + self.shared(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the router's logits, (M, E) float32, for ``x`` (M, H)."""
        bias = None if self.router_bias is None else self.router_bias.float()
        return nn.functional.linear(x.float(), self.router.float(), bias)

    def forward_few(self, x: Tensor, logits: Tensor) -> Tensor:
        """Compute :meth:`forward` from tokens (M, H) and logits (M, E), with the ops that compute only routed pairs. M
        may be any number.

        Raises:
            RuntimeError: if ``experts.route_few_()`` was not called before.
            ValueError, TypeError: as :meth:`forward`.
        """
        routing = moe_route_dense(
            logits, self.topk, self.bias, expert_factor=self.experts.expert_factor, **self.scoring
        )
        y = self.experts.forward_dense(x, routing, has_factors=True)
        return y if self.shared is None else y + self.shared(x)

    def forward_many(self, x: Tensor, logits: Tensor) -> Tensor:
        """Compute :meth:`forward` from tokens (M, H) and logits (M, E), with the ops that permute rows. M may be any
        number. Raises the same errors as :meth:`forward`."""
        weights, _, expanded, permuted, offsets, _ = moe_route(
            logits, self.topk, self.bias, alignment=1, **self.scoring
        )
        shared = None if self.shared is None else self.shared(x)
        return self.experts.forward_permuted(x, weights, expanded, permuted, offsets, shared)

    def extra_repr(self) -> str:
        """Return the settings that ``print(layer)`` shows."""
        return f"topk={self.topk}, {', '.join(f'{name}={value!r}' for name, value in self.scoring.items())}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer, but never cast ``bias``: the choice of experts needs it in float32."""
        own = self.bias
        super()._apply(lambda tensor: moved(fn, own) if own is not None and tensor is own else fn(tensor), recurse)
        return self
