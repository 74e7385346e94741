"""Linear layers with weights in FP8: one scale per block of 128 × 128, per 32 elements (MXFP8), per row, or per
tensor."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats.fp4 import encode_e4m3
from torch_cute_ops.formats.fp8 import MXFP8, float32_scales
from torch_cute_ops.formats.scale_layout import convert_scales, layout_of_operand
from torch_cute_ops.nn._base import (
    FP8_BLOCKS,
    Activations,
    Layout,
    Quantization,
    QuantLinear,
    float32_like,
    supported_weight,
)
from torch_cute_ops.nn._scaled_mm import scaled_mm
from torch_cute_ops.nn._straight_through import RowsDecoder
from torch_cute_ops.ops._backend_path import gemm_package
from torch_cute_ops.ops._fp8_gemm import FP8_K_MULTIPLE, FP8_N_MULTIPLE
from torch_cute_ops.ops.mm_fp8 import mm_fp8
from torch_cute_ops.ops.mm_fp8_block import mm_fp8_block
from torch_cute_ops.quantized import (
    FP8_BLOCK,
    decode_fp8_blocks,
    decode_mxfp8,
    encode,
    fp8_blocks,
    fp8_scale_of,
)
from torch_cute_ops.reference.mm_fp8_block import linear_mx_scales


class FP8BlockLinear(QuantLinear):
    """A linear layer with an FP8 weight and one scale per 128 × 128 block; arguments and errors are as for
    :class:`QuantLinear`.

    Activations: ``"fp8"``, with one scale per 128 elements of a row (``fp8_quantize`` and ``mm_fp8_block``).

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale_inv`` float32 (⌈N/128⌉, ⌈K/128⌉). The
    name ``weight_scale_inv`` is DeepSeek-V3's, but decoding multiplies by this scale. In a merged layer, every part
    except the last has a multiple of 128 rows.
    """

    scheme = "fp8_block"
    choices = ("fp8",)
    multiples = (8, 64)

    weight_scale_inv: Tensor

    def layout(self) -> Layout:
        """Return shape and dtype of each tensor of the weight, as in checkpoints and in ``state_dict``."""
        n, k = self.out_features, self.in_features
        return {
            "weight": ((n, k), torch.float8_e4m3fn),
            "weight_scale_inv": ((fp8_blocks(n), fp8_blocks(k)), torch.float32),
        }

    def _reason_unfit_parts(self) -> str | None:
        if any(rows % FP8_BLOCK for rows in self.parts[:-1]):
            return (
                f"parts is {self.parts}; expected multiples of {FP8_BLOCK}, except for the last: parts share no block"
            )
        return super()._reason_unfit_parts()

    def _quantization(self) -> Quantization:
        return FP8_BLOCKS

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, a_scale = operands
        options: dict[str, Any] = {"out_dtype": dtype, "static_weight": True, "prefetch": self._prefetch_weight()}
        return mm_fp8_block(a, self.weight.t(), a_scale, self.weight_scale_inv, bias=self.bias, **options)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), computed in fp32 from elements and scales and rounded once to ``dtype``."""
        return decode_fp8_blocks(self.weight, self.weight_scale_inv, dtype)

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes a range of the weight's rows as :meth:`dequantize` does."""
        weight, scale = self.weight, self.weight_scale_inv

        def decode(begin: int, end: int) -> Tensor:
            return decode_fp8_blocks(weight[begin:end], scale[begin // FP8_BLOCK : fp8_blocks(end)], dtype)

        return decode

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
        """Build a layer from the tensors of a checkpoint; see :class:`QuantLinear`.

        Args:
            weight: (N, K) float8_e4m3fn.
            weight_scale_inv: (⌈N/128⌉, ⌈K/128⌉) float32 or float8_e8m0fnu, factors of the decoded weight. The layer
                stores float8_e8m0fnu as float32.
            bias, parts, activations: as in :class:`QuantLinear`.
        """
        tensors = {"weight": weight, "weight_scale_inv": float32_scales(weight_scale_inv)}
        return cls._build(weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(cls, linear: nn.Linear, *, activations: Activations = "auto") -> Self:
        """Quantise a linear layer in bfloat16, float16 or float32. A block's scale is its largest magnitude / 448.

        Raises:
            ValueError: for unsupported sizes or activations.
        """
        elements, scale, _ = encode(supported_weight(cls, linear), cls.scheme)
        return cls.from_tensors(elements, scale, bias=linear.bias, activations=activations)

    def _rows_of_parts(self, name: str) -> list[int]:
        rows = super()._rows_of_parts(name)
        return [*map(fp8_blocks, rows)] if name == "weight_scale_inv" else rows


class MXFP8Linear(QuantLinear):
    """A linear layer with a weight in MXFP8; arguments and errors are as for :class:`QuantLinear`.

    Activations: ``"fp8"``, in MXFP8, with one scale per 32 elements of a row (``fp8_quantize`` and ``mm_fp8_block``).

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale`` ue8m0 bytes, uint8 (N, K/32). In
    memory, ``weight_scale`` has the layout that the kernels of its device read in place: 128x4 on data-center
    Blackwell, linear elsewhere and in layers of experts.
    """

    scheme = "mxfp8"
    choices = ("fp8",)
    multiples = (8, 64)

    weight_scale: Tensor
    _is_stack: bool = False
    """True if the weight stacks the weights of all experts. Its scales are then linear on every device, because grouped
    GEMMs read linear scales."""

    def layout(self) -> Layout:
        """Return shape and dtype of each tensor of the weight, as in checkpoints and in ``state_dict``."""
        n, k = self.out_features, self.in_features
        return {
            "weight": ((n, k), torch.float8_e4m3fn),
            "weight_scale": ((n, MXFP8.scales_per_row(k)), MXFP8.scale_dtype),
        }

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        if name != "weight_scale" or not self._has_tiles():
            return tensor
        return convert_scales(tensor, self.out_features, self.in_features, "linear", "128x4")

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        return linear_mx_scales(tensor, self.out_features, self.in_features) if name == "weight_scale" else tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._rearrange()
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        self._rearrange()  # ``torch.load`` may have moved the scales to another kind of device
        super()._load_from_state_dict(*given)
        self._rearrange()  # an assigned weight may be on another kind of device than the weight before it

    def as_stack_(self) -> None:
        """Keep linear scales on every device, as grouped GEMMs read them."""
        self._is_stack = True
        self._rearrange()

    def _has_tiles(self) -> bool:
        """Return True if scales have the layout 128x4 in memory."""
        return not self._is_stack and reads_tiles(self.weight.device)

    def _rearrange(self) -> None:
        """Rearrange the scales of the weight if they do not have the layout that the device's kernels read."""
        if layout_of_operand(self.weight_scale).is_linear == self._has_tiles():
            self._buffers["weight_scale"] = self._held("weight_scale", self._stored("weight_scale", self.weight_scale))
            self._complete()
        self._derive()

    def _derive(self) -> None:
        # Let activations have the layout that the kernels read without a copy, or with fewer copies.
        self._input_quantization = self._quantization()

    def _quantization(self) -> Quantization:
        tiles = {} if self._has_tiles() else {"scale_layout": "linear"}
        return Quantization("fp8", {"granularity": MXFP8.granularity, **tiles})

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, a_scale = operands
        options: dict[str, Any] = {"out_dtype": dtype, "static_weight": True, "prefetch": self._prefetch_weight()}
        return mm_fp8_block(a, self.weight.t(), a_scale, self.weight_scale, bias=self.bias, **options)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), computed in fp32 from elements and scales and rounded once to ``dtype``."""
        return decode_mxfp8(self.weight, self._stored("weight_scale", self.weight_scale), dtype)

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes a range of the weight's rows as :meth:`dequantize` does."""
        weight, scale = self.weight, self._stored("weight_scale", self.weight_scale)
        return lambda begin, end: decode_mxfp8(weight[begin:end], scale[begin:end], dtype)

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
            weight: (N, K) float8_e4m3fn.
            weight_scale: (N, K/32) uint8 or float8_e8m0fnu, linear; each byte stands for 2^(byte - 127).
            bias, parts, activations: as in :class:`QuantLinear`.
        """
        if weight_scale.dtype == torch.float8_e8m0fnu:
            weight_scale = weight_scale.view(MXFP8.scale_dtype)
        tensors = {"weight": weight, "weight_scale": weight_scale}
        return cls._build(weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(cls, linear: nn.Linear, *, activations: Activations = "auto") -> Self:
        """Quantise a linear layer in bfloat16, float16 or float32.

        Raises:
            ValueError: for unsupported sizes or activations.
        """
        elements, scale, _ = encode(supported_weight(cls, linear).contiguous(), cls.scheme)
        return cls.from_tensors(elements, scale, bias=linear.bias, activations=activations)


def reads_tiles(device: torch.device) -> bool:
    """Return True if the kernels of a device read MXFP8 scales in the layout 128x4 in place."""
    if device.type != "cuda":
        return False
    arch = gemm_package().select.target_of(device).arch
    return arch is not None and arch.has_tcgen05


class _FP8Linear(QuantLinear):
    """Base class of layers with an FP8 weight and one scale per tensor or per row, which call ``mm_fp8``.

    Attributes:
        fast_accum: as in ``mm_fp8``. Set it to True on a layer, or on a class, to accumulate all of K in the tensor
            cores.
    """

    choices = ("fp8",)
    multiples = (1, 1)
    fast_accum: bool = False
    _flat: ClassVar[tuple[int, ...]]
    """Argument of ``reshape`` that flattens the scales of the weight."""

    weight_scale: Tensor
    input_scale: Tensor

    def layout(self) -> Layout:
        """Return shape and dtype of each tensor of the weight, as in checkpoints and in ``state_dict``."""
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
        """Return the scale of each row of the weight, (N, 1)."""
        raise NotImplementedError

    def _factor(self) -> Tensor:
        """Return the factor of the GEMM's result: (1,) for all columns, or (N,) with one factor per column."""
        return self._row_scale().view(-1)

    @property
    def can_prefetch(self) -> bool:
        """True if the GEMM can load the next layer's weight into L2, which ``torch._scaled_mm`` cannot."""
        return self._fits_mm_fp8()

    def _fits_mm_fp8(self) -> bool:
        """Return True if ``mm_fp8`` supports N and K. If it does not, torch's scaled GEMM is called."""
        return self.out_features % FP8_N_MULTIPLE == 0 and self.in_features % FP8_K_MULTIPLE == 0

    def _quantization(self) -> Quantization:
        return Quantization("fp8", {"granularity": "tensor"} if self.has_input_scale else {})

    def _activation_scale(self) -> Tensor | None:
        return self.input_scale if self.has_input_scale else None

    def _quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        if rows.shape[1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: x has {rows.shape[1]} columns; expected {self.in_features}")
        return super()._quantized(rows)

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, a_scale = operands
        factor = self._factor()
        bias: Tensor | None = self.bias
        if not self._fits_mm_fp8():
            # torch's scaled GEMM takes row scales either for both operands or for neither
            by_row = factor.numel() > 1 or a_scale.dim() == 2
            factor = self._row_scale().view(1, -1) if by_row else factor
            return scaled_mm(a, self.weight, a_scale, factor, bias, dtype)
        if bias is not None and bias.dtype not in (dtype, torch.float32):
            bias = bias.float()
        options: dict[str, Any] = {"out_dtype": dtype, "static_weight": True, "prefetch": self._prefetch_weight()}
        return mm_fp8(a, self.weight.t(), a_scale, factor, bias=bias, fast_accum=self.fast_accum, **options)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), computed in fp32 from elements and scales and rounded once to ``dtype``."""
        return self.rows_decoder(dtype)(0, self.out_features)

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes a range of the weight's rows as :meth:`dequantize` does."""
        weight, scale = self.weight, self._row_scale()
        return lambda begin, end: (weight[begin:end].float() * scale[begin:end]).to(dtype)

    @classmethod
    def _amax(cls, weight: Tensor) -> Tensor:
        """Return the largest magnitude of each group of elements that share a scale, in the shape of
        ``weight_scale``."""
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
        """Build a layer from the tensors of a checkpoint; see :class:`QuantLinear`.

        Args:
            weight: (N, K) float8_e4m3fn.
            weight_scale: float32 factors of the decoded weight: per tensor, one element, or one per part; per channel,
                (N, 1) or (N,).
            input_scale: float32, one element, by which decoded activations are multiplied. With ``None``, each call
                computes one scale per row.
            bias, parts, activations: as in :class:`QuantLinear`.
        """
        tensors = {"weight": weight, "weight_scale": weight_scale.reshape(cls._flat)}
        if input_scale is not None:
            tensors["input_scale"] = input_scale.reshape(-1)
        return cls._build(weight.shape[-1], tensors, bias, parts, activations)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, *, activations: Activations = "auto", input_amax: Tensor | float | None = None
    ) -> Self:
        """Quantise a linear layer. The scale is amax / 448, with the largest magnitude amax of the weight or of each
        row.

        Args:
            linear: layer in bfloat16, float16 or float32.
            activations: argument of the class.
            input_amax: largest magnitude of the input, from calibration; larger values saturate. With ``None``, each
                call computes one scale per row of the activations.

        Raises:
            ValueError: for unsupported activations.
        """
        weight = supported_weight(cls, linear).float()
        scale = fp8_scale_of(cls._amax(weight))
        return cls.from_tensors(
            encode_e4m3(weight / scale),
            scale,
            input_scale=None if input_amax is None else fp8_scale_of(float32_like(input_amax, weight)),
            bias=linear.bias,
            activations=activations,
        )


class FP8TensorLinear(_FP8Linear):
    """A linear layer with an FP8 weight and one scale per tensor; arguments and errors are as for :class:`QuantLinear`.

    Activations: ``"fp8"``. With a calibrated ``input_scale``, all rows are quantised with this scale; without it, each
    row gets its own scale. ``fp8_quantize`` quantises. ``mm_fp8`` multiplies, with ``fast_accum=False`` unless the
    attribute ``fast_accum`` is set.

    If N is not a multiple of 8, or K not a multiple of 64, torch's scaled GEMM multiplies instead:
    ``torch.nn.functional.scaled_mm``, or ``torch._scaled_mm`` in older torch versions and in compiled code. It needs N
    and K that are multiples of 16, and a result in 16 bits with a bias in the same dtype. In all other cases, each call
    decodes the weight, which takes time and memory, and multiplies in float32. On a CPU each call decodes the weight
    and multiplies in float64.

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale`` float32 (number of parts,);
    ``input_scale`` float32 (1,). The scales are factors of decoded numbers, as in ModelOpt and compressed-tensors.
    """

    scheme = "fp8_tensor"
    _flat = (-1,)

    row_scale: Tensor

    def _scale_shape(self) -> tuple[int, ...]:
        return (len(self.parts),)

    def _rows_of_parts(self, name: str) -> list[int]:
        return [1] * len(self.parts) if name == "weight_scale" else super()._rows_of_parts(name)

    def _derive(self) -> None:
        self._set_derived("row_scale", self._to_rows(self.weight_scale).unsqueeze(1))

    def _row_scale(self) -> Tensor:
        return self.row_scale

    def _factor(self) -> Tensor:
        return self.weight_scale if len(self.parts) == 1 else super()._factor()

    @classmethod
    def _amax(cls, weight: Tensor) -> Tensor:
        return weight.abs().amax().reshape(1)


class FP8ChannelLinear(_FP8Linear):
    """A linear layer with an FP8 weight and one scale per row (output channel); arguments are as for
    :class:`QuantLinear`.

    Activations and GEMMs are as for :class:`FP8TensorLinear`.

    Buffers, as in a state dict: ``weight`` float8_e4m3fn (N, K); ``weight_scale`` float32 (N, 1); ``input_scale``
    float32 (1,). The scales are factors of decoded numbers, as in compressed-tensors.
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
