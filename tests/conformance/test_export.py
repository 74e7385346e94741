"""Programs that run without Python: packages of AOTInductor, its C++ wrapper, and ``torch.export`` with symbolic
sizes."""

import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from expected import assert_same
from support.cases import (
    arguments,
    choices_of,
    defined,
    dynamic_shapes,
    named,
    plain_sample,
    run,
    split_call,
    updated,
)
from support.interpreters import forked
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor import config
from torch.torch_version import TorchVersion

import torch_cute_ops
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

# Do not optimise the C++ wrapper of AOTInductor, because that takes a minute. Do not precompile headers that are used
# only once.
QUICKLY = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}
# With ``cpp_wrapper=True``, ``torch.compile`` takes the level of optimisation of its C++ wrapper from the environment.
UNOPTIMISED = {"TORCHINDUCTOR_DEBUG_COMPILE": "1"}


def default_call(op):
    """Return the arguments of a plain sample that are tensors or for which the op defines no default."""
    given = arguments(op, plain_sample(op, "cpu"))
    return named(
        op,
        {
            each.name: given[each.name]
            for each in op.signature.parameters
            if isinstance(given[each.name], torch.Tensor) or each.default is inspect.Parameter.empty
        },
    )


class EveryOp(torch.nn.Module):
    """Module that calls every op with default arguments."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def forward(self, tensors):
        return {name: as_tuple(OPS[name].function(**given, **self.numbers[name])) for name, given in tensors.items()}


def tensors_of(samples):
    return {
        name: {key: value for key, value in sample.kwargs.items() if isinstance(value, torch.Tensor)}
        for name, sample in samples.items()
    }


def default_calls():
    return {name: default_call(op) for name, op in OPS.items()}


def assert_eager(samples, tensors, outputs):
    """Check the outputs of every op, and the arguments that it updates, against eager calls."""
    for name, sample in samples.items():
        op, after = OPS[name], named(OPS[name], sample.kwargs | tensors[name])
        assert_same((*defined(op, sample, outputs[name]), *updated(op, after)), run(op, sample))


LOADED = """
import faulthandler, sys, torch, torch_cute_ops
faulthandler.enable()
package, calls, results = sys.argv[1:]
program, calls = torch._inductor.aoti_load_package(package), torch.load(calls)
outputs = [program(*call) for call in calls]
torch.save((calls, outputs), results)
"""
PASSES_DTYPES = TorchVersion(torch.__version__) >= (2, 11)
"""False for versions of torch whose AOTInductor passes wrong dtypes to custom ops (PyTorch's issue 169157)."""
ROWS = (5, 1, 2, 128)
"""Numbers of rows with which the package is called; the program is exported with the first."""
N, K = 64, 128


class Doubled(torch.nn.Module):
    """Module that calls none of our ops."""

    def forward(self, tensors):
        return {name: x * 2 for name, x in tensors.items()}


def loaded(module, calls, shapes, folder):
    """Compile the program to a package with AOTInductor and run it in another process. Return the process and the file
    with its results."""
    folder.mkdir()
    program = torch.export.export(module, calls[0], dynamic_shapes=shapes)
    package, given, results = (str(folder / name) for name in ("program.pt2", "calls.pt", "results.pt"))
    torch.save(calls, given)
    with config.patch(QUICKLY):
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    return forked(LOADED, arguments=(package, given, results)), results


class Everything(torch.nn.Module):
    """Module that calls every op, and chains of ops in which GEMMs read tiled scales that the program itself writes.

    All weights and scales are inputs. One weight is a ``QuantizedWeight``.
    """

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def forward(self, tensors, x, gates, q, up, up_scale):
        codes, scale = torch_cute_ops.fp4_quantize(x)
        hidden, hidden_scale = torch_cute_ops.moe_fc1_fp4(codes, up.mT, scale, up_scale, gates)
        chains = (
            torch_cute_ops.linear(x, q),
            torch_cute_ops.linear(x, q, activations="fp8"),
            torch_cute_ops.mm_fp4(codes, q.codes.t(), scale, q.scale, q.alpha),
            torch_cute_ops.fp4_dequantize(codes, scale),
            torch_cute_ops.moe_fc2_fp4(hidden, q.codes.t(), hidden_scale, q.scale, gates),
        )
        each = {name: as_tuple(OPS[name].function(**given, **self.numbers[name])) for name, given in tensors.items()}
        return chains, each


def call_of_everything(rows):
    """Return the inputs of one call per op, keyed by op name, and the arguments of ``Everything``."""
    split = {name: split_call(op, rows, device="cpu", **choices_of(op)[0]) for name, op in OPS.items()}
    tensors, numbers = ({name: both[i] for name, both in split.items()} for i in range(2))
    if not PASSES_DTYPES:
        numbers = {
            name: {key: None if isinstance(each, torch.dtype) else each for key, each in given.items()}
            for name, given in numbers.items()
        }
        del tensors["qkv_norm_rope_append"]["q_scale"]  # only q in FP8 takes a scale
    x, gates = torch.randn(rows, K).bfloat16(), torch.rand(rows, 2)
    up = torch_cute_ops.fp4_quantize(torch.randn(2, K, K))
    return numbers, (tensors, x, gates, torch_cute_ops.quantize(torch.randn(N, K)), *up)


@pytest.mark.slow
def test_package(tmp_path):
    """Check a package with a symbolic number of rows, in a process that imports the ops but not the program."""
    every = [call_of_everything(rows) for rows in ROWS]
    (numbers, first), calls = every[0], [call for _, call in every]
    rows = torch.export.Dim("rows", max=max(ROWS))
    by_op = {name: dynamic_shapes(OPS[name], given, rows) for name, given in first[0].items()}
    shapes = (by_op, {0: rows}, {0: rows}, [None] * 4, None, None)
    done, results = loaded(Everything(numbers), calls, shapes, tmp_path / "ours")
    if done.returncode < 0 and loaded(Doubled(), [({"x": torch.ones(4)},)], None, tmp_path / "plain")[0].returncode < 0:
        # torch's own device check crashes if the C++ compiler links its standard library statically, so skip.
        pytest.skip("no package of AOTInductor can be loaded on this machine, not even one of PyTorch's ops alone")
    assert done.returncode == 0, done.stderr
    after, outputs = torch.load(results)
    for (numbers, before), (updated_tensors, *_), (chains, each) in zip(every, after, outputs, strict=True):
        assert_same(chains, Everything(numbers)({}, *before[1:])[0])
        for name, op in OPS.items():
            sample = named(op, {**before[0][name], **numbers[name]})
            given = named(op, {**updated_tensors[name], **numbers[name]})
            assert_same((*defined(op, sample, each[name]), *updated(op, given)), run(op, sample))


# Disable the cache of graphs, because a cached program crashes if an op has gained an argument since.
WRAPPED = """
import faulthandler, json, sys, torch
faulthandler.enable()
search, given, results = sys.argv[1:]
sys.path[:] = json.loads(search)
from test_export import QUICKLY
program, tensors = torch.load(given, weights_only=False)
with torch._inductor.config.patch({**QUICKLY, "cpp_wrapper": True, "fx_graph_cache": False}):
    outputs = torch.compile(program, fullgraph=True)(tensors)
torch.save((tensors, outputs), results)
"""


def wrapped(module, tensors, folder):
    """Compile a module to C++ and run it in another process, because faulty C++ code could end this process. Return the
    process and the file with its results."""
    given, results = str(folder / "given.pt"), str(folder / "results.pt")
    torch.save((module, tensors), given)
    search = json.dumps([str(Path(__file__).parent), *sys.path])
    return forked(WRAPPED, arguments=(search, given, results), **UNOPTIMISED), results


@pytest.mark.slow
def test_cpp_wrapper(tmp_path):
    """Check the C++ code that Inductor generates."""
    samples = default_calls()
    numbers = {
        name: {key: value for key, value in sample.kwargs.items() if not isinstance(value, torch.Tensor)}
        for name, sample in samples.items()
    }
    done, results = wrapped(EveryOp(numbers), tensors_of(samples), tmp_path)
    if done.returncode < 0 and wrapped(Doubled(), {"x": torch.ones(4)}, tmp_path)[0].returncode < 0:
        pytest.skip("C++ that Inductor compiles crashes on this machine, even with PyTorch's ops alone")
    assert done.returncode == 0, done.stderr
    tensors, outputs = torch.load(results)
    assert_eager(samples, tensors, outputs)


# Integer arguments that are numbers of rows

SYMBOLIC = [
    pytest.param(op, each.name, id=f"{op.name}-{each.name}")
    for op in OPS.values()
    for each in op.signature.parameters
    if each.type == "SymInt"
]


class RowsOfAll(torch.nn.Module):
    """Module that passes the number of tokens to an op as an integer argument."""

    def __init__(self, op, name, numbers):
        super().__init__()
        self.op, self.name, self.numbers = op, name, numbers

    def forward(self, first):
        return as_tuple(self.op.function(first, **self.numbers, **{self.name: first.shape[0]}))


def rows_of_all(op, name, device):
    """Return the module for an op, and a function that makes its input for a number of tokens."""
    given = arguments(op, plain_sample(op, device))
    first, *_ = given
    numbers = {key: value for key, value in given.items() if key not in (first, name)}

    def make(tokens):
        return given[first][torch.randint(len(given[first]), (tokens,), device=device)]

    return RowsOfAll(op, name, numbers), make


def assert_module_is_eager(compiled, module, make, tokens):
    x = make(tokens)
    want = module(x)
    assert want[-1].sum() > 0  # some pairs are routed
    assert_same(compiled(x), want)
    given = {**module.numbers, module.name: tokens}
    first = module.op.signature.names[0]
    expected = importlib.import_module(f"expected.{module.op.name}").results({first: x, **given})
    assert_same([t.cpu() for t in want[-4:]], expected[-4:])


@pytest.mark.parametrize(("op", "name"), SYMBOLIC)
@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)], ids=["dynamic", "default"])
def test_a_number_of_rows_that_is_a_symbol(op, name, dynamic, most, device):
    """Check that one graph serves all numbers of tokens, or two graphs if the first number is not symbolic."""
    module, make = rows_of_all(op, name, device)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (5, 9, 17, 64, 3, 300):
        assert_module_is_eager(compiled, module, make, tokens)
    # Count the graphs that PyTorch stores, not its compilations: PyTorch compiles again if the op needs the value of a
    # float argument that was made symbolic.
    graphs = len(_debug_get_cache_entry_list(RowsOfAll.forward.__code__))
    torch._dynamo.reset()
    assert 1 <= graphs <= most


@pytest.mark.parametrize(("op", "name"), SYMBOLIC)
def test_export_with_a_number_of_rows(op, name, device):
    module, make = rows_of_all(op, name, device)
    program = torch.export.export(module, (make(6),), dynamic_shapes=({0: torch.export.Dim("tokens", max=1024)},))
    for tokens in (2, 9, 300):
        assert_module_is_eager(program.module(), module, make, tokens)
