"""The kernel of ``qkv_norm_rope_append``, executed in the PTX emulator, and the grids of its host function."""

from __future__ import annotations

from typing import Any, NamedTuple

import expected.qkv_norm_rope_append
import numpy as np
import pytest
import samples.qkv_norm_rope_append as made
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulated import CPU, equal, poisoned, written_late
from support.host_grids import Placed, call_apart, grids
from support.kernel_grid import BF16, FP16, FP32
from support.kernel_grid.qkv_rope import FP4, FP8, INT32, QkvRopeCase, qkv_rope_cases

from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.kernels import qkv_rope
from torch_cute_ops.runtime.arch import ARCHS

CACHES = expected.qkv_norm_rope_append.UPDATED


class Run(NamedTuple):
    """Launch of the kernel.

    Attributes:
        case: configuration.
        rows: number of rows.
        layout: "nhd", "hnd" (heads before slots), or "alternate": keys and values alternate by block, as one tensor.
        appended: number of rows that are appended, or None for all.
        seed: seed of the order of events.
    """

    case: QkvRopeCase
    rows: int
    layout: str = "nhd"
    appended: int | None = None
    seed: int | None = 0


RUNS = {
    # Both ways to divide heads over warps; one launch holds one head per lane, the other up to four.
    "16-bit": Run(QkvRopeCase(128, (5, 2), 128, norm=FP32, plus_one=True), 5, seed=1),
    "16-bit-more-rows": Run(QkvRopeCase(128, (17, 2), 128, norm=BF16, plus_one=True, few=0), 3, "alternate", seed=None),
    "interleaved-fp8": Run(
        QkvRopeCase(80, (3, 3), 32, True, FP16, FP16, FP16, stored=(FP8, FP8, FP8), scaled=True, integers=INT32),
        *(7, "hnd", 4),
    ),
    # The halves of a head are not a multiple of a vector.
    "nvfp4-in-software": Run(QkvRopeCase(80, (3, 2), 20, stored=(None, FP4, FP4), norm=FP32, few=0), 6, "hnd", 5, 2),
    "nvfp4": Run(
        QkvRopeCase(128, (2, 2), 64, table=BF16, stored=(FP8, FP4, FP4), scaled=True, arch="sm_100a"), 5, "alternate"
    ),
    # The other sizes of heads
    "heads-of-64": Run(QkvRopeCase(64, (5, 2), 48, True, norm=BF16, stored=(None, FP8, FP8), scaled=True), 5, seed=4),
    "heads-of-96": Run(QkvRopeCase(96, (3, 1), 96, dtype=FP16, table=FP16, norm=FP32), 4, "alternate", seed=5),
    "heads-of-256": Run(
        QkvRopeCase(256, (3, 2), 256, stored=(FP8, FP4, None), norm=FP32, plus_one=True, scaled=True), 3, "hnd", seed=6
    ),
    "caches-differ": Run(
        QkvRopeCase(192, (2, 1), 192, True, stored=(None, FP8, FP4), norm=BF16, arch="sm_120a", few=0), 5, "hnd", seed=3
    ),
}


def arguments_of(run: Run) -> dict[str, Any]:
    """Return the arguments of the op by name. Some slots are -1."""
    case, device = run.case, CPU
    q, key, value = case.stored
    layout = "nhd" if run.layout == "alternate" else run.layout
    sizes = {"dim": case.dim, "heads": case.heads, "rotary": case.rotary, "pages": (3, 4), "layout": layout}
    dtypes = {"dtype": case.dtype, "table_dtype": case.table, "key": key, "value": value, "integers": case.integers}
    given = made.arguments(run.rows, device, **sizes, **dtypes, appended=run.appended)
    given["qkv"] = made.random_rows(run.rows, given["qkv"].shape[1] + 16, dtype=case.dtype, device=device)[:, 8:-8]
    if run.layout == "alternate":
        for name in CACHES[:2] if key != FP4 else CACHES:
            if not name.startswith("key"):
                continue
            other = name.replace("key", "value")
            both = torch.stack((given[name].view(torch.uint8), given[other].view(torch.uint8)), 1).view(
                given[name].dtype
            )
            given[name], given[other] = both[:, 0], both[:, 1]
    norms = dict.fromkeys(("q_norm", "k_norm"))
    if case.norm is not None:
        norms = {name: made.weight(case.dim, case.norm, device) for name in norms}
    scales: dict[str, Any] = {
        f"{name}_scale": made.scale(count, device) if case.scaled and stored is not None else None
        for name, stored, count in (("q", q, 1), ("k", key, case.heads[1]), ("v", value, case.heads[1]))
    }
    rest = {"eps": 1e-5, "norm_plus_one": case.plus_one, "interleaved": case.interleaved, "q_dtype": q}
    return dict.fromkeys(CACHES) | given | norms | scales | rest


def execute(run: Run, given: dict[str, Any], late: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Run the kernel; return q and the caches. Arguments in ``late`` are written by the previous kernel, as late as
    possible."""
    case = run.case
    mine = {name: value.clone() if name in CACHES and value is not None else value for name, value in given.items()}
    if run.layout == "alternate":
        for key, value in (CACHES[:2], CACHES[2:]):
            if given[key] is not None:  # the copies must alternate in memory as well
                both = torch.stack([each.view(torch.uint8) for each in (given[key], given[value])], 1)
                mine[key], mine[value] = both.view(given[key].dtype).unbind(1)
    q = poisoned(run.rows, case.heads[0], case.dim, dtype=case.stored[0] or case.dtype)
    call = qkv_rope.Arguments(*(mine[name] if name != "q" else q for name in qkv_rope.Arguments._fields))
    written = None
    if late:
        call, written = written_late(call, late)
    run_kernel(case.kernel, ARCHS[case.arch], *call, seed=run.seed, strict=True, written_before=written)
    return {"q": q} | {name: mine[name] for name in CACHES if mine[name] is not None}


def check(run: Run, given: dict[str, Any], got: dict[str, torch.Tensor]) -> None:
    for (name, tensor), want in zip(got.items(), expected.qkv_norm_rope_append.results(given), strict=True):
        equal(name, tensor, want)


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_results(run: Run) -> None:
    """Check q and the whole caches bit for bit: slots that belong to no row keep their contents."""
    given = arguments_of(run)
    check(run, given, execute(run, given))
    assert_fits(run.case)


def test_inputs_are_read_after_the_previous_kernel() -> None:
    """Check that a call is correct if the previous kernel writes all inputs and the caches' old contents late."""
    run = RUNS["16-bit"]
    given = arguments_of(run)
    late = ("qkv", "cos_sin", "positions", "slots", "q_norm", "k_norm")
    check(run, given, execute(run, given, late))


@pytest.mark.parametrize("name", ["interleaved-fp8", "nvfp4-in-software"])
def test_indices_out_of_range(name: str) -> None:
    """Check that rows with a slot out of range are not written, and that the rotated elements of a row with a position
    out of range are NaN; nothing outside of the tensors is read or written."""
    run = RUNS[name]
    given = arguments_of(run)
    limits = (2**31 - 1, -(2**31)) if run.case.integers == INT32 else (2**40, -(2**40) - 1)
    slots, positions = given["slots"].clone(), given["positions"].clone()
    slots[:4] = torch.tensor([12, *limits, 3])
    positions[0], positions[3] = made.ROWS_OF_TABLE, limits[1]
    got = execute(run, {**given, "slots": slots, "positions": positions})
    table = torch.cat((given["cos_sin"], torch.full_like(given["cos_sin"][:1], torch.nan)))
    positions[[0, 3]] = made.ROWS_OF_TABLE
    slots[:3] = -1
    check(run, {**given, "slots": slots, "positions": positions, "cos_sin": table}, got)


# Registers


def assert_fits(case: QkvRopeCase) -> None:
    """Check that neither kernel, for few rows and for more rows, spills registers or uses shared memory."""
    compiled = compile_ptx(case.kernel, ARCHS[case.arch]).resources
    assert len(compiled) == 2
    for each in compiled:
        assert (each.spill_bytes, each.stack_bytes, each.smem_bytes) == (0, 0, 0), each
        assert each.registers <= 96, "too few warps on an SM to hide the latency of memory"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in qkv_rope_cases()])
def test_compiles_without_spills(case: QkvRopeCase) -> None:
    assert_fits(case)


# Overlaps

PLAIN = QkvRopeCase(64, (1, 1), 64)
BLOCKS, PAGE = 3, 2
DIMS = {"tokens": 2, "slots": 2, "positions": 5, "blocks": BLOCKS, "page": PAGE, "row_stride": 192, "table_stride": 64}
STRIDES = ("block", "slot", "head")


def cells(tensor: Placed) -> set[int]:
    """Return the addresses of all bytes of all elements."""
    addresses = np.array(tensor.address)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        addresses = np.add.outer(addresses, np.arange(extent) * stride * tensor.itemsize)
    return set(np.add.outer(addresses, np.arange(tensor.itemsize)).reshape(-1).tolist())


def placed_call(key: tuple[int, int], value: tuple[int, int], distance: int) -> Any:
    """Return a call whose caches have these strides (block, slot), in elements. The value cache starts ``distance``
    elements after the key cache."""
    dims = DIMS | {f"{kind}_{name}_stride": 64 for kind in ("key", "value") for name in STRIDES}
    call = call_apart(PLAIN.kernel, dims, {"eps": 1e-6})
    shape = (BLOCKS, PAGE, 1, 64)
    begin = call.key_cache.address
    caches = [
        Placed(address, 2, shape, (*strides, 64, 1))
        for address, strides in ((begin, key), (begin + 2 * distance, value))
    ]
    return call._replace(key_cache=caches[0], value_cache=caches[1])


def launches(call: Any) -> bool:
    ((ctas, _, _),) = grids(PLAIN.kernel, ARCHS["sm_90a"], *call)
    return ctas > 0


@pytest.mark.parametrize(
    ("strides", "distance"),
    [((128, 64), 384), ((256, 64), 128), ((256, 64), -128), ((256, 128), 64), ((64, 192), 576), ((64, 384), 192)],
    ids=["apart", "by-block", "values-first", "by-slot", "slots-first", "slots-first-alternate"],
)
def test_caches_may_alternate(strides: tuple[int, int], distance: int) -> None:
    """Check that the layouts of engines launch, with the number of CTAs that the rows need: three warps per row."""
    assert grids(PLAIN.kernel, ARCHS["sm_90a"], *placed_call(strides, strides, distance)) == [(2, 1, 1)]


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(*[st.sampled_from([0, 64, 128, 192, 256, 320])] * 2),
    st.tuples(*[st.sampled_from([64, 128, 192, 256])] * 2),
    st.integers(-12, 12),
)
def test_no_launch_if_caches_share_memory(key: tuple[int, int], value: tuple[int, int], distance: int) -> None:
    """Check, byte by byte, that a call does not launch if two elements of the caches share memory."""
    call = placed_call(key, value, 32 * distance)
    sizes = [len(cells(cache)) for cache in (call.key_cache, call.value_cache)]
    own = 2 * BLOCKS * PAGE * 64
    shares = sizes != [own, own] or bool(cells(call.key_cache) & cells(call.value_cache))
    assert not (launches(call) and shares)


@pytest.mark.parametrize("name", ["qkv", "cos_sin", "positions", "slots", "key_cache", "value_cache"])
def test_no_launch_if_another_tensor_is_written(name: str) -> None:
    """Check that nothing is launched if q, or a cache, overlaps another tensor."""
    call = placed_call((128, 64), (128, 64), 384)
    other = getattr(call, name)
    for written in ("q", "key_cache"):
        if written != name:
            moved = getattr(call, written)._replace(address=other.end - 1)
            assert not launches(call._replace(**{written: moved}))
