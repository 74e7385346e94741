"""Ranks of ``torch.distributed`` that agree on tuned choices, with simulated clocks."""

import json
import logging
import os
import socket
import threading
import time

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from support.tuner_model import A, B, C, Clock, empty_file, key_of

from torch_cute_ops.runtime import settings, tuner, tuning
from torch_cute_ops.runtime.agreement import Ranks, agree
from torch_cute_ops.runtime.tuning_file import Tuned, TuningFile

file = pytest.fixture(autouse=True)(empty_file)

TIMEOUT = 20.0
"""Time-out in seconds, which no test may reach."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(world, function, folder, store="tcp"):
    """Run ``function(rank)`` on each rank; return its result, duration and log."""
    method = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{folder}/store"
    mp.start_processes(rank_main, args=(world, function, folder, method), nprocs=world, start_method="fork")
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(world)]


def rank_main(rank, world, function, folder, method):
    settings.TUNING = folder / f"tuning{rank}.json"
    tuner.forget()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torch_cute_ops").addHandler(handler)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    started = time.monotonic()
    answer = function(rank)
    seconds = time.monotonic() - started
    (folder / f"rank{rank}").write_text(json.dumps({"answer": answer, "seconds": seconds, "log": lines}))
    if method.startswith("tcp"):
        # Rank 0 hosts the store, so it ends after all other ranks.
        while not all((folder / f"rank{other}").exists() for other in range(world)):
            time.sleep(0.01)
    dist.destroy_process_group()


def agreed(clock, **block):
    return [*clock.tune(**{"timeout_s": TIMEOUT, **block})]


def by_sum(rank):
    """Tune candidates A, B and C: B is fastest on rank 0, C on rank 1, and A in total. On rank 2, B is wrong."""
    seconds = ({A: 3.0, B: 1.0, C: 9.0}, {A: 3.0, B: 9.0, C: 2.0}, {A: 3.0, B: 0.1, C: 9.0})[rank]
    first = Clock(seconds, wrong=[B] if rank == 2 else [])
    answers = [agreed(first), agreed(first), len(first.timed)]
    # Rank 1 knows an earlier choice. All ranks use it, and rank 1 times nothing.
    second = Clock(seconds, bucket=16)
    if rank == 1:
        TuningFile(settings.TUNING).add(second.problem.key, Tuned(C, 1.0))
        tuner.forget()
    answers += [agreed(second), len(second.timed) if rank == 1 else 0]
    kept = {key.bucket: [*tuned.candidate] for key, tuned in TuningFile(settings.TUNING).read().items()}
    return [*answers, kept]


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_ranks_choose_by_the_sum_of_their_times(tmp_path, store):
    ranks = run_ranks(3, by_sum, tmp_path, store)
    a, c = ["a", [1]], ["b", []]
    assert [rank["answer"] for rank in ranks] == [[a, a, 1, c, 0, {"8": a, "16": c}]] * 3
    assert max(rank["seconds"] for rank in ranks) < TIMEOUT


def one_fails(rank):
    """Tune while rank 1 raises, then while all ranks raise, then while rank 1 is interrupted. No rank may wait."""
    seconds = {A: 3.0, B: 2.0, C: 9.0}
    error = RuntimeError("out of memory on this rank")
    answers = [agreed(Clock(error if rank == 1 else seconds))]
    for _ in range(2):
        answers.append(agreed(Clock(error, bucket=16)))
    answers.append(agreed(Clock(seconds, bucket=16)))
    clock = Clock(KeyboardInterrupt() if rank == 1 else {A: 2.0, B: 3.0, C: 9.0}, bucket=24)
    try:
        answers.append(agreed(clock))
    except KeyboardInterrupt:
        answers.append("interrupted")
    return answers


def test_a_failed_rank_delays_nobody(tmp_path):
    ranks = run_ranks(2, one_fails, tmp_path)
    a, b = ["a", [1]], ["a", [2, "x"]]
    assert [rank["answer"] for rank in ranks] == [[b, a, a, b, a], [b, a, a, b, "interrupted"]]
    assert max(rank["seconds"] for rank in ranks) < TIMEOUT
    log = "\n".join(ranks[0]["log"])
    assert "cute::some_op: tuning failed on rank 1: RuntimeError: out of memory on this rank" in log
    assert "nothing is tuned; calls use the estimated best, a [1]" in log
    assert "tuning failed on rank 1: KeyboardInterrupt" in log


def last_is_late(rank):
    """Tune so that rank 2 arrives, with different times, after the other ranks decided without it."""
    if rank == 2:
        time.sleep(4.0)
    clock = Clock({A: 0.1, B: 9.0, C: 9.0} if rank == 2 else {A: 3.0, B: 2.0, C: 9.0})
    return agreed(clock, timeout_s=1.0)


def first_never_comes(rank):
    """Tune without rank 0. The other ranks wait for it once in a block, for twice the time-out, and then agree without
    it."""
    if rank == 0:
        return None
    seconds = {A: 3.0, B: 2.0, C: 9.0} if rank == 1 else {A: 3.0, B: 2.5, C: 1.0}
    with tuning.autotune(timeout_s=1.0):
        tuner.tune(Clock(seconds).problem)
        first = time.monotonic()
        tuner.tune(Clock({A: 1.0, B: 2.0, C: 9.0}, bucket=16).problem)
        assert time.monotonic() - first < 1.0
    return [[*tuner.lookup(key_of(bucket))] for bucket in (8, 16)]


def test_waiting_for_the_last_rank_is_bounded(tmp_path):
    ranks = run_ranks(3, last_is_late, tmp_path)
    assert [rank["answer"] for rank in ranks] == [["a", [2, "x"]]] * 3
    assert all(0.9 < rank["seconds"] < 3.9 for rank in ranks[:2])
    assert any("ranks [2] did not answer in time" in line for line in ranks[0]["log"])


def test_waiting_for_the_first_rank_is_bounded(tmp_path):
    ranks = run_ranks(3, first_never_comes, tmp_path)
    assert ranks[1]["answer"] == ranks[2]["answer"] == [["a", [2, "x"]], ["a", [1]]]
    assert all(1.9 < rank["seconds"] < 4.0 for rank in ranks[1:])


def test_ranks_that_decide_at_once_take_one_decision():
    """Check that two ranks that have given up on rank 0 at the same time, and propose different decisions, use the same
    decision."""
    store, barrier, answers = dist.HashStore(), threading.Barrier(2), {}

    def decide(posts):
        barrier.wait()
        return min(posts.values()) if rank_of[threading.get_ident()] == 1 else max(posts.values())

    rank_of = {}

    def run(rank):
        rank_of[threading.get_ident()] = rank
        absent = set()
        answers[rank] = agree(Ranks(store, rank, 3), "name", f"post {rank}", decide, 0.05, absent)
        assert absent == {0}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[1] == answers[2] in ("post 1", "post 2")


def the_store_dies(rank):
    ready = settings.TUNING.with_name("ready")
    if rank == 0:
        while not ready.exists():
            time.sleep(0.01)
        os._exit(0)
    ready.touch()
    try:
        agreed(Clock({A: 3.0, B: 2.0, C: 9.0}), timeout_s=1.0)
    except RuntimeError as error:
        return str(error)
    return "agreed with nobody"


def test_a_lost_store_is_an_error(tmp_path):
    method = f"tcp://127.0.0.1:{free_port()}"
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(rank, 2, the_store_dies, tmp_path, method), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "rank1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.join()
    answer = json.loads((tmp_path / "rank1").read_text())["answer"]
    assert answer.startswith("rank 1 cannot agree with the others on tune/family/")
