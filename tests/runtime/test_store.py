"""Cache of compiled kernels on disk: valid, damaged and unreadable entries, and many processes at the same time."""

import errno
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fake_kernel import PROBLEM, SM90
from support.interpreters import forked, python_in_each, python_in_groups
from support.processes import kill_at_random

from torch_cute_ops.kernels import row_quant
from torch_cute_ops.runtime import compiler, files, settings
from torch_cute_ops.runtime.store import DESCRIPTION, LIBRARY, OBJECT, Damaged, Store, symbol_of

FORK = multiprocessing.get_context("fork")
MEGABYTE = 2**20


def digest(key):
    return hashlib.sha256(str(key).encode()).hexdigest()


def content_of(key):
    """Return the content of a simulated object file: some pages, and the name of its function."""
    return digest(key).encode() * 256 + b"__tvm_ffi_" + symbol_of(digest(key)).encode()


def write(key, more=b""):
    """Return a function that exports a simulated kernel with this key."""

    def export(path, symbol):
        assert symbol == symbol_of(digest(key))
        path.write_bytes(content_of(key) + more)

    return export


def read(path, symbol):
    return path.read_bytes(), symbol


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, MEGABYTE)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# One process


def test_save_then_load(store):
    name = digest(1)
    assert store.load(name, read) is None
    assert store.save("1", write(1))
    assert store.load(name, read) == (content_of(1), symbol_of(name))
    assert store.read(name).key == "1"
    assert store.load(digest(2), read) is None
    assert names_in(store.root / "work") == []


def test_saving_twice_keeps_the_first(store):
    store.save("1", write(1))
    assert store.save("1", write(1, b"other"))
    assert store.load(digest(1), read) == (content_of(1), symbol_of(digest(1)))
    assert names_in(store.root / "work") == []


def test_only_the_owner_can_write_to_entries(store):
    """Check, for any umask, that only the owner can write to an entry, and that everyone can read it."""
    before = os.umask(0)
    try:
        store.save("1", write(1))
    finally:
        os.umask(before)
    for path in (store.root, store.root / digest(1), *(store.root / digest(1)).iterdir()):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def truncate(folder):
    (folder / OBJECT).write_bytes((folder / OBJECT).read_bytes()[:-1])


def flip(folder):
    content = bytearray((folder / OBJECT).read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    (folder / OBJECT).write_bytes(content)


def describe(folder, **fields):
    """Change fields of an entry's description, with the size and digest of its object file."""
    content = (folder / OBJECT).read_bytes()
    true = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(description | true | fields))


def copy_of_another(*names):
    """Return a function that copies these files of another kernel's entry into an entry."""

    def damage(folder):
        store = Store(folder.parents[1], MEGABYTE)
        store.save("another", write("another"))
        for name in names:
            shutil.copy(folder.parent / digest("another") / name, folder / name)

    return damage


def replace_by(make):
    def damage(folder):
        (folder / OBJECT).unlink()
        make(folder / OBJECT)

    return damage


def bind(path):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # the path may be too long for the name of a socket
        server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


DAMAGES = {
    "truncated": truncate,
    "a bit": flip,
    "empty": lambda folder: (folder / OBJECT).write_bytes(b""),
    "no object": lambda folder: (folder / OBJECT).unlink(),
    "no description": lambda folder: (folder / DESCRIPTION).unlink(),
    "no JSON": lambda folder: (folder / DESCRIPTION).write_text("{"),
    "deep JSON": lambda folder: (folder / DESCRIPTION).write_text("[" * 100_000),
    "another format": lambda folder: (folder / DESCRIPTION).write_text('{"version": 7}'),
    "a list": lambda folder: (folder / DESCRIPTION).write_text("[]"),
    "binary": lambda folder: (folder / DESCRIPTION).write_bytes(b"\xff\xfe\x00"),
    "huge": lambda folder: os.truncate(folder / DESCRIPTION, 10 * MEGABYTE),
    "a size in words": lambda folder: describe(folder, size="large"),
    "no date": lambda folder: describe(folder, created=1e300),
    "a key that is no text": lambda folder: describe(folder, key="\ud800"),
    "a folder": replace_by(Path.mkdir),
    "a FIFO": replace_by(os.mkfifo),
    "a socket": replace_by(bind),
    "a device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "an entry of another kernel": copy_of_another(OBJECT, DESCRIPTION),
    "an object of another kernel": lambda folder: (copy_of_another(OBJECT)(folder), describe(folder)),
    "another symbol": lambda folder: describe(folder, symbol=symbol_of(digest("another"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_deleted(store, damage, caplog):
    """Check that a damaged entry is deleted at once, with one warning, and that the kernel can then be stored again."""
    name = digest(1)
    store.save("1", write(1))
    DAMAGES[damage](store.root / name)
    with pytest.raises(Damaged):
        store.read(name)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "torch_cute_ops"):
        assert store.load(name, read) is None
    assert time.monotonic() - started < 5
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text and "damaged" in caplog.text
    assert not (store.root / name).exists() and names_in(store.root / "work") == []
    caplog.clear()
    assert store.load(name, read) is None and not caplog.records
    assert store.save("1", write(1))
    assert store.load(name, read) == (content_of(1), symbol_of(name))


def test_an_entry_that_is_deleted_while_it_is_read_is_no_damage(store, monkeypatch, caplog):
    name, real = digest(1), files.read
    store.save("1", write(1))

    def read_description(path, limit):
        content = real(path, limit)
        path.parent.rename(store.root / "deleted")
        return content

    monkeypatch.setattr(files, "read", read_description)
    assert store.load(name, read) is None and not caplog.records


def test_an_entry_that_appears_while_it_is_read_is_no_damage(store, monkeypatch, caplog):
    """Check a reader that finds no description just before another process stores the whole entry. The reader must not
    delete the entry as incomplete: the other process needs it right after its compilation."""
    name, real, missed = digest(1), files.read, []

    def read_before_it_appears(path, limit):
        if not missed:
            missed.append(path)
            store.save("1", write(1))
            raise FileNotFoundError(errno.ENOENT, "missing", str(path))
        return real(path, limit)

    store.root.mkdir()
    with monkeypatch.context() as patch:
        saves = iter([read_before_it_appears])
        patch.setattr(files, "read", lambda path, limit: next(saves, real)(path, limit))
        assert store.load(name, read) == (content_of(1), symbol_of(name))
    assert missed and store.has(name) and not caplog.records


def test_only_the_damaged_entry_is_deleted(store, monkeypatch):
    """Check a reader that finds a damaged entry, which another process replaces by a whole entry before the reader
    deletes it. The whole entry must stay."""
    name, real = digest(1), store._delete
    store.save("1", write(1))
    truncate(store.root / name)

    def delete_late(folder, identity=None):
        real(folder)
        Store(store.root.parent, MEGABYTE).save("1", write(1))
        real(folder, identity)

    monkeypatch.setattr(store, "_delete", delete_late)
    assert store.load(name, read) is None
    assert store.load(name, read) == (content_of(1), symbol_of(name))
    assert names_in(store.root / "work") == []


TRANSIENT = [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES]


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
@pytest.mark.parametrize("where", ["reading", "loading"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_unreadable_entry_stays(store, number, where, times, monkeypatch, caplog):
    """Check that a read that fails once is repeated. If it fails twice, the kernel is compiled, and the entry stays."""
    for key in (1, 2):
        store.save(str(key), write(key))
    left = 0

    def fail():
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(number, os.strerror(number))

    def load(path, symbol):
        if where == "loading":
            fail()
        return read(path, symbol)

    real = files.read
    if where == "reading":
        monkeypatch.setattr(files, "read", lambda path, limit: fail() or real(path, limit))
    for key in (1, 2):
        left = times
        found = store.load(digest(key), load)
        assert found == ((content_of(key), symbol_of(digest(key))) if times == 1 else None)
    assert len(caplog.records) == times - 1  # one warning for each kind of error
    assert all(os.strerror(number) in line.getMessage() for line in caplog.records)
    left = 0

    assert store.load(digest(1), load) == (content_of(1), symbol_of(digest(1)))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_a_failed_write_affects_one_kernel(store, caplog, number):
    """Check that each kind of error is logged once, that later kernels are stored, and that stored kernels can be
    read."""
    store.save("1", write(1))

    def fail(path, symbol, number=number):
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    for _ in range(3):
        assert not store.save("2", fail)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(number) in caplog.text and "stay in memory" in caplog.text
    assert os.strerror(number) in store.failure
    assert names_in(store.root / "work") == []
    assert store.load(digest(2), read) is None
    assert store.load(digest(1), read) == (content_of(1), symbol_of(digest(1)))
    assert store.save("2", write(2))
    assert store.load(digest(2), read) == (content_of(2), symbol_of(digest(2)))
    assert not store.save("3", functools.partial(fail, number=errno.EDQUOT))
    assert len(caplog.records) == 2 and os.strerror(errno.EDQUOT) in caplog.records[1].getMessage()


def test_a_file_instead_of_the_folder(tmp_path, caplog):
    """Check that kernels stay in memory and no locks are taken if a file is in the place of the cache folder."""
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file", MEGABYTE)
    assert store.load(digest(1), read) is None
    with store.writing(digest(1)):
        assert not store.save("1", write(1))
    assert len(caplog.records) == 1
    assert not store.has(digest(1)) and list(store.entries()) == [] and store.clear() == (0, [])


def test_the_least_recently_used_go_first(tmp_path):
    size = len(content_of(""))
    store = Store(tmp_path, 4 * size)
    for age in range(4):
        store.save(str(3 - age), write(3 - age))
        os.utime(store.root / digest(3 - age) / DESCRIPTION, (1000 - age, 1000 - age))
    # Kernel 0 is the oldest, but loading it makes it the most recently used.
    assert store.load(digest(0), read)
    for new in ("a", "b"):
        store.save(new, write(new))
    assert {name for name, _ in store.entries()} == {digest(0), digest(3), digest("a"), digest("b")}
    assert names_in(store.root / "work") == []


def test_a_kernel_larger_than_the_limit_is_kept(tmp_path):
    store = Store(tmp_path, 1)
    store.save("1", write(1))
    store.save("2", write(2))
    assert [name for name, _ in store.entries()] == [digest(2)]


def test_remains_of_killed_writers_are_swept(store):
    """Check that old work folders, work folders dated far in the future, and old lock files are deleted."""
    now = time.time()
    ages = {"1-old": 1000, "2-young": now, "3-future": now + 1e6, "4-ahead": now + 60}
    for name, date in ages.items():
        (store.root / "work" / name).mkdir(parents=True)
        os.utime(store.root / "work" / name, (date, date))
    os.mkfifo(store.root / "work" / "5-old")
    os.utime(store.root / "work" / "5-old", (1000, 1000))
    (store.root / "locks").mkdir()
    (store.root / "locks" / f"{digest(7)}.lock").touch()
    os.utime(store.root / "locks" / f"{digest(7)}.lock", (1000, 1000))
    with store.writing(digest(8)):
        store.save("1", write(1))
        assert names_in(store.root / "work") == ["2-young", "4-ahead"]
        assert names_in(store.root / "locks") == [f"{digest(8)}.lock"]


def test_clear(store):
    for i in range(3):
        store.save(str(i), write(i))
    assert store.clear() == (3, [])
    assert list(store.entries()) == [] and store.load(digest(0), read) is None


def test_clear_returns_errors(store, monkeypatch):
    for i in range(3):
        store.save(str(i), write(i))
    real = Path.rename

    def rename(path, target):
        if path.name == digest(1):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    deleted, (error,) = store.clear()
    assert deleted == 2 and error.errno == errno.EROFS and digest(1) in str(error)
    assert [name for name, _ in store.entries()] == [digest(1)]


# Many processes


def compile_all(root, keys, log_path, barrier):
    """Load each kernel, or compile and store it, as a process that needs these kernels would."""
    store = Store(Path(root), MEGABYTE)
    barrier.wait()
    for key in keys:
        if store.load(digest(key), read) is None:
            with store.writing(digest(key)):
                if store.load(digest(key), read) is None:
                    time.sleep(0.01)
                    with open(log_path, "a") as log:
                        log.write(f"{key}\n")
                    store.save(str(key), write(key))
        assert store.load(digest(key), read)[0] == content_of(key)


def in_small_process(function, folder):
    """Call a function of this file, which forks processes, in a process with little memory: a fork of a process that
    has run thousands of tests takes ten times as long."""
    program = "import sys, pathlib, test_store; getattr(test_store, sys.argv[1])(pathlib.Path(sys.argv[2]))"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = forked(program, arguments=[function.__name__, str(folder)], PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr


def compile_in_sixteen(folder):
    barrier = FORK.Barrier(16)
    processes = [
        FORK.Process(
            target=compile_all, args=(folder / "cache", random.sample(range(10), 10), folder / "compiled", barrier)
        )
        for _ in range(16)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16


def test_sixteen_cold_processes_compile_each_kernel_once(tmp_path):
    in_small_process(compile_in_sixteen, tmp_path)
    assert sorted((tmp_path / "compiled").read_text().split()) == sorted(map(str, range(10)))


def save_for_ever(root):
    store = Store(Path(root), 20 * len(content_of("")))
    while True:
        key = random.randrange(30)
        if store.load(digest(key), read) is None:
            with store.writing(digest(key)):
                store.save(str(key), write(key))


def kill_writers(folder):
    for _ in range(15):
        kill_at_random(save_for_ever, folder, processes=3, longest=0.02)


def test_killed_writers_leave_a_usable_cache(tmp_path, caplog):
    """Check that the cache stays usable if processes are killed at random moments of writing, pruning and locking."""
    in_small_process(kill_writers, tmp_path)
    store = Store(tmp_path, MEGABYTE)
    for name, _ in list(store.entries()):
        assert store.load(name, read)[0] == content_of(store.read(name).key)
    for i in range(30):
        with store.writing(digest(i), patience=1.0):
            store.save(str(i), write(i))
        assert store.load(digest(i), read)[0] == content_of(i)
    assert not caplog.records


# With the compiler


def test_key_ingredients(monkeypatch):
    """Check that each field of the key changes the digest, and that nothing else does."""
    kernel = compiler.KernelSpec(row_quant.KERNEL, row_quant.plan(PROBLEM, SM90))
    key = compiler.key_of(kernel, SM90)
    fields = {field: getattr(key, field) for field in key.__dataclass_fields__}
    assert set(fields) == {
        *("kernel", "config", "arch", "options", "versions", "flavour", "environment", "host", "sources")
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
from torch_cute_ops.kernels.row_quant import KERNEL
from torch_cute_ops.kernels.row_quant import Arguments
from torch_cute_ops.kernels.row_quant import RowQuantSpec
from torch_cute_ops.kernels.row_quant import plan
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel
problem = RowQuantSpec("rows", torch.bfloat16, None, 64, 64, NVFP4, SCALE_LAYOUTS["linear"], False, False, False)
arch = ARCHS["sm_90a"]
function = compile_kernel(KernelSpec(KERNEL, plan(problem, arch)), arch)
try:
    function(*[torch.zeros(4, 4)] * len(Arguments._fields))
except Exception as error:
    print("refused", type(error).__name__)
print("DSL", "cutlass" in sys.modules)
"""


@pytest.mark.slow
def test_processes_share_real_kernels(tmp_path):
    """Check that if several processes start at the same time, one compiles a kernel and the others load the kernel, and
    that damaged kernels are compiled again."""
    kept, in_the_way = tmp_path / "kept", tmp_path / "file"
    in_the_way.touch()
    folder, other = ({"TORCH_CUTE_OPS_CACHE_DIR": str(path)} for path in (kept, in_the_way))
    # The processes are forked after `import torch`. Each imports the package, and compiles or loads.
    *outputs, later = (done.stdout for done in python_in_groups(PROGRAM, [folder] * 3, [folder]))
    assert sorted(output.split()[1] for output in outputs) == ["compiled", "loaded", "loaded"], outputs
    # A loaded function checks its arguments before it launches: it refuses a CPU tensor.
    assert later.split()[1] == "loaded" and "refused ValueError" in later
    # A process that finds its kernel on disk, or waits for it, does not import the DSL.
    assert [output.split()[-1] for output in (*outputs, later)].count("False") == 3 and later.endswith("DSL False\n")
    (entry,) = Store(kept, MEGABYTE).entries()
    assert names_in(entry[1]) == sorted([DESCRIPTION, LIBRARY])
    os.truncate(entry[1] / LIBRARY, (entry[1] / LIBRARY).stat().st_size - 1)
    ran = python_in_each(PROGRAM, folder, {**folder, "TORCH_CUTE_OPS_CACHE": "0"}, other)
    damaged, off, without = (done.stdout for done in ran)
    lines = [line.split()[:2] for line in damaged.splitlines()[:2]]
    assert lines == [["WARNING", "kernel"], ["INFO", "compiled"]], damaged
    assert off.split()[1] == "compiled"
    assert "compiled" in without, without


@pytest.mark.parametrize("linker", [None, "/bin/false"])
def test_without_a_linker_the_object_file_is_kept(tmp_path, monkeypatch, linker):
    """Check that the object file, which the DSL can load too, is stored if there is no linker, or if linking fails."""
    compiled = SimpleNamespace(export_to_c=lambda path, function_name: Path(path).write_bytes(content_of(1)))
    monkeypatch.setattr(compiler, "find_linker", lambda: linker)
    store = Store(tmp_path, MEGABYTE)
    assert store.save("1", functools.partial(compiler.export_library, compiled))
    assert names_in(store.root / digest(1)) == sorted([DESCRIPTION, OBJECT])
    assert store.load(digest(1), read) == (content_of(1), symbol_of(digest(1)))


def test_a_library_is_loaded_without_a_temporary_folder(tmp_path, monkeypatch):
    """Check that a library in the cache is itself loaded if no copy can be made, as in a read-only image."""
    (tmp_path / LIBRARY).write_bytes(content_of(1))
    loaded = {}
    monkeypatch.setattr(compiler, "load_library", lambda path, runtime: loaded.setdefault(path, path.read_bytes()))
    assert compiler._loaded(tmp_path / LIBRARY, Path("runtime")) == content_of(1)
    assert tmp_path / LIBRARY not in loaded  # a copy was loaded
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(tmp_path / "missing"))
    assert compiler._loaded(tmp_path / LIBRARY, Path("runtime")) == content_of(1)
    assert tmp_path / LIBRARY in loaded


def test_a_library_in_an_entry_of_an_object_is_damage(store):
    store.save("1", write(1))
    (store.root / digest(1) / LIBRARY).write_bytes(content_of(2))
    with pytest.raises(Damaged, match=f"{LIBRARY} does not match {DESCRIPTION}"):
        store.read(digest(1))


def test_settings_of_the_store(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(settings, "CACHE_MB", 3)
    store = compiler.store()
    assert store.root.parent == tmp_path and store.limit == 3 * MEGABYTE
    monkeypatch.setattr(settings, "CACHE_DIR", None)
    assert "torch_cute_ops" in str(compiler.store().root)
    monkeypatch.setattr(settings, "CACHE", False)
    assert compiler.store() is None


def test_a_key_prints_no_address():
    """Check that a key's text, from which the digest is computed, contains no address, so that it is the same in every
    process."""
    key = compiler.key_of(compiler.KernelSpec(row_quant.KERNEL, row_quant.plan(PROBLEM, SM90)), SM90)
    assert " at 0x" not in repr(key) and repr(torch.bfloat16) in repr(key)
