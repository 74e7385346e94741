"""``moe_permute_fp8quant``: tokens in the experts' order and FP8."""

from typing import NamedTuple

import torch

from torch_cute_ops.fake import moe_permute_fp8quant as fake
from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import Kernels, aligned, are_int32, readable_rows
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.compiler import Wanted
from torch_cute_ops.runtime.dispatch import is_plain_eager, mark_written

NAME = "moe_permute_fp8quant"
BLOCK = FP8_BLOCK128.block_size
Outputs = tuple[torch.Tensor, torch.Tensor]


def moe_permute_fp8quant(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
    *,
    out: Outputs | None = None,
) -> Outputs:
    """Put each token's row where its experts want it, quantised to FP8, in one pass over memory.

    ``y[r]`` and ``scale[:, r]`` are row ``permuted_to_expanded[r] // topk`` of ``input``, quantised as
    :func:`rmsnorm_fp8quant` does with granularity ``"block128"`` and scales by columns. Rows whose index is negative
    are padding, and not written.

    The kernel reads and quantises each row once, and stores it ``topk`` times. It finds where to by
    ``expanded_to_permuted``; without that it is made from ``permuted_to_expanded`` first, by some small kernels more.

    Args:
        input: (M, H), bfloat16, float16 or float32; H is a multiple of 128. Rows may be strided.
        permuted_to_expanded: (R,) int32, for each row the pair that it is for, ``token · topk + j``, or -1; as
            :func:`moe_route` gives it. A pair is there once at most.
        topk: experts of a token, at most 16.
        expanded_to_permuted: (M, topk) int32, the row of each pair, or -1: the inverse of ``permuted_to_expanded``, as
            :func:`moe_route` gives it too. Of two that are no inverses of each other neither decides. Rows from R on
            are not refused, and written where they would be.
        out: tensors to write ``(y, scale)`` into.

    Returns:
        ``y``: (R, H) float8_e4m3fn. What rows of padding hold is not specified.
        ``scale``: (H/128, R) float32.

    Raises:
        ValueError: for a wrong shape or device, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, input, permuted_to_expanded, expanded_to_permuted):
        return _run(input, permuted_to_expanded, topk, expanded_to_permuted, out)
    args = (input, permuted_to_expanded, topk, expanded_to_permuted)
    if out is None:
        return torch.ops.cute.moe_permute_fp8quant.default(*args)
    y, scale = out
    torch.ops.cute.moe_permute_fp8quant.out(*args, y=y, scale=scale)
    return out


def _check(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
) -> None:
    _checks.check_rows(NAME, "input", input, FP8_BLOCK128, _checks.INPUT_DTYPES)
    _checks.check_matrix(NAME, "input", input, "(M, H)")
    _checks.check_topk(NAME, topk)
    _checks.check_integers(NAME, "permuted_to_expanded", permuted_to_expanded, "input", input.device)
    if expanded_to_permuted is not None:
        name, shape = "expanded_to_permuted", (input.shape[0], topk)
        _checks.check_dtype(NAME, name, expanded_to_permuted, (torch.int32,))
        _checks.check_shape(NAME, name, expanded_to_permuted, shape, "topk rows for each of input")
        _checks.check_device(NAME, name, expanded_to_permuted, "input", input.device)
    _checks.check_no_grad(NAME, input)


class _Facts(NamedTuple):
    """What a launcher was made for."""

    hidden: int
    dtype: torch.dtype
    topk: int
    device: int


def _wanted(facts: _Facts, arch: Arch) -> Wanted:
    from torch_cute_ops.kernels import moe_permute

    config = moe_permute.plan(facts.dtype, facts.hidden, facts.topk, pdl=settings.PDL)
    return Wanted(moe_permute.KERNEL, config)


_kernels = Kernels(NAME, _wanted, {})


def _run(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
    out: Outputs | None = None,
) -> Outputs:
    """The way of nearly every call; whatever it does not expect it leaves to ``_run_checked``, as it does what the
    kernel refuses."""
    shape = input.shape
    launcher = None
    if len(shape) == 2 and expanded_to_permuted is not None and permuted_to_expanded.dim() == 1:
        launcher = _kernels.found.get((shape[1], input.dtype, topk, input.get_device()))
    if (
        launcher is None
        or not shape[0]
        or not permuted_to_expanded.shape[0]
        or not are_int32(permuted_to_expanded, expanded_to_permuted)
        or permuted_to_expanded.device != launcher.device
        or _checks.asks_for_grad(input, *(out or ()))
    ):
        return _run_checked(input, permuted_to_expanded, topk, expanded_to_permuted, out)
    rows, width = permuted_to_expanded.shape[0], shape[1]
    new = allocator(launcher.device)
    if out is None:
        y = new((rows, width), (width, 1), torch.float8_e4m3fn)
        scale = new((width // BLOCK, rows), (rows, 1), torch.float32)
    else:
        if len(out) != 2 or out[0].dim() != 2 or out[0].shape[0] != rows:
            return _run_checked(input, permuted_to_expanded, topk, expanded_to_permuted, out)
        y, scale = out
    try:
        kept = launcher.config.workspace_shape(shape[0])
        # Where it is not needed any aligned one will do.
        workspace = scale if kept is None else new(kept, (kept[1], 1), torch.float32)
        launcher.function(input, y, scale, expanded_to_permuted, permuted_to_expanded, workspace)
    except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
        return _run_checked(input, permuted_to_expanded, topk, expanded_to_permuted, out)
    except Exception as error:  # from CUDA
        raise launch_error(NAME, error, input, permuted_to_expanded, topk, expanded_to_permuted) from error
    if out is not None:
        mark_written(out)
        return out
    return y, scale


def _run_checked(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None,
    out: Outputs | None,
) -> Outputs:
    """``_run`` with every check, and copies of tensors that the kernel does not read where they are."""
    _check(input, permuted_to_expanded, topk, expanded_to_permuted)
    facts = _Facts(input.shape[1], input.dtype, topk, input.get_device())
    launcher = _kernels.get(facts, input.device)
    if out is None:
        out = fake.moe_permute_fp8quant(input, permuted_to_expanded, topk)
    else:
        like = fake.moe_permute_fp8quant(input.to("meta"), permuted_to_expanded, topk)
        _checks.check_row_outputs(NAME, out, like, input.device)
        mark_written(out)
    if input.numel() and out[0].numel():
        if expanded_to_permuted is None:
            expanded_to_permuted = _inverse(permuted_to_expanded, input.shape[0], topk)
        kept = launcher.config.workspace_shape(len(input)) or (1, 1)
        workspace = torch.empty(kept, dtype=torch.float32, device=input.device)
        tables = aligned(expanded_to_permuted), aligned(permuted_to_expanded)
        try:
            launcher.function(readable_rows(input), *out, *tables, workspace)
        except RuntimeError:  # of torch, such as memory that ran out
            raise
        except Exception as error:  # from CUDA
            raise launch_error(NAME, error, input, permuted_to_expanded, topk, expanded_to_permuted) from error
    return out


def _inverse(permuted_to_expanded: torch.Tensor, tokens: int, topk: int) -> torch.Tensor:
    """The row of each pair (M, topk), or -1."""
    pairs = tokens * topk
    inverse = permuted_to_expanded.new_full((pairs + 1,), -1)
    rows = torch.arange(len(permuted_to_expanded), dtype=torch.int32, device=inverse.device)
    # Padding's place is behind the last pair.
    places = torch.where(permuted_to_expanded < 0, pairs, permuted_to_expanded)
    return inverse.scatter_(0, places.long(), rows)[:pairs].view(tokens, topk)


def _cuda_out(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
    *,
    y: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    _run(input, permuted_to_expanded, topk, expanded_to_permuted, (y, scale))


def _needed(
    arch: Arch,
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
) -> tuple[Wanted, ...]:
    """The kernel that a call needs."""
    _check(input, permuted_to_expanded, topk, expanded_to_permuted)
    return (_wanted(_Facts(input.shape[1], input.dtype, topk, 0), arch),)


def _example(*, hidden: int, dtype: torch.dtype, topk: int, device: torch.device | int | str | None = None) -> Call:
    """A call on one token with these static facts; ``hidden`` is H."""
    target = cuda_device(device)
    pairs = torch.arange(topk, dtype=torch.int32, device=target)
    return (torch.zeros(1, hidden, dtype=dtype, device=target), pairs, topk, pairs.view(1, topk)), {}


OP = OpSpec(
    name=NAME,
    arguments="Tensor input, Tensor permuted_to_expanded, int topk, Tensor? expanded_to_permuted=None",
    outputs=("y", "scale"),
    check=_check,
    cuda=_run,
    cuda_out=_cuda_out,
    function=moe_permute_fp8quant,
    example=_example,
    kernels=_needed,
)
