"""Samples and error inputs of the ops that compute a gate. They extend the samples of a family of formats."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._row_errors import out_errors
from samples._rows import DTYPES, Family, random_rows, short, special_rows

GPT_OSS: dict[str, Any] = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
GATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt-oss", GPT_OSS),
    ("alpha", {"swiglu_alpha": 0.5}),
    ("alpha-negative", {"swiglu_alpha": -2.0}),
    ("alpha-zero", {"swiglu_alpha": 0.0}),
    ("alpha-large", {"swiglu_alpha": 1e30}),
    ("beta", {"swiglu_beta": -0.75}),
    ("limit", {"swiglu_limit": 0.5}),
    ("limit-large", {"swiglu_limit": 1e30}),
    ("defaults-named", {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": None}),
)
"""Parameters of gates that the samples use."""


OTHER_GATES = ("gelu_tanh", "gelu", "relu2")
"""Gates without parameters."""


def gate_errors(args: tuple[Any, ...]) -> Iterator[ErrorInput]:
    """Yield calls with the positional arguments ``args``, and unknown gates, or gates without parameters that get
    parameters."""
    for gate in ("relu", "GELU", ""):
        text = f"gate is '{gate}'; expected one of 'silu', 'gelu_tanh', 'gelu', 'relu2'"
        yield ErrorInput(f"gate-{gate}", args, {"gate": gate}, ValueError, text)
    for gate in OTHER_GATES:
        for name, value in GPT_OSS.items():
            text = f"{name} is {value} with gate='{gate}'; expected .* only gate='silu' takes parameters"
            yield ErrorInput(f"{gate}-{name.replace('_', '-')}", args, {"gate": gate, name: value}, ValueError, text)


def swiglu_errors(args: tuple[Any, ...]) -> Iterator[ErrorInput]:
    """Yield calls with the positional arguments ``args`` and wrong parameters of the gate."""
    for name, values in {
        "swiglu_alpha": (torch.nan, torch.inf),
        "swiglu_beta": (torch.nan, -torch.inf),
        "swiglu_limit": (torch.nan, torch.inf, 0.0, -7.0),
    }.items():
        for value in values:
            text = f"{name} is {value}; expected a finite number"
            yield ErrorInput(f"{name.replace('_', '-')}-{value}", args, {name: value}, ValueError, text)


def silu_mul_samples(family: Family, device: torch.device) -> Iterator[Sample]:
    """Yield the family's rows, and rows whose halves contain special values."""
    for name, rows, kwargs in family.rows(device, halves=True):
        yield Sample(name, (rows,), kwargs)
    factor, choices = family.positional(device)
    yield Sample("positional", (random_rows(4, 128, device=device), *factor, *choices, 1.5, 0.5, 2.0))
    for i, (name, gate) in enumerate(GATES):
        rows = torch.randn(19, 5 * 256, device=device).mul_(4).to(DTYPES[i % 3])
        yield Sample(f"swiglu-{name}", (rows,), {**family.plain, **gate})
    for i, gate in enumerate(OTHER_GATES):
        rows = torch.randn(19, 5 * 256, device=device).mul_(4).to(DTYPES[i])
        yield Sample(gate, (rows,), {**family.plain, "gate": gate})
        yield Sample(f"{gate}-small", (rows.flip(-1),), {**family.small, "gate": gate})
    for width in (2880, 1152):
        rows = torch.randn(33, 2 * width, device=device).mul_(4).bfloat16()
        yield Sample(f"swiglu-width-{width}", (rows,), {**family.small, **GPT_OSS})
    for dtype in DTYPES:
        special = special_rows(dtype, device)
        plain = torch.randn(special.shape, device=device).to(dtype)
        pairs = torch.cartesian_prod(*2 * [torch.arange(len(special), device=device)])
        # The gate values range from values at which exp(-a) overflows, past the minimum of silu, to values with silu(a)
        # close to a.
        slope = torch.linspace(-110, 20, plain.numel(), device=device).view_as(plain).to(dtype)
        halves = {
            "gate": (special, plain, family.plain),
            "up": (plain, special, family.plain),
            "pairs": (special[pairs[:, 0]], special[pairs[:, 1]], family.small),
            # silu(a) rounds to a.
            "identity": (torch.full_like(plain, 32.0), plain, family.plain),
            "slope": (slope, plain, family.plain),
            "slope-small": (slope, plain, family.small),
        }
        for name, (first, second, kwargs) in halves.items():
            rows = torch.cat((first, second), -1)
            yield Sample(f"{name}-{short(dtype)}", (rows,), kwargs)
            if name in ("gate", "up", "pairs"):
                yield Sample(f"swiglu-{name}-{short(dtype)}", (rows,), {**kwargs, **GPT_OSS})
            if name != "identity":
                for gate in OTHER_GATES:
                    yield Sample(f"{gate}-{name}-{short(dtype)}", (rows,), {**kwargs, "gate": gate})


def silu_mul_errors(family: Family, device: torch.device) -> Iterator[ErrorInput]:
    """Yield error inputs of an op of this family."""
    yield from family.errors(random_rows(4, 128, device=device), halves=True)
    yield from swiglu_errors((random_rows(4, 128, device=device),))
    yield from gate_errors((random_rows(4, 128, device=device),))
    kwargs, good = family.outputs(device)
    yield from out_errors((random_rows(4, 1024, device=device),), kwargs, good, device)
