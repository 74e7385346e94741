"""Call path that all GEMM ops share, with or without a gate in their epilogue. It chooses a backend for a CUDA call."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import torch

from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.prepared_scales import prepared_shape
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS, layout_of_operand, weight_layout
from torch_cute_ops.formats.shapes import fp4_shapes
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import CallPath, Launcher
from torch_cute_ops.ops._operands import aligned
from torch_cute_ops.ops._properties import Property
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.allocate import contiguous_strides
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

if TYPE_CHECKING:
    from torch_cute_ops.gemm.backend import Target
    from torch_cute_ops.gemm.problem import GemmProblem
    from torch_cute_ops.gemm.select import Choice

Tensor = torch.Tensor

AUTO: Final = "auto"
SIXTEEN_BIT: Final = (torch.bfloat16, torch.float16)
EXPERT_MULTIPLE: Final = 64
"""Number that must divide the width of an expert, so that its elements in a row of ``a`` fill whole bytes and
blocks."""

Call = TypeVar("Call", bound=tuple[Any, ...])


class BackendPath(CallPath[Call]):
    """Base class of the call paths of GEMM ops. Several backends can compute a GEMM, and the class chooses one.

    A ``Call`` has the fields ``a``, ``block_size``, ``scale_format``, ``scale_layout`` and ``backend``, among others.

    Args:
        a, b: formats of the activations and of the weight.
        prologue_gate: True if a row of ``a`` contains 16-bit gate and up values, from which the GEMM computes the
            activations with the activation function ``gate`` of the call.
        prologue_quant: True if the GEMM quantises 16-bit activations to FP4. The field ``a_scale`` of ``GemmCall`` then
            holds the call's ``global_scale``.

    Attributes:
        over: dimension of the GEMM that is divided among experts, as in ``gemm.problem.Grouping``.
        b_name: name of the op's weight argument.
    """

    renames: ClassVar = {"w": "b", "w_scale": "b_scale"}
    has_backends = True
    over: ClassVar[Literal["none", "k", "n", "rows"]] = "none"
    b_name: ClassVar[str] = "b"

    def __init__(
        self,
        a: Literal["fp4", "fp8", "16-bit"],
        b: Literal["fp4", "fp8"],
        *,
        prologue_gate: bool = False,
        prologue_quant: bool = False,
    ) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.prologue_gate, self.prologue_quant = prologue_gate, prologue_quant

    def problem(self, call: Any) -> "GemmProblem":
        """Describe a checked call as a ``GemmProblem``."""
        raise NotImplementedError

    def ready_launcher(self, *how: Any, **named: Any) -> Launcher[Call]:
        """Compile the kernels of the chosen backend for a problem and a target, and return a launcher for them."""
        raise NotImplementedError

    def rows(self, call: Any) -> int:
        """Return the number of rows of ``a``, or in the masked layout the number of rows per expert."""
        m: int = call.a.shape[-2]
        return m

    def flops(self, a_shape: Any, b_shape: Any) -> int:
        """Return the FLOP count of the GEMM as if every token were routed to every expert."""
        *lead, _ = a_shape
        k, n = b_shape[-2:]
        rows = b_shape[0] if self.over == "n" else 1
        for extent in lead:
            rows *= extent
        return int(2 * rows * n * k * (2 if self.b == "fp4" else 1))

    def fp4_format(self, call: Any) -> tuple[FP4Format, ScaleLayout, ScaleLayout]:
        """Return the FP4 format, the scale layout of the activations, and the scale layout of the weight.

        If the call names no layout, the layout is derived from the number of dimensions of the activations' scales. If
        the activations have no scales, it is derived from the weight's scales.
        """
        name = call.scale_layout
        if name is None:
            name = layout_of_operand(call.a_scale if self.a == "fp4" else call.b_scale).name
        fmt, layout = _checks.check_fp4_format(self.op, call.block_size, call.scale_format, name)
        b_layout = weight_layout(layout)
        if self.a != "fp4" and layout != b_layout:
            given = f"scale_layout={layout.name!r} is"
            if call.scale_layout is None:
                given = (
                    f"got {self.b_name}_scale with shape {tuple(call.b_scale.shape)}, {layout.name} tiles, which are"
                )
            raise ValueError(f"cute::{self.op}: {given} for activations; use '128x4' or 'linear'")
        return fmt, layout, b_layout

    def check_fp4_scale(
        self,
        name: str,
        scale: Tensor,
        matrix: tuple[int, ...],
        fmt: FP4Format,
        layout: ScaleLayout,
        call: Any,
    ) -> None:
        """Check that ``scale`` has the dtype and shape of an FP4 matrix's block scales in ``layout``."""
        _checks.check_dtype(self.op, name, scale, fmt.scale_dtypes)
        follows = "a_scale" if self.a == "fp4" and name != "a_scale" else None
        _checks.check_fp4_scale(self.op, name, scale, matrix, fmt, layout, call.scale_layout, follows)

    def check_activations(self, call: Any, k: int, fmt: FP4Format, layout: ScaleLayout) -> None:
        """Check that ``a`` has rows of ``k`` elements, either 16-bit elements or FP4 elements with block scales."""
        op, a, columns = self.op, call.a, {"k": "E·I", "n": "H"}.get(self.over, "2·K" if self.prologue_gate else "K")
        line = f"a column of {self.b_name}"
        _checks.check_matrix(op, "a", a, f"(M, {columns}/2)" if self.a == "fp4" else f"(M, {columns})")
        m = a.shape[0]
        if self.a == "16-bit":
            _checks.check_dtype(op, "a", a, SIXTEEN_BIT)
            meaning = f"the {k} elements that {line} has"
            if self.prologue_gate:
                meaning = f"gate and up for each of {meaning}"
            _checks.check_shape(op, "a", a, (m, self.a_width(k)), f"{meaning}{self.hint(call)}")
            if self.prologue_quant:
                _checks.check_global_scale(op, call.a_scale, fmt, "a", a.device)
        else:
            _checks.check_packed(op, "a", a, fmt)
            _checks.check_shape(op, "a", a, (m, k // 2), f"the {k // 2} bytes that {line} has{self.hint(call)}")
            self.check_fp4_scale("a_scale", call.a_scale, (m, k), fmt, layout, call)

    def a_width(self, k: int) -> int:
        """Return the number of elements in a row of ``a`` for a GEMM with K = ``k``: twice ``k`` if the row holds gate
        and up."""
        return 2 * k if self.prologue_gate else k

    def hint(self, call: Any) -> str:
        """Return advice to transpose the weight if ``a`` would fit the transposed weight, or else an empty string."""
        packed = self.b == "fp4" and self.a != "fp4"
        fits = self.a_width(call.b.shape[-1] * (2 if packed else 1)) == call.a.shape[-1]
        return f"; pass {self.b_name} as weight.mT" if fits else ""

    def example_format(self, given: Any) -> tuple[FP4Format, ScaleLayout]:
        """Return the FP4 format and the scale layout of an example's activations. The default layout is 128x4."""
        return _checks.check_fp4_format(self.op, given.block_size, given.scale_format, given.scale_layout)

    def declare_layout(self) -> dict[str, Property]:
        """Return the static property ``scale_layout``, the layout of a call's FP4 scales, or no property for an op
        without FP4 scales."""
        (declared,) = self.arguments_as_properties("scale_layout").values() if self.b == "fp4" else (None,)
        if declared is None:
            return {}
        return {"scale_layout": replace(declared, of=lambda call: self.fp4_format(call)[1].name)}

    def chosen(self, name: str, value: str | None, choices: Mapping[Any, Any]) -> Any:
        """Look up the value of a property in ``choices`` and return its entry.

        Raises:
            ValueError: if the value is not one of the choices.
        """
        if value not in choices:
            expected = ", ".join(map(repr, choices))
            raise ValueError(f"cute::{self.op}: {name} is {value!r}; expected one of {expected}")
        return choices[value]

    def check_backend(self, call: Any) -> None:
        """Check that the named backend exists and supports the tensors' device."""
        names = tuple(gemm_package().select.candidates(self.problem(call))) if call.backend != AUTO else ()
        if call.backend != AUTO and (call.backend not in names or call.a.device.type == "cpu"):
            self._choose(self.problem(call), 1, gemm_package().select.target_of(torch.device("cpu")), call.backend)

    def make_launcher(self, call: Any, device: int) -> Launcher[Call]:
        select = gemm_package().select
        problem, target = self.problem(call), select.target_of(torch.device("cuda", device))
        m = bucket(self.rows(call))
        may_tune = tuning.is_on() and call.backend == AUTO
        if may_tune and not torch.cuda.is_current_stream_capturing():
            gemm_package().tune.tune(self.op, problem, m, target)
            may_tune = False
        choice = self._choose(problem, m, target, call.backend)
        kernels = () if target.arch is None else choice.backend.kernels(problem, choice.tactic, target.arch)
        self.require_loaded(kernels, call, device)
        # Do not store the launcher while a CUDA graph is captured. Tuning is impossible during a capture, so a later
        # call may still have to tune.
        launcher: Any = self.ready_launcher(problem, choice, kernels, target, is_kept=not may_tune)
        launcher.views_b_scale = launcher.b_scale_shape is not None and call.b_scale.shape != launcher.b_scale_shape
        return launcher

    def kernels(self, call: Any, where: torch.device | Arch) -> tuple[KernelSpec, ...]:
        problem, m = self.problem(call), bucket(self.rows(call))
        package = gemm_package()
        targets = package.cost.usual_targets(where) if isinstance(where, Arch) else (package.select.target_of(where),)
        found: dict[KernelSpec, None] = {}
        for target in targets:
            if tuning.is_on() and call.backend == AUTO:
                found |= dict.fromkeys(package.tune.kernels(problem, m, target))
            choice = self._choose(problem, m, target, call.backend)
            if target.arch is not None:
                found |= dict.fromkeys(choice.backend.kernels(problem, choice.tactic, target.arch))
        return tuple(found)

    def tactic(self, call: Any, device: torch.device) -> tuple[Any, ...]:
        target = gemm_package().select.target_of(device)
        choice = self._choose(self.problem(call), bucket(self.rows(call)), target, call.backend)
        return choice.backend.name, choice.tactic

    def backends(self, call: Any, where: torch.device | Arch) -> dict[str, str | None]:
        select = gemm_package().select
        reasons: dict[str, str | None] = select.reasons(self.problem(call), select.target_of(where))
        return reasons

    def _choose(self, problem: "GemmProblem", m: int, target: "Target", backend: str) -> "Choice":
        try:
            choice: Choice = gemm_package().select.choose(problem, m, target, backend)
            return choice
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None


class BackendLauncher(Launcher[Call]):
    """Launcher of one backend and tactic.

    Args:
        problem, choice, target: problem, chosen backend and tactic, and device.
        kernels: kernels that the tactic launches.
        is_kept: True if later calls with the same static key use this launcher.

    Attributes:
        b_scale_shape: shape in which kernels expect the tiled or prepared scales of an FP4 weight; None for other
            scales.
        views_b_scale: True if the calls pass the weight's scales in another library's shape, so that each call must
            reshape them.
    """

    views_b_scale: bool = False

    def __init__(
        self,
        problem: "GemmProblem",
        choice: "Choice",
        kernels: tuple[KernelSpec, ...],
        target: "Target",
        *,
        is_kept: bool,
    ) -> None:
        self.kernels, self.is_kept = kernels, is_kept
        self.compute = choice.backend.launcher(problem, choice.tactic, target)
        self.is_direct = choice.backend.checks_operands(problem, choice.tactic)
        self.device, self.n, self.dtype = target.device, problem.n, problem.out_dtype
        a, b, quantised = problem.a, problem.b, problem.quantised
        self.b_scale_shape: tuple[int, ...] | None = None
        if isinstance(b.format, FP4Format) and b.scale_layout is not None and not b.scale_layout.is_linear:
            rows = problem.weight_rows * (problem.experts if problem.grouping.over == "rows" else 1)
            self.b_scale_shape = b.scale_layout.shape((rows,), problem.k // b.format.block_size)
        elif isinstance(b.format, FP4Format) and b.is_prepared:
            experts = problem.experts if problem.grouping.over == "rows" else None
            self.b_scale_shape = prepared_shape(problem.n, problem.k, b.format, experts)
        self.a_scales = self.y_scales = None
        if isinstance(a.format, FP4Format) and a.scale_layout is not None:
            self.a_scales = ScaleRows.of(a.scale_layout, problem.k // a.format.block_size)
        if quantised is not None and isinstance(quantised.format, FP4Format) and quantised.scale_layout is not None:
            self.y_scales = ScaleRows.of(quantised.scale_layout, problem.n // quantised.format.block_size)

    def tiles(self, scale: Tensor, rows: int) -> Tensor | None:
        """Return the scales of ``rows`` rows of activations in the shape that kernels expect, or None if ``scale`` has
        a shape that is not accepted.

        The fast path calls this function if the call names the layout, because the tiles may then have another
        library's shape.
        """
        scales = self.a_scales
        assert scales is not None
        count = scales.count(rows)
        matrix = count * scales.tile_rows, scales.columns * TILE_BLOCKS
        if scales.is_linear or tuple(scale.shape) not in (matrix, (matrix[0] * matrix[1],)):
            return None
        return scale.view(count, *scales.tail)

    def stored_scales(self, a_scale: Tensor | None, b_scale: Tensor, rows: int, fmt: FP4Format) -> Any:
        """Convert checked FP4 scales to the format that kernels read: contiguous tiles in the format's dtype."""
        b_scale = aligned(seen_as(b_scale, fmt.scale_dtype))
        if self.b_scale_shape is not None:
            b_scale = b_scale.view(self.b_scale_shape)
        if self.a_scales is not None and a_scale is not None:
            a_scale = aligned(seen_as(a_scale, fmt.scale_dtype)).view(self.a_scales.count(rows), *self.a_scales.tail)
        return a_scale, b_scale


class ScaleRows(NamedTuple):
    """Shape of a matrix's scales, for any number of rows.

    Attributes:
        tile_rows: rows of a tile; 1 for linear scales.
        columns: second extent of the scales: number of tiles along K, or number of blocks per row for linear scales.
        tail: all extents except the first.
        strides: strides of contiguous scales.
        is_linear: True for linear scales.
    """

    tile_rows: int
    columns: int
    tail: tuple[int, ...]
    strides: tuple[int, ...]
    is_linear: bool

    @classmethod
    def of(cls, layout: ScaleLayout, blocks: int) -> "ScaleRows":
        """Return the shape, in ``layout``, of the scales of a matrix with ``blocks`` blocks per row."""
        shape = layout.shape((1,), blocks)
        return cls(layout.tile_rows or 1, shape[1], shape[1:], contiguous_strides(shape), layout.is_linear)

    def count(self, rows: int) -> int:
        """Return the size of the first dimension of the scales of a matrix with ``rows`` rows."""
        return (rows + self.tile_rows - 1) // self.tile_rows


def fp4_zeros(
    shape: tuple[int, ...], fmt: FP4Format, layout: ScaleLayout, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the codes and block scales of an all-zero FP4 matrix of this shape."""
    codes, scale = (torch.zeros(each, dtype=torch.uint8, device=device) for each in fp4_shapes(shape, fmt, layout))
    return codes, scale.view(fmt.scale_dtype)


def check_bias(
    op: str,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    of: str = "column of the result",
) -> None:
    """Check that ``bias`` is None or has this shape, in float32 or ``dtype``, on ``device``."""
    if bias is not None:
        _checks.check_dtype(op, "bias", bias, tuple(dict.fromkeys((torch.float32, dtype))))
        _checks.check_shape(op, "bias", bias, shape, f"one element per {of}")
        _checks.check_device(op, "bias", bias, "a", device)


def check_row_scale(op: str, row_scale: Tensor | None, a: Tensor) -> None:
    """Check that ``row_scale`` is None or has one float32 element for each row of ``a``, on the same device."""
    if row_scale is not None:
        _checks.check_dtype(op, "row_scale", row_scale, (torch.float32,))
        _checks.check_shape(op, "row_scale", row_scale, (a.shape[0],), "one element per row of a")
        _checks.check_device(op, "row_scale", row_scale, "a", a.device)


def seen_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor viewed as ``dtype``."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


@cache
def gemm_package() -> ModuleType:
    """Import the package ``gemm``. The import loads the configurations of all kernels, so it is deferred to the first
    GEMM."""
    import torch_cute_ops.gemm as gemm
    import torch_cute_ops.gemm.cost
    import torch_cute_ops.gemm.problem
    import torch_cute_ops.gemm.select
    import torch_cute_ops.gemm.tune  # noqa: F401

    return gemm
