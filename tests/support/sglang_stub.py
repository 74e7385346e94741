"""Stubs of the classes and functions of SGLang that ``integrations.sglang`` uses, with SGLang's signatures.

``tests/engines/test_sglang_interface.py`` compares the stubs' signatures with SGLang, if SGLang is installed. The stubs
of layers and parameters derive from the stubs of vLLM, as SGLang's classes derive from vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

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


def get_model():
    return _settings("get_model")


def get_parallel():
    return _settings("get_parallel")


def get_schedule():
    return _settings("get_schedule")


def get_spec():
    return _settings("get_spec")


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
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.weight_block_size = config.get("weight_block_size")


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
        each.__name__: each for each in (get_server_args, get_exec, get_model, get_parallel, get_schedule, get_spec)
    },
    f"{_LAYERS}.linear": {"LinearBase": LinearBase, "WEIGHT_LOADER_V2_SUPPORTED": WEIGHT_LOADER_V2_SUPPORTED},
    f"{_LAYERS}.parameter": {
        each.__name__: each
        for each in (
            BlockQuantScaleParameter, ChannelQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
        )
    },
    f"{_LAYERS}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
    _QUANTIZATION: {"QUANTIZATION_METHODS": QUANTIZATION_METHODS},
    f"{_QUANTIZATION}.base_config": {"LinearMethodBase": LinearMethodBase, "QuantizationConfig": QuantizationConfig},
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors": {"CompressedTensorsConfig": CompressedTensorsConfig},
    f"{_QUANTIZATION}.fp8": {"Fp8Config": Fp8Config},
    f"{_QUANTIZATION}.modelopt_quant": {
        each.__name__: each for each in (ModelOptFp4Config, ModelOptFp8Config, ModelOptMixedPrecisionConfig)
    },
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
    graph = SimpleNamespace(decode=SimpleNamespace(bs=captured), prefill=SimpleNamespace(bs=None))
    settings: dict[str, dict[str, Any]] = {
        "get_server_args": {"chunked_prefill_size": None, "model_config": SimpleNamespace(context_len=1024)},
        "get_exec": {
            "graph": SimpleNamespace(cuda_graph_config=graph),
            "deterministic": SimpleNamespace(enable_deterministic_inference=own.pop("deterministic", False)),
        },
        "get_model": {"context_length": None},
        "get_parallel": {"tp_size": ranks, "nnodes": 1, "pp_size": 1},
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
