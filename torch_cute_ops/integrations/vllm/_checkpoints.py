"""vLLM's configurations of checkpoints, with this package's method for the linear layers that it supports."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torch_cute_ops.checkpoint.spec import LayerScheme, compressed_scheme, modelopt_scheme
from torch_cute_ops.integrations.vllm._config import LEAST_CAPABILITY
from torch_cute_ops.integrations.vllm._linear import CuteLinearMethod
from torch_cute_ops.integrations.vllm._prepare import Preparation
from torch_cute_ops.nn._base import Activations

_CONFIG: Final = Path("config.json")
"""File that error messages of the checkpoint reader name."""

_LINEAR: Final = nn.Linear(1, 1, device="meta")
"""Layer whose class the targets of compressed-tensors match as they match an output head's in transformers."""

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _CuteLayers(_Base):
    """Part of a configuration that chooses the method of each layer.

    Attributes:
        activations: format of activations for FP4 weights.
    """

    activations: Activations = "auto"

    @functools.cached_property
    def preparation(self) -> Preparation:
        """Kernels that the model's layers need. All layers of a model share it."""
        return Preparation()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return this package's method for a linear layer in a supported format, otherwise vLLM's method."""
        own = functools.partial(super().get_quant_method, layer, prefix)
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return own()
        scheme = self.scheme_of(layer, prefix)
        if scheme is None:
            return own()
        return CuteLinearMethod(scheme, prefix, self.activations, self.preparation, own)

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of a linear layer, or None for a layer that vLLM's own method computes."""
        raise NotImplementedError

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of models."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPUs that kernels support."""
        return LEAST_CAPABILITY


class CuteCompressedTensorsConfig(_CuteLayers, CompressedTensorsConfig):
    """Configuration of a compressed-tensors checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the group that targets the layer, or None for a format or a transform that only vLLM
        supports."""
        if self.transform_config is not None:
            return None
        # The target "Linear" includes an output head, which is no linear layer in vLLM's model.
        group = self.get_scheme_dict(_LINEAR if isinstance(layer, ParallelLMHead) else layer, prefix)
        if not group or group.get("weights") is None:
            return None
        try:
            plain = {name: _plain(value) for name, value in group.items()}
            return compressed_scheme(_CONFIG, f"{prefix}: ", plain, self.quant_format)
        except ValueError:  # a format of vLLM only
            return None


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


class _ModelOpt(_CuteLayers):
    """Configuration of a ModelOpt checkpoint."""

    def scheme_of(self, layer: nn.Module, prefix: str) -> LayerScheme | None:
        """Return the format of the layer's algorithm, or None for an excluded layer."""
        method = super(_CuteLayers, self).get_quant_method(layer, prefix)
        if method is None or isinstance(method, UnquantizedLinearMethod):
            return None
        algorithm = self.algorithm_of(prefix)
        known = {"FP8_PB_WO": "fp8_pb_wo"}
        try:
            return modelopt_scheme(_CONFIG, f"{prefix}: ", {"quant_algo": known.get(algorithm, algorithm)})
        except ValueError:
            return None

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
    "modelopt": CuteModelOptFp8Config,
    "modelopt_fp4": CuteNvFp4Config,
    "modelopt_mixed": CuteMixedConfig,
}
"""Configurations by the name of vLLM's method for the same style."""


def _plain(value: Any) -> Any:
    """Convert compressed-tensors' record of arguments to plain values, as in a checkpoint's JSON."""
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
