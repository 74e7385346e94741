"""Base class and helpers for kernel cases: dtypes, architectures, ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_cute_ops.kernels.common.core.layouts import Epilogue

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ARCHS = ("sm_90a", "sm_100a", "sm_120a")

PER_COLUMN = tuple(Epilogue(dtype, "column", bias) for dtype, bias in ((BF16, FP32), (FP16, FP16), (FP32, FP32)))
"""Epilogues that need the most registers: a factor per column."""


class KernelCase:
    """Base class of cases: a kernel's configuration and the architecture to compile it for.

    Each case has an ``id``, an ``arch``, and a ``kernel``, which is built as the backend or op builds it.
    """

    @property
    def role(self) -> Any:
        """Key of the case. If only some cases are compiled, one case represents all cases with the same key.

        Such cases differ only in parameters that alternate from case to case. By default, a case represents only
        itself.
        """
        return self


def short(*dtypes: torch.dtype) -> list[str]:
    """Return the names of dtypes without ``torch.``."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def epilogue_id(epilogue: Epilogue) -> str:
    """Return a name for an epilogue, to be used in test ids."""
    alpha = [] if epilogue.alpha is None else [f"alpha_{epilogue.alpha}"]
    bias = [] if epilogue.bias_dtype is None else [f"bias_{short(epilogue.bias_dtype)[0]}"]
    rows = ["rows"] if epilogue.has_row_scale else []
    return "-".join((*short(epilogue.out_dtype), *rows, *alpha, *bias))


def fp4_gemm_id(kind: str, case: Any, *rest: str) -> str:
    """Return the test id of a case of an FP4 GEMM."""
    return "-".join((kind, *short(case.dtype), case.format.name, case.layout, *rest, case.arch))


def together(some: Sequence[Any], others: Sequence[Any], every: bool) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of an element of ``some`` and an element of ``others``: all pairs if ``every``, or else a third of
    them."""
    for (i, one), (j, other) in itertools.product(enumerate(some), enumerate(others)):
        if every or (i + j) % 3 == 0:
            yield one, other
