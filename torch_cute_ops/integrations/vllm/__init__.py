"""Quantisation methods for vLLM that run a checkpoint's linear layers and experts on this package's kernels.

``vllm serve MODEL --quantization torch_cute_ops`` selects them. vLLM finds :func:`register` by the entry point
``torch_cute_ops`` in the group ``vllm.general_plugins``, and reads checkpoints of ModelOpt, compressed-tensors,
DeepSeek and gpt-oss in the same way as without the plugin. Only the methods of linear layers, output heads and routed
experts in a format that this package supports are replaced. The name of the method also selects the format of the
activations. A separate setting would not be safe, because vLLM's cache of compiled models depends only on the name.
"""

from torch_cute_ops.integrations._engines.checkpoints import METHODS

__all__ = ["METHODS", "register"]


def register() -> None:
    """Register the quantisation methods of ``METHODS`` with vLLM, and RMSNorm ops under the provider
    ``torch_cute_ops``.

    A second call changes nothing. The RMSNorm ops are used only if the user puts the provider into vLLM's
    ``ir_op_priority``.

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
