"""Input gradients of frozen quantised layers, with which adapters such as LoRA can be trained.

The gradient is ``dx = dy · W`` with the decoded weight W. It treats the rounding of the activations as the identity
(straight-through estimator). The forward computes the same result as without gradients, and saves only references to
the layer's buffers. The backward decodes W one block of rows at a time.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

BLOCK_ELEMENTS: Final = 2**24
"""Maximum number of weight elements that are decoded at a time: at most 0.2 GB with temporary tensors."""
BLOCK_ROWS: Final = 128
"""Blocks are multiples of this number of rows, the rows of an FP8 block."""

RowsDecoder = Callable[[int, int], Tensor]
"""Function that decodes the rows from ``first`` to ``end`` of a weight: (first, end) → (end - first, K)."""


class Layer(Protocol):
    """Protocol with the methods of :class:`torch_cute_ops.nn.QuantLinear` that the backward calls."""

    in_features: int
    out_features: int

    def compute(self, input: Tensor) -> Tensor:
        """Compute the layer's result without gradients."""

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes rows of the weight."""


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return True if gradients are enabled and at least one tensor requires grad."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def refuse_weight_gradient(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Check that no quantised weight or scale requires grad.

    Raises:
        ValueError: if a weight or scale requires grad. The message contains its name.
    """
    for name, tensor in weights:
        if tensor.requires_grad:
            raise ValueError(
                f"{type(module).__name__}: {name} requires grad, and quantised weights have no gradient; call "
                f"{name}.requires_grad_(False)"
            )


def linear(layer: Any, input: Tensor) -> Tensor:
    """Compute a layer's result with a gradient for ``input`` and the bias.

    Raises:
        ValueError: if a weight or scale requires grad.
    """
    refuse_weight_gradient(layer, layer.named_buffers())
    result: Tensor = _Linear.apply(input, layer.bias, layer)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        return layer.compute(input.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, bias, ctx.layer = inputs
        ctx.input_dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = input_gradient(ctx.layer, grad).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(ctx.bias_dtype)
        return of_input, of_bias, None


def input_gradient(layer: Layer, grad: Tensor) -> Tensor:
    """Return ``grad · W``, (..., K), for the gradient ``grad`` (..., N) of a layer's result. W is decoded in blocks of
    rows, whose products are added in fp32."""
    decode = layer.rows_decoder(grad.dtype)
    step = max(BLOCK_ROWS, BLOCK_ELEMENTS // layer.in_features // BLOCK_ROWS * BLOCK_ROWS)
    if step >= layer.out_features:
        return grad @ decode(0, layer.out_features)
    total: Tensor | None = None
    for begin in range(0, layer.out_features, step):
        end = min(begin + step, layer.out_features)
        part = (grad[..., begin:end] @ decode(begin, end)).float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(grad.dtype)


@torch.compiler.disable
def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute each token's weighted sum over experts, with gradients for the tokens and the routing weights.

    The backward waits for the device once per expert, so it cannot be compiled or captured.

    Raises:
        ValueError: if a weight, a scale or a bias of the experts requires grad.
    """
    refuse_weight_gradient(module, [*module.named_buffers(), *module.named_parameters()])
    result: Tensor = _Experts.apply(hidden_states, top_k_weights, top_k_index, module)
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor, module: Any) -> Tensor:
        x = hidden_states.detach()
        result: Tensor = module.summed(x, top_k_index, top_k_weights.detach(), x.dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.module = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_states, top_k_weights, top_k_index = ctx.saved_tensors
        gradients = experts_gradients(ctx.module, hidden_states, top_k_weights, top_k_index, grad)
        return *gradients, None, None


def experts_gradients(
    module: Any, hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to the tokens (M, H) and the routing weights (M, topk).

    Experts are processed one at a time, with decoded weights and unrounded activations.
    """
    dtype, count = hidden_states.dtype, module.experts
    of_tokens = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    of_weights = torch.zeros(top_k_weights.shape, dtype=torch.float32, device=hidden_states.device)
    layers = module.gate_up_proj, module.down_proj
    decoders = [layer.rows_decoder(dtype) for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach().view(count, -1).to(dtype) for layer in layers]
    for expert in range(count):
        tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        (gate_up, gate_up_bias), (down, down_bias) = (
            (decode(expert * rows, (expert + 1) * rows), None if bias is None else bias[expert])
            for decode, bias, rows in zip(
                decoders, biases, (2 * module.intermediate_size, module.hidden_size), strict=True
            )
        )
        own = hidden_states.detach()[tokens].requires_grad_()
        with torch.enable_grad():
            hidden = module.swiglu.of(*nn.functional.linear(own, gate_up, gate_up_bias).float().chunk(2, -1))
            result = nn.functional.linear(hidden.to(dtype), down, down_bias)
        received, factors = grad[tokens], top_k_weights.detach()[tokens, places].float()
        (part,) = torch.autograd.grad(result, own, (received.float() * factors[:, None]).to(dtype))
        of_tokens.index_add_(0, tokens, part.float())
        of_weights[tokens, places] = (result.detach().float() * received.float()).sum(-1)
    return of_tokens.to(dtype), of_weights.to(top_k_weights.dtype)
