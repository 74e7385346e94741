"""vLLM's settings that decide which kernels a model can need."""

from vllm.config import get_current_vllm_config_or_none

from torch_cute_ops.integrations._engines.prepare import Serving


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
