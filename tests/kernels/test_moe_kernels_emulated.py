"""Kernels before and after the experts' GEMMs, executed in the PTX emulator."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import expected.moe_route
import expected.moe_route_dense
import expected.moe_route_ids
import pytest
import torch
from samples import Sample
from samples._moe import poisoned_rows, random_routing
from samples._rows import random_rows
from support.cases import arguments
from support.emulated import CPU, POISON, changed, equal, poisoned
from support.kernel_grid import BF16, FP16, FP32, MoeCase

from ptx_emulator import EmulationError
from ptx_emulator.adapter import run_kernel
from torch_cute_ops.fake.moe_route_ids import moe_route_ids as route_shapes
from torch_cute_ops.formats import FP8_BLOCK128, FP8_BLOCK128_UE8M0, FP8Format
from torch_cute_ops.formats.experts import MAX_EXPERTS, USUAL_EXPERTS, used_rows
from torch_cute_ops.kernels import moe_finalize, moe_permute, moe_route, moe_route_dense, moe_route_ids, row_quant
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.testing import assert_fp8_close

finalized = OPS["moe_finalize"].reference
moe_permute_fp8quant = OPS["moe_permute_fp8quant"].reference
moe_swiglu_fp8quant = OPS["moe_swiglu_fp8quant"].reference
silu_mul_fp8quant = OPS["silu_mul_fp8quant"].reference


class Finalize(NamedTuple):
    """Launch of ``moe_finalize``: dtype, width of a row, routing, residual, number of SMs, seed of the order of
    events."""

    dtype: torch.dtype
    width: int
    routing: dict[str, Any]
    has_residual: bool
    sms: int
    seed: int | None


FINALIZE = {
    "decode": Finalize(BF16, 1096, {"m": 1, "topk": 8, "experts": 16}, True, 132, 0),
    "tokens-share-the-device": Finalize(FP16, 1096, {"m": 5, "topk": 3, "experts": 4}, False, 2, 1),
    "a-token-each": Finalize(FP32, 520, {"m": 9, "topk": 2, "experts": 3}, True, 1, None),
    "larger-ctas": Finalize(BF16, 1096, {"m": 2, "topk": 4, "experts": 4}, True, 1, 4),
    "narrow": Finalize(BF16, 8, {"m": 7, "topk": 1, "experts": 2}, False, 2, 2),
    "top-16": Finalize(FP16, 264, {"m": 3, "topk": 16, "experts": 17}, True, 1, 3),
    "top-32": Finalize(BF16, 264, {"m": 3, "topk": 32, "experts": 33}, True, 1, 2),
    "top-23": Finalize(FP32, 72, {"m": 3, "topk": 23, "experts": 1000}, False, 1, 0),
    "dropped": Finalize(FP32, 64, {"m": 12, "topk": 2, "experts": 3, "max_rows": 4}, True, 1, 0),
}


@pytest.mark.parametrize("few", [512, 0], ids=["few", "many"])
@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in FINALIZE.items()])
def test_finalize(one: Finalize, few: int) -> None:
    """Check that results equal the reference's bit for bit. Rows of padding, and weights of dropped pairs, are NaN."""
    torch.manual_seed(one.width)
    routed = random_routing(device=CPU, **one.routing)
    index = routed.expanded_to_permuted
    # The rows of the input are strided.
    x = poisoned_rows(routed, one.width + 16, one.dtype, CPU)[:, : one.width]
    weights = torch.rand(index.shape).masked_fill_(index < 0, torch.nan)
    residual = torch.randn(len(index), one.width + 8).to(one.dtype)[:, : one.width] if one.has_residual else None
    out = poisoned(len(index), one.width, dtype=one.dtype)
    planned = MoeCase("moe_finalize", (one.dtype, one.width, index.shape[1], one.has_residual)).kernel
    kernel = type(planned)(dataclasses.replace(planned.config, few=few))
    given = moe_finalize.Arguments(
        input=x, expanded_to_permuted=index, weights=weights, residual=residual, out=out, sms=one.sms
    )
    run_kernel(kernel, ARCHS["sm_90a"], *given, seed=one.seed)
    equal("out", out, finalized(x, index, weights, residual))


@pytest.mark.parametrize("few", [512, 0], ids=["few", "many"])
@pytest.mark.parametrize("beyond", [0, 2**31 - 1], ids=["first", "last"])
def test_finalize_of_rows_that_do_not_exist(beyond: int, few: int) -> None:
    """Check that an index beyond the last row adds nothing, and that nothing outside the buffer is read."""
    torch.manual_seed(0)
    x, weights = torch.randn(6, 64).to(BF16), torch.rand(3, 4)
    index = torch.tensor([[0, 5, 6, -1], [2, 6, 6, 6], [4, 4, 3, 5]], dtype=torch.int32)
    given = torch.where(index == 6, max(6, beyond), index)
    out = poisoned(3, 64, dtype=BF16)
    planned = MoeCase("moe_finalize", (BF16, 64, 4, False)).kernel
    kernel = type(planned)(dataclasses.replace(planned.config, few=few))
    run_kernel(kernel, ARCHS["sm_90a"], *moe_finalize.Arguments(x, given, weights, None, out, 2), seed=0)
    equal("out", out, finalized(x, torch.where(index == 6, -1, index), weights, None))


class Rows(NamedTuple):
    """Launch of a kernel that quantises rows: dtype, width of a row, routing, largest number of CTAs, seed of the order
    of events, changes to the planned configuration, parameters of the gate, and the format of the scales."""

    dtype: torch.dtype
    width: int
    routing: dict[str, Any]
    max_ctas: int
    seed: int | None
    changes: dict[str, int]
    gate: tuple[float, float, float] | None = None
    scale_format: str | None = None

    def kernel(self, *plan_arguments: Any) -> Any:
        many: tuple[Any, ...] = (MAX_EXPERTS,) if self.routing.get("experts", 1) > USUAL_EXPERTS else ()
        if self.scale_format is not None:
            many = (*(many or (USUAL_EXPERTS,)), "silu", self.scale_format)
        planned = MoeCase("moe_swiglu", (self.width, self.dtype, *plan_arguments, *many)).kernel
        return type(planned)(dataclasses.replace(planned.config, **self.changes))


WARP_GROUPS = {"threads_per_row": 32, "groups": 3}
WIDE_GROUPS = {"threads_per_row": 64, "groups": 2}
SOME = {"m": 13, "topk": 3, "experts": 5}
MASKED = {"m": 13, "topk": 2, "experts": 6, "max_rows": 4}


class Permute(NamedTuple):
    """Launch of ``moe_permute_fp8quant``: dtype, width of a row, routing, seed of the order of events, and the format
    of the scales."""

    dtype: torch.dtype
    width: int
    routing: dict[str, Any]
    seed: int | None
    scale_format: str | None = None


PERMUTE = {
    "one-scale": Permute(BF16, 128, SOME, 0),
    "dropped": Permute(FP32, 256, MASKED, 1),
    "wide": Permute(BF16, 2176, SOME, None),
    "wide-dropped": Permute(FP16, 1152, MASKED, 2),
    # The kernel loads four scales at once only if the number of scales per row is a multiple of four. Only this launch
    # has such a number.
    "four-scales-a-load": Permute(FP16, 2560, SOME, 1),
    "decode": Permute(BF16, 1152, {"m": 1, "topk": 8, "experts": 512}, 0),
    "top-16": Permute(FP32, 640, {"m": 9, "topk": 16, "experts": 16}, 3),
    "top-32": Permute(BF16, 384, {"m": 5, "topk": 32, "experts": 40}, 1),
    "top-23": Permute(FP16, 256, {"m": 3, "topk": 23, "experts": 1000}, 0),
    "half-a-block": Permute(BF16, 64, SOME, 1),
    "half-a-block-more": Permute(FP16, 960, {"m": 7, "topk": 10, "experts": 16}, 0),
    "half-a-block-dropped": Permute(FP32, 320, MASKED, 2),
    "powers": Permute(BF16, 960, SOME, 0, "ue8m0"),
    "powers-dropped": Permute(FP32, 512, MASKED, 1, "ue8m0"),
}


def permute(
    one: Permute, routed: Any, x: torch.Tensor, pairs: torch.Tensor, few: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels on poisoned outputs; return codes and scales. If there are more than ``few`` tokens, two kernels
    run."""
    m, topk = routed.expanded_to_permuted.shape
    y = poisoned(routed.rows, one.width, dtype=torch.float8_e4m3fn)
    scale = poisoned(-(-one.width // 128), routed.rows, dtype=torch.float32).t()
    planned = MoeCase("moe_permute", (one.dtype, one.width, topk, one.scale_format)).kernel
    config = dataclasses.replace(planned.config, few=few)
    workspace = poisoned(*(config.workspace_shape(m) or (1, 1)), dtype=torch.float32)
    given = moe_permute.Arguments(
        input=x,
        y=y,
        scale=scale,
        expanded_to_permuted=routed.expanded_to_permuted,
        permuted_to_expanded=pairs,
        workspace=workspace,
    )
    run_kernel(type(planned)(config), ARCHS["sm_90a"], *given, seed=one.seed, strict=True)
    return y, scale


@pytest.mark.parametrize("few", [512, 0], ids=["at-once", "for-each-token-first"])
@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in PERMUTE.items()])
def test_permute(one: Permute, few: int) -> None:
    """Check that results equal the reference's bit for bit, and that rows of padding keep their poison."""
    torch.manual_seed(one.width)
    routed = random_routing(device=CPU, **one.routing)
    m, topk = routed.expanded_to_permuted.shape
    x = random_rows(m, one.width + 32, dtype=one.dtype, device=CPU)[:, : one.width]
    if one.width % 128:
        # NaN in every second token, which is next to the short blocks of the other tokens in memory
        x[1::2] = torch.nan
    y, scale = permute(one, routed, x, routed.permuted_to_expanded, few)
    want = moe_permute_fp8quant(x, routed.permuted_to_expanded, topk, scale_format=one.scale_format)
    for name, got, result in zip(("y", "scale"), (y, scale), want, strict=True):
        used = ~routed.padding[:, None]
        equal(name, got, torch.where(used, result.view(got.dtype), poisoned(*got.shape, dtype=got.dtype)))


@pytest.mark.parametrize("pair", [-1, 2**30], ids=["padding", "of-no-token"])
def test_pairs_of_no_token(pair: int) -> None:
    """Check that the scales of rows without a token keep their poison, and that nothing outside the buffer is read."""
    one = PERMUTE["one-scale"]
    torch.manual_seed(0)
    routed = random_routing(device=CPU, **one.routing)
    m, topk = routed.expanded_to_permuted.shape
    x = random_rows(m, one.width, dtype=one.dtype, device=CPU)
    pairs = routed.permuted_to_expanded.clone()
    pairs[::2] = pair
    y, scale = permute(one, routed, x, pairs, few=0)
    want = moe_permute_fp8quant(x, routed.permuted_to_expanded, topk)
    used = ~routed.padding[:, None]
    equal("y", y, torch.where(used, want[0].view(y.dtype), poisoned(*y.shape, dtype=y.dtype)))
    used[::2] = False
    equal("scale", scale, torch.where(used, want[1], poisoned(*scale.shape, dtype=scale.dtype)))


@pytest.mark.parametrize("few", [512, 0], ids=["at-once", "for-each-token-first"])
@pytest.mark.parametrize("beyond", [0, 2**31 - 1], ids=["first", "last"])
def test_permute_to_rows_that_do_not_exist(beyond: int, few: int) -> None:
    """Check that a pair whose row is beyond the buffer is not written, and that nothing outside the buffer is
    written."""
    one = PERMUTE["half-a-block-more"]
    torch.manual_seed(0)
    routed = random_routing(device=CPU, **one.routing)
    m, topk = routed.expanded_to_permuted.shape
    x = random_rows(m, one.width, dtype=one.dtype, device=CPU)
    want = moe_permute_fp8quant(x, routed.permuted_to_expanded, topk)
    lost = torch.zeros(routed.rows, dtype=torch.bool)
    lost[routed.expanded_to_permuted.flatten()[::3].long()] = True
    places, pairs = routed.expanded_to_permuted.clone(), routed.permuted_to_expanded
    places.view(-1)[::3] = max(routed.rows, beyond)
    pairs = torch.where(lost, -1, pairs)
    y, scale = permute(one, dataclasses.replace(routed, expanded_to_permuted=places), x, pairs, few)
    used = (~routed.padding & ~lost)[:, None]
    equal("y", y, torch.where(used, want[0].view(y.dtype), poisoned(*y.shape, dtype=y.dtype)))
    equal("scale", scale, torch.where(used, want[1], poisoned(*scale.shape, dtype=scale.dtype)))


@pytest.mark.parametrize(
    ("offsets", "counts", "rows"),
    [
        ([-2, 6, 12], [4, 3], [*range(4), *range(6, 9)]),
        ([-(2**31), 9, 12], [2, 2**31 - 1], [0, 1, 9, 10, 11]),
        ([2**31 - 1, 12, 0], [5, 5], []),
        ([8, 3, 12], [-1, 2], [3, 4]),
    ],
    ids=["negative", "extremes", "beyond", "descending"],
)
def test_wrong_offsets_and_counts(offsets: list[int], counts: list[int], rows: list[int]) -> None:
    """Check that offsets and counts out of range are clipped to the buffer."""
    torch.manual_seed(0)
    one, x = Rows(BF16, 128, {}, 2, 0, {"groups": 2}), random_rows(12, 256, dtype=BF16, device=CPU)
    used = torch.zeros(12, dtype=torch.bool)
    used[rows] = True
    want = silu_mul_fp8quant(x[used], granularity="block128", scale_layout="column")
    given = (torch.tensor(each, dtype=torch.int32) for each in (offsets, counts))
    assert_rows(gate(one, x, *given), used, want)


SWIGLU = {
    "rows-share-a-warp": (Rows(BF16, 128, SOME, 2, 0, {"groups": 2}), "both"),
    "without-counts": (Rows(FP32, 256, SOME, 1, 1, {}), "offsets"),
    "a-warp-each": (Rows(BF16, 640, SOME, 2, None, WARP_GROUPS), "both"),
    "masked": (Rows(FP16, 640, MASKED, 2, 1, WARP_GROUPS), "counts"),
    "two-warps": (Rows(FP16, 1152, MASKED, 2, 2, WIDE_GROUPS), "counts"),
    "decode": (Rows(BF16, 512, {"m": 1, "topk": 8, "experts": 512}, 132, 0, {}), "both"),
    "1000-experts": (Rows(BF16, 640, {"m": 3, "topk": 23, "experts": 1000}, 2, 0, WARP_GROUPS), "both"),
    "1024-experts-share-a-warp": (Rows(FP16, 128, {"m": 4, "topk": 8, "experts": 1024}, 2, 1, {"groups": 2}), "both"),
    "one-expert": (Rows(BF16, 512, {"m": 40, "topk": 1, "experts": 7, "kind": "one"}, 1, 3, WARP_GROUPS), "both"),
    "gated-by-gpt-oss": (Rows(BF16, 320, SOME, 2, 0, {"groups": 2}, (1.702, 1.0, 7.0)), "both"),
    "without-a-limit": (Rows(FP32, 576, MASKED, 2, 1, WARP_GROUPS, (0.5, -1.0, math.inf)), "counts"),
    "half-a-block": (Rows(FP16, 64, SOME, 2, 2, {"groups": 2}), "both"),
    "half-a-block-more": (Rows(BF16, 2880, MASKED, 2, 0, {}), "counts"),
    "powers": (Rows(BF16, 640, SOME, 2, 0, WARP_GROUPS, None, "ue8m0"), "both"),
    "powers-of-gpt-oss": (Rows(FP16, 320, MASKED, 2, 1, {"groups": 2}, (1.702, 1.0, 7.0), "ue8m0"), "counts"),
    "no-tokens": (Rows(BF16, 128, {"m": 0, "topk": 1, "experts": 3, "max_rows": 4}, 2, 0, {}), "counts"),
}


def gate(
    one: Rows, x: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None, edit: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on poisoned outputs; return codes and scales."""
    y = poisoned(len(x), one.width, dtype=torch.float8_e4m3fn)
    scale = poisoned(-(-one.width // 128), len(x), dtype=torch.float32).t()
    alpha, beta, limit = one.gate or (None, None, None)
    given = dict.fromkeys(row_quant.Arguments._fields) | {"input": x, "y": y, "scale": scale, "eps": 0.0}
    given |= {"offsets": offsets, "counts": counts, "max_ctas": one.max_ctas}
    given |= {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit}
    kernel = one.kernel(offsets is not None, counts is not None, one.gate is not None)
    run_kernel(kernel, ARCHS["sm_90a"], *row_quant.Arguments(**given), seed=one.seed, strict=True, edit=edit)
    return y, scale


def assert_rows(
    got: tuple[torch.Tensor, torch.Tensor],
    used: torch.Tensor,
    want: tuple[torch.Tensor, torch.Tensor],
    fmt: FP8Format = FP8_BLOCK128,
) -> None:
    """Check that the codes and scales of the ``used`` rows are close to ``want``, and that all other rows keep their
    poison."""
    y, scale = got
    assert_fp8_close((y[used].contiguous(), scale[used].contiguous()), want, fmt)
    assert (y[~used].view(torch.uint8) == POISON).all()
    assert (scale[~used].contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize(("one", "given"), [pytest.param(*one, id=name) for name, one in SWIGLU.items()])
def test_swiglu(one: Rows, given: str) -> None:
    """Check that results are close to the reference's. Input rows of padding are NaN; output rows of padding keep their
    poison."""
    torch.manual_seed(one.width)
    routed = random_routing(device=CPU, **one.routing)
    offsets = None if given == "counts" else routed.offsets
    counts = None if given == "offsets" else routed.counts
    used = used_rows(routed.rows, offsets, counts)
    x = random_rows(routed.rows, 2 * one.width + 32, dtype=one.dtype, device=CPU)[:, : 2 * one.width]
    x[~used] = torch.nan
    y, scale = moe_swiglu_fp8quant(x, routed.offsets, counts, *(one.gate or ()), scale_format=one.scale_format)
    fmt = FP8_BLOCK128 if one.scale_format is None else FP8_BLOCK128_UE8M0
    assert_rows(gate(one, x, offsets, counts), used, (y[used], scale[used]), fmt)


@pytest.mark.parametrize(
    ("offsets", "rows"),
    [
        ([0, 4, 4, 9], range(9)),
        ([3, 3, 5, 12], range(3, 12)),
        ([5, 20, 30], range(5, 12)),
        ([-2, 3], range(3)),
        ([7, 7], []),
        ([2**31 - 1, 0, -(2**31)], []),
        ([5, 3, -(2**31)], []),
    ],
    ids=["from-the-first", "to-the-last", "cut-to-the-room-there-is", "cut-before", "none", "extremes", "negative-end"],
)
@pytest.mark.parametrize(
    ("width", "changes", "max_ctas"),
    [(128, {"groups": 2}, 1), (128, {"groups": 2}, 132), (640, WARP_GROUPS, 1), (640, WARP_GROUPS, 132)],
    ids=["rows-share-a-warp", "few-rows-share-a-warp", "a-warp-each", "few-a-warp-each"],
)
def test_offsets_alone(
    offsets: list[int], rows: Sequence[int], width: int, changes: dict[str, int], max_ctas: int
) -> None:
    """Check calls with only offsets, for a buffer of twelve rows without padding. With one CTA, each group of threads
    processes several rows. Rows outside of the offsets keep their poison."""
    torch.manual_seed(0)
    x = random_rows(12, 2 * width, dtype=BF16, device=CPU)
    one = Rows(BF16, width, {}, max_ctas, 0, changes)
    assert_gated(gate(one, x, torch.tensor(offsets, dtype=torch.int32), None), x, rows)


def assert_gated(got: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, rows: Sequence[int]) -> None:
    """Check that these rows of the outputs are the gated input rows, and that all other rows keep their poison."""
    used = torch.zeros(len(x), dtype=torch.bool)
    used[list(rows)] = True
    assert_rows(got, used, silu_mul_fp8quant(x[used], None, "block128"))


@pytest.mark.parametrize(
    ("counts", "in_parts", "rows"),
    [
        ([6, 0, 1], True, [0, 1, 2, 3, 8]),
        ([1, 0, 6], True, [0, 8, 9, 10, 11]),
        ([3, -2, 2], True, [0, 1, 2, 8, 9]),
        ([2, 0, 9], False, [0, 1, 8, 9, 10, 11]),
    ],
)
def test_counts_are_cut_to_the_room_there_is(counts: list[int], in_parts: bool, rows: list[int]) -> None:
    """Check that the counts of three experts are clipped to the twelve rows of the buffer, and that no other rows are
    written."""
    torch.manual_seed(0)
    x = random_rows(12, 256, dtype=BF16, device=CPU)
    offsets = None if in_parts else torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    one = Rows(BF16, 128, {}, 2, 0, {"groups": 2})
    assert_gated(gate(one, x, offsets, torch.tensor(counts, dtype=torch.int32)), x, rows)


def test_rows_are_found_before_they_are_read() -> None:
    """Check that the emulator finds a race if the barrier after the table of rows is removed."""
    one = SWIGLU["two-warps"][0]._replace(seed=1)
    routed = random_routing(device=CPU, **one.routing)
    x = random_rows(routed.rows, 2 * one.width, dtype=one.dtype, device=CPU)
    with pytest.raises(EmulationError):
        gate(one, x, None, routed.counts, changed(r"bar\.sync\s+0", 0))


class Route(NamedTuple):
    """Launch of ``moe_route``: tokens, experts, topk, other arguments, number of SMs, seed of the order of events."""

    tokens: int
    experts: int
    topk: int
    given: dict[str, Any]
    sms: int
    seed: int | None
    dtype: torch.dtype = FP32


DEEPSEEK = {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "bias": True, "scaling_factor": 2.5}
ROUTES = {
    "deepseek-decode": Route(7, 256, 8, DEEPSEEK, 132, 0, BF16),
    "deepseek": Route(70, 256, 8, DEEPSEEK, 2, 1, BF16),
    "softmax": Route(5, 33, 4, {"alignment": 16}, 2, 2, FP16),
    "softmax-of-all": Route(70, 40, 2, {"renormalize": False, "alignment": 1}, 2, None),
    "several-chunks": Route(150, 37, 3, {"alignment": 8}, 1, 3),
    "several-chunks-of-runs": Route(200, 12, 2, {"scoring": "sigmoid", "max_rows": 20}, 2, 4),
    "masked-decode": Route(9, 12, 3, {"max_rows": 4}, 2, 0),
    "many-rows": Route(3, 5, 2, {"max_rows": 14_000}, 3, 1),
    "no-tokens": Route(0, 12, 3, {"max_rows": 8}, 2, 0),
    "no-tokens-contiguous": Route(0, 12, 3, {}, 2, 0),
    "all-experts": Route(3, 512, 16, {"scoring": "sigmoid", "num_groups": 32, "topk_groups": 3}, 4, 2),
    "top-32-of-1024": Route(3, 1024, 32, {"scoring": "sigmoid", "bias": True}, 4, 2, BF16),
    "top-20-of-several-chunks": Route(70, 96, 20, {"alignment": 8}, 2, 1),
    "softmax-bias": Route(9, 40, 4, {"bias": True, "num_groups": 4, "topk_groups": 2}, 2, 0),
    "softmax-bias-of-900": Route(2, 900, 8, {"bias": True, "renormalize": False, "max_rows": 2}, 4, 3),
    "softmax-groups": Route(5, 160, 6, {"num_groups": 8, "topk_groups": 3, "renormalize": False}, 4, 1, BF16),
    "17-groups-of-30": Route(4, 510, 16, {**DEEPSEEK, "num_groups": 17}, 4, 1),
    "3-groups-of-341": Route(2, 1023, 9, {"bias": True, "num_groups": 3, "topk_groups": 2}, 4, 0, FP16),
    "a-group-of-one": Route(4, 5, 3, {"scoring": "sigmoid", "num_groups": 5, "topk_groups": 3}, 1, 0),
    "one-expert": Route(33, 1, 1, {"alignment": 4}, 1, 0),
}


def find_routes(one: Route, edit: Any = None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Run the kernels; return their outputs and the arguments of the op."""
    torch.manual_seed(one.experts)
    given = {"logits": torch.randn(one.tokens, one.experts), "topk": one.topk, **one.given}
    given["logits"] = given["logits"].to(one.dtype)
    given["bias"] = torch.randn(one.experts) * 0.1 if given.pop("bias", False) else None
    given = arguments(OPS["moe_route"], Sample("", (), given))
    plan_arguments = (given["num_groups"], given["topk_groups"], given["renormalize"], given["max_rows"] is not None)
    scoring = (given["scoring"] == "sigmoid", given["bias"] is not None)
    finite = (True,) if given["finite"] else ()
    case = MoeCase("moe_route", (one.dtype, one.experts, one.topk, *scoring, *plan_arguments, *finite))
    kernel = case.kernel
    outputs = [poisoned(*like.shape, dtype=like.dtype) for like in OPS["moe_route"].fake(**given)]
    words = kernel.config.workspace_words(one.tokens, len(outputs[3]), one.sms)
    workspace = poisoned(max(words, 1), dtype=torch.int32)
    unit = given["max_rows"] or given["alignment"]
    numbers = (given["scaling_factor"], unit, one.sms)
    launched = moe_route.Arguments(given["logits"], given["bias"], *outputs, workspace, *numbers)
    run_kernel(kernel, ARCHS["sm_90a"], *launched, seed=one.seed, edit=edit)
    return outputs, given


@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in ROUTES.items()])
def test_route(one: Route) -> None:
    outputs, given = find_routes(one)
    expected.moe_route.assert_results(outputs, expected.moe_route.results(given), given)


@pytest.mark.parametrize("experts", [40, 600])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_finite_weights(scoring: str, experts: int) -> None:
    """Check that logits that are not finite count as the largest or smallest finite number."""
    torch.manual_seed(experts)
    logits = torch.randn(8, experts)
    logits[0], logits[1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, 3e38
    logits[4, ::2], logits[5, ::3], logits[6, ::2], logits[6, 1::2] = torch.nan, torch.inf, -torch.inf, torch.nan
    for rest in ({}, {"renormalize": False}, {"bias": True, "num_groups": 4, "topk_groups": 2}):
        given = {"scoring": scoring, "finite": True, "logits": logits, **rest}
        outputs, given = find_routes(Route(8, experts, 5, given, 4, 0))
        assert outputs[0].isfinite().all()
        expected.moe_route.assert_results(outputs, expected.moe_route.results(given), given)


BARRIERS = {"alone": range(1, 4), "choose": range(4, 7), "place": range(8, 11)}
"""Indices, in the order of the PTX, of each kernel's barriers whose removal the emulator finds. The other barriers
separate clearing of bits from setting them; without them, bits are still cleared first in every order that the emulator
tries, because choosing experts takes longer."""
ORDERED = {
    "alone": Route(32, 64, 4, {"scoring": "sigmoid", "num_groups": 2}, 1, 0),
    "runs": Route(256, 64, 2, {"alignment": 8}, 2, 0),
}


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        pytest.param("alone" if kernel == "alone" else "runs", number, id=f"{kernel}-{number}")
        for kernel, numbers in BARRIERS.items()
        for number in numbers
    ],
)
def test_barriers_of_routes_are_needed(launch: str, number: int) -> None:
    """Check that the emulator finds a race or a wrong row, in some order of events, if the barrier with this index is
    removed."""
    with pytest.raises((EmulationError, AssertionError)):
        for seed in range(6):
            outputs, given = find_routes(ORDERED[launch]._replace(seed=seed), changed(r"bar\.sync\s+0", number))
            expected.moe_route.assert_results(outputs, expected.moe_route.results(given), given)


@pytest.mark.parametrize("launch", ORDERED)
def test_barriers_of_routes_are_enough(launch: str) -> None:
    for seed in range(3):
        outputs, given = find_routes(ORDERED[launch]._replace(seed=seed))
        expected.moe_route.assert_results(outputs, expected.moe_route.results(given), given)


class Placed(NamedTuple):
    """Launch of ``moe_route_ids``: tokens, experts, topk, number of invalid ids below and above the valid ids, other
    arguments, number of SMs, seed of the order of events."""

    tokens: int
    experts: int
    topk: int
    beyond: int
    given: dict[str, Any]
    sms: int
    seed: int | None


PLACED = {
    "decode": Placed(5, 256, 8, 0, {}, 132, 0),
    "two-launches-for-rows": Placed(5, 256, 8, 1, {"alignment": 512}, 3, 1),
    "one-expert": Placed(33, 1, 1, 1, {"alignment": 4}, 1, 0),
    "duplicates": Placed(60, 3, 7, 1, {"alignment": 8}, 2, 2),
    "a-whole-chunk": Placed(64, 33, 8, 0, {"alignment": 1}, 1, 3),
    "several-chunks": Placed(205, 37, 8, 2, {"alignment": 8}, 1, None),
    "several-runs": Placed(205, 12, 8, 1, {"max_rows": 130}, 4, 4),
    "several-chunks-of-runs": Placed(170, 512, 16, 20, {"alignment": 1}, 2, 1),
    "1024-experts": Placed(33, 1024, 32, 9, {"alignment": 1}, 2, 3),
    "1000-experts-of-a-chunk": Placed(20, 1000, 23, 9, {"max_rows": 3}, 2, 0),
    "masked": Placed(9, 12, 3, 3, {"max_rows": 2}, 2, 0),
    "no-tokens": Placed(0, 12, 3, 0, {"max_rows": 8}, 2, 0),
    "none-routed": Placed(20, 4, 3, -1, {}, 2, 0),
}


def place(one: Placed, edit: Any = None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Run the kernels; return their outputs and the arguments of the op."""
    torch.manual_seed(one.experts)
    ids = torch.randint(-one.beyond, one.experts + one.beyond, (one.tokens, one.topk), dtype=torch.int32)
    if one.beyond < 0:
        ids = ids.fill_(-1)
    given = {"ids": ids, "experts": one.experts, "alignment": 128, "max_rows": None, **one.given}
    outputs = [poisoned(*shape, dtype=dtype) for shape, dtype in route_shapes(**given)]
    kernel = MoeCase("moe_route_ids", (one.experts, given["max_rows"] is not None)).kernel
    words = kernel.config.workspace_words(ids.numel(), len(outputs[1]), one.sms)
    assert kernel.placement.smem_bytes <= ARCHS["sm_120a"].smem_per_cta
    workspace = poisoned(max(words, 1), dtype=torch.int32)
    unit = given["max_rows"] or given["alignment"]
    launched = moe_route_ids.Arguments(ids, *outputs, workspace, unit, one.sms)
    machines = run_kernel(kernel, ARCHS["sm_90a"], *launched, seed=one.seed, edit=edit)
    assert len(machines) == (2 if words else 1)
    return outputs, given


@pytest.mark.parametrize("one", [pytest.param(one, id=name) for name, one in PLACED.items()])
def test_route_ids(one: Placed) -> None:
    """Check the order of rows for any ids, including ids of experts that do not exist, and experts that a token names
    several times."""
    outputs, given = place(one)
    expected.moe_route_ids.assert_results(outputs, expected.moe_route_ids.results(given), given)


PLACING = {
    "alone": (Placed(32, 64, 8, 1, {"alignment": 1}, 1, 0), range(2, 4)),
    "rank": (Placed(256, 4, 8, 1, {"alignment": 1}, 4, 0), range(5, 7)),
    "place": (Placed(256, 64, 8, 1, {"alignment": 1}, 2, 0), range(8, 11)),
}
"""Launches, and the barriers of each kernel, as in ``BARRIERS``. The case of the second kernel shows that the order of
rows needs the bits of all warps; its source is also the first kernel's."""


@pytest.mark.parametrize(
    ("one", "number"),
    [
        pytest.param(one, number, id=f"{kernel}-{number}")
        for kernel, (one, numbers) in PLACING.items()
        for number in numbers
    ],
)
def test_barriers_of_route_ids_are_needed(one: Placed, number: int) -> None:
    """Check that the emulator finds a race or a wrong row, in some order of events, if the barrier with this index is
    removed."""
    with pytest.raises((EmulationError, AssertionError)):
        for seed in range(6):
            outputs, given = place(one._replace(seed=seed), changed(r"bar\.sync\s+0", number))
            expected.moe_route_ids.assert_results(outputs, expected.moe_route_ids.results(given), given)


DENSE = {
    "deepseek": (Route(7, 256, 8, DEEPSEEK, 1, 0, BF16), True),
    "gpt-oss": (Route(5, 32, 4, {}, 1, 1, BF16), False),
    "softmax-of-all": (Route(9, 40, 2, {"renormalize": False, "scaling_factor": 0.5}, 1, 2, FP16), True),
    "all-experts": (Route(3, 512, 16, {"scoring": "sigmoid", "num_groups": 32, "topk_groups": 3}, 1, None), True),
    "all-chosen": (Route(4, 5, 5, {"scoring": "sigmoid"}, 1, 0), False),
    "one-expert": (Route(6, 1, 1, {}, 1, 3), True),
    "top-32-of-1024": (Route(3, 1024, 32, {"scoring": "sigmoid", "bias": True}, 1, 2, BF16), True),
    "softmax-bias": (Route(4, 600, 22, {"bias": True, "renormalize": False}, 1, 0, FP16), False),
    "17-groups-of-30": (Route(4, 510, 16, {"bias": True, "num_groups": 17, "topk_groups": 4}, 1, 1), True),
}


@pytest.mark.parametrize(("one", "has_factor"), [pytest.param(*one, id=name) for name, one in DENSE.items()])
def test_route_dense(one: Route, has_factor: bool) -> None:
    """Check that results are close to the specification, and bitwise equal to the weights of ``moe_route`` times the
    experts' factors."""
    outputs, given = find_routes(one)
    factor = torch.randn(one.experts) if has_factor else None
    scoring = (given["scoring"] == "sigmoid", given["bias"] is not None)
    plan_arguments = (given["num_groups"], given["topk_groups"], given["renormalize"], has_factor)
    kernel = MoeCase("moe_route_dense", (one.dtype, one.experts, one.topk, *scoring, *plan_arguments)).kernel
    out = poisoned(one.tokens, one.experts, dtype=FP32)
    launched = moe_route_dense.Arguments(given["logits"], given["bias"], factor, out, given["scaling_factor"])
    run_kernel(kernel, ARCHS["sm_90a"], *launched, seed=one.seed, strict=True)
    call = {**given, "expert_factor": factor}
    expected.moe_route_dense.assert_results((out,), expected.moe_route_dense.results(call), call)
    weights, ids = outputs[0], outputs[1].long()
    want = torch.zeros(one.tokens, one.experts)
    equal("out", out, want.scatter_(1, ids, weights if factor is None else weights * factor[ids]))


def test_zeros_come_before_weights() -> None:
    """Check that zeros are written before the weights, for rows with NaN and strided rows of logits."""
    torch.manual_seed(0)
    logits = torch.randn(6, 48)[:, 8:41]
    logits[1, 3] = torch.nan
    logits[2] = torch.nan
    logits[4, 5] = torch.inf
    kernel = MoeCase("moe_route_dense", (FP32, 33, 4, False, False, 1, 1, True, False)).kernel
    out = poisoned(6, 33, dtype=FP32)
    run_kernel(kernel, ARCHS["sm_90a"], *moe_route_dense.Arguments(logits, None, None, out, 1.5), seed=0, strict=True)
    given = {"logits": logits, "topk": 4, "bias": None, "scoring": "softmax", "num_groups": 1, "topk_groups": 1}
    given |= {"renormalize": True, "scaling_factor": 1.5, "expert_factor": None}
    expected.moe_route_dense.assert_results((out,), expected.moe_route_dense.results(given), given)
