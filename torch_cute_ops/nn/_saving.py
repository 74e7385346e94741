"""Keeping models of Hugging Face from being saved without a word of how they are quantised."""

from typing import Any, NoReturn

from torch import nn

from torch_cute_ops.nn._base import QuantLinear


def guard_saving(model: nn.Module) -> None:
    """Have ``save_pretrained`` of the model, and of models within it, refuse where there are quantised layers: it would
    write their tensors, and a configuration that says nothing of them."""
    for module in model.modules():
        is_saved = callable(getattr(module, "save_pretrained", None))
        if is_saved and any(isinstance(each, QuantLinear) for each in module.modules()):
            guarded: Any = module
            guarded.save_pretrained = _refuse


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "save_pretrained: the configuration that it writes would not say how layers are quantised; use "
        "torch_cute_ops.checkpoint.save(model, path, style)"
    )
