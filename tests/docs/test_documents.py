"""What the documents show and name."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from support.example_scripts import ROOT

from torch_cute_ops import deployment
from torch_cute_ops.registry import OPS

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as somebody would paste them, beside the files that the document shows."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert deployment.read(tmp_path / name)
    if any("torch.compile" in block for block in blocks) and not (torch.cuda.is_available() or shutil.which("g++")):
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    program = tmp_path / "blocks.py"  # a file, because Dynamo reads the source of what it compiles
    program.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(program))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_readme_names_every_op() -> None:
    table = re.search(
        r"^## Ops\n\n(.*?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert sorted(re.findall(r"^\| `(\w+)` \|", table.group(1), re.MULTILINE)) == sorted(OPS)
