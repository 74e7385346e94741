"""Compiled kernels on disk: what is valid, what is put aside, and many processes at once."""

import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.fake_kernel import PROBLEM, SM90, FakeKernel
from support.interpreters import variables_of

from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.store import DESCRIPTION, OBJECT, Damaged, Store

FORK = multiprocessing.get_context("fork")
MEGABYTE = 2**20


def digest(text):
    return hashlib.sha256(str(text).encode()).hexdigest()


def content_of(name):
    """An object file's stand-in: some pages, told by its digest alone."""
    return hashlib.sha256(name.encode()).digest() * 512


def write(name):
    return lambda path: path.write_bytes(content_of(name))


def read(path, symbol):
    return path.read_bytes(), symbol


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, MEGABYTE)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# One process


def test_what_is_saved_is_loaded(store):
    name = digest(1)
    assert store.load(name, read) is None
    assert store.save(name, "the key", "symbol", write(name))
    assert store.load(name, read) == (content_of(name), "symbol")
    assert store.read(name).key == "the key"
    assert store.load(digest(2), read) is None
    assert names_in(store.root / "work") == []


def test_saving_twice_keeps_the_first(store):
    name = digest(1)
    store.save(name, "key", "first", write(name))
    assert store.save(name, "key", "second", write("other"))
    assert store.load(name, read) == (content_of(name), "first")
    assert names_in(store.root / "work") == []


def truncate(folder):
    (folder / OBJECT).write_bytes((folder / OBJECT).read_bytes()[:-1])


def flip(folder):
    content = bytearray((folder / OBJECT).read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    (folder / OBJECT).write_bytes(content)


DAMAGES = {
    "truncated": truncate,
    "a bit": flip,
    "empty": lambda folder: (folder / OBJECT).write_bytes(b""),
    "no object": lambda folder: (folder / OBJECT).unlink(),
    "no description": lambda folder: (folder / DESCRIPTION).unlink(),
    "no JSON": lambda folder: (folder / DESCRIPTION).write_text("{"),
    "another format": lambda folder: (folder / DESCRIPTION).write_text('{"version": 7}'),
    "a list": lambda folder: (folder / DESCRIPTION).write_text("[]"),
    "binary": lambda folder: (folder / DESCRIPTION).write_bytes(b"\xff\xfe\x00"),
    "a folder": lambda folder: ((folder / OBJECT).unlink(), (folder / OBJECT).mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_kernel_is_put_aside(store, damage, caplog):
    """With one line in the log; what is saved anew is found."""
    name = digest(1)
    store.save(name, "key", "symbol", write(name))
    DAMAGES[damage](store.root / name)
    os.utime(store.root / name, (1000, 1000))
    with caplog.at_level(logging.WARNING, "torch_cute_ops"):
        assert store.load(name, read) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text and "put aside" in caplog.text
    assert len(names_in(store.root / "aside")) == 1
    assert store.save(digest(2), "key", "symbol", write("2"))  # which prunes
    assert len(names_in(store.root / "aside")) == 1
    caplog.clear()
    assert store.load(name, read) is None and not caplog.records
    assert store.save(name, "key", "symbol", write(name))
    assert store.load(name, read) == (content_of(name), "symbol")


def test_what_cannot_be_loaded_is_put_aside(store, caplog):
    """Such as an object file of another machine, whole as it is."""

    def refuse(path, symbol):
        raise Damaged("no such symbol")

    name = digest(1)
    store.save(name, "key", "symbol", write(name))
    assert store.load(name, refuse) is None
    assert "no such symbol" in caplog.text
    assert store.load(name, read) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError("no")])
def test_where_nothing_can_be_written(store, caplog, error):
    """One warning, and never again an attempt; what is there is still read."""
    here = digest(1)
    store.save(here, "key", "symbol", write(here))

    def fail(path):
        path.write_bytes(b"half")
        raise error

    for i in range(3):
        assert not store.save(digest(2), "key", "symbol", fail if i == 0 else write("2"))
    assert len(caplog.records) == 1 and "stay in memory" in caplog.text
    assert names_in(store.root / "work") == []
    assert store.load(digest(2), read) is None
    assert store.load(here, read) == (content_of(here), "symbol")


def test_where_there_is_no_folder(tmp_path, caplog):
    """A file where the folder should be: kernels stay in memory, locks do without."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file", MEGABYTE)
    assert store.load(digest(1), read) is None
    with store.writing(digest(1)):
        assert not store.save(digest(1), "key", "symbol", write("1"))
    assert len(caplog.records) == 1


def test_the_least_recently_used_go_first(tmp_path):
    size = len(content_of(""))
    store = Store(tmp_path, 4 * size)
    names = [digest(i) for i in range(4)]
    for age, name in enumerate(reversed(names)):
        store.save(name, "key", "symbol", write(name))
        os.utime(store.root / name / DESCRIPTION, (1000 - age, 1000 - age))
    # names[0] is the oldest by now, but is used.
    assert store.load(names[0], read)
    for new in (digest("a"), digest("b")):
        store.save(new, "key", "symbol", write(new))
    assert {name for name, _ in store.entries()} == {names[0], names[3], digest("a"), digest("b")}
    assert names_in(store.root / "work") == []


def test_a_kernel_larger_than_the_limit_is_kept(tmp_path):
    store = Store(tmp_path, 1)
    store.save(digest(1), "key", "symbol", write("1"))
    store.save(digest(2), "key", "symbol", write("2"))
    assert [name for name, _ in store.entries()] == [digest(2)]


def test_what_dead_writers_left_is_swept(store):
    old, young = store.root / "work" / "1-old", store.root / "work" / "2-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1000, 1000))
    store.save(digest(1), "key", "symbol", write("1"))
    assert names_in(store.root / "work") == ["2-young"]


def test_clear(store):
    for i in range(3):
        store.save(digest(i), "key", "symbol", write(str(i)))
    assert store.clear() == 3
    assert list(store.entries()) == [] and store.load(digest(0), read) is None


# Many processes


def compile_all(root, names, log_path, barrier):
    """What a process does that needs these kernels: load each, or compile and save it."""
    store = Store(Path(root), MEGABYTE)
    barrier.wait()
    for name in names:
        if store.load(name, read) is None:
            with store.writing(name):
                if store.load(name, read) is None:
                    time.sleep(0.01)
                    with open(log_path, "a") as log:
                        log.write(f"{name}\n")
                    store.save(name, "key", "symbol", write(name))
        assert store.load(name, read) == (content_of(name), "symbol")


def test_sixteen_cold_processes_compile_each_kernel_once(tmp_path):
    names = [digest(i) for i in range(10)]
    log = tmp_path / "compiled"
    barrier = FORK.Barrier(16)
    processes = [
        FORK.Process(target=compile_all, args=(tmp_path / "cache", random.sample(names, 10), log, barrier))
        for _ in range(16)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    assert sorted(log.read_text().split()) == sorted(names)


def save_for_ever(root):
    store = Store(Path(root), 20 * len(content_of("")))
    while True:
        name = digest(random.randrange(30))
        if store.load(name, read) is None:
            with store.writing(name):
                store.save(name, "key", "symbol", write(name))


def test_killed_writers_leave_nothing_that_trips(tmp_path, caplog):
    """Many processes killed at random moments of writing, pruning and locking, some side by side."""
    for _ in range(50):
        processes = [FORK.Process(target=save_for_ever, args=(tmp_path,)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            time.sleep(random.uniform(0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    store = Store(tmp_path, MEGABYTE)
    for name, _ in list(store.entries()):
        assert store.load(name, read) == (content_of(name), "symbol")
    for i in range(30):
        with store.writing(digest(i), patience=1.0):
            store.save(digest(i), "key", "symbol", write(digest(i)))
        assert store.load(digest(i), read) == (content_of(digest(i)), "symbol")
    assert not caplog.records


# With the compiler


def test_key_ingredients(monkeypatch):
    """Each makes another digest: class, config, arguments, architecture, options, versions, flavour, environment,
    processor, sources; and the digest is a property of their values alone."""
    kernel = FakeKernel(row_quant.plan(PROBLEM, SM90))
    key = compiler.key_of(kernel, SM90)
    fields = {field: getattr(key, field) for field in key.__dataclass_fields__}
    assert set(fields) == {
        *("kernel", "config", "arguments", "arch", "options", "versions", "flavour", "environment", "host", "sources")
    }
    digests = {key.digest}
    for field, value in fields.items():
        other = (*value, "x") if isinstance(value, tuple) else f"{value}x"
        digests.add(compiler.Key(**{**fields, field: other}).digest)
    assert len(digests) == len(fields) + 1
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert compiler.key_of(kernel, SM90).digest != key.digest
    monkeypatch.setattr(compiler, "kernel_digest", lambda: "other")
    assert compiler.key_of(kernel, SM90).sources == "other"


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message).30s")
import torch
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels.row_quant import KERNEL, Problem, plan
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel
problem = Problem("rows", torch.bfloat16, None, 64, 64, NVFP4, SCALE_LAYOUTS["linear"], False, False, False)
arch = ARCHS["sm_90a"]
function = compile_kernel(Wanted(KERNEL, plan(problem, arch)), arch)
try:
    function(*[torch.zeros(4, 4)] * 12)
except Exception as error:
    print("refused", type(error).__name__)
"""


def program(folder, **environment):
    variables = variables_of(TORCH_CUTE_OPS_CACHE_DIR=str(folder), **environment)
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=variables, text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_processes_share_real_kernels(tmp_path):
    """Started cold at once, one compiles and the others load; later ones load; damage is compiled over."""
    outputs = [process.communicate()[0] for process in [program(tmp_path) for _ in range(3)]]
    assert sorted(output.split()[1] for output in outputs) == ["compiled", "loaded", "loaded"], outputs
    later = program(tmp_path).communicate()[0]
    # Loaded functions check their arguments before they launch; a CPU tensor is not theirs.
    assert later.split()[1] == "loaded" and "refused ValueError" in later
    (entry,) = Store(tmp_path, MEGABYTE).entries()
    truncate(entry[1])
    damaged = program(tmp_path).communicate()[0].splitlines()
    assert [line.split()[:2] for line in damaged[:2]] == [["WARNING", "kernel"], ["INFO", "compiled"]], damaged
    assert program(tmp_path, TORCH_CUTE_OPS_CACHE="0").communicate()[0].split()[1] == "compiled"
    shutil.rmtree(tmp_path)
    tmp_path.write_text("in the way")
    assert "compiled" in program(tmp_path).communicate()[0]


def test_settings_of_the_store(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(settings, "CACHE_MB", 3)
    store = compiler.store()
    assert store.root.parent == tmp_path and store.limit == 3 * MEGABYTE
    monkeypatch.setattr(settings, "CACHE_DIR", None)
    assert "torch_cute_ops" in str(compiler.store().root)
    monkeypatch.setattr(settings, "CACHE", False)
    assert compiler.store() is None


def test_torch_dtypes_print_alike():
    """The digest is of what the key prints: nothing in it may print an address."""
    key = compiler.key_of(FakeKernel(row_quant.plan(PROBLEM, SM90)), SM90)
    assert " at 0x" not in repr(key) and repr(torch.bfloat16) in repr(key)
