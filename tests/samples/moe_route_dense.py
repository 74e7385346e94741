"""Samples (valid calls) and error inputs of ``moe_route_dense``."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from samples._inputs import ErrorInput, Sample
from samples._routing import bad_outputs, choice_call, choice_errors, choice_samples, experts_for
from samples._rows import short

call, input_width = choice_call, experts_for


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, with and without factors of the experts."""
    for i, sample in enumerate(choice_samples(device)):
        yield sample
        if i % 2:
            factor = torch.randn(sample.args[0].shape[1], device=device).exp()
            yield replace(sample, name=f"{sample.name}-factor", kwargs={**sample.kwargs, "expert_factor": factor})
    logits = torch.randn(20, 128, device=device)
    bias, factor = torch.randn(2, 256, device=device)[:, ::2]
    yield Sample("positional", (logits, 4, bias, "sigmoid", 4, 2, False, 1.5, factor))
    special = torch.randn(128, device=device)
    special[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e38])
    for scoring in ("softmax", "sigmoid"):
        given = {"scoring": scoring, "expert_factor": special}
        yield Sample(f"special-factor-{scoring}", (logits.roll(1, 0), 16), given)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    logits, factor = torch.randn(4, 16, device=device), torch.ones(16, device=device)
    yield from choice_errors(device)

    def bad(name: str, error: type[Exception], match: str, value: torch.Tensor) -> ErrorInput:
        return ErrorInput(f"expert-factor-{name}", (logits, 2), {"expert_factor": value}, error, match)

    for dtype in (torch.bfloat16, torch.float64):
        yield bad(
            short(dtype), TypeError, f"got expert_factor with dtype {short(dtype)}; expected float32", factor.to(dtype)
        )
    for shape in ((15,), (16, 1), ()):
        text = r"got expert_factor with shape .*expected \(16,\), one for each expert"
        yield bad(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, device=device))
    yield bad("device", ValueError, "expert_factor is on meta", factor.to("meta"))
    yield bad("requires-grad", ValueError, "no gradient", factor.clone().requires_grad_())
    yield from bad_outputs({"out": torch.zeros(4, 16, device=device)}, (logits, 2), {})
