"""SGLang's settings that decide which kernels a model can need."""

from sglang.srt.runtime_context import get_exec, get_server_args

from torch_cute_ops.integrations._engines.prepare import Serving


def serving() -> Serving | None:
    """Return the settings of the server that loads a model, or None outside a server."""
    try:
        args = get_server_args()
    except ValueError:
        return None
    graphs = get_exec().graph.cuda_graph_config
    phases = () if graphs is None else (graphs.decode, graphs.prefill)
    captured = tuple(size for phase in phases for size in phase.bs or ())
    chunk = args.chunked_prefill_size or 0
    # Without chunks, a prefill has at most the tokens of a batch.
    most = chunk if chunk > 0 else args.max_prefill_tokens or 1
    return Serving(most, captured, max(1, args.tp_size // max(args.nnodes, 1)))
