"""Guard against compiling or loading a kernel while a CUDA graph is being captured."""

import torch


def forbid_in_capture(op: str, key: str, warmup_call: str) -> None:
    """Raise if the current stream is capturing: call on a cache miss, before anything is compiled or loaded.

    Raises:
        RuntimeError: naming the op, what is missing, and the call that warms it up.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"cute::{op} met a kernel that is not ready while a CUDA graph was being captured, when nothing can be "
            f"compiled or loaded. Missing: {key}. Before the capture, call: {warmup_call}"
        )
