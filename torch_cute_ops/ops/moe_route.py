"""``moe_route``: the experts of each token, and the order of their rows."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.ops._call import KernelLauncher, Outputs, Values
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, are_int32
from torch_cute_ops.ops._routing import (
    ChoiceCall,
    ChoicePath,
    check_choice,
    check_order,
    choice_properties,
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
    def run(self, values: Values, out: Any) -> Any:
        logits, topk, bias, _, _, _, _, scaling_factor, alignment, max_rows, _ = values
        shape = logits.shape
        if len(shape) != 2 or not shape[0] or not is_number(scaling_factor):
            return None
        tokens, experts = shape
        rows = rows_of_call(tokens, topk, experts, alignment, max_rows)
        if rows is None:
            return None
        if out is None:
            new = allocator(self.device)
            size, strides = (tokens, topk), (topk, 1)
            weights, ids = new(size, strides, torch.float32), new(size, strides, torch.int32)
            out = (weights, ids, *new_order(new, tokens, topk, rows, experts))
        elif out[3].shape != (rows,) or not are_int32(*out[1:]):
            return None
        self._call(logits, bias, out, rows, scaling_factor, max_rows or alignment)
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

    def key(self, values: Values, device: int) -> tuple[Any, ...]:
        logits, topk, bias, max_rows = values[0], values[1], values[2], values[9]
        return (
            logits.shape[-1],
            logits.dtype,
            topk,
            bias is not None,
            values[3:7],
            max_rows is None,
            device,
        )

    def check(self, call: ChoiceCall) -> None:
        check_choice(self.op, call)
        tokens, experts = call.logits.shape
        check_order(self.op, tokens, call.topk, experts, call.alignment, call.max_rows)

    def kernel(self, call: ChoiceCall, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_route as family

        config = family.plan(expert_choice(call), call.max_rows is not None, settings.PDL)
        return KernelSpec(family.KERNEL, config)

    def properties(self, call: ChoiceCall) -> dict[str, Any]:
        return choice_properties(call) | {"masked": call.max_rows is not None}


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
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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
        alignment: what each expert's first row is a multiple of, without ``max_rows``. GEMMs of other libraries need
            128, as a rule; :func:`grouped_mm_fp8` takes rows anywhere. With 1 there is no padding, which with few
            tokens and many experts nearly all rows would be, and it estimates the rows of an expert from R.
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
