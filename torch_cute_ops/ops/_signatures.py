"""The arguments of the ops that quantise rows: each kind of list once, as a schema and as a function.

The function takes the arguments as the op does and passes them on, arranged as ``RowQuant`` wants them: (input,
residual, weight, factor, eps, choices), where ``factor`` is the global scale of FP4 or the given scale of FP8, and
``choices`` are those of the format.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float, tuple[Any, ...]], Any]

FP4_CHOICES = ("block_size", "scale_format", "scale_layout")
FP8_CHOICES = ("granularity", "scale_layout")


class Signature(NamedTuple):
    """One kind of list.

    Attributes:
        schema: as in the op's schema.
        arrange: the function; called with what it shall call, and the arguments.
        choices: names of the format's choices.
    """

    schema: str
    arrange: Callable[..., Any]
    choices: tuple[str, ...]


_FP4 = "int block_size=16, str? scale_format=None"
_FP4_LAID_OUT = f'{_FP4}, str scale_layout="linear"'
_FP4_NORM = "Tensor weight, Tensor? global_scale=None, float eps=1e-6"
_FP8 = 'str granularity="token", str scale_layout="row"'
_FP8_NORM = "Tensor weight, Tensor? scale=None, float eps=1e-6"


def _fp4(
    call: Call,
    input: Tensor,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> Any:
    return call(input, None, None, global_scale, 0.0, (block_size, scale_format, scale_layout))


def _fp4_norm(
    call: Call,
    input: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> Any:
    return call(input, None, weight, global_scale, eps, (block_size, scale_format, scale_layout))


def _fp4_add_norm(
    call: Call,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "linear",
) -> Any:
    return call(input, residual, weight, global_scale, eps, (block_size, scale_format, scale_layout))


def _fp4_add_norm_both_layouts(
    call: Call,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
) -> Any:
    return call(input, residual, weight, global_scale, eps, (block_size, scale_format, "128x4"))


def _fp8(
    call: Call, input: Tensor, scale: Tensor | None = None, granularity: str = "token", scale_layout: str = "row"
) -> Any:
    return call(input, None, None, scale, 0.0, (granularity, scale_layout))


def _fp8_norm(
    call: Call,
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
) -> Any:
    return call(input, None, weight, scale, eps, (granularity, scale_layout))


def _fp8_add_norm(
    call: Call,
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    granularity: str = "token",
    scale_layout: str = "row",
) -> Any:
    return call(input, residual, weight, scale, eps, (granularity, scale_layout))


FP4 = Signature(f"Tensor input, Tensor? global_scale=None, {_FP4_LAID_OUT}", _fp4, FP4_CHOICES)
FP4_NORM = Signature(f"Tensor input, {_FP4_NORM}, {_FP4_LAID_OUT}", _fp4_norm, FP4_CHOICES)
FP4_ADD_NORM = Signature(f"Tensor input, Tensor(a!) residual, {_FP4_NORM}, {_FP4_LAID_OUT}", _fp4_add_norm, FP4_CHOICES)
FP4_ADD_NORM_BOTH_LAYOUTS = Signature(
    f"Tensor input, Tensor(a!) residual, {_FP4_NORM}, {_FP4}", _fp4_add_norm_both_layouts, FP4_CHOICES[:2]
)
FP8 = Signature(f"Tensor input, Tensor? scale=None, {_FP8}", _fp8, FP8_CHOICES)
FP8_NORM = Signature(f"Tensor input, {_FP8_NORM}, {_FP8}", _fp8_norm, FP8_CHOICES)
FP8_ADD_NORM = Signature(f"Tensor input, Tensor(a!) residual, {_FP8_NORM}, {_FP8}", _fp8_add_norm, FP8_CHOICES)
