"""What one op is made of."""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_cute_ops.ops._checks import check_number, check_output

if TYPE_CHECKING:
    from torch_cute_ops.testing import ErrorInput, Sample

NAMESPACE: Final = "cute"

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OpSpec:
    """One op, in the manner of PyTorch's ``OpInfo``.

    Reference, fake and samples are found by the op's name, in modules that are imported when first asked for.

    Attributes:
        name: name in the namespace ``cute``, and of the modules that implement and test it.
        arguments: the schema's arguments.
        outputs: names of the outputs.
        check: raises ``ValueError`` or ``TypeError`` for arguments that the op refuses; takes the op's arguments.
        cuda: the functional CUDA entry; checks its arguments itself.
        cuda_out: the CUDA entry that takes the outputs as further keyword arguments, named as in ``out_names``.
        function: the typed Python function of the same name.
        example: a call on one row, as (args, kwargs), from static facts given by keyword, ``device`` among them.
        kernels: the ``Wanted`` kernels of a call, from an ``Arch`` and the op's arguments; the tensors may be on meta.
        backends: why each backend cannot compute a call, from a device and the op's arguments; ``None``: has none.
    """

    name: str
    arguments: str
    outputs: tuple[str, ...]
    check: Callable[..., None]
    cuda: Callable[..., Any]
    cuda_out: Callable[..., None]
    function: Callable[..., Any]
    example: "Callable[..., Call]"
    kernels: Callable[..., tuple[Any, ...]]
    backends: "Callable[..., dict[str, str | None]] | None" = None

    @property
    def qualified_name(self) -> str:
        """``cute::name``."""
        return f"{NAMESPACE}::{self.name}"

    @property
    def reference(self) -> Callable[..., Any]:
        """The executable specification in plain torch: ``reference/<name>.py``. Takes the op's arguments."""
        return getattr(self._module("reference"), self.name)

    @property
    def fake(self) -> Callable[..., Any]:
        """Outputs with the right shapes and dtypes and no values: ``fake/<name>.py``. Takes the op's arguments."""
        return getattr(self._module("fake"), self.name)

    @property
    def defined(self) -> Callable[..., tuple[torch.Tensor, ...]] | None:
        """The outputs with zeros in place of what the op leaves unspecified, such as rows of padding.

        Takes a tuple of all outputs and the op's arguments; ``None``: it leaves nothing unspecified.
        """
        return getattr(self._module("reference"), "defined", None)

    @property
    def out_names(self) -> tuple[str, ...]:
        """The ``.out`` overload's names of the outputs: their own, with ``_out`` where an argument has the same."""
        return tuple(
            f"{output}_out" if re.search(rf" {output}\b", self.arguments) else output for output in self.outputs
        )

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that the op updates in place."""
        return tuple(re.findall(r"Tensor\([a-z]!\) (\w+)", self.arguments))

    @property
    def schema(self) -> str:
        """The functional schema."""
        if len(self.outputs) == 1:
            return f"{self.name}({self.arguments}) -> Tensor"
        return f"{self.name}({self.arguments}) -> ({', '.join(f'Tensor {output}' for output in self.outputs)})"

    @property
    def out_schema(self) -> str:
        """The schema of the ``.out`` overload."""
        letters = "abcdef"[len(self.mutated) :]
        outputs = ", ".join(
            f"Tensor({letter}!) {output}" for letter, output in zip(letters, self.out_names, strict=False)
        )
        return f"{self.name}.out({self.arguments}, *, {outputs}) -> ()"

    def sample_inputs(self, device: torch.device | str) -> "Iterator[Sample]":
        """Arguments that the op takes, with fresh data, from ``torch_cute_ops/testing/samples/<name>.py``."""
        return self._module("testing.samples").sample_inputs(torch.device(device))

    def error_inputs(self, device: torch.device | str) -> "Iterator[ErrorInput]":
        """Arguments that the op refuses, and how; from the same module."""
        return self._module("testing.samples").error_inputs(torch.device(device))

    def _module(self, floor: str) -> Any:
        return importlib.import_module(f"torch_cute_ops.{floor}.{self.name}")


def cuda_device(device: torch.device | int | str | None) -> torch.device:
    """The device that is meant; ``None``: the current CUDA device."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of an op as a tuple, also where there is one."""
    return value if isinstance(value, tuple) else (value,)


def check_outputs(spec: OpSpec, outputs: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check given output tensors against the fake's.

    Raises:
        ValueError: for a wrong shape, device or layout.
        TypeError: for a wrong dtype.
    """
    check_number(spec.name, tuple(outputs), spec.out_names)
    for name, output, want in zip(spec.out_names, outputs, as_tuple(spec.fake(*args, **kwargs)), strict=True):
        check_output(spec.name, name, output, tuple(want.shape), want.dtype, want.device)
