"""Read the tensors of a checkpoint: one safetensors file, or several shards with an index."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from typing_extensions import Self

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"


def load_safetensors() -> Any:
    """Import safetensors and safetensors.torch.

    Raises:
        ModuleNotFoundError: with the install command, if safetensors is missing.
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
    """Return the JSON object in a file.

    Raises:
        ValueError: if the file contains no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} contains a {type(value).__name__}; expected an object")
    return value


class Files:
    """Access to the tensors of a checkpoint by name. Each call reads one tensor.

    The constructor reads the headers of all files. After a call of ``rename``, all methods take the new names.

    Args:
        path: folder of the checkpoint.

    Attributes:
        file_of: file that contains each tensor, keyed by the tensor's name.
        metadata: metadata entries from the headers of all files, merged.

    Raises:
        FileNotFoundError: if the folder contains no tensors, or lacks a shard that the index names.
        ValueError: for a truncated file, a file in another format, or a tensor that is not in the shard named by the
            index.
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
        self._in_file = {name: name for name in self.file_of}
        self._suffixes = self._suffixes_of_modules()

    def _read_headers(self) -> None:
        index = self.path / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} contains no weight_map")
            for file in sorted({*map(str, weight_map.values())}):
                if Path(file).name != file:
                    raise ValueError(f"{index} names {file}; expected a file in the same folder")
                if not (self.path / file).is_file():
                    raise FileNotFoundError(f"{self.path / file}, named by {index.name}, is missing")
                self._open_file(self.path / file)
            for name, file in weight_map.items():
                if self.file_of.get(name) != self.path / file:
                    raise ValueError(f"{self.path / file} contains no tensor {name}, although {index.name} says so")
            return
        single = self.path / SINGLE
        if not single.is_file():
            raise FileNotFoundError(f"{self.path} contains neither {SINGLE} nor {INDEX}")
        self._open_file(single)

    def _suffixes_of_modules(self) -> dict[str, set[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name in self.file_of:
            prefix, _, suffix = name.rpartition(".")
            found[prefix].add(suffix)
        return found

    def rename(self, new_name: Callable[[str], str | None]) -> None:
        """Rename all tensors for later calls. A tensor for which ``new_name`` returns ``None`` is hidden."""
        renamed = {new_name(name): name for name in self.file_of}
        seen = {new: old for new, old in renamed.items() if new is not None}
        self.file_of = {new: self.file_of[old] for new, old in seen.items()}
        self._in_file = {new: self._in_file[old] for new, old in seen.items()}
        self._suffixes = self._suffixes_of_modules()

    def original(self, name: str) -> str:
        """Return the name that a module or tensor had in the checkpoint before ``rename``."""
        if name in self._in_file:
            return self._in_file[name]
        for suffix in self._suffixes.get(name, ()):
            return self._in_file[f"{name}.{suffix}"].rpartition(".")[0]
        return name

    def _open_file(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(load_safetensors().safe_open(path, framework="pt", device="cpu"))
        except Exception as error:
            if isinstance(error, ModuleNotFoundError):
                raise
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
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
        """Return the last name components of the tensors directly in a module, such as ``{"weight", "bias"}``. Tensors
        of submodules are left out."""
        return self._suffixes.get(module, set())

    def describe(self, name: str) -> str:
        """Return the tensor's name and file as text for messages."""
        return f"{self._in_file.get(name, name)} in {self.file_of.get(name, self.path)}"

    def _slice(self, name: str) -> Any:
        """Return the object with which safetensors reads a tensor or a slice. No data is read yet."""
        return self._open[self.file_of[name]].get_slice(self._in_file[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor from the file's header, without reading the tensor."""
        return tuple(self._slice(name).get_shape())

    def is_floating(self, name: str) -> bool:
        """Return True if the tensor's dtype is a float of at least 16 bits, and not a quantised format."""
        return self._slice(name).get_dtype() in ("F16", "BF16", "F32", "F64")

    def is_quantised(self, name: str) -> bool:
        """Return True if the tensor's dtype is an FP8 format, or uint8, which may store FP4 codes."""
        return self._slice(name).get_dtype() in ("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0")

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU. It may be mapped from the file: copy it if you keep it.

        Raises:
            ValueError: if the checkpoint contains no such tensor.
        """
        if name not in self:
            raise ValueError(f"{self.path} contains no tensor {name}")
        tensor: Tensor = self._open[self.file_of[name]].get_tensor(self._in_file[name])
        return tensor

    def is_packed(self, name: str) -> bool:
        """Return True if the tensor's dtype is uint8, which stores two FP4 codes per byte in weights."""
        return bool(self._slice(name).get_dtype() == "U8")

    def read_slice(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        """Read only the elements from ``begin`` to ``end`` of dimension ``dim``."""
        tensor: Tensor = self._slice(name)[(*[slice(None)] * dim, slice(begin, end))]
        return tensor
