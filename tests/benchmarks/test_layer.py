"""Test the results and tables of `python -m benchmarks layer`."""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks import layer, report, timeline
from benchmarks import measure as measurements

CPU = torch.device("cpu")
SMALL = layer.Widths(hidden=128, qkv=320, attention=256, intermediate=192)


def norm(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.EPS) * weight.double()


@torch.no_grad()
@pytest.mark.parametrize("label", [*layer.PRECISIONS, "W4A8 per token", "W4A8 per token, fast"])
def test_a_layer(label):
    """Compare a decoder layer's output, and the updated residual, with a float64 computation on decoded weights."""
    one = layer.LAYERS[label](SMALL, CPU, 3, inductor=False)
    weights = {
        name: (linear.weight if label == "bf16" else linear.dequantize()).double()
        for name, linear in one.linears.items()
    }
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SMALL.shapes
    x, residual = (torch.randn(5, 128, dtype=torch.bfloat16) for _ in range(2))
    total = x.double() + residual.double()
    qkv = norm(total, one.norms[0]) @ weights["qkv"].t()
    o = qkv.flatten()[: 5 * 256].view(5, 256) @ weights["o"].t()
    total = total + o
    first, second = (norm(total, one.norms[1]) @ weights["gate_up"].t()).chunk(2, -1)
    want = (F.silu(first) * second) @ weights["down"].t()
    got = one(x, residual)
    limit = {"bf16": 0.9999, "W4A16": 0.9999, "W4A4": 0.97}.get(label, 0.998)
    assert F.cosine_similarity(got.double().flatten(), want.flatten(), 0) > limit
    assert F.cosine_similarity(residual.double().flatten(), total.flatten(), 0) > 0.999
    if label != "bf16":
        assert layer.cosine(one, 5, CPU) > limit


@torch.no_grad()
def test_a_gate_apart(monkeypatch):
    """Check that the variant "gate apart" calls one op more than the other variants with one row, and the same ops with
    several rows."""
    one, apart = (cls(SMALL, CPU, 3, inductor=False) for cls in (layer.W4A16, layer.GateApart))
    apart.norms, gates = one.norms, []
    for each in (one, apart):
        monkeypatch.setattr(each, "gate", lambda rows, each=each: gates.append(each) or layer.gate(rows))
    for rows, expected in ((1, [apart]), (2, [one, apart])):
        x, residual = (torch.randn(rows, 128, dtype=torch.bfloat16) for _ in range(2))
        results = [each(x, residual.clone()).double().flatten() for each in (one, apart)]
        assert F.cosine_similarity(*results, 0) > 0.9999
        assert gates == expected
        gates.clear()


def test_bytes():
    """Compare `element_bytes` with the size of weights and scales in memory."""
    assert SMALL.weights == 320 * 128 + 128 * 256 + 384 * 128 + 128 * 192
    wide = layer.Widths(256, 512, 256, 256)
    for label, cls in layer.PRECISIONS.items():
        held = sum(
            tensor.nbytes
            for linear in cls(wide, CPU, 0, inductor=False).linears.values()
            for name, tensor in {**dict(linear.named_parameters()), **dict(linear.named_buffers())}.items()
            if name in ("weight", "weight_scale", "weight_scale_inv")
        )
        assert held == pytest.approx(wide.weights * cls.element_bytes, rel=1e-6), label


def recorded(replay):
    """Return a recorded profile: kernels of 8 µs with gaps of 2 µs, and one long kernel that the next two overlap."""
    replay()
    kernels = [timeline.Kernel(f"kernel {i % 3}", 10.0 * i, 10.0 * i + 8) for i in range(24)]
    return [kernel._replace(end=kernel.end + 20) if i == 12 else kernel for i, kernel in enumerate(kernels)]


@pytest.fixture
def made_up(monkeypatch, fake_backend, tmp_path):
    """Measure two models on a simulated device whose calls take 10, 4, 5, 3 and 2 µs."""
    monkeypatch.setattr(layer, "MODELS", {"8B": SMALL, "70B": SMALL})
    monkeypatch.setattr(timeline, "recorded", recorded)
    monkeypatch.setattr(layer, "ceilings", lambda *_: measurements.Ceilings(1.0, read_tbps=2.0))
    monkeypatch.setattr(layer.environment, "collect", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(layer.environment, "headline", lambda found: found["gpu"])
    monkeypatch.setattr(layer, "Settings", lambda: measurements.Settings(graph_ms=0.01, budget_ms=0.1))
    options = argparse.Namespace(
        models=["8B", "70B"],
        rows=[1, 64],
        precisions=list(layer.PRECISIONS),
        output=tmp_path,
        no_plot=True,
        timeline=True,
    )
    assert layer.measure_models(options, CPU, fake_backend([10.0, 4.0, 5.0, 3.0, 2.0]), l2_bytes=100_000) == 0
    return tmp_path


def test_results(made_up, capsys):
    result = json.loads((made_up / "layer.json").read_text())
    assert [(row["model"], row["rows"]) for row in result["rows"]] == [("8B", 1), ("8B", 64), ("70B", 1), ("70B", 64)]
    times = {label: each["us"] for label, each in result["rows"][1]["variants"].items()}
    assert times == pytest.approx({"bf16": 10, "W4A16": 4, "W4A4": 5, "W4A8": 3, "FP8": 2})
    assert result["rows"][0]["layers"] > 1 and not any(row["absent"] for row in result["rows"])
    floor = SMALL.weights * 0.5625 / 2e12 * 1e6
    assert result["rows"][0]["variants"]["W4A4"]["floor"] == pytest.approx(floor)
    text = (made_up / "layer.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0] == ["rows", "bf16", "W4A16", "W4A4", "W4A8", "FP8"]
    assert rows[3] == ["1", "10.0", "4.00", "5.00", "3.00", "2.00"] and rows[2][3] == report.number(floor)
    assert rows[5][:2] == ["cosine", "–"] and all(0.9 < float(cell) <= 1 for cell in rows[5][2:])


def test_timelines(made_up, capsys):
    """Check the timeline of a middle layer, in a profile of four layers with six kernels each. Times are relative to
    the start of this layer."""
    row = json.loads((made_up / "layer.json").read_text())["rows"][0]
    assert row["layers"] == 4 and set(row["timelines"]) == set(layer.PRECISIONS)
    ran = row["timelines"]["W4A8"]
    assert ran[0] == ["kernel 2", -10, -2] and ran[1] == ["kernel 0", 0, 28] and ran[-1] == ["kernel 2", 50, 58]


def test_a_timeline():
    """Check the times, the gaps and the shortened kernel names of a repetition in the middle of a profile."""
    ours = "kernel_cutlass_kernel_torch_cute_opskernelsfp4_wgmmakernelFP4WgmmaKernel_object_at__tensorptri8_0"
    assert timeline.short(ours) == "fp4_wgmma"
    assert timeline.short("void at::native::vectorized<4, at::add<float> >(int, float)") == "at::native::vectorized"
    ran = timeline.one_of(recorded(lambda: None), 4)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in timeline.table(ran).splitlines()]
    assert lines[0] == ["kernel", "start µs", "end µs", "gap µs"]
    starts, ends, gaps = zip(*(line[1:] for line in lines[2:]), strict=True)
    assert starts == ("0.00", "10.00", "20.00", "30.00", "40.00", "50.00")
    assert ends == ("28.00", "18.00", "28.00", "38.00", "48.00", "58.00")
    assert gaps == ("2.00", "-18.00", "-8.00", "2.00", "2.00", "2.00")
    for count, layers in ((24, 5), (0, 2), (24, 1)):
        with pytest.raises(ValueError, match=f"^{count} kernels do not divide into {layers} equal layers$"):
            timeline.one_of(recorded(lambda: None)[:count], layers)


@pytest.mark.gpu
def test_the_profiler_sees_what_a_replay_runs():
    x = torch.ones(1 << 20, device="cuda")
    replay = measurements.CudaGraphs().capture(lambda i: x.mul_(1.0).add_(float(i)), 2, 4)
    ran = timeline.one_of(timeline.recorded(replay), 4)
    assert len(ran) == 3 and all(kernel.start < kernel.end for kernel in ran) and ran[1].start == 0 < ran[2].start
