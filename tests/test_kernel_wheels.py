"""Kernels of well-known models, and wheels whose kernels a process without the DSL can load."""

import ast
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from support.interpreters import forked

import torch_cute_ops
from torch_cute_ops import kernel_wheels
from torch_cute_ops.cli.main import main
from torch_cute_ops.gemm.backends.fp8_fp4_mma_sync import FP8FP4MmaSync
from torch_cute_ops.kernel_wheels import MODELS, kernels_of_model
from torch_cute_ops.registry import kernels_of
from torch_cute_ops.runtime.arch import ARCHS

SM90 = ARCHS["sm_90a"]
BF16 = torch.bfloat16


def test_kernels_of_a_dense_model():
    """Check that ``kernels_of_model`` lists the kernels of each layer's GEMM and of the RMSNorm before it, for each
    format and number of rows."""
    found = set(kernels_of_model("llama-8b", SM90, (1, 256)))
    merged = {(6144, 4096), (28672, 4096)}  # each part of a merged layer has a global scale
    for n, k in (*merged, (4096, 4096), (4096, 14336)):
        for m in (1, 256):
            size = {"n": n, "k": k, "m": m, "static_weight": True}
            assert found >= {*kernels_of("mm_fp8_block", "sm_90a", **size)}, size
            size["alpha"] = "column" if (n, k) in merged else "one"
            assert found >= {*kernels_of("mm_fp4_weight_only", "sm_90a", **size, dtype=BF16)}, size
            assert found >= {*kernels_of("mm_fp4", "sm_90a", **size)}, size
    norm = {"hidden": 4096, "dtype": BF16, "weight_dtype": BF16}
    assert found >= {*kernels_of("add_rmsnorm_fp4quant", "sm_90a", **norm, global_scale=True)}
    assert found >= {*kernels_of("silu_mul_fp8quant", "sm_90a", hidden=28672, dtype=BF16, granularity="block128")}


@pytest.mark.parametrize(("name", "scheme"), [("llama-8b", "nvfp4"), ("qwen3-30b-a3b", "fp8_block")])
def test_kernels_of_any_number_of_rows(name, scheme):
    """Check that the default kernels suffice for numbers of rows that lie between two buckets. Without the DSL, a
    server could not compile other kernels."""
    built = set(kernels_of_model(name, SM90, formats=[scheme]))
    for rows in (2, 13, 41, random.randint(1, 8192)):
        assert set(kernels_of_model(name, SM90, (rows,), [scheme])) <= built, rows


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].experts is not None])
def test_kernels_of_experts(name):
    """Check that the two grouped GEMMs of the experts are found, with the model's sizes and biases."""
    model = MODELS[name]
    experts = model.experts
    found = {(each.kernel.split(".")[-1], each.config) for each in kernels_of_model(name, SM90, (64,))}
    scheme, _ = model.formats[0]
    op, of_scheme = ("grouped_mm_fp8", {}) if scheme == "fp8_block" else ("grouped_mm_fp8_fp4", {"block_size": 32})
    bias = {"bias_dtype": BF16} if experts.has_bias else {}
    for n, k in ((2 * experts.width, model.hidden), (model.hidden, experts.width)):
        size = {"n": n, "k": k, "m": 64 * experts.topk, "experts": experts.count, "counts": False}
        size |= {"static_weight": True}
        wanted = kernels_of(op, "sm_90a", **size, **of_scheme, **bias)
        assert found >= {(each.kernel.split(".")[-1], each.config) for each in wanted}, size


@pytest.fixture
def no_fp8_fp4(monkeypatch):
    """Remove the GEMMs of FP8 activations and FP4 weights from GPUs that have neither wgmma nor tcgen05."""
    monkeypatch.setattr(FP8FP4MmaSync, "reason_unsupported", lambda *_: "left out")


@pytest.mark.usefixtures("no_fp8_fp4")
def test_formats_without_a_gemm(capsys, caplog, tmp_path):
    """Check that the error names op and reason if no GEMM of a format finds a backend, and that other formats work."""
    arguments = ["build", "--wheel", "--rows", "64", "-o", str(tmp_path), "--arch"]
    assert main([*arguments, "sm_120a", "--models", "gpt-oss-120b"]) == 2
    error = capsys.readouterr().err
    assert "gpt-oss-120b in mxfp4 with auto activations: no GEMM runs on sm_120a" in error
    assert "grouped_mm_fp8_fp4: no backend: wgmma_ss: needs Hopper's warpgroup MMA; this is sm_120a" in error
    assert main([*arguments, "sm_120a", "--models", "llama-8b"]) == 2
    assert "llama-8b in mxfp4 with fp8 activations: no GEMM runs on sm_120a" in capsys.readouterr().err
    assert main([*arguments, "sm_90a", "--models", "llama-8b", "--formats", "nvfp4,int4"]) == 2
    assert "no format 'int4'; its formats are nvfp4, mxfp4, fp8_block, fp8_channel" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    sm100 = ARCHS["sm_100a"]
    chosen = set(kernels_of_model("llama-8b", sm100, (64,), ["nvfp4", "fp8_block"]))
    size = {"n": 4096, "k": 14336, "m": 64, "static_weight": True}
    assert chosen >= {*kernels_of("mm_fp8_block", "sm_100a", **size)}
    assert chosen >= {*kernels_of("mm_fp4", "sm_100a", **size, alpha="one")}
    assert not caplog.records


@pytest.mark.usefixtures("no_fp8_fp4")
def test_a_format_with_some_gemms(caplog):
    """Check that one warning names the op if only some GEMMs lack a backend, as expert GEMMs do on sm_120a."""
    assert set(kernels_of_model("qwen3-30b-a3b", ARCHS["sm_120a"], (1, 64), ["nvfp4"]))
    (message,) = caplog.messages
    start = "qwen3-30b-a3b in nvfp4 with fp4 activations: no kernel of grouped_mm_fp8_fp4 for sm_120a: no backend: "
    assert message.startswith(start)


def test_formats_of_the_command(monkeypatch, tmp_path, capsys):
    """Check that the wheel gets the kernels of the chosen formats, and that its description names the formats."""
    built = []

    def build_wheel(folder, arch, kernels, text, **how):
        built.append((arch.name, set(kernels), text))
        return tmp_path

    monkeypatch.setattr(kernel_wheels, "build_wheel", build_wheel)
    monkeypatch.setattr("torch_cute_ops.cli.main._tell_flavour", lambda: None)
    arguments = ["build", "--wheel", "--rows", "64", "-o", str(tmp_path), "--arch", "sm_100a"]
    assert main([*arguments, "--models", "llama-8b", "--formats", "nvfp4,fp8_channel"]) == 0
    expected = set(kernels_of_model("llama-8b", ARCHS["sm_100a"], (64,), ["nvfp4", "fp8_channel"]))
    assert built == [("sm_100a", expected, "Kernels of llama-8b in nvfp4, fp8_channel, for sm_100a.")]


def test_unknown_models(capsys, tmp_path):
    with pytest.raises(ValueError, match="'gpt-5' is no known model; the models are llama-8b, "):
        next(kernels_of_model("gpt-5", SM90))
    arguments = ["build", "--wheel", "--arch", "sm_90a", "-o", str(tmp_path), "--models"]
    assert main([*arguments, "gpt-5"]) == 2
    assert "is no known model" in capsys.readouterr().err
    assert main([*arguments, "llama-8b", "fp4_quantize"]) == 2
    assert "name models, or an op" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_names():
    assert kernel_wheels.wheel_name("sm_90a") == "torch_cute_ops_kernels_sm90"
    assert kernel_wheels.wheel_name("sm_100a") == "torch_cute_ops_kernels_sm100"


@pytest.mark.parametrize("path", ['a"b.toml', 'a"""b.toml', "a\\b.toml", "a\nb.toml", "\x7f\x01.toml", "é😀.toml"])
def test_any_path_can_be_described(path):
    """Check that quotes, backslashes and control characters in a path are quoted in the wheel's files."""
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = f"Kernels of {path}, for sm_90a."
    project = tomllib.loads(kernel_wheels._project("name_of_it", "sm_90a", text, ["a==1", "b==2"]))["project"]
    assert project["readme"] == {"text": text, "content-type": "text/plain"}
    assert project["dependencies"] == ["a==1", "b==2"] and project["name"] == "name-of-it"
    assert ast.get_docstring(ast.parse(kernel_wheels._quoted(text)), clean=False) == text
    assert ast.literal_eval(kernel_wheels._quoted("a\udcffb")) == "a?b"


QUANTIZE = ["fp4_quantize", "--hidden", "64", "--dtype", "bf16", "--arch", "sm_90a"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder in which a wheel of one kernel is installed, with the DSL's runtime library."""
    if shutil.which("cc") is None:
        pytest.skip("a bundle is linked by a C compiler")
    folder = tmp_path_factory.mktemp("wheels")
    assert main(["build", "--wheel", "--with-runtime", *QUANTIZE, "--workers", "1", "-o", str(folder)]) == 0
    (wheel,) = folder.iterdir()
    version = torch_cute_ops.__version__
    assert wheel.name.startswith(f"torch_cute_ops_kernels_sm90-{version}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as file:
        metadata = file.read(f"torch_cute_ops_kernels_sm90-{version}.dist-info/METADATA").decode()
    assert f"Requires-Dist: torch-cute-ops=={version}\n" in metadata and "Kernels of fp4_quantize" in metadata
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder / "site"]
    subprocess.run([*pip, wheel], check=True)
    return folder / "site"


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def find_no_dsl(name, path=None, target=None):
    return None if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl") else find_spec(name, path, target)
PathFinder.find_spec = find_no_dsl
import torch
from torch_cute_ops.registry import kernels_of
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import compile_kernel, is_kept
for width in (64, 128):
    (kernel,) = kernels_of("fp4_quantize", "sm_90a", hidden=width, dtype=torch.bfloat16)
    print(is_kept(kernel, ARCHS["sm_90a"]))
    try:
        compile_kernel(kernel, ARCHS["sm_90a"])(torch.zeros(3, 3))
    except (TypeError, RuntimeError) as error:
        print(type(error).__name__, str(error).splitlines()[0][:140])
print("the program goes on")
"""


def ran(folder, tmp_path):
    """Run the program without the DSL and without a C compiler; return its lines."""
    variables = {"PYTHONPATH": ":".join([str(folder), *sys.path]), "PATH": "/nowhere", "TORCH_CUTE_OPS_LOG": ""}
    done = forked(PROGRAM, **variables, TORCH_CUTE_OPS_CACHE_DIR=str(tmp_path / "cache"))
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_installed_wheel_is_found(installed, tmp_path):
    """Check that the wheel's kernel runs without the DSL, and that another kernel is refused."""
    kept, loaded, refused, other, error, end = ran(installed, tmp_path)
    assert (kept, other, end) == ("True", "False", "the program goes on")
    assert loaded.startswith("INFO from the package torch_cute_ops_kernels_sm90: KernelSpec(")
    assert refused.startswith("TypeError Expects 17 parameters when calling")
    assert error.startswith("RuntimeError a kernel cannot be compiled here (No module named 'cutlass'), and ")
    assert "and the package torch_cute_ops_kernels_sm90 lacks it: KernelSpec(" in error


def other_sources(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"sources": "0" * 64}))


def no_bundle(bundle):
    shutil.rmtree(bundle)


def damaged_library(bundle):
    (bundle / "sm_90a.so").write_bytes(b"")


MISMATCHES = {
    other_sources: "does not fit: its digest of the kernel sources is 0000",
    no_bundle: "is not a bundle: FileNotFoundError",
    damaged_library: "is damaged",
}


@pytest.mark.slow
@pytest.mark.parametrize("spoil", MISMATCHES, ids=lambda spoil: spoil.__name__)
def test_a_wheel_that_does_not_fit_is_ignored(installed, tmp_path, spoil):
    """Check that one warning gives the reason, and that the program continues as without the wheel."""
    copy = Path(shutil.copytree(installed, tmp_path / "site"))
    spoil(copy / "torch_cute_ops_kernels_sm90" / "bundle")
    lines = ran(copy, tmp_path)
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert warning.startswith("WARNING the kernels of the package torch_cute_ops_kernels_sm90 are not used: ")
    assert MISMATCHES[spoil] in warning or MISMATCHES[spoil] in warning.replace(str(copy), "")
    errors = [line for line in lines if line.startswith("RuntimeError a kernel cannot be compiled here")]
    assert len(errors) == 2 and lines[-1] == "the program goes on"
