"""``python -m torch_cute_ops replay``: run a dumped call again, and compare its result with the reference."""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from torch_cute_ops.cli.jobs import UsageError
from torch_cute_ops.registry import OPS


def add_replay(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="run a dumped call again",
        description="Run a call that TORCH_CUTE_OPS_DUMP has kept, print each output's shape and digest, and say where "
        "the result differs from the reference. The exit status is 1 if the result is wrong or the call fails.",
    )
    parser.add_argument("file", type=Path, help="dump: a safetensors file")
    parser.add_argument("--backend", metavar="NAME", help="backend to use instead of the call's, for a GEMM")
    parser.add_argument("--against", choices=("reference",), help="compare all rows of the result with the reference")
    parser.add_argument("--device", metavar="DEVICE", help="device (default: a GPU, if the call was on one)")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> int:
    # Import here, because other commands need neither these modules nor safetensors.
    from torch_cute_ops import dump as dumps
    from torch_cute_ops.verification import Verifier, every_row

    dump = dumps.Dump.read(options.file)
    spec = OPS.get(dump.about["op"])
    if spec is None:
        raise UsageError(f"{options.file}: this version has no op {dump.about['op']}")
    device = _device(options.device, dump.about)
    _print_differences(dump.about, spec.signature, dumps.versions())
    if dump.missing:
        print(f"not stored, replaced by zeros: {', '.join(dump.missing)}")
    try:
        call, old, outputs = dumps.replay(dump, spec, device, options.backend)
    except Exception as error:  # the op may raise any error; often a replay is run to see that error again
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    given = spec.path.arguments(call)
    updated = ((name, given[name]) for name in spec.updated if given[name] is not None)
    for name, output in (*zip(spec.outputs, outputs, strict=True), *updated):
        content = output.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if output.numel() else b""
        kind, digest = str(output.dtype).removeprefix("torch."), hashlib.sha256(content).hexdigest()[:16]
        print(f"{name}: {kind}{list(output.shape)} on {output.device}, SHA-256 {digest}")
    if options.against is None or not all(output.numel() for output in outputs):
        return 0
    with every_row(), torch.no_grad():
        found = Verifier(spec).compare(spec, call, {**given, **old}, given, outputs)
    print(f"differs from the reference: {found}" if found else "equals the reference, within the op's error bounds")
    return 1 if found else 0


def _device(named: str | None, about: dict[str, Any]) -> torch.device:
    if named is not None:
        try:
            return torch.device(named)
        except RuntimeError as error:
            raise UsageError(f"--device {named}: {str(error).splitlines()[0]}") from None
    tensors = (each for each in about["arguments"].values() if isinstance(each, dict) and "tensor" in each)
    was_on_gpu = any(each["device"].startswith("cuda") for each in tensors)
    return torch.device("cuda" if was_on_gpu and torch.cuda.is_available() else "cpu")


def _print_differences(about: dict[str, Any], signature: Any, here: dict[str, Any]) -> None:
    """Print what the dump says about the call, and which versions differ from the versions here."""
    tactic = about["tactic"]
    print(f"cute::{about['op']}, call {about['number']} of its process, {about['time']}")
    if tactic is not None:
        print(f"  backend and tactic then: {tactic}")
    if about["schema"] not in (signature.schema, signature.out_schema):
        print(f"  schema then: {about['schema']}")
    for name, then in about["versions"].items():
        now = here.get(name)
        if then != (list(now) if isinstance(now, tuple) else now):
            print(f"  {name}: then {then}, here {now}")
