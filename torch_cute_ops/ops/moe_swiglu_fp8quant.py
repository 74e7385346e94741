"""``moe_swiglu_fp8quant``: SwiGLU and FP8 quantisation of the experts' rows, in one pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cute_ops.formats.experts import MAX_EXPERTS, USUAL_EXPERTS
from torch_cute_ops.formats.fp8 import FP8_BLOCK128
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath, Outputs
from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._operands import aligned, are_int32, readable_rows, writable_columns
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, flag, size
from torch_cute_ops.ops._row_quant import gate_arguments, gates_plainly
from torch_cute_ops.ops._signature import FP8ScaleFormat
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec


class _Call(NamedTuple):
    input: Tensor
    offsets: Tensor | None
    counts: Tensor | None
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float | None
    gate: Gate
    scale_format: str | None

    @property
    def swiglu(self) -> tuple[float, float, float | None]:
        """Parameters of SwiGLU: alpha, beta and limit."""
        return self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit


class _Launcher(KernelLauncher[_Call]):
    def run(self, call: _Call, out: Any) -> Any:
        input, offsets, counts, swiglu = call.input, call.offsets, call.counts, call.swiglu
        shape = input.shape
        if not (_has_as_many(shape, offsets, counts) and are_int32(offsets, counts)) or not input.numel():
            return None
        width = shape[-1] // 2
        blocks = FP8_BLOCK128.scales_per_row(width)
        if offsets is not None:
            if out is None:
                new = allocator(self.device)
                y = new((shape[0], width), (width, 1), torch.float8_e4m3fn)
                out = (y, new((shape[0], blocks), (1, shape[0]), torch.float32))
            self._call(input, out[0], out[1], offsets, counts, swiglu)
            return out
        lead, rows = shape[:2], shape[0] * shape[1]
        if out is None:
            new = allocator(self.device)
            y = new((*lead, width), (shape[1] * width, width, 1), torch.float8_e4m3fn)
            out = (y, new((*lead, blocks), (shape[1], 1, rows), torch.float32))
        elif out[0].shape != (*lead, width) or out[1].shape != (*lead, blocks):
            return None
        x, y, scale = input.view(rows, shape[2]), out[0].view(rows, width), out[1].view(rows, blocks)
        self._call(x, y, scale, None, counts, swiglu)
        return out

    def launch(self, call: _Call, out: Outputs) -> None:
        rows = readable_rows(call.input.reshape(-1, call.input.shape[-1]))
        offsets, counts = (None if tensor is None else aligned(tensor) for tensor in (call.offsets, call.counts))
        y, scale = out
        with writable_columns(scale) as columns:
            matrices = y.view(len(rows), -1), columns.view(len(rows), -1)
            self._call(rows, *matrices, offsets, counts, call.swiglu)

    def _call(
        self,
        rows: Tensor,
        y: Tensor,
        scale: Tensor,
        offsets: Tensor | None,
        counts: Tensor | None,
        swiglu: Sequence[Any],
    ) -> None:
        ctas = self.sms * self.config.waves
        passed = gate_arguments(*swiglu)
        self.function(rows, *(None,) * 4, y, scale, *(None,) * 3, offsets, counts, 0.0, *passed, ctas)


class _Gate(KernelPath[_Call]):
    call_type = _Call
    launcher_type = _Launcher
    # The kernel stores column-major scales one element at a time.
    any_address = frozenset(("scale",))

    def key(self, call: _Call, device: int) -> tuple[Any, ...]:
        given = call.offsets is not None, call.counts is not None, gates_plainly(*call.swiglu)
        return (
            call.input.shape[-1],
            call.input.dtype,
            *given,
            _has_large_table(call),
            call.gate,
            call.scale_format,
            device,
        )

    def check(self, call: _Call) -> None:
        _checks.check_fp8_format(self.op, FP8_BLOCK128.granularity, None, call.scale_format)
        _checks.check_rows(self.op, "input", call.input, FP8_BLOCK128, _checks.INPUT_DTYPES, halves=True)
        _checks.check_expert_rows(self.op, call.input, call.offsets, call.counts)
        _checks.check_swiglu(self.op, *call.swiglu)
        _checks.check_gate(self.op, call.gate, *call.swiglu)

    def check_values(self, call: _Call) -> None:
        _checks.check_rows_of_experts(self.op, "input", call.input, call.offsets, call.counts)

    def kernel(self, call: _Call, arch: Arch) -> KernelSpec:
        from torch_cute_ops.kernels import row_quant

        given = call.offsets is not None, call.counts is not None
        width, is_general = call.input.shape[-1] // 2, not gates_plainly(*call.swiglu)
        experts = 1 if call.counts is None else call.counts.numel()
        spec = row_quant.RowQuantSpec.for_gated_experts(
            call.input.dtype, width, *given, is_general, experts, call.gate, call.scale_format
        )
        return KernelSpec(row_quant.KERNEL, row_quant.plan(spec, arch, pdl=settings.PDL))

    def declare(self) -> dict[str, Property]:
        return {
            "hidden": size(lambda call: call.input.shape[-1]),
            "dtype": dtype(lambda call: call.input.dtype, REQUIRED),
            "offsets": flag(lambda call: call.offsets is not None, True),
            "counts": flag(lambda call: call.counts is not None, True),
            "swiglu": flag(lambda call: not gates_plainly(*call.swiglu)),
            "many_experts": flag(_has_large_table),
        } | self.arguments_as_properties("gate", "scale_format")

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        experts = MAX_EXPERTS if given.many_experts else 1
        shape = (1, given.hidden) if given.offsets else (experts, 1, given.hidden)
        return {
            "input": torch.zeros(shape, dtype=given.dtype, device=device),
            "offsets": torch.zeros(experts + 1, dtype=torch.int32, device=device) if given.offsets else None,
            "counts": torch.zeros(experts, dtype=torch.int32, device=device) if given.counts else None,
            "swiglu_beta": 1.0 if given.swiglu else 0.0,
            "gate": given.gate,
            "scale_format": given.scale_format,
        }


def _has_large_table(call: _Call) -> bool:
    """Return True if the call has so many experts that the kernel needs its larger table of experts' rows."""
    return call.counts is not None and call.counts.numel() > USUAL_EXPERTS


def _has_as_many(shape: torch.Size, offsets: Tensor | None, counts: Tensor | None) -> bool:
    """Return True if the offsets, the counts and the input's shape imply the same number of experts."""
    if offsets is None:
        return counts is not None and len(shape) == 3 and counts.shape == shape[:1] and shape[0] <= MAX_EXPERTS
    experts = offsets.numel() - 1
    return len(shape) == 2 and 1 <= experts <= MAX_EXPERTS and (counts is None or counts.shape == (experts,))


@define(_Gate(), "y", "scale")
def moe_swiglu_fp8quant(
    input: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    gate: Gate = "silu",
    scale_format: FP8ScaleFormat | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply SwiGLU to experts' rows and quantise the results to FP8, in one pass over memory.

    For rows that are not padding, every step is computed in fp32::

        g = min(gate, swiglu_limit)
        u = clip(up, -swiglu_limit, swiglu_limit)
        h = g · sigmoid(swiglu_alpha · g) · (u + swiglu_beta)
        scale = amax(h) / 448  # of each 128 columns, unless scales are powers of two
        y = e4m3(h / scale)

    ``gate`` is the first half of each row of ``input``, ``up`` the second half. By default ``h`` is ``silu(gate) · up``
    (SwiGLU). gpt-oss uses ``swiglu_alpha=1.702``, ``swiglu_beta=1`` and ``swiglu_limit=7``. Clamps propagate NaN. The
    result equals :func:`silu_mul_fp8quant` with ``granularity="block128"``. The kernel reads ``offsets`` and ``counts``
    on the device to find the experts' rows; rows of padding are neither read nor written.

    Args:
        input: (R, 2I) bfloat16, float16 or float32, in which the rows of expert e begin at ``offsets[e]``; or (E,
            max_rows, 2I), in which expert e owns the first ``counts[e]`` rows of ``input[e]``. I is a multiple of 64.
            Rows may be strided.
        offsets: (E + 1,) int32: first row of each expert, and the end of the last expert's rows; E is at most 1,024.
            Required for an (R, 2I) input, otherwise ``None``.
        counts: (E,) int32: number of rows of each expert, at most the number reserved for it. ``None`` with ``offsets``
            means all rows between the expert's offsets; this is faster, but requires rows without padding. Offsets and
            counts out of range are refused on a CPU. On a GPU they give wrong results, but no access out of bounds.
        swiglu_alpha, swiglu_beta: finite parameters of the gate; the defaults give SwiGLU.
        swiglu_limit: positive clamp of gate and up; ``None`` means no clamp.
        gate: activation function: ``"silu"``, ``"gelu_tanh"`` (GELU, approximated by tanh as in Gemma), ``"gelu"``
            (GELU with the error function) or ``"relu2"`` (squared ReLU). Only ``"silu"`` takes ``swiglu_`` parameters.
        scale_format: ``"ue8m0"`` for scales that are powers of two, as in :func:`fp8_quantize`. ``None`` means float32
            scales of any value.
        out: tensors to write ``(y, scale)`` into: a contiguous ``y``, and a column-major or row-major ``scale``.

    Returns:
        ``y``: (R, I) or (E, max_rows, I) float8_e4m3fn. Rows of padding are unspecified.
        ``scale``: (R, ⌈I/128⌉) or (E, max_rows, ⌈I/128⌉) float32, column-major with strides (1, R), or (max_rows, 1,
        E · max_rows), as :func:`grouped_mm_fp8` reads it in place.

    Raises:
        ValueError: If a shape, device or gate parameter is wrong, or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import moe_swiglu_fp8quant
        >>> gate = torch.full((2, 128), 32.0)  # silu(32) rounds to 32
        >>> up = torch.tensor([[448.0], [-224.0]]).repeat(1, 128) / 32
        >>> offsets = torch.tensor([0, 1, 2], dtype=torch.int32)  # 2 experts with a row each
        >>> y, scale = moe_swiglu_fp8quant(torch.cat([gate, up], 1), offsets)
        >>> y[:, 0].float().tolist(), scale.tolist()
        ([448.0, -448.0], [[1.0], [0.5]])

    References:
        N. Shazeer, "GLU Variants Improve Transformer", 2020, equation 6; clamp and parameters: gpt-oss, OpenAI, 2025.
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values:
        docs/numerics.md, "Gate" and "The steps of an expert layer".
    """
