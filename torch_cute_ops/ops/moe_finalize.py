"""``moe_finalize``: weighted sum of each token's expert results."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, are_int32, readable_rows
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, flag, size
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

UNIT = 8
"""Number that must divide a row's length: a thread copies this many 2-byte elements at once."""


class _Call(NamedTuple):
    input: Tensor
    expanded_to_permuted: Tensor
    weights: Tensor
    residual: Tensor | None


class _Launcher(KernelLauncher[_Call]):
    def run(self, call: _Call, out: Any) -> Any:
        input, index, weights, residual = call
        shape, rows = input.shape, index.shape[0]
        if len(shape) != 2 or not rows or not are_int32(index):
            return None
        if out is None:
            out = allocator(self.device)((rows, shape[1]), (shape[1], 1), input.dtype)
        self.function(input, index, weights, residual, out, self.sms)
        return out

    def launch(self, call: _Call, out: Tensor) -> None:
        added = None if call.residual is None else readable_rows(call.residual)
        index, weights = aligned(call.expanded_to_permuted), aligned(call.weights)
        self.function(readable_rows(call.input), index, weights, added, out, self.sms)


class _Finalize(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher
    may_share = ("out", "residual")

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        topk = call.expanded_to_permuted.shape[-1]
        return call.input.shape[-1], call.input.dtype, topk, call.residual is not None, device

    def check(self, call: _Call) -> None:
        op, (input, index, weights, residual) = self.op, call
        _checks.check_dtype(op, "input", input, _checks.INPUT_DTYPES)
        _checks.check_matrix(op, "input", input, "(R, H)")
        width = input.shape[1]
        if width == 0 or width % UNIT:
            raise ValueError(f"cute::{op}: input has rows of {width} elements; expected a positive multiple of {UNIT}")
        _checks.check_dtype(op, "expanded_to_permuted", index, (torch.int32,))
        _checks.check_matrix(op, "expanded_to_permuted", index, "(M, topk)")
        tokens, topk = index.shape
        _checks.check_topk(op, topk)
        _checks.check_device(op, "expanded_to_permuted", index, "input", input.device)
        _checks.check_dtype(op, "weights", weights, (torch.float32,))
        _checks.check_shape(op, "weights", weights, (tokens, topk), "the shape of expanded_to_permuted")
        _checks.check_device(op, "weights", weights, "input", input.device)
        if residual is not None:
            _checks.check_dtype(op, "residual", residual, (input.dtype,))
            _checks.check_shape(op, "residual", residual, (tokens, width), "one row per token, of the width of input")
            _checks.check_device(op, "residual", residual, "input", input.device)

    def check_values(self, call: _Call) -> None:
        of = "rows of input; -1 stands for no row"
        _checks.check_indices(self.op, "expanded_to_permuted", call.expanded_to_permuted, len(call.input), of)

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_finalize as family

        topk, has_residual = call.expanded_to_permuted.shape[1], call.residual is not None
        config = family.plan(call.input.dtype, call.input.shape[1], topk, has_residual, pdl=settings.PDL)
        return KernelSpec(family.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        return {
            "hidden": size(lambda call: call.input.shape[1]),
            "dtype": dtype(lambda call: call.input.dtype, REQUIRED),
            "topk": size(lambda call: call.expanded_to_permuted.shape[1]),
            "residual": flag(lambda call: call.residual is not None),
        }

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        row = torch.zeros(1, given.hidden, dtype=given.dtype, device=device)
        return {
            "input": row,
            "expanded_to_permuted": torch.zeros(1, given.topk, dtype=torch.int32, device=device),
            "weights": torch.zeros(1, given.topk, dtype=torch.float32, device=device),
            "residual": torch.zeros(row.shape, dtype=row.dtype, device=device) if given.residual else None,
        }


@define(_Finalize(), "out")
def moe_finalize(
    input: Tensor,
    expanded_to_permuted: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Gather each token's expert results, weight them and add them up, in one pass over memory.

    The sum is computed in fp32, in the order of j; each product and each addition is rounded. The result is rounded
    once to the dtype of ``input``::

        out[m] = residual[m] + Σ_j weights[m, j] · input[expanded_to_permuted[m, j]]

    A pair with the index -1 adds nothing, even if its weight is NaN. CPU and GPU results are equal bit for bit.

    Args:
        input: (R, H) bfloat16, float16 or float32, rows in the experts' order; H is a multiple of 8. Rows may be
            strided.
        expanded_to_permuted: (M, topk) int32, the row of ``input`` of each pair of a token and one of its experts, or
            -1, as :func:`moe_route` returns it. An index below -1 or above R - 1 is refused on a CPU; on a GPU the pair
            adds nothing.
        weights: (M, topk) float32, routing weights.
        residual: (M, H) in the dtype of ``input``, e.g. the result of a shared expert; ``None`` means 0.
        out: contiguous tensor to write the result into. It may be ``residual``, but must not overlap ``input``.

    Returns:
        (M, H) in the dtype of ``input``.

    Raises:
        ValueError: If a shape or device is wrong, if an index is out of range (on a CPU), or if an input requires grad
            while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_finalize
        >>> rows = torch.tensor([[1.0], [2.0], [3.0]]).repeat(1, 8)
        >>> expanded_to_permuted = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
        >>> weights = torch.tensor([[0.5, 0.25], [1.0, 9.0]])
        >>> moe_finalize(rows, expanded_to_permuted, weights)[:, 0].tolist()  # 0.5 · 1 + 0.25 · 3, and 1 · 2
        [1.25, 2.0]

    References:
        Roundings and special values: docs/numerics.md, "The steps of an expert layer".
    """
