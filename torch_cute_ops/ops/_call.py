"""How the CUDA calls of an op reach a kernel: the one launcher cache, fast path and miss path of all ops.

``CallPath.run`` looks up a launcher by the call's static key, which never holds the number of rows, and calls it. The
compiled function behind it refuses tensors that do not fit, and outputs that overlap another tensor, before it
launches anything. Only then, and for the first call with a key, does ``run_checked`` run: the thorough checks that say
what is wrong, the copies that a kernel needs of tensors that it cannot read where they are, and plan and compile.
"""

import abc
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import torch

from torch_cute_ops.formats.shapes import OutputShapes
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._signature import Signature
from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.calls import described, launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import KernelSpec, compile_kernel
from torch_cute_ops.runtime.dispatch import mark_written

Call = TypeVar("Call", bound=tuple[Any, ...])
Outputs = tuple[torch.Tensor, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of an op."""

MOST_LAUNCHERS: Final = 4096
"""Launchers that an op keeps, some 1 KB each; the oldest goes."""

_storing = threading.Lock()
_launched: Final[set[tuple[KernelSpec, int]]] = set()
"""Kernels that have been launched, and on which device: their modules are loaded, so that they can be captured."""


class Launcher(abc.ABC, Generic[Call]):
    """What computes the calls with one static key.

    Attributes:
        kernels: what it launches.
        is_kept: whether it serves later calls with the key.
    """

    kernels: tuple[KernelSpec, ...]
    is_kept: bool = True

    def run(self, call: Call, out: Any) -> Any:
        """The fast path, where there is one: compute an unchecked call into ``out``, or into new outputs, and return
        these.

        ``None``, with nothing done, for calls that it does not take. Raises, with nothing launched, where the compiled
        function refuses a tensor.
        """
        return None

    @abc.abstractmethod
    def launch(self, call: Call, out: Any) -> None:
        """Compute a checked call into ``out``, with copies of tensors that the kernel cannot access where they are."""


class CallPath(abc.ABC, Generic[Call]):
    """The CUDA calls of one op. A family of ops shares a subclass.

    Args:
        fixed: values of the fields of ``call_type`` that the op has no parameter for, where these are not the defaults.

    Attributes:
        call_type: the ``NamedTuple`` of a call's arguments, the first one a tensor.
        renames: its fields by the names of the op's parameters, where these differ.
        may_share: an output and an argument that may be the same tensor.
        hints: arguments whose contents no result depends on: outputs may share memory with these.
        any_address: outputs that need not start at a multiple of 16 bytes.
        integer_outputs: outputs of integers, which cannot require grad.
        has_backends: whether there are several ways to compute a call.
    """

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
        """Serve the op of this signature."""
        self.signature = signature
        self.op = signature.name
        self.is_single = len(signature.outputs) == 1
        fields = self.call_type._fields
        unknown = [name for name in signature.names if self.renames.get(name, name) not in fields]
        if unknown:
            raise TypeError(f"{self.op}: {self.call_type.__name__} has no field for {', '.join(unknown)}")
        self.positions = tuple(fields.index(self.renames.get(name, name)) for name in signature.names)
        self.updated = tuple(fields.index(self.renames.get(name, name)) for name in signature.updated)

    # What a family defines

    @abc.abstractmethod
    def key(self, call: Call, device: int) -> tuple[Any, ...]:
        """The static key: all that decides which launcher serves a call on a CUDA device.

        Raises:
            AttributeError: for what is no tensor.
        """

    @abc.abstractmethod
    def check(self, call: Call) -> None:
        """Refuse what is wrong about arguments of the right kinds, on any device.

        Raises:
            ValueError: for a wrong value, shape, device, layout or format.
            TypeError: for a wrong dtype.
        """

    def check_values(self, call: Call) -> None:
        """Refuse what the tensors of a checked call hold, where the op runs on a CPU: a GPU cannot look at it.

        Raises:
            ValueError: for an index of something that is not there.
        """

    @abc.abstractmethod
    def make_launcher(self, call: Call, device: int) -> Launcher[Call]:
        """What computes checked calls like this one on that CUDA device; its kernels are compiled by ``compile``."""

    @abc.abstractmethod
    def kernels(self, call: Call, arch: Arch) -> tuple[KernelSpec, ...]:
        """The kernels that calls like this one may launch on GPUs of ``arch``; its tensors may be on meta."""

    @abc.abstractmethod
    def properties(self, call: Call) -> dict[str, Any]:
        """The static properties of a call, as ``example`` takes them."""

    example: Callable[..., Arguments]
    """The arguments of a call with these static properties, ``device`` among them; keyword-only and typed."""

    def has_property(self, name: str) -> bool:
        """Whether the op's calls have this one of the properties that ``example`` takes."""
        return True

    def backends(self, call: Call, where: torch.device | Arch) -> dict[str, str | None]:
        """Why each backend cannot compute a call on a device, or GPUs of an architecture; ``None``: it can."""
        raise NotImplementedError

    def output_shapes(self, call: Call) -> OutputShapes:
        """The outputs of a checked call, as ``fake/<op>.py`` has them."""
        fake = importlib.import_module(f"torch_cute_ops.fake.{self.op}")
        shapes: OutputShapes = getattr(fake, self.op)(**self.arguments(call))
        return shapes

    def fill_without_work(self, call: Call, out: Outputs) -> bool:
        """Whether a checked call needs no kernel, since it has no rows, say; what its outputs hold is then written."""
        return all(output.numel() == 0 for output in out)

    # The call path

    def run(self, out: Any, device: int | None, *values: Any) -> Any:
        """Compute the fields of a call on CUDA tensors into ``out``, a tensor or a tuple of several, or new tensors.

        ``device`` is the index of the first tensor's, where the caller has asked for it: that takes 0.07 µs.
        """
        # ``_make`` takes twice as long.
        call = tuple.__new__(self.call_type, values)
        try:
            if device is None:
                device = call[0].get_device()
            launcher = self.launchers.get(self.key(call, device))
            result = None if launcher is None else launcher.run(call, out)
        except Exception:  # of TVM-FFI, DLPack and CUDA, or for what is no tensor: run_checked finds out
            result = None
        if result is None:
            result = self.run_checked(call, out)
        if out is not None:
            mark_written((out,) if self.is_single else out)
        if self.updated:
            mark_written([values[i] for i in self.updated])
        return result

    def run_checked(self, call: Call, out: Any) -> Any:
        """``run`` with every check: for the first call with a key, for tensors that the fast path does not take, and
        for those that the compiled function refused."""
        self.check_call(call)
        device = call[0].device
        given = None if out is None else (out,) if self.is_single else tuple(out)
        outputs = self._outputs(call, given, device)
        result = outputs[0] if self.is_single else outputs
        if not self.fill_without_work(call, outputs):
            key = self.key(call, call[0].get_device())
            launcher = self.launchers.get(key)
            if launcher is None:
                launcher = self.make_launcher(call, device.index or 0)
            try:
                launcher.launch(call, result)
            except (RuntimeError, ValueError, TypeError):  # of torch, such as memory that ran out
                raise
            except Exception as error:  # from CUDA
                raise launch_error(self.op, error, *call) from error
            _launched.update((kernel, device.index or 0) for kernel in launcher.kernels)
            if launcher.is_kept:
                self._keep(key, launcher)
        return result

    def check_call(self, call: Call) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            TypeError: if an argument has a wrong kind or dtype.
            ValueError: if anything else is wrong.
        """
        given = self.arguments(call)
        self.signature.check_kinds(given.values())
        self._check_tensors(call, given)

    def check_dispatched(self, call: Call) -> None:
        """Check a call as ``check_call`` does, after PyTorch's dispatcher has matched it to the schema.

        The dispatcher lets only one wrong kind pass: None for a required tensor.
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
        """Check given output tensors of a checked call, and that they share no memory with arguments or each other.

        Raises:
            ValueError: if a shape, device or layout is wrong, or memory is shared.
            TypeError: if a dtype is wrong.
        """
        names = self.signature.out_names
        for name, output, (shape, dtype) in zip(names, outputs, self.output_shapes(call), strict=True):
            _checks.check_output(self.op, name, output, shape, dtype, call[0].device)
        self._check_memory(self.arguments(call), tuple(outputs))

    def _check_memory(self, given: dict[str, Any], outputs: Outputs) -> None:
        """Refuse outputs, and arguments that are updated in place, that share memory with another tensor of the call.

        Raises:
            ValueError: naming both.
        """
        tensors = {
            name: value for name, value in given.items() if isinstance(value, torch.Tensor) and name not in self.hints
        }
        by_name = dict(zip(self.signature.out_names, outputs, strict=False))
        _checks.check_no_sharing(self.op, by_name, tensors, self.signature.updated, self.may_share)

    def compile(self, kernel: KernelSpec, call: Call, device: int) -> Callable[..., None]:
        """The compiled function of a kernel that a call needs.

        Raises:
            RuntimeError: if a CUDA graph is being captured, and the kernel has not been launched before.
        """
        self.require_loaded((kernel,), call, device)
        return compile_kernel(kernel, arch_of_device(device))

    def require_loaded(self, kernels: tuple[KernelSpec, ...], call: Call, device: int) -> None:
        """Refuse to go on if a CUDA graph is being captured and one of the kernels is not loaded.

        Raises:
            RuntimeError: with the ``warmup`` call to make.
        """
        if not all((kernel, device) in _launched for kernel in kernels):
            shown = ", ".join(f"{name}={value!r}" for name, value in self.properties(call).items())
            advice = f"torch_cute_ops.warmup({self.op!r}, {shown}, device={device})"
            forbid_in_capture(self.op, described(self.op, tuple(call), {}), advice)

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the op's arguments by name."""
        return dict(zip(self.signature.names, map(call.__getitem__, self.positions), strict=True))

    def empty_outputs(self, call: Call) -> Any:
        """Return uninitialised outputs of a checked call on the device of its first tensor."""
        new = [call[0].new_empty(shape, dtype=dtype) for shape, dtype in self.output_shapes(call)]
        return new[0] if self.is_single else tuple(new)

    def _outputs(self, call: Call, given: Outputs | None, device: torch.device) -> Outputs:
        if given is None:
            shapes = self.output_shapes(call)
            return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)
        names = self.signature.out_names
        _checks.check_number(self.op, given, names)
        self.check_outputs(call, given)
        for name, output in zip(names, given, strict=True):
            if name not in self.any_address:
                _checks.check_aligned(self.op, name, output)
        return given

    def _keep(self, key: tuple[Any, ...], launcher: Launcher[Call]) -> None:
        """Keep a launcher for later calls. Other threads may do the same."""
        with _storing:
            if len(self.launchers) >= MOST_LAUNCHERS and key not in self.launchers:
                del self.launchers[next(iter(self.launchers))]
            self.launchers[key] = launcher


class KernelLauncher(Launcher[Call]):
    """One compiled kernel.

    Args:
        kernel: the kernel.
        function: it compiled.
        device: where it runs.
        sms: SMs of the device.
    """

    def __init__(self, kernel: KernelSpec, function: Callable[..., None], device: torch.device, sms: int) -> None:
        self.kernels = (kernel,)
        self.config, self.function, self.device, self.sms = kernel.config, function, device, sms


class KernelPath(CallPath[Call]):
    """The CUDA calls of an op that is one kernel."""

    launcher_type: ClassVar[type[KernelLauncher[Any]]]

    @abc.abstractmethod
    def kernel(self, call: Call, arch: Arch) -> KernelSpec:
        """The kernel for calls like this one; its tensors may be on meta."""

    def kernels(self, call: Call, arch: Arch) -> tuple[KernelSpec, ...]:
        return (self.kernel(call, arch),)

    def make_launcher(self, call: Call, device: int) -> Launcher[Call]:
        kernel = self.kernel(call, arch_of_device(device))
        function = self.compile(kernel, call, device)
        return self.launcher_type(kernel, function, torch.device("cuda", device), sm_count(device))
