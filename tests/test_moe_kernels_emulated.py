"""The kernels around the experts' products, executed thread for thread by the PTX emulator."""

from typing import Any, NamedTuple

import pytest
import torch
from kernel_grid import BF16, FP16, FP32, MoeCase
from ptx import run_kernel
from test_kernels_emulated import CPU, equal, poisoned

from torch_cute_ops.reference.moe_finalize import moe_finalize
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.samples._moe import random_routing
from torch_cute_ops.testing.samples.moe_finalize import poisoned_rows


class Finalize(NamedTuple):
    """A launch of ``moe_finalize``: dtype, length of a row, routing, residual, multiprocessors, order of events."""

    dtype: torch.dtype
    width: int
    routing: dict[str, Any]
    has_residual: bool
    sms: int
    seed: int | None


FINALIZE = {
    "decode": Finalize(BF16, 1096, {"m": 1, "topk": 8, "experts": 16}, True, 132, 0),
    "tokens-share-the-device": Finalize(FP16, 1096, {"m": 5, "topk": 3, "experts": 4}, False, 2, 1),
    "a-token-each": Finalize(FP32, 520, {"m": 9, "topk": 2, "experts": 3}, True, 1, None),
    "narrow": Finalize(BF16, 8, {"m": 7, "topk": 1, "experts": 2}, False, 2, 2),
    "top-16": Finalize(FP16, 264, {"m": 3, "topk": 16, "experts": 17}, True, 1, 3),
    "dropped": Finalize(FP32, 64, {"m": 12, "topk": 2, "experts": 3, "max_rows": 4}, True, 1, 0),
}


@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in FINALIZE.items()])
def test_finalize(one: Finalize) -> None:
    """Bit for bit; rows of padding are NaN, and so are weights of pairs that were dropped."""
    torch.manual_seed(one.width)
    routed = random_routing(device=CPU, **one.routing)
    index = routed.expanded_to_permuted
    # Rows of inputs are strided.
    x = poisoned_rows(routed, one.width + 16, one.dtype, CPU)[:, : one.width]
    weights = torch.rand(index.shape).masked_fill_(index < 0, torch.nan)
    residual = torch.randn(len(index), one.width + 8).to(one.dtype)[:, : one.width] if one.has_residual else None
    out = poisoned(len(index), one.width, dtype=one.dtype)
    case = MoeCase("moe_finalize", (one.dtype, one.width, index.shape[1], one.has_residual))
    run_kernel(case.kernel, ARCHS[case.arch], x, index, weights, residual, out, one.sms, seed=one.seed)
    equal("out", out, moe_finalize(x, index, weights, residual))
