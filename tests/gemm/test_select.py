"""Choice of a GEMM's backend: buckets, estimates, reasons, and the functions that users can query."""

import dataclasses
import itertools

import pytest
import torch
from support.gemm_problems import (
    BF16,
    FP16,
    FP32,
    HOPPER,
    ROW_LAYOUTS,
    fp4_problem,
    fp8_fp4_problem,
    fp8_problem,
    problem_id,
    problems,
    token_problem,
)

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends._fp8 import FP8Backend
from torch_cute_ops.gemm.backends.reference import Reference
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

NO_GPU = Target(torch.device("cpu"), None, 1)
GEMMS = {
    "mm_fp4": {"n": 64, "k": 256},
    "mm_fp4_weight_only": {"n": 64, "k": 256},
    "mm_fp8": {"n": 64, "k": 256},
    "mm_fp8_block": {"n": 64, "k": 256},
    "grouped_mm_fp8": {"n": 64, "k": 256, "experts": 4},
    "mm_fp8_fp4": {"n": 64, "k": 256},
    "grouped_mm_fp8_fp4": {"n": 64, "k": 256, "experts": 4},
    "moe_fc1_fp4": {"n": 256, "k": 256, "experts": 4},
    "moe_fc1_fp4_weight_only": {"n": 256, "k": 256, "experts": 4},
    "moe_fc2_fp4": {"n": 64, "k": 256, "experts": 4},
    "moe_fc2_fp4_weight_only": {"n": 64, "k": 256, "experts": 4},
    "silu_mul_mm_fp4_weight_only": {"n": 64, "k": 256},
    "fp4quant_mm_fp4": {"n": 64, "k": 256},
    "silu_mul_fp4quant_mm_fp4": {"n": 64, "k": 256},
}
"""Static properties of a call, keyed by the GEMM op's name."""


def test_bucket():
    """Check the buckets of M. A bucket is represented by a number that is at least M.

    One row is a separate bucket. The step between buckets is 8 up to 128 rows, 16 up to 256, 32 up to 512, and above
    512 a sixteenth of the next power of two.
    """
    assert [bucket(m) for m in (0, 1, 8, 9, 127, 128, 129, 256, 257, 512, 513, 1025, 16_384)] == [
        *(8, 1, 8, 16, 128, 128, 144, 256, 288, 512, 576, 1152, 16_384)
    ]
    for m in range(1, 5000):
        planned = bucket(m)
        assert m <= planned == bucket(planned) <= max(8, m * 1.13 + 8)


@pytest.mark.parametrize("problem", [*problems()], ids=problem_id)
@pytest.mark.parametrize("arch", ARCHS)
def test_backends_answer(problem, arch):
    """Check the names, tactics, estimates and kernels of all backends that handle a problem.

    The backends' names are distinct. A backend that supports the problem offers tactics, estimates at least as much
    time for 4,096 rows as for one row, and can build its kernels.
    """
    (target,) = usual_targets(ARCHS[arch])[:1]
    handling = select.candidates(problem).values()
    assert len([one for one in select.BACKENDS if one.handles(problem.without_prologue)]) == len(handling) > 1
    assert all(backend.handles(problem) for backend in handling)
    able = [backend for backend in handling if backend.reason_unsupported(problem, target) is None]
    assert "reference" in [backend.name for backend in able]
    for backend in able:
        tactics = backend.tactics(problem, 64, target)
        assert tactics
        for tactic in tactics:
            few, many = (backend.estimate(problem, m, tactic, target) for m in (1, 4096))
            assert 0 < few <= many
            assert all(kernel.make().config is not None for kernel in backend.kernels(problem, tactic, target.arch))


@pytest.mark.parametrize(
    ("alpha", "bias_dtype"), [*itertools.product((None, "one", "column"), (None, FP32, BF16))], ids=str
)
@pytest.mark.parametrize("arch", ARCHS)
def test_some_backend_takes_every_epilogue(alpha, bias_dtype, arch):
    """Check that ``"auto"`` finds a backend with kernels for every epilogue on every GPU."""
    (target,) = usual_targets(ARCHS[arch])[:1]
    epilogue = {"alpha": alpha, "bias_dtype": bias_dtype}
    of_experts = {**epilogue, "alpha": {"column": "expert_column", None: "expert"}.get(alpha, alpha)}
    for problem in (
        fp4_problem(**epilogue),
        fp4_problem(a_dtype=FP16, fmt=MXFP4, **epilogue),
        fp8_problem(**epilogue),
        *(
            token_problem(n, out_dtype=dtype, bias_dtype=bias_dtype)
            for n in (4096, 4104)
            for dtype in (BF16, FP16, FP32)
        ),
        *(fp8_problem(rows=rows, experts=4, **of_experts) for rows in ROW_LAYOUTS[1:]),
        *(fp8_fp4_problem(fmt, **epilogue) for fmt in (NVFP4, MXFP4)),
        *(fp8_fp4_problem(rows=rows, experts=4, **of_experts) for rows in ROW_LAYOUTS[1:]),
        *(token_problem(rows=rows, experts=4, bias_dtype=bias_dtype) for rows in ROW_LAYOUTS[1:]),
    ):
        assert select.choose(problem, 16, target).backend.name != "reference"


def test_auto_takes_no_reference_on_a_gpu():
    """Check that on a GPU ``"auto"`` raises an error with every backend's reason instead of running the slow
    reference."""
    problem = dataclasses.replace(fp4_problem(64, 12 * 64, experts=12), n=20)
    with pytest.raises(ValueError, match=r"no backend: wgmma: .*; routed: .*; reference: is selected only by its name"):
        select.choose(problem, 8, HOPPER)
    assert select.choose(problem, 8, HOPPER, "reference").backend.name == "reference"


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (57344, 8192)])
def test_many_rows_recode_an_fp4_weight(n, k):
    """Check that FP8 × NVFP4 GEMMs with many rows re-encode the weight in FP8 first, which was measured to be faster on
    an H200.

    With FP4 or 16-bit activations the weight is never re-encoded, because FP8 would round NVFP4's numbers.
    """
    names = [select.choose(fp8_fp4_problem(NVFP4, n=n, k=k), m, HOPPER).backend.name for m in (1, 64, 512, 1024, 4096)]
    assert names == ["wgmma_rs", "wgmma_ss", "wgmma_ss", "recode", "recode"]
    for dtype in (None, BF16):
        problem = fp4_problem(n=n, k=k, a_dtype=dtype)
        assert not any(isinstance(backend, FP8Backend) for backend in select.candidates(problem).values())


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (57344, 8192)])
def test_few_rows_scale_sums_of_an_mxfp4_weight(n, k):
    """Check that ``wgmma_codes`` is chosen for FP8 × MXFP4 GEMMs with few rows, which was measured to be faster on an
    H200."""
    problem = fp8_fp4_problem(MXFP4, n=n, k=k)
    assert [select.choose(problem, m, HOPPER).backend.name for m in (1, 16, 64, 512)] == ["wgmma_codes"] * 2 + [
        "wgmma_ss"
    ] * 2
    assert "wgmma_rs" not in select.candidates(problem)
    assert "wgmma_codes" not in select.candidates(fp8_fp4_problem(NVFP4, n=n, k=k))


def test_every_reason_is_given(monkeypatch):
    monkeypatch.setattr(Reference, "reason_unsupported", lambda *args: "is being tested")
    text = r"no backend: wgmma: needs a CUDA device; .*; mma_sync: needs .*; reference: is being tested"
    with pytest.raises(ValueError, match=text):
        select.choose(fp4_problem(), 8, NO_GPU)


def test_a_named_backend_says_why_it_cannot():
    known = "'auto', 'wgmma', 'tcgen05', 'mma_sync', 'cublas'"
    with pytest.raises(ValueError, match=f"backend='routed' is unknown; use {known}"):
        select.choose(fp4_problem(), 8, HOPPER, "routed")
    with pytest.raises(ValueError, match=r"backend 'wgmma': needs Hopper's warpgroup MMA; this is sm_100a"):
        select.choose(fp8_problem(), 8, usual_targets(ARCHS["sm_100a"])[0], "wgmma")


def test_keys_of_choices_differ():
    """Check that keys of tuned choices differ if the problem, the bucket of M or the GPU differs."""
    gpu = dataclasses.replace(HOPPER, name="GPU of test")
    every = list(problems())
    keys = [select.key_of(problem, m, gpu) for problem in every for m in (8, 9)]
    assert len(set(keys)) == 2 * len(every)
    assert select.key_of(every[0], 8, gpu) == select.key_of(every[0], 5, gpu)
    assert select.key_of(every[0], 8, dataclasses.replace(gpu, name="another")) != keys[0]
    assert select.key_of(every[0], 8, HOPPER) is None
    assert select.key_of(dataclasses.replace(every[0], static_weight=True), 8, gpu) == keys[0]  # not in the key


# Functions for users


def test_the_ops_with_backends_are_the_gemms():
    assert {name for name, op in OPS.items() if op.has_backends} == set(GEMMS)


@pytest.mark.parametrize("op", GEMMS)
def test_backends_on_a_cpu(op):
    """Check that every kernel's backend gives a reason on a CPU, and that the reference runs."""
    names = {"mm_fp4": ("wgmma", "tcgen05", "mma_sync", "cublas"), "mm_fp8_block": ("wgmma", "tcgen05", "mma_sync")}
    made_input = ("silu_mul_mm_fp4_weight_only", "fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4")
    names |= dict.fromkeys(("mm_fp4_weight_only", *made_input), names["mm_fp4"])
    names["mm_fp8"] = ("wgmma", "tcgen05", "mma_sync", "scaled_mm")
    names["grouped_mm_fp8"] = names["mm_fp8_block"]
    names["mm_fp8_fp4"] = names["grouped_mm_fp8_fp4"] = ("wgmma_ss", "wgmma_rs", "recode", "tcgen05", "mma_sync")
    names["moe_fc2_fp4"] = names["moe_fc2_fp4_weight_only"] = ("wgmma", "tcgen05", "routed")
    names["moe_fc1_fp4"] = names["moe_fc1_fp4_weight_only"] = ("tcgen05", "routed")
    no_gpu = "needs a CUDA device; the tensors are on cpu"
    found = torch_cute_ops.backends(op, device="cpu", **GEMMS[op])
    assert found == {**dict.fromkeys(names[op], no_gpu), "reference": None}


def test_backends_of_a_gpu_that_is_not_here():
    given = GEMMS["mm_fp4"]
    found = {arch: torch_cute_ops.backends("mm_fp4", arch, **given) for arch in ("sm_103a", "sm_120a")}
    assert [name for name, reason in found["sm_103a"].items() if reason is None] == [
        "tcgen05",
        "mma_sync",
        "cublas",
        "reference",
    ]
    assert found["sm_120a"]["tcgen05"] == "needs data-center Blackwell's tcgen05; this is sm_120a"
    with pytest.raises(ValueError, match="'sm_80a' is no architecture"):
        torch_cute_ops.backends("mm_fp4", "sm_80a", **given)
    with pytest.raises(TypeError, match="pass only one of them"):
        torch_cute_ops.backends("mm_fp4", "sm_90a", device="cpu", **given)


def test_an_op_without_backends():
    with pytest.raises(ValueError, match=r"'fp4_quantize' has no backends; .* grouped_mm_fp8_fp4, mm_fp4, mm_fp4_w"):
        torch_cute_ops.backends("fp4_quantize", hidden=64)


@pytest.mark.parametrize(
    ("op", "properties", "error", "text"),
    [
        ("moe_fc2_fp4", {"n": 64, "k": 128}, TypeError, "needs the property experts"),
        ("moe_fc2_fp4", {"n": 64, "k": 128, "experts": 2, "alpha": "one"}, TypeError, "has no property 'alpha'"),
        ("moe_fc2_fp4", {"n": 64, "k": 128, "experts": 3}, ValueError, "for 3 experts, and a column of w has 128"),
        (
            "moe_fc2_fp4_weight_only",
            {"n": 64, "k": 128, "experts": 4},
            ValueError,
            "for 4 experts, and a column of w has",
        ),
        ("moe_fc1_fp4", {"n": 64, "k": 128}, TypeError, "needs the property experts"),
        (
            "moe_fc1_fp4",
            {"n": 129, "k": 128, "experts": 2},
            ValueError,
            "the same number of columns for each of 2 experts",
        ),
        ("moe_fc1_fp4", {"n": 96, "k": 128, "experts": 1}, ValueError, "I a positive multiple of 64"),
        (
            "moe_fc1_fp4",
            {"n": 64, "k": 128, "experts": 1, "alpha": "column"},
            ValueError,
            "alpha is 'column'; expected one of 'expert', 'expert_half'",
        ),
        (
            "moe_fc1_fp4_weight_only",
            {"n": 64, "k": 128, "experts": 1, "global_scales": "one"},
            TypeError,
            "has no property 'global_scales'",
        ),
        ("mm_fp4", {"n": 64, "k": 128, "experts": 2}, TypeError, "has no property 'experts'"),
        ("mm_fp4", {"n": 64, "k": 128, "masked": True}, TypeError, "has no property 'masked'"),
        ("mm_fp4", {"n": "64", "k": 128}, TypeError, "n is '64'; expected a positive integer"),
        ("mm_fp4", {"n": 0, "k": 128}, ValueError, "n is 0; expected a positive integer"),
        ("mm_fp4", {"n": True, "k": 128}, TypeError, "n is True; expected a positive integer"),
        ("mm_fp4", {"n": 64, "k": 128, "alpha": "row"}, ValueError, "alpha is 'row'; expected one of 'one', 'column'"),
        (
            "mm_fp4",
            {"n": 64, "k": 128, "alpha": "expert"},
            ValueError,
            "alpha is 'expert'; expected one of 'one', 'col",
        ),
        (
            "grouped_mm_fp8",
            {**GEMMS["grouped_mm_fp8"], "alpha": "column"},
            ValueError,
            "expected one of 'one', 'expert'",
        ),
        ("mm_fp4", {"k": 128}, TypeError, "needs the property n"),
        ("mm_fp8_block", {"n": 64, "k": 128, "dtype": BF16}, TypeError, "has no property 'dtype'"),
        ("mm_fp8_block", {"n": 64, "k": 96}, ValueError, "b has K = 96; expected a positive multiple of 64"),
    ],
)
def test_properties_are_checked(op, properties, error, text):
    with pytest.raises(error, match=rf"cute::{op}\b.*{text}"):
        torch_cute_ops.backends(op, device="cpu", **properties)
