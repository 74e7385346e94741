"""The ops that are GEMMs: checks, the problem that a call is, and how it reaches a backend."""

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import torch

from torch_cute_ops.formats import FP8_BLOCK128, FP4Format
from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.formats.scale_layout import weight_layout
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
    fp4_zeros,
    gemm_package,
    seen_as,
)
from torch_cute_ops.ops._call import Arguments
from torch_cute_ops.ops._operands import aligned, are_int32, cuda_device
from torch_cute_ops.ops._signature import AlphaKind
from torch_cute_ops.ops._with_gemm import PREFETCH_MULTIPLE, is_prefetchable
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.allocate import allocator

if TYPE_CHECKING:
    from torch_cute_ops.gemm.problem import GemmProblem

Tensor = torch.Tensor

FP8_K_MULTIPLE: Final = 64
FP8_N_MULTIPLE: Final = 8


class GemmCall(NamedTuple):
    """The arguments of any GEMM op: ``b`` is its weight, transposed or not, by whatever name."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None = None
    b_scale: Tensor = None  # type: ignore[assignment]
    alpha: Tensor | None = None
    bias: Tensor | None = None
    offsets: Tensor | None = None
    counts: Tensor | None = None
    prefetch: Tensor | None = None
    out_dtype: torch.dtype | None = None
    block_size: int = 16
    scale_format: str | None = None
    scale_layout: str = "128x4"
    backend: str = AUTO
    static_weight: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        """Of the result: the one that is named, or the activations' where these have 16 bits, or bfloat16."""
        return self.out_dtype or (self.a.dtype if self.a.dtype in SIXTEEN_BIT else torch.bfloat16)


class Gemm(BackendPath[GemmCall]):
    """A GEMM op but those with a gate."""

    call_type = GemmCall
    hints = frozenset(("prefetch",))
    renames: ClassVar = {**BackendPath.renames, "global_scale": "a_scale"}

    def __init__(
        self,
        a: Literal["fp4", "fp8", "16-bit"],
        b: Literal["fp4", "fp8"],
        over: Literal["none", "k", "rows"] = "none",
        prologue_gate: bool = False,
        prologue_quant: bool = False,
    ) -> None:
        super().__init__(a, b, over, prologue_gate, prologue_quant)
        self.b_name = "w" if over == "k" else "b"

    def key(self, call: GemmCall, device: int) -> tuple[Any, ...]:
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, *options = call
        shape = a.shape
        m = shape[-2]
        return (
            bucket(m),
            shape[-1],
            a.dtype,
            b.shape,
            b.dtype,
            b_scale.shape,
            b_scale.dtype,
            None if a_scale is None else a_scale.dtype,
            None if alpha is None else alpha.shape[-1] if self.over == "k" else alpha.shape,
            None if bias is None else bias.dtype,
            offsets is not None,
            counts is not None,
            prefetch is not None,
            *options,
            device,
            tuning.generation,
            tuning.blocks and tuning.is_on(),
        )

    # Checks

    def check(self, call: GemmCall) -> None:
        op, device = self.op, call.a.device
        if self.a == "fp8":
            n, k = self._check_fp8(call)
        else:
            n, k = self._check_fp4(call)
        for name, tensor in (("a_scale", call.a_scale), (self.b_name, call.b), (f"{self.b_name}_scale", call.b_scale)):
            if tensor is not None:
                _checks.check_device(op, name, tensor, "a", device)
        if self.over == "k":
            self._check_expert_factors(call, n, k)
        else:
            self._check_epilogue(call, n)
        _checks.check_out_dtype(op, call.out_dtype)
        if call.prefetch is not None:
            self._check_prefetch(call.prefetch, device)
        self.check_backend(call)

    def _check_prefetch(self, prefetch: Tensor, device: torch.device) -> None:
        op = self.op
        if prefetch.dtype.itemsize != 1:
            raise TypeError(f"cute::{op}: prefetch has dtype {prefetch.dtype}; expected one of a byte, such as uint8")
        if not is_prefetchable(prefetch):
            raise ValueError(
                f"cute::{op}: prefetch has shape {tuple(prefetch.shape)} and strides {prefetch.stride()}; expected a "
                f"contiguous matrix, such as a weight by rows, whose rows are multiples of {PREFETCH_MULTIPLE} bytes"
            )
        _checks.check_device(op, "prefetch", prefetch, "a", device)

    def _check_fp4(self, call: GemmCall) -> tuple[int, int]:
        """Check ``a``, the weight and their scales; N and K."""
        op, b = self.op, call.b
        fmt, layout, b_layout = self.fp4_format(call)
        _checks.check_matrix(op, self.b_name, b, "(N, E·I/2)" if self.takes_rows else "(K/2, N)")
        self._refuse_untransposed(call)
        weight = b if self.takes_rows else b.t()
        _checks.check_packed(op, self.b_name if self.takes_rows else "b.t()", weight, fmt)
        n, k = weight.shape[0], weight.shape[1] * 2
        self.check_activations(call, k, fmt, layout)
        self.check_fp4_scale(f"{self.b_name}_scale", call.b_scale, (n, k), fmt, b_layout)
        return n, k

    def _check_fp8(self, call: GemmCall) -> tuple[int, int]:
        """Check the operands, their scales, offsets and counts; N and K."""
        op, a, b, a_scale, b_scale = self.op, call.a, call.b, call.a_scale, call.b_scale
        offsets, counts = call.offsets, call.counts
        assert a_scale is not None
        is_grouped, is_masked = self.over == "rows", self.over == "rows" and offsets is None
        if is_masked and counts is None:
            raise ValueError(
                f"cute::{op}: offsets and counts are None; expected offsets (E + 1,) of the contiguous layout, or "
                "counts (E,) of the masked one"
            )
        _checks.check_dtype(op, "a", a, (torch.float8_e4m3fn,))
        _checks.check_dtype(op, "a_scale", a_scale, (torch.float32,))
        fmt = layout = None
        if self.b == "fp8":
            _checks.check_dtype(op, "b", b, (torch.float8_e4m3fn,))
            _checks.check_dtype(op, "b_scale", b_scale, (torch.float32,))
        else:
            fmt, _, layout = self.fp4_format(call)
            _checks.check_dtype(op, "b", b, _checks.PACKED_DTYPES)
        columns = "K" if fmt is None else "K/2"
        if is_grouped:
            if b.dim() != 3:
                raise ValueError(f"cute::{op}: b has shape {tuple(b.shape)}; expected (E, N, {columns})")
            experts, n, k = b.shape
            if not 1 <= experts <= MAX_EXPERTS:
                raise ValueError(f"cute::{op}: b is of {experts} experts; expected 1 to {MAX_EXPERTS}")
        else:
            _checks.check_matrix(op, "b", b, f"({columns}, N)")
            self._refuse_untransposed(call)
            experts, (k, n) = 1, b.shape
        if fmt is not None:
            k *= 2
        if k == 0 or k % FP8_K_MULTIPLE:
            raise ValueError(f"cute::{op}: b has K = {k}; expected a positive multiple of {FP8_K_MULTIPLE}")
        if n % FP8_N_MULTIPLE:
            raise ValueError(f"cute::{op}: b has N = {n}; expected a multiple of {FP8_N_MULTIPLE}")
        if is_masked:
            if a.dim() != 3:
                raise ValueError(
                    f"cute::{op}: a has shape {tuple(a.shape)}; expected (E, rows of an expert, K), since offsets is "
                    "None"
                )
            _checks.check_shape(op, "a", a, (experts, a.shape[1], k), "the E and K of b")
        else:
            _checks.check_matrix(op, "a", a, "(R, K)" if is_grouped else "(M, K)")
            _checks.check_shape(op, "a", a, (a.shape[0], k), f"the K of b{self.hint(call)}")
        blocks = FP8_BLOCK128.scales_per_row(k)
        _checks.check_shape(op, "a_scale", a_scale, (blocks, *a.shape[:-1]), "a scale for 128 elements of a row of a")
        lead = (experts,) if is_grouped else ()
        if fmt is not None and layout is not None:
            self.check_fp4_scale("b_scale", b_scale, (*lead, n, k), fmt, layout)
        else:
            meaning = "a scale for 128 rows of the weight and 128 elements of k"
            _checks.check_shape(op, "b_scale", b_scale, (*lead, -(-n // FP8_BLOCK128.block_size), blocks), meaning)
        for name, given, shape, meaning in (
            ("offsets", offsets, (experts + 1,), "where experts begin, and where the last ends"),
            ("counts", counts, (experts,), "one for each expert of b"),
        ):
            if given is not None:
                _checks.check_dtype(op, name, given, (torch.int32,))
                _checks.check_shape(op, name, given, shape, meaning)
                _checks.check_device(op, name, given, "a", a.device)
        return n, k

    def _refuse_untransposed(self, call: GemmCall) -> None:
        """``b`` is not plainly a weight (N, K): a square matrix whose first dimension's elements are not neighbours."""
        b = call.b
        if not self.takes_rows and b.shape[0] == b.shape[1] > 1 and b.stride(0) != 1:
            raise ValueError(
                f"cute::{self.op}: b has shape {tuple(b.shape)} and strides {b.stride()}, as a weight by rows has; "
                "expected its transposed view: pass weight.t()"
            )

    def _check_epilogue(self, call: GemmCall, n: int) -> None:
        op, alpha, bias, device = self.op, call.alpha, call.bias, call.a.device
        is_grouped = self.over == "rows"
        experts = call.b.shape[0] if is_grouped else 1
        if alpha is not None:
            _checks.check_dtype(op, "alpha", alpha, (torch.float32,))
            if alpha.numel() != 1 and alpha.shape not in (((experts,), (experts, n)) if is_grouped else ((n,),)):
                expected = f"({experts},) or {(experts, n)}" if is_grouped else f"({n},)"
                raise ValueError(
                    f"cute::{op}: alpha has shape {tuple(alpha.shape)}; expected one element, or {expected}"
                )
            _checks.check_device(op, "alpha", alpha, "a", device)
        check_bias(op, bias, call.result_dtype, (experts, n) if is_grouped else (n,), device)

    def _check_expert_factors(self, call: GemmCall, n: int, k: int) -> None:
        """``alpha`` is (M, E) float32, for E experts that have equal parts of ``k``; the bias is theirs."""
        op, alpha = self.op, call.alpha
        assert alpha is not None
        _checks.check_dtype(op, "alpha", alpha, (torch.float32,))
        _checks.check_matrix(op, "alpha", alpha, "(M, E)")
        m, experts = alpha.shape
        _checks.check_shape(op, "alpha", alpha, (call.a.shape[0], experts), "a row for each of a")
        if experts == 0 or k % (experts * EXPERT_MULTIPLE):
            raise ValueError(
                f"cute::{op}: alpha has shape {(m, experts)}, for {experts} experts, and a row of w has {k} "
                f"elements; expected the same number for each expert, a multiple of {EXPERT_MULTIPLE}"
            )
        _checks.check_device(op, "alpha", alpha, "a", call.a.device)
        check_bias(op, call.bias, call.result_dtype, (experts, n), call.a.device)

    # What is computed, and by which backend

    def problem(self, call: GemmCall) -> "GemmProblem":
        """The problem that a checked call is."""
        p = gemm_package().problem
        weight = call.b if self.takes_rows else call.b.t()
        n, k = weight.shape[-2], weight.shape[-1]
        alpha = bias_dtype = None
        a = p.Operand(FP8_BLOCK128, COLUMN) if self.a == "fp8" else p.Operand(call.a.dtype)
        b = p.Operand(FP8_BLOCK128)
        if self.b == "fp4":
            fmt, layout, b_layout = self.fp4_format(call)
            b = p.Operand(fmt, b_layout)
            k *= 2
            if self.a == "fp4":
                a = p.Operand(fmt, layout)
        grouping = p.Grouping()
        if self.over == "k" and call.alpha is not None:
            grouping = p.Grouping("k", call.alpha.shape[1])
        elif self.over == "rows":
            rows = p.ExpertLayout(call.offsets is not None, call.counts is not None)
            grouping = p.Grouping("rows", weight.shape[0], rows)
        if self.over != "k" and call.alpha is not None:
            alpha = _alpha_kind(call.alpha, self.over == "rows")
        if call.bias is not None:
            bias_dtype = call.bias.dtype
        epilogue = p.Epilogue(call.result_dtype, alpha, bias_dtype)
        quantises = None
        if self.prologue_quant:
            quantises = "plain" if call.a_scale is None else "scaled"
        given = {"prologue_gate": self.prologue_gate, "prologue_quant": quantises}
        given |= {"static_weight": call.static_weight, "prefetches": call.prefetch is not None}
        problem: GemmProblem = p.GemmProblem(a, b, n, k, epilogue, grouping, **given)
        return problem

    def ready_launcher(self, *how: Any, **named: Any) -> "GemmLauncher":
        return GemmLauncher(self, *how, **named)

    def properties(self, call: GemmCall) -> dict[str, Any]:
        problem = self.problem(call)
        shown: dict[str, Any] = {"n": problem.n, "k": problem.k, "m": call.a.shape[-2]}
        if self.over != "none":
            shown["experts"] = problem.experts
        if self.over == "rows":
            layout = problem.grouping.rows
            shown |= {"masked": True} if layout.is_masked else {"counts": layout.has_counts}
        if self.a == "16-bit":
            shown["dtype"] = call.a.dtype
        if self.prologue_quant:
            shown["global_scale"] = call.a_scale is not None
        if self.over != "k":
            shown["alpha"] = problem.epilogue.alpha
        shown["bias_dtype"] = problem.epilogue.bias_dtype
        shown["out_dtype"] = call.result_dtype
        if self.b == "fp4":
            shown |= {name: getattr(call, name) for name in ("block_size", "scale_format", "scale_layout")}
        shown |= {"backend": call.backend, "static_weight": call.static_weight}
        return shown if "prefetch" not in self.signature.names else {**shown, "prefetch": call.prefetch is not None}

    def has_property(self, name: str) -> bool:
        if name == "experts":
            return self.over != "none"
        if name in ("masked", "counts"):
            return self.over == "rows"
        if name == "dtype":
            return self.a == "16-bit"
        if name == "global_scale":
            return self.prologue_quant
        if name == "prefetch":
            return name in self.signature.names
        if name == "alpha":
            return self.over != "k"
        if name in ("block_size", "scale_format", "scale_layout"):
            return self.b == "fp4"
        return True

    def example(
        self,
        *,
        n: int,
        k: int,
        m: int = 1,
        experts: int | None = None,
        masked: bool = False,
        counts: bool = True,
        dtype: torch.dtype | None = None,
        global_scale: bool = False,
        alpha: AlphaKind | None = None,
        bias_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        block_size: int = 16,
        scale_format: str | None = None,
        scale_layout: str = "128x4",
        backend: str = AUTO,
        static_weight: bool = False,
        prefetch: bool = False,
        device: torch.device | int | str | None = None,
    ) -> Arguments:
        """A call with these static properties.

        Args:
            n, k: columns of the result, and elements of a sum: of all experts together where these divide it.
            m: rows; calls in the same bucket are made ready too. Masked: rows that an expert has room for.
            experts: how many there are, of an op that has experts.
            masked: whether calls are in the masked layout, of ``grouped_mm_fp8`` and ``grouped_mm_fp8_fp4``.
            counts: whether its calls in the contiguous layout pass counts.
            dtype: of ``a``, where that has 16 bits; ``None`` means bfloat16.
            global_scale: whether calls pass a global scale, of an op that quantises its activations.
            alpha: what calls pass: ``"one"`` element, one for each ``"column"``, ``"expert"`` or ``"expert_column"``;
                ``None``: none.
            bias_dtype: of the bias that calls pass; ``None``: none.
            out_dtype, block_size, scale_format, scale_layout, backend, static_weight: as in the calls.
            prefetch: whether calls name something that is brought into L2.
            device: of the tensors; ``None`` means the current CUDA device.

        Raises:
            TypeError: if ``experts`` is missing.
            ValueError: for an unknown ``alpha``.
        """
        if self.over != "none" and experts is None:
            raise TypeError(f"cute::{self.op} needs the property experts: how many there are")
        target, count = cuda_device(device), experts or 1

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target)

        lead = (count, m) if masked else (m,)
        weights = (count, n) if self.over == "rows" else (n,)
        given: dict[str, Any] = {"out_dtype": out_dtype, "backend": backend, "static_weight": static_weight}
        given["prefetch"] = zeros(1, 16, dtype=torch.uint8) if prefetch else None
        blocks = FP8_BLOCK128.scales_per_row(k)
        if self.a == "fp8":
            given["a"] = zeros(*lead, k, dtype=torch.uint8).view(torch.float8_e4m3fn)
            given["a_scale"] = zeros(blocks, *lead)
        elif self.a == "16-bit":
            given["a"] = zeros(m, self.a_width(k), dtype=dtype or torch.bfloat16)
            given["a_scale"] = torch.ones(1, dtype=torch.float32, device=target) if global_scale else None
        if self.b == "fp8":
            given["b"] = zeros(*weights, k, dtype=torch.uint8).view(torch.float8_e4m3fn)
            given["b_scale"] = zeros(*weights[:-1], -(-n // FP8_BLOCK128.block_size), blocks)
        else:
            fmt, layout = _checks.check_fp4_format(self.op, block_size, scale_format, scale_layout)
            given["b"], given["b_scale"] = fp4_zeros((*weights, k), fmt, weight_layout(layout), target)
            if self.a == "fp4":
                given["a"], given["a_scale"] = fp4_zeros((m, k), fmt, layout, target)
            given |= {"block_size": block_size, "scale_format": scale_format, "scale_layout": scale_layout}
        if not self.takes_rows:
            given["b"] = given["b"].t()
        if self.over == "rows":
            given["offsets"] = None if masked else zeros(count + 1, dtype=torch.int32)
            given["counts"] = zeros(count, dtype=torch.int32) if masked or counts else None
        if self.over == "k":
            given["alpha"] = torch.ones(m, count, dtype=torch.float32, device=target)
        elif alpha is not None:
            of_experts = {"expert": (count,), "expert_column": (count, n)}
            shapes = {"one": (1,), **(of_experts if self.over == "rows" else {"column": (n,)})}
            given["alpha"] = torch.ones(self.chosen("alpha", alpha, shapes), dtype=torch.float32, device=target)
        if bias_dtype is not None:
            given["bias"] = zeros(*((count, n) if self.over == "k" else weights), dtype=bias_dtype)
        names = {self.renames.get(name, name): name for name in self.signature.names}
        return (), {names[name]: value for name, value in given.items() if name in names}


class GemmLauncher(BackendLauncher[GemmCall]):
    """The launcher of a GEMM without a gate; ``path``: of the op."""

    def __init__(self, path: Gemm, problem: "GemmProblem", *how: Any, **named: Any) -> None:
        super().__init__(problem, *how, **named)
        self.takes_rows = path.takes_rows and path.over != "rows"
        self.is_grouped, self.is_masked = path.over == "rows", problem.grouping.rows.is_masked
        self.fmt = problem.b.format if isinstance(problem.b.format, FP4Format) else None
        self.by_factors, self.prologue_quant = path.over == "k", path.prologue_quant
        self.has_fp8_rows = problem.a.is_fp8
        # The compiled function compares the blocks of a_scale with those of an FP8 weight's scales, not with FP4's.
        has_fp4_weight = self.has_fp8_rows and self.fmt is not None
        self.scale_blocks = FP8_BLOCK128.scales_per_row(problem.k) if has_fp4_weight else 0
        self.tile_rows = self.scale_columns = 0
        if isinstance(problem.a.format, FP4Format) and problem.a.scale_layout is not None:
            layout = problem.a.scale_layout
            self.tile_rows = layout.tile_rows or 1
            self.scale_columns = layout.padded_blocks(problem.k // problem.a.format.block_size)

    def run(self, call: GemmCall, out: Any) -> Any:
        if not self.is_direct:
            return None
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, *_ = call
        shape = a.shape
        m = shape[-2]
        if not m or not self.n:
            return None
        if self.tile_rows:
            tile = self.tile_rows
            # The compiled function takes any number of scale rows.
            if a_scale.shape != ((m + tile - 1) // tile * tile, self.scale_columns):
                return None
        if self.scale_blocks and a_scale.shape[0] != self.scale_blocks:
            return None
        # The compiled function takes any number of offsets, and does not look at strides within an expert.
        if self.is_grouped and not (
            a.is_contiguous()
            and are_int32(offsets, counts)
            and (offsets is None or offsets.shape[0] == b.shape[0] + 1)
            and (out is None or out.is_contiguous())
        ):
            return None
        if alpha is not None and alpha.dim() == 0:
            alpha = alpha.reshape(1)
        if prefetch is not None:
            # Not every compiled function looks at it.
            if not is_prefetchable(prefetch) or prefetch.device != a.device or not prefetch.numel():
                return None
            prefetch = seen_as(prefetch, torch.uint8)
        if out is None:
            n = self.n
            if self.is_masked:
                out = allocator(self.device)((shape[0], m, n), (m * n, n, 1), self.dtype)
            else:
                out = allocator(self.device)((m, n), (n, 1), self.dtype)
        # The class's own ``__new__`` takes twice as long.
        fields = a, b.t() if self.takes_rows else b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch
        self.compute(tuple.__new__(Operands, fields), out)
        return out

    def launch(self, call: GemmCall, out: Tensor) -> None:
        a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch, *_ = call
        if prefetch is not None:
            prefetch = seen_as(prefetch, torch.uint8)
            if not prefetch.numel() or prefetch.data_ptr() % PREFETCH_MULTIPLE:
                prefetch = prefetch.new_empty(0, PREFETCH_MULTIPLE)  # it would be no help to copy it
        if self.has_fp8_rows:
            assert a_scale is not None
            a, a_scale = aligned(a), _side_by_side(a_scale)
        elif self.prologue_quant:
            a, a_scale = aligned(a), None if a_scale is None else a_scale.reshape(1)
        elif self.fmt is not None and a_scale is not None:
            a, a_scale = aligned(seen_as(a, torch.uint8)), aligned(seen_as(a_scale, self.fmt.scale_dtype))
        else:
            a = aligned(a)
        if self.fmt is not None:
            b, b_scale = seen_as(b, torch.uint8), aligned(seen_as(b_scale, self.fmt.scale_dtype))
        else:
            b_scale = b_scale.contiguous()
        b = aligned(b) if self.is_grouped else aligned(b if self.takes_rows else b.t()).t()
        if alpha is not None and not self.by_factors:
            alpha = aligned(alpha.reshape(1) if alpha.numel() == 1 else alpha)
        bias, offsets, counts = (None if tensor is None else aligned(tensor) for tensor in (bias, offsets, counts))
        self.compute(Operands(a, b, a_scale, b_scale, alpha, bias, offsets, counts, prefetch), out)


def _alpha_kind(alpha: Tensor, is_grouped: bool) -> Any:
    """What ``alpha`` is given for, as ``kernels.common.core.layouts.Epilogue`` names it."""
    if alpha.numel() == 1:
        return "one"
    if not is_grouped:
        return "column"
    return "expert" if alpha.dim() == 1 else "expert_column"


def _side_by_side(scale: Tensor) -> Tensor:
    """Scales by columns, or a copy where those of a block of k do not lie side by side."""
    lies = scale.stride(-1) == 1 and (scale.dim() == 2 or scale.stride(1) == scale.shape[2] or scale.shape[1] == 1)
    return scale if lies and scale.stride(0) >= 0 else scale.contiguous()
