"""`tools/release.py` and `tools/setup_env.py`: the changelog's section, and pins that replace constraints."""

import importlib.util
import re
from pathlib import Path

import pytest

import torch_cute_ops

ROOT = Path(__file__).parents[2]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, setup_env = tool("release"), tool("setup_env")
BEFORE = "# Changelog\n\n## [Unreleased]\n\n### Fixed\n\n- A hang.\n\n## [0.1.0] - 2026-01-01\n\n- First.\n"


def test_the_changelog_gets_a_section():
    after = release.with_section(BEFORE, "0.2.0", "2026-02-03")
    assert re.findall(r"^## .*$", after, re.M) == [
        "## [Unreleased]",
        "## [0.2.0] - 2026-02-03",
        "## [0.1.0] - 2026-01-01",
    ]
    assert after.replace("\n## [0.2.0] - 2026-02-03\n", "", 1) == BEFORE
    for version, text in (("0.1.0", "already has a section"), ("0.3.0", "has no section")):
        with pytest.raises(SystemExit, match=text):
            release.with_section(BEFORE.replace("Unreleased", "Unreleased" if version == "0.1.0" else "x"), version, "")


def test_this_version_is_in_the_changelog():
    assert release.package_version() == torch_cute_ops.__version__
    assert f"\n## [{torch_cute_ops.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()


def test_pins_replace_constraints(monkeypatch):
    """CI tests other versions of torch and of the DSL by these pins."""
    monkeypatch.delenv("PINS", raising=False)
    usual = setup_env.constraints()
    assert usual == (ROOT / "constraints.txt").read_text().splitlines()
    monkeypatch.setenv("PINS", "torch nvidia-cutlass-dsl==4.8.0")
    changed = setup_env.constraints()
    assert set(usual) - set(changed) == {line for line in usual if re.match(r"(torch|nvidia-cutlass-dsl)==", line)}
    assert changed[-2:] == ["torch", "nvidia-cutlass-dsl==4.8.0"] and len(changed) == len(usual)
