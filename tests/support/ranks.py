"""Run a function in several processes, one per rank, which form a gloo process group."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world: int, function: Callable[..., None], *args: Any, timeout_s: float = 60.0) -> None:
    """Call ``function(rank, *args)`` in one forked process per rank. Raise an error if the call fails on any rank."""
    mp.start_processes(_main, args=(world, free_port(), timeout_s, function, args), nprocs=world, start_method="fork")


def _main(
    rank: int, world: int, port: int, timeout_s: float, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # A forked process cannot use the GPU that its parent uses, and torch.compile would read the GPU's random state.
    torch.cuda.is_available = lambda: False
    method, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timeout)
    function(rank, *args)
    dist.barrier()  # rank 0 hosts the store, so it must not end before the others
    dist.destroy_process_group()
