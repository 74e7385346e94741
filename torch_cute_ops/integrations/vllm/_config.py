"""Configurations that vLLM's registry names: they recognise a checkpoint and build the configuration of its style."""

from typing import Any, ClassVar, Final

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from torch_cute_ops.integrations.vllm import METHODS
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.runtime import settings

LEAST_CAPABILITY: Final = 90
"""Compute capability, times ten, of the oldest GPUs that kernels support."""


class TorchCuteOpsConfig(QuantizationConfig):
    """Registered configuration. :meth:`from_config` returns a subclass of vLLM's own configuration of the checkpoint's
    style, so vLLM's code that asks for that class works unchanged.

    Attributes:
        activations: format of activations for FP4 weights; a key of ``METHODS``.
        name: value of vLLM's ``--quantization``.
    """

    activations: ClassVar[Activations]
    name: ClassVar[str]

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

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the configuration of the checkpoint's style.

        Raises:
            ValueError: for an unsupported style.
        """
        from torch_cute_ops.integrations.vllm import _checkpoints

        style = style_of(config)
        if style is None:
            raise ValueError(
                f"--quantization {cls.name}: quant_method is {config.get('quant_method')!r}, quant_algo is "
                f"{algorithm_of(config) or None!r}; expected a checkpoint of compressed-tensors, ModelOpt, DeepSeek or "
                "gpt-oss"
            )
        made = _checkpoints.CONFIGS[style].from_config(config)
        made.activations = cls.activations
        return made

    def get_name(self) -> str:
        """Return the method's name."""
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of models."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPUs that kernels support."""
        return LEAST_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the file that ModelOpt writes beside ``config.json``."""
        return ["hf_quant_config.json"]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Raise: vLLM asks the configuration that :meth:`from_config` returns."""
        raise NotImplementedError(
            f"{type(self).__name__} describes no layers; from_config returns a configuration that does"
        )


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


def algorithm_of(config: dict[str, Any]) -> str:
    """Return ModelOpt's ``quant_algo`` in capital letters, or an empty string."""
    nested = config.get("quantization")
    given = nested if isinstance(nested, dict) else config
    return str(given.get("quant_algo") or "").upper()


def style_of(config: dict[str, Any]) -> str | None:
    """Return the key of ``_checkpoints.CONFIGS`` for a checkpoint's ``quantization_config``, or None if there is
    none."""
    method, algorithm = str(config.get("quant_method") or "").lower(), algorithm_of(config)
    if method == "compressed-tensors":
        return method
    if method in ("mxfp4", "gpt_oss_mxfp4"):  # vLLM renames the former
        return "gpt_oss_mxfp4"
    if method == "fp8":
        return method if config.get("weight_block_size") == [128, 128] else None
    if method.startswith("modelopt") or (not method and algorithm):
        if algorithm == "MIXED_PRECISION":
            # Older checkpoints list the layers in hf_quant_config.json only, which vLLM reads for its own method.
            given = config.get("quantization") if isinstance(config.get("quantization"), dict) else config
            return "modelopt_mixed" if given and given.get("quantized_layers") else None
        return {
            "NVFP4": "modelopt_fp4",
            "W4A16_NVFP4": "modelopt_fp4",
            "FP8": "modelopt",
            "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
            "FP8_PB_WO": "modelopt",
        }.get(algorithm)
    return None
