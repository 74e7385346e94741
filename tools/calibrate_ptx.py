"""Run kernels of other projects, known to be correct, in the PTX emulator: ``calibrate_ptx.py PATH_TO_CUTLASS``.

Results are compared bit for bit with float64, on inputs whose partial sums are exact. These kernels work on GPUs, so
the emulator is wrong if a result differs or the emulator reports a fault. ``--on-gpu`` compares the emulator with this
machine's GPU, bit for bit, on the same kernel and inputs. Without a path, our own Hopper kernels run
(``own_kernels.py``): ``calibrate_ptx.py --on-gpu`` needs only the GPU and this repository.

``--peers FOLDER`` runs the kernels of the packages in a folder (``peer_kernels.py``). Each of them runs in the
strictest mode of the emulator in which the kernel has no fault.

``--write`` saves the table. Four tables exist, each with its own page: CUTLASS's kernels without a GPU, CUTLASS's
kernels on a GPU, the kernels of packages, and our kernels on a GPU.
"""

import argparse
import contextlib
import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cutlass_kernels import CASES, CLUSTERS, E4M3, E8M0, F16, F32, Case, compile_case  # noqa: E402
from exact_operands import NAN, Operand, Problem, in_blocks  # noqa: E402
from own_kernels import ARCH, OWN_CASES, OwnCase, by_emulator, by_gpu, by_reference  # noqa: E402
from peer_kernels import PEER_CASES, PeerCase, compile_peer, versions  # noqa: E402

from ptx_emulator import Deadlock, EmulationError  # noqa: E402
from ptx_emulator.adapter import programs_of  # noqa: E402
from ptx_emulator.host import host_launches  # noqa: E402
from ptx_emulator.layout import GlobalMemory  # noqa: E402
from ptx_emulator.machine import Machine  # noqa: E402
from ptx_emulator.values import E2M1, SCALES, TINY  # noqa: E402

NOTES = ROOT / "docs" / "notes"
SEEDS = (None, 0, 1)
"""Seeds that order the emulator's warps and copies: None runs all warps in lockstep; a number draws a random order."""
MODES: dict[str, dict[str, bool]] = {"strict": {"strict": True}, "standard": {}, "lenient": {"lenient": True}}
"""Modes of the emulator, from the strictest to the most lenient, as arguments of ``Machine``."""


def operand(case: Case, rows: int, k: int, random: np.random.Generator) -> Operand:
    """Return a random matrix (rows, k) in the formats of A and B in ``case``."""
    if not case.block:
        numbers = random.integers(-4, 5, (rows, k)).astype(np.float64)
        if case.operand is E4M3:
            return Operand(TINY["e4m3x2"].encode(numbers).astype(np.uint8), None, numbers)
        return Operand(numbers.astype(np.float16), None, numbers)
    codes = random.integers(0, 16, (rows, k), dtype=np.uint8)
    name, some = ("ue8m0", range(125, 130)) if case.scale is E8M0 else ("ue4m3", (0x28, 0x30, 0x38, 0x40, 0x48))
    scales = random.choice(np.array(some, np.uint8), (rows, k // case.block))
    numbers = E2M1[codes] * np.repeat(SCALES[name][scales], case.block, 1)
    return Operand(codes[:, ::2] | codes[:, 1::2] << 4, in_blocks(scales, NAN[case.scale.__name__]), numbers)


def problem(case: Case, m: int, n: int, k: int) -> Problem:
    """Return random operands whose partial sums are exact in fp32 in any order."""
    random = np.random.default_rng([m, n, k])
    a, b = operand(case, m, k, random), operand(case, n, k, random)
    quantum = 2.0**-6 if case.block else 1.0
    assert (np.abs(a.numbers) @ np.abs(b.numbers).T).max() < 2**24 * quantum
    result = torch.from_numpy(a.numbers @ b.numbers.T).float()
    expected = result.to({F32: torch.float32, F16: torch.float16}.get(case.out, torch.bfloat16))
    bits = expected.view(torch.int32 if case.out is F32 else torch.int16).numpy()
    out = np.full_like(bits, -0x1112)
    scales = [a.scales, b.scales] if case.block else []
    return Problem((m, n, k), [a.data, b.data, *scales, out], bits)


class Emulated(NamedTuple):
    """Bits of C that the emulator computed, and the emulator's run time."""

    bits: Any
    seconds: float


def emulate(compiled: Any, given: Problem, seed: int | None, mode: str = "lenient") -> Emulated:
    """Execute the launches of a compiled kernel in a mode of the emulator."""
    programs = programs_of(compiled.artifacts.PTX)
    memory = GlobalMemory()
    addresses = [
        memory.allocate(f"argument {i}", np.ascontiguousarray(one).view(np.uint8).reshape(-1), 128)
        for i, one in enumerate(given.buffers)
    ]
    sizes = {name: [param.size for param in program.params] for name, program in programs.items()}
    leaves = [[value] for value in (*addresses, *given.sizes)]
    start = time.perf_counter()
    for name, launch in host_launches(compiled.ir_module, leaves, sizes):
        Machine(programs[name], launch, memory, seed, max_steps=20_000_000, **MODES[mode]).run()
    seconds = time.perf_counter() - start
    out = given.buffers[-1]
    return Emulated(memory.contents(addresses[-1], out.nbytes).view(out.dtype).reshape(out.shape).copy(), seconds)


def on_gpu(case: Case, compiled: Any, given: Problem) -> Any:
    """Run a compiled kernel on the GPU and return the bits of C."""
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream
    from cutlass.cute.runtime import make_ptr

    tensors = [torch.from_numpy(np.ascontiguousarray(one).view(np.uint8)).cuda() for one in given.buffers]
    types = [case.operand, case.operand, *([case.scale] * 2 if case.block else []), case.out]
    pointers = [
        make_ptr(type, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
        for type, tensor in zip(types, tensors, strict=True)
    ]
    compiled(*pointers, *given.sizes, CUstream(torch.cuda.current_stream().cuda_stream))
    torch.cuda.synchronize()
    out = given.buffers[-1]
    return tensors[-1].cpu().numpy().view(out.dtype).reshape(out.shape)


def difference(found: Any, expected: Any) -> str:
    """Return, as text, the fraction of elements that differ, or an empty string if all elements are equal."""
    share = float((found != expected).mean())
    return f"{share:.1%} of elements differ" if share else ""


class Row(NamedTuple):
    """A row of the table on a calibration page. ``fault`` is the rule of a stricter mode that the kernel breaks."""

    name: str
    arch: str
    size: str
    result: str
    seconds: float
    right: bool
    fault: str = ""


def calibrate(root: Path, case: Case, gpu: bool) -> list[Row]:
    """Compile one of NVIDIA's kernels and run it on each of its problems."""
    try:
        compiled = compile_case(root, case, optimised=gpu)
    except Exception as error:
        return [Row(case.name, case.arch, "", f"not compiled: {_first_line(error)}", 0.0, False)]
    rows = []
    for size in case.sizes:
        given = problem(case, *size)
        bits = on_gpu(case, compiled, given) if gpu else None
        emulated = functools.partial(emulate, compiled, given)
        rows.append(compare(case.name, case.arch, "×".join(map(str, size)), emulated, given.expected, bits))
    return rows


def calibrate_peer(folder: Path, case: PeerCase) -> Row:
    """Compile a kernel of a package, and run it in the strictest mode of the emulator in which it has no fault."""
    size, fault = "×".join(map(str, case.sizes)), ""
    name = f"{case.package.split('-')[0]}: {case.name}"
    try:
        compiled = compile_peer(folder, case)
    except Exception as error:
        return Row(name, case.arch, size, f"not compiled: {_first_line(error)}", 0.0, False)
    given = case.problem(case.sizes)
    if case.hangs:
        return Row(name, case.arch, size, *waits_for_ever(compiled, given, case.hangs))
    for mode in MODES:
        row = compare(
            name, case.arch, size, functools.partial(emulate, compiled, given, mode=mode), given.expected, None
        )
        if row.right or mode == "lenient":
            return row._replace(result=f"{row.result} ({mode})", fault=fault)
        # The message names the instruction and the thread after a semicolon.
        fault = row.result.split("; ")[0].split(": ", 1)[1]
    raise AssertionError


def waits_for_ever(compiled: Any, given: Problem, why: str) -> tuple[str, float, bool]:
    """Check that a kernel waits for ever. Return the result with the reason ``why``, the time of a run, and True if the
    kernel waits."""
    start = time.perf_counter()
    for seed in SEEDS:
        try:
            emulate(compiled, given, seed)
        except Deadlock:
            continue
        return "does not wait for ever", 0.0, False
    return f"waits for ever: {why}", (time.perf_counter() - start) / len(SEEDS), True


def calibrate_own(case: OwnCase, gpu: bool) -> Row:
    """Run one of our kernels, whose results are float32."""

    def emulated(seed: int | None) -> Emulated:
        start = time.perf_counter()
        result = by_emulator(case, seed).view(torch.int32).numpy()
        return Emulated(result, time.perf_counter() - start)

    bits = by_gpu(case).view(torch.int32).numpy() if gpu else None
    return compare(case.name, ARCH, case.size, emulated, by_reference(case).view(torch.int32).numpy(), bits)


def compare(
    name: str, arch: str, size: str, emulated: Callable[[int | None], Emulated], expected: Any, gpu: Any
) -> Row:
    """Run the emulator with each of ``SEEDS`` and compare bits.

    Without results of a GPU, the emulator is compared with ``expected``. With a GPU's results, the emulator is compared
    with the GPU, and the GPU with ``expected``.
    """
    wrong, seconds = [], 0.0
    for seed in SEEDS:
        try:
            result = emulated(seed)
        except (EmulationError, NotImplementedError) as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {_first_line(error)}")
            continue
        seconds += result.seconds / len(SEEDS)
        different = difference(result.bits, expected if gpu is None else gpu)
        wrong += [f"seed {seed}: {different}"] if different else []
    if gpu is not None:
        different = difference(gpu, expected)
        wrong += [f"GPU against float64: {different}"] if different else []
    text = "; ".join(wrong) or ("exact" if gpu is None else "the GPU's bits")
    return Row(name, arch, size, text, seconds, not wrong)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def revision(root: Path) -> str:
    """Return the git revision of a checkout, or an empty text if git does not know it."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            ["git", "-C", root, "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
    return "an unknown revision"


def page(rows: list[Row], kernels: str, command: str, gpu: str | None, title: str = "") -> str:
    """Return the Markdown page with the table. ``kernels`` is a text about the origin and version of the kernels, and
    ``title`` the end of the heading if no GPU is compared."""
    against = "with float64" if gpu is None else f"with an {gpu}'s, and these with float64's"
    lines = [
        f"# Calibration of the PTX emulator{title if gpu is None else f' on an {gpu}'}",
        "",
        f"Written by `{command}`: do not edit.",
        "",
        f"{kernels} Results are compared bit for bit",
        f"{against}, on random inputs whose sums are exact, with",
        f"{len(SEEDS)} orders of warps and copies. Persistent kernels run with {CLUSTERS} clusters.",
        "",
        f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}, torch {torch.__version__}.",
        "",
        "| kernel | compiled for | m×n×k | result | seconds a run |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {row.name} | {row.arch} | {row.size} | {row.result} | {row.seconds:.1f} |" for row in rows),
        "",
    ]
    faults: dict[str, list[str]] = {}
    for row in rows:
        if row.fault:
            faults.setdefault(_rule(row.fault), []).append(row.name)
    if faults:
        lines += [
            "## Faults in the next stricter mode",
            "",
            "These kernels are used on GPUs, so the hardware seems to ensure more than the documents promise.",
            "Our kernels must have no such fault.",
            "",
            "| fault | kernels | for example |",
            "| --- | --- | --- |",
            *(f"| {fault} | {len(names)} | {names[0]} |" for fault, names in faults.items()),
            "",
        ]
    return "\n".join(lines)


def _rule(fault: str) -> str:
    """Return a fault without its addresses and threads."""
    return re.sub(r"(offset |thread |column |lanes |pipe |CTA )(0x)?[0-9a-f.]+", r"\1…", fault)


def main() -> None:
    """Run the cases that the command line selects; exit with a message if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "cutlass", type=Path, nargs="?", metavar="PATH_TO_CUTLASS", help="checkout of NVIDIA/cutlass; default: ours"
    )
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="folder with the packages of other projects")
    parser.add_argument("--only", default="", metavar="PATTERN", help="run only cases whose name contains this text")
    parser.add_argument("--revision", default="", help="revision of CUTLASS, for a checkout without a git directory")
    parser.add_argument("--on-gpu", action="store_true", help="compare with this machine's GPU, if it can run the case")
    parser.add_argument("--write", action="store_true", help=f"save the table in {NOTES.relative_to(ROOT)}")
    given = parser.parse_args()
    if given.write and (given.only or not (given.cutlass or given.on_gpu or given.peers)):
        parser.error("--write saves whole tables only: drop --only, and give PATH_TO_CUTLASS, --peers or --on-gpu")
    if given.peers and (given.cutlass or given.on_gpu):
        parser.error("--peers runs alone")
    rows: list[Row] = []
    for row in measured(given.cutlass, given.only, given.on_gpu, given.peers):
        print(f"{row.arch:8s} {row.name:50s} {row.size:14s} {row.seconds:5.1f} s  {row.result}", flush=True)
        rows.append(row)
    if not rows:
        raise SystemExit(f"no case to run has {given.only!r} in its name")
    if given.write and given.peers:
        write_peers(rows, given.peers)
    elif given.write:
        write(rows, given.cutlass, given.revision, given.on_gpu)
    wrong = sum(not row.right for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} of {len(rows)} problems are wrong")
    print(f"all {len(rows)} problems are right")


def measured(cutlass: Path | None, only: str, gpu: bool, peers: Path | None) -> Iterator[Row]:
    """Run all cases whose name contains ``only`` and yield their rows. If ``gpu``, skip cases that this machine's GPU
    cannot run."""
    if peers is not None:
        for peer in PEER_CASES:
            if only in f"{peer.package}: {peer.name}":
                yield calibrate_peer(peers, peer)
        return
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability()) if gpu else None
    if cutlass is not None:
        for case in CASES:
            if only in case.name and arch in (None, case.arch):
                yield from calibrate(cutlass, case, gpu)
    elif arch in (None, ARCH):
        yield from (calibrate_own(case, gpu) for case in OWN_CASES if only in case.name)


def write(rows: list[Row], cutlass: Path | None, given_revision: str, on_gpu: bool) -> None:
    """Save the table in the page of ``NOTES`` that belongs to these kernels."""
    gpu = torch.cuda.get_device_name() if on_gpu else None
    options = ["PATH_TO_CUTLASS"] * (cutlass is not None) + ["--on-gpu"] * on_gpu + ["--write"]
    command = " ".join(["tools/calibrate_ptx.py", *options])
    kernels = "Kernels of this package for Hopper, run in the emulator."
    if cutlass is not None:
        kernels = (
            "Kernels of NVIDIA that are known to be right, run in the emulator's lenient mode:\n"
            f"CUTLASS {given_revision or revision(cutlass)}."
        )
    name = "blackwell" if not on_gpu else "hopper_cutlass" if cutlass else "hopper"
    (NOTES / f"{name}_calibration.md").write_text(page(rows, kernels, command, gpu), encoding="utf-8")


def write_peers(rows: list[Row], folder: Path) -> None:
    """Save the table of the kernels of packages."""
    found = versions(folder)
    packages = ", ".join(f"{one} {found[one]}" for one in dict.fromkeys(case.package for case in PEER_CASES))
    kernels = f"Kernels of other projects' packages, run in the emulator's strictest mode without a fault:\n{packages}."
    text = page(rows, kernels, "tools/calibrate_ptx.py --peers FOLDER --write", None, " with other projects' kernels")
    (NOTES / "peer_calibration.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
