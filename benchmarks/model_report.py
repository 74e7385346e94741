"""Report of `python -m benchmarks model`: targets and tables from a result file."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from . import environment, llama, report, targets
from .case import Mark, at_least, at_most
from .llama import BF16, UNMASKED


def is_four_bit(label: str, activations: str) -> bool:
    """Check that a precision combines FP4 weights with these activations."""
    return label in (f"nvfp4/{activations}", f"mxfp4/{activations}")


def goal_of(row: Mapping[str, Any], label: str) -> float | None:
    """Return the target for the speedup of the precision `label` over bf16, or None if there is no target."""
    if row["part"] == "prefill":
        if row["tokens"] != llama.TOKENS:
            return None
        found = [goal for activations, goal in targets.MODEL_PREFILL.items() if is_four_bit(label, activations)]
        return found[0] if row["model"] in llama.MODELS and found else None
    if row["part"] == "decode":
        is_judged = is_four_bit(label, "16bit") or (is_four_bit(label, "fp8") and row["batch"] >= llama.MANY)
        if not is_judged or row["context"] != llama.CONTEXT:
            return None
        return targets.MODEL_DECODE.get(row["model"], {}).get(row["batch"])
    return targets.MODEL_GENERATE.get(row["model"]) if is_four_bit(label, "16bit") else None


def marks(result: Mapping[str, Any]) -> list[Mark]:
    """Return the targets for served models with the measured values."""
    found = []
    for row in result["rows"]:
        for label, ratio in ratios(row).items():
            goal = goal_of(row, label)
            if goal is not None:
                found.append(at_least(f"{row['model']}, {row['case']}, {label}: bf16 / ours", ratio, goal))
    for each in result["memory"]:
        name, least = f"{each['model']}, {each['label']}", targets.MODEL_GIGABYTES.get(each["model"])
        if least is not None and is_four_bit(each["label"], "16bit"):
            found.append(at_most(f"{name}: memory", each["bytes"] / 1e9, least, " GB"))
            if each["peak_above"] is not None:
                found.append(
                    at_most(f"{name}: peak above", each["peak_above"] / 1e9, targets.MODEL_PEAK_GIGABYTES, " GB")
                )
    for each in result["logits"]:
        if is_four_bit(each["label"], "16bit"):
            name = f"{each['model']}, {each['label']}: 1 − cosine of logits"
            found.append(at_most(name, 1 - each["cosine"], targets.MODEL_LOGITS))
    for name, count in result["kernels_after_warmup"].items():
        found.append(at_most(f"{name}: kernels compiled after the warm-up", count, 0))
    for row in result["rows"]:
        for label, each in row["variants"].items():
            if "graphs" in each and label != BF16:
                name = f"{row['model']}, {label}: graphs recompiled by torch, {llama.LONGEST} tokens"
                found.append(at_most(name, each["graphs"] - 1 if each["graphs"] else None, 0))
    return found


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the speedup over bf16 of each precision in a row, by label."""
    times = {label: each["us"] for label, each in row["variants"].items()}
    return {label: times[BF16] / us for label, us in times.items() if label != BF16} if BF16 in times else {}


def failures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each missing measurement, by the measurement's name."""
    parts = {f"{name}, {what}": why for name, each in result["failed"].items() for what, why in each.items()}
    variants = {
        f"{row['model']}, {row['case']}, {label}": why for row in result["rows"] for label, why in row["absent"].items()
    }
    return {**parts, **variants}


# The report


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report: tables of times, memory, logits and targets."""
    rows = result["rows"]
    few = {len(each["by_layers"]) for row in rows for each in row["variants"].values() if "by_layers" in each}
    labels = list(dict.fromkeys(label for row in rows for label in row["variants"]))
    ours = [label for label in labels if label != BF16]
    parts = [
        "# A served model",
        f"{environment.headline(result['environment'])} · transformers {result['environment']['transformers']}",
        textwrap.fill(
            TEXT.format(
                rounds=llama.ROUNDS,
                attention=ATTENTION[result["attention"]],
                compiled=(COMPILED if result.get("is_compiled") else "Both run eagerly.")
                + (FUSED if result.get("fuses_attention") else ""),
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
            f"`generate()`: {llama.PROMPT} tokens of prompt and {llama.NEW} new ones, from end to end; "
            "its ms above are a token's."
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
"""Keys in a result file for the cosine similarities of logits: our model with bf16, our model with fp32, and bf16 with
fp32."""
COMPILED = (
    "Both are compiled by `torch.compile` for each batch, with `triton.enable_pdl` and the pass of "
    "`torch_cute_ops.integrations.inductor`, which leaves bf16 as it is."
)
FUSED = " Attention blocks of ours call `qkv_norm_rope_append` (`fuse_attention_`)."
ATTENTION = {
    UNMASKED: "Attention is transformers' `sdpa` without a mask, which a full cache does not need.",
    "sdpa": "Attention is transformers' `sdpa`, with its mask: 5.17 copies keys and values for it, for each head.",
}
