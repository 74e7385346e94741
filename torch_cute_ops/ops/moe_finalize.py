"""``moe_finalize``: the experts' results of a token, gathered, weighted and added up."""

from typing import NamedTuple

import torch

from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import Kernels, aligned, are_int32, readable_rows
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.compiler import Wanted
from torch_cute_ops.runtime.dispatch import is_plain_eager, mark_written

NAME = "moe_finalize"
UNIT = 8
"""What the length of a row is a multiple of: elements of two bytes that a thread takes at once."""


def moe_finalize(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the rows that the experts made of each token, weight them and add them up, in one pass over memory.

    ``out[m] = residual[m] + Σ_j weights[m, j] · input[expanded_to_permuted[m, j]]``, in fp32 and in the order of j,
    each product and each sum rounded; the result is rounded once to the dtype of ``input``. Where the index is negative
    nothing is read and nothing added, whatever the weight is.

    Args:
        input: (R, H), bfloat16, float16 or float32, in the experts' order; H is a multiple of 8. Rows may be strided.
        expanded_to_permuted: (M, topk) int32, rows of ``input``, or -1: as :func:`moe_route` gives it. An index from R
            on is not refused, and reads what lies there.
        weights: (M, topk) float32.
        residual: (M, H) in the dtype of ``input``, such as a shared expert's result, or ``None``.
        out: tensor to write into. It may be ``residual``, and shares no memory with ``input``.

    Returns:
        (M, H) in the dtype of ``input``.

    Raises:
        ValueError: for a wrong shape or device, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, expanded_to_permuted, weights, residual):
        return _run(input, expanded_to_permuted, weights, residual, out)
    args = (input, expanded_to_permuted, weights, residual)
    if out is None:
        return torch.ops.cute.moe_finalize.default(*args)
    torch.ops.cute.moe_finalize.out(*args, out=out)
    return out


def _check(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    _checks.check_dtype(NAME, "input", input, _checks.INPUT_DTYPES)
    _checks.check_matrix(NAME, "input", input, "(R, H)")
    width = input.shape[1]
    if width == 0 or width % UNIT:
        raise ValueError(f"cute::{NAME}: input has rows of {width} elements; expected a positive multiple of {UNIT}")
    _checks.check_dtype(NAME, "expanded_to_permuted", expanded_to_permuted, (torch.int32,))
    _checks.check_matrix(NAME, "expanded_to_permuted", expanded_to_permuted, "(M, topk)")
    tokens, topk = expanded_to_permuted.shape
    _checks.check_topk(NAME, topk)
    _checks.check_device(NAME, "expanded_to_permuted", expanded_to_permuted, "input", input.device)
    _checks.check_dtype(NAME, "weights", weights, (torch.float32,))
    _checks.check_shape(NAME, "weights", weights, (tokens, topk), "the shape of expanded_to_permuted")
    _checks.check_device(NAME, "weights", weights, "input", input.device)
    if residual is not None:
        _checks.check_dtype(NAME, "residual", residual, (input.dtype,))
        _checks.check_shape(NAME, "residual", residual, (tokens, width), "a row for each token, as long as input's")
        _checks.check_device(NAME, "residual", residual, "input", input.device)
    _checks.check_no_grad(NAME, input, weights, residual)


class _Facts(NamedTuple):
    """What a launcher was made for."""

    hidden: int
    dtype: torch.dtype
    topk: int
    residual: bool
    device: int


def _wanted(facts: _Facts, arch: Arch) -> Wanted:
    from torch_cute_ops.kernels import moe_finalize as family

    config = family.plan(facts.dtype, facts.hidden, facts.topk, facts.residual, pdl=settings.PDL)
    return Wanted(family.KERNEL, config)


_kernels = Kernels(NAME, _wanted, {})


def _run(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The way of nearly every call; whatever it does not expect it leaves to ``_run_checked``, as it does what the
    kernel refuses."""
    shape, index = input.shape, expanded_to_permuted.shape
    if len(shape) != 2 or len(index) != 2 or not index[0]:
        return _run_checked(input, expanded_to_permuted, weights, residual, out)
    launcher = _kernels.found.get((shape[1], input.dtype, index[1], residual is not None, input.get_device()))
    if (
        launcher is None
        or not are_int32(expanded_to_permuted)
        or _checks.asks_for_grad(input, weights, residual, out)
        or (out is not None and out.numel() and not _checks.are_apart(out, input))
    ):
        return _run_checked(input, expanded_to_permuted, weights, residual, out)
    result = out
    if result is None:
        result = allocator(launcher.device)((index[0], shape[1]), (shape[1], 1), input.dtype)
    try:
        launcher.function(input, expanded_to_permuted, weights, residual, result, launcher.sms)
    except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
        return _run_checked(input, expanded_to_permuted, weights, residual, out)
    except Exception as error:  # from CUDA
        raise launch_error(NAME, error, input, expanded_to_permuted, weights, residual) from error
    if out is not None:
        mark_written((out,))
    return result


def _run_checked(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """``_run`` with every check, and copies of tensors that the kernel does not read where they are."""
    _check(input, expanded_to_permuted, weights, residual)
    tokens, topk = expanded_to_permuted.shape
    facts = _Facts(input.shape[1], input.dtype, topk, residual is not None, input.get_device())
    launcher = _kernels.get(facts, input.device)
    if out is None:
        out = input.new_empty(tokens, facts.hidden)
    else:
        _checks.check_output(NAME, "out", out, (tokens, facts.hidden), input.dtype, input.device)
        _checks.check_aligned(NAME, "out", out)
        _checks.check_apart(NAME, "out", out, "input", input)
        mark_written((out,))
    if tokens:
        rows = readable_rows(input)
        added = None if residual is None else readable_rows(residual)
        index, factors = aligned(expanded_to_permuted), aligned(weights)
        try:
            launcher.function(rows, index, factors, added, out, launcher.sms)
        except RuntimeError:  # of torch, such as memory that ran out
            raise
        except Exception as error:  # from CUDA
            raise launch_error(NAME, error, input, expanded_to_permuted, weights, residual) from error
    return out


def _cuda_out(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    _run(input, expanded_to_permuted, weights, residual, out)


def _needed(
    arch: Arch,
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[Wanted, ...]:
    """The kernel that a call needs; it is the same source on every architecture."""
    _check(input, expanded_to_permuted, weights, residual)
    return (_wanted(_Facts(input.shape[1], input.dtype, weights.shape[1], residual is not None, 0), arch),)


def _example(
    *,
    hidden: int,
    dtype: torch.dtype,
    topk: int,
    residual: bool = False,
    device: torch.device | int | str | None = None,
) -> Call:
    """A call on one token with these static facts; ``hidden`` is H, ``residual`` whether calls will pass one."""
    target = cuda_device(device)
    row = torch.zeros(1, hidden, dtype=dtype, device=target)
    index = torch.zeros(1, topk, dtype=torch.int32, device=target)
    weights = torch.zeros(1, topk, dtype=torch.float32, device=target)
    return (row, index, weights, row if residual else None), {}


OP = OpSpec(
    name=NAME,
    arguments="Tensor input, Tensor expanded_to_permuted, Tensor weights, Tensor? residual=None",
    outputs=("out",),
    check=_check,
    cuda=_run,
    cuda_out=_cuda_out,
    function=moe_finalize,
    example=_example,
    kernels=_needed,
)
