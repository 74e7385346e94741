"""Functions for the benchmarks of FP8 × FP4 GEMMs. They create random weights and three peers: our FP8 GEMMs,
DeepGEMM's FP8 GEMMs, and humming's GEMMs with MXFP4 weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm.problem import GemmProblem, Operand
from torch_cute_ops.reference.mm_fp8_fp4 import fp8_weight

from .case import Case, Mark, Row, Tensors, Variant, at_least, at_most
from .compositions import from_128x4
from .fp4_peers import humming_layers
from .fp8_gemms import BLOCK, DEEP_GEMM, DTYPE

FORMATS = {fmt.name: fmt for fmt in (MXFP4, NVFP4)}
FP8_WEIGHT = "fp8_weight"
"""Name of the peer that is our GEMM with an FP8 weight of the same shape, which takes twice the bytes."""
SCALE_BYTES = {"e4m3": (0x30, 0x41), "ue8m0": (126, 129)}
"""Ranges of the bytes that encode random scales, by scale format. The scales are 1/2 to 2."""
LAYOUT = SCALE_LAYOUTS["128x4"]
ABOUT = """\
Our op decodes the FP4 weight to FP8 during the GEMM. "fp8_weight" is our GEMM with an FP8 weight of the same shape.
DeepGEMM also multiplies an FP8 weight. An FP8 weight takes twice the bytes and contains other numbers, so these results
are not compared. humming's layers multiply the same MXFP4 weight as our op. "humming W4A8" takes the same activations.
"humming W4A16" takes the activations rounded to bfloat16, so its results are not compared."""

HUMMING: dict[str, dict[str, Any]] = {
    "humming_w4a8": {"input_config": {"quant_method": "humming", "dtype": "float8e4m3", "group_size": BLOCK}},
    "humming_w4a16": {},
}
"""Settings that choose the activations' format in humming's layers, by name of the variant."""
PEERS = (FP8_WEIGHT, DEEP_GEMM, *HUMMING)


def format_of(tensors: Tensors) -> FP4Format:
    """Return the FP4 format of the weight in a buffer set."""
    return MXFP4 if tensors["b_scale"].dtype == torch.uint8 else NVFP4


def random_weight(fmt: FP4Format, *shape: int, device: torch.device) -> Tensors:
    """Return the tensors of a weight (..., N, K) with random codes and with random scales between 1/2 and 2."""
    codes, scale = fp4_shapes(shape, fmt, LAYOUT)
    low, high = SCALE_BYTES[fmt.scale_format]
    return {
        "b": torch.randint(0, 256, codes, dtype=torch.uint8, device=device),
        "b_scale": torch.randint(low, high, scale, dtype=torch.uint8, device=device).view(fmt.scale_dtype),
    }


def decoded_weight(tensors: Tensors) -> torch.Tensor:
    """Return the decoded weight (..., N, K) of a buffer set in float64."""
    weight, factors = fp8_weight(tensors["b"], tensors["b_scale"], format_of(tensors), LAYOUT)
    return weight.double() * factors.double().repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]


def gemm(a: torch.Tensor, a_scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute ``a @ weight.T`` in float64 from e4m3 rows with block scales and a decoded weight, and round the result
    to the result's dtype."""
    return ((a.double() * a_scale.double().repeat_interleave(BLOCK, 1)[:, : a.shape[1]]) @ weight.t()).to(DTYPE)


def humming(
    name: str,
    problem: GemmProblem,
    rows: int,
    sets: Sequence[Tensors],
    experts: Mapping[str, Any] | None = None,
) -> Variant | str:
    """Return a variant that runs humming's layers with the weights of these buffer sets.

    Args:
        name: Key of `HUMMING`.
        problem: GEMM problem of our op.
        rows: Value of M in the formulas of `problem`.
        sets: Buffer sets, whose activations are a single matrix with scales (M, K/128).
        experts: Names of the buffers that describe the experts' rows, or None if the GEMM has no experts.
    """
    if format_of(sets[0]) is not MXFP4:
        return "is measured only with MXFP4 weights, because humming's W4A8 does not support scales for 16 elements"
    weights = []
    for tensors in sets:
        b = tensors["b"]
        scale = from_128x4(tensors["b_scale"], b[..., 0].numel(), 2 * b.shape[-1] // MXFP4.block_size)
        weights.append({"weight": b, "weight_scale": scale.view(torch.uint8).view(*b.shape[:-1], -1)})
    has_fp8, total = "input_config" in HUMMING[name], sets[0]["a"].shape[:-1].numel()
    given: dict[str, Any] = {key: dict(value) for key, value in HUMMING[name].items()}
    if experts is not None:
        given |= {"num_experts": len(sets[0]["b"]), "grouping": {"gemm_type": experts["gemm_type"]}}
    made = humming_layers(total, problem.n, problem.k, {"quant_method": "mxfp4"}, weights, **given)
    if isinstance(made, str):
        return made
    layers, tuning = made
    calls = []
    for tensors in sets:
        a, a_scale = tensors["a"].flatten(0, -2), tensors["a_scale"].flatten(0, -2).contiguous()
        call: dict[str, Any] = {"inputs": a, "input_scale": a_scale} if has_fp8 else {"inputs": in_bf16(a, a_scale)}
        if experts is not None:
            call["expert_layout"] = tensors[experts["layout"]]
            call["compute_config"] = {"gemm_type": experts["gemm_type"]}
        calls.append({**call, "outputs": tensors["out"].flatten(0, -2), "tuning_config": tuning})

    def run(i: int) -> tuple[torch.Tensor, ...]:
        layers[i](**calls[i])
        return (sets[i]["out"],)

    a = problem.a if has_fp8 else Operand(DTYPE)
    note = "" if has_fp8 else "bfloat16 activations"
    return Variant(run, replace(problem, a=a).bytes_moved(rows), note, checked=has_fp8)


def in_bf16(a: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode e4m3 rows (M, K) with block scales (M, K/128), and round the result to bfloat16."""
    return (a.float() * scales.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]).to(DTYPE)


def with_fp8_weight(variant: Variant | str) -> Variant | str:
    """Exclude a peer's results from the check, because the peer's FP8 weight differs from the op's FP4 weight."""
    return variant if isinstance(variant, str) else replace(variant, note="an FP8 weight", checked=False)


def times_over_fp8(rows: Sequence[Row], keep: Callable[[Row], bool]) -> list[float]:
    """Return our time divided by the time of our GEMM with an FP8 weight, for each row that `keep` selects."""
    return [
        row["variants"]["ours"]["us"] / row["variants"][FP8_WEIGHT]["us"]
        for row in rows
        if keep(row) and FP8_WEIGHT in row["variants"]
    ]


def few_rows_mark(name: str, ratios: Sequence[float], goal: float) -> Mark:
    """Return a target for the largest of ``ratios``, which are our times divided by the times with an FP8 weight."""
    return at_most(f"{name}: time over that with FP8 weights", max(ratios, default=None), goal, " ×")


def many_rows_mark(name: str, ratios: Sequence[float], goal: float) -> Mark:
    """Return a target for the smallest ratio of our rate to the rate with an FP8 weight.

    `ratios` are our times divided by the times with an FP8 weight.
    """
    return at_least(
        f"{name}: rate over that with FP8 weights", min((1 / ratio for ratio in ratios), default=None), goal, " ×"
    )


def choices_of(case: Case) -> dict[str, Any]:
    """Convert the choices of a case to static properties of the op."""
    return {"block_size": FORMATS[case.choices["weight"]].block_size}
