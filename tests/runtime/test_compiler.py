"""``runtime/compiler.py``: the cache key contains everything, and a kernel is compiled once."""

import dataclasses
import importlib.metadata
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.fake_kernel import PROBLEM, SM90, FakeKernel

from torch_cute_ops.formats import MXFP4, NVFP4, SCALE_LAYOUTS
from torch_cute_ops.kernels import fp4_dequant, row_quant
from torch_cute_ops.runtime import compiler, settings
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.toolchain import installed_packages

BF16 = torch.bfloat16
CONFIGS = {
    "row_quant": row_quant.plan(PROBLEM, SM90),
    "fp4_dequant": fp4_dequant.plan(torch.bfloat16, 4096, NVFP4, SCALE_LAYOUTS["128x4"], True),
}


def wanted(config):
    """Return the spec of ``FakeKernel(config)``."""
    return compiler.KernelSpec(f"{FakeKernel.__module__}.FakeKernel", config)


def other(value):
    """Return a different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return (*value, 1)
    known = {None: 1, torch.bfloat16: torch.float16, NVFP4: MXFP4, SCALE_LAYOUTS["128x4"]: SCALE_LAYOUTS["8x4"]}
    return known[value]


def leaves(value, path=()):
    """Yield the path of each field of a dataclass and of its nested ``spec``."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner) and field.name == "spec":
            yield from leaves(inner, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(value, path):
    """Return a copy of a dataclass with another value in the field at ``path``."""
    name, *rest = path
    inner = getattr(value, name)
    return dataclasses.replace(value, **{name: changed(inner, rest) if rest else other(inner)})


@pytest.mark.parametrize("name", CONFIGS)
def test_key_contains_every_field_of_a_config(name):
    config = CONFIGS[name]
    keys = {compiler.key_of(wanted(config), SM90)}
    paths = list(leaves(config))
    for path in paths:
        keys.add(compiler.key_of(wanted(changed(config, path)), SM90))
    assert len(keys) == len(paths) + 1 > 5


@pytest.fixture
def forget_versions():
    """Return a function that clears the cache of installed versions. The cache is also cleared at the end of the
    test."""
    yield installed_packages.cache_clear
    installed_packages.cache_clear()


def test_key_contains_class_architecture_options_and_versions(monkeypatch, forget_versions):
    kernels = wanted(0), compiler.KernelSpec(f"{FakeKernel.__module__}.OtherKernel", 0)
    keys = [compiler.key_of(kernel, arch) for kernel in kernels for arch in ARCHS.values()]
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", "--other")
        keys.append(compiler.key_of(wanted(0), SM90))
    real = importlib.metadata.version
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata, "version", lambda name, package=package: "0" if name == package else real(name)
            )
            forget_versions()
            keys.append(compiler.key_of(wanted(0), SM90))
    assert len(set(keys)) == len(keys)
    forget_versions()
    assert compiler.key_of(wanted(0), SM90) == keys[0]


def test_arguments_depend_on_the_config_alone():
    """Check that equal configs give equal descriptions of arguments, because the key does not contain these."""
    kernels = row_quant.RowQuantKernel, fp4_dequant.FP4DequantKernel
    for make, config in zip(kernels, CONFIGS.values(), strict=True):
        assert make(config).arguments() == make(dataclasses.replace(config)).arguments() != ()


# Compiling once


@pytest.fixture
def compilations(monkeypatch):
    """Replace the compiler by a slow function that counts its calls, and empty the cache in memory."""
    state = SimpleNamespace(kernels=[], running=0, most_at_once=0, fail=False)

    def trace_and_compile(kernel, arch, options=""):
        state.running += 1
        state.most_at_once = max(state.most_at_once, state.running)
        time.sleep(0.05)
        state.running -= 1
        state.kernels.append((kernel, arch.name))
        if state.fail:
            raise RuntimeError("made to fail")
        function = object()
        return SimpleNamespace(__tvm_ffi_object__=lambda: function)

    monkeypatch.setattr(compiler, "trace_and_compile", trace_and_compile)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(settings, "CACHE", False)
    return state


def in_threads(calls):
    """Run each call in a separate thread, all starting at once, and return the results."""
    results = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(i):
        barrier.wait()
        results[i] = calls[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_that_ask_for_one_kernel_compile_it_once(compilations):
    functions = in_threads([lambda: compiler.compile_kernel(wanted("one"), SM90)] * 8)
    assert len(compilations.kernels) == 1
    assert functions[0] is not None and all(function is functions[0] for function in functions)


def test_one_compilation_at_a_time(compilations):
    """Check that only one thread compiles at a time, because the DSL's compiler keeps global state."""
    functions = in_threads([lambda i=i: compiler.compile_kernel(wanted(i % 4), SM90) for i in range(8)])
    assert compilations.most_at_once == 1
    assert len(compilations.kernels) == 4
    assert len(set(map(id, functions))) == 4


def test_cache(compilations):
    first = compiler.compile_kernel(wanted(1), SM90)
    assert compiler.compile_kernel(wanted(1), SM90) is first
    assert compiler.compile_kernel(wanted(1), ARCHS["sm_100a"]) is not first
    assert [arch for _, arch in compilations.kernels] == ["sm_90a", "sm_100a"]
    compiler.clear()
    assert compiler.compile_kernel(wanted(1), SM90) is not first


def test_a_failed_compilation_is_not_kept(compilations):
    compilations.fail = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made to fail"):
            compiler.compile_kernel(wanted(1), SM90)
    compilations.fail = False
    compiler.compile_kernel(wanted(1), SM90)
    assert len(compilations.kernels) == 3
