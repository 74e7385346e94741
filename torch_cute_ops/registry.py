"""Registry: the list of all ops, their registration with PyTorch, and functions that prepare kernels before calls.

Registration, conformance tests, docs and benchmarks all loop over ``OPS``. To add an op, add a module
``torch_cute_ops/ops/<op>.py`` that defines it. This module needs no change.
"""

import contextlib
import importlib
import pkgutil
from types import ModuleType
from typing import Any, Final

import torch

from torch_cute_ops import ops
from torch_cute_ops.ops._backend_path import BackendPath
from torch_cute_ops.ops._checks import check_dense
from torch_cute_ops.ops._define import NAMESPACE, OpSpec, as_tuple, refuse_gradient
from torch_cute_ops.ops._define import OPS as _DEFINED
from torch_cute_ops.ops._operands import cuda_device
from torch_cute_ops.ops._properties import Property
from torch_cute_ops.runtime import settings, tuning
from torch_cute_ops.runtime.arch import Arch, arch_named, arch_of_device
from torch_cute_ops.runtime.calls import configure_log, logged
from torch_cute_ops.runtime.compiler import KernelSpec, keep
from torch_cute_ops.runtime.dispatch import below_inplace, has_autograd_key, mark_written
from torch_cute_ops.runtime.imports import when_imported


def _discover() -> dict[str, OpSpec]:
    for module in pkgutil.iter_modules(ops.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{ops.__name__}.{module.name}")
    return dict(sorted(_DEFINED.items()))


OPS: Final[dict[str, OpSpec]] = _discover()

_library: Final = torch.library.Library(NAMESPACE, "FRAGMENT")


def _packed(output: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return an output of the reference with the strides that the fake op promises, because compiled programs rely on
    these strides even if an extent is 1.

    If ``strides`` is None, the fake op promises contiguous strides.
    """
    if strides is None:
        packed = torch.empty_like(output, memory_format=torch.contiguous_format)
    else:
        packed = output.new_empty_strided(output.shape, strides)
    return output if output.stride() == packed.stride() else packed.copy_(output)


def _register_fake(overload: str, fake: Any) -> None:
    """Register a fake implementation as ``torch.library.register_fake`` does, in less time: ``register_fake`` finds and
    reads the caller's source, which takes a fifth of the time of this package's import."""
    name, code = f"{NAMESPACE}::{overload}", fake.__code__
    library: Any = torch._library
    try:
        holder, handles = library.simple_registry.singleton.find(name).fake_impl, _library._registration_handles
        handle = holder.register(fake, f"{code.co_filename}:{code.co_firstlineno}", lib=_library)
    except (AttributeError, TypeError):  # a later version of torch
        torch.library.register_fake(name, fake, lib=_library)
    else:
        handles.append(handle)


def _register(spec: OpSpec) -> None:
    path, bind = spec.path, spec.bind

    def checked(*args: Any, **kwargs: Any) -> Any:
        call = bind(*args, **kwargs)
        if not has_autograd_key:
            given = path.arguments(call)
            refuse_gradient(spec.signature, [given[each.name] for each in spec.signature.tensors])
        path.check_dispatched(call)
        return call

    def cpu(*args: Any, **kwargs: Any) -> Any:
        call = checked(*args, **kwargs)
        path.check_values(call)
        old = path.verifier.before(call) if settings.CHECK else {}
        values, described = as_tuple(spec.compute(path.arguments(call))), path.output_shapes(call)
        outputs = tuple(_packed(value, each.strides) for value, each in zip(values, described, strict=True))
        if settings.CHECK:
            path.verifier.after(call, old, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def checked_outputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Check the arguments of a call. Return the call and its outputs; the outputs are removed from ``kwargs``."""
        outputs = [kwargs.pop(name) for name in spec.out_names]
        call = checked(*args, **kwargs)
        path.check_outputs(call, outputs)
        return call, outputs

    def cpu_out(*args: Any, **kwargs: Any) -> None:
        call, outputs = checked_outputs(args, kwargs)
        path.check_values(call)
        old = path.verifier.before(call) if settings.CHECK else {}
        arguments = path.arguments(call)
        values = spec.merge(outputs, as_tuple(spec.compute(arguments)), arguments)
        for output, value in zip(outputs, values, strict=True):
            output.copy_(value)
        if settings.CHECK:
            path.verifier.after(call, old, tuple(outputs))

    def fake(*args: Any, **kwargs: Any) -> Any:
        return path.empty_outputs(checked(*args, **kwargs))

    def fake_out(*args: Any, **kwargs: Any) -> None:
        checked_outputs(args, kwargs)

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        # PyTorch also calls this implementation if all tensor arguments are None.
        outputs = {name: kwargs.pop(name) for name in spec.out_names if name in kwargs}
        given = path.arguments(bind(*args, **kwargs))
        spec.signature.check_kinds(given.values())
        for name, value in {**given, **outputs}.items():
            if isinstance(value, torch.Tensor):
                check_dense(spec.name, name, value)
        device = given[spec.signature.tensors[0].name].device
        raise NotImplementedError(f"{spec.qualified_name} has no implementation for tensors on {device}")

    def written(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Increment the version counters after the call: a subclass such as DTensor has its own counter, which a kernel
        # that writes the inner tensor does not increment.
        outputs = functional.redispatch(keyset & below_inplace, *args, **kwargs)
        given = path.arguments(bind(*args, **kwargs))
        mark_written([given[name] for name in spec.updated if given[name] is not None])
        return outputs

    if settings.CHECK:
        # Imported in debug mode only, because the import takes time and memory.
        path.verifier = importlib.import_module("torch_cute_ops.verification").Verifier(spec)
    recorder = None
    if settings.DUMP is not None:
        recorder = importlib.import_module("torch_cute_ops.dump").recorder_of(spec)
    _library.define(spec.signature.schema, tags=spec.signature.tags)
    _library.define(spec.signature.out_schema)
    rest = {"CompositeExplicitAutograd": elsewhere}
    for overload, implementations in {
        spec.name: {"CPU": cpu, "CUDA": spec.cuda, "Autograd": spec.autograd, **rest},
        f"{spec.name}.out": {"CPU": cpu_out, "CUDA": spec.cuda_out, "Autograd": spec.autograd_out, **rest},
    }.items():
        for key, implementation in implementations.items():
            if key == "Autograd" and not has_autograd_key:
                continue
            if key in ("CPU", "CUDA"):
                if recorder is not None:
                    implementation = recorder.recorded(implementation)
                if settings.LOG == "debug":
                    implementation = logged(overload, implementation)
            _library.impl(overload, implementation, key)
    if spec.updated and below_inplace is not None:
        functional = getattr(torch.ops.cute, spec.name).default
        _library.impl(spec.name, written, "ADInplaceOrView", with_keyset=True)
    _register_fake(spec.name, fake)
    _register_fake(f"{spec.name}.out", fake_out)


def _register_flops(flop_counter: ModuleType) -> None:
    """Register the FLOP count of each GEMM with ``FlopCounterMode``."""
    for spec in OPS.values():
        path = spec.path
        if isinstance(path, BackendPath):

            def flops(a_shape: Any, b_shape: Any, *args: Any, path: BackendPath[Any] = path, **kwargs: Any) -> int:
                return path.flops(a_shape, b_shape)

            flop_counter.register_flop_formula(getattr(torch.ops.cute, spec.name))(flops)


def _generate(_dynamo: ModuleType) -> None:
    for spec in OPS.values():
        spec.generate()


configure_log()
for _spec in OPS.values():
    _register(_spec)
# Generate all code before Dynamo traces a call: Dynamo must not trace the stubs, which generate code on first use.
when_imported("torch._dynamo", _generate)
# Wait for the module's first import: importing the flop counter here would import Triton, which takes as long as
# importing the rest of this package.
when_imported("torch.utils.flop_counter", _register_flops)


def warmup(op: str, *, tune: bool = False, **properties: Any) -> None:
    """Compile and load the kernels that ``op`` needs for calls with these static properties.

    Afterwards, such calls neither compile nor load nor synchronise, and can be captured in a CUDA graph. The number of
    rows is not a static property: one kernel serves any number of rows. For a GEMM, ``warmup`` prepares the kernel that
    calls with about ``m`` rows use.

    Example:
        ``warmup("rmsnorm_fp4quant", hidden=7168, dtype=torch.bfloat16)``

    Args:
        op: name of the op, such as ``"rmsnorm_fp4quant"``.
        tune: True to choose among backends by timing them, as calls in an :func:`autotune` block do. No effect for an
            op without backends.
        properties: static properties that kernels are compiled for; ``properties_of(op)`` lists the properties of an
            op. All ops take ``device``. Ops that quantise rows take ``hidden`` (last dimension of ``input``),
            ``dtype``, ``weight_dtype``, and the op's own arguments for format and layout. FP4 ops also take
            ``global_scale`` (True if calls pass it), and ops with a gate take ``swiglu`` (True if calls pass parameters
            other than the defaults). GEMMs take ``n`` and ``k`` (columns of the result, and elements of a sum), ``m``
            (rows), ``alpha`` (``"one"`` element, or one for each ``"column"``, ``"expert"`` or ``"expert_column"``),
            ``bias_dtype``, ``experts`` (number of experts, for ops with experts), ``dtype``, and the op's own arguments
            from ``out_dtype`` on. ``grouped_mm_fp8`` also takes ``masked`` (True for the masked layout, with space for
            ``m`` rows of each expert) and ``counts`` (True if calls in the contiguous layout pass it). Steps of an
            expert layer take ``hidden``, ``dtype``, ``topk``, and a bool for each optional tensor that calls pass
            (``residual``, ``offsets``, ``counts``). ``moe_route`` takes ``experts``, ``dtype``, ``bias`` and ``masked``
            (True if calls use them), and its own arguments that choose experts. ``qkv_norm_rope_append`` takes
            ``head_dim``, ``dtype``, the dtypes of its other tensors (``key_dtype``, ``q_norm_dtype``, …), a bool for
            each scale that calls pass (``k_scale``, …), and its own arguments for heads and rotation.

    Raises:
        ValueError: for an unknown op, or a property whose value the op refuses.
        TypeError: for an unknown or missing property, or a property of the wrong type.
        RuntimeError: without a CUDA device, or on a device that no kernel supports.
    """
    spec = _spec_of(op)
    _check_properties(spec, properties)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"warmup({op!r}) needs a CUDA device: on a CPU the ops run their reference and compile nothing"
        )
    with torch.no_grad(), tuning.autotune() if tune else contextlib.nullcontext():
        call = spec.bind(**spec.path.example(**properties))
        device = call[0].device
        if tune and device.type == "cuda":
            # Imported here: few programs start processes, and the import takes 3 ms.
            from torch_cute_ops.runtime.compile_pool import compile_ahead

            compile_ahead(spec.path.kernels(call, device), arch_of_device(device.index))
        spec.path.run(None, None, *call)
        torch.cuda.synchronize(device)


def precompile(op: str, arch: str, **properties: Any) -> None:
    """Compile the kernels that ``op`` needs for calls with these static properties, into the cache on disk.

    No GPU is needed. A process with a GPU of that architecture and the same versions loads the kernels in milliseconds.

    Example:
        ``precompile("rmsnorm_fp4quant", "sm_90a", hidden=7168, dtype=torch.bfloat16)``

    Args:
        op: name of the op.
        arch: name of the architecture, such as ``"sm_90a"``, ``"sm_100a"`` or ``"sm_120a"``.
        properties: static properties, as for :func:`warmup`, without ``device``.

    Raises:
        ValueError: for an unknown op or architecture, or a property whose value the op refuses.
        TypeError: for an unknown or missing property, or a property of the wrong type.
        RuntimeError: if a kernel cannot be stored on disk.
    """
    for kernel in kernels_of(op, arch, **properties):
        keep(kernel, arch_named(arch))


def kernels_of(op: str, where: str | torch.device, **properties: Any) -> tuple[KernelSpec, ...]:
    """Return the kernels that ``op`` needs for calls with these static properties, on a CUDA device or, given the name
    of an architecture, on any of its known GPUs.

    Other arguments and errors are as for :func:`precompile`.
    """
    spec, target = _spec_of(op), arch_named(where) if isinstance(where, str) else where
    if "device" in properties:
        raise TypeError(f"cute::{op}: kernels are compiled for an architecture; only warmup takes device")
    return spec.kernels(target, **_example(spec, {**properties, "device": "meta"}))


def backends(op: str, arch: str | None = None, **properties: Any) -> dict[str, str | None]:
    """Return, for each backend of a GEMM, the reason why it cannot compute calls with these static properties, or None.

    None means that the backend supports the calls. The kernels of this package were tested on GPUs of compute
    capability 9.0. Kernels for other GPUs were tested only in a PTX emulator; ``"auto"`` chooses among these kernels by
    the GPUs' data sheets.

    Example:
        ``backends("mm_fp4", n=4096, k=7168, m=16)``, ``backends("mm_fp4", "sm_100a", n=4096, k=7168, m=16)``

    Args:
        op: name of the op.
        arch: name of an architecture, such as ``"sm_100a"``, for a GPU that need not be present; by default the
            architecture of ``device``.
        properties: static properties, as for :func:`warmup`. ``device`` may be a CPU. Without a GPU, a CPU is the
            default.

    Raises:
        ValueError: for an unknown op or architecture, an op without backends, or a property whose value the op refuses.
        TypeError: for an unknown or missing property, or a property of the wrong type.
    """
    spec = _spec_of(op)
    if not spec.has_backends:
        having = ", ".join(name for name, each in OPS.items() if each.has_backends)
        raise ValueError(f"{op!r} has no backends; ops with backends are {having}")
    named = properties.pop("device", None)
    if arch is None:
        where: torch.device | Arch = cuda_device(named if named is not None or torch.cuda.is_available() else "cpu")
    elif named is not None:
        raise TypeError(f"cute::{op}: got device={named!r} and arch={arch!r}; pass only one of them")
    else:
        where = arch_named(arch)
    return spec.backends(where, **_example(spec, {**properties, "device": "meta"}))


def properties_of(op: str) -> dict[str, Property]:
    """Return a dict of the static properties of an op's calls. The keys are the names of the properties, which
    :func:`warmup` takes as keyword arguments, together with ``device``.

    Raises:
        ValueError: for an unknown op.
    """
    return dict(_spec_of(op).path.statics)


def _example(spec: OpSpec, properties: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an example call with these static properties.

    Raises:
        TypeError, ValueError: as ``_check_properties``, and if the op refuses a value.
    """
    _check_properties(spec, properties)
    arguments: dict[str, Any] = spec.path.example(**properties)
    return arguments


def _check_properties(spec: OpSpec, properties: dict[str, Any]) -> None:
    """Check that calls of the op can have these static properties.

    Raises:
        TypeError: if the op lacks a property, or a value has the wrong type.
        ValueError: if a number is not a valid size, or a string is not one of the choices.
    """
    known = spec.path.statics
    for name, value in properties.items():
        if name == "device":
            continue
        if name not in known:
            raise TypeError(f"cute::{spec.name} has no property {name!r}; it has {', '.join(known)}")
        expected = known[name].reason_unfit(value)
        if expected is not None:
            text = f"cute::{spec.name}: {name} is {value!r}; expected {expected}"
            raise ValueError(text) if type(value) is known[name].kind else TypeError(text)
    missing = [name for name, each in known.items() if each.is_required and name not in properties]
    if missing:
        label = "property" if len(missing) == 1 else "properties"
        raise TypeError(f"cute::{spec.name} needs the {label} {', '.join(missing)}")


def _spec_of(op: str) -> OpSpec:
    spec = OPS.get(op)
    if spec is None:
        raise ValueError(f"{op!r} is no op; the ops are {', '.join(OPS)}")
    return spec
