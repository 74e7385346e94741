"""Weights and block scales with unusual strides, valid and invalid."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample


def with_padding(weight: torch.Tensor) -> torch.Tensor:
    """Return the transposed view of a row-major copy of ``weight`` (..., K, N) whose rows are padded."""
    rows = weight.view(torch.uint8).mT
    return torch.cat((rows, ~rows), -1)[..., : rows.shape[-1]].mT.view(weight.dtype)


def unaligned(weight: torch.Tensor) -> torch.Tensor:
    """Return a padded copy of ``weight`` whose rows start one byte later."""
    rows = weight.view(torch.uint8).mT
    return torch.cat((~rows, rows, ~rows), -1)[..., rows.shape[-1] : 2 * rows.shape[-1]].mT.view(weight.dtype)


def one_column(weight: torch.Tensor) -> torch.Tensor:
    """Return the first column of ``weight`` (..., K, N) expanded to N columns, so that ``stride(-1)`` is 0."""
    return weight[..., :1].expand_as(weight)


def one_expert(weight: torch.Tensor) -> torch.Tensor:
    """Return the first expert of ``weight`` (E, K, N) expanded to E experts, so that ``stride(0)`` is 0."""
    return weight[:1].expand_as(weight)


def every_other_expert(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` (E, K, N) stored as every other expert of a larger stack."""
    rows = weight.view(torch.uint8).mT
    return torch.stack((rows, ~rows), 1).flatten(0, 1)[::2].mT.view(weight.dtype)


def stride_errors(good: Sample, name: str) -> Iterator[ErrorInput]:
    """Yield calls whose weight is not the transposed view of a row-major weight.

    Args:
        good: valid call whose second argument is the weight.
        name: name of the weight argument.
    """
    text = (
        rf"got {name} with shape .* and strides .*; expected .*, with stride\(-2\) == 1: pass {name}\.mT if {name} is "
        rf"stored as .*, or {name}\.mT\.contiguous\(\)\.mT"
    )
    a, weight, *rest = good.args
    codes = weight.view(torch.uint8)
    for what, wrong in (
        ("as-stored", codes.mT.contiguous()),
        ("stored-transposed", codes.contiguous()),
        ("apart", torch.stack((codes, codes), -1)[..., 0]),
        ("rows-apart", torch.stack((codes.mT, codes.mT), -1)[..., 0].mT),
    ):
        yield ErrorInput(
            f"{name}-{what}-{good.name}", (a, wrong.view(weight.dtype), *rest), good.kwargs, ValueError, text
        )


def scale_stride_errors(good: Sample, *places: int) -> Iterator[ErrorInput]:
    """Yield calls in which FP4 block scales have the right values and shape, but the strides of a transposed view.

    Args:
        good: valid call in NVFP4.
        places: indices of the scales among the arguments.
    """
    text = r"got \w*scale with shape .* and strides .*, a transposed view; expected block scales by row"
    for place in places:
        scale = good.args[place].view(torch.uint8)
        for outer, inner in ((-2, -1), (0, 1)):
            if (outer != 0 or scale.dim() > 3) and min(scale.shape[outer], scale.shape[inner]) > 1:
                wrong = scale.transpose(outer, inner).contiguous().transpose(outer, inner).view(torch.float8_e4m3fn)
                args = (*good.args[:place], wrong, *good.args[place + 1 :])
                yield ErrorInput(f"scale-{place}-transposed-{outer}-{good.name}", args, good.kwargs, ValueError, text)
