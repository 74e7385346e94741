"""Part of an engine's method for routed experts that does not depend on the engine: the tensors that a checkpoint
contains, and the tensors that the kernels read."""

import types
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint._layers import READ, Field
from torch_cute_ops.checkpoint.spec import LayerScheme
from torch_cute_ops.integrations._engines import experts
from torch_cute_ops.integrations._engines.experts import MULTIPLES, ExpertForm
from torch_cute_ops.integrations._engines.linear import (
    UNLOADED,
    Loader,
    as_bytes,
    is_unloaded,
    keeps_input_scale,
    mark_unloaded,
    stored_fields,
)
from torch_cute_ops.integrations._engines.prepare import Preparation, arch_of
from torch_cute_ops.nn._base import Activations
from torch_cute_ops.nn._expert_tensors import FewActivations
from torch_cute_ops.quantized import FP4_FORMATS, FP8_BLOCK

GPT_OSS: Final = "gpt-oss"
"""Style of checkpoints in which the rows of gate and up alternate."""
SHARDS: Final = {"w13": 2, "w2": 1}
"""Number of linear layers per expert in each of the engine's parameters."""
_READ: Final = {**READ, (GPT_OSS, "mxfp4"): tuple(each for each in READ["modelopt", "mxfp4"] if not each.is_optional)}
"""Tensors of a linear layer in a checkpoint. Engines give gpt-oss's tensors the same names."""


def block_of(fmt: str) -> int:
    """Return the number of columns that share a scale of an FP4 weight, or 1 for other formats."""
    return FP4_FORMATS[fmt].block_size if fmt in FP4_FORMATS else 1


def rounded(fmt: str, hidden: int, width: int) -> tuple[int, int]:
    """Round the widths of experts up to multiples that kernels support."""
    multiple = MULTIPLES[fmt]
    return -(-hidden // multiple) * multiple, -(-width // multiple) * multiple


def reason_unread(scheme: LayerScheme) -> str | None:
    """Return the reason that no kernel reads experts of a format, or None if kernels do."""
    if (scheme.style, scheme.format) in _READ and scheme.format in MULTIPLES:
        return None
    return f"there is no kernel for {scheme.format} experts of {scheme.style} checkpoints"


def reason_divided(scheme: LayerScheme, ranks: int, width: int) -> str | None:
    """Return the reason that ranks cannot divide experts, or None if they can.

    Args:
        scheme: format of the experts.
        ranks: number of ranks that divide each expert.
        width: width of an expert on each rank.
    """
    block = FP8_BLOCK if scheme.format == "fp8_block" else block_of(scheme.format)
    return "ranks share a block of scales" if ranks > 1 and width % block else None


def divided(width: int, ranks: int) -> int:
    """Return the width of gpt-oss's experts on each rank except the last, without padding. Engines divide these experts
    among ranks in whole blocks of scales, so the last rank may get fewer columns."""
    block = block_of("mxfp4")
    return -(-width // block // ranks) * block


def width_of_rank(width: int, ranks: int, rank: int) -> int:
    """Return the width of gpt-oss's experts on a rank, without padding."""
    most = divided(width, ranks)
    return min(max(width - rank * most, 0), most)


class ExpertsMethod:
    """Part of an engine's method that computes routed experts with this package's kernels.

    Calls with few tokens compute only routed pairs of a token and an expert, with 16-bit activations (or FP4). Calls
    with more tokens permute the tokens by expert and use FP8 activations. Experts whose widths kernels do not support
    are padded with zeros.

    Args:
        scheme: format of the layer in the checkpoint.
        prefix: name of the layer, for messages.
        activations: format of activations for FP4 weights.
        preparation: collection of the kernels to compile for the model, to which this layer adds the kernels that it
            needs.
        has_few_tokens: False if every call permutes the tokens.

    Attributes:
        turned_off: hint appended to the log message about extra memory: how to turn off calls with few tokens.
        bias_name: suffix of the names of bias parameters.
        form: form of the layer, or None before :meth:`add_weights`.
    """

    turned_off: ClassVar[str] = ""
    bias_name: ClassVar[str] = "bias"

    def __init__(
        self,
        scheme: LayerScheme,
        prefix: str,
        activations: Activations,
        preparation: Preparation,
        *,
        has_few_tokens: bool,
    ) -> None:
        self.scheme, self.prefix, self.activations, self.preparation = scheme, prefix, activations, preparation
        self.form: ExpertForm | None = None
        self._has_few_tokens = has_few_tokens
        self._has_input_scale: bool | None = None

    def form_of(self, few: FewActivations | None, hidden: int, width: int) -> ExpertForm:
        """Return the form of the layer.

        Args:
            few: activations of calls with few tokens.
            hidden, width: sizes of the experts on this rank, with padding.
        """
        raise NotImplementedError

    def filled(self, tensor: Tensor, part: str, field: Field | None) -> Tensor:
        """Pad a loaded tensor with zeros to the sizes of ``form``. Codes of 0 decode to 0 with every finite scale, so
        padding does not change results.

        Args:
            tensor: (E, rows, ...), loaded tensor of all experts.
            part: ``"w13"`` or ``"w2"``.
            field: stored tensor, or None for a bias.
        """
        raise NotImplementedError

    def zeroed(self, tensor: Tensor, part: str, field: Field | None, hidden: int, width: int) -> Tensor:
        """Write zeros beyond the rows and columns that the checkpoint contains, for parameters with padded sizes.

        Args:
            tensor, part, field: as in :meth:`filled`.
            hidden, width: sizes of the experts in the checkpoint, on this rank.
        """
        rows, columns = (width, hidden) if part == "w13" else (hidden, width)
        if field is not None:
            shape = field.shape(rows, columns)
            rows, columns = shape[0], shape[-1]
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        if part == "w13" and self.scheme.style == GPT_OSS:
            data[:, 2 * rows :] = 0
        else:
            data.unflatten(1, (SHARDS[part], -1))[:, :, rows:] = 0
        if data.dim() == 3 and data.shape[-1] > 1:
            data[..., columns:] = 0
        return tensor

    def note(self, message: str) -> None:
        """Log a message once."""
        raise NotImplementedError

    # Loading

    def add_weights(
        self,
        layer: Any,
        hidden: int,
        width: int,
        loader: Callable[..., Any],
        check_shard: Callable[[str], None] = lambda shard: None,
    ) -> None:
        """Add a parameter for each tensor of the checkpoint.

        Args:
            layer: layer of the experts.
            hidden, width: sizes of the experts' parameters on this rank.
            loader: the engine's function that copies this rank's part of a stored tensor.
            check_shard: function that raises an error for the id of a shard that cannot be loaded.
        """
        device = torch.empty(0).device  # engines build models in a block that sets torch's default device
        self._set_form(*rounded(self.scheme.format, hidden, width), device, self._has_input_scales())
        assert self.form is not None
        for part, (n, k) in {"w13": (width, hidden), "w2": (hidden, width)}.items():
            for field in stored_fields(self.scheme, _READ):
                parameter = self._parameter(field, self.form.experts, SHARDS[part], n, k)
                vars(parameter)["weight_loader"] = _adapted(loader, layer, field, check_shard)
                layer.register_parameter(f"{part}_{field.stored}", parameter)
            if self.form.has_bias:
                data = torch.zeros((self.form.experts, SHARDS[part] * n), dtype=self.form.dtype)
                bias = nn.Parameter(data, requires_grad=False)
                vars(bias)["weight_loader"] = loader
                layer.register_parameter(f"{part}_{self.bias_name}", bias)
        self.preparation.add(self.form)

    def _has_input_scales(self) -> bool:
        return self.scheme.activations == "fp4" and self.scheme.format == "nvfp4"

    def _set_form(self, hidden: int, width: int, device: torch.device, has_input_scales: bool) -> None:
        """Set the form of the layer. FP4 activations of NVFP4 weights need input scales."""
        fmt, form = self.scheme.format, self.form_of(None, hidden, width)
        wants_fp4 = self.activations == "fp4" and (has_input_scales or fmt == "mxfp4")
        few = None
        if self._has_few_tokens:
            wanted: FewActivations = "fp4" if wants_fp4 else "16bit"
            few = experts.few_activations(fmt, form.experts, hidden, width, arch_of(device), wanted)
        self.form = self.form_of(few, hidden, width)

    def _parameter(self, field: Field, count: int, shards: int, n: int, k: int) -> nn.Parameter:
        """Return the parameter for a stored tensor of all experts. Its attributes tell the engine's loader how ranks
        divide the tensor.

        Args:
            field: stored tensor.
            count: number of experts.
            shards: number of linear layers per expert in the parameter.
            n: rows of each of these layers.
            k: columns.
        """
        dtype, shape, kind = field.dtypes[0], field.shape(n, k), None
        if field.name in ("weight_scale_2", "input_scale"):
            shape, kind = ((2,) if shards == 2 else ()), "tensor"
        elif self.scheme.format == "fp8_channel" and field.name == "weight_scale":
            shape, kind = (shards * n, *shape[1:]), "channel"
        else:
            shape = (shards * shape[0], shape[-1])
            if field.name != "weight":
                kind = "block"
        data = torch.empty((count, *shape), dtype=dtype)
        if kind is not None:
            data.view(torch.uint8).fill_(UNLOADED)
        parameter = nn.Parameter(data, requires_grad=False)
        if kind is not None:
            vars(parameter)["quant_method"] = kind
        return parameter

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loaded tensors by the tensors that the kernels read, and prepare the kernels.

        As for linear layers, a second call keeps the form that the first call set.

        Raises:
            ValueError: if the checkpoint lacks a tensor of an expert.
        """
        assert self.form is not None
        hidden, width = self.form.hidden, self.form.width
        parts = {name: self._taken(layer, name) for name in SHARDS}
        scales = [_reciprocal(part.pop("input_scale", None)) for part in parts.values()]
        both = [each for each in scales if each is not None]
        of_both = {"input_scale": both} if len(both) == len(scales) else {}
        self._has_input_scale = keeps_input_scale(self.prefix, of_both, self._has_input_scale)
        device, given = parts["w13"]["weight"].device, {}
        self._set_form(hidden, width, device, self._has_input_scale)
        if self.form.few == "fp4" and of_both:
            of_input, of_hidden = of_both["input_scale"]
            given = {"input_global_scale": of_input.min().reshape(1), "hidden_global_scale": of_hidden}
        tensors = experts.build(self.form, parts["w13"], parts["w2"], **given)
        copied = experts.bytes_of_copy(tensors)
        if copied:
            self.note(
                f"each layer of {self.form.experts} experts stores a second copy of its down layers for calls with "
                f"few tokens, {copied / 2**20:.1f} MiB{self.turned_off}"
            )
        for name, tensor in tensors.items():
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.preparation.add(self.form)
        self.preparation.run(device)

    def _taken(self, layer: Any, part: str) -> dict[str, Tensor]:
        """Remove the loaded parameters of ``w13`` or ``w2`` from a layer. Return them by the names that
        ``torch_cute_ops.nn`` uses, with zeros for elements that the checkpoint does not contain.

        Raises:
            ValueError: if the checkpoint lacks a tensor of an expert.
        """
        assert self.form is not None
        taken = {}
        read: list[tuple[str, Field | None]] = [(each.stored, each) for each in stored_fields(self.scheme, _READ)]
        read += [(self.bias_name, None)] * self.form.has_bias
        for stored, field in read:
            parameter = getattr(layer, f"{part}_{stored}")
            tensor: Tensor = parameter.data
            delattr(layer, f"{part}_{stored}")
            if self._has_input_scale is not None and field is not None and field.name != "weight":
                mark_unloaded(parameter)
            if field is not None and field.name == "input_scale":
                taken[field.name] = tensor.reciprocal() if field.is_reciprocal else tensor
                continue
            if tensor.dim() > 1 and (field is None or field.name != "weight_scale_2"):
                tensor = self.filled(tensor, part, field)
            if field is not None and field.name != "weight" and bool(is_unloaded(tensor).any()):
                raise ValueError(
                    f"{self.prefix}: the checkpoint has no {part}_{stored}, or not for every expert; experts that are "
                    "not quantised belong in the ignored layers of quantization_config"
                )
            if part == "w13" and self.scheme.style == GPT_OSS:  # gate and up alternate
                tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
            name = "bias" if field is None else field.name
            if name == "weight_scale_2":
                tensor = tensor.reshape(-1)
            elif self.scheme.format == "fp8_channel" and name == "weight_scale":
                tensor = tensor.flatten(1).unsqueeze(-1)
            elif name == "bias":
                tensor = tensor.to(self.form.dtype)
            taken[name] = tensor.reciprocal() if field is not None and field.is_reciprocal else tensor
        return taken


def _adapted(
    loader: Callable[..., Any], layer: Any, field: Field, check_shard: Callable[[str], None]
) -> Callable[..., Any]:
    """Wrap an engine's loader for stored forms that it does not support.

    Codes and e8m0 scales of any one-byte dtype are copied as bytes. ModelOpt's four-dimensional block scales become
    matrices. ``input_scale`` is renamed before the loader is called, because under its own name the loader would not
    keep separate scales of gate and up.

    Args:
        loader: the engine's function that copies this rank's part.
        layer: layer of the experts.
        field: stored tensor.
        check_shard: function that raises an error for the id of a shard that cannot be loaded.
    """

    def converted(loaded_weight: Tensor) -> Tensor:
        if field.dtypes[0] == torch.uint8:
            loaded_weight = as_bytes(loaded_weight)
        if field.name == "weight_scale_inv" and loaded_weight.dim() == 4:
            loaded_weight = loaded_weight.flatten(2).flatten(0, 1)
        return loaded_weight

    copy = Loader(loader, layer, is_marking=field.name != "weight").bound(converted).__func__

    def load(
        owner: Any,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        *args: Any,
        **options: Any,
    ) -> Any:
        check_shard(str(shard_id))
        if field.name == "input_scale":
            weight_name = weight_name.replace("input_scale", "scale").replace("input_global_scale", "scale")
        return copy(owner, param, loaded_weight, weight_name, shard_id, *args, **options)

    return types.MethodType(load, layer)


def _reciprocal(scales: Tensor | None) -> Tensor | None:
    """Return the global scales of activations, (E,) or (E, 2), from the input scales of experts, or None if no expert
    has a calibrated scale. Experts without a calibrated scale get the largest input scale."""
    if scales is None:
        return None
    is_calibrated = scales.isfinite() & (scales > 0)
    if not bool(is_calibrated.any()):
        return None
    largest = scales[is_calibrated].max()
    return torch.where(is_calibrated, scales, largest).reciprocal()
