"""What a GEMM computes: all about it that does not change from call to call."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal

import torch

from torch_cute_ops.formats import FP4Format, FP8Format, ScaleLayout
from torch_cute_ops.kernels.common.core.layouts import Epilogue
from torch_cute_ops.kernels.common.fp4.layouts import PrologueQuant
from torch_cute_ops.kernels.common.fp8.layouts import ExpertLayout

Tactic = tuple[int | str, ...]
"""One way in which a backend computes a GEMM: what JSON can hold, and the backend alone understands."""

USUAL_TOPK: Final = 8
"""Experts that a token is assumed to be routed to, where there are more: the host does not know the routing, and served
models mostly have this many (DeepSeek-V3, Qwen3, Kimi K2)."""


@dataclass(frozen=True)
class Operand:
    """How one side of a GEMM is stored.

    Attributes:
        format: FP4 or FP8 codes with block scales, or a 16-bit dtype.
        scale_layout: of the scales; ``None`` where there are none.
    """

    format: FP4Format | FP8Format | torch.dtype
    scale_layout: ScaleLayout | None = None

    @property
    def is_fp4(self) -> bool:
        """Whether it has FP4 codes."""
        return isinstance(self.format, FP4Format)

    @property
    def is_fp8(self) -> bool:
        """Whether it has FP8 codes."""
        return isinstance(self.format, FP8Format)

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` elements, with its scales."""
        if isinstance(self.format, FP4Format):
            return k // 2 + k // self.format.block_size
        if isinstance(self.format, FP8Format):
            return k + 4 * self.format.scales_per_row(k)
        return k * self.format.itemsize


ALL_ROWS: Final = ExpertLayout()


@dataclass(frozen=True)
class Grouping:
    """Which part of a GEMM belongs to which expert.

    Attributes:
        over: what experts divide: nothing; ``"k"``: the sum, into equal ranges, each multiplied by a factor that every
            token has for each expert (the second GEMM of an expert layer); ``"n"``: the columns of the weight (the
            first one); ``"rows"``: the rows of ``a``, each expert's with a weight of its own.
        experts: how many there are.
        rows: of ``"rows"``, how the device finds them.
    """

    over: Literal["none", "k", "n", "rows"] = "none"
    experts: int = 1
    rows: ExpertLayout = ALL_ROWS


@dataclass(frozen=True)
class GemmProblem:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n] + bias[n]``, or what ``grouping`` makes of it; M is not in it.

    The sum is in fp32. With experts over K, ``out[m, n] = Σ_e factor[m, e] · (Σ_{k of e} a[m, k] · b[k, n])``, each
    expert's sum rounded to fp32 and multiplied and added in fp32; where the factor is zero, of either sign, nothing is
    computed: what operands hold there does not show in the result, NaN included. With experts over K a bias is one of
    each expert's, ``factor[m, e] · (Σ … + bias[e, n])``, rounded to fp32 after each step.

    With experts over N and a gate, ``out[m, e · I + i] = swiglu(alpha · Σ_k a[m, k] · b[e, i, k] + bias, the same of
    b[e, I + i, k])`` in fp32 for I = n / E; where the routing of (m, e) is zero nothing is computed and nothing
    written.

    Attributes:
        a, b: the activations and the weight.
        n, k: columns of the result, and elements of a sum, of all experts together where they divide it.
        grouping: what belongs to which expert.
        epilogue: what is done to a sum before it is stored.
        gate: ``"silu"`` or ``"swiglu"``, with parameters that calls pass, if the result is SwiGLU of an expert's first
            and second half of rows of the weight, which has ``2 · n`` rows then; ``None``: there is no gate.
        quantised: format and scale layout, if the result is quantised; the epilogue's dtype is then the one that
            biases may have.
        global_scale: encode scales of a quantised result: ``"one"``, or one for each ``"expert"``.
        prologue_gate: True if calls pass gate and up, (M, 2K), as ``a``. The activations are ``silu(gate) · up`` of the
            halves of each row, rounded to their 16-bit dtype unless they are quantised.
        prologue_quant: whether the activations, which calls pass in 16 bits, are quantised to the weight's format
            before they are multiplied: ``"scaled"`` with a global scale, which calls pass as ``a_scale``, ``"plain"``
            without one. Their scales are then in the layout of the weight's.
        static_weight: the promise that the weight and its scales were complete before the previous launch on the
            stream, and so may be read ahead of it.
        prefetches: whether calls name something that a later launch reads, which may be brought into L2.
    """

    a: Operand
    b: Operand
    n: int
    k: int
    epilogue: Epilogue
    grouping: Grouping = Grouping()
    gate: Literal["silu", "swiglu"] | None = None
    quantised: Operand | None = None
    global_scale: Literal["one", "expert"] | None = None
    prologue_gate: bool = False
    prologue_quant: PrologueQuant | None = None
    static_weight: bool = False
    prefetches: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the result; uint8 for codes."""
        return self.epilogue.out_dtype if self.quantised is None else torch.uint8

    @property
    def experts(self) -> int:
        """How many there are; 1 where there are none."""
        return self.grouping.experts

    @property
    def expert_k(self) -> int:
        """Elements of an expert's sum."""
        return self.k // self.experts if self.grouping.over == "k" else self.k

    @property
    def expert_n(self) -> int:
        """Columns of the result that are an expert's."""
        return self.n // self.experts if self.grouping.over == "n" else self.n

    @property
    def has_prologue(self) -> bool:
        """Whether the activations are made of what calls pass, by a gate or a quantisation, or both."""
        return self.prologue_gate or self.prologue_quant is not None

    @property
    def without_prologue(self) -> "GemmProblem":
        """The same from the activations on, where these are made."""
        quantised = self.prologue_quant is not None
        a = Operand(self.b.format, self.b.scale_layout) if quantised else self.a
        return replace(self, a=a, prologue_gate=False, prologue_quant=None)

    @property
    def a_width(self) -> int:
        """Elements of a row that calls pass as ``a``."""
        return 2 * self.k if self.prologue_gate else self.k

    @property
    def weight_rows(self) -> int:
        """Rows of the weight that the columns of the result come from."""
        return self.n if self.gate is None else 2 * self.n

    @property
    def topk(self) -> int:
        """Experts that a token is assumed to be routed to."""
        return min(self.experts, USUAL_TOPK)

    def described(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        described: dict[str, Any] = _plain(self)
        return described

    def bytes_moved(self, m: int) -> int:
        """Each operand read and the result written, once; with experts over K or N, of those that ``m`` tokens are
        routed to, where each token draws ``topk`` of them; with experts over rows, of those that can have any."""
        out = m * (self.n * self.out_dtype.itemsize if self.quantised is None else self.quantised.row_bytes(self.n))
        a, b = m * self.a.row_bytes(self.a_width), self.weight_rows * self.b.row_bytes(self.k)
        if self.b.is_fp8:  # a scale for 128 rows of the weight
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
        """Multiplications and additions; with experts over K or N, of ``topk`` a token; masked, of all rows."""
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
