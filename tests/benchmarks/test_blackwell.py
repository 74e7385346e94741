"""Check the model of `python -m benchmarks blackwell` against figures computed by hand."""

import pytest

from benchmarks import __main__ as cli
from benchmarks import blackwell
from torch_cute_ops.formats import NVFP4
from torch_cute_ops.gemm import cost
from torch_cute_ops.runtime.arch import ARCHS

(B200,) = cost.usual_targets(ARCHS["sm_100a"])
BANDWIDTH = 0.888 * 7.67e12
"""Bandwidth of a copy on a B200: the same fraction of the peak, 7.67 TB/s, as on an H200."""
BYTES_PER_CLOCK = BANDWIDTH / (148 * 1.7e9)


def rows_of(printed):
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_figures(capsys):
    """Check the model's figures for a tile of 128 × 16 on 148 SMs at 1.7 GHz. An SM moves 28 bytes and computes 32,768
    operations per clock."""
    one = blackwell.line(NVFP4, 16384, 16384, 16, B200, None)
    assert one.tactic == (16, 1, 1) and one.config.tmem_columns == 128
    # A row's k tile of 256 elements is 128 bytes of codes and 16 bytes of scales.
    assert one.mma_clocks == 2 * 128 * 16 * 256 / 32_768
    assert one.byte_clocks == pytest.approx((128 + 16) * (128 + 16) / BYTES_PER_CLOCK)
    moved = (16384 + 16) * (8192 + 1024) + 2 * 16 * 16384
    assert one.floor_us == pytest.approx(moved / BANDWIDTH * 1e6)
    assert one.us > one.floor_us
    many = blackwell.line(NVFP4, 16384, 16384, 8192, B200, None)
    assert many.tactic == (256, 2, 1)
    assert many.floor_us == pytest.approx(2 * 8192 * 16384**2 / (148 * 32_768 * 1.7e9) * 1e6)


def test_experts():
    """Check the model of expert GEMMs with tiles of 128 tokens by 64 or 128 weight rows: large batches read the weights
    of all 256 experts; 8 tokens that are routed to 8 experts each read 22 % of the weights."""
    dense, routed = (blackwell.line(NVFP4, *blackwell.FC2, 8, B200, None, mode) for mode in blackwell.MODES[1:])
    assert dense.tactic[-1] == "dense" and routed.tactic[-1] == "routed"
    assert dense.rows == (dense.tactic[0], 128) and dense.mma_clocks == 2 * 128 * dense.tactic[0] * 256 / 32_768
    assert dense.byte_clocks == pytest.approx((128 + dense.tactic[0]) * (128 + 16) / BYTES_PER_CLOCK)
    weight = 7168 * 65_536 * (1 / 2 + 1 / 16)
    assert dense.floor_us == pytest.approx(weight / BANDWIDTH * 1e6, rel=2e-2)
    assert routed.floor_us / dense.floor_us == pytest.approx(1 - (1 - 8 / 256) ** 8, rel=2e-2)
    assert routed.us < dense.us


def test_table(capsys):
    """Check that the table says that nothing was measured, and that it lists every shape and TensorRT-LLM's figures."""
    assert cli.main(["blackwell", "--format", "mxfp4", "--arch", "sm_103a", "--no-registers"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A MODEL, NOT A MEASUREMENT: sm_103a") and "mxfp4" in printed
    table, rest = printed.split("bfloat16 activations by a weight")
    weight_only, layers = rest.split("Layers of DeepSeek-V3")
    gemms = [(f"{n:,} × {k:,}", f"{m:,}") for (n, k), every in blackwell.WEIGHT_ONLY_SHAPES.items() for m in every]
    assert [tuple(row[:2]) for row in rows_of(weight_only)] == gemms
    rows = rows_of(table)
    plain = [(f"{n:,} × {k:,}", "one", f"{m:,}") for (n, k), every in blackwell.SHAPES.items() for m in every]
    experts = [("7,168 × 65,536", mode, str(m)) for mode in ("dense", "routed") for m in (32, 64, 128, 256, 512)]
    assert [tuple(row[:3]) for row in rows] == plain + experts
    assert [row[-1] for row in rows] == ["–"] * 15 + ["52.0", "53.0", "54.0", "69.0", "101"] * 3
    names = [(name, str(m)) for name in blackwell.LAYERS for m in blackwell.LAYER_ROWS]
    assert [tuple(row[:2]) for row in rows_of(layers)] == names
    assert all(row[9] == "–" and float(row[12].replace(",", "")) > float(row[13].replace(",", "")) for row in rows)


def test_registers(monkeypatch, capsys):
    """Check the number of registers that the command prints for the compiled kernel of each configuration."""
    monkeypatch.setattr(blackwell, "SHAPES", {(16384, 16384): (1, 2), (28672, 4096): (1,)})
    compiled = []
    real = blackwell.compile_for
    monkeypatch.setattr(blackwell, "compile_for", lambda *given: compiled.append(given) or real(*given))
    assert cli.main(["blackwell"]) == 0
    assert len(compiled) == 1
    table, _ = capsys.readouterr().out.split("bfloat16 activations by a weight")
    (registers,) = {row[9] for row in rows_of(table)}
    assert int(registers) == max(each.registers for each in real(*compiled[0]).resources)


def test_16_bit_activations():
    """Check that the floor for one row is the time in which the weight is read, with half a byte per element and one
    byte per 16 elements, and that the estimate is above the time in which 148 SMs decode 50 elements per clock."""
    name, m, *micro, chosen = blackwell.weight_only_cells(NVFP4, 8192, 8192, 1, B200)
    tcgen05, mma_sync, cublas, floor = map(float, micro)
    assert (name, m, chosen) == ("8,192 × 8,192", "1", "tcgen05")
    assert floor == pytest.approx(8192**2 * (1 / 2 + 1 / 16) / BANDWIDTH * 1e6, rel=1e-2)
    assert 8192**2 / (50 * 148 * 1.7e9) * 1e6 < tcgen05 < mma_sync < cublas


def test_layers():
    """Check a layer of 32 experts with 64 tokens, which read the weights of all experts: three matrices of 2,048 ×
    7,168 each, with half a byte per element and one byte per 16 elements."""
    name, m, first, _, floor, second, _, other, both, least = blackwell.layer_cells(NVFP4, "32 experts", 64, B200)
    assert (name, m, first, second) == ("32 experts", "64", "tcgen05", "tcgen05")
    matrix = 32 * 2048 * 7168 * (1 / 2 + 1 / 16) / BANDWIDTH * 1e6
    assert float(floor) == pytest.approx(2 * matrix, rel=1e-2) and float(other) == pytest.approx(matrix, rel=2e-2)
    assert float(least) < float(both) < 1.5 * float(least)
