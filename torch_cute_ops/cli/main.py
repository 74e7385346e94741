"""Parser and entry point of the command line."""

import argparse
import contextlib
import importlib
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops import __version__, deployment, registry
from torch_cute_ops.cli import cache, info
from torch_cute_ops.cli.jobs import UsageError, add_jobs, read_gemm_jobs, read_jobs
from torch_cute_ops.cli.replay import add_replay
from torch_cute_ops.runtime import tuner
from torch_cute_ops.runtime.arch import ARCHS, arch_named
from torch_cute_ops.runtime.compiler import KernelSpec
from torch_cute_ops.runtime.toolchain import expected_flavour


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit status: 0 on success, 1 if some of the work failed, 2 for wrong arguments or a wrong file, 130 after
        SIGINT.
    """
    parser = argparse.ArgumentParser(prog="python -m torch_cute_ops", description="Custom ops for quantised serving.")
    parser.add_argument("--version", action="version", version=f"torch_cute_ops {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_info(commands)
    _add_cache(commands)
    _add_warmup(commands)
    _add_tune(commands)
    _add_build(commands)
    add_replay(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: this command needs a package that is not installed: {error}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, ops, cache and settings")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    report = info.collect()
    print(json.dumps(report, indent=2) if options.json else info.text(report))
    return 0


def _add_cache(commands: Any) -> None:
    parser = commands.add_parser("cache", help="the kernels on disk")
    parser.add_argument("action", choices=("list", "verify", "clear"), nargs="?", default="list")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=lambda options: cache.run(options.action, as_json=options.json))


def _add_build(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="make a bundle of kernels that runs without the compiler",
        description=_build.__doc__,
    )
    parser.add_argument("--arch", action="append", metavar="ARCH", required=True, help=f"one of {', '.join(ARCHS)}")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", required=True, help="folder to write to")
    parser.add_argument("--models", type=_names, metavar="NAME,...", help="kernels of these models instead of an op's")
    parser.add_argument("--formats", type=_names, metavar="NAME,...", help="formats of --models (default: all formats)")
    parser.add_argument("--rows", type=_counts, metavar="N,...", help="numbers of rows that --models will serve")
    parser.add_argument(
        "--wheel", action="store_true", help="a wheel for each architecture, found once it is installed"
    )
    parser.add_argument(
        "--with-runtime",
        action="store_true",
        help="include the DSL's runtime library, which is NVIDIA's, so that the kernels run without the DSL",
    )
    _add_workers(parser)
    add_jobs(parser)
    parser.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> int:
    """Compile the kernels of an op, of a deployment's file, or of models, for one or more architectures into a folder.
    Options with several values stand for every combination. Processes load the kernels from the folder that
    TORCH_CUTE_OPS_BUNDLE names, or from an installed wheel. Needs a C compiler to link with, and no GPU."""
    from torch_cute_ops.runtime.bundle_build import add_runtime, build

    pairs = list(dict.fromkeys(_pairs(options)))
    if not options.wheel:
        build(options.output, pairs, options.workers)
        if options.with_runtime:
            add_runtime(options.output)
        _tell_flavour()
        print(f"{len(pairs)} kernels are in {options.output}")
        return 0
    text = f"Kernels of {', '.join(options.models or [options.op or str(options.config)])}"
    if options.models and options.formats:
        text += f" in {', '.join(options.formats)}"
    for arch in _archs(options):
        kernels = [kernel for kernel, name in pairs if name == arch]
        how = {"with_runtime": options.with_runtime, "workers": options.workers}
        path = _kernel_wheels().build_wheel(options.output, arch_named(arch), kernels, f"{text}, for {arch}.", **how)
        print(f"{len(kernels)} kernels are in {path}, {path.stat().st_size / 2**20:.1f} MB")
    _tell_flavour()
    return 0


def _pairs(options: argparse.Namespace) -> Iterator[tuple[KernelSpec, str]]:
    """Yield the kernels that the arguments of ``build`` name, each with its architecture."""
    archs = _archs(options)
    if options.models:
        if options.op is not None or options.config is not None:
            raise UsageError("name models, or an op and its properties, or a file with --config")
        for model, arch in itertools.product(options.models, archs):
            rows = {} if options.rows is None else {"rows": options.rows}
            try:
                kernels = _kernel_wheels().kernels_of_model(model, ARCHS[arch], formats=options.formats, **rows)
                yield from ((kernel, arch) for kernel in kernels)
            except ValueError as error:
                raise UsageError(error) from None
        return
    for job, arch in itertools.product(read_jobs(options), archs):
        try:
            yield from ((kernel, arch) for kernel in registry.kernels_of(job.op, arch, **dict(job.properties)))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{job} {arch}: {error}") from None


def _kernel_wheels() -> Any:
    # Import by name, because models belong to a layer above the commands.
    return importlib.import_module("torch_cute_ops.kernel_wheels")


def _add_warmup(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile kernels into the cache on disk, in parallel",
        description=_warmup.__doc__,
    )
    parser.add_argument("--arch", action="append", metavar="ARCH", help=f"one or more of {', '.join(ARCHS)}")
    _add_workers(parser)
    add_jobs(parser)
    parser.set_defaults(run=_warmup)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    text = "number of processes (default: one per processor, at most 32)"
    parser.add_argument("--workers", type=_count, metavar="N", help=text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    return [_count(name) for name in _names(text)]


def _count(text: str) -> int:
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return number


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="choose among the backends of a GEMM by timing them",
        description="Time the backends of a GEMM, or of all GEMMs in a deployment's file, on the current GPU. Keep the "
        "fastest backend for each size in the file that TORCH_CUTE_OPS_TUNING names. Options with several values stand "
        "for every combination. Sizes that are already tuned are not timed again.",
    )
    add_jobs(parser)
    parser.set_defaults(run=_tune)


def _archs(options: argparse.Namespace) -> list[str]:
    """Return the architectures that the arguments name, or else the architectures of the local GPUs.

    Raises:
        UsageError: if an architecture is unknown, or none is given and no device is present.
    """
    try:
        archs = [arch_named(arch).name for arch in options.arch or info.archs_here()]
    except ValueError as error:
        raise UsageError(error) from None
    if not archs:
        raise UsageError("no CUDA device found; pass --arch")
    return list(dict.fromkeys(archs))


def _tell_flavour() -> None:
    """Print which build of the DSL compiled the kernels. The DSL selects the build that fits the driver, or the newest
    build if there is no driver."""
    print(f"compiled by the {expected_flavour()} build of the DSL; another build cannot load the kernels")


def _tune(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    jobs = read_gemm_jobs(options)
    if not torch.cuda.is_available():
        raise UsageError("tuning needs a CUDA device, because it times kernels")
    failed = 0
    with tqdm(jobs, unit="call") as bar:
        for job in bar:
            bar.set_postfix_str(str(job))
            try:
                registry.warmup(job.op, tune=True, **dict(job.properties))
            except Exception as error:  # the DSL raises exceptions without a common base class
                failed += 1
                bar.write(f"{job}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{len(jobs) - failed} calls tuned, {failed} failed; choices are kept in {tuner.path() or 'no file'}")
    return 1 if failed else 0


def _warmup(options: argparse.Namespace) -> int:
    """Compile the kernels of an op, or of a deployment's file, into the cache on disk. Options with several values
    stand for every combination. With --arch, no GPU is needed."""
    from tqdm import tqdm

    jobs, archs = read_jobs(options), _archs(options)
    if (reason := cache.reason_unusable()) is not None:
        raise UsageError(f"no kernels are kept on disk: {reason}")
    failed = 0
    outcomes = deployment.compile_jobs(jobs, archs, options.workers)
    with contextlib.closing(outcomes), tqdm(total=len(jobs) * len(archs), unit="kernel") as bar:
        for outcome in outcomes:
            if outcome.error:
                failed += 1
                bar.write(f"{outcome.job} {outcome.arch}: {outcome.error}", file=sys.stderr)
            bar.update()
    ready = len(jobs) * len(archs) - failed
    if ready:
        _tell_flavour()
    print(f"{ready} kernels are ready, {failed} failed")
    return 1 if failed else 0
