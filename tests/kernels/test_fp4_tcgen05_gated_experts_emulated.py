"""Kernels of the first FP4 GEMM of experts, with its gate, by tcgen05, executed in the PTX emulator.

We had no GPU with these instructions, so these tests are the only evidence that the kernels' results are correct.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.emulated import KERNEL_WAIT, changed
from support.gated_gemm import HALF, Gated, check, expected, launched, operands, results
from support.host_grids import call_apart, grids
from support.kernel_fit import check_emulated
from support.kernel_grid import BF16, FP16, FP32, Tcgen05GatedCase
from support.ptx_faults import CONVERGED, LOADED_AT_ONCE, TCGEN05, Edit, Unfound, check_faults

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels.fp4_tcgen05_gated_experts import TOKEN_BLOCK
from torch_cute_ops.runtime.arch import ARCHS

LINEAR, TILED, SMALL = SCALE_LAYOUTS["linear"], SCALE_LAYOUTS["128x4"], SCALE_LAYOUTS["8x4"]


def gated(*case: Any, epilogue: tuple[Any, ...], sizes: tuple[Any, ...], seed: int | None = 0) -> Gated:
    """Return a launch. ``case`` is format, layout and tile_n; ``sizes`` are M, K, experts, columns of an expert, kind
    of routing, and number of CTAs."""
    return Gated(Tcgen05GatedCase(*case, epilogue, stages=3), *sizes, seed, HALF)


# Launches with partial tiles along M and K; with several token blocks; with experts whose columns of up begin inside a
# scale tile; with more experts than a word has bits; with more k tiles than stages; and with at least three work tiles
# per CTA
COVERING = [
    gated(
        *(NVFP4, "128x4", 128),
        epilogue=(NVFP4, TILED, "expert_half", FP32, "expert", "swiglu"),
        sizes=(5, 1088, 3, 64, "few", 2),
    ),
    gated(
        *(NVFP4, "128x4", 64),
        epilogue=(NVFP4, SMALL, "expert", None, "one", "swiglu"),
        sizes=(2, 64, 70, 64, "few", 3),
        seed=1,
    ),
    gated(
        *(NVFP4, "linear", 256),
        epilogue=(NVFP4, LINEAR, None, FP32, "one", "swiglu", True),
        sizes=(130, 320, 3, 128, "hot", 2),
        seed=2,
    ),
    gated(
        *(MXFP4, "128x4", 64), epilogue=(MXFP4, TILED, None, BF16, None, "swiglu"), sizes=(40, 832, 2, 192, "one", 2)
    ),
    gated(
        *(MXFP4, "linear", 128), epilogue=(BF16, None, "expert", None, None, "relu2"), sizes=(3, 640, 4, 64, "few", 1)
    ),
    gated(*(NVFP4, "128x4", 64), epilogue=(FP16, None, None, None, None, "swiglu"), sizes=(1027, 64, 40, 64, "two", 3)),
    gated(*(NVFP4, "128x4", 64), epilogue=(NVFP4, TILED, None, None, None, "swiglu"), sizes=(3, 128, 2, 64, "none", 2)),
    # The first launch has a token block without touched m tiles between two others. In the second, the bits of the
    # experts take as many words as there are warps; in the third, 17 words.
    gated(*(NVFP4, "128x4", 64), epilogue=(FP16, None, None, None, None, "swiglu"), sizes=(2049, 64, 1, 64, "ends", 2)),
    gated(
        *(NVFP4, "linear", 128),
        epilogue=(BF16, None, None, None, None, "relu2"),
        sizes=(2, 64, 1000, 64, "few", 2),
        seed=3,
    ),
    gated(*(NVFP4, "128x4", 128), epilogue=(BF16, None, None, None, None, "relu2"), sizes=(3, 64, 544, 64, "few", 2)),
]
MORE = [
    gated(fmt, layout, tile_n, epilogue=(out, layout_of_out, alpha, bias, None, "swiglu"), sizes=sizes, seed=i)
    for i, (fmt, layout, tile_n) in enumerate(
        (fmt, layout, tile_n) for fmt in (NVFP4, MXFP4) for layout in ("128x4", "linear") for tile_n in (64, 128, 256)
    )
    for out, layout_of_out, alpha, bias in ((fmt, TILED, "expert", FP32), (BF16, None, None, None))
    for sizes in ((300, 640, 3, 256, "few", 5), (17, 1152, 5, 128, "dense", 3), (1, 256, 40, 128, "few", 148))
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "one" in metafunc.fixturenames:
        cases = COVERING + (MORE if metafunc.config.getoption("more_emulated") else [])
        metafunc.parametrize("one", [pytest.param(case, id=case.id) for case in cases])
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", FAULTY if metafunc.config.getoption("more_emulated") else ["tiled"])


def test_gated_gemm(one: Gated) -> None:
    """Check that the results equal the reference's bit for bit. Scales and biases of experts without a token are NaN,
    and results of pairs that are not routed stay unchanged."""
    check(one)


def touched_m_tiles(one: Gated, routing: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Return the (expert, m tile) of each token block in which a token is routed to the expert. M tiles are counted
    within their token block."""
    blocks = []
    for first in range(0, one.m, TOKEN_BLOCK):
        m_tiles = [(part != 0).any(0) for part in routing[first : first + TOKEN_BLOCK].split(128)]
        blocks.append([(e, i) for e in range(one.experts) for i, is_routed in enumerate(m_tiles) if is_routed[e]])
    return blocks


@pytest.mark.parametrize("number", [1, 5, 7, 8, 9])
def test_lists(number: int) -> None:
    """Check that the lists contain exactly the touched m tiles, in order, so that no other weight is read."""
    one = COVERING[number]
    given = operands(one)
    words = launched(one, given).workspace.view(torch.int32)
    want = touched_m_tiles(one, given.routing)
    counts, lists = words[: len(want)], words[len(want) :].view(len(want), -1)
    assert counts.tolist() == [len(each) for each in want]
    for entries, each in zip(lists, want, strict=True):
        assert entries[: len(each)].tolist() == [8 * expert + m_tile for expert, m_tile in each]


def test_compiles_without_spills(one: Gated) -> None:
    """Check that the kernels spill no registers and fit an SM. ``test_compile_kernels`` does not check the kernels that
    this file checks."""
    check_emulated(one.case, one.case.kernel)


def test_every_launch_waits_for_the_one_before() -> None:
    """Check that each role waits for the previous kernel, and that the tests notice if a wait is missing."""
    one = COVERING[4]
    waits = re.findall(KERNEL_WAIT, compile_ptx(one.case.kernel_for(one.k), ARCHS[one.case.arch]).ptx)
    # the kernel of the lists; the producer, the MMA thread, the epilogue and the scale loaders of the GEMM
    assert len(waits) == 5
    for number in range(len(waits)):
        with pytest.raises((EmulationError, AssertionError)):
            check(one, changed(KERNEL_WAIT, number))


def test_a_row_does_not_depend_on_the_others() -> None:
    """Check that a token's results equal the results of the token alone, although all tokens of an m tile are
    multiplied."""
    one = COVERING[2]
    given = operands(one, is_exact=False)
    got = results(one, given)
    case = one.case
    alone = given._replace(
        routing=given.routing[7:8],
        a=given.a[7:8],
        a_scale=given.a_scale[7:8],
        row_scale=None if given.row_scale is None else given.row_scale[7:8],
    )
    single = results(one._replace(m=1, num_ctas=3, seed=3), alone)
    assert case.layout == "linear" and (given.routing[7] != 0).any()
    for among, only in zip(got, single, strict=True):
        assert torch.equal(among.view(torch.uint8)[7], only.view(torch.uint8)[0])


SIZES = {
    **{"m": 24, "experts": 2, "rows": 256, "k_bytes": 256, "blocks": 32, "alpha_stride": 2, "alpha_column_stride": 1},
    **{"b_stride": 256 * 256, "b_scale_stride": 256 * 32, "workspace_bytes": 1 << 12},
    **{"y_width": 128, "y_scale_rows": 24, "y_blocks": 16},
}
"""Extents and strides of a launch with linear scales, keyed by their names in the kernel's arguments."""
NUMBERS = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": 1.0}


def grids_of(m: int = 24, sms: int = 3, apart: bool = False, onto: str = "") -> list[tuple[int, int, int]]:
    """Return the grids of a launch. If ``apart``, there are gaps between the scales of experts. The result ends with
    the first byte of the argument ``onto``, if it is given."""
    kernel = COVERING[2].case.kernel
    sizes = SIZES | {"m": m} | ({"b_scale_stride": 2 * SIZES["b_scale_stride"]} if apart else {})
    call = call_apart(kernel, sizes, NUMBERS | {"num_ctas": sms})
    if onto:
        call = call._replace(y=call.y._replace(address=getattr(call, onto).address + 1 - call.y.nbytes))
    return grids(kernel, ARCHS[COVERING[2].case.arch], *call)


@pytest.mark.parametrize(("m", "sms", "blocks"), [(1, 148, 1), (1024, 148, 1), (1025, 7, 2)])
def test_ctas(m: int, sms: int, blocks: int) -> None:
    """Check the grid of both kernels: one CTA per 1,024 tokens, and one CTA per SM."""
    assert grids_of(m, sms) == [(blocks, 1, 1), (sms, 1, 1)]


@pytest.mark.parametrize("other", ["a", "a_scale", "b", "b_scale", "routing", "bias", "global_scale", "row_scale"])
def test_nothing_is_launched_on_overlap(other: str) -> None:
    """Check that the host function launches nothing if the result overlaps another argument by one byte."""
    assert grids_of(onto=other) == [(0, 1, 1)]


def test_nothing_is_launched_for_experts_apart() -> None:
    """Check that the host function launches nothing if there are gaps between the experts' linear scales, because the
    kernel reads them as one matrix."""
    assert grids_of(apart=True) == [(0, 1, 1)]


# Faults. In the first two cases a CTA gets more k tiles than stages, three experts and several work tiles. The third
# case has many experts and several m tiles, for faults in the lists.

FAULTY = {
    "tiled": gated(
        *(NVFP4, "128x4", 64),
        epilogue=(NVFP4, TILED, "expert", None, None, "swiglu"),
        sizes=(40, 1088, 3, 64, "dense", 1),
    ),
    "linear": gated(
        *(NVFP4, "linear", 64), epilogue=(BF16, None, None, FP32, None, "swiglu"), sizes=(40, 1088, 3, 64, "dense", 1)
    ),
    "lists": gated(
        *(NVFP4, "128x4", 128),
        epilogue=(NVFP4, TILED, None, None, None, "swiglu"),
        sizes=(1027, 64, 40, 64, "two", 3),
    ),
}
KINDS = {
    "lists": ("barrier of the CTA left out", "kernel before not waited for", "zero stored"),
}
"""Kinds of faults that are tried in a case; by default all."""
WITHOUT_K = Unfound(1, "code for K = 0, which does not exist")
UNFOUND: dict[str, dict[str, Unfound]] = {
    "tiled": {
        "wait for loads left out": LOADED_AT_ONCE,
        "barrier of the warp left out": CONVERGED,
        "barrier of the CTA left out": Unfound(1, "matters with more than 32 experts, as in the case of the lists"),
        "zero stored": Unfound(7, "pairs of m tiles that do not exist, but do in the case of the lists"),
        "wait left out": WITHOUT_K,
        "wait for the other phase": WITHOUT_K,
        "commit left out": WITHOUT_K,
    },
    "lists": {},
}
UNFOUND["linear"] = UNFOUND["tiled"] | {
    "wait for the other phase": Unfound(2, "code for K = 0; a warp that only counts may be a phase late")
}


def test_faults_are_found(name: str, request: pytest.FixtureRequest) -> None:
    """Check that the emulator finds omitted or altered waits, arrivals, commits, fences, descriptors and copies."""
    one = FAULTY[name]
    given = operands(one)
    want = expected(one, given)

    def run(seed: int | None, edit: Edit) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = results(one._replace(seed=seed), given, edit)
        got, wanted = [codes], [want[0]]
        if scales is not None:
            got, wanted = [*got, scales], [*wanted, want[1]]
        return tuple(torch.cat([part.view(torch.uint8).flatten() for part in parts]) for parts in (got, wanted))

    kinds = {kind: TCGEN05[kind] for kind in KINDS.get(name, TCGEN05)}
    check_faults(run, one.case.kernel, one.case.arch, UNFOUND[name], request, kinds=kinds, least=min(36, len(kinds)))
