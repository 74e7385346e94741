"""The code between a CUDA call of an op and its kernel launch: launcher cache, fast path and checked path.

``CallPath.run`` looks up a launcher by the call's static key, which never contains the number of rows, and calls the
launcher. The launcher's compiled function refuses unsuitable tensors, and outputs that overlap another tensor, before
it launches anything. After such a refusal, and for the first call with a key, ``run_checked`` runs instead: it checks
every argument, explains errors, copies tensors that a kernel cannot read in place, and plans and compiles kernels.
"""

import abc
import importlib
import numbers
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch

from torch_cute_ops.formats.shapes import Output, OutputShapes
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._operands import cuda_device
from torch_cute_ops.ops._properties import Property, argument
from torch_cute_ops.ops._signature import Signature
from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.calls import described, launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel
from torch_cute_ops.runtime.dispatch import mark_written

Call = TypeVar("Call", bound=tuple[Any, ...])
Outputs = tuple[torch.Tensor, ...]

MOST_LAUNCHERS: Final = 4096
"""Maximum number of launchers per op, about 1 KB each. When it is reached, the oldest launcher is dropped."""

_storing = threading.Lock()
_launched: Final[set[tuple[KernelSpec, int]]] = set()
"""(kernel, device) of each kernel that was launched. Its module is loaded, so a CUDA graph can capture the kernel."""


def _of_python(value: Any) -> Any:
    """Convert a number of another library, such as ``numpy.int64``, to a Python number."""
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


class Launcher(abc.ABC, Generic[Call]):
    """Object that computes all calls with the same static key.

    Attributes:
        kernels: kernels that a call launches.
        is_kept: True if later calls with the key use the launcher.
    """

    kernels: tuple[KernelSpec, ...]
    is_kept: bool = True

    def run(self, call: Call, out: Any) -> Any:
        """Compute a call whose arguments are not checked, into ``out`` or new outputs, and return the outputs. This is
        the op's fast path, if it has one.

        Return None, without launching anything, if the fast path does not support the call. If the compiled function
        refuses a tensor, raise before anything is launched.
        """
        return None

    @abc.abstractmethod
    def launch(self, call: Call, out: Any) -> None:
        """Compute a checked call into ``out``. Tensors that the kernel cannot access in place are copied."""


class CallPath(abc.ABC, Generic[Call]):
    """Code that finds or creates the launcher for a CUDA call of one op. The ops of a family share a subclass.

    Args:
        fixed: values for fields of ``call_type`` that no parameter of the op sets. Fields that are set neither here nor
            by a parameter keep their defaults.

    Attributes:
        call_type: ``NamedTuple`` of a call's arguments; the first field is a tensor.
        renames: fields of ``call_type`` whose names differ from the op's parameters, keyed by parameter.
        may_share: name of an output and name of an argument that may be the same tensor.
        hints: arguments whose contents do not affect results, so that outputs may share memory with them.
        any_address: outputs that need no alignment to 16 bytes.
        integer_outputs: names of integer outputs, which cannot require grad.
        verifier: object that checks calls in debug mode, a ``torch_cute_ops.verification.Verifier``.
        has_backends: True if several backends can compute a call.
    """

    verifier: Any
    call_type: ClassVar[Any]
    renames: ClassVar[dict[str, str]] = {}
    may_share: ClassVar[tuple[str, str] | None] = None
    hints: ClassVar[frozenset[str]] = frozenset()
    any_address: ClassVar[frozenset[str]] = frozenset()
    integer_outputs: frozenset[str] = frozenset()
    has_backends: ClassVar[bool] = False

    def __init__(self, **fixed: Any) -> None:
        self.fixed = fixed
        self.launchers: dict[tuple[Any, ...], Launcher[Call]] = {}

    def bind(self, signature: Signature) -> None:
        """Attach the path to the op that has this signature."""
        self.signature = signature
        self.op = signature.name
        self.is_single = len(signature.outputs) == 1
        fields = self.call_type._fields
        unknown = [name for name in signature.names if self.renames.get(name, name) not in fields]
        if unknown:
            raise TypeError(f"{self.op}: {self.call_type.__name__} has no field for {', '.join(unknown)}")
        self.positions = tuple(fields.index(self.renames.get(name, name)) for name in signature.names)
        self.statics = self.declare()
        self.updated = tuple(fields.index(self.renames.get(name, name)) for name in signature.updated)

    # Methods that each family of ops defines

    @abc.abstractmethod
    def key(self, call: Call, device: int) -> tuple[Any, ...]:
        """Return the static key of a call on a CUDA device. Calls with equal keys use the same launcher.

        Raises:
            AttributeError: if an argument is not a tensor.
        """

    @abc.abstractmethod
    def check(self, call: Call) -> None:
        """Check the values of arguments that already have the right types, on any device.

        Raises:
            ValueError: if a value, shape, device, layout or format is wrong.
            TypeError: if a dtype is wrong.
        """

    def check_values(self, call: Call) -> None:
        """Check the values in the CPU tensors of a call that has passed ``check``. Values on a GPU are not checked.

        Raises:
            ValueError: if an index is out of range.
        """

    @abc.abstractmethod
    def make_launcher(self, call: Call, device: int) -> Launcher[Call]:
        """Return a launcher that can compute checked calls with the same static key as this call on a CUDA device.
        ``compile`` compiles its kernels."""

    @abc.abstractmethod
    def kernels(self, call: Call, where: torch.device | Arch) -> tuple[KernelSpec, ...]:
        """Return the kernels that calls like this one launch on a CUDA device, or may launch on GPUs of an
        architecture. The tensors may be on the meta device."""

    @abc.abstractmethod
    def declare(self) -> dict[str, Property]:
        """Return the static properties of the op's calls, keyed by name, except ``device``."""

    @abc.abstractmethod
    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments, by name, of an example call. Its static properties are the attributes of ``given``.

        The result may contain arguments that the op does not have.
        """

    def backends(self, call: Call, where: torch.device | Arch) -> dict[str, str | None]:
        """Return, for each backend, the reason why it cannot compute the call on this device or architecture, or None
        if it can."""
        raise NotImplementedError

    def tactic(self, call: Call, device: torch.device) -> tuple[Any, ...]:
        """Return the backend, and the tactic, that compute a call on a CUDA device."""
        raise NotImplementedError

    def output_shapes(self, call: Call) -> list[Output]:
        """Describe the outputs of a checked call, by the function in ``fake/<op>.py``."""
        fake = importlib.import_module(f"torch_cute_ops.fake.{self.op}")
        shapes: OutputShapes = getattr(fake, self.op)(**self.arguments(call))
        return [Output(*each) for each in shapes]

    def for_outputs(self, call: Call, out: Any) -> Call:
        """Return the call with its layout arguments set to the layouts of the given outputs. ``out`` is one tensor, or
        a tuple."""
        return call

    def fill_without_work(self, call: Call, out: Outputs) -> bool:
        """If a checked call needs no kernel, for example because it has no rows, fill its outputs and return True."""
        return all(output.numel() == 0 for output in out)

    # Static properties

    def arguments_as_properties(self, *names: str) -> dict[str, Property]:
        """Return the static properties whose values are arguments of the op. Skip names of arguments that the op
        lacks."""
        return {each.name: argument(each) for each in self.signature.parameters if each.name in names}

    def properties(self, call: Call) -> dict[str, Any]:
        """Return the static properties of a call, from which ``example`` can make a similar call."""
        values = {name: each.of(call) for name, each in self.statics.items()}
        return {name: value for name, value in values.items() if value is not None or self.statics[name].is_optional}

    def example(self, *, device: torch.device | int | str | None = None, **properties: Any) -> dict[str, Any]:
        """Return the arguments, by name, of a call on ``device`` that has these static properties.

        Raises:
            TypeError: if a required property is missing, or the op lacks a property.
            ValueError: if the op refuses a value.
        """
        unknown = [name for name in properties if name not in self.statics]
        if unknown:
            raise TypeError(f"cute::{self.op} has no property {unknown[0]!r}; it has {', '.join(self.statics)}")
        missing = [name for name, each in self.statics.items() if each.is_required and name not in properties]
        if missing:
            label = "property" if len(missing) == 1 else "properties"
            raise TypeError(f"cute::{self.op} needs the {label} {', '.join(missing)}")
        given = {name: properties.get(name, each.default) for name, each in self.statics.items()}
        made = self.make_example(SimpleNamespace(**given), cuda_device(device))
        return {name: made[name] for name in self.signature.names if name in made}

    # The call path

    def run(self, out: Any, device: int | None, *values: Any) -> Any:
        """Compute a call on CUDA tensors, given the fields of ``call_type``; return the outputs.

        Args:
            out: outputs that the caller gave: one tensor, a tuple of several, or None.
            device: index of the first tensor's device, or None to look it up, which takes 0.07 µs.
            values: fields of the call.
        """
        # ``tuple.__new__`` takes half as long as ``call_type._make``
        call = tuple.__new__(self.call_type, values)
        try:
            if device is None:
                device = call[0].get_device()
            launcher = self.launchers.get(self.key(call, device))
            result = None if launcher is None else launcher.run(call, out)
        except Exception:  # TVM-FFI, DLPack or CUDA failed, or an argument is not a tensor; run_checked finds why
            result = None
        if result is None:
            result = self.run_checked(call, out)
        if out is not None:
            mark_written((out,) if self.is_single else out)
        if self.updated:
            mark_written([values[i] for i in self.updated if values[i] is not None])
        return result

    def run_verified(self, out: Any, device: int | None, *values: Any) -> Any:
        """Compute a call as :meth:`run` does, and also check its values and results. ``TORCH_CUTE_OPS_CHECK`` selects
        this method."""
        call = self.call_type._make(map(_of_python, values))
        self.check_call(call)
        old = self.verifier.before(call)
        result = self.run(out, device, *values)
        if out is not None:
            call = self.for_outputs(call, out)
        self.verifier.after(call, old, (result,) if self.is_single else tuple(result))
        return result

    def run_checked(self, call: Call, out: Any) -> Any:
        """Compute a call and check all its arguments first.

        This path is used for the first call with a static key, and for calls that the fast path or the compiled
        function refused.
        """
        call = self.call_type._make(map(_of_python, call))
        self.check_call(call)
        device = call[0].device
        given = None if out is None else (out,) if self.is_single else tuple(out)
        outputs = self._outputs(call, given)
        if given is not None:
            call = self.for_outputs(call, out)
        result = outputs[0] if self.is_single else outputs
        if not self.fill_without_work(call, outputs):
            key = self.key(call, call[0].get_device())
            launcher = self.launchers.get(key)
            if launcher is None:
                launcher = self.make_launcher(call, device.index or 0)
            try:
                launcher.launch(call, result)
            except (RuntimeError, ValueError, TypeError):  # raised by torch, for example because memory is full
                raise
            except Exception as error:  # raised by CUDA
                raise launch_error(self.op, error, *call) from error
            _launched.update((kernel, device.index or 0) for kernel in launcher.kernels)
            if launcher.is_kept:
                self._keep(key, launcher)
        return result

    def check_call(self, call: Call) -> None:
        """Check that the op accepts the arguments.

        Raises:
            TypeError: if an argument has a wrong kind or dtype.
            ValueError: if anything else is wrong.
        """
        given = self.arguments(call)
        self.signature.check_kinds(given.values())
        self._check_tensors(call, given)

    def check_dispatched(self, call: Call) -> None:
        """Check a call that has passed PyTorch's dispatcher.

        The dispatcher has matched the arguments to the schema. It overlooks only one wrong type: None for a required
        tensor.
        """
        given = self.arguments(call)
        if any(given[name] is None for name in self.signature.required_tensors):
            self.signature.check_kinds(given.values())
        self._check_tensors(call, given)

    def _check_tensors(self, call: Call, given: dict[str, Any]) -> None:
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                _checks.check_dense(self.op, name, value)
        self.check(call)
        if self.updated:
            self._check_memory(given, ())

    def check_outputs(self, call: Call, outputs: Sequence[torch.Tensor]) -> None:
        """Check the output tensors that the caller gave: their properties, and that they share no memory with arguments
        or each other.

        Raises:
            ValueError: if a shape, device or layout is wrong, or memory is shared.
            TypeError: if a dtype is wrong.
        """
        names = self.signature.out_names
        for name, output, expected in zip(names, outputs, self.output_shapes(call), strict=True):
            _checks.check_output(self.op, name, output, expected, call[0].device)
        self._check_memory(self.arguments(call), tuple(outputs))

    def _check_memory(self, given: dict[str, Any], outputs: Outputs) -> None:
        """Check that no output, and no argument that is updated in place, shares memory with another tensor of the
        call.

        Raises:
            ValueError: if two tensors share memory; the message names both.
        """
        tensors = {
            name: value for name, value in given.items() if isinstance(value, torch.Tensor) and name not in self.hints
        }
        by_name = dict(zip(self.signature.out_names, outputs, strict=False))
        _checks.check_no_sharing(self.op, by_name, tensors, self.signature.updated, self.may_share)

    def compile(self, kernel: KernelSpec, call: Call, device: int) -> Callable[..., None]:
        """Compile a kernel, or find it in a cache, and return its compiled function.

        Raises:
            RuntimeError: if a CUDA graph is being captured and the kernel was never launched.
        """
        self.require_loaded((kernel,), call, device)
        return compile_kernel(kernel, arch_of_device(device))

    def require_loaded(self, kernels: tuple[KernelSpec, ...], call: Call, device: int) -> None:
        """If a CUDA graph is being captured, check that all kernels are loaded, because a capture cannot load kernels.

        Raises:
            RuntimeError: if a kernel is not loaded; the message shows the ``warmup`` call to make.
        """
        if not all((kernel, device) in _launched for kernel in kernels):
            shown = ", ".join(f"{name}={value!r}" for name, value in self.properties(call).items())
            advice = f"torch_cute_ops.warmup({self.op!r}, {shown}, device={device})"
            forbid_in_capture(self.op, described(self.op, tuple(call), {}), advice)

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call, keyed by the op's parameter names."""
        return dict(zip(self.signature.names, map(call.__getitem__, self.positions), strict=True))

    def empty_outputs(self, call: Call) -> Any:
        """Allocate the outputs of a checked call on the device of its first tensor, without initialising them."""
        new = self._new_outputs(call)
        return new[0] if self.is_single else new

    def _new_outputs(self, call: Call) -> Outputs:
        return tuple(
            call[0].new_empty(each.shape, dtype=each.dtype)
            if each.strides is None
            else call[0].new_empty_strided(each.shape, each.strides, dtype=each.dtype)
            for each in self.output_shapes(call)
        )

    def _outputs(self, call: Call, given: Outputs | None) -> Outputs:
        if given is None:
            return self._new_outputs(call)
        names = self.signature.out_names
        _checks.check_number(self.op, given, names)
        self.check_outputs(call, given)
        for name, output in zip(names, given, strict=True):
            if self.needs_alignment(name, output):
                _checks.check_aligned(self.op, name, output)
        return given

    def needs_alignment(self, name: str, output: torch.Tensor) -> bool:
        """Return True if an output must be aligned to 16 bytes."""
        return name not in self.any_address

    def _keep(self, key: tuple[Any, ...], launcher: Launcher[Call]) -> None:
        """Store a launcher for later calls. Several threads may call this method at once."""
        with _storing:
            if len(self.launchers) >= MOST_LAUNCHERS and key not in self.launchers:
                del self.launchers[next(iter(self.launchers))]
            self.launchers[key] = launcher


class KernelLauncher(Launcher[Call]):
    """Launcher of an op that launches one kernel.

    Args:
        kernel: kernel and its configuration.
        function: compiled function.
        device: CUDA device.
        sms: number of SMs of the device.
    """

    def __init__(self, kernel: KernelSpec, function: Callable[..., None], device: torch.device, sms: int) -> None:
        self.kernels = (kernel,)
        self.config, self.function, self.device, self.sms = kernel.config, function, device, sms


class KernelPath(CallPath[Call]):
    """Call path of an op that launches one kernel."""

    launcher_type: ClassVar[type[KernelLauncher[Any]]]

    @abc.abstractmethod
    def kernel(self, call: Call, arch: Arch) -> KernelSpec:
        """Return the kernel that calls with the same static key launch. Tensors may be on the meta device."""

    def kernels(self, call: Call, where: torch.device | Arch) -> tuple[KernelSpec, ...]:
        return (self.kernel(call, where if isinstance(where, Arch) else arch_of_device(where.index or 0)),)

    def make_launcher(self, call: Call, device: int) -> Launcher[Call]:
        kernel = self.kernel(call, arch_of_device(device))
        function = self.compile(kernel, call, device)
        return self.launcher_type(kernel, function, torch.device("cuda", device), sm_count(device))
