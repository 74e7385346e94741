"""Method for the linear layers of an engine: the tensors that it loads, and the product with the input.

SGLang derived its classes of layers and parameters from vLLM's, so one method serves both engines.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint._layers import READ, Field
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.formats.fp4 import decode_e2m1, decode_ue8m0, unpack_e2m1
from torch_cute_ops.integrations._engines.gemms import Form, Gemm, tensors_of
from torch_cute_ops.integrations._engines.invariant import backend_of, gemm_of
from torch_cute_ops.integrations._engines.prepare import Preparation, arch_of
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn.quantize import SCHEMES
from torch_cute_ops.quantized import FP4_FORMATS, FP8_BLOCK, decode_fp8_blocks

UNLOADED: Final = 0xFF
"""Byte that stands for NaN in every format of scales. It marks scales that were not loaded."""
_LOADED: Final = "is_loaded"
"""Attribute of parameters that a loader has written to."""
_BLOCK_SCALES: Final = ("weight_scale", "weight_scale_inv")
"""Names of the scales that are block scales in a format with blocks."""


class Engine(NamedTuple):
    """Classes and functions of an engine.

    Attributes:
        name: name of the engine, for messages.
        matrix: class of parameters that ranks divide along either dimension, such as weights.
        blocks: class of block scales of FP8 weights.
        channels: class of scales of a weight's rows.
        per_layer: class of parameters with an element for each merged layer.
        unquantised: class of the method for layers in 16 bits.
        warn: function that shows a message once.
    """

    name: str
    matrix: Any
    blocks: Any
    channels: Any
    per_layer: Any
    unquantised: Any
    warn: Callable[[str], None]


class LinearMethod:
    """Part of an engine's method that multiplies by quantised weights with this package's kernels.

    The weight of a layer is decoded to 16 bits when it is loaded if no kernel supports its size, or if merged parts or
    ranks share a block of scales. In the second case each scale is repeated for the rows and columns of its block, so
    that the engine's loaders can divide the block. Only if ranks share a byte of two FP4 codes is the engine's own
    method used.

    Args:
        scheme: format of the layer in the checkpoint.
        prefix: name of the layer, for messages.
        activations: format of activations for FP4 weights.
        preparation: collection of the kernels to compile for the model, to which this layer adds the kernels that it
            needs.
        own: function that returns the engine's native method for this layer.
        multiplies_identity: True if the engine multiplies an identity matrix by the weight to decode it. FP4 weights
            then keep 16-bit activations, and the checkpoint's scale of the input is not used, because the 1 of the
            identity may exceed the largest value that this scale can represent.
        is_invariant: True if a row of the result must not depend on the other rows of a call.

    Attributes:
        engine: classes and functions of the engine.
    """

    engine: ClassVar[Engine]

    def __init__(
        self,
        scheme: LayerScheme,
        prefix: str,
        activations: Activations,
        preparation: Preparation,
        own: Callable[[], Any],
        *,
        multiplies_identity: bool = False,
        is_invariant: bool = False,
    ) -> None:
        self.scheme, self.prefix = scheme, prefix
        self.activations: Activations = "auto" if multiplies_identity else activations
        self._multiplies_identity, self._is_invariant = multiplies_identity, is_invariant
        self.preparation, self._own = preparation, own
        self._parts: tuple[int, ...] = ()
        self._are_blocks_divided = False
        self._form: Form | None = None
        self._gemm: Gemm | None = None
        self._decoded: Any = None
        self._has_input_scale: bool | None = None

    # Loading

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Add a parameter for each tensor of the checkpoint. Arguments are as for the engine's
        ``LinearMethodBase``."""
        self._parts, k = tuple(output_partition_sizes), input_size_per_partition
        if self.scheme.format in FP4_FORMATS and k % 2:
            method: Any = self._own()
            self.engine.warn(
                f"{self.prefix}: ranks would share a byte of two FP4 codes; {self.engine.name}'s own method is used"
            )
            layer.quant_method = method
            method.create_weights(
                layer, k, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
            )
            return
        is_vocabulary = not hasattr(layer, "input_size")
        self._are_blocks_divided = self._divides_blocks(k, input_size, output_size, is_vocabulary=is_vocabulary)
        rows = getattr(layer, "org_vocab_size", output_size)  # an output head is padded
        if self.scheme.format == "fp8_block" and not self._are_blocks_divided:
            vars(layer)["weight_block_size"] = [FP8_BLOCK, FP8_BLOCK]  # the loaders read it
        given = extra_weight_attrs["weight_loader"]
        for field in stored_fields(self.scheme):
            loader = Loader(given, layer, is_marking="scale" in field.stored)
            if self._are_blocks_divided and field.name in _BLOCK_SCALES:
                parameter = self._repeated(field, k, (rows, input_size), loader)
            else:
                parameter = self._parameter(field, k, loader)
            layer.register_parameter(field.stored, parameter)
        has_input_scale = self.scheme.activations in ("fp4", "fp8_static") and not self._multiplies_identity
        device = torch.empty(0).device  # engines build models in a block that sets torch's default device
        self._form = self._form_of(k, params_dtype, has_input_scale, _adds_bias(layer), device)
        if self._reason_decoded(self._form) is None:
            self.preparation.add(self._form)

    def _divides_blocks(self, k: int, input_size: int, output_size: int, *, is_vocabulary: bool) -> bool:
        """Return True if merged parts, ranks or a padded vocabulary would share a block of scales.

        Args:
            k: columns of the weight on this rank.
            input_size, output_size: columns and rows of the weights of all ranks.
            is_vocabulary: True for an output head.
        """
        if self.scheme.format != "fp8_block":
            return k % self._block != 0
        if k != input_size and k % FP8_BLOCK:
            return True
        # The last merged part may end inside a block, unless the next rank has the rest of the block.
        inner = self._parts[:-1] if sum(self._parts) == output_size else self._parts
        return is_vocabulary or any(rows % FP8_BLOCK for rows in inner)

    @property
    def _block(self) -> int:
        """Columns of the weight that share a scale, or 1 without block scales."""
        if self.scheme.format == "fp8_block":
            return FP8_BLOCK
        fmt = FP4_FORMATS.get(self.scheme.format)
        return fmt.block_size if fmt is not None else 1

    def _reason_decoded(self, form: Form) -> str | None:
        """Return the reason that the weight is decoded to 16 bits, or None if kernels read it."""
        if self._are_blocks_divided:
            return "merged layers or ranks share a block of scales"
        return form.reason_unsupported

    def _repeated(self, field: Field, k: int, whole: tuple[int, int], loader: "Loader") -> nn.Parameter:
        """Return the parameter for block scales that merged parts or ranks divide. It has one row per row of the
        weight. Each column stands for as many columns of the weight as possible, such that all of them belong to one
        block and one rank.

        Args:
            field: block scales.
            k: columns of the weight on this rank.
            whole: rows and columns of the weight in the checkpoint.
            loader: the engine's loader, which copies this rank's part.
        """
        block = self._block
        group = math.gcd(k, block)
        rows = FP8_BLOCK if self.scheme.format == "fp8_block" else 1
        dtype = field.dtypes[0]

        def repeated(loaded_weight: Tensor) -> Tensor:
            scale = loaded_weight.view(dtype) if dtype == torch.uint8 else loaded_weight.to(dtype)
            scale = scale.flatten(1)
            if dtype.itemsize == 1:  # torch lacks repeat_interleave for FP8 dtypes
                scale = scale.view(torch.uint8)
            scale = scale.repeat_interleave(rows, 0).repeat_interleave(block // group, 1)
            return scale[: whole[0], : whole[1] // group].view(dtype)

        data = torch.empty((sum(self._parts), k // group), dtype=dtype)
        data.view(torch.uint8).fill_(UNLOADED)
        parameter: nn.Parameter = self.engine.matrix(
            data=data, input_dim=1, output_dim=0, weight_loader=loader.bound(repeated)
        )
        return parameter

    def _parameter(self, field: Field, k: int, loader: "Loader") -> nn.Parameter:
        """Return the engine's parameter for a stored tensor: its class says how merged layers and ranks divide it."""
        dtype, n = field.dtypes[0], sum(self._parts)
        shape = field.shape(n, k)
        options: dict[str, Any] = {"weight_loader": loader.bound()}
        kind = self.engine.per_layer
        if len(shape) == 2 and field.name == "weight_scale_inv":
            kind, options = self.engine.blocks, {**options, "output_dim": 0, "input_dim": 1}
            if self.scheme.style == "modelopt":
                shape, options["input_dim"] = (shape[0], 1, shape[1], 1), 2
        elif self.scheme.format == "fp8_channel" and field.name == "weight_scale":
            kind, options = self.engine.channels, {**options, "output_dim": 0}
        elif len(shape) == 2:
            kind, options = self.engine.matrix, {**options, "output_dim": 0, "input_dim": 1}
            if dtype == torch.uint8:
                options["weight_loader"] = loader.bound(as_bytes)
        else:
            shape = (len(self._parts),)
        data = torch.empty(shape, dtype=dtype)
        if "scale" in field.stored:
            data.view(torch.uint8).fill_(UNLOADED)
        parameter: nn.Parameter = kind(data=data, **options)
        return parameter

    def _form_of(self, k: int, dtype: torch.dtype, has_input_scale: bool, has_bias: bool, device: torch.device) -> Form:
        fmt, parts = self.scheme.format, self._parts
        activations = SCHEMES[fmt].choices[0] if self.activations == "auto" else self.activations
        if activations not in SCHEMES[fmt].choices:
            activations = SCHEMES[fmt].choices[0]
        if fmt == "nvfp4" and activations == "fp4" and not has_input_scale:
            activations = "16bit"
        if activations == "fp8" and fmt in FP4_FORMATS and k % 64:
            activations = "16bit"
        has_input_scale = has_input_scale and activations != "16bit" and fmt != "mxfp4"
        form = Form(fmt, activations, sum(parts), k, len(parts), has_input_scale, dtype, has_bias)
        arch = arch_of(device)
        if self._is_invariant and self._reason_decoded(form) is None:
            form = dataclasses.replace(form, backend=backend_of(form, arch))
        return form

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the loaded tensors by the tensors that the kernels read, and prepare the kernels.

        If the engine loads weights again, it calls this method again, and then copies the new tensors into the first
        tensors, which captured graphs read. Therefore the layer keeps its form: an input scale is used only if the
        first load contained one.

        Raises:
            ValueError: if the checkpoint lacks a tensor of the layer.
        """
        form = self._form
        assert form is not None
        tensors = self._taken(layer)
        self._has_input_scale = keeps_input_scale(self.prefix, tensors, self._has_input_scale)
        has_input_scale, device = self._has_input_scale, tensors["weight"].device
        form = self._form_of(form.k, form.dtype, has_input_scale, form.has_bias, device)
        reason = self._reason_decoded(form)
        if reason is not None:
            self.engine.warn(f"{self.prefix}: {reason}; the weight is decoded to 16 bits")
            weight = _decoded(form, tensors, self._parts, has_row_scales=self._are_blocks_divided)
            layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
            self._decoded = self.engine.unquantised()
            self._decoded.process_weights_after_loading(layer)
            return
        cls: Any = SCHEMES[form.scheme]
        module = cls.from_tensors(**tensors, parts=self._parts, activations=form.activations)
        for name, tensor in tensors_of(module).items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._form, self._gemm = form, gemm_of(form)
        self.preparation.add(form)  # the checkpoint may contain other input scales than its configuration says
        self.preparation.run(module.weight.device)

    def _taken(self, layer: nn.Module) -> dict[str, Tensor]:
        """Remove the loaded parameters from a layer; return them by the names of ``torch_cute_ops.nn``.

        Raises:
            ValueError: if the checkpoint lacks a tensor of the layer.
        """
        taken = {}
        for field in stored_fields(self.scheme):
            parameter = getattr(layer, field.stored)
            tensor = parameter.data
            delattr(layer, field.stored)
            if self._has_input_scale is not None and "scale" in field.stored:
                mark_unloaded(parameter)
            if field.name == "input_scale":
                shared = _largest(tensor.reciprocal() if field.is_reciprocal else tensor)
                if shared is not None and self.scheme.format != "mxfp4" and not self._multiplies_identity:
                    taken[field.name] = shared
                continue
            if "scale" in field.stored and bool(is_unloaded(tensor).any()):
                raise ValueError(
                    f"{self.prefix}: the checkpoint has no {field.stored}, or not for every merged layer; a layer that "
                    "is not quantised belongs in the ignored layers of quantization_config"
                )
            if field.name == "weight_scale_inv":
                tensor = tensor.flatten(1)
            taken[field.name] = tensor.reciprocal() if field.is_reciprocal else tensor
        return taken

    # Use

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x · Wᵀ + bias``, (..., N) in the dtype of ``x``, (..., K)."""
        if self._decoded is not None:
            decoded: Tensor = self._decoded.apply(layer, x, bias)
            return decoded
        assert self._gemm is not None
        y = self._gemm(layer, x.reshape(-1, x.shape[-1]), bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def stored_fields(scheme: LayerScheme, tables: Mapping[tuple[str, str], tuple[Field, ...]] = READ) -> Iterator[Field]:
    """Yield the tensors that a checkpoint contains for a layer of this scheme. ``tables`` is keyed by style and
    format."""
    for field in tables[scheme.style, scheme.format]:
        # ModelOpt's weight-only checkpoints may contain input scales.
        is_there = scheme.activations in ("fp4", "fp8_static") or scheme.style == "modelopt"
        if not field.is_optional or (is_there and scheme.activations != "fp8"):
            yield field


def _adds_bias(layer: Any) -> bool:
    """Return True if the engine passes a bias to ``apply``. If the K of a layer is divided among ranks, only the first
    rank gets the bias."""
    is_row_parallel = hasattr(layer, "input_is_parallel")
    return (
        bool(getattr(layer, "has_bias", getattr(layer, "with_bias", False)))
        and not getattr(layer, "skip_bias_add", False)
        and not (is_row_parallel and layer.tp_rank > 0)
    )


class Loader(NamedTuple):
    """Weight loader of a parameter.

    When an engine loads weights again, it creates the parameter again, with undefined content. The first call of the
    loader then fills scales with ``UNLOADED``, as they were when the layer was made.

    Attributes:
        given: the engine's loader, usually a method of the layer.
        layer: layer of the parameter.
        is_marking: True for scales.
    """

    given: Callable[..., Any]
    layer: nn.Module
    is_marking: bool

    def bound(self, convert: Callable[[Tensor], Tensor] | None = None) -> types.MethodType:
        """Return a loader that converts the loaded tensor first.

        The result is a method of the layer if the engine's loader is one. vLLM stores a bound method as its function,
        without the layer. A plain function that refers to the layer would keep the layer in memory.
        """
        given = getattr(self.given, "__func__", None) if getattr(self.given, "__self__", None) is self.layer else None
        function, is_marking = self.given if given is None else given, self.is_marking

        def load(owner: nn.Module, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_marking and not param.is_meta and not vars(param).get(_LOADED):
                mark_unloaded(param)
                vars(param)[_LOADED] = True
            loaded = loaded_weight if convert is None else convert(loaded_weight)
            return function(*(() if given is None else (owner,)), param, loaded, *args, **kwargs)

        return types.MethodType(load, self.layer)


def as_bytes(loaded_weight: Tensor) -> Tensor:
    """Return the bytes of codes or of e8m0 scales, whatever dtype the checkpoint gives them."""
    return loaded_weight.view(torch.uint8)


def mark_unloaded(parameter: nn.Parameter) -> None:
    """Fill scales with ``UNLOADED``, unless a loader has written to them."""
    if not vars(parameter).get(_LOADED):
        parameter.data.view(torch.uint8).fill_(UNLOADED)


def keeps_input_scale(prefix: str, tensors: dict[str, Any], had: bool | None) -> bool:
    """Return True if a layer uses a scale of its input; remove a scale that the first load did not contain.

    Args:
        prefix: name of the layer, for the message.
        tensors: loaded tensors by name.
        had: result of the first load, or None in the first load.

    Raises:
        ValueError: if only the first load contained a scale.
    """
    if had is False:
        tensors.pop("input_scale", None)
    if had and "input_scale" not in tensors:
        raise ValueError(
            f"{prefix}: the reloaded weights have no input scale, but the layer was loaded with one; reload a "
            "checkpoint with the same tensors"
        )
    return "input_scale" in tensors


def is_unloaded(scale: Tensor) -> Tensor:
    """Return True for each scale that was not loaded."""
    return scale == UNLOADED if scale.dtype == torch.uint8 else scale.float().isnan()


def _largest(scales: Tensor) -> Tensor | None:
    """Return the largest of the calibrated scales, with shape (1,), or None if no scale is calibrated.

    Merged layers share their input, so they need one scale.
    """
    calibrated = scales.flatten()[scales.flatten().isfinite() & (scales.flatten() > 0)]
    return calibrated.max().reshape(1) if calibrated.numel() else None


def _decoded(form: Form, tensors: dict[str, Tensor], parts: Sequence[int], *, has_row_scales: bool) -> Tensor:
    """Return the weight (N, K) in the dtype of the model, rounded once.

    Args:
        form: form of the layer.
        tensors: loaded tensors by the names of ``torch_cute_ops.nn``.
        parts: rows of each merged layer.
        has_row_scales: True if FP8 block scales have a row for each row of the weight; FP4 block scales always do.
    """
    weight, dtype = tensors["weight"], form.dtype
    if form.scheme in ("fp8_tensor", "fp8_channel"):
        return (weight.float() * _by_row(tensors["weight_scale"], parts)).to(dtype)
    if form.scheme == "fp8_block" and not has_row_scales:
        return decode_fp8_blocks(weight, tensors["weight_scale_inv"], dtype)
    scale = tensors["weight_scale_inv" if form.scheme == "fp8_block" else "weight_scale"]
    values = weight.float() if form.scheme == "fp8_block" else decode_e2m1(unpack_e2m1(weight))
    factors = decode_ue8m0(scale) if scale.dtype == torch.uint8 else scale.float()
    values = values * factors.repeat_interleave(form.k // scale.shape[1], 1)
    return (values * _by_row(tensors["weight_scale_2"], parts) if form.scheme == "nvfp4" else values).to(dtype)


def _by_row(scale: Tensor, parts: Sequence[int]) -> Tensor:
    """Return a factor for each row, (N, 1), from a factor for each part or each row."""
    if scale.numel() == sum(parts):
        return scale.reshape(-1, 1)
    return scale.reshape(-1).repeat_interleave(torch.tensor(parts, device=scale.device)).reshape(-1, 1)
