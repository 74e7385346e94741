"""FP4 GEMMs on a GPU: every tactic of every backend, rows, captures, consecutive launches, streams."""

import random

import pytest
import torch
from expected._fp4_gemm import results
from samples._epilogue import exact_epilogue
from samples._fp4_gemm import POWERS
from support.cases import arguments, named
from support.gemm_problems import backend_for
from test_fp4_gemm import SAMPLES, by_op

import torch_cute_ops
from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm.backends.cublas import BLOCK_SCALED
from torch_cute_ops.gemm.backends.fp4_wgmma import WgmmaTactic
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.kernels.fp4_wgmma import TILES_N
from torch_cute_ops.registry import OPS

pytestmark = pytest.mark.gpu

# (M, N, K; dtype of the result, alpha and bias; dtype of activations that are not FP4)
CALLS = [
    (1, 64, 64, torch.float32, None, None, torch.bfloat16),
    (9, 136, 288, torch.bfloat16, "one", torch.bfloat16, torch.float16),
    (65, 384, 1088, torch.float16, "column", torch.float32, torch.bfloat16),
    (130, 256, 4096, torch.bfloat16, "column", None, torch.float16),
]
LARGE = (513, 776, 2048, torch.bfloat16, "one", torch.float32, torch.bfloat16)
TACTICS = [
    (name, call)
    for name in ("wgmma", "tcgen05", "mma_sync", "cublas", "reference")
    for call in (*CALLS, *([LARGE] if name in ("wgmma", "tcgen05") else []))
]
by_kernel = pytest.mark.parametrize("name", ["wgmma", "tcgen05", "mma_sync"])


def gpu_target(name):
    """Return the current GPU's target, or skip the test if the backend ``name`` does not support it."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if name == "wgmma" and not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    if name == "tcgen05" and not target.arch.has_tcgen05:
        pytest.skip("needs data-center Blackwell's tcgen05")
    return target


def exact_call(op, target, m, n, k, fmt, layout, out_dtype, a_dtype=torch.bfloat16, **kwargs):
    """Return arguments for which all partial sums are exact in float32."""
    samples = SAMPLES[op.name]
    powers = POWERS[fmt.scale_format]
    given = arguments(
        op, samples.sample("", m, n, k, fmt, layout, target.device, scales=powers, out_dtype=out_dtype, **kwargs)
    )
    if not samples.has_a_scale:
        given["a"] = torch.randint(-8, 9, (m, k), device=target.device).to(a_dtype)
    return given


def prepared(op, given):
    """Return the problem of a call, and its operands as backends expect them."""
    sample = named(op, given)
    problem = op.path.problem(op.bind(*sample.args, **sample.kwargs))
    dtype = problem.b.format.scale_dtype
    a_scale = None if given.get("a_scale") is None else given["a_scale"].view(dtype)
    scales = a_scale, given["b_scale"].view(dtype)
    return problem, Operands(given["a"], given["b"], *scales, given["alpha"], given["bias"])


@pytest.mark.slow
@by_op
@pytest.mark.parametrize(("name", "sizes"), TACTICS, ids=str)
def test_every_tactic(op, name, sizes):
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned outputs with exactly these
    sums. Each run draws one of the two formats."""
    fmt = random.choice([NVFP4, MXFP4])
    m, n, k, out_dtype, alpha, bias_dtype, a_dtype = sizes
    target = gpu_target(name)
    if name == "tcgen05" and SAMPLES[op.name].has_a_scale:
        k = -(-k // 64) * 64
    # wgmma supports linear scales only for NVFP4
    layout = "linear" if m % 2 == 0 and (name != "wgmma" or fmt == NVFP4) else "128x4"
    epilogue = exact_epilogue(n, target.device)
    if alpha != "column":
        epilogue["alpha"] = None if alpha is None else torch.full((1,), -0.5, device=target.device)
    epilogue["bias"] = None if bias_dtype is None else epilogue["bias"].to(bias_dtype)
    given = exact_call(op, target, m, n, k, fmt, layout, out_dtype, a_dtype, **epilogue)
    (want,) = results(given)
    problem, operands = prepared(op, given)
    backend = backend_for(name, problem)
    assert backend.reason_unsupported(problem, target) is None
    for tactic in backend.tactics(problem, bucket(m), target):
        out = torch.full((m, n), torch.nan, dtype=out_dtype, device=target.device)
        backend.launcher(problem, tactic, target)(operands, out)
        assert torch.equal(out.cpu(), want), tactic


@by_op
@pytest.mark.parametrize(("tokens", "rows"), [(tokens, rows) for tokens in TILES_N for rows in TILES_N[tokens][1:]])
def test_tiles_with_fewer_rows_of_the_weight(op, tokens, rows):
    """Use inputs whose sums are exact, and check that the results are exactly these sums, even with a tile_n that the
    backend would not choose for this size.

    The last tile is partial, and begins in the middle of a scale tile.
    """
    target = gpu_target("wgmma")
    # only NVFP4 supports tiles of one row
    fmt, layout = random.choice([(NVFP4, "128x4"), (NVFP4, "linear"), (MXFP4, "128x4")][: 2 if tokens == 1 else 3])
    k = 2336 if layout == "128x4" else 2304  # a row of linear scales must be a multiple of 16 bytes
    given = exact_call(op, target, tokens + 1, 1000, k, fmt, layout, torch.float32)
    want = results(given)[0]
    problem, operands = prepared(op, given)
    for split in (1, 4):
        out = torch.full(want.shape, torch.nan, device=target.device)
        backend_for("wgmma", problem).launcher(problem, WgmmaTactic(tokens, rows, split), target)(operands, out)
        assert torch.equal(out.cpu(), want), split


@pytest.mark.parametrize("rows", TILES_N[1])
def test_one_row_of_the_largest_codes(rows):
    """Check that a single row is exact for the blocks whose sums need the most bits: 15 products of 36 and one product
    of 1/4."""
    target = gpu_target("wgmma")
    n, k, block = 520, 2048, NVFP4.block_size
    given = exact_call(OPS["mm_fp4"], target, 1, n, k, NVFP4, "128x4", torch.float32, alpha=None)
    codes = torch.full((k // block, block), 7, dtype=torch.uint8, device=target.device)  # the code of 6
    codes.scatter_(1, torch.randint(block, (k // block, 1), device=target.device), 1)  # the code of 1/2
    given["a"].copy_((codes[:, ::2] + codes[:, 1::2] * 16).view(1, -1))
    given["b"].copy_(given["a"].view(-1, 1).expand(-1, n))
    for scale in ("a_scale", "b_scale"):
        given[scale].fill_(1.0)
    problem, operands = prepared(OPS["mm_fp4"], given)
    for split in (1, 4):
        out = torch.full((1, n), torch.nan, device=target.device)
        backend_for("wgmma", problem).launcher(problem, WgmmaTactic(1, rows, split), target)(operands, out)
        assert (out == k // block * 540.25).all(), split


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_of_codes_has_the_bits_of_one_of_numbers(split):
    """Check that the rounded sums of a single row depend neither on tile_n nor on whether the kernel multiplies FP4
    codes or decoded numbers. Weight rows that several warps share are exempt."""
    target = gpu_target("wgmma")
    samples = SAMPLES["mm_fp4"]
    n = 160  # all in one tile
    sample = samples.sample("", 1, n, 7168, NVFP4, "128x4", target.device, out_dtype=torch.float32)
    problem, operands = prepared(OPS["mm_fp4"], arguments(OPS["mm_fp4"], sample))
    outs = torch.full((len(TILES_N[1]), 1, n), torch.nan, device=target.device)
    for rows, out in zip(TILES_N[1], outs, strict=True):
        backend_for("wgmma", problem).launcher(problem, WgmmaTactic(1, rows, split), target)(operands, out)
    for rows, out in zip(TILES_N[1], outs, strict=True):
        same = rows // 64 * 64  # several warps share the remaining weight rows, and add their sums in another order
        assert torch.equal(out[:, :same], outs[0][:, :same]), rows


def check_first_rows(launch, columns, device, tactic):
    """Check that the first row and the first 33 rows give the same bits alone as among 100 rows, and that a second call
    gives the same bits for all rows."""
    every = []
    for rows in (100, 100, 33, 1):
        every.append(torch.full((rows, columns), torch.nan, device=device))
        launch(rows, every[-1])
    assert torch.equal(every[0], every[1]), tactic
    assert torch.equal(every[0][:33], every[2]) and torch.equal(every[0][:1], every[3]), tactic


@by_op
@by_kernel
def test_a_row_does_not_depend_on_the_number_of_rows(op, name):
    """Check that each tactic gives a row the same rounded sums alone, among other rows, and in a second call."""
    samples = SAMPLES[op.name]
    target = gpu_target(name)
    device = target.device
    given = arguments(op, samples.sample("", 100, 392, 2560, NVFP4, "128x4", device, out_dtype=torch.float32))
    problem, operands = prepared(op, given)
    backend = backend_for(name, problem)
    for tactic in backend.tactics(problem, 16, target):
        launch = backend.launcher(problem, tactic, target)

        def of_rows(rows, out, launch=launch):
            # The scales of the first rows are the first bytes of each tile of 128 rows.
            launch(operands._replace(a=operands.a[:rows]), out)

        check_first_rows(of_rows, 392, device, tactic)


@pytest.mark.slow
@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
@by_kernel
def test_the_same_sums_every_time(op, fmt, name):
    """Check 100 consecutive launches with data in L2: k tiles then arrive early, and must not overwrite a stage in
    use."""
    target = gpu_target(name)
    given = exact_call(op, target, 40, 1296, 2048, fmt, "128x4", torch.float32)
    want = results(given)[0].to(target.device)
    problem, operands = prepared(op, given)
    backend = backend_for(name, problem)
    for tactic in backend.tactics(problem, 40, target):
        launch = backend.launcher(problem, tactic, target)
        outs = torch.full((100, 40, 1296), torch.nan, device=target.device)
        for out in outs:
            launch(operands, out)
        wrong = [i for i, out in enumerate(outs) if not torch.equal(out, want)]
        assert not wrong, tactic


@by_op
@by_kernel
def test_a_captured_call_serves_other_operands(op, name):
    """Check that a replayed graph uses the current operands, which copies in the graph write right before the GEMM."""
    target = gpu_target(name)
    used, *others = (exact_call(op, target, 24, 776, 1344, NVFP4, "128x4", torch.float32) for _ in range(4))
    tensors = [key for key, value in used.items() if isinstance(value, torch.Tensor)]
    sources = {key: used[key].clone() for key in tensors}
    used["backend"] = name
    op.function(**used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for key in tensors:
            used[key].copy_(sources[key])
        out = op.function(**used)
    for given in others:
        for key in tensors:
            sources[key].copy_(given[key])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.cpu(), results(given)[0])


@by_kernel
def test_consecutive_gemms(name):
    """Check GEMMs whose operands are written by the previous launch: by another GEMM, or by quantising the weight."""
    device = gpu_target(name).device
    weights = torch.randn(6, 512, 512, device=device)
    a = torch.randn(20, 512, device=device, dtype=torch.bfloat16)
    codes, scale = torch_cute_ops.fp4_quantize(weights[0])

    def chain(between):
        value, every = a, []
        for weight in (*weights, *weights):
            torch_cute_ops.fp4_quantize(weight, out=(codes, scale))
            between()
            for _ in range(2):
                value = torch_cute_ops.mm_fp4_weight_only(value, codes.t(), scale, backend=name)
                value = value / value.abs().amax()
                between()
                every.append(value)
        return torch.stack(every)

    want = chain(torch.cuda.synchronize)
    assert want.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(lambda: None), want)


@by_op
@by_kernel
def test_gemms_on_several_streams(op, name):
    """Check that concurrent calls do not share a workspace."""
    target = gpu_target(name)
    calls = [exact_call(op, target, 24, 776, 4096, NVFP4, "128x4", torch.float32) | {"backend": name} for _ in range(3)]
    wants = [results(given)[0] for given in calls]
    op.function(**calls[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    outs = [[] for _ in calls]
    for _ in range(10):
        for given, stream, every in zip(calls, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                every.append(op.function(**given))
    torch.cuda.synchronize()
    for every, want in zip(outs, wants, strict=True):
        assert all(torch.equal(out.cpu(), want) for out in every)


# Properties of block-scaled tensor cores that only a GPU can show; docs/limits.md lists them.


def block_scaled_results(given):
    """Yield the name, tactic and result of each ``mm_fp4`` backend that passes FP4 codes to the tensor cores."""
    target = gpu_target(None)
    if not target.arch.fp4_flops_per_clock:
        pytest.skip("needs tensor cores that take FP4")
    problem, operands = prepared(OPS["mm_fp4"], given)
    for name, choices in (("tcgen05", None), ("mma_sync", None), ("cublas", [BLOCK_SCALED])):
        backend = backend_for(name, problem)
        if backend.reason_unsupported(problem, target) is None and (name != "mma_sync" or not target.arch.has_tcgen05):
            tactics = backend.tactics(problem, len(given["a"]), target)
            for tactic in tactics if choices is None else [one for one in choices if one in tactics]:
                out = torch.full((len(given["a"]), problem.n), torch.nan, device=target.device)
                backend.launcher(problem, tactic, target)(operands, out)
                yield (name, tactic), out.cpu()


def block_scaled_call(scales=None):
    """Return a call whose scales are in the 128x4 layout."""
    return arguments(
        OPS["mm_fp4"],
        SAMPLES["mm_fp4"].sample(
            "", 40, 144, 1024, NVFP4, "128x4", torch.device("cuda"), scales=scales, out_dtype=torch.float32
        ),
    )


def test_the_sign_of_a_scale_counts():
    """Check that negative scales work, although PTX's ue4m3 lacks a sign bit. Our quantising ops never write them."""
    given = block_scaled_call(POWERS["e4m3"])
    given["b_scale"].view(torch.uint8)[::3] |= 0x80
    (want,) = results(given)
    for which, got in block_scaled_results(given):
        assert torch.equal(got, want), which


def test_nan_scales_make_their_row_or_column_nan():
    given = block_scaled_call(POWERS["e4m3"])
    (want,) = results(given)
    for scale, rows in (("a_scale", (3, slice(None))), ("b_scale", (slice(None), 5))):
        spoilt = {**given, scale: given[scale].clone()}
        # Byte of the first block's scale in row 3 or column 5: in 128x4 tiles, neighbouring rows are 16 bytes apart.
        spoilt[scale].view(torch.uint8).view(-1)[16 * (3 if scale == "a_scale" else 5)] = 0x7F
        expected = want.clone()
        expected[rows] = torch.nan
        for which, got in block_scaled_results(spoilt):
            assert torch.equal(got.isnan(), expected.isnan()), which
            assert torch.equal(got.nan_to_num(), expected.nan_to_num()), which


def test_sums_are_as_exact_as_fp32():
    """Check that sums have at most one fp32 rounding per 16 products, in whichever order tensor cores add."""
    given = block_scaled_call()
    (want,) = results(given)
    positive = {**given, "a": given["a"] & 0x77, "b": (given["b"].t() & 0x77).t()}
    (largest,) = results(positive)
    for which, got in block_scaled_results(given):
        assert ((got - want).abs() <= 1024 / 16 * 2.0**-24 * largest).all(), which
