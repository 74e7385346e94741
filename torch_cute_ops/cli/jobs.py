"""Command-line arguments that name calls: an op with its static properties, or a file that lists calls."""

import argparse
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops import deployment, registry


class UsageError(ValueError):
    """Error in the command line's arguments, or in a deployment file."""


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments that ``read_jobs`` reads."""
    parser.add_argument("op", nargs="?", help="name of the op, unless --config is given")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="file with tables [[kernel]]")
    group = parser.add_argument_group("static properties of the calls, as torch_cute_ops.warmup takes them")
    for name, ops in _properties().items():
        properties = [registry.properties_of(op)[name] for op in ops]
        option, one = f"--{name.replace('_', '-')}", properties[0]
        expected = f"{deployment.expected(one)}; " if one.choices or one.kind is torch.dtype else ""
        text = f"{expected}{_ops_in_words(ops)}"
        if all(each.kind is bool for each in properties):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = {int: "N", torch.dtype: "DTYPE"}.get(one.kind, "NAME")
            group.add_argument(option, nargs="+", metavar=metavar, help=text)


def read_jobs(options: argparse.Namespace) -> list[deployment.Job]:
    """Return the jobs (calls to prepare) that the command line describes.

    Raises:
        UsageError: if the arguments or the file are wrong.
    """
    named = vars(options)
    properties = {name: named[name] for name in _properties() if named.get(name) is not None}
    op = named.get("op")
    if (op is None) == (options.config is None) or (options.config and properties):
        raise UsageError("name an op and its properties, or a file with --config")
    try:
        return deployment.read(options.config) if op is None else deployment.jobs_of(op, **_parsed(op, properties))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(error if op is None else f"{op}: {error}") from None


def read_gemm_jobs(options: argparse.Namespace) -> list[deployment.Job]:
    """Return the jobs of ops with several backends. Ignore other jobs if a file lists them.

    Raises:
        UsageError: if no job is left, or the arguments or the file are wrong.
    """
    gemms = [name for name, op in registry.OPS.items() if op.has_backends]
    is_other = options.op in registry.OPS and options.op not in gemms
    jobs = [] if is_other else [job for job in read_jobs(options) if job.op in gemms]
    if not jobs:
        raise UsageError(f"no GEMM to tune; the ops with several backends are {', '.join(gemms)}")
    return jobs


def _properties() -> dict[str, list[str]]:
    """Return, for each static property, the names of the ops that take it."""
    found: dict[str, list[str]] = {}
    for op in registry.OPS:
        for name in registry.properties_of(op):
            found.setdefault(name, []).append(op)
    return found


def _ops_in_words(ops: list[str]) -> str:
    return ", ".join(ops) if len(ops) <= 4 else f"{', '.join(ops[:3])} and {len(ops) - 3} more ops"


def _parsed(op: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Convert properties that consist of digits to numbers."""
    known = registry.properties_of(op) if op in registry.OPS else {}
    numbers = {name for name, each in known.items() if each.kind is int}
    return {
        name: [int(word) if word.lstrip("-").isdecimal() else word for word in words] if name in numbers else words
        for name, words in properties.items()
    }
