"""Debug mode, ``TORCH_CUTE_OPS_CHECK=1``: values are checked, and rows of every result are compared with the
reference."""

from __future__ import annotations

import inspect

import pytest
import torch
from samples import sample_inputs
from support.cases import arguments, copy_updated, op_cases, overload, with_usable_backend
from support.interpreters import forked, python_in_groups
from support.ranks import free_port

from torch_cute_ops import fp8_quantize
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.verification import Verifier

SAMPLES = 6


def results(op, sample, verifier):
    """Run the reference of a sample; return the call, copies of its updated arguments, and the outputs."""
    call = op.bind(**arguments(op, sample))
    old = verifier.before(call)
    return call, old, as_tuple(overload(op)(**arguments(op, sample)))


def corrupted(output: torch.Tensor) -> torch.Tensor:
    """Return an output with wrong numbers in all rows, as from a faulty kernel."""
    if output.dtype.itemsize == 1:
        return (output.view(torch.uint8) ^ 0x32).view(output.dtype)
    return output * 1.25 + 1 if output.is_floating_point() else output + 1


def is_in_range(op, sample) -> bool:
    """Return False for a sample whose values debug mode refuses: an ``alpha`` that is not finite, or indices that only
    a GPU accepts."""
    alpha = sample.kwargs.get("alpha")
    if isinstance(alpha, torch.Tensor) and not alpha.isfinite().all():
        return False
    try:
        op.path.check_values(op.bind(**arguments(op, sample)))
    except ValueError as error:
        assert "out of range" in str(error)
        return False
    return True


def some_samples(op, device):
    every = [each for each in sample_inputs(op.name, device) if each.args[0].numel() < 2**18 and is_in_range(op, each)]
    chosen = every[:: max(1, len(every) // SAMPLES)]
    chosen += [each for each in every if each.name == "interleaved-2x3x2880"]
    return [copy_updated(op, with_usable_backend(op, each, torch.device(device))) for each in chosen]


def is_refused(op, check) -> bool:
    try:
        check()
    except RuntimeError as error:
        assert f"cute::{op.name}: " in str(error) and "is wrong: " in str(error)
        return True
    return False


@pytest.mark.parametrize("op", op_cases())
def test_wrong_results_raise(op, device):
    """Check, for samples of all kinds, that correct results are accepted, and that wrong numbers in any output are
    refused."""
    verifier, refused = Verifier(op), set()
    for sample in some_samples(op, device):
        call, old, outputs = results(op, sample, verifier)
        verifier.after(call, old, outputs)
        for i, name in enumerate(op.outputs):
            wrong = (*outputs[:i], corrupted(outputs[i]), *outputs[i + 1 :])
            if is_refused(op, lambda wrong=wrong: verifier.after(call, old, wrong)):  # noqa: B023
                refused.add(name)
    assert refused == set(op.outputs)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["silu_mul_fp8quant", "moe_swiglu_fp8quant"])
def test_powers_of_two_next_to_a_boundary(name, rows):
    """Check that a scale of twice its value is accepted with the codes that belong to it, because a gate's rounding
    may decide between two powers of two, and that other codes or a scale of 0 are refused."""
    op, x = OPS[name], torch.randn(rows, 1024)
    named = {"granularity": "block128"} if name == "silu_mul_fp8quant" else {"offsets": torch.tensor([0, rows]).int()}
    call = op.bind(x, **named, scale_format="ue8m0")
    y, scale = (each.clone() for each in getattr(torch.ops.cute, name)(x, **named, scale_format="ue8m0"))
    verifier = Verifier(op)
    scale[0, 1] *= 2
    assert is_refused(op, lambda: verifier.after(call, {}, (y, scale)))
    y[0, 128:256] = (y[0, 128:256].float() / 2).to(y.dtype)
    verifier.after(call, {}, (y, scale))
    assert is_refused(op, lambda: verifier.after(call, {}, (y, torch.zeros_like(scale))))


def test_a_scale_of_zero_is_no_power_of_two():
    op, x = OPS["fp8_quantize"], torch.zeros(4, 256)
    named = {"granularity": "block128", "scale_format": "ue8m0"}
    y, scale = torch.ops.cute.fp8_quantize(x, **named)
    call, verifier = op.bind(x, **named), Verifier(op)
    verifier.after(call, {}, (y, scale))
    assert is_refused(op, lambda: verifier.after(call, {}, (y, torch.zeros_like(scale))))


@pytest.mark.parametrize("named", [{"subtract_mean": True}, {"bias": torch.randn(4096)}], ids=["mean", "bias"])
def test_terms_that_cancel(named):
    """Check that a norm in float64, rounded once to float32, is accepted although terms cancel in the reference, and
    that an error of 2⁻¹² of the largest element is refused."""
    op, weight = OPS["rmsnorm"], torch.rand(4096) + 0.5
    verifier = Verifier(op)
    for _ in range(5):
        x = torch.randn(4, 4096) + 1
        v = x.double() - (x.double().mean(1, keepdim=True) if "subtract_mean" in named else 0.0)
        exact = v / (v.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight + named.get("bias", 0.0)
        call = op.bind(x, weight, **named)
        verifier.after(call, {}, (exact.float(),))
        wrong = (exact + exact.abs().max() * 2**-12).float()
        assert is_refused(op, lambda wrong=wrong, call=call: verifier.after(call, {}, (wrong,)))


def test_errors_of_mxfp8_sums():
    """Check that results are refused if their error is twice as large as sums over 128 elements may have: an MMA step
    keeps 13 bits of each of its 33 terms, relative to the largest term, and 128 elements are four steps."""
    op, m, n, k = OPS["mm_fp8_block"], 4, 128, 256
    (a, a_scale), (b, b_scale) = (
        fp8_quantize(torch.randn(rows, k), granularity="block32", scale_layout="linear") for rows in (m, n)
    )
    call = op.bind(a, b.mT, a_scale, b_scale, out_dtype=torch.float32)
    out = torch.ops.cute.mm_fp8_block(a, b.mT, a_scale, b_scale, out_dtype=torch.float32)
    size = torch.ops.cute.mm_fp8_block(
        *(a.float().abs().to(a.dtype), b.float().abs().to(b.dtype).mT, a_scale, b_scale), out_dtype=torch.float32
    )
    verifier = Verifier(op)
    verifier.after(call, {}, (out + size * (33 * 2.0**-14),))
    assert is_refused(op, lambda: verifier.after(call, {}, (out + size * (2 * 4 * 33 * 2.0**-13),)))


@pytest.mark.gpu
@pytest.mark.parametrize("op", op_cases())
def test_wrong_kernels_raise(op, monkeypatch):
    """Check calls in debug mode: correct kernels pass, and a launcher whose output is changed raises."""
    path, refused = op.path, 0
    path.verifier = Verifier(op)
    with monkeypatch.context() as patch:
        for sample in some_samples(op, "cuda"):
            call = op.bind(**arguments(op, copy_updated(op, sample)))
            path.run_verified(None, None, *call)
            run = path.run

            def wrong(out, device, *values, run=run):
                outputs = as_tuple(run(out, device, *values))
                outputs = (corrupted(outputs[0]), *outputs[1:])
                return outputs[0] if path.is_single else outputs

            patch.setattr(path, "run", wrong)
            call = op.bind(**arguments(op, copy_updated(op, sample)))
            refused += is_refused(op, lambda call=call: path.run_verified(None, None, *call))
            patch.undo()
    assert refused
    del path.verifier


@pytest.mark.gpu
def test_a_capture_raises():
    op = OPS["rmsnorm"]
    x, weight = torch.randn(4, 256, device="cuda"), torch.ones(256, device="cuda")
    verifier, graph = Verifier(op), torch.cuda.CUDAGraph()
    text = "cute::rmsnorm: TORCH_CUTE_OPS_CHECK=1 reads values, and a CUDA graph is being captured"
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=text):
        verifier.before(op.bind(x, weight))


def test_values_are_checked():
    """Check that indices are checked on any device, and that global scales must be finite and positive."""
    wrong = torch.tensor([torch.inf])
    quantise = OPS["fp4_quantize"]
    for value in (torch.inf, torch.nan, 0.0, -1.0):
        with pytest.raises(ValueError, match=f"fp4_quantize: global_scale holds {value}; expected positive, finite"):
            Verifier(quantise).before(quantise.bind(torch.ones(2, 64), torch.tensor([value])))
    static = OPS["fp8_quantize"]
    with pytest.raises(ValueError, match="cute::fp8_quantize: scale holds nan; expected finite numbers"):
        Verifier(static).before(static.bind(torch.ones(2, 64), wrong * 0, "tensor"))
    multiply = OPS["mm_fp4_weight_only"]
    sample = arguments(multiply, next(iter(sample_inputs("mm_fp4_weight_only", "cpu"))))
    with pytest.raises(ValueError, match="cute::mm_fp4_weight_only: alpha holds inf; expected finite numbers"):
        Verifier(multiply).before(multiply.bind(**{**sample, "alpha": wrong}))
    route = OPS["moe_route_ids"]
    with pytest.raises(ValueError, match="ids holds 4, out of range"):
        Verifier(route).before(route.bind(torch.tensor([[4]], dtype=torch.int32), 4))


def test_the_setting():
    """Check that the setting installs the checks: a wrong result of a reference raises, and so does a wrong scale."""
    done = forked(
        "import torch, torch_cute_ops\n"
        "from torch_cute_ops.reference import rmsnorm\n"
        "x, weight, right, calls = torch.randn(9, 64), torch.ones(64), rmsnorm.rmsnorm, []\n"
        "torch_cute_ops.rmsnorm(x, weight, out=torch.empty_like(x))\n"
        "def wrong(**given):\n"
        "    calls.append(1)\n"
        "    return right(**given) * (1.5 if len(calls) == 1 else 1.0)\n"
        "rmsnorm.rmsnorm = wrong\n"
        "for call in (lambda: torch_cute_ops.rmsnorm(x, weight), lambda: torch_cute_ops.fp4_quantize(x, x.sum()/0)):\n"
        "    try: call()\n"
        "    except (RuntimeError, ValueError) as error: print(error)\n",
        TORCH_CUTE_OPS_CHECK="1",
    )
    assert "cute::rmsnorm: out is wrong: 256 of 256 compared elements differ" in done.stdout, done
    assert "cute::fp4_quantize: global_scale holds" in done.stdout


RANKS = """
import os, torch, torch.distributed as dist
import torch_cute_ops as tco
from torch_cute_ops.reference import all_reduce_add_rmsnorm as reference

rank, port = int(os.environ["RANK"]), os.environ["PORT"]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
group, weight = dist.group.WORLD.group_name, torch.ones(128)
right, calls = reference.sum_over_ranks, []

def lacks_a_rank(input, group):
    calls.append(1)
    total = right(input, group)
    return input if len(calls) == 1 and rank == 1 else total

def call(op):
    torch.manual_seed(rank)
    return getattr(tco, f"all_reduce_add_{op}")(torch.randn(9, 128), torch.zeros(9, 128), weight, group)

for _ in range(3 * rank):  # the ranks compare the same rows, although they made different calls before
    tco.rmsnorm(torch.randn(9, 128), weight)
for op in ("rmsnorm", "rmsnorm_fp4quant", "rmsnorm_fp8quant"):
    call(op)
reference.sum_over_ranks = lacks_a_rank
try:
    call("rmsnorm")
except RuntimeError as error:
    print(error)
call("rmsnorm")
dist.barrier()
print("done", len(calls))
"""


def test_the_setting_with_two_ranks():
    """Check ops that sum over ranks: correct calls pass, a rank whose sum is wrong raises, and the ranks' later calls
    match."""
    given = {"TORCH_CUTE_OPS_CHECK": "1", "PORT": str(free_port())}
    right, wrong = python_in_groups(RANKS, [{**given, "RANK": rank} for rank in "01"])
    assert right.stdout == "done 4\n", right
    assert wrong.stdout.startswith("cute::all_reduce_add_rmsnorm: out is wrong: 512 of 512 compared elements"), wrong
    assert wrong.stdout.endswith("done 4\n")


def test_nothing_is_added_without_the_setting():
    """Check that without the setting generated code calls the unchecked path, and that the module of the checks is not
    imported."""
    for op in OPS.values():
        op.generate()
        for function in (op.function, op.cuda, op.cuda_out, op.autograd, op.autograd_out):
            runs = inspect.getclosurevars(function).nonlocals.get("run")
            assert runs == op.path.run, op.name
    done = forked("import sys, torch_cute_ops; print('torch_cute_ops.verification' in sys.modules)")
    assert done.stdout.split() == ["False"]
