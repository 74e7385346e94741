"""``all_reduce_add_rmsnorm…`` on several GPUs: results bit for bit, CUDA graphs, streams, late and missing ranks.

Each test starts one process per GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.ranks import free_port

import torch_cute_ops
from torch_cute_ops.distributed import reset_all_reduce
from torch_cute_ops.runtime import groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FORMS: dict[str, dict[str, Any]] = {
    "add_rmsnorm": {},
    "add_rmsnorm_fp4quant": {"scale_layout": "128x4"},
    "add_rmsnorm_fp8quant": {"granularity": "block128"},
}
BF16 = torch.bfloat16
WAIT = timedelta(seconds=120)


def start(rank: int, world: int, port: int, function: Callable[..., None]) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=world, timeout=WAIT)
    function(rank)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def on_gpus(function: Callable[..., None], world: int = 2) -> None:
    """Call ``function(rank)`` in one process per GPU."""
    mp.spawn(start, (world, free_port(), function), nprocs=world)


def world_name() -> str:
    return dist.group.WORLD.group_name


def rows(rank: int, count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the input of a rank, which every rank can compute. Magnitudes of elements differ by up to 2^16."""
    made = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    values = torch.randn(count, width, generator=made, device="cuda")
    exponents = torch.randint(-8, 8, (count, width), generator=made, device="cuda")
    return torch.ldexp(values, exponents).to(dtype)


def total(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return the sum over the ranks, in fp32 on a CPU, in the order of the ranks, rounded once."""
    found = rows(0, count, width, dtype, seed).cpu().float()
    for rank in range(1, dist.get_world_size()):
        found += rows(rank, count, width, dtype, seed).cpu().float()
    return found.to(dtype).cuda()


def residual_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return rows(99, count, width, dtype)


def outputs(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def check_equal(got: Any, want: Any, what: str) -> None:
    for i, (a, b) in enumerate(zip(outputs(got), outputs(want), strict=True)):
        same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        assert same, f"rank {dist.get_rank()}: {what}: output {i} differs"


def check_call(name: str, count: int, width: int, dtype: torch.dtype, group: str, seed: int = 0, **more: Any) -> None:
    """Compare a call with the op without the sum over ranks, and the residual with a sum on a CPU."""
    given = FORMS[name] | more
    weight = torch.rand(width, generator=torch.Generator().manual_seed(7)).cuda() + 0.5
    residual, expected_residual = residual_of(count, width, dtype), residual_of(count, width, dtype)
    got = getattr(torch_cute_ops, f"all_reduce_{name}")(
        rows(dist.get_rank(), count, width, dtype, seed), residual, weight, group, **given
    )
    summed = total(count, width, dtype, seed)
    want = getattr(torch_cute_ops, name)(summed, expected_residual, weight, **given)
    check_equal(got, want, f"{name} {count} × {width} {dtype} {given}")
    on_cpu = (summed.cpu().float() + residual_of(count, width, dtype).cpu().float()).to(dtype)
    check_equal(residual, on_cpu.cuda(), f"residual of {name} {count} × {width}")


def _results(rank: int) -> None:
    group = world_name()
    for name in FORMS:
        for count in (1, 3, 64, 133, 700):
            check_call(name, count, 8192, BF16, group, count)
    check_call("add_rmsnorm_fp4quant", 5, 2880, torch.float16, group, scale_layout="8x4")
    check_call("add_rmsnorm_fp4quant", 40, 32_768, BF16, group, block_size=32, scale_layout="linear")
    check_call("add_rmsnorm_fp8quant", 5, 2880, BF16, group)
    check_call("add_rmsnorm_fp8quant", 300, 96, BF16, group, granularity="token")
    check_call("add_rmsnorm", 9, 16_384, torch.float32, group)
    check_call("add_rmsnorm", 9, 104, BF16, group)
    # More rows than fit into the shared memory in one launch.
    for name in FORMS:
        check_call(name, 2500, 8192, BF16, group)
    # A single row gives the same bits as in a batch, and NaN and infinity are preserved.
    special = rows(rank, 4, 8192, BF16)
    special[1].view(torch.int16)[:4096] = -1
    special[2, 5], special[3] = torch.inf, -0.0
    norms = []
    for part in (special, special[1:2], special[2:3], special[3:4]):
        residual = torch.zeros_like(part)
        norms.append(torch_cute_ops.all_reduce_add_rmsnorm(part, residual, torch.ones(8192).cuda(), group))
    check_equal(norms[0][1:], torch.cat(norms[1:]), "rows alone")
    assert norms[0][1:3].isnan().any(dim=1).all()
    _graphs(rank)
    _streams(rank)


def _graphs(rank: int) -> None:
    """Replay graphs of several sizes in turn, with new inputs, and with eager calls between the replays."""
    group, width, weight = world_name(), 8192, torch.ones(8192).cuda()
    captured = {}
    for count in (1, 64, 300):
        x, residual = rows(rank, count, width, BF16), residual_of(count, width, BF16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, scale = torch_cute_ops.all_reduce_add_rmsnorm_fp4quant(x, residual, weight, group)
            norm = torch_cute_ops.all_reduce_add_rmsnorm(x, residual, weight, group)
        captured[count] = graph, x, residual, y, scale, norm
    other = torch.cuda.Stream()
    for i in range(20):
        count = (1, 64, 300, 64)[i % 4]
        graph, x, residual, y, scale, norm = captured[count]
        x.copy_(rows(rank, count, width, BF16, i))
        residual.copy_(residual_of(count, width, BF16))
        if i % 3 == 2:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                graph.replay()
            torch.cuda.current_stream().wait_stream(other)
        else:
            graph.replay()
        summed, sums = total(count, width, BF16, i), residual_of(count, width, BF16)
        check_equal((y, scale), torch_cute_ops.add_rmsnorm_fp4quant(summed, sums, weight), f"replay {i}")
        check_equal(norm, torch_cute_ops.add_rmsnorm(summed, sums, weight), f"second op of replay {i}")
        check_equal(residual, sums, f"residual of replay {i}")
        if i % 5 == 4:
            check_call("add_rmsnorm", 17, width, BF16, group, i)


def _streams(rank: int) -> None:
    """Call the op on two streams in turn. Only the op itself orders the streams."""
    group, weight = world_name(), torch.ones(8192).cuda()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = [rows(rank, 33, 8192, BF16, i) for i in range(20)]
    residuals = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    found = []
    for i, (x, residual) in enumerate(zip(inputs, residuals, strict=True)):
        with torch.cuda.stream(streams[i // 2 % 2]):
            found.append(torch_cute_ops.all_reduce_add_rmsnorm(x, residual, weight, group))
    torch.cuda.synchronize()
    for i, got in enumerate(found):
        summed = total(33, 8192, BF16, i)
        check_equal(got, torch_cute_ops.add_rmsnorm(summed, torch.zeros_like(summed), weight), f"stream call {i}")


def test_results() -> None:
    """Check results of eager calls, of graphs that are replayed 20 times, and of calls on several streams."""
    on_gpus(_results)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_results_of_four_ranks() -> None:
    on_gpus(_results, 4)


def _late_and_lost(rank: int) -> None:
    world, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    weight = torch.ones(8192).cuda()
    check_call("add_rmsnorm", 3, 8192, BF16, world_name())
    seconds = 3
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=seconds)).group_name
    check_call("add_rmsnorm", 3, 8192, BF16, group)
    assert groups.shared_memory(group, rank).timeout_s == seconds
    torch.cuda.synchronize()
    dist.barrier()
    # A rank is late, but arrives before the time-out.
    if rank == 1:
        time.sleep(1.5)
    x, residual = rows(rank, 3, 8192, BF16, 1), torch.zeros(3, 8192, dtype=BF16).cuda()
    began = time.perf_counter()
    got = torch_cute_ops.all_reduce_add_rmsnorm(x, residual, weight, group)
    torch.cuda.synchronize()
    waited = time.perf_counter() - began
    assert (waited > 1.0) == (rank != 1), waited
    summed = total(3, 8192, BF16, 1)
    check_equal(got, torch_cute_ops.add_rmsnorm(summed, torch.zeros_like(summed), weight), "a late rank")
    dist.barrier()
    torch.cuda.synchronize()
    # One rank does not join the call. The others continue after the time-out, and their next call raises an error that
    # names the missing rank.
    if rank != 1:
        began = time.perf_counter()
        torch_cute_ops.all_reduce_add_rmsnorm(x, residual, weight, group)
        torch.cuda.synchronize()
        waited = time.perf_counter() - began
        assert seconds - 0.5 < waited < seconds + 5, waited
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"^rank 1 of group '{group}' sent no rows within {seconds} s"):
                torch_cute_ops.all_reduce_add_rmsnorm(x, residual, weight, group)
        store.set(f"lost {rank}", "1")
    else:
        store.wait([f"lost {each}" for each in range(world) if each != 1], timedelta(seconds=60))
    reset_all_reduce(group)
    for seed in range(3):
        check_call("add_rmsnorm", 64, 8192, BF16, group, seed)


def test_late_and_lost_ranks() -> None:
    """Check that ranks wait for a late rank, that an error names a missing rank, and that a reset works."""
    on_gpus(_late_and_lost)
