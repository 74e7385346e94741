"""Make ``save_pretrained`` of Hugging Face models refuse quantised layers."""

from typing import Any, NoReturn

from torch import nn

from torch_cute_ops.nn._base import QuantLinear


def guard_saving(model: nn.Module) -> None:
    """Make ``save_pretrained`` of the model, and of models inside it, raise if they contain quantised layers.

    ``save_pretrained`` would write codes and scales, but a configuration that describes an unquantised model.
    """
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
