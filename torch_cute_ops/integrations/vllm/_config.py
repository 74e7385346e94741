"""Configuration classes in vLLM's registry. They recognise a checkpoint and build the configuration of its style."""

from collections.abc import Mapping
from typing import Any, Final

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from torch_cute_ops.integrations._engines.checkpoints import METHODS, RegisteredConfig, style_of
from torch_cute_ops.runtime import settings


class TorchCuteOpsConfig(RegisteredConfig, QuantizationConfig):
    """Base class of the configurations that vLLM's registry contains."""

    @classmethod
    def configs(cls) -> Mapping[str, Any]:
        """Return vLLM's configurations by style."""
        from torch_cute_ops.integrations.vllm import _checkpoints

        return _checkpoints.CONFIGS

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return this method's name if the user chose it and the checkpoint's style is supported, otherwise None."""
        chosen = user_quant == cls.name or (user_quant is None and cls.activations == settings.VLLM)
        style = style_of(hf_quant_cfg)
        if style == "gpt_oss_mxfp4" and getattr(hf_config, "model_type", None) != "gpt_oss":
            return None  # other models with this quant_method have another layout
        return cls.name if chosen and style is not None else None


class SixteenBitConfig(TorchCuteOpsConfig):
    """FP4 weights are multiplied by 16-bit activations."""

    activations = "auto"
    name = METHODS["auto"]


class FP4Config(TorchCuteOpsConfig):
    """FP4 weights are multiplied by FP4 activations, in layers with the input scales that NVFP4 needs."""

    activations = "fp4"
    name = METHODS["fp4"]


class FP8Config(TorchCuteOpsConfig):
    """FP4 weights are multiplied by FP8 activations with a scale per 128 elements of a row."""

    activations = "fp8"
    name = METHODS["fp8"]


CONFIGS: Final = (SixteenBitConfig, FP4Config, FP8Config)
