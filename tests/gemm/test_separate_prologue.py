"""GEMMs whose prologue is a gate or a quantisation, in one launch or two: tactics, kernels, and calls on the launch
model."""

import importlib
from dataclasses import replace
from typing import get_args

import pytest
import torch
from support.cases import arguments, expected_of, named
from support.gemm_problems import BF16, FP16, H100, HOPPER, fp4_problem
from support.launch_model import Launches, launches  # noqa: F401  (a fixture)

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.gemm import select
from torch_cute_ops.gemm.backends.fp4_wgmma import WgmmaTactic
from torch_cute_ops.gemm.backends.separate_prologue import SEPARATE, SeparatePrologue
from torch_cute_ops.gemm.cost import usual_targets
from torch_cute_ops.gemm.decode import fp4_operands
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

GATE, QUANTISE, BOTH = "silu_mul_mm_fp4_weight_only", "fp4quant_mm_fp4", "silu_mul_fp4quant_mm_fp4"
by_op = pytest.mark.parametrize("name", [GATE, QUANTISE, BOTH])


def made(name, *sizes, quantises="scaled", gate="silu", **kwargs):
    """Return the problem of an op's call with these sizes."""
    problem = fp4_problem(*sizes, a_dtype=kwargs.pop("a_dtype", BF16), **kwargs)
    quantises = None if name == GATE else quantises
    return replace(problem, prologue_gate=None if name == QUANTISE else gate, prologue_quant=quantises)


def behind(name, *sizes, **kwargs):
    """Return the problem of the plain GEMM that would follow a separate prologue."""
    a_dtype = kwargs.pop("a_dtype", BF16)
    return fp4_problem(*sizes, a_dtype=a_dtype if name == GATE else None, **kwargs)


@by_op
def test_bytes(name):
    """Check that the bytes moved include the activations that the call reads, which the prologue has not yet gated or
    quantised: 16-bit rows, of gate and up if the op has a gate."""
    problem, weight_only = made(name, 4096, 14336), fp4_problem(4096, 14336, a_dtype=BF16)
    assert problem.bytes_moved(8) == weight_only.bytes_moved(8) + 8 * 14336 * 2 * (name != QUANTISE)
    assert problem.flops(8) == weight_only.flops(8)
    assert problem.has_prologue and problem.without_prologue == behind(name, 4096, 14336)
    assert not problem.without_prologue.has_prologue


@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 8, 64, 4096])
def test_tactics(name, fmt, m):
    """Check the tactics with one launch, and the tactics with a separate prologue.

    A separate prologue is offered with each tactic of the plain GEMM; its launch is added to the estimate. On Hopper
    one launch is offered, too: with a gate alone for each tactic, and with a quantisation for tiles of up to 8 rows.
    """
    kind = {"quantises": "plain"} if fmt == MXFP4 else {}
    problem, alone = made(name, 4096, 14336, fmt=fmt, **kind), behind(name, 4096, 14336, fmt=fmt)
    backends, own_backends = select.candidates(problem), select.candidates(alone)
    assert [*backends] == [*own_backends] and all(isinstance(each, SeparatePrologue) for each in backends.values())
    for which, backend in own_backends.items():
        if backend.reason_unsupported(alone, HOPPER) is not None or which == "reference":
            continue
        own = backend.tactics(alone, m, HOPPER)
        apart = tuple((SEPARATE, *tactic) for tactic in own)
        one = []
        if which == "wgmma":
            one = [tactic for tactic in own if name == GATE or (m <= 8 and tactic.tile_m <= 8 and tactic.split_k > 0)]
            assert bool(one) == (name == GATE or m <= 8)
        assert backends[which].tactics(problem, m, HOPPER) == (*one, *apart)
        for tactic in own:
            two = backends[which].estimate(problem, m, (SEPARATE, *tactic), HOPPER)
            assert two > backend.estimate(alone, m, tactic, HOPPER) + 1.9e-6
    choice = select.choose(problem, m, HOPPER)
    if m == 1 and fmt == NVFP4:
        assert choice.backend.name == "wgmma" and SEPARATE not in choice.tactic
    elif name != GATE and m > 8:
        assert choice.tactic == (SEPARATE, *select.choose(alone, m, HOPPER).tactic)
    assert select.choose(alone, m, HOPPER).backend.name == choice.backend.name


def test_choice_of_a_fused_prologue():
    """Check that a prologue is fused where measurements in a layer showed fusing to be faster.

    For one row the gate is fused on H100 and H200. For 8 rows of 14,336 elements the gate is fused only on an H100,
    whose memory is slower. For 8 rows of 4,096 elements the quantisation is fused on both.
    """

    def is_apart(name, k, m, target):
        return SEPARATE in select.choose(made(name, 4096, k, quantises="plain", alpha="one"), m, target).tactic

    for name in (GATE, BOTH):
        assert not is_apart(name, 14336, 1, HOPPER) and not is_apart(name, 14336, 1, H100)
    assert is_apart(GATE, 14336, 8, HOPPER) and not is_apart(GATE, 14336, 8, H100)
    assert not is_apart(QUANTISE, 4096, 8, HOPPER) and not is_apart(QUANTISE, 4096, 8, H100)


@by_op
@pytest.mark.parametrize("arch", [arch for arch in ARCHS.values() if not arch.has_wgmma], ids=lambda arch: arch.name)
def test_other_gpus_have_two_launches(name, arch):
    (target,) = usual_targets(arch)[:1]
    problem = made(name, 4096, 14336)
    for m in (1, 4096):
        choice = select.choose(problem, m, target)
        assert choice.tactic[0] == SEPARATE and not choice.backend.checks_operands(problem, choice.tactic)


@pytest.mark.parametrize(
    ("name", "dtype", "given"),
    [
        (GATE, BF16, {}),
        (GATE, FP16, {"block_size": 32}),
        (GATE, BF16, {"gate": "gelu_tanh"}),
        (GATE, FP16, {"gate": "relu2"}),
        (QUANTISE, BF16, {}),
        (QUANTISE, FP16, {"global_scale": torch.ones(1, device="meta"), "scale_layout": "linear"}),
        (QUANTISE, FP16, {"block_size": 32}),
        (BOTH, BF16, {"global_scale": torch.ones(1, device="meta")}),
        (BOTH, FP16, {"scale_layout": "linear"}),
        (BOTH, BF16, {"block_size": 32}),
        (BOTH, BF16, {"gate": "gelu"}),
    ],
)
def test_kernels(name, dtype, given):
    """Check which kernels calls with one launch and with two launches use.

    The first of two launches runs the kernel of the prologue's op, the second the kernel of the plain GEMM. A single
    launch runs a kernel that differs from the plain GEMM's kernel only in its operands.
    """
    arch, op, rows = HOPPER.arch, OPS[name], 8 if name == GATE else 1
    kwargs = op.path.example(
        n=4096, k=1024, m=rows, dtype=dtype, device="meta", **scale_given(given), **without_scale(given)
    )
    problem = op.path.problem(op.bind(**kwargs))
    backend = select.candidates(problem)["wgmma"]
    maker = OPS[{GATE: "silu_mul", QUANTISE: "fp4_quantize", BOTH: "silu_mul_fp4quant"}[name]]
    a = torch.empty(rows, 1024 * (1 + (name != QUANTISE)), dtype=dtype, device="meta")
    (making,) = maker.kernels(arch, a, **({k: v for k, v in given.items() if k == "gate"} if name == GATE else given))
    tactic = WgmmaTactic(8, 256, 4) if name == GATE or "block_size" in given else WgmmaTactic(1, 208, 4)
    first, second = backend.kernels(problem, (SEPARATE, *tactic), arch)
    assert first == making
    assert (second,) == select.candidates(problem.without_prologue)["wgmma"].kernels(
        problem.without_prologue, tactic, arch
    )
    assert not backend.checks_operands(problem, (SEPARATE, *tactic))
    if name != GATE and "block_size" in given:
        return  # MXFP4 supports no tiles of one row
    (one,) = backend.kernels(problem, tactic, arch)
    operands = one.config.operands
    assert (operands.prologue_gate, operands.prologue_quant) == (problem.prologue_gate, problem.prologue_quant)
    assert operands.prologue_gate == (None if name == QUANTISE else given.get("gate", "silu"))
    assert (operands.a_dtype, operands.a_layout) == (dtype, None)
    assert replace(one.config, operands=fp4_operands(problem.without_prologue)) == second.config
    assert backend.checks_operands(problem, tactic)


def scale_given(given):
    """Return the static property of a call with a global scale, or an empty dict if the call lacks one."""
    return {"global_scale": True} if "global_scale" in given else {}


def without_scale(given):
    return {name: value for name, value in given.items() if name != "global_scale"}


@by_op
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 5, 12])
@pytest.mark.parametrize("backend", ["auto", "mma_sync", "cublas"])
def test_calls(name, fmt, m, backend, launches: Launches):  # noqa: F811
    """Check the launches of calls, including calls with strided rows, and that wrong calls launch nothing."""
    op = OPS[name]
    decoding = ["FP4DequantKernel"] * (name != GATE)  # a kernel that decodes FP4 activations
    kernels = {
        "auto": ["FP4WgmmaKernel"],
        "mma_sync": [*decoding, "FP4MmaKernel"],
        "cublas": [*decoding, "FP4DequantKernel"],
    }[backend]
    if backend != "auto" or (name != GATE and m > 8):
        kernels = ["RowQuantKernel", *kernels]
    scales = [torch.full(shape, 3.0) for shape in ((1,), (), (1, 1))] if name != GATE and fmt == NVFP4 else []
    for dtype in (BF16, FP16):
        given = arguments(op, sample_of(name, m, 136, 512, fmt, dtype=dtype, backend=backend))
        a = given["a"]
        wide = torch.cat((a, a), 1)[:, : a.shape[1]]
        some = [{"a": a}, {"a": a}, {"a": wide}, *({"global_scale": scale} for scale in scales)]
        for changes in some:
            launches.calls.clear()
            call = {**given, **changes}
            expected = expected_of(op).results(call)
            expected_of(op).assert_results((op.cuda(**call),), expected, call)
            assert [type(kernel).__name__ for kernel, _ in launches.calls] == kernels
        launches.calls.clear()
        text = rf"got a with shape \({m}, 256\); expected \({m}, {a.shape[1]}\), "
        with pytest.raises(ValueError, match=text + ("the 512" if name == QUANTISE else "gate and up for each of")):
            op.cuda(**{**given, "a": a[:, :256]})
        assert not launches.calls


@pytest.mark.parametrize("name", [GATE, BOTH])
@pytest.mark.parametrize(("backend", "count"), [("wgmma", 1), ("mma_sync", 2)])
@pytest.mark.parametrize("m", [1, 5])
def test_gates(name, backend, count, m, launches: Launches):  # noqa: F811
    """Check that calls that differ only in the gate launch their own kernels, as many as with SiLU, and give the result
    of the two separate ops."""
    op, kernels, results = OPS[name], {}, []
    given = arguments(op, sample_of(name, m, 136, 512, NVFP4, backend=backend))
    for gate in (*get_args(Gate), "silu"):
        launches.calls.clear()
        call = {**given, "gate": gate}
        results.append(op.cuda(**call))
        expected_of(op).assert_results(results[-1:], expected_of(op).results(call), call)
        first, *_ = (kernel for kernel, _ in launches.calls)
        assert len(launches.calls) == count + (backend == "mma_sync" and name == BOTH)  # FP4 activations are decoded
        own = first.config.operands.prologue_gate if count == 1 else first.config.spec.gate
        assert own == gate
        assert kernels.setdefault(gate, first.config) == first.config
    assert len({*kernels.values()}) == 4
    assert torch.equal(results[0], results[-1])
    assert all(not torch.equal(results[0], each) for each in results[1:-1])


def sample_of(name, m, n, k, fmt, layout="128x4", device="cpu", **kwargs):
    """Return a call of an op."""
    samples = importlib.import_module(f"samples.{name}").SAMPLES
    return samples.sample("", m, n, k, fmt, layout, torch.device(device), **kwargs)


@pytest.mark.parametrize(
    ("name", "scaled"), [(GATE, False), (QUANTISE, False), (QUANTISE, True), (BOTH, False), (BOTH, True)]
)
def test_an_example_is_a_call(name, scaled):
    """Check that the example call that ``warmup`` makes contains gate and up, and a global scale if requested."""
    op, own = OPS[name], {"global_scale": True} if scaled else {}
    kwargs = op.path.example(n=48, k=192, m=3, dtype=FP16, device="cpu", **own)
    given = arguments(op, named(op, kwargs))
    assert given["a"].shape == (3, 192 if name == QUANTISE else 384) and given["a"].dtype == FP16
    assert (given.get("global_scale") is not None) == scaled
    out = op.function(**given)
    assert out.shape == (3, 48) and out.dtype == FP16
    shown = op.path.properties(op.bind(**kwargs))
    assert shown["k"] == 192 and shown.get("global_scale", False) == scaled
    assert ("global_scale" in op.path.statics) == ("global_scale" in shown) == (name != GATE)
