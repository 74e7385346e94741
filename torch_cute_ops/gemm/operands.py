"""Dataclasses that hold the tensors of one GEMM call. The launch functions of backends take these objects as
arguments."""

from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """Tensors of a GEMM without a gate in its epilogue. The tensors are contiguous, and aligned to 16 bytes.

    Attributes:
        a: activations: (M, K/2) uint8 FP4 codes, (M, K) float8_e4m3fn, or (M, K) in 16 bits. With a gate in the
            prologue, (M, 2K). In the masked layout, (E, rows per expert, K). If k is interleaved, (⌈K/256⌉, 256)
            replaces K.
        b: transposed view of the weight: (K/2, N) uint8 FP4 codes, or (K, N) float8_e4m3fn. With experts over rows, (E,
            K/2, N) or (E, K, N).
        a_scale, b_scale: block scales in the dtypes and layouts of the formats. FP8 scales of ``a`` form one column per
            block of k, and columns may be any distance apart (``formats.fp8.is_one_column``). Per-token scales are (M,
            1), or (E · rows per expert, 1) in the masked layout; if all rows share one scale, the stride is 0.
            Per-channel scales of ``b`` are (N,), and a per-tensor scale is (1,). Prepared scales of ``b`` have the
            shape of ``formats.prepared_scales``. MXFP8 scales are uint8, in any layout. ``a_scale`` is None for 16-bit
            activations. If the prologue quantises the activations, ``a_scale`` is the global scale, (1,) float32, or
            None.
        alpha, bias: factors and addends of the epilogue, as ``Epilogue`` describes them. With experts over K, ``alpha``
            is (M, E) float32 with any strides, and ``bias`` is (E, N).
        offsets: (E + 1,) int32, first row of each expert if experts divide the rows of ``a``, or None.
        counts: (E,) int32, number of rows of each expert if experts divide the rows of ``a``, or None.
        prefetch: (rows, bytes) uint8 matrix that a later launch reads, or None. A backend may ignore it.
        row_scale: (M,) float32 factors of the rows of the result, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor
    alpha: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    prefetch: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None


class GatedOperands(NamedTuple):
    """Tensors of a GEMM with a gate in which each expert owns columns of the result. All tensors are aligned to 16
    bytes, and all except ``routing`` are contiguous.

    The result is a pair: ``y``, (M, E·I) in 16 bits or (M, E·I/2) uint8 FP4 codes, and the block scales of ``y``, or
    None. A backend writes the elements and scales of all pairs whose routing factor is not zero (NaN is not zero). The
    backend writes zero to all padding of tiled scales, and leaves every other byte unchanged.

    Attributes:
        a: activations: (M, H/2) uint8 FP4 codes, or (M, H) in 16 bits.
        b: (E, H/2, 2·I) uint8 FP4 codes, the transposed view of a contiguous weight. In each expert, the columns of the
            gate precede the columns of up.
        a_scale: block scales of ``a``, a matrix (M, H), or None for 16 bits.
        b_scale: block scales of ``b``, a matrix (E·2·I, H). Linear scales have the shape (E, 2·I, H/block).
        alpha: (E,) or (E, 2) float32 factors, or None.
        bias: (E, 2·I) float32, or in the 16-bit dtype of ``GemmProblem.epilogue``, or None.
        routing: (M, E) float32 factors with any strides.
        global_scale: (1,) or (E,) float32 encode scale of the result, or None.
        swiglu_alpha, swiglu_beta, swiglu_limit: parameters of the gate ``"swiglu"``, or None for the gate ``"silu"``.
            The limit is +inf if calls pass no limit.
        row_scale: (M,) float32 factors of the rows of ``a``, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    routing: torch.Tensor
    global_scale: torch.Tensor | None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    swiglu_limit: float | None = None
    row_scale: torch.Tensor | None = None
