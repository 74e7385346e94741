"""Test the benchmarks of GEMMs with a prologue, without a GPU: bytes, sizes, checks, and the variant with two separate
ops."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import ops, runner

CPU = torch.device("cpu")
PARTS = {
    "fp4quant_mm_fp4": ("fp4_quantize", "mm_fp4"),
    "silu_mul_fp4quant_mm_fp4": ("silu_mul_fp4quant", "mm_fp4"),
    "silu_mul_mm_fp4_weight_only": ("silu_mul", "mm_fp4_weight_only"),
}
"""Two ops that together compute the same result as a fused op, keyed by the fused op."""


class Called(TorchDispatchMode):
    """Dispatch mode that records which of our ops are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute":
            self.names.append(func._schema.name.removeprefix("cute::"))
        return func(*args, **(kwargs or {}))


by_op = pytest.mark.parametrize("op", PARTS)


def test_bytes_by_hand():
    """Check the bytes moved for M = 16, N = 32, K = 64. Two separate ops also write and read the codes and scales, or
    16-bit numbers."""
    weight, out = 32 * (32 + 4), 16 * 32 * 2
    moved = {}
    for op in PARTS:
        benchmark = ops.load(op)
        case = benchmark.case(16, 32, 64)
        sets = [benchmark.make_set(case, CPU)]
        moved[op] = benchmark.bytes_moved(case), benchmark.peer("apart", case, sets).bytes
        assert benchmark.flops(case) == 2 * 16 * 32 * 64
    one, both = weight + out + 16 * 128, weight + out + 16 * 256
    assert moved == {
        "fp4quant_mm_fp4": (one, one + 2 * 16 * (32 + 4)),
        "silu_mul_fp4quant_mm_fp4": (both, both + 2 * 16 * (32 + 4)),
        "silu_mul_mm_fp4_weight_only": (both, both + 2 * 16 * 128),
    }


@by_op
@pytest.mark.parametrize("sizes", [(1, 128, 64), (5, 136, 160)])
def test_the_op_and_the_two_agree_with_float64(op, sizes):
    benchmark = ops.load(op)
    case = benchmark.case(*sizes)
    sets = [benchmark.make_set(case, CPU) for _ in range(2)]
    for tensors in sets:
        expected = benchmark.expected(case, tensors)
        assert benchmark.mismatch((tensors["out"],), expected) == 1.0  # 1.0: all elements are poison
        assert expected[0].isfinite().all() and (expected[0] != 0).float().mean() > 0.99
    variants, absent = runner.collect_variants(benchmark, case, sets, with_peers=False)
    assert list(variants) == ["ours", "apart"] and {"wgmma", "mma_sync", "cublas"} <= set(absent)
    assert runner.check(benchmark, case, sets, variants) == dict.fromkeys(variants, 0.0)
    for variant, names in zip(variants.values(), ((op,), PARTS[op]), strict=True):
        with Called() as called:
            (got,) = variant.call(1)
        assert called.names == list(names)
        assert got.data_ptr() == sets[1]["out"].data_ptr()
        assert benchmark.mismatch((got,), benchmark.expected(case, sets[1])) == 0.0
