"""Layers of checkpoints, and a record of calls, for tests of the adapters for serving engines."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import weights
from torch_cute_ops.checkpoint.spec import LayerScheme


def stored_layer(scheme: LayerScheme, n: int, k: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return random tensors of one layer as a checkpoint stores them, and its weight in float64."""
    factor = float(2.0 ** torch.randint(-6, 3, ())) * 1.25
    if scheme.format in ("nvfp4", "mxfp4"):
        codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
        is_nvfp4 = scheme.format == "nvfp4"
        scale = (torch.rand(n, k // 16) + 0.1).to(torch.float8_e4m3fn)
        if not is_nvfp4:
            scale = torch.randint(120, 130, (n, k // 32), dtype=torch.uint8)
        weight = weights.fp4(codes, scale, factor if is_nvfp4 else 1.0)
        if scheme.style == "modelopt":
            own = {"weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(0.01)}
            return {"weight": codes, "weight_scale": scale, **(own if is_nvfp4 else {})}, weight
        tensors = {"weight_packed": codes, "weight_scale": scale}
        if is_nvfp4:
            tensors["weight_global_scale"] = torch.tensor([1 / factor])
            if scheme.activations == "fp4":
                tensors["input_global_scale"] = torch.tensor([100.0])
        return tensors, weight
    elements = (torch.randn(n, k) * 50).to(torch.float8_e4m3fn)
    if scheme.format == "fp8_block":
        scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.1
        stored = scale[:, None, :, None] if scheme.style == "modelopt" else scale
        name = "weight_scale_inv" if scheme.style == "deepseek" else "weight_scale"
        return {"weight": elements, name: stored}, weights.fp8_blocks(elements, scale)
    if scheme.format == "fp8_channel":
        scale = (torch.rand(n) + 0.1) * factor
        tensors = {"weight": elements, "weight_scale": scale if scheme.style == "modelopt" else scale[:, None]}
        return tensors, weights.fp8_rows(elements, scale)
    tensors = {
        "weight": elements,
        "weight_scale": torch.tensor(factor).reshape(() if scheme.style == "modelopt" else 1),
    }
    if scheme.activations == "fp8_static":
        tensors["input_scale"] = torch.tensor(0.02)
    return tensors, weights.fp8_rows(elements, torch.tensor(factor))


@contextlib.contextmanager
def installed(stub: ModuleType, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Replace the engine by stubs. Yield the integration, as ``root``, and its modules by name."""
    for name, module in stub.modules():
        monkeypatch.setitem(sys.modules, name, module)
    stub.forget()
    modules = {name: importlib.import_module(f"{stub.OURS}.{name}") for name in names}
    yield SimpleNamespace(root=importlib.import_module(stub.OURS), **modules)
    stub.forget()


class Recorded(TorchDispatchMode):
    """Record the ops of this package that a block calls, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute":
            self.calls.append((func._schema.name.removeprefix("cute::"), args, kwargs or {}))
        return func(*args, **(kwargs or {}))
