"""Map tensor names of a checkpoint to parameter names of a transformers model. The names differ, for example, in
vision-language models."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

_EXPERT: Final = re.compile(r"(.*\.experts)\.\d+\.")
"""Beginning of the name of a tensor of one expert; transformers keeps all experts in one parameter."""


def model_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the parameter name in the model for each tensor of a checkpoint.

    transformers can rename only the tensors of unquantised layers. So a tensor such as ``weight_global_scale`` of a
    quantised layer gets the prefix that transformers gives to the layer's ``weight``.

    Args:
        model: transformers model with unquantised layers.
        names: names of the checkpoint's tensors.
    """
    rename, known = _renaming(model, with_converters=False), model.state_dict().keys()

    @functools.cache
    def module_of(module: str) -> str:
        """Return the model's name for a module of the checkpoint. transformers renames only parameters, so rename a
        parameter of the unquantised module."""
        found = [(key, rename(f"{module}.{key}")) for key in ("weight", "gate_up_proj")]
        key, renamed = next((each for each in found if each[1] in known), found[0])
        return renamed[: -len(key) - 1] if renamed.endswith(f".{key}") else module

    def name_of(name: str) -> str:
        # A checkpoint can contain 100,000 tensors of experts, and renaming is slow. So rename their common prefix once.
        experts = _EXPERT.match(name)
        if experts and f"{module_of(experts[1])}.gate_up_proj" in known:
            return module_of(experts[1]) + name[len(experts[1]) :]
        module, _, last = name.rpartition(".")
        whole = rename(name)
        return whole if whole in known or not module else f"{module_of(module)}.{last}"

    return {name: name_of(name) for name in names}


def converted_names(model: Any, names: Iterable[str]) -> set[str]:
    """Convert names of a checkpoint's unquantised tensors to names of the parameters into which transformers loads
    them."""
    rename = _renaming(model, with_converters=True)
    return {rename(name) for name in names}


def _renaming(model: Any, *, with_converters: bool) -> Callable[[str], str]:
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter) and with_converters]
    given = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": model.state_dict()}

    def rename(name: str) -> str:
        renamed: str = rename_source_key(name, renamings, converters, **given)[0]
        return renamed

    return rename
