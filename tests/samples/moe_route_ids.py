"""Samples (valid calls) and error inputs of ``moe_route_ids``."""

import math
from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._moe import ROUTINGS, integer_errors, random_ids, unaligned
from samples._routing import ORDER, bad_outputs, integer_outputs, order_errors


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with M tokens (the product of all dimensions except the last) and ``input_width`` experts per
    token."""
    ids = torch.randint(0, 40, (math.prod(shape[:-1]), input_width(shape[-1])), dtype=torch.int32)
    return Sample("call", (ids.to(device), 40), {})


def input_width(width: int) -> int:
    """Return the number of experts per token for calls of this width."""
    return 1 + width // 16 % 16


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""

    def chosen(m: int, topk: int, experts: int, kind: str = "random") -> torch.Tensor:
        return random_ids(m, topk, experts, kind).to(torch.int32).to(device)

    yield Sample("plain", (chosen(19, 6, 64), 64))
    for name, sizes in ROUTINGS:
        order = {key: value for key, value in sizes.items() if key in ("alignment", "max_rows")}
        rest = {key: value for key, value in sizes.items() if key not in order}
        yield Sample(name, (chosen(**rest), sizes["experts"]), order)
    yield Sample("positional", (chosen(9, 3, 20), 20, 16, 5))
    for m in (1, 64, 65, 200, 3001):
        # Random ids, including negative ids (no expert) and tokens with the same expert twice. A CPU would refuse ids
        # below -1.
        ids = torch.randint(-3 if device.type == "cuda" else -1, 20, (m, 4), dtype=torch.int32).to(device)
        for order in ({}, {"alignment": 1}, {"max_rows": 7}):
            yield Sample("-".join(("any-id", str(m), *map(str, order))), (ids, 20), order)
    none = torch.full((7, 3), -1, dtype=torch.int32, device=device)
    yield Sample("none-routed", (none, 12))
    yield Sample("none-routed-masked", (none, 12), {"max_rows": 2})
    if device.type == "cuda":
        extremes = torch.tensor([[-1, 0], [-(2**31), 5], [-(2**31) + 1, 11]], dtype=torch.int32, device=device)
        yield Sample("extreme-ids", (extremes, 12))
    ids = chosen(20, 8, 32)
    yield Sample("row-strided", (ids[:, :5], 32))
    yield Sample("column-step", (ids[:, ::2], 32))
    yield Sample("columns-first", (ids.t().contiguous().t(), 32))
    yield Sample("rows-expanded", (ids[:1].expand(70, 8), 32))
    yield Sample("unaligned", (unaligned(ids), 32))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)

    def bad(name: str, match: str, *args: object) -> ErrorInput:
        return ErrorInput(name, args, {}, ValueError, match)

    yield from (error for error in integer_errors("ids", ids, (ids, 16), 0) if error.error is TypeError)
    yield bad("ids-1d", r"got ids with shape \(2,\); expected \(M, topk\)", ids[0], 16)
    yield bad("ids-3d", r"expected \(M, topk\)", ids[None], 16)
    for experts in (0, -1, 1025):
        yield bad(f"{experts}-experts", f"experts is {experts}; expected 1 to 1024", ids, experts)
    for topk in (0, 33):
        many = torch.zeros(4, topk, dtype=torch.int32, device=device)
        yield bad(f"topk-{topk}", f"topk is {topk}; expected 1 to 32", many, 16)
    yield from order_errors(device, ids, 16)
    yield from bad_outputs(integer_outputs(device, **ORDER), (ids, 16), {"alignment": 8})
