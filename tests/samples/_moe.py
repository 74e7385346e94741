"""Routings of tokens to experts, for samples of the ops that compute or use the order of experts' rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._row_errors import out_errors
from samples._rows import random_rows, short
from torch_cute_ops.reference.moe_route import places_of


@dataclass(frozen=True)
class Routing:
    """Routing of M tokens to ``topk`` experts each, in the form that ``moe_route`` returns.

    Attributes:
        expanded_to_permuted: (M, topk), the row of each pair, or -1.
        permuted_to_expanded: (R,), the pair of each row, or -1.
        offsets: (E + 1,), first row of each expert.
        counts: (E,), number of rows of each expert.
    """

    expanded_to_permuted: torch.Tensor
    permuted_to_expanded: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.permuted_to_expanded)

    @property
    def padding(self) -> torch.Tensor:
        """Mask of the rows that belong to no pair."""
        return self.permuted_to_expanded < 0


def random_ids(m: int, topk: int, experts: int, kind: str = "random") -> torch.Tensor:
    """Return random experts (M, topk) of each token, on the CPU. ``"one"`` routes all tokens to the first ``topk``
    experts; ``"half"`` uses only the last half of the experts."""
    chances = torch.rand(m, experts)
    if kind == "one":
        chances[:, :topk] += 1.0
    if kind == "half":
        chances[:, experts // 2 :] += 1.0
    return chances.topk(topk, dim=1).indices


def routing(
    ids: torch.Tensor, experts: int, device: torch.device, alignment: int = 128, max_rows: int | None = None
) -> Routing:
    """Return the routing with these ids: contiguous, or masked if ``max_rows`` is given."""
    return Routing(*(tensor.to(device) for tensor in places_of(ids, experts, alignment, max_rows)))


def random_routing(
    m: int,
    topk: int,
    experts: int,
    device: torch.device,
    kind: str = "random",
    alignment: int = 16,
    max_rows: int | None = None,
) -> Routing:
    """Return the routing of random ids."""
    return routing(random_ids(m, topk, experts, kind), experts, device, alignment, max_rows)


ROUTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("one-token", {"m": 1, "topk": 8, "experts": 32}),
    ("one-expert", {"m": 20, "topk": 1, "experts": 1}),
    ("all-on-one-expert", {"m": 37, "topk": 1, "experts": 9, "kind": "one"}),
    ("half-of-the-experts", {"m": 19, "topk": 3, "experts": 16, "kind": "half"}),
    ("top-16", {"m": 5, "topk": 16, "experts": 24}),
    ("top-32", {"m": 5, "topk": 32, "experts": 40}),
    ("top-all", {"m": 7, "topk": 5, "experts": 5}),
    ("512-experts", {"m": 33, "topk": 4, "experts": 512}),
    ("1000-experts", {"m": 33, "topk": 4, "experts": 1000}),
    ("many-tokens", {"m": 301, "topk": 2, "experts": 8}),
    ("no-padding", {"m": 13, "topk": 2, "experts": 4, "alignment": 1}),
    ("alignment-128", {"m": 9, "topk": 2, "experts": 3, "alignment": 128}),
    ("masked", {"m": 17, "topk": 3, "experts": 6, "max_rows": 32}),
    ("masked-full", {"m": 16, "topk": 2, "experts": 2, "max_rows": 16}),
    ("masked-dropped", {"m": 29, "topk": 2, "experts": 4, "max_rows": 8}),
    ("masked-one-row", {"m": 6, "topk": 2, "experts": 4, "max_rows": 1}),
    ("no-tokens", {"m": 0, "topk": 2, "experts": 4}),
    ("no-tokens-masked", {"m": 0, "topk": 2, "experts": 4, "max_rows": 8}),
)
"""Named routings: the arguments of ``random_routing``."""


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts one element after a multiple of 16 bytes."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def poisoned_rows(routed: Routing, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return random rows in the experts' order, with NaN in padding."""
    rows = random_rows(routed.rows, width, dtype=dtype, device=device)
    return rows.masked_fill_(routed.padding[:, None], torch.nan)


def output_errors(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, width: int, device: torch.device
) -> Iterator[ErrorInput]:
    """Yield calls with wrong outputs, of an op that returns codes (rows, width) and column-major scales."""
    good = {
        "y": torch.zeros(rows, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        "scale": torch.zeros(width // 128, rows, device=device).t(),
    }
    # Scales are stored one element at a time, so they may start at any address.
    return (e for e in out_errors(args, kwargs, good, device) if e.name != "out-scale-unaligned")


def integer_errors(name: str, good: torch.Tensor, args: tuple[Any, ...], place: int | str) -> Iterator[ErrorInput]:
    """Yield wrong dtypes and devices of the integer tensor ``name``, which is ``args[place]`` or a keyword argument."""

    def bad(what: str, error: type[Exception], match: str, value: torch.Tensor) -> ErrorInput:
        given, named = list(args), {}
        if isinstance(place, int):
            given[place] = value
        else:
            named[place] = value
        return ErrorInput(f"{name.replace('_', '-')}-{what}", tuple(given), named, error, match)

    for dtype in (torch.int64, torch.float32, torch.int16):
        text = f"got {name} with dtype {short(dtype)}; expected int32"
        yield bad(short(dtype), TypeError, text, good.to(dtype))
    yield bad("uint32", TypeError, f"got {name} with dtype uint32; expected int32", good.view(torch.uint32))
    yield bad("device", ValueError, f"{name} is on meta", good.to("meta"))
    if good.is_cuda:
        yield bad("cpu", ValueError, f"{name} is on cpu", good.cpu())
