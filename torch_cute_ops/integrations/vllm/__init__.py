"""Quantisation methods for vLLM that run a checkpoint's linear layers on this package's kernels.

``vllm serve MODEL --quantization torch_cute_ops`` selects them. vLLM finds :func:`register` by the entry point
``torch_cute_ops`` in the group ``vllm.general_plugins``, and reads checkpoints of ModelOpt, compressed-tensors and
DeepSeek as without the plugin: only linear layers and output heads in a format of this package get another method.
"""

from typing import Final

__all__ = ["METHODS", "register"]

METHODS: Final = {"auto": "torch_cute_ops", "fp4": "torch_cute_ops_fp4", "fp8": "torch_cute_ops_fp8"}
"""Names for vLLM's ``--quantization``, by the format of activations that are multiplied by FP4 weights. The names
differ, instead of a setting, because vLLM's cache of compiled models depends on the name."""


def register() -> None:
    """Register the quantisation methods of ``METHODS`` with vLLM, and norms under the provider ``torch_cute_ops``.

    A second call changes nothing. The norms are used only if the user puts the provider into vLLM's ``ir_op_priority``.

    If the environment variable ``TORCH_CUTE_OPS_VLLM`` names a key of ``METHODS``, that method is also chosen for every
    supported checkpoint that is served without ``--quantization``.

    Raises:
        ModuleNotFoundError: without vLLM, or with a version that lacks a module which the methods need.
    """
    try:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

        from torch_cute_ops.integrations.vllm import _norms
        from torch_cute_ops.integrations.vllm._config import CONFIGS
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"torch_cute_ops.integrations.vllm needs {missing.name} as in vLLM 0.32", name=missing.name
        ) from missing
    for config in CONFIGS:
        if config.name not in QUANTIZATION_METHODS:
            register_quantization_config(config.name)(config)
    _norms.register()
