"""What the ops that quantise rows to FP4 share: checks, the choice of a kernel, and the way to its launch.

A call looks up its launcher by the facts that the kernel was compiled for (never the number of rows) and calls it. The
compiled function refuses tensors that do not fit before it launches anything; only then do the slow checks run, to say
what is wrong or to make a copy that the kernel can read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_shapes
from torch_cute_ops.formats import FP4Format, ScaleLayout, resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.ops import _checks
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import arch_of_device, sm_count
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import compile_kernel
from torch_cute_ops.runtime.dispatch import mark_written

Outputs = tuple[torch.Tensor, ...]

OUTPUTS = ("y", "scale", "norm")
NORM_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? global_scale=None, float eps=1e-6, int block_size=16, "
    'str? scale_format=None, str scale_layout="linear"'
)


class Facts(NamedTuple):
    """What a launcher was made for."""

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    hidden: int
    global_scale: bool
    block_size: int
    scale_format: str | None
    scale_layout: str
    device: int


@dataclass(frozen=True)
class Launcher:
    """A compiled kernel and what a call of it needs.

    Attributes:
        function: the compiled kernel.
        max_ctas: CTAs that fill the device.
        fmt: the FP4 format.
        layout: the scale layout.
        device: the device that the kernel was made ready for.
        y_width, scale_width: row lengths of the outputs.
        tile_rows: rows of a scale tile, or 1.
    """

    function: Callable[..., None]
    max_ctas: int
    fmt: FP4Format
    layout: ScaleLayout
    device: torch.device
    y_width: int
    scale_width: int
    tile_rows: int


class RowQuant:
    """One op that quantises rows to FP4: rows (..., H) become codes (..., H/2), scales, and perhaps their norm (...,
    H).

    Args:
        op: the op's name.
        normalises: whether there is a weight and the rows are RMS-normalised first.
        returns_norm: whether the normalised rows are an output too.
    """

    def __init__(self, op: str, normalises: bool, returns_norm: bool = False) -> None:
        self.op = op
        self.normalises = normalises
        self.returns_norm = returns_norm
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def check(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        block_size: int,
        scale_format: str | None,
        scale_layout: str,
    ) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            ValueError: for a wrong shape, device, format or layout, and for an input that requires grad.
            TypeError: for a wrong dtype.
        """
        op = self.op
        fmt, _ = _checks.check_fp4_format(op, block_size, scale_format, scale_layout)
        _checks.check_rows(op, "input", input, fmt, _checks.INPUT_DTYPES)
        if weight is not None:
            _checks.check_dtype(op, "weight", weight, tuple(dict.fromkeys((input.dtype, torch.float32))))
            _checks.check_shape(op, "weight", weight, (input.shape[-1],), "one element a column of input")
            _checks.check_device(op, "weight", weight, "input", input.device)
        _checks.check_global_scale(op, global_scale, fmt, "input", input.device)
        _checks.check_no_grad(op, input, weight, global_scale)

    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        eps: float,
        block_size: int,
        scale_format: str | None,
        scale_layout: str,
        out: Outputs | None = None,
    ) -> Outputs:
        """Run the kernel on CUDA tensors, into ``out`` or into new tensors.

        What follows is the way of nearly every call, written out for speed (each line counts: 1 µs of Python is a tenth
        of a call); whatever it does not expect it leaves to ``_run_checked``.
        """
        shape = input.shape
        facts = (
            input.dtype,
            None if weight is None else weight.dtype,
            shape[-1] if shape else 0,
            global_scale is not None,
            block_size,
            scale_format,
            scale_layout,
            input.get_device(),
        )
        launcher = self._launchers.get(facts)
        if (
            launcher is None
            or len(shape) != 2
            or not shape[0]
            or (global_scale is not None and (global_scale.dim() != 1 or global_scale.requires_grad))
            or (torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad)))
        ):
            return self._run_checked(Facts(*facts), input, weight, global_scale, eps, out)
        rows = shape[0]
        tile = launcher.tile_rows
        scale_rows = (rows + tile - 1) // tile * tile
        norm = None
        if out is None:
            # empty_strided: 0.45 µs less than empty, each (torch 2.13).
            device = launcher.device
            width = launcher.y_width
            y = torch.empty_strided((rows, width), (width, 1), dtype=torch.uint8, device=device)
            width = launcher.scale_width
            scale = torch.empty_strided((scale_rows, width), (width, 1), dtype=launcher.fmt.scale_dtype, device=device)
            if self.returns_norm:
                width = shape[1]
                norm = torch.empty_strided((rows, width), (width, 1), dtype=input.dtype, device=device)
        else:
            y, scale = out[0], out[1]
            if self.returns_norm:
                norm = out[2]
            # The kernel takes the number of scale rows on trust.
            if scale.dim() != 2 or scale.shape[0] != scale_rows:
                return self._run_checked(Facts(*facts), input, weight, global_scale, eps, out)
        try:
            launcher.function(input, weight, global_scale, y, scale, norm, eps, launcher.max_ctas)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
            return self._run_checked(Facts(*facts), input, weight, global_scale, eps, out)
        if out is not None:
            mark_written(out)
            return out
        return (y, scale) if norm is None else (y, scale, norm)

    def _run_checked(
        self,
        facts: Facts,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        eps: float,
        out: Outputs | None,
    ) -> Outputs:
        """``run`` with every check, for the first call, for unusual shapes, and for tensors that the kernel refused."""
        self.check(input, weight, global_scale, *facts[4:7])
        launcher = self._launchers.get(facts)
        if launcher is None:
            launcher = self._launchers[facts] = self._make_launcher(facts)
        shapes = (*fp4_shapes(input.shape, launcher.fmt, launcher.layout), tuple(input.shape))
        dtypes = (torch.uint8, launcher.fmt.scale_dtype, input.dtype)
        expected = list(zip(OUTPUTS, shapes, dtypes, strict=True))[: 3 if self.returns_norm else 2]
        if out is None:
            out = tuple(torch.empty(shape, dtype=dtype, device=input.device) for _, shape, dtype in expected)
        else:
            for (name, shape, dtype), tensor in zip(expected, out, strict=True):
                _checks.check_output(self.op, name, tensor, shape, dtype, input.device)
                _checks.check_aligned(self.op, name, tensor)
            mark_written(out)
        if input.numel() == 0:
            return out
        rows = input.reshape(-1, facts.hidden)
        g = None if global_scale is None else global_scale.reshape(1)
        y, scale, *norm = out
        if launcher.layout.is_linear:
            scale = scale.view(rows.shape[0], -1)
        outputs = (y.view(rows.shape[0], -1), scale, norm[0].view(rows.shape) if norm else None)
        try:
            launcher.function(rows, weight, g, *outputs, eps, launcher.max_ctas)
        except (ValueError, TypeError):
            # Rows, or a weight, that do not start at multiples of 16 bytes.
            rows = rows.clone(memory_format=torch.contiguous_format)
            weight = None if weight is None else weight.clone(memory_format=torch.contiguous_format)
            launcher.function(rows, weight, g, *outputs, eps, launcher.max_ctas)
        return out

    def _make_launcher(self, facts: Facts) -> Launcher:
        forbid_in_capture(self.op, str(facts), self.warmup_call(facts))
        from torch_cute_ops.kernels import row_quant

        fmt = resolve_fp4_format(facts.block_size, facts.scale_format)
        layout = resolve_scale_layout(facts.scale_layout)
        problem = row_quant.Problem(
            dtype=facts.dtype,
            weight_dtype=facts.weight_dtype,
            width=facts.hidden,
            fmt=fmt,
            layout=layout,
            global_scale=facts.global_scale,
            writes_norm=self.returns_norm,
        )
        arch = arch_of_device(facts.device)
        try:
            config = row_quant.plan(problem, arch, pdl=settings.PDL)
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None
        function = compile_kernel(row_quant.RowQuantKernel(config), arch)
        return Launcher(
            function=function,
            max_ctas=sm_count(facts.device) * config.waves,
            fmt=fmt,
            layout=layout,
            device=torch.device("cuda", facts.device),
            y_width=facts.hidden // 2,
            scale_width=layout.padded_blocks(facts.hidden // fmt.block_size),
            tile_rows=layout.tile_rows or 1,
        )

    @property
    def launchers(self) -> dict[Facts, Launcher]:
        """The launchers made so far."""
        return {Facts(*facts): launcher for facts, launcher in self._launchers.items()}

    def warmup_call(self, facts: Facts) -> str:
        """The call of ``torch_cute_ops.warmup`` that makes these facts' kernel ready."""
        shown = facts._asdict()
        if not self.normalises:
            del shown["weight_dtype"]
        return f"torch_cute_ops.warmup({self.op!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def warmup(
        self,
        *,
        hidden: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        global_scale: bool = False,
        block_size: int = 16,
        scale_format: str | None = None,
        scale_layout: str = "linear",
        device: torch.device | int | str | None = None,
    ) -> None:
        """Compile and load the kernel for these facts, by running it on one row.

        Args:
            hidden: the last dimension of ``input``.
            dtype: its dtype.
            weight_dtype: dtype of ``weight``; ``None`` means ``dtype``.
            global_scale: whether calls will pass a global scale.
            block_size, scale_format, scale_layout: as in the calls.
            device: the CUDA device; ``None`` means the current one.
        """
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        with torch.no_grad():
            row = torch.ones(1, hidden, dtype=dtype, device=target)
            weight = torch.ones(hidden, dtype=weight_dtype or dtype, device=target) if self.normalises else None
            g = torch.ones(1, device=target) if global_scale else None
            self.run(row, weight, g, 1e-6, block_size, scale_format, scale_layout)
            torch.cuda.synchronize(target)


class NormQuant(RowQuant):
    """A ``RowQuant`` whose op takes (input, weight, global_scale, eps, block_size, scale_format, scale_layout)."""

    def __init__(self, op: str, returns_norm: bool = False) -> None:
        super().__init__(op, normalises=True, returns_norm=returns_norm)

    def check_call(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        global_scale: torch.Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        scale_format: str | None = None,
        scale_layout: str = "linear",
    ) -> None:
        """``check`` with the op's signature."""
        self.check(input, weight, global_scale, block_size, scale_format, scale_layout)

    def cuda(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        global_scale: torch.Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        scale_format: str | None = None,
        scale_layout: str = "linear",
    ) -> Outputs:
        """The functional CUDA entry."""
        return self.run(input, weight, global_scale, eps, block_size, scale_format, scale_layout)

    def cuda_out(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        global_scale: torch.Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        scale_format: str | None = None,
        scale_layout: str = "linear",
        **out: torch.Tensor,
    ) -> None:
        """The CUDA entry of the ``.out`` overload."""
        given = tuple(out[name] for name in OUTPUTS if name in out)
        self.run(input, weight, global_scale, eps, block_size, scale_format, scale_layout, given)
