"""All experts of a mixture-of-experts layer as one module."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.nn import _straight_through
from torch_cute_ops.nn._base import QuantLinear
from torch_cute_ops.nn._expert_tensors import FewActivations, PreparedScales, SideBySide
from torch_cute_ops.nn._tracing import one_node
from torch_cute_ops.nn.fp4_linear import MXFP4Linear, NVFP4Linear
from torch_cute_ops.nn.fp8_linear import FP8BlockLinear, FP8ChannelLinear, MXFP8Linear
from torch_cute_ops.ops._checks import index_out_of_range
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp4_quantize_per_token import fp4_quantize_per_token
from torch_cute_ops.ops.fp8_quantize import fp8_quantize
from torch_cute_ops.ops.grouped_mm_fp8 import grouped_mm_fp8
from torch_cute_ops.ops.grouped_mm_fp8_fp4 import grouped_mm_fp8_fp4
from torch_cute_ops.ops.moe_fc1_fp4 import moe_fc1_fp4
from torch_cute_ops.ops.moe_fc1_fp4_weight_only import moe_fc1_fp4_weight_only
from torch_cute_ops.ops.moe_fc2_fp4 import moe_fc2_fp4
from torch_cute_ops.ops.moe_fc2_fp4_weight_only import moe_fc2_fp4_weight_only
from torch_cute_ops.ops.moe_finalize import moe_finalize
from torch_cute_ops.ops.moe_permute_fp8quant import moe_permute_fp8quant
from torch_cute_ops.ops.moe_route_ids import moe_route_ids
from torch_cute_ops.ops.moe_swiglu_fp8quant import moe_swiglu_fp8quant
from torch_cute_ops.ops.silu_mul_fp8quant import silu_mul_fp8quant
from torch_cute_ops.registry import backends
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.dispatch import PLAIN, is_proxy

FORMATS: Final[dict[str, type[QuantLinear]]] = {
    cls.scheme: cls for cls in (NVFP4Linear, MXFP4Linear, FP8BlockLinear, FP8ChannelLinear, MXFP8Linear)
}
"""Linear layer class for each scheme that experts support."""
MULTIPLE: Final = 64
"""Widths of experts must be multiples of this number, or of 128 if FP8 scales are per block."""
_PER_EXPERT: Final = {"gate_up_proj": 2, "down_proj": 1}
"""Number of linear layers per expert in each stacked layer: gate and up, or down."""


MOST_FEW: Final = 512
"""Largest number of tokens for which only routed pairs are computed: one token block of the kernel that lists each
expert's tokens. Each additional token block reads the weights again. On desktop Blackwell, token blocks are smaller."""


def few_tokens(width: int) -> int:
    """Return the largest average number of tokens per expert for which ``route_few_`` computes only routed pairs. A
    result of 0 means that it never does.

    Measured on an H200: for I = 256 the routed path is faster than the permuted path up to ``MOST_FEW`` tokens, for any
    routing; for I = 768, it is faster up to 27 tokens per expert. For I = 2,880 the routed path is slower: by up to a
    fifth with 2 tokens per expert, and by more with more tokens. Only calls with a single token are faster, by 1 to 3
    %.

    Args:
        width: I, the intermediate size of an expert.
    """
    return 16 if width <= 1024 else 0


class SwiGLU(NamedTuple):
    """Gate of an expert: ``g · σ(alpha · g) · (u + beta)`` with ``g = min(gate, limit)`` and ``u = clip(up, ±limit)``,
    or ``gelu(gate) · up``, or ``max(gate, 0)² · up``.

    Attributes:
        alpha, beta, limit: parameters of SwiGLU. Other gates need the defaults.
        gate: ``"silu"``, ``"gelu_tanh"``, ``"gelu"`` or ``"relu2"``, as of :func:`torch_cute_ops.silu_mul`.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    gate: Gate = "silu"

    def check(self) -> None:
        """Check the name of the gate, and that only SwiGLU gets parameters.

        Raises:
            ValueError: otherwise.
        """
        if self.gate not in get_args(Gate):
            raise ValueError(f"SwiGLU: gate is {self.gate!r}; expected one of {', '.join(map(repr, get_args(Gate)))}")
        if self.gate != "silu" and self.is_general:
            raise ValueError(f"SwiGLU: got {self}; gate={self.gate!r} takes no alpha, beta or limit")

    @property
    def is_general(self) -> bool:
        """True if SwiGLU has other parameters than its defaults."""
        return (self.alpha, self.beta, self.limit) != (1.0, 0.0, None)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments, by name, of ops that compute the gate."""
        named = self._asdict()
        return {"gate": named.pop("gate")} | {f"swiglu_{name}": value for name, value in named.items()}

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the formula elementwise, in the dtype of the tensors."""
        if self.gate == "relu2":
            return gate.relu().square() * up
        if self.gate != "silu":
            return nn.functional.gelu(gate, approximate="tanh" if self.gate == "gelu_tanh" else "none") * up
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


class QuantExperts(nn.Module):
    """Experts of a layer with quantised weights, for inference. The router is not included.

    Activations are FP8, with one scale per 128 elements of a token:

    1. ``moe_route_ids`` orders rows by expert.
    2. ``moe_permute_fp8quant`` quantises the tokens into that order.
    3. ``grouped_mm_fp8`` or ``grouped_mm_fp8_fp4`` multiplies by ``gate_up_proj``.
    4. ``moe_swiglu_fp8quant`` gates and quantises.
    5. A second grouped GEMM multiplies by ``down_proj``.
    6. ``moe_finalize`` adds up the outputs of each token's experts, multiplied by their routing weights.

    If FP8 weights have one scale per channel (``"fp8_channel"``), activations have one scale per token: in step 2,
    ``fp8_quantize`` quantises the tokens and torch copies its rows into the experts' order; in step 4,
    ``silu_mul_fp8quant`` gates and quantises. :meth:`scale_tokens_` does the same for FP4 weights. Experts in MXFP8
    call the same ops, which then write MXFP8: one scale per 32 elements.

    The host never waits for the device, and no shape depends on the routing, so calls can be captured. After
    :meth:`route_few_`, calls with few tokens use other ops. :class:`ExpertLayer` adds the router.

    Args:
        gate_up_proj: merged layer with a weight (E · 2I, H): gate and up of the first expert, then of the next, as
            :func:`torch_cute_ops.nn.merge` returns.
        down_proj: merged layer with a weight (E · H, I): the down layers of all experts.
        experts: E.
        swiglu: parameters of the gate.
        topk: number of experts per token, for :func:`torch_cute_ops.nn.warmup`; ``None`` if unknown.

    Raises:
        ValueError: for layers of inconsistent sizes, or sizes that the ops do not support.
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
        swiglu.check()
        self.experts, self.swiglu, self.topk = experts, swiglu, topk
        self.hidden_size, self.intermediate_size = gate_up_proj.in_features, down_proj.in_features
        if type(gate_up_proj) is not type(down_proj) or gate_up_proj.scheme not in FORMATS:
            names = f"{type(gate_up_proj).__name__} and {type(down_proj).__name__}"
            raise ValueError(
                f"QuantExperts: the layers are {names}; expected two layers of one format among {[*FORMATS]}"
            )
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
        gate_up_proj.as_stack_()
        down_proj.as_stack_()
        self.side_by_side: SideBySide | None = None
        self.prepared: PreparedScales | None = None
        self.tokens_of_expert: int | None = None
        self.register_load_state_dict_post_hook(_renew)

    def scale_tokens_(self) -> Self:
        """Quantise the FP8 activations of FP4 weights with one scale per token instead of one per 128 elements.

        :func:`torch_cute_ops.prepare_scales` makes prepared scales of the weights, which take another 1/16 to 1/8 byte
        per weight element. The state dict does not change. After weights are loaded, the prepared scales are computed
        again, in place. ``grouped_mm_fp8_fp4`` is called with ``fast_accum=False``. Calls with few tokens after
        :meth:`route_few_` are not affected: their activations are not FP8.

        Returns:
            The module itself.

        Raises:
            ValueError: for FP8 weights, whose format decides how activations are scaled.
        """
        if self.scheme not in ("nvfp4", "mxfp4"):
            raise ValueError(
                f"QuantExperts.scale_tokens_: the weights are in {self.scheme}, which decides how activations are "
                "scaled; expected 'nvfp4' or 'mxfp4'"
            )
        if self.prepared is None:
            self.prepared = PreparedScales(self)
        else:
            self.prepared.renew(self)
        return self

    @property
    def has_token_scales(self) -> bool:
        """True if activations in FP8 have one scale per token."""
        return self.scheme == "fp8_channel" or self.prepared is not None

    def route_few_(
        self,
        activations: FewActivations = "16bit",
        *,
        input_global_scale: Tensor | None = None,
        hidden_global_scale: Tensor | None = None,
        tokens_of_expert: int | None = None,
    ) -> Self:
        """Let calls with few tokens compute only the routed (token, expert) pairs, without permuting rows.

        With 16-bit activations the ops are ``moe_fc1_fp4_weight_only`` and ``moe_fc2_fp4_weight_only``. With
        activations in the weights' format they are ``fp4_quantize``, or ``fp4_quantize_per_token`` for
        ``"fp4_token"``, then ``moe_fc1_fp4`` and ``moe_fc2_fp4``.

        A call has few tokens if it has at most ``tokens_of_expert`` tokens per expert on average, and at most 512 in
        all. For 256 experts with I = 256, and 8 experts per token, the limit is 512 tokens. For large experts the limit
        is zero, for example for gpt-oss's experts with I = 2,880. Then nothing changes, and a warning says so.

        The number of tokens alone selects the path (the ops of a call). The two paths round activations differently. In
        each path, a token's result is bitwise independent of the other tokens and their experts. It can depend on the
        number of tokens, which selects the path and, on a GPU, the GEMMs' tactics.

        The down layers are stored a second time, side by side as (H, E · I/2), because these ops need this layout: one
        third more bytes in total. A call allocates a temporary tensor (M, E · I) and writes only its routed elements.
        The tensor takes 2 bytes per element in 16 bits, 9/16 bytes in NVFP4, or 17/32 bytes in MXFP4; for example 64
        MiB in 16 bits for 512 tokens of 256 experts with I = 256. The state dict does not change, so it does not
        contain global scales. If CUDA graphs were captured before with another value of ``activations``, capture them
        again.

        Args:
            activations: ``"16bit"``, for bfloat16 or float16 calls (float32 calls use the permuted path); ``"fp4"``;
                or, for NVFP4 weights, ``"fp4_token"``: each token has its own global scale, which the op computes.
            input_global_scale: float32, one element, global scale that multiplies the tokens before they are encoded:
                :func:`torch_cute_ops.nvfp4_global_scale` of their largest magnitude in a calibration. Larger values
                saturate. NVFP4 weights with ``"fp4"`` need it; other settings refuse it.
            hidden_global_scale: float32, (E,) or one element for all experts, global scale of an expert's activations
                between its two layers. NVFP4 weights with ``"fp4"`` or ``"fp4_token"`` need it; other settings refuse
                it.
            tokens_of_expert: largest average number of tokens per expert for which only routed pairs are computed;
                ``None`` for the measured limit ``nn.experts.few_tokens``.

        Returns:
            The module itself.

        Raises:
            ValueError: for FP8 weights; on a GPU without a kernel for these sizes; for other activations; for global
                scales that are missing, unsupported, or of a wrong shape.
        """
        choices = ("16bit", "fp4", "fp4_token") if self.scheme == "nvfp4" else ("16bit", "fp4")
        if activations not in choices:
            raise ValueError(
                f"QuantExperts.route_few_: activations is {activations!r}; expected one of {choices} for weights in "
                f"{self.scheme}"
            )
        device = self.down_proj.weight.device
        sizes = self.scheme, self.experts, self.hidden_size, self.intermediate_size
        reason = reason_unrouted(*sizes, device if device.type == "cuda" else None, activations)
        if reason is not None:
            raise ValueError(f"QuantExperts.route_few_: {reason}")
        scales = self._global_scales(activations, input_global_scale, hidden_global_scale)
        self.tokens_of_expert = tokens_of_expert
        if not self._most_of_expert():
            self.side_by_side = None
            warnings.warn(
                "QuantExperts.route_few_: nothing changed, because for experts with I = "
                f"{self.intermediate_size} no number of tokens is few; pass tokens_of_expert to set one",
                stacklevel=2,
            )
        elif self.side_by_side is None or self.side_by_side.activations != activations:
            self.side_by_side = SideBySide(self, activations, *scales)
        else:
            self.side_by_side.renew(self, *scales)
        return self

    def _global_scales(
        self, activations: str, input_scale: Tensor | None, hidden_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Check the global scales of the activations and return them with the shapes (1,) and (E,)."""
        given = {"input_global_scale": (input_scale, (1,)), "hidden_global_scale": (hidden_scale, (1, self.experts))}
        needed = {"fp4": tuple(given), "fp4_token": ("hidden_global_scale",)}.get(activations, ())
        if self.scheme != "nvfp4":
            needed = ()
        found: dict[str, Tensor] = {}
        for name, (scale, sizes) in given.items():
            expected = " or ".join(map(str, sizes))
            if scale is None and name in needed:
                raise ValueError(
                    f"QuantExperts.route_few_: activations in NVFP4 need {name}, {expected} float32, from a calibration"
                )
            if scale is None:
                continue
            if name not in needed:
                case = f"activations={activations!r} with weights in {self.scheme}"
                raise ValueError(f"QuantExperts.route_few_: {case} take no {name}")
            if scale.numel() not in sizes:
                raise ValueError(f"QuantExperts.route_few_: {name} has {scale.numel()} elements; expected {expected}")
            found[name] = scale.detach().to(self.down_proj.weight.device, torch.float32, copy=True).reshape(-1)
        hidden = found.get("hidden_global_scale")
        return found.get("input_global_scale"), None if hidden is None else hidden.expand(self.experts).contiguous()

    @property
    def scheme(self) -> str:
        """Format of the weights: ``"nvfp4"``, ``"mxfp4"``, ``"fp8_block"``, ``"fp8_channel"`` or ``"mxfp8"``."""
        return self.gate_up_proj.scheme

    @property
    def expert_factor(self) -> Tensor | None:
        """(E,) float32: for each expert, the factor by which its routing weights in :meth:`forward_dense` must be
        multiplied to undo global scales. None if no factors are needed.

        Pass it to ``moe_route_dense`` as ``expert_factor``.
        """
        return None if self.side_by_side is None else self.side_by_side.alpha

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts.

        Args:
            hidden_states: (M, H), bfloat16, float16 or float32.
            top_k_index: (M, topk), int32 or int64, experts of each token; topk is at most 32. A pair with the index -1
                adds nothing; use -1 for an expert on another rank, for example. A CPU refuses an index below -1, or of
                E or more. On a GPU such a pair adds nothing, unless ``TORCH_CUTE_OPS_CHECK=1``, which refuses it.
            top_k_weights: (M, topk), any floating-point dtype.

        Tokens and routing weights that require grad get gradients as if the experts' weights were decoded and
        activations were not rounded. The backward waits for the device, and ``torch.compile`` does not trace a call
        with gradients.

        Returns:
            (M, H) in the dtype of ``hidden_states``.

        Raises:
            ValueError, TypeError: for a wrong shape, dtype or device, as in the ops, or if a weight, a scale or a bias
                of the experts requires grad while gradients are enabled.
        """
        if is_proxy(hidden_states):
            return one_node(self, hidden_states, top_k_index, top_k_weights)
        check_routing(top_k_index, top_k_weights, self.experts)
        if torch.is_grad_enabled() and _straight_through.needs_gradient(
            hidden_states, top_k_weights, *self.parameters(), *self.buffers()
        ):
            return _straight_through.experts(self, hidden_states, top_k_index, top_k_weights)
        return self.summed(hidden_states, top_k_index, top_k_weights, hidden_states.dtype)

    def forward_dense(
        self,
        hidden_states: Tensor,
        routing: Tensor,
        *,
        has_factors: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the weighted sum of each token's experts from routed pairs only, for any M; needs :meth:`route_few_`.

        Args:
            hidden_states: (M, H), bfloat16 or float16; after ``route_few_`` with FP4 activations also float32.
            routing: (M, E) float32, each token's weight of each expert, as ``moe_route_dense`` returns it. Zeros are
                skipped, and an expert whose column is all zeros is not read.
            has_factors: True if ``routing`` is already multiplied by ``expert_factor``, as ``moe_route_dense`` can do.
            out_dtype: dtype of the result; ``None`` for the dtype of ``hidden_states``.

        Returns:
            (M, H) in ``out_dtype``; 0 for tokens without experts.

        Raises:
            RuntimeError: without :meth:`route_few_`.
            ValueError, TypeError: as :meth:`forward`.
        """
        few = self.side_by_side
        if few is None:
            raise RuntimeError(
                "QuantExperts.forward_dense: the down layers are not stored side by side; call route_few_()"
            )
        if few.alpha is not None and not has_factors:
            routing = torch.where(routing == 0, 0.0, routing * few.alpha)
        return self._few(few, hidden_states, routing, out_dtype or hidden_states.dtype)

    def forward_permuted(
        self,
        hidden_states: Tensor,
        weights: Tensor,
        expanded_to_permuted: Tensor,
        permuted_to_expanded: Tensor,
        offsets: Tensor,
        shared: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute the weighted sum of each token's experts from permuted rows, with FP8 activations.

        Args:
            hidden_states: (M, H), bfloat16, float16 or float32.
            weights: (M, topk) float32, weights of each token's experts.
            expanded_to_permuted, permuted_to_expanded, offsets: order of the rows, as ``moe_route`` and
                ``moe_route_ids`` return it with ``alignment=1``.
            shared: (M, H) in ``out_dtype``, added to each token's sum before the rounding, such as a shared expert's
                result; or ``None``.
            out_dtype: dtype of the result, to which each expert's result and the sum are rounded; ``None`` for the
                dtype of ``hidden_states``.

        Returns:
            (M, H) in ``out_dtype``.

        Raises:
            ValueError, TypeError: as :meth:`forward`.
        """
        rows = expanded_to_permuted, permuted_to_expanded, offsets
        return self._many(hidden_states, weights, *rows, shared, out_dtype or hidden_states.dtype)

    def summed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, sums: torch.dtype) -> Tensor:
        """Compute :meth:`forward`, but round each expert's result and each token's sum to the dtype ``sums``."""
        weights = top_k_weights.to(torch.float32)
        few, (tokens, topk) = self.side_by_side, top_k_index.shape
        if few is not None and self.are_routed(tokens, topk, hidden_states.dtype):
            every = torch.arange(self.experts, dtype=top_k_index.dtype, device=top_k_index.device)
            own = top_k_index.unsqueeze(-1) == every
            factors = weights.unsqueeze(-1) if few.alpha is None else weights.unsqueeze(-1) * few.alpha
            # Use torch.where, because multiplying by 0 would not remove the NaN factor of an expert that is not used.
            return self._few(few, hidden_states, torch.where(own, factors, 0.0).sum(1), sums)
        expanded, permuted, offsets, _ = moe_route_ids(as_int32(top_k_index, self.experts), self.experts, alignment=1)
        return self._many(hidden_states, weights, expanded, permuted, offsets, None, sums)

    def are_routed(self, tokens: int, topk: int, dtype: torch.dtype) -> bool:
        """Return True if a call with this many tokens in this dtype computes only routed pairs."""
        few = self.side_by_side
        if few is None or (few.activations == "16bit" and dtype.itemsize != 2):
            return False
        return self.is_few(tokens, topk)

    def is_few(self, tokens: int, topk: int) -> bool:
        """Return True if a call with ``tokens`` tokens has few tokens, as ``route_few_`` defines it."""
        return tokens <= MOST_FEW and tokens * topk <= self._most_of_expert() * self.experts

    def _most_of_expert(self) -> int:
        return few_tokens(self.intermediate_size) if self.tokens_of_expert is None else self.tokens_of_expert

    def _few(self, few: SideBySide, hidden_states: Tensor, routing: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Compute each token's weighted sum over experts. The routing weights (M, E) already include the experts'
        factors."""
        gate_up: Any = self.gate_up_proj
        weight, w_scale = gate_up.weight.unflatten(0, (self.experts, -1)).mT, gate_up.weight_scale
        down, down_scale = few.weight.mT, few.weight_scale
        options: dict[str, Any] = {"block_size": gate_up.format.block_size, "static_weight": True}
        first: dict[str, Any] = {"alpha": few.gate_up_alpha, "bias": few.gate_up_bias, **options}
        first |= self.swiglu.arguments()
        if few.activations == "16bit":
            h = moe_fc1_fp4_weight_only(hidden_states, weight, w_scale, routing, **first)
            return moe_fc2_fp4_weight_only(h, down, down_scale, routing, few.bias, out_dtype, **options)
        if few.activations == "fp4_token":
            a, a_scale, first["row_scale"] = fp4_quantize_per_token(hidden_states)
        else:
            a, a_scale = fp4_quantize(hidden_states, few.input_global_scale, gate_up.format.block_size)
        h, h_scale = moe_fc1_fp4(a, weight, a_scale, w_scale, routing, global_scale=few.hidden_global_scale, **first)
        return moe_fc2_fp4(h, down, h_scale, down_scale, routing, few.bias, out_dtype, **options)

    def _many(
        self,
        hidden_states: Tensor,
        weights: Tensor,
        expanded: Tensor,
        permuted: Tensor,
        offsets: Tensor,
        shared: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        by_row: dict[str, Any] | None = None  # arguments of ops that quantise rows in the tokens' order
        if self.scheme == "mxfp8":
            by_row = {"granularity": "block32", "scale_layout": "linear"}
        elif self.has_token_scales:
            by_row = {"interleaved": self.prepared is not None}
        if by_row is not None:
            a, a_scale = _permuted_tokens(hidden_states, permuted, weights.shape[-1], by_row)
        else:
            a, a_scale = moe_permute_fp8quant(hidden_states, permuted, weights.shape[-1], expanded)
        h = self._multiply(self.gate_up_proj, a, a_scale, offsets, hidden_states.dtype)
        if by_row is not None:
            a, a_scale = silu_mul_fp8quant(h, **by_row, **self.swiglu.arguments())
        else:
            a, a_scale = moe_swiglu_fp8quant(h, offsets, **self.swiglu.arguments())
        h = self._multiply(self.down_proj, a, a_scale, offsets, out_dtype)
        return moe_finalize(h, expanded, weights, shared)

    def _multiply(self, layer: Any, a: Tensor, a_scale: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        bias = None if layer.bias is None else layer.bias.unflatten(0, (self.experts, -1))
        weight = layer.weight.unflatten(0, (self.experts, -1)).mT
        if "fp8" in self.scheme:
            stored = layer.weight_scale_inv if self.scheme == "fp8_block" else layer.weight_scale
            if self.scheme == "fp8_channel":
                stored = stored.flatten()
            scale = stored.unflatten(0, (self.experts, -1))
            return grouped_mm_fp8(a, weight, a_scale, scale, offsets, bias=bias, out_dtype=dtype, static_weight=True)
        alpha = layer._alpha()
        if alpha is not None and alpha.numel() > 1:
            alpha = alpha.unflatten(0, (self.experts, -1))
        scale, block = layer.weight_scale, layer.format.block_size
        if self.prepared is not None:
            scale = self.prepared.gate_up_scale if layer is self.gate_up_proj else self.prepared.down_scale
        return grouped_mm_fp8_fp4(
            a, weight, a_scale, scale, offsets, None, alpha, bias, dtype, block, static_weight=True
        )

    def renew_derived(self) -> None:
        """Compute derived buffers again after the weights changed."""
        for derived in (self.side_by_side, self.prepared):
            if derived is not None:
                derived.renew(self)

    def split(self) -> Iterator[tuple[QuantLinear, QuantLinear, QuantLinear]]:
        """Yield the three layers (gate, up, down) of each expert. Codes are views, scales are copies."""
        gate_up, down = self.gate_up_proj.split(), self.down_proj.split()
        yield from zip(gate_up[0::2], gate_up[1::2], down, strict=True)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the decoded weights: gate and up (E, 2I, H), gate's rows first, and down (E, H, I)."""
        layers = self.gate_up_proj, self.down_proj
        gate_up, down = (layer.dequantize(dtype).unflatten(0, (self.experts, -1)) for layer in layers)
        return gate_up, down

    def extra_repr(self) -> str:
        """Return the sizes and settings that ``print(module)`` shows."""
        return f"experts={self.experts}, {self.swiglu}"


def _permuted_tokens(
    hidden_states: Tensor, permuted: Tensor, topk: int, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Quantise tokens (M, H) by rows, and copy the rows and scales into the experts' order.

    Args:
        hidden_states: (M, H).
        permuted: (R,) int32, index of each row's pair of a token and an expert, or a negative number for padding.
        topk: number of experts per token.
        arguments: keyword arguments of ``fp8_quantize``, for which each row has its own scales.
    """
    codes, scale = fp8_quantize(hidden_states, **arguments)
    tokens = (permuted // topk).clamp(min=0)
    # index bytes, because torch 2.9 does not index FP8 tensors
    return codes.view(torch.uint8).index_select(0, tokens).view(codes.dtype), scale.index_select(0, tokens)


def _renew(experts: Any, incompatible_keys: Any) -> None:
    """Hook that updates the derived buffers after a state dict was loaded."""
    experts.renew_derived()


def check_routing(top_k_index: Tensor, top_k_weights: Tensor, experts: int) -> None:
    """Check the dtypes of a routing and, if its values can be read, that each index is -1 or an expert below
    ``experts``.

    Values of compiled calls are not checked; values on a GPU only if ``TORCH_CUTE_OPS_CHECK`` is set.

    Args:
        top_k_index: (M, topk), experts of each token.
        top_k_weights: (M, topk), weights of each token's experts.
        experts: number of experts of the layer.

    Raises:
        TypeError: for indices that are not int32 or int64, or weights that are not floating-point numbers.
        ValueError: for indices in another shape than (M, topk), or an index out of range.
    """
    index, weights = top_k_index.dtype, top_k_weights.dtype
    if top_k_index.dim() != 2:
        raise ValueError(
            f"QuantExperts: got top_k_index with shape {tuple(top_k_index.shape)}; expected (M, topk): flatten the "
            "tokens"
        )
    if index not in (torch.int32, torch.int64):
        swapped = index.is_floating_point and not weights.is_floating_point
        fix = "pass the indices before the weights" if swapped else "pass top_k_index.long()"
        raise TypeError(f"QuantExperts: got top_k_index with dtype {index}; expected int32 or int64; {fix}")
    if not weights.is_floating_point:
        raise TypeError(f"QuantExperts: got top_k_weights with dtype {weights}; expected floating-point numbers")
    if torch.compiler.is_compiling() or type(top_k_index) not in PLAIN or not top_k_index.numel():
        return
    # Values on a GPU cannot be read while a CUDA graph is captured. The ops then raise an error that names the setting.
    reads_gpu = settings.CHECK and top_k_index.is_cuda and not torch.cuda.is_current_stream_capturing()
    if top_k_index.is_cpu or reads_gpu:
        wrong = index_out_of_range(top_k_index, experts)
        if wrong is not None:
            raise ValueError(
                f"QuantExperts: top_k_index holds {wrong}, out of range: there are {experts} experts; -1 stands for "
                "no expert"
            )


def reason_unsupported(scheme: str, experts: int, hidden: int, width: int) -> str | None:
    """Return the reason why the ops do not support experts of these sizes in this format, or None if they do."""
    if scheme not in FORMATS:
        return f"scheme is {scheme!r}; expected {', '.join(map(repr, FORMATS))} for experts"
    if not 1 <= experts <= MAX_EXPERTS:
        return f"the number of experts is {experts}; expected 1 to {MAX_EXPERTS}"
    multiple = 128 if scheme == "fp8_block" else MULTIPLE
    if hidden % multiple or width % multiple:
        return f"experts are {hidden} and {width} wide; expected multiples of {multiple}"
    return None


def reason_unrouted(
    scheme: str,
    experts: int,
    hidden: int,
    width: int,
    target: torch.device | str | None,
    activations: FewActivations = "16bit",
) -> str | None:
    """Return the reason why :meth:`QuantExperts.route_few_` does not support these experts, or None if it does.

    Args:
        scheme, experts, hidden, width: format and sizes that ``reason_unsupported`` accepts.
        target: GPU, or name of an architecture; ``None`` for the CPU references, which support all sizes.
        activations: as in ``route_few_``.
    """
    if "fp8" in scheme:
        return "the weights are in FP8; the ops take FP4"
    if target is None:
        return None
    fmt: Any = FORMATS[scheme]
    given = {"experts": experts, "block_size": fmt.format.block_size}
    where: dict[str, Any] = {"arch" if isinstance(target, str) else "device": target}
    sizes = {"moe_fc1_fp4": (experts * width, hidden), "moe_fc2_fp4": (hidden, experts * width)}
    for op, (n, k) in sizes.items():
        if activations == "16bit":
            reasons = backends(f"{op}_weight_only", n=n, k=k, **given, **where)
        else:
            scaled = {**given, "row_scale": activations == "fp4_token"} if op == "moe_fc1_fp4" else given
            reasons = backends(op, n=n, k=k, **scaled, **where)
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
    """Stack several layers, such as the layers of all experts, along N in one layer. Read the tensors of one layer at a
    time.

    Args:
        cls: class of linear layers of this package.
        in_features: K of every layer.
        parts: rows of each layer.
        tensors_of: function that takes a layer's index and returns the layer's tensors in checkpoint layout, by name.
            Tensors with names that ``cls`` does not use are ignored.
        device: device of the result.
        bias: (sum of ``parts``,), or ``None``.

    Raises:
        ValueError: for sizes that the class does not support.
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
    layer = cls._build(in_features, whole, bias, parts, "auto")
    layer.as_stack_()
    return layer


def as_int32(ids: Tensor, experts: int) -> Tensor:
    """Convert ids of experts to int32. Ids that are out of range stay out of range. A plain cast of int64 would keep
    only the low 32 bits, which may be the id of an expert."""
    return ids if ids.dtype == torch.int32 else ids.clamp(-2, experts).to(torch.int32)
