"""Overlapping launches on a GPU: a GEMM may start before the previous launch ends, but must not read its weight before
the weight is complete."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import torch_cute_ops
from torch_cute_ops.nn import MXFP4Linear

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

N, K = 1024, 2048
COUNT, ROUNDS, FEW = 500, 200, 20
"""Chains per graph or eager round; graph replays, which is also the number of eager rounds for M = 1; and eager rounds
for larger M.

In total 100,000 captured chains run. Eagerly, 100,000 chains run for M = 1 and 10,000 chains for larger M. The host
takes 50 s for 100,000 eager chains if 30 processes share a GPU.
"""
E2M1 = (0, 1, 2, 3, 4, 6)
MXFP4_BLOCK = 32

Round = Callable[[int, torch.Tensor], None]
"""Function that computes the ``i``-th result of a chain into a tensor."""


def fp4_numbers(*shape: int) -> torch.Tensor:
    """Return random numbers that FP4 represents exactly with block scales of 1."""
    magnitudes = torch.tensor(E2M1, device="cuda")[torch.randint(0, len(E2M1), shape, device="cuda")]
    numbers = magnitudes * (torch.randint(0, 2, shape, device="cuda") * 2 - 1)
    numbers[..., ::16] = 6
    return numbers.bfloat16()


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, device="cuda").bfloat16()


def wants(activations: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the two expected results, which alternate. They are whole numbers, exact for any order of additions."""
    return torch.stack([(a.double() @ b.double().t()).float() for a, b in zip(activations, weights, strict=True)])


def check(one: Round, want: torch.Tensor) -> None:
    """Check, in graph replays and in eager calls, that every result was computed from its own weight and
    activations."""
    outs = torch.empty((COUNT, *want.shape[1:]), device="cuda")
    every = want.repeat(COUNT // 2, 1, 1)

    def run() -> None:
        for i, out in enumerate(outs):
            one(i % 2, out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for launch, rounds in ((graph.replay, ROUNDS), (run, ROUNDS if want.shape[1] == 1 else FEW)):
        for _ in range(rounds):
            outs.fill_(torch.nan)
            launch()
            wrong += (outs != every).any((1, 2)).sum()
    assert wrong.item() == 0


def fp4_chain(m: int, name: str, is_16_bit: bool, static: bool) -> tuple[Round, torch.Tensor]:
    """Return a chain of launches and its expected results. The launches quantise the weight and the activations, then
    multiply them.

    If the weight is static, the launch right before the GEMM quantises the activations, even if a 16-bit GEMM does not
    read the result. Otherwise the launch right before the GEMM writes the weight.
    """
    weights = [fp4_numbers(N, K) for _ in range(2)]
    rows = [whole_numbers(m, K) if is_16_bit else fp4_numbers(m, K) for _ in range(2)]
    b, b_scale = torch_cute_ops.fp4_quantize(weights[0])
    a, a_scale = torch_cute_ops.fp4_quantize(rows[0])
    given = {"backend": name, "static_weight": static, "out_dtype": torch.float32}

    def one(i: int, out: torch.Tensor) -> None:
        if not static and not is_16_bit:
            torch_cute_ops.fp4_quantize(rows[i], out=(a, a_scale))
        torch_cute_ops.fp4_quantize(weights[i], out=(b, b_scale))
        if static:
            torch_cute_ops.fp4_quantize(rows[i], out=(a, a_scale))
        if is_16_bit:
            torch_cute_ops.mm_fp4_weight_only(rows[i], b.t(), b_scale, out=out, **given)
        else:
            torch_cute_ops.mm_fp4(a, b.t(), a_scale, b_scale, out=out, **given)

    return one, wants(rows, weights)


def fp8_chain(
    m: int, name: str, is_fp4: bool, static: bool, granularity: str = "block128"
) -> tuple[Round, torch.Tensor]:
    """Return a chain as ``fp4_chain`` does, with FP8 activations whose scales are all 1.

    Each block of K contains a 448, so that its scale is 1. The weight is zero at these elements, so that they do not
    change the result.

    Args:
        granularity: granularity of the scales of the activations.
    """
    weights = [fp4_numbers(N, K) if is_fp4 else whole_numbers(N, K) for _ in range(2)]
    rows = [whole_numbers(m, K) for _ in range(2)]
    for weight, row in zip(weights, rows, strict=True):
        weight[:, 5::128], row[:, 5::128] = 0, 448
    one_scale = torch.ones(1, device="cuda")
    b_scale = torch.ones(N // 128, K // 128, device="cuda")
    quantise_weight = partial(torch_cute_ops.fp8_quantize, scale=one_scale, granularity="tensor")
    b, written = quantise_weight(weights[0])
    if is_fp4:
        # wgmma_codes supports only MXFP4
        block_size = MXFP4_BLOCK if name == "wgmma_codes" else 16
        quantise_weight = partial(torch_cute_ops.fp4_quantize, block_size=block_size)
        multiply = partial(torch_cute_ops.mm_fp8_fp4, block_size=block_size)
        b, written = quantise_weight(weights[0])
        b_scale = written
    elif granularity == "token":
        multiply, b_scale = torch_cute_ops.mm_fp8, one_scale
    else:
        multiply = torch_cute_ops.mm_fp8_block
    quantise = partial(torch_cute_ops.fp8_quantize, granularity=granularity)
    a, a_scale = quantise(rows[0])
    given = {"backend": name, "static_weight": static, "out_dtype": torch.float32}

    def one(i: int, out: torch.Tensor) -> None:
        if not static:
            quantise(rows[i], out=(a, a_scale))
        quantise_weight(weights[i], out=(b, written))
        if static:
            quantise(rows[i], out=(a, a_scale))
        multiply(a, b.t(), a_scale, b_scale, out=out, **given)

    return one, wants(rows, weights)


CHAINS = {
    "mm_fp4": partial(fp4_chain, is_16_bit=False),
    "mm_fp4_weight_only": partial(fp4_chain, is_16_bit=True),
    "mm_fp8": partial(fp8_chain, is_fp4=False, granularity="token"),
    "mm_fp8_block": partial(fp8_chain, is_fp4=False),
    "mm_fp8_fp4": partial(fp8_chain, is_fp4=True),
}
by_chain = pytest.mark.parametrize(
    ("op", "name", "m"),
    [
        (op, name, m)
        for op in CHAINS
        for name in ("wgmma", "wgmma_ss", "wgmma_codes", "wgmma_rs", "recode", "tcgen05", "mma_sync", "scaled_mm")
        for m in (1, 24, 100)
    ],
)


def chain_of(op: str, name: str, m: int, static: bool) -> tuple[Round, torch.Tensor]:
    given = {"block_size": MXFP4_BLOCK} if (op, name) == ("mm_fp8_fp4", "wgmma_codes") else {}
    reason = torch_cute_ops.backends(op, n=N, k=K, m=m, **given).get(name, "is none of its backends")
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return CHAINS[op](m, name, static=static)


@by_chain
def test_a_weight_that_the_launch_before_writes(op: str, name: str, m: int) -> None:
    """Check that the GEMM waits until the previous launch has written the weight."""
    check(*chain_of(op, name, m, static=False))


@by_chain
def test_a_static_weight_and_activations_that_the_launch_before_writes(op: str, name: str, m: int) -> None:
    """Check a static weight that is written two launches before the GEMM, the latest time that ``static_weight``
    permits, with activations written by the previous launch."""
    check(*chain_of(op, name, m, static=True))


def test_a_layer_that_has_just_been_quantised() -> None:
    """Check that the first forward of a layer that has just been quantised reads the complete weight."""
    linears = [torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for linear in linears:
        linear.weight.data.copy_(fp4_numbers(N, K))
    x = whole_numbers(4, K)
    with torch.no_grad():
        want = wants([x] * 2, [linear.weight for linear in linears]).bfloat16()
        for i in range(1000):
            layer = MXFP4Linear.from_float(linears[i % 2])
            assert torch.equal(layer(x), want[i % 2])
