"""``moe_route``: the experts of each token, and the order of their rows."""

from typing import Any, NamedTuple

import torch

from torch_cute_ops.fake import moe_route as fake
from torch_cute_ops.formats.experts import MAX_EXPERTS, rows_bound
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import Kernels, aligned, are_int32
from torch_cute_ops.ops._spec import Call, OpSpec, check_outputs, cuda_device
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.compiler import Wanted
from torch_cute_ops.runtime.dispatch import is_plain_eager, mark_written

NAME = "moe_route"
SCORINGS = ("softmax", "sigmoid")
MAX_GROUPS = 32
MOST_ROWS = 2**31 - 2**20
"""Of the permutation, whose last rows CTAs step over by less than the difference."""
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moe_route(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: int | None = None,
    *,
    out: Outputs | None = None,
) -> Outputs:
    """Choose the experts of each token, and give each pair of a token and an expert its row in the experts' order.

    ``"softmax"``: the ``topk`` largest logits; weights are their softmax over all experts. ``"sigmoid"``, as of
    DeepSeek-V3: scores are sigmoids of the logits; the choice is by score plus ``bias``, among the experts of the
    ``topk_groups`` groups whose two best have the largest sums; weights are the scores without bias. All in fp32. Of
    equal experts, and groups, the first is chosen; a NaN comes last.

    Rows are in the order of the experts, those of one expert in the order of the tokens. Without ``max_rows`` each
    expert's begin at the next multiple of ``alignment``; with it, expert e's begin at ``e * max_rows``, and the pairs
    for which there is no room are dropped. Few tokens are one launch, more are two; no result depends on their timing.

    Args:
        logits: (M, E), bfloat16, float16 or float32, of up to 512 experts.
        topk: experts of a token, at most 16.
        bias: (E,) float32, added to sigmoids for the choice alone, or ``None``.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        num_groups: groups of equally many experts, at most 32; more than one for ``"sigmoid"`` only.
        topk_groups: how many of the groups a token may have experts of.
        renormalize: whether a token's weights are divided by their sum.
        scaling_factor: what weights are multiplied with in the end.
        alignment: what each expert's first row is a multiple of, without ``max_rows``. Products of other libraries want
            128, as a rule; :func:`grouped_mm_fp8` takes rows anywhere. With 1 there is no padding, which with few
            tokens and many experts nearly all rows would be, and R tells it how many rows an expert has, about.
        max_rows: rows of each expert; ``None``: as many as it needs.
        out: tensors to write the outputs into.

    Returns:
        ``weights``: (M, topk) float32, from the best expert on.
        ``ids``: (M, topk) int32, the experts.
        ``expanded_to_permuted``: (M, topk) int32, the row of each pair, -1 for one that was dropped.
        ``permuted_to_expanded``: (R,) int32, the pair of each row, ``token * topk + j``, -1 for padding. R is
            ``(M * topk + min(E, M * topk) * (alignment - 1)) // alignment * alignment``, which is enough however tokens
            are routed, or ``E * max_rows``.
        ``offsets``: (E + 1,) int32, where each expert's rows begin, and where the last one's padding ends.
        ``counts``: (E,) int32, how many rows each expert has.

    Raises:
        ValueError: for a wrong shape, device or number, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    numbers = (scoring, num_groups, topk_groups, renormalize, scaling_factor, alignment, max_rows)
    if is_plain_eager(out, logits, bias):
        return _run(logits, topk, bias, *numbers, out=out)
    if out is None:
        return torch.ops.cute.moe_route.default(logits, topk, bias, *numbers)
    torch.ops.cute.moe_route.out(logits, topk, bias, *numbers, **dict(zip(OP.out_names, out, strict=True)))
    return out


def _check(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: int | None = None,
) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f"cute::{NAME}: {what}")

    _checks.check_dtype(NAME, "logits", logits, _checks.INPUT_DTYPES)
    _checks.check_matrix(NAME, "logits", logits, "(M, E)")
    tokens, experts = logits.shape
    if not 1 <= experts <= MAX_EXPERTS:
        refuse(f"logits are of {experts} experts; expected 1 to {MAX_EXPERTS}")
    _checks.check_topk(NAME, topk)
    if scoring not in SCORINGS:
        refuse(f"scoring={scoring!r} is unknown; use one of {', '.join(map(repr, SCORINGS))}")
    if scoring == "softmax" and (bias is not None or num_groups != 1):
        given = "bias is given" if bias is not None else f"num_groups is {num_groups}"
        refuse(f"{given}; scoring='softmax' has neither bias nor groups, so use 'sigmoid', or leave it out")
    if bias is not None:
        _checks.check_dtype(NAME, "bias", bias, (torch.float32,))
        _checks.check_shape(NAME, "bias", bias, (experts,), "one for each expert")
        _checks.check_device(NAME, "bias", bias, "logits", logits.device)
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups:
        refuse(f"num_groups is {num_groups}; expected 1 to {MAX_GROUPS}, a divisor of the {experts} experts")
    if not 1 <= topk_groups <= num_groups:
        refuse(f"topk_groups is {topk_groups}; expected 1 to num_groups, {num_groups}")
    if topk > experts // num_groups * topk_groups:
        refuse(f"topk is {topk}, and a token has {experts // num_groups * topk_groups} experts to choose from")
    if alignment < 1:
        refuse(f"alignment is {alignment}; expected a positive number")
    if max_rows is not None and max_rows < 1:
        refuse(f"max_rows is {max_rows}; expected a positive number, or None")
    rows = rows_bound(tokens, topk, experts, alignment) if max_rows is None else experts * max_rows
    for count, what in ((rows, "rows"), (tokens * topk, "pairs")):
        if isinstance(count, int) and count > MOST_ROWS:
            refuse(f"there would be {count} {what}; expected up to {MOST_ROWS}, since an index is an int32")
    _checks.check_no_grad(NAME, logits, bias)


class _Facts(NamedTuple):
    """What a launcher was made for."""

    experts: int
    dtype: torch.dtype
    topk: int
    bias: bool
    scoring: str
    num_groups: int
    topk_groups: int
    renormalize: bool
    masked: bool
    device: int


def _wanted(facts: _Facts, arch: Arch) -> Wanted:
    from torch_cute_ops.kernels import moe_route as family

    config = family.plan(
        facts.dtype,
        facts.experts,
        facts.topk,
        facts.scoring == "sigmoid",
        facts.bias,
        facts.num_groups,
        facts.topk_groups,
        facts.renormalize,
        facts.masked,
        pdl=settings.PDL,
    )
    return Wanted(family.KERNEL, config)


_kernels = Kernels(NAME, _wanted, {})


def _run(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: int | None = None,
    out: Outputs | None = None,
) -> Outputs:
    """The way of nearly every call; whatever it does not expect it leaves to ``_run_checked``, as it does what the
    kernel refuses."""
    shape = logits.shape
    numbers = (scoring, num_groups, topk_groups, renormalize, scaling_factor, alignment, max_rows)
    launcher = None
    if len(shape) == 2 and shape[0] and alignment > 0 and (max_rows is None or max_rows > 0):
        choices = (topk, bias is not None, scoring, num_groups, topk_groups, renormalize, max_rows is not None)
        launcher = _kernels.found.get((shape[1], logits.dtype, *choices, logits.get_device()))
    if launcher is None or _checks.asks_for_grad(logits, bias, *(out or ())):
        return _run_checked(logits, topk, bias, *numbers, out=out)
    tokens, experts = shape
    if max_rows is None:
        pairs = tokens * topk
        rows = (pairs + min(experts, pairs) * (alignment - 1)) // alignment * alignment
    else:
        rows = experts * max_rows
    if max(rows, tokens * topk) > MOST_ROWS or (out is not None and not _are_outputs(out, rows)):
        return _run_checked(logits, topk, bias, *numbers, out=out)
    new = allocator(launcher.device)
    outputs = out
    if outputs is None:
        size, strides = (tokens, topk), (topk, 1)
        weights = new(size, strides, torch.float32)
        ids = new(size, strides, torch.int32)
        expanded = new(size, strides, torch.int32)
        permuted = new((rows,), (1,), torch.int32)
        offsets = new((experts + 1,), (1,), torch.int32)
        outputs = (weights, ids, expanded, permuted, offsets, new((experts,), (1,), torch.int32))
    words = launcher.config.workspace_words(tokens, rows, launcher.sms)
    workspace = new((words,), (1,), torch.int32) if words else outputs[5]
    unit = alignment if max_rows is None else max_rows
    try:
        launcher.function(logits, bias, *outputs, workspace, scaling_factor, unit, launcher.sms)
    except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
        return _run_checked(logits, topk, bias, *numbers, out=out)
    except Exception as error:  # from CUDA
        raise launch_error(NAME, error, logits, topk, bias, *numbers) from error
    if out is not None:
        mark_written(out)
    return outputs


def _are_outputs(out: Outputs, rows: int) -> bool:
    """Whether they are what the kernel takes on trust."""
    return len(out) == len(OP.outputs) and out[3].shape == (rows,) and are_int32(*out[1:])


def _run_checked(
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None,
    scoring: str,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    alignment: int,
    max_rows: int | None,
    out: Outputs | None,
) -> Outputs:
    """``_run`` with every check, and copies of tensors that the kernel does not read where they are."""
    numbers = (scoring, num_groups, topk_groups, renormalize, scaling_factor, alignment, max_rows)
    _check(logits, topk, bias, *numbers)
    tokens, experts = logits.shape
    choices = (topk, bias is not None, scoring, num_groups, topk_groups, renormalize, max_rows is not None)
    launcher = _kernels.get(_Facts(experts, logits.dtype, *choices, logits.get_device()), logits.device)
    if out is None:
        out = fake.moe_route(logits, topk, bias, *numbers)
    else:
        check_outputs(OP, out, (logits, topk, bias, *numbers), {})
        mark_written(out)
    permuted, counts = out[3], out[5]
    words = launcher.config.workspace_words(tokens, len(permuted), launcher.sms)
    workspace = torch.empty(words, dtype=torch.int32, device=logits.device) if words else counts
    unit = alignment if max_rows is None else max_rows
    given = logits if logits.stride(1) == 1 or experts == 1 else logits.contiguous()
    try:
        launcher.function(
            given, None if bias is None else aligned(bias), *out, workspace, scaling_factor, unit, launcher.sms
        )
    except RuntimeError:  # of torch, such as memory that ran out
        raise
    except Exception as error:  # from CUDA
        raise launch_error(NAME, error, logits, topk, bias, *numbers) from error
    return out


def _cuda_out(*args: Any, **kwargs: Any) -> None:
    out = tuple([kwargs.pop(name) for name in OP.out_names])
    _run(*args, out=out, **kwargs)  # type: ignore[misc]


def _needed(
    arch: Arch,
    logits: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: int | None = None,
) -> tuple[Wanted, ...]:
    """The kernel that a call needs; it is the same source on every architecture."""
    groups = (num_groups, topk_groups)
    _check(logits, topk, bias, scoring, *groups, renormalize, scaling_factor, alignment, max_rows)
    choices = (topk, bias is not None, scoring, *groups, renormalize, max_rows is not None)
    return (_wanted(_Facts(logits.shape[1], logits.dtype, *choices, 0), arch),)


def _example(
    *,
    experts: int,
    dtype: torch.dtype,
    topk: int,
    bias: bool = False,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    masked: bool = False,
    device: torch.device | int | str | None = None,
) -> Call:
    """A call on one token with these static facts; ``bias`` and ``masked`` tell whether calls pass it, and max_rows."""
    target = cuda_device(device)
    logits = torch.zeros(1, experts, dtype=dtype, device=target)
    added = torch.zeros(experts, dtype=torch.float32, device=target) if bias else None
    choices = (scoring, num_groups, topk_groups, renormalize)
    return (logits, topk, added, *choices), {"max_rows": 1 if masked else None}


OP = OpSpec(
    name=NAME,
    arguments=(
        'Tensor logits, int topk, Tensor? bias=None, str scoring="softmax", int num_groups=1, int topk_groups=1, '
        "bool renormalize=True, float scaling_factor=1.0, int alignment=128, int? max_rows=None"
    ),
    outputs=("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts"),
    check=_check,
    cuda=_run,
    cuda_out=_cuda_out,
    function=moe_route,
    example=_example,
    kernels=_needed,
)
