"""Launches of GEMMs with FP8 operands, or with 16-bit and FP4 operands, in the emulator, and their exact results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from support.emulated import poisoned, run_strictly
from support.epilogues import finished
from support.expert_rows import ExpertRows
from torch_cute_ops.kernels.common.fp8.layouts import Arguments

E4M3 = torch.float8_e4m3fn
BLOCK = 128
"""Elements of K of a block scale of the activations."""
OPERANDS = ("a", "b", "a_scale", "b_scale", "alpha", "bias", "offsets", "counts")


class MatrixRun(NamedTuple):
    """A launch without experts.

    Attributes:
        case: kernel.
        m, n, k, max_ctas: sizes of the GEMM, and CTAs of the launch.
    """

    case: Any
    m: int
    n: int
    k: int
    max_ctas: int = 1

    @property
    def id(self) -> str:
        return f"{self.case.id}-{self.m}x{self.n}x{self.k}-{self.max_ctas}"


class ExpertRun(NamedTuple):
    """A launch whose rows experts may own.

    Attributes:
        case: kernel.
        counts: rows of each expert.
        n, k, max_ctas: sizes of the GEMM, and CTAs of the launch.
        room: rows of an expert's part of the buffer in the masked layout.
        has_one_scale: True if all rows share one per-token scale, whose stride is 0.
        scales: scale bytes of an FP4 weight to choose from, or None for scales with which sums are exact. With other
            scales, a row of activations holds a single element other than 0, so that no sum is rounded.
        seed: seed of the order in which the emulator runs warps. Only some tests read it.
    """

    case: Any
    counts: tuple[int, ...]
    n: int
    k: int
    max_ctas: int = 1
    room: int = 0
    has_one_scale: bool = False
    scales: tuple[int, ...] | None = None
    seed: int | None = 0

    @property
    def id(self) -> str:
        values = "" if self.scales is None else "-values"
        return f"{self.case.id}-{'+'.join(map(str, self.counts))}x{self.n}x{self.k}-{self.max_ctas}{values}"

    @property
    def rows(self) -> ExpertRows:
        return ExpertRows(self.case.layout, self.counts, self.room)

    @property
    def experts(self) -> int | None:
        """Number of experts, or None if the layout is plain."""
        return None if self.case.layout == "plain" else len(self.counts)


def powers(*shape: int) -> torch.Tensor:
    """Return random powers of two other than 1, so that scaled sums are exact."""
    return torch.exp2(torch.randint(1, 4, shape).float() * (2 * torch.randint(0, 2, shape) - 1))


def activation_scales(run: ExpertRun, has_blocks: bool) -> torch.Tensor:
    """Return random scales of the activations: (rows, blocks), or (rows, 1) per token."""
    rows = run.rows.total
    if has_blocks:
        return powers(-(-run.k // BLOCK), rows).t()
    return powers(1 if run.has_one_scale else rows, 1).expand(rows, 1)


def expected(
    run: ExpertRun, a: torch.Tensor, weight: torch.Tensor, a_scale: torch.Tensor, units: torch.Tensor, *terms: Any
) -> torch.Tensor:
    """Return the results, from sums in float64, which are exact. Rows that no expert owns are poison.

    Args:
        weight: (experts, N, K).
        units: factors of the weight rows, (experts, N, blocks) or (experts, N, 1).
        terms: alpha and bias.
    """

    def scaled(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        by_element = scales.repeat_interleave(BLOCK, 1)[:, : run.k] if scales.shape[1] > 1 else scales
        return matrix.double() * by_element.double()

    owner, epilogue = run.rows.owner, run.case.epilogue
    want = poisoned(len(a), run.n, dtype=epilogue.out_dtype)
    for expert in range(len(run.counts)):
        own = owner == expert
        sums = scaled(a[own], a_scale[own]) @ scaled(weight[expert], units[expert]).t()
        want[own] = finished(sums.float(), epilogue, *terms, None if run.experts is None else expert)
    return want


def void_padding(run: ExpertRun, a: torch.Tensor, a_scale: torch.Tensor) -> None:
    """Fill rows that no expert owns, and their scales, with NaN."""
    unowned = run.rows.owner < 0
    a[unowned] = torch.nan
    if not run.has_one_scale:
        a_scale[unowned] = torch.nan


def launch_rows(
    run: ExpertRun, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: Any, *terms: Any, **how: Any
) -> torch.Tensor:
    """Run the kernel for rows of ``a`` and their scales, and return the result (rows, N). ``launch`` gets the other
    arguments."""
    lead = run.rows.lead
    if run.case.layout == "masked" and a_scale.shape[1] > 1:
        a_scale = a_scale.t().view(-1, *lead).movedim(0, -1)
    out = launch(run, a.view(*lead, a.shape[1]), b, a_scale, b_scale, *terms, **run.rows.tensors, **how)
    return out.view(-1, run.n)


def launch(
    run: MatrixRun | ExpertRun,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    late: bool = False,
    **how: Any,
) -> torch.Tensor:
    """Run the kernel; return its result, in which poison stays where the kernel writes nothing.

    Args:
        late: True if the previous kernel writes the operands at the last moment.
        how: arguments of ``run_kernel``.
    """
    out = poisoned(*a.shape[:-1], run.n, dtype=run.case.epilogue.out_dtype)
    given = Arguments(
        a=a,
        b=b,
        a_scale=a_scale,
        b_scale=b_scale,
        offsets=offsets,
        counts=counts,
        alpha=alpha,
        bias=bias,
        out=out,
        prefetch=None,
        max_ctas=run.max_ctas,
    )
    run_strictly(run.case, given, OPERANDS if late else None, **how)
    return out


def tiled(linear: torch.Tensor, nan: int) -> torch.Tensor:
    """Arrange scale bytes (rows, blocks) as 128x4 tiles. The byte ``nan`` fills the tiles."""
    rows, blocks = linear.shape
    padded = torch.full((-(-rows // 128) * 128, -(-blocks // 4) * 4), nan, dtype=torch.uint8)
    padded[:rows, :blocks] = linear
    return padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
