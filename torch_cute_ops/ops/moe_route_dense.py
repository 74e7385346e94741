"""``moe_route_dense``: the routing weights of each token as a matrix over all experts."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.ops._call import KernelLauncher, Values
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned
from torch_cute_ops.ops._routing import (
    ChoiceCall,
    ChoicePath,
    check_choice,
    check_per_expert,
    choice_properties,
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
    def run(self, values: Values, out: Any) -> Any:
        logits, _, bias, _, _, _, _, scaling_factor, _, _, expert_factor = values
        shape = logits.shape
        if len(shape) != 2 or not shape[0] or not is_number(scaling_factor):
            return None
        if out is None:
            out = allocator(self.device)((shape[0], shape[1]), (shape[1], 1), torch.float32)
        self.function(logits, bias, expert_factor, out, scaling_factor)
        return out

    def launch(self, call: ChoiceCall, out: Tensor) -> None:
        bias = None if call.bias is None else aligned(call.bias)
        factor = None if call.expert_factor is None else aligned(call.expert_factor)
        self.function(readable_logits(call.logits), bias, factor, out, call.scaling_factor)


class _RouteDense(ChoicePath):
    launcher_type = _Launcher
    any_address = frozenset(("out",))

    def key(self, values: Values, device: int) -> tuple[Any, ...]:
        logits, topk, bias, factor = values[0], values[1], values[2], values[10]
        given = bias is not None, factor is not None
        return (logits.shape[-1], logits.dtype, topk, *given, values[3:7], device)

    def check(self, call: ChoiceCall) -> None:
        check_choice(self.op, call)
        check_per_expert(self.op, "expert_factor", call.expert_factor, call.logits)

    def kernel(self, call: ChoiceCall, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_route_dense as family

        config = family.plan(expert_choice(call), call.expert_factor is not None, settings.PDL)
        return KernelSpec(family.KERNEL, config)

    def properties(self, call: ChoiceCall) -> dict[str, Any]:
        return choice_properties(call) | {"expert_factor": call.expert_factor is not None}


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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Choose the experts of each token, and write their weights as a matrix over all experts.

    The ``alpha`` of :func:`moe_fc2_fp4`, in one launch: the weights of :func:`moe_route`, to the bit, times
    ``expert_factor`` in fp32, in the columns of a token's experts, and 0 in all others.

    Args:
        logits: (M, E), bfloat16, float16 or float32, of up to 512 experts.
        topk, bias, scoring, num_groups, topk_groups, renormalize, scaling_factor: as for :func:`moe_route`.
        expert_factor: (E,) float32, what each expert's weights are multiplied with, such as one over the product of
            its weights' and its activations' global scales; ``None``: nothing.
        out: tensor to write the result into.

    Returns:
        (M, E) float32.

    Raises:
        ValueError: for a wrong shape, device or number, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
