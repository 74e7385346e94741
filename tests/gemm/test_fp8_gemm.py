"""``mm_fp8_block`` and ``grouped_mm_fp8``: exact sums, padding, and the rows of experts."""

from dataclasses import replace

import pytest
import torch
from samples._epilogue import exact_epilogue
from samples._fp8_gemm import BLOCK, NAN, integers, powers
from samples.grouped_mm_fp8 import contiguous, masked
from samples.mm_fp8_block import sample
from support.tactics import check_every_tactic

import torch_cute_ops
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.registry import OPS

N, K = 264, 512
ROWS = (0, 1, 7, 8, 9, 16, 33, 64, 65, 128, 129, 300)


def exact(a, b, a_scale, b_scale):
    """Compute ``a @ b.T`` for whole numbers and scales that are powers of two, so that no sum is rounded."""
    left = a.double() * a_scale.double().repeat_interleave(BLOCK, 1)
    right = b.double() * b_scale.double().repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)
    return left @ right.t()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_numbers_are_exact(m, dtype, device):
    """Check that whole numbers give exact sums, whichever tactic is chosen for the number of rows."""
    one = sample("", m, N, K, torch.device(device), exact=True)
    a, b, a_scale, b_scale = one.args
    got = torch_cute_ops.mm_fp8_block(*one.args, out_dtype=dtype)
    assert torch.equal(got, exact(a, b.t(), a_scale, b_scale).to(dtype))


@pytest.mark.parametrize("counts", [[0, 0, 300, 0], [1, 0, 64, 65], [129, 128, 7, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("layout", ["contiguous", "uncounted", "masked"])
def test_experts_have_their_rows(counts, layout, device):
    """Check the results in the rows of experts, and that no other row is written."""
    where = torch.device(device)
    if layout == "masked":
        one = masked("", counts, 300, N, K, where, exact=True)
    else:
        one = contiguous("", counts, N, K, where, exact=True, alignment=128, spare=5, counted=layout == "contiguous")
    a, b, a_scale, b_scale, *rest = one.args
    rows, scales = a.reshape(-1, K), a_scale.reshape(-1, K // BLOCK)
    poison = 1e30
    out = torch.full((*a.shape[:-1], N), poison, dtype=torch.float32, device=where)
    want = out.clone().view(-1, N)
    begins = [300 * expert for expert in range(4)] if layout == "masked" else rest[0].tolist()
    ends = begins[1:] if layout == "uncounted" else [begin + n for begin, n in zip(begins, counts, strict=False)]
    for expert, (begin, end) in enumerate(zip(begins, ends, strict=False)):
        of_expert = slice(begin, end)
        want[of_expert] = exact(rows[of_expert], b[expert].mT, scales[of_expert], b_scale[expert])
    torch_cute_ops.grouped_mm_fp8(*one.args, **one.kwargs, out_dtype=torch.float32, out=out)
    if device == "cpu":
        # The reference writes zeros to rows without an expert.
        want = torch.where(want == poison, 0.0, want)
    assert torch.equal(out.view(-1, N), want)


def test_one_expert_is_the_plain_gemm(device):
    one = sample("", 70, N, K, torch.device(device), exact=True)
    a, b, a_scale, b_scale = one.args
    counts = torch.tensor([70], dtype=torch.int32, device=device)
    want = torch_cute_ops.mm_fp8_block(*one.args)
    got = torch_cute_ops.grouped_mm_fp8(a[None], b[None], a_scale[None], b_scale[None], counts=counts)
    assert torch.equal(got[0], want)


@pytest.mark.parametrize("m", [5, 130])
def test_long_sums_do_not_lose_more(m, device):
    """Check long sums of positive numbers, in which tensor cores alone would lose small terms. The error must not
    exceed the error of a sum over one k tile."""
    where = torch.device(device)
    k = 128 * BLOCK
    a, b = (torch.rand(rows, k, device=where).to(torch.float8_e4m3fn) for rows in (m, 128))
    a_scale, b_scale = torch.ones(m, 128, device=where), torch.ones(1, 128, device=where)
    got = torch_cute_ops.mm_fp8_block(a, b.t(), a_scale, b_scale, out_dtype=torch.float32)
    want = a.double() @ b.double().t()
    assert ((got.double() - want).abs() / want).max() < 2.0**-9


@pytest.mark.parametrize("m", [3, 140])
def test_nan_stays_where_it_is(m, device):
    """Check that NaN affects only its row or column, and a NaN scale only its row or its 128 columns."""
    where = torch.device(device)
    a, b = integers(m, K, device=where), integers(N, K, device=where)
    a_scale, b_scale = powers(m, K // BLOCK, device=where), powers(3, K // BLOCK, device=where)
    a.view(torch.uint8)[1, 300] = NAN
    b.view(torch.uint8)[7, 3] = NAN
    a_scale[2, 2] = torch.nan
    b_scale[1, 0] = torch.nan
    got = torch_cute_ops.mm_fp8_block(a, b.t(), a_scale, b_scale)
    want = torch.zeros(m, N, dtype=torch.bool, device=where)
    want[1], want[2], want[:, 7], want[:, 128:256] = True, True, True, True
    assert torch.equal(got.isnan(), want)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wgmma", "tcgen05", "mma_sync"])
@pytest.mark.parametrize(("m", "k"), [(1, 128), (9, 448), (60, 2880), (300, 512)])
@pytest.mark.parametrize("epilogue", ["none", "alpha", "bias", "both"])
def test_every_tactic(name, m, k, epilogue):
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums, without experts and with each layout of experts."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if name == "wgmma" and not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    if name == "tcgen05" and not target.arch.has_tcgen05:
        pytest.skip("needs data-center Blackwell's tcgen05")
    device, counts = target.device, [m, 0, m // 2 + 1]
    calls = {
        "mm_fp8_block": [sample("", m, N, k, device, exact=True)],
        "grouped_mm_fp8": [
            contiguous("", counts, N, k, device, exact=True),
            contiguous("", counts, N, k, device, exact=True, counted=False),
            masked("", counts, m + 3, N, k, device, exact=True),
        ],
    }
    for op, samples in calls.items():
        experts = None if op == "mm_fp8_block" else 3
        values = exact_epilogue(N, device, experts)
        given = {key: value for key, value in values.items() if epilogue in (key, "both")}
        if epilogue == "alpha" and experts:
            given["alpha"] = given["alpha"][:, 0].contiguous()
        for one in samples:
            check_every_tactic(OPS[op], name, one, {**given, "out_dtype": torch.float32}, target)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [9, 40])
def test_clusters_with_several_tiles(m):
    """Run a cluster over several tiles on few SMs. A CTA must send the partial sums of a tile only after the partial
    sums of the previous tile were read."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    one = sample("", m, 1032, 1408, target.device, exact=True)
    for _ in range(10):
        check_every_tactic(OPS["mm_fp8_block"], "wgmma", one, {"out_dtype": torch.float32}, replace(target, sms=6))


@pytest.mark.gpu
def test_a_replay_follows_the_counts():
    """Check that a graph replay uses the current counts."""
    device = torch.device("cuda")
    one = masked("", [3, 0, 16], 16, N, K, device, exact=True)
    a, b, a_scale, b_scale = one.args
    for tensor in (a, a_scale, b_scale):
        tensor.nan_to_num_() if tensor.dtype == torch.float32 else tensor.copy_(integers(*tensor.shape, device=device))
    counts = one.kwargs["counts"]
    out = torch.empty(3, 16, N, dtype=torch.bfloat16, device=device)
    torch_cute_ops.grouped_mm_fp8(*one.args, counts=counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_cute_ops.grouped_mm_fp8(*one.args, counts=counts, out=out)
    for given in ([0, 0, 0], [16, 16, 16], [0, 5, 1]):
        counts.copy_(torch.tensor(given))
        out.fill_(777.0)
        graph.replay()
        for expert, count in enumerate(given):
            want = exact(a[expert], b[expert].mT, a_scale[expert], b_scale[expert]).bfloat16()
            want[count:] = 777.0
            assert torch.equal(out[expert], want)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 60, 500])
def test_the_same_sums_every_time(rows):
    """Check that repeated calls give the same sums if operands stay in L2, where copies take the least time."""
    one = contiguous("", [rows, 0, rows // 2, 1], 512, 4096, torch.device("cuda"))
    first = torch_cute_ops.grouped_mm_fp8(*one.args)
    used = used_rows(len(first), *one.args[4:])
    for _ in range(200):
        assert torch.equal(torch_cute_ops.grouped_mm_fp8(*one.args)[used], first[used])
