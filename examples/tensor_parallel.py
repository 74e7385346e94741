#!/usr/bin/env python3
"""Run a decoder and an expert layer on several ranks, and compare them with one rank.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py                      # NCCL with a GPU for each, else gloo
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --scheme fp8_block
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --hidden 8192 --intermediate 28672 --heads 64 \\
        --kv-heads 8 --layers 4 --tokens 4096                                    # Llama 3 70B's layers

Rank 0 writes a checkpoint with random codes, and every rank reads only its slices. Between the layers each rank stores
some of the tokens. Each rank adds the residual to its tokens, normalises them and quantises them in one pass. The ranks
gather the codes and scales of all tokens. Each rank multiplies the gathered rows by its rows of the weights q, k, v,
gate and up, and multiplies the results of the attention and of the gate by its columns of the weights o and down. The
sums over the ranks are then scattered, so that each rank gets its tokens again. The expert layer sends each token to
the ranks of its experts as FP8 rows, and these ranks send their results back.

The results of both layers are compared with the results of a single rank that reads the whole checkpoint. On GPUs the
layers are captured as CUDA graphs, compared again, and timed. Before the layers run, the ranks check that their
versions, sources and tensors match. If a rank dies, the other ranks name it. Rank 0 prints the last line, which starts
with SUCCESS or FAILURE; the exit status is 0 or 1 accordingly.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_cute_ops
from quickstart import conclude
from torch_cute_ops import checkpoint
from torch_cute_ops import distributed as cute_distributed
from torch_cute_ops.nn import QuantizedRows, random_, warmup

STYLES = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors", "fp8_block": "compressed-tensors"}
ACTIVATIONS: dict[str, Any] = {"nvfp4": "fp4", "mxfp4": "fp4", "fp8_block": "fp8"}
LEAST_SAVED = {"nvfp4": 3.5, "mxfp4": 3.7, "fp8_block": 1.9}
"""Smallest accepted ratio, by scheme, of the bytes that ranks would gather in bf16 to the bytes that they gather."""
MAX_ERROR = 0.02
"""Largest accepted relative error of the result. Several ranks add partial sums in another order than one rank. If a
sum is then rounded differently, a code of the next layer may differ by one step."""
TOPK = 2
MINUTES = 5


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if "RANK" not in os.environ:
        sys.exit("tensor_parallel.py is one of several ranks: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    device, backend = place()
    dist.init_process_group(backend, timeout=timedelta(minutes=MINUTES), **by_device(device))
    try:
        with cute_distributed.watched_ranks(timeout_s=MINUTES * 60 / 2):
            return run(options, device, backend)
    finally:
        dist.destroy_process_group()
        # Free the layers before the interpreter exits. They refer to the process group, and gloo's threads run as long
        # as the group is referenced. If the interpreter exits while such a thread uses a tensor, the process aborts.
        gc.collect()


def run(options: argparse.Namespace, device: torch.device, backend: str) -> int:
    for name in ("tokens", "experts"):
        if getattr(options, name) % dist.get_world_size():
            sys.exit(f"--{name} {getattr(options, name)} is no multiple of the {dist.get_world_size()} ranks")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = shared_folder(folder)
        cute_distributed.check_ranks(options=vars(options), backend=backend)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        say(f"ranks      {mesh.size()} on {backend}, {name}")
        if dist.get_rank() == 0:
            with torch.device("meta"):
                model = Decoder(options, is_merged=False).bfloat16()
            random_(model, options.scheme, activations=ACTIVATIONS[options.scheme], device="cpu")
            norms_(model)
            checkpoint.save(model, path, STYLES[options.scheme])
        dist.barrier()
        problems += decoder_problems(options, mesh, device, path)
        dist.barrier()
    problems += expert_problems(options, mesh, device)
    # Gather the problems of all ranks, so that every rank returns the same exit status.
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, problems)
    problems = [f"rank {rank}: {problem}" for rank, each in enumerate(found) for problem in each]
    return conclude(problems) if dist.get_rank() == 0 else int(bool(problems))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=tuple(STYLES), default="nvfp4")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="of all ranks together")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-width", type=int, help="intermediate size of an expert (default: at most 2048)")
    options = parser.parse_args(arguments)
    options.expert_width = options.expert_width or min(options.intermediate, 2048)
    return options


def place() -> tuple[torch.device, str]:
    """Choose this rank's device. Return the device, and the name of the backend for collectives."""
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available() and torch.cuda.device_count() >= on_host:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
        return device, "nccl"
    torch.set_num_threads(1)
    return torch.device("cpu"), "gloo"


def by_device(device: torch.device) -> dict[str, Any]:
    return {"device_id": device} if device.type == "cuda" else {}


def shared_folder(own: str) -> Path:
    """Send the name of rank 0's folder ``own`` to all ranks, and return it."""
    folder = [own]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


# The decoder


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace, is_merged: bool) -> None:
        super().__init__()
        self.head = options.hidden // options.heads
        rows = options.hidden, options.kv_heads * self.head, options.kv_heads * self.head
        if is_merged:
            self.qkv_proj = nn.Linear(options.hidden, sum(rows), bias=False)
        else:
            for name, n in zip(("q_proj", "k_proj", "v_proj"), rows, strict=True):
                self.add_module(name, nn.Linear(options.hidden, n, bias=False))
        self.o_proj = nn.Linear(options.hidden, options.hidden, bias=False)

    def forward(self, rows: QuantizedRows) -> torch.Tensor:
        """Compute attention for this rank's heads and all tokens, and return the result of the output projection."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(0, 1).unsqueeze(0)
            for part in self.qkv_proj(rows).split(self.qkv_proj.parts, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed[0].transpose(0, 1).flatten(1))


class MLP(nn.Module):
    def __init__(self, options: argparse.Namespace, is_merged: bool) -> None:
        super().__init__()
        if is_merged:
            self.gate_up_proj = nn.Linear(options.hidden, 2 * options.intermediate, bias=False)
        else:
            self.gate_proj = nn.Linear(options.hidden, options.intermediate, bias=False)
            self.up_proj = nn.Linear(options.hidden, options.intermediate, bias=False)
        self.down_proj = nn.Linear(options.intermediate, options.hidden, bias=False)

    def forward(self, rows: QuantizedRows) -> torch.Tensor:
        gate, up = self.gate_up_proj(rows).split(self.gate_up_proj.parts, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, options: argparse.Namespace, is_merged: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(options, is_merged), MLP(options, is_merged)
        self.input_layernorm = nn.RMSNorm(options.hidden, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(options.hidden, eps=1e-6)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, and return the layer's output, which the next layer adds to the
        residual."""
        to_rows = cute_distributed.normed_rows
        x = self.self_attn(to_rows(self.self_attn.qkv_proj, x, self.input_layernorm.weight, residual))
        return self.mlp(to_rows(self.mlp.gate_up_proj, x, self.post_attention_layernorm.weight, residual))


class Decoder(nn.Module):
    def __init__(self, options: argparse.Namespace, is_merged: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(options, is_merged) for _ in range(options.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the last layer, for tokens (M, H). These are this rank's tokens, or with one
        rank all tokens."""
        residual = torch.zeros_like(x)
        for layer in self.model.layers:
            x = layer(x, residual)
        return residual + x


def norms_(model: nn.Module) -> None:
    """Create the norm weights of a model in place, because ``random_`` leaves them on the meta device."""
    random = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            weight = torch.rand(module.weight.shape, generator=random) + 0.5
            module.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)


def decoder_problems(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, path: Path) -> list[str]:
    rank, world = mesh.get_local_rank(), mesh.size()
    given = {"activations": ACTIVATIONS[options.scheme], "device": device}
    with torch.device("meta"):
        model, whole = Decoder(options).bfloat16(), Decoder(options).bfloat16()
    plan = cute_distributed.decoder_plan(options.hidden // options.heads, sequence=True, sums=torch.float32)
    cute_distributed.load_(model, path, mesh, plan, **given)
    cute_distributed.check_ranks(model)
    checkpoint.load_(whole, path, **given)
    own, all_of_it = bytes_of(model), bytes_of(whole)
    say(f"model      {options.layers} layers of {options.scheme}; {own:,} bytes on a rank, {all_of_it:,} in all")

    torch.manual_seed(0)
    x = torch.randn(options.tokens, options.hidden).bfloat16().to(device)
    mine = x.tensor_split(world)[rank].clone()
    if device.type == "cuda":
        warmup(whole, rows=(len(x),))
    want = whole(x)
    with cute_distributed.count_traffic() as traffic:
        y = model(mine)
    gathered, in_bf16 = traffic.nbytes("all_gather"), 2 * options.layers * mine.nbytes
    error = relative(y, want.tensor_split(world)[rank])
    say(f"gathered   {gathered:,} bytes of a rank; bf16 would take {in_bf16:,}, a factor of {in_bf16 / gathered:.2f}")
    say(f"scattered  {traffic.nbytes('reduce_scatter'):,} bytes of a rank, sums in float32")
    say(f"result     {error:.5f} from one rank (limit {MAX_ERROR})")
    problems = [] if error <= MAX_ERROR else [f"the decoder is off by {error:.3g}"]
    if in_bf16 / gathered < LEAST_SAVED[options.scheme]:
        problems.append(f"{gathered:,} bytes were gathered")
    if device.type == "cuda":
        problems += captured_problems("decoder", lambda: model(mine), y)
        say(f"           {captured_us(lambda: whole(x)):,.0f} µs on one rank")
    return problems


def bytes_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# The experts


def expert_problems(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[str]:
    rank, world = mesh.get_local_rank(), mesh.size()
    random = torch.Generator(device).manual_seed(2)
    up, down = (
        random_experts(options.experts, n, k, random)
        for n, k in ((2 * options.expert_width, options.hidden), (options.hidden, options.expert_width))
    )
    torch.manual_seed(3)
    x = torch.randn(options.tokens, options.hidden).bfloat16().to(device)
    logits = torch.randn(options.tokens, options.experts).to(device)
    weights, ids, *_ = torch_cute_ops.moe_route(logits, TOPK)
    want = cute_distributed.ExpertParallel(up, down)(x, ids, weights).tensor_split(world)[rank]
    begin, end = (options.experts * each // world for each in (rank, rank + 1))
    parts = up.of_experts(begin, end), down.of_experts(begin, end)
    mine = [each.tensor_split(world)[rank] for each in (x, ids, weights)]
    problems = []
    for room in (None, len(mine[0])):
        layer = cute_distributed.ExpertParallel(*parts, mesh.get_group(), max_rows=room)
        with cute_distributed.count_traffic() as traffic:
            y = layer(*mine)
        error = relative(y, want)
        name = "experts" if room is None else f"experts with room for {room} rows each"
        codes, scales, back = (each.nbytes for each in traffic.sent[1:])
        sizes = f"{codes + scales:,} bytes of a rank go as FP8 rows, {back:,} come back in bf16"
        say(
            f"{name}: {sizes}; {error:.5f} from one rank, {'equal' if torch.equal(y, want) else 'not equal'} to the bit"
        )
        # On a GPU, the GEMM may use another tactic on several ranks, because the number of rows differs.
        if not error <= (MAX_ERROR if device.type == "cuda" else 0.0):
            problems.append(f"{name} are off by {error:.3g}")
        if device.type == "cuda" and room is not None:
            problems += captured_problems("experts", lambda layer=layer: layer(*mine), y)
    return problems


def random_experts(experts: int, n: int, k: int, random: torch.Generator) -> cute_distributed.ExpertWeights:
    weight = torch.randn(experts, n, k, device=random.device, generator=random)
    scale = torch.rand(experts, -(-n // 128), -(-k // 128), device=random.device, generator=random) / k**0.5
    return cute_distributed.ExpertWeights(weight.to(torch.float8_e4m3fn), scale)


# On GPUs


def captured_problems(name: str, call: Callable[[], torch.Tensor], want: torch.Tensor) -> list[str]:
    """Capture a call with its collectives as a CUDA graph, compare the result of a replay with ``want``, and print the
    time. Return a list with a message if the error is too large."""
    graph, out = captured(call)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    error = relative(out, want)
    say(
        f"{name} as a CUDA graph: {replayed_us(graph):,.0f} µs on {dist.get_world_size()} ranks; {error:.5f} from eager"
    )
    return [] if error <= MAX_ERROR else [f"captured, the {name} are off by {error:.3g}"]


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph, out


def captured_us(call: Callable[[], torch.Tensor]) -> float:
    return replayed_us(captured(call)[0])


def replayed_us(graph: torch.cuda.CUDAGraph, replays: int = 20) -> float:
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
