"""Method for vLLM's layers of routed experts: the tensors that it loads, and the sum of each token's experts."""

from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from torch_cute_ops.checkpoint._layers import Field
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import experts
from torch_cute_ops.integrations._engines.expert_method import (
    GPT_OSS,
    ExpertsMethod,
    block_of,
    divided,
    reason_divided,
    reason_unread,
    rounded,
    width_of_rank,
)
from torch_cute_ops.integrations._engines.experts import ExpertForm
from torch_cute_ops.integrations._engines.prepare import Preparation
from torch_cute_ops.integrations.vllm._prepare import has_few_tokens
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._expert_tensors import FewActivations
from torch_cute_ops.nn.experts import SwiGLU

logger = init_logger(f"vllm.{__name__}")  # vLLM shows INFO only of loggers named vllm.*

_GPT_OSS_SHARD: Final = "gpt_oss_"
"""Start of the shard ids for tensors of a single expert of gpt-oss."""


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
    moe, is_gpt_oss = layer.moe_config, scheme.style == GPT_OSS
    parallel = moe.moe_parallel_config
    unread = reason_unread(scheme)
    if unread is not None:
        return unread
    if swiglu_of(moe) is None or (moe.activation.value == "swigluoai") != is_gpt_oss:
        return f"the activation function is {moe.activation.value}"
    if moe.is_lora_enabled:
        return "LoRA layers are on top"
    if parallel.enable_eplb:
        return "experts move between ranks (EPLB)"
    if moe.dp_size > 1 or moe.pcp_size > 1 or moe.is_sequence_parallel:
        return "ranks have different tokens"
    if layer.apply_router_weight_on_input and moe.experts_per_token > 1:
        return "the router's weights multiply the input, and a token has several experts"
    if moe.has_bias and not is_gpt_oss and moe.tp_size > 1:
        return "ranks share a bias"
    reason = None if is_gpt_oss else reason_divided(scheme, moe.tp_size, moe.intermediate_size_per_partition)
    if reason is not None:
        return reason
    if moe.hidden_dim % block_of(scheme.format):
        return f"the hidden size is {moe.hidden_dim}"
    hidden, width = rounded(scheme.format, moe.hidden_dim, moe.intermediate_size_per_partition)
    return _form(scheme.format, None, moe, hidden, width).reason_unsupported


def _form(fmt: str, few: FewActivations | None, moe: Any, hidden: int, width: int) -> ExpertForm:
    swiglu = swiglu_of(moe)
    assert swiglu is not None
    return ExpertForm(
        fmt, few, moe.num_local_experts, moe.num_experts, hidden, width, moe.experts_per_token, swiglu, moe.in_dtype,
        moe.has_bias,
    )  # fmt: skip


class CuteExpertsMethod(ExpertsMethod, FusedMoEMethodBase):
    """Method that computes routed experts with this package's kernels. vLLM chooses the experts of each token, adds
    shared experts and sums over ranks.

    Args:
        scheme, prefix, activations, preparation: as in ``ExpertsMethod``.
        layer: vLLM's layer, for which :func:`reason_left` is None.
    """

    turned_off: ClassVar[str] = '; --additional-config \'{"torch_cute_ops": {"few_tokens": false}}\' avoids the copy'

    def __init__(
        self, scheme: LayerScheme, prefix: str, activations: Activations, preparation: Preparation, layer: Any
    ) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        ExpertsMethod.__init__(self, scheme, prefix, activations, preparation, has_few_tokens=has_few_tokens())
        self._width = self.moe.intermediate_size_per_partition  # without padding
        if scheme.style == GPT_OSS:
            self.weight_dtype = "gpt_oss_mxfp4"
            self._width = width_of_rank(self.moe.intermediate_size, self.moe.tp_size, self.moe.tp_rank)

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
        return rounded(self.scheme.format, hidden_size, intermediate_size_per_partition)

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
        refused = self._reason_whole(intermediate_size_per_partition)

        def check_shard(shard: str) -> None:
            if refused is not None and shard.startswith(_GPT_OSS_SHARD):
                raise ValueError(refused)

        self.add_weights(
            layer, hidden_size, intermediate_size_per_partition, extra_weight_attrs["weight_loader"], check_shard
        )

    def form_of(self, few: FewActivations | None, hidden: int, width: int) -> ExpertForm:
        """Return the form of the layer."""
        return _form(self.scheme.format, few, self.moe, hidden, width)

    def note(self, message: str) -> None:
        """Log a message once."""
        logger.info_once(message)

    def _reason_whole(self, padded: int) -> str | None:
        """Return the reason why ranks cannot load gpt-oss's experts from separate tensors for each expert, or None if
        they can.

        For a tensor of a single expert, vLLM's loader divides the padded width among the ranks. For a tensor of all
        experts, the loader divides the blocks of scales among the ranks.

        Args:
            padded: width of an expert on this rank, with padding.
        """
        each = divided(self.moe.intermediate_size, self.moe.tp_size)
        if self.scheme.style != GPT_OSS or self.moe.tp_size == 1 or each == padded:
            return None
        return (
            f"{self.prefix}: the checkpoint has a tensor for each expert, which vLLM divides by {padded} columns per "
            f"rank instead of {each}; use --enable-expert-parallel, another number of ranks, or a checkpoint whose "
            "tensors contain all experts"
        )

    def filled(self, tensor: Tensor, part: str, field: Field | None) -> Tensor:
        """Write zeros beyond the rows and columns that the checkpoint contains: parameters have the padded sizes."""
        return self.zeroed(tensor, part, field, self.moe.hidden_dim_unpadded, self._width)

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
