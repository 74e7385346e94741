"""Code shared by the ops that route tokens: the choice of each token's experts, and the order of the routed rows."""

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS, rows_bound
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelPath, Outputs
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, flag, size
from torch_cute_ops.runtime.allocate import New

if TYPE_CHECKING:
    from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

Tensor = torch.Tensor

SCORINGS: Final = ("softmax", "sigmoid")
MAX_GROUPS: Final = 32
MAX_ROWS: Final = 2**31 - 2**20
"""Largest number of rows of the experts' buffer, and of (token, expert) pairs. Indices are int32. In its last step, a
CTA may count beyond the last row; the margin between this number and 2^31 covers this."""


class ChoiceCall(NamedTuple):
    """Arguments of an op that chooses experts from logits. An argument that the op lacks keeps its default."""

    logits: Tensor
    topk: int
    bias: Tensor | None
    scoring: str
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float
    alignment: int = 1
    max_rows: int | None = None
    expert_factor: Tensor | None = None
    finite: bool = False


def check_choice(op: str, call: ChoiceCall) -> None:
    """Check the logits, and the arguments that control the choice of experts."""
    logits, topk, bias, num_groups = call.logits, call.topk, call.bias, call.num_groups

    def refuse(what: str) -> None:
        raise ValueError(f"cute::{op}: {what}")

    _checks.check_dtype(op, "logits", logits, _checks.INPUT_DTYPES)
    _checks.check_matrix(op, "logits", logits, "(M, E)")
    experts = logits.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        refuse(f"logits are of {experts} experts; expected 1 to {MAX_EXPERTS}")
    _checks.check_topk(op, topk)
    if call.scoring not in SCORINGS:
        refuse(f"scoring={call.scoring!r} is unknown; use one of {', '.join(map(repr, SCORINGS))}")
    check_per_expert(op, "bias", bias, logits)
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups:
        refuse(f"num_groups is {num_groups}; expected 1 to {MAX_GROUPS}, a divisor of the {experts} experts")
    if not 1 <= call.topk_groups <= num_groups:
        refuse(f"topk_groups is {call.topk_groups}; expected 1 to num_groups, {num_groups}")
    if topk > experts // num_groups * call.topk_groups:
        refuse(f"topk is {topk}, and a token has {experts // num_groups * call.topk_groups} experts to choose from")
    _checks.check_finite(op, "scaling_factor", call.scaling_factor)


def check_per_expert(op: str, name: str, values: Tensor | None, logits: Tensor) -> None:
    """Check that ``values`` is None, or float32 with one element per expert on the device of the logits."""
    if values is not None:
        _checks.check_dtype(op, name, values, (torch.float32,))
        _checks.check_shape(op, name, values, (logits.shape[1],), "one for each expert")
        _checks.check_device(op, name, values, "logits", logits.device)


def expert_choice(call: ChoiceCall) -> "ExpertChoice":
    """Return the parameters of the choice of experts, from which kernels are planned."""
    from torch_cute_ops.kernels.common.experts.layouts import ExpertChoice

    is_sigmoid, has_bias = call.scoring == "sigmoid", call.bias is not None
    groups = call.num_groups, call.topk_groups
    of_logits = call.logits.dtype, call.logits.shape[1], call.topk
    return ExpertChoice(*of_logits, is_sigmoid, has_bias, *groups, call.renormalize, call.finite)


def choice_key(call: ChoiceCall) -> tuple[Any, ...]:
    """Return the elements of the static key that describe the choice of experts. The call need not be checked yet."""
    logits = call.logits
    return (
        *(logits.shape[-1], logits.dtype, call.topk, call.bias is not None),
        *(call.scoring, call.num_groups, call.topk_groups, call.renormalize, call.finite),
    )


class ChoicePath(KernelPath[ChoiceCall]):
    """Call path of an op that chooses experts from logits."""

    call_type = ChoiceCall

    def declare(self) -> dict[str, Property]:
        choices = self.arguments_as_properties("topk", "scoring", "num_groups", "topk_groups", "renormalize", "finite")
        return {
            "experts": size(lambda call: call.logits.shape[1]),
            "dtype": dtype(lambda call: call.logits.dtype, REQUIRED),
            "bias": flag(lambda call: call.bias is not None),
            **choices,
        }

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        ones = torch.ones(given.experts, dtype=torch.float32, device=device)
        return {
            "logits": torch.zeros(1, given.experts, dtype=given.dtype, device=device),
            "topk": given.topk,
            "bias": ones if given.bias else None,
            "scoring": given.scoring,
            "num_groups": given.num_groups,
            "topk_groups": given.topk_groups,
            "renormalize": given.renormalize,
            "finite": given.finite,
            "max_rows": 1 if getattr(given, "masked", False) else None,
            "expert_factor": ones if getattr(given, "expert_factor", False) else None,
        }


def readable_logits(logits: Tensor) -> Tensor:
    """Return the logits, or a copy if their columns are not contiguous. Kernels need contiguous columns; rows may be
    strided."""
    return logits.contiguous() if logits.stride(1) != 1 and logits.shape[1] > 1 else logits


def check_order(op: str, tokens: int, topk: int, experts: int, alignment: int, max_rows: int | None) -> None:
    """Check ``alignment`` and ``max_rows``, and that indices of rows and pairs fit an int32."""

    def refuse(what: str) -> None:
        raise ValueError(f"cute::{op}: {what}")

    if alignment < 1:
        refuse(f"alignment is {alignment}; expected a positive number")
    if isinstance(max_rows, int) and max_rows < 1:
        refuse(f"max_rows is {max_rows}; expected a positive number, or None")
    rows = rows_bound(tokens, topk, experts, alignment) if max_rows is None else experts * max_rows
    for count, what in ((rows, "rows"), (tokens * topk, "pairs")):
        if isinstance(count, int) and count > MAX_ROWS:
            refuse(f"there would be {count} {what}; expected up to {MAX_ROWS}, since an index is an int32")


def is_number(scaling_factor: float) -> bool:
    """Return True if ``scaling_factor``, which is not checked yet, is a finite number."""
    return -math.inf < scaling_factor < math.inf


def rows_of_call(tokens: int, topk: int, experts: int, alignment: int, max_rows: int | None) -> int | None:
    """Return the number of rows in the experts' buffer, or None if an argument (none is checked yet) is wrong."""
    if alignment < 1 or (max_rows is not None and max_rows < 1):
        return None
    rows = rows_bound(tokens, topk, experts, alignment) if max_rows is None else experts * max_rows
    return rows if max(rows, tokens * topk) <= MAX_ROWS else None


def new_order(new: New, tokens: int, topk: int, rows: int, experts: int) -> Outputs:
    """Allocate ``expanded_to_permuted``, ``permuted_to_expanded``, ``offsets`` and ``counts``, uninitialised."""
    return (
        new((tokens, topk), (topk, 1), torch.int32),
        new((rows,), (1,), torch.int32),
        new((experts + 1,), (1,), torch.int32),
        new((experts,), (1,), torch.int32),
    )


def workspace_of(config: Any, slots: int, rows: int, sms: int, new: New, order: Outputs) -> Tensor:
    """Allocate the workspace of a call's kernels. If the kernels need none, return one of the outputs, which they
    ignore."""
    words = config.workspace_words(slots, rows, sms)
    return new((words,), (1,), torch.int32) if words else order[-1]
