"""What the ops that take ``silu`` of one half of a row times the other add to the families' rows."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._rows import DTYPES, Family, out_errors, random_rows, short, special_rows


def silu_mul_samples(family: Family, device: torch.device) -> Iterator[Sample]:
    """The family's rows, and halves with special values."""
    for name, rows, kwargs in family.rows(device, halves=True):
        yield Sample(name, (rows,), kwargs)
    factor, choices = family.positional(device)
    yield Sample("positional", (random_rows(4, 128, device=device), factor, *choices))
    for dtype in DTYPES:
        special = special_rows(dtype, device)
        plain = torch.randn(special.shape, device=device).to(dtype)
        pairs = torch.cartesian_prod(*2 * [torch.arange(len(special), device=device)])
        # It reaches from nothing, where exp(-a) overflows, over its least value to nearly a.
        slope = torch.linspace(-110, 20, plain.numel(), device=device).view_as(plain).to(dtype)
        halves = {
            "gate": (special, plain, family.plain),
            "up": (plain, special, family.plain),
            "pairs": (special[pairs[:, 0]], special[pairs[:, 1]], family.small),
            # silu(a) is a, to the bit.
            "identity": (torch.full_like(plain, 32.0), plain, family.plain),
            "slope": (slope, plain, family.plain),
            "slope-small": (slope, plain, family.small),
        }
        for name, (gate, up, kwargs) in halves.items():
            yield Sample(f"{name}-{short(dtype)}", (torch.cat((gate, up), -1),), kwargs)


def silu_mul_errors(family: Family, device: torch.device) -> Iterator[ErrorInput]:
    """Bad inputs of an op of this family."""
    yield from family.errors(random_rows(4, 128, device=device), halves=True)
    kwargs, good = family.outputs(device)
    yield from out_errors((random_rows(4, 1024, device=device),), kwargs, good, device)
