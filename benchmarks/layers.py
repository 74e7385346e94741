"""Code shared by `layer` and `expert_layer`, the benchmarks of whole layers.

Each row of their result files is a dict with the keys "model", "rows", "variants" (times and floor by label), "cosine"
and "absent".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import report
from .measure import Backend, CudaGraphs

RESULTS = Path(__file__).with_name("results")
NO_GPU = 2


def parser(command: str, doc: str | None, models: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that both commands share."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks {command}", description=(doc or "").splitlines()[0])
    made.add_argument("--models", nargs="+", choices=models, default=list(models), metavar="MODEL")
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of the files written")
    made.add_argument("--no-plot", action="store_true", help="write no PNG")
    return made


def on_gpu(
    command: str, measure: Callable[[argparse.Namespace, torch.device, Backend, int], int], options: argparse.Namespace
) -> int:
    """Call `measure(options, device, backend, L2 bytes)` on the current GPU, and return the exit status."""
    if not torch.cuda.is_available():
        print(f"python -m benchmarks {command} needs a CUDA GPU, and torch sees none here.", file=sys.stderr)
        return NO_GPU
    device = torch.device("cuda", torch.cuda.current_device())
    return measure(options, device, CudaGraphs(), torch.cuda.get_device_properties(device).L2_cache_size)


def cosine(got: Tensor, want: Tensor) -> float:
    """Return the cosine similarity of two tensors, each flattened to a vector."""
    return F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0).item()


def progress(where: str, variants: Mapping[str, Mapping[str, float]]) -> str:
    """Return the progress line with the times of one row of results."""
    times = ", ".join(f"{label} {report.number(each['us'])}" for label, each in variants.items())
    return f"  {where}: {f'{times} µs a layer' if times else 'no time'}"


def finish(
    options: argparse.Namespace,
    name: str,
    text: str,
    rows: Sequence[Mapping[str, Any]],
    draw: Callable[[Sequence[Mapping[str, Any]], Path], None],
) -> None:
    """Write and print the tables. Plot the rows, unless the option `--no-plot` is set or nothing was measured."""
    (options.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}", flush=True)
    if rows and not options.no_plot:
        draw(rows, options.output / f"{name}.png")


def plot(panels: Mapping[str, Sequence[Mapping[str, Any]]], labels: Sequence[str], size: str, path: Path) -> None:
    """Plot time against the number of rows. Each entry of `panels` is a panel. In a panel, each label gets a solid line
    for the time and a dashed line for the floor."""
    from matplotlib import pyplot

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        for i, label in enumerate(labels):
            points = [(row["rows"], row["variants"][label]) for row in rows if label in row["variants"]]
            if points:
                x = [m for m, _ in points]
                axis.plot(x, [each["us"] for _, each in points], marker="o", markersize=4, color=f"C{i}", label=label)
                if points[0][1]["floor"] is not None:
                    floors = [each["floor"] for _, each in points]
                    axis.plot(x, floors, color=f"C{i}", linewidth=1, linestyle=(0, (2, 2)))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(size)
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("µs a layer; dashed: floor")
    axes[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
