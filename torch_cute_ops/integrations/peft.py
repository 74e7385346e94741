"""LoRA adapters of PEFT for quantised layers.

``register`` tells a ``LoraConfig`` how to adapt the layers of this package. All other steps are as usual in PEFT::

    config = torch_cute_ops.integrations.peft.register(LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    model = get_peft_model(model, config)
"""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from torch_cute_ops.nn import QuantLinear


class LoraQuantLinear(nn.Module, LoraLayer):
    """A quantised layer plus LoRA adapters: ``y = layer(x) + scaling · B(A(x))``.

    The quantised weight is never changed, so adapters cannot be merged into it. Adapters are float32 unless PEFT casts
    them.

    Args:
        base_layer: quantised layer.
        adapter_name: name of the first adapter.
        config: configuration of the adapter.
        r: rank of the adapter.
        lora_alpha: numerator of the adapter's scaling.
        named: additional arguments that PEFT passes to every adapted layer.

    Raises:
        ValueError: for a variant of LoRA that needs the weight itself, such as DoRA.
    """

    # PEFT's base class sets this attribute. Declare it, because mypy does not see PEFT's classes.
    base_layer: Any
    active_adapters: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    scaling: Any
    _cast_input_dtype: Any
    update_layer: Any

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **named: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **named)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **named)

    def resolve_lora_variant(self, *, config: LoraConfig, **named: Any) -> None:
        """Raise for any variant of LoRA, such as DoRA: variants change the weight or the forward pass.

        Raises:
            ValueError: for any variant.
        """
        if config.use_dora:
            raise ValueError("LoraQuantLinear: use_dora needs the unquantised weight; use plain LoRA")

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        """Compute the quantised layer's result plus the results of the active adapters."""
        result: Tensor = self.base_layer(x, *args, **named)
        if self.disable_adapters:
            return result
        dtype = result.dtype
        for name in self.active_adapters:
            if name in self.lora_A:
                down, up = self.lora_A[name], self.lora_B[name]
                rows = self.lora_dropout[name](self._cast_input_dtype(x, down.weight.dtype))
                result = result + up(down(rows)) * self.scaling[name]
        return result.to(dtype)

    def merge(self, *args: Any, **named: Any) -> None:
        """Raise, because adapters cannot be merged into a quantised weight.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "LoraQuantLinear: adapters cannot be merged into a quantised weight; merge them into the original model "
            "and quantise the result"
        )

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        """Return K and N of a quantised layer. PEFT's implementation would warn about an unknown layer class."""
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype of new adapters. PEFT's own method would return the dtype of the codes."""
        return base_layer.weight.device, torch.float32

    def __repr__(self) -> str:
        return f"lora.{super().__repr__()}"


def register(config: LoraConfig) -> LoraConfig:
    """Make a LoRA configuration accept quantised layers of this package, and return the configuration.

    Saved configurations do not contain this setting: pass ``register(LoraConfig.from_pretrained(path))`` as ``config``
    to ``PeftModel.from_pretrained``.
    """
    config._register_custom_module({QuantLinear: LoraQuantLinear})
    return config
