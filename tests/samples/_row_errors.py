"""Error inputs that most ops share: wrong rows, scalars and outputs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._inputs import ErrorInput
from samples._rows import Family, random_rows, short


def error_maker(tensors: dict[str, Any], kwargs: dict[str, Any]) -> Callable[..., ErrorInput]:
    """Return a function that makes error inputs from a valid call. This function takes a name, an error, a message,
    keyword arguments that extend or replace ``kwargs``, and, by name, tensors that replace entries of ``tensors``."""

    def bad(
        name: str, error: type[Exception], match: str, with_: dict[str, Any] | None = None, **given: Any
    ) -> ErrorInput:
        return ErrorInput(name, tuple((tensors | given).values()), kwargs | (with_ or {}), error, match)

    return bad


def input_errors(good: torch.Tensor) -> Iterator[ErrorInput]:
    """Yield rows of a wrong dtype, without a dimension, or of zero length, and rows that require grad."""
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool):
        text = f"got input with dtype {short(dtype)}; expected bfloat16"
        yield ErrorInput(f"input-{short(dtype)}", (good.to(dtype),), {}, TypeError, text)
    yield ErrorInput("input-0d", (good[0, 0],), {}, ValueError, "input has no dimension")
    yield ErrorInput("width-zero", (good[:, :0],), {}, ValueError, "last dimension of 0; ")
    grad = good.detach().clone().requires_grad_()
    yield ErrorInput("input-requires-grad", (grad,), {}, ValueError, "no gradient")


def scalar_errors(
    name: str, good: torch.Tensor, kwargs: dict[str, Any] | None = None, args: tuple[Any, ...] = ()
) -> Iterator[ErrorInput]:
    """Yield wrong values of the argument ``name``, an fp32 tensor of one element, together with ``args`` and
    ``kwargs``."""
    device = good.device
    one = torch.ones(1, device=device)

    def bad(what: str, error: type[Exception], match: str, value: torch.Tensor) -> ErrorInput:
        return ErrorInput(f"{name.replace('_', '-')}-{what}", (good,), {**(kwargs or {}), name: value}, error, match)

    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        text = f"got {name} with dtype {short(dtype)}; expected float32"
        yield bad(short(dtype), TypeError, text, one.to(dtype))
    for shape in ((0,), (2,), (4, 1), (64,)):
        text = rf"got {name} with shape \({', '.join(map(str, shape))},?\); expected one element"
        yield bad(f"shape-{list(shape)}", ValueError, text, torch.ones(shape, device=device))
    yield bad("device", ValueError, f"{name} is on meta", one.to("meta"))
    if device.type == "cuda":
        yield bad("cpu", ValueError, f"{name} is on cpu", torch.ones(1))
        yield bad("cpu-0d", ValueError, f"{name} is on cpu", torch.ones(()))
    yield bad("requires-grad", ValueError, "no gradient", one.clone().requires_grad_())


def out_errors(
    args: tuple[Any, ...], kwargs: dict[str, Any], good: dict[str, torch.Tensor], device: torch.device
) -> Iterator[ErrorInput]:
    """Yield calls with ``args`` and ``kwargs`` in which one of the ``good`` outputs is replaced by a wrong output.

    float32 outputs are FP8 block scales, for which either layout is valid.
    """
    block_scales = [name for name, each in good.items() if name.startswith("scale") and each.dtype == torch.float32]

    def blank(*shape: int, dtype: torch.dtype, device: torch.device = device) -> torch.Tensor:
        storage = torch.uint8 if dtype.itemsize == 1 else dtype
        return torch.zeros(shape, dtype=storage, device=device).view(dtype)

    for name, tensor in good.items():

        def bad(what: str, error: type[Exception], match: str, value: torch.Tensor, name: str = name) -> ErrorInput:
            out = tuple({**good, name: value}.values())
            return ErrorInput(f"out-{name}-{what}", args, kwargs, error, rf"{name} {match}", out)

        dtype, (rows, *rest) = tensor.dtype, tensor.shape
        is_vector = not rest
        *inner, columns = rest or (0,)
        size, right = tensor.numel(), ", ".join(map(str, tensor.shape)) + "," * is_vector
        others = {
            torch.uint8: (torch.int8, torch.float32),
            torch.float8_e4m3fn: (torch.uint8, torch.float32),
            torch.bfloat16: (torch.float16, torch.float32),
            torch.float32: (torch.float16, torch.int32),
        }
        for wrong in others[dtype]:
            text = f"with dtype {short(wrong)}; expected "
            yield bad(short(wrong), TypeError, text, blank(*tensor.shape, dtype=wrong))
        of_matrix = () if is_vector else ((rows, *inner, columns + 4), (size,))
        for shape in ((rows + 1, *rest), (rows - 1, *rest), *of_matrix, (), (1, rows, *rest)):
            text = rf"with shape \({', '.join(map(str, shape))},?\); expected \({right}\)"
            yield bad(f"shape-{'x'.join(map(str, shape))}", ValueError, text, blank(*shape, dtype=dtype))
        if name in block_scales:
            text = "with shape .* and strides .* row-major or column-major"
            yield bad("every-other", ValueError, text, blank(rows, 2 * columns, dtype=dtype)[:, ::2])
            yield bad("rows-expanded", ValueError, text, blank(1, columns, dtype=dtype).expand(rows, -1))
            overlapping = blank(rows * columns, dtype=dtype).as_strided((rows, columns), (1, rows - 1))
            yield bad("columns-overlap", ValueError, text, overlapping)
        elif is_vector:
            yield bad("every-other", ValueError, "with strides .* contiguous", blank(2 * rows, dtype=dtype)[::2])
        else:
            text = "with strides .* contiguous"
            order = tuple(reversed(range(tensor.dim())))
            columns_first = blank(*reversed(tensor.shape), dtype=dtype).permute(order)
            yield bad("columns-first", ValueError, text, columns_first)
            yield bad("row-strided", ValueError, text, blank(rows, *inner, columns + 16, dtype=dtype)[..., :columns])
        yield bad("device", ValueError, "is on meta", blank(*tensor.shape, dtype=dtype, device=torch.device("meta")))
        if dtype.is_floating_point:
            leaf = blank(*tensor.shape, dtype=dtype).requires_grad_()
            yield bad("requires-grad", ValueError, "requires grad", leaf)
        if device.type == "cuda":
            yield bad("cpu", ValueError, "is on cpu", blank(*tensor.shape, dtype=dtype, device=torch.device("cpu")))
            if name not in ("scale_linear", "scale_out", "row_scale"):
                offset = blank(size + 16, dtype=dtype)[1 : 1 + size].view(tensor.shape)
                unaligned = bad("unaligned", ValueError, ".* multiple of 16 bytes", offset)
                yield replace(unaligned, is_address=True)


def rows_errors(family: Family, device: torch.device) -> Iterator[ErrorInput]:
    """Yield error inputs of an op that quantises rows and takes no other inputs."""
    yield from family.errors(random_rows(4, 128, device=device))
    kwargs, good = family.outputs(device)
    yield from out_errors((random_rows(4, 512, device=device),), kwargs, good, device)
