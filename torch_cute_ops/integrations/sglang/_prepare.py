"""SGLang's settings that decide which kernels a model can need.

The functions read the settings in effect. ``get_server_args`` would return the user's input without defaults.
"""

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.runtime_context import (
    get_exec,
    get_model,
    get_parallel,
    get_schedule,
    get_server_args,
    get_spec,
)

from torch_cute_ops.integrations._engines.prepare import Serving


def serving() -> Serving | None:
    """Return the settings of the server that loads a model, or None outside a server."""
    if not _is_server():
        return None
    graphs, parallel = get_exec().graph.cuda_graph_config, get_parallel()
    phases = () if graphs is None else (graphs.decode, graphs.prefill)
    captured = tuple(size for phase in phases for size in phase.bs or ())
    most = max(_most_of_prefill(), _most_of_decode())
    return Serving(most, captured, max(1, parallel.tp_size // max(parallel.nnodes, 1)))


def is_deterministic() -> bool:
    """Return True if a server was started with ``--enable-deterministic-inference``."""
    return _is_server() and bool(get_exec().deterministic.enable_deterministic_inference)


def _is_server() -> bool:
    """Return True if this process has the settings of a server."""
    try:
        get_schedule()
    except ValueError:
        return False
    return True


def _most_of_prefill() -> int:
    """Return the largest number of tokens of a prefill."""
    schedule = get_schedule()
    chunk, whole = schedule.chunked_prefill_size or 0, schedule.max_prefill_tokens or 1
    if chunk <= 0:  # a batch has at most this number of tokens, or one longer prompt
        return max(whole, get_model().context_length or model_config_of(get_server_args()).context_len)
    if schedule.enable_dynamic_chunking and get_parallel().pp_size > 1:  # SGLang's bound of a chunk's size
        chunk = max(-(-chunk * 5 // 4), whole)
    return chunk + (_most_of_decode() if schedule.enable_mixed_chunk else 0)


def _most_of_decode() -> int:
    """Return the largest number of tokens of a decode step, or 0 if the number of requests is not limited yet."""
    return (get_schedule().max_running_requests or 0) * max(1, get_spec().speculative_num_draft_tokens or 1)
