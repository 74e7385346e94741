"""Samples and error inputs of the argument ``prefetch`` of GEMMs."""

from collections.abc import Callable, Iterator

import torch

from samples._inputs import ErrorInput


def prefetched(device: torch.device) -> torch.Tensor:
    """Return a matrix, such as the next weight, for calls to prefetch into L2."""
    return torch.randint(0, 256, (40, 48), dtype=torch.uint8, device=device)


def prefetches(device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, matrix) for matrices of several dtypes: larger than one request, empty, and misaligned."""
    rows = prefetched(device)
    wide = torch.zeros(3, 4112, dtype=torch.uint8, device=device)
    yield "prefetch-uint8", rows
    yield "prefetch-fp8", rows.view(torch.float8_e4m3fn)
    yield "prefetch-wide", wide
    yield "prefetch-empty", rows[:0]
    yield "prefetch-misaligned", wide.view(-1)[3 : 3 + 64].view(2, 32)


def prefetch_errors(bad: Callable[..., ErrorInput], device: torch.device) -> Iterator[ErrorInput]:
    """Yield wrong dtypes, shapes, strides and devices. ``bad`` makes an error input from a name, an error, a message
    and additional arguments."""
    given = prefetched(device)
    for name, kind, text, wrong in (
        ("float32", TypeError, "got prefetch with dtype torch.float32; expected one of a byte", given.float()),
        ("1d", ValueError, "got prefetch with shape .*; expected a contiguous matrix", given[0]),
        ("columns", ValueError, "got prefetch with shape .*; expected a contiguous matrix", given.t()),
        ("narrow", ValueError, "whose rows are multiples of 16 bytes", given[:, :24].contiguous()),
        ("device", ValueError, "prefetch is on meta, a on", given.to("meta")),
    ):
        yield bad(f"prefetch-{name}", kind, text, {"prefetch": wrong})
