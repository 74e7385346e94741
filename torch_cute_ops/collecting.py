"""Collection of the kernels that a program's calls need, without compiling or launching them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cute_ops.ops._define import NAMESPACE, OpSpec, as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import Arch, arch_of_device
from torch_cute_ops.runtime.compiler import KernelSpec


class CollectKernels(TorchDispatchMode):
    """Context manager that collects the kernels of calls of this package's ops and launches nothing. The outputs are
    zeros, which later calls accept as ids, offsets and counts. PyTorch's own ops run as usual.

    Args:
        arch: architecture whose kernels are collected; the tensors may then be on any device. By default, kernels are
            collected for each tensor's CUDA device, and calls on other devices run as usual.
        found: function that is called with the kernels and the architecture of each call; None for no function.

    Attributes:
        kernels: kernels by architecture, each once, in the order of the calls.
        refused: pair (name of the op, error) for each call that ``arch`` does not support. Without ``arch``, an
            unsupported call raises its error.
        served: names of the ops whose kernels were collected.
    """

    def __init__(
        self, arch: Arch | None = None, found: Callable[[Iterable[KernelSpec], Arch], None] | None = None
    ) -> None:
        super().__init__()
        self.arch, self.found = arch, found
        self.kernels: dict[Arch, dict[KernelSpec, None]] = {}
        self.refused: list[tuple[str, ValueError]] = []
        self.served: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        spec = OPS.get(func.__name__.split(".")[0]) if func.namespace == NAMESPACE else None
        if spec is None:
            return func(*args, **given)
        if not all(issubclass(each, FakeTensor) for each in types):
            return NotImplemented  # a DTensor, for example, calls the op again with its shard
        outputs = {name: given.pop(name) for name in spec.out_names if name in given}
        call = spec.bind(*args, **given)
        if self.arch is None and not call[0].is_cuda:
            return func(*args, **given, **outputs)
        spec.path.check_call(call)
        results = tuple(outputs.values()) or as_tuple(spec.path.empty_outputs(call))
        if any(each.numel() for each in results):
            self._collect(spec, call)
        for each in results:
            each.zero_()
        return None if outputs else results if len(results) > 1 else results[0]

    def _collect(self, spec: OpSpec, call: Any) -> None:
        device = call[0].device
        try:
            kernels = dict.fromkeys(spec.path.kernels(call, self.arch or device))
        except ValueError as error:
            if self.arch is None:
                raise
            self.refused.append((spec.name, error))
        else:
            self.served.add(spec.name)
            arch = self.arch or arch_of_device(device.index)
            self.kernels.setdefault(arch, {}).update(kernels)
            if self.found is not None:
                self.found(kernels, arch)
