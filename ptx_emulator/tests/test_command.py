"""Test the command ``python -m ptx_emulator``: its exit status and output for a correct kernel, a race, and wrong
arguments."""

from pathlib import Path

import numpy as np
import pytest
from programs import AT, SLOT, entry

from ptx_emulator.__main__ import main

DOUBLE = entry(f"{AT} ld.global.b32 %r1, [%rd9]; add.u32 %r1, %r1, %r1; st.global.b32 [%rd9], %r1;", params=1)
# Each thread stores its number in shared memory and reads its neighbour's word, which is a race without the barrier.
EXCHANGE = entry(
    f"{AT} {SLOT} st.shared.b32 [%r9], %r0; BARRIER xor.b32 %r10, %r8, 4; mov.u32 %r11, buf; add.s32 %r11, %r11, %r10;"
    "ld.shared.b32 %r1, [%r11]; st.global.b32 [%rd9], %r1;",
    shared=256,
    params=1,
)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the command on a PTX text. It returns the exit status, the output, and the folder
    with the saved buffers."""

    def run(text: str, *arguments: str) -> tuple[int, str, Path]:
        file = tmp_path / "kernel.ptx"
        file.write_text(text)
        status = main([str(file), "--save", str(tmp_path), *arguments])
        return status, "".join(capsys.readouterr()), tmp_path

    return run


def test_right_kernel(run) -> None:
    status, output, folder = run(DOUBLE, "--param", "arange:u4:32")
    assert (status, output) == (0, "no fault in 4 runs; the same bits in each\n")
    assert np.load(folder / "buffer0.npy").tolist() == list(range(0, 64, 2))


def test_race(run) -> None:
    given = ("--block", "64", "--param", "zeros:u4:64")
    status, output, folder = run(EXCHANGE.replace("BARRIER", "bar.sync 0;"), *given)
    assert status == 0 and np.load(folder / "buffer0.npy").tolist() == [i ^ 1 for i in range(64)]
    status, output, _ = run(EXCHANGE.replace("BARRIER", ""), *given)
    assert status == 1 and output.startswith(("Race", "Uninitialised"))


def test_out_of_bounds(run) -> None:
    status, output, _ = run(DOUBLE, "--param", "zeros:u4:31")
    assert status == 1 and output.startswith("OutOfBounds") and "thread 31" in output


def test_wrong_arguments(run, tmp_path: Path) -> None:
    status, output, _ = run(DOUBLE)
    assert status == 2 and "takes 1 parameters; got 0" in output
    assert main([str(tmp_path / "missing.ptx")]) == 2
    status, output, _ = run(DOUBLE + DOUBLE.replace("kernel", "other"), "--param", "zeros:u4:32")
    assert status == 2 and "--kernel is needed" in output
