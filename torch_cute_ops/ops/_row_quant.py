"""Call path of ops that quantise, normalise or gate rows with the kernel ``row_quant``."""

import math
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch

from torch_cute_ops.formats import FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.fp8 import (
    COLUMN,
    FP8_BLOCK128,
    FP8_DYNAMIC_TENSOR,
    FP8_TENSOR,
    ROW,
    is_column_major,
    is_packed_column,
    new_column_scales,
)
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import KernelLauncher, KernelPath, Outputs
from torch_cute_ops.ops._properties import REQUIRED, Property, dtype, flag, size
from torch_cute_ops.ops._signature import Signature
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator, contiguous_strides
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec
from torch_cute_ops.runtime.dispatch import mark_written

Tensor = torch.Tensor

# A global of this module, because reading an attribute of another module takes longer.
_INFINITY: Final = math.inf
_BYTE: Final = torch.uint8
_BLOCK: Final = FP8_BLOCK128.granularity

MOST_SIZES: Final = 4096
"""Maximum number of row counts for which a launcher stores the shapes of its outputs."""


class RowCall(NamedTuple):
    """Arguments of any op that quantises, normalises or gates rows. ``factor`` is the global scale of FP4, or the
    static scale of FP8."""

    input: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    factor: Tensor | None = None
    eps: float = 0.0
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    swiglu_limit: float | None = None
    block_size: int = 0
    scale_format: str | None = None
    granularity: str | None = None
    scale_layout: str | None = "128x4"
    interleaved: bool = False
    weight_plus_one: bool = False
    gate: Gate = "silu"
    bias: Tensor | None = None
    subtract_mean: bool = False

    @property
    def swiglu(self) -> tuple[float, float, float | None]:
        """Parameters of SwiGLU: alpha, beta and limit."""
        return self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit


class RowLauncher(KernelLauncher[RowCall]):
    """Launcher of the kernel ``row_quant``, with the shapes and dtypes of its outputs."""

    def __init__(self, kernel: KernelSpec, function: Any, device: torch.device, sms: int) -> None:
        super().__init__(kernel, function, device, sms)
        problem = kernel.config.spec
        self.max_ctas = sms * kernel.config.waves
        fmt, self.layout = problem.fmt, problem.layout
        self.width, self.source = problem.width, problem.source
        self.is_padded, self.is_interleaved = problem.width != problem.norm_width, problem.interleaved
        # Interleaved codes need no padded copy, because the rows of the op's output are already padded.
        self.pads_output = self.is_padded and not self.is_interleaved
        self.also_linear, self.writes_norm = problem.also_linear, problem.writes_norm
        self.has_row_scale = problem.has_row_scale
        self.has_weight = problem.has_weight
        self.tile_rows = self.layout.tile_rows or 1
        self.y_width, self.y_dtype, self.blocks = self.width, problem.dtype, 0
        if isinstance(fmt, FP4Format):
            self.y_width, self.y_dtype = self.width // 2, torch.uint8
            self.blocks = self.width // fmt.block_size
        elif fmt is not None:
            self.y_dtype = torch.float8_e4m3fn
            self.blocks = fmt.scales_per_row(self.width)
        self.scale_width = self.layout.padded_blocks(self.blocks)
        self.scale_dtype = problem.dtype if fmt is None else fmt.scale_dtype
        # Scales are a row-major matrix, a column-major matrix, or a single element.
        self.is_column = self.layout == COLUMN
        self.has_scale_rows = not self.is_column and not problem.has_tensor_scale
        self.reduces_tensor = fmt == FP8_DYNAMIC_TENSOR
        self.has_scale = fmt is not None
        self.has_two_outputs = self.has_scale and not (self.also_linear or self.writes_norm or self.has_row_scale)
        self.y_tail: tuple[int, ...] = (self.y_width,)
        if problem.interleaved:
            self.y_tail = (-(-self.y_width // INTERLEAVED_K), INTERLEAVED_K)
        self.y_strides = contiguous_strides((1, *self.y_tail))
        self.scale_tail = self.layout.shape((1,), self.blocks)[1:]
        self.scale_strides = contiguous_strides((1, *self.scale_tail))
        self.stores_bytes, self.stores_byte_scales = self.y_dtype is torch.uint8, self.scale_dtype is torch.uint8
        self.sizes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def size_outputs(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the codes and of row-major or tiled scales, and store them in ``sizes``, because
        computing them takes as long as half an allocation."""
        if len(self.sizes) >= MOST_SIZES:
            self.sizes.clear()
        sizes = (rows, *self.y_tail), (-(-rows // self.tile_rows), *self.scale_tail)
        self.sizes[rows] = sizes
        return sizes

    def new_partials(self, rows: int) -> Tensor:
        """Allocate the workspace in which each CTA stores one float: the amax of the rows that it reads. The tensor has
        ``rows`` rows."""
        return allocator(self.device)((self.config.tensor_ctas(rows, self.sms),), (1,), torch.float32)

    def new_outputs(self, rows: int, dtype: torch.dtype) -> Any:
        """Allocate the outputs of a call whose input has ``rows`` rows and this dtype: one tensor, or a tuple of
        several."""
        new = allocator(self.device)
        y_size, scale_size = self.sizes.get(rows) or self.size_outputs(rows)
        y = new(y_size, self.y_strides, self.y_dtype)
        if not self.has_scale:
            return y
        if self.has_scale_rows:
            scale = new(scale_size, self.scale_strides, self.scale_dtype)
        elif self.is_column:
            scale = new((rows, self.scale_width), (1, rows), torch.float32)
        else:
            scale = new((1,), (1,), torch.float32)
        if self.has_two_outputs:
            return y, scale
        more = []
        if self.also_linear:
            more.append(new((rows, self.blocks), (self.blocks, 1), self.scale_dtype))
        if self.writes_norm:
            more.append(new((rows, self.width), (self.width, 1), dtype))
        if self.has_row_scale:
            more.append(new((rows,), (1,), torch.float32))
        return y, scale, *more

    def launch(self, call: RowCall, out: Any) -> None:
        input, residual, weight, bias, factor = call.input, call.residual, call.weight, call.bias, call.factor
        hidden = input.shape[-1]
        if not self.has_weight:
            weight = None
        rows = input.reshape(-1, hidden)
        sums = None if residual is None else residual.reshape(-1, hidden)
        count = rows.shape[0]
        y = scale = linear = norm = row_scale = held = None
        if self.has_scale:
            y = output = out[0].view(count, -1)
            if self.is_interleaved:
                y = output.view(count, *self.y_tail)
            scale = out[1]
            if self.is_column or (self.has_scale_rows and self.layout.is_linear):
                if not (is_packed_column(scale) if self.is_column else scale.is_contiguous()):
                    held = new_column_scales(scale) if self.is_column else scale.new_empty(scale.shape)
                scale = (scale if held is None else held).view(count, -1)
            if self.also_linear:
                linear = out[2].view(count, -1)
            if self.writes_norm:
                norm = out[-1].view(count, -1)
            if self.has_row_scale:
                row_scale = out[-1]
        else:
            norm = output = out.view(count, -1)
        if self.is_padded:
            rows = _padded(rows, 2 if self.source == "silu_mul" else 1, self.width)
            sums = None if sums is None else _padded(sums, 1, self.width)
            weight, bias = (
                None if each is None else _padded(each.unsqueeze(0), 1, self.width)[0] for each in (weight, bias)
            )
        if self.pads_output:
            padded = output.new_empty(count, self.width)
            y, norm = (None, padded) if y is None else (padded, norm)
        outputs = (y, scale, linear, norm, row_scale, None, None)
        if self.reduces_tensor:
            factor = self.new_partials(count)
        elif factor is not None:
            factor = factor.reshape(1)
        rest = (factor, *outputs)
        scalars = (call.eps, *gate_arguments(*call.swiglu), self.max_ctas)
        try:
            self.function(rows, sums, weight, bias, *rest, *scalars)
        except (ValueError, TypeError):
            # The compiled function refused a tensor whose rows do not start at multiples of 16 bytes. So copy them.
            copies = [
                None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
                for tensor in (rows, sums, weight, bias)
            ]
            self.function(*copies, *rest, *scalars)
            sums = copies[1]
        if self.pads_output:
            output.copy_(padded[:, : output.shape[1]])
        if held is not None:
            out[1].copy_(held)
        if residual is not None and sums is not None and sums.data_ptr() != residual.data_ptr():
            residual.copy_(sums[:, :hidden].view(residual.shape))


class RowQuant(KernelPath[RowCall]):
    """Call path of an op that converts rows of ``input``, (..., H), or (..., 2H) for a gate, to codes, scales and other
    outputs. An op with one output does not quantise: it rounds the rows to the input's dtype.

    Args:
        source: source of the values of a row: the input's row; the sum of the input's row and the residual's row, which
            then overwrites the residual; or the gated product of the row's two halves.
        normalises: True if rows are first normalised.
        four_over_six: True if each NVFP4 block gets the better of two scales.
        reduces_tensor: True if the op computes one FP8 scale for the whole tensor.
        fixed: as in ``CallPath``.
    """

    call_type: ClassVar[Any] = RowCall
    launcher_type: ClassVar[Any] = RowLauncher
    renames: ClassVar = {"global_scale": "factor", "scale": "factor"}
    # These outputs need no alignment, because the kernel stores them one element at a time. Scales of MXFP8 are an
    # exception.
    any_address = frozenset(("scale_linear", "scale_out", "row_scale"))

    def __init__(
        self,
        source: Literal["rows", "add", "silu_mul"] = "rows",
        *,
        normalises: bool = False,
        four_over_six: bool = False,
        reduces_tensor: bool = False,
        **fixed: Any,
    ) -> None:
        super().__init__(**fixed)
        self.reduces_tensor = reduces_tensor
        self.source, self.normalises, self.four_over_six = source, normalises, four_over_six

    def needs_alignment(self, name: str, output: Tensor) -> bool:
        if self.reduces_tensor and name == "scale":
            return False
        return super().needs_alignment(name, output) or (name == "scale_out" and output.dtype == torch.uint8)

    def bind(self, signature: Signature) -> None:
        super().bind(signature)
        self.quantises = not self.is_single
        if self.quantises and not self.reduces_tensor and "granularity" not in signature.names:
            self.integer_outputs = frozenset(("y",))

    @property
    def takes_general_norms(self) -> bool:
        """True if the op's norm may subtract a mean, add a bias, lack a weight and follow a float32 residual."""
        return "subtract_mean" in self.signature.names

    def key(self, call: RowCall, device: int) -> tuple[Any, ...]:
        weight_dtype = None if call.weight is None else call.weight.dtype
        return (
            *(call.input.shape[-1], call.input.dtype, weight_dtype, call.factor is not None),
            *(gates_plainly(*call.swiglu), call.block_size, call.scale_format, call.granularity, call.scale_layout),
            *(call.interleaved, call.weight_plus_one, call.gate, _kind_of_norm(call)),
            device,
        )

    run_by_launcher = KernelPath.run

    def run(
        self,
        out: Any,
        device: int | None,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        factor: Tensor | None,
        eps: float,
        alpha: float,
        beta: float,
        limit: float | None,
        block_size: int,
        scale_format: str | None,
        granularity: str | None,
        layout: str | None,
        interleaved: bool,
        weight_plus_one: bool,
        gate: Gate,
        bias: Tensor | None,
        subtract_mean: bool,
    ) -> Any:
        """Compute a call as ``CallPath.run`` does. For speed, ``key`` and the launch are inlined.

        Without inlining, a call takes 1.2 µs longer on the host of an H200 (``benchmarks host``).
        """
        result = None
        try:
            if device is None:
                device = input.get_device()
            rows, width = input.shape  # raises unless ``input`` has two dimensions
            is_plain = limit is None and alpha == 1.0 and beta == 0.0
            dtype, weight_dtype = input.dtype, None if weight is None else weight.dtype
            has_factor = factor is not None
            written_layout = layout
            if out is not None and layout is None and granularity == _BLOCK and not is_column_major(out[1]):
                written_layout = ROW.name
            norm_kind = None
            if weight is not None:
                has_bias, is_without_weight = bias is not None, not weight.numel()
                if is_without_weight and (weight.shape != (0,) or weight.get_device() != device):
                    raise ValueError  # The kernel does not see this weight. ``run_checked`` explains the error.
                has_other_residual = residual is not None and residual.dtype is not dtype
                if has_bias or subtract_mean is not False or is_without_weight or has_other_residual:
                    norm_kind = has_bias, subtract_mean, is_without_weight, has_other_residual
            # fmt: off
            launcher: Any = self.launchers.get((
                width, dtype, weight_dtype, has_factor, is_plain,
                block_size, scale_format, granularity, written_layout, interleaved, weight_plus_one, gate,
                norm_kind, device,
            ))
            # fmt: on
            if launcher is not None and rows and 0.0 <= eps < _INFINITY and not launcher.is_padded:
                outputs = launcher.new_outputs(rows, dtype) if out is None else out
                linear = norm = row_scale = None
                if launcher.has_two_outputs:
                    y, scale = outputs
                elif not launcher.has_scale:
                    y = scale = None
                    norm = outputs
                else:
                    y, scale = outputs[0], outputs[1]
                    linear = outputs[2] if launcher.also_linear else None
                    norm = outputs[-1] if launcher.writes_norm else None
                    row_scale = outputs[-1] if launcher.has_row_scale else None
                if has_factor and factor.dim() != 1:  # type: ignore[union-attr]
                    factor = factor.reshape(1)  # type: ignore[union-attr]
                workspace_or_factor = launcher.new_partials(rows) if launcher.reduces_tensor else factor
                if is_plain:
                    factor_of_gate = offset = clamp = None
                else:
                    factor_of_gate, offset, clamp = gate_arguments(alpha, beta, limit)
                # Check these dtypes here, because the compiled function also accepts int8 instead of uint8.
                if out is None or (
                    (not launcher.stores_bytes or y.dtype is _BYTE)
                    and (
                        not launcher.stores_byte_scales
                        or (scale.dtype is _BYTE and (linear is None or linear.dtype is _BYTE))
                    )
                ):
                    # fmt: off
                    launcher.function(
                        input, residual, weight if launcher.has_weight else None, bias,
                        workspace_or_factor, y, scale, linear, norm, row_scale, None, None,
                        eps, factor_of_gate, offset, clamp, launcher.max_ctas,
                    )
                    # fmt: on
                    result = outputs
        except Exception:  # see CallPath.run
            result = None
        if result is None:
            swiglu = alpha, beta, limit
            formats = block_size, scale_format, granularity, layout, interleaved
            given = input, residual, weight, factor, eps, *swiglu, *formats, weight_plus_one, gate, bias, subtract_mean
            result = self.run_checked(RowCall._make(given), out)
        if out is not None:
            mark_written((out,) if self.is_single else out)
        if residual is not None:
            mark_written((residual,))
        return result

    def for_outputs(self, call: RowCall, out: Any) -> RowCall:
        if call.granularity != _BLOCK or call.scale_layout is not None or is_column_major(out[1]):
            return call
        return call._replace(scale_layout=ROW.name)

    def formats(self, call: RowCall) -> tuple[FP4Format | FP8Format | None, ScaleLayout]:
        """Return the format of the codes, or None if the op does not quantise, and the scale layout."""
        if not self.quantises:
            return None, ROW
        if self.reduces_tensor:
            return FP8_DYNAMIC_TENSOR, ROW
        if call.granularity is None:
            assert call.scale_layout is not None
            return _checks.check_fp4_format(self.op, call.block_size, call.scale_format, call.scale_layout)
        return _checks.check_fp8_format(self.op, call.granularity, call.scale_layout, call.scale_format)

    def check(self, call: RowCall) -> None:
        op, input, device = self.op, call.input, call.input.device
        fmt, _ = self.formats(call)
        _checks.check_rows(op, "input", input, fmt, _checks.INPUT_DTYPES, halves=self.source == "silu_mul")
        if call.residual is not None:
            _checks.check_residual(op, call.residual, input, allows_fp32=self.takes_general_norms)
        if call.weight is not None:
            _checks.check_dtype(op, "weight", call.weight, tuple(dict.fromkeys((input.dtype, torch.float32))))
            if not self.takes_general_norms or call.weight.shape != (0,):
                _checks.check_shape(op, "weight", call.weight, (input.shape[-1],), "one element per column of input")
            elif call.weight_plus_one:
                raise ValueError(
                    f"cute::{op}: weight_plus_one is True, and weight has no elements; expected a weight to add 1 to"
                )
            _checks.check_device(op, "weight", call.weight, "input", device)
            _checks.check_finite(op, "eps", call.eps, " of at least 0", call.eps >= 0)
            if call.bias is not None:
                _checks.check_dtype(op, "bias", call.bias, (call.weight.dtype,))
                _checks.check_shape(op, "bias", call.bias, (input.shape[-1],), "one element per column of input")
                _checks.check_device(op, "bias", call.bias, "input", device)
        if isinstance(fmt, FP4Format):
            _checks.check_global_scale(op, call.factor, fmt, "input", device)
        elif fmt is not None:
            _checks.check_fp8_scale(op, call.factor, fmt, "input", device)
            _checks.check_interleaved_codes(op, call.interleaved, fmt)
        _checks.check_swiglu(op, *call.swiglu)
        _checks.check_gate(op, call.gate, *call.swiglu)

    def fill_without_work(self, call: RowCall, out: Outputs) -> bool:
        if call.input.numel():
            return False
        if self.reduces_tensor:
            out[1].zero_()
        elif call.granularity == FP8_TENSOR.granularity and call.factor is not None:
            out[1].copy_(call.factor.reshape(1))
        return True

    def _problem(self, call: RowCall) -> Any:
        """Describe the call for the function that plans the kernel ``row_quant``."""
        from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT
        from torch_cute_ops.kernels.row_quant import RowQuantSpec

        fmt, layout = self.formats(call)
        hidden = call.input.shape[-1] // 2 if self.source == "silu_mul" else call.input.shape[-1]
        return RowQuantSpec(
            source=self.source,
            dtype=call.input.dtype,
            weight_dtype=None if call.weight is None else call.weight.dtype,
            # Round the width up to a multiple of FP8_UNIT. Only FP8 rows may need this: FP4 rows consist of whole
            # blocks, and the block sizes are multiples of FP8_UNIT.
            width=-(-hidden // FP8_UNIT) * FP8_UNIT,
            norm_width=hidden,
            fmt=fmt,
            layout=layout,
            also_linear="scale_linear" in self.signature.outputs,
            has_factor=call.factor is not None or self.reduces_tensor,
            writes_norm=not self.quantises or "norm" in self.signature.outputs,
            swiglu=not gates_plainly(*call.swiglu),
            interleaved=call.interleaved,
            weight_plus_one=call.weight_plus_one,
            gate=call.gate,
            has_row_scale="row_scale" in self.signature.outputs,
            has_weight=call.weight is None or call.weight.numel() > 0,
            has_bias=call.bias is not None,
            subtracts_mean=call.subtract_mean,
            has_fp32_residual=call.residual is not None and call.residual.dtype != call.input.dtype,
            four_over_six=self.four_over_six,
        )

    def kernel(self, call: RowCall, arch: Arch) -> KernelSpec:
        """Return the kernel that calls with the same static key launch."""
        from torch_cute_ops.kernels import row_quant

        try:
            return KernelSpec(row_quant.KERNEL, row_quant.plan(self._problem(call), arch, pdl=settings.PDL))
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None

    def declare(self) -> dict[str, Property]:
        declared = {
            "hidden": size(lambda call: call.input.shape[-1]),
            "dtype": dtype(lambda call: call.input.dtype, REQUIRED),
        }
        if self.normalises:
            declared["weight_dtype"] = dtype(lambda call: call.weight.dtype)
        if self.takes_general_norms:
            declared["without_weight"] = flag(lambda call: None if call.weight.numel() else True)
            declared["bias"] = flag(lambda call: None if call.bias is None else True)
            if self.source == "add":
                declared["residual_dtype"] = dtype(lambda call: call.residual.dtype)
        if "global_scale" in self.signature.names:
            declared["global_scale"] = flag(lambda call: call.factor is not None)
        if self.source == "silu_mul":
            declared["swiglu"] = flag(lambda call: None if gates_plainly(*call.swiglu) else True)
        return declared | self.arguments_as_properties(
            "block_size",
            "scale_format",
            "granularity",
            "scale_layout",
            "interleaved",
            "weight_plus_one",
            "gate",
            "subtract_mean",
        )

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        row = torch.ones(1, given.hidden, dtype=given.dtype, device=device)
        static = getattr(given, "granularity", None) == FP8_TENSOR.granularity
        has_factor = static or getattr(given, "global_scale", False)
        factor = torch.ones(1, dtype=torch.float32, device=device) if has_factor else None
        weight_dtype = getattr(given, "weight_dtype", None) or given.dtype
        residual_dtype = getattr(given, "residual_dtype", None) or given.dtype
        columns = 0 if getattr(given, "without_weight", False) else given.hidden
        has_bias = getattr(given, "bias", False)
        return vars(given) | {
            "input": row,
            # ``ones_like`` on the meta device would import sympy, which takes 0.5 s
            "residual": torch.ones(row.shape, dtype=residual_dtype, device=device),
            "weight": torch.ones(columns, dtype=weight_dtype, device=device),
            "bias": torch.ones(given.hidden, dtype=weight_dtype, device=device) if has_bias else None,
            "global_scale": factor,
            "scale": factor,
            "swiglu_beta": 1.0 if getattr(given, "swiglu", False) else 0.0,
        }


def _kind_of_norm(call: Any) -> tuple[Any, ...] | None:
    """Return the part of a call's static key that describes the norm, or None for an RMSNorm with a weight whose
    residual, if any, has the dtype of the input."""
    if call.weight is None:
        return None
    has_other_residual = call.residual is not None and call.residual.dtype != call.input.dtype
    kind = call.bias is not None, call.subtract_mean, not call.weight.numel(), has_other_residual
    return kind if any(kind) else None


def gates_plainly(alpha: float, beta: float, limit: float | None) -> bool:
    """Return True if the gate is plain ``silu(gate) · up``, or another activation without scaling, offset or clamp.
    This gate is compiled to a separate kernel."""
    return limit is None and alpha == 1.0 and beta == 0.0


def gate_arguments(alpha: float, beta: float, limit: float | None) -> tuple[float | None, float | None, float | None]:
    """Return the parameters of a gate in the representation that the kernel expects.

    Raises:
        ValueError: if a parameter is not finite, or the limit is not positive.
    """
    if gates_plainly(alpha, beta, limit):
        return None, None, None
    if not (math.isfinite(alpha) and math.isfinite(beta) and (limit is None or 0.0 < limit < math.inf)):
        raise ValueError("a parameter of the gate is out of range")
    return alpha, beta, math.inf if limit is None else limit


def _padded(rows: Tensor, parts: int, width: int) -> Tensor:
    """Divide rows (M, parts · K) into ``parts`` parts, pad each part with zeros to ``width``, and return (M, parts ·
    width)."""
    count, columns = rows.shape
    padded = rows.new_zeros(count, parts, width)
    padded[:, :, : columns // parts] = rows.reshape(count, parts, columns // parts)
    return padded.view(count, parts * width)
