"""Test the benchmarks of the ops before and after the GEMMs of an expert layer, without a GPU."""

import pytest
import torch

from benchmarks import ops
from benchmarks.case import Case
from benchmarks.moe_rows import PACKED, PADDED, TOP, MoeRowBenchmark, RoutingBenchmark
from benchmarks.runner import cloned

CPU = torch.device("cpu")
OPS = [name for name in ops.names() if isinstance(ops.load(name), MoeRowBenchmark)]
by_op = pytest.mark.parametrize("op", OPS)

BYTES = {
    "moe_finalize": 4096 * (8 * 14336 + 2 * 14336 + 8 * 8),
    "moe_permute_fp8quant": 4096 * (14336 + 8 * (7168 + 56 * 4) + 8 * 4),
    "moe_swiglu_fp8quant": 4096 * 8 * (8192 + 2048 + 16 * 4) + 513 * 4,
    "moe_route": 4096 * (512 + 8 * 12) + (4096 * 8 + 256 * 127) // 128 * 128 * 4 + 513 * 4,
    "moe_route_dense": 4096 * 256 * (2 + 4),
    "moe_route_ids": 4096 * 8 * 4 * 2 + (4096 * 8 + 256 * 127) // 128 * 128 * 4 + 513 * 4,
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_by_hand(op):
    benchmark = ops.load(op)
    assert benchmark.bytes_moved(benchmark.case(4096)) == BYTES[op]
    packed = benchmark.bytes_moved(benchmark.case(4096, alignment=PACKED))
    assert packed == BYTES[op] - (511 * 4 if op == "moe_swiglu_fp8quant" else 0)


@by_op
@pytest.mark.parametrize("alignment", [PACKED, PADDED])
def test_the_op_agrees_with_what_is_expected(op, alignment):
    """Compare the op with the benchmark's `expected`. On a GPU, unspecified elements must not be written."""
    benchmark = ops.load(op)
    case = benchmark.case(5, 32 if isinstance(benchmark, RoutingBenchmark) else 256, 32, alignment)
    tensors = benchmark.make_set(case, CPU)
    made = cloned(tensors)
    want = benchmark.expected(case, tensors)
    outputs = benchmark.call(case, tensors)
    defined = [(got == like) | (got.float() == 0) for got, like in zip(outputs, want, strict=True)]
    assert all(part.all() for part in defined)
    assert all(torch.equal(tensors[name], made[name]) for name in made if name not in benchmark.outputs)
    assert str(benchmark.smallest(case)).startswith("M=1 ")


def test_a_fill_writes_as_many_codes():
    benchmark = ops.load("moe_permute_fp8quant")
    case = Case({"M": 5, "H": 256, "E": 32})
    sets = [benchmark.make_set(case, CPU) for _ in range(2)]
    peer = benchmark.peer("fill", case, sets)
    peer.call(1)
    written = sets[1]["y"].view(torch.int32).view(-1)
    assert (written[: 5 * TOP * 256 // 4] == 1).all() and (written[5 * TOP * 256 // 4 :] != 1).all()
    read, scales, indices = 5 * 256 * 2, 5 * TOP * 2 * 4, 5 * TOP * 4
    assert peer.bytes == benchmark.bytes_moved(case) - read - scales - indices
