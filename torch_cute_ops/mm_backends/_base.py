"""What a backend of the FP4 products is asked for, and what it answers."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import Wanted

Tactic = tuple[int | str, ...]
"""One way in which a backend computes a product: what JSON can hold, and the backend alone understands."""


@dataclass(frozen=True)
class Product:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n]``: all about it that a call does not change. M does change.

    Attributes:
        n, k: columns of the result, and elements of a sum.
        fmt: format of ``b``, and of ``a`` if that is in FP4.
        a_dtype: uint8 for FP4 codes; bfloat16 or float16.
        a_layout: scale layout of ``a``; ``None`` if it has no scales.
        b_layout: scale layout of ``b``.
        has_alpha: whether there is an ``alpha``.
        out_dtype: of the result.
    """

    n: int
    k: int
    fmt: FP4Format
    a_dtype: torch.dtype
    a_layout: ScaleLayout | None
    b_layout: ScaleLayout
    has_alpha: bool
    out_dtype: torch.dtype

    def described(self) -> dict[str, int | bool | str | None]:
        """All of it, as JSON can hold it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    def bytes_moved(self, m: int) -> int:
        """Each operand read and the result written, once."""
        row = self.k // 2 + self.k // self.fmt.block_size
        a = row if self.a_layout is not None else self.k * self.a_dtype.itemsize
        return self.n * row + m * a + m * self.n * self.out_dtype.itemsize

    def flops(self, m: int) -> int:
        """Multiplications and additions."""
        return 2 * m * self.n * self.k


def _plain(value: Any) -> int | bool | str | None:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.name if isinstance(value, FP4Format | ScaleLayout) else value


class Operands(NamedTuple):
    """The tensors of a call as backends take them: 2-D and contiguous, ``b`` by columns.

    Attributes:
        a: (M, K/2) uint8, or (M, K).
        a_scale: its scales in the format's dtype, in ``a_layout``; or ``None``.
        b: (K/2, N) uint8.
        b_scale: its scales in the format's dtype, in ``b_layout``.
        alpha: (1,) float32, or ``None``.
        out: (M, N), to be written.
    """

    a: torch.Tensor
    a_scale: torch.Tensor | None
    b: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    out: torch.Tensor


Launcher = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None
]
"""A function of ``Operands`` that writes ``out``, queued on the current stream of a GPU; there is at least one row and
one column."""


@dataclass(frozen=True)
class Target:
    """Where a product is computed.

    Attributes:
        device: the device.
        arch: its architecture; ``None``: no kernel of ours supports it, as on a CPU.
        sms: its streaming multiprocessors.
        name: the GPU's; ``None``: there is none, and so nothing that was tuned on it.
    """

    device: torch.device
    arch: Arch | None
    sms: int
    name: str | None = None


class Backend(abc.ABC):
    """One way to compute FP4 products, on the devices that it supports. Has no state."""

    name: ClassVar[str]

    @abc.abstractmethod
    def reason_unsupported(self, product: Product, target: Target) -> str | None:
        """Why it cannot compute ``product`` on ``target``, for no M; ``None`` if it can, for every M."""

    @abc.abstractmethod
    def tactics(self, product: Product, m: int, target: Target) -> Sequence[Tactic]:
        """The ways in which it can compute a product that it supports, for ``m`` rows or fewer; at least one."""

    @abc.abstractmethod
    def estimate(self, product: Product, m: int, tactic: Tactic, target: Target) -> float:
        """Seconds that a call will take, by a model of bytes, operations and waves."""

    @abc.abstractmethod
    def kernels(self, product: Product, tactic: Tactic, arch: Arch) -> tuple[Wanted, ...]:
        """Our kernels that the tactic launches."""

    @abc.abstractmethod
    def launcher(self, product: Product, tactic: Tactic, target: Target) -> Launcher:
        """The function that computes; its kernels are compiled."""

    def refuses(self, product: Product) -> bool:
        """Whether launchers refuse operands that do not lie as they must, by ``ValueError`` or ``TypeError`` and before
        anything is launched: whether all that they launch is one compiled function's."""
        return False
