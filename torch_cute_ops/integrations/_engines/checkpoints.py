"""Recognition of a checkpoint by its configuration, and the part of an engine's configuration that does not depend on
the engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from torch_cute_ops.checkpoint.spec import LayerScheme, compressed_scheme, modelopt_scheme
from torch_cute_ops.nn._base import Activations

METHODS: Final = {"auto": "torch_cute_ops", "fp4": "torch_cute_ops_fp4", "fp8": "torch_cute_ops_fp8"}
"""Values of ``--quantization``, keyed by the format of the activations that are multiplied by FP4 weights."""
LEAST_CAPABILITY: Final = 90
"""Compute capability, times ten, of the oldest GPUs that kernels support."""
_CONFIG: Final = Path("config.json")
"""File name that the checkpoint reader shows in error messages."""


class SupportedModels:
    """Part of every configuration: the models and GPUs that this package supports."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of models."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPUs that kernels support."""
        return LEAST_CAPABILITY


class RegisteredConfig(SupportedModels):
    """Part of a configuration class in an engine's registry.

    Each checkpoint style has a configuration class in the engine. :meth:`from_config` returns an object of a subclass
    of this class, so the engine's code that tests for the class works unchanged.

    Attributes:
        activations: format of activations for FP4 weights; a key of ``METHODS``.
        name: value of ``--quantization``.
    """

    activations: ClassVar[Activations]
    name: ClassVar[str]

    @classmethod
    def configs(cls) -> Mapping[str, Any]:
        """Return the engine's configurations by style."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the configuration of the checkpoint's style.

        Raises:
            ValueError: for an unsupported style.
        """
        style, configs = style_of(config), cls.configs()
        if style is None or style not in configs:
            raise ValueError(
                f"--quantization {cls.name}: quant_method is {config.get('quant_method')!r}, quant_algo is "
                f"{algorithm_of(config) or None!r}; expected a checkpoint of compressed-tensors, ModelOpt, DeepSeek or "
                "gpt-oss"
            )
        made = configs[style].from_config(config)
        made.activations = cls.activations
        return made

    @classmethod
    def get_name(cls) -> str:
        """Return the method's name."""
        return cls.name

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the name of the quantisation file that ModelOpt writes next to ``config.json``."""
        return ["hf_quant_config.json"]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Raise an error: an engine must ask the configuration that :meth:`from_config` returns instead."""
        raise NotImplementedError(
            f"{type(self).__name__} describes no layers; from_config returns a configuration that does"
        )


def scheme_of_group(group: Mapping[str, Any] | None, prefix: str, overall: str | None) -> LayerScheme | None:
    """Return the format of a group of compressed-tensors, or None for a format that only the engine supports.

    Args:
        group: ``weights``, ``input_activations`` and ``format``, as records of compressed-tensors or plain values.
        prefix: name of the layer, for messages.
        overall: format of groups that do not name a format.
    """
    if not group or group.get("weights") is None:
        return None
    plain = {
        name: each.model_dump(mode="json") if hasattr(each, "model_dump") else each for name, each in group.items()
    }
    try:
        return _supported(compressed_scheme(_CONFIG, f"{prefix}: ", plain, overall))
    except ValueError:
        return None


def scheme_of_algorithm(algorithm: str | None, prefix: str) -> LayerScheme | None:
    """Return the format of ModelOpt's algorithm, or None for an algorithm that only the engine supports."""
    known = {"FP8_PB_WO": "fp8_pb_wo"}
    try:
        return _supported(modelopt_scheme(_CONFIG, f"{prefix}: ", {"quant_algo": known.get(str(algorithm), algorithm)}))
    except ValueError:
        return None


def _supported(scheme: LayerScheme) -> LayerScheme | None:
    """Return the scheme, or None for MXFP8, whose layers the engine's own methods compute."""
    return None if scheme.format == "mxfp8" else scheme


def algorithm_of(config: dict[str, Any]) -> str:
    """Return ModelOpt's ``quant_algo`` in capital letters, or an empty string."""
    nested = config.get("quantization")
    given = nested if isinstance(nested, dict) else config
    return str(given.get("quant_algo") or "").upper()


def style_of(config: dict[str, Any]) -> str | None:
    """Return the style of a checkpoint with this ``quantization_config``, or None if there is none. Styles have the
    names of vLLM's methods."""
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
