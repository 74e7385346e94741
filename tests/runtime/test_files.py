"""Reading files that anyone may have written, and replacing files atomically."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from torch_cute_ops.runtime import files
from torch_cute_ops.runtime.files import Unusable


@pytest.mark.parametrize("size", [0, 1, 100])
def test_read(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    assert files.read(path, 100) == path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    assert files.read(tmp_path / "link", 100) == path.read_bytes()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev"])
def test_other_kinds_of_files_are_refused(path):
    with pytest.raises(Unusable, match=f"{path} is not a regular file"):
        files.read(Path(path), 100)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    with pytest.raises(Unusable, match="is not a regular file"):
        files.read(tmp_path / "fifo", 100)
    assert time.monotonic() - started < 1


def test_a_file_that_is_too_large(tmp_path):
    """Check that a file that is too large is refused by its size, without being read."""
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(Unusable, match="1,099,511,627,776 bytes; the limit is 100"):
        files.read(tmp_path / "file", 100)


def test_reading_leaks_no_descriptor(tmp_path):
    (tmp_path / "file").write_bytes(bytes(200))
    before = len(os.listdir("/proc/self/fd"))
    for limit in (100, 200):
        for path in (tmp_path / "file", tmp_path):
            try:
                files.read(path, limit)
            except Unusable:
                continue
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE], ids=errno.errorcode.get)
def test_reading_again(tmp_path, number, monkeypatch):
    (tmp_path / "file").write_bytes(b"content")
    real, errors = os.open, [number]

    def fail(*args):
        if errors:
            raise OSError(errors.pop(), "of a test")
        return real(*args)

    monkeypatch.setattr(os, "open", fail)
    assert files.read_again(tmp_path / "file", 100) == b"content"
    errors += [number, number]
    with pytest.raises(OSError, match="of a test"):
        files.read_again(tmp_path / "file", 100)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a":' * 100_000, "NaN", "[1, Infinity]", "-Infinity", "\ud800", "1" * 10_000, "\x00"],
)
def test_invalid_json(text):
    with pytest.raises(Unusable, match="JSON"):
        files.parse_json(text.encode("utf-8", "surrogatepass"))


def test_json():
    assert files.parse_json(b'{"a": [1, 2.5, null, "\xc3\xa9"]}') == {"a": [1, 2.5, None, "é"]}


def test_replace(tmp_path):
    """Check that everyone can read the file, that only its owner can write it, and that no temporary file is left."""
    path = tmp_path / "file"
    before = os.umask(0)
    try:
        for content in (b"first", b"second"):
            files.replace(path, content)
            assert path.read_bytes() == content
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_the_target_of_a_link(tmp_path):
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    (tmp_path / "near").symlink_to(target)
    (tmp_path / "link").symlink_to("near")
    files.replace(tmp_path / "link", b"new")
    assert target.read_bytes() == b"new" and not target.is_symlink()
    assert os.readlink(tmp_path / "link") == "near" and os.readlink(tmp_path / "near") == str(target)
    assert sorted(tmp_path.iterdir()) == [target.parent, tmp_path / "link", tmp_path / "near"]


def test_replacing_a_link(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    files.replace(tmp_path / "link", b"new", 0o600, follow_links=False)
    assert target.read_bytes() == b"old"
    assert (tmp_path / "link").read_bytes() == b"new" and not (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [tmp_path / "link", target]


def test_a_failed_replacement(tmp_path, monkeypatch):
    """Check that after a failure the old file is unchanged, and that no temporary file is left."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_stale_temporary_files_are_deleted(tmp_path):
    now = time.time()
    dates = {"old": 1000, "young": now, "future": now + 1e6, "ahead": now + 60}
    for name, date in dates.items():
        (tmp_path / f"file.{name}.tmp").touch()
        os.utime(tmp_path / f"file.{name}.tmp", (date, date))
    files.replace(tmp_path / "file", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.ahead.tmp", "file.young.tmp"]


def test_make_folder(tmp_path):
    """Check that missing parents are created, too, writable only by the owner, and that existing folders keep their
    mode."""
    tmp_path.chmod(0o777)
    before = os.umask(0)
    try:
        files.make_folder(tmp_path / "a" / "b")
        files.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [
        *(0o777, 0o755, 0o755)
    ]
