"""A gate in front of a GEMM: one launch or two, which kernels these are, and calls on the model of kernels."""

from dataclasses import replace

import pytest
import torch
from support.cases import arguments, expected_of, named
from support.gemm_problems import BF16, FP16, HOPPER, fp4_problem
from support.launch_model import Launches, launches  # noqa: F401  (a fixture)

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends.input_first import APART, InputFirst
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing.samples import silu_mul_mm_fp4_weight_only

OP = OPS["silu_mul_mm_fp4_weight_only"]
PLAIN = fp4_problem(4096, 14336, a_dtype=BF16)
GATED = replace(PLAIN, gates_input=True)


def test_bytes():
    """Gate and up are read."""
    assert GATED.bytes_moved(8) == PLAIN.bytes_moved(8) + 8 * 14336 * 2
    assert GATED.flops(8) == PLAIN.flops(8)


@pytest.mark.parametrize("m", [1, 8, 64, 4096])
def test_tactics(m):
    """All of a backend behind a launch for the gate, which takes its time by the model; of Hopper's also without it,
    as is chosen for one row."""
    plain, gated = (select.candidates(problem) for problem in (PLAIN, GATED))
    assert [*plain] == [*gated] and all(isinstance(each, InputFirst) for each in gated.values())
    for name, backend in plain.items():
        if backend.reason_unsupported(PLAIN, HOPPER) is not None or name == "reference":
            continue
        own = backend.tactics(PLAIN, m, HOPPER)
        apart = tuple((APART, *tactic) for tactic in own)
        assert gated[name].tactics(GATED, m, HOPPER) == (*(own if name == "wgmma" else ()), *apart)
        for tactic in own:
            two = gated[name].estimate(GATED, m, (APART, *tactic), HOPPER)
            assert two > backend.estimate(PLAIN, m, tactic, HOPPER) + 1.9e-6
    choice = select.choose(GATED, m, HOPPER)
    if m == 1:
        assert choice.backend.name == "wgmma" and APART not in choice.tactic
    assert select.choose(PLAIN, m, HOPPER).backend.name == choice.backend.name


@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if not arch.has_wgmma], ids=lambda arch: arch.name)
def test_other_gpus_have_two_launches(arch):
    (target,) = usual_targets(arch)[:1]
    for m in (1, 4096):
        choice = select.choose(GATED, m, target)
        assert choice.tactic[0] == APART and not choice.backend.checks_operands(GATED, choice.tactic)


@pytest.mark.parametrize(("dtype", "fmt"), [(BF16, NVFP4), (FP16, MXFP4)])
def test_kernels(dtype, fmt):
    """That of two launches is the kernel of the op ``silu_mul``; that of one has the gate."""
    arch = HOPPER.arch
    problem = replace(fp4_problem(4096, 1024, fmt, dtype), gates_input=True)
    backend = select.candidates(problem)["wgmma"]
    (silu_mul,) = OPS["silu_mul"].kernels(arch, torch.empty(8, 2048, dtype=dtype, device="meta"))
    first, second = backend.kernels(problem, (APART, 8, 256, 4), arch)
    assert first == silu_mul and not second.config.operands.gated
    assert not backend.checks_operands(problem, (APART, 8, 256, 4))
    (one,) = backend.kernels(problem, (8, 256, 4), arch)
    assert replace(one.config, operands=replace(one.config.operands, gated=False)) == second.config
    assert one.config.operands.gated and backend.checks_operands(problem, (8, 256, 4))


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("backend", "kernels"),
    [
        ("auto", ["FP4WgmmaKernel"]),
        ("mma_sync", ["RowQuantKernel", "FP4MmaKernel"]),
        ("cublas", ["RowQuantKernel", "FP4DequantKernel"]),
    ],
)
def test_calls(fmt, backend, kernels, launches: Launches):  # noqa: F811
    """One launch or two, of strided rows too; none where the call is wrong."""
    for dtype in (BF16, FP16):
        sample = silu_mul_mm_fp4_weight_only.SAMPLES.sample(
            "", 5, 136, 512, fmt, "128x4", torch.device("cpu"), dtype=dtype, backend=backend
        )
        given = arguments(OP, sample)
        expected = expected_of(OP).results(given)
        wide = torch.cat((given["a"], given["a"]), 1)[:, : given["a"].shape[1]]
        for a in (given["a"], given["a"], wide):
            launches.calls.clear()
            expected_of(OP).assert_results((OP.cuda(**{**given, "a": a}),), expected, given)
            assert [type(kernel).__name__ for kernel, _ in launches.calls] == kernels
        launches.calls.clear()
        with pytest.raises(ValueError, match=r"a has shape \(5, 512\); expected \(5, 1024\), gate and up for each of"):
            OP.cuda(**{**given, "a": given["a"][:, :512]})
        assert not launches.calls


def test_an_example_is_a_call():
    """What ``warmup`` calls has gate and up."""
    args, kwargs = OP.path.example(n=48, k=192, m=3, dtype=FP16, device="cpu")
    given = arguments(OP, named(OP, kwargs))
    assert not args and given["a"].shape == (3, 384) and given["a"].dtype == FP16
    assert torch_cute_ops.silu_mul_mm_fp4_weight_only(**given).shape == (3, 48)
    assert OP.path.properties(OP.bind(**kwargs))["k"] == 192
