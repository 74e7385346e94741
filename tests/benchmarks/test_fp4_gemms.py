"""Test the benchmarks of FP4 GEMMs without a GPU: bytes, sizes, checks, peers, and the comparison with targets."""

import pytest
import torch

import torch_cute_ops
from benchmarks import compositions, fp4_gemms, measure, ops
from benchmarks.measure import Ceilings

CPU = torch.device("cpu")
OPS = ["mm_fp4", "mm_fp4_weight_only"]
by_op = pytest.mark.parametrize("op", OPS)


def sets_of(benchmark, case, count=2):
    return [benchmark.make_set(case, CPU) for _ in range(count)]


# --- stand-ins ------------------------------------------------------------------------------------


# --- bytes and sizes ------------------------------------------------------------------------------


def test_bytes_by_hand():
    """Check the bytes moved for M = 16, N = 32, K = 64: 4-bit codes, one scale byte per 16 codes, 16-bit results."""
    weight, out = 32 * (32 + 4), 16 * 32 * 2
    fp4, weight_only = (ops.load(op) for op in OPS)
    case = fp4.case(16, 32, 64)
    assert fp4.bytes_moved(case) == weight + out + 16 * (32 + 4)
    assert weight_only.bytes_moved(case) == weight + out + 16 * 128
    for benchmark in (fp4, weight_only):
        assert benchmark.flops(case) == 2 * 16 * 32 * 64
        assert benchmark.peer_bytes("humming", case) == weight_only.bytes_moved(case)
        assert benchmark.peer_bytes("cublas_bf16", case) == 2 * (16 * 64 + 32 * 64 + 16 * 32)
    large = fp4.case(1, 16384, 16384)
    assert fp4.bytes_moved(large) == 16385 * 9216 + 32768 == 151_036_928


@by_op
def test_the_formula_is_the_bytes_of_the_tensors(op):
    benchmark = ops.load(op)
    case = benchmark.case(128, 256, 512)  # sizes without padding of scales
    (tensors,) = sets_of(benchmark, case, 1)
    assert benchmark.bytes_moved(case) == sum(t.nbytes for name, t in tensors.items() if name != "alpha")


# --- checks ---------------------------------------------------------------------------------------


def test_decoding_is_the_package_s():
    codes, scale = fp4_gemms.random_nvfp4(200, 96, CPU)
    linear = compositions.from_128x4(scale, 200, 6)
    assert torch.equal(compositions.to_128x4(linear).view(torch.uint8), scale.view(torch.uint8))
    want = torch_cute_ops.fp4_dequantize(codes, scale, out_dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(compositions.nvfp4_dequantize(codes, linear, dtype), want.to(dtype))
    assert want.abs().max() > 6 and 0.5 <= linear.float().min() < linear.float().max() <= 2


@by_op
@pytest.mark.parametrize("sizes", [(1, 128, 64), (5, 136, 160)])
def test_the_op_agrees_with_float64(op, sizes):
    benchmark = ops.load(op)
    case = benchmark.case(*sizes)
    sets = sets_of(benchmark, case, 1)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch((sets[0]["out"],), expected) == 1.0  # 1.0: all elements are poison
    assert benchmark.mismatch(benchmark.ours(case, sets).call(0), expected) == 0.0
    assert expected[0].abs().mean() > 0.1


def test_mismatch_allows_rounded_partial_sums_and_no_more():
    benchmark = ops.load("mm_fp4")
    want = torch.randn(64, 64).bfloat16()
    assert benchmark.mismatch((want,), (want,)) == 0.0
    assert benchmark.mismatch(((want.float() + 2**-9).bfloat16(),), (want,)) == 0.0
    assert benchmark.mismatch(((want.float() * 1.03).bfloat16(),), (want,)) > 0.5
    assert benchmark.mismatch((want.flip(0),), (want,)) > 0.9
    with pytest.raises(ValueError, match="expected"):
        benchmark.mismatch((want[:1],), (want,))


# --- peers ----------------------------------------------------------------------------------------


# --- a whole run ----------------------------------------------------------------------------------


def test_ceilings(fake_backend, monkeypatch):
    """Check that the read bandwidth is measured with the faster of two ways to read memory, and that a ceiling that
    cannot be measured is None."""
    monkeypatch.setattr(measure, "peak_copy_tbps", lambda backend, device: 4.2)
    peaks = {name: getattr(measure, name) for name in ("peak_read_tbps", "peak_bf16_tflops")}
    read = peaks["peak_read_tbps"](fake_backend([100.0, 50.0]), CPU, mib=1)
    assert read == pytest.approx(2**20 / 50e-6 / 1e12)
    assert peaks["peak_bf16_tflops"](fake_backend([10.0]), CPU, size=64) == pytest.approx(2 * 64**3 / 10e-6 / 1e12)
    monkeypatch.setattr(measure, "peak_read_tbps", lambda backend, device: 4.6)
    monkeypatch.setattr(measure, "peak_bf16_tflops", lambda backend, device: 1 / 0)
    assert measure.ceilings(None, CPU) == Ceilings(4.2, 4.6, None)


# --- marks ----------------------------------------------------------------------------------------
