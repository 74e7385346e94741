"""``moe_route_dense``: choose each token's experts, and write the routing weights as a matrix (tokens, experts)."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.ops._call import KernelLauncher
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned
from torch_cute_ops.ops._properties import Property, flag
from torch_cute_ops.ops._routing import (
    ChoiceCall,
    ChoicePath,
    check_choice,
    check_per_expert,
    choice_key,
    expert_choice,
    is_number,
    readable_logits,
)
from torch_cute_ops.ops._signature import Scoring
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Launcher(KernelLauncher[ChoiceCall]):
    def run(self, call: ChoiceCall, out: Any) -> Any:
        shape = call.logits.shape
        if len(shape) != 2 or not shape[0] or not is_number(call.scaling_factor):
            return None
        if out is None:
            out = allocator(self.device)((shape[0], shape[1]), (shape[1], 1), torch.float32)
        self.function(call.logits, call.bias, call.expert_factor, out, call.scaling_factor)
        return out

    def launch(self, call: ChoiceCall, out: Tensor) -> None:
        bias = None if call.bias is None else aligned(call.bias)
        factor = None if call.expert_factor is None else aligned(call.expert_factor)
        self.function(readable_logits(call.logits), bias, factor, out, call.scaling_factor)


class _RouteDense(ChoicePath):
    launcher_type = _Launcher
    any_address = frozenset(("out",))

    def key(self, call: ChoiceCall, device: int) -> tuple[Any, ...]:
        return *choice_key(call), call.expert_factor is not None, device

    def check(self, call: ChoiceCall) -> None:
        check_choice(self.op, call)
        check_per_expert(self.op, "expert_factor", call.expert_factor, call.logits)

    def kernel(self, call: ChoiceCall, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_route_dense as family

        config = family.plan(expert_choice(call), call.expert_factor is not None, settings.PDL)
        return KernelSpec(family.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        return super().declare() | {"expert_factor": flag(lambda call: call.expert_factor is not None)}


@define(_RouteDense(), "out")
def moe_route_dense(
    logits: Tensor,
    topk: int,
    bias: Tensor | None = None,
    scoring: Scoring = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    expert_factor: Tensor | None = None,
    finite: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Choose the experts of each token, and write the routing weights as a matrix over all experts.

    The result is the ``alpha`` of :func:`moe_fc2_fp4`: the weights of :func:`moe_route`, bit for bit, times
    ``expert_factor`` in the columns of a token's experts, and 0 in all other columns::

        scores = softmax(logits) or sigmoid(logits)
        ids = topk(scores + bias, in the best topk_groups of num_groups groups)
        weights = scaling_factor · scores[ids] / (Σ scores[ids] if renormalize else 1)
        out[m, ids[m]] = weights[m] · expert_factor[ids[m]]

    A token's scores are the softmax of the token's logits over all experts, or the sigmoid of each logit. Experts are
    chosen by score plus ``bias``; weights are the scores without bias. With groups, a token's experts come from the
    ``topk_groups`` best groups. Groups are ranked by the sum of their two largest scores plus bias, as in DeepSeek-V3.
    With ``"softmax"`` and no bias, groups are ranked by their largest score, as in DeepSeek-V2. Everything is computed
    in fp32. Among experts or groups of equal rank, the first is chosen; NaN ranks last.

    With ``"softmax"``, a NaN or inf among a token's logits makes the token's weights NaN, as in :func:`torch.softmax`.
    With ``"sigmoid"``, a NaN logit makes the token's weights NaN if the expert of this logit is chosen. Padded rows of
    captured graphs may contain arbitrary logits; ``finite`` keeps the weights of these rows finite.

    Args:
        logits: (M, E) bfloat16, float16 or float32; E is at most 1,024.
        topk: experts per token, at most 32.
        bias: (E,) float32, added to the scores for the choice only; ``None`` means 0.
        scoring: function that converts logits to scores: ``"softmax"`` or ``"sigmoid"``.
        num_groups: number of groups into which the experts are divided equally, at most 32.
        topk_groups: number of groups from which a token's experts are chosen.
        renormalize: ``True`` to divide a token's weights by their sum.
        scaling_factor: factor of all weights.
        expert_factor: (E,) float32, factor of each expert's weights, such as ``1 / (g_a · g_w)``, which divides out the
            global scales of the expert's activations (``g_a``) and weight (``g_w``); ``None`` means 1.
        finite: ``True`` to replace NaN and -inf among the logits by the most negative finite float32, and inf by the
            largest finite float32.
        out: contiguous tensor to write the result into.

    Returns:
        (M, E) float32.

    Raises:
        ValueError: If a shape, device or number is wrong, or if an input requires grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_route_dense
        >>> logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 0.0, 5.0, 4.0]])
        >>> moe_route_dense(logits, topk=2, scaling_factor=4.0).tolist()
        [[0.0, 2.0, 0.0, 2.0], [2.0, 0.0, 2.0, 0.0]]

    References:
        N. Shazeer et al., "Outrageously Large Neural Networks", 2017 (softmax); DeepSeek-AI, "DeepSeek-V3 Technical
        Report", 2024, section 2.1.2 (sigmoid). Roundings and special values: docs/numerics.md, "The steps of an expert
        layer".
    """
