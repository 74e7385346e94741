"""Calls of ops that compute a layer of experts for tokens that an engine has routed.

The ops and their order are the same as in :class:`torch_cute_ops.nn.QuantExperts`. They are called through
``torch.ops.cute``, so that ``torch.compile`` traces no code of this package, whose files vLLM would hash.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from torch_cute_ops.formats.experts import MAX_TOPK
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.integrations._engines.gemms import BLOCK_SIZES, STATIC, Call
from torch_cute_ops.nn._expert_tensors import FewActivations
from torch_cute_ops.nn.experts import (
    FORMATS,
    MOST_FEW,
    QuantExperts,
    SwiGLU,
    as_int32,
    few_tokens,
    reason_unrouted,
    reason_unsupported,
)

MULTIPLES: Final = {"nvfp4": 64, "mxfp4": 64, "fp8_block": 128, "fp8_channel": 64}
"""Number that must divide the width of an expert, keyed by format. Engines pad other experts with zeros."""


@dataclass(frozen=True)
class ExpertForm:
    """Static description of a layer of experts: layers with equal forms call the same kernels.

    Attributes:
        scheme: format of the weights, a key of ``MULTIPLES``.
        few: activations of calls with few tokens, which compute only routed pairs: ``"16bit"`` or ``"fp4"``; None if
            every call permutes the tokens. Other calls have FP8 activations.
        experts: number of experts on this rank.
        of: number of experts of all ranks.
        hidden: H, the width of tokens.
        width: I, the width of an expert on this rank.
        topk: number of experts per token.
        swiglu: parameters of the gate.
        dtype: dtype of tokens, results and biases.
        has_bias: True if both layers of an expert add a bias.
    """

    scheme: str
    few: FewActivations | None
    experts: int
    of: int
    hidden: int
    width: int
    topk: int
    swiglu: SwiGLU
    dtype: torch.dtype
    has_bias: bool

    @property
    def reason_unsupported(self) -> str | None:
        """Reason that the ops do not support the layer, or None."""
        if not 1 <= self.topk <= MAX_TOPK:
            return f"a token has {self.topk} experts; expected at most {MAX_TOPK}"
        return reason_unsupported(self.scheme, self.experts, self.hidden, self.width)

    def is_few(self, tokens: int) -> bool:
        """Return True if a call with this many tokens computes only routed pairs.

        Tokens per expert are counted over all ranks, because the pairs are spread over the experts of all ranks.
        """
        return self.few is not None and tokens <= MOST_FEW and tokens * self.topk <= few_tokens(self.width) * self.of

    def bucket(self, m: int) -> Hashable:
        """Return a key that is equal for numbers of tokens that call the same kernels."""
        is_few = self.is_few(m)
        return is_few, bucket(m if is_few else m * self.topk)

    def calls(self, m: int) -> Iterator[Call]:
        """Yield the calls of ops for ``m`` tokens."""
        return _few_calls(self, m) if self.is_few(m) else _many_calls(self, m)


def few_activations(
    scheme: str, experts: int, hidden: int, width: int, arch: str | None, activations: FewActivations
) -> FewActivations | None:
    """Return the format of activations for few tokens: ``activations`` if kernels support it, else 16 bits; None if no
    number of tokens is few, or no kernel computes only routed pairs.

    Args:
        scheme, experts, hidden, width: as in :class:`ExpertForm`.
        arch: name of the GPU's architecture, or None for a CPU.
        activations: wanted format.
    """
    if not few_tokens(width):
        return None
    for each in dict.fromkeys((activations, "16bit")):
        if reason_unrouted(scheme, experts, hidden, width, arch, each) is None:
            return each
    return None


# Tensors


def build(
    form: ExpertForm,
    gate_up: Mapping[str, Tensor],
    down: Mapping[str, Tensor],
    *,
    input_global_scale: Tensor | None = None,
    hidden_global_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that :func:`compute` reads, by name.

    Args:
        form: form of the layer.
        gate_up: tensors of all experts' first layers in checkpoint layout, by the names of the arguments of the linear
            layer's ``from_tensors``; each has the experts as its first dimension, and gate's rows before up's rows.
        down: tensors of the second layers.
        input_global_scale, hidden_global_scale: as in ``QuantExperts.route_few_``; for NVFP4 activations only.

    Raises:
        ValueError: for sizes that the ops do not support.
    """
    cls: Any = FORMATS[form.scheme]
    parts = {"gate_up": (form.width,) * (2 * form.experts), "down": (form.hidden,) * form.experts}
    layers = {
        name: cls.from_tensors(**{key: _stacked(tensor) for key, tensor in given.items()}, parts=parts[name])
        for name, given in (("gate_up", gate_up), ("down", down))
    }
    module = QuantExperts(layers["gate_up"], layers["down"], form.experts, swiglu=form.swiglu, topk=form.topk)
    if form.few is not None:
        module.route_few_(form.few, input_global_scale=input_global_scale, hidden_global_scale=hidden_global_scale)
    return _tensors_of(module)


def bytes_of_copy(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the second copy of the down layers among the tensors of :func:`build`."""
    names = ("few_weight", "few_weight_scale")
    return sum(tensor.nbytes for name, tensor in tensors.items() if name in names)


def _stacked(tensor: Tensor) -> Tensor:
    """Flatten the expert dimension into the row dimension. Return a tensor with one number per expert unchanged."""
    return tensor if tensor.dim() == 1 else tensor.flatten(0, 1)


def _tensors_of(module: QuantExperts) -> dict[str, Tensor]:
    """Return the tensors of experts by the names that the calls read."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {"gate_up": module.gate_up_proj, "down": module.down_proj}
    for name, layer in layers.items():
        tensors[f"{name}_weight"] = layer.weight.unflatten(0, (module.experts, -1))
        if module.scheme in BLOCK_SIZES:
            tensors[f"{name}_scale"] = layer.weight_scale
            alpha = layer._alpha()
            if alpha is not None:
                tensors[f"{name}_alpha"] = alpha if alpha.numel() == 1 else alpha.unflatten(0, (module.experts, -1))
        else:
            scale = layer.weight_scale_inv if module.scheme == "fp8_block" else layer.weight_scale.flatten()
            tensors[f"{name}_scale"] = scale.unflatten(0, (module.experts, -1))
        if layer.bias is not None:
            tensors[f"{name}_bias"] = layer.bias.detach().unflatten(0, (module.experts, -1))
    if module.side_by_side is not None:
        tensors |= {f"few_{name}": tensor for name, tensor in module.side_by_side.named_buffers()}
        tensors["few_weight"] = tensors["few_weight"].contiguous()
    return tensors


# Calls


def compute(layer: Any, form: ExpertForm, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts on this rank, (M, H) in the dtype of ``x``.

    Args:
        layer: object whose attributes are the tensors of :func:`build`.
        form: form of the layer.
        x: (M, H), tokens.
        ids: (M, topk) int32 or int64, experts of this rank; -1 for an expert on another rank. Ids that belong to no
            expert of this rank count as -1.
        weights: (M, topk), weights of the experts.
    """
    weights = weights.to(torch.float32)
    # If the number of tokens is symbolic, for example when vLLM compiles for a CPU, the choice made while tracing is
    # used for all later calls. This is correct, because both functions accept any number of tokens.
    return (_few if form.is_few(len(x)) else _many)(layer, form, x, ids, weights)


def _few(layer: Any, form: ExpertForm, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    ops = torch.ops.cute
    # Pairs of other ranks go to an additional column E: without the sign bit, -1 is larger than E and is clamped to E.
    places = torch.bitwise_and(ids, 2**31 - 1).clamp(max=form.experts).to(torch.int64)
    alpha = getattr(layer, "few_alpha", None)
    if alpha is not None:
        weights = weights * alpha[places.clamp(max=form.experts - 1)]
    routing = x.new_zeros((len(x), form.experts + 1), dtype=torch.float32)
    routing = routing.scatter_add_(1, places, weights)[:, : form.experts]

    gate_up, gate_up_scale = layer.gate_up_weight.mT, layer.gate_up_scale
    down, down_scale = layer.few_weight.mT, layer.few_weight_scale
    options: dict[str, Any] = {"block_size": BLOCK_SIZES[form.scheme], **STATIC}
    first = {
        "alpha": getattr(layer, "few_gate_up_alpha", None), "bias": getattr(layer, "few_gate_up_bias", None),
        **form.swiglu.arguments(), **options,
    }  # fmt: skip
    bias = getattr(layer, "few_bias", None)
    if form.few == "16bit":
        h = ops.moe_fc1_fp4_weight_only(x, gate_up, gate_up_scale, routing, **first)
        y: Tensor = ops.moe_fc2_fp4_weight_only(h, down, down_scale, routing, bias, x.dtype, **options)
        return y
    a, a_scale = ops.fp4_quantize(x, getattr(layer, "few_input_global_scale", None), options["block_size"])
    first["global_scale"] = getattr(layer, "few_hidden_global_scale", None)
    h, h_scale = ops.moe_fc1_fp4(a, gate_up, a_scale, gate_up_scale, routing, **first)
    y = ops.moe_fc2_fp4(h, down, h_scale, down_scale, routing, bias, x.dtype, **options)
    return y


def _few_calls(form: ExpertForm, m: int) -> Iterator[Call]:
    is_nvfp4, block, given = form.scheme == "nvfp4", BLOCK_SIZES[form.scheme], _given(form, torch.float32)
    fc1 = {**given, "n": form.experts * form.width, "k": form.hidden, "m": m, **_gate(form)}
    fc2 = {**given, "n": form.hidden, "k": form.experts * form.width, "m": m, "out_dtype": form.dtype}
    fc1["block_size"] = fc2["block_size"] = block
    if is_nvfp4:
        fc1["alpha"] = "expert_half"
    if form.few == "16bit":
        yield "moe_fc1_fp4_weight_only", {**fc1, "dtype": form.dtype}
        yield "moe_fc2_fp4_weight_only", {**fc2, "dtype": form.dtype}
        return
    yield (
        "fp4_quantize",
        {"hidden": form.hidden, "dtype": form.dtype, "global_scale": is_nvfp4, "block_size": block},
    )
    if is_nvfp4:
        fc1["global_scales"] = "expert"
    yield "moe_fc1_fp4", fc1
    yield "moe_fc2_fp4", fc2


def _many(layer: Any, form: ExpertForm, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    ops, gate = torch.ops.cute, form.swiglu.arguments()
    expanded, permuted, offsets, _ = ops.moe_route_ids(as_int32(ids, form.experts), form.experts, 1)
    if form.scheme == "fp8_channel":
        codes, scale = ops.fp8_quantize(x)
        tokens = (permuted // form.topk).clamp(min=0)
        a = codes.view(torch.uint8).index_select(0, tokens).view(codes.dtype)  # torch 2.9 does not index FP8 tensors
        h = _product(layer, form, "gate_up", a, scale.index_select(0, tokens), offsets)
        a, scale = ops.silu_mul_fp8quant(h, **gate)
    else:
        a, scale = ops.moe_permute_fp8quant(x, permuted, form.topk, expanded)
        h = _product(layer, form, "gate_up", a, scale, offsets)
        a, scale = ops.moe_swiglu_fp8quant(h, offsets, **gate)
    h = _product(layer, form, "down", a, scale, offsets)
    y: Tensor = ops.moe_finalize(h, expanded, weights)
    return y


def _product(layer: Any, form: ExpertForm, name: str, a: Tensor, a_scale: Tensor, offsets: Tensor) -> Tensor:
    weight, scale = getattr(layer, f"{name}_weight").mT, getattr(layer, f"{name}_scale")
    epilogue = {"bias": getattr(layer, f"{name}_bias", None), "out_dtype": form.dtype, **STATIC}
    if form.scheme not in BLOCK_SIZES:
        y: Tensor = torch.ops.cute.grouped_mm_fp8(a, weight, a_scale, scale, offsets, **epilogue)
        return y
    alpha = getattr(layer, f"{name}_alpha", None)
    y = torch.ops.cute.grouped_mm_fp8_fp4(
        a, weight, a_scale, scale, offsets, alpha=alpha, block_size=BLOCK_SIZES[form.scheme], **epilogue
    )
    return y


def _many_calls(form: ExpertForm, m: int) -> Iterator[Call]:
    rows, dtype = m * form.topk, form.dtype
    yield "moe_route_ids", {"experts": form.experts}
    if form.scheme == "fp8_channel":
        yield "fp8_quantize", {"hidden": form.hidden, "dtype": dtype}
    else:
        yield "moe_permute_fp8quant", {"hidden": form.hidden, "dtype": dtype, "topk": form.topk}
    op = "grouped_mm_fp8_fp4" if form.scheme in BLOCK_SIZES else "grouped_mm_fp8"
    for n, k, is_first in ((2 * form.width, form.hidden, True), (form.hidden, form.width, False)):
        given = {**_given(form, dtype), "n": n, "k": k, "m": rows, "counts": False, "out_dtype": dtype}
        if form.scheme == "fp8_channel":
            given["token_scales"] = True
        elif form.scheme in BLOCK_SIZES:
            given["block_size"] = BLOCK_SIZES[form.scheme]
        if form.scheme == "nvfp4":
            given["alpha"] = "expert_column" if is_first or form.experts > 1 else "one"
        yield op, given
        if is_first and form.scheme == "fp8_channel":
            yield "silu_mul_fp8quant", {"hidden": 2 * form.width, "dtype": dtype, **_gate(form)}
        elif is_first:
            gate = {"hidden": 2 * form.width, "dtype": dtype, "offsets": True, "counts": False}
            yield "moe_swiglu_fp8quant", {**gate, **_gate(form)}
    yield "moe_finalize", {"hidden": form.hidden, "dtype": dtype, "topk": form.topk}


def _given(form: ExpertForm, bias: torch.dtype) -> dict[str, Any]:
    """Return the properties of all GEMMs of a form, with biases in the dtype ``bias``."""
    return {"experts": form.experts, **STATIC, **({"bias_dtype": bias} if form.has_bias else {})}


def _gate(form: ExpertForm) -> dict[str, Any]:
    """Return the properties of ops that compute the gate of a form."""
    return {"swiglu": form.swiglu.is_general, "gate": form.swiglu.gate}
