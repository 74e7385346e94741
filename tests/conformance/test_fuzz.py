"""Random calls: each call returns results that match the fake results and independent formulas, or raises a
``ValueError`` or ``TypeError`` that names the op."""

import functools
import math
import os
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.cases import (
    arguments,
    defined,
    expected_of,
    form_cases,
    get_sample,
    named,
    op_cases,
    overload,
    poisoned,
    tensors_in,
)
from support.results import results_of
from support.strategies import one_of
from torch._subclasses import FakeTensorMode

from torch_cute_ops.ops._define import as_tuple

SMALL = 1 << 14
"""Maximum size of a sample's tensors, bytes. Only the form of a call matters here."""

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
)
KINDS = ("dtype", "shape", "strides", "device", "gradient", "sparse", "other", "none")
"""Kinds of changes of a tensor."""
NO_TENSOR = (None, 3, 1.5, True, "x", [1.0], (), b"", object())
VALUES = {
    "int": (0, -1, 1, 3, 16, 32, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), True, 1.5, math.nan, "16", None, [1]),
    "float": (0, -0.0, -1.0, 1e-45, 1e39, 1e308, math.nan, math.inf, -math.inf, 2**63, 10**400, True, "1", None, 1j),
    "bool": (True, False, 0, 1, 2, 1.0, "yes", None),
    "str": (
        "",
        "bogus",
        "128X4",
        "linear",
        "128x4",
        "8x4",
        "row",
        "column",
        "token",
        "\0",
        "ü",
        16,
        True,
        None,
        b"row",
    ),
    "ScalarType": (*DTYPES, "bfloat16", 15, 1000, -1, 1.0, None, torch.strided, torch.device("cpu")),
}
VALUES["SymInt"] = VALUES["int"]
EACH_VALUE = {kind: st.sampled_from(values) for kind, values in VALUES.items()}
"""Strategies that draw one of a kind's values, by kind."""


# Random changes of tensors


def like(tensor, shape, dtype=None, device=None):
    """Return zeros with another shape, dtype or device. If ``tensor`` is a transposed view, such as a weight, so is the
    result."""
    dtype = dtype or tensor.dtype
    zeros = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device or tensor.device)
    if len(shape) > 1 and tensor.dim() > 1 and tensor.stride(-2) == 1 != tensor.stride(-1):
        return zeros.view(dtype).view(*shape[:-2], shape[-1], shape[-2]).mT
    return zeros.view(dtype).view(shape)


def shapes_near(draw, shape):
    shape, kind = list(shape), draw(one_of(("drop", "add", "size", "turn")))
    if not shape or kind == "add":
        shape.insert(draw(st.integers(0, len(shape))), draw(st.integers(0, 2)))
    elif kind == "drop":
        del shape[draw(st.integers(0, len(shape) - 1))]
    elif kind == "size":
        i = draw(st.integers(0, len(shape) - 1))
        sizes = (0, 1, shape[i] - 1, shape[i] + 1, 2 * shape[i], shape[i] // 2, shape[i] + 16)
        shape[i] = max(0, draw(st.sampled_from(sizes)))
    else:
        shape.reverse()
    return tuple(shape)


def strided(draw, tensor):
    """Draw a copy of the tensor with other strides."""
    kind = draw(one_of(("columns first", "transposed", "step", "offset", "expanded", "overlapping")))
    shape, strides, offset = tensor.shape, list(torch.empty(tensor.shape, device="meta").stride()), 0
    if kind == "columns first":
        strides = list(torch.empty(tuple(reversed(shape)), device="meta").stride())[::-1]
    elif kind == "transposed" and len(shape) > 1:
        pitch = shape[-2] + 16 * draw(st.integers(0, 2))
        strides = [*torch.empty((*shape[:-2], shape[-1], pitch), device="meta").stride()[:-2], 1, pitch]
    elif kind == "step":
        strides = [2 * stride for stride in strides]
    elif kind == "offset":
        offset = 1
    elif strides:
        strides[draw(st.integers(0, len(strides) - 1))] = 0 if kind == "expanded" else 1
    reach = sum(stride * max(extent - 1, 0) for stride, extent in zip(strides, shape, strict=True)) + offset + 1
    if tensor.is_meta:
        return like(tensor, (reach,)).as_strided(shape, strides, offset)
    # If several elements share an address, keep the value of one of them.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    where = torch.arange(reach).as_strided(shape, strides, offset)
    data = torch.zeros(reach, dtype=bits).index_put_((where.flatten(),), tensor.contiguous().view(bits).flatten())
    return data.view(tensor.dtype).as_strided(shape, strides, offset)


INTEGERS = st.lists(st.sampled_from((-(2**31), -1, 0, 1, 5, 1000, 2**31 - 1)), min_size=1, max_size=4)


def random_integers(draw, tensor):
    values = draw(INTEGERS)
    count = tensor.numel()
    return torch.tensor(values * (count // len(values) + 1), dtype=torch.int32)[:count].view(tensor.shape)


def changed_tensor(draw, tensor, others):
    """Draw a replacement for a tensor: another tensor, or a value that is not a tensor."""
    if not isinstance(tensor, torch.Tensor):
        others = [other for other in others if isinstance(other, torch.Tensor)]
        return draw(st.sampled_from((*NO_TENSOR, *others)))
    if tensor.layout != torch.strided:
        return tensor
    kind = draw(one_of(KINDS + ("integers",) * 3 * (tensor.dtype == torch.int32)))
    if kind == "dtype":
        return like(tensor, tensor.shape, draw(one_of(DTYPES)))
    if kind == "shape":
        return like(tensor, shapes_near(draw, tensor.shape))
    if kind == "strides":
        return strided(draw, tensor)
    if kind == "device":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if kind == "gradient":
        return tensor.detach().requires_grad_(tensor.dtype.is_floating_point)
    if kind == "sparse":
        return torch.zeros(tensor.shape, dtype=torch.float32).to_sparse()
    if kind == "integers":
        return random_integers(draw, tensor)
    return draw(st.sampled_from([*NO_TENSOR] if kind == "none" else others))


def overlapping(draw, output, tensors):
    """Draw an output that lies in the memory of another tensor, if it fits."""
    other = draw(st.sampled_from([tensor for tensor in tensors if tensor.layout == torch.strided]))
    storage = other.untyped_storage()
    if other.is_meta or storage.nbytes() < output.numel() * output.itemsize or not output.numel():
        return output
    room = (storage.nbytes() - output.numel() * output.itemsize) // output.itemsize
    empty = torch.empty(0, dtype=output.dtype)
    return empty.set_(storage, draw(st.integers(0, room)), output.shape, output.stride())


# Random calls


@st.composite
def calls(draw, op):
    """Draw arguments by name, and outputs: a sample in which some arguments are changed."""
    name = draw(one_of(samples_of(op)))
    sample = get_sample(op, name, "cpu")
    given = arguments(op, sample)
    outputs = list(poisoned(results_of(op, name, "cpu")[: len(op.outputs)]))
    everything = [*tensors_in(sample), *outputs]
    if draw(st.integers(0, 9)) == 0:
        given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        outputs = [output.to("meta") for output in outputs]
    for _ in range(draw(one_of((0, 1, 1, 1, 2, 2, 3)))):
        where = draw(st.integers(0, 9))
        if where < 7:
            parameter = draw(one_of(tuple(op.signature.parameters)))
            if draw(st.integers(0, 11)) == 0:
                given.pop(parameter.name, None)
            elif parameter.is_tensor:
                given[parameter.name] = changed_tensor(draw, given.get(parameter.name), everything)
            else:
                given[parameter.name] = draw(EACH_VALUE[parameter.type])
        elif where == 7 and len(outputs) > 1:
            outputs = draw(st.sampled_from((outputs[:-1], [*outputs, outputs[0]], outputs[::-1], [])))
        elif outputs:
            i = draw(st.integers(0, len(outputs) - 1))
            if where == 8 and isinstance(outputs[i], torch.Tensor) and outputs[i].layout == torch.strided:
                outputs[i] = overlapping(draw, outputs[i], everything)
            else:
                outputs[i] = changed_tensor(draw, outputs[i], everything)
    return given, tuple(outputs)


@functools.cache
def samples_of(op):
    """Return the names of small samples that cover every form."""
    names = [case.values[1] for case in form_cases() if case.values[0] is op]
    size = {
        name: sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(get_sample(op, name, "cpu")))
        for name in names
    }
    return tuple(name for name in names if size[name] <= SMALL) or tuple(sorted(names, key=size.get)[:3])


def fits_schema(op, given):
    """Return True if torch can bind the arguments to the schema. torch crashes if a dtype is a number."""
    return not any(
        parameter.type == "ScalarType" and not isinstance(given.get(parameter.name), torch.dtype | None)
        for parameter in op.signature.parameters
    )


def forms_of(op, given, outputs):
    forms = {
        "function": lambda given, outputs: op.function(**given),
        "out=": lambda given, outputs: op.function(**given, out=outputs if len(op.outputs) > 1 else outputs[0]),
    }
    if fits_schema(op, given):
        forms["op"] = lambda given, outputs: overload(op)(**given)
        if len(outputs) == len(op.outputs):
            forms[".out"] = lambda given, outputs: overload(op, "out")(
                **given, **dict(zip(op.out_names, outputs, strict=True))
            )
    return forms


def outcome(op, form, given, outputs, is_function):
    """Return the results, or the error's text."""
    try:
        results = form(given, outputs)
    except (ValueError, TypeError) as error:
        assert op.name in str(error), f"{type(error).__name__} does not name the op: {error}"
        return str(error)
    except RuntimeError as error:
        # raised by torch's binding of Python values to the schema
        if is_function or f"Declaration: cute::{op.name}" not in str(error):
            raise
        return str(error)
    return () if results is None else as_tuple(results)


def kind_of(result):
    """Return shapes, dtypes, strides and devices of the results, or the error's text."""
    return result if isinstance(result, str) else [(tuple(t.shape), t.dtype, t.stride(), t.device) for t in result]


PLAIN = {
    "float": lambda value: torch.tensor(value, dtype=torch.float32).item(),  # infinite if too large
    "int": int,
    "SymInt": int,
    "str": lambda value: value.decode() if isinstance(value, bytes) else value,
}
"""Conversions of arguments that torch accepts, such as True for 1, to the values with which the op computes."""


def assert_values(op, before, given, results, expected=None):
    """Compare a call's results and updated arguments with formulas that share no code with the package.

    Return the results of the formulas, which the next call takes as ``expected`` if its arguments are the same.
    """
    sample, module = named(op, before), expected_of(op)
    before = arguments(op, sample)
    for parameter in op.signature.parameters:
        value = before[parameter.name]
        if value is not None and parameter.type in PLAIN:
            before[parameter.name] = PLAIN[parameter.type](value)
            if parameter.type == "float" and not math.isfinite(before[parameter.name]):
                return None  # which results are NaN is not specified
    expected = expected or module.results(before)
    actual = (*defined(op, sample, results), *(given[name] for name in op.updated if given.get(name) is not None))
    module.assert_results(actual, expected, before)
    return None if op.updated else expected


OF_VALUES = re.compile("out of range|offsets descends|holds [0-9]+ twice")
"""Errors that depend on values. Calls with fake tensors succeed, because these lack values."""


@pytest.mark.parametrize("op", op_cases())
def test_any_call(op, request):
    @hypothesis.seed(int(os.environ["TEST_SEED"]))
    @hypothesis.settings(
        max_examples=request.config.getoption("fuzz_examples"),
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(calls(op))
    def check(call):
        given, outputs = call
        mode = FakeTensorMode()
        fake = lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v  # noqa: E731
        fakes = {name: fake(value) for name, value in given.items()}, tuple(map(fake, outputs))
        formulas = None
        for name, form in forms_of(op, given, outputs).items():
            if name == "out=" and len(op.outputs) == 1 and not outputs:
                continue
            with mode:
                expected = kind_of(outcome(op, form, *fakes, name in ("function", "out=")))
            before = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
            results = outcome(op, form, given, outputs, name in ("function", "out="))
            got = kind_of(results)
            hypothesis.note(f"{name}: {got}; fake: {expected}")
            if isinstance(got, str) and OF_VALUES.search(got):
                continue
            assert type(got) is type(expected) and (isinstance(got, str) or got == expected), (name, got, expected)
            written = results or outputs  # the .out overload returns nothing
            if not isinstance(results, str) and not written[0].is_meta:
                formulas = assert_values(op, before, given, written, formulas)
            if name in ("out=", ".out"):
                formulas = None  # an output may be an argument, too

    check()
