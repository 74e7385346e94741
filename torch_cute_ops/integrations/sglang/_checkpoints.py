"""SGLang's configurations of checkpoints, with this package's methods for the linear layers and experts that it
supports."""

import functools
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4Config,
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
)
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import nn

from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines.checkpoints import SupportedModels, scheme_of_algorithm, scheme_of_group
from torch_cute_ops.integrations._engines.prepare import Preparation
from torch_cute_ops.integrations.sglang._experts import CuteExpertsMethod, reason_left
from torch_cute_ops.integrations.sglang._linear import CuteLinearMethod, warn
from torch_cute_ops.integrations.sglang._prepare import is_deterministic, serving
from torch_cute_ops.nn._base import Activations

_READ_BY_MODELS: Final = ("kv_b_proj", "wo_a")
"""Last components of the names of layers that keep SGLang's own method, because SGLang's models read their weight and
scales directly: MLA's up-projection of keys and values, and DeepSeek-V4's grouped output projection."""
_LINEAR: Final = nn.Linear(1, 1, device="meta")
"""Linear layer that represents an expert's layer when layers are matched with a checkpoint's targets."""

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _CuteLayers(SupportedModels, _Base):
    """Part of a configuration that chooses the method of each layer.

    Attributes:
        activations: format of activations for FP4 weights.
        algorithm: ModelOpt's algorithm, or an empty string.
    """

    activations: Activations = "auto"
    algorithm: str = ""

    @functools.cached_property
    def preparation(self) -> Preparation:
        """Kernels that the model's layers need. All layers of a model share it."""
        return Preparation(serving)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return this package's method for a linear layer or experts in a supported format, otherwise SGLang's
        method."""
        own = functools.partial(super().get_quant_method, layer, prefix)
        if isinstance(layer, FusedMoE):
            scheme = self.scheme_of_experts(layer, prefix)
            if scheme is None:
                return own()
            reason = "their results would depend on the batch" if is_deterministic() else reason_left(scheme, layer)
            if reason is not None:
                warn(f"{prefix}: {reason}; SGLang's own method computes these experts")
                return own()
            return CuteExpertsMethod(scheme, prefix, self.activations, self.preparation, layer)
        if not isinstance(layer, (LinearBase, ParallelLMHead)) or prefix.split(".")[-1] in _READ_BY_MODELS:
            return own()
        scheme = self.scheme_of(layer, prefix)
        if scheme is None:
            return own()
        return CuteLinearMethod(
            scheme, prefix, self.activations, self.preparation, own, is_invariant=is_deterministic()
        )

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of a linear layer, or None for a layer that SGLang's own method computes."""
        raise NotImplementedError

    def scheme_of_experts(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of a layer of experts, or None for experts that SGLang's own method computes."""
        raise NotImplementedError


class CuteCompressedTensorsConfig(_CuteLayers, CompressedTensorsConfig):
    """Configuration of a compressed-tensors checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the group that targets the layer, or None for a format that only SGLang supports. As in
        SGLang, output heads are not quantised unless a group names them; SGLang's method computes such heads."""
        if isinstance(layer, ParallelLMHead) or self.linear_fp8_config is not None:
            return None
        return scheme_of_group(self.get_scheme_dict(layer, prefix), prefix, self.quant_format)

    def scheme_of_experts(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format that all layers of the first expert have, otherwise None."""
        names = (f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down"))
        groups = [self.get_scheme_dict(_LINEAR, name) for name in names]
        schemes = {scheme_of_group(group, prefix, self.quant_format) for group in groups}
        return schemes.pop() if len(schemes) == 1 else None


class CuteFp8Config(_CuteLayers, Fp8Config):
    """Configuration of a checkpoint in DeepSeek-V3's format."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return FP8 with block scales, or None for a layer that is not quantised."""
        if self.weight_block_size != [128, 128] or not isinstance(layer, LinearBase):
            return None
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return None
        return LayerScheme("fp8_block", "deepseek", "fp8")

    def scheme_of_experts(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return FP8 with block scales, or None for experts that are not quantised or in another format."""
        if self.weight_block_size != [128, 128] or self.is_fp4_experts:
            return None
        if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
            return None
        return LayerScheme("fp8_block", "deepseek", "fp8")


class CuteGptOssConfig(_CuteLayers, Mxfp4Config):
    """Configuration of a gpt-oss checkpoint, whose experts are in MXFP4."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return None: linear layers are not quantised."""
        return None

    def scheme_of_experts(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return MXFP4, with the rows of gate and up alternating."""
        return LayerScheme("mxfp4", "gpt-oss", "16bit")


class _ModelOpt(_CuteLayers):
    """Configuration of a ModelOpt checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the layer's algorithm, or None for an excluded layer."""
        skipped = is_layer_skipped(prefix, self.exclude_modules, self.packed_modules_mapping or {})
        if skipped or self.is_layer_excluded(prefix):
            return None
        return scheme_of_algorithm(self.algorithm_of(prefix), prefix)

    def scheme_of_experts(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the experts' algorithm, or None for excluded experts."""
        return None if self.is_layer_excluded(prefix) else scheme_of_algorithm(self.algorithm_of(prefix), prefix)

    def algorithm_of(self, prefix: str) -> str | None:
        """Return the layer's algorithm, by ModelOpt's name."""
        return self.algorithm


class CuteNvFp4Config(_ModelOpt, ModelOptFp4Config):
    """Configuration of a ModelOpt checkpoint in NVFP4."""


class CuteModelOptFp8Config(_ModelOpt, ModelOptFp8Config):
    """Configuration of a ModelOpt checkpoint in FP8 with a scale per tensor."""


class CuteMixedConfig(_ModelOpt, ModelOptMixedPrecisionConfig):
    """Configuration of a ModelOpt checkpoint whose layers have different formats."""

    def algorithm_of(self, prefix: str) -> str | None:
        """Return the layer's algorithm, by ModelOpt's name."""
        algorithm: str | None = self._resolve_quant_algo(prefix)
        return algorithm


CONFIGS: Final[dict[str, Any]] = {
    "compressed-tensors": CuteCompressedTensorsConfig,
    "fp8": CuteFp8Config,
    "gpt_oss_mxfp4": CuteGptOssConfig,
    "modelopt": CuteModelOptFp8Config,
    "modelopt_fp4": CuteNvFp4Config,
    "modelopt_mixed": CuteMixedConfig,
}
"""Configurations by style."""
