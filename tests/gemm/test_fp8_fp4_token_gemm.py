"""The Hopper backend for FP8 activations with per-token scales and an FP4 weight: tactics, operands, repeated calls."""

from dataclasses import replace

import pytest
import torch
from samples import Sample, grouped_mm_fp8_fp4, mm_fp8_fp4
from samples._fp8_fp4_tokens import with_tokens
from support.gemm_problems import BF16, FP16, FP32, HOPPER, backend_for
from support.launch_model import launches  # noqa: F401  (a fixture)
from support.tactics import check_every_tactic

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.formats.experts import used_rows
from torch_cute_ops.gemm.select import target_of
from torch_cute_ops.gemm.tune import estimates
from torch_cute_ops.kernels.fp8_fp4_token_wgmma import FAST_TILE_M
from torch_cute_ops.registry import OPS

CPU = torch.device("cpu")


def samples(device: torch.device, m: int = 9, k: int = 576, **given) -> list[tuple[str, Sample]]:
    """Return calls of both ops whose results are exact, in both formats and in every layout of rows. In every second
    call, k of the activations is interleaved; in two of three calls, the scales of the weight are prepared."""
    calls = []
    for fmt, layout in ((NVFP4, "128x4"), (MXFP4, "linear")):
        counts, n, how = [m, 0, 2 * m], 136, {"exact": True, **given}
        calls += [
            mm_fp8_fp4.sample("plain", m, n, k, fmt, layout, device, **how),
            grouped_mm_fp8_fp4.contiguous("spaced", fmt, layout, counts, n, k, device, spare=5, **how),
            grouped_mm_fp8_fp4.contiguous("packed", fmt, layout, counts, n, k, device, counted=False, **how),
            grouped_mm_fp8_fp4.masked("masked", fmt, layout, counts, 2 * m + 3, n, k, device, **how),
        ]
    made = (
        with_tokens(one, exact=True, prepared=i % 3 > 0, interleaved=i % 2 == 0, one_a_scale=i % 3 == 1)
        for i, one in enumerate(calls)
    )
    return [("mm_fp8_fp4" if one.name.endswith("plain") else "grouped_mm_fp8_fp4", one) for one in made]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("backend", ["wgmma", "recode", "mma_sync"])
def test_repeated_calls(backend: str) -> None:
    """Check that a call passes its operands to the kernels in the form that the kernels expect, and that a repeated
    call, which passes its tensors to the compiled function without checks, gives the same result as the first."""
    for op, one in samples(CPU):
        want = OPS[op].reference(*one.args, **one.kwargs)
        kwargs = {**one.kwargs, "backend": backend}
        call = OPS[op].bind(*one.args, **kwargs)
        used = torch.ones(want.shape[:-1], dtype=torch.bool)
        if op == "grouped_mm_fp8_fp4":
            used = used_rows(used.numel(), call.offsets, call.counts).view(used.shape)
        for _ in range(2):
            got = OPS[op].cuda(*one.args, **kwargs)
            assert torch.equal(got[used], want[used]), one.name


def test_groups_of_k_are_compared(launches) -> None:  # noqa: F811
    """Check that a call launches no kernel and is refused if activations and weight differ in the number of groups of
    256 elements, even if a launcher for the right number exists."""
    for op, one in [each for each in samples(CPU, k=256) if "interleaved" in each[1].name]:
        kwargs = {**one.kwargs, "backend": "wgmma"}
        OPS[op].cuda(*one.args, **kwargs)
        a, *rest = one.args
        count = len(launches.calls)
        with pytest.raises(ValueError, match=r"interleaved rows of K = 256"):
            OPS[op].cuda(torch.cat((a, a), -2), *rest, **kwargs)
        assert len(launches.calls) == count


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("backend", ["wgmma", "mma_sync"])
def test_signs_of_scales_move_to_the_codes(backend: str) -> None:
    """Check calls with negative scales, which prepared scales cannot represent."""
    one = with_tokens(mm_fp8_fp4.sample("", 9, 136, 576, NVFP4, "128x4", CPU, exact=True), exact=True)
    a, b, a_scale, b_scale = one.args
    signs = (torch.randint(2, b_scale.shape) * 0x80).to(torch.uint8)
    b_scale = (b_scale.view(torch.uint8) | signs).view(b_scale.dtype)
    want = OPS["mm_fp8_fp4"].reference(a, b, a_scale, b_scale, **one.kwargs)
    got = OPS["mm_fp8_fp4"].cuda(a, b, a_scale, b_scale, **one.kwargs, backend=backend)
    assert torch.equal(got, want)


def test_tactics() -> None:
    """Check that tactics cover all tiles that fit the rows, that large tiles are offered only with ``fast_accum``, and
    that an interleaving launch costs time."""
    for fast_accum in (False, True):
        one = mm_fp8_fp4.sample("", 9, 4096, 4096, NVFP4, "128x4", CPU, fast_accum=fast_accum)
        one = with_tokens(one, prepared=True)
        problem = OPS["mm_fp8_fp4"].path.problem(OPS["mm_fp8_fp4"].bind(*one.args, **one.kwargs))
        backend = backend_for("wgmma", problem)
        assert {tactic.tile_m for tactic in backend.tactics(problem, 9, HOPPER)} == {8, 16}
        many = {tactic.tile_m for tactic in backend.tactics(problem, 4096, HOPPER)}
        assert many == {8, 16, 32, 64, 128} | ({FAST_TILE_M} if fast_accum else set())
        for m in (1, 64, 300, 4096):
            best = min(backend.tactics(problem, m, HOPPER), key=lambda one: backend.estimate(problem, m, one, HOPPER))
            arranged = replace(problem, a=replace(problem.a, is_interleaved=True))
            assert backend.estimate(problem, m, best, HOPPER) > backend.estimate(arranged, m, best, HOPPER)
            (multiply,) = backend.kernels(arranged, best, HOPPER.arch)
            _, second = backend.kernels(problem, best, HOPPER.arch)
            # The previous launch only interleaves k, so the weight is static.
            assert second.config == replace(multiply.config, static_weight=best.tile_m <= 64)
            # The previous launch prepares the scales, so the weight is not static, whatever the caller promises.
            promised = replace(arranged, static_weight=True)
            given = replace(promised, b=replace(problem.b, is_prepared=False, scale_layout=SCALE_LAYOUTS["linear"]))
            kernels = [backend.kernels(each, best, HOPPER.arch)[0].config for each in (promised, given)]
            assert [config.static_weight for config in kernels] == [best.tile_m <= 64, False]
            assert backend.estimate(given, m, best, HOPPER) > backend.estimate(promised, m, best, HOPPER)


def test_recoding_is_chosen_for_many_rows() -> None:
    """Check that a weight is recoded for many rows only, and never with ``fast_accum``."""
    for fast_accum in (False, True):
        one = mm_fp8_fp4.sample("", 9, 8192, 8192, MXFP4, "128x4", CPU, fast_accum=fast_accum)
        one = with_tokens(one, prepared=True, interleaved=True)
        problem = OPS["mm_fp8_fp4"].path.problem(OPS["mm_fp8_fp4"].bind(*one.args, **one.kwargs))
        every = {m: estimates(problem, m, HOPPER) for m in (64, 4096)}
        chosen = {m: min(seconds, key=seconds.get) for m, seconds in every.items()}
        assert chosen[64].backend == "wgmma" and chosen[4096].backend == ("wgmma" if fast_accum else "recode")
        reason = backend_for("recode", problem).reason_unsupported(problem, HOPPER)
        assert (reason is None) is not fast_accum


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("first", "m", "k", "given"),
    [
        (0, 1, 192, {"out_dtype": BF16}),
        (1, 9, 448, {"out_dtype": FP16, "fast_accum": True}),
        (2, 33, 1088, {"out_dtype": FP32}),
        (3, 70, 2880, {"out_dtype": BF16, "fast_accum": True}),
        (0, 300, 1600, {"out_dtype": FP32, "fast_accum": True}),
        (1, 300, 1088, {"out_dtype": BF16}),
        (3, 600, 1088, {"out_dtype": BF16, "fast_accum": True}),
    ],
)
def test_every_tactic(first: int, m: int, k: int, given: dict) -> None:
    """Use inputs whose sums are exact, and check that every tactic overwrites the poisoned output with exactly these
    sums.

    Each test runs every fourth call, from number ``first`` on, because a test of all calls would compile 200 kernels.
    """
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    for op, one in samples(target.device, m, k, **given)[first::4]:
        for backend in ("wgmma",) if given.get("fast_accum") else ("wgmma", "recode"):
            check_every_tactic(OPS[op], backend, one, {}, target)


@pytest.mark.gpu
def test_clusters_with_several_tiles() -> None:
    """Run a cluster over several tiles on few SMs. A CTA must send the partial sums of a tile only after the partial
    sums of the previous tile were read."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    if not target.arch.has_wgmma:
        pytest.skip("needs Hopper's warpgroup MMA")
    one = mm_fp8_fp4.sample("", 40, 1032, 1408, NVFP4, "128x4", target.device, exact=True)
    one = with_tokens(one, exact=True, prepared=True, interleaved=True)
    for _ in range(10):
        check_every_tactic(OPS["mm_fp8_fp4"], "wgmma", one, {}, replace(target, sms=6))
