"""Detection of the DSL's loaded build, in several ways and without guessing."""

import importlib.metadata
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.fake_kernel import SM90, FakeKernel

from torch_cute_ops.runtime import compiler, once, settings, toolchain
from torch_cute_ops.runtime.toolchain import compiler_flavour


@pytest.fixture
def dsl(monkeypatch):
    """Return a function that replaces the DSL by a stand-in with this version, library name and packages."""

    def install(version, library, packages):
        modules = {"cutlass": ModuleType("cutlass")}
        if version is not None:
            modules["cutlass"].CUDA_VERSION = version
        if library is not None:
            modules["cutlass.somewhere.renamed"] = ModuleType("renamed")
            modules["cutlass.somewhere.renamed"].__file__ = f"/folder/{library}"
        for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        found = dict.fromkeys(("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{name}" for name in packages)), "9.9")
        real = importlib.metadata.version

        def installed(name):
            if name.startswith("nvidia-cutlass-dsl"):
                if name not in found:
                    raise importlib.metadata.PackageNotFoundError(name)
                return found[name]
            return real(name)

        monkeypatch.setattr(importlib.metadata, "version", installed)
        monkeypatch.setattr(once, "_given", set())
        compiler_flavour.cache_clear()

    yield install
    monkeypatch.undo()
    compiler_flavour.cache_clear()


def cuda(major):
    return SimpleNamespace(major=major, minor=9)


TOLD = {
    "by the library": (cuda(13), "_cutlass_ir.cu12.cpython-311-x86_64-linux-gnu.so", ["cu12"], "cu13"),
    "by the file": (None, "_other.cu13.cpython-311-x86_64-linux-gnu.so", ["cu12", "cu13"], "cu13"),
    "by a file without a version": (SimpleNamespace(), "_cutlass_ir.cu12.abi3.so", ["cu13"], "cu12"),
    "by the package": (None, "_cutlass_ir.so", ["base", "core", "cu13"], "cu13"),
    "by nothing": (None, "_cutlass_ir.so", ["base", "core"], None),
    "by two packages": (None, None, ["cu12", "cu13"], None),
    "by a version of another kind": ("12.9", None, ["cu12", "cu13"], None),
}


@pytest.mark.parametrize("how", TOLD)
def test_flavour(how, dsl, caplog):
    version, library, packages, flavour = TOLD[how]
    dsl(version, library, packages)
    assert compiler_flavour() == flavour
    assert len(caplog.records) == (flavour is None)
    if flavour is None:
        assert "CUDA 12 or 13" in caplog.text and "stay in memory" in caplog.text


def test_all_ways_agree_on_the_installed_dsl():
    """The version, the library's file name and the installed packages all identify the loaded build."""
    import cutlass

    compiler_flavour.cache_clear()
    flavour = compiler_flavour()
    assert re.fullmatch(r"cu\d+", flavour) and flavour == f"cu{cutlass.CUDA_VERSION.major}"
    files = [
        getattr(module, "__file__", "") or "" for name, module in sys.modules.items() if name.startswith("cutlass.")
    ]
    assert {match.group(1) for file in files if (match := re.search(r"\.(cu\d+)\.", file))} == {flavour}
    assert toolchain.installed_packages()[f"nvidia-cutlass-dsl-libs-{flavour}"] is not None


@pytest.mark.parametrize("lost", [(True, False), (False, True), (True, True)])
def test_builds_share_no_key(lost, dsl):
    """Two builds get different cache keys, even if some of the DSL's private names are missing."""
    keys = []
    for major in (12, 13):
        version, file = (
            None if gone else value for gone, value in zip(lost, (cuda(major), f"_ir.cu{major}.so"), strict=True)
        )
        dsl(version, file, [f"cu{major}"])
        keys.append(compiler.key_of(FakeKernel(), SM90))
    assert [key.flavour for key in keys] == ["cu12", "cu13"] and keys[0].digest != keys[1].digest


def test_an_unknown_build_uses_no_cache(dsl, monkeypatch, tmp_path, caplog):
    """Kernels are neither looked up nor stored, and one warning covers all kernels."""
    dsl(None, None, ["cu12", "cu13"])
    monkeypatch.setattr(settings, "CACHE", True)
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(
        compiler, "trace_and_compile", lambda *args: SimpleNamespace(__tvm_ffi_object__=lambda: lambda: None)
    )
    wanted = [compiler.KernelSpec(f"{FakeKernel.__module__}.FakeKernel", config) for config in (1, 2)]
    for kernel in wanted:
        assert compiler.compile_kernel(kernel, SM90) is not None
        assert not compiler.is_kept(kernel, SM90)
    assert list(tmp_path.iterdir()) == []
    assert len(caplog.records) == 1
    with pytest.raises(RuntimeError, match="unknown which build of the DSL compiles them"):
        compiler.keep(wanted[0], SM90)
