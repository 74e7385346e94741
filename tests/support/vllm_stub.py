"""Stubs of the classes and functions of vLLM that ``integrations.vllm`` uses, with vLLM's signatures.

``tests/engines/test_vllm_interface.py`` compares the stubs' signatures with vLLM, if vLLM is installed.
"""

from __future__ import annotations

import logging
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

QUANTIZATION_METHODS: list[str] = ["modelopt"]
REGISTERED: dict[str, type] = {}
LOADER_V2: list[str] = []
VLLM_CONFIG: list[Any] = [None]
"""List whose only element is the result of ``get_current_vllm_config_or_none``."""


def get_current_vllm_config_or_none() -> Any:
    return VLLM_CONFIG[0]


class _Logger(logging.Logger):
    def warning_once(self, message: str, *args: Any) -> None:
        self.warning(message, *args)

    def info_once(self, message: str, *args: Any) -> None:
        self.info(message, *args)


def init_logger(name: str) -> _Logger:
    return _Logger(name)


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer: nn.Module, *args, **kwargs) -> torch.Tensor: ...

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module):
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ): ...

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


class UnquantizedLinearMethod(LinearMethodBase):
    def __init__(self) -> None: ...

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ):
        shape = sum(output_partition_sizes), input_size_per_partition
        layer.weight = Parameter(torch.zeros(shape, dtype=params_dtype), requires_grad=False)

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


def register_weight_loader_v2_supported_method(cls):
    LOADER_V2.append(cls.__name__)
    return cls


class LinearBase(nn.Module):
    """A linear layer, or several merged layers."""


class ParallelLMHead(nn.Module):
    """An output head."""


@dataclass
class FusedMoEConfig:
    """Settings of a layer of experts: the attributes of vLLM's class that the integration reads."""

    num_experts: int
    num_local_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    intermediate_size_per_partition: int
    in_dtype: torch.dtype
    activation: Any
    moe_parallel_config: Any
    hidden_dim_unpadded: int | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    has_bias: bool = False
    is_lora_enabled: bool = False
    is_sequence_parallel: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    pcp_size: int = 1

    def __post_init__(self) -> None:
        if self.hidden_dim_unpadded is None:
            self.hidden_dim_unpadded = self.hidden_dim


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: FusedMoEConfig):
        self.moe = moe

    @property
    def supports_eplb(self) -> bool:
        return False

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ): ...

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any: ...

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor: ...


class RoutedExperts(nn.Module):
    """The experts of a layer on one rank. Like vLLM's loader, the loader copies a tensor of one expert, or this rank's
    part of the tensor."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    apply_router_weight_on_input = False
    expert_map: torch.Tensor | None = None

    def __init__(self, moe: FusedMoEConfig) -> None:
        super().__init__()
        self.moe_config = moe

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if shard_id is None:  # gpt-oss: all experts of a rank
            region = tuple(slice(size) for size in loaded_weight.shape)
            param.data[region] = loaded_weight
            return None
        local = expert_id if self.expert_map is None else int(self.expert_map[expert_id])
        if local < 0:
            return False
        data, kind = param.data[local], getattr(param, "quant_method", None)
        if shard_id.startswith("gpt_oss_"):  # divide by the parameter's size, and flatten the blocks of a weight
            loaded_weight = loaded_weight.reshape(len(loaded_weight), -1)
            dim = 0 if shard_id == "gpt_oss_w13" else 1
            begin = self.moe_config.tp_rank * data.shape[dim]
            loaded_weight = loaded_weight.narrow(dim, begin, min(data.shape[dim], loaded_weight.shape[dim] - begin))
            data[tuple(slice(size) for size in loaded_weight.shape)] = loaded_weight
            return True if return_success else None
        if "input_scale" in weight_name:
            data[...] = loaded_weight
        elif kind == "tensor":
            data[() if shard_id == "w2" else ("w1", "w3").index(shard_id)] = loaded_weight.reshape(())
        else:
            dim = 1 if shard_id == "w2" else 0
            if shard_id != "w2":
                data = data.unflatten(0, (2, -1))[("w1", "w3").index(shard_id)]
            if not (kind == "channel" and shard_id == "w2"):
                size = loaded_weight.shape[dim] // self.moe_config.tp_size
                loaded_weight = loaded_weight.narrow(dim, size * self.moe_config.tp_rank, size)
            data[tuple(slice(size) for size in loaded_weight.shape)] = loaded_weight
        return True if return_success else None


class QuantizationConfig(ABC):
    def __init__(self):
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig: ...

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return None

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None: ...


def register_quantization_config(quantization: str):
    def register(config: type) -> type:
        QUANTIZATION_METHODS.append(quantization)
        REGISTERED[quantization] = config
        return config

    return register


class OwnMethod:
    """vLLM's own method for a quantised layer."""

    create_weights = UnquantizedLinearMethod.create_weights


class _Checkpoint(QuantizationConfig):
    """Stand-in for vLLM's quantisation configurations. vLLM defines one per checkpoint style. Layers whose name
    contains an ignored name are not quantised."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.ignored = config.get("ignore") or []

    def get_name(self) -> str:
        return "own"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Checkpoint:
        return cls(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return None if any(name in prefix for name in self.ignored) else OwnMethod()
        if not isinstance(layer, (LinearBase, ParallelLMHead)):
            return None
        return UnquantizedLinearMethod() if any(name in prefix for name in self.ignored) else OwnMethod()


class _Arguments:
    """compressed-tensors' ``QuantizationArgs``."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return self.values


class CompressedTensorsConfig(_Checkpoint):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.quant_format = config.get("format")
        self.transform_config = config.get("transform_config")
        group = next(iter(config["config_groups"].values()))
        self.target_scheme_map = {
            "Linear": {
                "format": group.get("format"),
                **{n: _Arguments(group[n]) for n in ("weights", "input_activations") if group.get(n) is not None},
            }
        }

    def get_scheme_dict(self, layer: nn.Module, layer_name: str | None = None) -> dict[str, Any] | None:
        if any(name in (layer_name or "") for name in self.ignored):
            return None
        if "Linear" not in type(layer).__name__:  # no target fits
            return None
        group = self.target_scheme_map["Linear"]
        return {**group, "format": group.get("format") or self.quant_format}


class Fp8Config(_Checkpoint):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.weight_block_size = config.get("weight_block_size")
        self.ignored_layers = self.ignored
        self.ignored_layers_match_mode = "exact"
        self.store_dtype = config.get("store_dtype")


class GptOssMxfp4Config(_Checkpoint):
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def is_layer_skipped(
    prefix: str,
    ignored_layers: list[str],
    fused_mapping: Any = types.MappingProxyType({}),
    *,
    match_mode: str = "exact",
) -> bool:
    assert match_mode == "exact" and not fused_mapping
    return any(prefix in name for name in ignored_layers)


class _ModelOpt(_Checkpoint):
    def is_layer_excluded(self, prefix: str) -> bool:
        return any(name in prefix for name in self.ignored)


class ModelOptFp8Config(_ModelOpt):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.quant_method = config["quant_algo"]


class ModelOptNvFp4Config(ModelOptFp8Config):
    pass


class ModelOptMixedPrecisionConfig(_ModelOpt):
    def _resolve_quant_algo(self, prefix: str) -> str | None:
        layer = self.config["quantized_layers"].get(prefix)
        return None if layer is None else layer["quant_algo"]


class IrOp:
    """An op of vLLM's IR, with its implementations by provider."""

    def __init__(
        self,
        name: str,
        native_impl: Callable,
        activations: list[str] | None = None,
        registration_stack: list[str] | None = None,
    ):
        self.name = name
        self.impls: dict[str, Any] = {"native": native_impl}

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Any]:
        def register(function: Callable[..., Any]) -> Any:
            assert provider not in self.impls
            self.impls[provider] = types.SimpleNamespace(
                function=function, supports_args=supports_args, inplace=inplace
            )
            return function

        return register


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None): ...


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
): ...


IR_OPS = types.SimpleNamespace(**{each.__name__: IrOp(each.__name__, each) for each in (rms_norm, fused_add_rms_norm)})


class BasevLLMParameter(Parameter):
    def __new__(cls, data: torch.Tensor | None, **kwargs):
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: Callable):
        self.weight_loader = weight_loader


class _Column(BasevLLMParameter):
    def __init__(self, output_dim: int, **kwargs):
        self.output_dim = output_dim
        super().__init__(**kwargs)


class _Row(BasevLLMParameter):
    def __init__(self, input_dim: int, **kwargs):
        self.input_dim = input_dim
        super().__init__(**kwargs)


class ModelWeightParameter(_Column, _Row):
    pass


class BlockQuantScaleParameter(_Column, _Row):
    pass


class ChannelQuantScaleParameter(_Column):
    pass


class PerTensorScaleParameter(BasevLLMParameter):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


_QUANTIZATION = "vllm.model_executor.layers.quantization"
MODULES: dict[str, dict[str, Any]] = {
    "vllm.config": {"get_current_vllm_config_or_none": get_current_vllm_config_or_none},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.ir": {"ops": IR_OPS},
    "vllm.ir.op": {"IrOp": IrOp},
    "vllm.ir.ops.layernorm": {"rms_norm": rms_norm, "fused_add_rms_norm": fused_add_rms_norm},
    "vllm.logger": {"init_logger": init_logger},
    "vllm.model_executor.layers.fused_moe": {
        "FusedMoEMethodBase": FusedMoEMethodBase,
        "RoutedExperts": RoutedExperts,
    },
    "vllm.model_executor.layers.fused_moe.config": {"FusedMoEConfig": FusedMoEConfig},
    "vllm.model_executor.layers.linear": {
        each.__name__: each
        for each in (
            LinearBase, LinearMethodBase, UnquantizedLinearMethod, register_weight_loader_v2_supported_method
        )
    },
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
    "vllm.model_executor.parameter": {
        each.__name__: each
        for each in (
            BlockQuantScaleParameter, ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
        )
    },
    _QUANTIZATION: {
        "QUANTIZATION_METHODS": QUANTIZATION_METHODS,
        "register_quantization_config": register_quantization_config,
    },
    f"{_QUANTIZATION}.base_config": {"QuantizationConfig": QuantizationConfig},
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors": {"CompressedTensorsConfig": CompressedTensorsConfig},
    f"{_QUANTIZATION}.fp8": {"Fp8Config": Fp8Config},
    f"{_QUANTIZATION}.mxfp4": {"GptOssMxfp4Config": GptOssMxfp4Config},
    f"{_QUANTIZATION}.utils.quant_utils": {"is_layer_skipped": is_layer_skipped},
    f"{_QUANTIZATION}.modelopt": {
        each.__name__: each for each in (ModelOptFp8Config, ModelOptMixedPrecisionConfig, ModelOptNvFp4Config)
    },
}  # fmt: skip
"""Names that the integration imports, by vLLM's module."""


def modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the stubs as modules, with their packages."""
    yield from as_modules(MODULES)


def as_modules(contents: dict[str, dict[str, Any]]) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield modules with these contents by name, and their packages."""
    made: dict[str, types.ModuleType] = {}
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            prefix = ".".join(parts[:i])
            made.setdefault(prefix, types.ModuleType(prefix)).__path__ = []  # type: ignore[attr-defined]
            if i > 1:
                vars(made[".".join(parts[: i - 1])]).setdefault(parts[i - 1], made[prefix])
        vars(made[name]).update(content)
    yield from made.items()


OURS = "torch_cute_ops.integrations.vllm"


def forget() -> None:
    """Remove the integration's modules from ``sys.modules``, so that its next import uses the modules of vLLM, stubs or
    real, that are in ``sys.modules`` then."""
    for name in [name for name in sys.modules if name == OURS or name.startswith(f"{OURS}.")]:
        del sys.modules[name]
