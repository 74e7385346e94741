"""``moe_permute_fp8quant``: copy the tokens' rows into the experts' order, and quantise them to FP8."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath, Outputs
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, are_int32, readable_rows, writable_columns
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, size
from torch_cute_ops.ops._signature import FP8ScaleFormat
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Call(NamedTuple):
    input: Tensor
    permuted_to_expanded: Tensor
    topk: int
    expanded_to_permuted: Tensor | None
    scale_format: str | None


class _Launcher(KernelLauncher[_Call]):
    """Launcher of ``moe_permute_fp8quant``. Calls without ``expanded_to_permuted`` take longer, because it is first
    computed from ``permuted_to_expanded``."""

    def __init__(self, kernel: KernelSpec, function: Callable[..., None], device: torch.device, sms: int) -> None:
        super().__init__(kernel, function, device, sms)
        # Tensor that is passed as the workspace if a call needs no workspace.
        self.unused = allocator(device)((1, 1), (1, 1), torch.float32)

    def run(self, call: _Call, out: Any) -> Any:
        input, pairs, places = call.input, call.permuted_to_expanded, call.expanded_to_permuted
        shape, rows = input.shape, pairs.shape
        if len(shape) != 2 or not shape[0] or len(rows) != 1 or not rows[0]:
            return None
        if places is None or not are_int32(pairs, places) or pairs.device != self.device:
            return None
        width = shape[1]
        new = allocator(self.device)
        if out is None:
            blocks = FP8_BLOCK128.scales_per_row(width)
            y = new((rows[0], width), (width, 1), torch.float8_e4m3fn)
            out = (y, new((rows[0], blocks), (1, rows[0]), torch.float32))
        elif out[0].dim() != 2 or out[0].shape[0] != rows[0]:
            return None
        kept = self.config.workspace_shape(shape[0])
        workspace = self.unused if kept is None else new(kept, (kept[1], 1), torch.float32)
        self.function(input, out[0], out[1], places, pairs, workspace)
        return out

    def launch(self, call: _Call, out: Outputs) -> None:
        input, pairs, topk, places, _ = call
        if places is None:
            places = _inverse(pairs, input.shape[0], topk)
        kept = self.config.workspace_shape(len(input))
        workspace = self.unused if kept is None else torch.empty(kept, dtype=torch.float32, device=input.device)
        y, scale = out
        with writable_columns(scale) as columns:
            self.function(readable_rows(input), y, columns, aligned(places), aligned(pairs), workspace)


class _Permute(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher
    # The kernel writes column-major scales one element at a time, so they need no alignment.
    any_address = frozenset(("scale",))

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        return call.input.shape[-1], call.input.dtype, call.topk, call.scale_format, device

    def check(self, call: _Call) -> None:
        op, (input, pairs, topk, places, scale_format) = self.op, call
        _checks.check_fp8_format(op, FP8_BLOCK128.granularity, None, scale_format)
        _checks.check_rows(op, "input", input, FP8_BLOCK128, _checks.INPUT_DTYPES)
        _checks.check_matrix(op, "input", input, "(M, H)")
        _checks.check_topk(op, topk)
        _checks.check_integers(op, "permuted_to_expanded", pairs, "input", input.device)
        if places is not None:
            _checks.check_dtype(op, "expanded_to_permuted", places, (torch.int32,))
            shape = (input.shape[0], topk)
            _checks.check_shape(op, "expanded_to_permuted", places, shape, "topk elements per row of input")
            _checks.check_device(op, "expanded_to_permuted", places, "input", input.device)

    def check_values(self, call: _Call) -> None:
        pairs = call.input.shape[0] * call.topk
        of = "pairs; -1 stands for padding"
        _checks.check_indices(self.op, "permuted_to_expanded", call.permuted_to_expanded, pairs, of)
        if call.expanded_to_permuted is not None:
            rows = len(call.permuted_to_expanded)
            of = "rows; -1 stands for no row"
            _checks.check_indices(self.op, "expanded_to_permuted", call.expanded_to_permuted, rows, of)

    def fill_without_work(self, call: _Call, out: Outputs) -> bool:
        return not (call.input.numel() and out[0].numel())

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import moe_permute

        config = moe_permute.plan(call.input.dtype, call.input.shape[1], call.topk, call.scale_format, pdl=settings.PDL)
        return KernelSpec(moe_permute.KERNEL, config)

    def declare(self) -> dict[str, Property]:
        return {
            "hidden": size(lambda call: call.input.shape[1]),
            "dtype": dtype(lambda call: call.input.dtype, REQUIRED),
            **self.arguments_as_properties("topk", "scale_format"),
        }

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        pairs = torch.arange(given.topk, dtype=torch.int32, device=device)
        return {
            "input": torch.zeros(1, given.hidden, dtype=given.dtype, device=device),
            "permuted_to_expanded": pairs,
            "topk": given.topk,
            "expanded_to_permuted": pairs.view(1, given.topk),
            "scale_format": given.scale_format,
        }


def _inverse(permuted_to_expanded: Tensor, tokens: int, topk: int) -> Tensor:
    """Invert ``permuted_to_expanded``: return the row of each (token, expert) pair, (M, topk), or -1 for a pair without
    a row."""
    pairs = tokens * topk
    inverse = permuted_to_expanded.new_full((pairs + 1,), -1)
    rows = torch.arange(len(permuted_to_expanded), dtype=torch.int32, device=inverse.device)
    # Rows of padding, and invalid pairs, write to an extra last element, which is then dropped.
    is_pair = (permuted_to_expanded >= 0) & (permuted_to_expanded < pairs)
    places = torch.where(is_pair, permuted_to_expanded, pairs)
    return inverse.scatter_(0, places.long(), rows)[:pairs].view(tokens, topk)


@define(_Permute(), "y", "scale")
def moe_permute_fp8quant(
    input: Tensor,
    permuted_to_expanded: Tensor,
    topk: int,
    expanded_to_permuted: Tensor | None = None,
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy each token's row to the rows of its experts, quantised to FP8, in one pass over memory.

    For each row r that is not padding, with ``fp8_quantize`` in blocks of 128::

        y[r], scale[r] = fp8_quantize(input[permuted_to_expanded[r] // topk])

    Rows with the index -1 are padding and are not written. The kernel reads and quantises each token once and
    stores it ``topk`` times. For this, the kernel needs ``expanded_to_permuted``. If this argument is ``None``, a few
    small kernels first compute it from ``permuted_to_expanded``.

    Args:
        input: (M, H) bfloat16, float16 or float32; H is a multiple of 64. Rows may be strided.
        permuted_to_expanded: (R,) int32, the pair ``token · topk + j`` of each row, or -1, as :func:`moe_route` returns
            it. No pair occurs twice. An index below -1 or above M · topk - 1 is refused on a CPU; on a GPU the row is
            not written.
        topk: experts per token, at most 32.
        expanded_to_permuted: (M, topk) int32, the row of each pair, or -1: the inverse of ``permuted_to_expanded``, as
            :func:`moe_route` returns it. With any other content the result is unspecified. An index below -1 or above R
            - 1 is refused on a CPU; on a GPU the pair is not written.
        scale_format: ``"ue8m0"`` for scales that are powers of two, as in :func:`fp8_quantize`. ``None`` means float32
            scales of any value.
        out: tensors to write ``(y, scale)`` into: a contiguous ``y``, and a column-major or row-major ``scale``.

    Returns:
        ``y``: (R, H) float8_e4m3fn. Rows of padding are unspecified.
        ``scale``: (R, ⌈H/128⌉) float32, column-major with strides (1, R), as :func:`grouped_mm_fp8` reads it in place.

    Raises:
        ValueError: If a shape or device is wrong, if an index is out of range (on a CPU), or if an input requires grad
            while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_permute_fp8quant
        >>> x = torch.tensor([[448.0], [-896.0]]).repeat(1, 64)
        >>> pairs = torch.tensor([0, 2, 3, 1], dtype=torch.int32)  # token pair // 2
        >>> y, scale = moe_permute_fp8quant(x, pairs, topk=2)
        >>> y[:, 0].float().tolist(), scale.tolist()
        ([448.0, -448.0, -448.0, 448.0], [[1.0], [2.0], [2.0], [1.0]])

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values:
        docs/numerics.md, "Quantising to FP8" and "The steps of an expert layer".
    """
