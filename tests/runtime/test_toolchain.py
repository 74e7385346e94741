"""Detection of which build of the DSL is loaded."""

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.fake_kernel import SM90, FakeKernel

from torch_cute_ops.runtime import compiler, once, settings, toolchain
from torch_cute_ops.runtime.toolchain import compiler_flavour


def forget():
    """Forget which packages and which build were found."""
    toolchain.installed_packages.cache_clear()
    compiler_flavour.cache_clear()
    toolchain._chosen_flavour.cache_clear()


@pytest.fixture
def dsl(monkeypatch):
    """Return a function that replaces the DSL by a stub with a given version and given packages."""

    def install(version, packages):
        module = ModuleType("cutlass")
        if version is not None:
            module.CUDA_VERSION = version
        for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "cutlass", module)
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
        forget()

    yield install
    monkeypatch.undo()
    forget()


def cuda(major):
    return SimpleNamespace(major=major, minor=9)


BUILDS = {
    "the library's version": (cuda(13), ["cu12"], "cu13"),
    "the only package": (None, ["base", "core", "cu13"], "cu13"),
    "no package": (SimpleNamespace(), ["base", "core"], None),
    "two packages": (None, ["cu12", "cu13"], None),
    "an unknown version": ("12.9", ["cu12", "cu13"], None),
}


@pytest.mark.parametrize("how", BUILDS)
def test_flavour(how, dsl, caplog):
    version, packages, flavour = BUILDS[how]
    dsl(version, packages)
    assert compiler_flavour() == flavour
    assert len(caplog.records) == (flavour is None)
    if flavour is None:
        assert "CUDA 12 or 13" in caplog.text and "stay in memory" in caplog.text


def test_installed_dsl():
    """Check that the installed DSL states its CUDA version, and that the package of this build is installed."""
    import cutlass

    compiler_flavour.cache_clear()
    flavour = compiler_flavour()
    assert flavour == f"cu{cutlass.CUDA_VERSION.major}"
    assert toolchain.installed_packages()[f"nvidia-cutlass-dsl-libs-{flavour}"] is not None


EXPECTED = {
    "no build": ((13, 0), [], None),
    "one build, whatever the driver": ((12, 4), ["cu13"], "cu13"),
    "the newest that the driver supports": ((12, 9), ["cu12", "cu13"], "cu12"),
    "a new driver": ((14, 1), ["cu12", "cu13"], "cu13"),
    "no driver": (None, ["cu12", "cu13"], "cu13"),
    "no build for the driver": ((11, 8), ["cu12", "cu13"], None),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_expected_flavour(case, dsl, monkeypatch):
    """Check that the DSL's own rule gives the expected build until the DSL is imported. Afterwards, the loaded build
    counts."""
    driver, packages, flavour = EXPECTED[case]
    dsl(cuda(12), ["base", *packages])
    monkeypatch.setattr(toolchain, "driver_version", lambda: driver)
    monkeypatch.delitem(sys.modules, "cutlass")
    assert toolchain.expected_flavour() == flavour
    dsl(cuda(99), ["base", *packages])
    assert toolchain.expected_flavour() == "cu99"


def test_packages_are_looked_for_once(monkeypatch):
    """Check that versions are looked up only once. Each kernel's key contains them, and looking them up takes a
    millisecond."""
    asked = []
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or real(name))
    toolchain.installed_packages.cache_clear()
    keys = [compiler.key_of(compiler.KernelSpec("module.Kernel", config), SM90) for config in range(3)]
    packages = [f"nvidia-cutlass-dsl{part}" for part in ("", *(f"-libs-{p}" for p in ("base", "core", "cu12", "cu13")))]
    assert asked == [*packages, "apache-tvm-ffi"]
    assert all(f"apache-tvm-ffi=={real('apache-tvm-ffi')}" in key.versions for key in keys)
    with pytest.raises(TypeError):
        toolchain.installed_packages()["apache-tvm-ffi"] = "0"


def test_the_installed_build_is_expected():
    """Check that the DSL's loaded build equals the build that was expected before the import."""
    toolchain._chosen_flavour.cache_clear()
    assert toolchain._chosen_flavour() == compiler_flavour()


def test_builds_share_no_key(dsl):
    keys = []
    for major in (12, 13):
        dsl(cuda(major), ["cu12", "cu13"])
        keys.append(compiler.key_of(compiler.KernelSpec("module.Kernel", 0), SM90))
    assert [key.flavour for key in keys] == ["cu12", "cu13"] and keys[0].digest != keys[1].digest


def test_an_unknown_build_uses_no_cache(dsl, monkeypatch, tmp_path, caplog):
    """Check that, if the build is unknown, kernels are neither looked up nor stored, and that one warning covers all
    kernels."""
    dsl(None, ["cu12", "cu13"])
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
