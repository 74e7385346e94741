"""The list of ops, and their registration with PyTorch.

Everything that loops over ops (registration, conformance tests, docs, benchmarks) loops over ``OPS``. Each module
``torch_cute_ops/ops/<op>.py`` binds ``OP`` to an ``OpSpec``; a new module there is a new op.
"""

import contextlib
import importlib
import inspect
import pkgutil
from typing import Any, Final

import torch

from torch_cute_ops import ops
from torch_cute_ops.ops._spec import NAMESPACE, Call, OpSpec, as_tuple, check_outputs, cuda_device
from torch_cute_ops.runtime import settings, tuning
from torch_cute_ops.runtime.arch import arch_named
from torch_cute_ops.runtime.calls import configure_log, logged
from torch_cute_ops.runtime.compiler import Wanted, keep


def _discover() -> dict[str, OpSpec]:
    names = sorted(module.name for module in pkgutil.iter_modules(ops.__path__) if not module.name.startswith("_"))
    specs = (importlib.import_module(f"{ops.__name__}.{name}").OP for name in names)
    return {spec.name: spec for spec in specs}


OPS: Final[dict[str, OpSpec]] = _discover()

_library: Final = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register(spec: OpSpec) -> None:
    def cpu(*args: Any, **kwargs: Any) -> Any:
        spec.check(*args, **kwargs)
        return spec.reference(*args, **kwargs)

    def cpu_out(*args: Any, **kwargs: Any) -> None:
        outputs = [kwargs.pop(name) for name in spec.out_names]
        spec.check(*args, **kwargs)
        check_outputs(spec, outputs, args, kwargs)
        for output, value in zip(outputs, as_tuple(spec.reference(*args, **kwargs)), strict=True):
            output.copy_(value)

    def fake(*args: Any, **kwargs: Any) -> Any:
        spec.check(*args, **kwargs)
        return spec.fake(*args, **kwargs)

    def fake_out(*args: Any, **kwargs: Any) -> None:
        outputs = [kwargs.pop(name) for name in spec.out_names]
        spec.check(*args, **kwargs)
        check_outputs(spec, outputs, args, kwargs)

    _library.define(spec.schema)
    _library.define(spec.out_schema)
    for overload, implementations in {
        spec.name: {"CPU": cpu, "CUDA": spec.cuda},
        f"{spec.name}.out": {"CPU": cpu_out, "CUDA": spec.cuda_out},
    }.items():
        for key, implementation in implementations.items():
            entry = logged(overload, implementation) if settings.LOG == "debug" else implementation
            _library.impl(overload, entry, key)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", fake, lib=_library)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}.out", fake_out, lib=_library)


configure_log()
for _spec in OPS.values():
    _register(_spec)


def warmup(op: str, *, tune: bool = False, **facts: Any) -> None:
    """Compile and load the kernel that ``op`` needs for calls with these static facts, so that nothing happens later.

    After it, such calls neither compile nor load nor synchronise, and may be captured in a CUDA graph. The number of
    rows is no fact: one kernel serves all.

    Example:
        ``warmup("rmsnorm_fp4quant", hidden=7168, dtype=torch.bfloat16, scale_layout="128x4")``

    Args:
        op: the op's name, such as ``"rmsnorm_fp4quant"``.
        tune: whether to choose among backends by timing them, as calls in an :func:`autotune` block do; an op without
            backends has nothing to choose.
        facts: what the kernel is compiled for. For the ops that quantise rows: ``hidden`` (the last dimension of
            ``input``), ``dtype``, ``weight_dtype``, ``device``, and the op's own arguments that choose format and
            layout; FP4: also ``global_scale``, whether calls pass one. For the products: ``n`` and ``k`` (columns, and
            elements of a sum), ``m`` (rows: the choice of a backend is for those near it), ``alpha`` (whether calls
            pass one) or ``experts`` (how many, of an op that has them), ``dtype``, ``device``, and the op's own
            arguments from ``out_dtype`` on; of ``grouped_mm_fp8`` also ``masked``, whether the layout is, with ``m``
            rows that an expert has room for, or ``counts``, whether calls in the contiguous layout pass them. For the
            steps of an expert layer: ``hidden``, ``dtype``, ``topk``, and for each optional tensor whether calls pass
            it (``residual``, ``offsets``, ``counts``); of ``moe_route`` ``experts``, ``dtype``, whether there is a
            ``bias``, whether calls are ``masked``, and its own arguments that choose experts.

    Raises:
        ValueError: for an unknown op, or facts that the op refuses.
        TypeError: for a fact that the op does not have.
        RuntimeError: without a CUDA device, or on one that no kernel supports.
    """
    spec = _spec_of(op)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"warmup({op!r}) needs a CUDA device: on a CPU the ops run their reference and compile nothing"
        )
    with torch.no_grad(), tuning.autotune() if tune else contextlib.nullcontext():
        args, kwargs = _example(spec, facts)
        spec.cuda(*args, **kwargs)
        torch.cuda.synchronize(args[0].device)


def precompile(op: str, arch: str, **facts: Any) -> None:
    """Compile the kernels that ``op`` needs for calls with these static facts, into the cache on disk.

    Needs no GPU. A process with that architecture and the same versions then loads it in milliseconds.

    Example:
        ``precompile("rmsnorm_fp4quant", "sm_90a", hidden=7168, dtype=torch.bfloat16)``

    Args:
        op: the op's name.
        arch: the architecture, such as ``"sm_90a"``, ``"sm_100a"`` or ``"sm_120a"``.
        facts: as for :func:`warmup`, without ``device``.

    Raises:
        ValueError: for an unknown op or architecture, or facts that the op refuses.
        TypeError: for a fact that the op does not have.
        RuntimeError: if the kernel cannot be kept on disk.
    """
    for kernel in kernels_of(op, arch, **facts):
        keep(kernel, arch_named(arch))


def kernels_of(op: str, arch: str, **facts: Any) -> tuple[Wanted, ...]:
    """The kernels that ``op`` needs for calls with these static facts.

    Arguments and errors are as of :func:`precompile`.
    """
    spec, target = _spec_of(op), arch_named(arch)
    if "device" in facts:
        raise TypeError(f"cute::{op}: the fact device is for warmup; kernels are compiled for an architecture")
    args, kwargs = _example(spec, {**facts, "device": "meta"})
    return spec.kernels(target, *args, **kwargs)


def backends(op: str, **facts: Any) -> dict[str, str | None]:
    """Each backend of a product and why it cannot compute calls with these static facts; ``None``: it can.

    Example:
        ``backends("mm_fp4", n=4096, k=7168, m=16)``

    Args:
        op: the op's name.
        facts: as for :func:`warmup`; ``device`` may be a CPU, and is one by default where there is no GPU.

    Raises:
        ValueError: for an unknown op, one that has no backends, or facts that the op refuses.
        TypeError: for a fact that the op does not have.
    """
    spec = _spec_of(op)
    if spec.backends is None:
        having = ", ".join(name for name, spec in OPS.items() if spec.backends is not None)
        raise ValueError(f"{op!r} has one implementation a device; those with backends are {having}")
    named = facts.pop("device", None)
    device = cuda_device(named if named is not None or torch.cuda.is_available() else "cpu")
    args, kwargs = _example(spec, {**facts, "device": "meta"})
    return spec.backends(device, *args, **kwargs)


def _example(spec: OpSpec, facts: dict[str, Any]) -> Call:
    """A call with these facts.

    Raises:
        TypeError: for a fact that the op does not have, or that is missing.
    """
    try:
        inspect.signature(spec.example).bind(**facts)
        args, kwargs = spec.example(**facts)
        inspect.signature(spec.function).bind(*args, **kwargs)
    except TypeError as error:
        text = str(error)
        raise TypeError(text if text.startswith("cute::") else f"cute::{spec.name}, facts of a call: {text}") from None
    return args, kwargs


def _spec_of(op: str) -> OpSpec:
    spec = OPS.get(op)
    if spec is None:
        raise ValueError(f"{op!r} is no op; the ops are {', '.join(OPS)}")
    return spec
