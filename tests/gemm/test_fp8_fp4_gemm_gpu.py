"""GEMMs of FP8 activations and an FP4 weight on a GPU: every tactic of each backend."""

from dataclasses import replace

import pytest
import torch
from samples._epilogue import exact_epilogue
from samples._fp8_fp4 import scale_values
from samples.grouped_mm_fp8_fp4 import contiguous, masked
from samples.mm_fp8_fp4 import sample
from support.tactics import backend_for, check_every_tactic, operands_of, results

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm.backends.fp8_fp4_recode import RECODE_SMS
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.registry import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

N = 264


@pytest.fixture(scope="module")
def target():
    """Return the current GPU's target, or skip the test if the kernels do not support it."""
    found = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not found.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    return found


@pytest.mark.parametrize(
    ("name", "fmt", "layout", "m", "k", "epilogue"),
    [
        ("wgmma_ss", NVFP4, "128x4", 300, 576, True),
        ("wgmma_ss", MXFP4, "linear", 60, 2880, False),
        ("wgmma_ss", NVFP4, "linear", 76, 576, True),
        ("wgmma_ss", MXFP4, "128x4", 92, 2880, False),
        ("wgmma_ss", MXFP4, "linear", 200, 2880, True),
        ("wgmma_rs", NVFP4, "128x4", 60, 2880, True),
        ("wgmma_rs", NVFP4, "linear", 14, 576, False),
        ("wgmma_rs", NVFP4, "linear", 21, 2880, True),
        ("wgmma_codes", MXFP4, "128x4", 60, 2880, True),
        ("wgmma_codes", MXFP4, "linear", 14, 576, False),
        ("wgmma_codes", MXFP4, "linear", 21, 2880, True),
        ("recode", NVFP4, "128x4", 300, 2880, True),
        ("recode", NVFP4, "linear", 60, 576, False),
        ("recode", MXFP4, "128x4", 1, 128, False),
        ("recode", MXFP4, "linear", 300, 576, True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_tactic(name, fmt, layout, m, k, epilogue, target):
    """Use inputs whose sums are exact, and check that every tactic returns exactly these sums, without experts and with
    each layout of experts."""
    device, counts = target.device, [m, 0, m // 2 + 1]
    calls = {
        "mm_fp8_fp4": [sample("", m, N, k, fmt, layout, device, exact=True)],
        "grouped_mm_fp8_fp4": [
            contiguous("", fmt, layout, counts, N, k, device, exact=True),
            contiguous("", fmt, layout, counts, N, k, device, exact=True, counted=False),
            masked("", fmt, layout, counts, m + 3, N, k, device, exact=True),
        ],
    }
    for op, samples in calls.items():
        given = exact_epilogue(N, device, None if op == "mm_fp8_fp4" else 3) if epilogue else {}
        given = {**given, "out_dtype": torch.float32}
        for one in samples:
            check_every_tactic(OPS[op], name, one, given, target)


@pytest.mark.parametrize(
    ("name", "fmt", "m"),
    [
        ("wgmma_ss", NVFP4, 40),
        ("wgmma_ss", MXFP4, 20),
        ("wgmma_ss", NVFP4, 190),
        ("wgmma_rs", NVFP4, 9),
        ("wgmma_codes", MXFP4, 9),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_clusters_with_several_tiles(name, fmt, m, target):
    """Run a cluster over several tiles on few SMs. A CTA must send the partial sums of a tile only after the partial
    sums of the previous tile were read."""
    one = sample("", m, 1032, 1408, fmt, "128x4", target.device, exact=True)
    for _ in range(10):
        check_every_tactic(OPS["mm_fp8_fp4"], name, one, {"out_dtype": torch.float32}, replace(target, sms=6))


@pytest.mark.parametrize(("fmt", "layout"), [(NVFP4, "128x4"), (MXFP4, "linear")], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("is_hard", [False, True], ids=["exact", "hard"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_recoding_during_the_gemm(is_hard, fmt, layout, captured, target):
    """Check that results are equal whether most of the weight is re-encoded while the GEMM runs, or the whole weight is
    re-encoded before the GEMM.

    Each checked call follows a call with another weight, so that a GEMM that does not wait for a row would read old
    numbers. Another call, whose kernels may start early, follows each checked call. If ``is_hard``, the weight contains
    rows in which each k tile needs another exponent.
    """
    n, k, op = 24_584, 2112, OPS["mm_fp8_fp4"]
    weight = {"scales": (0, 0x7F)} if is_hard else None
    calls = []
    for _ in range(3):
        one = sample("", 2100, n, k, fmt, layout, target.device, exact=not is_hard, weight=weight)
        calls.append(op.bind(*one.args, **one.kwargs, out_dtype=torch.bfloat16))
    problem = op.path.problem(calls[0])
    backend = backend_for("recode", problem)
    tactics = backend.tactics(problem, bucket(2100), target)
    assert [tactic.recode_sms for tactic in tactics] == [0, *RECODE_SMS]
    launchers = {tactic: backend.launcher(problem, tactic, target) for tactic in tactics}
    outs = [torch.empty(2100, n, dtype=torch.bfloat16, device=target.device) for _ in calls]
    wants = [out.clone() for out in outs]
    for call, want in zip(calls, wants, strict=True):
        launchers[tactics[0]](operands_of(problem, call), want)
        torch.cuda.synchronize()
    for tactic in tactics[1:]:

        def run(tactic=tactic):
            for call, out in zip(calls, outs, strict=True):
                launchers[tactic](operands_of(problem, call), out)

        graph = torch.cuda.CUDAGraph()
        run()
        if captured:
            with torch.cuda.graph(graph):
                run()
        for _ in range(10):
            for out in outs:
                out.fill_(torch.nan)
            (graph.replay if captured else run)()
            for out, want in zip(outs, wants, strict=True):
                assert torch.equal(out.view(torch.int16), want.view(torch.int16))


def hard(device):
    """Return samples of many rows with scales that are hard to re-encode."""

    def make(name, fmt, layout, **weight):
        return sample(name, 140, 136, 2624, fmt, layout, device, weight=weight)

    return scale_values(make)


@pytest.mark.parametrize("name", [one.name for one in hard(torch.device("cpu"))])
def test_recoding_in_memory_or_in_the_gemm_gives_the_same(name, target):
    """Check that re-encoding in memory and inside the GEMM gives the same bits, for any numbers."""
    one = next(one for one in hard(target.device) if one.name == name)
    op, given = OPS["mm_fp8_fp4"], {"out_dtype": torch.float32}
    found = dict(results(op, "wgmma_ss", one, given, target))
    ((_, recoded),) = results(op, "recode", one, given, target)
    alone = {tactic: out for tactic, out in found.items() if tactic.split_k == 1}  # split-K adds in another order
    assert alone
    for tactic, out in alone.items():
        assert torch.equal(out.nan_to_num(7.5), recoded.nan_to_num(7.5)), tactic
        assert torch.equal(out.isnan(), recoded.isnan()), tactic
