"""Run a kernel of a PTX file: ``python -m ptx_emulator kernel.ptx --grid 2 --block 128 --param randn:f4:64 --param 7``.

Each ``--param`` is one parameter of the kernel, in order. For a pointer to a buffer, pass ``zeros:DTYPE:COUNT``,
``ones:…``, ``arange:…``, ``randn:…`` or ``FILE.npy``. DTYPE is a NumPy dtype such as f4, float16 or uint8. For other
parameters, pass a number, which is converted to the parameter's size. The kernel runs once with all warps in lockstep
and once with each seed, each time on fresh buffers.

The exit status is 0 if no run had a fault and all runs gave the same bits, 1 if not, and 2 for wrong arguments or
unknown instructions. A fault is printed with instruction, thread and address.
"""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ptx_emulator.layout import GlobalMemory, Launch
from ptx_emulator.machine import Machine
from ptx_emulator.memory import EmulationError
from ptx_emulator.parser import Program, parse_all

FILLS = {
    "zeros": lambda dtype, count, random: np.zeros(count, dtype),
    "ones": lambda dtype, count, random: np.ones(count, dtype),
    "arange": lambda dtype, count, random: np.arange(count).astype(dtype),
    "randn": lambda dtype, count, random: random.standard_normal(count).astype(dtype),
}


def dims(text: str) -> tuple[int, int, int]:
    """Parse ``X``, ``X,Y`` or ``X,Y,Z``."""
    x, y, z = (*map(int, text.split(",")), 1, 1)[:3]
    return x, y, z


def buffer_of(text: str) -> np.ndarray[Any, Any] | None:
    """Create the buffer that a ``--param`` describes, or return None if the text is a number."""
    if text.endswith(".npy"):
        return np.load(text)
    name, *rest = text.split(":")
    if name not in FILLS:
        return None
    dtype, count = rest
    return FILLS[name](np.dtype(dtype), int(count), np.random.default_rng(0))


def number_of(text: str, size: int) -> bytes:
    """Encode a number as a parameter of ``size`` bytes. A number with a decimal point or an exponent is a float."""
    if any(character in text.lower() for character in ".en") and not text.lower().startswith("0x"):
        return struct.pack({4: "<f", 8: "<d"}[size], float(text))
    return (int(text, 0) % (1 << 8 * size)).to_bytes(size, "little")


def run(program: Program, given: argparse.Namespace, seed: int | None) -> list[np.ndarray[Any, Any]]:
    """Execute one launch on fresh buffers. Return the contents of the buffers after the launch."""
    memory, params, buffers = GlobalMemory(), [], []
    for text, param in zip(given.param, program.params, strict=True):
        buffer = buffer_of(text)
        if buffer is None:
            params.append(number_of(text, param.size))
            continue
        address = memory.allocate(f"parameter {len(params)}", buffer.reshape(-1).view(np.uint8), 256)
        params.append(struct.pack("<Q", address))
        buffers.append((address, buffer))
    launch = Launch(given.grid, given.block, params, given.cluster, given.shared)
    Machine(program, launch, memory, seed, given.max_steps, lenient=given.lenient).run()
    return [memory.contents(address, one.nbytes).view(one.dtype).copy() for address, one in buffers]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="ptx_emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="PTX file")
    parser.add_argument("--kernel", help="name of the kernel; needed if the file has several")
    parser.add_argument("--grid", type=dims, default=(1, 1, 1), metavar="X[,Y[,Z]]", help="CTAs")
    parser.add_argument("--block", type=dims, default=(32, 1, 1), metavar="X[,Y[,Z]]", help="threads of a CTA")
    parser.add_argument("--cluster", type=dims, default=(1, 1, 1), metavar="X[,Y[,Z]]", help="CTAs of a cluster")
    parser.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory of a CTA")
    parser.add_argument(
        "--param", action="append", default=[], metavar="VALUE", help="parameter of the kernel, in order"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of runs in random orders, after the run in lockstep"
    )
    parser.add_argument("--lenient", action="store_true", help="allow omissions of NVIDIA's kernels (see races.py)")
    parser.add_argument("--max-steps", type=int, default=20_000_000, help="instructions after which a run is aborted")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the buffers of the run in lockstep as .npy")
    given = parser.parse_args(arguments)
    try:
        programs = {program.name: program for program in parse_all(given.file.read_text())}
        if given.kernel is None and len(programs) != 1:
            raise ValueError(f"--kernel is needed; {given.file} has {', '.join(programs) or 'no kernel'}")
        program = programs[given.kernel] if given.kernel else next(iter(programs.values()))
        if len(given.param) != len(program.params):
            raise ValueError(f"{program.name} takes {len(program.params)} parameters; got {len(given.param)}")
        results = [run(program, given, seed) for seed in (None, *range(given.seeds))]
    except EmulationError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if given.save:
        given.save.mkdir(parents=True, exist_ok=True)
        for i, one in enumerate(results[0]):
            np.save(given.save / f"buffer{i}.npy", one)
    differing = [
        i for i in range(len(results[0])) if any(r[i].tobytes() != results[0][i].tobytes() for r in results[1:])
    ]
    if differing:
        print(f"no fault, but the bits of buffer {', '.join(map(str, differing))} depend on the order of execution")
        return 1
    print(f"no fault in {len(results)} runs; the same bits in each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
