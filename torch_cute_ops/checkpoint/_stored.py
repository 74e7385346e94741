"""Layers of an open checkpoint, found by the names of a model's modules."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from torch_cute_ops.checkpoint import torchao
from torch_cute_ops.checkpoint._files import Files
from torch_cute_ops.checkpoint._layers import KV_SCALES, lacks_input_scale
from torch_cute_ops.checkpoint.experts import EXPERT_NAMES, RENAMED
from torch_cute_ops.checkpoint.spec import LayerScheme, QuantSpec
from torch_cute_ops.nn._names import listed


class StoredLayers:
    """Layers of an open checkpoint. They are named as in the checkpoint; ``stored`` and ``sources`` translate the names
    of a model's modules.

    Args:
        files: tensors of the checkpoint.
        spec: quantisation of the checkpoint.
        merged: names of the checkpoint's layers that form a merged layer of the model, keyed by its name.
        model: model, whose module names decide whether names are translated.

    Attributes:
        used: names of the tensors that were loaded.
        uncalibrated: names of the layers that lack an input scale and do not need it.
    """

    def __init__(self, files: Files, spec: QuantSpec, merged: Mapping[str, Sequence[str]], model: nn.Module) -> None:
        self.files, self.spec, self.merged = files, spec, merged
        modules = [f".{name}." for name, _ in model.named_modules()]
        self.renamed = [
            pair
            for pair in RENAMED
            if any(pair[1] in f".{name}" for name in files.file_of) and not any(pair[1] in name for name in modules)
        ]
        self.used: set[str] = set()
        self.uncalibrated: list[str] = []

    def use(self, source: str) -> None:
        """Record that all tensors of a layer are loaded."""
        self.used.update(f"{source}.{suffix}" for suffix in self.files.suffixes(source))

    def stored(self, name: str) -> str:
        """Return the name that the checkpoint uses for the module ``name``."""
        for ours, theirs in self.renamed:
            name = f".{name}.".replace(ours, theirs)[1:-1]
        return name

    def sources(self, name: str) -> list[str]:
        """Return the names of the checkpoint's layers that form a layer of the model. A merged layer has several."""
        name = self.stored(name)
        parent, _, last = name.rpartition(".")
        if not self.files.suffixes(name) and last in self.merged:
            layers = [f"{parent}.{layer}".lstrip(".") for layer in self.merged[last]]
            if any(map(self.files.suffixes, layers)):
                return layers
        return [name]

    def is_quantised(self, source: str) -> bool:
        """Return True if the checkpoint stores the layer ``source`` in a quantised format."""
        suffixes = self.files.suffixes(source) - {"bias"} - KV_SCALES
        return bool(suffixes) and not (suffixes == {"weight"} and self.files.is_floating(f"{source}.weight"))

    def scheme(self, source: str) -> LayerScheme | None:
        """Return the scheme of the checkpoint's quantised layer ``source``, or None if the configuration does not give
        it."""
        if self.spec.style == "torchao":
            return torchao.scheme_of(self.files, source)
        return self.spec.scheme_of_tensors(self.files.original(source))

    def describe(self, source: str) -> str:
        """Return the name and the file of one of the layer's tensors, for messages."""
        suffixes = sorted(self.files.suffixes(source))
        return self.files.describe(f"{source}.{suffixes[0]}") if suffixes else source

    def note_uncalibrated(self, sources: Sequence[str], schemes: Sequence[LayerScheme]) -> bool:
        """Return True if one of the layers ``sources`` lacks an input scale and does not need it. Record this layer for
        the warning."""
        lacking = [
            source
            for source, scheme in zip(sources, schemes, strict=True)
            if lacks_input_scale(self.files, source, scheme)
        ]
        self.uncalibrated += lacking
        return bool(lacking)

    def scheme_of_quantised(self, source: str) -> LayerScheme:
        """Return the scheme of a quantised layer, or raise ``ValueError`` if the configuration does not give it."""
        scheme = self.scheme(source)
        if scheme is None:
            raise ValueError(f"{self.describe(source)} is quantised, but {self.spec.path} does not say how")
        return scheme

    def expert_layers(self, name: str, experts: int) -> list[list[str]] | None:
        """Return the names of the checkpoint's gate, up and down layers of each expert, or None if the checkpoint does
        not store experts as layers.

        Args:
            name: module name of the experts.
            experts: number of experts.
        """
        stored = self.stored(name)
        names = next((each for each in EXPERT_NAMES if self.files.suffixes(f"{stored}.0.{each[0]}")), None)
        return names and [[f"{stored}.{expert}.{layer}" for layer in names] for expert in range(experts)]

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` if any of these checkpoint tensors was not loaded, except scales of the KV cache."""
        left = [name for name in names if name not in self.used and name.rpartition(".")[2] not in KV_SCALES]
        if left:
            raise ValueError(f"the model does not use {listed([self.files.describe(name) for name in left])}")
