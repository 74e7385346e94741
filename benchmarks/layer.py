"""`python -m benchmarks layer`: time of the GEMMs, norms and gate of a decoder layer in one captured graph, by
precision.

A layer is add + norm → qkv → (attention) → o → add + norm → gate and up → SiLU · mul → down. The graph contains several
layers with distinct weights, one after the other; each op depends on the previous op. Attention is left out: o reads
the first elements of the result of qkv. The ops are measured together because consecutive kernels overlap, so the sum
of the times of separate ops would be wrong.

"gate apart" is W4A16 in which a separate kernel computes the gate for any number of rows. This precision is measured
only if `--precisions` names it. The peer humming multiplies the same weights as W4A16. With humming and with bf16,
Inductor compiles the RMSNorms and gates. (QuACK is compared only with `mm_fp4` and `mm_fp4_weight_only`, because it
changes the DSL that compiles our kernels.)

`--join` merges result files of several models, which were measured at the same time on several GPUs of one machine.

`--timeline` prints when each kernel of a layer starts and ends, and how long the GPU is idle before the kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cute_ops as ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.nn import random_
from torch_cute_ops.ops._with_gemm import gates_with_gemm, quantises_with_gemm

from . import environment, fp4_peers, layers, report, targets, timeline
from .case import Mark, at_most
from .compositions import from_128x4
from .measure import Backend, Replay, Settings, ceilings, measure_what_captures, plan
from .runner import ASSUMED_TFLOPS, describe

DTYPE, EPS = torch.bfloat16, 1e-6
NOTES = "fp4_wgmma"
NOTES_OF = {"W4A8": "fp8_fp4_wgmma_ss", "FP8": "fp8_wgmma"}
"""Files of notes on a layer's limits, for precisions whose GEMMs are not in the kernel family `NOTES`."""


@dataclass(frozen=True)
class Widths:
    """Widths of a decoder layer: the width of the residual stream, of q, k and v together, of the input of o, and of
    the gate. The up projection is as wide as the gate."""

    hidden: int
    qkv: int
    attention: int
    intermediate: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each weight, by name."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attention),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def weights(self) -> int:
        """Number of elements of all weights."""
        return sum(n * k for n, k in self.shapes.values())


MODELS = {
    "8B": Widths(4096, 6144, 4096, 14336),
    "32B": Widths(5120, 10240, 8192, 25600),
    "70B": Widths(8192, 10240, 8192, 28672),
}
"""Widths of Llama 3.1 8B, Qwen3 32B and Llama 3.1 70B, keyed by size."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)


INDUCTOR = {"triton.enable_pdl": True} if hasattr(inductor_config.triton, "enable_pdl") else {}
"""Options of `torch.compile`. With PDL, Inductor's kernels may overlap the kernels before and after them, like our
kernels."""


# The norm and the gate for precisions without a fused op. Inductor compiles these functions


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Add `x` to the residual in place, and return RMSNorm of the sum."""
    return F.rms_norm(residual.add_(x), (residual.shape[-1],), weight, EPS)


def gate(rows: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of each row by the second half."""
    first, second = rows.chunk(2, -1)
    return F.silu(first) * second


class Layer:
    """Decoder layer in bf16; base class of the layers in other precisions.

    Attributes:
        label: name of the layer's precision in tables.
        scheme: scheme of the weights in `torch_cute_ops.nn`, or None for bf16.
        element_bytes: bytes per weight element, scales included.
    """

    label = "bf16"
    scheme: Any = None
    element_bytes = 2.0
    scales = "weight_scale"
    """Name of the attribute of a linear layer that contains the scales of its weight."""
    following: Layer | None = None
    """Layer that follows in the captured graph, or None."""

    def __init__(self, widths: Widths, device: torch.device, seed: int, inductor: bool) -> None:
        self.widths = widths
        self.norms = [torch.rand(widths.hidden, dtype=DTYPE, device=device) + 0.5 for _ in range(2)]
        linears = nn.ModuleDict(
            {name: nn.Linear(k, n, bias=False, dtype=DTYPE, device="meta") for name, (n, k) in widths.shapes.items()}
        )
        if self.scheme is None:
            linears.to_empty(device=device)
            for linear in linears.values():
                nn.init.normal_(linear.weight, std=0.02)
        else:
            random_(linears, self.scheme, device=device, seed=seed)
        self.linears = linears.requires_grad_(False)
        compiled: Callable[[Any], Any] = (
            torch.compile(dynamic=False, options=INDUCTOR) if inductor else lambda function: function
        )
        self.add_norm, self.gate = compiled(add_norm), compiled(gate)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Update the residual, and return the rows that the next layer adds to it."""
        rows = self.multiply("qkv", self.normed(x, residual, 0))
        rows = rows.view(-1)[: len(x) * self.widths.attention].view(len(x), -1)
        x = self.multiply("o", self.quantised(rows))
        return self.down(self.multiply("gate_up", self.normed(x, residual, 1)))

    # Steps that the subclasses override. The input of a GEMM is either a tensor or a pair of codes and scales

    def normed(self, x: Tensor, residual: Tensor, which: int) -> Any:
        """Add `x` to the residual in place, and return the normalised sum in the format that the following GEMM
        takes."""
        return self.add_norm(x, residual, self.norms[which])

    def gated(self, rows: Tensor) -> Any:
        """Apply the gate, and return the result in the format that the following GEMM takes."""
        return self.gate(rows)

    def down(self, rows: Tensor) -> Tensor:
        """Apply the gate to `rows`, the outputs of the gate and up projections, and multiply by the `down` weight."""
        return self.multiply("down", self.gated(rows))

    def quantised(self, rows: Tensor) -> Any:
        """Convert rows to the format that the following GEMM takes."""
        return rows

    def multiply(self, name: str, rows: Any) -> Tensor:
        """Multiply rows by the named weight."""
        return self.linears[name](rows)

    def product(self, op: Callable[..., Tensor], name: str, **given: Any) -> Tensor:
        """Call one of our GEMM ops with the weight of the linear layer `name`, and with the arguments in `given`."""
        each: Any = self.linears[name]
        weight = {"b": each.weight.t(), "b_scale": getattr(each, self.scales)}
        return op(**weight, **given, out_dtype=DTYPE, static_weight=True, prefetch=self.next_weight(name))

    def next_weight(self, name: str) -> Tensor | None:
        """Return the weight of the GEMM after the GEMM `name` in the captured graph, or None if `name` is the last
        GEMM."""
        names = list(self.linears)
        at = names.index(name) + 1
        owner = self if at < len(names) else self.following
        return None if owner is None else owner.linears[names[at % len(names)]].weight  # type: ignore[return-value]

    def decoded(self) -> Layer:
        """Return an eager bf16 layer whose weights are the decoded weights of this layer."""
        twin = Layer.__new__(Layer)
        twin.widths, twin.norms, twin.add_norm, twin.gate = self.widths, self.norms, add_norm, gate
        weights = {name: linear.dequantize(DTYPE) for name, linear in self.linears.items()}  # type: ignore[operator]
        twin.multiply = lambda name, rows: rows @ weights[name].t()  # type: ignore[method-assign]
        return twin


class NVFP4Weights(Layer):
    """Layer with NVFP4 weights. The argument `alpha` of each GEMM undoes the weight's global scale."""

    scheme, element_bytes = "nvfp4", 0.5625

    def product(self, op: Callable[..., Tensor], name: str, **given: Any) -> Tensor:
        return super().product(op, name, alpha=self.linears[name].weight_scale_2, **given)


class W4A16(NVFP4Weights):
    """NVFP4 weights and bf16 activations. With one row, the `down` GEMM also applies the gate. With more rows, a kernel
    that Inductor generates applies it."""

    label = "W4A16"

    def normed(self, x: Tensor, residual: Tensor, which: int) -> Any:
        return ops.add_rmsnorm(x, residual, self.norms[which], eps=EPS)

    def down(self, rows: Tensor) -> Tensor:
        if not gates_with_gemm(len(rows), rows.device):
            return super().down(rows)
        return self.product(ops.silu_mul_mm_fp4_weight_only, "down", a=rows)

    def multiply(self, name: str, rows: Any) -> Tensor:
        return self.product(ops.mm_fp4_weight_only, name, a=rows)


class GateApart(W4A16):
    """W4A16 in which a kernel that Inductor generates applies the gate, even with only one row."""

    label = "gate apart"

    def down(self, rows: Tensor) -> Tensor:
        return Layer.down(self, rows)


class W4A4(NVFP4Weights):
    """NVFP4 weights and activations. With few rows, the `o` and `down` GEMMs quantise their inputs. With one row, the
    `down` GEMM also applies the gate."""

    label = "W4A4"

    def normed(self, x: Tensor, residual: Tensor, which: int) -> Any:
        return ops.add_rmsnorm_fp4quant(x, residual, self.norms[which], eps=EPS)

    def gated(self, rows: Tensor) -> Any:
        return ops.silu_mul_fp4quant(rows)

    def quantised(self, rows: Tensor) -> Any:
        return rows if self.quantises_with_gemm(rows) else ops.fp4_quantize(rows)

    def quantises_with_gemm(self, rows: Tensor, *, gated: bool = False) -> bool:
        """Check whether a GEMM quantises `rows` in its own launch, instead of a separate launch."""
        return quantises_with_gemm(len(rows), rows.device, NVFP4.block_size, gated=gated)

    def down(self, rows: Tensor) -> Tensor:
        if not self.quantises_with_gemm(rows, gated=True):
            return super().down(rows)
        return self.product(ops.silu_mul_fp4quant_mm_fp4, "down", a=rows)

    def multiply(self, name: str, rows: Any) -> Tensor:
        if isinstance(rows, Tensor):
            return self.product(ops.fp4quant_mm_fp4, name, a=rows)
        return self.product(ops.mm_fp4, name, a=rows[0], a_scale=rows[1])


class QuantisedApart(W4A4):
    """W4A4 in which each quantisation is a separate launch, for any number of rows."""

    label = "quantised apart"

    def quantises_with_gemm(self, rows: Tensor, *, gated: bool = False) -> bool:
        return False


class FP8(Layer):
    """FP8 weights with a scale per 128 × 128 elements, FP8 activations with a scale per 1 × 128 elements."""

    label, scheme, element_bytes = "FP8", "fp8_block", 1.0 + 4 / 128**2
    scales = "weight_scale_inv"
    how: Mapping[str, Any] = {"granularity": "block128"}

    def normed(self, x: Tensor, residual: Tensor, which: int) -> Any:
        return ops.add_rmsnorm_fp8quant(x, residual, self.norms[which], eps=EPS, **self.how)

    def gated(self, rows: Tensor) -> Any:
        return ops.silu_mul_fp8quant(rows, **self.how)

    def quantised(self, rows: Tensor) -> Any:
        return ops.fp8_quantize(rows, **self.how)

    def multiply(self, name: str, rows: Any) -> Tensor:
        return self.product(ops.mm_fp8_block, name, a=rows[0], a_scale=rows[1])


class W4A8(FP8):
    """MXFP4 weights, FP8 activations with a scale per 1 × 128 elements."""

    label, scheme, element_bytes = "W4A8", "mxfp4", 0.53125
    scales = Layer.scales

    def multiply(self, name: str, rows: Any) -> Tensor:
        return self.product(ops.mm_fp8_fp4, name, a=rows[0], a_scale=rows[1], block_size=MXFP4.block_size)


class TokenW4A8(W4A8):
    """MXFP4 weights with prepared scales, FP8 activations with one scale per token and interleaved k."""

    label = "W4A8 per token"
    how: Mapping[str, Any] = {"granularity": "token", "interleaved": True}
    fast_accum = False

    def __init__(self, widths: Widths, device: torch.device, seed: int, inductor: bool) -> None:
        super().__init__(widths, device, seed, inductor)
        self.prepared = {
            name: ops.prepare_scales(self.linears[name].weight_scale, n, k, block_size=MXFP4.block_size)  # type: ignore[arg-type]
            for name, (n, k) in widths.shapes.items()
        }

    def multiply(self, name: str, rows: Any) -> Tensor:
        weight: Any = self.linears[name].weight
        options: dict[str, Any] = {"block_size": MXFP4.block_size, "fast_accum": self.fast_accum, "out_dtype": DTYPE}
        options |= {"static_weight": True, "prefetch": self.next_weight(name)}
        return ops.mm_fp8_fp4(rows[0], weight.t(), rows[1], self.prepared[name], **options)


class FastTokenW4A8(TokenW4A8):
    """W4A8 per token in which tensor cores add up all of K."""

    label, fast_accum = "W4A8 per token, fast", True


class Humming(Layer):
    """W4A16 in which humming's layers compute the GEMMs."""

    label, scheme, element_bytes = "humming", W4A16.scheme, W4A16.element_bytes

    def __init__(self, widths: Widths, device: torch.device, seed: int, inductor: bool) -> None:
        super().__init__(widths, device, seed, inductor)
        self.made: dict[str, tuple[Any, Any]] = {}

    def multiply(self, name: str, rows: Any) -> Tensor:
        if name not in self.made:
            self.made[name] = self._repacked(name, len(rows))
        layer, tuning = self.made[name]
        out = rows.new_empty(len(rows), self.widths.shapes[name][0])
        return layer(rows, outputs=out, tuning_config=tuning)

    def _repacked(self, name: str, m: int) -> tuple[Any, Any]:
        """Return humming's layer for the weight `name`, and humming's tuning for `m` rows."""
        each: Any = self.linears[name]
        n, k = self.widths.shapes[name]
        scale = from_128x4(each.weight_scale, n, k // each.format.block_size)
        weight = {"weight": each.weight, "weight_scale": scale, "weight_scale_2": each.weight_scale_2.view(1)}
        made = fp4_peers.humming_layers(m, n, k, fp4_peers.HUMMING_NVFP4, [weight])
        if isinstance(made, str):
            raise RuntimeError(made)
        return made[0][0], made[1]


PRECISIONS: dict[str, type[Layer]] = {cls.label: cls for cls in (Layer, W4A16, W4A4, W4A8, FP8)}
USUAL = (*PRECISIONS, Humming.label)
"""Default of `--precisions`."""
OTHERS: tuple[type[Layer], ...] = (TokenW4A8, FastTokenW4A8, GateApart, QuantisedApart, Humming)
"""Further layers. Except humming's, they are measured only if `--precisions` names them."""
LAYERS: dict[str, type[Layer]] = {**PRECISIONS, **{one.label: one for one in OTHERS}}
NOT_OURS = (Layer.label, Humming.label)


def cosine(layer: Layer, m: int, device: torch.device) -> float:
    """Return the cosine similarity between a layer's result and the result of a bf16 layer with the decoded weights."""
    x, residual = (torch.randn(m, layer.widths.hidden, dtype=DTYPE, device=device) for _ in range(2))
    return layers.cosine(layer(x, residual.clone()), layer.decoded()(x, residual.clone()))


def run(
    widths: Widths,
    m: int,
    labels: Sequence[str],
    device: torch.device,
    backend: Backend,
    l2_bytes: int,
    settings: Settings,
    read_tbps: float | None,
    record: Callable[[Replay], Sequence[timeline.Kernel]] | None = None,
) -> dict[str, Any]:
    """Measure a layer with `m` rows in each precision.

    Args:
        record: function that replays a graph and returns the kernels that ran, or None to record no timelines.

    Returns:
        A row of the result file. It contains times in µs, cosine similarities, the reason for each missing precision,
        and timelines. The entry "floor" is the time to read the weights at `read_tbps`.
    """
    smallest = round(widths.weights * min(LAYERS[label].element_bytes for label in labels))
    how = plan(smallest, len(labels), l2_bytes, settings, call_ms=2 * m * widths.weights / ASSUMED_TFLOPS * 1e-9)
    calls, cosines, absent = {}, {}, {}
    torch._dynamo.reset()  # each number of rows is compiled separately, and Dynamo limits the number of recompilations
    residual = torch.randn(m, widths.hidden, dtype=DTYPE, device=device)
    for label in labels:
        try:
            chain = [LAYERS[label](widths, device, seed, device.type == "cuda") for seed in range(how.n_sets)]
            for one, other in itertools.pairwise(chain):
                one.following = other
            if label != "bf16":
                cosines[label] = cosine(chain[0], m, device)
        except Exception as error:  # for example, a peer is not installed
            absent[label] = describe(error)
            continue
        calls[label] = _chain(chain, torch.randn_like(residual), residual)
    timings = measure_what_captures(
        calls, how.n_sets, how.calls, how.rounds, backend, lambda name, error: absent.update({name: str(error)})
    )
    variants = {
        label: {**timing.as_dict(), "floor": floor_us(widths, label, read_tbps)} for label, timing in timings.items()
    }
    row = {"rows": m, "layers": how.n_sets, "variants": variants, "cosine": cosines, "absent": absent}
    if record is not None:
        row["timelines"] = lines = {}
        for label in variants:
            try:
                ran = record(backend.capture(calls[label], how.n_sets, how.n_sets))
                lines[label] = timeline.one_of(ran, how.n_sets)
            except Exception as error:  # for example, no profiler is available
                absent[f"timeline of {label}"] = str(error)
    return row


def floor_us(widths: Widths, label: str, read_tbps: float | None) -> float | None:
    """Return the time in µs to read a layer's weights at `read_tbps`, or None if `read_tbps` is unknown."""
    return None if read_tbps is None else widths.weights * LAYERS[label].element_bytes / read_tbps * 1e-6


def _chain(each: Sequence[Layer], x: Tensor, residual: Tensor) -> Callable[[int], Tensor]:
    """Return a function that calls layer `i` on the previous layer's result, and the first layer on `x`.

    The function keeps `x` alive for captured graphs.
    """
    held = [x]

    def call(i: int) -> Tensor:
        held[0] = each[i](held[0] if i else x, residual)
        return held[0]

    return call


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Return the targets for layers with the measured times."""
    times = {(row["model"], row["rows"], label): each["us"] for row in rows for label, each in row["variants"].items()}
    found = []
    for model, longest in targets.LAYER_US.items():
        for m in ROWS:
            for label, of_rows in longest.items():
                if m in of_rows:
                    us, notes = times.get((model, m, label)), NOTES_OF.get(label, "")
                    found.append(at_most(f"{model}, M={m}, {label}", us, of_rows[m], " µs", notes))
            if model in targets.W4A8_OVER_FP8 and m in targets.W4A8_ROWS:
                w4a8, fp8 = (times.get((model, m, label)) for label in ("W4A8", "FP8"))
                over = None if w4a8 is None or fp8 is None else w4a8 / fp8
                most, notes = targets.W4A8_OVER_FP8[model], NOTES_OF["W4A8"]
                found.append(at_most(f"{model}, M={m}, W4A8 over FP8", over, most, " ×", notes))
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report in Markdown, with one table of layer times per model."""
    parts = [f"# A decoder layer as one chain\n\n{environment.headline(result['environment'])}"]
    parts.append(
        f"µs a layer, medians; floor: bytes of the weights at {report.number(result['peak_read_tbps'])} TB/s, the rate "
        "of reads in this run. Cosine: the least over rows, to the same weights in bf16."
    )
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == model]
        labels = [label for label in LAYERS if any(label in row["variants"] for row in rows)]

        def cells(row: Mapping[str, Any], key: str, labels: Sequence[str] = labels) -> list[str]:
            return [report.number(row["variants"].get(label, {}).get(key)) for label in labels]

        body = [["floor", *cells(rows[0], "floor")], *([f"{row['rows']:,}", *cells(row, "us")] for row in rows)]
        least = {label: min((row["cosine"].get(label, 1.0) for row in rows), default=1.0) for label in labels}
        body.append(["cosine", *(f"{least[label]:.5f}" if label != "bf16" else "–" for label in labels)])
        parts.append(f"## {model}\n\n{report.table(['rows', *labels], body)}")
    absent = {f"{label}: {why}" for row in result["rows"] for label, why in row["absent"].items()}
    return "\n\n".join([*parts, *sorted(absent)])


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the layer times against the number of rows, with one panel per model."""
    layers.plot(report.grouped(rows, lambda row: row["model"]), list(LAYERS), "rows", path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = layers.parser("layer", __doc__, list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="M")
    parser.add_argument("--precisions", nargs="+", choices=LAYERS, default=list(USUAL), metavar="PRECISION")
    parser.add_argument("--timeline", action="store_true", help="print when each kernel of a layer starts and ends")
    parser.add_argument("--join", nargs="+", type=Path, metavar="RESULT", help="join these files, measure nothing")
    options = parser.parse_args(arguments)
    if options.join:
        result = joined(options.join)
        save(result, options)
        layers.finish(options, "layer", markdown(result), result["rows"], picture)
        return 0
    return layers.on_gpu("layer", measure_models, options)


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge result files of different models. All floors are recomputed with the read bandwidth in the first file.

    Raises:
        ValueError: if the files were measured in different environments, or two contain the same model.
    """
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    first = results[0]
    if any(each[name] != first[name] for each in results for name in ("environment", "method")):
        raise ValueError("the files were measured in different environments")
    of_model = [report.grouped(each["rows"], lambda row: row["model"]) for each in results]
    if len({model for each in of_model for model in each}) < sum(map(len, of_model)):
        raise ValueError("several files contain the same model")
    rows = sorted((row for each in results for row in each["rows"]), key=lambda row: list(MODELS).index(row["model"]))
    for row in rows:
        for label, each in row["variants"].items():
            each["floor"] = floor_us(MODELS[row["model"]], label, first["peak_read_tbps"])
    return {**{name: first[name] for name in ("environment", "method", "peak_read_tbps")}, "rows": rows}


def save(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write a result to `layer.json` in the output folder."""
    options.output.mkdir(parents=True, exist_ok=True)
    report.write_json(result, marks(result["rows"]), options.output / "layer.json")


@torch.no_grad()
def measure_models(options: argparse.Namespace, device: torch.device, backend: Backend, l2_bytes: int) -> int:
    """Measure the chosen models; print the results, and write `layer.json`, `layer.md` and `layer.png`."""
    peaks, settings = ceilings(backend, device), Settings()
    result: dict[str, Any] = {
        "environment": environment.collect(device),
        "method": asdict(settings),
        "peak_read_tbps": peaks.read_tbps,
        "rows": [],
    }
    record = timeline.recorded if options.timeline else None
    given = (options.precisions, device, backend, l2_bytes, settings, peaks.read_tbps, record)
    for model in options.models:
        for m in options.rows:
            row = run(MODELS[model], m, *given)
            result["rows"].append({"model": model, **row})
            print(layers.progress(f"{model}, M={m}", row["variants"]), flush=True)
            for label, kernels in row.get("timelines", {}).items():
                print(f"\n{model}, M={m}, {label}\n\n{timeline.table(kernels)}\n", flush=True)
            save(result, options)
    layers.finish(options, "layer", markdown(result), result["rows"], picture)
    return 0
