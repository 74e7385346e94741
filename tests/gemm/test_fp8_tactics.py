"""Which kernel multiplies FP8 matrices, with which tile, and how many CTAs."""

import dataclasses
import random

import pytest
import torch

from torch_cute_ops.kernels import fp8_mma, fp8_wgmma
from torch_cute_ops.kernels.common.expert_layout import ExpertLayout
from torch_cute_ops.ops import _fp8_tactics
from torch_cute_ops.ops._fp8_tactics import Shape, Tactic, choose, tactics
from torch_cute_ops.runtime.arch import ARCHS

HOPPER = ARCHS["sm_90a"]
SMS = 132
TYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (ExpertLayout(), ExpertLayout(True), ExpertLayout(True, True), ExpertLayout(False, True))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_every_tactic_has_a_kernel(arch):
    for tactic in tactics(arch):
        for rows in LAYOUTS:
            for dtype in TYPES:
                config = tactic.wanted(rows, dtype, arch).config
                assert config.reason_unsupported(arch) is None
                assert config.stages >= 2 and config.tokens == tactic.tokens


def test_tactics_are_the_tiles():
    assert [(one.tokens, one.columns, one.splits) for one in tactics(HOPPER)] == list(fp8_wgmma.TILES)
    assert [one.tokens for one in tactics(ARCHS["sm_120a"])] == list(fp8_mma.TILES)
    assert _fp8_tactics.MANY == fp8_wgmma.MANY


def test_unsupported():
    """With the reason."""
    config = tactics(HOPPER)[0].wanted(ExpertLayout(), torch.bfloat16, HOPPER).config
    assert "sm_100a" in config.reason_unsupported(ARCHS["sm_100a"])
    facts = {"rows": ExpertLayout(), "out_dtype": torch.bfloat16, "arch": HOPPER, "pdl": True}
    assert fp8_wgmma.plan(tokens=48, columns=128, **facts) is None
    assert fp8_wgmma.plan(tokens=16, columns=256, **facts) is None
    assert fp8_mma.plan(tokens=48, **facts) is None
    assert "as many stages; there are 2" in dataclasses.replace(config, stages=2).reason_unsupported(HOPPER)
    pairs = fp8_wgmma.plan(tokens=128, columns=128, **facts)
    assert "5 stages have not whole ones" in dataclasses.replace(pairs, stages=5).reason_unsupported(HOPPER)


@pytest.mark.parametrize("tactic", tactics(HOPPER), ids=lambda one: "x".join(map(str, one[1:])))
def test_there_are_never_more_tiles(tactic):
    """Whatever rows experts have: a launch of as many CTAs as there are tiles at most leaves none out, and no CTA of a
    cluster alone."""
    for seed in range(50):
        some = random.Random(seed)
        experts, n = some.randint(1, 20), some.randint(1, 80) * 8
        counts = [some.choice((0, 1, some.randint(0, 300))) for _ in range(experts)]
        across = -(-n // tactic.columns)
        tiles = sum(-(-count // tactic.tokens) for count in counts) * across
        for shape in (Shape(sum(counts), experts, n, 128), Shape(experts * 300, experts, n, 128, 300)):
            assert tactic.most_tiles(shape) >= tiles
            workers = tactic.workers(shape, SMS)
            assert workers <= SMS and workers % tactic.splits == 0
            assert workers > 0 or not tiles


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        (Shape(32 * 8, 32, 4096, 7168, 8), (16, 128, 1)),
        (Shape(32 * 8, 32, 7168, 2048, 8), (16, 128, 1)),
        (Shape(8 * 16, 8, 7168, 2048, 16), (16, 128, 1)),
        (Shape(8 * 64, 8, 4096, 7168, 64), (128, 128, 1)),
        (Shape(32 * 64, 32, 7168, 2048, 64), (128, 128, 1)),
        (Shape(32 * 128, 32, 4096, 7168), (128, 128, 1)),
        (Shape(32 * 256, 32, 4096, 7168), (128, 128, 1)),
        (Shape(8 * 512, 8, 4096, 7168), (128, 128, 1)),
        (Shape(4 * 8192, 4, 4096, 7168), (128, 128, 1)),
        (Shape(8 * 4096, 8, 7168, 2048), (128, 128, 1)),
        (Shape(8, 1, 4096, 7168), (16, 128, 2)),
        (Shape(16, 1, 4096, 7168), (16, 128, 2)),
        (Shape(32, 1, 4096, 7168), (16, 128, 1)),
        (Shape(64, 1, 4096, 7168), (16, 128, 1)),
        (Shape(128, 1, 4096, 7168), (32, 128, 1)),
        (Shape(256, 1, 4096, 7168), (128, 64, 1)),
        (Shape(512, 1, 4096, 7168), (128, 128, 1)),
        (Shape(1024, 1, 4096, 7168), (128, 128, 1)),
        (Shape(8192, 1, 4096, 7168), (128, 128, 1)),
        (Shape(8, 1, 7168, 2048), (16, 128, 1)),
        (Shape(64, 1, 7168, 2048), (128, 64, 1)),
        (Shape(256, 1, 7168, 2048), (128, 128, 1)),
        (Shape(8192, 1, 7168, 2048), (128, 128, 1)),
    ],
)
def test_the_fastest_is_chosen(shape, tile):
    """What was, on an H200, or nearly."""
    assert choose(shape, HOPPER, SMS)[1:] == tile


def test_few_tiles_are_shared():
    """Where there are fewer than SMs, and only there."""
    assert choose(Shape(8, 1, 1024, 7168), HOPPER, SMS).splits > 1
    assert choose(Shape(32 * 8, 32, 4096, 7168, 8), HOPPER, SMS).splits == 1


def test_other_gpus_multiply_by_warps():
    for name in ("sm_100a", "sm_120a"):
        assert choose(Shape(1, 1, 4096, 7168), ARCHS[name], SMS) == Tactic("mma", 16, 128)
        assert choose(Shape(8192, 1, 4096, 7168), ARCHS[name], SMS) == Tactic("mma", 64, 128)
        # A weight is read once for each tile of rows.
        assert choose(Shape(32 * 33, 32, 4096, 7168, 33), ARCHS[name], SMS) == Tactic("mma", 64, 128)
