"""Merge quantised layers that have the same input, in models whose ``forward`` calls the layers one by one."""

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn

from torch_cute_ops.nn import _names
from torch_cute_ops.nn._base import QuantLinear, merge
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.dispatch import PLAIN, is_proxy


@torch.no_grad()
def merge_(model: nn.Module, merged: Mapping[str, Sequence[str]] = _names.MERGED) -> nn.Module:
    """Merge quantised layers with the same input, in place, so that one GEMM replaces two or three.

    A module with, say, ``q_proj``, ``k_proj`` and ``v_proj`` gets a ``qkv_proj`` instead. Its ``forward`` stays
    unchanged: a call to one of the three returns its columns of the merged result. Modules such as Hugging Face
    decoders therefore need no support for merging, even under ``torch.compile``. Layers that cannot be merged stay
    separate, such as the layers of an attention block if only some are quantised, or layers with hooks. Layers also
    stay separate if a method other than ``forward`` uses them, or if ``forward`` calls ``super()`` or assigns
    attributes of its module.

    Args:
        model: model with layers of this package, such as after :func:`quantize_`.
        merged: names of the layers to merge, keyed by the name of the merged layer.

    Returns:
        ``model``. A call that passes different inputs to merged layers, as in cross-attention, raises ``RuntimeError``,
        and so does a call that changes the input in place between two merged layers. Torch does not count changes of
        inference tensors. Under ``torch.inference_mode()`` the values of the inputs are therefore compared, but only on
        a CPU, or on a GPU with ``TORCH_CUTE_OPS_CHECK=1``. Without this setting, wrong calls under
        ``torch.inference_mode()`` on a GPU are not detected, and neither are wrong calls under ``torch.compile``.
    """
    # Leave out quantised layers, because this list would keep all of them in memory until the last layer is merged.
    for module in [each for each in model.modules() if not isinstance(each, QuantLinear)]:
        groups = {}
        cls: Any = type(module)
        for name, originals in merged.items():
            found = [layer for each in originals if isinstance(layer := module._modules.get(each), QuantLinear)]
            if len(found) < len(originals) or name in module._modules or any(map(_names.reason_bound, found)):
                continue
            if not _can_run_with_originals(cls, frozenset(originals)):
                continue
            try:
                layer = merge(found)
            except ValueError:
                continue
            for each in originals:
                del module._modules[each]
            module.add_module(name, layer.train(module.training))
            groups[name] = tuple(originals)
        if groups:
            module.__class__ = merging(cls, tuple(groups.items()))
    return model


@functools.cache
def _can_run_with_originals(base: Any, originals: frozenset[str]) -> bool:
    """Return True if ``forward`` of ``base`` can run with :class:`_WithOriginals` as ``self``.

    Only ``forward`` may use the layers ``originals``. It must not call ``super()``, which refuses such an object, or
    assign attributes of ``self``, which would be lost.
    """
    methods = [
        (name, inspect.unwrap(method))
        for name, method in inspect.getmembers(base, inspect.isfunction)
        if getattr(nn.Module, name, None) is not method and name != "__init__"
    ]
    return not any(
        "__class__" in method.__code__.co_freevars or _assigns_to_self(method.__code__)
        if name == "forward"
        else any(originals.intersection(code.co_names) for code in _nested(method.__code__))
        for name, method in methods
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and the code of all functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _assigns_to_self(code: CodeType) -> bool:
    """Return True if a method's code assigns to an attribute of its first parameter."""
    return any(
        step.opname == "STORE_ATTR" and _last_loaded(before) == code.co_varnames[0]
        for before, step in itertools.pairwise(dis.get_instructions(code))
    )


def _last_loaded(step: dis.Instruction) -> str | None:
    """Return the name of the variable that an instruction loads last, or None if it loads none."""
    # Since Python 3.13, one instruction may load two variables; its argument is then a pair of names.
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return names[-1] if step.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_DEREF")) else None


Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs (name of a merged layer, names of the layers that it replaces)."""


@functools.cache
def merging(base: Any, groups: Groups) -> type[nn.Module]:
    """Return a subclass of ``base`` whose ``forward`` can call the original layers by name, as if they had not been
    merged."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.forward(_WithOriginals(self, groups), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made: Any = object.__reduce_ex__(self, protocol)
        return (_blank, (base, groups), *made[2:])

    # Give the subclass the name of ``base``, because Hugging Face's hooks look up classes by name. Under this name,
    # pickle would find ``base``. So ``__reduce_ex__`` calls ``merging`` again.
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "forward": functools.wraps(base.forward)(forward),
        MERGED_FROM: (base, groups),
    }
    return type(base.__name__, (base,), members)


MERGED_FROM: Final = "_merged_from"
"""Attribute of a class that :func:`merging` made: its arguments."""


def _blank(base: Any, groups: Groups) -> Any:
    """Create an empty instance of the subclass that ``merging`` returns, for pickle."""
    cls = merging(base, groups)
    return cls.__new__(cls)


class _WithOriginals:
    """Object that replaces ``self`` during one call of a module's ``forward``. Its attributes are the original layers
    and all other attributes of the module. Concurrent calls use separate objects."""

    def __init__(self, module: nn.Module, groups: Groups) -> None:
        self._module = module
        self._originals: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, originals in groups:
            results = _Results(name, getattr(module, name))
            for i, original in enumerate(originals):
                self._originals[original] = _Original(results, i)

    def __getattr__(self, name: str) -> Any:
        originals = self.__dict__["_originals"]
        return originals[name] if name in originals else getattr(self.__dict__["_module"], name)


class _Results:
    """Results of a merged layer. They are computed when the first original layer is called, and reused for the other
    original layers."""

    def __init__(self, name: str, layer: QuantLinear) -> None:
        self.name, self.layer = name, layer
        self.input: Tensor | None = None
        self.version: int | None = None
        self.copy: Tensor | None = None
        self.values: Sequence[Tensor] = ()

    def of(self, x: Tensor) -> Sequence[Tensor]:
        version = _version(x)
        if self.input is None:
            self.input, self.version = x, version
            self.copy = x.clone() if _compares_values(x) else None
            self.values = self.layer(x).split(self.layer.parts, -1)
        elif self.input is not x:
            raise RuntimeError(
                f"{self.name} merges layers that were called with different inputs; do not merge them (merge=False)"
            )
        elif self.version != version or (self.copy is not None and not _has_equal_bytes(self.copy, x)):
            raise RuntimeError(
                f"{self.name} merges layers, and their input was changed in place between two calls; do not merge them "
                "(merge=False)"
            )
        return self.values


def _version(x: Tensor) -> int | None:
    """Return the counter that torch increments when the tensor changes in place, or None if the tensor has no such
    counter.

    Inference tensors have no counter, and compiled or traced code cannot compare counters.
    """
    return None if torch.compiler.is_compiling() or is_proxy(x) or x.is_inference() else x._version


def _compares_values(x: Tensor) -> bool:
    """Return True if changes of this input are detected by comparing its values. This is so for inference tensors on a
    CPU, and in debug mode also on a GPU."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or not x.is_inference():
        return False
    return x.is_cpu or (settings.CHECK and x.is_cuda and not torch.cuda.is_current_stream_capturing())


def _has_equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of equal shape and dtype have equal bits. Equal bits include equal NaNs."""
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))


class _Original:
    """Replacement for one of the original layers that were merged. The module's ``forward`` calls and inspects it."""

    def __init__(self, results: _Results, index: int) -> None:
        self.results, self.index = results, index

    def __call__(self, input: Tensor) -> Tensor:
        return self.results.of(input)[self.index]

    def _own(self, rows: Tensor) -> Tensor:
        return rows.split([*self.results.layer.parts])[self.index]

    @property
    def weight(self) -> Tensor:
        """Rows of the merged weight that belong to this layer, as stored codes."""
        return self._own(self.results.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """Bias of this layer, or None."""
        bias = self.results.layer.bias
        return None if bias is None else self._own(bias)

    @property
    def in_features(self) -> int:
        """Number of input features, K."""
        return self.results.layer.in_features

    @property
    def out_features(self) -> int:
        """Number of output features of this original layer, N."""
        return self.results.layer.parts[self.index]
