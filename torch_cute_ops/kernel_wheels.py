"""Kernels of well-known models, and wheels that contain them.

The kernels are collected by running one layer of each kind in a model with fake tensors, so neither the checkpoint nor
a GPU is needed.
"""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from torch_cute_ops._version import __version__
from torch_cute_ops.collecting import CollectKernels
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.nn import ExpertLayer, QuantExperts
from torch_cute_ops.nn._base import Activations, QuantLinear
from torch_cute_ops.nn.experts import SwiGLU
from torch_cute_ops.nn.quantize import SCHEMES
from torch_cute_ops.nn.warmup import collect
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import bundle_build, files
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.bundle import GROUP, Bundle, BundleError
from torch_cute_ops.runtime.compiler import KernelSpec

log = logging.getLogger("torch_cute_ops")

DTYPE: Final = torch.bfloat16
MOST_ROWS: Final = 8192


def _rows() -> Iterator[int]:
    yield from range(1, 8)
    rows = 8
    while rows <= MOST_ROWS:
        yield rows
        rows = bucket(rows + 1)


ROWS: Final = tuple(_rows())
"""Numbers of rows for which kernels are built by default: each number below 8, because calls with experts use different
kernels for them, and one number per larger bucket. All calls with up to ``MOST_ROWS`` rows find their kernels."""


@dataclass(frozen=True)
class Experts:
    """Experts of a layer.

    Attributes:
        count: number of experts.
        topk: number of experts per token.
        width: intermediate size of an expert.
        swiglu: parameters of the gate.
        has_bias: True if the experts' layers have biases.
        scoring: function of the router's logits.
        shared: intermediate size of the shared expert, or 0 without one.
    """

    count: int
    topk: int
    width: int
    swiglu: SwiGLU = SwiGLU()  # noqa: RUF009  an immutable tuple
    has_bias: bool = False
    scoring: str = "softmax"
    shared: int = 0


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layers.

    Attributes:
        hidden: hidden size.
        linears: sizes of each kind of linear layer: the N of each merged projection, such as (N of q, N of k, N of v),
            and K.
        formats: (scheme, activations) of each format in which checkpoints of the model exist; values as in
            ``nn.quantize_``.
        experts: experts of a layer, or None.
    """

    hidden: int
    linears: tuple[tuple[tuple[int, ...], int], ...]
    formats: tuple[tuple[str, Activations], ...]
    experts: Experts | None = None


_DENSE: Final[tuple[tuple[str, Activations], ...]] = (
    ("nvfp4", "fp4"),
    ("nvfp4", "16bit"),
    ("mxfp4", "fp8"),
    ("fp8_block", "auto"),
    ("fp8_channel", "auto"),
)
MODELS: Final = {
    "llama-8b": Model(
        4096, (((4096, 1024, 1024), 4096), ((4096,), 4096), ((14336, 14336), 4096), ((4096,), 14336)), _DENSE
    ),
    "llama-70b": Model(
        8192, (((8192, 1024, 1024), 8192), ((8192,), 8192), ((28672, 28672), 8192), ((8192,), 28672)), _DENSE
    ),
    "qwen3-30b-a3b": Model(
        2048,
        (((4096, 512, 512), 2048), ((2048,), 4096)),
        (("fp8_block", "auto"), ("nvfp4", "fp4")),
        Experts(128, 8, 768),
    ),
    "deepseek-v3": Model(
        7168,
        (
            ((1536, 576), 7168),
            ((24576,), 1536),
            ((32768,), 512),
            ((7168,), 16384),
            ((18432, 18432), 7168),
            ((7168,), 18432),
        ),
        (("fp8_block", "auto"),),
        Experts(256, 8, 2048, scoring="sigmoid", shared=2048),
    ),
    "gpt-oss-120b": Model(2880, (), (("mxfp4", "auto"),), Experts(128, 4, 2880, SwiGLU(1.702, 1.0, 7.0), True)),
}
"""Models by name. Sizes are from the models' configurations."""


def kernels_of_model(
    name: str, arch: Arch, rows: Iterable[int] = ROWS, formats: Collection[str] | None = None
) -> Iterator[KernelSpec]:
    """Yield the kernels that ``nn.warmup`` would load for a model on GPUs of ``arch``, for each of its formats.

    If ``arch`` supports only some of a format's calls, a warning names each op without a kernel.

    Args:
        name: name of the model.
        arch: architecture.
        rows: numbers of rows.
        formats: schemes of the formats, such as ``"nvfp4"``; None for all formats of the model.

    Raises:
        ValueError: for an unknown model, a format unknown for the model, a number of rows that is not positive,
            or a format without any GEMM for ``arch``.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is no known model; the models are {', '.join(MODELS)}")
    schemes = list(dict.fromkeys(scheme for scheme, _ in MODELS[name].formats))
    if unknown := [each for each in formats or () if each not in schemes]:
        raise ValueError(f"{name} has no format {unknown[0]!r}; its formats are {', '.join(schemes)}")
    numbers = tuple(rows)
    for scheme, activations in MODELS[name].formats:
        if formats is None or scheme in formats:
            with FakeTensorMode():
                layers = _layers(MODELS[name], SCHEMES[scheme], activations)
                collected = collect(layers, numbers, arch, DTYPE)
            _check_collected(f"{name} in {scheme} with {activations} activations", collected, arch)
            yield from collected.kernels[arch]


def _check_collected(model: str, collected: CollectKernels, arch: Arch) -> None:
    """Warn of each op that ``arch`` does not support.

    Raises:
        ValueError: if ``arch`` supports no GEMM.
    """
    errors = {op: str(error).removeprefix(f"cute::{op}: ") for op, error in collected.refused}
    if not any(OPS[op].has_backends for op in collected.served):
        reasons = "; ".join(f"{op}: {error}" for op, error in errors.items())
        raise ValueError(f"{model}: no GEMM runs on {arch.name}; choose other formats or models. {reasons}")
    for op, error in errors.items():
        log.warning("%s: no kernel of %s for %s: %s", model, op, arch.name, error)


def _layers(model: Model, cls: type[QuantLinear], activations: Activations) -> nn.Module:
    """Return an RMSNorm, one linear layer of each kind, and an expert layer."""
    layers = nn.ModuleList([nn.RMSNorm(model.hidden, dtype=DTYPE)])
    layers += [cls(k, sum(parts), parts=parts, activations=activations) for parts, k in model.linears]
    if (given := model.experts) is not None:
        shared = [cls(model.hidden, 2 * given.shared), cls(given.shared, model.hidden)] if given.shared else []
        layers.extend(shared)
        gate_up, down = (
            cls(k, given.count * n * many, parts=(n,) * (given.count * many), bias=given.has_bias)
            for n, k, many in ((given.width, model.hidden, 2), (model.hidden, given.width, 1))
        )
        experts = QuantExperts(gate_up, down, given.count, swiglu=given.swiglu, topk=given.topk)
        router = torch.zeros(given.count, model.hidden)
        layers.append(ExpertLayer(router, experts, given.topk, scoring=given.scoring))  # type: ignore[arg-type]
    return layers


def wheel_name(arch: str) -> str:
    """Return the name of the package with the kernels of an architecture: ``torch_cute_ops_kernels_sm90``."""
    return f"torch_cute_ops_kernels_{arch.rstrip('af').replace('_', '')}"


def build_wheel(
    folder: Path,
    arch: Arch,
    kernels: Sequence[KernelSpec],
    contents: str,
    *,
    with_runtime: bool = False,
    workers: int | None = None,
) -> Path:
    """Build a wheel with the kernels of an architecture, which ``torch_cute_ops`` finds by its entry point.

    Args:
        folder: folder to write the wheel to; created if missing.
        arch: architecture.
        kernels: kernels.
        contents: one-line description of the kernels for the wheel's metadata.
        with_runtime: True to include the DSL's runtime library, so that the DSL need not be installed. The library is
            NVIDIA's: mind its licence when you pass it on.
        workers: number of processes, as for ``compile_all``.

    Returns:
        Path of the wheel.

    Raises:
        BundleError: if the bundle or the wheel cannot be built.
        OSError: if a file cannot be written.
    """
    name = wheel_name(arch.name)
    with tempfile.TemporaryDirectory() as work:
        package = Path(work, name)
        bundle_build.build(package / "bundle", [(kernel, arch.name) for kernel in kernels], workers)
        built = Bundle(package / "bundle")
        if with_runtime:
            bundle_build.add_runtime(package / "bundle")
        (package / "__init__.py").write_text(f"{_quoted(contents)}\n", encoding="utf-8")
        requires = [f"torch-cute-ops=={__version__}", f"apache-tvm-ffi=={built.manifest['tvm_ffi']}"]
        project = _project(name, arch.name, contents, requires)
        Path(work, "pyproject.toml").write_text(project, encoding="utf-8")
        Path(work, "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = linux_{built.manifest['host'][0]}\n")
        files.make_folder(folder)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        options = ["--disable-pip-version-check", "--no-index", "--wheel-dir", str(Path(work, "dist")), work]
        done = subprocess.run([*command, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        found = list(Path(work, "dist").glob("*.whl"))
        if done.returncode or len(found) != 1:
            raise BundleError(f"pip cannot build the wheel (it needs setuptools): {done.stderr.strip()}")
        return Path(shutil.copy(found[0], folder / found[0].name))


def _quoted(text: str) -> str:
    """Quote a text, which may contain any path, as a string literal that is valid in both TOML and Python."""
    valid = text.encode("utf-8", "replace").decode()  # a path may contain bytes that are not UTF-8
    return json.dumps(valid, ensure_ascii=False).replace("\x7f", "\\u007f")


def _project(name: str, arch: str, contents: str, requires: Sequence[str]) -> str:
    """Return the ``pyproject.toml`` of a wheel of kernels."""
    return textwrap.dedent(
        f"""\
        [build-system]
        requires = ["setuptools>=77.0.3"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "{name.replace("_", "-")}"
        version = "{__version__}"
        description = "Compiled kernels of torch_cute_ops for {arch}"
        readme = {{text = {_quoted(contents)}, content-type = "text/plain"}}
        requires-python = ">=3.10"
        dependencies = {list(requires)!r}

        [project.entry-points."{GROUP}"]
        {arch} = "{name}"

        [tool.setuptools]
        packages = ["{name}"]

        [tool.setuptools.package-data]
        {name} = ["bundle/*"]
        """
    )
