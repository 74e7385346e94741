"""Processes of the benchmarks that need several GPUs: one process per GPU. The processes form an NCCL group."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch

from .layers import NO_GPU

TIMEOUT: Final = timedelta(seconds=240)
"""Time after which a rank that waits for another rank ends with an error."""


def start(command: str, function: Callable[..., None], ranks: int, *arguments: Any) -> int:
    """Call `function(rank, ranks, port, *arguments)` in one process per GPU, and return the exit status. `port` is a
    free port of this host."""
    if torch.cuda.device_count() < ranks:
        print(
            f"python -m benchmarks {command} needs {ranks} GPUs; torch sees {torch.cuda.device_count()}",
            file=sys.stderr,
        )
        return NO_GPU
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(ranks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(function, (ranks, port, *arguments), nprocs=ranks)
    return 0


@contextlib.contextmanager
def joined(rank: int, ranks: int, port: int) -> Iterator[torch.device]:
    """Make this process the given rank of an NCCL group for the duration of a `with` block, and return its GPU."""
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        device_id=device,
        timeout=TIMEOUT,
    )
    yield device
    gc.collect()  # NCCL waits for captured graphs that are still alive
    torch.cuda.synchronize()
    dist.destroy_process_group()
