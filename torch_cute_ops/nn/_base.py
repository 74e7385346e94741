"""What quantised linear layers share: buffers that move and never cast, state dicts as checkpoints hold them, parts."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_cute_ops.ops._with_gemm import is_prefetchable
from torch_cute_ops.ops.fp4_quantize import fp4_quantize
from torch_cute_ops.ops.fp8_quantize import fp8_quantize

Activations = Literal["auto", "16bit", "fp4", "fp8"]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""

_SHARED: Final = "input_scale"
"""The tensor that the parts of a merged layer share: they have one input."""
_QUANTISE: Final[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {"fp4": fp4_quantize, "fp8": fp8_quantize}
_SCALE_ARGUMENT: Final = {"fp4": "global_scale", "fp8": "scale"}
"""Their second argument."""


class Quantization(NamedTuple):
    """How a layer quantises its input.

    Attributes:
        to: by ``fp4_quantize`` or ``fp8_quantize``.
        arguments: what the op, and those that are fused with it, take beside the input, by name.
    """

    to: Literal["fp4", "fp8"]
    arguments: Mapping[str, Any]


class QuantizedRows(NamedTuple):
    """Rows in the form in which a layer's GEMM takes them, as :meth:`QuantLinear.quantize` makes them.

    Attributes:
        operands: elements, (M, ...), and their scales where there are any.
        lead: the dimensions that the M rows had.
        dtype: of the result.
        is_gate_and_up: whether the rows are gate and up, (M, 2K) in 16 bits, of which the layer multiplies
            ``silu(gate) · up``; a layer that says so takes them (:meth:`QuantLinear.gates_input`).
    """

    operands: tuple[Tensor, ...]
    lead: tuple[int, ...]
    dtype: torch.dtype
    is_gate_and_up: bool = False


class QuantLinear(nn.Module):
    """A linear layer with a quantised weight, for inference: ``y = x · Wᵀ + bias``.

    The base of :class:`NVFP4Linear`, :class:`MXFP4Linear`, :class:`FP8BlockLinear`, :class:`FP8TensorLinear` and
    :class:`FP8ChannelLinear`. Weight and scales are buffers.
    ``.to``, ``.bfloat16()`` and the like move them and never cast them; the bias follows as in ``nn.Linear``.
    ``state_dict`` has them as checkpoints hold them, block scales linear; in memory FP4's lie in 128x4, and there is no
    second copy. A layer that nothing has been loaded into holds NaN scales, and so computes NaN.

    What is computed is chosen at construction and never by the batch.

    The weight is static to the GEMMs (their ``static_weight``): it is complete before the first forward,
    since whatever of this class writes it ends with one more launch. Code that writes the buffers itself has to have
    another launch, or a synchronisation, before the next forward.

    Args:
        in_features, out_features: K and N.
        bias: whether there is one. The GEMM adds it in fp32, before the one rounding.
        activations: in what the GEMM takes them; ``"auto"`` is the first of the class's ``choices``.
        parts: rows of each of the layers that this one merges, such as q, k and v; ``None``: it is one.
        has_input_scale: whether there is an ``input_scale``, for a format that has one. Activations in NVFP4 need it;
            those in FP8, beside a weight with a scale of the tensor or of channels, are static with it.
        dtype: of the bias: float32, or that of the activations.
        device: of all tensors.

    Raises:
        ValueError: for sizes or activations that the ops do not take, or parts that do not fit.
    """

    scheme: ClassVar[str]
    choices: ClassVar[tuple[str, ...]]
    """What ``activations`` may be."""
    multiples: ClassVar[tuple[int, int]]
    """What N and K are multiples of, whatever the activations are."""
    can_prefetch: ClassVar[bool] = True
    """Whether the GEMM can bring the weight of the next layer into L2."""

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
        self.in_features, self.out_features = in_features, out_features
        self.activations = self._chosen(activations)
        self.parts = (out_features,) if parts is None else tuple(parts)
        self.has_input_scale = has_input_scale or self._needs_input_scale()
        reason = self.reason_unsupported(out_features, in_features, activations) or self._reason_unfit_parts()
        if reason is not None:
            raise ValueError(f"{type(self).__name__}: {reason}")
        for name, (shape, kind) in self.layout().items():
            byte = 0xFF if "scale" in name else 0  # NaN in every format of scales, and zero
            undefined = torch.full((*shape[:-1], shape[-1] * kind.itemsize), byte, dtype=torch.uint8, device=device)
            self.register_buffer(name, self._held(name, undefined.view(kind)))
        values = torch.full((out_features,), torch.nan, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values, requires_grad=False))
        # Without the scale, which is a buffer: that may move, or be replaced.
        self._how = self._quantization()
        self._derive()

    @classmethod
    def reason_unsupported(cls, out_features: int, in_features: int, activations: Activations = "auto") -> str | None:
        """Why the ops take no weight (N, K) of this size with these activations; ``None``: they do."""
        multiples = cls.multiples_for(activations)
        for name, size, multiple in zip(("out", "in"), (out_features, in_features), multiples, strict=True):
            if size <= 0 or size % multiple:
                return f"{name}_features is {size}; expected a positive multiple of {multiple}"
        return None

    @classmethod
    def multiples_for(cls, activations: Activations) -> tuple[int, int]:
        """What N and K are multiples of, with these activations."""
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
        """Shape and dtype of each tensor of the weight, as checkpoints hold them and ``state_dict`` has them."""
        raise NotImplementedError

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of a checkpoint, as the buffer ``name`` holds it."""
        return tensor

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer ``name``, as checkpoints hold it."""
        return tensor

    def _derive(self) -> None:
        """Compute what follows from the buffers."""

    def _complete(self) -> None:
        """Put a launch between those that have written the weight and the next forward, which may read it ahead of the
        launch before."""
        if self.weight.is_cuda:
            torch.empty(1, device=self.weight.device).fill_(0.0)

    def _set_derived(self, name: str, value: Tensor) -> None:
        """Write a buffer that is in no state dict: in place where it is there, because CUDA graphs may read it."""
        old = self._buffers.get(name)
        if old is not None and old.shape == value.shape and old.device == value.device and not value.is_meta:
            old.copy_(value)
        else:
            self.register_buffer(name, value, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weight by name, as checkpoints hold them; scales that are held tiled are copies."""
        return {name: self._stored(name, self.get_buffer(name)) for name in self.layout()}

    @classmethod
    def _of(
        cls,
        in_features: int,
        tensors: Mapping[str, Tensor],
        bias: Tensor | None,
        parts: Sequence[int] | None,
        activations: Activations,
    ) -> Self:
        """The layer that has these tensors, which are as checkpoints hold them."""
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
                raise ValueError(f"{cls.__name__}: there is no {name}, which activations={layer.activations!r} needs")
            tensor = tensors[name].detach()
            if tensor.dtype != dtype:
                raise TypeError(f"{cls.__name__}: {name} has dtype {tensor.dtype}; expected {dtype}")
            if tensor.shape != shape:
                raise ValueError(f"{cls.__name__}: {name} has shape {tuple(tensor.shape)}; expected {shape}")
            layer._buffers[name] = layer._held(name, tensor.contiguous())
        if bias is not None:
            if bias.shape != (layer.out_features,):
                raise ValueError(
                    f"{cls.__name__}: bias has shape {tuple(bias.shape)}; expected {(layer.out_features,)}"
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
            # ModelOpt's scales of a tensor have no dimension, and those of channels one.
            if [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]:
                tensor = tensor.reshape(shape)
            # copy_ would cast.
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
        """The weight (N, K) that the codes and scales stand for: computed in fp32, rounded once to ``dtype``."""
        raise NotImplementedError

    def forward(self, input: Tensor | QuantizedRows) -> Tensor:
        """``input · Wᵀ + bias``.

        Args:
            input: (..., K), bfloat16 or float16; float32 too where ``activations`` is not ``"16bit"``. Or what
                :meth:`quantize`, of this layer or one of the same form, made of it.

        Returns:
            (..., N) in the dtype of ``input``.

        Raises:
            ValueError, TypeError: as the op that multiplies, for a wrong shape, dtype or device, or an input that
                requires grad while gradients are on.
        """
        rows = input if isinstance(input, QuantizedRows) else self._taken(input)
        multiply = self._gated_product if rows.is_gate_and_up else self._product
        return multiply(rows.operands, rows.dtype).view(*rows.lead, self.out_features)

    def quantize(self, x: Tensor) -> QuantizedRows:
        """The rows of ``x``, (..., K), as the GEMM takes them; errors are those of :meth:`forward`."""
        return QuantizedRows(self._quantized(_rows_of(x)), (*x.shape[:-1],), x.dtype)

    def _taken(self, x: Tensor) -> QuantizedRows:
        """The same as this layer's own GEMM takes it, which may quantise rows itself."""
        rows = _rows_of(x)
        if self.quantises_input(rows):
            return QuantizedRows((rows,), (*x.shape[:-1],), x.dtype)
        return self.quantize(x)

    def _prefetched(self) -> Tensor | None:
        """What the GEMM brings into L2: the weight of the layer behind this one, where ``prefetch_`` has named it. In
        compiled models the pass of ``integrations.inductor`` sees to it."""
        following = None if torch.compiler.is_compiling() else following_of(self)
        if following is None:
            return None
        weight = following.weight
        return weight if is_prefetchable(weight) and weight.device == self.weight.device else None

    def rows_for(self, rows: int) -> int:
        """Rows of an input whose GEMM multiplies ``rows``: fewer, rounded up, where ranks gather theirs."""
        return rows

    def quantises_input(self, rows: Tensor) -> bool:
        """Whether its GEMM quantises these rows, (M, K), in the same launch."""
        return False

    def gates_input(self, rows: Tensor) -> bool:
        """Whether it takes these rows of gate and up, (M, 2K), as :class:`QuantizedRows`, and gates them itself."""
        return False

    def quantization(self) -> Quantization | None:
        """How the input is quantised; ``None``: the GEMM takes it in 16 bits."""
        how, scale = self._how, self._activation_scale()
        if how is None or scale is None:
            return how
        return Quantization(how.to, {_SCALE_ARGUMENT[how.to]: scale, **how.arguments})

    def _quantization(self) -> Quantization | None:
        """The same, with those arguments alone that are no tensors."""
        raise NotImplementedError

    def _activation_scale(self) -> Tensor | None:
        """The scale that the input is quantised with, or its global scale; ``None``: each row or block gets its own."""
        return None

    def _quantized(self, rows: Tensor) -> tuple[Tensor, ...]:
        """``operands`` of rows (M, K)."""
        how = self._how
        return (rows,) if how is None else _QUANTISE[how.to](rows, self._activation_scale(), **how.arguments)

    def _product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The result (M, N) in ``dtype``."""
        raise NotImplementedError

    def _gated_product(self, operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The same of gate and up (M, 2K)."""
        raise ValueError(
            f"{type(self).__name__}: the rows are gate and up; a layer with activations={self.activations!r} does not "
            "gate them, pass silu(gate) · up"
        )

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        parts = f", parts={self.parts}" if 1 < len(self.parts) <= 8 else ""
        if len(self.parts) > 8:
            parts = f", {len(self.parts)} parts"
        return f"{text}, activations={self.activations!r}{parts}"

    # Parts

    def split(self) -> list[Self]:
        """A layer for each part, in order; ``[self]`` where there is one.

        The inverse of :func:`merge`. Codes are views of this layer's; scales are copies.
        """
        if len(self.parts) == 1:
            return [self]
        biases: Sequence[Tensor | None] = [None] * len(self.parts)
        if self.bias is not None:
            biases = self.bias.split([*self.parts])
        activations: Any = self.activations
        return [
            self._of(self.in_features, tensors, bias, None, activations)
            for tensors, bias in zip(self._tensors_of_parts(), biases, strict=True)
        ]

    def _rows_of_parts(self, name: str) -> list[int]:
        """How many rows of the tensor ``name`` each part has."""
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

    def _of_rows(self, values: Tensor) -> Tensor:
        """(N,): of the values of the parts, that of the part that a row belongs to."""
        return torch.cat([value.expand(rows) for value, rows in zip(values, self.parts, strict=True)])


def merge(layers: Sequence[QuantLinear]) -> QuantLinear:
    """One layer that computes the results of several with the same input, side by side.

    For q, k and v, or gate and up: one GEMM reads the input once. ``y.split(layer.parts, -1)`` takes the results apart.
    The global scales of NVFP4 weights, and those of FP8 weights with one for the tensor, stay each part's own, as a
    column of factors in the GEMM's epilogue; nothing is quantised again. Activations use the greatest of the input
    scales.

    Args:
        layers: of one class, with equal ``in_features`` and ``activations``, and with a bias all or none. FP8 blocks:
            ``out_features`` of each but the last is a multiple of 128, because parts share no block.

    Raises:
        ValueError: for layers that do not fit together.
    """
    if not layers:
        raise ValueError("merge: there are no layers")
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
    return first._of(first.in_features, tensors, torch.cat(biases) if biases else None, parts, activations)


def prefetch_(layers: Iterable[QuantLinear]) -> None:
    """Have the GEMM of each layer, with few rows, bring the weight of the next one into L2.

    It changes no result, and what was said of a layer before is forgotten. A copy of a layer, or one that takes its
    place, has to be named again. In compiled models the pass of ``integrations.inductor`` finds the order of calls
    itself.

    Args:
        layers: in the order in which a model calls them. The last one brings nothing.
    """
    every = [*layers]
    for layer, following in zip(every, (*every[1:], None), strict=True):
        link(layer, following)


def following_of(layer: QuantLinear) -> QuantLinear | None:
    """The layer that is called next, if that is known and still there."""
    found = _FOLLOWING.get(layer)
    return None if found is None else found()


def link(layer: QuantLinear, following: QuantLinear | None) -> None:
    """Name the layer that is called next, or none."""
    _FOLLOWING.pop(layer, None)
    if following is not None:
        _FOLLOWING[layer] = weakref.ref(following)


# Not in the modules, whose copies and files would follow the chain
_FOLLOWING: weakref.WeakKeyDictionary[QuantLinear, weakref.ref[QuantLinear]] = weakref.WeakKeyDictionary()


def _rows_of(x: Tensor) -> Tensor:
    """``x``, (..., K), as rows (M, K)."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, one below the other; by bytes, since not every torch concatenates FP8."""
    if tensors[0].dtype != torch.float8_e4m3fn:
        return torch.cat([*tensors])
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(torch.float8_e4m3fn)


def moved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What ``fn`` makes of the tensor's bytes: ``.to(dtype)`` casts only what is floating-point."""
    as_bytes = fn(tensor.view(torch.uint8))
    if as_bytes.dtype != torch.uint8:  # Module.type casts everything
        return tensor.to(as_bytes.device)
    return as_bytes.view(tensor.dtype)
