"""Real linear layers of SGLang on a CPU, with this package's method: registration, loading and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import linear, quantization
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend, TorchNativeLoRABatchInfo
from sglang.srt.lora.layers import get_lora_layer
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin
from sglang.srt.runtime_context import get_parallel, get_schedule, publish
from sglang.srt.server_args import ServerArgs
from support.engine_layers import stored_layer

import torch_cute_ops.nn
from torch_cute_ops import checkpoint
from torch_cute_ops.checkpoint.spec import LayerScheme, compressed_arguments
from torch_cute_ops.integrations.sglang import METHODS, _prepare, register
from torch_cute_ops.integrations.sglang._linear import CuteLinearMethod

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


def compressed(fmt: str, stored: str, inputs: Any = None) -> dict[str, Any]:
    group = {"weights": compressed_arguments(fmt), "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


CHECKPOINTS = [
    (NVFP4, LayerScheme("nvfp4", "modelopt", "fp4"), "16bit"),
    ({**NVFP4, "quant_algo": "W4A16_NVFP4"}, LayerScheme("nvfp4", "modelopt", "16bit"), "16bit"),
    ({**NVFP4, "quant_algo": "FP8"}, LayerScheme("fp8_tensor", "modelopt", "fp8_static"), "fp8"),
    (compressed("nvfp4", "nvfp4-pack-quantized"), LayerScheme("nvfp4", "compressed-tensors", "16bit"), "16bit"),
    (compressed("mxfp4", "mxfp4-pack-quantized"), LayerScheme("mxfp4", "compressed-tensors", "16bit"), "16bit"),
    (compressed("fp8_channel", "float-quantized", FP8_INPUTS),
     LayerScheme("fp8_channel", "compressed-tensors", "fp8"), "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
     LayerScheme("fp8_block", "deepseek", "fp8"), "fp8"),
]  # fmt: skip
BOUNDS = {"16bit": 2**-7, "fp8": 0.05}


@pytest.fixture(autouse=True)
def registered():
    for _ in range(2):
        register()


def test_register():
    """Check that our methods precede SGLang's, because one of SGLang's methods overrides the user's choice."""
    assert [*quantization.QUANTIZATION_METHODS][:3] == [*METHODS.values()]
    assert [name for name in QUANTIZATION_CHOICES if name in METHODS.values()] == [*METHODS.values()]
    assert linear.WEIGHT_LOADER_V2_SUPPORTED.count(CuteLinearMethod.__name__) == 1
    name = METHODS["auto"]
    cls = quantization.get_quantization_config(name)
    assert issubclass(cls, QuantizationConfig) and cls().get_name() == name
    given = {**NVFP4, "quant_method": "modelopt_fp4"}  # as SGLang's parser of configurations calls it
    overrides = (each.override_quantization_method(given, name) for each in quantization.QUANTIZATION_METHODS.values())
    assert next(each for each in overrides if each) == name
    assert cls.override_quantization_method(given, "modelopt_fp4") is None
    assert cls.override_quantization_method({**NVFP4, "quant_algo": "FP8_PB_WO"}, name) is None


def layers_of(config: Any, k: int, **own: Any) -> dict[str, Any]:
    """Return a decoder's layers, one of each kind."""
    options: Any = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16, **own}
    lead = "model.layers.0"
    return {
        "qkv_proj": linear.QKVParallelLinear(k, 128, 2, 2, prefix=f"{lead}.self_attn.qkv_proj", **options),
        "gate_up_proj": linear.MergedColumnParallelLinear(k, [256, 256], prefix=f"{lead}.mlp.gate_up_proj", **options),
        "o_proj": linear.RowParallelLinear(k, 128, prefix=f"{lead}.self_attn.o_proj", **options),
    }


SIZES = {"qkv_proj": (256, 256, 256), "gate_up_proj": (256, 256), "o_proj": (128,)}
SHARDS: dict[str, tuple[Any, ...]] = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": (0, 1), "o_proj": (None,)}


def load(layer: Any, name: str, parts: list[Any]) -> Any:
    """Load the stored tensors of each merged layer with SGLang's loaders; return the layer's method."""
    for shard, (tensors, _) in zip(SHARDS[name], parts, strict=True):
        for stored, tensor in tensors.items():
            parameter = getattr(layer, stored)
            parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method


def check(got: np.ndarray, x: np.ndarray, weights: list[np.ndarray], bound: float) -> None:
    """Check the products with each merged layer."""
    begin = 0
    for weight in weights:
        part, want = got[:, begin : begin + len(weight)], x @ weight.T
        begin += len(weight)
        assert np.linalg.norm(part - want) < bound * np.linalg.norm(want)
    assert begin == got.shape[1]


@pytest.mark.parametrize(("config", "scheme", "chosen"), CHECKPOINTS)
@torch.no_grad()
def test_layers(config, scheme, chosen):
    """Check that SGLang's loaders fill layers and merged layers, and that products agree with decoded weights."""
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(config))
    for name, layer in layers_of(made, 256, parallel_group="replicated").items():
        assert type(layer.quant_method) is CuteLinearMethod and layer.quant_method.scheme == scheme, name
        parts = [stored_layer(scheme, rows, 256) for rows in SIZES[name]]
        x = torch.randn(3, 256).bfloat16()
        got = load(layer, name, parts).apply(layer, x).double().numpy()
        check(got, x.double().numpy(), [weight for _, weight in parts], BOUNDS[chosen])


@pytest.mark.parametrize(("config", "scheme", "chosen"), [CHECKPOINTS[0], CHECKPOINTS[-1]])
@torch.no_grad()
def test_two_ranks(config, scheme, chosen):
    """Check that each rank loads its shard of the rows or of the columns."""
    parts = {name: [stored_layer(scheme, rows, 256) for rows in sizes] for name, sizes in SIZES.items()}
    x, sums = torch.randn(3, 256).bfloat16(), 0.0
    for rank in range(2):
        with get_parallel().override(tp_size=2, tp_rank=rank):
            made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(config))
            layers = layers_of(made, 256)
            methods = {name: load(layer, name, parts[name]) for name, layer in layers.items()}
        for name in ("qkv_proj", "gate_up_proj"):
            got = methods[name].apply(layers[name], x).double().numpy()
            own = [np.split(weight, 2)[rank] for _, weight in parts[name]]
            check(got, x.double().numpy(), own, BOUNDS[chosen])
        half = x.chunk(2, 1)[rank].contiguous()
        sums = sums + methods["o_proj"].apply(layers["o_proj"], half).double().numpy()
    check(sums, x.double().numpy(), [parts["o_proj"][0][1]], BOUNDS[chosen])


@pytest.mark.parametrize(("config", "scheme", "chosen"), CHECKPOINTS)
@torch.no_grad()
def test_adapters(config, scheme, chosen, monkeypatch):
    """Check LoRA adapters on our layers in SGLang, for rows with two adapters and without an adapter."""
    tensor = torch.tensor  # SGLang pins tensors, which needs a GPU
    monkeypatch.setattr(torch, "tensor", lambda *args, pin_memory=False, **named: tensor(*args, **named))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    ranks, scalings, rows = torch.tensor([0, 4, 8]), torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1, 2, 3])
    numbers, ends = torch.arange(3), torch.tensor([0, 1, 3, 6])
    backend: Any = TorchNativeLoRABackend(3, torch.device("cpu"))
    backend.batch_info = TorchNativeLoRABatchInfo(
        use_cuda_graph=False, bs=3, num_segments=3, seg_indptr=ends, seg_indptr_cpu=ends, weight_indices=numbers,
        weight_indices_cpu=numbers, lora_ranks=ranks, lora_ranks_cpu=ranks, scalings=scalings, scalings_cpu=scalings,
        seg_lens=rows, seg_lens_cpu=rows, max_len=3, has_active_lora=True,
    )  # fmt: skip
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(dict(config))
    for name, base in layers_of(made, 256, parallel_group="replicated").items():
        parts, x = [stored_layer(scheme, count, 256) for count in SIZES[name]], torch.randn(6, 256).bfloat16()
        load(base, name, parts)
        layer: Any = get_lora_layer(base, backend)
        weights = [weight for _, weight in parts]
        size = np.linalg.norm(np.concatenate(weights)) / sum(SIZES[name]) ** 0.5  # of a row of the weight
        down = torch.randn(3, 8 * len(parts), 256).bfloat16() / 16
        up = (torch.randn(3, sum(SIZES[name]), 8) * size / 3).bfloat16()
        layer.set_lora_info(down, up)
        got, _ = layer(x)
        got, given, factors = got.double().numpy(), x.double().numpy(), scalings.double().numpy()
        for number, span in enumerate((slice(0, 1), slice(1, 3), slice(3, 6))):
            rank, begin = int(ranks[number]), 0
            for i, weight in enumerate(weights):
                columns = slice(begin, begin + len(weight))
                a = down[number, i * rank : (i + 1) * rank].double().numpy()
                b = up[number, columns, :rank].double().numpy()
                want = given[span] @ weight.T + factors[number] * (given[span] @ a.T @ b.T)
                difference = np.linalg.norm(got[span, columns] - want)
                assert difference < BOUNDS[chosen] * np.linalg.norm(want), (name, span, i)
                begin = columns.stop


def test_ignored_layers():
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(
        {**NVFP4, "ignore": ["model.layers.0.self_attn*"], "packed_modules_mapping": {}}
    )
    layers = layers_of(made, 256, parallel_group="replicated")
    assert isinstance(layers["o_proj"].quant_method, UnquantizedLinearMethod)
    assert isinstance(layers["gate_up_proj"].quant_method, CuteLinearMethod)


@torch.no_grad()
def test_attention_of_deepseek():
    """Check attributes that SGLang's models read: kv_b_proj's weight and scales, and names of other methods."""
    config, scheme, _ = CHECKPOINTS[-1]
    made = quantization.get_quantization_config(METHODS["auto"]).from_config(config)
    options: Any = {"bias": False, "quant_config": made, "params_dtype": torch.bfloat16, "parallel_group": "replicated"}
    layer = linear.ColumnParallelLinear(256, 512, prefix="model.layers.0.self_attn.kv_b_proj", **options)
    other = linear.ColumnParallelLinear(256, 512, prefix="model.layers.0.self_attn.q_b_proj", **options)
    assert (
        type(other.quant_method) is CuteLinearMethod and other.quant_method.quant_config.get_name() == "torch_cute_ops"
    )
    stored, weight = stored_layer(scheme, 512, 256)
    for name, tensor in stored.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    attention = SimpleNamespace(
        kv_b_proj=layer, qk_nope_head_dim=64, v_head_dim=64, w_kc=None, w_vc=None, w_scale=None, w_scale_k=None
    )
    model = SimpleNamespace(start_layer=0, end_layer=1, layers=[SimpleNamespace(self_attn=attention)])
    architecture = SimpleNamespace(num_hidden_layers=1, architectures=["DeepseekV3ForCausalLM"])
    DeepseekV2WeightLoaderMixin.post_load_weights(SimpleNamespace(quant_config=made, config=architecture, model=model))
    keys, values = torch.from_numpy(weight).unflatten(0, (-1, 128)).split(64, 1)
    factor = 1.0 if attention.w_scale is None else attention.w_scale.double()  # FP8 with one scale on a CPU
    for got, want in ((attention.w_kc, keys), (attention.w_vc.transpose(1, 2), values)):
        assert (got.double() * factor - want).norm() < 0.05 * want.norm()


def test_transforms_are_refused():
    transform = {"type": "hadamard", "apply": [{"location": "input", "targets": ["Linear"]}]}
    config = {**compressed("nvfp4", "nvfp4-pack-quantized"), "transform_config": {"config_groups": {"R4": transform}}}
    with pytest.raises(ValueError, match="the checkpoint has a transform_config"):
        quantization.get_quantization_config(METHODS["auto"]).from_config(config)


@pytest.mark.parametrize(
    ("scheme", "style", "kind"),
    [("nvfp4", "modelopt", "CuteNvFp4Config"), ("mxfp4", "compressed-tensors", "CuteCompressedTensorsConfig")],
)
def test_checkpoints(scheme, style, kind, tmp_path):
    """Check that SGLang loads saved checkpoints with our method, or without --quantization with its own."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=512, **sizes)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        torch_cute_ops.nn.quantize_(model, scheme)
    checkpoint.save(model, tmp_path, style)
    merged = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for activations, name in METHODS.items():
        chosen = ModelConfig(model_path=str(tmp_path), quantization=name)
        made = get_quant_config(chosen, LoadConfig(), merged)
        assert chosen.quantization == name and type(made).__name__ == kind and made.activations == activations
        layer = linear.MergedColumnParallelLinear(
            256, [512, 512], bias=False, quant_config=made, prefix="model.layers.0.mlp.gate_up_proj",
            parallel_group="replicated",
        )  # fmt: skip
        assert type(layer.quant_method) is CuteLinearMethod
    assert ModelConfig(model_path=str(tmp_path)).quantization in ("modelopt_fp4", "compressed-tensors")


def test_without_a_server():
    assert _prepare.serving() is None


def test_settings_of_a_server(tmp_path):
    """Check that SGLang's effective settings give the largest number of rows: the size of a prefill chunk or, without
    chunks, the longest prompt. SGLang provides no function to forget settings, so this test runs last."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=512, max_position_embeddings=20000, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    for own in ({}, {"chunked_prefill_size": -1}, {"chunked_prefill_size": 512, "max_running_requests": 3000}):
        publish(ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True, device="cpu", **own), role="scheduler")
        found, chunk = _prepare.serving(), get_schedule().chunked_prefill_size
        assert chunk == own.get("chunked_prefill_size", chunk) and chunk is not None
        assert found.most == {-1: 20000, 512: 3000}.get(chunk, chunk) and found.ranks_of_node == 1
        assert not _prepare.is_deterministic()
