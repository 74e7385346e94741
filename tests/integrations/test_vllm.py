"""vLLM plugin, tested with stubs of vLLM 0.33.0's interfaces."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import weights
from torch import nn

import torch_cute_ops


class PlatformEnum(enum.Enum):
    CUDA = enum.auto()
    CPU = enum.auto()


class NvFp4LinearKernel(ABC):
    def __init__(self, config) -> None:
        assert self.can_implement(config)[0]
        assert self.is_supported()[0]
        self.config = config

    def input_quant_key(self):
        return None

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]: ...

    @classmethod
    @abstractmethod
    def can_implement(cls, config) -> tuple[bool, str | None]: ...

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    @abstractmethod
    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...


def replace_parameter(layer: nn.Module, param_name: str, new_tensor: torch.Tensor | None) -> None:
    old = getattr(layer, param_name)
    if isinstance(old, nn.Parameter):
        old.data = new_tensor
    else:
        setattr(layer, param_name, nn.Parameter(new_tensor, requires_grad=False))


class Marlin:
    """Stub of one of vLLM's kernel classes."""


class VLLM:
    """Stubs of the vLLM modules that the plugin imports."""

    def __init__(self) -> None:
        self.kernels = {PlatformEnum.CUDA: [Marlin]}
        self.config: SimpleNamespace | None = None
        self.modules = {
            "vllm.config": {"get_current_vllm_config_or_none": lambda: self.config},
            "vllm.model_executor.kernels.linear": {
                "_POSSIBLE_NVFP4_KERNELS": self.kernels,
                "register_linear_kernel": self.register_linear_kernel,
            },
            "vllm.model_executor.kernels.linear.nvfp4.base": {"NvFp4LinearKernel": NvFp4LinearKernel},
            "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
            "vllm.platforms.interface": {"PlatformEnum": PlatformEnum},
        }

    def register_linear_kernel(self, kernel_class: type, platform: PlatformEnum, kernel_type: str = "mp") -> None:
        assert kernel_type == "nvfp4"
        self.kernels[platform].append(kernel_class)


@pytest.fixture
def vllm(monkeypatch):
    stub = VLLM()
    made: dict[str, types.ModuleType] = {}
    for name, content in stub.modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            prefix = ".".join(parts[:i])
            made.setdefault(prefix, types.ModuleType(prefix)).__path__ = []
            if i > 1:
                setattr(made[".".join(parts[: i - 1])], parts[i - 1], made[prefix])
        vars(made[name]).update(content)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "torch_cute_ops.integrations.vllm", raising=False)
    stub.plugin = importlib.import_module("torch_cute_ops.integrations.vllm")
    yield stub
    sys.modules.pop("torch_cute_ops.integrations.vllm", None)


def layer_of(n: int, k: int, device: str = "cpu", bias: bool = False) -> tuple[nn.Module, np.ndarray]:
    """Return a layer with the tensors that vLLM loads, and its decoded weight in float64."""
    layer = nn.Module()
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(n, k // 16) + 0.1).to(torch.float8_e4m3fn)
    own = {"weight": codes, "weight_scale": scale, "weight_global_scale": torch.tensor(0.125)}
    for name, tensor in own.items():
        setattr(layer, name, nn.Parameter(tensor.to(device), requires_grad=False))
    layer.bias = nn.Parameter(torch.randn(n, device=device).bfloat16(), requires_grad=False) if bias else None
    return layer, weights.fp4(codes, scale, 0.125)


@pytest.fixture
def supported(vllm, monkeypatch):
    """Pretend that our kernels support the layer: without a GPU only the reference runs, which vLLM would not
    select."""
    monkeypatch.setattr(vllm.plugin.CuteNvFp4LinearKernel, "is_supported", classmethod(lambda cls: (True, None)))
    return vllm.plugin.CuteNvFp4LinearKernel(None)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_values(bias, supported, device):
    layer, weight = layer_of(72, 192, device, bias)
    supported.process_weights_after_loading(layer)
    assert layer.weight_scale.shape == (1, 3, 32, 4, 4) and isinstance(layer.weight_scale, nn.Parameter)
    x = torch.randn(2, 3, 192, device=device).bfloat16()
    got = supported.apply_weights(layer, x, layer.bias)
    assert got.shape == (2, 3, 72) and got.dtype == torch.bfloat16
    want = x.double().cpu().numpy() @ weight.T
    if bias:
        want = want + layer.bias.double().cpu().numpy()
    assert np.linalg.norm(got.double().cpu().numpy() - want) < 2**-7 * np.linalg.norm(want)
    compiled = torch.compile(lambda x: supported.apply_weights(layer, x, layer.bias), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), got)


def test_unsupported_sizes(supported):
    layer, _ = layer_of(72, 48)
    with pytest.raises(ValueError, match="in_features is 48; expected a positive multiple of 32; disable CuteNvFp4"):
        supported.process_weights_after_loading(layer)


def test_is_supported(vllm, monkeypatch):
    kernel = vllm.plugin.CuteNvFp4LinearKernel
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel.is_supported() == (False, "torch_cute_ops needs a CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def old(index):
        raise RuntimeError("compute capability 8.0")

    monkeypatch.setattr(vllm.plugin, "arch_of_device", old)
    assert kernel.is_supported(80) == (False, "compute capability 8.0")
    monkeypatch.setattr(vllm.plugin, "arch_of_device", lambda index: None)
    assert kernel.is_supported(90) == (True, None) and kernel.can_implement(None) == (True, None)


@pytest.mark.parametrize(("plugins", "place"), [(None, 1), ("other", 1), ("other, torch_cute_ops", 0)])
def test_register(plugins, place, vllm, monkeypatch):
    """Check that our kernel is registered last, or first if the user names it, and only once if vLLM calls register
    several times."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    for _ in range(2):
        vllm.plugin.register()
    kernels = vllm.kernels[PlatformEnum.CUDA]
    assert len(kernels) == 2 and kernels[place] is vllm.plugin.CuteNvFp4LinearKernel


@pytest.mark.gpu
def test_captured_sizes_are_made_ready(supported, vllm):
    """Check that after loading, calls with the sizes that vLLM captures compile nothing."""
    vllm.config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 16]),
    )
    layer, _ = layer_of(64, 320, "cuda")
    supported.process_weights_after_loading(layer)
    x = torch.randn(2, 320, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = supported.apply_weights(layer, x)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, supported.apply_weights(layer, x))


def test_entry_point(vllm):
    """Check that the entry point in the package's metadata is the plugin's function."""
    project = Path(torch_cute_ops.__file__).parents[1] / "pyproject.toml"
    line = next(line for line in project.read_text().splitlines() if line.startswith("torch_cute_ops = "))
    module, _, name = line.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.plugin.register
    assert vllm.plugin.PLUGIN == "torch_cute_ops"


def test_without_vllm(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_cute_ops.integrations.vllm", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with pytest.raises(ModuleNotFoundError, match=r"needs vllm.config as in vLLM 0.33"):
        importlib.import_module("torch_cute_ops.integrations.vllm")
