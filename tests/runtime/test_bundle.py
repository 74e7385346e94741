"""Bundles: kernels run without the compiler, and invalid bundles are refused."""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support.interpreters import forked, python

from torch_cute_ops import registry
from torch_cute_ops.cli import info
from torch_cute_ops.cli.main import main
from torch_cute_ops.runtime import bundle, bundle_build, compiler, settings, toolchain
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
# Code that hides the DSL, except its runtime library.
WITHOUT_DSL = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_no_dsl(name, path=None, target=None):
    return None if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl") else find_spec(name, path, target)
PathFinder.find_spec = find_no_dsl
import torch
import torch_cute_ops
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Build a bundle for two architectures with the command line, and copy the runtime library into it."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "deployment.toml").write_text(FILE)
    arguments = ["--config", str(folder / "deployment.toml"), "--arch", "sm_90a", "--arch", "sm_100a"]
    assert main(["build", *arguments, "-o", str(folder / "kernels")]) == 0
    shutil.copy(Bundle(folder / "kernels").runtime(), folder / "kernels" / RUNTIME)
    return folder / "kernels"


@pytest.fixture
def copy(made, tmp_path):
    """Copy the bundle without the runtime library, which is large, and which is also found in the DSL's package."""
    return Path(shutil.copytree(made, tmp_path / "kernels", ignore=shutil.ignore_patterns(RUNTIME)))


IMPORTS = """
from torch_cute_ops.registry import kernels_of
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import compile_kernel
"""
LOAD = (
    IMPORTS
    + """
for op, properties in (("fp4_quantize", {"hidden": 96, "dtype": torch.bfloat16}), ("fp4_dequantize", {"hidden": 64})):
    function = compile_kernel(*kernels_of(op, "sm_90a", **properties), ARCHS["sm_90a"])
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
    """Check that without the DSL functions of the bundle load and check their arguments, and that the error for a
    missing kernel names it."""
    done = forked(WITHOUT_DSL + LOAD, TORCH_CUTE_OPS_BUNDLE=str(made))
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Expects 17 parameters when calling"), done.stderr
    assert lines[1].startswith("Expects 5 parameters when calling")
    assert f"the bundle {made} lacks it" in lines[2] and "cutlass" in lines[2] and "width=128" in lines[2]


def test_without_dsl_and_bundle():
    wanted = '*kernels_of("fp4_dequantize", "sm_90a", hidden=64)'
    done = forked(f'{WITHOUT_DSL}{IMPORTS}compile_kernel({wanted}, ARCHS["sm_90a"])')
    assert "RuntimeError: a kernel cannot be compiled here" in done.stderr


def test_is_kept_without_the_dsl(made, tmp_path):
    """Check that ``is_kept`` without the DSL, and with an empty cache, knows only the bundle's kernels."""
    code = """
from torch_cute_ops.runtime.compiler import is_kept
for hidden in (96, 128):
    (kernel,) = kernels_of("fp4_quantize", "sm_90a", hidden=hidden, dtype=torch.bfloat16)
    print(is_kept(kernel, ARCHS["sm_90a"]))
"""
    environment = {"TORCH_CUTE_OPS_BUNDLE": str(made), "TORCH_CUTE_OPS_CACHE_DIR": str(tmp_path)}
    done = forked(WITHOUT_DSL + IMPORTS + code, **environment)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.timing
def test_start_is_quick(made):
    """Check that the import, the bundle and the first kernel take less than 0.3 s of processor time in addition to
    importing torch, in the best of five runs.

    On a busy processor everything is slower, so the test also passes if they take less than a quarter of torch's import
    time.
    """
    code = (
        "import time; start = time.process_time()\nimport torch\nbetween = time.process_time()\n"
        "import torch_cute_ops\n" + LOAD.split("    try:")[0] + "end = time.process_time()\n"
        "print('took', end - between, between - start)"
    )
    runs = []
    for _ in range(5):
        done = python(code, TORCH_CUTE_OPS_BUNDLE=str(made))
        ours, of_torch = map(float, done.stdout.split("took")[1].split())
        if ours < max(0.3, of_torch / 4):
            return
        runs.append(f"{ours:.2f} s, torch {of_torch:.2f} s")
    raise AssertionError(f"takes {'; '.join(runs)}")


def test_manifest(made):
    """Check that the manifest names the compiler, the digest of each file, and exactly the kernels of the bundle."""
    manifest = json.loads((made / MANIFEST).read_text())
    assert set(manifest["archs"]) == {"sm_90a", "sm_100a"}
    assert manifest["compiler"] == list(toolchain.compiler_versions())
    for file in (manifest["runtime"], *manifest["archs"].values()):
        assert hashlib.sha256((made / file["file"]).read_bytes()).hexdigest() == file["sha256"]
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


def wanted():
    """Return a kernel that the bundle contains."""
    (kernel,) = registry.kernels_of("fp4_quantize", "sm_90a", hidden=64, dtype=torch.bfloat16)
    return kernel


def change(*path, to):
    """Return a function that sets a field of the manifest to ``to``, or deletes the field if ``to`` is None."""

    def spoil(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        inner = manifest
        for name in path[:-1]:
            inner = inner[name]
        if to is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return spoil


def write(content):
    return lambda folder: (folder / MANIFEST).write_bytes(content)


def replace_by(make):
    def spoil(folder):
        (folder / MANIFEST).unlink()
        make(folder / MANIFEST)

    return spoil


LIBRARY = ("archs", "sm_90a")
REFUSED = {
    "another version": (change("tvm_ffi", to="0.0.1"), "its version of apache-tvm-ffi is 0.0.1, here it is"),
    "other sources": (change("sources", to="abc"), "its digest of the kernel sources is abc, here it is"),
    "another format": (change("format", to=99), "format: expected 2, which this version of torch_cute_ops reads"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "is not a bundle: FileNotFoundError"),
    "no JSON": (write(b"{"), "is not a bundle: .*not JSON"),
    "deep JSON": (write(b"[" * 100_000), "is not a bundle: .*nested too deeply"),
    "binary": (write(b"\xff\x00"), "is not a bundle: .*not JSON"),
    "huge": (lambda folder: os.truncate(folder / MANIFEST, 2**40), "is not a bundle: .* bytes; the limit is"),
    "a FIFO": (replace_by(os.mkfifo), "is not a bundle: .*is not a regular file"),
    "a device": (replace_by(lambda path: path.symlink_to("/dev/zero")), "is not a bundle: .*is not a regular file"),
    "a folder": (replace_by(os.mkdir), "is not a bundle: .*is not a regular file"),
    "another processor": (
        change("host", to=[*toolchain.host_features(), "avx9"]),
        "needs a processor with avx9",
    ),
    "a list": (write(b"[]"), "is not a bundle: .*expected an object"),
    "no host": (change("host", to=[]), "host: expected one or more strings"),
    "numbers for a host": (change("host", to=[1]), "host: expected one or more strings"),
    "architectures in a list": (change("archs", to=[]), "archs: expected an object"),
    "a library in words": (change(*LIBRARY, to="sm_90a.so"), "sm_90a: expected an object"),
    "no file": (change(*LIBRARY, "file", to=None), "sm_90a: file: expected a string"),
    "an absolute file": (change(*LIBRARY, "file", to="/lib/x.so"), "/lib/x.so leads out of it"),
    "a file above": (change(*LIBRARY, "file", to="a/../../x.so"), "a/../../x.so leads out of it"),
    "an absolute runtime": (change("runtime", "file", to="/lib/x.so"), "/lib/x.so leads out of it"),
    "a digest in words": (change(*LIBRARY, "sha256", to="right"), "sm_90a: sha256: expected a string like"),
    "kernels in a list": (change(*LIBRARY, "kernels", to=[]), "sm_90a: kernels: expected an object"),
    "a flavour with a path": (change("flavour", to="../cu12"), "flavour: expected a string like"),
} | {
    f"without {name}": (change(name, to=None), f"is not a bundle: .*{name}")
    for name in ("format", "created", "sources", "tvm_ffi", "flavour", "runtime", "host", "archs")
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, copy, monkeypatch, capsys):
    """Check that a bad bundle is refused with the reason at its first use, and in ``info``."""
    spoil, reason = REFUSED[name]
    spoil(copy)
    started = time.monotonic()
    with pytest.raises(BundleError, match=reason):
        Bundle(copy)
    assert time.monotonic() - started < 5
    monkeypatch.setattr(settings, "BUNDLE", copy)
    assert re.search(reason, info.bundle_state()["error"])


@given(
    path=st.lists(st.sampled_from(["archs", "sm_90a", "kernels", "runtime", "file", "sha256", "host", 0]), max_size=4),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=4,
    ),
)
@hypothesis.settings(max_examples=200)
def test_any_manifest(made, tmp_path_factory, path, value):
    """Check that any manifest gives a ``BundleError`` or a usable bundle, and no other exception."""
    folder = tmp_path_factory.mktemp("bundle")
    manifest = json.loads((made / MANIFEST).read_text())
    inner = manifest
    for name in path:
        if not isinstance(inner, dict) or not isinstance(inner.get(name), (dict, list)):
            break
        inner = inner[name]
    if isinstance(inner, dict):
        inner[path[-1] if path and isinstance(path[-1], str) else "format"] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    try:
        bundle_ = Bundle(folder)
        bundle_.has(wanted().digest, "sm_90a")
        bundle_.function(wanted().digest, "sm_90a")
    except BundleError:
        pass


def test_another_architecture(copy):
    (kernel,) = registry.kernels_of("fp4_quantize", "sm_120a", hidden=64, dtype=torch.bfloat16)
    with pytest.raises(BundleError, match="contains kernels for sm_90a, sm_100a; this device is sm_120a"):
        Bundle(copy).function(kernel.digest, "sm_120a")


LIBRARIES = {
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "gone": Path.unlink,
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "elsewhere": lambda path: path.symlink_to(path.rename(path.parents[1] / path.name)),
}


@pytest.mark.parametrize("damage", LIBRARIES)
def test_a_damaged_library(copy, damage):
    LIBRARIES[damage](copy / "sm_90a.so")
    with pytest.raises(BundleError, match=r"is damaged: .*sm_90a\.so"):
        Bundle(copy).function(wanted().digest, "sm_90a")


def test_links_in_a_bundle(copy):
    """Check that links to the bundle and inside it are allowed, because container volumes consist of links."""
    copy.rename(copy.with_name("data"))
    copy.symlink_to("data")
    (copy / "sm_90a.so").rename(copy / "version-7.so")
    (copy / "sm_90a.so").symlink_to("version-7.so")
    assert Bundle(copy).function(wanted().digest, "sm_90a") is not None


def test_a_library_without_a_function(copy, tmp_path):
    """Check the error if the manifest lists a function that the library lacks."""
    other = "ab" * 32
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["archs"]["sm_90a"]["kernels"][other] = f"k{other[:24]}"
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"is damaged: sm_90a\.so contains no function kabab"):
        Bundle(copy).function(other, "sm_90a")


def test_no_runtime_library(copy, monkeypatch):
    monkeypatch.setattr(bundle.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BundleError, match=rf"needs {RUNTIME} of cu\d+, .*TORCH_CUTE_OPS_DSL_RUNTIME"):
        Bundle(copy).runtime()


def test_another_runtime_library(copy, monkeypatch):
    """Check that a runtime library with another digest is refused, unless the user configures it."""
    packaged = Bundle(copy).runtime()
    assert packaged != copy / RUNTIME
    (copy / RUNTIME).write_bytes(b"other")
    with pytest.raises(BundleError, match=rf"is damaged: {copy / RUNTIME} does not match .*TORCH_CUTE_OPS_DSL_RUNTIME"):
        Bundle(copy).function(wanted().digest, "sm_90a")
    monkeypatch.setattr(settings, "DSL_RUNTIME", packaged)
    assert Bundle(copy).function(wanted().digest, "sm_90a") is not None
    monkeypatch.setattr(settings, "DSL_RUNTIME", copy / RUNTIME)
    assert Bundle(copy).runtime() == copy / RUNTIME
    monkeypatch.setattr(settings, "DSL_RUNTIME", copy / "nowhere")
    with pytest.raises(BundleError, match=r"TORCH_CUTE_OPS_DSL_RUNTIME=.*nowhere is not a file"):
        Bundle(copy).runtime()
    monkeypatch.setattr(settings, "DSL_RUNTIME", None)
    (copy / RUNTIME).unlink()
    change("runtime", "sha256", to="0" * 64)(copy)
    with pytest.raises(BundleError, match=rf"is damaged: {packaged} does not match"):
        Bundle(copy).function(wanted().digest, "sm_90a")


def test_a_runtime_library_that_leads_out(copy):
    (copy / RUNTIME).symlink_to(Bundle(copy).runtime())
    with pytest.raises(BundleError, match=f"{RUNTIME} leads out of it"):
        Bundle(copy).runtime()


def test_without_a_flavour(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler_flavour", lambda: None)
    with pytest.raises(BundleError, match="CUDA 12 or 13"):
        bundle_build.build(tmp_path / "kernels", [])
    assert not (tmp_path / "kernels").exists()


def test_no_linker(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(BundleError, match="linked by a C compiler, and none was found"):
        bundle_build.build(tmp_path / "kernels", [])


def test_info_tells_the_bundle(made, monkeypatch):
    monkeypatch.setattr(settings, "BUNDLE", made)
    state = info.bundle_state()
    assert state["kernels"] == {"sm_90a": 3, "sm_100a": 3} and state["error"] is None
    monkeypatch.setattr(info, "availability", lambda spec: {})
    assert "3 for sm_90a, 3 for sm_100a" in info.text(info.collect())
