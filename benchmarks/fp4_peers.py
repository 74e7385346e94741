"""The peers of GEMMs with an FP4 weight, and cuBLAS with the same weight in bfloat16.

A peer is a function that takes a list of `Operands`, one per buffer set. Before anything is timed, the function
converts the weights to the peer's layout. The function returns `call(i)`, which writes `out` of buffer set i, or a
`str` with the reason why the peer is missing. If the function raises an exception, the exception is reported as the
reason (`runner.collect_variants`). A peer's library is imported only when the peer runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .compositions import nvfp4_dequantize

DTYPE = torch.bfloat16
Size = tuple[int, int, int]
"""M, N, K."""


class Operands(NamedTuple):
    """Operands and result of one buffer set: `out = alpha · a @ dequantised(codes, scale).T`."""

    a: torch.Tensor
    """(M, K) bfloat16."""
    codes: torch.Tensor
    """(N, K/2) uint8: two e2m1 codes a byte, element 0 in the low nibble."""
    scale: torch.Tensor
    """(N, K/16) float8_e4m3fn, row-major."""
    alpha: torch.Tensor
    """(1,) float32."""
    out: torch.Tensor
    """(M, N) bfloat16."""

    @property
    def size(self) -> Size:
        return self.a.shape[0], self.codes.shape[0], self.a.shape[1]


Peer = Callable[[Sequence[Operands]], Callable[[int], Any] | str]


def _missing(name: str, error: Exception) -> str:
    return f"{name} cannot be imported ({type(error).__name__}: {error})"


HUMMING_NVFP4 = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
"""Checkpoint configuration that makes humming read weights in ModelOpt's NVFP4 format."""


def humming(sets: Sequence[Operands]) -> Callable[[int], Any] | str:
    """Return a function that calls humming's layers. humming repacks NVFP4 weights from ModelOpt's checkpoint layout.
    alpha is passed as the weight's second-level scale."""
    m, n, k = sets[0].size
    weights = [
        {"weight": operands.codes, "weight_scale": operands.scale, "weight_scale_2": operands.alpha}
        for operands in sets
    ]
    made = humming_layers(m, n, k, HUMMING_NVFP4, weights)
    if isinstance(made, str):
        return made
    layers, tuning = made
    return lambda i: layers[i](sets[i].a, outputs=sets[i].out, tuning_config=tuning)


def humming_layers(
    m: int,
    n: int,
    k: int,
    weight_config: Mapping[str, Any],
    weights: Sequence[Mapping[str, torch.Tensor]],
    grouping: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> tuple[list[Any], Any] | str:
    """Return one humming layer for each weight, repacked, and humming's tuning for M.

    humming compiles one kernel for each N, K and range of M. humming's heuristic selects the kernel for M.

    Args:
        m, n, k: Sizes of the GEMM. With experts, M counts the rows of all experts.
        weight_config: Checkpoint configuration of the weights.
        weights: Tensors by humming's names, in checkpoint layout.
        grouping: Grouping of the experts' rows for humming's heuristic.
        more: Further arguments of humming's layers.
    """
    try:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config
    except Exception as error:
        return _missing("humming", error)
    device, layers = weights[0]["weight"].device, []
    for tensors in weights:
        # Each weight needs its own layer: overlapping calls must not share a layer's counters.
        with device:
            layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(weight_config), torch_dtype=DTYPE, **more)
        layer.to(device)
        layer.load_from_tensors(dict(tensors))
        layer.transform()
        layers.append(layer)
    # Pass the tuning for one M: without it, the first call would compile the kernels of all 33 ranges of M.
    return layers, get_heuristics_config(layers[0].humming_config, shape_m=m, device=device, **grouping)


def prepare_humming(sizes: Sequence[Size], device: torch.device) -> None:
    """Compile humming's kernels for these sizes in parallel, because each kernel takes seconds to compile."""
    from humming.kernel.humming import HummingKernel
    from humming.schema.modelopt import ModeloptNvfp4WeightSchema
    from humming.transform import prepare_layer_config
    from humming.tune import get_heuristics_config

    kernels: dict[tuple[str, str], None] = {}
    for m, n, k in sizes:
        schema = ModeloptNvfp4WeightSchema().to_humming_schema(DTYPE)
        config = prepare_layer_config(shape_n=n, shape_k=k, weight_schema=schema, torch_dtype=DTYPE, device=device)
        tuning = get_heuristics_config(config, shape_m=m, device=device)
        kernels[config.to_str(), json.dumps(tuning)] = None

    def compile_one(layer_and_tuning: tuple[str, str]) -> None:
        with contextlib.suppress(Exception):  # the same error is reported when the case runs
            HummingKernel.prepare_kernels(layer_and_tuning[0], None, layer_and_tuning[1], device)

    with ThreadPoolExecutor(max(1, min(len(kernels), os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, kernels))


def quack(sets: Sequence[Operands]) -> Callable[[int], Any] | str:
    """Return a function that calls QuACK's GEMM with a 4-bit weight, which is repacked into MMA fragments. alpha is
    passed as a number on the host."""
    try:
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight
    except Exception as error:
        return _missing("QuACK", error)
    packed = [prepare_w4_weight(operands.codes, operands.scale, "nvfp4") for operands in sets]
    alphas = [operands.alpha.item() for operands in sets]

    def call(i: int) -> Any:
        codes, scale = packed[i]
        return gemm_w4a16(sets[i].a, codes, scale, tensor_scale=alphas[i], out=sets[i].out, wformat="nvfp4")

    return call


def marlin(sets: Sequence[Operands]) -> str:
    """Return the reason why Marlin is not measured: it is part of vLLM, not of torch, and this benchmark does not use
    vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return f"torch {torch.__version__} has no such GEMM, and vLLM, which has Marlin, is not installed"
    return "vLLM is installed, and this benchmark does not know how to call its Marlin"


def cublas_bf16(sets: Sequence[Operands]) -> Callable[[int], Any]:
    """Decode the weight to bfloat16, multiply it by alpha, and return a function that calls `torch.mm` with the result.

    The bfloat16 weight is exact, because alpha is a power of two.
    """
    weights = [nvfp4_dequantize(each.codes, each.scale, DTYPE).mul_(each.alpha.to(DTYPE)).t() for each in sets]
    return lambda i: torch.mm(sets[i].a, weights[i], out=sets[i].out)


PEERS: dict[str, Peer] = {"humming": humming, "quack": quack, "marlin": marlin, "cublas_bf16": cublas_bf16}
FP4_PEERS = tuple(name for name in PEERS if name != "cublas_bf16")
