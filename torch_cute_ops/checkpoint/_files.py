"""The tensors of a checkpoint: one safetensors file, or shards with an index."""

import contextlib
import json
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from typing_extensions import Self

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"


def load_safetensors() -> Any:
    """The module safetensors, with its part for torch.

    Raises:
        ModuleNotFoundError: that says how to get it.
    """
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading and writing checkpoints needs safetensors: pip install 'torch-cute-ops[checkpoint]'"
        ) from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ValueError: if it holds none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


class Files:
    """The tensors of a checkpoint by name, read one at a time. The headers of all files are read at once.

    Args:
        path: the checkpoint's folder.

    Attributes:
        file_of: the file that each tensor is in.
        metadata: what the headers say beside the tensors, of all files together.

    Raises:
        FileNotFoundError: without tensors, or without a shard that the index names.
        ValueError: for a file that is truncated or none of safetensors, and a tensor that is not where the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, Any] = {}
        self.file_of: dict[str, Path] = {}
        self.metadata: dict[str, str] = {}
        try:
            self._read_headers()
        except BaseException:
            self._stack.close()
            raise
        self._suffixes: defaultdict[str, set[str]] = defaultdict(set)
        for name in self.file_of:
            prefix, _, suffix = name.rpartition(".")
            self._suffixes[prefix].add(suffix)

    def _read_headers(self) -> None:
        index = self.path / INDEX
        if index.is_file():
            where = read_json(index).get("weight_map")
            if not isinstance(where, dict):
                raise ValueError(f"{index} has no weight_map")
            for file in sorted({*map(str, where.values())}):
                if Path(file).name != file:
                    raise ValueError(f"{index} names {file}; expected a file in the same folder")
                if not (self.path / file).is_file():
                    raise FileNotFoundError(f"{self.path / file} is missing, which {index.name} names")
                self._open_file(self.path / file)
            for name, file in where.items():
                if self.file_of.get(name) != self.path / file:
                    raise ValueError(f"{self.path / file} has no tensor {name}, which {index.name} says it has")
            return
        single = self.path / SINGLE
        if not single.is_file():
            raise FileNotFoundError(f"{self.path} has neither {SINGLE} nor {INDEX}")
        self._open_file(single)

    def _open_file(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(load_safetensors().safe_open(path, framework="pt", device="cpu"))
        except Exception as error:
            if isinstance(error, ModuleNotFoundError):
                raise
            raise ValueError(f"{path} is truncated, or no safetensors file: {error}") from error
        self._open[path] = handle
        self.file_of.update(dict.fromkeys(handle.keys(), path))
        self.metadata.update(handle.metadata() or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def suffixes(self, module: str) -> set[str]:
        """The last parts of the names of a module's own tensors."""
        return self._suffixes.get(module, set())

    def describe(self, name: str) -> str:
        """The tensor and its file, for messages."""
        return f"{name} in {self.file_of.get(name, self.path)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; nothing but the header is read."""
        return tuple(self._open[self.file_of[name]].get_slice(name).get_shape())

    def is_floating(self, name: str) -> bool:
        """Whether a tensor holds numbers of 16 bits or more, and so is not quantised."""
        return self._open[self.file_of[name]].get_slice(name).get_dtype() in ("F16", "BF16", "F32", "F64")

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, which may lie in the file itself: copy what is kept.

        Raises:
            ValueError: if there is no such tensor.
        """
        if name not in self:
            raise ValueError(f"{self.path} has no tensor {name}")
        tensor: Tensor = self._open[self.file_of[name]].get_tensor(name)
        return tensor

    def is_packed(self, name: str) -> bool:
        """Whether a tensor holds bytes: of a weight, two FP4 codes each."""
        return bool(self._open[self.file_of[name]].get_slice(name).get_dtype() == "U8")

    def read_part(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        """What a tensor has from ``begin`` to ``end`` of dimension 0 or 1; the rest of it is not read."""
        part = self._open[self.file_of[name]].get_slice(name)
        tensor: Tensor = part[begin:end] if dim == 0 else part[:, begin:end]
        return tensor
