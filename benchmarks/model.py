"""`python -m benchmarks model`: memory use, and times of decode steps, prefill and generation, of whole models,
quantised and in bf16.

If a bf16 model exceeds the GPU's memory, it is timed with few layers, and its time is extrapolated linearly.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
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
from torch import Tensor

import torch_cute_ops.nn
from torch_cute_ops.integrations.inductor import FuseQuantization
from torch_cute_ops.runtime import compiler

from . import environment, layer, llama, report
from .layers import NO_GPU, RESULTS, on_gpu
from .llama import BF16, UNMASKED
from .measure import AsTheyAre, Backend, measure, measure_what_captures
from .model_report import ATTENTION, COSINES, failures, markdown, marks

NOTES = layer.NOTES
LOGIT_LAYERS, LOGIT_TOKENS = 4, 64
W4A8 = "mxfp4/fp8"
"""Precision that is always measured for prefill and for decode steps of at least `llama.MANY` sequences, even if the
options do not name it."""


def cosines(got: Tensor, want: Tensor) -> Tensor:
    """Return the cosine similarity between the logits `got` (…, vocabulary) and the expected logits `want`, for each
    token."""
    return F.cosine_similarity(got.double(), want.double(), -1)


def extrapolated(times: Mapping[int, float], layers: int) -> float:
    """Extrapolate linearly from times of models with few layers to the time of a model with `layers` layers."""
    (first, start), *_, (last, end) = sorted(times.items())
    return start + (end - start) / (last - first) * (layers - first)


@dataclass
class Bench:
    """Measurements of one model size. Each part adds its results to `result`.

    Attributes:
        name: Name of the size in the tables.
        size: Widths and number of layers.
        parts: Entries of `llama.PARTS`, names of methods of this class.
        labels: Our precisions as "scheme/activations".
        batches: Batch sizes (numbers of sequences) of the decode steps.
        context: Position at which the decode step computes the next token.
        tokens: Number of tokens of the prompt in a prefill.
        attention: transformers' name of the attention implementation, for decode steps and prefill.
        save: Function that writes the results. It is called after each result, so that an aborted run loses no results.
        compile_config: Compile configuration of `generate()`, or None for transformers' default.
        is_compiled: True if `torch.compile` compiles the models of decode steps and prefill.
        fuses_attention: True if the attention blocks of our models call `qkv_norm_rope_append`.
    """

    name: str
    size: llama.Size
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
    fuses_attention: bool = False
    models: dict[tuple[str, int], Any] = field(default_factory=dict)

    def run(self) -> None:
        """Run the parts in order. If a part fails, record the error and continue with the next part."""
        failed = self.result["failed"].setdefault(self.name, {})
        for part in (each for each in llama.PARTS if each in self.parts):
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
        """Compile the model with `torch.compile` if `is_compiled`, and return it."""
        return torch.compile(model, dynamic=False) if self.is_compiled else model

    def rows_of(self, label: str) -> list[int]:
        """Return the numbers of rows for which a model's kernels are compiled before the model is measured."""
        rows = {"decode": self.batches_of(label), "prefill": [self.tokens]}
        if label in self.labels:
            rows["generate"] = [1, llama.PROMPT]
        return sorted({each for part in self.parts for each in rows.get(part, ())})

    def with_w4a8(self) -> list[str]:
        """Return the requested precisions, with `W4A8` added if it was not requested."""
        return list(dict.fromkeys([*self.labels, W4A8]))

    def batches_of(self, label: str) -> list[int]:
        """Return the batch sizes of decode steps for a precision. If `W4A8` was not requested, it is measured only with
        large batches."""
        return [each for each in self.batches if label in (*self.labels, BF16) or each >= llama.MANY]

    @contextmanager
    def noting(self, what: str, failed: dict[str, str]) -> Iterator[None]:
        """Catch an exception of the `with` block, and record it in `failed` under the name `what`."""
        try:
            yield
        except Exception as error:
            lines = str(error).splitlines() or [""]
            failed[what] = f"{type(error).__name__}: {lines[0][:200]}"
            print(f"  {self.name}, {what}: {failed[what]}", flush=True)

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Count the kernels that the warm-up missed: they are compiled or loaded in the `with` block."""
        before = len(compiler._compiled)
        try:
            yield
        finally:
            late, key = self.result["kernels_after_warmup"], f"{self.name}, {part}"
            late[key] = late.get(key, 0) + len(compiler._compiled) - before

    def collect(self) -> None:
        """Free the memory of objects that are no longer referenced."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def made(self, label: str, layers: int | None = None) -> Any:
        """Return a model with `layers` layers, or with all layers if `layers` is None. Its kernels are compiled. The
        first call for a label builds the model and records its memory."""
        key = (label, layers or self.size.layers)
        if key not in self.models:
            config, on_gpu = self.size.config(layers, self.attention), self.device.type == "cuda"
            start = time.perf_counter()
            self.collect()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
            model = llama.build(label, config, self.device, fuse=self.fuses_attention)
            held, above = llama.bytes_of(model), None
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
        """Return the numbers of layers of the bf16 models that are timed; None stands for the whole model."""
        return self.size.bf16_layers or (None,)

    def all_made(self, labels: Sequence[str], failed: dict[str, str]) -> dict[Any, Any]:
        """Build the models of these precisions and of bf16. Return the models that could be built, keyed by label and
        number of layers (None for all layers)."""
        found = {}
        wanted = [(label, None) for label in labels] + [(BF16, layers) for layers in self.bf16_layers()]
        for label, layers in wanted:
            with self.noting(label, failed):
                found[label, layers] = self.made(label, layers)
        return found

    def add(self, part: str, case: str, timings: Mapping[Any, Any], failed: dict[str, str], **more: Any) -> None:
        """Add a row with the time of each precision to the result. If bf16 was timed with few layers, its time is
        extrapolated to the whole model."""
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
        """Record how much memory our models need, and how much additional memory is in use while they are built."""
        for label in self.labels:
            self.made(label)

    def decode(self) -> None:
        """Measure a decode step, captured in a CUDA graph, at the last position of the cache. Each round times every
        model."""
        unmade: dict[str, str] = {}
        labels = [label for label in self.with_w4a8() if self.batches_of(label)]
        models = self.all_made(labels, unmade)
        for batch in self.batches:
            failed = {label: why for label, why in unmade.items() if batch in self.batches_of(label)}
            contexts, steps = {}, {}
            for key, model in models.items():
                if batch not in self.batches_of(key[0]):
                    continue
                with self.noting(key[0], failed):
                    layers = model.config.num_hidden_layers
                    if layers not in contexts:  # models with equal numbers of layers share a context
                        contexts[layers] = llama.Context(model.config, batch, self.context, self.device)
                    steps[key] = llama.DecodeStep(self.as_called(model), contexts[layers], batch)
            with self.counting("decode"):
                timings = measure_what_captures(
                    steps, 1, 1, llama.ROUNDS, self.backend, functools.partial(self.lose, failed=failed)
                )
            case = f"decode, batch {batch}, context {self.context:,}"
            self.add("decode", case, timings, failed, batch=batch, context=self.context)
            del contexts, steps
            self.collect()

    def prefill(self) -> None:
        """Measure the forward pass of a prompt with a new cache."""
        failed: dict[str, str] = {}
        labels = self.with_w4a8()
        models, calls = self.all_made(labels, failed), {}
        ids = torch.randint(self.size.vocabulary, (1, self.tokens), device=self.device)
        with self.counting("prefill"):
            for key, model in models.items():
                with self.noting(key[0], failed):
                    called = self.as_called(model)
                    llama.forward(called, ids)
                    calls[key] = lambda called=called: llama.forward(called, ids)
            timings = measure(calls, 1, 1, llama.ROUNDS, AsTheyAre(self.backend))
        self.add("prefill", f"prefill, {self.tokens:,} tokens", timings, failed, tokens=self.tokens)

    def generate(self) -> None:
        """Measure `generate()` end to end, with transformers' compiled decode step."""
        failed: dict[str, str] = {}
        prompt = torch.randint(self.size.vocabulary, (1, llama.PROMPT), device=self.device)
        variants: dict[str, dict[str, Any]] = {}
        for label in (*self.labels, BF16):
            if label == BF16 and self.size.bf16_layers:
                continue
            with self.noting(label, failed):
                model = self.made(label)
                model.set_attn_implementation("sdpa")  # the cache is not full, so a mask is needed
                try:
                    with self.counting("generate"):
                        variants[label] = self.generation(model, prompt)
                finally:
                    model.set_attn_implementation(self.attention)
                print(f"  {self.name}, generate(), {label}: {variants[label]['tokens_per_s']:.0f} tokens/s", flush=True)
        row = {"model": self.name, "part": "generate", "case": f"generate(), {llama.NEW} tokens"}
        self.result["rows"].append({**row, "variants": variants, "absent": failed})
        self.save()

    def generation(self, model: Any, prompt: Tensor) -> dict[str, Any]:
        """Return the time per token, as the median over several generations, and the number of recompilations: the
        number of compiled graphs minus one."""
        stats = torch._dynamo.utils.counters["stats"]
        torch._dynamo.reset()
        before = stats["unique_graphs"]
        # Run the longest generation first: later generations reuse its KV cache, whose length then never changes.
        llama.generated(model, prompt, llama.LONGEST, self.compile_config)
        seconds = []
        for new in (llama.LONGEST, *[llama.NEW] * llama.GENERATIONS):
            self.backend.synchronize()
            start = time.perf_counter()
            llama.generated(model, prompt, new, self.compile_config)
            self.backend.synchronize()
            seconds.append(time.perf_counter() - start)
        median = sorted(seconds[1:])[llama.GENERATIONS // 2]
        graphs = stats["unique_graphs"] - before
        return {"us": median / llama.NEW * 1e6, "tokens_per_s": llama.NEW / median, "graphs": graphs}

    def logits(self) -> None:
        """Compare logits of models with few layers: our model with a bf16 model that uses the decoded weights, and each
        of the two with an fp32 model."""
        config = self.size.config(min(LOGIT_LAYERS, self.size.layers))
        ids = torch.randint(self.size.vocabulary, (1, LOGIT_TOKENS), device=self.device)
        for label in self.labels:
            with self.noting(f"logits, {label}", self.result["failed"][self.name]):
                model = llama.build(label, config, self.device, merge=False)
                twin = llama.decoded(model)
                want = twin(ids, use_cache=False).logits
                exact = twin.float()(ids, use_cache=False).logits
                got = torch_cute_ops.nn.merge_(model)(ids, use_cache=False).logits
                least = [cosines(*pair).min().item() for pair in ((got, want), (got, exact), (want, exact))]
                found = dict(zip(COSINES, least, strict=True))
                self.result["logits"].append({"model": self.name, "label": label, **found})
                print(f"  {self.name}, logits, {label}: cosine {least[0]:.6f}", flush=True)

    def lose(self, key: tuple[str, int | None], error: Exception, failed: dict[str, str]) -> None:
        """Record the reason why a decode step could not be captured."""
        with self.noting(key[0], failed):
            raise error


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
    parser.add_argument("--models", nargs="+", choices=llama.MODELS, default=list(llama.MODELS), metavar="MODEL")
    parser.add_argument(
        "--parts", nargs="+", choices=llama.PARTS, help="default: all for 8B, memory and decode for 70B"
    )
    parser.add_argument("--schemes", nargs="+", choices=("nvfp4", "mxfp4", "fp8_block"), default=["nvfp4"])
    parser.add_argument(
        "--activations", nargs="+", choices=("16bit", "fp4", "fp8"), default=["16bit"], help="fp8_block has fp8 alone"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=list(llama.BATCHES), help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=llama.CONTEXT, help="tokens in the cache of a decode step")
    parser.add_argument("--tokens", type=int, default=llama.TOKENS, help="of a prefill")
    parser.add_argument("--layers", type=int, help="cut models to this number of layers, without targets")
    parser.add_argument(
        "--attention",
        choices=tuple(ATTENTION),
        default=UNMASKED,
        help="for decode and prefill (default: %(default)s)",
    )
    parser.add_argument("--compiled", action="store_true", help="compile the models of decode and prefill")
    parser.add_argument(
        "--fuse-attention", action="store_true", help="call qkv_norm_rope_append in our models' attention"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the files written")
    return parser.parse_args(arguments)


def precisions(schemes: Sequence[str], activations: Sequence[str]) -> list[str]:
    """Combine each scheme with each format of activations, as "scheme/activations". "fp8_block" is combined only with
    FP8 activations."""
    pairs = (f"{scheme}/{'fp8' if scheme == 'fp8_block' else each}" for scheme in schemes for each in activations)
    return list(dict.fromkeys(pairs))


@torch.no_grad()
def measure_models(options: argparse.Namespace, device: torch.device, backend: Backend) -> int:
    """Measure the models, print the report, and write `model.json` and `model.md`."""
    options.output.mkdir(parents=True, exist_ok=True)
    llama.register_unmasked()
    result: dict[str, Any] = {
        "environment": {**environment.collect(device), "transformers": metadata.version("transformers")},
        "attention": options.attention,
        "is_compiled": options.compiled,
        "fuses_attention": options.fuse_attention,
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
        size = llama.MODELS[name]
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
            fuses_attention=options.fuse_attention,
        )
        with inductor_config.patch(compiling):
            bench.run()
    print(f"\n{markdown(result)}", flush=True)
    return 1 if failures(result) else 0
