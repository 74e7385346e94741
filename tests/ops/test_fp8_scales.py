"""Quantisers and GEMMs with FP8 block scales (M, ⌈K/128⌉) in each layout, which only the strides show.

If M = K/128 the scales are square, so that only their strides distinguish the two layouts.
"""

from dataclasses import replace

import pytest
import torch
from expected import assert_same
from samples import Sample
from samples._fp8_fp4 import with_fp4_weight
from samples.grouped_mm_fp8 import contiguous, masked, with_mx_scales
from samples.mm_fp8_block import mx_sample, sample
from support.cases import arguments, expected_of, forget, run, with_usable_backend
from support.gemm_problems import backend_for
from support.tactics import operands_of
from torch._dynamo.testing import CompileCounterWithBackend

import torch_cute_ops
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backend import Target
from torch_cute_ops.gemm.backends.mxfp8_wgmma import MXFP8Tactic
from torch_cute_ops.kernels.fp8_wgmma import MANY
from torch_cute_ops.ops._call import CallPath
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

CPU = torch.device("cpu")
SQUARES = ((16, 2048), (32, 4096), (40, 5120), (56, 7168), (64, 8192), (112, 14336))
"""Pairs of M and K with M = K/128."""
N = 136
FP8_OPS = ("mm_fp8_block", "mm_fp8_fp4", "grouped_mm_fp8", "grouped_mm_fp8_fp4")


def call_of(op: str, m: int, k: int, device: torch.device, n: int = 8, *, is_masked: bool = False) -> Sample:
    """Return a call of a GEMM with ``m`` rows and fp32 results. In a grouped GEMM two experts own the rows."""
    if not op.startswith("grouped"):
        one = sample(op, m, n, k, device, out_dtype=torch.float32)
    elif is_masked:
        one = masked(op, [m, m // 2], m, n, k, device, out_dtype=torch.float32)
    else:
        one = contiguous(op, [m // 2, m - m // 2], n, k, device, alignment=1, out_dtype=torch.float32)
    return with_fp4_weight(one, NVFP4, "linear") if op.endswith("fp4") else one


def padded(scale: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the scales column-major with NaN between the columns, as DeepGEMM and vLLM pad them."""
    columns = scale.mT
    room = columns.new_full((*columns.shape[:-1], columns.shape[-1] + padding), torch.nan)
    room[..., : columns.shape[-1]] = columns
    return room[..., : columns.shape[-1]].mT


LAYOUTS = {
    "column": lambda scale: scale.movedim(-1, 0).contiguous().movedim(0, -1),
    "row": lambda scale: scale.contiguous(),
    "padded-column": lambda scale: padded(scale, 3),
    "padded-row": lambda scale: torch.cat((scale, scale.new_full((*scale.shape[:-1], 5), torch.nan)), -1)[
        ..., : scale.shape[-1]
    ],
}


def in_layout(one: Sample, layout: str) -> Sample:
    """Return the call with ``a_scale`` copied to another layout."""
    a, b, a_scale, *rest = one.args
    return replace(one, args=(a, b, LAYOUTS[layout](a_scale), *rest))


def check(op: str, one: Sample, results: tuple[torch.Tensor, ...]) -> None:
    """Compare a call's results with sums in float64."""
    spec = OPS[op]
    given = arguments(spec, one)
    outputs = results if spec.defined is None else spec.defined(results, **given)
    expected_of(spec).assert_results(outputs, expected_of(spec).results(given), given)


@pytest.mark.parametrize(("m", "k"), SQUARES)
@pytest.mark.parametrize("op", FP8_OPS)
def test_square_scales(op, m, k, device):
    """Compare eager calls with float64, for each layout of square scales."""
    torch.manual_seed(m)
    one = with_usable_backend(OPS[op], call_of(op, m, k, torch.device(device)), torch.device(device))
    for layout in LAYOUTS:
        check(op, one, run(OPS[op], in_layout(one, layout)))


@pytest.mark.parametrize(("m", "k"), SQUARES)
def test_square_scales_compiled(m, k, fresh_compiler, device):
    """Compare a compiled program with float64, for each layout of square scales, and for scales that the program
    computes."""
    torch.manual_seed(k)
    where = torch.device(device)
    one = with_usable_backend(OPS["mm_fp8_block"], call_of("mm_fp8_block", m, k, where), where)
    a, b, a_scale, b_scale = one.args
    x = torch.randn(m, k, device=device)

    def program(a, b, b_scale, x, *scales):
        made = [torch_cute_ops.fp8_quantize(x, granularity="block128", scale_layout=layout) for layout in (None, "row")]
        given = [(a, scale) for scale in scales] + [(a, scales[0] * 1.0), *made]
        return made, [torch_cute_ops.mm_fp8_block(one, b, two, b_scale, **options) for one, two in given]

    options = one.kwargs
    scales = [make(a_scale) for make in LAYOUTS.values()]
    backend = "inductor" if m == SQUARES[0][0] else "aot_eager"
    made, products = torch.compile(program, backend=backend)(a, b, b_scale, x, *scales)
    for product in products[: len(scales) + 1]:
        check("mm_fp8_block", one, (product,))
    assert [each[1].stride() for each in made] == [(1, m), (m, 1)]
    for (codes, scale), product in zip(made, products[len(scales) + 1 :], strict=True):
        check("mm_fp8_block", Sample("", (codes, b, scale, b_scale), options), (product,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_compilations_serve_every_number_of_rows(layout, fresh_compiler, device):
    """Check that three compilations suffice (the first number of rows, one row, all others), and compare results with
    float64."""
    where, counter = torch.device(device), CompileCounterWithBackend("aot_eager")
    program = torch.compile(torch_cute_ops.mm_fp8_block, backend=counter, fullgraph=True)
    for m in (4, 1, 2, 16, 300, 17, 64):
        one = in_layout(call_of("mm_fp8_block", m, 512, where), layout)
        check("mm_fp8_block", one, (program(*one.args, **one.kwargs),))
    assert counter.frame_count == 3


@pytest.mark.parametrize("op", ["grouped_mm_fp8", "grouped_mm_fp8_fp4"])
def test_masked_scales(op, device):
    """Compare GEMMs with float64, for the masked layout of rows and each layout of scales. A column of scales may
    belong to one expert or to all experts."""
    where = torch.device(device)
    for m, k in ((4, 512), (1, 512), (4, 128)):
        one = with_usable_backend(OPS[op], call_of(op, m, k, where, is_masked=True), where)
        for layout in LAYOUTS:
            check(op, one, run(OPS[op], in_layout(one, layout)))


# The CUDA entries, with a model of the compiled kernels


@pytest.fixture
def slow_calls(monkeypatch):
    """Record the calls that take the slow path."""
    seen = []
    checked = CallPath.run_checked

    def run_checked(self, call, out):
        seen.append(call)
        return checked(self, call, out)

    monkeypatch.setattr(CallPath, "run_checked", run_checked)
    return seen


@pytest.mark.parametrize("op", FP8_OPS)
def test_layouts_on_the_fast_path(op, launches, slow_calls):
    """Check that on the fast path a GEMM reads column-major scales in place, and copies scales in other layouts."""
    for is_masked in (False, True) if op.startswith("grouped") else (False,):
        launches.forget()
        slow_calls.clear()
        one = with_usable_backend(OPS[op], call_of(op, 6, 768, CPU, N, is_masked=is_masked), torch.device("cuda"))
        OPS[op].cuda(*one.args, **one.kwargs)
        assert len(slow_calls) == 1
        for layout in LAYOUTS:
            given = in_layout(one, layout)
            launches.calls.clear()
            check(op, one, (OPS[op].cuda(*given.args, **given.kwargs),))
            _, passed = launches.calls[-1]
            # In the masked layout, an expert's columns end where the next expert's begin, so a kernel cannot skip
            # padding.
            in_place = layout == "column" or (layout == "padded-column" and not is_masked)
            assert (passed[2].data_ptr() == given.args[2].data_ptr()) == in_place
        assert len(slow_calls) == 1
        for layout in LAYOUTS:
            forget(OPS[op])
            given = in_layout(one, layout)
            check(op, one, (OPS[op].cuda(*given.args, **given.kwargs),))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("weight_layout", SCALE_LAYOUTS)
def test_mxfp8_layouts(layout, weight_layout, launches):
    """Check MXFP8 scales in each layout through the CUDA entry, for whole and for short k tiles, and in calls for which
    a launcher exists."""
    for m, k in ((6, 768), (130, 192)):
        for _ in range(2):
            one = mx_sample("", m, N, k, CPU, exact=True, layout=layout, weight_layout=weight_layout)
            options = {"out_dtype": torch.float32, "backend": "mma_sync"}
            got = OPS["mm_fp8_block"].cuda(*one.args, **options)
            assert torch.equal(got, OPS["mm_fp8_block"].reference(*one.args, **options))
            _, passed = launches.calls[-1]
            assert passed[2].shape == (m, -(-k // 128)) and passed[2].stride() == (1, m)
            assert passed[3].shape == (N, -(-k // 128)) and passed[3].is_contiguous()
    assert len(launches.compiled) == 1


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("weight_layout", SCALE_LAYOUTS)
def test_mxfp8_layouts_with_wgmma(layout, weight_layout, launches):
    """Check MXFP8 scales in each layout and dtype, scales at any address, and calls without rows or columns, through
    the CUDA entry on Hopper, whose kernels fold both operands. Scales of ``a`` in the layouts linear and 128x4 are read
    in place, and linear scales of ``b`` if K is a multiple of 128."""
    options = {"out_dtype": torch.float32}
    for m, n, k in ((6, N, 768), (130, N, 192), (0, N, 192), (5, 0, 192)):
        one = mx_sample("", m, n, k, CPU, exact=True, layout=layout, weight_layout=weight_layout)
        want = OPS["mm_fp8_block"].reference(*one.args, **options)
        moved = [torch.cat((scale.flatten()[:1], scale.flatten()))[1:].view(scale.shape) for scale in one.args[2:]]
        as_e8m0 = [scale.view(torch.float8_e8m0fnu) for scale in one.args[2:]]
        for scales in (one.args[2:], as_e8m0, moved) if m * n else (one.args[2:],):
            launches.calls.clear()
            assert torch.equal(OPS["mm_fp8_block"].cuda(*one.args[:2], *scales, **options), want)
            if m * n:
                (fold, folding), (gemm, multiplying) = launches.calls
                names = [type(kernel).__name__ for kernel in (fold, gemm)]
                assert names == ["MXFP8FoldKernel", "MXFP8WgmmaKernel"]
                read = [
                    folding[1].data_ptr() == scales[0].data_ptr(),
                    multiplying[3].data_ptr() == scales[1].data_ptr(),
                ]
                if scales is not moved:
                    assert read == [layout != "8x4", weight_layout == "linear" and k % 128 == 0]


@pytest.mark.parametrize("weight_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("alpha", [None, "one", "column"])
def test_folding_the_weight_first(alpha, weight_layout, launches):
    """Check the launches and the result if the weight is folded before the GEMM, for scales in each layout."""
    one = mx_sample("", 130, 264, 448, CPU, exact=True, weight_layout=weight_layout)
    epilogue = {"alpha": {None: None, "one": torch.tensor([0.5]), "column": torch.randint(1, 5, (264,)).float()}[alpha]}
    epilogue |= {"bias": torch.randint(-9, 9, (264,)).float(), "out_dtype": torch.float32}
    check_folding_first("mm_fp8_block", one, epilogue, launches)


@pytest.mark.parametrize("alpha", [None, "one", "expert", "expert_column"])
def test_folding_the_weights_of_experts_first(alpha, launches):
    """Check the launches and the result with experts if the weights are folded before the GEMM."""
    one = contiguous("", [130, 0, 7, 65], 264, 320, CPU, exact=True)
    one = with_mx_scales(one, exact=True)
    shape = {"one": (1,), "expert": (4,), "expert_column": (4, 264)}.get(alpha or "")
    epilogue = {"alpha": None if shape is None else torch.randint(1, 5, shape).float(), "out_dtype": torch.float32}
    epilogue["bias"] = torch.randint(-9, 9, (4, 264)).float()
    check_folding_first("grouped_mm_fp8", one, epilogue, launches)


def check_folding_first(name, one, epilogue, launches):
    """Run the tactic that folds the weight first, and compare with the reference."""
    op = OPS[name]
    call = op.bind(*one.args, **one.kwargs, **epilogue)
    problem, target = op.path.problem(call), select.target_of(torch.device("cuda", 0))
    out = torch.full((len(call.a), problem.n), torch.nan)
    backend_for("wgmma", problem).launcher(problem, MXFP8Tactic(MANY, MANY, 1, True), target)(
        operands_of(problem, call), out
    )
    want = op.reference(*one.args, **one.kwargs, **epilogue)
    used = slice(None) if call.offsets is None else used_rows(len(out), call.offsets, call.counts)
    assert torch.equal(out[used], want[used])
    names = [type(kernel).__name__ for kernel, _ in launches.calls]
    assert names == ["MXFP8FoldKernel", "MXFP8FoldKernel", "FP8WgmmaKernel"]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("weight_layout", SCALE_LAYOUTS)
def test_mxfp8_layouts_with_tcgen05(layout, weight_layout, launches, monkeypatch):
    """Check MXFP8 scales in each layout for data-center Blackwell, whose kernel takes tiled scales. Scales in the
    128x4 layout are read in place if they are aligned."""
    target = Target(torch.device("cuda", 0), ARCHS["sm_100a"], 148)
    monkeypatch.setattr(select, "target_of", lambda device: target)
    options = {"out_dtype": torch.float32}
    for m, k in ((6, 768), (130, 192)):
        one = mx_sample("", m, N, k, CPU, exact=True, layout=layout, weight_layout=weight_layout)
        want = OPS["mm_fp8_block"].reference(*one.args, **options)
        for as_e8m0 in (False, True):
            scales = [scale.view(torch.float8_e8m0fnu) if as_e8m0 else scale for scale in one.args[2:]]
            assert torch.equal(OPS["mm_fp8_block"].cuda(*one.args[:2], *scales, **options), want)
            _, passed = launches.calls[-1]
            for name, scale, given in zip((layout, weight_layout), scales, passed[2:4], strict=True):
                assert (given.data_ptr() == scale.data_ptr()) == (name == "128x4")
        moved = [torch.cat((scale.flatten()[:1], scale.flatten()))[1:].view(scale.shape) for scale in one.args[2:]]
        assert torch.equal(OPS["mm_fp8_block"].cuda(*one.args[:2], *moved, **options), want)
    assert {type(kernel).__name__ for kernel, _ in launches.calls} == {"MXFP8Tcgen05Kernel"}


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_mxfp8_layouts_of_experts(layout, arch, launches, monkeypatch):
    """Check that grouped MXFP8 GEMMs with scales in each layout run ``mxfp8_wgmma`` on Hopper and ``fp8_mma`` on other
    GPUs, in both row layouts, for whole and for short k tiles."""
    target = Target(torch.device("cuda", 0), ARCHS[arch], 148)
    monkeypatch.setattr(select, "target_of", lambda device: target)
    names = [*SCALE_LAYOUTS]
    op, other = OPS["grouped_mm_fp8"], names[names.index(layout) - 1]
    for k in (256, 192):
        for one in (contiguous("", [5, 0, 19], N, k, CPU, exact=True), masked("", [5, 0, 8], 8, N, k, CPU, exact=True)):
            given = with_mx_scales(one, layout, other, exact=True)
            given = replace(given, kwargs={**given.kwargs, "out_dtype": torch.float32})
            for _ in range(2):
                check("grouped_mm_fp8", given, (op.cuda(*given.args, **given.kwargs),))
            _, passed = launches.calls[-1]
            rows, columns = given.args[0].shape[:-1], -(-k // 128)
            assert passed[2].shape == (*rows, columns) and passed[3].shape == (3, N, columns)
    names = {"MXFP8FoldKernel", "MXFP8WgmmaKernel"} if arch == "sm_90a" else {"FP8MmaKernel"}
    assert {type(kernel).__name__ for kernel, _ in launches.calls} == names


def test_mxfp8_scales_at_any_address(launches):
    """Check linear scales that begin at an odd byte, and scales with gaps between the rows."""
    a, b, a_scale, b_scale = mx_sample("", 6, N, 256, CPU, exact=True, layout="linear").args
    options = {"out_dtype": torch.float32}
    want = OPS["mm_fp8_block"].reference(a, b, a_scale, b_scale, **options)

    def moved(scale):
        return torch.cat((scale.flatten()[:1], scale.flatten()))[1:].view(scale.shape)

    def gapped(scale):
        return torch.cat((scale, scale), 1)[:, : scale.shape[1]]

    for change in (moved, gapped):
        assert torch.equal(OPS["mm_fp8_block"].cuda(a, b, change(a_scale), change(b_scale), **options), want)


def test_one_row_is_read_in_place(launches, slow_calls):
    """Check that the scales of a single row are never copied."""
    one = call_of("mm_fp8_block", 1, 768, CPU, N)
    for layout in ("column", "row"):
        given = in_layout(one, layout)
        check("mm_fp8_block", one, (OPS["mm_fp8_block"].cuda(*given.args, **given.kwargs),))
        assert launches.calls[-1][1][2].data_ptr() == given.args[2].data_ptr()
    assert len(slow_calls) == 1


@pytest.mark.parametrize("op", ["mm_fp8_block", "grouped_mm_fp8"])
def test_transposed_weight_scales_raise(op, launches):
    """Check that a transposed view of a weight's scales is refused, even after a valid call with the same shapes, and
    that its contiguous copy is accepted."""
    one = call_of(op, 6, 256, CPU, 256)
    a, b, a_scale, b_scale, *rest = one.args
    OPS[op].cuda(*one.args, **one.kwargs)
    for entry in (OPS[op].cuda, OPS[op].function, torch.compile(OPS[op].function, backend="eager")):
        with pytest.raises(Exception, match=r"b_scale with shape .*2, 2\) .*transposed view.*b_scale\.contiguous\(\)"):
            entry(a, b, a_scale, b_scale.mT, *rest, **one.kwargs)
    turned = b_scale.mT.contiguous()
    check(
        op,
        Sample("", (a, b, a_scale, turned, *rest), one.kwargs),
        run(OPS[op], Sample("", (a, b, a_scale, turned, *rest), one.kwargs)),
    )


# Layouts of output scales


def quantising(device: torch.device) -> dict[str, tuple[Sample, torch.Size]]:
    """Return, for each op that quantises to FP8, a call and the shape of its codes."""
    x = torch.randn(2, 3, 640, device=device)
    weight = torch.rand(640, device=device)
    blocks = {"granularity": "block128"}
    pairs = torch.tensor([4, 0, 3, 1, 5, 2], dtype=torch.int32, device=device)
    counts = torch.tensor([3, 3], dtype=torch.int32, device=device)
    return {
        "fp8_quantize": Sample("", (x,), blocks),
        "rmsnorm_fp8quant": Sample("", (x, weight), blocks),
        "add_rmsnorm_fp8quant": Sample("", (x, torch.zeros_like(x), weight), blocks),
        "silu_mul_fp8quant": Sample("", (torch.cat((x, x), -1),), blocks),
        "moe_permute_fp8quant": Sample("", (x[0], pairs, 2), {}),
        "moe_swiglu_fp8quant": Sample("", (torch.cat((x, x), -1), None, counts), {}),
    }


@pytest.mark.parametrize("entry", ["real", "model"])
@pytest.mark.parametrize("op", quantising(CPU))
def test_outputs_take_the_layout_of_the_given_tensor(op, entry, request, device):
    """Check that scales are written in the layout of the given output tensor, that memory between its elements does not
    change, and that a second call and ``out=`` give the same results."""
    if entry == "model":
        request.getfixturevalue("launches")
        device = "cpu"
    spec = OPS[op]
    one = quantising(torch.device(device))[op]
    y, scale, *_ = run(spec, one)
    assert scale.shape == (*y.shape[:-1], 5)
    for layout, make in LAYOUTS.items():
        for _ in range(2):
            target = make(torch.full_like(scale, torch.nan))
            strides, codes = target.stride(), torch.empty_like(y)
            given = Sample(
                "", tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in one.args), one.kwargs
            )
            version = target._version
            if entry == "model":
                spec.cuda_out(*given.args, **given.kwargs, **dict(zip(spec.out_names, (codes, target), strict=True)))
            else:
                spec.function(*given.args, **given.kwargs, out=(codes, target))
            assert target.stride() == strides and target._version > version
            assert_same((codes, target), (y, scale))
            if layout.startswith("padded"):
                whole = torch.empty(0, device=device).set_(target.untyped_storage())
                assert int(whole.isnan().sum()) == whole.numel() - target.numel()


def test_row_major_outputs_take_the_fast_path(launches, slow_calls):
    """Check that later calls with row-major output scales use the kernel that writes row-major scales, without
    copies."""
    op, x = OPS["fp8_quantize"], torch.randn(4, 640)
    y, want = torch_cute_ops.fp8_quantize(x, granularity="block128", scale_layout="row")
    scale = torch.empty_like(want)
    for _ in range(3):
        op.cuda_out(x, granularity="block128", y=y, scale_out=scale.fill_(torch.nan))
        assert torch.equal(scale, want) and launches.calls[-1][1][6].data_ptr() == scale.data_ptr()
    assert len(slow_calls) == 1


def test_a_named_layout_must_fit_the_given_scales(device):
    x = torch.randn(4, 512, device=device)
    y, column = torch_cute_ops.fp8_quantize(x, granularity="block128", scale_layout="column")
    _, row = torch_cute_ops.fp8_quantize(x, granularity="block128", scale_layout="row")
    assert column.stride() == (1, 4) and row.stride() == (4, 1) and torch.equal(column, row)
    for layout, scale in (("column", row), ("row", column)):
        with pytest.raises(ValueError, match=rf"strides .* expected {layout}-major scales, as scale_layout='{layout}'"):
            torch_cute_ops.fp8_quantize(x, granularity="block128", scale_layout=layout, out=(y, scale))
    for granularity, static in (("token", None), ("tensor", torch.ones(1, device=device))):
        for layout in ("row", "column", None):
            _, scale = torch_cute_ops.fp8_quantize(x, static, granularity, layout)
            assert scale.is_contiguous() and scale.shape == ((4, 1) if static is None else (1,))
