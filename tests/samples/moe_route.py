"""Samples (valid calls) and error inputs of ``moe_route``."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from samples._inputs import ErrorInput, Sample
from samples._routing import (
    ORDER,
    bad_outputs,
    choice_call,
    choice_errors,
    choice_sample,
    choice_samples,
    experts_for,
    integer_outputs,
    order_errors,
)

call, input_width = choice_call, experts_for


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    for sample in choice_samples(device):
        yield sample
        if sample.name.startswith("deepseek"):
            yield replace(sample, name=f"{sample.name}-masked", kwargs={**sample.kwargs, "max_rows": 16})
    for alignment in (1, 2, 100, 1024):
        yield choice_sample(f"alignment-{alignment}", 40, 12, 2, device, alignment=alignment)
    for max_rows in (1, 5, 40):
        yield choice_sample(f"max-rows-{max_rows}", 40, 12, 2, device, max_rows=max_rows)
        yield choice_sample(f"max-rows-{max_rows}-many-tokens", 150, 12, 3, device, max_rows=max_rows)
    yield choice_sample("many-rows", 2, 512, 2, device, max_rows=200)
    logits, bias = torch.randn(20, 128, device=device), torch.randn(256, device=device)[::2]
    yield Sample("positional", (logits, 4, bias, "sigmoid", 4, 2, False, 1.5, 16, 20))
    yield Sample("positional-contiguous", (logits, 4, bias, "sigmoid", 4, 2, False, 1.5, 16, None))
    # One expert gets all tokens. Each token's other experts have equal scores.
    hot = torch.zeros(90, 48, device=device)
    hot[:, 11] = 1.0
    yield Sample("all-on-one-expert", (hot, 1))
    yield Sample("all-on-one-expert-masked", (hot, 2), {"max_rows": 8})


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    logits = torch.randn(4, 16, device=device)
    yield from choice_errors(device)
    yield from order_errors(device, logits, 2)
    outputs = {"weights": torch.zeros(4, 2, device=device), **integer_outputs(device, ids=(4, 2), **ORDER)}
    yield from bad_outputs(outputs, (logits, 2), {"alignment": 8})
