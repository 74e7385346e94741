"""`python -m benchmarks expert_layer`: routed expert layers, from logits to results, by tokens and routing.

few       `nn.ExpertLayer.forward_few`: `moe_route_dense`, `fp4_quantize`, `moe_fc1_fp4`, `moe_fc2_fp4`
few-bf16  `few` with activations in 16 bits: `moe_fc1_fp4_weight_only`, `moe_fc2_fp4_weight_only`
many      `nn.ExpertLayer.forward_many`, with activations in FP8: `moe_route`, `moe_permute_fp8quant`,
          `grouped_mm_fp8_fp4`, `moe_swiglu_fp8quant`, `grouped_mm_fp8_fp4`, `moe_finalize`
many-fp8  peer: `many` with weights in FP8, which `grouped_mm_fp8` multiplies
bf16      peer: `torch._grouped_mm` with the decoded weights in bf16, on rows sorted by expert

The calls in a captured graph alternate between several sets of tokens with different experts, and between two sets of
weights. L2 therefore contains almost none of the weights that a call reads. The router's GEMM and shared experts are
not measured, because they are the same for all implementations.

Routing: a token's experts are drawn without replacement. With "uniform", all experts are equally likely. With "zipf",
the r-th likeliest expert has a probability proportional to 1/r. With "hot", all tokens take one expert, and their other
experts are drawn uniformly. The likeliest experts and the hot expert differ from call to call.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.nn.experts import few_tokens

from . import environment, layers, report, targets
from .case import Mark, at_least, at_most
from .expert_gemms import MARLIN_FIGURES
from .expert_ways import (
    DEEPSEEK,
    FEW_ROWS,
    MODELS,
    ROUTINGS,
    WAYS,
    Decoded,
    Inputs,
    Model,
    Prepared,
    Way,
    draw,
    expert_bytes,
    ways_of,
)
from .measure import Backend, Settings, ceilings, measure_what_captures, plan
from .runner import ASSUMED_TFLOPS, describe

NOTES = "fp4_gated_experts"
BUDGET_MS = 80.0
"""GPU time in ms that the replays for one table row may take. With this limit, about 60 rows take less than two
minutes."""
WEIGHT_SETS = 2
"""Number of sets of weights. Each set is many times larger than L2."""
COSINE_ROWS = (8, 64)
"""Numbers of tokens for which results are compared with the results of a layer with decoded weights."""
MARLIN_NOTE = (
    "Marlin's expert kernel, from notes and not from this run: the second GEMM alone of the sizes of DeepSeek-V3 above "
    f"(256 experts of 256, 7,168 columns, NVFP4, top-8, without adding up a token's experts), µs: {MARLIN_FIGURES}."
)
PEER = "bf16: the decoded weights in bf16, by `torch._grouped_mm`. "
LARGE = 4096
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, FEW_ROWS, LARGE)


def blank(model: Model, routing: str, m: int) -> dict[str, Any]:
    """Return a row of the result file in which the times are still missing. The entry `experts` is the number of
    experts that tokens are routed to, and `bytes` is the size of these experts' weights. Both are means over the
    calls."""
    return {
        "rows": m,
        "routing": routing,
        "rows_of_expert": m * model.topk / model.experts,
        "experts": 0.0,
        "bytes": 0.0,
        "variants": {},
        "cosine": {},
        "absent": {},
    }


def run(
    prepared: Prepared,
    row: dict[str, Any],
    names: Sequence[str],
    backend: Backend,
    l2_bytes: int,
    settings: Settings,
    copy_tbps: float,
) -> None:
    """Measure the implementations of a layer and write the results to `row`.

    The results are the time of each implementation in µs, a lower bound, and the reason for each missing time. The
    lower bound is the time to read the weights of the experts in use at the bandwidth of a copy.
    """
    model, device, m, routing = prepared.model, prepared.device, row["rows"], row["routing"]
    absent, size = row["absent"], {name: WAYS[name].expert_bytes(model) for name in names}
    flops = 6 * m * model.topk * model.intermediate * model.hidden
    first = draw(model, routing, m, 0, device)
    how = plan(first.used * min(size.values()), len(names), l2_bytes, settings, call_ms=flops / ASSUMED_TFLOPS * 1e-9)
    inputs = [first, *(draw(model, routing, m, i, device) for i in range(1, how.n_sets))]
    row["experts"] = sum(each.used for each in inputs) / len(inputs)
    row["bytes"] = row["experts"] * expert_bytes(model, model.scheme)
    calls: dict[str, Callable[[int], Tensor]] = {}
    wanted: dict[str, Tensor] = {}
    for name in names:
        try:
            ways = [prepared.way(name, which) for which in range(WEIGHT_SETS)]
            if routing == "uniform" and m in COSINE_ROWS:
                got, scheme = ways[0](first.x, first.logits), WAYS[name].scheme(model)
                if scheme not in wanted:
                    wanted[scheme] = Decoded(model, ways[0].experts)(first.x, first.logits)
                row["cosine"][name] = layers.cosine(got, wanted[scheme])
            calls[name] = partial(_call, ways, inputs)
        except Exception as error:
            absent[name] = describe(error)
    timings = measure_what_captures(
        calls, how.n_sets, how.calls, how.rounds, backend, lambda name, error: absent.update({name: describe(error)})
    )
    for name, timing in timings.items():
        row["variants"][name] = {**timing.as_dict(), "floor": row["experts"] * size[name] / copy_tbps * 1e-6}


def _call(ways: Sequence[Way], inputs: Sequence[Inputs], i: int) -> Tensor:
    return ways[i % len(ways)](inputs[i].x, inputs[i].logits)


# --- results ---


def faster(row: Mapping[str, Any]) -> float | None:
    """Return the time of `few` or `many`, whichever is smaller, or None if both were not measured."""
    return min((each["us"] for name, each in row["variants"].items() if name in ("few", "many")), default=None)


def same_bytes_us(uniform: Mapping[int, tuple[float, float]], m: int, moved: float) -> float:
    """Return the longest acceptable time, in µs, for `m` tokens that read `moved` bytes of expert weights, computed
    from times that were measured with uniform routing.

    The result is the longer of two estimates. The first estimate uses the measured times for up to `m` tokens, and
    interpolates linearly between two of them by the bytes read. The second estimate is the time of `m` tokens, scaled
    by the bytes read. The second estimate is needed if nearly all experts are in use: then more tokens take more time,
    but read no more bytes.

    Args:
        uniform: Bytes of the experts' weights and time in µs, by number of tokens; contains `m`.
        m: Number of tokens.
        moved: Bytes of the experts' weights.
    """
    points = [uniform[tokens] for tokens in sorted(uniform) if tokens <= m]
    between = next(((low, high) for low, high in pairwise(points) if low[0] <= moved < high[0]), None)
    scaled = points[-1][1] * moved / points[-1][0]
    if between is None:
        return scaled
    (low, before), (high, after) = between
    return max(scaled, before + (after - before) * (moved - low) / (high - low))


def crossing(rows: Sequence[Mapping[str, Any]], few: str) -> tuple[float | None, str]:
    """Return the mean number of tokens per expert above which `many` is faster than `few`, and a sentence that states
    it. The number is interpolated logarithmically. It is None if neither implementation overtakes the other."""
    points = [
        (row["rows_of_expert"], math.log(row["variants"][few]["us"] / row["variants"]["many"]["us"]))
        for row in sorted(rows, key=lambda row: row["rows"])
        if few in row["variants"] and "many" in row["variants"]
    ]
    if not points:
        return None, f"`{few}` and `many` were not both measured"
    if points[-1][1] <= 0:
        return None, f"`{few}` is not slower than `many` up to {points[-1][0]:.3g} tokens of an expert"
    last = next((i for i in reversed(range(len(points))) if points[i][1] <= 0), None)
    if last is None:
        return None, f"`{few}` is slower than `many` from {points[0][0]:.3g} tokens of an expert on"
    (low, before), (high, after) = points[last], points[last + 1]
    where = low * (high / low) ** (-before / (after - before))
    return where, f"`{few}` and `many` cross at {where:.3g} tokens of an expert"


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the targets for expert layers with the measured values."""
    by_case = {(row["model"], row["routing"], row["rows"]): row for row in rows}
    found = []
    for m, most in targets.EXPERT_LAYER_US.items():
        row = by_case.get((DEEPSEEK, "uniform", m))
        found.append(at_most(f"{DEEPSEEK}, M = {m}: time", row and faster(row), most, " µs"))
    for model in MODELS:
        uniform = {
            m: _point(row) for (name, routing, m), row in by_case.items() if (name, routing) == (model, "uniform")
        }
        known = {m: point for m, point in uniform.items() if point is not None}
        for skewed in ROUTINGS[1:]:
            points = {
                m: _point(row) for (name, routing, m), row in by_case.items() if (name, routing) == (model, skewed)
            }
            ratios = [
                point[1] / same_bytes_us(known, m, point[0]) for m, point in points.items() if point and m in known
            ]
            most = max(ratios, default=None)
            found.append(
                at_most(f"{model}, {skewed}: most time over that of the same bytes", most, targets.SKEWED_OVER_UNIFORM)
            )
    over = {
        m: row["variants"]["many"]["us"] / row["variants"]["many-fp8"]["us"]
        for (name, routing, m), row in by_case.items()
        if (name, routing) == (DEEPSEEK, "uniform") and {"many", "many-fp8"} <= row["variants"].keys()
    }
    decode = max((ratio for m, ratio in over.items() if m <= 64), default=None)
    found.append(at_most(f"{DEEPSEEK}, M ≤ 64: many over many-fp8", decode, targets.W4A8_LAYER_DECODE))
    found.append(at_most(f"{DEEPSEEK}, M = {LARGE:,}: many over many-fp8", over.get(LARGE), targets.W4A8_LAYER_LARGE))
    for (way, scheme), least in targets.EXPERT_LAYER_COSINE.items():
        for name in (name for name, model in MODELS.items() if model.scheme == scheme):
            found.append(at_least(f"{name}, {way}: cosine", least_cosine(rows, name, way), least))
    return found


def _point(row: Mapping[str, Any]) -> tuple[float, float] | None:
    us = faster(row)
    return None if us is None else (row["bytes"], us)


def least_cosine(rows: Sequence[Mapping[str, Any]], model: str, way: str) -> float | None:
    """Return the smallest measured cosine similarity between an implementation's result and the expected result, or
    None if none was measured."""
    return min((row["cosine"][way] for row in rows if row["model"] == model and way in row["cosine"]), default=None)


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report: a table per model and routing, then the number of tokens above which `many` is faster than
    `few`."""
    parts = [
        f"# Routed expert layers\n\n{environment.headline(result['environment'])}",
        "µs a layer, medians: routing and both GEMMs; floor: bytes of the weights of the experts in use at "
        f"{report.number(result['peak_copy_tbps'])} TB/s, the rate of copies in this run. many-fp8: weights in FP8. "
        f"{PEER if any('bf16' in row['variants'] for row in result['rows']) else ''}"
        "Cosine: the least, to the same weights in bf16.",
    ]
    for model, given in MODELS.items():
        of_model = [row for row in result["rows"] if row["model"] == model]
        labels = [name for name in WAYS if any(name in row["variants"] for row in of_model)]
        for routing in (routing for routing in ROUTINGS if any(row["routing"] == routing for row in of_model)):
            rows = [row for row in of_model if row["routing"] == routing]
            body = []
            for row in rows:
                floor = row["bytes"] / result["peak_copy_tbps"] * 1e-6
                times = [report.number(row["variants"].get(name, {}).get("us")) for name in labels]
                body.append([f"{row['rows']:,}", f"{row['experts']:.1f}", report.number(floor), *times])
            if any(row["cosine"] for row in rows):
                least = [least_cosine(rows, model, name) for name in labels]
                body.append(["cosine", "", "", *("–" if each is None else f"{each:.5f}" for each in least)])
            header = ["tokens", "experts", "floor", *labels]
            parts.append(f"## {model}, {given.scheme}, {routing}\n\n{report.table(header, body)}")
        if any(row["routing"] == "uniform" for row in of_model):
            rows = [row for row in of_model if row["routing"] == "uniform"]
            lines = "; ".join(crossing(rows, few)[1] for few in WAYS if WAYS[few].is_few)
            parts.append(f"Uniform routing: {lines}; `nn.experts.few_tokens` says {few_tokens(given.intermediate)}.")
        if model == DEEPSEEK and of_model:
            parts.append(MARLIN_NOTE)
    failed = [
        f"- {name}, {row['model']}, {row['routing']}, M = {row['rows']}: {why}"
        for row in result["rows"]
        for name, why in row["absent"].items()
    ]
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])])


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the times against the number of tokens, with one panel per model and routing."""
    layers.plot(report.grouped(rows, lambda row: f"{row['model']}, {row['routing']}"), list(WAYS), "tokens", path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = layers.parser("expert_layer", __doc__, list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(ROWS), metavar="M")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), metavar="ROUTING")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    return layers.on_gpu("expert_layer", measure_models, parser.parse_args(arguments))


@torch.no_grad()
def measure_models(options: argparse.Namespace, device: torch.device, backend: Backend, l2_bytes: int) -> int:
    """Measure the layers, print the tables, and write `expert_layer.json`, `.md` and `.png`. Return 1 if a measurement
    failed, else 0."""
    options.output.mkdir(parents=True, exist_ok=True)
    peaks, settings = ceilings(backend, device), Settings(budget_ms=BUDGET_MS)
    result: dict[str, Any] = {
        "environment": environment.collect(device),
        "method": asdict(settings),
        "peak_copy_tbps": peaks.copy_tbps,
        "rows": [],
    }
    for model in options.models:
        prepared = Prepared(MODELS[model], device)
        for routing in (routing for routing in ROUTINGS if routing in options.routing):
            for m in sorted(options.tokens):
                names = ways_of(MODELS[model], routing, m, options.ways)
                if not names:
                    continue
                row, where = blank(MODELS[model], routing, m), f"{model}, {routing}, M = {m}"
                try:
                    run(prepared, row, names, backend, l2_bytes, settings, peaks.copy_tbps)
                except Exception as error:  # a CUDA error may be raised only at the end of the replays
                    row["absent"] |= {name: describe(error) for name in names if name not in row["absent"]}
                result["rows"].append({"model": model, **row})
                failed = "".join(f"\n    {name}: {why}" for name, why in row["absent"].items())
                print(layers.progress(where, row["variants"]) + failed, flush=True)
                report.write_json(result, marks(result["rows"]), options.output / "expert_layer.json")
    print(f"\n{report.marks_table(marks(result['rows']))}", flush=True)
    layers.finish(options, "expert_layer", markdown(result), result["rows"], picture)
    return 1 if any(row["absent"] for row in result["rows"]) else 0
