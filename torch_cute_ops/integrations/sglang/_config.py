"""Configuration classes in SGLang's registry. They recognise a checkpoint and build the configuration of its style."""

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.layers.quantization.base_config import QuantizationConfig

from torch_cute_ops.integrations._engines.checkpoints import METHODS, RegisteredConfig, algorithm_of, style_of


class TorchCuteOpsConfig(RegisteredConfig, QuantizationConfig):
    """Base class of the configurations that SGLang's registry contains."""

    @classmethod
    def configs(cls) -> Mapping[str, Any]:
        """Return SGLang's configurations by style."""
        from torch_cute_ops.integrations.sglang import _checkpoints

        return _checkpoints.CONFIGS

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the configuration of the checkpoint's style.

        Raises:
            ValueError: for an unsupported style; for a checkpoint whose activations are transformed online.
        """
        if config.get("transform_config"):
            raise ValueError(
                f"--quantization {cls.name}: the checkpoint has a transform_config, whose online transforms SGLang's "
                "linear layers do not compute; expected a checkpoint without transforms"
            )
        made = super().from_config(config)
        made.algorithm = algorithm_of(config)
        return made

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        """Return this method's name if the user chose it and the checkpoint's style is supported, otherwise None."""
        if user_quant != cls.name or hf_quant_cfg is None or style_of(hf_quant_cfg) not in cls.configs():
            return None
        # SGLang's own configuration reads no other FP8 of ModelOpt.
        return None if algorithm_of(hf_quant_cfg) in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO") else cls.name

    def get_scaled_act_names(self) -> list[str]:
        """Return an empty list: only AWQ scales activation functions."""
        return []


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
