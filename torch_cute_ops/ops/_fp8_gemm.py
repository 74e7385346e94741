"""Call paths of GEMMs with FP8 activations, and a weight in FP8 or FP4."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, MXFP8, NVFP4, SCALE_LAYOUTS, FP4Format, ScaleLayout
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp8 import COLUMN, FP8_TENSOR, FP8_TOKEN
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import is_prepared, prepared_shape
from torch_cute_ops.formats.scale_layout import fitting_layouts, weight_layout
from torch_cute_ops.formats.token_scales import has_token_scales, is_interleaved
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._backend_path import (
    fp4_zeros,
    gemm_package,
)
from torch_cute_ops.ops._gemm import Gemm, GemmCall
from torch_cute_ops.ops._properties import Property, flag, size

if TYPE_CHECKING:
    from torch_cute_ops.gemm.problem import Grouping, Operand

Tensor = torch.Tensor

FP8_K_MULTIPLE: Final = 64
FP8_N_MULTIPLE: Final = 8
MX_SCALE_DTYPES: Final = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes that ops accept for the scales of an MXFP8 matrix."""


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
        _checks.check_dtype(op, "a_scale", a_scale, MX_SCALE_DTYPES if self.is_mxfp8(call) else (torch.float32,))
        fmt, layout = self._check_weight_format(call)
        experts, n, k = self.check_weight_shape(b, "K" if fmt is None else "K/2")
        if fmt is not None:
            k *= 2
        if k == 0 or k % FP8_K_MULTIPLE:
            raise ValueError(f"cute::{op}: b has K = {k}; expected a positive multiple of {FP8_K_MULTIPLE}")
        if n % FP8_N_MULTIPLE:
            raise ValueError(f"cute::{op}: b has N = {n}; expected a multiple of {FP8_N_MULTIPLE}")
        self.check_rows(call, experts, k)
        if self.is_mxfp8(call):
            self._check_mx_scale("a_scale", a_scale, tuple(a.shape[:-1]), k)
            self._check_mx_scale("b_scale", b_scale, (*b.shape[:-2], n), k)
        elif self.has_token_scales(call) and fmt is not None:
            self._check_fp4_tokens(call, n, k, fmt, layout)
        elif self.has_token_scales(call):
            check_token_scales(op, a_scale, b_scale, a.shape[:-1], tuple(b.shape[:-2]), n)
        else:
            self._check_block_scales(call, n, k, fmt, layout)
        self.check_expert_rows(call, experts)
        return n, k

    def is_mxfp8(self, call: GemmCall) -> bool:
        """Return True if both matrices are in MXFP8, as the dtype of the weight's scales says."""
        return self.b == "fp8" and call.b_scale.dtype in MX_SCALE_DTYPES

    def has_row_scales(self, call: GemmCall) -> bool:
        """Return True if an FP8 weight has block scales for each row: ``b_scale`` is (..., N, ⌈K/128⌉). N is
        a multiple of 8, so N and ⌈N/128⌉ differ unless both are 0."""
        *lead, k, n = call.b.shape
        of_rows = (*lead, n, FP8_BLOCK128.scales_per_row(k))
        return self.b == "fp8" and call.b_scale.dtype == torch.float32 and call.b_scale.shape == of_rows and n > 0

    def _check_mx_scale(self, name: str, scale: Tensor, rows: tuple[int, ...], k: int) -> None:
        """Check the shape and strides of the MXFP8 scales of a tensor (rows, K). ``rows`` may be several dimensions."""
        blocks = k // MXFP8.block_size
        fitting = fitting_layouts(scale.shape, rows, blocks)
        if not fitting:
            shapes = " or ".join(f"{each.shape(rows, blocks)} ({each.name})" for each in SCALE_LAYOUTS.values())
            raise ValueError(
                f"cute::{self.op}: got {name} with shape {tuple(scale.shape)}; expected {shapes}, MXFP8 scales of "
                f"{name[0]}"
            )
        _checks.check_not_transposed(self.op, name, scale, fitting[0])

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
        """Refuse a ``b_scale`` with the shape of prepared scales for a block size other than the call's."""
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
            if self.has_row_scales(call):
                return
            of_rows = f"{(*lead, n, blocks)}, a scale for each row and 128 elements of k"
            meaning = f"a scale for 128 rows of the weight and 128 elements of k; or {of_rows}"
            _checks.check_shape(op, "b_scale", b_scale, (*lead, -(-n // FP8_BLOCK128.block_size), blocks), meaning)
            self._refuse_transposed_scale(b_scale)

    def check_layout(self, call: GemmCall) -> None:
        """Check that the call passes ``offsets`` or ``counts``, which locate each expert's rows."""

    def _check_weight_format(self, call: GemmCall) -> tuple[FP4Format | None, ScaleLayout | None]:
        if self.b == "fp8":
            _checks.check_dtype(self.op, "b", call.b, (torch.float8_e4m3fn,))
            _checks.check_dtype(self.op, "b_scale", call.b_scale, (torch.float32, *MX_SCALE_DTYPES))
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
        """Check the shape of interleaved activations ``a``, whose leading dimensions must be ``rows``."""
        groups = -(-k // INTERLEAVED_K)
        _checks.check_shape(
            self.op, "a", call.a, (*rows, groups, INTERLEAVED_K), f"interleaved rows of K = {k}, the K of b"
        )

    def check_expert_rows(self, call: GemmCall, experts: int) -> None:
        """Check ``offsets`` and ``counts``, which locate each expert's rows."""

    def operands(self, call: GemmCall) -> "tuple[Operand, Operand]":
        p = gemm_package().problem
        a = p.Operand(FP8_BLOCK128, COLUMN)
        if self.is_mxfp8(call):
            return p.Operand(MXFP8), p.Operand(MXFP8)
        if self.b == "fp8":
            return a, p.Operand(FP8_BLOCK128, scales_by_row=self.has_row_scales(call))
        fmt, _, b_layout = self.fp4_format(call)
        if self.has_token_scales(call):
            a_format = FP8_TENSOR if has_one_a_scale(call) else FP8_TOKEN
            a = p.Operand(a_format, is_interleaved=self.is_interleaved(call))
        if self.is_prepared(call):
            return a, p.Operand(fmt, is_prepared=True)
        return a, p.Operand(fmt, b_layout)

    def declare_kind(self) -> dict[str, Property]:
        kind = self.declare_fp4_tokens() if self.b == "fp4" else {}
        if self.b == "fp8":
            kind = {"mxfp8": flag(self.is_mxfp8), "scales_by_row": flag(self.has_row_scales)}
        return {**kind, **super().declare_kind()}

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
            if given.scales_by_row and given.mxfp8:
                raise ValueError(f"cute::{self.op}: scales_by_row=True does not fit mxfp8=True")
            if given.scales_by_row:
                made["b_scale"] = zeros(*weights[:-1], blocks, given.n).mT
            if given.mxfp8:
                for name, rows in (("a_scale", lead), ("b_scale", weights)):
                    made[name] = zeros(*rows, given.k // MXFP8.block_size, dtype=torch.uint8)
        else:
            fmt, layout = self.example_format(given)
            made["b"], made["b_scale"] = fp4_zeros((*weights, given.k), fmt, weight_layout(layout), device)
            made |= self._make_fp4_tokens(given, made["a"], fmt)
        made["b"] = made["b"].mT
        return made

    def _make_fp4_tokens(self, given: Any, a: Tensor, fmt: FP4Format) -> dict[str, Tensor]:
        """For an example with per-token scales, return the operands that differ from an example with block scales."""
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
        if self.b == "fp8":
            return call.b_scale.dim() < 3 and not self.is_mxfp8(call)
        return super().has_token_scales(call)

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
