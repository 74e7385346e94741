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


OLD = "torch_cute_ops-0.1.0.tar.gz", "torch_cute_ops-0.1.0-py3-none-any.whl"


def test_old_packages_are_deleted(tmp_path):
    """Check that nothing else is deleted: a folder with other files, or with folders, is refused before anything is
    deleted."""
    release.delete_packages(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    for name in (*OLD, "thesis.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SystemExit, match=r"more than wheels and \.tar\.gz files: thesis\.txt"):
        release.delete_packages(tmp_path)
    with pytest.raises(SystemExit, match="is not a folder"):
        release.delete_packages(tmp_path / "thesis.txt")
    (tmp_path / "thesis.txt").unlink()
    (tmp_path / "photos.whl").mkdir()
    with pytest.raises(SystemExit, match="photos"):
        release.delete_packages(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted((*OLD, "photos.whl"))
    (tmp_path / "photos.whl").rmdir()
    release.delete_packages(tmp_path)
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_a_release_deletes_no_other_files(tmp_path, monkeypatch):
    """Check that the command stops before it builds anything."""
    (tmp_path / "thesis.txt").write_bytes(b"")
    monkeypatch.setattr(release.sys, "argv", ["release.py", "--dist", str(tmp_path)])
    monkeypatch.setattr(release, "run", lambda *command, cwd: pytest.fail("a command runs"))
    with pytest.raises(SystemExit, match="thesis"):
        release.main()
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_this_version_is_in_the_changelog():
    assert release.package_version() == torch_cute_ops.__version__
    assert f"\n## [{torch_cute_ops.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()


def test_pins_replace_constraints(monkeypatch):
    """Check that PINS replaces constraints. CI uses it to test other versions of torch and of the DSL."""
    monkeypatch.delenv("PINS", raising=False)
    usual = setup_env.constraints()
    assert usual == (ROOT / "constraints.txt").read_text().splitlines()
    monkeypatch.setenv("PINS", "torch nvidia-cutlass-dsl==4.8.0")
    changed = setup_env.constraints()
    assert set(usual) - set(changed) == {line for line in usual if re.match(r"(torch|nvidia-cutlass-dsl)==", line)}
    assert changed[-2:] == ["torch", "nvidia-cutlass-dsl==4.8.0"] and len(changed) == len(usual)


def test_pins_replace_an_installed_torch(monkeypatch, tmp_path):
    """Check that a torch that PINS names is installed, although the Python has a suitable torch. Otherwise the tests
    would run with the wrong torch, and nothing would say so."""
    commands, python = [], tmp_path / "bin" / "python"
    found = {"python": "3.12.0", "torch": "2.13.0", "cuda": None, "sites": ["/packages"], "foreign": ["torch"]}
    monkeypatch.setattr(setup_env, "probe", lambda python: dict(found))
    monkeypatch.setattr(setup_env, "_run", lambda *command: commands.append(command))
    monkeypatch.setattr(setup_env, "compile_packages", lambda *_: setup_env.subprocess.Popen(["true"]))
    monkeypatch.setattr(setup_env, "site_packages", lambda python: str(tmp_path))
    monkeypatch.setattr(setup_env.subprocess, "call", lambda command: 0)
    for pins, installed, shared in (
        ("", set(), True),
        ("nvidia-cutlass-dsl==4.8.0", set(), True),
        ("torch==2.9.*", {"torch==2.9.*"}, False),
        ("torch", {"torch"}, False),
    ):
        monkeypatch.setenv("PINS", pins)
        commands.clear()
        setup_env.create(tmp_path, python)
        setup_env.install(python, set())
        given = {part for command in commands for part in command if part.split("=")[0] == "torch"}
        assert given == installed, pins
        assert (tmp_path / "base_packages.pth").exists() == shared, pins
        (tmp_path / "base_packages.pth").unlink(missing_ok=True)
