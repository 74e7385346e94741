"""Choose a backend and a tactic for a GEMM."""

import functools
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from torch_cute_ops.gemm.backend import Backend, Target
from torch_cute_ops.gemm.backends.cublas import Cublas
from torch_cute_ops.gemm.backends.fp4_mma_sync import FP4MmaSync
from torch_cute_ops.gemm.backends.fp4_tcgen05 import FP4Tcgen05
from torch_cute_ops.gemm.backends.fp4_tcgen05_experts import FP4Tcgen05Experts
from torch_cute_ops.gemm.backends.fp4_tcgen05_gated_experts import FP4Tcgen05GatedExperts
from torch_cute_ops.gemm.backends.fp4_weight_tcgen05 import FP4WeightTcgen05
from torch_cute_ops.gemm.backends.fp4_wgmma import FP4Wgmma
from torch_cute_ops.gemm.backends.fp8_fp4_mma_sync import FP8FP4MmaSync, FP8FP4TokenMmaSync
from torch_cute_ops.gemm.backends.fp8_fp4_recode import FP8FP4Recode
from torch_cute_ops.gemm.backends.fp8_fp4_tcgen05 import FP8FP4Tcgen05, FP8FP4TokenTcgen05
from torch_cute_ops.gemm.backends.fp8_fp4_token_recode import FP8FP4TokenRecode
from torch_cute_ops.gemm.backends.fp8_fp4_token_wgmma import FP8FP4TokenWgmma
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma_codes import FP8FP4WgmmaCodes
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma_rs import FP8FP4WgmmaRS
from torch_cute_ops.gemm.backends.fp8_fp4_wgmma_ss import FP8FP4WgmmaSS
from torch_cute_ops.gemm.backends.fp8_mma_sync import FP8MmaSync, FP8TokenMmaSync, MXFP8MmaSync
from torch_cute_ops.gemm.backends.fp8_scaled_mm import FP8ScaledMM
from torch_cute_ops.gemm.backends.fp8_tcgen05 import FP8Tcgen05, FP8TokenTcgen05
from torch_cute_ops.gemm.backends.fp8_token_wgmma import FP8TokenWgmma
from torch_cute_ops.gemm.backends.fp8_wgmma import FP8Wgmma
from torch_cute_ops.gemm.backends.mxfp8_tcgen05 import MXFP8Tcgen05
from torch_cute_ops.gemm.backends.mxfp8_wgmma import MXFP8Wgmma
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.gemm.backends.routed import Routed
from torch_cute_ops.gemm.backends.routed_gated import RoutedGated
from torch_cute_ops.gemm.backends.separate_prologue import SeparatePrologue
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.runtime import tuner
from torch_cute_ops.runtime.arch import ARCHS, Arch, arch_name, reported_bandwidth, sm_count

AUTO: Final = "auto"
BACKENDS: Final[list[Backend]] = [
    FP4Wgmma(),
    FP4Tcgen05(),
    FP4Tcgen05Experts(),
    FP4Tcgen05GatedExperts(),
    FP4WeightTcgen05(),
    FP4MmaSync(),
    Routed(),
    RoutedGated(),
    FP8Wgmma(),
    FP8TokenWgmma(),
    MXFP8Wgmma(),
    FP8FP4WgmmaSS(),
    FP8FP4WgmmaCodes(),
    FP8FP4WgmmaRS(),
    FP8FP4TokenWgmma(),
    FP8FP4TokenRecode(),
    FP8FP4Recode(),
    FP8Tcgen05(),
    FP8TokenTcgen05(),
    MXFP8Tcgen05(),
    FP8FP4Tcgen05(),
    FP8FP4TokenTcgen05(),
    FP8MmaSync(),
    FP8TokenMmaSync(),
    MXFP8MmaSync(),
    FP8FP4MmaSync(),
    FP8FP4TokenMmaSync(),
    Cublas(),
    FP8ScaledMM(),
    Reference(),
]
"""All backends. Backends with the same name handle different kinds of GEMMs."""


class Choice(NamedTuple):
    """A backend and one of its tactics."""

    backend: Backend
    tactic: Tactic


def target_of(device: torch.device | Arch) -> Target:
    """Return the ``Target`` of a device. For an architecture, return the first known GPU with this architecture."""
    if isinstance(device, Arch):
        return usual_targets(device)[0]
    if device.type != "cuda":
        return Target(device, None, 1)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu(index: int) -> Target:
    arch, sms, bandwidth = ARCHS.get(arch_name(index)), sm_count(index), reported_bandwidth(index)
    if arch is not None:
        bandwidth = arch.peak_bandwidth(sms, bandwidth)
    return Target(torch.device("cuda", index), arch, sms, torch.cuda.get_device_name(index), bandwidth)


def candidates(problem: GemmProblem) -> dict[str, Backend]:
    """Return the backends that handle problems of this kind, keyed by name."""
    backends = map(SeparatePrologue, BACKENDS) if problem.has_prologue else BACKENDS
    return {backend.name: backend for backend in backends if backend.handles(problem)}


def reasons(problem: GemmProblem, target: Target) -> dict[str, str | None]:
    """Return, for each backend that handles ``problem``, the reason why it does not support ``target``, or None if it
    does. Keys are the backends' names."""
    return {name: backend.reason_unsupported(problem, target) for name, backend in candidates(problem).items()}


def key_of(problem: GemmProblem, m: int, target: Target) -> tuner.Key | None:
    """Return the key under which a tuned choice for ``m`` rows is stored, or None if the target cannot be tuned.

    The key does not contain ``static_weight`` and ``prefetches``, so that calls with and without them share a choice.
    """
    if target.name is None:
        return None
    described = replace(problem, static_weight=False, prefetches=False).described()
    return tuner.Key("gemm", tuner.canonical(described), bucket(m), target.name, tuner.versions())


def _tuned(problem: GemmProblem, m: int, target: Target) -> Choice | None:
    key = key_of(problem, m, target)
    found = tuner.lookup(key) if key is not None else None
    backend = candidates(problem).get(found.backend) if found is not None else None
    if found is None or backend is None or backend.reason_unsupported(problem, target) is not None:
        return None
    # The tuner stores a tactic as a plain tuple. This tuple equals the backend's tactic, which is a named tuple.
    tactics = backend.tactics(problem, bucket(m), target)
    return next((Choice(backend, tactic) for tactic in tactics if tactic == found.tactic), None)


def choose(problem: GemmProblem, m: int, target: Target, name: str = AUTO) -> Choice:
    """Return the backend ``name`` and its tactic with the smallest estimate.

    With ``AUTO``, return the tuned choice if it is still possible, otherwise the choice with the smallest estimate over
    all backends.

    Raises: ValueError: if the name is unknown, or if no possible backend supports the problem. The message gives the
        reasons.
    """
    known = candidates(problem)
    if name != AUTO:
        backend = known.get(name)
        if backend is None:
            raise ValueError(f"backend={name!r} is unknown; use {', '.join(map(repr, (AUTO, *known)))}")
        reason = backend.reason_unsupported(problem, target)
        if reason is not None:
            raise ValueError(f"backend {name!r}: {reason}")
        able = [backend]
    else:
        tuned = _tuned(problem, m, target)
        if tuned is not None:
            return tuned
        why_not = reasons(problem, target)
        able = [known[name] for name, reason in why_not.items() if reason is None]
        if target.device.type == "cuda":
            # On a GPU, a slow backend must be requested by name. Otherwise "auto" could be slow for no visible reason.
            able = [backend for backend in able if not backend.by_name_only]
            why_not |= {name: "is selected only by its name" for name, one in known.items() if one.by_name_only}
        if not able:
            raise ValueError(f"no backend: {'; '.join(f'{name}: {reason}' for name, reason in why_not.items())}")
    choices = [Choice(backend, tactic) for backend in able for tactic in backend.tactics(problem, m, target)]
    return min(choices, key=lambda choice: choice.backend.estimate(problem, m, choice.tactic, target))
