"""Check that other quantisation libraries and this package decode each other's checkpoints to the same weights.

Needs the extra `producers`.
"""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
from safetensors.torch import load_file
from support import checkpoints
from support.checkpoints import KINDS

from torch_cute_ops import checkpoint
from torch_cute_ops.nn import NVFP4Linear, quantize_

N, K = 192, 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.lm_head = nn.Linear(K, N, bias=False), nn.Linear(K, 8, bias=False)


def quantised(scheme: str, activations: str) -> Model:
    def calibrate(model: Model) -> None:
        model.up(torch.randn(4, K).bfloat16())

    is_calibrated = activations in ("fp4", "fp8_static")
    activations = activations.removesuffix("_static")
    return quantize_(
        Model().bfloat16(), scheme, activations=activations, calibrate=calibrate if is_calibrated else None
    )


def of_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("up."): tensor for name, tensor in tensors.items() if name.startswith("up.")}


def read(folder, tensors: dict[str, torch.Tensor], name: str) -> Model:
    """Load the model from a checkpoint with these tensors for the layer ``up``."""
    tensors = {f"up.{key}": tensor for key, tensor in tensors.items()}
    checkpoints.write(folder, {**tensors, "lm_head.weight": torch.ones(8, K)}, KINDS[name].quantization)
    return checkpoint.load_(Model(), folder)


def assert_near(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert got.shape == want.shape and (got.float() - want.float()).abs().le(relative * want.float().abs()).all()


def assert_codes_of(layer: NVFP4Linear, weight: torch.Tensor) -> None:
    """Check that a layer's codes equal the codes of ``from_float``, except where the order of roundings matters."""
    linear = nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    assert (NVFP4Linear.from_float(linear).weight != layer.weight).float().mean() < 1e-3


# compressed-tensors decodes in bfloat16, in which the scale (or a quotient) and the product are rounded.

BF16 = 2.0**-7


@pytest.fixture
def compressed_tensors() -> ModuleType:
    return pytest.importorskip("compressed_tensors")


def scheme_of(name: str):
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme.model_validate(KINDS[name].quantization["config_groups"]["group_0"])


def compressor(fmt: str):
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(fmt)


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        ("nvfp4", "16bit"),
        ("nvfp4", "fp4"),
        ("mxfp4", "16bit"),
        ("mxfp4", "fp4"),
        ("mxfp4", "fp8"),
        ("fp8_block", "fp8"),
        ("fp8_tensor", "fp8"),
        ("fp8_tensor", "fp8_static"),
        ("fp8_channel", "fp8"),
    ],
)
def test_written_for_compressed_tensors(compressed_tensors, scheme, activations, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig

    model = quantised(scheme, activations)
    checkpoint.save(model, tmp_path, "compressed-tensors")
    given = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(given)
    (group,) = config.config_groups.values()
    tensors = of_up(load_file(tmp_path / "model.safetensors"))
    assert_near(compressor(config.format).decompress(tensors, group)["weight"], model.up.dequantize(), BF16)


@pytest.mark.parametrize("name", ["compressed-tensors NVFP4A16", "compressed-tensors MXFP4"])
def test_written_by_compressed_tensors(compressed_tensors, name, tmp_path):
    scheme, weight = scheme_of(name), torch.randn(N, K)
    amax = weight.view(N, -1, scheme.weights.group_size).abs().amax(-1)
    given = {"weight": weight, "weight_scale": 2 ** (amax / 6).log2().ceil()}
    if KINDS[name].scheme == "nvfp4":
        given["weight_global_scale"] = 2688 / weight.abs().max().reshape(1)
        given["weight_scale"] = (amax / 6 * given["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    of_format = compressor(KINDS[name].quantization["format"])
    tensors = of_format.compress(given, scheme)
    layer = read(tmp_path, tensors, name).up
    assert_near(of_format.decompress(tensors, scheme)["weight"], layer.dequantize(), BF16)
    if KINDS[name].scheme == "nvfp4":
        assert_codes_of(layer, weight)


@pytest.mark.parametrize("name", ["compressed-tensors FP8 tensor", "compressed-tensors FP8 channel"])
def test_fp8_written_by_compressed_tensors(compressed_tensors, name, tmp_path):
    scheme, weight = scheme_of(name), torch.randn(N, K).bfloat16()
    amax = weight.abs().amax().reshape(1) if KINDS[name].scheme == "fp8_tensor" else weight.abs().amax(1, keepdim=True)
    given = {"weight": weight, "weight_scale": amax / 448}
    if KINDS[name].has_input_scale:
        given["input_scale"] = torch.tensor([0.02]).bfloat16()
    of_format = compressor(KINDS[name].quantization["format"])
    tensors = of_format.compress(dict(given), scheme)
    layer = read(tmp_path, tensors, name).up
    assert layer.has_input_scale is KINDS[name].has_input_scale
    assert_near(of_format.decompress(tensors, scheme)["weight"], layer.dequantize(), BF16)
    assert (weight - layer.dequantize()).norm() < 0.05 * weight.norm()


# ModelOpt decodes in float32.


@pytest.fixture
def modelopt() -> ModuleType:
    return pytest.importorskip("modelopt.torch.quantization.qtensor")


def decoded(modelopt: ModuleType, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    packed = modelopt.NVFP4QTensor(torch.Size((N, K)), torch.float32, tensors["weight"])
    return packed.dequantize(
        torch.float32, scale=tensors["weight_scale"], double_scale=tensors["weight_scale_2"], block_sizes={-1: 16}
    )


@pytest.mark.parametrize("activations", ["16bit", "fp4"])
def test_written_for_modelopt(modelopt, activations, tmp_path):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    model = quantised("nvfp4", activations)
    checkpoint.save(model, tmp_path, "modelopt")
    got = decoded(modelopt, of_up(load_file(tmp_path / "model.safetensors")))
    assert_near(got, model.up.dequantize(), 2.0**-22)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    own = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert {"quant_method": "modelopt", **convert_hf_quant_config_format(own)} == config


def test_written_by_modelopt(modelopt, tmp_path):
    weight = torch.randn(N, K)
    packed, scale, factor = modelopt.NVFP4QTensor.quantize(weight, 16)
    tensors = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
    layer = read(tmp_path, tensors, "modelopt W4A16").up
    assert_near(decoded(modelopt, tensors), layer.dequantize(), 2.0**-22)
    assert_codes_of(layer, weight)


def test_mxfp4_written_by_modelopt(modelopt, tmp_path):
    weight = torch.randn(N, K)
    packed, scale = modelopt.MXFP4QTensor.quantize(weight, 32)
    tensors = {"weight": packed._quantized_data, "weight_scale": scale.reshape(N, -1)}
    layer = read_as(tmp_path, tensors, "mxfp4")
    want = packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    assert torch.equal(layer.dequantize(), want)
    assert (layer.dequantize() - weight).norm() < 0.15 * weight.norm()


def test_fp8_blocks_written_by_modelopt(modelopt, tmp_path):
    weight = torch.randn(N, K)
    packed, _ = modelopt.FP8QTensor.quantize(weight, block_sizes={-1: 128, -2: 128})
    scale = torch.nn.functional.pad(weight, (0, 0, 0, -N % 128)).view(-1, 128, K // 128, 128).abs().amax((1, 3)) / 448
    tensors = {"weight": packed._quantized_data, "weight_scale": scale[:, None, :, None]}
    layer = read_as(tmp_path, tensors, "fp8_pb_wo")
    assert (layer.dequantize() - weight).norm() < 0.03 * weight.norm()


def read_as(folder, tensors: dict[str, torch.Tensor], algorithm: str) -> nn.Module:
    """Load a layer from a checkpoint with ModelOpt's ``algorithm``."""
    written = {f"up.{key}": tensor for key, tensor in tensors.items()}
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    checkpoints.write(folder, {**written, "lm_head.weight": torch.ones(8, K)}, quantization)
    return checkpoint.load_(Model(), folder).up
