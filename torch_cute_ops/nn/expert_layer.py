"""A layer of experts as models have it: the router, the experts, and what all tokens have."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.nn._base import QuantizedRows, QuantLinear, moved
from torch_cute_ops.nn.experts import QuantExperts, SwiGLU
from torch_cute_ops.ops._signature import Scoring
from torch_cute_ops.ops.moe_route import moe_route
from torch_cute_ops.ops.moe_route_dense import moe_route_dense
from torch_cute_ops.ops.silu_mul_fp4quant import silu_mul_fp4quant
from torch_cute_ops.ops.silu_mul_fp8quant import silu_mul_fp8quant


class GatedMLP(nn.Module):
    """Two quantised linear layers with a SwiGLU between, such as a shared expert.

    Where the second layer takes activations in FP4 or FP8, one op gates and quantises; where it multiplies 16-bit ones
    by an FP4 weight, and the gate is ``silu(gate) · up``, one op gates and multiplies.

    Args:
        gate_up_proj: (2I, H), the rows of the gate before those of up, as :func:`torch_cute_ops.nn.merge` makes it.
        down_proj: (H, I).
        swiglu: the gate's parameters.

    Raises:
        ValueError: for layers that do not fit together.
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
        self.gate_up_proj, self.down_proj, self.swiglu = gate_up_proj, down_proj, swiglu

    def forward(self, x: Tensor) -> Tensor:
        """``down_proj(swiglu(gate_up_proj(x)))``: (..., H) of (..., H); errors are those of :class:`QuantLinear`."""
        both = self.gate_up_proj(x)
        lead, how, rows = (*x.shape[:-1],), self.down_proj.quantization(), both.reshape(-1, both.shape[-1])
        if self.swiglu == SwiGLU() and self.down_proj.prologue_gates(rows):
            return self.down_proj(QuantizedRows((rows,), lead, x.dtype, is_gate_and_up=True))
        if how is None:
            return self.down_proj(self.swiglu.of(*both.float().chunk(2, -1)).to(both.dtype))  # rounded once
        quantise = silu_mul_fp4quant if how.to == "fp4" else silu_mul_fp8quant
        gate = {f"swiglu_{name}": value for name, value in self.swiglu._asdict().items()}
        operands = quantise(rows, **how.arguments, **gate)
        return self.down_proj(QuantizedRows(tuple(operands), lead, x.dtype))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return str(self.swiglu)


class ExpertLayer(nn.Module):
    """A layer of experts: a router, experts of which each token has a few, and a shared expert that all have.

    Logits are ``x · routerᵀ + router_bias`` in fp32. Where :meth:`QuantExperts.route_few_` has the routed pairs of a
    call with few tokens computed alone, ``moe_route_dense`` writes the routing in one launch; else ``moe_route`` orders
    rows by expert, and the shared expert's result is added in the last step, before the one rounding; of few tokens,
    behind it. Nothing waits for the device and no shape depends on the routing, so calls can be captured, and a replay
    follows whatever routing it finds.

    As with ``route_few_``, a token's result depends neither on the other tokens nor on their experts, to the bit; on
    their number by the way, the tactics of the GEMMs, and cuBLAS's algorithm for the router.

    In a state dict there are ``router``, ``router_bias`` and ``bias`` where they are given, ``experts`` and ``shared``.
    Call ``layer.experts.route_few_()`` for few tokens.

    Args:
        router: (E, H), of any floating-point dtype. One in float32 is not converted in each call.
        experts: E of them.
        topk: experts of a token, at most 16.
        shared: with inputs and results of H, or ``None``.
        router_bias: (E,), added to the logits, as in gpt-oss; ``None``: nothing.
        bias: (E,), kept in float32, added to sigmoids for the choice alone, as in DeepSeek-V3; ``None``: nothing.
        scoring, num_groups, topk_groups, renormalize, scaling_factor: as of ``moe_route``.

    Raises:
        ValueError: for tensors or layers that do not fit together, and a ``topk`` that is no number of experts.
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
                got = f"{name} has shape {tuple(tensor.shape)}"
                raise ValueError(f"ExpertLayer: {got}; expected {expected[name]}, as the experts have it")
        if not 1 <= topk <= min(count, MAX_TOPK):
            raise ValueError(f"ExpertLayer: topk is {topk}; expected 1 to {min(count, MAX_TOPK)}")
        if isinstance(shared, GatedMLP) and shared.down_proj.out_features != hidden:
            got = f"the shared expert's results have {shared.down_proj.out_features} columns"
            raise ValueError(f"ExpertLayer: {got}; expected {hidden}, as those of the experts")
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
        """The layer's result.

        Args:
            x: (M, H) or (..., H), bfloat16, float16 or float32, as the experts and the shared expert take it.

        Returns:
            The shape and dtype of ``x``.

        Raises:
            ValueError, TypeError: as the ops, for a wrong shape, dtype or device, or an input that requires grad while
                gradients are on.
        """
        tokens = x.reshape(-1, x.shape[-1])
        is_few = self.experts.are_routed(len(tokens), self.topk, x.dtype)
        compute = self.forward_few if is_few else self.forward_many
        return compute(tokens, self.logits(tokens)).view(x.shape)

    def logits(self, x: Tensor) -> Tensor:
        """The router's, (M, E) float32, of (M, H)."""
        bias = None if self.router_bias is None else self.router_bias.float()
        return nn.functional.linear(x.float(), self.router.float(), bias)

    def forward_few(self, x: Tensor, logits: Tensor) -> Tensor:
        """:meth:`forward` by the routed pairs alone, whatever M is, of tokens (M, H) with logits (M, E).

        Raises:
            RuntimeError: without ``experts.route_few_()``.
            ValueError, TypeError: as :meth:`forward`.
        """
        routing = moe_route_dense(
            logits, self.topk, self.bias, expert_factor=self.experts.expert_factor, **self.scoring
        )
        y = self.experts.forward_dense(x, routing, has_factors=True)
        return y if self.shared is None else y + self.shared(x)

    def forward_many(self, x: Tensor, logits: Tensor) -> Tensor:
        """:meth:`forward` by rows in the experts' order, whatever M is, of tokens (M, H) with logits (M, E); errors are
        those of :meth:`forward`."""
        weights, _, expanded, permuted, offsets, _ = moe_route(
            logits, self.topk, self.bias, alignment=1, **self.scoring
        )
        shared = None if self.shared is None else self.shared(x)
        return self.experts.forward_permuted(x, weights, expanded, permuted, offsets, shared)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"topk={self.topk}, {', '.join(f'{name}={value!r}' for name, value in self.scoring.items())}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the bias of the choice, and never casts it."""
        own = self.bias
        super()._apply(lambda tensor: moved(fn, own) if own is not None and tensor is own else fn(tensor), recurse)
        return self
