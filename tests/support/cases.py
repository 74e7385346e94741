"""Samples of all ops as test parameters, and functions that call an op. The tests use these words:

- A *sample* is a call that an op accepts, an *error input* a call that it refuses. Both come from ``tests/samples``.
- A *case* is a ``pytest.param`` of an op and the name of a sample or an error input. ``sample_cases()`` lists all
  samples; ``form_cases()`` lists the few samples of each op that differ in form, for tests that ignore values.
- ``@each_sample(cases)`` parametrises a check ``(op, name)``, as ``pytest.mark.parametrize`` would. One pytest item
  checks a *chunk* of 32 samples (``support.chunks``), because an item takes pytest longer than most checks.
- ``get_sample(op, name, device)`` is the sample itself, ``arguments(op, sample)`` its arguments by name, and
  ``named(op, given)`` a sample made from arguments by name.
- ``call``, ``call_out`` and ``call_function`` call the op, its ``.out`` overload and its Python function. ``run``,
  ``run_out`` and ``run_function`` do so with copies of updated arguments (``copy_updated``); they return the outputs,
  then the final values of updated arguments (``updated``), with unspecified elements set to zero (``defined``).
- ``expected_of(op)`` is the module that computes the expected results, ``tests/expected/<op>.py``.
- ``out_for`` and ``poisoned`` make outputs filled with a pattern, which shows elements that the op does not write.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from expected import Tensors, raw
from samples import ErrorInput, Sample, error_inputs, sample_inputs
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from support.chunks import Check, each_case
from torch_cute_ops.formats import NVFP4, SCALE_LAYOUTS
from torch_cute_ops.ops import _call
from torch_cute_ops.ops._define import OpSpec, as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime.arch import ARCHS

Input = TypeVar("Input", Sample, ErrorInput)


def sample_cases(*names: str) -> list[Any]:
    """Return cases (op, name of a sample) of all samples, or only of the samples with these names."""
    return [
        _case(op, sample)
        for op in OPS.values()
        for sample in _samples(op.name, "cpu").values()
        if not names or sample.name in names
    ]


@cache
def form_cases() -> tuple[Any, ...]:
    """Return cases (op, name of a sample) for tests that depend on the *form* of a call but not on values or sizes.

    The form is all that the dispatcher, fakes, graphs and the compiler see: dtypes, dimensions, strides and arguments.
    For each op, the sample with the most such features is selected first, then always the sample that adds the most new
    features, until every feature is covered.
    """
    cases = []
    for op in OPS.values():
        forms = [(sample, form_of(op, sample)) for sample in _samples(op.name, "cpu").values()]
        missing = set().union(*(features for _, features in forms))
        while missing:
            sample, features = max(forms, key=lambda form: len(form[1] & missing))
            missing -= features
            cases.append(_case(op, sample))
    return tuple(cases)


def form_groups(most: int) -> list[Any]:
    """Return cases (op, names of up to ``most`` samples) that together contain all samples of `form_cases`."""
    names: dict[str, list[str]] = {}
    for case in form_cases():
        op, name = case.values
        names.setdefault(op.name, []).append(name)
    return [
        pytest.param(OPS[op], tuple(each[begin : begin + most]), id=f"{op}-forms-{begin}")
        for op, each in names.items()
        for begin in range(0, len(each), most)
    ]


def form_of(op: OpSpec, sample: Sample) -> set[Any]:
    """Return the features of a call's form: dtypes, dimensions, strides and arguments."""
    given = arguments(op, sample)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    features: set[Any] = {("positional", len(sample.args))}
    features |= {(name, value) for name, value in given.items() if name not in tensors and not isinstance(value, float)}
    features |= {(name, type(value), value.dtype) for name, value in tensors.items()}
    features |= {(name, value.dim(), *_placement(value)) for name, value in tensors.items() if value.numel()}
    first = next(iter(tensors.values()))
    layout = [given.get(name) for name in ("scale_layout", "granularity")]
    features.add((*layout, min(first.dim(), 3) if first.numel() else "empty"))
    for (a, one), (b, other) in itertools.combinations(tensors.items(), 2):
        if _storage(one) == _storage(other):
            features.add((a, b, one is other, one.storage_offset() == other.storage_offset()))
    return features


def _placement(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe a tensor's memory layout: whether each stride is less than, equal to or greater than the contiguous
    stride, and whether rows are aligned."""
    strides, contiguous = [], 1
    for stride, extent in reversed(list(zip(tensor.stride(), tensor.shape, strict=True))):
        strides.append(extent > 1 and ("0" if stride == 0 else (stride > contiguous) - (stride < contiguous)))
        contiguous *= extent
    steps = (tensor.storage_offset(), *(s for s, n in zip(tensor.stride()[:-1], tensor.shape, strict=False) if n > 1))
    return *strides, all(step * tensor.itemsize % 16 == 0 for step in steps)


def error_cases(*devices: str, addresses: bool = True) -> list[Any]:
    """Return cases (op, name of an error input, device). ``addresses`` includes inputs whose only error is their
    address. For CUDA, some inputs contain CPU tensors."""
    return [
        pytest.param(op, error.name, device, id=f"{device}-{op.name}-{error.name}")
        for device in devices
        for op in OPS.values()
        for error in _errors(op.name, device).values()
        if addresses or not error.is_address
    ]


CHUNK = 32
"""Number of consecutive samples of an op that one pytest item checks. The number is small, so that an item takes only
seconds and workers get equal loads."""


def each_sample(cases: Iterable[Any]) -> Callable[[Check], Check]:
    """Parametrise a check of (op, name of a sample) with these cases, divided into chunks.

    A sample is in a chunk with the same id in every test, so that one worker runs the sample in all tests, and its
    kernel is compiled once.
    """
    return each_case(
        ("op", "name"), cases, lambda op, name: f"{op.name}-samples-{_chunk(_samples(op.name, 'cpu'), name)}"
    )


def each_error(cases: Iterable[Any]) -> Callable[[Check], Check]:
    """Parametrise a check of (op, name of an error input, device) with these cases, divided into chunks."""
    chunk_of = lambda op, name, on: f"{on}-{op.name}-errors-{_chunk(_errors(op.name, on), name)}"  # noqa: E731
    return each_case(("op", "name", "on"), cases, chunk_of)


def each_of_op(*names: str, cases: Iterable[Any]) -> Callable[[Check], Check]:
    """Parametrise a check with cases whose first value is an op. All cases of an op form one chunk."""
    return each_case(names, cases, lambda op, *_: op.name)


def _chunk(entries: dict[str, Any], name: str) -> int:
    """Return the position in ``entries`` of the first entry of the chunk that contains ``name``."""
    return [*entries].index(name) // CHUNK * CHUNK


def op_cases() -> list[Any]:
    return [pytest.param(op, id=op.name) for op in OPS.values()]


def _case(op: OpSpec, entry: Sample | ErrorInput) -> Any:
    return pytest.param(op, entry.name, id=f"{op.name}-{entry.name}")


PLAIN = ("plain", "nvfp4-128x4-bfloat16", "block128-column-bfloat16", "nvfp4-128x4-to-bfloat16")
"""Names of samples with bfloat16 rows and the scale layout that GEMMs read. One of these samples exists for each op."""


def plain_sample(op: OpSpec, device: str) -> Sample:
    """Return the sample of an op that has no special features."""
    sample = next(sample for sample in sample_inputs(op.name, device) if sample.name in PLAIN)
    return with_usable_backend(op, sample, torch.device(device))


@cache
def _plain_on_meta(name: str) -> Sample:
    return plain_sample(OPS[name], "meta")


def sample_with(op: OpSpec, device: str, *names: str) -> Sample:
    """Return a copy of a sample in which these arguments are nonempty tensors: the plain sample, if possible."""
    return copied(_sample_with(op.name, device, names))


@cache
def _sample_with(name: str, device: str, names: tuple[str, ...]) -> Sample:
    op = OPS[name]
    for sample in (plain_sample(op, device), *_samples(name, device).values()):
        given = arguments(op, sample)
        if all(isinstance(given[each], torch.Tensor) and given[each].numel() for each in names):
            return with_usable_backend(op, named(op, given), torch.device(device))
    raise AssertionError(f"no sample of {name} passes {', '.join(names)}")


def get_sample(op: OpSpec, name: str, device: str) -> Sample:
    """Return a fresh copy of a sample. Its data depends only on the seed of the run, not on the test."""
    return copied(_samples(op.name, device)[name])


def new_sample(op: OpSpec, name: str, device: str) -> Sample:
    """Return a sample with new random data."""
    return with_usable_backend(op, _named(sample_inputs(op.name, device), name), torch.device(device))


def get_error(op: OpSpec, name: str, device: str) -> ErrorInput:
    """Return an error input with copies of its arguments. Wrong outputs are shared instead of copied."""
    error = _errors(op.name, device)[name]
    if all(tensor.is_leaf for tensor in tensors_in(error)):
        return copied(error)
    return with_usable_backend(op, _named(error_inputs(op.name, device), name), torch.device(device))


@cache
def _samples(op: str, device: str) -> dict[str, Sample]:
    return _made(OPS[op], sample_inputs, device)


@cache
def _errors(op: str, device: str) -> dict[str, ErrorInput]:
    return _made(OPS[op], error_inputs, device)


def _made(op: OpSpec, inputs: Callable[[str, str], Iterable[Input]], device: str) -> dict[str, Input]:
    # Make samples once per process, because this takes longer than most tests. A separate seed makes the samples' data
    # independent of the order of tests.
    digest = hashlib.sha256(f"{os.environ.get('TEST_SEED')} {op.name}".encode()).digest()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(int.from_bytes(digest[:4], "little"))
        return {entry.name: with_usable_backend(op, entry, torch.device(device)) for entry in inputs(op.name, device)}


def with_usable_backend(op: OpSpec, entry: Input, device: torch.device) -> Input:
    """Return the call. Set ``backend`` to the reference if no other backend can compute the call on a GPU, because
    ``auto`` never chooses the reference there."""
    if not op.has_backends or device.type != "cuda":
        return entry
    given = arguments(op, entry)
    if given["backend"] != "auto" or has_kernels(op, given, device):
        return entry
    positional = len(entry.args) == len(given)
    return replace(
        entry,
        args=(*entry.args[:-1], "reference") if positional else entry.args,
        kwargs=entry.kwargs if positional else entry.kwargs | {"backend": "reference"},
    )


def has_kernels(op: OpSpec, given: dict[str, Any], device: torch.device) -> bool:
    """Return True if a backend other than the reference can compute a GEMM call, or if the op refuses the call."""
    try:
        reasons = op.backends(device, **given)
    except (TypeError, ValueError):
        return True
    return any(reason is None for name, reason in reasons.items() if name != "reference")


@cache
def compiled_op_cases() -> tuple[Any, ...]:
    """Return the ops whose plain sample runs a kernel on a Hopper GPU."""

    def is_compiled(op: OpSpec) -> bool:
        sample = plain_sample(op, "meta")
        try:
            return bool(op.kernels(ARCHS["sm_90a"], *sample.args, **sample.kwargs))
        except ValueError:
            return False

    return tuple(case for case in op_cases() if is_compiled(*case.values))


def _named(inputs: Iterable[Any], name: str) -> Any:
    return next(entry for entry in inputs if entry.name == name)


def good_outputs_error(op: OpSpec, device: str) -> ErrorInput:
    """Return an error input whose only error is in its outputs, so that its arguments are valid."""
    return copied(next(error for error in _errors(op.name, device).values() if error.out is not None))


def expected_of(op: OpSpec) -> ModuleType:
    """Return the module ``expected/<op>.py``, which computes expected results."""
    return importlib.import_module(f"expected.{op.name}")


def properties_for(op: OpSpec) -> dict[str, Any]:
    """Return the static properties, for ``warmup``, of a call that passes every optional tensor."""
    name, dtype = op.name, torch.bfloat16
    if name == "moe_route_ids":
        return {"experts": 16}
    if name == "qkv_norm_rope_append":
        kinds = {"key_dtype": torch.uint8, "value_dtype": torch.uint8, "q_dtype": torch.float8_e4m3fn}
        kinds |= {"q_norm_dtype": dtype, "k_norm_dtype": torch.float32, "q_scale": True, "k_scale": True}
        return {"head_dim": 128, "dtype": dtype, "q_heads": 4, "kv_heads": 2, "v_scale": True, **kinds}
    if name.startswith("moe_route"):
        factor = {"expert_factor": True} if name == "moe_route_dense" else {}
        return {"experts": 16, "dtype": dtype, "topk": 2, "bias": True, "scoring": "sigmoid", **factor}
    if name in ("moe_finalize", "moe_permute_fp8quant"):
        return {"hidden": 256, "dtype": dtype, "topk": 2} | ({"residual": True} if name == "moe_finalize" else {})
    if name.startswith("moe_fc1"):
        given = {"n": 256, "k": 512, "experts": 2, "alpha": "expert_half", "bias_dtype": torch.float32, "swiglu": True}
        return given | ({} if name.endswith("weight_only") else {"global_scales": "expert", "row_scale": True})
    if name.startswith("moe_fc2"):
        return {"n": 256, "k": 512, "experts": 2, "bias_dtype": torch.float32}
    if name.startswith("grouped_mm_fp8"):
        return {"n": 256, "k": 512, "experts": 2, "alpha": "expert", "bias_dtype": torch.float32}
    if name == "mm_fp8":
        return {"n": 256, "k": 512, "bias_dtype": torch.float32}
    if "mm_" in name:
        return {"n": 256, "k": 512, "alpha": "column", "bias_dtype": torch.float32}
    if name == "fp4_dequantize":
        return {"hidden": 256, "global_scale": True}
    if name == "moe_swiglu_fp8quant":
        return {"hidden": 512, "dtype": dtype}
    if name == "fp8_quantize_block128x128":
        return {"dtype": dtype, "scale_format": "ue8m0"}
    if name.endswith(("_per_token", "_per_tensor")):
        return {"hidden": 512, "dtype": dtype}
    factor = {"fp8": {"granularity": "tensor"}, "fp4": {"global_scale": True}}
    return {"hidden": 512, "dtype": dtype} | next((given for fmt, given in factor.items() if fmt in name), {})


def overload(op: OpSpec, name: str = "default") -> Any:
    """Return ``torch.ops.cute.<op>.<name>``."""
    return getattr(getattr(torch.ops.cute, op.name), name)


# Calls. Functions named ``call…`` use the sample's tensors. Functions named ``run…`` leave the sample unchanged: they
# copy arguments that the op updates, return the copies after the outputs, and set unspecified elements to zero.


def call(op: OpSpec, sample: Sample | ErrorInput) -> Tensors:
    """Call the op and return its outputs as a tuple."""
    return as_tuple(overload(op)(*sample.args, **sample.kwargs))


def call_out(op: OpSpec, sample: Sample | ErrorInput, outputs: Tensors) -> None:
    """Call the op's ``.out`` overload, which returns nothing."""
    by_name = dict(zip(op.out_names, outputs, strict=True))
    assert overload(op, "out")(*sample.args, **sample.kwargs, **by_name) is None


def call_function(op: OpSpec, sample: Sample | ErrorInput, outputs: Tensors | None = None) -> Tensors:
    """Call the op's typed Python function, with ``out=`` if outputs are given, and return the results."""
    kwargs = dict(sample.kwargs)
    if outputs is not None:
        kwargs["out"] = outputs if len(op.outputs) > 1 else outputs[0]
    return as_tuple(op.function(*sample.args, **kwargs))


def run(op: OpSpec, sample: Sample) -> Tensors:
    """Call the op with copies; return its outputs and the final values of updated arguments."""
    sample = copy_updated(op, sample)
    return *defined(op, sample, call(op, sample)), *updated(op, sample)


def run_out(op: OpSpec, sample: Sample, outputs: Tensors) -> Tensors:
    """Call the ``.out`` overload with copies; return ``outputs`` and the final values of updated arguments."""
    sample = copy_updated(op, sample)
    call_out(op, sample, outputs)
    return *defined(op, sample, outputs), *updated(op, sample)


def run_function(op: OpSpec, sample: Sample, outputs: Tensors | None = None) -> Tensors:
    """Call the typed Python function with copies; return its outputs and the final values of updated arguments."""
    sample = copy_updated(op, sample)
    return *defined(op, sample, call_function(op, sample, outputs)), *updated(op, sample)


def defined(op: OpSpec, sample: Sample, outputs: Iterable[torch.Tensor]) -> Tensors:
    """Set to zero those elements of the outputs that the op leaves unspecified, in place, and return the outputs."""
    outputs = tuple(outputs)
    if op.defined is not None:
        for output, value in zip(outputs, op.defined(outputs, *sample.args, **sample.kwargs), strict=True):
            output.copy_(value)
    return outputs


def updated(op: OpSpec, sample: Sample | ErrorInput) -> Tensors:
    """Return the sample's arguments that the op updates in place, except those that are None."""
    given = arguments(op, sample)
    return tuple(given[name] for name in op.updated if given[name] is not None)


def copy_updated(op: OpSpec, sample: Input) -> Input:
    """Return the sample with copies of the arguments that the op updates in place."""
    return copied(sample, updated(op, sample))


def require_grad(sample: Sample) -> None:
    """Set ``requires_grad`` of all tensors of the sample that support it, except one-byte scales."""
    for tensor in tensors_in(sample):
        if tensor.is_leaf and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.requires_grad_()


def copied(sample: Input, tensors: Iterable[torch.Tensor] | None = None) -> Input:
    """Return the sample with copies of these tensors, or of all tensors. Whole storages are copied, so that the copies
    are the same views and overlap in the same way."""
    originals = tuple(tensors_in(sample) if tensors is None else tensors)
    assert all(tensor.is_leaf for tensor in originals), "a copy would have no history"
    storages = {_storage(tensor): tensor.untyped_storage() for tensor in originals if not tensor.is_meta}
    copies = {key: storage.clone() for key, storage in storages.items()}
    made: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _storage(value) not in copies:
            return value
        if id(value) not in made:
            view = view_of(copies[_storage(value)], value).requires_grad_(value.requires_grad)
            is_parameter = isinstance(value, torch.nn.Parameter)
            made[id(value)] = torch.nn.Parameter(view.detach(), value.requires_grad) if is_parameter else view
        return made[id(value)]

    return _mapped(copy, sample)


def fake_mode(shapes: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a mode for fake tensors that does not cache calls of PyTorch's ops. Few calls in a mode are equal, and the
    keys and entries of the cache took a third of the time of such tests. Calls of our ops are never cached."""
    mode = FakeTensorMode(shape_env=shapes)
    mode.cache_enabled = False
    return mode


def faked(sample: Input, mode: FakeTensorMode) -> Input:
    """Return the sample with all tensors replaced by fake tensors."""
    return _mapped(lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value, sample)


def on_meta(sample: Input) -> Input:
    """Return the sample on the meta device, with the same views and overlaps between tensors."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            key, size = _storage(value), value.untyped_storage().nbytes()
            if key not in storages:
                storages[key] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            made[id(value)] = view_of(storages[key], value)
        return made[id(value)]

    return _mapped(change, sample)


def _mapped(change: Callable[[Any], Any], sample: Input) -> Input:
    """Return the sample with ``change`` applied to each argument."""
    kwargs = {name: change(value) for name, value in sample.kwargs.items()}
    return replace(sample, args=tuple(map(change, sample.args)), kwargs=kwargs)


def view_of(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the offset, shape and strides of ``like`` in ``storage``."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def only_updates(op: OpSpec, sample: Sample) -> Iterator[None]:
    """Check that calls in this block change only the arguments that the op updates, and increment only their versions.
    Memory between the elements of a strided tensor must not change either."""
    written = updated(op, sample)
    storages = {_storage(target): target.untyped_storage() for target in written}
    others = [tensor for tensor in tensors_in(sample) if _storage(tensor) not in storages]
    before = [(raw(tensor), tensor._version) for tensor in others]
    copies = {key: storage.clone() for key, storage in storages.items()}
    versions = [target._version for target in written]
    yield
    for tensor, (data, version) in zip(others, before, strict=True):
        assert torch.equal(raw(tensor), data)
        assert tensor._version == version
    for target, version in zip(written, versions, strict=True):
        assert target._version > version
        view_of(copies[_storage(target)], target).copy_(target)
    for key, storage in storages.items():
        assert torch.equal(_bytes(storage), _bytes(copies[key])), "memory next to an updated argument was written"


def arguments(op: OpSpec, sample: Sample | ErrorInput) -> dict[str, Any]:
    """Return the sample's arguments by name, including defaults."""
    # inspect.Signature.bind would take ten times as long.
    defaults = _defaults(op.function)
    given = {**dict(zip(defaults, sample.args, strict=False)), **sample.kwargs}
    assert len(given) == len(sample.args) + len(sample.kwargs) and given.keys() <= defaults.keys()
    found = {**defaults, **given}
    assert all(value is not inspect.Parameter.empty for value in found.values())
    return found


@cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each parameter except ``out``, or ``inspect.Parameter.empty`` if it has none."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.name != "out"}


def named(op: OpSpec, given: dict[str, Any]) -> Sample:
    """Return a sample whose arguments are given by name."""
    return Sample(op.name, (), given)


# Calls with a given size


def all_choices_of(op: OpSpec) -> list[dict[str, Any]]:
    """Return every granularity with every layout that the op supports, as keyword arguments. The FP4 format is always
    the default."""
    names = inspect.signature(op.function).parameters
    if "granularity" in names:
        pairs = (("token", "row"), ("tensor", "row"), ("block128", "row"), ("block128", "column"))
        return [{"granularity": granularity, "scale_layout": layout} for granularity, layout in pairs]
    if "scale_layout" not in names:
        return [{}]
    # The 8x4 layout is only for activations, and the activations of weight-only ops are not quantised.
    return [
        {"scale_layout": name} for name in SCALE_LAYOUTS if not (op.name.endswith("_weight_only") and name == "8x4")
    ]


def choices_of(op: OpSpec) -> list[dict[str, Any]]:
    """Return ``all_choices_of`` without the choices whose outputs differ from the outputs of another choice only in
    tile size or in the number of scales."""
    alike: tuple[Any, ...] = ({"scale_layout": "8x4"}, {"granularity": "block128", "scale_layout": "row"})
    return [choices for choices in all_choices_of(op) if choices not in alike]


def make_call(
    op: OpSpec, *shape: int, device: str, dtype: torch.dtype = torch.bfloat16, **choices: Any
) -> dict[str, Any]:
    """Return the arguments, by name, of a call with random data. Its result is a tensor of ``shape``, or is computed
    from one. The default is NVFP4 with 128x4 scales, or FP8 with one scale per row. If the op's module of samples
    defines ``call``, that function makes the call.
    """
    samples = importlib.import_module(f"samples.{op.name}")
    if hasattr(samples, "call"):
        return arguments(op, samples.call(*shape, device=torch.device(device)))
    if op.has_backends:
        return make_product(op, *shape, device=device, **choices)
    given = arguments(op, _plain_on_meta(op.name))
    layout = {name: choices[name] for name in ("granularity", "scale_layout") if name in choices}
    if "granularity" in given:
        layout = {"granularity": "token", "scale_layout": "row", **layout}
    given |= layout
    if "input" in given:
        width = input_width(op, shape[-1])
        given["input"] = torch.randn(*shape[:-1], width, dtype=dtype, device=device)
    else:
        given["y"] = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
        layout = {} if given["scale_layout"] is None else {"scale_layout": given["scale_layout"]}
        like = OPS["fp4_quantize"].fake(torch.empty(shape, device="meta"), **layout)[1]
        scale = torch.randint(0, 0x7F, like.shape, dtype=torch.uint8, device=device)
        given["scale"] = scale.view(torch.float8_e4m3fn)
    if "residual" in given:
        given["residual"] = torch.randn_like(given["input"])
    if "weight" in given:
        given["weight"] = torch.randn(shape[-1], device=device)
    if "global_scale" in given:
        given["global_scale"] = torch.rand(1, device=device) * 400 + 10
    elif given.get("granularity") == "tensor":
        given["scale"] = torch.rand(1, device=device) + 0.01
    return given


def split_call(op: OpSpec, *lead: int, device: str, **choices: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a call with these leading dimensions, split into its tensors and its other arguments."""
    width = 256 if choices.get("granularity") == "block128" else 80
    given = make_call(op, *lead, width, device=device, **choices)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in given.items() if name not in tensors}


def dynamic_shapes(op: OpSpec, tensors: dict[str, torch.Tensor], rows: Any) -> dict[str, dict[int, Any] | None]:
    """Return the ``dynamic_shapes`` for ``torch.export``: which dimensions of a call's tensors are the number of
    rows."""
    samples = importlib.import_module(f"samples.{op.name}")
    where = {name: 0 for name, t in tensors.items() if t.dim() > 1 and name not in ("b", "b_scale", "w", "w_scale")}
    where = getattr(samples, "ROW_DIMENSIONS", where)
    return {name: {where[name]: rows} if name in where else None for name in tensors}


def make_product(op: OpSpec, *shape: int, device: str, scale_layout: str = "128x4") -> dict[str, Any]:
    """Return the arguments, by name, of an NVFP4 GEMM with random data. ``a`` is (M, K), the flattened ``shape``. The
    result has 136 columns, or, if the GEMM has a gate, 64 columns for each of five experts."""
    samples = importlib.import_module(f"samples.{op.name}").SAMPLES
    *lead, width = shape
    # make_call already gives expert GEMMs an alpha
    kwargs = {} if op.name.startswith("moe_") else {"alpha": torch.rand(1, device=device)}
    # The numbers of columns must differ from every M in the tests, because PyTorch treats equal sizes as one symbol.
    columns = 5 * 64 if op.name.startswith("moe_fc1_") else 136
    sizes = (math.prod(lead), columns, input_width(op, width))
    sample = samples.sample("", *sizes, NVFP4, scale_layout, torch.device(device), **kwargs)
    return arguments(op, with_usable_backend(op, sample, torch.device(device)))


def quantises_rows(op: OpSpec) -> bool:
    """Return True if the op turns each row of an input into a row of codes, independent of other rows."""
    has_input = next(iter(inspect.signature(op.function).parameters)) == "input"
    return has_input and not op.name.startswith("moe_") and not op.name.endswith(("block128x128", "per_tensor"))


def is_for_experts(op: OpSpec) -> bool:
    return op.name.startswith("moe_fc2_")


def input_width(op: OpSpec, width: int) -> int:
    """Return the length of input rows from which the op computes rows of ``width``. For experts the length is at least
    5 · 64, and no test uses it as M, because PyTorch treats equal sizes as one symbol."""
    samples = importlib.import_module(f"samples.{op.name}")
    if hasattr(samples, "input_width"):
        return int(samples.input_width(width))
    if op.name.startswith("moe_fc1_"):
        return math.ceil(width / 64) * 64
    if is_for_experts(op):
        return max(5, math.ceil(width / 64)) * 64
    return 2 * width if op.name.startswith("silu_mul") else width


def forget(op: OpSpec) -> None:
    """Reset an op to its state before the first call, so that its next call chooses a backend, compiles and loads
    again."""
    op.path.launchers.clear()
    _call._launched.clear()


# Tensors


def out_for(op: OpSpec, results: Tensors) -> Tensors:
    """Return poisoned output tensors for the op, made like the outputs among the results of ``run``."""
    return poisoned(results[: len(op.outputs)])


def poisoned(like: Iterable[torch.Tensor]) -> Tensors:
    """Return tensors with these shapes and strides, filled with 0xAA bytes, or with NaN if the dtype is a float of at
    least two bytes."""
    return tuple(_poison(t) for t in like)


def _poison(like: torch.Tensor) -> torch.Tensor:
    if like.dtype.is_floating_point and like.dtype.itemsize > 1:
        return torch.empty_like(like).fill_(torch.nan)  # keeps strides, such as column-major scales
    if like.dtype.itemsize > 1:
        return torch.full(like.shape, 0xAAAAAAAA - 2**32, dtype=like.dtype, device=like.device)
    return torch.full(like.shape, 0xAA, dtype=torch.uint8, device=like.device).view(like.dtype)


def tensors_in(sample: Sample | ErrorInput) -> list[torch.Tensor]:
    values = [*sample.args, *sample.kwargs.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
