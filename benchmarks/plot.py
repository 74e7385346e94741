"""Plot an op's results. Several panels show the bandwidth against the number of rows. Two more panels show our
bandwidth as a fraction of a copy's bandwidth, and the peers' times divided by ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .case import Row

COLOURS = {
    "ours": "#0072B2",
    "wgmma": "#0072B2",
    "mma_sync": "#56B4E9",
    "cublas": "#F0E442",
    "humming": "#CC79A7",
    "marlin": "#E69F00",
    "quack": "#D55E00",
    "plain": "#D55E00",
    "inductor": "#009E73",
    "cublas_bf16": "#009E73",
    "bf16": "#009E73",
    "copy": "#8A8A8A",
}
MARKERS = {"ours": "o", "quack": "s", "plain": "s", "inductor": "^", "humming": "v", "cublas_bf16": "^", "copy": None}


def _count(value: float, _: Any = None) -> str:
    """Format a size as an axis label, such as 1, 128, 4k, 64k or 2M."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def _log2_axis(axis: Any, values: Sequence[float], ticks: int = 7) -> None:
    """Make the x axis logarithmic, fit it to the range of `values`, and label about `ticks` powers of two."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    axis.set_xscale("log", base=2)
    axis.set_xlim(2 ** (low - 0.4), 2 ** (high + 0.4))
    axis.set_xticks([2**k for k in range(low, high + 1, max(1, math.ceil((high - low) / ticks)))])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter(_count)


def _bandwidth(axis: Any, rows: Sequence[Row], names: Sequence[str], peak: float) -> None:
    """Draw one panel: the bandwidth of every variant in TB/s, against the number of rows."""
    size = next(iter(rows[0]["sizes"]))
    axis.axhline(peak, color="#444444", linewidth=1, linestyle=(0, (2, 2)))
    for name in names:
        points = [(row["sizes"][size], row["variants"][name]["tbps"]) for row in rows if name in row["variants"]]
        if points:
            style = {"marker": MARKERS.get(name, "d"), "markersize": 4, "linewidth": 1.8 if name != "copy" else 3}
            alpha = {"alpha": 0.55, "zorder": 1} if name == "copy" else {"zorder": 3 if name == "ours" else 2}
            axis.plot(*zip(*points, strict=True), color=COLOURS.get(name), label=report.label(name), **style, **alpha)
    axis.set_title(rows[0]["panel"], fontsize=10, loc="left")
    axis.set_ylim(0, peak * 1.12)
    axis.grid(alpha=0.25)


def _fractions(axis: Any, panels: dict[str, list[Row]], palette: Any, target: float | None) -> None:
    """Draw our bandwidth divided by the bandwidth of a copy of the same number of bytes, against the bytes moved, with
    one line per panel."""
    for index, (title, rows) in enumerate(panels.items()):
        points = [(row["bytes"], row["variants"]["ours"]["of_copy"]) for row in rows]
        colour = palette((index + 0.5) / len(panels))
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.3, color=colour, label=title)
    axis.axhline(1, color="#444444", linewidth=1)
    if target is not None:
        axis.axhline(target, color="#B00020", linewidth=1, linestyle="--")
        axis.annotate(
            f"target {target:g} (large)",
            (0.995, target),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="top",
            fontsize=8,
            color="#B00020",
            xytext=(0, -2),
            textcoords="offset points",
        )
    _log2_axis(axis, [row["bytes"] for rows in panels.values() for row in rows], 10)
    axis.set_xlabel("bytes moved by formula")
    axis.set_ylabel("bandwidth / same-bytes copy")
    axis.set_title("Ours against a copy of as many bytes (1 = as fast)", fontsize=10, loc="left")
    values = [row["variants"]["ours"]["of_copy"] for rows in panels.values() for row in rows]
    axis.set_ylim(0.5 if min(values) > 0.55 else 0, max(1.05, 1.05 * max(values)))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, ncols=2, frameon=False, loc="lower right")


def _rates(axis: Any, panels: dict[str, list[Row]], palette: Any, peak: float | None) -> None:
    """Draw our rate in TFLOP/s against M, with one line per panel, and cuBLAS's rate as a dashed line."""
    size = next(iter(next(iter(panels.values()))[0]["sizes"]))
    for index, (title, rows) in enumerate(panels.items()):
        points = [(row["sizes"][size], row["variants"]["ours"]["tflops"]) for row in rows]
        colour = palette((index + 0.5) / len(panels))
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.3, color=colour, label=title)
    if peak:
        axis.axhline(peak, color="#444444", linewidth=1, linestyle=(0, (2, 2)))
    _log2_axis(axis, [row["sizes"][size] for rows in panels.values() for row in rows], 10)
    axis.set_yscale("log")
    axis.set_xlabel(f"{size} (rows)")
    axis.set_ylabel("TFLOP/s")
    axis.set_title("Ours: TFLOP/s (dashed: cuBLAS, bfloat16, 8,192 × 8,192)", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, ncols=2, frameon=False, loc="lower right")


def _speedups(axis: Any, panels: dict[str, list[Row]], peers: Sequence[str]) -> None:
    """Draw each peer's time divided by our time, against the bytes moved, or for GEMMs against M. Where the ratio is
    above 1, our op is faster."""
    every = [row for rows in panels.values() for row in rows]
    size = next(iter(every[0]["sizes"]))
    is_gemm = report.multiplies(every)
    for name in peers:
        points = [
            (
                row["sizes"][size] if is_gemm else row["bytes"],
                row["variants"][name]["us"] / row["variants"]["ours"]["us"],
            )
            for row in every
            if name in row["variants"]
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker=MARKERS.get(name, "d"),
                markersize=5,
                color=COLOURS.get(name),
                alpha=0.75,
                label=f"{report.label(name)} / ours",
            )
    axis.axhline(1, color="#444444", linewidth=1)
    _log2_axis(axis, [row["sizes"][size] if is_gemm else row["bytes"] for row in every], 10)
    low, high = axis.get_ylim()
    if high > 4 * low:  # otherwise 1 would be the only labelled power of two
        axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axis.set_xlabel(f"{size} (rows)" if is_gemm else "bytes moved by formula")
    axis.set_ylabel("time over ours")
    axis.set_title("Peers' time over ours (above 1: ours is faster)", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False)
    else:
        axis.text(0.5, 0.6, "no peer was measured", transform=axis.transAxes, ha="center", color="#666666")


def plot(result: dict[str, Any], path: Path, of_copy: float | None = None) -> None:
    """Draw `result`, the content of a result file, as a PNG. `of_copy` is the target for our bandwidth as a fraction of
    a copy's bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report.ordered(result["rows"])
    panels = report.grouped(rows, lambda row: row["panel"])
    names = sorted(report.variant_names(rows), key=lambda name: name != "copy")
    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    peak = result["peak_copy_tbps"]
    figure = plt.figure(figsize=(max(3.4 * columns, 10.5), 2.6 * lines + 4.4), layout="constrained")
    halves = figure.add_gridspec(2, 1, height_ratios=[2.6 * lines, 3.9])
    upper, lower = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    grid = upper.subplots(lines, columns, sharey=True, squeeze=False)
    size = next(iter(rows[0]["sizes"]))
    for axis, group in zip(grid.flat, panels.values(), strict=False):
        _bandwidth(axis, group, names, peak)
        _log2_axis(axis, [row["sizes"][size] for row in rows], 6)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    upper.supylabel("TB/s by formula", fontsize=10)
    handles, labels = {}, []
    for axis in grid.flat:
        handles.update({text: handle for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)})
    labels = [report.label(name) for name in report.variant_names(rows) if report.label(name) in handles]
    what = ", ".join(filter(None, (result["op"], result["settings"].get("dtype"))))
    title = f"{what}: {result['environment']['gpu']}, L2-cold; every variant by its own bytes; dashed: 2 GiB copy"
    upper.suptitle(title, fontsize=12, x=0.01, ha="left")
    # Put the legend next to the title if it fits there. Otherwise put it below the panels, next to their axis label.
    few = len(labels) <= 4
    upper.supxlabel(f"{size} (rows)", fontsize=10, x=0.5 if few else 0.1)
    place = "upper right" if few else "outside lower right"
    upper.legend([handles[text] for text in labels], labels, loc=place, ncols=len(labels), frameon=False, fontsize=10)
    left, right = lower.subplots(1, 2)
    if report.multiplies(rows):
        _rates(left, panels, plt.get_cmap("viridis"), result.get("bf16_tflops"))
    else:
        _fractions(left, panels, plt.get_cmap("viridis"), of_copy)
    _speedups(right, panels, [name for name in names if name not in ("ours", "copy")])
    figure.savefig(path, dpi=130)
    plt.close(figure)
