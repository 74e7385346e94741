"""``python -m torch_cute_ops`` and deployments: what they print, compile and refuse."""

import json
import re
import subprocess
import sys

import pytest
import torch
from support.cases import facts_of, op_cases
from support.interpreters import PACKAGE, python

import torch_cute_ops
from torch_cute_ops import deployment
from torch_cute_ops.cli import info
from torch_cute_ops.cli.main import main
from torch_cute_ops.mm_backends import BACKENDS
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.arch import ARCHS


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache on disk, for this process and those that it starts."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(settings, "CACHE_DIR", folder)
    monkeypatch.setenv("TORCH_CUTE_OPS_CACHE_DIR", str(folder))
    return folder


# info


def test_info(capsys, cache):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (torch_cute_ops.__version__, torch.__version__, "0 kernels", str(cache), *OPS, *ARCHS):
        assert word in text
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["ops"]) == set(OPS)
    assert facts["ops"]["fp4_quantize"] == {"cpu": "reference", **dict.fromkeys(ARCHS, "kernel")}
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_info_says_what_is_missing(monkeypatch):
    real = info.versions()
    monkeypatch.setattr(info, "versions", lambda: {**real, "nvidia-cutlass-dsl": None})
    answers = info.availability(OPS["fp4_quantize"])
    assert answers["cpu"] == "reference" and answers["sm_90a"] == "nvidia-cutlass-dsl not installed"


@pytest.mark.parametrize("op", ["mm_fp4", "moe_fc2_fp4_weight_only"])
def test_info_asks_the_backends(op, monkeypatch):
    """One call that one backend besides the reference can compute is a kernel."""

    def reason(product, target):
        return None if target.arch.name == "sm_90a" and product.out_dtype == torch.float32 else "does not suit"

    for name, backend in BACKENDS.items():
        if name != "reference":
            monkeypatch.setattr(backend, "reason_unsupported", lambda product, target: "does not suit")
    by_name = {"cpu": "reference", **dict.fromkeys(ARCHS, "reference by name")}
    assert info.availability(OPS[op]) == by_name
    monkeypatch.setattr(BACKENDS["cublas"], "reason_unsupported", reason)
    assert info.availability(OPS[op]) == by_name | {"sm_90a": "kernel"}


def test_info_compares_the_record(tmp_path, monkeypatch):
    """With the sources that are here: the same, others, or no record."""
    path = tmp_path / "gpu_record.json"
    monkeypatch.setattr(info, "RECORD", path)
    assert info.record() == {"found": False}
    from torch_cute_ops.runtime.provenance import source_digest

    content = {"date": "2026", "gpu": "G", "passed": 3, "failed": 0, "skipped": 1, "source_digest": source_digest()}
    path.write_text(json.dumps(content))
    assert info.record()["matches"] is True and info.record()["passed"] == 3
    path.write_text(json.dumps({**content, "source_digest": "other"}))
    assert info.record()["matches"] is False
    assert "OTHER sources" in info.text(info.collect())


def test_settings_tell_their_source():
    code = "from torch_cute_ops.runtime import settings; print(settings.described())"
    described = python(code, TORCH_CUTE_OPS_CACHE_MB="5").stdout
    assert "{'variable': 'TORCH_CUTE_OPS_CACHE_MB', 'value': '5', 'source': 'environment'}" in described
    assert "{'variable': 'TORCH_CUTE_OPS_PDL', 'value': 'True', 'source': 'default'}" in described
    for name, bad, words in (("CACHE", "yes", "0 or 1"), ("CACHE_MB", "1.5", "a whole number")):
        assert f"TORCH_CUTE_OPS_{name}='{bad}'; use {words}" in python(code, **{f"TORCH_CUTE_OPS_{name}": bad}).stderr


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "torch_cute_ops", "--help"], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0 and all(command in done.stdout for command in ("info", "cache", "warmup"))


# warmup and cache


@pytest.mark.slow
def test_warmup_fills_the_cache(cache, capsys, monkeypatch):
    """In processes of their own; afterwards this one loads what it would have compiled."""
    arguments = ["warmup", "fp4_quantize", "--hidden", "64", "96", "--dtype", "bf16", "--arch", "sm_90a"]
    assert main([*arguments, "--workers", "2"]) == 0
    assert "2 kernels are ready, 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "trace_and_compile", lambda *args: pytest.fail("compiled again"))
    for hidden in (64, 96):
        torch_cute_ops.precompile("fp4_quantize", "sm_90a", hidden=hidden, dtype=torch.bfloat16)

    assert main(["cache"]) == 0
    listed = capsys.readouterr().out
    assert len(re.findall(r"^[0-9a-f]{16}  .*RowQuantKernel", listed, re.M)) == 2 and "2 kernels" in listed
    assert main(["cache", "verify"]) == 0
    assert "0 damaged" in capsys.readouterr().out
    next(cache.rglob("kernel.o")).write_bytes(b"")
    assert main(["cache", "verify"]) == 1
    assert "1 damaged" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "2 kernels deleted" in capsys.readouterr().out
    assert not list(cache.rglob("kernel.o"))


def test_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setattr(settings, "CACHE", False)
    assert main(["cache", "clear"]) == 0
    assert "TORCH_CUTE_OPS_CACHE=0" in capsys.readouterr().out


def test_warmup_reports_failures(cache, capsys, monkeypatch):
    """With what the op says, and goes on with the others."""
    outcomes = [
        deployment.Outcome(deployment.Job("fp4_quantize", (("hidden", 64),)), "sm_90a", ""),
        deployment.Outcome(deployment.Job("fp4_quantize", (("hidden", 65),)), "sm_90a", "ValueError: of width"),
    ]
    monkeypatch.setattr(deployment, "compile_jobs", lambda *args: iter(outcomes))
    arguments = ["warmup", "fp4_quantize", "--hidden", "64", "65", "--dtype", "bf16", "--arch", "sm_90a"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "fp4_quantize hidden=65 sm_90a: ValueError: of width" in shown.err
    assert "1 kernels are ready, 1 failed" in shown.out


WRONG = {
    "no op": (["warmup"], "name an op and its facts, or a file"),
    "both": (["warmup", "fp4_quantize", "--config", "x.toml"], "name an op and its facts, or a file"),
    "unknown op": (["warmup", "fp4", "--hidden", "64", "--arch", "sm_90a"], "'fp4' is no op"),
    "unknown dtype": (["warmup", "fp4_quantize", "--hidden", "64", "--dtype", "int8"], "'int8' is no dtype"),
    "unknown arch": (["warmup", "fp4_quantize", "--hidden", "64", "--arch", "sm_80"], "'sm_80' is no architecture"),
    "no file": (["warmup", "--config", "nowhere.toml", "--arch", "sm_90a"], "No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, capsys):
    arguments, text = WRONG[name]
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_warmup_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(info, "archs_here", lambda: [])
    assert main(["warmup", "fp4_quantize", "--hidden", "64", "--dtype", "bf16"]) == 2
    assert "say --arch" in capsys.readouterr().err


STEPS = {
    "moe_route": "--experts 16 --dtype fp32 --topk 2 --scoring sigmoid --num-groups 4 --topk-groups 2 --bias --masked "
    "--no-renormalize",
    "moe_permute_fp8quant": "--hidden 256 --dtype bf16 --topk 4",
    "moe_swiglu_fp8quant": "--hidden 512 --dtype fp16 --no-offsets",
    "moe_finalize": "--hidden 256 --dtype bf16 --topk 4 --residual",
    "grouped_mm_fp8": "--n 256 --k 512 --experts 4 --masked --m 16",
    "fp4_quantize": "--hidden 256 --dtype bf16 --scale-format e4m3",
}


@pytest.mark.parametrize("op", STEPS)
def test_every_fact_can_be_said(op, monkeypatch, capsys):
    """What is said arrives as facts of a call."""
    said, words = [], STEPS[op].split()
    monkeypatch.setattr(deployment, "compile_jobs", lambda jobs, archs, workers: said.extend(jobs) or [])
    assert main(["warmup", op, *words, "--arch", "sm_90a"]) == 0
    (job,) = said
    facts = dict(job.facts)
    assert len(facts) == sum(word.startswith("--") for word in words)
    assert all(facts[word[5:]] is False for word in words if word.startswith("--no-"))
    (kernel,) = torch_cute_ops.registry.kernels_of(op, "sm_90a", **facts)
    if op == "moe_route":
        config = kernel.config
        assert config.is_sigmoid and config.has_bias and config.is_masked and not config.renormalize
        assert (config.experts, config.topk, config.num_groups, config.topk_groups) == (16, 2, 4, 2)


@pytest.mark.parametrize("op", op_cases())
def test_wrong_facts_name_the_op(op):
    facts = facts_of(op)
    for fact in ("colour", "device"):
        with pytest.raises(TypeError, match=rf"^cute::{op.name}\b.*{fact}"):
            torch_cute_ops.registry.kernels_of(op.name, "sm_90a", **facts, **{fact: 0})
    needed = "experts" if op.name == "moe_route" else "k" if "k" in facts else "hidden"
    del facts[needed]
    with pytest.raises(TypeError, match=rf"^cute::{op.name}\b.*'{needed}'"):
        torch_cute_ops.registry.kernels_of(op.name, "sm_90a", **facts)


def test_device_0_is_a_device(monkeypatch):
    """And not the current one, or a CPU."""
    asked = []
    monkeypatch.setattr(
        torch_cute_ops.registry, "cuda_device", lambda device: asked.append(device) or torch.device("cpu")
    )
    torch_cute_ops.backends("mm_fp4", n=64, k=128, device=0)
    torch_cute_ops.backends("mm_fp4", n=64, k=128)
    assert asked == [0, None if torch.cuda.is_available() else "cpu"]


# Deployments

FILE = """
[[kernel]]
op = "add_rmsnorm_fp4quant"
hidden = [4096, 7168]
dtype = "bfloat16"
weight_dtype = ["bf16", "fp32"]
scale_layout = "128x4"

[[kernel]]
op = "rmsnorm_fp8quant"
hidden = 7168
dtype = "fp16"
granularity = "block128"
"""


def test_read(tmp_path):
    path = tmp_path / "deployment.toml"
    path.write_text(FILE)
    jobs = deployment.read(path)
    facts = [(job.op, dict(job.facts)) for job in jobs]
    bf16 = torch.bfloat16
    assert [f["hidden"] for _, f in facts] == [4096, 4096, 7168, 7168, 7168]
    assert [f.get("weight_dtype") for _, f in facts] == [bf16, torch.float32, bf16, torch.float32, None]
    assert facts[0] == (
        "add_rmsnorm_fp4quant",
        {"hidden": 4096, "dtype": bf16, "weight_dtype": bf16, "scale_layout": "128x4"},
    )
    assert facts[4][1]["granularity"] == "block128"
    path.write_text(FILE + FILE)
    assert deployment.read(path) == jobs


BAD_FILES = {
    "": "expected one or more tables",
    "kernel = 3": "expected one or more tables",
    "other = 3\n" + FILE: "and nothing else",
    '[[kernel]]\nop = "nothing"': "kernel 1: 'nothing' is no op",
    FILE + "[[kernel]]\nhidden = 64": "kernel 3: ",
    '[[kernel]]\nop = "fp4_quantize"\ndtype = "fp8"': "kernel 1: 'fp8' is no dtype",
    "[[kernel": "",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_bad_files(content, tmp_path):
    path = tmp_path / "deployment.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(BAD_FILES[content])):
        deployment.read(path)


def test_prepare_needs_a_device(tmp_path, monkeypatch):
    path = tmp_path / "deployment.toml"
    path.write_text(FILE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        deployment.prepare(path)


@pytest.mark.gpu
def test_prepare(tmp_path, monkeypatch, cache):
    """After it, the calls that the file lists compile nothing and can be captured."""
    path = tmp_path / "deployment.toml"
    path.write_text('[[kernel]]\nop = "rmsnorm_fp4quant"\nhidden = [1008, 1040]\ndtype = "bf16"\n')
    deployment.prepare(path)
    monkeypatch.setattr(compiler, "trace_and_compile", lambda *args: pytest.fail("compiled after prepare"))
    monkeypatch.setattr(compiler, "load_object", lambda *args: pytest.fail("loaded after prepare"))
    for hidden in (1008, 1040):
        rows = torch.randn(3, hidden, dtype=torch.bfloat16, device="cuda")
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = torch_cute_ops.rmsnorm_fp4quant(rows, weight)
        graph.replay()
        want = torch_cute_ops.rmsnorm_fp4quant(rows, weight)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
