"""Indices, offsets and counts out of range on a GPU: no byte before or after an output may be written.

Reads are checked by ``python tools/sanitize.py --tests tests/ops/test_wrong_indices_gpu.py --tools memcheck``.
"""

from __future__ import annotations

import pytest
import torch
from samples import sample_inputs
from support.cases import arguments, overload

from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

pytestmark = pytest.mark.gpu

GUARD = 1 << 20
"""Bytes of poison before and after each output."""
LEAST, MOST = -(2**31), 2**31 - 1
WRONG = {
    "negative": lambda each: each.fill_(-5),
    "least": lambda each: each.fill_(LEAST),
    "beyond": lambda each: each.fill_(2**20),
    "most": lambda each: each.fill_(MOST),
    "descending": lambda each: each.copy_(each.flip(0) if each.dim() == 1 else each.flip(1)),
    "random": lambda each: each.random_(LEAST, MOST),
    "near": lambda each: each.random_(-40, 400),
    "overflowing": lambda each: each.copy_(
        torch.linspace(MOST, LEAST, each.numel(), dtype=torch.float64).view_as(each)
    ),
}
INDICES = ("offsets", "counts", "expanded_to_permuted", "permuted_to_expanded", "ids")
CASES = [name for name, op in OPS.items() if any(each in op.signature.names for each in INDICES)]


def calls(op, device):
    """Yield a few calls of an op by name, each with all its index tensors, one call per backend."""
    samples = [each for each in sample_inputs(op.name, device) if each.args[0].numel() < 2**22]
    chosen, seen = [], set()
    for each in samples:
        given = arguments(op, each)
        kind = frozenset(name for name in INDICES if given.get(name) is not None)
        if kind and kind not in seen:
            seen.add(kind)
            chosen.append(given)
    for given in chosen:
        reasons = op.backends(torch.device(device), **given) if op.has_backends else {}
        for backend in [name for name, reason in reasons.items() if reason is None and name != "reference"] or [None]:
            yield given if backend is None else {**given, "backend": backend}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_is_written_out_of_bounds(name, wrong):
    op, device, ran = OPS[name], "cuda", 0
    for given in calls(op, device):
        wanted = as_tuple(overload(op)(**given))
        for changed in (name for name in INDICES if given.get(name) is not None):
            bad = WRONG[wrong](given[changed].contiguous().clone())
            whole, outputs = [], []
            for like in wanted:
                memory = torch.full((like.nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=device)
                whole.append(memory)
                inner = memory[GUARD : GUARD + like.nbytes].view(like.dtype)
                outputs.append(inner.as_strided(like.shape, like.stride(), inner.storage_offset()))
            overload(op, "out")(**{**given, changed: bad}, **dict(zip(op.out_names, outputs, strict=True)))
            for memory in whole:
                around = torch.cat((memory[:GUARD], memory[-GUARD:]))
                assert (around == 0xA5).all(), (changed, given.get("backend"))
            ran += 1
    assert ran


@pytest.mark.parametrize("rows", [3 * 2**20, 5 * 2**20], ids=["negative-sum", "positive-sum"])
def test_sums_of_counts_may_overflow(rows):
    """Check that nothing is written out of bounds if every expert counts all rows, so that the number of rows of all
    experts exceeds int32. A sum that overflows to a negative number means that no row is written."""
    experts, device = 1024, "cuda"
    x = torch.zeros(rows, 256, dtype=torch.bfloat16, device=device)
    codes, scales = (
        torch.full((bytes_of_row * rows + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=device)
        for bytes_of_row in (128, 4)
    )
    y = codes[GUARD:-GUARD].view(torch.float8_e4m3fn).view(rows, 128)
    scale = scales[GUARD:-GUARD].view(torch.float32).view(1, rows).mT
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
    torch.ops.cute.moe_swiglu_fp8quant.out(x, offsets, counts, y=y, scale=scale)
    for memory in (codes, scales):
        assert (memory[:GUARD] == 0xA5).all()
        assert (memory[-GUARD:] == 0xA5).all()
    is_written = (y.view(torch.uint8) == 0).all(1) & (scale == 0).flatten()
    untouched = (y.view(torch.uint8) == 0xA5).all(1)
    assert (is_written | untouched).all()
    assert is_written.any() == (experts * rows % 2**32 < 2**31)
