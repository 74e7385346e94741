"""Quantisation methods for SGLang that run a checkpoint's linear layers and experts on this package's kernels.

``python -m sglang.launch_server --model-path MODEL --quantization torch_cute_ops`` selects them. SGLang finds
:func:`register` by the entry point ``torch_cute_ops`` in the group ``sglang.srt.plugins``, and reads checkpoints of
ModelOpt, compressed-tensors, DeepSeek and gpt-oss in the same way as without the plugin. Only the methods of linear
layers, output heads and routed experts in a format that this package supports are replaced.
"""

from torch_cute_ops.integrations._engines.checkpoints import METHODS

__all__ = ["METHODS", "register"]


def register() -> None:
    """Register the quantisation methods of ``METHODS`` with SGLang. A second call changes nothing.

    Raises:
        ModuleNotFoundError: without SGLang, or with a version that lacks a module which the methods need.
    """
    try:
        from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
        from sglang.srt.layers import linear, quantization

        from torch_cute_ops.integrations.sglang._config import CONFIGS
        from torch_cute_ops.integrations.sglang._linear import CuteLinearMethod
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"torch_cute_ops.integrations.sglang needs {missing.name} as in SGLang 0.5.23", name=missing.name
        ) from missing
    # SGLang asks its methods in order whether they override the user's choice. ModelOpt's methods would, so this
    # package's methods must come first.
    others = {name: cls for name, cls in quantization.QUANTIZATION_METHODS.items() if name not in METHODS.values()}
    quantization.QUANTIZATION_METHODS.clear()
    quantization.QUANTIZATION_METHODS.update({config.name: config for config in CONFIGS} | others)
    add_quantization_method_choices([name for name in METHODS.values() if name not in QUANTIZATION_CHOICES])
    if CuteLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
        linear.WEIGHT_LOADER_V2_SUPPORTED.append(CuteLinearMethod.__name__)
