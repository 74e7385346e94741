"""Linear layers with weights in NVFP4 or MXFP4."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats import MXFP4, NVFP4, FP4Format, convert_scales, nvfp4_global_scale
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.formats.prepared_scales import prepare_scales
from torch_cute_ops.formats.scale_layout import FP4ScaleLayout
from torch_cute_ops.nn._base import (
    FP8_BLOCKS,
    Activations,
    Layout,
    Quantization,
    QuantLinear,
    float32_like,
    supported_weight,
)
from torch_cute_ops.nn._straight_through import RowsDecoder
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops._with_gemm import quantises_with_gemm
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.ops.fp4quant_mm_fp4 import fp4quant_mm_fp4
from torch_cute_ops.ops.mm_fp4 import mm_fp4
from torch_cute_ops.ops.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.ops.mm_fp8_fp4 import mm_fp8_fp4
from torch_cute_ops.ops.silu_mul_fp4quant_mm_fp4 import silu_mul_fp4quant_mm_fp4
from torch_cute_ops.ops.silu_mul_mm_fp4_weight_only import silu_mul_mm_fp4_weight_only
from torch_cute_ops.quantized import encode, fp8_scale_of, readable_values


class _FP4Linear(QuantLinear):
    """Base class of layers with an FP4 weight: the buffers are ``weight``, and ``weight_scale`` in the 128x4 layout.

    Attributes:
        fast_accum: argument of ``mm_fp8_fp4`` with activations ``"fp8_token"``. Set it to True on a layer, or on a
            class, to accumulate all of K in the tensor cores.
    """

    choices: ClassVar[tuple[str, ...]] = ("16bit", "fp4", "fp8", "fp8_token")
    multiples = (8, 32)
    format: ClassVar[FP4Format]
    fast_accum: bool = False

    weight_scale: Tensor
    prepared_scale: Tensor

    @classmethod
    def multiples_for(cls, activations: Activations) -> tuple[int, int]:
        """Return the required divisors of N and of K for these activations."""
        return (8, 64) if activations in ("fp8", "fp8_token") else cls.multiples

    def layout(self) -> Layout:
        """Return shape and dtype of each tensor of the weight, as in checkpoints and in ``state_dict``."""
        n, k = self.out_features, self.in_features
        return {
            "weight": ((n, k // 2), torch.uint8),
            "weight_scale": ((n, k // self.format.block_size), self.format.scale_dtype),
        }

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        return self._converted(tensor, "linear", "128x4") if name == "weight_scale" else tensor

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        return self._converted(tensor, "128x4", "linear") if name == "weight_scale" else tensor

    def _converted(self, scale: Tensor, source: FP4ScaleLayout, target: FP4ScaleLayout) -> Tensor:
        return convert_scales(scale, self.out_features, self.in_features, source, target)

    def _derive(self) -> None:
        if self.activations == "fp8_token":
            n, k, block_size = self.out_features, self.in_features, self.format.block_size
            self._set_derived("prepared_scale", prepare_scales(self.weight_scale, n, k, block_size=block_size))

    def _alpha(self) -> Tensor | None:
        """Return the GEMM's ``alpha``: one factor for all columns, one factor per column, or None for a factor of 1."""
        return None

    def _quantization(self) -> Quantization | None:
        if self.activations == "16bit":
            return None
        if self.activations == "fp4_token":
            return Quantization("fp4_token", {})
        if self.activations == "fp8":
            return FP8_BLOCKS
        if self.activations == "fp8_token":
            static = {} if self._activation_scale() is None else {"granularity": "tensor"}
            return Quantization("fp8", {**static, "interleaved": True})
        return Quantization("fp4", {"block_size": self.format.block_size})

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if len(operands) == 1:
            return self._multiply_16bit(operands[0], dtype, mm_fp4_weight_only, fp4quant_mm_fp4)
        weight, block, alpha = self.weight.t(), self.format.block_size, self._alpha()
        a, a_scale, *row_scale = operands
        options: dict[str, Any] = {"static_weight": True, "prefetch": self._prefetch_weight()}
        if self.activations == "fp8_token":
            options["fast_accum"] = self.fast_accum
            return mm_fp8_fp4(a, weight, a_scale, self.prepared_scale, alpha, self.bias, dtype, block, **options)
        if row_scale:
            options["row_scale"] = row_scale[0]
        multiply = mm_fp8_fp4 if self.activations == "fp8" else mm_fp4
        return multiply(a, weight, a_scale, self.weight_scale, alpha, self.bias, dtype, block, **options)

    def prologue_quantises(self, rows: Tensor) -> bool:
        """Return True for few 16-bit rows, on a GPU for which a single kernel quantises and multiplies them."""
        return self._quantises(rows, gated=False)

    def prologue_gates(self, rows: Tensor) -> bool:
        """Return True if the layer's activations are in 16 bits, or if ``rows`` is a single row and the GPU has one
        kernel that gates, quantises and multiplies."""
        return self.activations == "16bit" or self._quantises(rows, gated=True)

    def _quantises(self, rows: Tensor, *, gated: bool) -> bool:
        # In compiled models, the pass of ``integrations.inductor`` decides whether the GEMM quantises, because the pass
        # knows whether another op reads the codes.
        if self.activations != "fp4" or rows.dtype not in SIXTEEN_BIT or torch.compiler.is_compiling():
            return False
        return quantises_with_gemm(len(rows), rows.device, self.format.block_size, gated=gated)

    def _gated_product(self, operands: tuple[Tensor, ...], dtype: torch.dtype, gate: Gate) -> Tensor:
        if self.activations in ("fp4_token", "fp8", "fp8_token"):
            return super()._gated_product(operands, dtype, gate)
        ops = silu_mul_mm_fp4_weight_only, silu_mul_fp4quant_mm_fp4
        return self._multiply_16bit(operands[0], dtype, *ops, gate=gate)

    def _multiply_16bit(
        self,
        a: Tensor,
        dtype: torch.dtype,
        weight_only: Callable[..., Tensor],
        quantising: Callable[..., Tensor],
        **more: Any,
    ) -> Tensor:
        """Multiply 16-bit rows ``a`` by the weight. Call the op ``quantising`` for FP4 activations, or else the op
        ``weight_only``. ``more`` contains additional arguments of the op."""
        out_dtype, block = None if dtype == a.dtype else dtype, self.format.block_size
        operands = (a, self.weight.t(), self.weight_scale)
        epilogue = {"alpha": self._alpha(), "bias": self.bias, "out_dtype": out_dtype}
        options = {**epilogue, "block_size": block, "static_weight": True, "prefetch": self._prefetch_weight()} | more
        if self.activations == "16bit":
            return weight_only(*operands, **options)
        return quantising(*operands, self._activation_scale(), **options)

    def _decoded(self) -> Tensor:
        """Return the codes times the block scales, in float32, without global scales."""
        return fp4_dequantize(
            self.weight, self.weight_scale, out_dtype=torch.float32, block_size=self.format.block_size
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), decoded from codes and scales and rounded to ``dtype``."""
        return self._decoded().to(dtype)

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes a range of the weight's rows as :meth:`dequantize` does."""
        weight, scale, factor = self.weight, self._stored("weight_scale", self.weight_scale), self._row_factor()
        options: dict[str, Any] = {"block_size": self.format.block_size, "out_dtype": torch.float32}

        def decode(begin: int, end: int) -> Tensor:
            rows = fp4_dequantize(weight[begin:end], scale[begin:end], scale_layout="linear", **options)
            return (rows if factor is None else rows * factor[begin:end, None]).to(dtype)

        return decode

    def _row_factor(self) -> Tensor | None:
        """Return the factor of each row of the decoded weight, (N,), or None if the format has none."""
        return None


class NVFP4Linear(_FP4Linear):
    """A linear layer with a weight in NVFP4; arguments and errors are as for :class:`QuantLinear`.

    Activations:

    - ``"16bit"`` (``"auto"``): ``mm_fp4_weight_only``.
    - ``"fp4"``: ``fp4_quantize`` and ``mm_fp4``, with an ``input_scale`` from calibration or the checkpoint.
    - ``"fp4_token"``: ``fp4_quantize_per_token``, which computes a scale per row, and ``mm_fp4``. It needs no
      calibration, and ignores an ``input_scale``.
    - ``"fp8"``: ``fp8_quantize`` with one scale per 128 elements of a row, and ``mm_fp8_fp4``, which rounds the weight
      to FP8; K is a multiple of 64.
    - ``"fp8_token"``: ``fp8_quantize`` with one scale per row, or with a calibrated ``input_scale``, and ``mm_fp8_fp4``
      with ``fast_accum=False`` unless the attribute ``fast_accum`` is True; K is a multiple of 64. The buffer
      ``prepared_scale`` is derived from ``weight_scale`` when tensors are loaded, and is not part of a state dict.

    Buffers, as in a state dict: ``weight`` uint8 (N, K/2); ``weight_scale`` e4m3 (N, K/16); ``weight_scale_2`` float32
    (number of parts,); ``input_scale`` float32 (1,). As in ModelOpt, decoded numbers are multiplied by
    ``weight_scale_2`` and ``input_scale``.
    """

    scheme = "nvfp4"
    choices = ("16bit", "fp4", "fp4_token", "fp8", "fp8_token")
    format = NVFP4

    weight_scale_2: Tensor
    input_scale: Tensor
    alpha: Tensor
    input_global_scale: Tensor

    def _needs_input_scale(self) -> bool:
        return self.activations == "fp4"

    def layout(self) -> Layout:
        """Return shape and dtype of each tensor of the weight, as in checkpoints and in ``state_dict``."""
        layout = {**super().layout(), "weight_scale_2": ((len(self.parts),), torch.float32)}
        if self.has_input_scale:
            layout["input_scale"] = ((1,), torch.float32)
        return layout

    def _derive(self) -> None:
        super()._derive()
        alpha = self.weight_scale_2
        if self.activations == "fp4":
            self._set_derived("input_global_scale", self.input_scale.reciprocal())
            alpha = alpha * self.input_scale
        # Use one factor per column even if all parts have equal factors. A comparison of the factors would wait for the
        # GPU, and layers of equal sizes might be compiled differently.
        if len(self.parts) > 1:
            alpha = self._to_rows(alpha)
        if alpha is not self.weight_scale_2:
            self._set_derived("alpha", alpha)

    def _alpha(self) -> Tensor:
        return self.alpha if "alpha" in self._buffers else self.weight_scale_2

    def _activation_scale(self) -> Tensor | None:
        if self.activations == "fp8_token" and self.has_input_scale:
            return self.input_scale
        return self.input_global_scale if self.activations == "fp4" else None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), computed in fp32 from codes and scales and rounded once to ``dtype``."""
        return (self._decoded() * self._row_factor().unsqueeze(1)).to(dtype)

    def _row_factor(self) -> Tensor:
        return self._to_rows(self.weight_scale_2)

    @classmethod
    def from_tensors(
        cls,
        weight: Tensor,
        weight_scale: Tensor,
        weight_scale_2: Tensor,
        *,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
        parts: Sequence[int] | None = None,
        activations: Activations = "auto",
    ) -> Self:
        """Build a layer from the tensors of a checkpoint; see :class:`QuantLinear`.

        Args:
            weight: (N, K/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
            weight_scale: (N, K/16) float8_e4m3fn, linear.
            weight_scale_2: float32, one element, or one per part, by which decoded weights are multiplied, as in
                ModelOpt. It is 1 / ``weight_global_scale`` of compressed-tensors.
            input_scale: float32, one element, by which decoded activations are multiplied, as in ModelOpt.
                ``activations="fp4"`` needs it. With ``activations="fp8_token"`` it is the scale of FP8 activations,
                amax / 448, and ``None`` means one scale per row; scales of FP4 activations are amax / 2688.
            bias, parts, activations: as in :class:`QuantLinear`.

        Raises:
            ValueError: if ``weight_scale_2`` is negative or not finite, or is 0 and ``weight`` is not. The value is
                checked on a CPU, and on a GPU if ``TORCH_CUTE_OPS_CHECK=1``.
        """
        scales = readable_values(weight_scale_2)
        wrong = [value for value in scales if not 0.0 <= value < math.inf]
        # Producers write 0 for a weight whose elements are all zero.
        if wrong or (scales == [0.0] and (weight.view(torch.uint8) & 0x77).any()):
            raise ValueError(
                f"{cls.__name__}: weight_scale_2 contains {(wrong or scales)[0]}; expected positive, finite numbers"
            )
        tensors = {"weight": weight, "weight_scale": weight_scale, "weight_scale_2": weight_scale_2.reshape(-1)}
        if input_scale is not None:
            tensors["input_scale"] = input_scale.reshape(-1)
        return cls._build(2 * weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        *,
        activations: Activations = "auto",
        amax: Tensor | float | None = None,
        input_amax: Tensor | float | None = None,
    ) -> Self:
        """Quantise a linear layer.

        Args:
            linear: layer in bfloat16, float16 or float32.
            activations: argument of the class.
            amax: largest magnitude that the global scale covers, for layers that share a global scale; ``None`` uses
                the largest magnitude of this weight.
            input_amax: largest magnitude of the input, from calibration; larger values saturate. ``activations="fp4"``
                needs it. ``activations="fp8_token"`` without it uses one scale per row.

        Raises:
            ValueError: for unsupported sizes or activations, or a missing ``input_amax``.
        """
        weight = supported_weight(cls, linear, activations)
        if cls._chosen(activations) == "fp4" and input_amax is None:
            raise ValueError(f"{cls.__name__}: activations='fp4' needs input_amax, from calibration")
        amax = None if amax is None else float32_like(amax, weight)
        codes, scale, global_scale = encode(weight, cls.scheme, amax, "linear")
        assert global_scale is not None
        input_scale = None
        if input_amax is not None:
            largest = float32_like(input_amax, weight)
            is_fp8 = cls._chosen(activations) == "fp8_token"
            input_scale = fp8_scale_of(largest) if is_fp8 else nvfp4_global_scale(largest).reciprocal()
        return cls.from_tensors(
            codes,
            scale,
            global_scale.reciprocal(),
            input_scale=input_scale,
            bias=linear.bias,
            activations=activations,
        )

    def _rows_of_parts(self, name: str) -> list[int]:
        return [1] * len(self.parts) if name == "weight_scale_2" else super()._rows_of_parts(name)


class MXFP4Linear(_FP4Linear):
    """A linear layer with a weight in MXFP4; arguments and errors are as for :class:`QuantLinear`.

    Activations:

    - ``"16bit"`` (``"auto"``): ``mm_fp4_weight_only``.
    - ``"fp4"``: ``fp4_quantize`` and ``mm_fp4``.
    - ``"fp8"``: ``fp8_quantize`` with a scale for each 128 elements of a row, and ``mm_fp8_fp4``; K is a multiple of
      64.
    - ``"fp8_token"``: ``fp8_quantize`` with a scale for each row, and ``mm_fp8_fp4``, as in :class:`NVFP4Linear`.

    Buffers, as in a state dict: ``weight`` uint8 (N, K/2); ``weight_scale`` ue8m0 bytes, uint8 (N, K/32).
    """

    scheme = "mxfp4"
    format = MXFP4

    @classmethod
    def from_tensors(
        cls,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        bias: Tensor | None = None,
        parts: Sequence[int] | None = None,
        activations: Activations = "auto",
    ) -> Self:
        """Build a layer from the tensors of a checkpoint; see :class:`QuantLinear`.

        Args:
            weight: (N, K/2) uint8, two e2m1 codes per byte, element 0 in the low nibble.
            weight_scale: (N, K/32) uint8, linear; each byte stands for 2^(byte - 127).
            bias, parts, activations: as in :class:`QuantLinear`.
        """
        tensors = {"weight": weight, "weight_scale": weight_scale}
        return cls._build(2 * weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(cls, linear: nn.Linear, *, activations: Activations = "auto") -> Self:
        """Quantise a linear layer in bfloat16, float16 or float32.

        Raises:
            ValueError: for unsupported sizes or activations.
        """
        weight = supported_weight(cls, linear, activations)
        codes, scale, _ = encode(weight, cls.scheme, scale_layout="linear")
        return cls.from_tensors(codes, scale, bias=linear.bias, activations=activations)
