"""Read the quantised experts of a layer, in each form in which checkpoints store them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torch_cute_ops.checkpoint import experts, torchao
from torch_cute_ops.checkpoint._layers import read_tensors
from torch_cute_ops.checkpoint._stored import StoredLayers
from torch_cute_ops.checkpoint._values import check_finite
from torch_cute_ops.nn import FP8BlockLinear, MXFP4Linear, QuantLinear
from torch_cute_ops.nn.experts import FORMATS, stack
from torch_cute_ops.nn.float_experts import FloatExperts

Layers = tuple[QuantLinear, QuantLinear]
"""One layer with the weights of gate and up of all experts, and one layer with the weights of down."""


class ExpertReader:
    """Reads the experts of a layer as two quantised layers.

    Args:
        layers: layers of the checkpoint.
        device_of: function that returns the device for the tensors that replace a tensor of the model.
    """

    def __init__(self, layers: StoredLayers, device_of: Callable[[Tensor], torch.device]) -> None:
        self.layers, self.files, self.device_of = layers, layers.files, device_of

    def read_layers(self, given: FloatExperts, layers: Sequence[Sequence[str]]) -> Layers:
        """Read experts that are stored as one quantised layer per matrix.

        Args:
            given: unquantised experts of the model.
            layers: names of the gate, up and down layers of each expert.
        """
        every = [layer for each in layers for layer in each]
        schemes = {self.layers.scheme(layer) for layer in every}
        first = layers[0][0]
        scheme = schemes.pop()
        if scheme is None or schemes:
            reason = "does not say how" if scheme is None else "gives several schemes for the experts of this layer"
            raise ValueError(f"{self.layers.describe(first)} is quantised, but {self.layers.spec.path} {reason}")
        self.layers.note_uncalibrated(every, [scheme] * len(every))
        is_fp8, cls = "fp8" in scheme.format, FORMATS.get(scheme.format, FP8BlockLinear)
        device = self.device_of(given.module.down_proj)

        def stacked(sources: Sequence[str], n: int, k: int, has_bias: bool) -> QuantLinear:
            bias = (
                torch.empty(n * len(sources), dtype=given.module.down_proj.dtype, device=device) if has_bias else None
            )

            def tensors_of(i: int) -> dict[str, Tensor]:
                source = sources[i]
                tensors = dict(read_tensors(self.files, source, scheme, has_input_scale=False))
                got = (len(tensors["weight"]), tensors["weight"].shape[1] * (1 if is_fp8 else 2))
                if got != (n, k):
                    raise ValueError(f"{self.layers.describe(source)}: (N, K) is {got}; expected {(n, k)}")
                if scheme.format == "fp8_tensor":  # every block gets the tensor's scale
                    blocks = -(-n // 128), -(-k // 128)
                    tensors["weight_scale_inv"] = tensors.pop("weight_scale").expand(blocks)
                if (f"{source}.bias" in self.files) != has_bias:
                    raise ValueError(
                        f"{source} in {self.files.path} {'lacks a' if has_bias else 'contains an unexpected'} bias"
                    )
                if bias is not None:
                    own = self.files.read(f"{source}.bias")
                    check_finite(self.files.describe(f"{source}.bias"), own)
                    bias[i * n : (i + 1) * n] = own
                self.layers.use(source)
                return tensors

            try:
                return stack(cls, k, [n] * len(sources), tensors_of, device=device, bias=bias)
            except (TypeError, ValueError) as error:
                raise ValueError(f"experts of {self.layers.describe(first)}: {error}") from error

        sources = [source for gate, up, _ in layers for source in (gate, up)]
        return (
            stacked(sources, given.width, given.hidden, given.has_bias),
            stacked([down for _, _, down in layers], given.hidden, given.width, given.has_bias),
        )

    def read_fused(self, stored: str, given: FloatExperts) -> Layers:
        """Read experts whose three-dimensional parameters were quantised as a whole: transformers' FP8 blocks, or
        ModelOpt's NVFP4."""
        parts = {part: f"{stored}.{part}" for part in ("gate_up_proj", "down_proj")}
        scheme = self.layers.spec.scheme_of_tensors(self.files.original(stored))
        if scheme is None:
            tensor = self.files.describe(parts["gate_up_proj"])
            raise ValueError(f"{tensor} is quantised, but {self.layers.spec.path} does not say how")
        device = self.device_of(given.module.down_proj)
        biases = self._fused_biases(stored, given)
        read = {}
        for part, name in parts.items():
            n, k = (2 * given.width, given.hidden) if part == "gate_up_proj" else (given.hidden, given.width)
            read[part] = experts.read_fused(
                self.files, name, scheme, given.experts, n, k, is_transposed=given.is_transposed
            )
            self.layers.used.update(f"{stored}.{suffix}" for suffix in experts.fused_names(self.files, stored, part))
        cls, is_blocks = FORMATS[scheme.format], scheme.format == "fp8_block"
        if is_blocks and given.is_interleaved:
            raise ValueError(
                f"{self.files.describe(parts['gate_up_proj'])}: gate and up rows alternate, so that they share blocks; "
                "expected gate rows before up rows"
            )

        def gate_or_up(i: int) -> dict[str, Tensor]:
            own = {key: each[i // 2] for key, each in read["gate_up_proj"].items()}
            rows = {"weight", "weight_scale", "weight_scale_inv"} & {*own}
            if is_blocks:
                return own | {key: own[key].chunk(2)[i % 2] for key in rows}
            return own | {key: given.halves(own[key])[i % 2] for key in rows}

        def down(i: int) -> dict[str, Tensor]:
            return {key: each[i] for key, each in read["down_proj"].items()}

        try:
            return (
                stack(
                    cls, given.hidden, [given.width] * (2 * given.experts), gate_or_up, device=device, bias=biases[0]
                ),
                stack(cls, given.width, [given.hidden] * given.experts, down, device=device, bias=biases[1]),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.files.describe(parts['gate_up_proj'])}: {error}") from error

    def _fused_biases(self, stored: str, given: FloatExperts) -> tuple[Tensor | None, Tensor | None]:
        """Read the experts' biases into the module. Return them stacked, as ``FloatExperts.biases`` does."""
        device = self.device_of(given.module.down_proj)
        for key in ("gate_up_proj_bias", "down_proj_bias") if given.has_bias else ():
            read = self.files.read(f"{stored}.{key}")
            check_finite(self.files.describe(f"{stored}.{key}"), read)
            bias = read.to(device, getattr(given.module, key).dtype, copy=True)
            given.module._parameters[key] = nn.Parameter(bias, requires_grad=False)
            self.layers.used.add(f"{stored}.{key}")
        return given.biases()

    def read_gpt_oss(self, stored: str, given: FloatExperts) -> Layers:
        """Read experts in gpt-oss's form: MXFP4 blocks, with the rows of gate and up interleaved."""
        if self.layers.spec.style != "gpt-oss":
            tensor = self.files.describe(f"{stored}.gate_up_proj_blocks")
            raise ValueError(
                f"{tensor} is in gpt-oss's form, but {self.layers.spec.path} does not say that it is MXFP4"
            )
        read = experts.mxfp4_experts(self.files, stored, self.device_of(given.module.down_proj))
        got, want = read.down.shape, (given.experts, given.hidden, given.width // 2)
        if got != want:
            tensor = self.files.describe(f"{stored}.down_proj_blocks")
            raise ValueError(f"{tensor}: (E, N, K) is {(*got[:2], 2 * got[2])}; expected {(*want[:2], given.width)}")
        self.layers.used.update(experts.gpt_oss_names(stored))
        dtype = given.module.down_proj.dtype
        return tuple(
            MXFP4Linear.from_tensors(
                codes.flatten(0, 1), scale.flatten(0, 1), bias=bias.flatten().to(dtype), parts=[rows] * count
            )
            for codes, scale, bias, rows, count in (
                (*read[:3], given.width, 2 * given.experts),
                (*read[3:], given.hidden, given.experts),
            )
        )  # type: ignore[return-value]

    def read_torchao(self, stored: str, given: FloatExperts) -> Layers:
        """Read experts whose three-dimensional parameters torchao quantised."""
        names = [f"{stored}.gate_up_proj", f"{stored}.down_proj"]
        device = self.device_of(given.module.down_proj)
        self._fused_biases(stored, given)
        gate_up, down = (torchao.read_weight(self.files, name) for name in names)
        for name in names:
            self.layers.used.update(torchao.tensor_names(self.files, name).values())
        try:
            return torchao.expert_stacks(gate_up, down, given, device)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.files.describe(f'{stored}._gate_up_proj_qdata')}: {error}") from error
