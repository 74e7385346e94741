"""`python -m benchmarks plots`: which rows of which result files are drawn, and how."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from benchmarks import layers, ops, plots
from benchmarks.performance import RESULTS

NAMES = ("expert_layer", "host", "layer", "mm_fp4", "model", "rmsnorm_fp4quant")


@pytest.fixture
def results(tmp_path):
    """A folder with some of the result files."""
    for name in NAMES:
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    return tmp_path


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn, by the name of the picture, in order."""
    found = {}

    def draw(result, path, of_copy):
        found[path.name] = result["op"], len(result["rows"]), of_copy

    def draw_layers(panels, labels, size, path):
        found[path.name] = {title: [row["rows"] for row in rows] for title, rows in panels.items()}, labels[0], size

    monkeypatch.setitem(sys.modules, "benchmarks.plot", SimpleNamespace(plot=draw))
    monkeypatch.setattr(layers, "plot", draw_layers)
    return found


def rows_of(name: str, *keys: str) -> dict:
    """The sizes of a result file's rows, by what these keys hold."""
    panels = {}
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
        panels.setdefault(", ".join(row[key] for key in keys), []).append(row["rows"])
    return panels


def test_all(results, drawn, capsys):
    assert plots.main(["--results", str(results)]) == 0
    pictures = [f"{name}.png" for name in NAMES if name not in ("host", "model")]
    assert list(drawn) == pictures
    assert capsys.readouterr().out.splitlines() == [str(results / picture) for picture in pictures]
    assert drawn["layer.png"] == (rows_of("layer", "model"), "bf16", "rows")
    assert drawn["expert_layer.png"] == (rows_of("expert_layer", "model", "routing"), "few", "tokens")
    for op in ("mm_fp4", "rmsnorm_fp4quant"):
        rows = json.loads((results / f"{op}.json").read_text())["rows"]
        assert drawn[f"{op}.png"] == (op, len(rows), ops.load(op).of_copy)


def test_some(results, drawn):
    assert plots.main(["mm_fp4", "--results", str(results)]) == 0
    assert list(drawn) == ["mm_fp4.png"]


@pytest.mark.parametrize("name", ["model", "mm_fp5"])
def test_no_such_picture(results, drawn, capsys, name):
    with pytest.raises(SystemExit, match="2"):
        plots.main(["layer", name, "--results", str(results)])
    assert f"no pictures of {name} in {results}; there are those of expert_layer, layer" in capsys.readouterr().err
    assert not drawn


def test_every_result_has_its_picture():
    if not any(RESULTS.glob("*.png")):
        pytest.skip("there are no pictures here: copies of the repository may go without")
    for path in RESULTS.glob("*.json"):
        assert path.with_suffix(".png").exists() == (path.stem not in plots.WITHOUT), path.stem
