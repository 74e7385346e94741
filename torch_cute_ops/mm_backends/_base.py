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


TOP_EXPERTS = 8
"""Experts that a token is taken to be routed to, where experts are more: no product knows what its ``alpha`` will hold,
and this is usual in models that are served (DeepSeek-V3, Qwen3, Kimi K2)."""


@dataclass(frozen=True)
class Product:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n]``: all about it that a call does not change. M does change.

    With experts, which have ranges of K, equal and one after the other,
    ``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of e} a[m, k] · b[k, n])``. An expert's sum is rounded to fp32, multiplied by
    ``alpha`` in fp32, and added to the others in fp32. Where ``alpha`` is zero, of either sign, nothing is computed:
    what ``a``, ``b`` and their scales hold there does not show in the result, NaN included.

    Attributes:
        n, k: columns of the result, and elements of a sum: of all experts together.
        fmt: format of ``b``, and of ``a`` if that is in FP4.
        a_dtype: uint8 for FP4 codes; bfloat16 or float16.
        a_layout: scale layout of ``a``; ``None`` if it has no scales.
        b_layout: scale layout of ``b``.
        has_alpha: whether there is an ``alpha``; with experts there is.
        out_dtype: of the result.
        experts: how many there are, with ``k // experts`` elements of a sum each, a multiple of 64; ``None``: the
            product is a plain one.
    """

    n: int
    k: int
    fmt: FP4Format
    a_dtype: torch.dtype
    a_layout: ScaleLayout | None
    b_layout: ScaleLayout
    has_alpha: bool
    out_dtype: torch.dtype
    experts: int | None = None

    def described(self) -> dict[str, int | bool | str | None]:
        """All of it, as JSON can hold it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    def bytes_moved(self, m: int) -> int:
        """Each operand read and the result written, once; with experts, of those that ``m`` tokens are routed to, where
        each token draws ``TOP_EXPERTS`` of them."""
        row = self.k // 2 + self.k // self.fmt.block_size
        a = row if self.a_layout is not None else self.k * self.a_dtype.itemsize
        out = m * self.n * self.out_dtype.itemsize
        if self.experts is None:
            return self.n * row + m * a + out
        met = 1 - (1 - self.routed / self.experts) ** m
        return round(self.n * row * met + m * a * self.routed / self.experts) + 4 * m * self.experts + out

    def flops(self, m: int) -> int:
        """Multiplications and additions; with experts, of ``TOP_EXPERTS`` a token."""
        return 2 * m * self.n * (self.k if self.experts is None else self.k // self.experts * self.routed)

    @property
    def routed(self) -> int:
        """Experts that a token is taken to be routed to; 1 of a plain product."""
        return min(self.experts or 1, TOP_EXPERTS)


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
        alpha: (1,) float32, or ``None``; of a product with experts (M, E) float32, with any strides.
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
