"""Base class of quantised linear layers. Weights and scales are buffers that are moved between devices but never cast.
State dicts use the layout of checkpoints."""

import numbers
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.formats import SCALE_LAYOUTS
from torch_cute_ops.formats.fp8 import MXFP8
from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.nn import _straight_through
from torch_cute_ops.nn._straight_through import RowsDecoder, needs_gradient
from torch_cute_ops.nn._tracing import one_node
from torch_cute_ops.ops._checks import is_transposed_scale
from torch_cute_ops.ops._with_gemm import is_prefetchable
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp4_quantize_per_token import fp4_quantize_per_token
from torch_cute_ops.ops.fp8_quantize import fp8_quantize
from torch_cute_ops.quantized import autocast
from torch_cute_ops.runtime.dispatch import is_proxy

Activations = Literal["auto", "16bit", "fp4", "fp4_token", "fp8", "fp8_token"]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor, keyed by the tensor's name."""

_SHARED: Final = "input_scale"
"""Name of the tensor that the parts of a merged layer share, because all parts have the same input."""
_QUANTISE: Final[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {"fp4": fp4_quantize, "fp8": fp8_quantize}
_SCALE_ARGUMENT: Final = {"fp4": "global_scale", "fp8": "scale"}
"""Name of the scale argument of ``fp4_quantize`` and ``fp8_quantize``, keyed by format."""


class Quantization(NamedTuple):
    """Quantisation of a layer's input.

    Attributes:
        to: ``"fp4"`` for ``fp4_quantize``, ``"fp4_token"`` for ``fp4_quantize_per_token``, ``"fp8"`` for
            ``fp8_quantize``.
        arguments: keyword arguments of this op, and of the fused ops that contain it.
    """

    to: Literal["fp4", "fp4_token", "fp8"]
    arguments: Mapping[str, Any]

    @property
    def suffix(self) -> str:
        """Suffix of the names of the ops that normalise or gate rows and then quantise them to this format."""
        return {"fp4": "fp4quant", "fp4_token": "fp4quant_per_token", "fp8": "fp8quant"}[self.to]


FP8_BLOCKS: Final = Quantization("fp8", {"granularity": "block128"})
"""FP8 activations with a scale for each 128 elements of a row."""


class QuantizedRows(NamedTuple):
    """Input rows of a layer's GEMM, quantised if the layer quantises its input. :meth:`QuantLinear.quantize` returns
    them.

    Attributes:
        operands: elements (M, ...) and, if the format uses scales, their scales; with ``"fp4_token"``, also the scales
            of the rows, (M,).
        lead: leading dimensions of the original input; their product is M.
        dtype: dtype of the layer's result.
        gate: activation function if the rows are gate and up, (M, 2K) in 16 bits, and the layer must compute
            ``act(gate) · up`` before it multiplies, or None. Only layers whose :meth:`QuantLinear.prologue_gates`
            returns True accept such rows.
    """

    operands: tuple[Tensor, ...]
    lead: tuple[int, ...]
    dtype: torch.dtype
    gate: Gate | None = None


class QuantLinear(nn.Module):
    """A linear layer with a quantised weight, for inference: ``y = x · Wᵀ + bias``.

    Base class of :class:`NVFP4Linear`, :class:`MXFP4Linear`, :class:`FP8BlockLinear`, :class:`MXFP8Linear`,
    :class:`FP8TensorLinear` and :class:`FP8ChannelLinear`. The weight and its scales are buffers: ``.to``,
    ``.bfloat16()`` and the like move them but never cast them. The bias is cast as in ``nn.Linear``. ``state_dict``
    uses the layout of checkpoints, with linear block scales; in memory, the block scales of FP4 use the 128x4 layout,
    and the block scales of MXFP8 use the layout that the device's kernels read, without a second copy. Until tensors
    are loaded, scales are NaN, so the layer's results are NaN.

    The formats and the rounding are fixed when the layer is constructed and do not depend on the batch.

    The GEMMs are called with ``static_weight=True``: they may read the weight before the previous launch on the stream
    ends. Every method that writes the weight therefore launches one more kernel afterwards. Code that writes the
    buffers directly must launch another kernel, or synchronise, before the next forward.

    Each subclass builds layers with ``from_tensors``, which takes the tensors of a checkpoint, and ``from_float``,
    which quantises an ``nn.Linear``. ``from_tensors`` builds the layer on the tensors' device and does not copy the
    weight. Its ``bias`` is a tensor (N,), in float32 or the dtype of the activations; its ``parts`` and ``activations``
    are as below. It raises ``ValueError`` for a wrong shape or a transposed view, and ``TypeError`` for a wrong dtype.

    Args:
        in_features: K.
        out_features: N.
        bias: True to add a bias, in fp32 before the single rounding of the GEMM's result.
        activations: format of the activations in the GEMM; ``"auto"`` selects the first entry of the class attribute
            ``choices``.
        parts: number of rows of each layer that was merged into this layer, such as q, k and v; ``None`` if none was
            merged.
        has_input_scale: True to add an ``input_scale``, in formats that use one. NVFP4 activations need it. If the
            weight is FP8 with tensor or channel scales, or NVFP4 with activations ``"fp8_token"``, activations are
            quantised with ``input_scale`` if it exists, and otherwise with one computed scale per row.
        dtype: dtype of the bias: float32, or the dtype of the activations.
        device: device of all tensors.

    Raises:
        ValueError: for sizes or activations that the ops do not support, or ``parts`` that do not sum to N.
        TypeError: for a size that is not an integer.
    """

    scheme: ClassVar[str]
    choices: ClassVar[tuple[str, ...]]
    """Valid values of ``activations``."""
    multiples: ClassVar[tuple[int, int]]
    """(divisor of N, divisor of K) that every weight must satisfy, for any activations."""
    weight: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        activations: Activations = "auto",
        parts: Sequence[int] | None = None,
        has_input_scale: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, numbers.Integral) or isinstance(size, bool):
                raise TypeError(f"{type(self).__name__}: {name} is {size!r}, a {type(size).__name__}; expected an int")
        in_features, out_features = int(in_features), int(out_features)
        self.in_features, self.out_features = in_features, out_features
        self.activations = self._chosen(activations)
        self.parts = (out_features,) if parts is None else tuple(parts)
        self.has_input_scale = has_input_scale or self._needs_input_scale()
        reason = self.reason_unsupported(out_features, in_features, activations) or self._reason_unfit_parts()
        if reason is not None:
            raise ValueError(f"{type(self).__name__}: {reason}")
        for name, (shape, kind) in self.layout().items():
            byte = 0xFF if "scale" in name else 0  # 0xFF is NaN in every scale format; codes are 0
            undefined = torch.full((*shape[:-1], shape[-1] * kind.itemsize), byte, dtype=torch.uint8, device=device)
            self.register_buffer(name, self._held(name, undefined.view(kind)))
        values = torch.full((out_features,), torch.nan, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values, requires_grad=False))
        # The stored quantisation does not contain the activations' scale, because this buffer may be moved or replaced
        # later.
        self._input_quantization = self._quantization()
        self._derive()

    @property
    def can_prefetch(self) -> bool:
        """True if the GEMM can load the next layer's weight into L2."""
        return True

    @classmethod
    def reason_unsupported(cls, out_features: int, in_features: int, activations: Activations = "auto") -> str | None:
        """Return the reason why no op supports a weight of shape (N, K) with these activations, or None if one does."""
        multiples = cls.multiples_for(activations)
        for name, size, multiple in zip(("out", "in"), (out_features, in_features), multiples, strict=True):
            if size <= 0 or size % multiple:
                return f"{name}_features is {size}; expected a positive multiple of {multiple}"
        return None

    @classmethod
    def multiples_for(cls, activations: Activations) -> tuple[int, int]:
        """Return the numbers that must divide N and K for these activations."""
        return cls.multiples

    @classmethod
    def _chosen(cls, activations: str) -> str:
        chosen = cls.choices[0] if activations == "auto" else activations
        if chosen not in cls.choices:
            expected = ", ".join(map(repr, ("auto", *cls.choices)))
            raise ValueError(f"{cls.__name__}: activations is {activations!r}; expected one of {expected}")
        return chosen

    def _needs_input_scale(self) -> bool:
        return False

    def _reason_unfit_parts(self) -> str | None:
        if sum(self.parts) != self.out_features or min(self.parts) <= 0:
            return f"parts is {self.parts}; expected positive numbers whose sum is out_features, {self.out_features}"
        return None

    # Tensors

    def layout(self) -> Layout:
        """Return the shape and dtype of each tensor that makes up the weight, as in checkpoints and in
        ``state_dict``."""
        raise NotImplementedError

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a checkpoint tensor to the layout of the buffer ``name``."""
        return tensor

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert the buffer ``name`` to the layout of checkpoints."""
        return tensor

    def _derive(self) -> None:
        """Compute the buffers that are derived from other buffers."""

    def _complete(self) -> None:
        """Launch an empty kernel after the kernels that wrote the weight.

        The next GEMM may read its static weight while the previous launch still runs. If the previous launch is this
        empty kernel, the kernels that wrote the weight have already ended.
        """
        if self.weight.is_cuda:
            torch.empty(1, device=self.weight.device).fill_(0.0)

    def _set_derived(self, name: str, value: Tensor) -> None:
        """Set a buffer that no state dict contains. If possible, overwrite the old buffer in place, because CUDA graphs
        may read its memory."""
        old = self._buffers.get(name)
        if old is not None and old.shape == value.shape and old.device == value.device and not value.is_meta:
            old.copy_(value)
        else:
            self.register_buffer(name, value, persistent=False)

    def as_stack_(self) -> None:
        """Prepare this layer, whose weight stacks the weights of all experts, for grouped GEMMs."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that make up the weight by name, in checkpoint layout. Scales in the 128x4 layout are
        copied."""
        return {name: self._stored(name, self.get_buffer(name)) for name in self.layout()}

    @classmethod
    def _build(
        cls,
        in_features: int,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        parts: Sequence[int] | None,
        activations: Activations,
    ) -> Self:
        """Build a layer from tensors in checkpoint layout."""
        layer = cls(
            in_features,
            tensors["weight"].shape[0],
            bias=bias is not None,
            activations=activations,
            parts=parts,
            has_input_scale="input_scale" in tensors,
            device="meta",
        )
        for name, (shape, dtype) in layer.layout().items():
            if name not in tensors:
                raise ValueError(f"{cls.__name__}: {name} is missing; activations={layer.activations!r} needs it")
            tensor = tensors[name].detach()
            if tensor.dtype != dtype:
                raise TypeError(f"{cls.__name__}: got {name} with dtype {tensor.dtype}; expected {dtype}")
            if tensor.shape != shape:
                raise ValueError(f"{cls.__name__}: got {name} with shape {tuple(tensor.shape)}; expected {shape}")
            if is_transposed_scale(tensor, SCALE_LAYOUTS["linear"]):
                raise ValueError(
                    f"{cls.__name__}: got {name} with shape {shape} and strides {tensor.stride()}, a transposed view; "
                    f"pass tensors as a checkpoint stores them, or {name}.contiguous() if the view has the right order"
                )
            layer._buffers[name] = layer._held(name, tensor.contiguous())
        if bias is not None:
            if bias.shape != (layer.out_features,):
                raise ValueError(
                    f"{cls.__name__}: got bias with shape {tuple(bias.shape)}; expected {(layer.out_features,)}"
                )
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        layer._derive()
        layer._complete()
        return layer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor is self.bias else moved(fn, tensor)

        super()._apply(move, recurse)
        self._complete()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.layout():
            destination[prefix + name] = self._stored(name, destination[prefix + name])

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        held = dict(state_dict)
        for name, (shape, dtype) in self.layout().items():
            tensor = held.get(prefix + name)
            if tensor is None:
                continue
            # ModelOpt stores tensor scales without a dimension, and channel scales with one dimension.
            if [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]:
                tensor = tensor.reshape(shape)
            # Check the dtype here, because super() would cast silently.
            if tensor.dtype != dtype or tensor.shape != shape:
                got = f"{tuple(tensor.shape)} {tensor.dtype}"
                error_msgs.append(f"{prefix}{name} is {got}; expected {shape} {dtype}")
                return
            held[prefix + name] = self._held(name, tensor)
        super()._load_from_state_dict(held, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._derive()
        self._complete()

    # Use

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (N, K), computed in fp32 from codes and scales and rounded once to ``dtype``."""
        raise NotImplementedError

    def rows_decoder(self, dtype: torch.dtype) -> RowsDecoder:
        """Return a function that decodes a range of the weight's rows as :meth:`dequantize` does.

        The arguments of the returned function are the first row of the range, a multiple of 128, and the end.
        """
        raise NotImplementedError

    def forward(self, input: Tensor | QuantizedRows) -> Tensor:
        """Compute ``input · Wᵀ + bias``.

        Args:
            input: (..., K), bfloat16 or float16, and float32 unless ``activations`` is ``"16bit"``; or the result of
                :meth:`quantize` of this layer, or of another layer with the same input quantisation.

        An input tensor that requires grad gets the gradient ``dy · W`` with the decoded weight W, as if activations
        were not rounded. Under ``torch.autocast``, an input tensor is cast as in ``nn.Linear``.

        Returns:
            (..., N) in the dtype of ``input``.

        Raises:
            ValueError, TypeError: from the op, for a wrong shape, dtype or device; and if a weight, a scale or
                :class:`QuantizedRows` require grad while gradients are enabled.
        """
        if is_proxy(input):
            return one_node(self, input)
        if isinstance(input, Tensor):
            input = autocast(input)
            if torch.is_grad_enabled() and needs_gradient(input, self.bias, *self._buffers.values()):
                return _straight_through.linear(self, input)
        return self.compute(input)

    def compute(self, input: Tensor | QuantizedRows) -> Tensor:
        """Compute :meth:`forward` without gradients."""
        rows = input if isinstance(input, QuantizedRows) else self._prepared(input)
        if rows.gate is None:
            result = self._product(rows.operands, rows.dtype)
        else:
            result = self._gated_product(rows.operands, rows.dtype, rows.gate)
        return result.view(*rows.lead, self.out_features)

    def quantize(self, x: Tensor) -> QuantizedRows:
        """Convert ``x``, (..., K), to the input of this layer's GEMM: quantised rows, or 16-bit rows. Raises the same
        errors as :meth:`forward`."""
        return QuantizedRows(self._quantized(_rows_of(x)), (*x.shape[:-1],), x.dtype)

    def _prepared(self, x: Tensor) -> QuantizedRows:
        """Convert ``x`` as :meth:`quantize` does, but leave it in 16 bits if this layer's GEMM quantises in its
        prologue."""
        rows = _rows_of(x)
        if self.prologue_quantises(rows):
            return QuantizedRows((rows,), (*x.shape[:-1],), x.dtype)
        return self.quantize(x)

    def _prefetch_weight(self) -> Tensor | None:
        """Return the weight that this layer's GEMM loads into L2 for the next layer, or None if :func:`prefetch_` set
        no next layer.

        In compiled models, the pass of ``integrations.inductor`` chooses the weight instead.
        """
        following = None if torch.compiler.is_compiling() else following_of(self)
        if following is None:
            return None
        weight = following.weight
        return weight if is_prefetchable(weight) and weight.device == self.weight.device else None

    def rows_for(self, rows: int) -> int:
        """Return how many input rows a call needs so that the GEMM multiplies at least ``rows`` rows.

        The result is smaller than ``rows`` if the layer gathers the input rows of several ranks.
        """
        return rows

    def prologue_quantises(self, rows: Tensor) -> bool:
        """Return True if the GEMM quantises these rows, (M, K), in its prologue."""
        return False

    def prologue_gates(self, rows: Tensor) -> bool:
        """Return True if the GEMM accepts these rows of gate and up, (M, 2K), as :class:`QuantizedRows`, and computes
        the gate in its prologue."""
        return False

    def quantization(self) -> Quantization | None:
        """Return the quantisation of the input, or None if the GEMM takes 16-bit activations."""
        quantization, scale = self._input_quantization, self._activation_scale()
        if quantization is None or scale is None:
            return quantization
        return Quantization(quantization.to, {_SCALE_ARGUMENT[quantization.to]: scale, **quantization.arguments})

    def _quantization(self) -> Quantization | None:
        """Return :meth:`quantization` without the arguments that are tensors."""
        raise NotImplementedError

    @property
    def has_fp8_blocks(self) -> bool:
        """True if the input is quantised to FP8 with a scale for each 128 elements of a row."""
        quantization = self._input_quantization
        # Compare single entries, because Dynamo of torch 2.11 cannot compare dictionaries.
        return (
            quantization is not None
            and quantization.to == "fp8"
            and quantization.arguments.get("granularity") == "block128"
        )

    @property
    def has_scale_tiles(self) -> bool:
        """True if the input is quantised with block scales in the layout 128x4: to FP4, or to MXFP8 on some GPUs."""
        quantization = self._input_quantization
        if quantization is None:
            return False
        is_mxfp8 = quantization.arguments.get("granularity") == MXFP8.granularity
        return quantization.to != "fp8" or (is_mxfp8 and "scale_layout" not in quantization.arguments)

    @property
    def has_linear_scales(self) -> bool:
        """True if the input is quantised to MXFP8 with linear block scales."""
        quantization = self._input_quantization
        return quantization is not None and "scale_layout" in quantization.arguments

    @property
    def has_computed_row_scales(self) -> bool:
        """True if the input is quantised to FP8 with a scale per row that each call computes."""
        quantization = self._input_quantization
        return quantization is not None and quantization.to == "fp8" and not quantization.arguments

    def _activation_scale(self) -> Tensor | None:
        """Return the scale or global scale of the input, or None if scales are computed per row or block."""
        return None

    def _quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Quantise rows (M, K); return ``QuantizedRows.operands``."""
        quantization = self._input_quantization
        if quantization is None:
            return (rows,)
        if quantization.to == "fp4_token":
            return fp4_quantize_per_token(rows, **quantization.arguments)
        return _QUANTISE[quantization.to](rows, self._activation_scale(), **quantization.arguments)

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Multiply by the weight; return (M, N) in ``dtype``."""
        raise NotImplementedError

    def _gated_product(self, operands: tuple[Tensor, ...], dtype: torch.dtype, gate: Gate) -> Tensor:
        """Apply the gate to rows (M, 2K) and multiply by the weight; return (M, N) in ``dtype``."""
        raise ValueError(
            f"{type(self).__name__}: the rows are gate and up, which a layer with activations={self.activations!r} "
            "does not gate; pass act(gate) · up"
        )

    def extra_repr(self) -> str:
        """Return the sizes and settings that ``print(layer)`` shows."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        parts = f", parts={self.parts}" if 1 < len(self.parts) <= 8 else ""
        if len(self.parts) > 8:
            parts = f", {len(self.parts)} parts"
        return f"{text}, activations={self.activations!r}{parts}"

    # Parts of a merged layer

    def split(self) -> list[Self]:
        """Undo :func:`merge`: return the original layers in order, or ``[self]`` for a layer that is not merged.

        Codes are views of this layer's codes; scales are copies.
        """
        if len(self.parts) == 1:
            return [self]
        biases: Sequence[Tensor | None] = [None] * len(self.parts)
        if self.bias is not None:
            biases = self.bias.split([*self.parts])
        activations: Any = self.activations
        return [
            self._build(self.in_features, tensors, bias, None, activations)
            for tensors, bias in zip(self._tensors_of_parts(), biases, strict=True)
        ]

    def _rows_of_parts(self, name: str) -> list[int]:
        """Return the number of rows of the tensor ``name`` in each part."""
        return [*self.parts]

    def _tensors_of_parts(self) -> list[dict[str, Tensor]]:
        split = {
            name: [tensor] * len(self.parts) if name == _SHARED else tensor.split(self._rows_of_parts(name))
            for name, tensor in self.tensors().items()
        }
        return [dict(zip(split, tensors, strict=True)) for tensors in zip(*split.values(), strict=True)]

    @classmethod
    def _merged_tensors(cls, tensors: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        merged = {name: _rows([each[name] for each in tensors]) for name in tensors[0]}
        if _SHARED in merged:
            merged[_SHARED] = merged[_SHARED].amax(0, keepdim=True)
        return merged

    def _to_rows(self, values: Tensor) -> Tensor:
        """Expand one value per part to one value per row of the weight, (N,)."""
        return torch.cat([value.expand(rows) for value, rows in zip(values, self.parts, strict=True)])


def merge(layers: Sequence[QuantLinear]) -> QuantLinear:
    """Merge layers with the same input into one layer that computes their results side by side.

    Use it for q, k and v, or for gate and up, so that one GEMM reads the input once. ``y.split(layer.parts, -1)``
    separates the results. Nothing is quantised again: each part keeps its NVFP4 global scale or FP8 tensor scale, which
    the GEMM's epilogue applies per column. The input is quantised with the largest of the layers' input scales.

    Args:
        layers: layers of one class, with equal ``in_features`` and ``activations``, all with a bias or all without. For
            FP8 blocks, ``out_features`` of every layer except the last is a multiple of 128, because parts do not share
            a block.

    Raises:
        ValueError: for layers that cannot be merged.
        TypeError: for modules that are not layers of this package.
    """
    if not layers:
        raise ValueError("merge: layers is empty; expected at least one layer")
    for i, layer in enumerate(layers):
        if not isinstance(layer, QuantLinear):
            raise TypeError(
                f"merge: layers[{i}] is {_described(layer)}; expected quantised layers, such as "
                "NVFP4Linear.from_float(linear)"
            )
    first = layers[0]
    differences: dict[str, set[Any]] = {
        "class": {type(layer).__name__ for layer in layers},
        "in_features": {layer.in_features for layer in layers},
        "activations": {layer.activations for layer in layers},
        "a bias": {layer.bias is not None for layer in layers},
        "an input scale": {layer.has_input_scale for layer in layers},
    }
    for name, values in differences.items():
        if len(values) > 1:
            raise ValueError(f"merge: the layers differ in {name}: {sorted(map(str, values))}; expected the same")
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    parts = [part for layer in layers for part in layer.parts]
    tensors = first._merged_tensors([layer.tensors() for layer in layers])
    activations: Any = first.activations
    return first._build(first.in_features, tensors, torch.cat(biases) if biases else None, parts, activations)


def is_writable(tensor: Tensor) -> bool:
    """Return True if a tensor can be changed in place. Tensors that were made in inference mode can be changed only in
    inference mode."""
    return not tensor.is_inference() or torch.is_inference_mode_enabled()


def overwrite_(layer: QuantLinear, new: QuantLinear) -> bool:
    """Copy the tensors of ``new`` into the tensors of ``layer``, so that CUDA graphs that read ``layer`` stay valid.

    Args:
        layer: layer that keeps its tensors.
        new: layer whose tensors are copied.

    Returns:
        True if the tensors were copied. False, with nothing copied, if the layers differ in class, sizes, parts,
        activations, or the shape, dtype or device of a tensor.
    """

    def described(each: QuantLinear) -> tuple[Any, ...]:
        held = {**each._buffers, **each._parameters}
        tensors = {
            name: None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
            for name, tensor in held.items()
        }
        return type(each), each.in_features, each.parts, each.activations, each.has_input_scale, tensors

    if layer.weight.is_meta or not is_writable(layer.weight):
        return False
    is_unused = layer.scheme == "nvfp4" and layer.activations not in ("fp4", "fp8_token")
    if layer.has_input_scale and not new.has_input_scale and is_unused:
        del layer._buffers[_SHARED]
        layer.has_input_scale = False
    if described(layer) != described(new):
        return False
    for name, tensor in {**new._buffers, **new._parameters}.items():
        if tensor is not None:
            getattr(layer, name).detach().copy_(tensor)
    layer._complete()
    return True


def prefetch_(layers: Iterable[QuantLinear]) -> None:
    """Make each layer's GEMM, if it has few rows, also load the weight of the next layer into L2.

    Results do not change. A second call replaces the settings of the first. If you copy or replace a layer, call
    ``prefetch_`` again. Compiled models ignore these settings: there, the pass of ``integrations.inductor`` finds the
    next layer.

    Args:
        layers: layers in the order in which the model calls them. The last layer prefetches nothing.
    """
    every = [*layers]
    for layer, following in zip(every, (*every[1:], None), strict=True):
        link(layer, following)


def following_of(layer: QuantLinear) -> QuantLinear | None:
    """Return the layer that the model calls after ``layer``, or None if it is unknown or no longer exists."""
    found = _FOLLOWING.get(layer)
    return None if found is None else found()


def link(layer: QuantLinear, following: QuantLinear | None) -> None:
    """Set the layer that the model calls after ``layer``; None if there is no next layer."""
    _FOLLOWING.pop(layer, None)
    if following is not None:
        _FOLLOWING[layer] = weakref.ref(following)


# Store the links outside the modules. If they were attributes, a copy or pickle of one layer would include all
# later layers.
_FOLLOWING: weakref.WeakKeyDictionary[QuantLinear, weakref.ref[QuantLinear]] = weakref.WeakKeyDictionary()


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _rows_of(x: Tensor) -> Tensor:
    """Flatten ``x``, (..., K), to rows (M, K)."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along dimension 0. Concatenate FP8 tensors as bytes, because some torch versions do not
    support FP8 here."""
    if tensors[0].dtype != torch.float8_e4m3fn:
        return torch.cat([*tensors])
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(torch.float8_e4m3fn)


def moved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply ``fn``, such as ``.to(dtype)``, to the tensor viewed as bytes, so that the tensor is moved but not cast."""
    as_bytes = fn(tensor.view(torch.uint8))
    if as_bytes.dtype != torch.uint8:  # Module.type casts all tensors, even bytes
        return tensor.to(as_bytes.device)
    return as_bytes.view(tensor.dtype)


def supported_weight(cls: type[QuantLinear], linear: nn.Linear, activations: Activations = "auto") -> Tensor:
    """Return the weight of a linear layer after checking that ``cls`` supports its size with these activations.

    Raises:
        ValueError: if ``cls`` does not support them, with the reason.
    """
    reason = cls.reason_unsupported(linear.out_features, linear.in_features, activations)
    if reason is not None:
        raise ValueError(f"{cls.__name__}: {reason}")
    return linear.weight.detach()


def float32_like(value: Any, like: Tensor) -> Tensor:
    """Convert a number or tensor to a float32 tensor on the device of ``like``."""
    return torch.as_tensor(value, dtype=torch.float32, device=like.device)
