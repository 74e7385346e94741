"""``python -m torch_cute_ops`` and deployments: output, compiled kernels and errors."""

import errno
import functools
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cases import op_cases, properties_for
from support.interpreters import PACKAGE, forked, python_in_each, variables_of
from support.processes import is_alive, wait_until, workers_of

import torch_cute_ops
from torch_cute_ops import deployment
from torch_cute_ops.cli import info
from torch_cute_ops.cli.main import main
from torch_cute_ops.gemm.select import BACKENDS
from torch_cute_ops.ops._properties import Property
from torch_cute_ops.registry import OPS, kernels_of
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.store import Store, symbol_of


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Set an empty cache on disk for this process and its children, and return its folder."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(settings, "CACHE_DIR", folder)
    monkeypatch.setenv("TORCH_CUTE_OPS_CACHE_DIR", str(folder))
    return folder


# info


def test_info(capsys, cache, monkeypatch):
    # Cache the answers: each plans an op for every architecture, and the text and the JSON print the same answers.
    monkeypatch.setattr(info, "availability", functools.cache(info.availability))
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (torch_cute_ops.__version__, torch.__version__, "0 kernels", str(cache), *OPS, *ARCHS):
        assert word in text
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["ops"]) == set(OPS)
    assert report["ops"]["fp4_quantize"] == {"cpu": "reference", **dict.fromkeys(ARCHS, "kernel")}
    assert len(report["devices"]) == torch.cuda.device_count()
    answers = [line for line in text.splitlines() if "reference: cpu" in line]
    assert [line.split()[0] for line in answers] == list(OPS)  # a blank follows even a long name


@pytest.mark.parametrize(
    ("arch", "answer"),
    [
        ("sm_80a", "kernels support sm_90a, sm_100a, sm_103a, sm_120a, sm_121a"),
        ("sm_90a", "supported"),
        ("sm_100a", "supported; its kernels were tested in an emulator only"),
        ("sm_121a", "supported; its kernels were tested in an emulator only"),
    ],
)
def test_info_names_untested_architectures(arch, answer, monkeypatch):
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(info, "arch_name", lambda index: arch)
    found = info.devices()
    monkeypatch.undo()
    monkeypatch.setattr(info, "availability", lambda spec: {})
    assert f"  0  a GPU  {arch}  {answer}" in info.text({**info.collect(), "devices": found}).splitlines()


def test_info_names_missing_packages(monkeypatch):
    real = info.versions()
    monkeypatch.setattr(info, "versions", lambda: {**real, "nvidia-cutlass-dsl": None})
    answers = info.availability(OPS["fp4_quantize"])
    assert answers["cpu"] == "reference" and answers["sm_90a"] == "nvidia-cutlass-dsl not installed"


@pytest.mark.parametrize("op", ["mm_fp4", "moe_fc2_fp4_weight_only"])
def test_info_asks_the_backends(op, monkeypatch):
    """Check that the answer is "kernel" if a backend other than the reference can compute the op."""

    def reason(problem, target):
        return None if target.arch.name == "sm_90a" else "does not suit"

    for backend in BACKENDS:
        if backend.name != "reference":
            monkeypatch.setattr(backend, "reason_unsupported", lambda problem, target: "does not suit")
    by_name = {"cpu": "reference", **dict.fromkeys(ARCHS, "reference by name")}
    assert info.availability(OPS[op]) == by_name
    chosen = "cublas" if op == "mm_fp4" else "routed"
    for backend in BACKENDS:
        if backend.name == chosen:
            monkeypatch.setattr(backend, "reason_unsupported", reason)
    assert info.availability(OPS[op]) == by_name | {"sm_90a": "kernel"}


def test_info_compares_the_record(tmp_path, monkeypatch):
    """Check the report if the GPU record contains the digest of these sources or of other sources, or is missing."""
    path = tmp_path / "gpu_record.json"
    monkeypatch.setattr(info, "RECORD", path)
    monkeypatch.setattr(info, "availability", lambda spec: {})
    assert info.record() == {"found": False}
    from torch_cute_ops.runtime.provenance import source_digest

    content = {"date": "2026", "gpu": "G", "passed": 3, "failed": 0, "skipped": 1, "source_digest": source_digest()}
    path.write_text(json.dumps(content))
    assert info.record()["matches"] is True and info.record()["passed"] == 3
    path.write_text(json.dumps({**content, "source_digest": "other"}))
    assert info.record()["matches"] is False
    assert "OTHER sources" in info.text(info.collect())
    assert info.record()["not_run"] == 0 and "INCOMPLETE" not in info.text(info.collect())
    path.write_text(json.dumps({**content, "not_run": 5}))
    report = info.collect()
    assert report["gpu_record"]["not_run"] == 5
    assert info.text(report).endswith("3 passed, 0 failed; INCOMPLETE: 5 did not run")


def test_settings_name_their_source():
    code = "from torch_cute_ops.runtime import settings; print(settings.described())"
    read, refused = python_in_each(code, {"TORCH_CUTE_OPS_CACHE_MB": "5"}, {"TORCH_CUTE_OPS_CACHE_MB": "-5"})
    assert "{'variable': 'TORCH_CUTE_OPS_CACHE_MB', 'value': '5', 'source': 'environment'}" in read.stdout
    assert "{'variable': 'TORCH_CUTE_OPS_PDL', 'value': 'True', 'source': 'default'}" in read.stdout
    assert refused.returncode == 1
    assert "ValueError: TORCH_CUTE_OPS_CACHE_MB='-5'; use a whole number" in refused.stderr


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "torch_cute_ops", "--help"], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0 and all(command in done.stdout for command in ("info", "cache", "warmup"))


# warmup and cache


@pytest.mark.slow
def test_warmup_fills_the_cache(cache, capsys, monkeypatch):
    """Check that workers compile the kernels into the cache, and that this process then loads them."""
    arguments = ["warmup", "fp4_quantize", "--hidden", "64", "96", "--dtype", "bf16", "--arch", "sm_90a"]
    assert main([*arguments, "--workers", "2"]) == 0
    assert "2 kernels are ready, 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "trace_and_compile", lambda *args: pytest.fail("compiled again"))
    for hidden in (64, 96):
        torch_cute_ops.precompile("fp4_quantize", "sm_90a", hidden=hidden, dtype=torch.bfloat16)

    # A warm cache needs neither the DSL nor processes, which take seconds to start.
    code = f"import sys; from torch_cute_ops.cli.main import main; main({arguments}); print('cutlass' in sys.modules)"
    code = f"from torch_cute_ops.runtime import workers; workers._Template = None; {code}"
    done = forked(code, TORCH_CUTE_OPS_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert "2 kernels are ready, 0 failed\nFalse\n" in done.stdout and "compiled by the cu1" in done.stdout

    assert main(["cache"]) == 0
    listed = capsys.readouterr().out
    assert len(re.findall(r"^[0-9a-f]{16}  .*RowQuantKernel", listed, re.M)) == 2 and "2 kernels" in listed
    assert main(["cache", "verify"]) == 0
    assert "0 damaged" in capsys.readouterr().out
    # Copy another kernel's object and make the description match it: the function's name reveals the exchange.
    first, second = sorted(path.parent for path in cache.rglob("kernel.so"))
    shutil.copy(first / "kernel.so", second / "kernel.so")
    description = json.loads((first / "kernel.json").read_text()) | {"symbol": symbol_of(second.name)}
    description["key"] = json.loads((second / "kernel.json").read_text())["key"]
    (second / "kernel.json").write_text(json.dumps(description))
    with pytest.raises(OSError, match=symbol_of(second.name)):
        compiler.load_object(second / "kernel.so", symbol_of(second.name))
    assert main(["cache", "verify"]) == 1
    shown = capsys.readouterr().out
    assert f"{second.name[:16]}  damaged: kernel.so is another kernel's" in shown and "1 damaged" in shown
    compiled = []

    def compile_all(tasks, workers):
        compiled.extend(tasks)
        yield from ((task, "") for task in compiled)

    monkeypatch.setattr(deployment, "compile_all", compile_all)
    assert main(arguments) == 0
    assert len(compiled) == 1 and "2 kernels are ready" in capsys.readouterr().out  # only the damaged kernel
    assert main(["cache", "clear"]) == 0
    assert "1 kernels deleted" in capsys.readouterr().out
    assert not list(cache.rglob("kernel.so"))


def test_an_object_that_cannot_be_loaded(tmp_path):
    """Check that the error is an ``OSError`` and not ``Damaged``, because the DSL does not report the cause."""
    (tmp_path / "kernel.o").write_bytes(b"no object file")
    with pytest.raises(OSError, match=r"\w+Error: "):
        compiler.load_object(tmp_path / "kernel.o", "k0")


HIDDEN = [str(64 * i) for i in range(1, 101)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_warmup_can_be_stopped(tmp_path, number, status):
    """Check that the workers exit although minutes of compilation remain, and that no stored kernel is incomplete.
    Ctrl-C reaches all processes of the terminal; SIGTERM reaches only the first process."""
    command = [sys.executable, "-m", "torch_cute_ops", "warmup", "fp4_quantize", "--dtype", "bf16", "--arch", "sm_90a"]
    command += ["--workers", "2", "--hidden", *HIDDEN]
    variables = variables_of(TORCH_CUTE_OPS_CACHE_DIR=str(tmp_path))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # Background jobs of a shell ignore SIGINT, and so would their children, so restore the default.
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, env=variables, text=True, start_new_session=True, preexec_fn=hear, **streams
    ) as process:
        # No limit for the start: on a busy machine, imports and the first kernels can take minutes.
        assert wait_until(lambda: list(tmp_path.glob("v2/*/kernel.json")) or process.poll() is not None, 1800)
        workers = workers_of(process.pid)
        assert len(workers) >= 2
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert wait_until(lambda: not any(map(is_alive, workers)), 20.0)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "Traceback" not in output
    store = Store(tmp_path, 2**30)
    kept = [digest for digest, _ in store.entries()]
    assert 0 < len(kept) < len(HIDDEN) and all(store.read(digest) for digest in kept)


def test_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setattr(settings, "CACHE", False)
    assert main(["cache", "clear"]) == 0
    assert "TORCH_CUTE_OPS_CACHE=0" in capsys.readouterr().out
    monkeypatch.setattr(settings, "CACHE", True)
    monkeypatch.setattr(settings, "CACHE_DIR", None)
    monkeypatch.setattr(settings, "_user_cache_folder", lambda: None)
    assert main(["cache"]) == 0
    assert "no home folder; set TORCH_CUTE_OPS_CACHE_DIR" in capsys.readouterr().out
    monkeypatch.setattr(info, "availability", lambda spec: {})
    assert "off: there is no home folder" in info.text(info.collect())


def test_a_cache_folder_that_is_no_folder(monkeypatch, capsys):
    """Check that the reason is reported before anything is compiled, without the advice to change the permissions of
    /dev/null."""
    monkeypatch.setattr(settings, "CACHE_DIR", Path("/dev/null"))
    reason = "/dev/null is no folder; set TORCH_CUTE_OPS_CACHE_DIR to a folder"
    assert main([*QUANTIZE, "--arch", "sm_90a"]) == 2
    assert capsys.readouterr().err == f"error: no kernels are kept on disk: {reason}\n"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"no kernels are kept on disk: {reason}\n"
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": None, "why": reason}
    monkeypatch.setattr(info, "availability", lambda spec: {})
    assert f"off: {reason}" in info.text(info.collect())


def test_cache_as_json(cache, monkeypatch, capsys):
    store = compiler.store()
    for key in ("one", "two"):
        assert store.save(key, lambda path, symbol: path.write_text(symbol))
    (first, folder), (second, _) = store.entries()
    (folder / "kernel.o").write_text("damaged")
    assert main(["cache", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(store.root)
    damaged, whole = found["kernels"]
    assert damaged["digest"] == first and damaged["error"].startswith("damaged: ")
    assert whole["digest"] == second and whole["error"] is None and whole["key"] in ("one", "two")
    assert whole["bytes"] == len(symbol_of(second)) and abs(whole["created"] - time.time()) < 100
    assert main(["cache", "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == found
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(store.root), "deleted": 2, "errors": []}


def test_version(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"torch_cute_ops {torch_cute_ops.__version__}\n"


@pytest.mark.parametrize("variable", ["TORCH_CUTE_OPS_CACHE_MB", "TORCH_CUTE_OPS_PDL"])
def test_a_wrong_setting(variable):
    """Check that a command ends with one line and status 2, and that other programs get a traceback."""
    environment = {**os.environ, variable: "x"}
    done = subprocess.run(
        [sys.executable, "-m", "torch_cute_ops", "cache"],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        env=environment,
    )
    assert done.returncode == 2 and not done.stdout
    assert re.fullmatch(f"error: {variable}='x'; use .*\n", done.stderr)


def test_building_an_op_by_name(tmp_path, monkeypatch, capsys):
    """Check that building an op from command-line options compiles the same kernels as a deployment file that lists the
    same calls."""
    built = []
    monkeypatch.setattr("torch_cute_ops.runtime.bundle_build.build", lambda folder, pairs, workers: built.extend(pairs))
    monkeypatch.setattr("torch_cute_ops.cli.main._tell_flavour", lambda: None)
    arguments = ["build", *QUANTIZE[1:], "--arch", "sm_90a", "--arch", "sm_100a", "-o", str(tmp_path)]
    assert main(arguments) == 0
    assert f"2 kernels are in {tmp_path}" in capsys.readouterr().out
    (job,) = deployment.jobs_of("fp4_quantize", hidden=64, dtype=torch.bfloat16)
    for kernel, arch in built:
        assert [kernel] == list(kernels_of("fp4_quantize", arch, **dict(job.properties)))
    assert [arch for _, arch in built] == ["sm_90a", "sm_100a"]


def test_warmup_without_a_cache(monkeypatch, capsys):
    """Check that ``warmup`` is refused without a cache on disk, because its kernels would be lost."""
    monkeypatch.setattr(settings, "CACHE", False)
    assert main([*QUANTIZE, "--arch", "sm_90a"]) == 2
    assert "no kernels are kept on disk: TORCH_CUTE_OPS_CACHE=0" in capsys.readouterr().err


def test_cache_clear_reports_failures(cache, monkeypatch, capsys):
    """Check the report if renaming fails, as on a read-only file system."""
    store = compiler.store()
    for key in ("1", "2"):
        assert store.save(key, lambda path, symbol: path.write_text(symbol))

    def rename(path, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", rename)
    assert main(["cache", "clear"]) == 1
    shown = capsys.readouterr()
    assert f"0 kernels deleted, 2 could not be deleted, in {store.root}" in shown.out
    assert all(f"Read-only file system: '{folder}'" in shown.err for _, folder in store.entries())


def test_cache_that_cannot_be_read(cache, monkeypatch, capsys):
    """Check that the commands fail if the cache cannot be read, instead of reporting an empty cache."""

    def iterdir(path):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    for action in ("list", "verify", "clear"):
        assert main(["cache", action]) == 1
        assert "Permission denied" in capsys.readouterr().err


def test_warmup_reports_failures(cache, capsys, monkeypatch):
    """Check that each failure is printed with its reason, and that the other jobs are still run."""
    outcomes = (
        deployment.Outcome(deployment.Job("fp4_quantize", (("hidden", hidden),)), "sm_90a", error)
        for hidden, error in {64: "", 96: "ValueError: of width"}.items()
    )
    monkeypatch.setattr(deployment, "compile_jobs", lambda *args: outcomes)
    arguments = ["warmup", "fp4_quantize", "--hidden", "64", "96", "--dtype", "bf16", "--arch", "sm_90a"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert "fp4_quantize hidden=96 sm_90a: ValueError: of width" in shown.err
    assert "1 kernels are ready, 1 failed" in shown.out


def test_tune_reports_failures(capsys, monkeypatch):
    """Check that each failure is printed with its reason, and that the other jobs are still run."""

    def warmup(op, *, tune, n, k, m):
        if m == 2:
            raise ArithmeticError("of a test")  # any exception: the DSL's classes share no base

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_cute_ops.registry, "warmup", warmup)
    assert main(["tune", "mm_fp4", "--n", "64", "--k", "128", "--m", "1", "2", "3"]) == 1
    shown = capsys.readouterr()
    assert "mm_fp4 n=64 k=128 m=2: ArithmeticError: of a test" in shown.err
    assert "2 calls tuned, 1 failed" in shown.out


QUANTIZE = ["warmup", "fp4_quantize", "--hidden", "64", "--dtype", "bf16"]
WRONG = {
    "neither op nor file": (["warmup"], "name an op and its properties, or a file"),
    "op and file": (["warmup", "fp4_quantize", "--config", "x.toml"], "name an op and its properties, or a file"),
    "unknown op": (["warmup", "fp4_quantise", "--hidden", "64"], '"fp4_quantise" is no op; the ops are'),
    "unknown dtype": (
        ["warmup", "fp4_quantize", "--hidden", "64", "--dtype", "int8"],
        'dtype = "int8": expected a dtype',
    ),
    "no dtype": (["warmup", "fp4_quantize", "--hidden", "64"], "fp4_quantize: dtype: missing"),
    "no number": ([*QUANTIZE, "--block-size", "16x"], 'block_size = "16x": expected a positive integer'),
    "no size": ([*QUANTIZE, "--hidden", "0"], "hidden = 0: expected a positive integer"),
    "a negative size": (
        ["warmup", "fp4_quantize", "--hidden=-8", "--dtype", "bf16"],
        "hidden = -8: expected a positive",
    ),
    "more than 64 bits": ([*QUANTIZE, "--hidden", f"{2**63}"], f"hidden = {2**63}: expected an integer of at most"),
    "another op's property": ([*QUANTIZE, "--topk", "2"], "topk: no property of fp4_quantize"),
    "a refused layout": ([*QUANTIZE, "--scale-layout", "tiled"], 'scale_layout = "tiled": expected one of'),
    "a refused size": ([*QUANTIZE, "--hidden", "64", "65"], "cute::fp4_quantize"),
    "unknown arch": ([*QUANTIZE, "--arch", "sm_80"], "'sm_80' is no architecture"),
    "missing properties": (["warmup", "mm_fp4"], "mm_fp4: n, k: missing; mm_fp4 needs them"),
    "no file": (["warmup", "--config", "nowhere.toml", "--arch", "sm_90a"], "No such file"),
    "a folder for a file": (["warmup", "--config", "/", "--arch", "sm_90a"], "is not a regular file"),
    "no op to build": (["build", "--arch", "sm_90a", "-o", "x"], "name an op and its properties, or a file"),
    "a wrong op to build": (["build", "fp4", "--arch", "sm_90a", "-o", "x"], '"fp4" is no op'),
    "no file to build from": (["build", "--config", "nowhere.toml", "--arch", "sm_90a", "-o", "x"], "No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, capsys):
    """Check that the exit status is 2, that an error names the cause, and that nothing is compiled."""
    arguments, text = WRONG[name]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert text in shown.err and shown.err.startswith("error: ") and not shown.out


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_wrong_number_of_workers(count, capsys):
    with pytest.raises(SystemExit) as raised:
        main([*QUANTIZE, "--workers", count])
    text = f"argument --workers: '{count}': expected a positive integer"
    assert raised.value.code == 2 and text in capsys.readouterr().err


def test_wrong_number_of_processes():
    job = deployment.Job("fp4_quantize", (("hidden", 64), ("dtype", torch.bfloat16)))
    for workers in (0, -1):
        with pytest.raises(ValueError, match=f"workers={workers}; use 1 or more"):
            next(deployment.compile_jobs([job], ["sm_90a"], workers))


def test_building_an_unsupported_call(tmp_path, capsys):
    """Check that the error names the call, and that no bundle is written."""
    path = tmp_path / "deployment.toml"
    path.write_text('[[kernel]]\nop = "mm_fp4"\nn = 64\nk = 100\n')
    assert main(["build", "--config", str(path), "--arch", "sm_90a", "-o", str(tmp_path / "kernels")]) == 2
    assert "mm_fp4" in capsys.readouterr().err and not (tmp_path / "kernels").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    """Check that the exit status is 1, and that the error names the missing package, without a traceback."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main([*QUANTIZE, "--arch", "sm_90a"]) == 1
    assert "needs a package that is not installed" in (text := capsys.readouterr().err) and "tqdm" in text
    path = tmp_path / "deployment.toml"
    path.write_text(FILE)
    monkeypatch.setattr(deployment, "sys", SimpleNamespace(version_info=(3, 10, 9)))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ModuleNotFoundError, match="needs the package tomli"):
        deployment.read(path)
    monkeypatch.delitem(sys.modules, "tqdm")
    assert main(["warmup", "--config", str(path), "--arch", "sm_90a"]) == 1
    assert "tomli" in capsys.readouterr().err


WITHOUT = """
import os, pwd, sys
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
LACKING = ("platformdirs", "filelock", "tqdm", "tomli", "tomllib")
PathFinder.find_spec = lambda name, *args: None if name.partition(".")[0] in LACKING else find_spec(name, *args)

def getpwuid(number):
    raise KeyError(number)

pwd.getpwuid = getpwuid
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
import torch
import torch_cute_ops
from torch_cute_ops.cli import info
from torch_cute_ops.cli.main import main
from torch_cute_ops.registry import kernels_of
from torch_cute_ops.runtime import tuner
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import compile_kernel
info.OPS = {name: info.OPS[name] for name in ("fp4_quantize", "mm_fp8_block")}  # one of each kind
assert main(["info"]) == 0
assert tuner.lookup(tuner.Key("family", "{}", 8, "GPU", "{}")) is None
for hidden in (64, 96):
    (kernel,) = kernels_of("fp4_quantize", "sm_90a", hidden=hidden, dtype=torch.bfloat16)
    function = compile_kernel(kernel, ARCHS["sm_90a"])
    print("compiled" if callable(function) else function)
"""


@pytest.mark.slow
def test_a_bare_image(tmp_path):
    """Check that ``info``, tuned choices and kernels work without optional packages, a home folder and a passwd entry.

    A single warning names the environment variable to set, and no folder is created.
    """
    variables = variables_of()
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["compiled"] * 2
    assert "off: there is no home folder" in done.stdout
    assert done.stderr.count("TORCH_CUTE_OPS_CACHE_DIR") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_warmup_without_a_device(monkeypatch, capsys):
    monkeypatch.setattr(info, "archs_here", lambda: [])
    assert main(["warmup", "fp4_quantize", "--hidden", "64", "--dtype", "bf16"]) == 2
    assert "pass --arch" in capsys.readouterr().err


OPTIONS = {
    "moe_route": "--experts 16 --dtype fp32 --topk 2 --scoring sigmoid --num-groups 4 --topk-groups 2 --bias --masked "
    "--no-renormalize",
    "moe_permute_fp8quant": "--hidden 256 --dtype bf16 --topk 4",
    "moe_swiglu_fp8quant": "--hidden 512 --dtype fp16 --no-offsets",
    "moe_finalize": "--hidden 256 --dtype bf16 --topk 4 --residual",
    "grouped_mm_fp8": "--n 256 --k 512 --experts 4 --masked --m 16",
    "fp4_quantize": "--hidden 256 --dtype bf16 --scale-format e4m3",
    "qkv_norm_rope_append": "--head-dim 128 --dtype bf16 --q-heads 8 --kv-heads 2 --q-norm-dtype fp32 --no-interleaved "
    "--rotary-dim 64 --key-dtype float8_e4m3fn --value-dtype uint8 --position-dtype int32 --k-scale",
}


@pytest.mark.parametrize("op", OPTIONS)
def test_options_become_properties(op, monkeypatch, capsys):
    """Check that each option of the command line becomes a property of the job."""
    given, words = [], OPTIONS[op].split()
    monkeypatch.setattr(deployment, "compile_jobs", lambda jobs, *_: given.extend(jobs) or (outcome for outcome in ()))
    assert main(["warmup", op, *words, "--arch", "sm_90a"]) == 0
    (job,) = given
    properties = dict(job.properties)
    assert len(properties) == sum(word.startswith("--") for word in words)
    assert all(properties[word[5:]] is False for word in words if word.startswith("--no-"))
    (kernel,) = torch_cute_ops.registry.kernels_of(op, "sm_90a", **properties)
    if op == "moe_route":
        config = kernel.config
        assert config.is_sigmoid and config.has_bias and config.is_masked and not config.renormalize
        assert (config.experts, config.topk, config.num_groups, config.topk_groups) == (16, 2, 4, 2)


@pytest.mark.parametrize("op", op_cases())
def test_properties_of_each_op(op):
    """Check that ``properties_of`` lists every static property of the samples, and marks required properties."""
    stated, known = properties_for(op), torch_cute_ops.properties_of(op.name)
    assert stated.keys() <= known.keys() and "device" not in known
    assert all(stated[name] for name, each in known.items() if each.is_required)
    (job,) = deployment.jobs_of(op.name, **stated)
    assert dict(job.properties) == stated


def test_a_property_is_of_one_kind():
    """Check that the kind of a property is the same in all ops, because its command-line option either takes values or
    is a switch."""
    kinds = {(name, each.kind) for op in OPS for name, each in torch_cute_ops.properties_of(op).items()}
    assert len(kinds) == len(dict(kinds))


NEW_PROPERTIES = {
    "width": Property(int, inspect.Parameter.empty, False),
    "shade": Property(str, None, True, ("red", "green")),
    "glossy": Property(bool, False, False),
    "ink": Property(torch.dtype, torch.float16, False),
    "frame": Property(str, "oak", False, ("oak", "ash")),
}


def test_a_new_op_needs_no_edit(monkeypatch, capsys):
    """Check that the command line accepts, checks and prints the properties of a newly defined op."""
    path = SimpleNamespace(example=lambda **_: {}, statics=NEW_PROPERTIES)
    spec = SimpleNamespace(name="new_op", path=path, kernels=lambda arch: (), has_backends=False)
    monkeypatch.setitem(OPS, "new_op", spec)
    assert torch_cute_ops.properties_of("new_op") == NEW_PROPERTIES
    given = []
    monkeypatch.setattr(deployment, "compile_jobs", lambda jobs, *_: given.extend(jobs) or (outcome for outcome in ()))
    arguments = ["warmup", "new_op", "--width", "7", "8", "--shade", "red", "--no-glossy", "--ink", "bf16"]
    assert main([*arguments, "--frame", "oak", "--arch", "sm_90a"]) == 0
    rest = {"shade": "red", "glossy": False, "ink": torch.bfloat16, "frame": "oak"}
    assert [dict(job.properties) for job in given] == [{"width": width, **rest} for width in (7, 8)]
    assert main([*arguments[:4], "--shade", "blue", "--arch", "sm_90a"]) == 2
    assert 'new_op: shade = "blue": expected one of "red", "green"' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    assert "--glossy, --no-glossy" in capsys.readouterr().out


@pytest.mark.parametrize("op", op_cases())
def test_wrong_properties_name_the_op(op):
    properties = properties_for(op)
    for name in ("colour", "device"):
        with pytest.raises(TypeError, match=rf"^cute::{op.name}\b.*{name}"):
            torch_cute_ops.registry.kernels_of(op.name, "sm_90a", **properties, **{name: 0})
    needed = next(name for name in ("k", "hidden", "experts", "head_dim", "dtype") if name in properties)
    del properties[needed]
    with pytest.raises(TypeError, match=rf"^cute::{op.name} needs the property {needed}"):
        torch_cute_ops.registry.kernels_of(op.name, "sm_90a", **properties)


def test_device_0_is_a_device(monkeypatch):
    """Check that ``device=0`` means CUDA device 0, not the current device or a CPU."""
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
    stated = [(job.op, dict(job.properties)) for job in jobs]
    bf16 = torch.bfloat16
    assert [f["hidden"] for _, f in stated] == [4096, 4096, 7168, 7168, 7168]
    assert [f.get("weight_dtype") for _, f in stated] == [bf16, torch.float32, bf16, torch.float32, None]
    assert stated[0] == (
        "add_rmsnorm_fp4quant",
        {"hidden": 4096, "dtype": bf16, "weight_dtype": bf16, "scale_layout": "128x4"},
    )
    assert stated[4][1]["granularity"] == "block128"
    path.write_text(FILE + FILE)
    assert deployment.read(path) == jobs


KERNEL = '[[kernel]]\nop = "mm_fp4"\nn = 64\nk = 128\n'
SIZES = ", ".join(map(str, range(1, 1001)))
BAD_FILES = {
    "": "expected one or more tables",
    "kernel = 3": "expected one or more tables",
    "kernel = [3]": "[[kernel]] 1: 3: expected a table",
    "other = 3\n" + FILE: "expected one or more tables [[kernel]], and nothing else",
    FILE + "[[kernel]]\nhidden = 64": "[[kernel]] 3: op: missing",
    "[[kernel]]\nop = 3": "[[kernel]] 1: 3 is no op; the ops are add_rmsnorm, add_rmsnorm_fp4quant",
    "[[kernel]]\nop = []": "[[kernel]] 1: [] is no op",
    '[[kernel]]\nop = "mm_fp5"': '[[kernel]] 1 (mm_fp5): "mm_fp5" is no op; the ops are',
    '[[kernel]]\nop = "mm_fp4"\nn = 64': "[[kernel]] 1 (mm_fp4): k: missing; mm_fp4 needs it",
    FILE + KERNEL + "m = 0": "[[kernel]] 3 (mm_fp4): m = 0: expected a positive integer",
    KERNEL + "m = [8, -1]": "[[kernel]] 1 (mm_fp4): m = -1: expected a positive integer",
    KERNEL + "m = true": "[[kernel]] 1 (mm_fp4): m = true: expected a positive integer",
    KERNEL + "m = 8.0": "[[kernel]] 1 (mm_fp4): m = 8.0: expected a positive integer",
    KERNEL + "m = [[8]]": "[[kernel]] 1 (mm_fp4): m = [8]: expected a positive integer",
    KERNEL + "m = 2020-01-01": "[[kernel]] 1 (mm_fp4): m = datetime.date(2020, 1, 1): expected a positive integer",
    KERNEL + "m = []": "[[kernel]] 1 (mm_fp4): m = []: expected at least one value",
    KERNEL + f"m = {2**63}": f"[[kernel]] 1 (mm_fp4): m = {2**63}: expected an integer of at most {2**63 - 1}",
    KERNEL + f"m = {10**18}\n": "[[kernel]] 1 (mm_fp4): mm_fp4 n=64 k=128 m=1000000000000000000: Storage size",
    KERNEL + 'alpha = "no"': '[[kernel]] 1 (mm_fp4): alpha = "no": expected one of "one", "column", "expert"',
    KERNEL + 'alpha = "expert"': "[[kernel]] 1 (mm_fp4): cute::mm_fp4: alpha is 'expert'; expected one of 'one', 'col",
    KERNEL + "alpha = 1": "[[kernel]] 1 (mm_fp4): alpha = 1: expected one of",
    KERNEL + "backend = 1": "[[kernel]] 1 (mm_fp4): backend = 1: expected a string",
    KERNEL
    + 'scale_layout = "tiled"': '[[kernel]] 1 (mm_fp4): scale_layout = "tiled": expected one of "linear", "128x4"',
    KERNEL + "alfa = true": "[[kernel]] 1 (mm_fp4): alfa: no property of mm_fp4; expected one of n, k",
    KERNEL + 'device = "cuda"': "[[kernel]] 1 (mm_fp4): device: no property of mm_fp4",
    KERNEL + "experts = 4": "[[kernel]] 1 (mm_fp4): experts: no property of mm_fp4",
    KERNEL + f'out_dtype = "{"x" * 1000}"': '[[kernel]] 1 (mm_fp4): out_dtype = "xxxx',
    '[[kernel]]\nop = "fp4_quantize"\nhidden = 64\ndtype = "fp8"': (
        '[[kernel]] 1 (fp4_quantize): dtype = "fp8": expected a dtype: one of bfloat16, bf16'
    ),
    '[[kernel]]\nop = "fp4_quantize"\nhidden = 64\ndtype = "bf16"\nglobal_scale = "no"': (
        '[[kernel]] 1 (fp4_quantize): global_scale = "no": expected true or false'
    ),
    f'[[kernel]]\nop = "mm_fp4"\nn = [{SIZES}]\nk = [{SIZES}]\nm = [{SIZES}]': (
        "[[kernel]] 1 (mm_fp4): 1000 n × 1000 k × 1000 m are 1,000,000,000 combinations; the limit is 10,000"
    ),
    "".join(f'[[kernel]]\nop = "mm_fp4"\nn = [{SIZES}]\nk = {64 * i}\nm = [1, 2, 3, 4]\n' for i in (1, 2, 3)): (
        "the first 3 tables [[kernel]] stand for 12,000 calls; the limit is 10,000"
    ),
    "[[kernel": "not TOML: ",
    "kernel = " + "[" * 100_000: "not TOML: nested too deeply",
    "\udcff": "not TOML: ",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=lambda content: BAD_FILES[content][:60])
def test_bad_files(content, tmp_path):
    """Check that the error names the file, table, op and key, and the expected value."""
    path = tmp_path / "deployment.toml"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {BAD_FILES[content]}')}") as raised:
        deployment.read(path)
    assert len(str(raised.value)) < 1200  # a list of all ops is the longest message


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_other_kinds_of_files_are_refused(kind, tmp_path):
    path = tmp_path / "deployment.toml"
    {"a FIFO": os.mkfifo, "a folder": os.mkdir, "a device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(ValueError, match=f"{path} is not a regular file"):
        deployment.read(path)


def test_prepare_needs_a_device(tmp_path, monkeypatch):
    path = tmp_path / "deployment.toml"
    path.write_text(FILE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        deployment.prepare(path)


@pytest.mark.gpu
def test_prepare(tmp_path, monkeypatch, cache):
    """Check that after ``prepare`` the calls in the file compile nothing and can be captured."""
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
