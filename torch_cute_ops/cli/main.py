"""Arguments of the command line, and what each command runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops import deployment, registry
from torch_cute_ops.cli import cache, info
from torch_cute_ops.runtime import tuner
from torch_cute_ops.runtime.arch import ARCHS, arch_named
from torch_cute_ops.runtime.compiler import compiler_flavour


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 where something failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m torch_cute_ops", description="Custom ops for quantised serving.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_info(commands)
    _add_cache(commands)
    _add_warmup(commands)
    _add_tune(commands)
    _add_build(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, devices, ops, cache and settings")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_info)


def _info(options: argparse.Namespace) -> int:
    facts = info.collect()
    print(json.dumps(facts, indent=2) if options.json else info.text(facts))
    return 0


def _add_cache(commands: Any) -> None:
    parser = commands.add_parser("cache", help="the kernels on disk")
    parser.add_argument("action", choices=("list", "verify", "clear"), nargs="?", default="list")
    parser.set_defaults(run=lambda options: cache.run(options.action))


def _add_build(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="make a bundle of kernels that runs without the compiler",
        description="Compile the kernels of a deployment for one or more architectures into a folder, which a process "
        "uses that has TORCH_CUTE_OPS_BUNDLE set to it. Needs a C compiler to link with, and no GPU.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE.toml", required=True, help="tables [[kernel]]")
    parser.add_argument("--arch", action="append", metavar="ARCH", required=True, help=f"of {', '.join(ARCHS)}")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", required=True, help="where the bundle is put")
    parser.set_defaults(run=_build)


def _build(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from torch_cute_ops.runtime import bundle

    jobs = deployment.read(options.config)
    pairs = [
        (kernel, arch)
        for job in jobs
        for arch in options.arch
        for kernel in registry.kernels_of(job.op, arch, **dict(job.facts))
    ]
    bundle.build(options.output, tqdm(pairs, unit="kernel"))
    _tell_flavour()
    print(f"{len(set(pairs))} kernels are in {options.output}")
    return 0


def _add_warmup(commands: Any) -> None:
    parser = commands.add_parser(
        "warmup",
        help="compile kernels into the cache on disk, in parallel",
        description="Compile the kernels of an op, or of the deployment that a file lists, into the cache on disk. "
        "Options that take several values stand for every combination. No GPU is needed if --arch is given.",
    )
    parser.add_argument("--arch", action="append", metavar="ARCH", help=f"one or more of {', '.join(ARCHS)}")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each processor)")
    _add_jobs(parser)
    parser.set_defaults(run=_warmup)


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="choose among the backends of products by timing them",
        description="Time the backends of a product, or of all those of the deployment that a file lists, on the "
        "current GPU, and keep the fastest for each size in the file that TORCH_CUTE_OPS_TUNING names. Options that "
        "take several values stand for every combination. What is tuned already is not timed again.",
    )
    _add_jobs(parser)
    parser.set_defaults(run=_tune)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    """What ``_jobs`` reads."""
    parser.add_argument("op", nargs="?", help="the op's name; or --config")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="tables [[kernel]] with op and facts")
    facts = parser.add_argument_group("facts of the calls, as torch_cute_ops.warmup takes them")
    facts.add_argument("--hidden", type=int, nargs="+", help="last dimension of the input")
    for name in deployment.DTYPE_FACTS:
        facts.add_argument(f"--{name.replace('_', '-')}", nargs="+", metavar="DTYPE", help="bf16, fp16 or fp32")
    facts.add_argument("--block-size", type=int, nargs="+", help="16: NVFP4, 32: MXFP4")
    facts.add_argument("--scale-format", nargs="+", help="e4m3, ue8m0")
    facts.add_argument("--scale-layout", nargs="+", help="linear, 128x4, 8x4; FP8: row, column")
    facts.add_argument("--granularity", nargs="+", help="FP8: tensor, token, block128")
    facts.add_argument("--global-scale", action="store_true", default=None, help="calls pass a global scale")
    for name, text in {"n": "columns", "k": "elements of a sum", "m": "rows"}.items():
        facts.add_argument(f"--{name}", type=int, nargs="+", help=f"products: {text}")
    facts.add_argument("--experts", type=int, nargs="+", help="moe_route, products with experts: how many there are")
    facts.add_argument("--alpha", action="store_true", default=None, help="products: calls pass an alpha")
    facts.add_argument("--backend", nargs="+", help="products: auto, or a backend's name")
    facts.add_argument("--topk", type=int, nargs="+", help="steps of an expert layer: experts of a token")
    facts.add_argument("--scoring", nargs="+", help="moe_route: softmax, sigmoid")
    for name, text in {"num-groups": "groups of experts", "topk-groups": "those that a token may choose from"}.items():
        facts.add_argument(f"--{name}", type=int, nargs="+", help=f"moe_route: {text}")
    for name, text in SWITCHES.items():
        facts.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)


def _tell_flavour() -> None:
    """Kernels are for the driver that the compiler thinks of: without one, the newest that it is installed for."""
    print(f"compiled by the {compiler_flavour()} build of the DSL; one of another build does not take them")


SWITCHES = {
    "masked": "moe_route, grouped_mm_fp8: calls are in the masked layout",
    "offsets": "moe_swiglu_fp8quant: calls pass offsets",
    "counts": "moe_swiglu_fp8quant, grouped_mm_fp8: calls pass counts",
    "residual": "moe_finalize: calls pass a residual",
    "bias": "moe_route: calls pass a bias",
    "renormalize": "moe_route: weights are made to sum to 1",
}
FACTS = (
    *("hidden", *deployment.DTYPE_FACTS, "block_size", "scale_layout", "granularity", "global_scale"),
    *("n", "k", "m", "experts", "alpha", "backend", "scale_format"),
    *("topk", "scoring", "num_groups", "topk_groups", *SWITCHES),
)


def _jobs(options: argparse.Namespace) -> list[deployment.Job]:
    facts = {name: getattr(options, name) for name in FACTS if getattr(options, name) is not None}
    if (options.op is None) == (options.config is None) or (options.config and facts):
        raise ValueError("name an op and its facts, or a file with --config")
    return deployment.read(options.config) if options.config else deployment.jobs_of(options.op, **facts)


def _tune(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    jobs = [job for job in _jobs(options) if registry.OPS[job.op].backends is not None]
    if not jobs:
        having = ", ".join(name for name, op in registry.OPS.items() if op.backends is not None)
        raise ValueError(f"nothing to tune: the ops with backends are {having}")
    if not torch.cuda.is_available():
        raise ValueError("tuning needs a CUDA device: it times kernels")
    failed = 0
    with tqdm(jobs, unit="call") as bar:
        for job in bar:
            bar.set_postfix_str(str(job))
            try:
                registry.warmup(job.op, tune=True, **dict(job.facts))
            except Exception as error:  # the DSL's errors have no common base
                failed += 1
                bar.write(f"{job}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{len(jobs) - failed} calls are done, {failed} failed; choices are kept in {tuner.path() or 'no file'}")
    return 1 if failed else 0


def _warmup(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    jobs = _jobs(options)
    archs = [arch_named(arch).name for arch in options.arch or info.archs_here()]
    if not archs:
        raise ValueError("there is no CUDA device here: say --arch")
    failed = 0
    with tqdm(total=len(jobs) * len(archs), unit="kernel") as bar:
        for outcome in deployment.compile_jobs(jobs, archs, options.workers):
            if outcome.error:
                failed += 1
                bar.write(f"{outcome.job} {outcome.arch}: {outcome.error}", file=sys.stderr)
            bar.update()
    _tell_flavour()
    print(f"{len(jobs) * len(archs) - failed} kernels are ready, {failed} failed")
    return 1 if failed else 0
