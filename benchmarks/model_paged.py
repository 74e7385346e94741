"""`python -m benchmarks model_paged`: time of a decode step of a Llama whose keys and values are in a paged cache, with
and without `qkv_norm_rope_append`.

fused     `qkv_norm_rope_append` rotates q and k and writes k and v to the cache, in one launch per layer
separate  plain torch operations rotate q and k and write k and v to the cache. Inductor compiles them

All other operations are equal in both ways. Attention reads the cache by `scaled_dot_product_attention`: the pages of a
sequence follow each other, so the cache is viewed as (sequences, tokens, heads, D) and nothing is gathered. The new
token takes the last position of a full context. By default, `torch.compile` compiles the whole model as for `python -m
benchmarks model --compiled`; In this case, Inductor may fuse the separate steps with each other and with neighbouring
operations.

Models of few layers are timed, and the time of the whole model is extrapolated linearly.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cute_ops
import torch_cute_ops.nn
from torch_cute_ops.integrations.inductor import FuseQuantization

from . import compositions, environment, layer, layers, llama, report, targets, timeline
from .case import Mark, at_most
from .llama import HEAD
from .measure import Backend, Replay, measure_what_captures
from .model import cosines, extrapolated
from .model_report import is_four_bit
from .runner import describe

NOTES = "qkv_rope"
FILE = "model_paged"
FUSED, SEPARATE = WAYS = ("fused", "separate")
FEW = (2, 6)
"""Numbers of layers of the models that are timed."""
ROUNDS = 31
PAGE = 16
"""Tokens per page of the cache."""


class Pages:
    """Positions and slots of the new tokens, one per sequence.

    Attributes:
        batch: number of sequences.
        context: tokens of each sequence, the new token included; a multiple of `PAGE`.
        positions: (batch,) int64, position of each new token.
        slots: (batch,) int64, slot of each new token. The pages of a sequence follow each other.
    """

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        if context % PAGE:
            raise ValueError(f"a context of {context} tokens is not a multiple of {PAGE}, the tokens per page")
        self.batch, self.context = batch, context
        self.positions = torch.full((batch,), context - 1, device=device)
        self.slots = torch.arange(1, batch + 1, device=device) * context - 1


class PagedAttention(nn.Module):
    """Attention block of a Llama with a paged cache. It replaces transformers' block, and uses this block's merged
    projection of q, k and v, and its output projection.

    Attributes:
        cos_sin: (context, D) float32: in each row the cosines of a position, then the sines.
        key_cache: (blocks, `PAGE`, heads of k, D) bfloat16, vLLM's layout NHD.
        value_cache: tensor like `key_cache`.
    """

    def __init__(
        self,
        block: Any,
        pages: Pages,
        cos_sin: Tensor,
        way: str,
        rotate: Callable[..., Any],
        append: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = block.qkv_proj, block.o_proj
        self.heads = block.config.num_attention_heads, block.config.num_key_value_heads
        self.batch, self.context = pages.batch, pages.context
        self.is_fused, self.rotate, self.append = way == FUSED, rotate, append
        device = pages.slots.device
        made = torch.Generator(device).manual_seed(block.layer_idx)
        shape = (pages.batch * pages.context // PAGE, PAGE, self.heads[1], HEAD)
        tensors = {"positions": pages.positions, "slots": pages.slots, "cos_sin": cos_sin}
        for name in ("key_cache", "value_cache"):
            tensors[name] = torch.randn(shape, dtype=llama.DTYPE, device=device, generator=made)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return the result of the block (batch, 1, hidden), and None instead of attention weights."""
        q_heads, kv_heads = self.heads
        qkv = self.qkv_proj(hidden_states).view(self.batch, -1)
        if self.is_fused:
            q = torch_cute_ops.qkv_norm_rope_append(
                *(qkv, self.cos_sin, self.positions, self.key_cache, self.value_cache, self.slots, q_heads, kv_heads)
            )
        else:
            q, k, v = qkv.unflatten(-1, (-1, HEAD)).split((q_heads, kv_heads, kv_heads), 1)
            q, k = self.rotate(q, k, self.cos_sin, self.positions)
            self.append(k, v, self.slots, self.key_cache, self.value_cache)
        keys, values = (
            cache.view(self.batch, self.context, kv_heads, HEAD).transpose(1, 2)
            for cache in (self.key_cache, self.value_cache)
        )
        attended = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=q_heads > kv_heads)
        return self.o_proj(attended.reshape(self.batch, 1, q_heads * HEAD)), None


def append(k: Tensor, v: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Write heads of k and v, (M, heads, D), to slots of paged caches."""
    block, token = slots // PAGE, slots % PAGE
    key_cache[block, token] = k
    value_cache[block, token] = v


def table(model: Any, positions: int) -> Tensor:
    """Return the cosines and sines of a model's rotary embedding, (positions, D) float32."""
    at = torch.arange(positions, device=model.device)
    each = model.model.rotary_emb(torch.empty(0, dtype=torch.float32, device=model.device), at.unsqueeze(0))
    return torch.cat([values[0, :, : HEAD // 2] for values in each], 1).contiguous()


class Step:
    """Decode step at the last position of each sequence's context. Each call chooses the next tokens greedily. The next
    call processes these tokens at the same position.

    Args:
        model: model of transformers with merged projections. The attention blocks are replaced.
        is_compiled: True if `torch.compile` compiles the whole model. If False, it compiles only the rotation and the
            write to the cache, as two separate functions.
    """

    def __init__(self, model: Any, pages: Pages, way: str, is_compiled: bool) -> None:
        compiled: Callable[[Any], Any] = torch.compile(dynamic=False, options=layer.INDUCTOR)
        steps = [each if is_compiled else compiled(each) for each in (compositions.rotated_heads, append)]
        cos_sin, self.blocks = table(model, pages.context), []
        for each in model.model.layers:
            each.self_attn = PagedAttention(each.self_attn, pages, cos_sin, way, *steps)
            self.blocks.append(each.self_attn)
        self.model = torch.compile(model, dynamic=False) if is_compiled else model
        self.ids = torch.zeros(pages.batch, 1, dtype=torch.int64, device=pages.slots.device)
        self.positions = pages.positions[:1].view(1, 1)

    def __call__(self, _: int = 0) -> Tensor:
        """Return the logits (batch, 1, vocabulary), and set `ids` to the next tokens."""
        given = {"input_ids": self.ids, "position_ids": self.positions, "use_cache": False, "logits_to_keep": 1}
        logits: Tensor = self.model(**given).logits
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits


def build(size: llama.Size, label: str, count: int, batch: int, device: torch.device) -> Any:
    """Return a model with `count` layers in the precision `label`. Its kernels are compiled, and all calls return the
    same weights."""
    torch.manual_seed(count)
    model = llama.build(label, size.config(count, llama.UNMASKED), device)
    torch_cute_ops.nn.warmup(model, batch)
    return model


def compared(steps: Mapping[str, Step]) -> dict[str, float]:
    """Call both ways once on the same tokens. Return the smallest cosine similarity of their logits, and the largest
    difference of an element of the first layer's caches, divided by the largest element."""
    logits = {way: step().clone() for way, step in steps.items()}
    blocks = [steps[way].blocks[0] for way in WAYS]
    pairs = [(getattr(blocks[0], name), getattr(blocks[1], name)) for name in ("key_cache", "value_cache")]
    keys, values = (((a.float() - b.float()).abs().max() / b.abs().max()).item() for a, b in pairs)
    return {"cosine": cosines(logits[FUSED], logits[SEPARATE]).min().item(), "keys": keys, "values": values}


def is_right(results: Mapping[str, float]) -> bool:
    """Check the results of `compared`. Both ways copy the values, but may round rotated keys differently."""
    return results["cosine"] > 0.999 and results["keys"] <= 2**-7 and results["values"] == 0


def kernels_per_layer(names: Mapping[int, Sequence[str]]) -> dict[str, float]:
    """Return the number of launches of each kernel per layer, keyed by name, from the kernels of models with different
    numbers of layers."""
    (first, few), *_, (last, many) = sorted(names.items())
    more = Counter(many)
    more.subtract(Counter(few))
    return {name: count / (last - first) for name, count in more.items() if count}


def measure_model(
    name: str,
    size: llama.Size,
    label: str,
    batch: int,
    context: int,
    is_compiled: bool,
    device: torch.device,
    backend: Backend,
    record: Callable[[Replay], Sequence[timeline.Kernel]] | None = None,
) -> dict[str, Any]:
    """Measure the decode steps of a model, one way after the other in each round.

    Args:
        record: function that replays a graph and returns the kernels that ran, or None to record no kernels.

    Returns:
        A row of the result file: times in µs by way, of the models with `FEW` layers and, extrapolated, of the whole
        model; comparisons of the ways' results; kernels per layer; and the reason for each missing result.
    """
    torch._dynamo.reset()  # Dynamo limits the number of recompilations
    pages, absent = Pages(batch, context, device), {}
    steps: dict[tuple[str, int], Step] = {}
    for count in FEW:
        for way in WAYS:
            model = build(size, label, count, batch, device)
            steps[way, count] = Step(model, pages, way, is_compiled)
    results = {str(count): compared({way: steps[way, count] for way in WAYS}) for count in FEW}
    timings: Mapping[Any, Any] = measure_what_captures(
        steps,  # type: ignore[arg-type]
        1,
        1,
        ROUNDS,
        backend,
        lambda key, error: absent.update({", ".join(map(str, key)): describe(error)}),
    )
    variants, kernels = {}, {}
    for way in WAYS:
        few = {count: timings[way, count].us for count in FEW if (way, count) in timings}
        if len(few) == len(FEW):
            by_layers = {str(count): us for count, us in few.items()}
            variants[way] = {"us": extrapolated(few, size.layers), "by_layers": by_layers}
        if record is not None and way in variants:
            try:
                ran = {count: record(backend.capture(steps[way, count], 1, 1)) for count in FEW}
                kernels[way] = kernels_per_layer({count: [each.name for each in ran[count]] for count in FEW})
            except Exception as error:  # for example, no profiler is available
                absent[f"kernels, {way}"] = describe(error)
    case = f"decode, batch {batch}, context {context:,}, paged cache, {label}"
    row = {"model": name, "case": case, "batch": batch, "context": context, "precision": label}
    row |= {"is_compiled": is_compiled}
    return {**row, "variants": variants, "results": results, "kernels": kernels, "absent": absent}


# The report


def ratio(row: Mapping[str, Any]) -> float | None:
    """Return the time with the op divided by the time without it, or None if one of the times is missing."""
    times = row["variants"]
    return times[FUSED]["us"] / times[SEPARATE]["us"] if len(times) == len(WAYS) else None


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the targets for decode steps of compiled models with the measured values."""
    return [
        at_most(
            f"{row['model']}, {row['case']}: fused / separate",
            ratio(row),
            targets.MODEL_PAGED[row["model"], row["batch"]],
        )
        for row in rows
        if row["is_compiled"]
        and (row["model"], row["batch"]) in targets.MODEL_PAGED
        and row["context"] == llama.CONTEXT
        and is_four_bit(row["precision"], "16bit")
    ]


ABOUT = """\
Decode steps of Llamas with random weights in CUDA graphs, at the last position of a full context. Keys and values are
in pages of {page} tokens, (blocks, page, heads, D) in bfloat16. `fused` calls `qkv_norm_rope_append`. `separate`
rotates q and k and writes k and v by torch operations that Inductor compiles. Attention is the same in both:
`scaled_dot_product_attention` over a view of the cache, whose pages follow each other. {compiled} Times are medians of
{rounds} replays of models of {few} layers, extrapolated linearly to the whole model. `cosine` is the smallest cosine
similarity between the logits of both."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report in Markdown."""
    how = (
        "`torch.compile` compiles the whole model, with `triton.enable_pdl` and the pass of "
        "`torch_cute_ops.integrations.inductor`."
        if result["is_compiled"]
        else "The model itself is not compiled."
    )
    rows, few = result["rows"], " and ".join(map(str, FEW))
    body = []
    for row in rows:
        times = [row["variants"].get(way, {}).get("us") for way in WAYS]
        slope = [
            (each["by_layers"][str(FEW[1])] - each["by_layers"][str(FEW[0])]) / (FEW[1] - FEW[0])
            for each in (row["variants"].get(way) for way in WAYS)
            if each is not None
        ]
        counts = [f"{sum(row['kernels'][way].values()):g}" if way in row["kernels"] else "–" for way in WAYS]
        cells = [report.number(None if us is None else us / 1e3, 4) for us in times]
        saved = report.number(slope[1] - slope[0]) if len(slope) == len(WAYS) else "–"
        cosine = min(each["cosine"] for each in row["results"].values())
        body.append([row["model"], row["case"], *cells, report.fraction(ratio(row)), saved, *counts, f"{cosine:.6f}"])
    header = ["model", "what", *(f"{way} ms" for way in WAYS), "fused / separate", "saved per layer µs"]
    header += [*(f"kernels per layer, {way}" for way in WAYS), "cosine"]
    parts = [
        "# A decode step with a paged cache",
        f"{environment.headline(result['environment'])} · transformers {result['environment']['transformers']}",
        textwrap.fill(ABOUT.format(page=PAGE, compiled=how, rounds=ROUNDS, few=few), 120, break_on_hyphens=False),
        report.table(header, body),
        *sorted({f"{what}: {why}" for row in rows for what, why in row["absent"].items()}),
    ]
    if judged := marks(rows):
        parts.append(f"## Marks\n\n{report.marks_table(judged)}")
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks model_paged", description=" ".join((__doc__ or "").split("\n\n")[0].split())
    )
    parser.add_argument("--models", nargs="+", choices=llama.MODELS, default=["8B"], metavar="MODEL")
    parser.add_argument("--precisions", nargs="+", default=["nvfp4/16bit"], help="scheme/activations")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=llama.CONTEXT, help="tokens in the cache of each sequence")
    parser.add_argument("--eager", action="store_true", help="compile only the separate steps, not the model")
    parser.add_argument("--output", type=Path, default=layers.RESULTS, help="folder of the files written")
    options = parser.parse_args(arguments)
    try:
        metadata.version("transformers")
    except metadata.PackageNotFoundError:
        print("python -m benchmarks model_paged needs transformers: the extra 'transformers'.", file=sys.stderr)
        return layers.NO_GPU
    return layers.on_gpu(FILE, lambda options, device, backend, _: measure_models(options, device, backend), options)


@torch.no_grad()
def measure_models(
    options: argparse.Namespace,
    device: torch.device,
    backend: Backend,
    record: Callable[[Replay], Sequence[timeline.Kernel]] | None = timeline.recorded,
) -> int:
    """Measure the chosen models, print the report, and write `model_paged.json` and `model_paged.md`. Return 1 if a
    result is wrong or missing."""
    options.output.mkdir(parents=True, exist_ok=True)
    llama.register_unmasked()
    result: dict[str, Any] = {
        "environment": {**environment.collect(device), "transformers": metadata.version("transformers")},
        "is_compiled": not options.eager,
        "rows": [],
    }
    compiling = {} if options.eager else {**layer.INDUCTOR, "post_grad_custom_pre_pass": FuseQuantization()}
    good, path = True, options.output / f"{FILE}.json"
    for name in options.models:
        for label in options.precisions:
            for batch in options.batch:
                start = time.perf_counter()
                given = (name, llama.MODELS[name], label, batch, options.context, not options.eager, device, backend)
                with inductor_config.patch(compiling):
                    row = measure_model(*given, record)
                good &= len(row["variants"]) == len(WAYS) and all(map(is_right, row["results"].values()))
                result["rows"].append(row)
                report.write_json(result, marks(result["rows"]), path)
                path.with_suffix(".md").write_text(f"{markdown(result)}\n", encoding="utf-8")
                print(f"  {name}, {row['case']}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\n{markdown(result)}", flush=True)
    return 0 if good else 1
