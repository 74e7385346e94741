"""Call paths of GEMMs without a gate in their epilogue. A call path checks arguments, describes the problem and
launches the kernel.

Each kind of GEMM has a class: ``FP4Gemm``, ``ExpertFP4Gemm``, ``FP8Gemm``, ``GroupedFP8Gemm`` and ``TokenFP8Gemm``.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import torch

from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, NVFP4, FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp8 import COLUMN, FP8_TENSOR, FP8_TOKEN, is_one_column, new_column_scales
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import is_prepared, prepared_shape
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.formats.token_scales import has_token_scales, is_interleaved
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._backend_path import (
    AUTO,
    EXPERT_MULTIPLE,
    SIXTEEN_BIT,
    BackendLauncher,
    BackendPath,
    check_bias,
    check_row_scale,
    fp4_zeros,
    gemm_package,
    seen_as,
)
from torch_cute_ops.ops._operands import aligned, are_int32
from torch_cute_ops.ops._properties import Property, choice, dtype, flag, size
from torch_cute_ops.ops._signature import AlphaKind
from torch_cute_ops.ops._with_gemm import PREFETCH_MULTIPLE, is_prefetchable
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.dispatch import mark_written

if TYPE_CHECKING:
    from torch_cute_ops.gemm.problem import GemmProblem, Grouping, Operand

Tensor = torch.Tensor

FP8_K_MULTIPLE: Final = 64
FP8_N_MULTIPLE: Final = 8


class GemmCall(NamedTuple):
    """Arguments of any GEMM op without a gate in its epilogue. ``b`` is the weight, a transposed view. Some ops name
    this argument ``w``."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None = None
    b_scale: Tensor = None  # type: ignore[assignment]
    alpha: Tensor | None = None
    bias: Tensor | None = None
    offsets: Tensor | None = None
    counts: Tensor | None = None
    prefetch: Tensor | None = None
    row_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    block_size: int = 16
    scale_format: str | None = None
    scale_layout: str | None = None
    backend: str = AUTO
    static_weight: bool = False
    fast_accum: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of the result: ``out_dtype``, or else the dtype of 16-bit activations, or else bfloat16."""
        return self.out_dtype or (self.a.dtype if self.a.dtype in SIXTEEN_BIT else torch.bfloat16)


class Gemm(BackendPath[GemmCall]):
    """Base class of call paths of GEMMs without a gate in their epilogue."""

    call_type = GemmCall
    hints = frozenset(("prefetch",))
    by_a_scale: bool = False
    """True if the number of scales of a row of ``a`` is part of ``key``, because this number decides how ``a`` is
    scaled."""
    renames: ClassVar = {**BackendPath.renames, "global_scale": "a_scale"}

    def key(self, call: GemmCall, device: int) -> tuple[Any, ...]:
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale, *static = call
        shape = a.shape
        return (
            bucket(shape[-2]) if shape[-1] != INTERLEAVED_K or len(shape) < 3 else self._key_of_rows(shape, offsets),
            shape[-1],
            a.dtype,
            b.shape,
            b.dtype,
            b_scale.shape,
            b_scale.dtype,
            None if a_scale is None else a_scale.dtype,
            a_scale.dim() if a_scale is not None and not self.by_a_scale else self._key_of_scale(a_scale),
            None if alpha is None else alpha.shape[-1] if self.over == "k" else alpha.shape,
            None if bias is None else bias.dtype,
            offsets is not None,
            counts is not None,
            prefetch is not None,
            row_scale is not None,
            tuple(static),
            device,
            tuning.generation,
            tuning.blocks and tuning.is_on(),
        )

    def _key_of_scale(self, a_scale: Tensor | None) -> Any:
        """Return the entry of ``key`` for the shape of ``a_scale``, if it is None or ``by_a_scale`` is True."""
        return None if a_scale is None else (a_scale.dim(), a_scale.shape[-1])

    def _key_of_rows(self, shape: Any, offsets: Tensor | None) -> Any:
        """Return the entry of ``key`` for the number of rows of activations with at least three dimensions, whose last
        extent is 256. If k is interleaved, the entry also contains the number of groups of 256 elements, because the
        compiled function does not compare it with the K of ``b``."""
        ordinary = 3 if self.over == "rows" and offsets is None else 2
        return (bucket(shape[-3]), shape[-2]) if len(shape) > ordinary else bucket(shape[-2])

    def run(
        self,
        out: Any,
        device: int | None,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None,
        b_scale: Tensor,
        alpha: Tensor | None,
        bias: Tensor | None,
        offsets: Tensor | None,
        counts: Tensor | None,
        prefetch: Tensor | None,
        row_scale: Tensor | None,
        *static: Any,
    ) -> Any:
        """Compute a call as ``CallPath.run`` does. For speed, ``key`` is inlined, and local variables replace the
        ``GemmCall``.

        This reduces the time of a call from 2.6 µs to 2.2 µs (measured on a CPU, with an empty compiled function).
        """
        result = None
        try:
            if device is None:
                device = a.get_device()
            shape = a.shape
            launcher: Any = self.launchers.get(
                (
                    bucket(shape[-2])
                    if shape[-1] != INTERLEAVED_K or len(shape) < 3
                    else self._key_of_rows(shape, offsets),
                    shape[-1],
                    a.dtype,
                    b.shape,
                    b.dtype,
                    b_scale.shape,
                    b_scale.dtype,
                    None if a_scale is None else a_scale.dtype,
                    a_scale.dim() if a_scale is not None and not self.by_a_scale else self._key_of_scale(a_scale),
                    None if alpha is None else alpha.shape[-1] if self.over == "k" else alpha.shape,
                    None if bias is None else bias.dtype,
                    offsets is not None,
                    counts is not None,
                    prefetch is not None,
                    row_scale is not None,
                    static,
                    device,
                    tuning.generation,
                    tuning.blocks and tuning.is_on(),
                )
            )
            if launcher is not None:
                result = launcher.run((a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale), out)
        except Exception:  # TVM-FFI, DLPack or CUDA failed, or an argument is not a tensor; run_checked finds why
            result = None
        if result is None:
            call = GemmCall(a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale, *static)
            result = self.run_checked(call, out)
        if out is not None:
            mark_written((out,))
        return result

    # Checks

    def check(self, call: GemmCall) -> None:
        op, device = self.op, call.a.device
        n, k = self.check_operands(call)
        for name, tensor in (("a_scale", call.a_scale), (self.b_name, call.b), (f"{self.b_name}_scale", call.b_scale)):
            if tensor is not None:
                _checks.check_device(op, name, tensor, "a", device)
        _checks.check_out_dtype(op, call.out_dtype)  # first, because it limits the dtypes of a bias
        self.check_epilogue(call, n, k)
        check_row_scale(op, call.row_scale, call.a)
        if call.prefetch is not None:
            self._check_prefetch(call.prefetch, device)
        self.check_backend(call)

    def check_operands(self, call: GemmCall) -> tuple[int, int]:
        """Check the matrices and their scales, and return N and K."""
        raise NotImplementedError

    def check_epilogue(self, call: GemmCall, n: int, k: int) -> None:
        """Check ``alpha`` and ``bias``."""
        alpha, experts = call.alpha, self.experts(call)
        if alpha is not None:
            self._check_alpha(alpha, experts, n, call.a.device)
        shape = (experts, n) if self.over == "rows" else (n,)
        check_bias(self.op, call.bias, call.result_dtype, shape, call.a.device)

    def _check_alpha(self, alpha: Tensor, experts: int, n: int, device: torch.device) -> None:
        op, shapes = self.op, ((experts,), (experts, n)) if self.over == "rows" else ((n,),)
        _checks.check_dtype(op, "alpha", alpha, (torch.float32,))
        if alpha.numel() != 1 and alpha.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(
                f"cute::{op}: got alpha with shape {tuple(alpha.shape)}; expected one element, or {expected}"
            )
        _checks.check_device(op, "alpha", alpha, "a", device)

    def _check_prefetch(self, prefetch: Tensor, device: torch.device) -> None:
        op = self.op
        if prefetch.dtype.itemsize != 1:
            raise TypeError(
                f"cute::{op}: got prefetch with dtype {prefetch.dtype}; expected one of a byte, such as uint8"
            )
        if not is_prefetchable(prefetch):
            raise ValueError(
                f"cute::{op}: got prefetch with shape {tuple(prefetch.shape)} and strides {prefetch.stride()}; "
                f"expected a "
                f"contiguous matrix, such as a weight by rows, whose rows are multiples of {PREFETCH_MULTIPLE} bytes"
            )
        _checks.check_device(op, "prefetch", prefetch, "a", device)

    # Description of the GEMM

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        """Return the formats of the activations and of the weight."""
        raise NotImplementedError

    def experts(self, call: GemmCall) -> int:
        """Return the number of experts, or 1 if the GEMM has no experts."""
        return 1

    def grouping(self, call: GemmCall) -> "Grouping":
        """Return how the GEMM is divided among experts."""
        grouping: Grouping = gemm_package().problem.Grouping()
        return grouping

    def alpha_kind(self, call: GemmCall) -> str | None:
        """Return the kind of ``alpha`` that the epilogue applies, or None if it applies none."""
        return None if call.alpha is None else _alpha_kind(call.alpha, self.over == "rows")

    def problem(self, call: GemmCall) -> "GemmProblem":
        p = gemm_package().problem
        k, n = call.b.shape[-2:]
        k *= 2 if self.b == "fp4" else 1
        bias_dtype = None if call.bias is None else call.bias.dtype
        quant = None if not self.prologue_quant else "plain" if call.a_scale is None else "scaled"
        problem: GemmProblem = p.GemmProblem(
            *self.operands(call),
            n,
            k,
            p.Epilogue(call.result_dtype, self.alpha_kind(call), bias_dtype, call.row_scale is not None),
            self.grouping(call),
            prologue_gate=self.prologue_gate,
            prologue_quant=quant,
            static_weight=call.static_weight,
            prefetches=call.prefetch is not None,
            fast_accum=call.fast_accum and not self.ignores_fast_accum(call),
        )
        return problem

    def ignores_fast_accum(self, call: GemmCall) -> bool:
        """Return True if ``fast_accum`` does not affect the result."""
        return False

    def ready_launcher(self, *how: Any, **named: Any) -> "GemmLauncher":
        return GemmLauncher(self, *how, **named)

    # Static properties

    def declare(self) -> dict[str, Property]:
        declared = {
            "n": size(lambda call: self.problem(call).n),
            "k": size(lambda call: self.problem(call).k),
            "m": size(self.rows, default=1),
            **self.declare_kind(),
            "bias_dtype": dtype(lambda call: None if call.bias is None else call.bias.dtype),
            "out_dtype": dtype(lambda call: call.result_dtype),
            **self.arguments_as_properties("block_size", "scale_format"),
            **self.declare_layout(),
            **self.arguments_as_properties("backend", "static_weight"),
        }
        if "prefetch" in self.signature.names:
            declared["prefetch"] = flag(lambda call: call.prefetch is not None)
        if "row_scale" in self.signature.names:
            declared["row_scale"] = flag(lambda call: call.row_scale is not None)
        return declared

    def declare_kind(self) -> dict[str, Property]:
        """Return the static properties of this kind of GEMM that other kinds lack."""
        return {"alpha": choice(AlphaKind, self.alpha_kind)}

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        arguments = vars(given) | self.make_operands(given, device) | {"bias": None}
        experts, n = getattr(given, "experts", 1), given.n
        alpha = arguments.get("alpha")
        if alpha is not None and not isinstance(alpha, Tensor):
            of_experts = {"expert": (experts,), "expert_column": (experts, n)}
            shapes = {"one": (1,), **(of_experts if self.over == "rows" else {"column": (n,)})}
            arguments["alpha"] = torch.ones(self.chosen("alpha", alpha, shapes), dtype=torch.float32, device=device)
        if given.bias_dtype is not None:
            shape = (n,) if self.over == "none" else (experts, n)
            arguments["bias"] = torch.zeros(shape, dtype=given.bias_dtype, device=device)
        if getattr(given, "prefetch", False):
            arguments["prefetch"] = torch.zeros(1, PREFETCH_MULTIPLE, dtype=torch.uint8, device=device)
        else:
            arguments["prefetch"] = None
        has_row_scale = getattr(given, "row_scale", False)
        rows = torch.ones(given.m, dtype=torch.float32, device=device) if has_row_scale else None
        return arguments | {"row_scale": rows}

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        """Return matrices, scales and the other arguments of this kind of GEMM for an example call."""
        raise NotImplementedError


class FP4Gemm(Gemm):
    """Call path of a GEMM with an FP4 weight, and activations in FP4 or 16 bits."""

    def __init__(
        self, a: Literal["fp4", "16-bit"], *, prologue_gate: bool = False, prologue_quant: bool = False
    ) -> None:
        super().__init__(a, "fp4", prologue_gate=prologue_gate, prologue_quant=prologue_quant)

    def check_operands(self, call: GemmCall) -> tuple[int, int]:
        fmt, layout, b_layout = self.fp4_format(call)
        self.check_weight(call.b, fmt)
        n, k = call.b.shape[1], call.b.shape[0] * 2
        self.check_activations(call, k, fmt, layout)
        self.check_fp4_scale(f"{self.b_name}_scale", call.b_scale, (n, k), fmt, b_layout, call)
        return n, k

    def check_weight(self, b: Tensor, fmt: FP4Format) -> None:
        """Check the dtype, shape and strides of the weight's codes."""
        columns = "E·I/2" if self.over == "k" else "K/2"
        _checks.check_matrix(self.op, self.b_name, b, f"({columns}, N)")
        _checks.check_transposed(self.op, self.b_name, b, f"(N, {columns})")
        _checks.check_packed(self.op, f"{self.b_name}.mT", b.mT, fmt)

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        p = gemm_package().problem
        fmt, layout, b_layout = self.fp4_format(call)
        return p.Operand(fmt, layout) if self.a == "fp4" else p.Operand(call.a.dtype), p.Operand(fmt, b_layout)

    def declare_kind(self) -> dict[str, Property]:
        declared = {}
        if self.a == "16-bit":
            declared["dtype"] = dtype(lambda call: call.a.dtype)
        if self.prologue_quant:
            declared["global_scale"] = flag(lambda call: call.a_scale is not None)
        return declared | super().declare_kind()

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        fmt, layout = self.example_format(given)
        weight, weight_scale = fp4_zeros((given.n, given.k), fmt, weight_layout(layout), device)
        made = {self.b_name: weight.mT, f"{self.b_name}_scale": weight_scale}
        if self.a == "fp4":
            made["a"], made["a_scale"] = fp4_zeros((given.m, given.k), fmt, layout, device)
            return made
        shape = given.m, self.a_width(given.k)
        made["a"] = torch.zeros(shape, dtype=given.dtype or torch.bfloat16, device=device)
        has_scale = getattr(given, "global_scale", False)
        return made | {"global_scale": torch.ones(1, dtype=torch.float32, device=device) if has_scale else None}


class ExpertFP4Gemm(FP4Gemm):
    """Call path of a GEMM in which each expert owns a range of K. The FP4 weight is (E·I/2, N)."""

    over = "k"
    b_name = "w"

    def check_epilogue(self, call: GemmCall, n: int, k: int) -> None:
        op, alpha = self.op, call.alpha
        assert alpha is not None
        _checks.check_dtype(op, "alpha", alpha, (torch.float32,))
        _checks.check_matrix(op, "alpha", alpha, "(M, E)")
        m, experts = alpha.shape
        _checks.check_shape(op, "alpha", alpha, (call.a.shape[0], experts), "a row for each of a")
        if experts == 0 or k % (experts * EXPERT_MULTIPLE):
            raise ValueError(
                f"cute::{op}: got alpha with shape {(m, experts)}, for {experts} experts, and a column of w has {k} "
                f"elements; expected the same number for each expert, a multiple of {EXPERT_MULTIPLE}"
            )
        _checks.check_device(op, "alpha", alpha, "a", call.a.device)
        check_bias(op, call.bias, call.result_dtype, (experts, n), call.a.device)

    def experts(self, call: GemmCall) -> int:
        assert call.alpha is not None
        return call.alpha.shape[1]

    def grouping(self, call: GemmCall) -> "Grouping":
        grouping: Grouping = gemm_package().problem.Grouping("k", self.experts(call))
        return grouping

    def alpha_kind(self, call: GemmCall) -> None:
        """Return None, because the experts' factors are applied before the epilogue, not by it."""

    def declare_kind(self) -> dict[str, Property]:
        declared = {"experts": size(self.experts), **super().declare_kind()}
        del declared["alpha"]
        return declared

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        factors = torch.ones(given.m, given.experts, dtype=torch.float32, device=device)
        return super().make_operands(given, device) | {"alpha": factors}


def check_token_scales(
    op: str, a_scale: Tensor, b_scale: Tensor, rows: tuple[int, ...], experts: tuple[int, ...], n: int
) -> None:
    """Check the shapes of FP8 scales that are per token and per channel, or per matrix.

    Args:
        op: name of the op.
        a_scale, b_scale: scales of the activations and of the weight.
        rows: shape of the activations without the dimension K.
        experts: (E,), or () for a GEMM without experts.
        n: number of columns.
    """
    _check_scale_or_one(op, "b_scale", b_scale, (*experts, n), "a scale for each column of b", experts or (1,))
    check_row_scales(op, a_scale, rows)


def check_row_scales(op: str, a_scale: Tensor, rows: tuple[int, ...], fix: str = "") -> None:
    """Check that ``a_scale`` consists of one scale, or of one scale per row of the activations, whose leading
    dimensions are ``rows``. The error message ends with ``fix``."""
    _check_scale_or_one(op, "a_scale", a_scale, (*rows, 1), "a scale for each row of a", (1,), fix)


def _check_scale_or_one(
    op: str, name: str, scale: Tensor, shape: tuple[int, ...], meaning: str, one: tuple[int, ...], fix: str = ""
) -> None:
    if scale.shape not in (one, shape):
        raise ValueError(
            f"cute::{op}: got {name} with shape {tuple(scale.shape)}; expected {shape}, {meaning}, or {one}{fix}"
        )


def has_one_a_scale(call: GemmCall) -> bool:
    """Return True if all rows of ``a`` share one scale."""
    return call.a_scale is not None and call.a_scale.dim() == 1


def has_one_b_scale(call: GemmCall) -> bool:
    """Return True if all columns of ``b`` share one scale. N is a multiple of 8, so one element is never a scale per
    column."""
    return call.b_scale.numel() == 1


def token_operands(one_a_scale: bool, one_b_scale: bool) -> "tuple[Operand, Operand]":
    """Return the formats of two FP8 matrices.

    A flag is True if the matrix has one scale for the whole tensor. If the flags are False, ``a`` has one scale per row
    and ``b`` has one scale per column.
    """
    p = gemm_package().problem
    return tuple(p.Operand(FP8_TENSOR if one else FP8_TOKEN) for one in (one_a_scale, one_b_scale))


def with_alpha(b_scale: Tensor, alpha: Tensor | None) -> Tensor:
    """Multiply the per-channel scales (E, N) or (E,) of experts' weights by ``alpha``."""
    if alpha is None:
        return b_scale
    if alpha.numel() == 1:
        return b_scale * alpha.reshape(())
    if b_scale.dim() < alpha.dim():
        b_scale = b_scale[:, None]
    elif b_scale.dim() > alpha.dim():
        alpha = alpha[:, None]
    return b_scale * alpha


class TokenFP8Gemm(Gemm):
    """Call path of a GEMM of FP8 matrices, with per-token or per-tensor scales of ``a``, and per-channel or per-tensor
    scales of ``b``."""

    def __init__(self) -> None:
        super().__init__("fp8", "fp8")

    def check_operands(self, call: GemmCall) -> tuple[int, int]:
        op, a, b, a_scale, b_scale = self.op, call.a, call.b, call.a_scale, call.b_scale
        assert a_scale is not None
        for name, tensor, wanted in (
            ("a", a, torch.float8_e4m3fn),
            ("b", b, torch.float8_e4m3fn),
            ("a_scale", a_scale, torch.float32),
            ("b_scale", b_scale, torch.float32),
        ):
            _checks.check_dtype(op, name, tensor, (wanted,))
        _checks.check_matrix(op, "b", b, "(K, N)")
        _checks.check_transposed(op, "b", b, "(N, K)")
        k, n = b.shape
        if k == 0 or k % FP8_K_MULTIPLE:
            raise ValueError(f"cute::{op}: b has K = {k}; expected a positive multiple of {FP8_K_MULTIPLE}")
        if n % FP8_N_MULTIPLE:
            raise ValueError(f"cute::{op}: b has N = {n}; expected a multiple of {FP8_N_MULTIPLE}")
        _checks.check_matrix(op, "a", a, "(M, K)")
        _checks.check_shape(op, "a", a, (a.shape[0], k), f"the K of b{self.hint(call)}")
        check_token_scales(op, a_scale, b_scale, a.shape[:-1], (), n)
        return n, k

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        return token_operands(has_one_a_scale(call), has_one_b_scale(call))

    def declare_kind(self) -> dict[str, Property]:
        return {
            "one_a_scale": flag(has_one_a_scale),
            "one_b_scale": flag(has_one_b_scale),
            **self.arguments_as_properties("fast_accum"),
        }

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        a, weight = (torch.zeros(rows, given.k, dtype=torch.uint8, device=device) for rows in (given.m, given.n))
        a_scale, b_scale = (1,) if given.one_a_scale else (given.m, 1), (1 if given.one_b_scale else given.n,)
        return {
            "a": a.view(torch.float8_e4m3fn),
            "b": weight.view(torch.float8_e4m3fn).t(),
            "a_scale": torch.zeros(a_scale, dtype=torch.float32, device=device),
            "b_scale": torch.zeros(b_scale, dtype=torch.float32, device=device),
        }


class FP8Gemm(Gemm):
    """Call path of a GEMM of FP8 activations with block scales, and a weight in FP8 or FP4. With an FP4 weight, the
    activations may have per-token scales."""

    def __init__(self, b: Literal["fp8", "fp4"]) -> None:
        super().__init__("fp8", b)
        self.by_a_scale = b == "fp4"

    def check_operands(self, call: GemmCall) -> tuple[int, int]:
        op, a, b, a_scale, b_scale = self.op, call.a, call.b, call.a_scale, call.b_scale
        assert a_scale is not None
        self.check_layout(call)
        _checks.check_dtype(op, "a", a, (torch.float8_e4m3fn,))
        _checks.check_dtype(op, "a_scale", a_scale, (torch.float32,))
        fmt, layout = self._check_weight_format(call)
        experts, n, k = self.check_weight_shape(b, "K" if fmt is None else "K/2")
        if fmt is not None:
            k *= 2
        if k == 0 or k % FP8_K_MULTIPLE:
            raise ValueError(f"cute::{op}: b has K = {k}; expected a positive multiple of {FP8_K_MULTIPLE}")
        if n % FP8_N_MULTIPLE:
            raise ValueError(f"cute::{op}: b has N = {n}; expected a multiple of {FP8_N_MULTIPLE}")
        self.check_rows(call, experts, k)
        if self.has_token_scales(call) and fmt is not None:
            self._check_fp4_tokens(call, n, k, fmt, layout)
        elif self.has_token_scales(call):
            check_token_scales(op, a_scale, b_scale, a.shape[:-1], tuple(b.shape[:-2]), n)
        else:
            self._check_block_scales(call, n, k, fmt, layout)
        self.check_expert_rows(call, experts)
        return n, k

    def has_token_scales(self, call: GemmCall) -> bool:
        """Return True for scales per token, per channel or per matrix, and False for scales per block."""
        if self.b != "fp4" or call.a_scale is None:
            return False
        return has_token_scales(call.a, call.b, call.a_scale, call.b_scale, call.block_size, self.is_masked(call))

    def ignores_fast_accum(self, call: GemmCall) -> bool:
        return not self.has_token_scales(call)

    def is_masked(self, call: GemmCall) -> bool:
        """Return True if each expert owns the same number of rows of a three-dimensional ``a``."""
        return self.over == "rows" and call.offsets is None

    def is_prepared(self, call: GemmCall) -> bool:
        """Return True if an FP4 weight has prepared scales."""
        return self.b == "fp4" and is_prepared(call.b, call.b_scale, call.block_size)

    def is_interleaved(self, call: GemmCall) -> bool:
        """Return True if k of the activations is interleaved."""
        return self.b == "fp4" and is_interleaved(call.a, self.is_masked(call))

    def rows(self, call: GemmCall) -> int:
        return call.a.shape[-3 if self.is_interleaved(call) else -2]

    def flops(self, a_shape: Any, b_shape: Any) -> int:
        if self.b == "fp4" and a_shape[-1] != 2 * b_shape[-2]:
            a_shape = (*a_shape[:-2], 2 * b_shape[-2])  # k is interleaved
        return super().flops(a_shape, b_shape)

    def fp4_format(self, call: GemmCall) -> tuple[FP4Format, ScaleLayout, ScaleLayout]:
        if not self.is_prepared(call):
            if self.b == "fp4":
                self._refuse_other_block_size(call)
            return super().fp4_format(call)
        fmt, layout = _checks.check_fp4_format(self.op, call.block_size, call.scale_format, "linear")
        if call.scale_layout is not None:
            raise ValueError(
                f"cute::{self.op}: scale_layout is {call.scale_layout!r}, and b_scale has the shape "
                f"{tuple(call.b_scale.shape)} of prepared scales; expected None"
            )
        return fmt, layout, layout

    def _refuse_other_block_size(self, call: GemmCall) -> None:
        """Check that ``b_scale`` does not have the shape of prepared scales for a block size that the call does not
        name."""
        for fmt in (NVFP4, MXFP4):
            if is_prepared(call.b, call.b_scale, fmt.block_size):
                raise ValueError(
                    f"cute::{self.op}: got b_scale with shape {tuple(call.b_scale.shape)}, which prepared scales have "
                    f"for block_size={fmt.block_size}; got block_size={call.block_size}"
                )

    def _check_fp4_tokens(self, call: GemmCall, n: int, k: int, fmt: FP4Format, layout: ScaleLayout | None) -> None:
        """Check the scales of a call with per-token scales and an FP4 weight."""
        op, a, b, a_scale, b_scale = self.op, call.a, call.b, call.a_scale, call.b_scale
        assert a_scale is not None and layout is not None
        interleaved, lead = self.is_interleaved(call), tuple(b.shape[:-2])
        rows, fix = a.shape[: -2 if interleaved else -1], ""
        if a_scale.shape == (*rows, FP8_BLOCK128.scales_per_row(k)):
            parts = ["b_scale holds prepared scales"] if self.is_prepared(call) else []
            parts += ["k of a is interleaved; deinterleave_k(a, K) undoes that"] if interleaved else []
            fix = f". Block scales of a are refused, because {' and '.join(parts)}"
        check_row_scales(op, a_scale, tuple(rows), fix)
        if not self.is_prepared(call):
            self.check_fp4_scale("b_scale", b_scale, (*lead, n, k), fmt, layout, call)
            return
        shape = prepared_shape(n, k, fmt, *lead)
        _checks.check_shape(op, "b_scale", b_scale, shape, f"prepared scales of b in {fmt.name}")

    def _check_block_scales(
        self, call: GemmCall, n: int, k: int, fmt: FP4Format | None, layout: ScaleLayout | None
    ) -> None:
        op, a, b, a_scale, b_scale = self.op, call.a, call.b, call.a_scale, call.b_scale
        assert a_scale is not None
        blocks = FP8_BLOCK128.scales_per_row(k)
        _checks.check_shape(op, "a_scale", a_scale, (*a.shape[:-1], blocks), "a scale for 128 elements of a row of a")
        lead = tuple(b.shape[:-2])
        if fmt is not None and layout is not None:
            self.check_fp4_scale("b_scale", b_scale, (*lead, n, k), fmt, layout, call)
        else:
            meaning = "a scale for 128 rows of the weight and 128 elements of k"
            _checks.check_shape(op, "b_scale", b_scale, (*lead, -(-n // FP8_BLOCK128.block_size), blocks), meaning)
            self._refuse_transposed_scale(b_scale)

    def check_layout(self, call: GemmCall) -> None:
        """Check that the call passes ``offsets`` or ``counts``, which locate each expert's rows."""

    def _check_weight_format(self, call: GemmCall) -> tuple[FP4Format | None, ScaleLayout | None]:
        if self.b == "fp8":
            _checks.check_dtype(self.op, "b", call.b, (torch.float8_e4m3fn,))
            _checks.check_dtype(self.op, "b_scale", call.b_scale, (torch.float32,))
            return None, None
        fmt, _, layout = self.fp4_format(call)
        _checks.check_dtype(self.op, "b", call.b, _checks.PACKED_DTYPES)
        return fmt, layout

    def _refuse_transposed_scale(self, b_scale: Tensor) -> None:
        """Check that the scales of an FP8 weight are not column-major, because such scales were probably transposed by
        mistake."""
        rows, blocks = b_scale.shape[-2:]
        if rows > 1 and blocks > 1 and b_scale.stride(-2) == 1 and b_scale.stride(-1) != 1:
            raise ValueError(
                f"cute::{self.op}: got b_scale with shape {tuple(b_scale.shape)} and strides {b_scale.stride()}, a "
                "transposed view; expected scales by row, (⌈N/128⌉, ⌈K/128⌉). If the view has the right order, pass "
                "b_scale.contiguous()"
            )

    def check_weight_shape(self, b: Tensor, k: str) -> tuple[int, int, int]:
        """Check the weight's shape and strides. Return E, N and the number of stored elements in a column.

        ``k`` is the word for this number in error messages.
        """
        _checks.check_matrix(self.op, "b", b, f"({k}, N)")
        _checks.check_transposed(self.op, "b", b, f"(N, {k})")
        return 1, b.shape[1], b.shape[0]

    def check_rows(self, call: GemmCall, experts: int, k: int) -> None:
        """Check the shape of ``a``."""
        if self.is_interleaved(call):
            self.check_interleaved(call, (call.a.shape[0],), k)
            return
        _checks.check_matrix(self.op, "a", call.a, "(M, K)")
        _checks.check_shape(self.op, "a", call.a, (call.a.shape[0], k), f"the K of b{self.hint(call)}")

    def check_interleaved(self, call: GemmCall, rows: tuple[int, ...], k: int) -> None:
        """Check the shape of ``a`` whose k is interleaved, for leading dimensions ``rows``."""
        groups = -(-k // INTERLEAVED_K)
        _checks.check_shape(
            self.op, "a", call.a, (*rows, groups, INTERLEAVED_K), f"interleaved rows of K = {k}, the K of b"
        )

    def check_expert_rows(self, call: GemmCall, experts: int) -> None:
        """Check ``offsets`` and ``counts``, which locate each expert's rows."""

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        p = gemm_package().problem
        a = p.Operand(FP8_BLOCK128, COLUMN)
        if self.b == "fp8":
            return a, p.Operand(FP8_BLOCK128)
        fmt, _, b_layout = self.fp4_format(call)
        if self.has_token_scales(call):
            a_format = FP8_TENSOR if has_one_a_scale(call) else FP8_TOKEN
            a = p.Operand(a_format, is_interleaved=self.is_interleaved(call))
        if self.is_prepared(call):
            return a, p.Operand(fmt, is_prepared=True)
        return a, p.Operand(fmt, b_layout)

    def declare_kind(self) -> dict[str, Property]:
        return {**(self.declare_fp4_tokens() if self.b == "fp4" else {}), **super().declare_kind()}

    def declare_fp4_tokens(self) -> dict[str, Property]:
        """Return the static properties that only GEMMs of FP8 activations and an FP4 weight have."""
        return {
            "token_scales": flag(self.has_token_scales),
            "one_a_scale": flag(lambda call: self.has_token_scales(call) and has_one_a_scale(call)),
            "prepared_scales": flag(self.is_prepared),
            "interleaved_k": flag(self.is_interleaved),
            **self.arguments_as_properties("fast_accum"),
        }

    def declare_layout(self) -> dict[str, Property]:
        declared = super().declare_layout()
        if declared:
            of = declared["scale_layout"].of
            named = replace(declared["scale_layout"], of=lambda call: None if self.is_prepared(call) else of(call))
            declared["scale_layout"] = named
        return declared

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        blocks = FP8_BLOCK128.scales_per_row(given.k)
        lead: tuple[int, ...] = (given.m,)
        weights: tuple[int, ...] = (given.n,)
        if self.over == "rows":
            lead, weights = (given.experts, given.m) if given.masked else lead, (given.experts, given.n)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        made = {"a_scale": zeros(blocks, *lead).movedim(0, -1)}
        made["a"] = zeros(*lead, given.k, dtype=torch.uint8).view(torch.float8_e4m3fn)
        if self.b == "fp8":
            made["b"] = zeros(*weights, given.k, dtype=torch.uint8).view(torch.float8_e4m3fn)
            made["b_scale"] = zeros(*weights[:-1], -(-given.n // FP8_BLOCK128.block_size), blocks)
        else:
            fmt, layout = self.example_format(given)
            made["b"], made["b_scale"] = fp4_zeros((*weights, given.k), fmt, weight_layout(layout), device)
            made |= self._make_fp4_tokens(given, made["a"], fmt)
        made["b"] = made["b"].mT
        return made

    def _make_fp4_tokens(self, given: Any, a: Tensor, fmt: FP4Format) -> dict[str, Tensor]:
        """Return the operands of an example with per-token scales that differ from those with block scales."""
        made = {}
        if given.token_scales or given.one_a_scale or given.prepared_scales or given.interleaved_k:
            shape = (1,) if given.one_a_scale else (*a.shape[:-1], 1)
            made["a_scale"] = torch.zeros(shape, dtype=torch.float32, device=a.device)
        if given.prepared_scales:
            shape = prepared_shape(given.n, given.k, fmt, *((given.experts,) if self.over == "rows" else ()))
            made["b_scale"] = torch.zeros(shape, dtype=torch.uint8, device=a.device)
        if given.interleaved_k:
            groups = -(-given.k // INTERLEAVED_K)
            shape = (*a.shape[:-1], groups, INTERLEAVED_K)
            made["a"] = torch.zeros(shape, dtype=torch.uint8, device=a.device).view(a.dtype)
        return made


class GroupedFP8Gemm(FP8Gemm):
    """Call path of a GEMM of FP8 activations whose rows belong to experts. Each expert has a weight (K, N) in FP8 or
    FP4."""

    over = "rows"

    def check_layout(self, call: GemmCall) -> None:
        if call.offsets is None and call.counts is None:
            raise ValueError(
                f"cute::{self.op}: offsets and counts are None; expected offsets (E + 1,) of the contiguous layout, or "
                "counts (E,) of the masked one"
            )

    def check_weight_shape(self, b: Tensor, k: str) -> tuple[int, int, int]:
        if b.dim() != 3:
            raise ValueError(f"cute::{self.op}: got b with shape {tuple(b.shape)}; expected (E, {k}, N)")
        _checks.check_transposed(self.op, "b", b, f"(E, N, {k})")
        experts, held, n = b.shape
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"cute::{self.op}: b is of {experts} experts; expected 1 to {MAX_EXPERTS}")
        return experts, n, held

    def check_rows(self, call: GemmCall, experts: int, k: int) -> None:
        op, a = self.op, call.a
        if self.is_interleaved(call):
            self.check_interleaved(call, (experts, a.shape[1]) if self.is_masked(call) else (a.shape[0],), k)
        elif call.offsets is not None:
            _checks.check_matrix(op, "a", a, "(R, K)")
            _checks.check_shape(op, "a", a, (a.shape[0], k), f"the K of b{self.hint(call)}")
        elif a.dim() != 3:
            raise ValueError(
                f"cute::{op}: got a with shape {tuple(a.shape)}; expected (E, rows of an expert, K), since "
                f"offsets is None{_checks.interleaved_fix(a, 4)}"
            )
        else:
            _checks.check_shape(op, "a", a, (experts, a.shape[1], k), f"the E and K of b{self.hint(call)}")

    def check_expert_rows(self, call: GemmCall, experts: int) -> None:
        for name, given, shape, meaning in (
            ("offsets", call.offsets, (experts + 1,), "where experts begin, and where the last ends"),
            ("counts", call.counts, (experts,), "one for each expert of b"),
        ):
            if given is not None:
                _checks.check_dtype(self.op, name, given, (torch.int32,))
                _checks.check_shape(self.op, name, given, shape, meaning)
                _checks.check_device(self.op, name, given, "a", call.a.device)

    def check_values(self, call: GemmCall) -> None:
        _checks.check_rows_of_experts(self.op, "a", call.a, call.offsets, call.counts)

    def has_token_scales(self, call: GemmCall) -> bool:
        return call.b_scale.dim() < 3 if self.b == "fp8" else super().has_token_scales(call)

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        if self.b == "fp4" or not self.has_token_scales(call):
            return super().operands(call)
        return token_operands(has_one_a_scale(call), self._has_one_factor(call))

    def _has_one_factor(self, call: GemmCall) -> bool:
        """Return True if one factor, the product of ``b_scale`` and ``alpha``, applies to all columns of an expert."""
        return call.b_scale.dim() == 1 and (call.alpha is None or call.alpha.numel() == 1 or call.alpha.dim() < 2)

    def alpha_kind(self, call: GemmCall) -> str | None:
        """Return the kind of ``alpha`` in the epilogue. With per-token scales and an FP8 weight it is None, because
        ``alpha`` is multiplied into the weight's scales."""
        return None if self.b == "fp8" and self.has_token_scales(call) else super().alpha_kind(call)

    def experts(self, call: GemmCall) -> int:
        return call.b.shape[0]

    def grouping(self, call: GemmCall) -> "Grouping":
        p = gemm_package().problem
        experts = self.experts(call)
        rows = p.ExpertLayout(call.offsets is not None, call.counts is not None, p.table_experts(experts))
        grouping: Grouping = p.Grouping("rows", experts, rows)
        return grouping

    def declare_kind(self) -> dict[str, Property]:
        return {
            "experts": size(self.experts),
            "masked": flag(lambda call: True if call.offsets is None else None),
            "counts": flag(lambda call: None if call.offsets is None else call.counts is not None, default=True),
            **(self._declare_token_scales() if self.b == "fp8" else {}),
            **super().declare_kind(),
        }

    def _declare_token_scales(self) -> dict[str, Property]:
        return {
            "token_scales": flag(self.has_token_scales),
            "one_a_scale": flag(lambda call: self.has_token_scales(call) and has_one_a_scale(call)),
            "one_b_scale": flag(lambda call: self.has_token_scales(call) and self._has_one_factor(call)),
            **self.arguments_as_properties("fast_accum"),
        }

    def make_operands(self, given: Any, device: torch.device) -> dict[str, Any]:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        made = super().make_operands(given, device) | {
            "offsets": None if given.masked else zeros(given.experts + 1),
            "counts": zeros(given.experts) if given.masked or given.counts else None,
        }
        if self.b == "fp8" and given.token_scales:
            a_scale = (1,) if given.one_a_scale else (*made["a"].shape[:-1], 1)
            b_scale = (given.experts,) if given.one_b_scale else (given.experts, given.n)
            for name, shape in (("a_scale", a_scale), ("b_scale", b_scale)):
                made[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        return made


class GemmLauncher(BackendLauncher[GemmCall]):
    """Launcher of a GEMM without a gate in its epilogue."""

    def __init__(self, path: Gemm, problem: "GemmProblem", *how: Any, **named: Any) -> None:
        super().__init__(problem, *how, **named)
        self.is_grouped, self.is_masked = path.over == "rows", problem.grouping.rows.is_masked
        self.is_interleaved, self.is_prepared = problem.a.is_interleaved, problem.b.is_prepared
        self.fmt = problem.b.format if isinstance(problem.b.format, FP4Format) else None
        self.by_factors, self.prologue_quant = path.over == "k", path.prologue_quant
        self.has_fp8_rows = problem.a.has_fp8_blocks
        self.has_token_scales = problem.a.is_fp8 and not problem.a.has_fp8_blocks
        # For an FP4 weight, the compiled function does not check the number of blocks in a_scale.
        has_fp4_weight = self.has_fp8_rows and self.fmt is not None
        self.scale_blocks = FP8_BLOCK128.scales_per_row(problem.k) if has_fp4_weight else 0
        self.tile_rows = self.scale_columns = 0
        if self.a_scales is not None:
            self.tile_rows, self.scale_columns = self.a_scales.tile_rows, self.a_scales.columns

    def run(self, tensors: Any, out: Any) -> Any:
        """Compute a call whose arguments are not checked, as ``Launcher.run`` does. ``tensors`` contains the fields of
        ``Operands`` as a plain tuple."""
        if not self.is_direct:
            return None
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale = tensors
        shape = a.shape
        m = shape[-3 if self.is_interleaved else -2]
        if not m or not self.n:
            return None
        is_changed = False
        if self.views_b_scale:
            b_scale, is_changed = b_scale.view(self.b_scale_shape), True
        # Check that the scale tiles have no gaps between them. Otherwise the kernel would launch no CTAs, and the
        # resulting CUDA error would end a graph capture.
        if self.b_scale_shape is not None and not b_scale.is_contiguous():
            return None
        if self.tile_rows:
            tile = self.tile_rows
            # Check the number of scale rows here, because the compiled function does not.
            extents = a_scale.shape
            if extents[0] != (m + tile - 1) // tile or extents[1] != self.scale_columns:
                a_scale, is_changed = self.tiles(a_scale, m), True
                if a_scale is None:
                    return None
            if not a_scale.is_contiguous():
                return None
        copies_scale = False
        if self.has_fp8_rows:
            if a_scale is None or (self.scale_blocks and a_scale.shape[-1] != self.scale_blocks):
                return None
            copies_scale = (
                a_scale.stride(-2) != 1 or (self.is_masked and a_scale.stride(0) != m)
            ) and not is_one_column(a_scale)
        # The compiled function checks neither the number of offsets nor, in the masked layout, the distance between
        # experts. So check them here.
        if self.is_grouped and not (
            a.is_contiguous()
            and are_int32(offsets, counts)
            and (offsets is None or offsets.shape[0] == b.shape[0] + 1)
            and (out is None or out.is_contiguous())
        ):
            return None
        if self.has_token_scales:
            if a_scale.dim() == 1:
                a_scale, is_changed = a_scale.expand(m * shape[0] if self.is_masked else m, 1), True
            elif self.is_masked:
                # Check the number of scales here, because the compiled function does not.
                if a_scale.shape[:2] != shape[:2]:
                    return None
                a_scale, is_changed = a_scale.reshape(-1, 1), True
            if self.is_grouped and self.fmt is None and alpha is not None:
                return None
        if copies_scale:
            assert a_scale is not None
            a_scale, is_changed = new_column_scales(a_scale).copy_(a_scale), True
        if alpha is not None and alpha.dim() == 0:
            alpha, is_changed = alpha.reshape(1), True
        if prefetch is not None:
            # Check ``prefetch`` here, because some compiled functions do not.
            if not is_prefetchable(prefetch) or prefetch.device != a.device or not prefetch.numel():
                return None
            prefetch, is_changed = seen_as(prefetch, torch.uint8), True
        if out is None:
            n = self.n
            if self.is_masked:
                out = allocator(self.device)((shape[0], m, n), (m * n, n, 1), self.dtype)
            else:
                out = allocator(self.device)((m, n), (n, 1), self.dtype)
        if is_changed:
            tensors = a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale
        self.compute(tensors, out)
        return out

    def launch(self, call: GemmCall, out: Tensor) -> None:
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale, *_ = call
        if prefetch is not None:
            prefetch = seen_as(prefetch, torch.uint8)
            if not prefetch.numel() or prefetch.data_ptr() % PREFETCH_MULTIPLE:
                prefetch = prefetch.new_empty(0, PREFETCH_MULTIPLE)  # the next GEMM would not read an aligned copy
        if self.has_fp8_rows:
            assert a_scale is not None
            a, a_scale = aligned(a), a_scale if is_one_column(a_scale) else new_column_scales(a_scale).copy_(a_scale)
        elif self.has_token_scales:
            assert a_scale is not None
            rows = a.shape[: -2 if self.is_interleaved else -1].numel()
            a, a_scale = aligned(a), a_scale.reshape(-1).contiguous()[:, None].expand(rows, 1)
            if self.fmt is None:
                b_scale, alpha = with_alpha(b_scale, alpha), None
        elif self.prologue_quant:
            a, a_scale = aligned(a), None if a_scale is None else a_scale.reshape(1)
        elif self.tile_rows:
            a = aligned(seen_as(a, torch.uint8))
        else:
            a = aligned(a)
        if self.is_prepared:
            b, b_scale = seen_as(b, torch.uint8), aligned(b_scale)
        elif self.fmt is not None:
            b = seen_as(b, torch.uint8)
            a_scale, b_scale = self.stored_scales(a_scale, b_scale, a.shape[0], self.fmt)
        else:
            b_scale = aligned(b_scale)
        b = aligned(b.mT).mT
        if alpha is not None and not self.by_factors:
            alpha = aligned(alpha.reshape(1) if alpha.numel() == 1 else alpha)
        rest = bias, offsets, counts, row_scale
        bias, offsets, counts, row_scale = (None if tensor is None else aligned(tensor) for tensor in rest)
        self.compute(Operands(a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, row_scale), out)


def _alpha_kind(alpha: Tensor, is_grouped: bool) -> Any:
    """Return the kind of ``alpha`` with the names of ``kernels.common.core.layouts.Epilogue``."""
    if alpha.numel() == 1:
        return "one"
    if not is_grouped:
        return "column"
    return "expert" if alpha.dim() == 1 else "expert_column"
