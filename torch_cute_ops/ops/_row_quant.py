"""What the ops that quantise rows share: checks, the choice of a kernel, and the way to its launch.

A call looks up its launcher by the facts that the kernel was compiled for (never the number of rows) and calls it. The
compiled function refuses tensors that do not fit before it launches anything; only then do the slow checks run, to say
what is wrong or to make a copy that the kernel can read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import is_grad_enabled

from torch_cute_ops.fake.fp4_quantize import fp4_shapes
from torch_cute_ops.fake.rmsnorm_fp8quant import fp8_shapes
from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.fp8 import COLUMN, FP8_BLOCK128, FP8_TENSOR, FP8Format
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._signatures import FP4_CHOICES, Signature
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel
from torch_cute_ops.runtime.dispatch import mark_written

Outputs = tuple[torch.Tensor, ...]


class Facts(NamedTuple):
    """What a launcher was made for.

    Attributes:
        hidden: the last dimension of the input.
        factor: whether a global scale (FP4) or a scale (FP8) is given.
        choices: format and layout, as the op's signature names them.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    hidden: int
    factor: bool
    device: int
    choices: tuple[Any, ...]


@dataclass(frozen=True)
class Launcher:
    """A compiled kernel and what a call of it needs.

    Attributes:
        function: the compiled kernel.
        max_ctas: CTAs that fill the device.
        device: the device that the kernel was made ready for.
        width: elements of a row that the kernel quantises.
        is_padded: whether rows are shorter than that.
        fmt, layout: format and scale layout.
        y_width, y_dtype: of the codes.
        scale_width, scale_dtype: of the scales; a width of 0 where they are no matrix of whole rows.
        tile_rows: rows of a scale tile, or 1.
    """

    function: Callable[..., None]
    max_ctas: int
    device: torch.device
    width: int
    is_padded: bool
    fmt: FP4Format | FP8Format
    layout: ScaleLayout
    y_width: int
    y_dtype: torch.dtype
    scale_width: int
    scale_dtype: torch.dtype
    tile_rows: int


class RowQuant:
    """One op that quantises rows: input (..., H), or (..., 2H) for ``silu_mul``, becomes codes, scales, and more.

    Args:
        op: the op's name.
        signature: its arguments.
        source: what the rows are; as in ``kernels.row_quant.Problem``.
        normalises: whether there is a weight and the rows are RMS-normalised first.
        third: the output after codes and scales: ``"norm"``, ``"scale_linear"``, or none.
    """

    def __init__(
        self,
        op: str,
        signature: Signature,
        *,
        source: Literal["rows", "add", "silu_mul"] = "rows",
        normalises: bool = False,
        third: str | None = None,
    ) -> None:
        self.op = op
        self.signature = signature
        self.source = source
        self.normalises = normalises
        self.third = third
        self.is_fp4 = signature.choices[0] == FP4_CHOICES[0]
        scale = "scale_128x4" if third == "scale_linear" else "scale"
        self.outputs = ("y", scale) if third is None else ("y", scale, third)
        self.out_names: tuple[str, ...] = self.outputs
        # Entries with the op's signature: its arguments checked; the functional CUDA entry.
        self.check_call = partial(signature.arrange, self.check)
        self.cuda = partial(signature.arrange, self.run)
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        # Those whose rows are padded: a call of one is never the usual one.
        self._padding_launchers: dict[tuple[Any, ...], Launcher] = {}

    # The op's entries

    def spec(self, function: Callable[..., Any]) -> OpSpec:
        """The op's place in the registry."""
        spec = OpSpec(
            name=self.op,
            arguments=self.signature.schema,
            outputs=self.outputs,
            check=self.check_call,
            cuda=self.cuda,
            cuda_out=self.cuda_out,
            function=function,
            example=self.example,
            kernels=self.kernels,
        )
        self.out_names = spec.out_names
        return spec

    def cuda_out(self, *args: Any, **kwargs: Any) -> None:
        """The CUDA entry of the ``.out`` overload."""
        out = tuple([kwargs.pop(name) for name in self.out_names])
        self.signature.arrange(partial(self.run, out=out), *args, **kwargs)

    def example(
        self,
        *,
        hidden: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        global_scale: bool = False,
        device: torch.device | int | str | None = None,
        **choices: Any,
    ) -> Call:
        """A call on one row with these static facts.

        Args:
            hidden: the last dimension of ``input``.
            dtype: its dtype.
            weight_dtype: dtype of ``weight``; ``None`` means ``dtype``.
            global_scale: whether calls will pass a global scale; FP4 only.
            device: of the tensors; ``None`` means the current CUDA device.
            choices: format and layout, as in the calls.

        Raises:
            TypeError: for a fact that the op does not have.
        """
        if unknown := choices.keys() - set(self.signature.choices):
            raise TypeError(f"cute::{self.op} has no fact {', '.join(sorted(unknown))}")
        if (weight_dtype is not None and not self.normalises) or (global_scale and not self.is_fp4):
            raise TypeError(f"cute::{self.op} has no {'global_scale' if global_scale else 'weight'}")
        target = cuda_device(device)
        takes_factor = global_scale if self.is_fp4 else choices.get("granularity") == FP8_TENSOR.granularity
        row = torch.ones(1, hidden, dtype=dtype, device=target)
        given: list[torch.Tensor | None] = [row]
        if self.source == "add":
            given.append(torch.ones_like(row))
        if self.normalises:
            given.append(torch.ones(hidden, dtype=weight_dtype or dtype, device=target))
        given.append(torch.ones(1, dtype=torch.float32, device=target) if takes_factor else None)
        return tuple(given), choices

    def warmup_call(self, facts: Facts) -> str:
        """The call of ``torch_cute_ops.warmup`` that makes these facts' kernel ready."""
        shown: dict[str, Any] = {"hidden": facts.hidden, "dtype": facts.dtype}
        if self.normalises:
            shown["weight_dtype"] = facts.weight_dtype
        if self.is_fp4:
            shown["global_scale"] = facts.factor
        shown.update(zip(self.signature.choices, facts.choices, strict=False))
        shown["device"] = facts.device
        return f"torch_cute_ops.warmup({self.op!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    # The way of a call

    def check(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        factor: torch.Tensor | None,
        eps: float,
        choices: tuple[Any, ...],
    ) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            ValueError: for a wrong shape, device, format or layout, and for an input that requires grad.
            TypeError: for a wrong dtype.
        """
        op = self.op
        fmt, _ = self._resolve(choices)
        _checks.check_rows(op, "input", input, fmt, _checks.INPUT_DTYPES, halves=self.source == "silu_mul")
        if residual is not None:
            _checks.check_residual(op, residual, input)
        if weight is not None:
            _checks.check_dtype(op, "weight", weight, tuple(dict.fromkeys((input.dtype, torch.float32))))
            _checks.check_shape(op, "weight", weight, (input.shape[-1],), "one element a column of input")
            _checks.check_device(op, "weight", weight, "input", input.device)
        if isinstance(fmt, FP4Format):
            _checks.check_global_scale(op, factor, fmt, "input", input.device)
        else:
            _checks.check_fp8_scale(op, factor, fmt, "input", input.device)
        _checks.check_no_grad(op, input, residual, weight, factor)

    def run(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        factor: torch.Tensor | None,
        eps: float,
        choices: tuple[Any, ...],
        out: Outputs | None = None,
    ) -> Any:
        """Run the kernel on CUDA tensors, into ``out`` or into new tensors.

        What follows is the way of nearly every call, written out for speed (each line counts: 1 µs of Python is a tenth
        of a call); whatever it does not expect it leaves to ``_run_checked``.
        """
        shape = input.shape
        facts = (
            input.dtype,
            None if weight is None else weight.dtype,
            shape[-1] if shape else 0,
            factor is not None,
            input.get_device(),
            choices,
        )
        launcher = self._launchers.get(facts)
        grads = is_grad_enabled()
        if (
            launcher is None
            or len(shape) != 2
            or not shape[0]
            or (residual is not None and not _is_plain_residual(residual, input))
            or (factor is not None and (factor.dim() != 1 or factor.requires_grad))
            or (grads and (input.requires_grad or (weight is not None and weight.requires_grad)))
        ):
            return self._run_checked(Facts(*facts), input, residual, weight, factor, eps, out)
        rows = shape[0]
        tile = launcher.tile_rows
        scale_rows = (rows + tile - 1) // tile * tile
        linear = norm = None
        if out is None:
            new = allocator(launcher.device)
            width = launcher.y_width
            y = new((rows, width), (width, 1), launcher.y_dtype)
            width = launcher.scale_width
            if width:
                scale = new((scale_rows, width), (width, 1), launcher.scale_dtype)
            elif launcher.layout == COLUMN:
                scale = new((launcher.width // FP8_BLOCK128.block_size, rows), (rows, 1), torch.float32)
            else:
                scale = new((1,), (1,), torch.float32)
            if self.third == "norm":
                width = shape[1]
                norm = new((rows, width), (width, 1), input.dtype)
            elif self.third is not None:
                width = launcher.width // launcher.fmt.block_size
                linear = new((rows, width), (width, 1), launcher.scale_dtype)
        else:
            try:
                if self.third is None:
                    y, scale = out
                elif self.third == "norm":
                    y, scale, norm = out
                else:
                    y, scale, linear = out
            except ValueError:
                return self._run_checked(Facts(*facts), input, residual, weight, factor, eps, out)
            # The kernel takes the number of scale rows on trust, and int8 for uint8.
            if (
                y.dtype is not launcher.y_dtype
                or scale.dtype is not launcher.scale_dtype
                or (linear is not None and linear.dtype is not launcher.scale_dtype)
                or (launcher.scale_width and (scale.dim() != 2 or scale.shape[0] != scale_rows))
                or (grads and (y.requires_grad or scale.requires_grad))
                or (grads and self.third is not None and out[2].requires_grad)
            ):
                return self._run_checked(Facts(*facts), input, residual, weight, factor, eps, out)
        try:
            launcher.function(
                input, residual, weight, factor, y, scale, linear, norm, None, None, eps, launcher.max_ctas
            )
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
            return self._run_checked(Facts(*facts), input, residual, weight, factor, eps, out)
        except Exception as error:  # from CUDA
            raise launch_error(self.op, error, input, residual, weight, factor, eps, *choices) from error
        if residual is not None:
            mark_written((residual,))
        if out is not None:
            mark_written(out)
            return out
        if self.third is None:
            return y, scale
        third = linear if norm is None else norm
        assert third is not None
        return y, scale, third

    def _run_checked(
        self,
        facts: Facts,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        factor: torch.Tensor | None,
        eps: float,
        out: Outputs | None,
    ) -> Outputs:
        """``run`` with every check, for the first call, for unusual shapes, and for tensors that the kernel refused."""
        self.check(input, residual, weight, factor, eps, facts.choices)
        launcher = self._launchers.get(facts) or self._padding_launchers.get(facts)
        if launcher is None:
            launcher = self._launcher_by_other_words(facts) or self._make_launcher(facts)
            (self._padding_launchers if launcher.is_padded else self._launchers)[facts] = launcher
        expected = self._expected(input, launcher)
        if out is None:
            out = tuple(torch.empty(shape, dtype=dtype, device=input.device) for _, shape, dtype in expected)
        else:
            _checks.check_number(self.op, out, self.out_names)
            for (name, shape, dtype), tensor in zip(expected, out, strict=True):
                _checks.check_output(self.op, name, tensor, shape, dtype, input.device)
                if name not in _checks.STORED_SINGLY:
                    _checks.check_aligned(self.op, name, tensor)
            mark_written(out)
        if residual is not None:
            _checks.check_overlap(self.op, "residual", residual, "input", input)
            mark_written((residual,))
        if input.numel() == 0:
            if factor is not None and launcher.fmt == FP8_TENSOR:
                out[1].copy_(factor.reshape(1))
            return out
        try:
            self._launch(launcher, input, residual, weight, factor, eps, out)
        except RuntimeError:  # of torch, such as memory that ran out
            raise
        except Exception as error:  # from CUDA
            raise launch_error(self.op, error, input, residual, weight, factor, eps, *facts.choices) from error
        return out

    def _expected(self, input: torch.Tensor, launcher: Launcher) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name as an argument, shape and dtype of each output."""
        fmt, layout = launcher.fmt, launcher.layout
        *lead, width = input.shape
        shape = torch.Size((*lead, width // 2 if self.source == "silu_mul" else width))
        shapes = fp4_shapes(shape, fmt, layout) if isinstance(fmt, FP4Format) else fp8_shapes(shape, fmt, layout)
        expected = list(zip(self.out_names, shapes, (launcher.y_dtype, launcher.scale_dtype), strict=False))
        if self.third == "norm":
            expected.append((self.third, tuple(shape), input.dtype))
        elif self.third is not None:
            expected.append((self.third, (*lead, shape[-1] // fmt.block_size), launcher.scale_dtype))
        return expected

    def _launch(
        self,
        launcher: Launcher,
        input: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        factor: torch.Tensor | None,
        eps: float,
        out: Outputs,
    ) -> None:
        """Run the kernel on tensors of any dimensions, strides and alignment, by copies where it takes no other way."""
        halves = 2 if self.source == "silu_mul" else 1
        rows = input.reshape(-1, input.shape[-1])
        sums = None if residual is None else residual.reshape(-1, input.shape[-1])
        count = rows.shape[0]
        y = out[0].view(count, -1)
        scale = out[1].view(count, -1) if launcher.scale_width and launcher.layout.is_linear else out[1]
        third = out[2].view(count, -1) if len(out) > 2 else None
        linear, norm = (None, third) if self.third == "norm" else (third, None)
        codes = y
        if launcher.is_padded:
            rows = _padded(rows, halves, launcher.width)
            sums = None if sums is None else _padded(sums, 1, launcher.width)
            weight = None if weight is None else _padded(weight.unsqueeze(0), 1, launcher.width)[0]
            codes = y.new_empty(count, launcher.width)
        g = None if factor is None else factor.reshape(1)
        rest = (g, codes, scale, linear, norm, None, None, eps, launcher.max_ctas)
        try:
            launcher.function(rows, sums, weight, *rest)
        except (ValueError, TypeError):
            # Rows, or a weight, that do not start at multiples of 16 bytes.
            copies = [
                None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
                for tensor in (rows, sums, weight)
            ]
            launcher.function(*copies, *rest)
            sums = copies[1]
        if codes is not y:
            y.copy_(codes[:, : y.shape[1]])
        if residual is not None and sums is not None and sums.data_ptr() != residual.data_ptr():
            residual.copy_(sums[:, : residual.shape[-1]].view(residual.shape))

    def _resolve(self, choices: tuple[Any, ...]) -> tuple[FP4Format | FP8Format, ScaleLayout]:
        """The format and layout that the choices name."""
        return (_checks.check_fp4_format if self.is_fp4 else _checks.check_fp8_format)(self.op, *choices)

    def _kernel(self, facts: Facts, arch: Arch) -> Wanted:
        """The kernel for these facts on ``arch``."""
        from torch_cute_ops.kernels import row_quant
        from torch_cute_ops.kernels.common.fp8_units import FP8_UNIT

        fmt, layout = self._resolve(facts.choices)
        hidden = facts.hidden // 2 if self.source == "silu_mul" else facts.hidden
        problem = row_quant.Problem(
            source=self.source,
            dtype=facts.dtype,
            weight_dtype=facts.weight_dtype,
            # FP4 rows are whole blocks, and so whole units.
            width=-(-hidden // FP8_UNIT) * FP8_UNIT,
            norm_width=hidden,
            fmt=fmt,
            layout=layout,
            also_linear=self.third == "scale_linear",
            has_factor=facts.factor,
            writes_norm=self.third == "norm",
        )
        try:
            return Wanted(row_quant.KERNEL, row_quant.plan(problem, arch, pdl=settings.PDL))
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None

    def kernels(self, arch: Arch, *args: Any, **kwargs: Any) -> tuple[Wanted, ...]:
        """The kernel that a call with the op's arguments needs on ``arch``; the tensors may be on meta."""
        self.check_call(*args, **kwargs)
        return (self._kernel(self.signature.arrange(_facts, *args, **kwargs), arch),)

    def _launcher_by_other_words(self, facts: Facts) -> Launcher | None:
        """The launcher of a call that named the same format otherwise."""
        for known, launcher in list(self._launchers.items()):  # other threads add to them
            same = Facts(*known)._replace(choices=facts.choices) == facts
            if same and self._resolve(facts.choices) == (launcher.fmt, launcher.layout):
                return launcher
        return None

    def _make_launcher(self, facts: Facts) -> Launcher:
        forbid_in_capture(self.op, str(facts), self.warmup_call(facts))
        arch = arch_of_device(facts.device)
        kernel = self._kernel(facts, arch)
        function = compile_kernel(kernel, arch)
        problem, fmt, layout = kernel.config.problem, kernel.config.problem.fmt, kernel.config.problem.layout
        if isinstance(fmt, FP4Format):
            y_width, scale_width = problem.width // 2, layout.padded_blocks(problem.width // fmt.block_size)
            y_dtype, scale_dtype = torch.uint8, fmt.scale_dtype
        else:
            y_width, scale_width = problem.width, fmt.scales_per_row(problem.width)
            y_dtype, scale_dtype = torch.float8_e4m3fn, torch.float32
            if fmt == FP8_TENSOR or layout == COLUMN:
                scale_width = 0
        return Launcher(
            function=function,
            max_ctas=sm_count(facts.device) * kernel.config.waves,
            device=torch.device("cuda", facts.device),
            width=problem.width,
            is_padded=problem.width != problem.norm_width,
            fmt=fmt,
            layout=layout,
            y_width=y_width,
            y_dtype=y_dtype,
            scale_width=scale_width,
            scale_dtype=scale_dtype,
            tile_rows=layout.tile_rows or 1,
        )

    def launcher_of(
        self, input: torch.Tensor, weight: torch.Tensor | None, factor: torch.Tensor | None, choices: tuple[Any, ...]
    ) -> Launcher:
        """The launcher of calls like this one, which came before."""
        return self._launchers[_facts(input, None, weight, factor, 0.0, choices)]


def _facts(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    factor: torch.Tensor | None,
    eps: float,
    choices: tuple[Any, ...],
) -> Facts:
    """The facts of a call."""
    weight_dtype = None if weight is None else weight.dtype
    return Facts(input.dtype, weight_dtype, input.shape[-1], factor is not None, input.get_device(), choices)


def _is_plain_residual(residual: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether a residual (M, H) certainly has its elements each at a place of its own, and none of the input's."""
    if residual.dim() != 2 or residual.stride(0) < residual.shape[1] or residual.requires_grad:
        return False
    if residual is input:
        return True
    begin, end = _extent(residual)
    other_begin, other_end = _extent(input)
    return end <= other_begin or other_end <= begin


def _extent(rows: torch.Tensor) -> tuple[int, int]:
    """Addresses between which a matrix with contiguous rows lies."""
    begin = rows.data_ptr()
    return begin, begin + ((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]) * rows.element_size()


def _padded(rows: torch.Tensor, parts: int, width: int) -> torch.Tensor:
    """Rows (M, parts · K) with zeros after each of the parts: (M, parts · width)."""
    count, columns = rows.shape
    padded = rows.new_zeros(count, parts, width)
    padded[:, :, : columns // parts] = rows.reshape(count, parts, columns // parts)
    return padded.view(count, parts * width)
