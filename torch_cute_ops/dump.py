"""Write the last call of each op to a file (``TORCH_CUTE_OPS_DUMP=folder``), and replay a call from its file.

A dump is a safetensors file with the call's tensors as they were before the call, and a description in the metadata. It
is written before the op runs, so it survives a CUDA error, a time-out and the end of the process. If
``TORCH_CUTE_OPS_DUMP`` is set, the registry wraps each op with a :class:`Recorder`.
"""

import functools
import itertools
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, distributed

from torch_cute_ops._version import __version__
from torch_cute_ops.ops._define import OpSpec, as_tuple
from torch_cute_ops.runtime import files, settings
from torch_cute_ops.runtime.provenance import source_digest
from torch_cute_ops.runtime.toolchain import driver_version, installed_packages

log = logging.getLogger("torch_cute_ops")

FORMAT: Final = 1
KEY: Final = "torch_cute_ops"
"""Key in a file's metadata that holds the description of the call as JSON."""
ADDRESS: Final = 256
"""A dump stores each tensor's address modulo this number of bytes. Kernels distinguish alignments up to 128 bytes."""
NATIVE: Final = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool)
)
"""Dtypes that are stored as they are; tensors of other dtypes are stored as bytes."""

_calls = itertools.count(1)


class Recorder:
    """Writer of the last call of one op.

    Args:
        spec: op.
        folder: folder of the dumps; created at the first call.
        limit: maximum total size of the tensors in a dump, bytes. If a call's tensors exceed the limit, the dump
            contains only the descriptions of the largest tensors, without their contents.
    """

    def __init__(self, spec: OpSpec, folder: Path, limit: int) -> None:
        self.spec, self.folder, self.limit = spec, folder, limit

    @property
    def path(self) -> Path:
        """File of the dump. Each process writes a separate file, whose name contains the host's name, the rank (if any)
        and the process's id. The id alone would not be unique if containers share the folder."""
        return self.folder / f"{self.spec.name}-{_process_name()}.safetensors"

    def recorded(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an implementation of the op, so that each call is written before it runs."""

        @functools.wraps(implementation)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_recorded = self.record(args, kwargs)
            try:
                return implementation(*args, **kwargs)
            except Exception:
                if is_recorded:
                    log.error("cute::%s failed; the call's dump is %s", self.spec.name, self.path)
                else:
                    log.error("cute::%s failed; the call was not dumped", self.spec.name)
                raise

        return call

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Write a call and return True. If it cannot be written, log the reason, keep the previous dump and return
        False."""
        try:
            outputs = {name: kwargs[name] for name in self.spec.out_names if name in kwargs}
            call = self.spec.bind(*args, **{name: value for name, value in kwargs.items() if name not in outputs})
            given = self.spec.path.arguments(call)
            described, stored = self._described(given, self.limit)
            about = {
                "format": FORMAT,
                "op": self.spec.name,
                "schema": self.spec.signature.out_schema if outputs else self.spec.signature.schema,
                "number": next(_calls),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "tactic": _tactic(self.spec, call),
                "versions": versions(),
                "arguments": described,
                "outputs": self._described(outputs, 0)[0],
            }
            files.make_folder(self.folder)
            # Do not follow symbolic links. The file name is predictable, so another user who can write to the folder
            # could create a link with this name to any file.
            files.replace(self.path, save(stored, {KEY: json.dumps(about)}), mode=0o600, follow_links=False)
        except Exception as error:  # any exception: after a CUDA error, no tensor can be read
            log.error("cute::%s: the call is not dumped: %s: %s", self.spec.name, type(error).__name__, error)
            return False
        return True

    def _described(self, given: dict[str, Any], limit: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return descriptions of all arguments, and the contents of the tensors to store, by name.

        While a CUDA graph is captured, no contents can be read.
        """
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        described = {name: value if name in tensors else _scalar(value) for name, value in given.items()}
        capturing = any(each.is_cuda for each in tensors.values()) and torch.cuda.is_current_stream_capturing()
        stored: dict[str, Tensor] = {}
        seen: dict[Any, str] = {}
        for name, tensor in sorted(tensors.items(), key=lambda pair: pair[1].numel() * pair[1].itemsize):
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            first = seen.setdefault(view, name)
            distinct = _distinct(tensor)
            limit -= 0 if first != name else distinct.numel() * tensor.itemsize
            if first == name and limit >= 0 and not capturing:
                content = distinct.detach()
                if content.itemsize == 1 and content.dtype not in NATIVE:
                    content = content.view(torch.uint8)  # before the copy, because torch 2.9 cannot copy FP4
                content = content.to("cpu", copy=True).contiguous()
                stored[name] = content if content.dtype in NATIVE else content.view(torch.uint8)
            described[name] = {
                "tensor": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "device": str(tensor.device),
                "address": tensor.data_ptr() % ADDRESS,
                "same_as": None if first == name else first,
                "stored": name in stored,
            }
        return described, stored


def _process_name() -> str:
    """Return the host's name, the rank (if any) and the process's id, for a file's name."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", platform.node()) or "host"
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal():
        rank = str(distributed.get_rank()) if distributed.is_available() and distributed.is_initialized() else ""
    return f"{host}-{f'rank{rank}-' if rank else ''}{os.getpid()}"


def _distinct(tensor: Tensor) -> Tensor:
    """Return a view that contains each stored element once: expanded dimensions (stride 0) get length 1."""
    for dim, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and extent > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _scalar(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _tactic(spec: OpSpec, call: Any) -> Any:
    """Return the backend and tactic that a GEMM on a GPU would use, or None."""
    if not spec.has_backends or not call[0].is_cuda:
        return None
    try:
        return spec.path.tactic(call, call[0].device)
    except ValueError as error:  # the call is wrong, or no backend supports it
        return str(error)


@functools.cache
def versions() -> dict[str, Any]:
    """Return versions and devices that a call's result can depend on."""
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return {
        "torch_cute_ops": __version__,
        "sources": source_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
        **installed_packages(),
    }


class DumpError(ValueError):
    """File that is not a dump, or whose call cannot be replayed here."""


@dataclass(frozen=True)
class Dump:
    """A call that was read from a file.

    Attributes:
        about: description of the call, as ``Recorder.record`` writes it.
        stored: contents of the stored tensors, by argument.
    """

    about: dict[str, Any]
    stored: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> "Dump":
        """Read a dump.

        Raises:
            DumpError: if the file is not a dump of this format.
            OSError: if the file cannot be read.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file")
        try:
            with safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {})[KEY])
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no iterable
        except OSError:
            raise
        except Exception as error:  # raised by safetensors, without a common base class, or by json
            raise DumpError(f"{path} is no dump of a call: {type(error).__name__}: {error}") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise DumpError(f"{path} is no dump of a call in format {FORMAT}")
        return cls(about, stored)

    @property
    def missing(self) -> list[str]:
        """Names of the tensors whose contents were not stored."""
        return [name for name, each in self._tensors() if not each["stored"] and each["same_as"] is None]

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, value in self.about["arguments"].items():
            if isinstance(value, dict) and "tensor" in value:
                yield name, value

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the call's arguments by name, on ``device``, with the strides and alignments of the original call.
        Tensors whose contents were not stored are zeros, which are valid ids, offsets and counts."""
        found = {name: _value(value) for name, value in self.about["arguments"].items()}
        for name, value in self._tensors():
            found[name] = _tensor(value, self.stored.get(name), device)
        for name, value in self._tensors():
            if value["same_as"] is not None:
                found[name] = found[value["same_as"]]
        return found

    def outputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate outputs like the tensors that the caller passed as ``out``, or return an empty tuple if there were
        none."""
        return tuple(_tensor(value, None, device) for value in self.about["outputs"].values())


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        return getattr(torch, value["dtype"])
    return float(value["float"]) if isinstance(value, dict) and "float" in value else value


def _tensor(about: dict[str, Any], content: Tensor | None, device: torch.device) -> Tensor:
    """Return a tensor with the described dtype, strides and alignment, and with this content or zeros."""
    dtype, shape, strides = getattr(torch, about["tensor"]), about["shape"], about["stride"]
    kind = torch.uint8 if dtype.itemsize == 1 else dtype  # few functions of torch support every 1-byte dtype
    extents = [1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True)]
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True) if extent)
    begin = about["address"] // kind.itemsize
    memory = torch.zeros(begin + count, dtype=kind, device=device)
    if content is not None and 0 not in shape:
        memory.as_strided(extents, strides, begin).copy_(content.view(kind).reshape(extents))
    return memory.as_strided(shape, strides, begin).view(dtype)


def replay(dump: Dump, spec: OpSpec, device: torch.device, backend: str | None = None) -> tuple[Any, Any, Any]:
    """Run a call again.

    Args:
        dump: the call.
        spec: its op.
        device: device to run on.
        backend: backend to use instead of the call's, for a GEMM.

    Returns:
        The call (an object of the call path's ``call_type``), copies of the updated arguments from before the call, and
        the outputs.

    Raises:
        DumpError: for ``backend`` with an op without backends.
        Exception: any exception that the op raises.
    """
    given = dump.arguments(device)
    if backend is not None:
        if "backend" not in given:
            raise DumpError(f"{spec.name} has no backends")
        given["backend"] = backend
    call = spec.bind(**given)
    old = spec.copies_of_updated(given)
    op = getattr(torch.ops.cute, spec.name)
    outputs = dump.outputs(device)
    with torch.no_grad():
        if outputs:
            op.out(**given, **dict(zip(spec.out_names, outputs, strict=True)))
        else:
            outputs = as_tuple(op.default(**given))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return call, old, outputs


def recorder_of(spec: OpSpec) -> Recorder:
    """Return the recorder that the settings ask for."""
    assert settings.DUMP is not None
    return Recorder(spec, settings.DUMP, settings.DUMP_MB * 2**20)
