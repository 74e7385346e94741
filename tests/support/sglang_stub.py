"""Stubs of the classes and functions of SGLang that ``integrations.sglang`` uses, with SGLang's signatures.

``tests/engines/test_sglang_interface.py`` compares the stubs' signatures with SGLang, if SGLang is installed. The stubs
of layers and parameters derive from the stubs of vLLM, as SGLang's classes derive from vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from support import vllm_stub
from support.vllm_stub import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    LinearBase,
    ModelWeightParameter,
    OwnMethod,
    ParallelLMHead,
    PerTensorScaleParameter,
)

QUANTIZATION_METHODS: dict[str, Any] = {}
QUANTIZATION_CHOICES: list[str] = ["modelopt_fp4"]
WEIGHT_LOADER_V2_SUPPORTED: list[str] = []
SERVER: list[Any] = [None]
"""List with one element: the settings of the server, keyed by the name of the SGLang function that returns them, or
None outside a server."""


def _settings(name: str) -> Any:
    if SERVER[0] is None:
        raise ValueError("config namespace not published")
    return SERVER[0][name]


def get_server_args():
    return _settings("get_server_args")


def get_exec():
    return _settings("get_exec")


def get_lora():
    return _settings("get_lora")


def get_model():
    return _settings("get_model")


def get_parallel():
    return _settings("get_parallel")


def get_schedule():
    return _settings("get_schedule")


def get_spec():
    return _settings("get_spec")


def get_moe_runner_backend():
    return _settings("get_moe_runner_backend")


def get_moe_a2a_backend():
    return _settings("get_moe_a2a_backend")


def model_config_of(server_args: Any):
    return server_args.model_config


class LinearMethodBase:
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

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

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


class FusedMoEMethodBase:
    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ): ...

    def create_moe_runner(self, layer: nn.Module, moe_runner_config): ...

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    def apply(self, layer: nn.Module, dispatch_output): ...


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class FusedMoE(vllm_stub.RoutedExperts):
    """The experts of a layer on one rank.

    Args:
        config: ``MoeRunnerConfig``.
        tp_size, tp_rank: ranks that divide each expert, and this rank.
    """

    with_bias = is_shared_fused_moe = False

    def __init__(self, config: Any, tp_size: int = 1, tp_rank: int = 0) -> None:
        super().__init__(SimpleNamespace(tp_size=tp_size, tp_rank=tp_rank))  # type: ignore[arg-type]
        self.moe_runner_config, self.top_k = config, config.top_k
        self.moe_tp_size, self.moe_tp_rank = tp_size, tp_rank
        config.layer = self

    def weight_loader(  # type: ignore[override]
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None,
    ) -> None:
        assert expert_id is not None
        super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id)


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant) -> str | None:
        return None


class _Checkpoint(vllm_stub._Checkpoint):
    """Stand-in for SGLang's quantisation configurations. SGLang defines one per checkpoint style. Layers whose name
    contains an ignored name are not quantised."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.exclude_modules = self.ignored_layers = self.ignored

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant) -> str | None:
        return None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return OwnMethod()


class CompressedTensorsConfig(_Checkpoint):
    linear_fp8_config = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.quant_format = config.get("format")

    def get_scheme_dict(
        self, layer: nn.Module, layer_name: str | None = None, matched_target: str | None = None
    ) -> dict[str, Any] | None:
        if any(name in (layer_name or "") for name in self.ignored):
            return None
        return dict(next(iter(self.config["config_groups"].values())))


class Fp8Config(_Checkpoint):
    is_fp4_experts = False

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.weight_block_size = config.get("weight_block_size")


class Mxfp4Config(_Checkpoint):
    pass


class ModelOptFp8Config(_Checkpoint):
    @classmethod
    def override_quantization_method(cls, hf_quant_config, user_quant) -> str | None:
        return "modelopt_fp4" if (hf_quant_config or {}).get("quant_method") == "modelopt_fp4" else None

    def is_layer_excluded(self, prefix: str) -> bool:
        return any(name in prefix for name in self.exclude_modules)


class ModelOptFp4Config(ModelOptFp8Config):
    pass


class ModelOptMixedPrecisionConfig(ModelOptFp8Config):
    def _resolve_quant_algo(self, prefix: str) -> str | None:
        layer = self.config["quantized_layers"].get(prefix)
        return None if layer is None else layer["quant_algo"]


def is_layer_skipped(prefix: str, ignored_layers: list[str], fused_mapping: Any = MappingProxyType({})) -> bool:
    return any(name in prefix for name in ignored_layers)


add_quantization_method_choices: Callable[[list[str]], None] = QUANTIZATION_CHOICES.extend

_LAYERS = "sglang.srt.layers"
_QUANTIZATION = f"{_LAYERS}.quantization"
MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.choices": {
        "QUANTIZATION_CHOICES": QUANTIZATION_CHOICES,
        "add_quantization_method_choices": add_quantization_method_choices,
    },
    "sglang.srt.arg_groups.model_override_base": {"model_config_of": model_config_of},
    "sglang.srt.runtime_context": {
        each.__name__: each
        for each in (get_server_args, get_exec, get_lora, get_model, get_parallel, get_schedule, get_spec)
    },
    f"{_LAYERS}.linear": {"LinearBase": LinearBase, "WEIGHT_LOADER_V2_SUPPORTED": WEIGHT_LOADER_V2_SUPPORTED},
    f"{_LAYERS}.moe": {each.__name__: each for each in (get_moe_a2a_backend, get_moe_runner_backend)},
    f"{_LAYERS}.moe.fused_moe_triton": {"FusedMoE": FusedMoE},
    f"{_LAYERS}.moe.token_dispatcher.standard": {"StandardCombineInput": StandardCombineInput},
    f"{_LAYERS}.parameter": {
        each.__name__: each
        for each in (
            BlockQuantScaleParameter, ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
        )
    },
    f"{_LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
    _QUANTIZATION: {"QUANTIZATION_METHODS": QUANTIZATION_METHODS},
    f"{_QUANTIZATION}.base_config": {
        each.__name__: each for each in (FusedMoEMethodBase, LinearMethodBase, QuantizationConfig)
    },
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors": {"CompressedTensorsConfig": CompressedTensorsConfig},
    f"{_QUANTIZATION}.fp8": {"Fp8Config": Fp8Config},
    f"{_QUANTIZATION}.modelopt_quant": {
        each.__name__: each for each in (ModelOptFp4Config, ModelOptFp8Config, ModelOptMixedPrecisionConfig)
    },
    f"{_QUANTIZATION}.mxfp4": {"Mxfp4Config": Mxfp4Config},
    f"{_QUANTIZATION}.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod},
    f"{_QUANTIZATION}.utils": {"is_layer_skipped": is_layer_skipped},
}  # fmt: skip
"""Names that the integration imports, by SGLang's module."""

OURS = "torch_cute_ops.integrations.sglang"


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the stubs as modules, with their packages."""
    yield from vllm_stub.as_modules(MODULES)


def forget() -> None:
    """Forget the integration's modules, so that the next import uses other modules of SGLang."""
    for name in [name for name in sys.modules if name == OURS or name.startswith(f"{OURS}.")]:
        del sys.modules[name]


def server(chunk: int, captured: list[int], ranks: int, **own: Any) -> Any:
    """Return the element of ``SERVER`` for a server with these settings."""
    runner = own.pop("runner", "auto")
    graph = SimpleNamespace(decode=SimpleNamespace(bs=captured), prefill=SimpleNamespace(bs=None))
    settings: dict[str, dict[str, Any]] = {
        "get_server_args": {"chunked_prefill_size": None, "model_config": SimpleNamespace(context_len=1024)},
        "get_exec": {
            "graph": SimpleNamespace(cuda_graph_config=graph),
            "deterministic": SimpleNamespace(enable_deterministic_inference=own.pop("deterministic", False)),
            "moe": SimpleNamespace(
                enable_eplb=False, ep_num_redundant_experts=0, init_expert_location="trivial",
                enable_paged_experts=False, kt_weight_path=None,
            ),
        },
        "get_lora": {"enable_lora": None, "lora_paths": None},
        "get_moe_runner_backend": {"value": runner, "is_auto": lambda: runner == "auto"},
        "get_moe_a2a_backend": {"value": "none", "is_none": lambda: True},
        "get_model": {"context_length": None},
        "get_parallel": {
            "tp_size": ranks, "nnodes": 1, "pp_size": 1, "attn_dp_size": 1, "moe_dp_size": 1, "dwdp_size": 1,
        },
        "get_schedule": {
            "chunked_prefill_size": chunk, "max_prefill_tokens": 4096, "max_running_requests": None,
            "enable_mixed_chunk": False, "enable_dynamic_chunking": False,
        },
        "get_spec": {"speculative_num_draft_tokens": None},
    }  # fmt: skip
    for values in settings.values():
        values.update({name: own.pop(name) for name in [*own] if name in values})
    assert not own
    return {name: SimpleNamespace(**values) for name, values in settings.items()}
