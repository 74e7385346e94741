"""FP4 GEMMs whose kernel computes a gate or a quantisation as prologue, in the PTX emulator.

``test_fp4_gemm_emulated`` checks the sums over gated activations.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expected._fp4_gemm import decoded
from samples._fp4_gemm import POWERS, random_matrix
from support import spec
from support.emulated import (
    CPU,
    INPUTS,
    KERNEL_WAIT,
    PASSED,
    WAIT,
    changed,
    check_in_orders,
    equal,
    is_static,
    poisoned,
    written_late,
)
from support.epilogues import finished, operands
from support.kernel_grid import BF16, FP16, FP32, WgmmaCase
from test_fp4_gemm_emulated import STATIC, WGMMAS, Wgmma, multiply_by_warpgroups

from ptx_emulator import EmulationError
from ptx_emulator.adapter import compile_ptx, run_kernel
from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS, FP4Format
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.kernels import fp4_wgmma, row_quant
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.runtime.arch import ARCHS

READ_AHEAD = [one for one in STATIC if one.values[0].case.prologue_gate is not None]
OTHER_GATES: tuple[Gate, ...] = ("gelu_tanh", "gelu", "relu2")


def with_other_gates(launches: Iterable[Wgmma]) -> list[Any]:
    """Return the launches with a gate as prologue, as pytest parameters. Each launch appears with SiLU and with one of
    the other gates, which alternate."""
    gated = [one for one in launches if one.case.prologue_gate is not None]
    others = [
        one._replace(case=replace(one.case, prologue_gate=gate))
        for one, gate in zip(gated, itertools.cycle(OTHER_GATES), strict=False)
    ]
    return [pytest.param(one, id=one.id) for one in (*gated, *others)]


GATED = with_other_gates(one.values[0] for one in WGMMAS)


@pytest.mark.parametrize("one", READ_AHEAD)
def test_gates_wait_for_the_kernel_before(one: Wgmma) -> None:
    """Check that decoders, which gate activations, and consumers, which gate the first k tile, wait for the previous
    kernel."""
    one = is_static(one)
    kernel = one.case.kernel
    waits = range(len(re.findall(KERNEL_WAIT, compile_ptx(kernel, ARCHS[one.case.arch]).ptx)))
    assert len(waits) == 2
    for number in waits:
        with pytest.raises((EmulationError, AssertionError)):
            got, want = multiply_by_warpgroups(one, changed(KERNEL_WAIT, number), late=("a",))
            assert torch.equal(got, want)


def gated(one: Wgmma, rows: torch.Tensor, *, overlap: bool = True) -> tuple[torch.Tensor, ...]:
    """Return the rows gated by the kernel of ``silu_mul``, the result of a GEMM of these rows, and the result of the
    GEMM that gates.

    If ``overlap``, the launches overlap.
    """
    (m, n, k), case = one.sizes, one.case
    b, scale = random_matrix(n, k, case.format, case.layout, CPU)
    alpha, bias = operands(case.epilogue, n)
    arch, after = ARCHS[case.arch], poisoned(m, k, dtype=rows.dtype)
    gate = row_quant.RowQuantKernel(
        row_quant.plan(row_quant.RowQuantSpec.for_gated_rows(rows.dtype, k, case.prologue_gate), arch, pdl=True)
    )
    run_kernel(gate, arch, *row_quant.Arguments(rows, *[None] * 7, after, *[None] * 3, 0.0, *[None] * 3, 132))
    results = []
    for a, config in (
        (after, replace(case, prologue_gate=None).kernel.config),
        (rows, replace(case.kernel.config, pdl=overlap)),
    ):
        out = poisoned(m, n, dtype=case.epilogue.out_dtype)
        size = -(-m // case.tile_m) * config.workspace_bytes(k, one.num_ctas, has_partial_sums=one.has_partial_sums)
        workspace = None if config.rearranges else poisoned(size, dtype=torch.uint8)
        shared = workspace, None, one.num_ctas, int(one.has_partial_sums)
        given = fp4_wgmma.Arguments(
            a, None, b.t(), scale.view(case.format.scale_dtype), alpha, bias, None, out, *shared
        )
        run_kernel(fp4_wgmma.FP4WgmmaKernel(config), arch, *given, seed=one.seed, strict=True)
        results.append(out)
    return after, *results


@pytest.mark.parametrize("one", GATED)
def test_a_gate_equals_silu_mul(one: Wgmma) -> None:
    """Check that results equal ``silu_mul`` followed by a GEMM without the gate, bit for bit. Launches overlap in every
    second case."""
    (m, n, k), case = one.sizes, one.case
    torch.manual_seed(n)
    # Squares of larger numbers would give results that exceed float16's range.
    rows = (torch.randn(m, 2 * k) * (1 if case.prologue_gate == "relu2" else 4)).to(case.a_dtype or case.dtype)
    _, want, got = gated(one, rows, overlap=[each.values[0] for each in GATED].index(one) % 2 == 0)
    assert want.isfinite().all() and want.any()
    assert torch.equal(got, want)


@pytest.mark.parametrize("value", ["overflow", "largest", "gate of -inf", "gate of NaN"])
@pytest.mark.parametrize(
    ("tile_m", "dtype", "gate"),
    [
        *((tile_m, dtype, "silu") for tile_m in (1, 8) for dtype in (BF16, FP16)),
        *[(1, BF16, "gelu_tanh"), (8, FP16, "gelu_tanh"), (8, BF16, "gelu"), (1, FP16, "gelu"), (1, BF16, "relu2")],
    ],
    ids=str,
)
def test_a_gate_of_special_values(tile_m: int, dtype: torch.dtype, gate: Gate, value: str) -> None:
    """Check that gated products equal the products of ``silu_mul`` if they are NaN, or exceed or nearly exceed the
    dtype's largest number.

    These products are in the last block of K of one row.
    """
    one = Wgmma(
        WgmmaCase(dtype, NVFP4, "128x4", None, tile_m, Epilogue(FP32), 1, prologue_gate=gate),
        (1, 136, 288),
        0,
        False,
        0,
    )
    (_, _, k), most = one.sizes, torch.finfo(dtype).max
    torch.manual_seed(k)
    rows = torch.randn(1, 2 * k).to(dtype)
    largest = (1.0, most) if gate == "relu2" else (most / 4, 4.0)
    special = {"overflow": (most, 2.0), "largest": largest, "gate of -inf": (-torch.inf, 1.0)}
    rows[0, k - 2], rows[0, -2] = (torch.tensor(each) for each in special.get(value, (torch.nan, 1.0)))
    after, expected, got = gated(one, rows)
    want = {"overflow": torch.inf, "largest": most}.get(value, torch.nan)
    if (gate, value) == ("relu2", "gate of -inf"):
        want = 0.0
    torch.testing.assert_close(after[0, k - 2].item(), want, rtol=0, atol=0, equal_nan=True)
    assert expected.isfinite().any() == math.isfinite(want)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# A CTA multiplies more k tiles than its pipelines have stages. ``test_fp4_gemm_emulated`` lists the kernel's waits.
ROW = Wgmma(
    WgmmaCase(FP16, NVFP4, "128x4", None, 1, Epilogue(FP32), 2, prologue_gate="silu"), (1, 136, 7168), 0, False, None
)
ROWS = Wgmma(
    WgmmaCase(FP16, NVFP4, "128x4", None, 8, Epilogue(FP32), 2, prologue_gate="silu"), (8, 136, 3072), 0, False, None
)
# Edits of PTX that remove a wait for activations
by_edit = pytest.mark.parametrize(
    "edit",
    [
        pytest.param(changed(WAIT, -4, PASSED), id="stage of activations empty"),
        pytest.param(changed(r"bar\.sync\s+1", 0), id="first activations rearranged"),
        pytest.param(changed(r"bar\.warp\.sync", 0), id="activations rearranged"),
        pytest.param(changed(WAIT, -2, PASSED), id="activations complete"),
    ],
)


@pytest.mark.parametrize("one", [ROW, ROWS], ids=["row", "rows"])
@by_edit
def test_each_wait_for_gated_activations_is_needed(one: Wgmma, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes a wait."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_by_warpgroups, one, 6, edit)


@pytest.mark.parametrize("one", [ROW, ROWS], ids=["row", "rows"])
def test_the_waits_for_gated_activations_are_enough(one: Wgmma) -> None:
    """Check that the unedited kernels have no races and give correct results."""
    check_in_orders(multiply_by_warpgroups, one, 2)


# Quantisation as prologue, in some cases after a gate


def quantised(
    a_dtype: torch.dtype,
    layout: str,
    split_k: int,
    prologue_quant: Any,
    *,
    epilogue: tuple[Any, ...] = (FP32,),
    prologue_gate: Gate | None = None,
    tile_n: int | None = None,
    sizes: tuple[int, int, int],
    tile_m: int = 1,
    fmt: FP4Format = NVFP4,
) -> Wgmma:
    """Return a launch of a GEMM that quantises its activations. The arguments are fields of ``WgmmaCase``."""
    operands = fmt.operand_dtype(FP16), fmt, layout, None, tile_m, Epilogue(*epilogue), split_k
    case = WgmmaCase(
        *operands, a_dtype=a_dtype, tile_n=tile_n, prologue_gate=prologue_gate, prologue_quant=prologue_quant
    )
    return Wgmma(case, sizes, 0, False, None)


# Launches with a partial last k tile, several rows, warps that divide k tiles, more k tiles than stages, and clusters
QUANTISED = [
    quantised(BF16, "128x4", 1, "scaled", prologue_gate="silu", sizes=(1, 136, 544)),
    quantised(FP16, "linear", 2, "plain", epilogue=(FP32, "column", FP32), sizes=(2, 200, 768)),
    quantised(BF16, "128x4", 2, "scaled", epilogue=(FP32, "one"), tile_n=208, sizes=(1, 208, 4640)),
    quantised(FP16, "128x4", 1, "plain", epilogue=(BF16,), prologue_gate="silu", tile_n=224, sizes=(1, 224, 3872)),
    quantised(FP16, "linear", 3, "scaled", prologue_gate="silu", sizes=(2, 136, 768)),
    quantised(BF16, "128x4", 1, "plain", epilogue=(FP16, "one"), tile_n=160, sizes=(1, 168, 1056)),
    quantised(BF16, "128x4", 1, "scaled", sizes=(3, 136, 2080), tile_m=8),
    quantised(FP16, "linear", 3, "plain", epilogue=(BF16, "one"), prologue_gate="silu", sizes=(9, 136, 768), tile_m=8),
]
# A block of MXFP4 is four k groups.
MXFP4_ROWS = [
    quantised(FP16, "128x4", 2, "plain", sizes=(8, 136, 1120), tile_m=8, fmt=MXFP4),
    quantised(BF16, "128x4", 1, "plain", prologue_gate="silu", sizes=(5, 264, 544), tile_m=8, fmt=MXFP4),
]
# Each launch without a gate, and each launch with a gate, which appears with SiLU and with another gate
EVERY_QUANTISED = [
    *(pytest.param(one, id=one.id) for one in (*QUANTISED, *MXFP4_ROWS) if one.case.prologue_gate is None),
    *with_other_gates((*QUANTISED, *MXFP4_ROWS)),
]
by_quantised = pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in QUANTISED])
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def global_scale_of(one: Wgmma, value: float) -> torch.Tensor | None:
    """Return a global scale with this value if the case needs a global scale."""
    return torch.tensor([value]) if one.case.prologue_quant == "scaled" else None


def e2m1_rows(one: Wgmma, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows that quantisation does not change, and the numbers that the GEMM multiplies.

    Each block consists of e2m1 numbers, including 6, times a power of two. The silu of each gate value is exactly the
    value itself, or zero.
    """
    (m, _, k), case = one.sizes, one.case
    numbers = E2M1[torch.randint(8, (m, k // 16, 16))]
    largest = torch.randint(16, (m, k // 16, 1))
    numbers.scatter_(2, largest, 6.0)
    numbers *= torch.randint(0, 2, numbers.shape).sub(0.5).sign() * torch.randint(-2, 2, largest.shape).exp2()
    value = numbers if global_scale is None else numbers / global_scale
    if not case.prologue_gate:
        return value.view(m, k).to(case.a_dtype), numbers.view(m, k)
    gate = torch.tensor([32.0, 64.0])[torch.randint(2, largest.shape)].expand(numbers.shape).clone()
    up = value / gate
    nothing = (torch.rand(gate.shape) < 0.3).scatter(2, largest, False)
    gate[nothing] = torch.tensor([0.0, -200.0])[torch.randint(2, (int(nothing.sum()),))]
    rows = torch.cat((gate.view(m, k), up.view(m, k)), 1)
    return rows.to(case.a_dtype), numbers.masked_fill(nothing, 0.0).view(m, k)


def multiply_e2m1(
    one: Wgmma, edit: Any = None, late: tuple[str, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on rows that quantisation does not change; return its result and the expected result. Sums are
    exact.

    ``late`` names the arguments that a simulated previous kernel writes at the last moment.
    """
    (m, n, k), case = one.sizes, one.case
    torch.manual_seed(k)
    global_scale = global_scale_of(one, 4.0)
    rows, numbers = e2m1_rows(one, global_scale)
    b, scale = random_matrix(n, k, case.format, case.layout, CPU, POWERS["e4m3"])
    alpha, bias = operands(case.epilogue, n)
    out = poisoned(m, n, dtype=case.epilogue.out_dtype)
    given = fp4_wgmma.Arguments(rows, global_scale, b.t(), scale, alpha, bias, None, out, None, None, 0, 0)
    given, written = written_late(given, late or ())
    before = None if late is None else written
    run_kernel(case.kernel, ARCHS[case.arch], *given, seed=one.seed, strict=True, edit=edit, written_before=before)
    weight = torch.from_numpy(decoded(b, scale, case.layout, 16))
    return out, finished((numbers.double() @ weight.t()).float(), case.epilogue, alpha, bias)


@by_quantised
def test_sums_of_quantised_rows(one: Wgmma) -> None:
    """Use inputs whose sums are exact, and check that the results equal the expected sums bit for bit, in two orders of
    threads."""
    for seed in (None, 0):
        got, want = multiply_e2m1(one._replace(seed=seed))
        assert torch.equal(got, want)


def by_two_kernels(one: Wgmma, rows: torch.Tensor, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the rows quantised by the kernel of ``fp4_quantize`` or ``silu_mul_fp4quant``, and the results of two
    GEMMs.

    The first GEMM multiplies these codes and scales; the second GEMM quantises the rows itself.
    """
    (m, n, k), case, layout = one.sizes, one.case, SCALE_LAYOUTS[one.case.layout]
    arch = ARCHS[case.arch]
    spec = row_quant.RowQuantSpec.for_fp4_rows(
        rows.dtype, k, case.prologue_gate, case.format, layout, global_scale is not None
    )
    codes, a_scale = (poisoned(*shape, dtype=torch.uint8) for shape in fp4_shapes((m, k), case.format, layout))
    a_scale = a_scale.view(case.format.scale_dtype)
    given = row_quant.Arguments(
        *(rows, None, None, None, global_scale, codes, a_scale, *[None] * 5, 0.0, None, None, None, 132)
    )
    run_kernel(row_quant.RowQuantKernel(row_quant.plan(spec, arch, pdl=True)), arch, *given)
    b, scale = random_matrix(n, k, case.format, case.layout, CPU)
    alpha, bias = operands(case.epilogue, n)
    after = replace(case, prologue_gate=None, prologue_quant=None, a_dtype=None, a_layout=case.layout)
    results = []
    for operand, its_scale, which in ((codes, a_scale, after), (rows, global_scale, case)):
        out = poisoned(m, n, dtype=case.epilogue.out_dtype)
        shared = fp4_wgmma.Arguments(operand, its_scale, b.t(), scale, alpha, bias, None, out, None, None, 0, 0)
        run_kernel(which.kernel, arch, *shared, seed=one.seed, strict=True)
        results.append(out)
    return codes, a_scale, *results


@pytest.mark.parametrize("one", EVERY_QUANTISED)
def test_quantised_rows_are_those_of_two_kernels(one: Wgmma) -> None:
    """Check for blocks of any magnitude that a GEMM that quantises its rows gives bitwise the same results as a
    quantising kernel followed by a GEMM, in two orders of threads."""
    (m, _, k), case = one.sizes, one.case
    for seed in (0, 1):
        size = torch.randint(-6, 5, (m, k // 16)).exp2().repeat_interleave(16, 1)
        rows = torch.randn(m, k) * size
        if case.prologue_gate:
            rows = torch.cat((torch.randn(m, k) * 4, rows), 1)
        *_, want, got = by_two_kernels(one._replace(seed=seed), rows.to(case.a_dtype), global_scale_of(one, 3.7))
        assert torch.equal(got, want)
        assert want.isfinite().all() and want.any()


def special_rows(m: int, k: int) -> torch.Tensor:
    """Return rows with special blocks: one kind per row.

    Row 0 contains a NaN, row 1 an infinity, row 2 only zeros of both signs, row 3 an amax too small for a scale, row 4
    an amax that saturates the scale, and row 5 amax values around the smallest scale.
    """
    value = torch.randn(m, k)
    value[0, k - 2], value[1, 17] = torch.nan, -torch.inf
    value[2] = torch.tensor([0.0, -0.0]).repeat(k // 2)
    value[3, 16:32] = 2.0**-15
    value[4, 32:48] *= 2.0**13
    value[5] *= (torch.arange(k // 16) % 18 - 13.0).exp2().repeat_interleave(16)
    return value


@pytest.mark.parametrize("one", [pytest.param(QUANTISED[i], id=QUANTISED[i].id) for i in (0, 1, 2, 4, 6)])
def test_special_values_are_quantised(one: Wgmma) -> None:
    """Check that special values are quantised as specified, with bitwise the same results as a quantising kernel
    followed by a GEMM."""
    # Every CTA of a cluster must get a k tile.
    one = one._replace(sizes=(6, 136, 768 if one.case.layout == "linear" else 288), seed=0)
    (m, n, k), case, global_scale = one.sizes, one.case, global_scale_of(one, 3.7)
    torch.manual_seed(n)
    value = special_rows(m, k)
    if case.prologue_gate:
        # silu(32) is 32. Set NaN in the gate, too, not only in up.
        gate = torch.full((m, k), 32.0).masked_fill(value.isnan(), torch.nan)
        rows = torch.cat((gate, value.nan_to_num(1.0, neginf=-torch.inf) / 32), 1).to(case.a_dtype)
        value = gate * rows[:, k:].float()
    else:
        rows = value.to(case.a_dtype)
        value = rows.float()
    torch.manual_seed(k)
    codes, a_scale, want, got = by_two_kernels(one, rows, global_scale)
    equal("results", got, want)
    blocks = spec.quantise(value.numpy(), 16, None if global_scale is None else global_scale.item())
    assert torch.equal(codes, torch.from_numpy(blocks.packed))
    scales = torch.from_numpy(blocks.scales)
    assert torch.equal(a_scale.view(torch.uint8), torch.from_numpy(spec.arrange(blocks.scales, case.layout)))
    assert scales[0, -1] == scales[1, 1] == 0x7F and not scales[2].any()
    assert scales[3, 1] == 0 and scales[4, 2] == 0x7E and {0, 1} < set(scales[5].tolist())
    torch.manual_seed(k)
    b, scale = random_matrix(n, k, NVFP4, case.layout, CPU)
    alpha, bias = operands(case.epilogue, n)
    weight = torch.from_numpy(decoded(b, scale, case.layout, 16))
    numbers = torch.from_numpy(spec.dequantise(blocks.codes, blocks.scales)).double()
    exact = finished((numbers @ weight.t()).float(), case.epilogue, alpha, bias)
    assert got[:2].isnan().all() and got[2:].isfinite().all()
    factor = 1.0 if alpha is None else alpha.abs()
    lost = (numbers.abs() @ weight.abs().t()) * (k * 2.0**-24) * factor + exact.abs() * 2.0**-22
    assert ((got - exact).abs() <= lost)[2:].all()


QUANTISED_AHEAD = [
    quantised(BF16, "128x4", 1, "scaled", sizes=(1, 136, 2080)),
    quantised(BF16, "128x4", 1, "scaled", prologue_gate="silu", sizes=(1, 136, 2080)),
    quantised(BF16, "128x4", 1, "scaled", sizes=(4, 136, 2080), tile_m=8),
]


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in QUANTISED_AHEAD])
def test_rows_and_a_global_scale_of_the_kernel_before(one: Wgmma) -> None:
    """Check that decoders, and consumers, which quantise the first k tiles, wait for the previous kernel before they
    read rows or the global scale.

    With these waits in place, only static arguments are read earlier.
    """
    one = is_static(one)._replace(seed=0)
    got, want = multiply_e2m1(one, late=INPUTS)
    assert torch.equal(got, want)
    waits = range(len(re.findall(KERNEL_WAIT, compile_ptx(one.case.kernel, ARCHS[one.case.arch]).ptx)))
    assert len(waits) == 2
    for number in waits:
        for late in ("a", "a_scale"):
            with pytest.raises((EmulationError, AssertionError)):
                got, want = multiply_e2m1(one, changed(KERNEL_WAIT, number), late=(late,))
                assert torch.equal(got, want)


# Launches with more k tiles than stages, like ``ROW``
QUANTISED_ROW = quantised(FP16, "128x4", 2, "scaled", sizes=(1, 136, 7168))
GATED_ROW = quantised(FP16, "128x4", 2, "plain", prologue_gate="silu", sizes=(1, 136, 7168))
QUANTISED_ROWS = quantised(FP16, "128x4", 2, "plain", sizes=(8, 136, 3072), tile_m=8)


@pytest.mark.parametrize("one", [QUANTISED_ROW, GATED_ROW, QUANTISED_ROWS], ids=["quantised", "gated", "rows"])
@by_edit
def test_each_wait_for_quantised_activations_is_needed(one: Wgmma, edit: Any) -> None:
    """Check that the emulator finds a race or a wrong result, in some order of threads, if ``edit`` removes a wait."""
    with pytest.raises((EmulationError, AssertionError)):
        check_in_orders(multiply_e2m1, one, 6, edit)


@pytest.mark.parametrize("one", [QUANTISED_ROW, GATED_ROW, QUANTISED_ROWS], ids=["quantised", "gated", "rows"])
def test_the_waits_for_quantised_activations_are_enough(one: Wgmma) -> None:
    """Check that the unedited kernels have no races and give correct results."""
    check_in_orders(multiply_e2m1, one, 2)
