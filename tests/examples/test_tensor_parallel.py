"""Tests of examples/tensor_parallel.py: with two ranks under torchrun, and with four processes forked by the test."""

import importlib
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.multiprocessing as mp
from support.example_scripts import EXAMPLES, run_main
from support.interpreters import variables_of
from support.ranks import free_port

pytest.importorskip("safetensors")

SMALL = ("--layers", "1", "--hidden", "256", "--intermediate", "256", "--tokens", "16", "--experts", "4")


@pytest.fixture
def script(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("tensor_parallel")


@pytest.mark.slow
def test_two_ranks_under_torchrun() -> None:
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    )
    run = (*command, str(EXAMPLES / "tensor_parallel.py"), *SMALL)
    env = variables_of(CUDA_VISIBLE_DEVICES="", PYTHONFAULTHANDLER="1")
    done = subprocess.run(run, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_said(done.stdout, 2)


def test_four_ranks(script, capfd) -> None:
    mp.start_processes(main_of_rank, args=(4, free_port(), script.main), nprocs=4, start_method="fork")
    assert_said(capfd.readouterr().out, 4)


def main_of_rank(rank, world, port, main) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.cuda.is_available = lambda: False  # pretend that no GPU exists, because a forked process cannot use it
    status = main([*SMALL])
    if status:
        sys.exit(status)


def assert_said(out: str, world: int) -> None:
    """Check the script's output: all results are equal, and only codes and scales are gathered."""
    assert out.strip().splitlines()[-1] == "SUCCESS: every check passed"
    assert f"{world} on gloo" in out
    elements = 2 * 16 // world * 256
    gathered = f"gathered   {elements * 9 // 16:,} bytes of a rank; bf16 would take {elements * 2:,}, a factor of 3.56"
    assert gathered in out
    assert f"scattered  {2 * 16 * 256 * 4:,} bytes" in out
    (error,) = re.findall(r"result +([\d.]+)", out)
    assert float(error) < 0.02
    assert out.count("0.00000 from one rank, equal to the bit") == 2
    own, whole = re.findall(r"model .* ([\d,]+) bytes on a rank, ([\d,]+) in all", out)[0]
    assert int(own.replace(",", "")) * world < int(whole.replace(",", "")) * 1.25


def test_alone_it_says_how_to_run_it(script, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"torchrun --nproc-per-node 2 examples/tensor_parallel.py"):
        script.main([])


def test_wrong_results_are_found(script, monkeypatch, capsys) -> None:
    """Check that the script fails if a rank's results are far off."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "WORLD_SIZE": 1}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "relative", lambda got, want: 1.0)
    _, last = run_main(script, capsys, *SMALL, status=1)
    assert last.startswith(
        "FAILURE: rank 0: the decoder is off by 1; rank 0: experts are off by 1; rank 0: experts with "
    )
