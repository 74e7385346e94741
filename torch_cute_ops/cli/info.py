"""``python -m torch_cute_ops info``: versions, devices, ops, cache and settings."""

import platform
from typing import Any

import torch

import torch_cute_ops
from torch_cute_ops.cli.cache import reason_unusable
from torch_cute_ops.ops._define import OpSpec
from torch_cute_ops.registry import OPS, properties_of
from torch_cute_ops.runtime import files, settings
from torch_cute_ops.runtime.arch import ARCHS, Arch, arch_name
from torch_cute_ops.runtime.bundle import Bundle
from torch_cute_ops.runtime.compiler import bundle, packaged_bundles, store
from torch_cute_ops.runtime.provenance import ROOT, source_digest
from torch_cute_ops.runtime.toolchain import driver_version, installed_packages

RECORD = ROOT.parent / "tests" / "gpu_record.json"
RECORD_BYTES = 2**20


def collect() -> dict[str, Any]:
    """Return all sections of the ``info`` report, as values that JSON can represent."""
    return {
        "versions": versions(),
        "devices": devices(),
        "ops": {name: availability(spec) for name, spec in OPS.items()},
        "cache": cache(),
        "bundle": bundle_state(),
        "settings": settings.described(),
        "gpu_record": record(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the package, Python, torch, CUDA, the driver and the compiler; None for a missing
    component."""
    found: dict[str, str | None] = {
        "torch_cute_ops": torch_cute_ops.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
        "cuda of the driver": _driver(),
    }
    return {**found, **installed_packages()}


def _driver() -> str | None:
    version = driver_version()
    return None if version is None else f"{version[0]}.{version[1]}"


def devices() -> list[dict[str, Any]]:
    """Describe each CUDA device: name, architecture, the reason if kernels do not support it, and ``Arch.has_run``."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        arch = arch_name(index)
        reason = None if arch in ARCHS else f"kernels support {', '.join(ARCHS)}"
        has_run = reason is None and ARCHS[arch].has_run
        device = {"index": index, "name": torch.cuda.get_device_name(index), "arch": arch}
        found.append({**device, "unsupported": reason, "has_run": has_run})
    return found


def archs_here() -> list[str]:
    """Return the architectures of the local GPUs that kernels support."""
    return list(dict.fromkeys(device["arch"] for device in devices() if device["unsupported"] is None))


def availability(spec: OpSpec) -> dict[str, str]:
    """Describe how the op runs on the CPU and on each GPU architecture: by a kernel or by the reference, or the reason
    that kernels cannot be compiled."""
    found = versions()
    missing = [name for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi") if found[name] is None]
    if missing:
        return {"cpu": "reference", **dict.fromkeys(ARCHS, f"{' and '.join(missing)} not installed")}
    having = list(ARCHS) if not spec.has_backends else archs_with_kernels(spec)
    return {"cpu": "reference"} | {name: "kernel" if name in having else "reference by name" for name in ARCHS}


def archs_with_kernels(spec: OpSpec) -> list[str]:
    """Return the architectures on which some backend other than the reference can compute the op."""
    known = properties_of(spec.name)
    smallest = {int: 256, torch.dtype: torch.bfloat16}
    given = {name: smallest[found.kind] for name, found in known.items() if found.is_required}
    given |= {"experts": 2} if "experts" in known else {}

    def has_kernels(arch: Arch, block_size: int) -> bool:
        blocks = {"block_size": block_size} if "block_size" in known else {}
        try:
            return bool(spec.kernels(arch, **spec.path.example(**given, **blocks, device="meta")))
        except ValueError:  # no backend supports the call
            return False

    return [name for name, arch in ARCHS.items() if has_kernels(arch, 16) or has_kernels(arch, 32)]


def cache() -> dict[str, Any]:
    """Return the folder, number and size of the compiled kernels on disk."""
    kernels, reason = store(), reason_unusable()
    if kernels is None or reason is not None:
        return {"folder": None, "why": reason}
    sizes = [size for _, size, _ in kernels.used()]
    return {"folder": str(kernels.root), "kernels": len(sizes), "bytes": sum(sizes), "limit": kernels.limit}


def bundle_state() -> dict[str, Any]:
    """Return the folder and kernels of the bundle in use, or the reason that this process cannot use it."""
    try:
        found = bundle()
    except ValueError as error:
        return {"folder": str(settings.BUNDLE), "error": str(error)}
    if found is None:
        return {"folder": None, "packages": {each.root.parent.name: _counts(each) for each in packaged_bundles()}}
    return {"folder": str(found.root), "created": found.manifest["created"], "kernels": _counts(found), "error": None}


def _counts(found: Bundle) -> dict[str, int]:
    """Return the number of kernels in a bundle, by architecture."""
    return {arch: len(library["kernels"]) for arch, library in found.manifest["archs"].items()}


def record() -> dict[str, Any]:
    """Compare the digest in ``tests/gpu_record.json`` with the sources, and count the tests that did not run on the
    GPU."""
    try:
        content = files.parse_json(files.read(RECORD, RECORD_BYTES))
    except (OSError, ValueError):
        return {"found": False}
    if not isinstance(content, dict):
        return {"found": False}
    record = {name: content.get(name) for name in ("date", "gpu", "passed", "failed", "skipped")}
    matches, not_run = content.get("source_digest") == source_digest(), content.get("not_run", 0)
    return {"found": True, "matches": matches, **record, "not_run": not_run}


def text(report: dict[str, Any]) -> str:
    """Format an ``info`` report for a terminal."""
    lines = ["Versions"]
    lines += [f"  {name:<32}{version or 'not installed'}" for name, version in report["versions"].items()]
    lines.append("Devices")
    for device in report["devices"]:
        supported = "supported" if device["has_run"] else "supported; its kernels were tested in an emulator only"
        lines.append(f"  {device['index']}  {device['name']}  {device['arch']}  {device['unsupported'] or supported}")
    if not report["devices"]:
        lines.append("  no CUDA device: ops run their reference on the CPU")
    lines.append("Ops")
    width = max(map(len, report["ops"])) + 1
    for name, where in report["ops"].items():
        by_answer: dict[str, list[str]] = {}
        for arch, answer in where.items():
            by_answer.setdefault(answer, []).append(arch)
        answers = "; ".join(f"{answer}: {' '.join(on)}" for answer, on in by_answer.items())
        lines.append(f"  {name:<{width}}{answers}")
    kept = report["cache"]
    lines.append("Kernel cache")
    if kept["folder"] is None:
        lines.append(f"  off: {kept['why']}")
    else:
        size, limit = kept["bytes"] / 2**20, kept["limit"] / 2**20
        lines.append(f"  {kept['kernels']} kernels, {size:.1f} of {limit:.0f} MB, in {kept['folder']}")
    bundled = report["bundle"]
    if bundled["folder"] is not None:
        held = ", ".join(f"{count} for {arch}" for arch, count in bundled.get("kernels", {}).items())
        lines += ["Bundle", f"  {bundled['error'] or f'{held}, in ' + bundled['folder']}"]
    for name, kernels in bundled.get("packages", {}).items():
        held = ", ".join(f"{count} for {arch}" for arch, count in kernels.items())
        lines += ["Packages of kernels", f"  {name}: {held}"]
    lines.append("Settings")
    for setting in report["settings"]:
        lines.append(f"  {setting['variable']:<32}{setting['value']}  ({setting['source']})")
    found = report["gpu_record"]
    lines.append("GPU record")
    if not found["found"]:
        lines.append("  none; the record is part of the source tree")
    else:
        same = "same sources" if found["matches"] else "OTHER sources"
        counts = f"{found['passed']} passed, {found['failed']} failed"
        if found["not_run"]:
            counts += f"; INCOMPLETE: {found['not_run']} did not run"
        lines.append(f"  {same}, {found['date']}, {found['gpu']}: {counts}")
    return "\n".join(lines)
