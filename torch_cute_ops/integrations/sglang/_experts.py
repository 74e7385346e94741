"""Method for SGLang's layers of routed experts."""

import functools
import logging
from typing import Any, ClassVar

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel
from torch import Tensor
from torch.nn import functional

from torch_cute_ops.checkpoint._layers import Field
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import experts
from torch_cute_ops.integrations._engines.expert_method import (
    GPT_OSS,
    SHARDS,
    ExpertsMethod,
    divided,
    reason_divided,
    reason_unread,
    rounded,
    width_of_rank,
)
from torch_cute_ops.integrations._engines.experts import ExpertForm
from torch_cute_ops.integrations._engines.prepare import Preparation
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._expert_tensors import FewActivations
from torch_cute_ops.nn.experts import SwiGLU

logger = logging.getLogger(__name__)


@functools.cache
def inform(message: str) -> None:
    """Log a message, each message once."""
    logger.info(message)


def swiglu_of(config: Any) -> SwiGLU | None:
    """Return the parameters of the experts' gate, or None for another activation function.

    Args:
        config: SGLang's ``MoeRunnerConfig``.
    """
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if not config.is_gated or config.gemm1_beta not in (None, 1.0):
        return None
    if config.activation == "silu" and alpha is None and limit is None:  # with a limit, SGLang clamps SiLU's result
        return SwiGLU(limit=config.swiglu_limit)
    if config.activation == "silu" and alpha is not None and config.swiglu_limit is None:
        return SwiGLU(alpha, 1.0, limit)
    if config.activation in ("gelu", "gelu_tanh") and (alpha, limit, config.swiglu_limit) == (None, None, None):
        return SwiGLU(gate=config.activation)
    return None


def reason_left(scheme: LayerScheme, layer: Any) -> str | None:
    """Return the reason why this package's method cannot compute a layer of experts, or None if it can. If there is a
    reason, SGLang's own method computes the layer.

    Args:
        scheme: format of the layer in the checkpoint.
        layer: SGLang's ``FusedMoE``, before it has weights.
    """
    config, is_gpt_oss = layer.moe_runner_config, scheme.style == GPT_OSS
    reason = reason_unread(scheme) or _reason_of_server()
    if reason is not None:
        return reason
    # Rows of gate and up alternate in experts with gpt-oss's gate, unless the setting says otherwise.
    alternates = config.gemm1_alpha is not None and config.gate_up_interleaved
    if swiglu_of(config) is None or alternates != is_gpt_oss:
        return f"the activation function is {config.activation} with settings that no kernel supports"
    if layer.with_bias != is_gpt_oss:
        return "gpt-oss's experts have no biases" if is_gpt_oss else "only gpt-oss's experts may have biases"
    if config.no_combine:
        return "the results of a token's experts are not added up"
    if config.apply_router_weight_on_input and layer.top_k > 1:
        return "the router's weights multiply the input, and a token has several experts"
    if layer.is_shared_fused_moe:
        return "the layer contains shared experts"
    hidden, width = rounded(scheme.format, config.hidden_size, config.intermediate_size_per_partition)
    if hidden != config.hidden_size:
        return f"the hidden size is {config.hidden_size}"
    ranks = 1 if is_gpt_oss else layer.moe_tp_size  # gpt-oss's experts are divided by blocks
    reason = reason_divided(scheme, ranks, config.intermediate_size_per_partition)
    return reason or _form(scheme.format, None, config, hidden, width).reason_unsupported


def _reason_of_server() -> str | None:
    """Return the reason in the server's settings why SGLang's own methods compute all experts, or None."""
    runner, moe, parallel = get_moe_runner_backend(), get_exec().moe, get_parallel()
    if not runner.is_auto():
        return f"--moe-runner-backend is {runner.value}"
    if not get_moe_a2a_backend().is_none():
        return f"--moe-a2a-backend is {get_moe_a2a_backend().value}"
    if moe.enable_eplb or moe.ep_num_redundant_experts or moe.init_expert_location != "trivial":
        return "EPLB, redundant experts or --init-expert-location is set"
    if moe.enable_paged_experts or moe.kt_weight_path is not None or parallel.dwdp_size > 1:
        return "paged experts, KTransformers or DWDP is enabled"
    if parallel.attn_dp_size > 1 or parallel.moe_dp_size > 1:
        return "data parallelism is enabled"
    lora = get_lora()
    return "LoRA is enabled" if lora.enable_lora or lora.lora_paths else None


def _form(fmt: str, few: FewActivations | None, config: Any, hidden: int, width: int) -> ExpertForm:
    swiglu = swiglu_of(config)
    if swiglu is None:  # some models change the configuration after they have created the layer
        raise ValueError(
            f"the experts' activation function is {config.activation} with gemm1_alpha={config.gemm1_alpha}, "
            f"gemm1_beta={config.gemm1_beta}, gemm1_clamp_limit={config.gemm1_clamp_limit} and "
            f"swiglu_limit={config.swiglu_limit}, which no kernel supports; serve this model without --quantization "
            "torch_cute_ops"
        )
    return ExpertForm(
        fmt, few, config.num_local_experts, config.num_experts, hidden, width, config.top_k, swiglu,
        config.params_dtype, config.layer.with_bias,
    )  # fmt: skip


class CuteExpertsMethod(ExpertsMethod, FusedMoEMethodBase):
    """Method that computes routed experts with this package's kernels. SGLang chooses the experts of each token, adds
    shared experts and sums over ranks.

    Args:
        scheme, prefix, activations, preparation: as in ``ExpertsMethod``.
        layer: SGLang's layer, for which :func:`reason_left` is None.
    """

    bias_name: ClassVar[str] = "weight_bias"

    def __init__(
        self, scheme: LayerScheme, prefix: str, activations: Activations, preparation: Preparation, layer: Any
    ) -> None:
        super().__init__(scheme, prefix, activations, preparation, has_few_tokens=True)
        self._config, self._width = layer.moe_runner_config, 0

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add a parameter for each tensor of the checkpoint. Arguments are as for SGLang's ``FusedMoEMethodBase``."""
        width = intermediate_size_per_partition
        if self.scheme.style == GPT_OSS:
            whole, ranks = width * layer.moe_tp_size, layer.moe_tp_size
            self._width = width_of_rank(whole, ranks, layer.moe_tp_rank)
            _, width = rounded(self.scheme.format, hidden_size, divided(whole, ranks))
        self.add_weights(layer, hidden_size, width, extra_weight_attrs["weight_loader"])

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Create nothing: without a runner, SGLang passes the chosen experts as ids of this rank's experts."""

    def form_of(self, few: FewActivations | None, hidden: int, width: int) -> ExpertForm:
        """Return the form of the layer."""
        return _form(self.scheme.format, few, self._config, hidden, width)

    def note(self, message: str) -> None:
        """Log a message once."""
        inform(message)

    def filled(self, tensor: Tensor, part: str, field: Field | None) -> Tensor:
        """Append zeros: parameters have the sizes of the checkpoint, because SGLang's loaders divide a parameter among
        ranks by its own size. Only gpt-oss's parameters have padded sizes."""
        if self.scheme.style == GPT_OSS:
            return self.zeroed(tensor, part, field, self._config.hidden_size, self._width)
        assert self.form is not None and field is not None
        hidden, width = self.form.hidden, self.form.width
        shape = field.shape(*((width, hidden) if part == "w13" else (hidden, width)))
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        data = data.unflatten(1, (SHARDS[part], -1))
        columns, rows = shape[-1] - data.shape[-1] if len(shape) > 1 else 0, shape[0] - data.shape[2]
        if not (columns or rows):
            return tensor  # pad would copy it
        data = functional.pad(data, (0, columns, 0, rows))
        return data.flatten(1, 2).view(tensor.dtype)

    # Use

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Return the weighted sum of each token's experts on this rank, (M, H). Arguments are as for SGLang's
        ``FusedMoEMethodBase``; the model adds shared experts. As in SGLang's Triton runner, the result is multiplied by
        the routed scaling factor."""
        assert self.form is not None
        x, topk, config = dispatch_output.hidden_states, dispatch_output.topk_output, layer.moe_runner_config
        weights = topk.topk_weights
        if config.apply_router_weight_on_input:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        if config.routed_scaling_factor is not None:
            weights = weights * config.routed_scaling_factor
        return StandardCombineInput(hidden_states=experts.compute(layer, self.form, x, topk.topk_ids, weights))
