"""Description of a GEMM (``GemmProblem``): everything that does not change from call to call."""

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import torch

from torch_cute_ops.formats import FP8_BLOCK128, FP8_TENSOR, FP8_TOKEN, FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.formats.gates import Gate, GemmGate
from torch_cute_ops.formats.interleave import INTERLEAVED_K
from torch_cute_ops.formats.prepared_scales import prepared_shape
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.experts.layouts import table_experts as table_experts
from torch_cute_ops.kernels.common.fp4.layouts import PrologueQuant
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout

Tactic = tuple[int | str, ...]
"""One variant of a backend: a tuple of numbers and strings, which JSON can hold."""

USUAL_TOPK: Final = 8
"""Number of experts per token that estimates assume, unless there are fewer experts. The host does not know the
routing, and most served models use this number (DeepSeek-V3, Qwen3, Kimi K2)."""


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is stored.

    Attributes:
        format: format of FP4 or FP8 codes, or a 16-bit dtype.
        scale_layout: layout of the block scales, or None for 16 bits, for prepared scales, and for MXFP8, whose scales
            may be in another layout in each call.
        is_prepared: True if an FP4 weight comes with prepared scales (``formats.prepared_scales``) instead of block
            scales.
        scales_by_row: True if an FP8 weight has a block scale for each row and 128 elements (1 × 128), False if 128
            rows share a block scale (128 × 128), and for all other operands.
        is_interleaved: True if k of FP8 activations is interleaved (``formats.interleave``).
    """

    format: FP4Format | FP8Format | torch.dtype
    scale_layout: ScaleLayout | None = None
    is_prepared: bool = False
    is_interleaved: bool = False
    scales_by_row: bool = False

    @cached_property
    def is_fp4(self) -> bool:
        """True if the operand consists of FP4 codes."""
        return isinstance(self.format, FP4Format)

    @cached_property
    def is_fp8(self) -> bool:
        """True if the operand consists of FP8 codes."""
        return isinstance(self.format, FP8Format)

    @cached_property
    def has_fp8_blocks(self) -> bool:
        """True if the operand consists of FP8 codes with fp32 block scales of 128 elements."""
        return self.format == FP8_BLOCK128

    @cached_property
    def has_fp8_tokens(self) -> bool:
        """True if the operand consists of FP8 codes with a scale per row or per tensor."""
        return self.format in (FP8_TENSOR, FP8_TOKEN)

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of ``k`` elements, including its scales."""
        if isinstance(self.format, FP4Format):
            if self.is_prepared:
                slabs, _, width = prepared_shape(1, k, self.format)
                return k // 2 + slabs * width
            return k // 2 + k // self.format.block_size
        if isinstance(self.format, FP8Format):
            if self.is_interleaved:
                k = -(-k // INTERLEAVED_K) * INTERLEAVED_K
            return k + self.format.scale_dtype.itemsize * self.format.scales_per_row(k)
        return k * self.format.itemsize


ALL_ROWS: Final = ExpertLayout()


@dataclass(frozen=True)
class Grouping:
    """How a GEMM is divided among experts.

    Attributes:
        over: dimension that is divided among the experts. ``"none"``: the GEMM has no experts. ``"k"``: each expert
            owns a range of K, and its sum is multiplied by a factor per token (second GEMM of an expert layer).
            ``"n"``: each expert owns columns of the result (first GEMM of an expert layer). ``"rows"``: each expert
            owns rows of ``a``, and a separate weight.
        experts: number of experts, or 1 for ``"none"``.
        rows: if ``over`` is ``"rows"``, description of the tensors that assign rows to experts.
    """

    over: Literal["none", "k", "n", "rows"] = "none"
    experts: int = 1
    rows: ExpertLayout = ALL_ROWS


@dataclass(frozen=True)
class GemmProblem:
    """Description of a GEMM for any M. Without experts, ``out[m, n] = alpha · Σ_k a[m, k] · b[k, n] + bias[n]``.

    The sum is in fp32. With experts over K, ``out[m, n] = Σ_e factor[m, e] · (Σ_{k of e} a[m, k] · b[k, n])``. Each
    expert's sum is rounded to fp32. The multiplication by the factor and the addition to other experts' sums are in
    fp32. If the factor is 0 or -0, nothing is computed: the operands do not affect the result, even if they are NaN.
    Each expert has its own bias, ``factor[m, e] · (Σ … + bias[e, n])``, with a rounding to fp32 after each step.

    With experts over N and a gate, ``out[m, e · I + i] = swiglu(gate, up)``, or GELU, in fp32 for I = n / E, with
    ``gate = alpha · Σ_k a[m, k] · b[e, i, k] + bias`` and ``up`` from ``b[e, I + i, k]``. If the routing of (m, e) is
    zero, nothing is computed and nothing is written.

    Attributes:
        a, b: storage of the activations, and storage of the weight.
        n, k: number of columns of the result, and number of elements of a sum. If experts divide N or K, ``n`` or ``k``
            counts all experts together.
        grouping: division among experts.
        epilogue: operations that are applied to an accumulator before it is stored.
        gate: ``"silu"``, ``"gelu_tanh"``, ``"gelu"`` or ``"relu2"``, ``"swiglu"`` with parameters that calls pass, or
            None without a gate. With a gate, the weight contains ``2 · n`` rows, and the gate combines the results of
            the two halves of each expert's rows.
        quantised: storage of the result if it is quantised, or None. The epilogue's dtype is then the dtype of a bias.
        global_scale: ``"one"`` if a quantised result has a single encode scale, ``"expert"`` if each expert has an
            encode scale, or None without an encode scale.
        prologue_gate: activation function if calls pass gate and up, (M, 2K), as ``a``, or None. The activations are
            ``act(gate) · up`` of the halves of each row, rounded to their 16-bit dtype unless they are quantised.
        prologue_quant: ``"scaled"`` if 16-bit activations are quantised to the weight's format and scale layout with a
            global scale, which calls pass as ``a_scale``; ``"plain"`` if they are quantised without a global scale; or
            None.
        static_weight: promise that the weight and its scales were written before the previous launch on the stream, so
            that kernels may read them early.
        prefetches: True if calls pass a matrix for a later launch, which the kernel may prefetch into L2.
        fast_accum: True if tensor cores may add up FP8 products over all of K, False if they may add up at most 512
            elements of K. With block scales, the value is False: the tensor cores add up 128 elements, in MXFP8 32
            or 128 elements, or all of K with block-scaled MMAs.
    """

    a: Operand
    b: Operand
    n: int
    k: int
    epilogue: Epilogue
    grouping: Grouping = Grouping()
    gate: GemmGate | None = None
    quantised: Operand | None = None
    global_scale: Literal["one", "expert"] | None = None
    prologue_gate: Gate | None = None
    prologue_quant: PrologueQuant | None = None
    static_weight: bool = False
    prefetches: bool = False
    fast_accum: bool = False

    @cached_property
    def configs(self) -> dict[Any, Any]:
        """Cache of kernel configurations for this problem. Backends fill it."""
        return {}

    @cached_property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the result, which is uint8 for codes."""
        return self.epilogue.out_dtype if self.quantised is None else torch.uint8

    @cached_property
    def experts(self) -> int:
        """Number of experts, or 1 without experts."""
        return self.grouping.experts

    @cached_property
    def expert_k(self) -> int:
        """Number of elements along K that one expert owns."""
        return self.k // self.experts if self.grouping.over == "k" else self.k

    @cached_property
    def expert_n(self) -> int:
        """Number of columns of the result that one expert owns."""
        return self.n // self.experts if self.grouping.over == "n" else self.n

    @cached_property
    def has_prologue(self) -> bool:
        """True if a prologue (a gate, a quantisation, or both) computes the activations from the rows that calls
        pass."""
        return self.prologue_gate is not None or self.prologue_quant is not None

    @cached_property
    def without_prologue(self) -> "GemmProblem":
        """The same problem without the prologue. Its ``a`` is the result of the prologue."""
        quantised = self.prologue_quant is not None
        a = Operand(self.b.format, self.b.scale_layout) if quantised else self.a
        return replace(self, a=a, prologue_gate=None, prologue_quant=None)

    @cached_property
    def a_width(self) -> int:
        """Number of elements of a row of ``a``."""
        return self.k if self.prologue_gate is None else 2 * self.k

    @cached_property
    def weight_rows(self) -> int:
        """Number of rows of the weight."""
        return self.n if self.gate is None else 2 * self.n

    @cached_property
    def topk(self) -> int:
        """Number of experts per token that estimates assume."""
        return min(self.experts, USUAL_TOPK)

    def described(self) -> dict[str, Any]:
        """Return all fields as values that JSON can hold."""
        described: dict[str, Any] = _plain(self)
        return described

    def bytes_moved(self, m: int) -> int:
        """Return the bytes that a call moves if it reads each operand once and writes the result once.

        With experts over K or N, the weight of an expert is counted if one of the ``m`` tokens is routed to the expert.
        The expected number of such experts assumes that each token draws ``topk`` experts at random. With experts over
        rows, the weights of at most ``m`` experts are counted.
        """
        out = m * (self.n * self.out_dtype.itemsize if self.quantised is None else self.quantised.row_bytes(self.n))
        a, b = m * self.a.row_bytes(self.a_width), self.weight_rows * self.b.row_bytes(self.k)
        if self.b.has_fp8_blocks and not self.b.scales_by_row:  # one scale per 128 rows of the weight
            b = self.n * self.k + 4 * -(-self.n // 128) * -(-self.k // 128)
        if self.grouping.over in ("k", "n"):
            share = self.topk / self.experts
            touched = 1 - (1 - share) ** m
            shared = a * share + out if self.grouping.over == "k" else a + out * share
            return round(b * touched + shared) + 4 * m * self.experts
        if self.grouping.over == "rows":
            if self.grouping.rows.is_masked:
                return (a + b + out) * self.experts
            return a + b * min(self.experts, m) + out
        return a + b + out

    def flops(self, m: int) -> int:
        """Return the number of multiplications and additions of a call.

        With experts over K or N, ``topk`` experts are counted per token. In the masked layout, all rows of the buffer
        are counted.
        """
        if self.grouping.over == "n":
            return 2 * m * self.weight_rows // self.experts * self.k * self.topk
        if self.grouping.over == "k":
            return 2 * m * self.n * self.expert_k * self.topk
        return 2 * m * self.n * self.k * (self.experts if self.grouping.rows.is_masked else 1)


def _plain(value: Any) -> Any:
    if isinstance(value, FP4Format | FP8Format | ScaleLayout):
        return getattr(value, "name", None) or value.granularity  # type: ignore[union-attr]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value
