"""The experts of a layer, all in one module, and how they are found in models that keep them in two parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.formats.experts import MAX_EXPERTS, MAX_TOPK
from torch_cute_ops.formats.scale_layout import from_linear
from torch_cute_ops.nn._base import QuantLinear, moved
from torch_cute_ops.nn.linear import FP8BlockLinear, MXFP4Linear, NVFP4Linear
from torch_cute_ops.ops.grouped_mm_fp8 import grouped_mm_fp8
from torch_cute_ops.ops.grouped_mm_fp8_fp4 import grouped_mm_fp8_fp4
from torch_cute_ops.ops.moe_fc1_fp4_weight_only import moe_fc1_fp4_weight_only
from torch_cute_ops.ops.moe_fc2_fp4_weight_only import moe_fc2_fp4_weight_only
from torch_cute_ops.ops.moe_finalize import moe_finalize
from torch_cute_ops.ops.moe_permute_fp8quant import moe_permute_fp8quant
from torch_cute_ops.ops.moe_route_ids import moe_route_ids
from torch_cute_ops.ops.moe_swiglu_fp8quant import moe_swiglu_fp8quant
from torch_cute_ops.registry import backends

FORMATS: Final[dict[str, type[QuantLinear]]] = {cls.scheme: cls for cls in (NVFP4Linear, MXFP4Linear, FP8BlockLinear)}
"""What experts can be in, by scheme."""
MULTIPLE: Final = 64
"""What the widths of experts are multiples of; in FP8 blocks, of 128."""
_PER_EXPERT: Final = {"gate_up_proj": 2, "down_proj": 1}
"""How many linear layers of an expert a stack has."""


def few_tokens(width: int) -> int:
    """Tokens of an expert, on average, up to which ``route_few_`` has the routed pairs computed alone; ``width``: I.

    On an H200 that is faster than permuted rows up to 27 tokens of an expert or more with 256 and with 768 columns.
    With 2,880 it is at most 8 % slower up to 2 tokens of an expert, and a quarter or more from 4 on. Behind the
    first 512 tokens of a call the weights are read once more.
    """
    return 16 if width <= 1024 else 2


class SwiGLU(NamedTuple):
    """``g · σ(alpha · g) · (u + beta)`` with ``g = min(gate, limit)`` and ``u = clip(up, ±limit)``."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


class QuantExperts(nn.Module):
    """The experts of a layer, with quantised weights, for inference; the router is another module.

    Activations are FP8 with a scale for each 128 elements, computed for each token, whatever the weights are in:
    ``moe_route_ids`` orders rows by expert, ``moe_permute_fp8quant`` quantises the tokens into that order,
    ``grouped_mm_fp8`` or ``grouped_mm_fp8_fp4`` multiplies by ``gate_up_proj``, ``moe_swiglu_fp8quant`` gates, the
    second GEMM multiplies by ``down_proj``, and ``moe_finalize`` adds up the experts of each token. Nothing waits for
    the device and no shape depends on the routing, so calls can be captured. After :meth:`route_few_` calls with few
    tokens take another way.

    Args:
        gate_up_proj: the experts' gates and ups, (E · 2I, H), one expert after the other, gate first: a merged layer,
            as :func:`torch_cute_ops.nn.merge` makes it.
        down_proj: their second layers, (E · H, I), the same.
        experts: E.
        swiglu: the gate's parameters.
        topk: experts of a token, which :func:`torch_cute_ops.nn.warmup` has to know; ``None``: not known.

    Raises:
        ValueError: for sizes that do not fit, or that the ops do not take.
    """

    def __init__(
        self,
        gate_up_proj: QuantLinear,
        down_proj: QuantLinear,
        experts: int,
        *,
        swiglu: SwiGLU = SwiGLU(),  # noqa: B008  an immutable tuple
        topk: int | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.swiglu, self.topk = experts, swiglu, topk
        self.hidden_size, self.intermediate_size = gate_up_proj.in_features, down_proj.in_features
        if type(gate_up_proj) is not type(down_proj) or gate_up_proj.scheme not in FORMATS:
            names = f"{type(gate_up_proj).__name__} and {type(down_proj).__name__}"
            raise ValueError(f"QuantExperts: the layers are {names}; expected two of one format among {[*FORMATS]}")
        reason = reason_unsupported(gate_up_proj.scheme, experts, self.hidden_size, self.intermediate_size)
        if reason is not None:
            raise ValueError(f"QuantExperts: {reason}")
        for name, layer, width in (
            ("gate_up_proj", gate_up_proj, self.intermediate_size),
            ("down_proj", down_proj, self.hidden_size),
        ):
            parts = (width,) * (_PER_EXPERT[name] * experts)
            if layer.parts != parts:
                got = f"{len(layer.parts)} parts, the first with {layer.parts[0]} rows"
                raise ValueError(f"QuantExperts: {name} has {got}; expected {len(parts)} with {width}")
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.side_by_side: _SideBySide | None = None
        self.register_load_state_dict_post_hook(_renew)

    def route_few_(self) -> Self:
        """Have calls with few tokens computed by ``moe_fc1_fp4_weight_only`` and ``moe_fc2_fp4_weight_only``: the
        routed pairs alone, without permuted rows, and with activations in 16 bits, not in FP8.

        Few are, on average, up to ``nn.experts.few_tokens`` for each expert: with 8 of 256 experts a token, 512 tokens
        where experts have 256 columns. Results of calls with few and with more tokens then differ by what FP8 rounds.
        The experts' second layers are held twice, because these ops want them side by side, (H, E · I/2): a third more
        bytes in all. The state dict stays what it is.

        Returns:
            The module itself.

        Raises:
            ValueError: for weights in FP8, or on a GPU that has no kernel for these sizes.
        """
        device = self.down_proj.weight.device
        sizes = self.scheme, self.experts, self.hidden_size, self.intermediate_size
        reason = reason_unrouted(*sizes, device if device.type == "cuda" else None)
        if reason is not None:
            raise ValueError(f"QuantExperts.route_few_: {reason}")
        if self.side_by_side is None:
            self.side_by_side = _SideBySide(self)
        return self

    @property
    def scheme(self) -> str:
        """The format of the weights: ``"nvfp4"``, ``"mxfp4"`` or ``"fp8_block"``."""
        return self.gate_up_proj.scheme

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (M, H), bfloat16, float16 or float32.
            top_k_index: (M, topk), int32 or int64, the experts of each token, at most 16. A pair with an index outside
                0..E-1, as of an expert on another rank, adds nothing.
            top_k_weights: (M, topk), of any floating-point dtype.

        Returns:
            (M, H) in the dtype of ``hidden_states``.

        Raises:
            ValueError, TypeError: as the ops, for a wrong shape, dtype or device, or an input that requires grad while
                gradients are on.
        """
        return self.summed(hidden_states, top_k_index, top_k_weights, hidden_states.dtype)

    def summed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, sums: torch.dtype) -> Tensor:
        """The same in the dtype ``sums``, to which each expert's result is rounded, and the sum of a token's."""
        dtype = hidden_states.dtype
        if self.side_by_side is not None and dtype.itemsize == 2 and self.is_few(*top_k_index.shape):
            return self._routed(self.side_by_side, hidden_states, top_k_index, top_k_weights, sums)
        expanded, permuted, offsets, _ = moe_route_ids(top_k_index.to(torch.int32), self.experts, alignment=1)
        a, a_scale = moe_permute_fp8quant(hidden_states, permuted, top_k_index.shape[-1], expanded)
        h = self._multiply(self.gate_up_proj, a, a_scale, offsets, dtype)
        a, a_scale = moe_swiglu_fp8quant(h, offsets, None, *self.swiglu)
        h = self._multiply(self.down_proj, a, a_scale, offsets, sums)
        return moe_finalize(h, expanded, top_k_weights.to(torch.float32))

    def is_few(self, tokens: int, topk: int) -> bool:
        """Whether ``route_few_`` is for calls with so many tokens."""
        return tokens * topk <= few_tokens(self.intermediate_size) * self.experts

    def _routed(
        self,
        down: "_SideBySide",
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        sums: torch.dtype,
    ) -> Tensor:
        every = torch.arange(self.experts, dtype=top_k_index.dtype, device=top_k_index.device)
        own = top_k_index.unsqueeze(-1) == every
        routing = torch.where(own, top_k_weights.to(torch.float32).unsqueeze(-1), 0.0).sum(1)
        gate_up: Any = self.gate_up_proj
        weight, bias = self._by_expert(gate_up)
        alpha, beta, limit = self.swiglu
        how: dict[str, Any] = {"block_size": gate_up.format.block_size, "static_weight": True}
        h = moe_fc1_fp4_weight_only(
            *(hidden_states, weight, gate_up.weight_scale, routing, down.gate_up_alpha, bias),
            swiglu_alpha=alpha,
            swiglu_beta=beta,
            swiglu_limit=limit,
            **how,
        )
        factors = routing if down.alpha is None else routing * down.alpha
        return moe_fc2_fp4_weight_only(h, down.weight, down.weight_scale, factors, down.bias, sums, **how)

    def _by_expert(self, layer: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a stack, with a dimension for the experts."""
        bias = None if layer.bias is None else layer.bias.unflatten(0, (self.experts, -1))
        return layer.weight.unflatten(0, (self.experts, -1)), bias

    def _multiply(self, layer: Any, a: Tensor, a_scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        weight, bias = self._by_expert(layer)
        if self.scheme == "fp8_block":
            scale = layer.weight_scale_inv.unflatten(0, (self.experts, -1))
            return grouped_mm_fp8(a, weight, a_scale, scale, offsets, bias=bias, out_dtype=dtype, static_weight=True)
        alpha = layer._alpha()
        if alpha is not None and alpha.numel() > 1:
            alpha = alpha.unflatten(0, (self.experts, -1))
        scale, block = layer.weight_scale, layer.format.block_size
        return grouped_mm_fp8_fp4(
            a, weight, a_scale, scale, offsets, None, alpha, bias, dtype, block, static_weight=True
        )

    def split(self) -> Iterator[tuple[QuantLinear, QuantLinear, QuantLinear]]:
        """Gate, up and down of each expert, as layers by themselves: codes are views, scales copies."""
        gate_up, down = self.gate_up_proj.split(), self.down_proj.split()
        yield from zip(gate_up[0::2], gate_up[1::2], down, strict=True)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The weights that the codes stand for: (E, 2I, H), gate first, and (E, H, I)."""
        layers = self.gate_up_proj, self.down_proj
        gate_up, down = (layer.dequantize(dtype).unflatten(0, (self.experts, -1)) for layer in layers)
        return gate_up, down

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"experts={self.experts}, {self.swiglu}"


class _SideBySide(nn.Module):
    """What ``moe_fc2_fp4_weight_only`` takes of experts' second layers, derived from a :class:`QuantExperts`.

    Buffers, none of them in a state dict: ``weight`` uint8 (H, E · I/2) and ``weight_scale`` over (H, E · I), 128x4;
    ``alpha`` (E,) and ``gate_up_alpha`` (E, 2) float32, the global scales of NVFP4, else ``None``; ``bias`` (E, H)
    float32 over ``alpha``, which multiplies it, or ``None``.
    """

    weight: Tensor
    weight_scale: Tensor
    alpha: Tensor | None
    gate_up_alpha: Tensor | None
    bias: Tensor | None

    def __init__(self, experts: QuantExperts) -> None:
        super().__init__()
        for name, value in self._derived(experts).items():
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def renew(self, experts: QuantExperts) -> None:
        """Follow weights that have changed, in place, because CUDA graphs may read the buffers."""
        for name, value in self._derived(experts).items():
            if value is not None:
                self.get_buffer(name).copy_(value)

    @staticmethod
    def _derived(given: QuantExperts) -> dict[str, Tensor | None]:
        down: Any = given.down_proj
        tensors, count = down.tensors(), given.experts
        alpha = tensors.get("weight_scale_2")
        gate_up_alpha = None if alpha is None else given.gate_up_proj.tensors()["weight_scale_2"].view(count, 2).clone()
        bias = None if down.bias is None else down.bias.detach().float().view(count, -1)
        if bias is not None:
            bias = bias.clone() if alpha is None else bias / alpha.unsqueeze(1)

        def beside(rows: Tensor) -> Tensor:
            return rows.view(torch.uint8).unflatten(0, (count, -1)).transpose(0, 1).flatten(1)

        scale = beside(tensors["weight_scale"]).view(down.format.scale_dtype)
        return {
            "weight": beside(tensors["weight"]),
            "weight_scale": from_linear(scale, SCALE_LAYOUTS["128x4"]),
            "alpha": None if alpha is None else alpha.clone(),
            "gate_up_alpha": gate_up_alpha,
            "bias": bias,
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(lambda tensor: moved(fn, tensor), recurse)
        return self


def _renew(experts: Any, incompatible_keys: Any) -> None:
    """After a state dict has been loaded."""
    if experts.side_by_side is not None:
        experts.side_by_side.renew(experts)


def reason_unsupported(scheme: str, experts: int, hidden: int, width: int) -> str | None:
    """Why the ops take no experts of these sizes in this format; ``None``: they do."""
    if scheme not in FORMATS:
        return f"scheme is {scheme!r}; experts can be in {', '.join(map(repr, FORMATS))}"
    if not 1 <= experts <= MAX_EXPERTS:
        return f"there are {experts} experts; expected 1 to {MAX_EXPERTS}"
    multiple = 128 if scheme == "fp8_block" else MULTIPLE
    if hidden % multiple or width % multiple:
        return f"experts are {hidden} and {width} wide; expected multiples of {multiple}"
    return None


def reason_unrouted(
    scheme: str, experts: int, hidden: int, width: int, target: torch.device | str | None
) -> str | None:
    """Why few tokens cannot be routed to experts of these sizes (:meth:`QuantExperts.route_few_`); ``None``: they can.

    Args:
        scheme, experts, hidden, width: of experts that ``reason_unsupported`` says nothing about.
        target: a GPU, or an architecture by its name; ``None``: none, and references take all sizes.
    """
    if scheme == "fp8_block":
        return "the weights are in FP8; the ops take FP4"
    if target is None:
        return None
    fmt: Any = FORMATS[scheme]
    given = {"experts": experts, "block_size": fmt.format.block_size}
    where: dict[str, Any] = {"arch" if isinstance(target, str) else "device": target}
    sizes = {"moe_fc1": (experts * width, hidden), "moe_fc2": (hidden, experts * width)}
    for op, (n, k) in sizes.items():
        reasons = backends(f"{op}_fp4_weight_only", n=n, k=k, **given, **where)
        if all(reason is not None for name, reason in reasons.items() if name != "reference"):
            return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    return None


def stack(
    cls: type[QuantLinear],
    in_features: int,
    parts: Sequence[int],
    tensors_of: Callable[[int], Mapping[str, Tensor]],
    *,
    device: torch.device | str | None = None,
    bias: Tensor | None = None,
) -> QuantLinear:
    """One layer of many, such as those of all experts, one below the other; only one of them exists beside it.

    Args:
        cls: a class of linear layers of this package.
        in_features: K, of all of them.
        parts: rows of each.
        tensors_of: given the number of a layer, its tensors as checkpoints hold them, by name; those that the class
            does not have are left out.
        device: of the result.
        bias: (sum of ``parts``,), or ``None``.

    Raises:
        ValueError: for sizes that the class does not take.
    """
    blank = cls(in_features, sum(parts), parts=parts, device="meta")
    whole = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in blank.layout().items()}
    rows = {name: blank._rows_of_parts(name) for name in whole}
    starts = dict.fromkeys(whole, 0)
    for i in range(len(parts)):
        own = tensors_of(i)
        for name, tensor in whole.items():
            place = tensor.narrow(0, starts[name], rows[name][i])
            place.copy_(own[name].view(place.shape))
            starts[name] += rows[name][i]
    return cls._of(in_features, whole, bias, parts, "auto")


# Experts in models


class FloatExperts(NamedTuple):
    """A module that keeps the experts of a layer in the parameters ``gate_up_proj`` and ``down_proj``, as the models of
    Hugging Face do.

    Attributes:
        module: the module.
        experts: E.
        hidden: H.
        width: I.
        is_transposed: whether the parameters are (E, H, 2I) and (E, I, H), instead of (E, 2I, H) and (E, H, I).
        is_interleaved: whether rows of gate and up take turns, instead of all of the gate's before all of up's.
        has_bias: whether there are ``gate_up_proj_bias`` (E, 2I) and ``down_proj_bias`` (E, H).
        swiglu: the gate; ``None``: it is no SwiGLU.
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
        """Gate and up of what is 2I long in the first dimension."""
        return (both[0::2], both[1::2]) if self.is_interleaved else (both[: self.width], both[self.width :])

    def weights(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate (I, H), up (I, H) and down (H, I) of an expert."""
        both, down = (each[expert].detach() for each in (self.module.gate_up_proj, self.module.down_proj))
        if self.is_transposed:
            both, down = both.t(), down.t()
        return *self.halves(both), down

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of stacks: (E · 2I,), the gate's first, and (E · H,)."""
        if not self.has_bias:
            return None, None
        both, down = self.module.gate_up_proj_bias.detach(), self.module.down_proj_bias.detach()
        return torch.cat(self.halves(both.t())).t().flatten(), down.flatten()

    def reason_unsupported(self, scheme: str) -> str | None:
        """Why they cannot be quantised; ``None``: they can."""
        if self.swiglu is None:
            return "its gate is no SwiGLU"
        return reason_unsupported(scheme, self.experts, self.hidden, self.width)


def float_experts(module: nn.Module) -> FloatExperts | None:
    """What a module says about its experts; ``None``: it has none."""
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
    """How many experts a token has, of the experts ``name``: as the module around it, its router or the model's
    configuration says; ``None``: nothing does."""
    parent = model.get_submodule(name.rpartition(".")[0])
    config: Any = getattr(model, "config", None)
    found = [getattr(each, "top_k", None) for each in (parent, *parent.children())]
    found += [getattr(config, key, None) for key in ("num_experts_per_tok", "moe_topk")]
    return next((each for each in found if isinstance(each, int) and 1 <= each <= MAX_TOPK), None)


def _swiglu_of(module: Any, is_interleaved: bool) -> SwiGLU | None:
    """The parameters under which a module's gate is ours, found by trying it on numbers.

    Modules do not say what their gate computes, only sometimes with which numbers.
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
    if swiglu.limit is not None:
        gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    want = gate * torch.sigmoid(swiglu.alpha * gate) * (up + swiglu.beta)
    return got.shape == want.shape and torch.allclose(got.float(), want, rtol=1e-4, atol=1e-5)


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer without bias that has this weight (N, K)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return linear


def quantized_experts(given: FloatExperts, scheme: Literal["nvfp4", "mxfp4", "fp8_block"], topk: int | None) -> Any:
    """The experts in a format. In NVFP4, gate and up of an expert share a global scale.

    Args:
        given: experts that ``reason_unsupported`` says nothing about.
        scheme: the format.
        topk: as of :class:`QuantExperts`.
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
