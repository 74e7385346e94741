"""The benchmarks of the ops around the GEMMs of an expert layer, without a GPU."""

import pytest
import torch

from benchmarks import ops
from benchmarks.case import Case
from benchmarks.moe_rows import PACKED, PADDED, SIZES, TOP, MoeRowBenchmark, RoutingBenchmark, alignment_of, routing
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
def test_sizes_hold_every_mark(op):
    benchmark = ops.load(op)
    cases = {sizes: {case["M"] for case in benchmark.cases(sizes)} for sizes in SIZES}
    assert cases["marks"] < cases["quick"] <= cases["full"]
    rows = [
        {
            "sizes": dict(case.sizes),
            "choices": dict(case.choices),
            "variants": {
                "ours": {"us": case["M"] / (16 if alignment_of(case.choices) == PADDED else 32), "of_copy": 0.9}
            },
        }
        for case in benchmark.cases("marks")
    ]
    marks = {mark.name: (mark.value, mark.passed) for mark in benchmark.marks(rows)}
    if isinstance(benchmark, RoutingBenchmark):
        assert marks == {"decode, M ≤ 64: time": (4.0, True)}
    else:
        assert marks.pop("decode, M ≤ 64, alignment 1: time") == (2.0, True)
        assert marks.pop("decode, M ≤ 64, alignment 128: time") == (4.0, True)
        assert marks == {"M ≥ 4,096: of copy": (0.9, True)}
    assert all(mark.value is None for mark in benchmark.marks([]))


@by_op
@pytest.mark.parametrize("alignment", [PACKED, PADDED])
def test_the_op_agrees_with_what_is_expected(op, alignment):
    """On the CPU they are the same; what the op leaves unspecified is not written on a GPU."""
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


@pytest.mark.parametrize("op", ["moe_route", "moe_route_dense", "moe_route_ids"])
def test_the_torch_peer_computes_the_same(op):
    """Logits are all different here: of equal ones torch may take any."""
    benchmark = ops.load(op)
    case = benchmark.case(40, experts=32)
    sets = [benchmark.make_set(case, CPU) for _ in range(2)]
    if op != "moe_route_ids":
        sets[1]["logits"].copy_(torch.stack([torch.randperm(32) for _ in range(40)]) / 8 - 2)
    peer = benchmark.peer("torch", case, sets)
    assert benchmark.mismatch(peer.call(1), benchmark.expected(case, sets[1])) == 0.0
    assert peer.checked is (op == "moe_route_ids") and peer.bytes == benchmark.bytes_moved(case)


def test_routings_are_what_they_say():
    parts = routing(40, 32, 128)
    used = parts["permuted_to_expanded"] >= 0
    assert int(used.sum()) == 40 * TOP == int(parts["counts"].sum())
    assert routing(40, 32, 128) is parts
    packed = routing(40, 32, 1)["permuted_to_expanded"]
    assert len(packed) == 40 * TOP and int(packed.min()) == 0
    assert torch.equal(packed, parts["permuted_to_expanded"][used])
