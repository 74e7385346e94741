"""Models whose quantised layers are replaced by layers of torch with the decoded weights."""

from __future__ import annotations

import torch
from torch import nn

from torch_cute_ops.nn import QuantLinear


def decode_layers(model: nn.Module, dtype: torch.dtype) -> dict[nn.Linear, QuantLinear]:
    """Replace each ``QuantLinear`` of a model by ``nn.Linear`` with the decoded weight in ``dtype``.

    Return the replaced layers, keyed by their replacements.
    """
    replaced = {}
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, QuantLinear):
                twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                twin.weight.data = layer.dequantize(dtype)
                if layer.bias is not None:
                    twin.bias.data = layer.bias.data
                parent.add_module(name, twin)
                replaced[twin] = layer
    return replaced
