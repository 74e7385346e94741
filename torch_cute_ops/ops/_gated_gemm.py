"""Call path of the ops ``moe_fc1_*``, the first GEMM of an expert layer. Each expert owns columns of the result, and
the epilogue applies a gate."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torch_cute_ops.formats import FP4Format
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import GatedOperands
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
from torch_cute_ops.ops._operands import aligned
from torch_cute_ops.ops._properties import Property, choice, dtype, flag, size
from torch_cute_ops.ops._row_quant import gate_arguments, gates_plainly
from torch_cute_ops.ops._signature import GatedAlphaKind, GlobalScaleKind
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.allocate import allocator

if TYPE_CHECKING:
    from torch_cute_ops.gemm.problem import GemmProblem

Tensor = torch.Tensor


class GatedCall(NamedTuple):
    """Arguments of a GEMM op with a gate in its epilogue."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None = None
    b_scale: Tensor = None  # type: ignore[assignment]
    routing: Tensor = None  # type: ignore[assignment]
    alpha: Tensor | None = None
    bias: Tensor | None = None
    global_scale: Tensor | None = None
    row_scale: Tensor | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    swiglu_limit: float | None = None
    block_size: int = 16
    scale_format: str | None = None
    scale_layout: str | None = None
    backend: str = AUTO
    static_weight: bool = False
    gate: Gate = "silu"

    @property
    def swiglu(self) -> tuple[float, float, float | None]:
        """Parameters of SwiGLU: alpha, beta and limit."""
        return self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit

    @property
    def bias_dtype(self) -> torch.dtype:
        """Dtype that a bias may have instead of float32."""
        return self.a.dtype if self.a.dtype in SIXTEEN_BIT else torch.bfloat16


class GatedGemm(BackendPath[GatedCall]):
    """Call path of a GEMM in which each expert owns columns of the result. The epilogue combines the two halves of
    these columns, gate and up, into the gated result.

    Args:
        a: format of the activations and of the result.
    """

    call_type = GatedCall
    over = "n"
    b_name = "w"

    def __init__(self, a: Literal["fp4", "16-bit"]) -> None:
        super().__init__(a, "fp4")

    def key(self, call: GatedCall, device: int) -> tuple[Any, ...]:
        a, b, a_scale, b_scale, routing, alpha, bias, global_scale, row_scale, *_ = call
        return (
            bucket(a.shape[0]),
            a.shape[1],
            a.dtype,
            b.shape,
            b.dtype,
            b_scale.shape,
            b_scale.dtype,
            None if a_scale is None else a_scale.dtype,
            None if a_scale is None else a_scale.dim(),
            routing.shape[1],
            None if alpha is None else alpha.shape,
            None if bias is None else bias.dtype,
            None if global_scale is None else global_scale.numel(),
            row_scale is not None,
            gates_plainly(*call.swiglu),
            call.gate,
            call.block_size,
            call.scale_format,
            call.scale_layout,
            call.backend,
            call.static_weight,
            device,
            tuning.generation,
            tuning.blocks and tuning.is_on(),
        )

    # Checks

    def check(self, call: GatedCall) -> None:
        op, a, b, device = self.op, call.a, call.b, call.a.device
        fmt, layout, b_layout = self.fp4_format(call)
        if b.dim() != 3:
            raise ValueError(f"cute::{op}: got w with shape {tuple(b.shape)}; expected (E, H/2, 2·I)")
        _checks.check_transposed(op, "w", b, "(E, 2·I, H/2)")
        _checks.check_packed(op, "w.mT", b.mT, fmt)
        experts, k, columns = b.shape[0], 2 * b.shape[1], b.shape[2]
        if not 1 <= experts <= MAX_EXPERTS:
            raise ValueError(f"cute::{op}: w is of {experts} experts; expected 1 to {MAX_EXPERTS}")
        if columns == 0 or columns % (2 * EXPERT_MULTIPLE):
            raise ValueError(
                f"cute::{op}: w has {columns} columns per expert; expected 2·I, with I a positive multiple of "
                f"{EXPERT_MULTIPLE}"
            )
        self.check_activations(call, k, fmt, layout)
        self.check_fp4_scale("w_scale", call.b_scale, (experts, columns, k), fmt, b_layout, call)
        _checks.check_dtype(op, "routing", call.routing, (torch.float32,))
        matrix = a.shape[0], experts
        _checks.check_shape(op, "routing", call.routing, matrix, "one row per row of a, one element per expert of w")
        if call.alpha is not None:
            _checks.check_dtype(op, "alpha", call.alpha, (torch.float32,))
            if call.alpha.shape not in ((experts,), (experts, 2)):
                raise ValueError(
                    f"cute::{op}: got alpha with shape {tuple(call.alpha.shape)}; expected ({experts},), or "
                    f"{(experts, 2)} for gate and up"
                )
        self._check_global_scale(call.global_scale, experts, fmt)
        for name, tensor in zip(
            ("w", "a_scale", "w_scale", "routing", "alpha", "global_scale"),
            (b, call.a_scale, call.b_scale, call.routing, call.alpha, call.global_scale),
            strict=True,
        ):
            if tensor is not None:
                _checks.check_device(op, name, tensor, "a", device)
        check_bias(op, call.bias, call.bias_dtype, (experts, columns), device, "column of w")
        check_row_scale(op, call.row_scale, a)
        _checks.check_swiglu(op, *call.swiglu)
        _checks.check_gate(op, call.gate, *call.swiglu)
        self.check_backend(call)

    def _check_global_scale(self, global_scale: Tensor | None, experts: int, fmt: FP4Format) -> None:
        if global_scale is None:
            return
        if not fmt.has_global_scale:
            raise ValueError(f"cute::{self.op}: global_scale is given; {fmt.name} takes none, so pass None")
        _checks.check_dtype(self.op, "global_scale", global_scale, (torch.float32,))
        if global_scale.numel() != 1 and global_scale.shape != (experts,):
            raise ValueError(
                f"cute::{self.op}: got global_scale with shape {tuple(global_scale.shape)}; expected one element, or "
                f"({experts},)"
            )

    # Problem and backend

    def problem(self, call: GatedCall) -> "GemmProblem":
        p = gemm_package().problem
        fmt, layout, b_layout = self.fp4_format(call)
        experts, held, columns = call.b.shape
        is_fp4 = self.a == "fp4"
        a = p.Operand(fmt, layout) if is_fp4 else p.Operand(call.a.dtype)
        bias_dtype = None if call.bias is None else call.bias.dtype
        problem: GemmProblem = p.GemmProblem(
            a,
            p.Operand(fmt, b_layout),
            experts * (columns // 2),
            2 * held,
            p.Epilogue(call.bias_dtype, _alpha_kind(call), bias_dtype, call.row_scale is not None),
            p.Grouping("n", experts),
            gate=call.gate if gates_plainly(*call.swiglu) else "swiglu",
            quantised=p.Operand(fmt, layout) if is_fp4 else None,
            global_scale=_global_scale_kind(call),
            static_weight=call.static_weight,
        )
        return problem

    def ready_launcher(self, *how: Any, **named: Any) -> "GatedLauncher":
        return GatedLauncher(*how, **named)

    def fill_without_work(self, call: GatedCall, out: tuple[Tensor, ...]) -> bool:
        return not call.a.shape[0]

    def declare(self) -> dict[str, Property]:
        declared = {
            "n": size(lambda call: self.problem(call).n),
            "k": size(lambda call: self.problem(call).k),
            "m": size(lambda call: call.a.shape[0], default=1),
            "experts": size(lambda call: call.b.shape[0]),
        }
        if self.a == "16-bit":
            declared["dtype"] = dtype(lambda call: call.a.dtype)
        declared |= {
            "alpha": choice(GatedAlphaKind, _alpha_kind),
            "bias_dtype": dtype(lambda call: None if call.bias is None else call.bias.dtype),
        }
        if self.a == "fp4":
            declared["global_scales"] = choice(GlobalScaleKind, _global_scale_kind)
        declared["swiglu"] = flag(lambda call: not gates_plainly(*call.swiglu))
        declared |= self.arguments_as_properties("block_size", "scale_format") | self.declare_layout()
        declared |= self.arguments_as_properties("backend", "static_weight", "gate")
        if self.a == "fp4":
            declared["row_scale"] = flag(lambda call: call.row_scale is not None)
        return declared

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        n, k, m, experts = given.n, given.k, given.m, given.experts
        if n % experts:
            raise ValueError(
                f"cute::{self.op}: n is {n}; expected the same number of columns for each of {experts} experts"
            )
        rows = 2 * (n // experts)
        fmt, layout = self.example_format(given)
        b_layout = weight_layout(layout)

        def ones(*shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.float32, device=device)

        w, w_scale = fp4_zeros((experts, rows, k), fmt, b_layout, device)
        alpha = self.chosen("alpha", given.alpha, {None: None, "expert": (experts,), "expert_half": (experts, 2)})
        made = vars(given) | {
            "w": w.mT,
            "w_scale": w_scale,
            "routing": ones(m, experts),
            "alpha": None if alpha is None else ones(*alpha),
            "bias": None if given.bias_dtype is None else ones(experts, rows).to(given.bias_dtype),
            "swiglu_beta": float(given.swiglu),
        }
        if self.a == "16-bit":
            return made | {"a": torch.zeros(m, k, dtype=given.dtype or torch.bfloat16, device=device)}
        made["a"], made["a_scale"] = fp4_zeros((m, k), fmt, layout, device)
        scales = {None: None, "one": (1,), "expert": (experts,)}
        shape = self.chosen("global_scales", given.global_scales, scales)
        made["row_scale"] = ones(m) if given.row_scale else None
        return made | {"global_scale": None if shape is None else ones(*shape)}


def _alpha_kind(call: GatedCall) -> str | None:
    return None if call.alpha is None else "expert" if call.alpha.dim() == 1 else "expert_half"


def _global_scale_kind(call: GatedCall) -> str | None:
    return None if call.global_scale is None else "one" if call.global_scale.numel() == 1 else "expert"


class GatedLauncher(BackendLauncher[GatedCall]):
    """Launcher of a GEMM with a gate in its epilogue."""

    def __init__(self, problem: "GemmProblem", *how: Any, **named: Any) -> None:
        super().__init__(problem, *how, **named)
        assert isinstance(problem.b.format, FP4Format)
        self.fmt = problem.b.format
        k_bytes = problem.k // 2
        self.b_strides = problem.weight_rows // problem.experts * k_bytes, 1, k_bytes

    def run(self, call: GatedCall, out: Any) -> Any:
        if not self.is_direct:
            return None
        a, b, a_scale, b_scale, routing, alpha, bias, global_scale, row_scale, *_ = call
        m, scales = a.shape[0], self.a_scales
        if not m:
            return None
        # Check that the operands have no gaps between rows. Otherwise the compiled function would request a launch with
        # no CTAs, and the resulting CUDA error would end a graph capture.
        if b.stride() != self.b_strides or not b_scale.is_contiguous():
            return None
        if a_scale is not None and not a_scale.is_contiguous():
            return None
        if self.views_b_scale:
            assert self.b_scale_shape is not None
            b_scale = b_scale.view(self.b_scale_shape)
        if scales is not None:
            # Check the number of scale rows here, because the compiled function does not.
            extents = a_scale.shape  # type: ignore[union-attr]
            if extents[0] != scales.count(m) or extents[1] != scales.columns:
                a_scale = self.tiles(a_scale, m)  # type: ignore[arg-type]
                if a_scale is None:
                    return None
        if out is None:
            new = allocator(self.device)
            if self.y_scales is None:
                out = new((m, self.n), (self.n, 1), self.dtype)
            else:
                codes = new((m, self.n // 2), (self.n // 2, 1), self.dtype)
                shape = self.y_scales.count(m), *self.y_scales.tail
                out = codes, new(shape, self.y_scales.strides, self.fmt.scale_dtype)
        results = (out, None) if self.y_scales is None else out
        if global_scale is not None and global_scale.dim() != 1:
            global_scale = global_scale.reshape(1)
        gate = gate_arguments(*call.swiglu)
        fields = a, b, a_scale, b_scale, alpha, bias, routing, global_scale, *gate, row_scale
        self.compute(tuple.__new__(GatedOperands, fields), results)
        return out

    def launch(self, call: GatedCall, out: Any) -> None:
        a, b, a_scale, b_scale, routing, alpha, bias, global_scale, row_scale, *_ = call
        a = aligned(a if a_scale is None else seen_as(a, torch.uint8))
        b = aligned(seen_as(b, torch.uint8).mT).mT
        a_scale, b_scale = self.stored_scales(a_scale, b_scale, a.shape[0], self.fmt)
        terms = alpha, bias, row_scale
        alpha, bias, row_scale = (None if tensor is None else aligned(tensor) for tensor in terms)
        if global_scale is not None:
            global_scale = aligned(global_scale.reshape(-1))
        results = (out, None) if self.y_scales is None else out
        gate = gate_arguments(*call.swiglu)
        self.compute(
            GatedOperands(a, b, a_scale, b_scale, alpha, bias, routing, global_scale, *gate, row_scale), results
        )
