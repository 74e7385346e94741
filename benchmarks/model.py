"""`python -m benchmarks model`: whole models as they are served, ours and in bf16: decode, prefill, generation, memory.

Llamas with random weights, on transformers' own modelling code. bf16 is what the same configuration gives there,
untouched; ours has quantised linear layers, merged where they share an input, and its `lm_head` in bf16. A bf16 model
that no GPU holds is timed with few layers, which gives the line that all of them lie on.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import inspect
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cute_ops.nn
from torch_cute_ops.integrations.inductor import FuseQuantization
from torch_cute_ops.nn import QuantLinear
from torch_cute_ops.runtime import compiler

from . import environment, layer, report
from .case import Mark, at_least, at_most
from .layers import NO_GPU, RESULTS, on_gpu
from .measure import AsTheyAre, Backend, measure, measure_what_captures

NOTES, DTYPE = layer.NOTES, layer.DTYPE
HEAD = 128
"""Elements of a head of attention."""
BATCHES, CONTEXT, TOKENS = (1, 16, 64), 1024, 2048
"""Sequences of a decode step, tokens in its cache, tokens of a prefill."""
ROUNDS = 11
"""Of a decode step, a prefill, or a generation each model is timed so many times, in turn."""
PROMPT, NEW, LONGEST, GENERATIONS = 16, 128, 256, 3
"""Tokens of the prompt of `generate()`, new ones where it is timed and where recompilations are counted; how often."""
LOGIT_LAYERS, LOGIT_TOKENS = 4, 64
BF16 = "bf16"
W4A8 = "mxfp4/fp8"
"""What prefill is measured with beside the precisions that were asked for."""
UNMASKED = "sdpa_unmasked"


@dataclass(frozen=True)
class Size:
    """Of a Llama: a layer's widths, how many there are, the vocabulary.

    Attributes:
        parts: what is measured if nothing is said.
        bf16_layers: of the bf16 models that are timed in place of one that does not fit; empty: it does.
    """

    widths: layer.Widths
    layers: int
    vocabulary: int
    parts: tuple[str, ...]
    bf16_layers: tuple[int, ...] = ()

    def config(self, layers: int | None = None, attention: str = "sdpa") -> Any:
        """transformers' configuration, with all layers or `layers`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.widths.hidden,
            intermediate_size=self.widths.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.widths.attention // HEAD,
            num_key_value_heads=(self.widths.qkv - self.widths.attention) // 2 // HEAD,
            head_dim=HEAD,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            attn_implementation=attention,
            eos_token_id=None,  # random weights would draw it anywhere
        )


PARTS = ("memory", "decode", "prefill", "generate", "logits")
MODELS = {
    "8B": Size(layer.MODELS["8B"], 32, 128256, PARTS),
    "70B": Size(layer.MODELS["70B"], 80, 128256, ("memory", "decode"), bf16_layers=(2, 6)),
}
"""Llama 3.1."""


# Models


def register_unmasked() -> None:
    """Have transformers know `UNMASKED`: its attention by `scaled_dot_product_attention`, without a mask.

    Right where a prompt fills an empty cache, and where a token takes the last place of one. With a mask transformers
    5.17 copies keys and values for each head of queries, eight times the cache of a 70B, in every step.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(UNMASKED, sdpa_attention_forward)


def build(label: str, config: Any, device: torch.device, merge: bool = True) -> Any:
    """The model in bf16, or in "scheme/activations"."""
    from torch_cute_ops.integrations.transformers import from_config

    if label == BF16:  # no layer quantised: the layers as transformers has them
        return from_config(config, device=device, dtype=DTYPE, merge=False, ignore=("*",))
    scheme, _, activations = label.partition("/")
    return from_config(
        config,
        scheme,  # type: ignore[arg-type]
        activations=activations,  # type: ignore[arg-type]
        device=device,
        dtype=DTYPE,
        merge=merge,
    )


def decoded(model: nn.Module) -> nn.Module:
    """The model with bf16 weights that have the numbers of the quantised ones, which are not merged."""
    twin = copy.deepcopy(model)
    for parent in [*twin.modules()]:
        for name, each in [*parent.named_children()]:
            if isinstance(each, QuantLinear):
                linear = nn.Linear(each.in_features, each.out_features, bias=False, device="meta")
                linear.weight = nn.Parameter(each.dequantize(DTYPE), requires_grad=False)
                parent.add_module(name, linear)
    return twin


def bytes_of(model: nn.Module) -> int:
    """Of all tensors of a model, shared ones once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def cosines(got: Tensor, want: Tensor) -> Tensor:
    """Of the logits of each token, (…, vocabulary), to what they should be."""
    return F.cosine_similarity(got.double(), want.double(), -1)


def extrapolated(times: Mapping[int, float], layers: int) -> float:
    """The time with `layers` layers, on the line through the times with few."""
    (first, start), *_, (last, end) = sorted(times.items())
    return start + (end - start) / (last - first) * (layers - first)


class Context:
    """A static cache with random keys and values in all places but the last.

    The layers count their tokens in views of one tensor, so that one fill takes a step back.
    """

    def __init__(self, config: Any, batch: int, length: int, device: torch.device) -> None:
        from transformers import StaticCache

        self.length = length
        self.cache = StaticCache(config=config, max_cache_len=length)
        self.cache.early_initialization(
            batch_size=batch, num_heads=config.num_key_value_heads, head_dim=HEAD, dtype=DTYPE, device=device
        )
        counts = [each.cumulative_length for each in self.cache.layers]
        self.taken = torch.full((len(counts),), length - 1, dtype=counts[0].dtype, device=device)
        for each, taken in zip(self.cache.layers, self.taken.unbind(), strict=True):
            each.cumulative_length = taken
            each.keys.normal_()
            each.values.normal_()

    def rewind(self) -> None:
        """Free the last place again."""
        self.taken.fill_(self.length - 1)


class DecodeStep:
    """A token for each sequence at the last place of a context, and greedily the one after it; as often as called."""

    def __init__(self, model: Any, context: Context, batch: int) -> None:
        self.model, self.context = model, context
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.full((1, 1), context.length - 1, device=model.device)

    def __call__(self, _: int = 0) -> Tensor:
        """The logits, (batch, 1, vocabulary); `ids` are the next tokens then."""
        self.context.rewind()
        logits = forward(self.model, self.ids, self.context.cache, position_ids=self.positions)
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits


def forward(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Tensor:
    """The logits of the last token after `ids`, with a new cache or the given one."""
    if cache is not None:
        # transformers 5.17 calls it `past_key_values`.
        parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
        given["cache" if "cache" in parameters else "past_key_values"] = cache
    return model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits


def generated(model: Any, prompt: Tensor, new: int, compile_config: Any = None) -> Tensor:
    """`new` tokens after a prompt by `generate()`: greedily, with a static cache."""
    from transformers import GenerationConfig

    how = GenerationConfig(
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
        pad_token_id=0,
    )
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)


# What is measured


@dataclass
class Bench:
    """The parts of one model size, each of which adds to `result` what it found.

    Attributes:
        name: of the size, in the tables.
        size: the widths and the number of layers.
        parts: some of `PARTS`, which are methods here.
        labels: the precisions of ours, as "scheme/activations".
        batches, context, tokens: sequences of decode steps, the place of their token, tokens of a prefill.
        attention: transformers' name for that of decode and prefill.
        save: called after each finding, so that a run cut short leaves what it found.
        compile_config: for `generate()`; `None`: transformers' default.
        is_compiled: whether decode steps and prefill are those of models that `torch.compile` has compiled.
    """

    name: str
    size: Size
    parts: Sequence[str]
    labels: Sequence[str]
    batches: Sequence[int]
    context: int
    tokens: int
    attention: str
    device: torch.device
    backend: Backend
    result: dict[str, Any]
    save: Callable[[], None] = lambda: None
    compile_config: Any = None
    is_compiled: bool = False
    models: dict[tuple[str, int], Any] = field(default_factory=dict)

    def run(self) -> None:
        """The parts in their order; one that fails is noted, and the next begins."""
        failed = self.result["failed"].setdefault(self.name, {})
        for part in (each for each in PARTS if each in self.parts):
            start = time.perf_counter()
            with self.noting(part, failed):
                getattr(self, part)()
            seconds = time.perf_counter() - start
            self.result["seconds"][f"{self.name}, {part}"] = seconds
            print(f"  {self.name}, {part}: {seconds:.0f} s", flush=True)
            self.save()
        self.models.clear()
        self.collect()

    def as_called(self, model: Any) -> Any:
        """The model, or that compiled."""
        return torch.compile(model, dynamic=False) if self.is_compiled else model

    def rows_of(self, label: str) -> list[int]:
        """Numbers of rows to warm a model up for; what was not asked for is there for prefill alone."""
        parts = self.parts if label in self.labels else ("prefill",)
        rows = {"decode": self.batches, "prefill": [self.tokens], "generate": [1, PROMPT]}
        return sorted({each for part in parts for each in rows.get(part, ())})

    @contextmanager
    def noting(self, what: str, failed: dict[str, str]) -> Iterator[None]:
        """Whatever is raised inside becomes a line in `failed`."""
        try:
            yield
        except Exception as error:
            lines = str(error).splitlines() or [""]
            failed[what] = f"{type(error).__name__}: {lines[0][:200]}"
            print(f"  {self.name}, {what}: {failed[what]}", flush=True)

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Whatever kernel is made ready inside was missed by the warm-up."""
        before = len(compiler._compiled)
        try:
            yield
        finally:
            late, key = self.result["kernels_after_warmup"], f"{self.name}, {part}"
            late[key] = late.get(key, 0) + len(compiler._compiled) - before

    def collect(self) -> None:
        """Give back the memory of what is no longer used."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def made(self, label: str, layers: int | None = None) -> Any:
        """A model of so many layers, or all, warmed up; built at the first call, when its memory is noted."""
        key = (label, layers or self.size.layers)
        if key not in self.models:
            config, on_gpu = self.size.config(layers, self.attention), self.device.type == "cuda"
            start = time.perf_counter()
            self.collect()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
            model = build(label, config, self.device)
            held, above = bytes_of(model), None
            if on_gpu:
                above = torch.cuda.max_memory_allocated(self.device) - before - held
            torch_cute_ops.nn.warmup(model, self.rows_of(label))
            self.models[key] = model
            seconds = time.perf_counter() - start
            self.result["seconds"][f"{self.name}, {label} of {key[1]} layers, built and warmed up"] = seconds
            if layers is None and label != BF16:
                self.result["memory"].append({"model": self.name, "label": label, "bytes": held, "peak_above": above})
        return self.models[key]

    def bf16_layers(self) -> Sequence[int | None]:
        """Of the models that stand for the one in bf16."""
        return self.size.bf16_layers or (None,)

    def all_made(self, labels: Sequence[str], failed: dict[str, str]) -> dict[Any, Any]:
        """The models by label and layers (`None`: all), those in bf16 too, without those that could not be built."""
        found = {}
        wanted = [(label, None) for label in labels] + [(BF16, layers) for layers in self.bf16_layers()]
        for label, layers in wanted:
            with self.noting(label, failed):
                found[label, layers] = self.made(label, layers)
        return found

    def add(self, part: str, case: str, timings: Mapping[Any, Any], failed: dict[str, str], **more: Any) -> None:
        """A row of times, by label; those of bf16 with few layers become one."""
        variants = {label: timing.as_dict() for (label, layers), timing in timings.items() if layers is None}
        few = {layers: timing.us for (_, layers), timing in timings.items() if layers is not None}
        if few and len(few) == len(self.size.bf16_layers):
            us = extrapolated(few, self.size.layers)
            variants[BF16] = {"us": us, "by_layers": {str(layers): each for layers, each in few.items()}}
        row = {"model": self.name, "part": part, "case": case, **more, "variants": variants, "absent": failed}
        self.result["rows"].append(row)
        times = ", ".join(f"{label} {report.number(each['us'] / 1e3)}" for label, each in variants.items())
        print(f"  {self.name}, {case}: {times} ms", flush=True)
        self.save()

    # Parts

    def memory(self) -> None:
        """What ours takes, and how much more while it is built."""
        for label in self.labels:
            self.made(label)

    def decode(self) -> None:
        """A step in a graph, at the last place of a full cache; all models in turn."""
        unmade: dict[str, str] = {}
        models = self.all_made(self.labels, unmade)
        for batch in self.batches:
            failed, contexts, steps = dict(unmade), {}, {}
            for key, model in models.items():
                with self.noting(key[0], failed):
                    layers = model.config.num_hidden_layers
                    if layers not in contexts:  # models of as many layers share one
                        contexts[layers] = Context(model.config, batch, self.context, self.device)
                    steps[key] = DecodeStep(self.as_called(model), contexts[layers], batch)
            with self.counting("decode"):
                timings = measure_what_captures(
                    steps, 1, 1, ROUNDS, self.backend, functools.partial(self.lose, failed=failed)
                )
            case = f"decode, batch {batch}, context {self.context:,}"
            self.add("decode", case, timings, failed, batch=batch, context=self.context)
            del contexts, steps
            self.collect()

    def prefill(self) -> None:
        """A prompt into a new cache."""
        failed: dict[str, str] = {}
        labels = list(dict.fromkeys([*self.labels, W4A8]))
        models, calls = self.all_made(labels, failed), {}
        ids = torch.randint(self.size.vocabulary, (1, self.tokens), device=self.device)
        with self.counting("prefill"):
            for key, model in models.items():
                with self.noting(key[0], failed):
                    called = self.as_called(model)
                    forward(called, ids)
                    calls[key] = lambda called=called: forward(called, ids)
            timings = measure(calls, 1, 1, ROUNDS, AsTheyAre(self.backend))
        self.add("prefill", f"prefill, {self.tokens:,} tokens", timings, failed, tokens=self.tokens)

    def generate(self) -> None:
        """`generate()` from end to end, with the decode step as transformers compiles it."""
        failed: dict[str, str] = {}
        prompt = torch.randint(self.size.vocabulary, (1, PROMPT), device=self.device)
        variants: dict[str, dict[str, Any]] = {}
        for label in (*self.labels, BF16):
            if label == BF16 and self.size.bf16_layers:
                continue
            with self.noting(label, failed):
                model = self.made(label)
                model.set_attn_implementation("sdpa")  # the cache is not full: its mask is needed
                try:
                    with self.counting("generate"):
                        variants[label] = self.generation(model, prompt)
                finally:
                    model.set_attn_implementation(self.attention)
                print(f"  {self.name}, generate(), {label}: {variants[label]['tokens_per_s']:.0f} tokens/s", flush=True)
        row = {"model": self.name, "part": "generate", "case": f"generate(), {NEW} tokens"}
        self.result["rows"].append({**row, "variants": variants, "absent": failed})
        self.save()

    def generation(self, model: Any, prompt: Tensor) -> dict[str, Any]:
        """Time of a token, the median of several generations, and how many graphs torch compiled beyond one."""
        stats = torch._dynamo.utils.counters["stats"]
        torch._dynamo.reset()
        before = stats["unique_graphs"]
        # The longest first, for later ones keep the cache's length.
        generated(model, prompt, LONGEST, self.compile_config)
        seconds = []
        for new in (LONGEST, *[NEW] * GENERATIONS):
            self.backend.synchronize()
            start = time.perf_counter()
            generated(model, prompt, new, self.compile_config)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        median = sorted(seconds[1:])[GENERATIONS // 2]
        graphs = stats["unique_graphs"] - before
        return {"us": median / NEW * 1e6, "tokens_per_s": NEW / median, "graphs": graphs}

    def logits(self) -> None:
        """Of a model with few layers, to those of its weights in bf16; and both to those in fp32."""
        config = self.size.config(min(LOGIT_LAYERS, self.size.layers))
        ids = torch.randint(self.size.vocabulary, (1, LOGIT_TOKENS), device=self.device)
        for label in self.labels:
            with self.noting(f"logits, {label}", self.result["failed"][self.name]):
                model = build(label, config, self.device, merge=False)
                twin = decoded(model)
                want = twin(ids, use_cache=False).logits
                exact = twin.float()(ids, use_cache=False).logits
                got = torch_cute_ops.nn.merge_(model)(ids, use_cache=False).logits
                least = [cosines(*pair).min().item() for pair in ((got, want), (got, exact), (want, exact))]
                found = dict(zip(COSINES, least, strict=True))
                self.result["logits"].append({"model": self.name, "label": label, **found})
                print(f"  {self.name}, logits, {label}: cosine {least[0]:.6f}", flush=True)

    def lose(self, key: tuple[str, int | None], error: Exception, failed: dict[str, str]) -> None:
        """Note that a step could not be captured."""
        with self.noting(key[0], failed):
            raise error


# Targets

DECODE = {"8B": {1: 2.0, 16: 1.6, 64: 1.3}, "70B": {1: 2.4, 64: 1.7}}
GENERATE = {"8B": 1.6}
PREFILL = {"16bit": 0.95, "fp8": 1.4}
"""How many times as fast as bf16 ours has to be: a decode step by batch, `generate()`, and prefill by activations."""
DISTANCE = 1e-4
"""1 − cosine of the logits, at most."""
GIGABYTES = {"8B": 6.3, "70B": 43.5}
PEAK_GIGABYTES = 2.0
"""Above the model, while it is built."""


def is_four_bit(label: str, activations: str) -> bool:
    """Whether a precision has FP4 weights beside these activations."""
    return label in (f"nvfp4/{activations}", f"mxfp4/{activations}")


def goal_of(row: Mapping[str, Any], label: str) -> float | None:
    """What bf16's time over that of `label` has to be at least."""
    if row["part"] == "prefill":
        if row["tokens"] != TOKENS:
            return None
        found = [goal for activations, goal in PREFILL.items() if is_four_bit(label, activations)]
        return found[0] if row["model"] in MODELS and found else None
    if not is_four_bit(label, "16bit"):
        return None
    if row["part"] == "decode":
        return DECODE.get(row["model"], {}).get(row["batch"]) if row["context"] == CONTEXT else None
    return GENERATE.get(row["model"])


def marks(result: Mapping[str, Any]) -> list[Mark]:
    """What was measured, against what a served model has to reach."""
    found = []
    for row in result["rows"]:
        for label, ratio in ratios(row).items():
            goal = goal_of(row, label)
            if goal is not None:
                found.append(at_least(f"{row['model']}, {row['case']}, {label}: bf16 / ours", ratio, goal))
    for each in result["memory"]:
        name, least = f"{each['model']}, {each['label']}", GIGABYTES.get(each["model"])
        if least is not None and is_four_bit(each["label"], "16bit"):
            found.append(at_most(f"{name}: memory", each["bytes"] / 1e9, least, " GB"))
            if each["peak_above"] is not None:
                found.append(at_most(f"{name}: peak above", each["peak_above"] / 1e9, PEAK_GIGABYTES, " GB"))
    for each in result["logits"]:
        if is_four_bit(each["label"], "16bit"):
            name = f"{each['model']}, {each['label']}: 1 − cosine of logits"
            found.append(at_most(name, 1 - each["cosine"], DISTANCE))
    for name, count in result["kernels_after_warmup"].items():
        found.append(at_most(f"{name}: kernels compiled after the warm-up", count, 0))
    for row in result["rows"]:
        for label, each in row["variants"].items():
            if "graphs" in each and label != BF16:
                name = f"{row['model']}, {label}: graphs recompiled by torch, {LONGEST} tokens"
                found.append(at_most(name, each["graphs"] - 1 if each["graphs"] else None, 0))
    return found


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """bf16's time over that of each other precision."""
    times = {label: each["us"] for label, each in row["variants"].items()}
    return {label: times[BF16] / us for label, us in times.items() if label != BF16} if BF16 in times else {}


def failures(result: Mapping[str, Any]) -> dict[str, str]:
    """Why something was not measured, by what."""
    parts = {f"{name}, {what}": why for name, each in result["failed"].items() for what, why in each.items()}
    variants = {
        f"{row['model']}, {row['case']}, {label}": why for row in result["rows"] for label, why in row["absent"].items()
    }
    return {**parts, **variants}


# The report


def markdown(result: Mapping[str, Any]) -> str:
    """Tables of times, memory, logits and marks."""
    rows = result["rows"]
    few = {len(each["by_layers"]) for row in rows for each in row["variants"].values() if "by_layers" in each}
    labels = list(dict.fromkeys(label for row in rows for label in row["variants"]))
    ours = [label for label in labels if label != BF16]
    parts = [
        "# A served model",
        f"{environment.headline(result['environment'])} · transformers {result['environment']['transformers']}",
        textwrap.fill(
            TEXT.format(
                rounds=ROUNDS,
                attention=ATTENTION[result["attention"]],
                compiled=COMPILED if result.get("is_compiled") else "Both run eagerly.",
            ),
            120,
            break_on_hyphens=False,
        ),
    ]
    body = []
    for row in rows:
        star = "*" if "by_layers" in row["variants"].get(BF16, {}) else ""
        times = [row["variants"].get(label, {}).get("us") for label in (BF16, *ours)]
        cells = [report.number(None if us is None else us / 1e3) for us in times]
        quotients = [f"{ratios(row)[label]:.2f}" if label in ratios(row) else "–" for label in ours]
        body.append([row["model"], row["case"], cells[0] + star, *cells[1:], *quotients])
    if rows:
        header = ["model", "what", "bf16 ms", *(f"{label} ms" for label in ours), *(f"bf16 / {x}" for x in ours)]
        parts.append(report.table(header, body))
        if few:
            parts.append("* on the line through models of fewer layers.")
    tokens = [
        [row["model"], label, report.number(each["tokens_per_s"]), str(each["graphs"] or "eager")]
        for row in rows
        for label, each in row["variants"].items()
        if "tokens_per_s" in each
    ]
    if tokens:
        about = (
            f"`generate()`: {PROMPT} tokens of prompt and {NEW} new ones, from end to end; its ms above are a token's."
        )
        parts.append(
            f"{about}\n\n{report.table(['model', 'precision', 'tokens/s', 'graphs of the decode step'], tokens)}"
        )
    held = [
        [
            each["model"],
            each["label"],
            f"{each['bytes'] / 1e9:.2f}",
            "–" if each["peak_above"] is None else f"{each['peak_above'] / 1e9:.2f}",
        ]
        for each in result["memory"]
    ]
    if held:
        parts.append(report.table(["model", "precision", "GB", "peak above it, GB"], held))
    close = [
        [each["model"], each["label"], *(f"{each[key]:.6f}" if key in each else "–" for key in COSINES)]
        for each in result["logits"]
    ]
    if close:
        header = ["model", "precision", "logits: least cosine to bf16", "to fp32", "of bf16 to fp32"]
        parts.append(report.table(header, close))
    failed = [f"- {what}: {why}" for what, why in failures(result).items()]
    if failed:
        parts.append("\n".join(failed))
    judged = marks(result)
    if judged:
        parts.append(f"## Marks\n\n{report.marks_table(judged)}")
    took = [[name, f"{seconds:.1f}"] for name, seconds in result["seconds"].items()]
    parts.append(f"## Wall time\n\n{report.table(['part', 's'], took)}")
    return "\n\n".join(parts)


TEXT = """\
Llamas with random weights; medians of {rounds}, models in turn; ours as scheme of the weights / activations, merged;
bf16 as transformers has it. {compiled} A decode step is captured in a graph, with its cache full; prefill is
not, and fills a new cache; `generate()` has a static cache, and its decode step is compiled by transformers'
default (`torch.compile`, mode "reduce-overhead", attention with a mask). {attention} Logits: of four layers, to those
of the same weights in bf16, the worst token; and both to those in fp32."""
COSINES = ("cosine", "to_fp32", "bf16_to_fp32")
"""Of ours to bf16, of ours to fp32, and of bf16 to fp32: what a result file calls them."""
COMPILED = (
    "Both are compiled by `torch.compile` for each batch, with `triton.enable_pdl` and the pass of "
    "`torch_cute_ops.integrations.inductor`, which leaves bf16 as it is."
)
ATTENTION = {
    UNMASKED: "Attention is transformers' `sdpa` without a mask, which a full cache does not need.",
    "sdpa": "Attention is transformers' `sdpa`, with its mask: 5.17 copies keys and values for it, for each head.",
}


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        metadata.version("transformers")
    except metadata.PackageNotFoundError:
        print("python -m benchmarks model needs transformers: the extra 'transformers'.", file=sys.stderr)
        return NO_GPU
    return on_gpu("model", lambda options, device, backend, _: measure_models(options, device, backend), options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all of 8B, memory and decode of 70B")
    parser.add_argument("--schemes", nargs="+", choices=("nvfp4", "mxfp4", "fp8_block"), default=["nvfp4"])
    parser.add_argument(
        "--activations", nargs="+", choices=("16bit", "fp4", "fp8"), default=["16bit"], help="fp8_block has fp8 alone"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens in the cache of a decode step")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a prefill")
    parser.add_argument("--layers", type=int, help="of models that are cut to so many, for a look; no target holds")
    parser.add_argument(
        "--attention", choices=tuple(ATTENTION), default=UNMASKED, help="of decode and prefill (default: %(default)s)"
    )
    parser.add_argument("--compiled", action="store_true", help="decode and prefill by models that torch has compiled")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the files written")
    return parser.parse_args(arguments)


def precisions(schemes: Sequence[str], activations: Sequence[str]) -> list[str]:
    """Every scheme with all activations that it has."""
    pairs = (f"{scheme}/{'fp8' if scheme == 'fp8_block' else each}" for scheme in schemes for each in activations)
    return list(dict.fromkeys(pairs))


@torch.no_grad()
def measure_models(options: argparse.Namespace, device: torch.device, backend: Backend) -> int:
    """Measure what was asked for; print and write `model.json` and `model.md`."""
    options.output.mkdir(parents=True, exist_ok=True)
    register_unmasked()
    result: dict[str, Any] = {
        "environment": {**environment.collect(device), "transformers": metadata.version("transformers")},
        "attention": options.attention,
        "is_compiled": options.compiled,
        "rows": [],
        "memory": [],
        "logits": [],
        "kernels_after_warmup": {},
        "seconds": {},
        "failed": {},
    }

    def save() -> None:
        report.write_json(result, marks(result), options.output / "model.json")
        (options.output / "model.md").write_text(markdown(result) + "\n", encoding="utf-8")

    compiling = {**layer.INDUCTOR, "post_grad_custom_pre_pass": FuseQuantization()} if options.compiled else {}
    for name in options.models:
        size = MODELS[name]
        parts = options.parts or size.parts
        if options.layers is not None:
            name, size = f"{name} with {options.layers} layers", replace(size, layers=options.layers, bf16_layers=())
        bench = Bench(
            name,
            size,
            parts,
            precisions(options.schemes, options.activations),
            options.batch,
            options.context,
            options.tokens,
            options.attention,
            device,
            backend,
            result,
            save,
            is_compiled=options.compiled,
        )
        with inductor_config.patch(compiling):
            bench.run()
    print(f"\n{markdown(result)}", flush=True)
    return 1 if failures(result) else 0
