"""Ranks that mismatch, come late, fail or die, as real processes: the errors name these ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.processes import wait_until
from support.ranks import free_port
from torch import nn

from torch_cute_ops.distributed import check_ranks, compare, start, watched_ranks

WORLD = 3
LIMIT = 30.0
"""Time-out of the process group in seconds. No test should have to wait for it."""


def outcomes(function: Any, folder: Path, *, dead: int | None = None) -> dict[int, Any]:
    """Return the result of ``function(rank)``, or its error, for each rank except the rank that is meant to die."""
    context, port = mp.get_context("fork"), free_port()
    processes = [context.Process(target=_main, args=(rank, port, function, folder)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    left = [rank for rank in range(WORLD) if rank != dead]
    assert wait_until(lambda: all((folder / f"{rank}.json").exists() for rank in left), LIMIT)
    (folder / "done").touch()
    for process in processes:
        process.join(LIMIT)
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in left}


def _main(rank: int, port: int, function: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_cute_ops").addHandler(handler)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    began = time.monotonic()
    try:
        answer = function(rank)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    text = json.dumps({"answer": answer, "seconds": time.monotonic() - began, "log": lines})
    (folder / f"{rank}.part").write_text(text)
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    if rank == 0:  # rank 0 hosts the store, so it ends last
        wait_until((folder / "done").exists, LIMIT)
    os._exit(0)  # do not wait for dead ranks in the shutdown handshake


def checks(rank: int) -> list[str]:
    """Check ranks that are equal; then ranks with a different fact, shape, dtype or version; then a missing rank."""
    model = nn.Linear(4, 4)
    found = []

    def check(*given: Any, timeout_s: float = LIMIT, **facts: Any) -> None:
        try:
            check_ranks(*given, timeout_s=timeout_s, **facts)
            found.append("")
        except RuntimeError as error:
            found.append(str(error))

    check()
    check(model, batch=3, sizes=(1, 2))
    check(model, batch=4 if rank == 1 else 3)
    check(nn.Linear(4, 5) if rank == 2 else model)
    check(model.bfloat16() if rank == 0 else nn.Linear(4, 4))
    real, start.__version__ = start.__version__, "0.0" if rank == 1 else start.__version__
    check()
    start.__version__ = real
    check(nn.Sequential(*[nn.Linear(2, 2 + (rank == 1))] * 1, *[nn.Linear(2, 2 + (rank == 1)) for _ in range(4)]))
    if rank != 2:
        check(timeout_s=1.0)
    return found


def test_check_ranks(tmp_path):
    found = outcomes(checks, tmp_path)
    expected = (
        r"",
        r"",
        r"check_ranks: rank 1 differs: batch is 4, on rank 0 3",
        r"check_ranks: rank 2 differs: weight is 'Linear \(5, 4\) .*', on rank 0 'Linear \(4, 4\) .*; bias is .*",
        r"check_ranks: rank 1 differs: weight is 'Linear \(4, 4\) torch.float32', on rank 0 '.*bfloat16'; bias is .*",
        r"check_ranks: rank 1 differs: torch_cute_ops is '0.0', on rank 0 '.*'",
        r"check_ranks: rank 1 differs: 0.weight is .*; 0.bias .*; 1.weight .*; 1.bias .*; and 6 more",
        r"check_ranks: rank 2 did not come within 1 s",
    )
    for rank, each in found.items():
        answers = each["answer"]
        assert len(answers) == len(expected) - (rank == 2)
        for answer, pattern in zip(answers, expected, strict=False):
            assert re.fullmatch(pattern, answer), answer
        assert each["seconds"] < LIMIT / 2


def test_a_single_rank_compares_nothing():
    check_ranks(nn.Linear(2, 2))
    with watched_ranks():
        pass


def work_with_one_that_dies(rank: int) -> None:
    with watched_ranks(timeout_s=2.0):
        for step in range(1000):
            if rank == 1 and step == 3:
                os._exit(9)
            dist.all_reduce(torch.ones(4))


def work_with_one_that_fails(rank: int) -> None:
    with watched_ranks(timeout_s=2.0):
        for step in range(1000):
            if rank == 1 and step == 3:
                raise ValueError("no such page")
            if rank == 1 or step < 3:
                dist.all_reduce(torch.ones(4))
            else:
                dist.recv(torch.ones(4), 1)


def one_is_silent(rank: int) -> str:
    """Let rank 1 stop reporting that it is alive, like a host that hangs, while no call fails. An error that rank 1
    raised in an earlier block must not count."""
    with contextlib.suppress(ValueError), watched_ranks(timeout_s=LIMIT):
        if rank == 1:
            raise ValueError("of an earlier block")
    dist.barrier()
    with watched_ranks(timeout_s=0.5):
        if rank == 1:
            start._Watch._beat = lambda watch: None
        time.sleep(2.0)
    return "went on"


def test_a_rank_that_dies_is_named(tmp_path):
    for rank, each in outcomes(work_with_one_that_dies, tmp_path, dead=1).items():
        pattern = rf"RuntimeError: rank {rank}: rank 1 \(host .+, process \d+\) is gone; the error on this rank: "
        assert re.match(pattern, each["answer"]), each
        assert each["seconds"] < LIMIT / 2


def test_a_rank_that_fails_is_named_with_its_error(tmp_path):
    found = outcomes(work_with_one_that_fails, tmp_path)
    assert found[1]["answer"] == "ValueError: no such page"
    for rank in (0, 2):
        said = "\n".join([str(found[rank]["answer"]), *found[rank]["log"]])
        assert re.search(r"rank 1 \(host .+, process \d+\) ended with ValueError: no such page", said), said


@pytest.mark.timing
def test_a_rank_that_gives_no_sign_is_named(tmp_path):
    found = outcomes(one_is_silent, tmp_path)
    assert [each["answer"] for each in found.values()] == ["went on"] * WORLD
    for rank in (0, 2):
        assert any(re.match(r"rank 1 \(.+\) gave no sign for 0.5 s", line) for line in found[rank]["log"])
        assert not any("earlier block" in line for line in found[rank]["log"])


def test_a_lost_store_is_reported(monkeypatch):
    class Gone:
        def set(self, *_: Any) -> None:
            raise RuntimeError("connection reset")

        check = get = set

    watch = start._Watch(start.Ranks(Gone(), 1, 2), 2.0, "prefix")
    assert "the store of the process group is gone" in watch.gone_after(RuntimeError())
    monkeypatch.setattr(compare, "members", lambda group: compare.Members(start.Ranks(Gone(), 1, 2), [0, 1]))
    with pytest.raises(RuntimeError, match="check_ranks: rank 1 cannot reach the store: connection reset"):
        check_ranks()
