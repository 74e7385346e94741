"""``moe_route_ids``: order the routed rows by expert, if the experts of each token were already chosen."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats.experts import MAX_EXPERTS, MAX_TOPK
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath, Outputs
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import are_int32
from torch_cute_ops.ops._properties import Property, flag
from torch_cute_ops.ops._routing import check_order, new_order, rows_of_call, workspace_of
from torch_cute_ops.ops._signature import SymInt
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Call(NamedTuple):
    ids: Tensor
    experts: int
    alignment: int
    max_rows: int | None


class _Launcher(KernelLauncher[_Call]):
    def run(self, call: _Call, out: Any) -> Any:
        ids, experts, alignment, max_rows = call
        shape = ids.shape
        if len(shape) != 2 or not shape[0] or not 1 <= shape[1] <= MAX_TOPK:
            return None
        tokens, topk = shape
        rows = rows_of_call(tokens, topk, experts, alignment, max_rows)
        if rows is None:
            return None
        if out is None:
            out = new_order(allocator(self.device), tokens, topk, rows, experts)
        elif out[1].shape != (rows,) or not are_int32(*out):
            return None
        self._call(ids, out, rows, max_rows or alignment)
        return out

    def launch(self, call: _Call, out: Outputs) -> None:
        self._call(call.ids.contiguous(), out, len(out[1]), call.max_rows or call.alignment)

    def _call(self, ids: Tensor, out: Outputs, rows: int, unit: int) -> None:
        workspace = workspace_of(self.config, ids.numel(), rows, self.sms, allocator(self.device), out)
        self.function(ids, *out, workspace, unit, self.sms)


class _RouteIds(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher
    any_address = frozenset(("expanded_to_permuted", "permuted_to_expanded", "offsets", "counts"))

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        return call.experts, call.max_rows is None, call.ids.dtype, device

    def check(self, call: _Call) -> None:
        op, ids, experts = self.op, call.ids, call.experts
        _checks.check_dtype(op, "ids", ids, (torch.int32,))
        _checks.check_matrix(op, "ids", ids, "(M, topk)")
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"cute::{op}: experts is {experts}; expected 1 to {MAX_EXPERTS}")
        tokens, topk = ids.shape
        _checks.check_topk(op, topk)
        check_order(op, tokens, topk, experts, call.alignment, call.max_rows)

    def check_values(self, call: _Call) -> None:
        _checks.check_indices(self.op, "ids", call.ids, call.experts, "experts; -1 stands for no expert")

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_route_ids as family

        return KernelSpec(family.KERNEL, family.plan(call.experts, call.max_rows is not None, pdl=settings.PDL))

    def declare(self) -> dict[str, Property]:
        return {**self.arguments_as_properties("experts"), "masked": flag(lambda call: call.max_rows is not None)}

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
        return {"ids": ids, "experts": given.experts, "max_rows": 1 if given.masked else None}


@define(_RouteIds(), "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
def moe_route_ids(
    ids: Tensor,
    experts: int,
    alignment: int = 128,
    max_rows: SymInt | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give each pair of a token and an expert a row in the experts' order, for experts that were chosen elsewhere.

    Rows are ordered by expert, and within an expert by pair. Without ``max_rows``, each expert's rows begin at the next
    multiple of ``alignment``. With ``max_rows``, the rows of expert e begin at ``e · max_rows``, and pairs beyond an
    expert's first ``max_rows`` are dropped. A pair with the id -1, such as one for an expert on another rank, gets no
    row and is not counted. A token that names an expert twice gets two rows.

    For the k-th pair of expert e::

        row = offsets[e] + k
        expanded_to_permuted[token, j] = row
        permuted_to_expanded[row] = token · topk + j

    Args:
        ids: (M, topk) int32, experts of each token, or -1; topk is at most 32. An id below -1 or above E - 1 is refused
            on a CPU; on a GPU the pair gets no row.
        experts: number of experts E, at most 1,024.
        alignment: number that divides the index of each expert's first row, if ``max_rows`` is ``None``. GEMMs of other
            libraries usually need 128; :func:`grouped_mm_fp8` takes 1, which leaves no padding. With few tokens and
            many experts, choose 1, because the GEMM selects its tactic by the number of rows R, which includes padding
            rows.
        max_rows: rows reserved for each expert (masked layout); ``None`` selects the contiguous layout, with only the
            rows that each expert needs.
        out: contiguous tensors to write ``(expanded_to_permuted, permuted_to_expanded, offsets, counts)`` into.

    Returns:
        ``expanded_to_permuted``: (M, topk) int32, the row of each pair, or -1 for a pair without a row.
        ``permuted_to_expanded``: (R,) int32, the pair ``token · topk + j`` of each row, or -1 for padding. R is
        ``E · max_rows``, or without ``max_rows`` the bound
        ``(M · topk + min(E, M · topk) · (alignment - 1)) // alignment · alignment``.
        ``offsets``: (E + 1,) int32, the first row of each expert, and the end of the last expert's padding.
        ``counts``: (E,) int32, rows of each expert.

    Raises:
        ValueError: If a shape, device or number is wrong, if an id is out of range (on a CPU), or if an input requires
            grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_route_ids
        >>> ids = torch.tensor([[1, 3], [0, 3]], dtype=torch.int32)
        >>> expanded, permuted, offsets, counts = moe_route_ids(ids, experts=4, alignment=1)
        >>> expanded.tolist(), permuted.tolist()  # row 0 is pair 2: token 1 and expert 0
        ([[1, 2], [0, 3]], [2, 0, 1, 3])
        >>> offsets.tolist(), counts.tolist()
        ([0, 1, 2, 2, 4], [1, 1, 0, 2])

    References:
        Layouts: docs/moe.md, "Rows in the experts' order". Roundings and special values: docs/numerics.md, "The steps
        of an expert layer".
    """
