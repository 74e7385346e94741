"""Test the benchmark of ``qkv_norm_rope_append`` without a GPU."""

import pytest
import torch

from benchmarks import compositions, ops
from benchmarks.runner import cloned

CPU = torch.device("cpu")
BENCHMARK = ops.load("qkv_norm_rope_append")
by_cache = pytest.mark.parametrize("cache", ["bf16", "fp8", "nvfp4"])


def test_bytes_by_hand():
    read = 48 * 128 * 2 + 128 * 4 + 16
    for cache, written in {"bf16": 16 * 128 * 2, "fp8": 16 * 128, "nvfp4": 16 * (64 + 8)}.items():
        moved = BENCHMARK.bytes_moved(BENCHMARK.case(4096, cache=cache))
        assert moved == 4096 * (read + 32 * 128 * 2 + written) + 2 * 256 + (0 if cache == "bf16" else 8)


@by_cache
def test_the_op_agrees_with_what_is_expected(cache):
    """Check that the op writes only the expected results, and that computing these changes no tensor."""
    case = BENCHMARK.case(5, cache=cache)
    sets = [BENCHMARK.make_set(case, CPU)]
    made = cloned(sets[0])
    want = BENCHMARK.expected(case, sets[0])
    assert all(torch.equal(_raw(tensor), _raw(made[name])) for name, tensor in sets[0].items())
    got = BENCHMARK.ours(case, sets).call(0)
    assert len(got) == (5 if cache == "nvfp4" else 3)
    assert all(torch.equal(_raw(a), _raw(b)) for a, b in zip(got, want, strict=True))
    assert str(BENCHMARK.smallest(case)) == f"M=1 D=128 {cache}"


@by_cache
def test_the_peers_compute_the_op(cache):
    """Check the peer, a composition whose steps round intermediate results to 16 bits. q may differ by two ulps; caches
    of values must be equal in 16 bits and FP8. Of the other results, about 1.5 % of the bytes differ: values with a
    relative error of up to 2^-8 are rounded to e4m3 scales, whose relative steps are 2^-4 to 2^-3, so this fraction of
    the scales rounds to the other neighbour. The limit of 3 % is seven standard deviations of 4,096 scales away."""
    case = BENCHMARK.case(64, cache=cache)
    tensors = BENCHMARK.make_set(case, CPU)
    want = BENCHMARK.expected(case, tensors)
    got = BENCHMARK.results(compositions.qkv_norm_rope_append(**BENCHMARK.arguments(tensors)), tensors)
    assert ((got[0].float() - want[0].float()).abs() <= want[0].float().abs() / 64 + 1 / 64).all()
    if cache != "nvfp4":
        assert torch.equal(_raw(got[2]), _raw(want[2]))
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (_raw(a) != _raw(b)).float().mean() < 0.03


def _raw(tensor):
    return tensor.contiguous().view(torch.uint8)
