"""Call path of GEMMs without a gate in their epilogue. A call path checks arguments, describes the problem and launches
the kernel.

Subclasses of ``Gemm`` describe the operands: ``_fp4_gemm`` and ``_fp8_gemm``.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from torch_cute_ops.formats import FP8_BLOCK128, MXFP8, FP4Format
from torch_cute_ops.formats.fp8 import is_column_major, is_one_column, new_column_scales
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.token_scales import with_alpha
from torch_cute_ops.gemm.buckets import bucket
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._backend_path import (
    AUTO,
    SIXTEEN_BIT,
    BackendLauncher,
    BackendPath,
    check_bias,
    check_row_scale,
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
    gate: Gate = "silu"

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
        """Return the entry of ``key`` that describes the shape of ``a_scale``. The entry is needed if ``a_scale`` is
        None or ``by_a_scale`` is True."""
        return None if a_scale is None else (a_scale.dim(), a_scale.shape[-1])

    def _key_of_rows(self, shape: Any, offsets: Tensor | None) -> Any:
        """Return the entry of ``key`` for the number of rows, for activations with at least three dimensions and the
        last extent 256. If k is interleaved, the entry also contains the number of groups of 256 elements, because the
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
        if self.prologue_gate:
            _checks.check_gate(op, call.gate)
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
            prologue_gate=call.gate if self.prologue_gate else None,
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
            **self.arguments_as_properties("backend", "static_weight", "gate"),
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


class GemmLauncher(BackendLauncher[GemmCall]):
    """Launcher of a GEMM without a gate in its epilogue."""

    def __init__(self, path: Gemm, problem: "GemmProblem", *how: Any, **named: Any) -> None:
        super().__init__(problem, *how, **named)
        self.is_grouped, self.is_masked = path.over == "rows", problem.grouping.rows.is_masked
        self.is_interleaved, self.is_prepared = problem.a.is_interleaved, problem.b.is_prepared
        self.scales_by_row = problem.b.scales_by_row
        self.fmt = problem.b.format if isinstance(problem.b.format, FP4Format) else None
        self.by_factors, self.prologue_quant = path.over == "k", path.prologue_quant
        self.has_fp8_rows = problem.a.has_fp8_blocks
        self.has_token_scales, self.is_mxfp8 = problem.a.has_fp8_tokens, problem.a.format == MXFP8
        if self.is_mxfp8:
            self.is_direct = False  # ``launch`` views the scales as bytes, and passes ``Operands``
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
        if self.scales_by_row and not is_column_major(b_scale):
            return None
        # Check that the scale tiles have no gaps between them. Otherwise the compiled function would launch no CTAs,
        # and the resulting CUDA error would end a graph capture.
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
        elif self.is_mxfp8:
            assert a_scale is not None
            a, a_scale = aligned(a), aligned(seen_as(a_scale, torch.uint8))
            b_scale = seen_as(b_scale, torch.uint8)
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
        elif self.scales_by_row:
            b_scale = b_scale if is_column_major(b_scale) else b_scale.mT.contiguous().mT
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
