"""Samples and error inputs of the ops that sum rows over ranks: a part of the inputs of the ops without the sum, with a
group of one rank."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from samples._add import add_norm_error_inputs, add_norm_samples
from samples._inputs import ErrorInput, Sample
from samples._rows import Family, random_rows

ALONE = ""
EVERY = 3
"""Every third sample is used, because a group of one rank runs the code of the op without the sum."""


def all_reduce_samples(family: Family, device: torch.device) -> Iterator[Sample]:
    """Yield every third sample of the op without the sum, and the sample with positional arguments."""
    for i, sample in enumerate(add_norm_samples(family, device, only_rms=True)):
        if i % EVERY == 0 or sample.name == "positional":
            yield replace(sample, args=(*sample.args[:3], ALONE, *sample.args[3:]))


def all_reduce_error_inputs(family: Family, device: torch.device) -> Iterator[ErrorInput]:
    """Yield some error inputs of the op without the sum, and wrong groups."""
    yield from _with_group(add_norm_error_inputs(family, device, only_rms=True))
    rows, weight = random_rows(4, 128, device=device), torch.ones(128, device=device)
    for name in ("nobody", "-1", "0 of 2"):
        text = f"group is {name!r}, which names no process group of this process"
        yield ErrorInput(f"group-{name}", (rows, rows.clone(), weight, name), {}, ValueError, text)


def _with_group(errors: Iterable[ErrorInput]) -> Iterator[ErrorInput]:
    for i, error in enumerate(errors):
        if i % EVERY == 0 or error.is_address:
            yield replace(error, args=(*error.args[:3], ALONE, *error.args[3:]))
