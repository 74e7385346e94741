"""vLLM's settings that decide which kernels a model can need."""

from typing import Final

from vllm.config import get_current_vllm_config_or_none

from torch_cute_ops.integrations._engines.prepare import Serving

NAME: Final = "torch_cute_ops"
"""Key of this package's settings in vLLM's ``additional_config``."""
_KNOWN: Final = ("few_tokens",)


def has_few_tokens() -> bool:
    """Return the setting ``few_tokens``: True if experts may store a second copy of the down layers for calls with few
    tokens.

    Raises:
        ValueError: for unknown settings of this package, or a value that is not a boolean.
    """
    config = get_current_vllm_config_or_none()
    given = getattr(config, "additional_config", None)
    own = given.get(NAME, {}) if isinstance(given, dict) else {}
    if not isinstance(own, dict) or not own.keys() <= {*_KNOWN} or not isinstance(own.get("few_tokens", True), bool):
        raise ValueError(f'additional_config["{NAME}"] is {own!r}; expected {{"few_tokens": true}} or false')
    return bool(own.get("few_tokens", True))


def serving() -> Serving | None:
    """Return the settings of the model that vLLM is loading, or None outside a load."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return None
    parallel = config.parallel_config
    return Serving(
        config.scheduler_config.max_num_batched_tokens,
        tuple(config.compilation_config.cudagraph_capture_sizes or ()),
        # With Ray, vLLM does not know the number of nodes.
        parallel.local_world_size * max(parallel.data_parallel_size_local, 1),
    )
