"""Method for vLLM's linear layers."""

from typing import Any, ClassVar

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from torch_cute_ops.integrations._engines.linear import Engine, LinearMethod, stored_fields

logger = init_logger(__name__)


@register_weight_loader_v2_supported_method
class CuteLinearMethod(LinearMethod, LinearMethodBase):
    """Method that multiplies by quantised weights with this package's kernels."""

    engine: ClassVar = Engine(
        name="vLLM",
        matrix=ModelWeightParameter,
        blocks=BlockQuantScaleParameter,
        channels=ChannelQuantScaleParameter,
        per_layer=PerTensorScaleParameter,
        unquantised=UnquantizedLinearMethod,
        warn=logger.warning_once,
    )

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Let an output head share the embedding's weight and method: a tied head needs no other tensors."""
        for field in stored_fields(self.scheme):
            delattr(layer, field.stored)
        method: Any = embed_tokens.quant_method
        layer.quant_method = method
        tied: nn.Module = method.tie_weights(layer, embed_tokens)
        return tied
