"""Names that transformers gives to the tensors of a checkpoint, such as older names of vision-language models."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

_EXPERT: Final = re.compile(r"(.*\.experts)\.\d+\..*")
"""Layer of one expert; transformers keeps all experts in one parameter."""


def model_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the model's name of each tensor of a checkpoint.

    transformers knows the names of unquantised tensors only. A tensor of a quantised layer, such as
    ``weight_global_scale``, is renamed as the layer's ``weight`` would be.

    Args:
        model: model of transformers, with unquantised layers.
        names: names of the checkpoint's tensors.
    """
    rename, known = _renaming(model, with_converters=False), model.state_dict().keys()
    modules: dict[str, str] = {}

    def module_of(module: str) -> str:
        if module not in modules:
            experts = _EXPERT.match(f"{module}.")
            prefixes = [module, *([experts[1]] if experts else [])]
            probes = [(prefix, key) for prefix in prefixes for key in ("weight", "gate_up_proj")]
            found = [(prefix, key, rename(f"{prefix}.{key}")) for prefix, key in probes]
            prefix, key, renamed = next((each for each in found if each[2] in known), found[0])
            is_same = renamed.endswith(f".{key}")
            modules[module] = renamed[: -len(key) - 1] + module[len(prefix) :] if is_same else module
        return modules[module]

    result = {}
    for name in names:
        whole = rename(name)
        module, _, last = name.rpartition(".")
        result[name] = whole if whole in known or not module else f"{module_of(module)}.{last}"
    return result


def converted_names(model: Any, names: Iterable[str]) -> set[str]:
    """Return the names of parameters that transformers makes of unquantised tensors."""
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
