"""The backend ``routed`` for expert GEMMs with a gate: plans and workspaces, without running kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gemm_problems import FP32, gated_problem

from torch_cute_ops.formats import MXFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends import _fp4, routed_gated
from torch_cute_ops.gemm.backends.routed_gated import GatedTactic
from torch_cute_ops.gemm.operands import GatedOperands
from torch_cute_ops.gemm.problem import Grouping, Operand
from torch_cute_ops.kernels import fp4_gated_experts
from torch_cute_ops.runtime.arch import ARCHS

TILED = SCALE_LAYOUTS["128x4"]
TARGET = Target(torch.device("cuda", 0), ARCHS["sm_90a"], 132)
BACKEND = routed_gated.RoutedGated()
LAYER = gated_problem(
    256 * 256, 7168, experts=256, alpha="expert_half", bias_dtype=FP32, gate="swiglu", global_scale="expert"
)


def test_a_launch_gives_each_operand_to_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def compile_kernel(spec: Any, arch: Any) -> Callable[..., None]:
        return lambda *args: calls.append(fp4_gated_experts.Arguments(*args))

    monkeypatch.setattr(_fp4, "compile_kernel", compile_kernel)
    monkeypatch.setattr(routed_gated, "new_bytes", lambda device, size: torch.empty(size, dtype=torch.uint8))
    tactic = GatedTactic(tile_n=64, tile_m=8, split_k=2, token_block=32)
    names = (*GatedOperands._fields, "y", "scale")
    given = {name: torch.full((5, 1), float(i)) for i, name in enumerate(names)}
    *operands, y, scale = given.values()
    BACKEND.launcher(LAYER, tactic, TARGET)(GatedOperands(*operands), (y, scale))
    (call,) = calls
    assert {name: getattr(call, name) for name in names} == given
    assert call.num_ctas == 132
    # The workspace stores a 16-bit row of 28 k tiles per token, and partial sums and four flags per CTA.
    assert call.workspace.numel() == 5 * 28 * 512 + 132 * (64 * 8 * 4 + 4 * 4)


@pytest.mark.parametrize(
    ("m", "rows", "most"),
    [(1, 32, 13), (8, 128, 38), (32, 256, 95), (64, 256, 128), (128, 256, 148), (256, 256, 172), (512, 256, 235)],
)
def test_estimates_of_a_layer(m: int, rows: int, most: int) -> None:
    """Check the chosen tile_n, which is narrow only for a single token, and that the estimate is below a limit in
    µs."""
    choice = select.choose(LAYER, m, TARGET)
    assert choice.backend.name == "routed" and choice.tactic[0] == rows
    assert choice.backend.estimate(LAYER, m, choice.tactic, TARGET) * 1e6 < most


def test_refused_problems() -> None:
    def reason(**changes: Any) -> str | None:
        return BACKEND.reason_unsupported(replace(LAYER, **changes), TARGET)

    assert reason() is None
    assert "gate" in str(reason(gate=None))
    assert "multiple of 64" in str(reason(n=256 * 96))
    assert "at most 1024" in str(reason(n=1025 * 64, grouping=Grouping("n", 1025)))
    # MXFP4 blocks of 32 columns exclude tiles that result in 16 gated columns. Wider tiles remain.
    both = Operand(MXFP4, TILED)
    mxfp4 = replace(LAYER, a=both, b=both, quantised=both, global_scale=None)
    assert BACKEND.reason_unsupported(mxfp4, TARGET) is None
    assert {tactic[0] for tactic in BACKEND.tactics(mxfp4, 1, TARGET)} == {64, 128, 256}
    narrow = replace(LAYER, n=256 * 64)
    assert {tactic[0] for tactic in BACKEND.tactics(narrow, 1, TARGET)} == {32, 64, 128}
