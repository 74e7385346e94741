"""Sphinx configuration for the documents, and for the API reference from the docstrings (``make docs``)."""

import gc
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# A build only adds objects until it ends. Searching them for garbage took a quarter of its time.
gc.disable()

from torch_cute_ops import __version__  # noqa: E402
from torch_cute_ops.registry import OPS  # noqa: E402

project = "torch_cute_ops"
version = release = __version__

# The source folder is the root of the repository, so that links between documents lead to the same place in a rendered
# page and in a file view.
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "ptx_emulator/README.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"
myst_heading_anchors = 4
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

nitpicky = True
# Types of other libraries: their inventories are not fetched, so that the build needs no network.
nitpick_ignore_regex = [
    ("py:.*", rf"({other})\..*") for other in ("torch", "collections", "pathlib", "typing", "types")
]

html_theme = "furo"
html_title = f"torch_cute_ops {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# The whole page of a note or a table is read on one screen: no list of headings that only repeats a number.
html_theme_options = {"top_of_page_buttons": []}


def section(lines: list[str], title: str) -> tuple[int, int, list[str]] | None:
    """Return begin, end and entries (one line each) of a section of a Google docstring, or None."""
    if title not in lines:
        return None
    begin = lines.index(title)
    end = next((i for i in range(begin + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    entries: list[str] = []
    for line in lines[begin + 1 : end]:
        if line.startswith("     ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line:
            entries.append(line.strip())
    return begin, end, entries


def list_results(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show several results as a list: Napoleon takes a section ``Returns:`` for a single result."""
    if (found := section(lines, "Returns:")) is not None:
        begin, end, entries = found
        is_list = sum(entry.startswith("``") for entry in entries) > 1
        body = re.sub(r" (?=``\w+``: )", "\n* ", f" {' '.join(entries)}").split("\n") if is_list else entries
        lines[begin:end] = [":returns:", *(f"   {line}" for line in body), ""]


def split_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give each of ``a, b: …`` an entry: Napoleon takes the first for the type of the second."""
    if what == "class" and (found := section(lines, "Attributes:")) is not None:
        begin, end, entries = found
        split = [(names, text) for names, _, text in (entry.partition(":") for entry in entries)]
        body = [f"    {one}:{text}" for names, text in split for one in names.split(", ")]
        lines[begin:end] = ["Attributes:", *body, ""]


ATTRIBUTES = ("attribute", "data", "property")
written: dict[str, list[str]] = {}


def keep_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Save the docstring of an attribute: Napoleon takes the text before a colon for its type."""
    if what in ATTRIBUTES:
        written[name] = list(lines)


def restore_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Restore the docstring of an attribute after Napoleon."""
    if what in ATTRIBUTES:
        lines[:] = written.pop(name)


def ops_of_readme() -> dict[str, list[tuple[list[str], str]]]:
    """Return the rows of the README's table of ops by heading: the ops of a row, and its text."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Ops\n")[1].split("\n## ")[0]
    found: dict[str, list[tuple[list[str], str]]] = {}
    rows = [line.strip("|").split("|", 1) for line in table.splitlines() if line.startswith("| ")]
    for first, text in rows[2:]:
        if "**" in first:
            found[first.strip(" *")] = []
        else:
            found[list(found)[-1]].append((re.findall(r"`(\w+)`", first), text.strip()))
    return found


def list_ops(app: Any, docname: str, source: list[str]) -> None:
    """Append the entries of all ops to the page of ops, in the order and under the headings of the README."""
    if docname == "docs/ops":
        lines = [".. currentmodule:: torch_cute_ops"]
        for heading, rows in ops_of_readme().items():
            lines += ["", heading, "-" * len(heading)]
            for names, _ in rows:
                for name in names:
                    lines += ["", f".. autofunction:: {name}"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def skip_ops(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave the ops out of the page of all other names."""
    return True if name in OPS and app.env.docname == "docs/api" else None


def setup(app: Any) -> None:
    """Connect the functions before and after Napoleon, whose priority is 500."""
    app.connect("source-read", list_ops)
    app.connect("autodoc-skip-member", skip_ops)
    for function in (list_results, split_attributes, keep_attribute):
        app.connect("autodoc-process-docstring", function, priority=400)
    app.connect("autodoc-process-docstring", restore_attribute, priority=600)


# Libraries that rendering does not need.
autodoc_mock_imports = ["torchao", "vllm"]
