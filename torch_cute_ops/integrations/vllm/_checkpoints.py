"""vLLM's configurations of checkpoints, with this package's methods for the linear layers and experts that it
supports."""

import functools
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines.checkpoints import SupportedModels, scheme_of_algorithm, scheme_of_group
from torch_cute_ops.integrations._engines.prepare import Preparation
from torch_cute_ops.integrations.vllm._experts import CuteExpertsMethod, reason_left
from torch_cute_ops.integrations.vllm._linear import CuteLinearMethod
from torch_cute_ops.integrations.vllm._prepare import serving
from torch_cute_ops.nn._base import Activations

logger = init_logger(__name__)

_DECODED: Final = "kv_b_proj"
"""Last component of the name of MLA's layer whose weight vLLM decodes by multiplying an identity matrix by it."""
_READ_BY_MODELS: Final = "wo_a"
"""Last component of the name of the layer that keeps vLLM's own method, because vLLM's models read its weight and
scales directly: DeepSeek-V4's grouped output projection."""
_LINEAR: Final = nn.Linear(1, 1, device="meta")
"""Linear layer that represents an output head, or an expert's layer, when layers are matched with a checkpoint's
targets. In transformers, these layers are ``nn.Linear`` too."""

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _CuteLayers(SupportedModels, _Base):
    """Part of a configuration that chooses the method of each layer.

    Attributes:
        activations: format of activations for FP4 weights.
    """

    activations: Activations = "auto"

    @functools.cached_property
    def preparation(self) -> Preparation:
        """Kernels that the model's layers need. All layers of a model share it."""
        return Preparation(serving)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return this package's method for a linear layer or experts in a supported format, otherwise vLLM's method."""
        own = functools.partial(super().get_quant_method, layer, prefix)
        if isinstance(layer, RoutedExperts):
            scheme = self.scheme_of_experts(layer, prefix)
            if scheme is None:
                return own()
            reason = "their results depend on the batch" if envs.VLLM_BATCH_INVARIANT else reason_left(scheme, layer)
            if reason is not None:
                logger.warning_once("%s: %s; vLLM's own method computes these experts", prefix, reason)
                return own()
            return CuteExpertsMethod(scheme, prefix, self.activations, self.preparation, layer)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return own()
        scheme = self.scheme_of(layer, prefix)
        name = prefix.split(".")[-1]
        if scheme is None or name == _READ_BY_MODELS:
            return own()
        return CuteLinearMethod(
            scheme, prefix, self.activations, self.preparation, own,
            multiplies_identity=name == _DECODED, is_invariant=envs.VLLM_BATCH_INVARIANT,
        )  # fmt: skip

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of a linear layer, or None for a layer that vLLM's own method computes."""
        raise NotImplementedError

    def scheme_of_experts(self, layer: Any, prefix: str) -> LayerScheme | None:
        """Return the format of a layer of experts, or None for experts that vLLM's own method computes."""
        raise NotImplementedError


class CuteCompressedTensorsConfig(_CuteLayers, CompressedTensorsConfig):
    """Configuration of a compressed-tensors checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the group that targets the layer, or None for a format or a transform that only vLLM
        supports."""
        if self.transform_config is not None:
            return None
        # The target "Linear" includes an output head, which is not a linear layer in vLLM's model.
        return self._scheme_of(_LINEAR if isinstance(layer, ParallelLMHead) else layer, prefix)

    def scheme_of_experts(self, layer: Any, prefix: str) -> LayerScheme | None:
        """Return the format that all layers of the first expert have, otherwise None. As for linear layers, only vLLM
        supports transforms."""
        if self.transform_config is not None:
            return None
        names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        schemes = {self._scheme_of(_LINEAR, f"{prefix}.0.{name}") for name in names}
        return schemes.pop() if len(schemes) == 1 else None

    def _scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        return scheme_of_group(self.get_scheme_dict(layer, prefix), prefix, self.quant_format)


class CuteFp8Config(_CuteLayers, Fp8Config):
    """Configuration of a checkpoint in DeepSeek-V3's format."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return FP8 with block scales, or None for a layer that is not quantised."""
        if self.weight_block_size != [128, 128] or not isinstance(layer, LinearBase):
            return None
        method = super(_CuteLayers, self).get_quant_method(layer, prefix)
        if isinstance(method, UnquantizedLinearMethod):
            return None
        return LayerScheme("fp8_block", "deepseek", "fp8")

    def scheme_of_experts(self, layer: Any, prefix: str) -> LayerScheme | None:
        """Return FP8 with block scales, or None for experts that are not quantised or in another format."""
        if self.weight_block_size != [128, 128] or getattr(self, "store_dtype", None) == "mxfp4":
            return None
        skipped = is_layer_skipped(
            prefix,
            self.ignored_layers,
            self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        )
        return None if skipped else LayerScheme("fp8_block", "deepseek", "fp8")


class CuteGptOssConfig(_CuteLayers, GptOssMxfp4Config):
    """Configuration of a gpt-oss checkpoint, whose experts are in MXFP4."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return None: linear layers are not quantised."""
        return None

    def scheme_of_experts(self, layer: Any, prefix: str) -> LayerScheme | None:
        """Return MXFP4, with the rows of gate and up alternating."""
        return LayerScheme("mxfp4", "gpt-oss", "16bit")


class _ModelOpt(_CuteLayers):
    """Configuration of a ModelOpt checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the layer's algorithm, or None for an excluded layer."""
        method = super(_CuteLayers, self).get_quant_method(layer, prefix)
        if method is None or isinstance(method, UnquantizedLinearMethod):
            return None
        return scheme_of_algorithm(self.algorithm_of(prefix), prefix)

    def scheme_of_experts(self, layer: Any, prefix: str) -> LayerScheme | None:
        """Return the format of the experts' algorithm, or None for excluded experts."""
        return None if self.is_layer_excluded(prefix) else scheme_of_algorithm(self.algorithm_of(prefix), prefix)

    def algorithm_of(self, prefix: str) -> str:
        """Return the layer's algorithm, by ModelOpt's name."""
        return str(self.quant_method)


class CuteNvFp4Config(_ModelOpt, ModelOptNvFp4Config):
    """Configuration of a ModelOpt checkpoint in NVFP4."""


class CuteModelOptFp8Config(_ModelOpt, ModelOptFp8Config):
    """Configuration of a ModelOpt checkpoint in FP8."""


class CuteMixedConfig(_ModelOpt, ModelOptMixedPrecisionConfig):
    """Configuration of a ModelOpt checkpoint whose layers have different formats."""

    def algorithm_of(self, prefix: str) -> str:
        """Return the layer's algorithm, by ModelOpt's name."""
        return str(self._resolve_quant_algo(prefix))


CONFIGS: Final[dict[str, Any]] = {
    "compressed-tensors": CuteCompressedTensorsConfig,
    "fp8": CuteFp8Config,
    "gpt_oss_mxfp4": CuteGptOssConfig,
    "modelopt": CuteModelOptFp8Config,
    "modelopt_fp4": CuteNvFp4Config,
    "modelopt_mixed": CuteMixedConfig,
}
"""Configurations by the name of vLLM's method for the same style."""
