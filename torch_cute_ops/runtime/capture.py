"""Guard against compiling or loading a kernel during CUDA-graph capture."""

import torch


def forbid_in_capture(op: str, key: str, warmup_call: str) -> None:
    """Check, after a cache miss, that the current stream is not capturing.

    Raises:
        RuntimeError: if the stream is capturing. The message names the op, the missing kernel, and the call that
            prepares the kernel.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"cute::{op} needs a kernel that is not loaded, and kernels cannot be compiled or loaded during CUDA-graph "
            f"capture. Missing: {key}. Before the capture, call: {warmup_call}"
        )
