"""``moe_swiglu_fp8quant``: SwiGLU's gate and FP8 quantisation of the rows that experts have."""

from typing import NamedTuple

import torch

from torch_cute_ops.fake import moe_swiglu_fp8quant as fake
from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import Kernels, aligned, are_int32, readable_rows
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.compiler import Wanted
from torch_cute_ops.runtime.dispatch import is_plain_eager, mark_written

NAME = "moe_swiglu_fp8quant"
BLOCK = FP8_BLOCK128.block_size
Outputs = tuple[torch.Tensor, torch.Tensor]


def moe_swiglu_fp8quant(
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    out: Outputs | None = None,
) -> Outputs:
    """Gate the rows that experts have as SwiGLU does and quantise them to FP8, in one pass over memory.

    As :func:`silu_mul_fp8quant` with granularity ``"block128"`` and scales by columns, of the rows that are not
    padding: those are found on the device, and the others are neither read nor written.

    Args:
        input: (R, 2I), each expert's rows from ``offsets[e]`` on; or (E, max_rows, 2I), each expert's rows first.
            bfloat16, float16 or float32; I is a multiple of 128. Rows may be strided.
        offsets: (E + 1,) int32, where each expert's rows begin, and the last one's end; for an input (R, 2I), and only
            that. At most 512 experts.
        counts: (E,) int32, how many rows each expert has, of those that the buffer has room for. Without it, all up to
            the next offset: for rows without padding, which are found faster so.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (R, I) or (E, max_rows, I) float8_e4m3fn. What rows of padding hold is not specified.
        ``scale``: (I/128, R) or (I/128, E, max_rows) float32.

    Raises:
        ValueError: for a wrong shape or device, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, offsets, counts):
        return _run(input, offsets, counts, out)
    args = (input, offsets, counts)
    if out is None:
        return torch.ops.cute.moe_swiglu_fp8quant.default(*args)
    y, scale = out
    torch.ops.cute.moe_swiglu_fp8quant.out(*args, y=y, scale=scale)
    return out


def _check(input: torch.Tensor, offsets: torch.Tensor | None = None, counts: torch.Tensor | None = None) -> None:
    _checks.check_rows(NAME, "input", input, FP8_BLOCK128, _checks.INPUT_DTYPES, halves=True)
    _checks.check_expert_rows(NAME, input, offsets, counts)
    _checks.check_no_grad(NAME, input)


class _Facts(NamedTuple):
    """What a launcher was made for."""

    hidden: int
    dtype: torch.dtype
    offsets: bool
    counts: bool
    device: int


def _wanted(facts: _Facts, arch: Arch) -> Wanted:
    from torch_cute_ops.kernels import row_quant

    problem = row_quant.Problem(
        source="silu_mul",
        dtype=facts.dtype,
        weight_dtype=None,
        width=facts.hidden // 2,
        norm_width=facts.hidden // 2,
        fmt=FP8_BLOCK128,
        layout=COLUMN,
        rows="experts",
        has_offsets=facts.offsets,
        has_counts=facts.counts,
    )
    return Wanted(row_quant.KERNEL, row_quant.plan(problem, arch, pdl=settings.PDL))


_kernels = Kernels(NAME, _wanted, {})


def _run(
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out: Outputs | None = None,
) -> Outputs:
    """The way of nearly every call; whatever it does not expect it leaves to ``_run_checked``, as it does what the
    kernel refuses."""
    shape = input.shape
    masked = offsets is None
    launcher = None
    if shape and input.numel() and _has_as_many(shape, offsets, counts) and are_int32(offsets, counts):
        facts = (shape[-1], input.dtype, offsets is not None, counts is not None, input.get_device())
        launcher = _kernels.found.get(facts)
    if launcher is None or _checks.asks_for_grad(input, *(out or ())):
        return _run_checked(input, offsets, counts, out)
    width = shape[-1] // 2
    rows = shape[0] * shape[1] if masked else shape[0]
    try:
        if out is None:
            new = allocator(launcher.device)
            y = new((rows, width), (width, 1), torch.float8_e4m3fn)
            scale = new((width // BLOCK, rows), (rows, 1), torch.float32)
        elif masked:
            if len(out) != 2 or out[0].shape != (*shape[:2], width) or out[1].shape != (width // BLOCK, *shape[:2]):
                return _run_checked(input, offsets, counts, out)
            y, scale = out[0].view(rows, width), out[1].view(-1, rows)
        else:
            y, scale = out
        given = input.view(rows, shape[2]) if masked else input
        ctas = launcher.sms * launcher.config.waves
        launcher.function(given, None, None, None, y, scale, None, None, offsets, counts, 0.0, ctas)
    except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, and for what has no view as a matrix
        return _run_checked(input, offsets, counts, out)
    except Exception as error:  # from CUDA
        raise launch_error(NAME, error, input, offsets, counts) from error
    if out is not None:
        mark_written(out)
        return out
    return (y.view(*shape[:2], width), scale.view(-1, *shape[:2])) if masked else (y, scale)


def _has_as_many(shape: torch.Size, offsets: torch.Tensor | None, counts: torch.Tensor | None) -> bool:
    """Whether offsets, counts and the input's dimensions are of the same number of experts."""
    if offsets is None:
        return counts is not None and len(shape) == 3 and counts.shape == shape[:1] and shape[0] <= MAX_EXPERTS
    experts = offsets.numel() - 1
    return len(shape) == 2 and 1 <= experts <= MAX_EXPERTS and (counts is None or counts.shape == (experts,))


def _run_checked(
    input: torch.Tensor, offsets: torch.Tensor | None, counts: torch.Tensor | None, out: Outputs | None
) -> Outputs:
    """``_run`` with every check, and copies of tensors that the kernel does not read where they are."""
    _check(input, offsets, counts)
    hidden = input.shape[-1]
    facts = _Facts(hidden, input.dtype, offsets is not None, counts is not None, input.get_device())
    launcher = _kernels.get(facts, input.device)
    if out is None:
        out = fake.moe_swiglu_fp8quant(input, offsets, counts)
    else:
        _checks.check_row_outputs(NAME, out, fake.moe_swiglu_fp8quant(input.to("meta")), input.device)
        mark_written(out)
    if input.numel():
        rows = readable_rows(input.reshape(-1, hidden))
        y, scale = out[0].view(len(rows), -1), out[1].view(-1, len(rows))
        table = [None if tensor is None else aligned(tensor) for tensor in (offsets, counts)]
        ctas = launcher.sms * launcher.config.waves
        try:
            launcher.function(rows, None, None, None, y, scale, None, None, *table, 0.0, ctas)
        except RuntimeError:  # of torch, such as memory that ran out
            raise
        except Exception as error:  # from CUDA
            raise launch_error(NAME, error, input, offsets, counts) from error
    return out


def _cuda_out(
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    y: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    _run(input, offsets, counts, (y, scale))


def _needed(
    arch: Arch, input: torch.Tensor, offsets: torch.Tensor | None = None, counts: torch.Tensor | None = None
) -> tuple[Wanted, ...]:
    """The kernel that a call needs."""
    _check(input, offsets, counts)
    return (_wanted(_Facts(input.shape[-1], input.dtype, offsets is not None, counts is not None, 0), arch),)


def _example(
    *,
    hidden: int,
    dtype: torch.dtype,
    offsets: bool = True,
    counts: bool = True,
    device: torch.device | int | str | None = None,
) -> Call:
    """A call on one row with these static facts: ``hidden`` is 2I; ``offsets`` and ``counts`` tell what calls pass."""
    target = cuda_device(device)
    row = torch.zeros((1, hidden) if offsets else (1, 1, hidden), dtype=dtype, device=target)
    ends = torch.zeros(2, dtype=torch.int32, device=target) if offsets else None
    return (row, ends, torch.zeros(1, dtype=torch.int32, device=target) if counts else None), {}


OP = OpSpec(
    name=NAME,
    arguments="Tensor input, Tensor? offsets=None, Tensor? counts=None",
    outputs=("y", "scale"),
    check=_check,
    cuda=_run,
    cuda_out=_cuda_out,
    function=moe_swiglu_fp8quant,
    example=_example,
    kernels=_needed,
)
