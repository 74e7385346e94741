"""Load checkpoints that are written like torchao's: the metadata of the files describes each weight.

tests/integrations/test_torchao.py writes and decodes with torchao itself, if it is installed.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from support import experts as support
from support import spec, weights
from support.experts import Block, E, Experts, GptOssExperts, H, I
from torch import nn

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from torch_cute_ops import checkpoint
from torch_cute_ops.checkpoint.spec import spec_of
from torch_cute_ops.nn import QuantExperts

K, N = 192, 72  # sizes with padding rows and padding blocks in tiled scales
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "NVFP4WeightOnlyConfig", "_data": {}}}}
FP4 = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """Convert linear scales (N, blocks) to the 128x4 layout in torchao's shape."""
    tiles = torch.from_numpy(spec.arrange(weights.raw(scale), "128x4")).view(scale.dtype)
    return tiles.view(tiles.shape[0] * 32, tiles.shape[1] * 16)


class Stored:
    """Checkpoint under construction, as torchao would write it.

    Attributes:
        tensors: tensors of the file.
        metadata: metadata of the file.
        decoded: float64 weight of each parameter. The weights of experts are stacked along their rows.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.metadata: dict[str, str] = {}
        self.decoded: dict[str, np.ndarray] = {}

    def add(self, name: str, kind: str, n: int, k: int, *, is_tiled: bool, experts: int = 0, factor: bool = True):
        """Add a random weight. With ``experts``, its shape is (E, N, K)."""
        rows, lead = n * max(experts, 1), (experts,) if experts else ()
        codes = torch.randint(256, (rows, k // 2), dtype=torch.uint8)
        if kind == "NVFP4Tensor":
            scale = (torch.rand(rows, k // 16) + 0.1).to(torch.float8_e4m3fn)
            factors = (torch.rand(*lead, 1, 1) if experts else torch.rand(())) + 0.5 if factor else None
        else:
            scale, factors = torch.randint(118, 124, (rows, k // 32), dtype=torch.uint8), None
        by_row: Any = 1.0 if factors is None else factors.double().numpy().reshape(-1).repeat(n)
        self.decoded[name] = weights.fp4(codes, scale, by_row)
        parts = {"qdata": codes.view(*lead, n, k // 2), "scale": (tiled(scale) if is_tiled else scale)}
        parts["scale"] = parts["scale"].view(*lead, -1, parts["scale"].shape[1])
        if factors is not None:
            parts = {"per_tensor_scale": factors, **parts}
        if kind == "MXTensor":
            parts["scale"] = parts["scale"].view(torch.float8_e8m0fnu)
        data = {"block_size": 16 if kind == "NVFP4Tensor" else 32, "is_swizzled_scales": is_tiled}
        data |= {} if kind == "NVFP4Tensor" else {"elem_dtype": FP4}
        self.metadata[name] = json.dumps({"_type": kind, "_data": data, "_tensor_data_names": [*parts]})
        module, _, parameter = name.rpartition(".")
        self.tensors |= {f"{module}._{parameter}_{part}": each for part, each in parts.items()}

    def change(self, name: str, **data: Any) -> None:
        described = json.loads(self.metadata[name])
        for key, value in data.items():
            described.pop(key) if value is None else described["_data"].update({key: value})
        self.metadata[name] = json.dumps(described)

    def write(self, folder) -> None:
        names = {"tensor_names": json.dumps([*self.metadata])}
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt", **self.metadata, **names})
        (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(K, N), nn.Linear(K, N, bias=False)
        self.lm_head = nn.Linear(K, 8, bias=False)


def stored(kind: str, is_tiled: bool, **given: Any) -> Stored:
    made = Stored()
    for name in ("q_proj", "k_proj"):
        made.add(f"{name}.weight", kind, N, K, is_tiled=is_tiled, **given)
    made.tensors |= {"q_proj.bias": torch.randn(N), "lm_head.weight": torch.randn(8, K)}
    made.metadata |= dict.fromkeys(("q_proj.bias", "lm_head.weight"), json.dumps({"_type": "Tensor"}))
    return made


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


by_kind = pytest.mark.parametrize("kind", ["NVFP4Tensor", "MXTensor"])
by_layout = pytest.mark.parametrize("is_tiled", [False, True], ids=["linear", "tiled"])


@by_kind
@by_layout
@pytest.mark.parametrize("factor", [True, False])
def test_values(kind, is_tiled, factor, tmp_path):
    made = stored(kind, is_tiled, factor=factor)
    made.write(tmp_path)
    model = checkpoint.load_(on_meta(), tmp_path)
    for name in ("q_proj", "k_proj"):
        got = model.get_submodule(name).dequantize().double().numpy()
        assert np.allclose(got, made.decoded[f"{name}.weight"], rtol=2.5e-7, atol=0)
    assert torch.equal(model.q_proj.bias, made.tensors["q_proj.bias"])
    assert torch.equal(model.lm_head.weight, made.tensors["lm_head.weight"])


@by_kind
@by_layout
def test_values_of_scales(kind, is_tiled, tmp_path):
    made = stored(kind, is_tiled)
    codes = made.tensors["k_proj._weight_scale"].view(torch.uint8)
    codes[7, 3] = byte = 0x7F if kind == "NVFP4Tensor" else 0xFF
    made.write(tmp_path)
    with pytest.raises(
        ValueError, match=rf"k_proj\._weight_scale in .* contains the byte 0x{byte:02X} at \[7, 3\]; expected"
    ):
        checkpoint.load_(on_meta(), tmp_path)


def test_input_scale(tmp_path):
    made = stored("NVFP4Tensor", True)
    for name in ("q_proj", "k_proj"):
        described = json.loads(made.metadata[f"{name}.weight"])
        described["_tensor_data_names"].append("act_per_tensor_scale")
        made.metadata[f"{name}.weight"] = json.dumps(described)
        made.tensors[f"{name}._weight_act_per_tensor_scale"] = torch.tensor(0.25)
    made.write(tmp_path)
    model = checkpoint.load_(on_meta(), tmp_path, activations="fp4")
    assert model.q_proj.activations == "fp4" and model.q_proj.input_scale.item() == 0.25
    # Check that the loaded model can be saved in another format with the same codes and scales.
    checkpoint.save(model, tmp_path / "modelopt", "modelopt")
    again = load_file(tmp_path / "modelopt" / "model.safetensors")
    assert torch.equal(again["k_proj.weight"], made.tensors["k_proj._weight_qdata"])
    assert torch.equal(again["k_proj.weight_scale_2"], made.tensors["k_proj._weight_per_tensor_scale"])
    made.tensors["k_proj._weight_act_per_tensor_scale"] = torch.tensor(0.0)
    made.write(tmp_path)
    with pytest.raises(
        ValueError, match=r"k_proj\._weight_act_per_tensor_scale in .*safetensors is 0\.0; expected a p"
    ):
        checkpoint.load_(on_meta(), tmp_path)


def dropped(suffix: str):
    return lambda made: made.tensors.pop(f"k_proj._weight_{suffix}")


def with_data(**data: Any):
    return lambda made: made.change("k_proj.weight", **data)


def with_kind(kind: str):
    def change(made: Stored) -> None:
        made.metadata["k_proj.weight"] = made.metadata["k_proj.weight"].replace("NVFP4Tensor", kind)

    return change


def with_tensor(suffix: str, tensor: torch.Tensor):
    return lambda made: made.tensors.update({f"k_proj._weight_{suffix}": tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dropped("scale"), r"contains no tensor k_proj\._weight_scale"),
        (dropped("per_tensor_scale"), r"contains no tensor k_proj\._weight_per_tensor_scale"),
        (with_data(block_size=32), r"k_proj\._weight_.* in .*: block_size is 32; expected 16"),
        (
            with_data(is_swizzled_scales=False),
            r"k_proj\._weight_qdata in .*: got scale with shape .*linear scales, \(72, 12\)",
        ),
        (with_data(_data=None), "block_size is None; expected 16"),
        (with_kind("Float8Tensor"), "the class is torchao's Float8Tensor; expected NVFP4Tensor, or MXTensor of float4"),
        (with_kind("MXTensor"), "the class is torchao's MXTensor of None; expected NVFP4Tensor"),
        (lambda made: made.metadata.pop("k_proj.weight"), r"k_proj\._weight_.* is quantised, but .* not say how"),
        (with_tensor("zero_point", torch.zeros(1)), r"k_proj\._weight_zero_point in .* is unknown to torchao nvfp4"),
        (with_tensor("per_tensor_scale", torch.tensor(torch.nan)), r"k_proj\._weight_per_tensor_scale in .* is nan"),
        (with_tensor("per_tensor_scale", torch.ones(3)), r"got per_tensor_scale with shape \(3,\)"),
        (with_tensor("qdata", torch.zeros(N, K // 2)), r"got qdata with shape .*expected rows of bytes"),
        (with_tensor("scale", torch.ones(32, 48)), "got scale with dtype torch.float32; expected torch.float8_e4m3fn"),
    ],
)
def test_refused_checkpoints(change, message, tmp_path):
    made = stored("NVFP4Tensor", True)
    change(made)
    made.write(tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_(on_meta(), tmp_path)


# Experts


def with_experts(kind: str, is_tiled: bool, width: int = I) -> Stored:
    made = Stored()
    made.add("mlp.experts.gate_up_proj", kind, 2 * width, H, is_tiled=is_tiled, experts=E)
    made.add("mlp.experts.down_proj", kind, H, width, is_tiled=is_tiled, experts=E)
    made.tensors["o_proj.weight"] = torch.randn(H, H).bfloat16()
    return made


def block(form=Experts, **given: Any) -> Block:
    with torch.device("meta"):
        return Block(form(**given)).bfloat16()


@by_kind
@by_layout
def test_experts(kind, is_tiled, tmp_path):
    made = with_experts(kind, is_tiled)
    made.write(tmp_path)
    experts = checkpoint.load_(block(), tmp_path).mlp.experts
    assert isinstance(experts, QuantExperts) and experts.topk == support.TOPK
    for got, name in zip(support.decoded(experts), ("gate_up_proj", "down_proj"), strict=True):
        want = made.decoded[f"mlp.experts.{name}"].reshape(got.shape)
        assert np.allclose(got, want, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            Experts,
            lambda made: made.tensors.pop("mlp.experts._down_proj_qdata"),
            "contains no tensor mlp.experts._down_proj_q",
        ),
        (
            Experts,
            lambda made: made.metadata.pop("mlp.experts.down_proj"),
            "not describe mlp.experts.down",
        ),
        (GptOssExperts, lambda made: None, "_gate_up_proj_qdata in .*: experts are transposed"),
        (
            lambda: Experts(E + 1),
            lambda made: None,
            r"gate_up_proj has qdata of shape \(4, 256, 128\); expected \(5, 256",
        ),
    ],
)
def test_experts_that_are_refused(form, change, message, tmp_path):
    made = with_experts("NVFP4Tensor", True)
    if form is GptOssExperts:
        made.tensors["mlp.experts.gate_up_proj_bias"] = torch.randn(E, 2 * I)
        made.tensors["mlp.experts.down_proj_bias"] = torch.randn(E, H)
    change(made)
    made.write(tmp_path)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_(block(form), tmp_path)


# Configuration


def test_configurations(tmp_path):
    mx = {"_type": "MXDynamicActivationMXWeightConfig", "_data": {"weight_dtype": FP4}}
    both = {
        "_type": "FqnToConfig",
        "_data": {"fqn_to_config": {"_default": CONFIG["quant_type"]["default"], "a": mx, "b": None}},
    }
    for config in (CONFIG["quant_type"]["default"], mx, both):
        given = {"quant_method": "torchao", "quant_type": {"default": config}}
        assert spec_of(tmp_path, given).style == "torchao"
    mxfp8 = {"_type": mx["_type"], "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}}
    mixed = {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": mx, "b": {"_type": "Int4WeightOnlyConfig"}}}}
    for config, kind in (
        (mxfp8, "MXDynamicActivationMXWeightConfig with weights in float8_e4m3fn"),
        (mixed, "Int4WeightOnlyConfig"),
        ("int4_weight_only", "int4_weight_only"),
        (None, "None"),
    ):
        with pytest.raises(ValueError, match=f"quant_type is {kind}; expected one of NVFP4WeightOnlyConfig, "):
            spec_of(tmp_path, {"quant_method": "torchao", "quant_type": {"default": config}})
