"""The backend ``cublas`` on GPUs whose tensor cores take NVFP4: GEMMs that multiply FP4 codes, and calls of PyTorch.

The tests run without such a GPU: PyTorch's meta kernels check the calls, and the reference computes the results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples._fp4_gemm import random_matrix
from support.emulated import CPU, poisoned
from support.epilogues import finished, operands
from support.gemm_problems import BF16, FP16, FP32, HOPPER, backend_for, fp4_problem

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.gemm.backends import cublas
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.reference.mm_fp4 import fp4_gemm
from torch_cute_ops.runtime.arch import ARCHS

BACKEND = backend_for("cublas", fp4_problem())
(BLACKWELL,) = usual_targets(ARCHS["sm_100a"])
LAYOUT = SCALE_LAYOUTS["128x4"]
DECODED, BLOCK_SCALED = (), ("block_scaled",)
SCALED_MM, SCALED_MM_V2 = torch._scaled_mm, getattr(torch, "_scaled_mm_v2", None)
two_levels = pytest.mark.skipif(not cublas.HAS_TWO_LEVELS, reason="torch 2.9 lacks tensor-wide scales")


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        (True, fp4_problem(n=16, k=32)),
        (True, fp4_problem(alpha="column", bias_dtype=FP32)),
        (False, fp4_problem(n=24)),
        (False, fp4_problem(k=48)),
        (False, fp4_problem(fmt=MXFP4)),
        (False, fp4_problem(a_dtype=BF16)),
        (False, fp4_problem(layout="linear")),
        (False, fp4_problem(layout="8x4")),
    ],
)
def test_operands_that_stay_codes(codes: bool, problem: Any) -> None:
    """Check for which problems PyTorch gets FP4 codes. The operands of all other problems are decoded first."""
    for arch in ARCHS.values():
        target = usual_targets(arch)[0]
        tactics = BACKEND.tactics(problem, 64, target)
        native = codes and (arch.has_tcgen05 or arch.has_block_scaled_mma)
        assert tactics == ((DECODED, BLOCK_SCALED) if native else (DECODED,))
        assert BACKEND.reason_unsupported(problem, target) is None
        assert [bool(BACKEND.kernels(problem, tactic, arch)) for tactic in tactics] == [True, False][: len(tactics)]
        if native:
            decoded, block_scaled = (BACKEND.estimate(problem, 512, tactic, target) for tactic in tactics)
            assert block_scaled < decoded


@pytest.mark.parametrize(("version", "takes"), [(None, True), ("12.6", False), ("12.8", True), ("13.0", True)])
def test_cuda_has_it(version: str | None, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    assert cublas._cuda_multiplies_codes.__wrapped__() is takes


def meta(value: Any) -> Any:
    """Return meta tensors for a tensor or a list of tensors, and any other value unchanged."""
    if isinstance(value, list):
        return [meta(one) for one in value]
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


class Calls(list[SimpleNamespace]):
    """Replacements for PyTorch's scaled GEMMs that run PyTorch's own checks, compute with the reference, and record the
    calls."""

    def scaled_mm_v2(
        self, a: Any, b: Any, a_scales: Any, recipe: Any, swizzle: Any, b_scales: Any, *rest: Any, out: Any
    ) -> None:
        b_recipe, b_swizzle, bias, dtype = rest
        assert (recipe, swizzle) == (b_recipe, b_swizzle) and bias is None and out.dtype == dtype
        made = SCALED_MM_V2(*map(meta, (a, b, a_scales, recipe, swizzle, b_scales, *rest)))
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        factors = [scale for scales in (a_scales, b_scales) for scale in scales[1:]]
        self.append(SimpleNamespace(recipe=recipe, swizzle=swizzle, factors=factors, dtype=dtype))
        self.sums(a, b, a_scales[0], b_scales[0], torch.stack(factors).prod(0) if factors else None, out)

    def scaled_mm(self, a: Any, b: Any, a_scale: Any, b_scale: Any, *, out_dtype: Any, out: Any) -> None:
        made = SCALED_MM(*map(meta, (a, b, a_scale, b_scale)), out_dtype=out_dtype)
        assert (made.shape, made.dtype) == (out.shape, out.dtype)
        self.append(SimpleNamespace(dtype=out_dtype))
        self.sums(a, b, a_scale, b_scale, None, out)

    @staticmethod
    def sums(a: Any, b: Any, a_scale: Any, b_scale: Any, factor: Any, out: Any) -> None:
        a, b = (codes.view(torch.uint8) for codes in (a, b.t()))
        out.copy_(fp4_gemm(a, a_scale, b, b_scale, factor, None, out.dtype, NVFP4, LAYOUT, LAYOUT))


def call(epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Call a launcher twice, check the results, and return the calls that PyTorch received."""
    m, n, k = 9, 48, 96
    calls = Calls()
    problem = fp4_problem(n, k, out_dtype=epilogue.out_dtype, alpha=epilogue.alpha, bias_dtype=epilogue.bias_dtype)
    monkeypatch.setattr(torch, "_scaled_mm", calls.scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm_v2", calls.scaled_mm_v2, raising=False)
    launch = BACKEND.launcher(problem, BLOCK_SCALED, BLACKWELL)
    for _ in range(2):
        (a, a_scale), (b, b_scale) = (random_matrix(rows, k, NVFP4, "128x4", CPU) for rows in (m, n))
        alpha, bias = operands(epilogue, n)
        out = poisoned(m, n, dtype=epilogue.out_dtype)
        launch(Operands(a, b.t(), a_scale, b_scale, alpha, bias), out)
        sums = fp4_gemm(a, a_scale, b, b_scale, None, None, FP32, NVFP4, LAYOUT, LAYOUT)
        assert torch.equal(out, finished(sums, epilogue, alpha, bias))
    return calls


@two_levels
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
def test_one_alpha_is_a_scale_of_the_tensor(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a single alpha is applied as a tensor-wide scale in one call. The other operand's scale is a tensor
    with the value 1, which is made only once."""
    from torch.nn.functional import ScalingType, SwizzleType

    first, second = call(Epilogue(out_dtype, "one"), monkeypatch)
    assert first.recipe == [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value]
    assert first.swizzle == [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value]
    assert first.dtype == second.dtype == out_dtype
    assert first.factors[1].tolist() == [1] and first.factors[1] is second.factors[1]


@two_levels
def test_without_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = call(Epilogue(BF16), monkeypatch)
    assert (len(one.recipe), len(one.swizzle), one.dtype, one.factors) == (1, 1, BF16, [])


@two_levels
@pytest.mark.parametrize(
    "epilogue", [Epilogue(BF16, "column"), Epilogue(FP16, "one", FP16), Epilogue(FP32, "column", FP32)], ids=str
)
def test_other_epilogues_follow_in_fp32(epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all other epilogues are applied to fp32 results, so that the result is rounded only once."""
    one, _ = call(epilogue, monkeypatch)
    assert (len(one.recipe), one.dtype, one.factors) == (1, FP32, [])


@pytest.mark.parametrize("epilogue", [Epilogue(BF16), Epilogue(BF16, "one"), Epilogue(FP16, "column", FP32)], ids=str)
def test_before_torch_2_10(epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every alpha is applied in fp32 after the GEMM if PyTorch supports no tensor-wide scales."""
    monkeypatch.setattr(cublas, "HAS_TWO_LEVELS", False)
    one, _ = call(epilogue, monkeypatch)
    assert one.dtype == (BF16 if epilogue.alpha is None else FP32)


def test_hopper_decodes() -> None:
    assert BACKEND.tactics(fp4_problem(), 4096, HOPPER) == (DECODED,)
