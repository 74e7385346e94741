"""Method for vLLM's layers of routed experts: the tensors that it loads, and the sum of each token's experts."""

import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from torch_cute_ops.checkpoint._layers import READ, Field
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import experts
from torch_cute_ops.integrations._engines.experts import MULTIPLES, ExpertForm
from torch_cute_ops.integrations._engines.linear import (
    UNLOADED,
    Loader,
    as_bytes,
    is_unloaded,
    keeps_input_scale,
    mark_unloaded,
)
from torch_cute_ops.integrations._engines.prepare import Preparation, arch_of
from torch_cute_ops.integrations.vllm._prepare import has_few_tokens
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.experts import SwiGLU
from torch_cute_ops.quantized import FP4_FORMATS, FP8_BLOCK

logger = init_logger(f"vllm.{__name__}")  # vLLM shows INFO only of loggers named vllm.*

_GPT_OSS: Final = "gpt-oss"
_GPT_OSS_SHARD: Final = "gpt_oss_"
"""Start of the shard ids for tensors of a single expert of gpt-oss."""
_SHARDS: Final = {"w13": 2, "w2": 1}
"""Number of an expert's layers in each of vLLM's parameters."""


def swiglu_of(moe: Any) -> SwiGLU | None:
    """Return the parameters of the experts' gate, or None for another activation function.

    Args:
        moe: vLLM's ``FusedMoEConfig``.
    """
    kind = moe.activation.value
    if kind == "silu":
        return SwiGLU(limit=moe.swiglu_limit)
    if kind == "swigluoai":  # vLLM's op for gpt-oss has these constants
        return SwiGLU(1.702, 1.0, 7.0)
    if kind == "swigluoai_uninterleave":
        alpha, beta = moe.swiglu_alpha, moe.swiglu_beta
        return SwiGLU(1.0 if alpha is None else alpha, 0.0 if beta is None else beta, moe.swiglu_limit)
    if kind in ("gelu", "gelu_tanh"):
        return SwiGLU(gate=kind)
    return None


def reason_left(scheme: LayerScheme, layer: Any) -> str | None:
    """Return the reason why this package's method cannot compute a layer of experts, or None if it can. If there is a
    reason, vLLM's own method computes the layer.

    Args:
        scheme: format of the layer in the checkpoint.
        layer: vLLM's ``RoutedExperts``, before it has weights.
    """
    moe, is_gpt_oss = layer.moe_config, scheme.style == _GPT_OSS
    parallel = moe.moe_parallel_config
    if (scheme.style, scheme.format) not in _READ or scheme.format not in MULTIPLES:
        return f"experts in {scheme.format} of {scheme.style} have no kernel"
    if swiglu_of(moe) is None or (moe.activation.value == "swigluoai") != is_gpt_oss:
        return f"the activation function is {moe.activation.value}"
    if moe.is_lora_enabled:
        return "LoRA layers are on top"
    if parallel.enable_eplb:
        return "experts move between ranks (EPLB)"
    if moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel:
        return "ranks have different tokens"
    if layer.apply_router_weight_on_input and moe.experts_per_token > 1:
        return "several weights of the router multiply the input"
    if moe.has_bias and not is_gpt_oss and moe.tp_size > 1:
        return "ranks share a bias"
    block = FP8_BLOCK if scheme.format == "fp8_block" else _block_of(scheme.format)
    if not is_gpt_oss and moe.tp_size > 1 and moe.intermediate_size_per_partition % block:
        return "ranks share a block of scales"
    if moe.hidden_dim % _block_of(scheme.format):
        return f"the hidden size is {moe.hidden_dim}"
    hidden, width = _rounded(scheme.format, moe.hidden_dim, moe.intermediate_size_per_partition)
    return _form(scheme.format, None, moe, hidden, width).reason_unsupported


def _block_of(fmt: str) -> int:
    """Return the number of columns that share a scale of an FP4 weight, or 1 for other formats."""
    return FP4_FORMATS[fmt].block_size if fmt in FP4_FORMATS else 1


def _rounded(fmt: str, hidden: int, width: int) -> tuple[int, int]:
    """Round the widths of experts up to multiples that kernels support."""
    multiple = MULTIPLES[fmt]
    return -(-hidden // multiple) * multiple, -(-width // multiple) * multiple


def _form(fmt: str, few: Any, moe: Any, hidden: int, width: int) -> ExpertForm:
    swiglu = swiglu_of(moe)
    assert swiglu is not None
    return ExpertForm(
        fmt, few, moe.num_local_experts, moe.num_experts, hidden, width, moe.experts_per_token, swiglu, moe.in_dtype,
        moe.has_bias,
    )  # fmt: skip


_READ: Final = {**READ, (_GPT_OSS, "mxfp4"): tuple(each for each in READ["modelopt", "mxfp4"] if not each.is_optional)}
"""Tensors of a linear layer in a checkpoint. vLLM gives gpt-oss's tensors the same names."""


class CuteExpertsMethod(FusedMoEMethodBase):
    """Method that computes routed experts with this package's kernels. vLLM chooses the experts of each token, adds
    shared experts and sums over ranks.

    Calls with few tokens compute only routed pairs of a token and an expert, with 16-bit activations (or FP4). Calls
    with more tokens permute them by expert and have FP8 activations. Experts whose widths kernels do not support are
    padded with zeros.

    Args:
        scheme: format of the layer in the checkpoint.
        prefix: name of the layer, for messages.
        activations: format of activations for FP4 weights.
        preparation: kernels of the model's layers; this layer adds its own.
        layer: vLLM's layer, for which :func:`reason_left` is None.
    """

    def __init__(
        self, scheme: LayerScheme, prefix: str, activations: Activations, preparation: Preparation, layer: Any
    ) -> None:
        super().__init__(layer.moe_config)
        self.scheme, self.prefix, self.activations, self.preparation = scheme, prefix, activations, preparation
        self.form: ExpertForm | None = None
        self._has_few_tokens = has_few_tokens()
        self._has_input_scale: bool | None = None
        self._width = self.moe.intermediate_size_per_partition  # without zeros
        if scheme.style == _GPT_OSS:
            # vLLM's loader divides these experts among ranks by blocks of scales, so that the last rank gets fewer.
            self.weight_dtype = "gpt_oss_mxfp4"
            most = self._divided
            self._width = min(max(self.moe.intermediate_size - self.moe.tp_rank * most, 0), most)

    @property
    def _divided(self) -> int:
        """Width of gpt-oss's experts on each rank except the last, without padding."""
        block = _block_of("mxfp4")
        return -(-self.moe.intermediate_size // block // self.moe.tp_size) * block

    @property
    def supports_eplb(self) -> bool:
        """False: experts cannot move between ranks."""
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """Round the widths of experts up to multiples that kernels support."""
        return _rounded(self.scheme.format, hidden_size, intermediate_size_per_partition)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: vLLM's own kernels are not used."""
        return

    # Loading

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add a parameter for each tensor of the checkpoint. Arguments are as for vLLM's ``FusedMoEMethodBase``."""
        loader = extra_weight_attrs["weight_loader"]
        refused = self._reason_whole(intermediate_size_per_partition)
        sizes = {
            "w13": (intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for part, (n, k) in sizes.items():
            for field in self._fields():
                parameter = self._parameter(field, num_experts, _SHARDS[part], n, k)
                vars(parameter)["weight_loader"] = _adapted(loader, layer, field, refused)
                layer.register_parameter(f"{part}_{field.stored}", parameter)
            if self.moe.has_bias:
                bias = nn.Parameter(
                    torch.zeros((num_experts, _SHARDS[part] * n), dtype=params_dtype), requires_grad=False
                )
                vars(bias)["weight_loader"] = loader
                layer.register_parameter(f"{part}_bias", bias)
        self._set_form(hidden_size, intermediate_size_per_partition, torch.empty(0).device, self._has_input_scales())
        assert self.form is not None
        self.preparation.add(self.form)

    def _reason_whole(self, padded: int) -> str | None:
        """Return the reason why ranks cannot load gpt-oss's experts from separate tensors for each expert, or None if
        they can.

        For a tensor of a single expert, vLLM's loader divides the padded width among the ranks. For a tensor of all
        experts, the loader divides the blocks of scales among the ranks.

        Args:
            padded: width of an expert on this rank, with padding.
        """
        each = self._divided
        if self.scheme.style != _GPT_OSS or self.moe.tp_size == 1 or each == padded:
            return None
        return (
            f"{self.prefix}: the checkpoint has a tensor for each expert, which vLLM divides by {padded} columns per "
            f"rank instead of {each}; use --enable-expert-parallel, another number of ranks, or a checkpoint whose "
            "tensors contain all experts"
        )

    def _fields(self) -> Iterator[Field]:
        """Yield the tensors that the checkpoint contains for an expert's layer."""
        for field in _READ[self.scheme.style, self.scheme.format]:
            # ModelOpt's weight-only checkpoints may contain input scales.
            is_there = self.scheme.activations in ("fp4", "fp8_static") or self.scheme.style == "modelopt"
            if not field.is_optional or (is_there and self.scheme.activations != "fp8"):
                yield field

    def _has_input_scales(self) -> bool:
        return self.scheme.activations == "fp4" and self.scheme.format == "nvfp4"

    def _set_form(self, hidden: int, width: int, device: torch.device, has_input_scales: bool) -> None:
        """Set the form of the layer. FP4 activations of NVFP4 weights need input scales."""
        fmt, count = self.scheme.format, self.moe.num_local_experts
        wants_fp4 = self.activations == "fp4" and (has_input_scales or fmt == "mxfp4")
        few = None
        if self._has_few_tokens:
            few = experts.few_activations(fmt, count, hidden, width, arch_of(device), "fp4" if wants_fp4 else "16bit")
        self.form = _form(fmt, few, self.moe, hidden, width)

    def _parameter(self, field: Field, count: int, shards: int, n: int, k: int) -> nn.Parameter:
        """Return the parameter for a stored tensor of all experts. Its attributes tell vLLM's loader how ranks divide
        the tensor.

        Args:
            field: stored tensor.
            count: number of experts.
            shards: number of an expert's layers in the parameter.
            n: rows of each of these layers.
            k: columns.
        """
        dtype, shape, kind = field.dtypes[0], field.shape(n, k), None
        if field.name in ("weight_scale_2", "input_scale"):
            shape, kind = ((2,) if shards == 2 else ()), "tensor"
        elif self.scheme.format == "fp8_channel" and field.name == "weight_scale":
            shape, kind = (shards * n, *shape[1:]), "channel"
        else:
            shape = (shards * shape[0], shape[-1])
            if field.name != "weight":
                kind = "block"
        data = torch.empty((count, *shape), dtype=dtype)
        if kind is not None:
            data.view(torch.uint8).fill_(UNLOADED)
        parameter = nn.Parameter(data, requires_grad=False)
        if kind is not None:
            vars(parameter)["quant_method"] = kind
        return parameter

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loaded tensors by the tensors that the kernels read, and prepare the kernels.

        As for linear layers, a second call keeps the form that the first call set.

        Raises:
            ValueError: if the checkpoint lacks a tensor of an expert.
        """
        assert self.form is not None
        hidden, width = self.form.hidden, self.form.width
        parts = {name: self._taken(layer, name) for name in _SHARDS}
        scales = [_reciprocal(part.pop("input_scale", None)) for part in parts.values()]
        both = [each for each in scales if each is not None]
        of_both = {"input_scale": both} if len(both) == len(scales) else {}
        self._has_input_scale = keeps_input_scale(self.prefix, of_both, self._has_input_scale)
        device, given = parts["w13"]["weight"].device, {}
        self._set_form(hidden, width, device, self._has_input_scale)
        if self.form.few == "fp4" and of_both:
            of_input, of_hidden = of_both["input_scale"]
            given = {"input_global_scale": of_input.min().reshape(1), "hidden_global_scale": of_hidden}
        tensors = experts.build(self.form, parts["w13"], parts["w2"], **given)
        copied = experts.bytes_of_copy(tensors)
        if copied:
            logger.info_once(
                "each layer of %d experts takes %.1f MiB more for calls with few tokens, a second copy of its down "
                'layers; --additional-config \'{"torch_cute_ops": {"few_tokens": false}}\' turns them off',
                self.form.experts, copied / 2**20,
            )  # fmt: skip
        for name, tensor in tensors.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.preparation.add(self.form)
        self.preparation.run(device)

    def _taken(self, layer: Any, part: str) -> dict[str, Tensor]:
        """Remove the loaded parameters of ``w13`` or ``w2`` from a layer. Return them by the names that
        ``torch_cute_ops.nn`` uses, with zeros for elements that the checkpoint does not contain.

        Raises:
            ValueError: if the checkpoint lacks a tensor of an expert.
        """
        taken = {}
        names = [(field.stored, field) for field in self._fields()] + [("bias", None)] * self.moe.has_bias
        for stored, field in names:
            parameter = getattr(layer, f"{part}_{stored}")
            tensor: Tensor = parameter.data
            delattr(layer, f"{part}_{stored}")
            if self._has_input_scale is not None and field is not None and field.name != "weight":
                mark_unloaded(parameter)
            if field is not None and field.name == "input_scale":
                taken[field.name] = tensor.reciprocal() if field.is_reciprocal else tensor
                continue
            if tensor.dim() > 1 and (field is None or field.name != "weight_scale_2"):
                self._fill_up(tensor, part, field)
            if field is not None and field.name != "weight" and bool(is_unloaded(tensor).any()):
                raise ValueError(
                    f"{self.prefix}: the checkpoint has no {part}_{stored}, or not for every expert; experts that are "
                    "not quantised belong in the ignored layers of quantization_config"
                )
            if part == "w13" and self.scheme.style == _GPT_OSS:  # gate and up alternate
                tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
            name = "bias" if field is None else field.name
            if name == "weight_scale_2":
                tensor = tensor.reshape(-1)
            elif self.scheme.format == "fp8_channel" and name == "weight_scale":
                tensor = tensor.flatten(1).unsqueeze(-1)
            elif name == "bias":
                tensor = tensor.to(self.moe.in_dtype)
            taken[name] = tensor.reciprocal() if field is not None and field.is_reciprocal else tensor
        return taken

    def _fill_up(self, tensor: Tensor, part: str, field: Field | None) -> None:
        """Write zeros beyond the rows and columns that the checkpoint contains. A code of 0 is 0 with every finite
        scale.

        Args:
            tensor: (E, rows, ...), loaded tensor of all experts.
            part: ``"w13"`` or ``"w2"``.
            field: stored tensor, or None for a bias.
        """
        hidden, width = self.moe.hidden_dim_unpadded, self._width
        rows, columns = (width, hidden) if part == "w13" else (hidden, width)
        if field is not None:
            shape = field.shape(rows, columns)
            rows, columns = shape[0], shape[-1]
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        if part == "w13" and self.scheme.style == _GPT_OSS:
            data[:, 2 * rows :] = 0
        else:
            data.unflatten(1, (_SHARDS[part], -1))[:, :, rows:] = 0
        if data.dim() == 3 and data.shape[-1] > 1:
            data[..., columns:] = 0

    # Use

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts on this rank, (M, H). Arguments are as for vLLM's
        ``FusedMoEMethodBase``; vLLM adds shared experts."""
        assert self.form is not None
        if layer.apply_router_weight_on_input:
            x, topk_weights = (x * topk_weights).to(x.dtype), torch.ones_like(topk_weights)
        expert_map = layer.expert_map
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.to(torch.int64)]
        return experts.compute(layer, self.form, x, topk_ids, topk_weights)


def _adapted(loader: Callable[..., Any], layer: Any, field: Field, refused: str | None) -> Callable[..., Any]:
    """Return vLLM's loader for a tensor whose stored form vLLM's loader does not know.

    Bytes of codes and of e8m0 scales are copied whatever dtype the checkpoint gives them; ModelOpt's block scales lose
    their dimensions of size 1; and the input scales of gate and up are stored separately, which vLLM's loader does only
    for parameters whose name does not contain ``input_scale``.

    Args:
        loader: vLLM's function that copies this rank's part.
        layer: layer of the experts.
        field: stored tensor.
        refused: reason that this rank's part of gpt-oss's experts cannot be loaded one expert after the other, or None.
    """

    def converted(loaded_weight: Tensor) -> Tensor:
        if field.dtypes[0] == torch.uint8:
            loaded_weight = as_bytes(loaded_weight)
        if field.name == "weight_scale_inv" and loaded_weight.dim() == 4:
            loaded_weight = loaded_weight.flatten(2).flatten(0, 1)
        return loaded_weight

    copy = Loader(loader, layer, is_marking=field.name != "weight").bound(converted).__func__

    def load(
        owner: Any,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        if refused is not None and str(shard_id).startswith(_GPT_OSS_SHARD):
            raise ValueError(refused)
        if field.name == "input_scale":
            weight_name = weight_name.replace("input_scale", "scale").replace("input_global_scale", "scale")
        return copy(
            owner, param, loaded_weight, weight_name=weight_name, shard_id=shard_id, expert_id=expert_id,
            return_success=return_success,
        )  # fmt: skip

    return types.MethodType(load, layer)


def _reciprocal(scales: Tensor | None) -> Tensor | None:
    """Return the global scales of activations, (E,) or (E, 2), from the input scales of experts, or None if no expert
    has a calibrated scale. Experts without a calibrated scale get the largest input scale."""
    if scales is None:
        return None
    is_calibrated = scales.isfinite() & (scales > 0)
    if not bool(is_calibrated.any()):
        return None
    largest = scales[is_calibrated].max()
    return torch.where(is_calibrated, scales, largest).reciprocal()
