"""Settings: the error for a wrong value names its variable, and the cache folder follows from the environment."""

import os
import runpy
from pathlib import Path

import pytest

from torch_cute_ops.runtime import compiler, once, settings


@pytest.fixture
def read(monkeypatch):
    """Return a function that reads the settings with the given environment variables."""

    def read(**environment):
        for name in list(os.environ):
            if name.startswith("TORCH_CUTE_OPS_"):
                monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(f"TORCH_CUTE_OPS_{name}", value)
        return runpy.run_path(settings.__file__)

    return read


WRONG = [
    *(("CACHE_MB", text, "a whole number, 0 or more") for text in ("-5", "1.5", "", "much")),
    *(
        (name, "~no.such.user/x", "home folder that exists")
        for name in ("CACHE_DIR", "BUNDLE", "TUNING", "DSL_RUNTIME")
    ),
    ("CACHE", "yes", "0 or 1"),
    ("LOG", "loud", "info or debug"),
    ("VLLM", "1", "auto, fp4 or fp8"),
]


@pytest.mark.parametrize(("name", "text", "words"), WRONG)
def test_a_wrong_value(read, name, text, words):
    with pytest.raises(ValueError, match=words) as raised:
        read(**{name: text})
    assert str(raised.value).startswith(f"TORCH_CUTE_OPS_{name}={text!r}; use ")


def test_a_missing_home_folder(read, monkeypatch, tmp_path):
    """Check that a path in a missing or unknown home folder is an error, and that no folder named ~ is ever used."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path / "none") if path == "~nobody" else path)
    for text in ("~nobody/x", "~/x", "~"):
        with pytest.raises(ValueError, match="TORCH_CUTE_OPS_CACHE_DIR="):
            read(CACHE_DIR=text)
    assert read(CACHE_DIR="x/~/y")["CACHE_DIR"] == Path("x/~/y")


def test_values(read, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = read(CACHE_MB="0", CACHE_DIR="~/a/b", BUNDLE="/x", TUNING="")
    assert (found["CACHE_MB"], found["CACHE_DIR"], found["BUNDLE"], found["TUNING"]) == (
        *(0, tmp_path / "a" / "b", Path("/x"), None),
    )
    assert {"variable": "TORCH_CUTE_OPS_CACHE_MB", "value": "0", "source": "environment"} in found["described"]()


FOLDERS = {
    "XDG": ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home"}, "/xdg/torch_cute_ops"),
    "a relative XDG is ignored": (
        {"XDG_CACHE_HOME": "xdg", "HOME": "/home"},
        "/home/.cache/torch_cute_ops",
    ),
    "HOME": ({"HOME": "/home"}, "/home/.cache/torch_cute_ops"),
    "XDG without HOME": ({"XDG_CACHE_HOME": "/xdg", "HOME": "~"}, "/xdg/torch_cute_ops"),
    "no HOME": ({"HOME": "~"}, None),
    "an empty HOME": ({"HOME": ""}, "/.cache/torch_cute_ops"),
    "a relative HOME": ({"HOME": "here"}, None),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_cache_folder(name, monkeypatch, caplog):
    """Check the cache folder for each environment. Without a home folder nothing is stored, and one warning names the
    variable to set."""
    environment, folder = FOLDERS[name]
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(settings, "CACHE", True)
    monkeypatch.setattr(settings, "CACHE_DIR", None)
    monkeypatch.setattr(once, "_given", set())
    settings._user_cache_folder.cache_clear()
    try:
        for _ in range(2):
            assert settings.cache_folder() == (None if folder is None else Path(folder))
            store = compiler.store()
            assert (store is None) == (folder is None)
    finally:
        settings._user_cache_folder.cache_clear()
    assert len(caplog.records) == (folder is None)
    if folder is None:
        assert "TORCH_CUTE_OPS_CACHE_DIR" in caplog.text and "stay in memory" in caplog.text
        assert "TORCH_CUTE_OPS_CACHE_DIR" in compiler.reason_no_store()
