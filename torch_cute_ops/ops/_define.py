"""From an op's typed Python function to everything that PyTorch calls.

``define`` reads the function's signature and docstring, and makes the function's body, the CUDA entries of both
overloads, and the guards at the Autograd key. They differ from op to op in their parameters alone, and a call spends as
long in a generic ``*args`` wrapper as in its launch; so they are generated, as ``dataclasses`` generates ``__init__``.
"""

import importlib
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch

from torch_cute_ops.formats.experts import zeroed_rows
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import CallPath, Outputs
from torch_cute_ops.ops._signature import Signature
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec
from torch_cute_ops.runtime.dispatch import (
    CHECKS,
    NEEDS_DISPATCHER,
    NEEDS_REDISPATCH,
    PLAIN,
    below_autograd,
    has_tangent,
    in_dual_level,
)

NAMESPACE: Final = "cute"
OPS: Final[dict[str, "OpSpec"]] = {}
"""The ops that are defined so far, by name."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class OpSpec:
    """One op, as the registry knows it.

    Attributes:
        signature: its parameters and outputs.
        path: how its CUDA calls reach a kernel.
        function: the typed Python function of the same name.
        bind: the path's ``Call`` of the op's arguments.
        cuda, cuda_out: the CUDA entries of the functional op and of its ``.out`` overload, which takes the outputs as
            further keyword arguments. They check their arguments themselves.
        autograd, autograd_out: the entries at the Autograd key: they refuse what requires grad or has a tangent.
    """

    signature: Signature
    path: CallPath[Any]
    function: Callable[..., Any]
    bind: Callable[..., Any]
    cuda: Callable[..., Any]
    cuda_out: Callable[..., None]
    autograd: Callable[..., Any]
    autograd_out: Callable[..., None]

    @property
    def name(self) -> str:
        """In the namespace ``cute``, and of the modules that implement and test the op."""
        return self.signature.name

    @property
    def qualified_name(self) -> str:
        """``cute::name``."""
        return f"{NAMESPACE}::{self.name}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return self.signature.outputs

    @property
    def out_names(self) -> tuple[str, ...]:
        """Names of the outputs as arguments of the ``.out`` overload."""
        return self.signature.out_names

    @property
    def updated(self) -> tuple[str, ...]:
        """Names of the arguments that the op updates in place."""
        return self.signature.updated

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs by the executable specification in plain torch, ``reference/<name>.py``."""
        return getattr(self._reference, self.name)(**self._by_name(*args, **kwargs))

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs with the right shapes and dtypes and no values, where the first argument is; of a checked call."""
        call = self.bind(*args, **kwargs)
        outputs = tuple(call[0].new_empty(shape, dtype=dtype) for shape, dtype in self.path.output_shapes(call))
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def defined(self) -> Callable[..., tuple[torch.Tensor, ...]] | None:
        """The outputs with zeros in place of what the op leaves unspecified, such as rows of padding.

        Takes a tuple of all outputs and the op's arguments; ``None``: it leaves nothing unspecified.
        """
        given = self._of_outputs("defined")
        return given if given is not None or self.written is None else self._zeroed

    @property
    def written(self) -> Callable[..., tuple[torch.Tensor, ...]] | None:
        """Which elements of its outputs the op writes, as masks; the others keep what they hold.

        Takes a tuple of all outputs and the op's arguments; ``None``: it writes all.
        """
        return self._of_outputs("written")

    def _zeroed(self, outputs: Outputs, *args: Any, **kwargs: Any) -> Outputs:
        assert self.written is not None
        masks = self.written(outputs, *args, **kwargs)
        return tuple(zeroed_rows(output, mask) for output, mask in zip(outputs, masks, strict=True))

    @property
    def has_backends(self) -> bool:
        """Whether there are several ways to compute a call: whether it is a GEMM."""
        return self.path.has_backends

    def kernels(self, arch: Arch, *args: Any, **kwargs: Any) -> tuple[KernelSpec, ...]:
        """The kernels that a call may launch on GPUs of ``arch``; its tensors may be on meta.

        Raises:
            ValueError: for arguments that the op refuses, or if no backend can compute the call there.
            TypeError: for a wrong dtype.
        """
        call = self.bind(*args, **kwargs)
        self.path.check_call(call)
        return self.path.kernels(call, arch)

    def backends(self, where: torch.device | Arch, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """Each backend and why it cannot compute a call on a device, or GPUs of an architecture, whatever backend that
        names; ``None``: it can."""
        call = self.bind(*args, **kwargs)._replace(backend="auto")
        self.path.check_call(call)
        return self.path.backends(call, where)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            TypeError: for a wrong kind or dtype.
            ValueError: for anything else that is wrong.
        """
        self.path.check_call(self.bind(*args, **kwargs))

    def check_values(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what the tensors of a checked call hold, on a CPU.

        Raises:
            ValueError: for an index of something that is not there.
        """
        self.path.check_values(self.bind(*args, **kwargs))

    def check_outputs(self, outputs: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check given output tensors, and that they share no memory with arguments or each other.

        Raises:
            ValueError: for a wrong shape, device or layout, or shared memory.
            TypeError: for a wrong dtype.
        """
        call = self.bind(*args, **kwargs)
        shapes = self.path.output_shapes(call)
        for name, output, (shape, dtype) in zip(self.out_names, outputs, shapes, strict=True):
            _checks.check_output(self.name, name, output, shape, dtype, call[0].device)
        self.path.check_memory(call, tuple(outputs))

    @property
    def _reference(self) -> Any:
        return importlib.import_module(f"torch_cute_ops.reference.{self.name}")

    def _of_outputs(self, name: str) -> Callable[..., Outputs] | None:
        """A function of the reference's module that takes all outputs, and the op's arguments by name."""
        function = getattr(self._reference, name, None)
        if function is None:
            return None
        return lambda outputs, *args, **kwargs: function(outputs, **self._by_name(*args, **kwargs))

    def _by_name(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by name, defaults included."""
        return self.path.arguments(self.bind(*args, **kwargs))


def as_tuple(value: Any) -> Outputs:
    """The outputs of an op as a tuple, also where there is one."""
    return value if isinstance(value, tuple) else (value,)


def define(path: CallPath[Any], *outputs: str) -> Callable[[Function], Function]:
    """Define the op whose parameters and docstring are those of the decorated function, which has no body of its own.

    The function's keyword-only parameter ``out`` takes the outputs.

    Args:
        path: how CUDA calls reach a kernel.
        outputs: names of the outputs.
    """

    def decorate(function: Function) -> Function:
        signature = Signature.of(function, outputs)
        path.bind(signature)
        made = _generate(signature, path)
        public = made.pop("function")
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(public, name, getattr(function, name))
        OPS[signature.name] = OpSpec(signature, path, public, **made)
        return cast(Function, public)

    return decorate


_TEMPLATE: Final = """\
def bind({parameters}):
    return Call(({values},))

def cuda({parameters}):
    return run(None, None, {values})

def cuda_out({parameters}, *, {outs}):
    run({outs_checked}, None, {values})

def autograd({parameters}):
    if not ({needs_redispatch}) and {plain} and not (is_grad_enabled() and ({grads})):
        return run(None, device, {values})
    refuse_gradient(({tensors},))
    with below_autograd():
        return ops.{name}.default({arguments})

def autograd_out({parameters}, *, {outs}):
    if (
        not ({needs_redispatch})
        and {plain}
        and {plain_outs}
        and not (is_grad_enabled() and ({grads} or {grads_of_outs}))
    ):
        run({outs_given}, device, {values})
        return
    refuse_gradient(({tensors},), {outs_tuple})
    with below_autograd():
        ops.{name}.out({arguments}, {outs_by_name})

def function({parameters}, *, out=None):
    if not ({needs_dispatcher}) and {plain}:
        if out is None:
            if not (is_grad_enabled() and ({grads})):
                return run(None, device, {values})
        elif {out_is_plain}:
            {outs_target} = out
            if {plain_outs} and not (is_grad_enabled() and ({grads} or {grads_of_outs})):
                return run(out, device, {values})
    if not is_dynamo_compiling():
        check_kinds(({arguments},))
    if out is None:
        return ops.{name}.default({arguments})
    {outs_target} = given_outputs(out)
    ops.{name}.out({arguments}, {outs_by_name})
    return out
"""


def _generate(signature: Signature, path: CallPath[Any]) -> dict[str, Any]:
    """The functions of ``_TEMPLATE`` for one op, by name."""
    values: dict[str, Any] = {}

    def default(name: str, value: Any) -> str:
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        values[f"default_{name}"] = value
        return f"default_{name}"

    parameters = ", ".join(
        each.name if each.default is inspect.Parameter.empty else f"{each.name}={default(each.name, each.default)}"
        for each in signature.parameters
    )
    fields = {path.renames.get(name, name): name for name in signature.names}
    unknown = fields.keys() - set(path.call_type._fields)
    if unknown:
        raise TypeError(f"{signature.name}: {path.call_type.__name__} has no field for {', '.join(sorted(unknown))}")
    call = ", ".join(
        fields.get(field) or default(f"of_{field}", path.fixed.get(field, path.call_type._field_defaults.get(field)))
        for field in path.call_type._fields
    )
    tensors = [each.name for each in signature.tensors]
    outs = signature.out_names
    plain = [
        f"type({each.name}) in PLAIN"
        if not each.is_optional
        else f"({each.name} is None or type({each.name}) in PLAIN)"
        for each in signature.tensors
    ]
    is_single = len(outs) == 1
    source = _TEMPLATE.format(
        name=signature.name,
        parameters=parameters,
        arguments=", ".join(signature.names),
        values=call,
        grads=" or ".join(
            f"({each.name} is not None and {each.name}.requires_grad)"
            if each.is_optional
            else f"{each.name}.requires_grad"
            for each in signature.tensors
        ),
        grads_of_outs=" or ".join(f"{name}.requires_grad" for name in outs if name not in path.integer_outputs)
        or "False",
        tensors=", ".join(tensors),
        plain=f"{' and '.join(plain)} and (device := {tensors[0]}.get_device()) >= 0",
        outs=", ".join(outs),
        outs_tuple=f"({', '.join(outs)},)",
        outs_given=outs[0] if is_single else f"({', '.join(outs)})",
        # ``CallPath.run`` takes None for a call without outputs.
        outs_checked=f"given_outputs({outs[0]})" if is_single else f"({', '.join(outs)})",
        outs_target=outs[0] if is_single else ", ".join(outs),
        outs_by_name=", ".join(f"{name}={name}" for name in outs),
        plain_outs=" and ".join(f"type({name}) in PLAIN" for name in outs),
        needs_dispatcher=NEEDS_DISPATCHER,
        needs_redispatch=NEEDS_REDISPATCH,
        out_is_plain="type(out) in PLAIN" if is_single else f"type(out) is tuple and len(out) == {len(outs)}",
    )

    def given_outputs(out: Any) -> Any:
        return _checks.check_given_outputs(signature.name, out, outs)

    values |= CHECKS | {
        "Call": path.call_type._make,
        "run": path.run,
        "ops": torch.ops.cute,
        "PLAIN": PLAIN,
        "below_autograd": below_autograd,
        "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "is_grad_enabled": torch.is_grad_enabled,
        "refuse_gradient": partial(refuse_gradient, signature),
        "check_kinds": signature.check_kinds,
        "given_outputs": given_outputs,
    }
    made = ("bind", "cuda", "cuda_out", "autograd", "autograd_out", "function")
    # In a function, since torch.compile would look for their globals in a module.
    body = "".join(f"    {line}\n" if line else "\n" for line in source.splitlines())
    text = f"def make({', '.join(values)}):\n{body}    return {', '.join(made)}\n"
    # Named and kept, so that a traceback shows the lines.
    filename = f"<torch_cute_ops {signature.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), namespace)
    return dict(zip(made, namespace["make"](**values), strict=True))


def refuse_gradient(signature: Signature, tensors: Sequence[torch.Tensor | None], outputs: Outputs = ()) -> None:
    """Refuse tensors that require grad while gradients are on, and those that have a tangent.

    Raises:
        ValueError: the ops are for inference, and have no derivative.
    """
    names = (*(parameter.name for parameter in signature.tensors), *signature.out_names)
    given = [(name, one) for name, one in zip(names, (*tensors, *outputs), strict=False) if one is not None]
    for name, tensor in given:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"cute::{signature.name} has no gradient, and {name} requires grad; "
                f"call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )
        if in_dual_level() and has_tangent(tensor):
            raise ValueError(
                f"cute::{signature.name} has no derivative, and {name} has a tangent (forward-mode differentiation); "
                f"pass {name}.detach()"
            )
