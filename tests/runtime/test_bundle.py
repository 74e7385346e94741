"""Bundles: kernels that run without the compiler, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.interpreters import python

from torch_cute_ops import registry
from torch_cute_ops.cli import info
from torch_cute_ops.cli.main import main
from torch_cute_ops.runtime import bundle, compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.bundle import MANIFEST, RUNTIME, Bundle, BundleError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="a bundle is linked by a C compiler")

FILE = """
[[kernel]]
op = "fp4_quantize"
hidden = [64, 96]
dtype = "bf16"

[[kernel]]
op = "fp4_dequantize"
hidden = 64
"""
# Of the DSL, only the runtime library is left.
WITHOUT_DSL = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_no_dsl(name, path=None, target=None):
    return None if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl") else find_spec(name, path, target)
PathFinder.find_spec = find_no_dsl
import torch
import torch_cute_ops
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle for two architectures, made by the command, with the runtime library in it."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "deployment.toml").write_text(FILE)
    arguments = ["--config", str(folder / "deployment.toml"), "--arch", "sm_90a", "--arch", "sm_100a"]
    assert main(["build", *arguments, "-o", str(folder / "kernels")]) == 0
    os.symlink(Bundle(folder / "kernels").runtime(), folder / "kernels" / RUNTIME)
    return folder / "kernels"


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "kernels", symlinks=True))


IMPORTS = """
from torch_cute_ops.registry import kernels_of
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import compile_kernel
"""
LOAD = (
    IMPORTS
    + """
for op, facts in (("fp4_quantize", {"hidden": 96, "dtype": torch.bfloat16}), ("fp4_dequantize", {"hidden": 64})):
    function = compile_kernel(*kernels_of(op, "sm_90a", **facts), ARCHS["sm_90a"])
    try:
        function(torch.zeros(3, 3))
    except TypeError as error:
        print(str(error)[:80])
try:
    compile_kernel(*kernels_of("fp4_quantize", "sm_90a", hidden=128, dtype=torch.bfloat16), ARCHS["sm_90a"])
except RuntimeError as error:
    print(error)
"""
)


def test_without_the_dsl(made):
    """Its functions load and check their arguments; what it lacks is missed by name."""
    done = python(WITHOUT_DSL + LOAD, TORCH_CUTE_OPS_BUNDLE=str(made))
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Expects 12 parameters when calling"), done.stderr
    assert lines[1].startswith("Expects 5 parameters when calling")
    assert f"not in the bundle {made}" in lines[2] and "cutlass" in lines[2] and "width=128" in lines[2]


def test_without_dsl_and_bundle():
    wanted = '*kernels_of("fp4_dequantize", "sm_90a", hidden=64)'
    done = python(f'{WITHOUT_DSL}{IMPORTS}compile_kernel({wanted}, ARCHS["sm_90a"])')
    assert "RuntimeError: a kernel is in no bundle, and cannot be compiled here" in done.stderr


def test_what_is_kept_without_the_dsl(made):
    """Only what the bundle has; nothing on disk can be looked up."""
    code = """
from torch_cute_ops.runtime.compiler import is_kept
for hidden in (96, 128):
    (kernel,) = kernels_of("fp4_quantize", "sm_90a", hidden=hidden, dtype=torch.bfloat16)
    print(is_kept(kernel, ARCHS["sm_90a"]))
"""
    done = python(WITHOUT_DSL + IMPORTS + code, TORCH_CUTE_OPS_BUNDLE=str(made))
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_start_is_quick(made):
    """Import, bundle and first kernel take less than 0.3 s on top of torch, in the best of some runs."""
    code = (
        "import time; start = time.perf_counter()\n"
        "import torch_cute_ops\n" + LOAD.split("    try:")[0] + "print('took', time.perf_counter() - start)"
    )
    best = 10.0
    for _ in range(5):
        done = python("import torch\n" + code, TORCH_CUTE_OPS_BUNDLE=str(made))
        best = min(best, float(done.stdout.split("took")[1]))
        if best < 0.3:
            return
    raise AssertionError(f"takes {best:.2f} s")


def test_manifest(made):
    """It says what the kernels were made from, and the kernels are those that were listed."""
    manifest = json.loads((made / MANIFEST).read_text())
    assert set(manifest["archs"]) == {"sm_90a", "sm_100a"}
    assert manifest["compiler"] == list(compiler.compiler_versions())
    wanted = {
        kernel.digest
        for hidden in (64, 96)
        for kernel in registry.kernels_of("fp4_quantize", "sm_100a", hidden=hidden, dtype=torch.bfloat16)
    } | {kernel.digest for kernel in registry.kernels_of("fp4_dequantize", "sm_100a", hidden=64)}
    assert set(manifest["archs"]["sm_100a"]["kernels"]) == wanted


def test_a_bundle_comes_before_the_compiler(made, monkeypatch):
    monkeypatch.setattr(settings, "BUNDLE", made)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "trace_and_compile", lambda *args: pytest.fail("compiled"))
    (torch_kernel,) = registry.kernels_of("fp4_quantize", "sm_90a", hidden=64, dtype=torch.bfloat16)
    assert compiler.compile_kernel(torch_kernel, ARCHS["sm_90a"]) is not None


def change(folder, **fields):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **fields}))


def change_out(folder, name):
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest[name]
    (folder / MANIFEST).write_text(json.dumps(manifest))


REFUSED = {
    "another version": (lambda folder: change(folder, tvm_ffi="0.0.1"), "its apache-tvm-ffi is 0.0.1, here it is"),
    "other sources": (lambda folder: change(folder, sources="abc"), "its kernel sources is abc, here it is"),
    "another format": (lambda folder: change(folder, format=99), "its format is 99, here it is 1"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "is no bundle: FileNotFoundError"),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), "is no bundle: JSONDecodeError"),
    "another processor": (
        lambda folder: change(folder, host=[*compiler.host_features(), "avx9"]),
        "compiled on a processor with avx9, which this one has not",
    ),
    "without a part": (lambda folder: change_out(folder, "archs"), "is no bundle: KeyError: 'archs'"),
    "a list": (lambda folder: (folder / MANIFEST).write_text("[]"), "is no bundle: TypeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, copy, monkeypatch, capsys):
    """With the reason, on the first use and by ``info``."""
    spoil, reason = REFUSED[name]
    spoil(copy)
    with pytest.raises(BundleError, match=reason):
        Bundle(copy)
    monkeypatch.setattr(settings, "BUNDLE", copy)
    assert reason in info.bundle_state()["error"]


def test_another_architecture(copy):
    (wanted,) = registry.kernels_of("fp4_quantize", "sm_120a", hidden=64, dtype=torch.bfloat16)
    with pytest.raises(BundleError, match="has kernels for sm_90a, sm_100a; this device is sm_120a"):
        Bundle(copy).function(wanted, "sm_120a")


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_library(copy, damage):
    library = copy / "sm_90a.so"
    library.write_bytes(library.read_bytes()[:-1]) if damage == "changed" else library.unlink()
    (wanted,) = registry.kernels_of("fp4_quantize", "sm_90a", hidden=64, dtype=torch.bfloat16)
    with pytest.raises(BundleError, match=r"is damaged: .*sm_90a\.so"):
        Bundle(copy).function(wanted, "sm_90a")


def test_no_runtime_library(copy, monkeypatch):
    (copy / RUNTIME).unlink()
    monkeypatch.setattr(bundle.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BundleError, match=rf"needs {RUNTIME} of cu\d+, .*TORCH_CUTE_OPS_DSL_RUNTIME"):
        Bundle(copy).runtime()
    elsewhere = copy / "elsewhere.so"
    elsewhere.touch()
    monkeypatch.setattr(settings, "DSL_RUNTIME", elsewhere)
    assert Bundle(copy).runtime() == elsewhere


def test_no_linker(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle.shutil, "which", lambda name: None)
    with pytest.raises(BundleError, match="linked by a C compiler, and there is none"):
        bundle.build(tmp_path / "kernels", [])


def test_info_tells_the_bundle(made, monkeypatch):
    monkeypatch.setattr(settings, "BUNDLE", made)
    state = info.bundle_state()
    assert state["kernels"] == {"sm_90a": 3, "sm_100a": 3} and state["error"] is None
    assert "3 for sm_90a, 3 for sm_100a" in info.text(info.collect())
