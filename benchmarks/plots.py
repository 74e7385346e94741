"""`python -m benchmarks plots`: draw the pictures of existing result files, in case the machine that measured had no
matplotlib."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from . import ops
from .performance import LAYERS, RESULTS

WITHOUT = ("all_reduce_2", "host", "layer_tp_2", "model", "model_paged")
"""Names of the result files for which no picture is drawn."""


def draw(path: Path) -> Path:
    """Draw the picture of a result file, write it next to the file, and return its path."""
    from .plot import plot

    result, picture = json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")
    if path.stem in LAYERS:
        LAYERS[path.stem].picture(result["rows"], picture)
    else:
        plot(result, picture, ops.load(path.stem).of_copy)
    return picture


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of result files (default: all with a picture)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="their folder")
    options = parser.parse_args(arguments)
    every = sorted(path.stem for path in options.results.glob("*.json") if path.stem not in WITHOUT)
    unknown = [name for name in options.names if name not in every]
    if unknown:
        parser.error(f"no pictures of {', '.join(unknown)} in {options.results}; expected {', '.join(every)}")
    for name in options.names or every:
        print(draw(options.results / f"{name}.json"))
    return 0
