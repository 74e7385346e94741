"""Skip tests of kernels whose code has not changed since the test passed, unless ``--unchanged`` is given.

Compiling, checking and emulating kernels takes most of the suite's time, although the result depends only on code and
toolchain. ``tests/kernel_checks.json`` lists a digest for each test that passed. The digest covers

- the test's name;
- the code of the kernels that the test's parameters name and its file imports, or of all kernels if no parameter names
  one, with everything that they import from ``kernels`` and ``formats``;
- the code of the test's file, of the test support that it imports, and of ``ptx_emulator``;
- the versions of the compiler's packages, and which of its builds is loaded.

Comments and docstrings do not count, except for tests that read docstrings. References are not covered: the conformance
tests compare them with independent formulas in every run. ``--record-unchanged``, with all of ``tests/kernels``, runs
the tests whose digests changed and then rewrites the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "kernel_checks.json"
DOCSTRINGS_READ = ("test_pipelines.py",)
"""Names of the test files that also read the docstrings of kernel packages."""
COVERED = (
    *("test_compile_kernels.py", "test_encoder.py", "test_overlap.py", "test_row_quant_host.py", "_emulated.py"),
    *DOCSTRINGS_READ,
)
"""Endings of the names of the test files whose tests may be skipped."""
COMPILED = (
    "torch_cute_ops/kernels",
    "torch_cute_ops/formats",
    "torch_cute_ops/runtime/arch.py",
    "torch_cute_ops/runtime/argspec.py",
    "torch_cute_ops/runtime/compiler.py",
)
"""Files of the package that affect how a kernel is compiled."""
RUN = ("tests", "ptx_emulator", "torch_cute_ops/testing/resources.py")
"""Files and folders that affect how a kernel is tested."""


def is_covered(item: pytest.Item) -> bool:
    """Return True if a test may be skipped as long as the code that it depends on does not change."""
    return item.path.parent.name == "kernels" and item.path.name.endswith(COVERED)


@functools.cache
def passed() -> frozenset[str]:
    """Return the digests of the tests that passed, from the file."""
    return frozenset(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else frozenset()


def write(digests: Iterable[str]) -> None:
    """Write the digests of the tests that passed to the file."""
    RECORD.write_text(json.dumps(sorted(digests), indent=0) + "\n", encoding="utf-8")


def digest_of(item: pytest.Item) -> str:
    """Return the digest of a test and of all code that its result depends on."""
    named = sorted({type(kernel).__module__ for kernel in _kernels_of(item)})
    imported = (file for file in _imports(item.path) if ROOT / COMPILED[0] in file.parents)
    compiled = _code((*map(_path_of, named), *imported), COMPILED) if named else _all_kernels()
    run = _code((item.path,), RUN)
    # Include the configurations, because the name of a test does not contain all of its kernel's configuration.
    configs = sorted(repr(kernel.config) for kernel in _kernels_of(item))
    docstrings = _docstrings() if item.path.name in DOCSTRINGS_READ else ()
    return _sha(item.nodeid, compiled, run, *configs, *docstrings, *_toolchain())[:16]


def _sha(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _kernels_of(item: pytest.Item) -> Iterator[Any]:
    """Yield the kernels of a test's parameters, which may be cases, or runs of a case."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for value in parameters:
        case = getattr(value, "case", value)
        if hasattr(case, "kernel") and hasattr(case, "arch"):
            yield case.kernel
            yield from (before.kernel for before in getattr(case, "before", ()))


@functools.cache
def _toolchain() -> tuple[str, ...]:
    from torch_cute_ops.runtime.toolchain import compiler_flavour, compiler_versions

    return (*compiler_versions(), str(compiler_flavour()))


@functools.cache
def _docstrings() -> tuple[str, ...]:
    """Return the docstrings of the packages of all kernel families."""
    packages = sorted((ROOT / "torch_cute_ops" / "kernels").glob("*/__init__.py"))
    return tuple(ast.get_docstring(_tree(package)) or "" for package in packages)


@functools.cache
def _all_kernels() -> str:
    return _code(tuple(sorted((ROOT / "torch_cute_ops" / "kernels").rglob("*.py"))), COMPILED)


def _path_of(module: str) -> Path | None:
    """Return the file of a module if it belongs to this repository, or else None."""
    for base in (ROOT, ROOT / "tests"):
        path = base.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.cache
def _code(files: tuple[Path | None, ...], folders: tuple[str, ...]) -> str:
    """Return a digest of the code of ``files`` and of all files in ``folders`` that they import."""
    found: set[Path] = set()
    waiting = [file for file in files if file is not None]
    allowed = [ROOT / folder for folder in folders]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for imported in _imports(file):
            if any(folder == imported or folder in imported.parents for folder in allowed):
                waiting.append(imported)
    return _sha(*(f"{file.relative_to(ROOT)} {_stripped(file)}" for file in sorted(found)))


@functools.cache
def _imports(file: Path) -> tuple[Path, ...]:
    """Return the files of this repository that a file imports, including imports inside functions."""
    names: set[str] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    # Importing a module also imports the packages that contain it.
    names |= {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    # Test files in tests/kernels import each other by file name, without a package.
    siblings = (file.with_name(f"{name}.py") for name in names)
    paths = (*map(_path_of, sorted(names)), *(sibling for sibling in siblings if sibling.is_file()))
    return tuple(path for path in paths if path is not None)


@functools.cache
def _stripped(file: Path) -> str:
    """Return a digest of a file's code without comments and docstrings."""
    tree = _tree(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)] or [ast.Pass()]
    return _sha(ast.dump(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


class Recorder:
    """Plugin of the controlling process: collects the digests of the tests that passed or were skipped as unchanged,
    and writes them at the end."""

    def __init__(self) -> None:
        self.digests: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the digest of a test that passed, or that was skipped because its code is unchanged."""
        digests = {value for name, value in report.user_properties if name == "digest"}
        if report.skipped:
            self.digests |= digests & passed()
        elif report.when == "call" and report.passed:
            self.digests |= digests

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        write(self.digests)
