"""Derivatives: an op refuses every way to request a derivative, and the error names the argument. Without gradients,
tensor subclasses receive calls of the op."""

import pytest
import torch
from expected import assert_same
from support.cases import (
    arguments,
    call,
    call_function,
    call_out,
    copy_updated,
    defined,
    each_of_op,
    named,
    op_cases,
    out_for,
    overload,
    run,
    sample_with,
    tensors_in,
    updated,
)
from support.devices import DEVICES
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from torch_cute_ops.registry import OPS


@pytest.fixture(params=(*DEVICES, "model"))
def place(request, monkeypatch):
    """Return each device, and then the CPU with simulated kernel launches, so that Python functions take the path that
    they take on a GPU."""
    if request.param != "model":
        return request.param
    request.getfixturevalue("launches")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return "cpu"


def backward(function, tensor):
    function(tensor.requires_grad_()).backward()


def dual(function, tensor):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(tensor, tensor))


def dual_without_grad(function, tensor):
    with torch.no_grad():
        dual(function, tensor)


ATTEMPTS = {
    "backward": backward,
    "dual": dual,
    "dual-without-grad": dual_without_grad,
    "grad": lambda function, one: torch.func.grad(function)(one),
    "vjp": lambda function, one: torch.func.vjp(function, one),
    "jacrev": lambda function, one: torch.func.jacrev(function)(one),
    "jvp": lambda function, one: torch.func.jvp(function, (one,), (one,)),
    "jacfwd": lambda function, one: torch.func.jacfwd(function)(one),
    "hessian": lambda function, one: torch.func.hessian(function)(one),
}
"""Ways to differentiate a function by an argument of the op, or by a factor that multiplies the argument."""

FLOATING = [
    pytest.param(op, each.name, id=f"{op.name}-{each.name}")
    for op in OPS.values()
    for each in op.signature.tensors
    if each.name in arguments(op, sample := sample_with(op, "cpu", each.name))
    and arguments(op, sample)[each.name].dtype.is_floating_point
]
DERIVATIVES = [
    pytest.param(*case.values, attempt, id=f"{case.id}-{attempt}") for case in FLOATING for attempt in ATTEMPTS
]


def forms_of(op, outputs):
    """Return functions that call the op or its Python function, with and without outputs, and return a differentiable
    sum of the results."""

    def total(results):
        return sum(result.float().sum() for result in results)

    def into(call_into):
        def form(sample):
            call_into(op, sample, outputs)
            return total(tensor.detach() for tensor in outputs) + sum(t.float().sum() for t in tensors_in(sample))

        return form

    return {
        "function": lambda sample: total(call_function(op, sample)),
        "op": lambda sample: total(call(op, sample)),
        "out=": into(call_function),
        ".out": into(call_out),
    }


@each_of_op("op", "name", "attempt", cases=DERIVATIVES)
def test_derivatives_are_refused(op, name, attempt, place):
    """Check that a request for a derivative is refused, and that the op is not silently treated as a constant."""
    given = arguments(op, sample_with(op, place, name))
    outputs = out_for(op, run(op, named(op, given)))
    value = given[name].detach().clone()
    for form in forms_of(op, outputs).values():

        def of_tensor(tensor, form=form):
            return form(named(op, {**given, name: tensor}))

        def of_factor(factor, of_tensor=of_tensor):
            return of_tensor((value.float() * factor).to(value.dtype))

        # Differentiate by one common factor, because one tangent per element would take too long.
        ways = [(of_factor, torch.ones((), device=value.device))] + (
            [(of_tensor, value)] if attempt not in ("jacfwd", "hessian") else []
        )
        for function, by in ways:
            with pytest.raises(ValueError, match=rf"^cute::{op.name} has no (gradient|derivative), and {name} "):
                ATTEMPTS[attempt](function, by)


class Wrapper(torch.Tensor):
    """Tensor subclass that wraps another tensor and forwards every op to it."""

    seen: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, held, requires_grad=False):
        facts = {"dtype": held.dtype, "device": held.device, "strides": held.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **facts, requires_grad=requires_grad)

    def __init__(self, held, requires_grad=False):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        args, kwargs = tree_map_only(cls, lambda wrapper: wrapper.held, (args, kwargs or {}))
        return func(*args, **kwargs)


def wrapped(op, sample, requiring=()):
    """Return the sample with wrapped tensors. The tensors named in ``requiring`` require grad."""
    given = arguments(op, sample)
    return named(op, {k: Wrapper(v, k in requiring) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@each_of_op("op", "name", cases=FLOATING)
def test_a_subclass_that_requires_grad(op, name, place):
    """Check that a call with a subclass that requires grad is refused while gradients are enabled."""
    sample = wrapped(op, sample_with(op, place, name), [name])
    outputs = out_for(op, run(op, sample_with(op, place, name)))
    for form in forms_of(op, outputs).values():
        with pytest.raises(ValueError, match=rf"^cute::{op.name} has no gradient, and {name} requires grad"):
            form(sample)


@pytest.mark.parametrize("op", op_cases())
@pytest.mark.parametrize("mode", [None, torch.no_grad, torch.inference_mode], ids=["plain", "no-grad", "inference"])
def test_a_subclass_sees_the_op(op, mode, place):
    """Check, without gradients, that the op reaches ``__torch_dispatch__`` exactly once, and that the result computed
    there is returned."""
    sample = sample_with(op, place)
    want = run(op, sample)
    tensors = {name: value for name, value in arguments(op, sample).items() if isinstance(value, torch.Tensor)}
    floating = [name for name, value in tensors.items() if value.is_floating_point()]
    calls = {
        "default": (lambda each: call_function(op, each), lambda each: call(op, each)),
        "out": (lambda each: call_function(op, each, outputs), lambda each: call_out(op, each, outputs)),
    }
    for kind, forms in calls.items():
        for form in forms:
            own, outputs = copy_updated(op, sample), out_for(op, want)
            given = wrapped(op, own, floating if mode else ())
            Wrapper.seen.clear()
            with mode() if mode else torch.enable_grad():
                results = form(given)
                assert Wrapper.seen == [overload(op, kind)]
                got = outputs if kind == "out" else results
                assert_same((*defined(op, own, got), *updated(op, own)), want)
