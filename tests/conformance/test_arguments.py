"""Wrong arguments that no schema refuses, for every op and every form of a call: ``None`` for a required tensor,
outputs that overlap another tensor, and weights with wrong strides."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from expected import assert_same, raw
from samples._weights import every_other_expert, one_column, one_expert, unaligned, with_padding
from support.cases import (
    arguments,
    each_of_op,
    fake_mode,
    get_error,
    make_call,
    named,
    op_cases,
    overload,
    poisoned,
    run,
    sample_with,
    with_usable_backend,
)
from support.devices import DEVICES
from support.launch_model import Launches
from torch._subclasses import FakeTensorMode

from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS

# Forms of a call. Each function takes the op, the arguments by name, and the output tensors, keyed by their names in
# the ``.out`` overload.


def as_function(op, given, outputs=None):
    if outputs is None:
        return as_tuple(op.function(**given))
    values = tuple(outputs.values())
    return op.function(**given, out=values[0] if len(op.outputs) == 1 else values)


def as_op(op, given, outputs=None):
    if outputs is None:
        return as_tuple(overload(op)(**given))
    return overload(op, "out")(**given, **outputs)


def as_cuda_entry(op, given, outputs=None):
    if outputs is None:
        return as_tuple(op.cuda(**given))
    return op.cuda_out(**given, **outputs)


def as_autograd_entry(op, given, outputs=None):
    if outputs is None:
        return as_tuple(op.autograd(**given))
    return op.autograd_out(**given, **outputs)


@dataclass
class Place:
    """Environment in which calls run.

    Attributes:
        device: device of the calls' tensors.
        forms: available forms of a call.
        fakes: mode that makes fake tensors, or None if calls use real tensors.
        launches: launches recorded by the model of kernels.
        made: tensors and their fake tensors, keyed by the id of the tensor. The tensor stays alive, so that its id
            names no other tensor.
    """

    device: str
    forms: tuple[Any, ...] = (as_function, as_op)
    fakes: FakeTensorMode | None = None
    launches: Launches = field(default_factory=Launches)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def anew(self):
        """Restore the initial state, so that the cases of one test do not affect each other."""
        self.launches.anew()
        if self.fakes is not None:
            self.fakes = fake_mode()
            self.made.clear()

    def call(self, form, op, given, outputs=None):
        if self.fakes is None:
            return form(op, given, outputs)
        given, outputs = (None if each is None else changed(each, self.faked) for each in (given, outputs))
        with self.fakes:
            return form(op, given, outputs)

    def faked(self, tensor):
        """Return the fake tensor of a tensor. Most calls of a check differ in one tensor, and making the fake tensors
        of all others again would take two fifths of its time."""
        if id(tensor) not in self.made:
            self.made[id(tensor)] = tensor, self.fakes.from_tensor(tensor)
        return self.made[id(tensor)][1]

    def good_call(self, op, has=()):
        """Return valid arguments that include the optional tensors ``has``, and tensors for the outputs."""
        device = self.device.replace("meta", "cpu")
        given, outputs = sample_with(op, device, *has).kwargs, poisoned(outputs_with(op.name, device, tuple(has)))
        if self.device == "meta":
            given, outputs = changed(given, on_meta), tuple(map(on_meta, outputs))
        return given, dict(zip(op.out_names, outputs, strict=True))


@cache
def outputs_with(name, device, has):
    """Return the outputs of a call with the optional tensors ``has``, for their shapes, dtypes and strides."""
    op = OPS[name]
    return run(op, sample_with(op, device, *has))[: len(op.outputs)]


def callable_on(op, given, device):
    """Return the arguments, with ``backend`` set to the reference if no kernel can compute the call."""
    return arguments(op, with_usable_backend(op, named(op, given), torch.device(device)))


def changed(given, change):
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def on_meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@pytest.fixture(params=(*DEVICES, "meta", "fake", "model"))
def place(request, monkeypatch):
    """Return each environment in turn: real devices, meta, fake tensors, and the CUDA entries on the launch model."""
    if request.param == "fake":
        return Place("cpu", fakes=fake_mode())
    if request.param == "model":
        recorded = request.getfixturevalue("launches")
        # Pretend that tensors are on CUDA device 0, so that functions and guards take the fast path.
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
        return Place("cpu", (as_function, as_autograd_entry, as_cuda_entry), launches=recorded)
    return Place(request.param)


# None instead of a required tensor


def missing_in(op):
    """Yield the name of each required tensor, and all names together."""
    required = tuple(each.name for each in op.signature.tensors if not each.is_optional)
    return dict.fromkeys((*((name,) for name in required), required))


@each_of_op(
    *("op", "missing"),
    cases=[
        pytest.param(op, missing, id=f"{op.name}-{'-'.join(missing)}")
        for op in OPS.values()
        for missing in missing_in(op)
    ],
)
def test_none_for_a_required_tensor(op, missing, place):
    """Check that None for a required tensor is refused, both before the first valid call and after it, when the kernel
    is ready."""
    given, outputs = place.good_call(op)
    for form in place.forms:
        for _ in range(2):
            place.launches.calls.clear()
            for written in (None, outputs):
                with pytest.raises(TypeError, match=rf"^cute::{op.name}: {missing[0]} is None; expected a tensor$"):
                    place.call(form, op, {**given, **dict.fromkeys(missing)}, written)
            assert not place.launches.calls
            place.call(form, op, given, outputs)


@pytest.mark.parametrize("op", op_cases())
def test_none_for_an_output(op, place):
    given, outputs = place.good_call(op)
    # A function with one output takes ``out=None`` as a request for a new tensor.
    forms = place.forms if len(op.outputs) > 1 else place.forms[1:]
    for form in forms:
        for name in op.out_names:
            with pytest.raises(TypeError, match=rf"^cute::{op.name}: {name}\b.* is .*None.*; expected a tensor$"):
                place.call(form, op, given, {**outputs, name: None})
            place.call(form, op, given, outputs)


# Wrong Python types

WRONG = {
    "Tensor": (3, "x", [1.0]),
    "int": ("16", 1.5, [16]),
    "SymInt": ("16", 1.5, [16]),
    "float": ("1", [1.0], 1j),
    "bool": ("yes", 2, []),
    "str": (7, b"linear", ["linear"]),
    "ScalarType": ("bfloat16", 15, 1000, 1.0),
}
"""Values of wrong types. torch's own binding refuses all of them except the dtype 1000, for which it crashes."""


@each_of_op(
    *("op", "parameter"),
    cases=[
        pytest.param(op, each, id=f"{op.name}-{each.name}") for op in OPS.values() for each in op.signature.parameters
    ],
)
def test_wrong_python_types(op, parameter, place):
    """Check that wrong Python types are refused on the first call and on later calls."""
    given, outputs = place.good_call(op)
    nothing = () if parameter.is_optional else (None,)
    for _ in range(2):
        for value in (*WRONG[parameter.type], *nothing):
            for written in (None, outputs):
                with pytest.raises(TypeError, match=rf"^cute::{op.name}: {parameter.name} is .*; expected "):
                    place.call(as_function, op, {**given, parameter.name: value}, written)
        place.call(as_function, op, given)


# Overlapping tensors


def span(tensor):
    """Return the number of bytes from the start of a tensor's first element to the end of its last element."""
    last = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.itemsize


def in_one_storage(written, other, shift):
    """Copy both tensors into one storage, so that ``written`` starts ``shift`` bytes after ``other``. ``other`` keeps
    its values."""
    storage = torch.zeros(span(written) + span(other) + 2 * abs(shift) + 64, dtype=torch.uint8, device=written.device)
    storage = storage[: len(storage) // 16 * 16]
    begin = max(-shift, 0)

    def view(like, at):
        return storage.view(like.dtype).as_strided(like.shape, like.stride(), at // like.itemsize)

    views = view(written, begin + shift), view(other, begin)
    if not other.is_meta:
        values = other.untyped_storage()
        first = other.storage_offset() * other.itemsize
        bytes_of = torch.empty(0, dtype=torch.uint8, device=other.device).set_(values, first, (span(other),), (1,))
        storage[begin : begin + span(other)] = bytes_of
    return *views, storage


def shifts_of(written, other):
    """Return shifts (multiples of 16 bytes) with which the tensors overlap completely, almost completely, or
    slightly."""
    far = [(span(tensor) - 1) // 16 * 16 for tensor in (other, written)]
    return dict.fromkeys((0, min(16, far[0]), far[0], -min(16, far[1]), -far[1]))


OVERLAPS = [
    pytest.param(op, written, id=f"{op.name}-{written}")
    for op in OPS.values()
    for written in (*op.out_names, *op.updated)
]


@each_of_op("op", "written", cases=OVERLAPS)
def test_no_output_overlaps_another_tensor(op, written, place):
    """Check that outputs and updated arguments that overlap another tensor are refused, on the first call and on later
    calls, and that nothing is written. An output may be the same view as an input if the op permits it. A prefetch hint
    may overlap any tensor, because hints do not affect results."""
    names = [each.name for each in op.signature.tensors if each.name not in op.path.hints]
    for other in (name for name in (*names, *op.out_names) if name != written):
        given, outputs = place.good_call(op, has=[name for name in (written, other) if name in names])
        tensors = {**given, **outputs}
        may_be_same = (written, other) == op.path.may_share or (written in op.updated and other == "input")
        message = "|".join(rf"{a} .*shares memory with {b}\b" for a, b in ((written, other), (other, written)))
        for shift in shifts_of(tensors[written], tensors[other]):
            if shift == 0 and may_be_same:
                continue
            one, two, storage = in_one_storage(tensors[written], tensors[other], shift)
            shared = {written: one, other: two}
            bad = {name: shared.get(name, value) for name, value in given.items()}
            bad_outputs = {name: shared.get(name, value) for name, value in outputs.items()}
            before = None if storage.is_meta else raw(storage)
            for form in place.forms:
                place.launches.calls.clear()
                with pytest.raises(ValueError, match=rf"^cute::{op.name}: ({message})"):
                    place.call(form, op, bad, bad_outputs)
                assert not place.launches.calls
            assert before is None or torch.equal(raw(storage), before)
        for form in place.forms:
            place.call(form, op, given, outputs)


# Strides of weights

WEIGHTS = {op: name for op in OPS.values() if op.has_backends for name in ("b", "w") if name in op.signature.names}
"""Name of the weight argument of each GEMM op."""
EACH_WEIGHT = [pytest.param(op, name, id=op.name) for op, name in WEIGHTS.items()]


@pytest.mark.parametrize("op, name", EACH_WEIGHT)
@pytest.mark.parametrize("strides", ["as-stored", "stored-transposed", "apart", "rows-apart"])
def test_strides_reveal_a_square_weight_that_is_no_transposed_view(op, name, strides, place):
    """Check that the op refuses a square weight that is not a transposed view, on the first call and after valid calls
    with equal shapes."""
    given = arguments(op, get_error(op, f"{name}-{strides}-square", place.device))
    stored = given[name]
    assert stored.shape[-2] == stored.shape[-1] and stored.stride(-2) != 1
    rows = stored.view(torch.uint8).mT.contiguous()
    good = callable_on(op, {**given, name: rows.view(stored.dtype).mT}, place.device)
    for form in place.forms:
        for _ in range(2):
            place.launches.calls.clear()
            with pytest.raises(ValueError, match=rf"^cute::{op.name}: got {name} with shape .*pass {name}\.mT"):
                place.call(form, op, given)
            assert not place.launches.calls
            place.call(form, op, good)


@pytest.mark.parametrize(
    "op, name, change",
    [
        pytest.param(op, name, change, id=f"{op.name}-{change.__name__}")
        for op, name in WEIGHTS.items()
        for change in (with_padding, unaligned, one_column, every_other_expert, one_expert)
        if op.path.over in ("n", "rows") or "expert" not in change.__name__
    ],
)
def test_strides_of_rows_and_experts_change_no_result(op, name, change, place):
    """Check that a weight with padded rows, or with gaps between experts, gives the same result as a contiguous copy,
    even right after a call with the copy."""
    given = callable_on(op, make_call(op, 4, 384, device=place.device), place.device)
    apart = {**given, name: change(given[name])}
    rows = apart[name].view(torch.uint8).mT.contiguous()
    given[name] = rows.view(given[name].dtype).mT
    assert apart[name].stride() != given[name].stride()
    for form in place.forms:
        want, got = (place.call(form, op, each) for each in (given, apart))
        assert [each.shape for each in got] == [each.shape for each in want]
        if place.fakes is None and place.device != "meta":
            if op.defined is not None:
                want, got = op.defined(want, **given), op.defined(got, **given)
            assert_same(got, want)
