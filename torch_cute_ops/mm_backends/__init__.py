"""The backends of the FP4 products, and which of them computes a call.

A backend is a class in a module of its own (``_base.Backend``) and an entry in ``BACKENDS``; nothing else is edited for
a new one.
"""

import functools
from typing import Final, NamedTuple

import torch

from torch_cute_ops.mm_backends._base import Backend, Launcher, Operands, Product, Tactic, Target
from torch_cute_ops.mm_backends._model import usual_targets
from torch_cute_ops.mm_backends.cublas import Cublas
from torch_cute_ops.mm_backends.mma_sync import MmaSync
from torch_cute_ops.mm_backends.reference import Reference
from torch_cute_ops.mm_backends.routed import Routed
from torch_cute_ops.mm_backends.wgmma import Wgmma
from torch_cute_ops.ops._fp4_product import AUTO
from torch_cute_ops.runtime import tuner
from torch_cute_ops.runtime.arch import ARCHS, arch_name, sm_count

__all__ = [
    "AUTO",
    "BACKENDS",
    "Backend",
    "Choice",
    "Launcher",
    "Operands",
    "Product",
    "Tactic",
    "Target",
    "bucket",
    "choose",
    "key_of",
    "reasons",
    "target_of",
    "usual_targets",
]

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in (Wgmma(), MmaSync(), Routed(), Cublas(), Reference())
}


class Choice(NamedTuple):
    """A backend and one of its tactics."""

    backend: Backend
    tactic: Tactic


def bucket(m: int) -> int:
    """The number of rows that ``m`` rows are planned as: ``m`` rounded up, to a sixteenth of the next power of two or
    to 8."""
    step = max(8, (1 << max(m - 1, 0).bit_length()) // 16)
    return max(1, -(-m // step)) * step


def target_of(device: torch.device) -> Target:
    """What the backends know of a device."""
    if device.type != "cuda":
        return Target(device, None, 1)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu(index: int) -> Target:
    device = torch.device("cuda", index)
    return Target(device, ARCHS.get(arch_name(index)), sm_count(index), torch.cuda.get_device_name(index))


def reasons(product: Product, target: Target) -> dict[str, str | None]:
    """Each backend's name, and why it cannot compute ``product`` on ``target``; ``None``: it can."""
    return {name: backend.reason_unsupported(product, target) for name, backend in BACKENDS.items()}


def key_of(product: Product, m: int, target: Target) -> tuner.Key | None:
    """What a tuned choice for ``m`` rows goes by; ``None``: nothing is tuned for such a target."""
    if target.name is None:
        return None
    return tuner.Key("fp4_product", tuner.canonical(product.described()), bucket(m), target.name, tuner.versions())


def _tuned(product: Product, m: int, target: Target) -> Choice | None:
    key = key_of(product, m, target)
    found = tuner.lookup(key) if key is not None else None
    backend = BACKENDS.get(found.backend) if found is not None else None
    if found is None or backend is None or backend.reason_unsupported(product, target) is not None:
        return None
    return Choice(backend, found.tactic) if found.tactic in backend.tactics(product, bucket(m), target) else None


def choose(product: Product, m: int, target: Target, name: str = AUTO) -> Choice:
    """A backend and its tactic: the one of that name, and its tactic with the least estimate; with ``AUTO`` what was
    tuned, if that is still possible, else the least estimate of all.

    Raises:
        ValueError: for an unknown name, or a backend that cannot; with the reason, or every backend's.
    """
    if name != AUTO:
        backend = BACKENDS.get(name)
        if backend is None:
            raise ValueError(f"backend={name!r} is unknown; use {', '.join(map(repr, (AUTO, *BACKENDS)))}")
        reason = backend.reason_unsupported(product, target)
        if reason is not None:
            raise ValueError(f"backend {name!r}: {reason}")
        able = [backend]
    else:
        tuned = _tuned(product, m, target)
        if tuned is not None:
            return tuned
        why_not = reasons(product, target)
        able = [BACKENDS[name] for name, reason in why_not.items() if reason is None]
        if target.device.type == "cuda":
            # A reference that nobody asked for would only be slow without a reason.
            able = [backend for backend in able if backend.name != Reference.name]
            why_not[Reference.name] = "is taken only where it is named"
        if not able:
            raise ValueError(f"no backend: {'; '.join(f'{name}: {reason}' for name, reason in why_not.items())}")
    choices = [Choice(backend, tactic) for backend in able for tactic in backend.tactics(product, m, target)]
    return min(choices, key=lambda choice: choice.backend.estimate(product, m, choice.tactic, target))
