"""Activations for tests of FP4 GEMMs in the emulator."""

from __future__ import annotations

import torch
from samples._fp4_gemm import POWERS, random_matrix

from support.emulated import CPU
from support.kernel_grid import ExpertsCase, WgmmaCase


def exact_activations(case: WgmmaCase | ExpertsCase, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return random activations for which all sums are exact, and their scales or None.

    If the kernel rounds the activations to bfloat16, their significands are one bit longer than bfloat16's, so that
    half of the activations are ties.
    """
    if case.a_layout is not None:
        codes, scale = random_matrix(m, k, case.format, case.a_layout, CPU, POWERS[case.format.scale_format])
        return codes, scale.view(case.format.scale_dtype)
    if case.a_dtype is None:
        return torch.randint(-8, 9, (m, k)).to(case.dtype), None
    numbers = torch.randint(-(2**9), 2**9, (m, k)) * (torch.rand(m, k) < 0.05)
    return numbers.to(case.a_dtype), None
