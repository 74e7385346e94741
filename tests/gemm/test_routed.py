"""The backends ``routed`` of both expert GEMMs on every architecture: tactics and choices, without running kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.gemm_problems import BF16, FP32, HOPPER, backend_for, fp4_problem, gated_problem

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends._routed import clocks_per_weight
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.runtime.arch import ARCHS, Arch

every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
DEEPSEEK, MIXTRAL = (7168, 2048, 256), (4096, 14_336, 8)
"""H, the width of an expert, and the number of experts of a layer."""


def first(hidden: int, width: int, experts: int, **given: Any) -> Any:
    return gated_problem(n=experts * width, k=hidden, experts=experts, **given)


def second(hidden: int, width: int, experts: int, **given: Any) -> Any:
    return fp4_problem(hidden, experts * width, experts=experts, **given)


def operands() -> list[dict[str, Any]]:
    """Return all supported formats and layouts of the operands."""
    tiled = [{"fmt": fmt, "layout": layout} for fmt in (NVFP4, MXFP4) for layout in ("128x4", "8x4")]
    given = [*tiled, {"fmt": NVFP4, "layout": "linear"}]
    return [*given, *(each | {"a_dtype": BF16} for each in given if each["layout"] != "8x4")]


@every_arch
@pytest.mark.parametrize(
    "given", operands(), ids=lambda given: "-".join(getattr(each, "name", str(each)) for each in given.values())
)
def test_every_supported_problem_has_a_tactic(arch: Arch, given: dict[str, Any]) -> None:
    """Check the smallest and odd widths of experts, and lists of more experts than usual, which take more shared
    memory."""
    multiple = 256 if given["layout"] == "linear" else 64
    (target, *_) = usual_targets(arch)
    for experts, m in itertools.product((3, 1000), (1, 30, 100, 300, 3000)):
        problems = (
            first(5 * multiple, 64, experts, bias_dtype=FP32, **given),
            first(5 * multiple, 3 * 64, experts, **given),
            second(72, 3 * multiple, experts, **given),
            second(72, 3 * multiple, experts, bias_dtype=FP32, **given),
        )
        for problem in problems:
            backend = backend_for("routed", problem)
            assert backend.reason_unsupported(problem, target) is None
            assert backend.tactics(problem, m, target), (problem, m)


@every_arch
@pytest.mark.parametrize("sizes", [DEEPSEEK, MIXTRAL], ids=["deepseek", "mixtral"])
def test_choices(arch: Arch, sizes: tuple[int, int, int]) -> None:
    """Check that "auto" takes a kernel on every GPU: ``routed``, or a kernel that its estimate prefers."""
    (target, *_) = usual_targets(arch)
    for m in (1, 8, 64, 256, 1024):
        gated, gated_weight_only, both, weight_only = (
            select.choose(problem, m, target).backend.name
            for problem in (first(*sizes), first(*sizes, a_dtype=BF16), second(*sizes), second(*sizes, a_dtype=BF16))
        )
        assert gated_weight_only == "routed"
        assert weight_only == ("wgmma" if arch.has_wgmma and m >= 64 and sizes is MIXTRAL else "routed")
        if arch.has_tcgen05:
            # With many tokens and few of them per expert, tcgen05 reads each weight once per 128 tokens. With 256
            # tokens, both estimates are about equal.
            names = {256: {"tcgen05", "routed"}, 1024: {"routed"}} if sizes is DEEPSEEK else {}
            assert {gated, both} <= names.get(m, {"tcgen05"})
        else:
            assert (gated, both) == (gated_weight_only, weight_only)


@every_arch
def test_token_blocks(arch: Arch) -> None:
    """Check that blocks of tokens whose accumulators do not fit into shared memory are not offered, and that smaller
    blocks are tried if shared memory is small."""
    problem, (target, *_) = second(*DEEPSEEK), usual_targets(arch)
    blocks = {
        m: {tactic.token_block for tactic in backend_for("routed", problem).tactics(problem, m, target)}
        for m in (16, 100, 600)
    }
    large = arch.smem_per_cta > HOPPER.arch.smem_per_cta // 2
    assert blocks == {16: {16}, 100: {128} if large else {64, 128}, 600: {256, 512} if large else {64, 128, 256}}


@every_arch
def test_codes_are_multiplied(arch: Arch) -> None:
    """Check that GPUs with block-scaled mma.sync multiply the codes of two FP4 operands, and that other GPUs, and GEMMs
    with 16-bit activations, decode."""
    target = usual_targets(arch)[0]
    for sizes, given in itertools.product((DEEPSEEK, MIXTRAL), operands()):
        for problem in (first(*sizes, **given), second(*sizes, **given)):
            backend = backend_for("routed", problem)
            configs = [backend.built(problem, tactic, arch) for tactic in backend.tactics(problem, 100, target)]
            assert {config.operands.by_codes for config in configs} == {
                arch.has_block_scaled_mma and given.get("a_dtype") is None
            }


def test_clocks_of_a_weight() -> None:
    """Check that more tokens take more time, that the assumed rate of mma.sync is not tcgen05's, and that the first
    eight tokens cost little because decoding takes as long as multiplying."""
    clocks = {name: [clocks_per_weight(m, arch) for m in (8, 16, 32)] for name, arch in ARCHS.items()}
    for each in clocks.values():
        assert each == sorted(each) and each[0] < 1.3 * clocks["sm_90a"][0]
    assert clocks["sm_90a"][2] < clocks["sm_100a"][2] < clocks["sm_120a"][2]
    # 32 tokens times a weight element are 64 FLOP, at 80 % of 2,048 and 1,024 FLOP per clock.
    assert clocks["sm_100a"][2] > 64 / (0.8 * 2048) and clocks["sm_120a"][2] > 64 / (0.8 * 1024)


def test_clocks_of_codes() -> None:
    """Check that multiplying codes is limited by the FP4 rate of the data sheet and by shared memory, and takes at most
    a third of the time of decoding."""
    arch = ARCHS["sm_120a"]
    for m in (8, 16, 32):
        clocks = clocks_per_weight(m, arch, by_codes=True)
        assert clocks > 2 * m / (0.8 * 4096) and clocks > 0.5625 * (1 + m / 16) / 128
        assert clocks < clocks_per_weight(m, arch) / 3
