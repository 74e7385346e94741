"""``moe_route``: choose the experts of each token, and order the routed rows by expert."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.ops._call import KernelLauncher, Outputs
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, are_int32
from torch_cute_ops.ops._properties import Property, flag
from torch_cute_ops.ops._routing import (
    ChoiceCall,
    ChoicePath,
    check_choice,
    check_order,
    choice_key,
    expert_choice,
    is_number,
    new_order,
    readable_logits,
    rows_of_call,
    workspace_of,
)
from torch_cute_ops.ops._signature import Scoring, SymInt
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Launcher(KernelLauncher[ChoiceCall]):
    def run(self, call: ChoiceCall, out: Any) -> Any:
        shape, topk = call.logits.shape, call.topk
        if len(shape) != 2 or not shape[0] or not is_number(call.scaling_factor):
            return None
        tokens, experts = shape
        rows = rows_of_call(tokens, topk, experts, call.alignment, call.max_rows)
        if rows is None:
            return None
        if out is None:
            new = allocator(self.device)
            size, strides = (tokens, topk), (topk, 1)
            weights, ids = new(size, strides, torch.float32), new(size, strides, torch.int32)
            out = (weights, ids, *new_order(new, tokens, topk, rows, experts))
        elif out[3].shape != (rows,) or not are_int32(*out[1:]):
            return None
        self._call(call.logits, call.bias, out, rows, call.scaling_factor, call.max_rows or call.alignment)
        return out

    def launch(self, call: ChoiceCall, out: Outputs) -> None:
        logits = readable_logits(call.logits)
        bias = None if call.bias is None else aligned(call.bias)
        self._call(logits, bias, out, len(out[3]), call.scaling_factor, call.max_rows or call.alignment)

    def _call(
        self, logits: Tensor, bias: Tensor | None, out: Outputs, rows: int, scaling_factor: float, unit: int
    ) -> None:
        workspace = workspace_of(self.config, logits.shape[0], rows, self.sms, allocator(self.device), out)
        self.function(logits, bias, *out, workspace, scaling_factor, unit, self.sms)


class _Route(ChoicePath):
    launcher_type = _Launcher
    any_address = frozenset(("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts"))

    def key(self, call: ChoiceCall, device: int) -> tuple[Any, ...]:
        return *choice_key(call), call.max_rows is None, device

    def check(self, call: ChoiceCall) -> None:
        check_choice(self.op, call)
        tokens, experts = call.logits.shape
        check_order(self.op, tokens, call.topk, experts, call.alignment, call.max_rows)

    def kernel(self, call: ChoiceCall, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_route as family

        config = family.plan(expert_choice(call), call.max_rows is not None, settings.PDL)
        return KernelSpec(family.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        return super().declare() | {"masked": flag(lambda call: call.max_rows is not None)}


@define(_Route(), "weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
def moe_route(
    logits: Tensor,
    topk: int,
    bias: Tensor | None = None,
    scoring: Scoring = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    alignment: int = 128,
    max_rows: SymInt | None = None,
    finite: bool = False,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose the experts of each token, and give each pair of a token and an expert a row in the experts' order.

    Routing weights::

        scores = softmax(logits) or sigmoid(logits)
        ids = topk(scores + bias, in the best topk_groups of num_groups groups)
        weights = scaling_factor · scores[ids] / (Σ scores[ids] if renormalize else 1)

    A token's scores are the softmax of the token's logits over all experts, or the sigmoid of each logit. Experts are
    chosen by score plus ``bias``; weights are the scores without bias. With groups, a token's experts come from the
    ``topk_groups`` best groups. Groups are ranked by the sum of their two largest scores plus bias, as in DeepSeek-V3.
    With ``"softmax"`` and no bias, groups are ranked by their largest score, as in DeepSeek-V2. Everything is computed
    in fp32. Among experts or groups of equal rank, the first is chosen; NaN ranks last.

    With ``"softmax"``, a NaN or inf among a token's logits makes the token's weights NaN, as in :func:`torch.softmax`.
    With ``"sigmoid"``, a NaN logit makes the token's weights NaN if the expert of this logit is chosen. Padded rows of
    captured graphs may contain arbitrary logits; ``finite`` keeps the weights of these rows finite.

    Rows are ordered by expert, and within an expert by pair. Without ``max_rows``, each expert's rows begin at the next
    multiple of ``alignment``. With ``max_rows``, the rows of expert e begin at ``e · max_rows``, and pairs beyond an
    expert's first ``max_rows`` are dropped. Few tokens need one launch; more tokens need two. Results are
    deterministic.

    Args:
        logits: (M, E) bfloat16, float16 or float32; E is at most 1,024.
        topk: experts per token, at most 32.
        bias: (E,) float32, added to the scores for the choice only; ``None`` means 0.
        scoring: function that converts logits to scores: ``"softmax"`` or ``"sigmoid"``.
        num_groups: number of groups into which the experts are divided equally, at most 32.
        topk_groups: number of groups from which a token's experts are chosen.
        renormalize: ``True`` to divide a token's weights by their sum.
        scaling_factor: factor of all weights.
        alignment: number that divides the index of each expert's first row, if ``max_rows`` is ``None``. GEMMs of other
            libraries usually need 128; :func:`grouped_mm_fp8` takes 1, which leaves no padding. With few tokens and
            many experts, choose 1, because the GEMM selects its tactic by the number of rows R, which includes padding
            rows.
        max_rows: rows reserved for each expert (masked layout); ``None`` selects the contiguous layout, with only the
            rows that each expert needs.
        finite: ``True`` to replace NaN and -inf among the logits by the most negative finite float32, and inf by the
            largest finite float32.
        out: contiguous tensors to write ``(weights, ids, expanded_to_permuted, permuted_to_expanded, offsets, counts)``
            into.

    Returns:
        ``weights``: (M, topk) float32, the best expert first.
        ``ids``: (M, topk) int32, experts of each token.
        ``expanded_to_permuted``: (M, topk) int32, the row of each pair, or -1 for a pair without a row.
        ``permuted_to_expanded``: (R,) int32, the pair ``token · topk + j`` of each row, or -1 for padding. R is
        ``E · max_rows``, or without ``max_rows`` the bound
        ``(M · topk + min(E, M · topk) · (alignment - 1)) // alignment · alignment``.
        ``offsets``: (E + 1,) int32, the first row of each expert, and the end of the last expert's padding.
        ``counts``: (E,) int32, rows of each expert.

    Raises:
        ValueError: If a shape, device or number is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_route
        >>> logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 1.0, 4.0]])
        >>> weights, ids, expanded, permuted, offsets, counts = moe_route(logits, topk=2, alignment=1)
        >>> ids.tolist(), counts.tolist(), offsets.tolist()
        ([[1, 3], [0, 3]], [1, 1, 0, 2], [0, 1, 2, 2, 4])
        >>> expanded.tolist(), permuted.tolist()  # row 0 is pair 2: token 1 and expert 0
        ([[1, 2], [0, 3]], [2, 0, 1, 3])
        >>> assert torch.allclose(weights, torch.softmax(torch.tensor([[3.0, 2.0], [5.0, 4.0]]), 1))

    References:
        N. Shazeer et al., "Outrageously Large Neural Networks", 2017 (softmax); DeepSeek-AI, "DeepSeek-V3 Technical
        Report", 2024, section 2.1.2 (sigmoid). Roundings and special values: docs/numerics.md, "The steps of an expert
        layer".
    """
