"""The benchmarks of FP8 GEMMs without a GPU: bytes, sizes, checks, marks."""

import sys
from types import SimpleNamespace

import pytest
import torch

import torch_cute_ops
from benchmarks import fp8_gemms, ops
from benchmarks.case import Case

CPU = torch.device("cpu")
OPS = ("mm_fp8_block", "grouped_mm_fp8")
SMALL = [
    ("mm_fp8_block", Case({"M": 5, "N": 136, "K": 256})),
    ("grouped_mm_fp8", Case({"M": 3, "N": 136, "K": 256, "E": 2}, choices={"layout": "contiguous"})),
    ("grouped_mm_fp8", Case({"M": 3, "N": 136, "K": 256, "E": 2}, choices={"layout": "masked"})),
    ("grouped_mm_fp8", Case({"M": 4, "N": 136, "K": 256, "E": 16}, choices={"layout": "routed"})),
]
WITH_FP4 = [
    ("mm_fp8_fp4", Case({"M": 5, "N": 136, "K": 256}, choices={"weight": "mxfp4"})),
    ("mm_fp8_fp4", Case({"M": 5, "N": 136, "K": 256}, choices={"weight": "nvfp4"})),
    *(("grouped_mm_fp8_fp4", Case(case.sizes, choices={**case.choices, "weight": "nvfp4"})) for _, case in SMALL[1:]),
]
by_small = pytest.mark.parametrize(("op", "case"), SMALL)
by_any = pytest.mark.parametrize(("op", "case"), SMALL + WITH_FP4)


@by_any
def test_the_formula_is_the_bytes_of_the_tensors(op, case):
    """Offsets and counts apart."""
    benchmark = ops.load(op)
    tensors = benchmark.make_set(case, CPU)
    padding = 0
    if tensors["b"].dtype == torch.uint8:  # of tiled scales
        block = benchmark.problem(case).b.format.block_size
        padding = tensors["b_scale"].nbytes - tensors["b"].nbytes * 2 // block
    moved = sum(t.nbytes for t in tensors.values() if t.dtype != torch.int32)
    assert benchmark.bytes_moved(case) == moved - padding


@by_any
def test_ours_passes_the_check_and_others_do_not(op, case):
    benchmark = ops.load(op)
    sets = [benchmark.make_set(case, CPU)]
    got = benchmark.ours(case, sets).call(0)
    expected = benchmark.expected(case, sets[0])
    assert benchmark.mismatch(got, expected) == 0.0
    wrong = got[0].clone()
    wrong.view(-1)[7] += wrong.abs().max()  # half as much again of a small number is within the noise
    assert 0 < benchmark.mismatch((wrong,), expected) < 0.01
    assert benchmark.mismatch((got[0].fill_(torch.nan),), expected) == 1.0


@pytest.mark.parametrize(("op", "case"), WITH_FP4)
def test_fp8_weights_beside_fp4_ones(op, case):
    """Their GEMM runs, moves twice the weight, and is not taken for the same."""
    benchmark = ops.load(op)
    sets = [benchmark.make_set(case, CPU)]
    other = benchmark.peer("fp8_weight", case, sets)
    assert not other.checked
    assert benchmark.mismatch(other.call(0), benchmark.expected(case, sets[0])) > 0.5
    n, k, experts = case["N"], case["K"], benchmark.problem(case).experts
    more = n * k // 2 - n * k // benchmark.problem(case).b.format.block_size + 4 * -(-n // 128) * (k // 128)
    assert other.bytes - benchmark.bytes_moved(case) == experts * more


class Humming(torch.nn.Module):
    """humming's layer of an MXFP4 weight, as far as the benchmark uses it, on a CPU."""

    def __init__(self, shape_n, shape_k, weight_config, torch_dtype, input_config=None, num_experts=None):
        super().__init__()
        assert weight_config == {"quant_method": "mxfp4"} and torch_dtype == torch.bfloat16
        assert input_config in (None, {"quant_method": "humming", "dtype": "float8e4m3", "group_size": 128})
        experts = () if num_experts is None else (num_experts,)
        self.shapes = {"weight": (*experts, shape_n, shape_k // 2), "weight_scale": (*experts, shape_n, shape_k // 32)}
        self.has_fp8, self.humming_config = input_config is not None, None

    def load_from_tensors(self, tensors):
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == self.shapes
        assert all(tensor.dtype == torch.uint8 for tensor in tensors.values())
        self.tensors = tensors

    def transform(self):
        weight, scale = self.tensors["weight"], self.tensors["weight_scale"]
        given = {"block_size": 32, "scale_layout": "linear", "out_dtype": torch.float32}
        self.weight, self.humming_config = torch_cute_ops.fp4_dequantize(weight, scale, **given).double(), self

    def forward(self, inputs, outputs, tuning_config, input_scale=None, expert_layout=None, compute_config=None):
        gemm_type = "dense" if compute_config is None else compute_config["gemm_type"]
        assert tuning_config == (len(inputs), gemm_type) and inputs.is_contiguous()
        assert (input_scale is not None) is self.has_fp8 is (inputs.dtype == torch.float8_e4m3fn)
        a = inputs.double()
        if self.has_fp8:
            assert input_scale.shape == (len(a), a.shape[1] // 128) and input_scale.is_contiguous()
            a = a * input_scale.double().repeat_interleave(128, 1)
        if gemm_type == "dense":
            outputs.copy_(a @ self.weight.t())
            return
        room = len(a) // len(self.weight)
        for expert, weight in enumerate(self.weight):
            if gemm_type == "grouped_masked":
                rows = slice(expert * room, expert * room + int(expert_layout[expert]))
            else:
                rows = slice(*expert_layout[expert : expert + 2].tolist())
            outputs[rows] = (a[rows] @ weight.t()).to(outputs.dtype)


@pytest.mark.parametrize(("op", "case"), WITH_FP4)
def test_humming_takes_the_same_weights(op, case, monkeypatch):
    """MXFP4 ones; with FP8 activations it computes the same, with those in bfloat16 nearly so."""
    tuning = SimpleNamespace(
        get_heuristics_config=lambda layer, shape_m, device, gemm_type="dense": (shape_m, gemm_type)
    )
    for name, made in {"": {}, ".layer": {"HummingLayer": Humming}, ".tune": vars(tuning)}.items():
        monkeypatch.setitem(sys.modules, f"humming{name}", SimpleNamespace(**made))
    benchmark = ops.load(op)
    nvfp4, case = case, Case(case.sizes, choices={**case.choices, "weight": "mxfp4"})
    sets = [benchmark.make_set(case, CPU) for _ in range(2)]
    expected = benchmark.expected(case, sets[1])
    w4a8, w4a16 = (benchmark.peer(name, case, sets) for name in ("humming_w4a8", "humming_w4a16"))
    assert w4a8.checked and benchmark.mismatch(w4a8.call(1), expected) == 0.0
    assert not w4a16.checked and w4a16.note
    (got,), (want,) = w4a16.call(1), expected
    assert torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), 0) > 0.9999
    rows = sets[0]["a"].shape[:-1].numel()
    assert w4a8.bytes == benchmark.bytes_moved(case)
    assert w4a16.bytes - w4a8.bytes == rows * (case["K"] - 4 * case["K"] // 128)
    if nvfp4.choices["weight"] == "nvfp4":
        assert "MXFP4" in benchmark.peer("humming_w4a8", nvfp4, [benchmark.make_set(nvfp4, CPU)])


def test_marks_of_fp4_weights():
    """Over our GEMMs with FP8 weights: the worst case counts."""

    def row(m, ours, fp8, **choices):
        variants = {"ours": {"us": ours}, "fp8_weight": {"us": fp8}}
        return {"sizes": {"M": m}, "choices": choices, "variants": variants}

    (mark,) = ops.load("mm_fp8_fp4").marks([row(2048, 10, 10), row(4096, 20, 18), row(64, 9, 1)])
    assert mark.value == pytest.approx(0.9) and not mark.passed
    rows = [
        row(16, 5, 10, layout="masked", weight="mxfp4"),
        row(1, 7, 10, layout="masked", weight="mxfp4"),
        row(1, 6, 10, layout="masked", weight="nvfp4"),
        row(1024, 10, 9.5, layout="contiguous", weight="nvfp4"),
    ]
    mxfp4, nvfp4, many = ops.load("grouped_mm_fp8_fp4").marks(rows)
    assert mxfp4.value == pytest.approx(0.7) and not mxfp4.passed
    assert nvfp4.value == pytest.approx(0.6) and nvfp4.passed
    assert many.value == pytest.approx(0.95) and many.passed


@by_small
def test_peers_that_do_not_run_say_why(op, case, monkeypatch):
    def absent(*args, **kwargs):
        raise RuntimeError("not here\nat all")

    for name in ("_scaled_mm", "_scaled_grouped_mm"):
        monkeypatch.setattr(torch, name, absent)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    benchmark = ops.load(op)
    sets = [benchmark.make_set(case, CPU)]
    reasons = {name: benchmark.peer(name, case, sets) for name in benchmark.peers}
    assert reasons.pop("deep_gemm").startswith("ModuleNotFoundError: ")
    assert set(reasons.values()) == {"RuntimeError: not here"}


class DeepGemm:
    """DeepGEMM's functions as its documentation has them, on a CPU."""

    def check(self, a, b, out):
        (codes, a_scale), (weight, b_scale) = a, b
        assert codes.is_contiguous() and weight.is_contiguous() and b_scale.is_contiguous() and out.is_contiguous()
        assert a_scale.shape == (*codes.shape[:-1], codes.shape[-1] // 128)
        # As its copies read them, without a change of layout before.
        assert a_scale.stride(-2) == 1 and a_scale.stride(-1) == -(-a_scale.shape[-2] // 4) * 4
        assert a_scale.dim() == 2 or a_scale.stride(0) == a_scale.stride(-1) * a_scale.shape[-1]

    def fp8_gemm_nt(self, a, b, out):
        self.check(a, b, out)
        out.copy_(fp8_gemms.decoded_gemm(a[0], b[0], a[1].t(), b[1]))

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, out, owners):
        self.check(a, b, out)
        assert owners.dtype == torch.int32 and owners.shape == out.shape[:1]
        for expert in range(len(b[0])):
            rows = owners == expert
            assert rows.sum() % 128 == 0
            codes = a[0].view(torch.uint8)[rows].view(a[0].dtype)
            out[rows] = fp8_gemms.decoded_gemm(codes, b[0][expert], a[1][rows].t(), b[1][expert])

    def fp8_m_grouped_gemm_nt_masked(self, a, b, out, counts, expected_rows):
        self.check(a, b, out)
        assert counts.dtype == torch.int32 and expected_rows == counts.max() and out.shape[1] % 128 == 0
        out.fill_(torch.nan)  # whole tiles are written
        for expert, count in enumerate(counts.tolist()):
            codes, scale = a[0][expert, :count], a[1][expert, :count]
            out[expert, :count] = fp8_gemms.decoded_gemm(codes, b[0][expert], scale.t(), b[1][expert])


def test_deep_gemm_computes_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm())
    few = ops.load("grouped_mm_fp8").case(2, 128, 136, 256)
    # With a multiple of four rows, scales by columns are as DeepGEMM reads them.
    plain = ("mm_fp8_block", Case({"M": 8, "N": 136, "K": 256}))
    full = ops.load("grouped_mm_fp8").case(2, 128, 136, 256, "masked")
    for op, case in (plain, ("grouped_mm_fp8", few), ("grouped_mm_fp8", full), ("grouped_mm_fp8", SMALL[2][1])):
        benchmark = ops.load(op)
        sets = [benchmark.make_set(case, CPU)]
        expected = benchmark.expected(case, sets[0])
        variant = benchmark.peer("deep_gemm", case, sets)
        assert variant.checked and benchmark.mismatch(variant.call(0), expected) == 0.0
    for op, case in (("mm_fp8_fp4", plain[1]), ("grouped_mm_fp8_fp4", full)):
        benchmark, case = ops.load(op), Case(case.sizes, choices={**case.choices, "weight": "mxfp4"})
        sets = [benchmark.make_set(case, CPU)]
        variant = benchmark.peer("deep_gemm", case, sets)  # with an FP8 weight of other numbers
        expected = benchmark.expected(case, sets[0])
        assert not variant.checked and variant.bytes == benchmark.peer("fp8_weight", case, sets).bytes
        (result,) = variant.call(0)
        assert result.isfinite().all() and benchmark.mismatch((result,), expected) > 0.5
    benchmark, case = ops.load("grouped_mm_fp8"), SMALL[1][1]
    reason = "ValueError: the number of an expert's rows is no multiple of 128"
    assert benchmark.peer("deep_gemm", case, [benchmark.make_set(case, CPU)]) == reason


@pytest.mark.parametrize("op", OPS)
def test_sizes(op):
    benchmark = ops.load(op)
    named = {sizes: {str(case) for case in benchmark.cases(sizes)} for sizes in ("marks", "quick", "full")}
    assert all(len(named[sizes]) == len(benchmark.cases(sizes)) for sizes in named)
    assert {case["K"] for case in benchmark.cases("marks")} == {7168, 2048}


def test_random_routing_gives_experts_unequal_rows():
    """64 tokens of 8 of 32 experts: as many rows as 16 for each, in the order of the experts; bytes of the experts with
    rows alone."""
    benchmark = ops.load("grouped_mm_fp8")
    assert "M=16 N=4096 K=7168 E=32 routed" in map(str, benchmark.cases("quick"))
    case = benchmark.case(32, 16, 136, 256, "routed")
    tensors = benchmark.make_set(case, CPU)
    counts = tensors["offsets"].diff()
    assert len(tensors["a"]) == counts.sum() == 32 * 16 and counts.min() < 16 < counts.max()
    few = benchmark.case(64, 1, 136, 256, "routed")
    used = int((benchmark.make_set(few, CPU)["offsets"].diff() > 0).sum())
    assert 8 < used < 64
    assert benchmark.bytes_moved(few) == 64 * (256 + 2 * 4 + 136 * 2) + used * (136 * 256 + 4 * 2 * 2)
    assert benchmark.flops(few) == 2 * 64 * 136 * 256


def row(case, **variants):
    return {"sizes": dict(case.sizes), "choices": dict(case.choices), "variants": variants}


def test_marks_of_the_plain_gemm():
    benchmark = ops.load("mm_fp8_block")
    large = benchmark.case(8192, 4096, 7168)
    few = benchmark.case(16, 4096, 7168)
    rows = [
        row(large, ours={"tflops": 1200.0}, rowwise={"tflops": 1250.0}, blockwise={"tflops": 1100.0}),
        row(few, ours={"tflops": 1.0}, rowwise={"tflops": 9.0}),
    ]
    rows[0]["variants"]["deep_gemm"] = {"tflops": 1500.0}
    got = [(mark.value, mark.passed) for mark in benchmark.marks(rows)]
    assert got == [(1200.0, True), (0.96, True), (1200 / 1100, True), (0.8, False)]
    assert [mark.value for mark in benchmark.marks(rows[1:])] == [None] * 4


def test_marks_of_the_grouped_gemm():
    benchmark = ops.load("grouped_mm_fp8")
    prefill, decode = benchmark.case(4, 8192, 4096, 7168), benchmark.case(32, 16, 4096, 7168, "masked")
    rows = [
        row(prefill, ours={"tflops": 1000.0}, scaled_grouped_mm={"tflops": 1250.0}, deep_gemm={"tflops": 1000.0}),
        row(decode, ours={"tflops": 9.0, "of_copy": 0.82}, scaled_grouped_mm={"tflops": 99.0}),
    ]
    marks = benchmark.marks(rows)
    assert [(mark.value, mark.passed) for mark in marks] == [(1000.0, False), (0.8, False), (1.0, True), (0.82, True)]


def test_the_expected_gemm_is_that_of_the_decoded_numbers():
    a, b = (fp8_gemms.codes(3, 256, CPU) for _ in range(2))
    a_scale, b_scale = fp8_gemms.scales(2, 3, device=CPU), fp8_gemms.scales(1, 2, device=CPU)
    want = sum(
        (a[:, at].double() * a_scale[i].double()[:, None]) @ (b[:, at].double() * b_scale[0, i].double()).t()
        for i, at in enumerate((slice(0, 128), slice(128, 256)))
    )
    assert torch.equal(fp8_gemms.decoded_gemm(a, b, a_scale, b_scale), want.bfloat16())
