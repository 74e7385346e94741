"""Call paths of GEMMs with an FP4 weight, and activations in FP4 or 16 bits."""

from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._backend_path import (
    EXPERT_MULTIPLE,
    check_bias,
    fp4_zeros,
    gemm_package,
)
from torch_cute_ops.ops._gemm import Gemm, GemmCall
from torch_cute_ops.ops._properties import Property, dtype, flag, size

if TYPE_CHECKING:
    from torch_cute_ops.gemm.problem import Grouping, Operand

Tensor = torch.Tensor


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
        _checks.check_shape(op, "alpha", alpha, (call.a.shape[0], experts), "one row per row of a")
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
