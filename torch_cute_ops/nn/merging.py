"""Merging the layers of a model that have the same input, in models whose ``forward`` calls them one by one."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import QuantLinear, merge


@torch.no_grad()
def merge_(model: nn.Module, merged: Mapping[str, Sequence[str]] = _names.MERGED) -> nn.Module:
    """Merge the quantised layers of a model that have the same input, in place: one GEMM in place of two or three.

    A module that has, say, ``q_proj``, ``k_proj`` and ``v_proj`` gets a ``qkv_proj`` in their place. Its ``forward``
    stays as it is: where it calls one of the three, it gets that one's columns of the merged result. So this works for
    modules that know nothing of it, as those of Hugging Face's decoders, under ``torch.compile`` too. Layers that do
    not fit together, such as those of an attention of which only some are quantised, stay apart.

    Args:
        model: with layers of this package, such as after :func:`quantize_`.
        merged: names of the layers that are merged, by the name that the merged one gets.

    Returns:
        ``model``. A call in which such layers are given different inputs, as in cross-attention, raises a
        ``RuntimeError``.
    """
    # Without the layers themselves: a list would keep them all until the last is merged.
    for module in [each for each in model.modules() if not isinstance(each, QuantLinear)]:
        groups = {}
        for name, parts in merged.items():
            layers = [module._modules.get(part) for part in parts]
            found = [layer for layer in layers if isinstance(layer, QuantLinear)]
            if len(found) < len(layers) or name in module._modules:
                continue
            try:
                layer = merge(found)
            except ValueError:
                continue
            for part in parts:
                del module._modules[part]
            module.add_module(name, layer.train(module.training))
            groups[name] = tuple(parts)
        if groups:
            base: Any = type(module)
            module.__class__ = _merging(base, tuple(groups.items()))
    return model


Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of merged layers, and of their parts."""


@functools.cache
def _merging(base: Any, groups: Groups) -> type[nn.Module]:
    """A subclass whose ``forward`` is that of ``base``, of a module with the parts in place of the merged layers."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.forward(_WithParts(self, groups), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = object.__reduce_ex__(self, protocol)
        return (_blank, (base, groups), *made[2:])

    # Named as the class that it stands for, which is looked up by name, by Hugging Face's hooks for one. By its name
    # pickle would find that class.
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "forward": functools.wraps(base.forward)(forward),
    }
    return type(base.__name__, (base,), members)


def _blank(base: Any, groups: Groups) -> Any:
    """A module of ``_merging`` that unpickling fills."""
    cls = _merging(base, groups)
    return cls.__new__(cls)


class _WithParts:
    """A module as one call of its ``forward`` sees it. Of the call alone, so that calls may run side by side."""

    def __init__(self, module: nn.Module, groups: Groups) -> None:
        self._module = module
        self._parts: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, parts in groups:
            results = _Results(name, getattr(module, name))
            for i, part in enumerate(parts):
                self._parts[part] = _Part(results, i)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__["_parts"]
        return parts[name] if name in parts else getattr(self.__dict__["_module"], name)


class _Results:
    """What a merged layer makes of its input, computed when the first part is asked for."""

    def __init__(self, name: str, layer: QuantLinear) -> None:
        self.name, self.layer = name, layer
        self.input: Tensor | None = None
        self.values: Sequence[Tensor] = ()

    def of(self, x: Tensor) -> Sequence[Tensor]:
        if self.input is None:
            self.input = x
            self.values = self.layer(x).split(self.layer.parts, -1)
        elif self.input is not x:
            raise RuntimeError(
                f"{self.name} merges layers that were given different inputs; leave them apart (merge=False)"
            )
        return self.values


class _Part:
    """One of the layers that were merged, as ``forward`` calls it and looks at it."""

    def __init__(self, results: _Results, index: int) -> None:
        self.results, self.index = results, index

    def __call__(self, input: Tensor) -> Tensor:
        return self.results.of(input)[self.index]

    def _own(self, rows: Tensor) -> Tensor:
        return rows.split([*self.results.layer.parts])[self.index]

    @property
    def weight(self) -> Tensor:
        """The part's rows of the merged weight, codes as that has them."""
        return self._own(self.results.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """The part's own."""
        bias = self.results.layer.bias
        return None if bias is None else self._own(bias)

    @property
    def in_features(self) -> int:
        """K."""
        return self.results.layer.in_features

    @property
    def out_features(self) -> int:
        """The part's N."""
        return self.results.layer.parts[self.index]
