"""Check the model of `python -m benchmarks distributed` against figures computed by hand."""

import pytest

from benchmarks import __main__ as cli
from benchmarks import distributed
from torch_cute_ops.gemm import cost
from torch_cute_ops.runtime.arch import ARCHS

H200 = cost.usual_targets(ARCHS["sm_90a"])[0]


def rows_of(printed, columns):
    lines = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if len(line) == columns][2:]


def test_bytes_of_a_decoder_layer():
    """Check the bytes and time of a decoder layer: each GPU receives 7/8 of 4,096 tokens × 8,192 elements twice, at 450
    GB/s."""
    elements = 2 * 4096 * 8192 * 7 / 8
    sizes = {"bf16": 2, "fp8": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
    for fmt, size in sizes.items():
        for sums, bytes_of_sum in (("float32", 4), ("bf16", 2)):
            layer = distributed.decoder(fmt, sums, 4096, H200)
            assert layer.gathered == elements * size
            assert layer.scattered == elements * bytes_of_sum
            assert layer.wire_us == pytest.approx(elements * (size + bytes_of_sum) / 450e3)
    # FP8 rows with their scales are 1.9 times smaller than bf16 rows, FP4 rows 3.6 times.
    assert sizes["bf16"] / sizes["fp8"] == pytest.approx(1.94, abs=0.01)
    assert sizes["bf16"] / sizes["nvfp4"] == pytest.approx(3.56, abs=0.01)


def test_gemms_of_a_rank():
    """Check the GEMM times of one of 8 ranks in Llama 3 70B. In bf16, the time is the larger of memory time and compute
    time."""
    assert distributed.LLAMA_70B.gemms(8) == ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
    assert sum(n * k for n, k in distributed.LLAMA_70B.gemms(8)) * 8 == 8192 * (10240 + 8192 + 3 * 28672)
    rate, bandwidth = 132 * 1.7e9, 4.26e12
    few = 2 * (7168 * 8192 + 7168 + 8192) / bandwidth
    assert distributed.gemm_seconds("bf16", 7168, 8192, 1, H200) == pytest.approx(few, rel=1e-3)
    many = 2 * 16384 * 7168 * 8192 / (4096 * rate * 0.8)
    assert distributed.gemm_seconds("bf16", 7168, 8192, 16384, H200) == pytest.approx(many)
    for fmt, size in (("fp8", 1), ("nvfp4", 0.5625)):
        least = 7168 * 8192 * size / bandwidth
        assert least < distributed.gemm_seconds(fmt, 7168, 8192, 1, H200) < 3 * least + 10e-6


def test_bytes_of_experts():
    sent, back, us = distributed.experts("fp8", 128)
    assert sent == 128 * 8 * 7 / 8 * (7168 + 4 * 56)
    assert back == 128 * 8 * 7 / 8 * 2 * 7168
    assert us == pytest.approx((sent + back) / 450e3)


def test_tables(capsys):
    """Check that the tables say that nothing was measured, and that they list every number of tokens in every
    format."""
    assert cli.main(["distributed"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A MODEL, NOT A MEASUREMENT: 8 H200s, NVLink at 450 GB/s")
    decoder, experts = rows_of(printed, 10), rows_of(printed, 6)
    formats = [*distributed.OPERANDS]
    assert [row[:3] for row in decoder] == [[f"{m:,}", *case] for m in distributed.TOKENS for case in distributed.CASES]
    assert [row[:2] for row in experts] == [[f"{m:,}", fmt] for m in distributed.OWN_TOKENS for fmt in formats]
    assert [row[4] for row in decoder[:5]] == ["1.00", "1.94", "1.94", "3.56", "3.56"]
    assert decoder[10][3] == f"{2 * 4096 * 8192 * 2 * 7 / 8 / 1e6:.0f}"
    assert cli.main(["distributed", "--ranks", "2"]) == 0
    assert "2 H200s" in capsys.readouterr().out
