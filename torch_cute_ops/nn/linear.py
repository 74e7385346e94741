"""Linear layers with weights in NVFP4, MXFP4, and FP8 with scales of blocks, rows or the tensor."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats import FP8_BLOCK128, MXFP4, NVFP4, FP4Format, convert_scales, nvfp4_global_scale
from torch_cute_ops.formats.fp4 import E4M3_MAX, encode_e4m3
from torch_cute_ops.formats.scale_layout import FP4ScaleLayout
from torch_cute_ops.nn._base import Activations, Layout, Quantization, QuantLinear
from torch_cute_ops.nn._scaled_mm import scaled_mm
from torch_cute_ops.ops._backend_path import SIXTEEN_BIT
from torch_cute_ops.ops._with_gemm import quantises_with_gemm
from torch_cute_ops.ops.fp4_dequantize import fp4_dequantize
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp4quant_mm_fp4 import fp4quant_mm_fp4
from torch_cute_ops.ops.mm_fp4 import mm_fp4
from torch_cute_ops.ops.mm_fp4_weight_only import mm_fp4_weight_only
from torch_cute_ops.ops.mm_fp8_block import mm_fp8_block
from torch_cute_ops.ops.mm_fp8_fp4 import mm_fp8_fp4
from torch_cute_ops.ops.silu_mul_fp4quant_mm_fp4 import silu_mul_fp4quant_mm_fp4
from torch_cute_ops.ops.silu_mul_mm_fp4_weight_only import silu_mul_mm_fp4_weight_only

_BLOCK = FP8_BLOCK128.block_size
_FP8_BLOCKS = Quantization("fp8", {"granularity": "block128", "scale_layout": "column"})
"""A scale for each 128 elements of a row."""


class _FP4Linear(QuantLinear):
    """A layer with its weight in FP4: ``weight`` and ``weight_scale``, held in 128x4."""

    choices = ("16bit", "fp4", "fp8")
    multiples = (8, 32)
    format: ClassVar[FP4Format]

    weight_scale: Tensor

    @classmethod
    def multiples_for(cls, activations: Activations) -> tuple[int, int]:
        """What N and K are multiples of, with these activations."""
        return (8, 64) if activations == "fp8" else cls.multiples

    def layout(self) -> Layout:
        """Shape and dtype of each tensor of the weight, as checkpoints hold them and ``state_dict`` has them."""
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

    def _alpha(self) -> Tensor | None:
        """The factor of the result, or of each of its columns."""
        return None

    def _quantization(self) -> Quantization | None:
        if self.activations == "16bit":
            return None
        if self.activations == "fp8":
            return _FP8_BLOCKS
        return Quantization("fp4", {"block_size": self.format.block_size})

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if len(operands) == 1:
            return self._of_16_bit(operands[0], dtype, mm_fp4_weight_only, fp4quant_mm_fp4)
        weight, block, alpha = self.weight.t(), self.format.block_size, self._alpha()
        a, a_scale = operands
        multiply = mm_fp8_fp4 if self.activations == "fp8" else mm_fp4
        how: dict[str, Any] = {"static_weight": True, "prefetch": self._prefetched()}
        return multiply(a, weight, a_scale, self.weight_scale, alpha, self.bias, dtype, block, **how)

    def quantises_input(self, rows: Tensor) -> bool:
        """Of few rows in 16 bits, where the GPU has one launch for both."""
        return self._quantises(rows, gated=False)

    def gates_input(self, rows: Tensor) -> bool:
        """Any in 16 bits where the activations have these; else one row, as ``quantises_input``."""
        return self.activations == "16bit" or self._quantises(rows, gated=True)

    def _quantises(self, rows: Tensor, *, gated: bool) -> bool:
        # In compiled models the pass of ``integrations.inductor`` sees to it, which knows what else reads the codes.
        if self.activations != "fp4" or rows.dtype not in SIXTEEN_BIT or torch.compiler.is_compiling():
            return False
        return quantises_with_gemm(len(rows), rows.device, self.format.block_size, gated=gated)

    def _gated_product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if self.activations == "fp8":
            return super()._gated_product(operands, dtype)
        return self._of_16_bit(operands[0], dtype, silu_mul_mm_fp4_weight_only, silu_mul_fp4quant_mm_fp4)

    def _of_16_bit(
        self, a: Tensor, dtype: torch.dtype, weight_only: Callable[..., Tensor], quantising: Callable[..., Tensor]
    ) -> Tensor:
        """What an op makes of ``a``, in 16 bits: the one that multiplies it as it is, or the one that quantises it."""
        out_dtype, block = None if dtype == a.dtype else dtype, self.format.block_size
        operands = (a, self.weight.t(), self.weight_scale)
        epilogue = {"alpha": self._alpha(), "bias": self.bias, "out_dtype": out_dtype}
        how = {**epilogue, "block_size": block, "static_weight": True, "prefetch": self._prefetched()}
        if self.activations == "16bit":
            return weight_only(*operands, **how)
        return quantising(*operands, self._activation_scale(), **how)

    def _decoded(self) -> Tensor:
        """Codes times block scales, float32."""
        return fp4_dequantize(
            self.weight, self.weight_scale, out_dtype=torch.float32, block_size=self.format.block_size
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that the codes and scales stand for, rounded to ``dtype``."""
        return self._decoded().to(dtype)


class NVFP4Linear(_FP4Linear):
    """A linear layer with its weight in NVFP4; arguments and errors are those of :class:`QuantLinear`.

    Activations: ``"16bit"`` (``mm_fp4_weight_only``), which is ``"auto"``; ``"fp4"`` (``fp4_quantize`` and ``mm_fp4``),
    which takes an ``input_scale`` from calibration or the checkpoint; or ``"fp8"`` (``fp8_quantize`` with a scale for
    each 128 elements of a row, and ``mm_fp8_fp4``, which rounds the weight once more, to FP8; K is a multiple of 64).

    Buffers, as in a state dict: ``weight`` uint8 (N, K/2); ``weight_scale`` e4m3 (N, K/16); ``weight_scale_2`` float32,
    (number of parts,), and ``input_scale`` float32 (1,), which multiply decoded numbers, as ModelOpt's of these names.
    """

    scheme = "nvfp4"
    format = NVFP4

    weight_scale_2: Tensor
    input_scale: Tensor
    alpha: Tensor
    input_global_scale: Tensor

    def _needs_input_scale(self) -> bool:
        return self.activations == "fp4"

    def layout(self) -> Layout:
        """Shape and dtype of each tensor of the weight, as checkpoints hold them and ``state_dict`` has them."""
        layout = {**super().layout(), "weight_scale_2": ((len(self.parts),), torch.float32)}
        if self.has_input_scale:
            layout["input_scale"] = ((1,), torch.float32)
        return layout

    def _derive(self) -> None:
        alpha = self.weight_scale_2
        if self.activations == "fp4":
            self._set_derived("input_global_scale", self.input_scale.reciprocal())
            alpha = alpha * self.input_scale
        # Parts have a column of factors also where these are equal: to find out would mean waiting for the GPU, and
        # layers of one form are then one form to a compiler.
        if len(self.parts) > 1:
            alpha = self._of_rows(alpha)
        if alpha is not self.weight_scale_2:
            self._set_derived("alpha", alpha)

    def _alpha(self) -> Tensor:
        return self.alpha if "alpha" in self._buffers else self.weight_scale_2

    def _activation_scale(self) -> Tensor | None:
        return self.input_global_scale if self.activations == "fp4" else None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that the codes and scales stand for: computed in fp32, rounded once to ``dtype``."""
        return (self._decoded() * self._of_rows(self.weight_scale_2).unsqueeze(1)).to(dtype)

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
        """The layer that has these tensors, on their device.

        Args:
            weight: (N, K/2) uint8: two e2m1 codes a byte, element 0 in the low nibble. It is not copied.
            weight_scale: (N, K/16) float8_e4m3fn, linear.
            weight_scale_2: float32, one element, or one for each part: what multiplies decoded numbers, as ModelOpt's;
                1 / ``weight_global_scale`` of compressed-tensors.
            input_scale: float32, one element: the same of activations, as ModelOpt's.
            bias: (N,), float32 or the dtype of the activations.
            parts: rows of each layer that is merged in this one.
            activations: as of the class.

        Raises:
            ValueError: for a wrong shape, or without the ``input_scale`` that ``activations="fp4"`` needs.
            TypeError: for a wrong dtype.
        """
        tensors = {"weight": weight, "weight_scale": weight_scale, "weight_scale_2": weight_scale_2.reshape(-1)}
        if input_scale is not None:
            tensors["input_scale"] = input_scale.reshape(-1)
        return cls._of(2 * weight.shape[-1], tensors, bias, parts, activations)

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
            linear: bfloat16, float16 or float32.
            activations: as of the class.
            amax: the largest magnitude that the weight's scales shall reach: of several layers that share a global
                scale. ``None``: this weight's own.
            input_amax: the largest magnitude of the input, from calibration; larger values saturate.

        Raises:
            ValueError: for sizes that the ops do not take, or without the ``input_amax`` that ``activations="fp4"``
                needs.
        """
        weight = _weight_of(cls, linear, activations)
        if cls._chosen(activations) == "fp4" and input_amax is None:
            raise ValueError(f"{cls.__name__}: activations='fp4' needs input_amax, from calibration")
        global_scale = nvfp4_global_scale(weight.abs().amax() if amax is None else _as_tensor(amax, weight))
        codes, scale = fp4_quantize(weight, global_scale, scale_layout="linear")
        return cls.from_tensors(
            codes,
            scale,
            global_scale.reciprocal(),
            input_scale=None if input_amax is None else nvfp4_global_scale(_as_tensor(input_amax, weight)).reciprocal(),
            bias=linear.bias,
            activations=activations,
        )

    def _rows_of_parts(self, name: str) -> list[int]:
        return [1] * len(self.parts) if name == "weight_scale_2" else super()._rows_of_parts(name)


class MXFP4Linear(_FP4Linear):
    """A linear layer with its weight in MXFP4; arguments and errors are those of :class:`QuantLinear`.

    Activations: ``"16bit"`` (``mm_fp4_weight_only``), which is ``"auto"``; ``"fp4"`` (``fp4_quantize`` and ``mm_fp4``);
    or ``"fp8"`` (``fp8_quantize`` with a scale for each 128 elements of a row, and ``mm_fp8_fp4``; K is a multiple of
    64).

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
        """The layer that has these tensors, on their device.

        Args:
            weight: (N, K/2) uint8: two e2m1 codes a byte, element 0 in the low nibble. It is not copied.
            weight_scale: (N, K/32) uint8, linear: 2^(byte - 127).
            bias, parts, activations: as of :meth:`NVFP4Linear.from_tensors`.

        Raises:
            ValueError: for a wrong shape.
            TypeError: for a wrong dtype.
        """
        tensors = {"weight": weight, "weight_scale": weight_scale}
        return cls._of(2 * weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(cls, linear: nn.Linear, *, activations: Activations = "auto") -> Self:
        """Quantise a linear layer of bfloat16, float16 or float32.

        Raises:
            ValueError: for sizes or activations that the ops do not take.
        """
        codes, scale = fp4_quantize(
            _weight_of(cls, linear, activations), block_size=cls.format.block_size, scale_layout="linear"
        )
        return cls.from_tensors(codes, scale, bias=linear.bias, activations=activations)


class FP8BlockLinear(QuantLinear):
    """A linear layer with its weight in FP8, a scale for 128 × 128 elements; arguments and errors are those of
    :class:`QuantLinear`.

    Activations: ``"fp8"``, with a scale for each 128 elements of a row (``fp8_quantize`` and ``mm_fp8_block``).

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale_inv`` float32 (⌈N/128⌉, ⌈K/128⌉), which
    multiplies, as DeepSeek-V3's of this name. Of the parts of a merged layer each but the last has a multiple of 128
    rows.
    """

    scheme = "fp8_block"
    choices = ("fp8",)
    multiples = (8, 64)

    weight_scale_inv: Tensor

    def layout(self) -> Layout:
        """Shape and dtype of each tensor of the weight, as checkpoints hold them and ``state_dict`` has them."""
        n, k = self.out_features, self.in_features
        return {
            "weight": ((n, k), torch.float8_e4m3fn),
            "weight_scale_inv": ((_blocks(n), _blocks(k)), torch.float32),
        }

    def _reason_unfit_parts(self) -> str | None:
        if any(rows % _BLOCK for rows in self.parts[:-1]):
            return f"parts is {self.parts}; expected multiples of {_BLOCK} but for the last: parts share no block"
        return super()._reason_unfit_parts()

    def _quantization(self) -> Quantization:
        return _FP8_BLOCKS

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, a_scale = operands
        how: dict[str, Any] = {"out_dtype": dtype, "static_weight": True, "prefetch": self._prefetched()}
        return mm_fp8_block(a, self.weight.t(), a_scale, self.weight_scale_inv, bias=self.bias, **how)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that elements and scales stand for: computed in fp32, rounded once to ``dtype``."""
        scale = self.weight_scale_inv.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        return (self.weight.float() * scale[: self.out_features, : self.in_features]).to(dtype)

    @classmethod
    def from_tensors(
        cls,
        weight: Tensor,
        weight_scale_inv: Tensor,
        *,
        bias: Tensor | None = None,
        parts: Sequence[int] | None = None,
        activations: Activations = "auto",
    ) -> Self:
        """The layer that has these tensors, on their device.

        Args:
            weight: (N, K) float8_e4m3fn. It is not copied.
            weight_scale_inv: (⌈N/128⌉, ⌈K/128⌉) float32, which multiplies.
            bias, parts, activations: as of :meth:`NVFP4Linear.from_tensors`.

        Raises:
            ValueError: for a wrong shape.
            TypeError: for a wrong dtype.
        """
        tensors = {"weight": weight, "weight_scale_inv": weight_scale_inv}
        return cls._of(weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(cls, linear: nn.Linear, *, activations: Activations = "auto") -> Self:
        """Quantise a linear layer of bfloat16, float16 or float32: a block's scale is its largest magnitude / 448.

        Raises:
            ValueError: for sizes or activations that the ops do not take.
        """
        weight = _weight_of(cls, linear).float()
        n, k = weight.shape
        padded = nn.functional.pad(weight, (0, -k % _BLOCK, 0, -n % _BLOCK))
        blocks = padded.view(_blocks(n), _BLOCK, _blocks(k), _BLOCK)
        scale = _scale_of(blocks.abs().amax((1, 3)))
        elements = encode_e4m3(blocks / scale[:, None, :, None]).view(padded.shape)[:n, :k].contiguous()
        return cls.from_tensors(elements, scale, bias=linear.bias, activations=activations)

    def _rows_of_parts(self, name: str) -> list[int]:
        rows = super()._rows_of_parts(name)
        return [*map(_blocks, rows)] if name == "weight_scale_inv" else rows


class _FP8Linear(QuantLinear):
    """A weight in FP8 under a scale of the tensor or of each row, multiplied by torch's own scaled GEMM."""

    choices = ("fp8",)
    multiples = (1, 1)
    can_prefetch = False
    _flat: ClassVar[tuple[int, ...]]
    """What scales of any number are reshaped to."""

    weight_scale: Tensor
    input_scale: Tensor

    def layout(self) -> Layout:
        """Shape and dtype of each tensor of the weight, as checkpoints hold them and ``state_dict`` has them."""
        layout: Layout = {
            "weight": ((self.out_features, self.in_features), torch.float8_e4m3fn),
            "weight_scale": (self._scale_shape(), torch.float32),
        }
        if self.has_input_scale:
            layout["input_scale"] = ((1,), torch.float32)
        return layout

    def _scale_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _row_scale(self) -> Tensor:
        """The scale of each row of the weight, (N, 1)."""
        raise NotImplementedError

    def _factor(self) -> Tensor:
        """What multiplies the result, (1,), or each of its columns, (1, N)."""
        return self._row_scale().t()

    def _quantization(self) -> Quantization:
        return Quantization("fp8", {"granularity": "tensor"} if self.has_input_scale else {})

    def _activation_scale(self) -> Tensor | None:
        return self.input_scale if self.has_input_scale else None

    def _quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        if rows.shape[1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: x has rows of {rows.shape[1]}; expected {self.in_features}")
        return super()._quantized(rows)

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, a_scale = operands
        return scaled_mm(a, self.weight, a_scale, self._factor(), self.bias, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) that elements and scales stand for: computed in fp32, rounded once to ``dtype``."""
        return (self.weight.float() * self._row_scale()).to(dtype)

    @classmethod
    def _amax(cls, weight: Tensor) -> Tensor:
        """The largest magnitude of what shares a scale, in the shape of ``weight_scale``."""
        raise NotImplementedError

    @classmethod
    def from_tensors(
        cls,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
        parts: Sequence[int] | None = None,
        activations: Activations = "auto",
    ) -> Self:
        """The layer that has these tensors, on their device.

        Args:
            weight: (N, K) float8_e4m3fn. It is not copied.
            weight_scale: float32, which multiplies: one element, or one for each part; of channels (N, 1) or (N,).
            input_scale: float32, one element: the same of activations. ``None``: each row of them has its own.
            bias, parts, activations: as of :meth:`NVFP4Linear.from_tensors`.

        Raises:
            ValueError: for a wrong shape.
            TypeError: for a wrong dtype.
        """
        tensors = {"weight": weight, "weight_scale": weight_scale.reshape(cls._flat)}
        if input_scale is not None:
            tensors["input_scale"] = input_scale.reshape(-1)
        return cls._of(weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, *, activations: Activations = "auto", input_amax: Tensor | float | None = None
    ) -> Self:
        """Quantise a linear layer: a scale is the largest magnitude, of the weight or of its row, / 448.

        Args:
            linear: bfloat16, float16 or float32.
            activations: as of the class.
            input_amax: the largest magnitude of the input, from calibration; larger values saturate. ``None``: each row
                of activations gets a scale of its own.

        Raises:
            ValueError: for activations that the class does not have.
        """
        weight = _weight_of(cls, linear).float()
        scale = _scale_of(cls._amax(weight))
        return cls.from_tensors(
            encode_e4m3(weight / scale),
            scale,
            input_scale=None if input_amax is None else _scale_of(_as_tensor(input_amax, weight)),
            bias=linear.bias,
            activations=activations,
        )


class FP8TensorLinear(_FP8Linear):
    """A linear layer with its weight in FP8 under one scale; arguments and errors are those of :class:`QuantLinear`.

    Activations: ``"fp8"``, with an ``input_scale`` from calibration under that (static), without one under a scale of
    each row (dynamic). ``fp8_quantize`` quantises, and torch's own scaled GEMM multiplies:
    ``torch.nn.functional.scaled_mm``, or ``torch._scaled_mm`` in a torch that has only that, and in compiled code. On a
    GPU it chooses a kernel by the number of rows too, so that a row's result may depend on the batch in its last bits.

    On a CPU, on a GPU without FP8, and where torch's GEMM refuses (N or K is no multiple of 16, the result is float32,
    or the bias has another dtype than the result), elements are decoded in each call and multiplied in float32, on a
    CPU in float64. That takes time, and memory for the decoded weight.

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale`` float32, (number of parts,), and
    ``input_scale`` float32 (1,), which multiply, as ModelOpt's and compressed-tensors' of these names.
    """

    scheme = "fp8_tensor"
    _flat = (-1,)

    row_scale: Tensor

    def _scale_shape(self) -> tuple[int, ...]:
        return (len(self.parts),)

    def _rows_of_parts(self, name: str) -> list[int]:
        return [1] * len(self.parts) if name == "weight_scale" else super()._rows_of_parts(name)

    def _derive(self) -> None:
        self._set_derived("row_scale", self._of_rows(self.weight_scale).unsqueeze(1))

    def _row_scale(self) -> Tensor:
        return self.row_scale

    def _factor(self) -> Tensor:
        # Scales of rows on one side take scales of rows on the other.
        return self.weight_scale if self.has_input_scale and len(self.parts) == 1 else super()._factor()

    @classmethod
    def _amax(cls, weight: Tensor) -> Tensor:
        return weight.abs().amax().reshape(1)


class FP8ChannelLinear(_FP8Linear):
    """A linear layer with its weight in FP8, a scale for each row (output channel); arguments and errors are those of
    :class:`QuantLinear`.

    Activations, and what multiplies where, are those of :class:`FP8TensorLinear`.

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale`` float32 (N, 1), and ``input_scale``
    float32 (1,), which multiply, as compressed-tensors' of these names.
    """

    scheme = "fp8_channel"
    _flat = (-1, 1)

    def _scale_shape(self) -> tuple[int, ...]:
        return self.out_features, 1

    def _row_scale(self) -> Tensor:
        return self.weight_scale

    @classmethod
    def _amax(cls, weight: Tensor) -> Tensor:
        return weight.abs().amax(1, keepdim=True)


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _scale_of(amax: Tensor) -> Tensor:
    """The FP8 scale under which ``amax`` is the largest element."""
    scale = amax / E4M3_MAX
    return torch.where(scale == 0, 1.0, scale)


def _weight_of(cls: type[QuantLinear], linear: nn.Linear, activations: Activations = "auto") -> Tensor:
    reason = cls.reason_unsupported(linear.out_features, linear.in_features, activations)
    if reason is not None:
        raise ValueError(f"{cls.__name__}: {reason}")
    return linear.weight.detach()


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=like.device)
