"""Build a bundle: compile kernels, link them into one library per architecture, and write the manifest."""

import contextlib
import hashlib
import importlib.metadata
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_cute_ops._version import __version__
from torch_cute_ops.runtime import compiler, files, settings, toolchain
from torch_cute_ops.runtime.bundle import FORMAT, MANIFEST, Bundle, BundleError, symbol_of
from torch_cute_ops.runtime.compile_pool import Task, compile_all, progress
from torch_cute_ops.runtime.provenance import kernel_digest
from torch_cute_ops.runtime.toolchain import RUNTIME, packaged_runtimes


def build(folder: Path, kernels: Iterable[tuple[compiler.KernelSpec, str]], workers: int | None = None) -> None:
    """Build a bundle. The kernels are compiled in parallel processes, and the progress is shown.

    Args:
        folder: folder to write to; created if missing.
        kernels: pairs of a kernel and the name of an architecture.
        workers: number of processes, as for ``compile_all``.

    Raises:
        BundleError: if a kernel cannot be compiled, no C compiler is found, linking fails, or the DSL's build or
            runtime library is unknown.
        OSError: if the bundle cannot be written.
    """
    linker = toolchain.find_linker()
    if linker is None:
        raise BundleError("a bundle is linked by a C compiler, and none was found: cc, gcc or clang")
    flavour = toolchain.compiler_flavour()
    if flavour is None:
        raise BundleError("a bundle names its CUDA version, but the DSL does not say if it compiles for CUDA 12 or 13")
    runtime = settings.DSL_RUNTIME or next(packaged_runtimes(flavour), None)
    if runtime is None:
        raise BundleError(f"the DSL's package contains no {RUNTIME}; name one in TORCH_CUTE_OPS_DSL_RUNTIME")
    archs: dict[str, dict[str, Any]] = {}
    files.make_folder(folder)
    with tempfile.TemporaryDirectory() as work:
        tasks = []
        for kernel, arch in dict.fromkeys(kernels):
            symbol = symbol_of(kernel.digest)
            archs.setdefault(arch, {"file": f"{arch}.so", "kernels": {}})["kernels"][kernel.digest] = symbol
            tasks.append(Task(kernel, arch, Path(work, f"{arch}-{symbol}.o")))
        with contextlib.closing(compile_all(tasks, workers)) as outcomes, progress(len(tasks), always=True) as bar:
            for task, error in outcomes:
                if error:
                    raise BundleError(f"{task.kernel} cannot be compiled for {task.arch}: {error}")
                bar.update()
        for arch, library in archs.items():
            linked = Path(work, library["file"])
            try:
                toolchain.link(linker, sorted(Path(work).glob(f"{arch}-*.o")), linked)
            except OSError as error:
                raise BundleError(str(error)) from None
            content = linked.read_bytes()
            library["sha256"] = hashlib.sha256(content).hexdigest()
            # Replace the library instead of overwriting it, because a process may have mapped the old library.
            files.replace(folder / library["file"], content)
    manifest = {
        "format": FORMAT,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch_cute_ops": __version__,
        "sources": kernel_digest(),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "compiler": toolchain.compiler_versions(),
        "flavour": flavour,
        "runtime": {"file": RUNTIME, "sha256": hashlib.sha256(runtime.read_bytes()).hexdigest()},
        "host": toolchain.host_features(),
        "archs": archs,
    }
    files.replace(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def add_runtime(folder: Path) -> None:
    """Copy the DSL's runtime library into a bundle, which then needs no DSL. The library is NVIDIA's: mind its licence
    when you pass it on."""
    files.replace(folder / RUNTIME, Bundle(folder).runtime().read_bytes(), mode=0o755)
