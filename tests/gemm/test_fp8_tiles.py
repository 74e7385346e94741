"""Tiles of the FP8 GEMMs: which tiles are offered as tactics, which tile is chosen, and the number of CTAs."""

import dataclasses
import math

import pytest
import torch
from support.gemm_problems import BF16, FP16, FP32, H100, HOPPER, ROW_LAYOUTS, fp4_problem, fp8_fp4_problem, fp8_problem

from torch_cute_ops.formats import MXFP4
from torch_cute_ops.gemm.backends import fp8_mma_sync, fp8_wgmma
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.fp8_tiles import Tile, expected_tiles
from torch_cute_ops.gemm.select import choose
from torch_cute_ops.kernels import fp8_mma
from torch_cute_ops.kernels import fp8_wgmma as wgmma_kernel
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout
from torch_cute_ops.runtime.arch import ARCHS

BACKENDS = (fp8_wgmma.FP8Wgmma(), fp8_mma_sync.FP8MmaSync())


def contiguous(experts, n, k):
    return fp8_problem(n, k, ExpertLayout(True, True), experts)


def masked(experts, n, k):
    return fp8_problem(n, k, ExpertLayout(False, True), experts)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_every_tactic_has_a_kernel(arch):
    (target,) = usual_targets(arch)[:1]
    for rows in ROW_LAYOUTS:
        for dtype in (BF16, FP16, FP32):
            problem = fp8_problem(rows=rows, experts=1 if rows.is_plain else 4, out_dtype=dtype)
            for backend in BACKENDS:
                if backend.reason_unsupported(problem, target) is None:
                    for m in (1, 100, 4096):
                        for tactic in backend.tactics(problem, m, target):
                            (kernel,) = backend.kernels(problem, tactic, arch)
                            assert kernel.config.reason_unsupported(arch) is None
                            assert kernel.config.stages >= 2 and kernel.config.tile_m == tactic[0]


def test_tactics_are_the_tiles():
    """Check that each tile is offered as a tactic for some number of rows, and that 8 rows get no tile meant for many
    rows."""
    problem = fp8_problem()
    found = {tactic for m in (1, 64, 4096) for tactic in BACKENDS[0].tactics(problem, m, HOPPER)}
    assert found == set(wgmma_kernel.TILES)
    assert all(tactic[0] < wgmma_kernel.MANY for tactic in BACKENDS[0].tactics(problem, 8, HOPPER))
    assert {tile_m for tile_m, _ in BACKENDS[1].tactics(problem, 8, HOPPER)} == set(fp8_mma.TILES)


def test_unsupported():
    """Check the reasons for unsupported configurations."""
    (kernel,) = BACKENDS[0].kernels(fp8_problem(), (16, 128, 1), HOPPER.arch)
    config = kernel.config
    assert "sm_100a" in config.reason_unsupported(ARCHS["sm_100a"])
    given = {"rows": ExpertLayout(), "epilogue": Epilogue(torch.bfloat16), "arch": HOPPER.arch, "pdl": True}
    assert wgmma_kernel.plan(tile_m=48, tile_n=128, **given) is None
    assert wgmma_kernel.plan(tile_m=16, tile_n=256, **given) is None
    assert fp8_mma.plan(tile_m=48, **given) is None
    assert "need one each; stages=2" in dataclasses.replace(config, stages=2).reason_unsupported(HOPPER.arch)
    pairs = wgmma_kernel.plan(tile_m=128, tile_n=128, **given)
    assert "5 stages are not a multiple" in dataclasses.replace(pairs, stages=5).reason_unsupported(HOPPER.arch)


def test_clusters_that_run_at_once():
    """Check the number of CTAs that run at once: clusters of two CTAs fill the SMs, larger clusters do not."""
    assert Tile(16, 128).clusters(132) == 132
    assert Tile(16, 128, 2).clusters(132) == 66
    assert [Tile(16, 128, split_k).clusters(132) for split_k in (3, 4, 5, 6, 8)] == [39, 30, 22, 18, 14]
    assert Tile(256, 128, cluster_m=2).clusters(132) == 66
    assert Tile(16, 128, ctas_per_sm=2).clusters(114) == 228


@pytest.mark.parametrize("tile_m", [16, 24, 32, 64, 80, 128])
@pytest.mark.parametrize("mean", [0.25, 1.0, 3.0, 16.0, 40.0, 128.0, 1000.0])
def test_expected_tiles(mean, tile_m):
    """Check that the estimated number of tiles of an expert is within 1.5 % of the expected value, for a
    Poisson-distributed number of rows."""
    rows = range(1, int(mean + 40 * math.sqrt(mean) + 40))
    probabilities = [math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in rows]
    want = sum(p * math.ceil(count / tile_m) for p, count in zip(probabilities, rows, strict=True))
    assert expected_tiles(mean, tile_m) == pytest.approx(want, rel=0.015)


def test_random_routing_takes_larger_tiles():
    """Check that larger tiles are chosen under random routing, because half of the experts get more rows than the mean.

    If rows may be padded, the distribution is unknown, and tiles are chosen for the mean.
    """
    packed = fp8_problem(4096, 7168, ExpertLayout(True, False), 32)
    assert choose(packed, 32 * 16, HOPPER).tactic == (32, 128, 1)
    assert choose(packed, 32 * 4, HOPPER).tactic == (16, 128, 1)
    for problem in (contiguous(32, 4096, 7168), masked(32, 4096, 7168)):
        assert choose(problem, 32 * 16 if not problem.grouping.rows.is_masked else 16, HOPPER).tactic == (16, 128, 1)


def test_random_routing_takes_larger_tiles_of_an_fp4_weight():
    given = {"rows": ExpertLayout(True, False), "experts": 32}
    choices = {m: choose(fp8_fp4_problem(MXFP4, **given), 32 * m, HOPPER) for m in (4, 8, 16)}
    found = {m: (choice.backend.name, choice.tactic) for m, choice in choices.items()}
    assert found == {
        4: ("wgmma_codes", (8, 128, 1)),
        8: ("wgmma_codes", (16, 128, 1)),
        16: ("wgmma_codes", (24, 128, 1)),
    }
    of_nvfp4 = {m: choose(fp8_fp4_problem(**given), 32 * m, HOPPER) for m in (4, 8, 16, 64)}
    found = {m: (choice.backend.name, choice.tactic) for m, choice in of_nvfp4.items()}
    want = {
        4: ("wgmma_rs", (8, 128, 1)),
        8: ("wgmma_rs", (16, 128, 1)),
        16: ("wgmma_rs", (24, 128, 1)),
        64: ("wgmma_ss", (80, 128, 1)),
    }
    assert found == want


FASTEST = [
    (masked(32, 4096, 7168), {8: (16, 128, 1)}),
    (masked(32, 7168, 2048), {8: (16, 128, 1), 64: (128, 128, 1)}),
    (masked(8, 7168, 2048), {16: (16, 128, 1)}),
    (masked(8, 4096, 7168), {64: (128, 128, 1)}),
    (contiguous(32, 4096, 7168), {32 * 128: (128, 128, 1), 32 * 256: (128, 128, 1)}),
    (contiguous(8, 4096, 7168), {8 * 512: (128, 128, 1)}),
    (contiguous(4, 4096, 7168), {4 * 8192: (128, 128, 1)}),
    (contiguous(8, 7168, 2048), {8 * 4096: (128, 128, 1)}),
    (
        fp8_problem(4096, 7168),
        {
            128: (32, 128, 1),
            256: (128, 64, 1),
            512: (128, 128, 1),
            1024: (128, 128, 1),
            8192: (128, 128, 1),
        },
    ),
    (fp8_problem(7168, 2048), {64: (128, 64, 1), 256: (128, 128, 1), 8192: (128, 128, 1)}),
    (fp8_fp4_problem(n=4096, k=4096), {1: ("wgmma_rs", 8, 128, 3)}),
    (fp8_fp4_problem(n=6144, k=4096), {1: ("wgmma_rs", 8, 128, 2)}),
    (fp8_fp4_problem(n=4096, k=14336), {1: ("wgmma_rs", 8, 128, 3)}),
    (
        fp8_fp4_problem(n=28672, k=4096),
        {
            1: ("wgmma_rs", 8, 128, 1),
            16: ("wgmma_rs", 16, 128, 1),
            32: (32, 128, 1),
            64: (64, 128, 1),
            128: (128, 128, 1),
            256: (256, 128, 1),
        },
    ),
    (fp4_problem(4096, 14336), {8: (8, 160, 4), 16: (16, 192, 5), 32: (32, 192, 5), 64: (64, 256, 6)}),
    (fp4_problem(4096, 4096), {1: (1, 192, 4), 8: (8, 160, 4), 16: (16, 192, 4), 64: (32, 192, 2)}),
    (fp4_problem(6144, 4096), {16: (16, 256, 4), 32: (32, 256, 4), 64: (32, 192, 2)}),
    (fp4_problem(28672, 4096), {1: (1, 256, 1), 8: (8, 224, 1), 16: (16, 256, 1), 64: (64, 256, 1)}),
    (fp4_problem(10240, 5120), {1: (1, 192, 2), 8: (8, 160, 2), 16: (16, 192, 2), 32: (32, 192, 2)}),
    (fp4_problem(8192, 28672), {1: (1, 256, 3), 8: (8, 224, 3), 16: (16, 256, 0), 32: (32, 256, 0)}),
]
"""The fastest or nearly fastest tile on an H200 for each problem and M. The name of the backend precedes the tile,
except for ``wgmma``, and ``wgmma_ss`` with an FP4 weight."""

FASTEST_ON_H100 = [
    (fp8_problem(4096, 4096), {1: (16, 64, 2), 16: (16, 64, 2)}),
    (fp8_problem(4096, 14336), {1: (16, 64, 2), 16: (16, 64, 2), 32: (32, 64, 2), 64: (64, 64, 2)}),
    (fp8_problem(28672, 4096), {1: (16, 128, 1), 16: (16, 128, 1), 32: (32, 128, 1)}),
    (fp8_problem(10240, 8192), {32: (32, 128, 1)}),
    (fp8_problem(8192, 28672), {32: (32, 64, 1)}),
    (fp8_problem(57344, 8192), {24: (32, 64, 1), 32: (32, 64, 1)}),
    (fp8_problem(51200, 5120), {32: (32, 64, 1)}),
    (fp8_problem(7168, 2048), {1: (16, 64, 1), 16: (16, 64, 1), 64: (128, 64, 1)}),
    (fp8_fp4_problem(n=4096, k=14336), {1: ("wgmma_rs", 8, 128, 3), 32: (32, 64, 2), 64: (64, 64, 2)}),
    (fp8_fp4_problem(n=4096, k=4096), {16: ("wgmma_rs", 16, 128, 3)}),
    (fp8_fp4_problem(n=6144, k=4096), {32: (32, 128, 2), 64: (64, 64, 1)}),
    (fp8_fp4_problem(n=28672, k=4096), {1: ("wgmma_rs", 8, 128, 1), 32: (32, 128, 1), 64: (64, 128, 1)}),
    (fp8_fp4_problem(MXFP4, n=4096, k=14336), {1: ("wgmma_codes", 8, 128, 3), 32: (32, 64, 2), 64: (64, 64, 2)}),
    (fp8_fp4_problem(MXFP4, n=5120, k=5120), {1: ("wgmma_codes", 8, 128, 2), 64: (64, 64, 1)}),
    (fp8_fp4_problem(MXFP4, n=4096, k=4096), {96: (96, 64, 2), 128: (128, 64, 2), 256: (128, 128, 2)}),
    (fp8_fp4_problem(n=4096, k=7168), {96: (96, 64, 2), 128: (128, 64, 2), 256: (128, 128, 2)}),
    (fp8_fp4_problem(n=6144, k=4096), {96: (96, 64, 1), 128: (128, 128, 2), 256: (256, 128, 1)}),
    (fp4_problem(4096, 14336), {8: (8, 160, 4), 16: (16, 192, 5), 96: (128, 128, 0), 192: (128, 128, 2)}),
    (fp4_problem(4096, 4096), {1: (1, 192, 4), 48: (16, 192, 2), 96: (32, 192, 2), 256: (128, 128, 2)}),
    (fp4_problem(6144, 4096), {1: (1, 192, 2), 16: (16, 256, 4), 64: (32, 192, 2), 512: (256, 128, 1)}),
    (fp4_problem(28672, 4096), {1: (1, 256, 1), 32: (32, 256, 1), 64: (64, 256, 1), 192: (256, 128, 0)}),
    (fp4_problem(8192, 28672), {16: (16, 256, 3), 32: (32, 256, 3), 128: (128, 128, 0), 1024: (256, 128, 1)}),
]
"""The fastest tile on an H100 for each problem and M."""


@pytest.mark.parametrize(
    ("target", "problem", "m", "tile"),
    [
        (target, problem, m, tile)
        for target, fastest in ((HOPPER, FASTEST), (H100, FASTEST_ON_H100))
        for problem, tiles in fastest
        for m, tile in tiles.items()
    ],
)
def test_the_fastest_is_chosen(target, problem, m, tile):
    """Check that the chosen tile is the tile in the tables, which was measured to be (nearly) the fastest."""
    choice = choose(problem, m, target)
    default = "wgmma_ss" if problem.a.is_fp8 and problem.b.is_fp4 else "wgmma"
    want = tile if isinstance(tile[0], str) else (default, *tile)
    assert (choice.backend.name, *choice.tactic) == want


def test_few_tiles_are_shared():
    """Check that split-K is used only if the GEMM has fewer tiles than the GPU has SMs."""
    assert choose(fp8_problem(1024, 7168), 8, HOPPER).tactic[2] > 1
    assert choose(masked(32, 4096, 7168), 8, HOPPER).tactic[2] == 1


@pytest.mark.parametrize(("problem", "m", "tile_m"), [(fp8_problem(), 1, 16), (fp8_problem(), 8192, 64)])
@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
def test_other_gpus_use_mma_sync(arch, problem, m, tile_m):
    """Check that GPUs without wgmma and tcgen05 use the kernel with mma.sync, with tiles of 16 rows for few rows."""
    (target,) = usual_targets(ARCHS[arch])[:1]
    choice = choose(problem, m, target)
    assert choice.backend.name == "mma_sync" and choice.tactic.tile_m == tile_m
    assert (choice.tactic.split_k > 1) == (
        m == 1 and arch == "sm_120a"
    )  # the memory of sm_121 is too slow for more CTAs
