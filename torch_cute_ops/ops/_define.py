"""Define an op from its typed Python function, and generate all functions of the op that PyTorch calls.

``define`` reads the function's signature and docstring, and generates the function's body, the CUDA entries of both
overloads, and the guards at the Autograd key. The generated functions differ only in the op's parameters. Their code is
generated, as ``dataclasses`` generates ``__init__``, because a generic ``*args`` wrapper would take as long as a
launch.
"""

import functools
import importlib
import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch

from torch_cute_ops.formats.experts import merged, zeroed_rows
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._call import CallPath, Outputs
from torch_cute_ops.ops._signature import Signature
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec
from torch_cute_ops.runtime.dispatch import (
    CHECKS,
    NEEDS_DISPATCHER,
    NEEDS_DISPATCHER_WITHOUT_DYNAMO,
    NEEDS_REDISPATCH,
    PLAIN,
    below_autograd,
    has_tangent,
    in_dual_level,
)

NAMESPACE: Final = "cute"
OPS: Final[dict[str, "OpSpec"]] = {}
"""All ops, keyed by name. ``define`` adds an op."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class OpSpec:
    """One op in the registry: its signature and all its functions.

    Attributes:
        signature: parameters and outputs.
        path: code that leads from a CUDA call to a kernel launch.
        function: typed Python function with the op's name.
        generate: function that generates the code of ``function``, ``bind`` and the entries below. It runs on the first
            call of any of these functions.
        bind: function that converts the op's arguments to the path's ``Call``.
        cuda, cuda_out: CUDA entries of the functional op and of its ``.out`` overload, which takes the outputs as
            additional keyword arguments. Both entries check their arguments.
        autograd, autograd_out: entries at the Autograd key, which refuse tensors that require grad or have a tangent.
    """

    signature: Signature
    path: CallPath[Any]
    function: Callable[..., Any]
    generate: Callable[[], None]
    bind: Callable[..., Any]
    cuda: Callable[..., Any]
    cuda_out: Callable[..., None]
    autograd: Callable[..., Any]
    autograd_out: Callable[..., None]

    @property
    def name(self) -> str:
        """Name of the op in the namespace ``cute``. The modules that implement and test the op have the same name."""
        return self.signature.name

    @property
    def qualified_name(self) -> str:
        """Name with the namespace, ``cute::<name>``."""
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

    @property
    def has_backends(self) -> bool:
        """True if several backends can compute a call. Only GEMMs have backends."""
        return self.path.has_backends

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op with its executable specification in plain torch, ``reference/<name>.py``."""
        return self.compute(self._arguments(*args, **kwargs))

    def compute(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the op with its executable specification, from a dict of all arguments."""
        return getattr(self._reference, self.name)(**arguments)

    def copies_of_updated(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return copies, by name, of the arguments that a call will update, and of ``input``, which may be one of them.
        The dict is empty if the op updates nothing, and lacks arguments that are None."""
        names = (*self.updated, "input") if self.updated else ()
        return {name: arguments[name].clone() for name in names if arguments.get(name) is not None}

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate uninitialised outputs with the shapes and dtypes of a call's results, on the device of its first
        argument."""
        return self.path.empty_outputs(self.bind(*args, **kwargs))

    @property
    def defined(self) -> Callable[..., Outputs] | None:
        """Function that sets output elements that the op leaves unspecified, such as padding, to zero.

        The function takes a tuple of all outputs and the op's arguments. The property is None if the op specifies all
        elements.
        """
        given = self._of_outputs("defined")
        return given if given is not None or self.written is None else self._zeroed

    @property
    def written(self) -> Callable[..., Outputs] | None:
        """Function that returns, for each output, a mask of the elements that the op writes.

        The function takes a tuple of all outputs and the op's arguments. The property is None if the op writes all
        elements.
        """
        return self._of_outputs("written")

    def merge(self, outputs: Sequence[torch.Tensor], values: Outputs, arguments: Mapping[str, Any]) -> Outputs:
        """Return ``values``, but take the elements that the op leaves unwritten from ``outputs``."""
        written = getattr(self._reference, "written", None)
        if written is None:
            return values
        masks = written(tuple(outputs), **arguments)
        return tuple(merged(new, old, mask) for new, old, mask in zip(values, outputs, masks, strict=True))

    def kernels(self, where: torch.device | Arch, *args: Any, **kwargs: Any) -> tuple[KernelSpec, ...]:
        """Return the kernels that a call launches on a CUDA device, or may launch on GPUs of an architecture. The
        tensors may be on the meta device.

        Raises:
            ValueError: if the op refuses an argument, or if no backend can compute the call on ``arch``.
            TypeError: if a tensor has a wrong dtype.
        """
        call = self.bind(*args, **kwargs)
        self.path.check_call(call)
        return self.path.kernels(call, where)

    def backends(self, where: torch.device | Arch, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """Return, for each backend, the reason why it cannot compute a call on ``where``, or None if it can.

        The argument ``backend`` of the call is ignored.
        """
        call = self.bind(*args, **kwargs)._replace(backend="auto")
        self.path.check_call(call)
        return self.path.backends(call, where)

    def _zeroed(self, outputs: Outputs, *args: Any, **kwargs: Any) -> Outputs:
        assert self.written is not None
        masks = self.written(outputs, *args, **kwargs)
        return tuple(zeroed_rows(output, mask) for output, mask in zip(outputs, masks, strict=True))

    @property
    def _reference(self) -> Any:
        return importlib.import_module(f"torch_cute_ops.reference.{self.name}")

    def _of_outputs(self, name: str) -> Callable[..., Outputs] | None:
        """Return the function of this name in ``reference/<op>.py``, or None if the module does not define it. The
        function takes all outputs, and the op's arguments by name."""
        function = getattr(self._reference, name, None)
        if function is None:
            return None
        return lambda outputs, *args, **kwargs: function(outputs, **self._arguments(*args, **kwargs))

    def _arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, with defaults."""
        return self.path.arguments(self.bind(*args, **kwargs))


def as_tuple(value: Any) -> Outputs:
    """Return the outputs of an op as a tuple, even if the op has only one output."""
    return value if isinstance(value, tuple) else (value,)


def define(path: CallPath[Any], *outputs: str) -> Callable[[Function], Function]:
    """Define an op with the parameters and the docstring of the decorated function. The function needs no body.

    The function's keyword-only parameter ``out`` takes the outputs.

    Args:
        path: code that leads from a CUDA call to a kernel launch.
        outputs: names of the outputs.
    """

    def decorate(function: Function) -> Function:
        signature = Signature.of(function, outputs)
        path.bind(signature)
        made, generate = _functions(signature, path)
        public = functools.update_wrapper(made["function"], function)
        entries = {name: made[name] for name in _NAMES if name != "function"}
        OPS[signature.name] = OpSpec(signature, path, public, generate, **entries)
        return cast(Function, public)

    return decorate


_TEMPLATE: Final = """\
def bind({parameters}):
    if False:
        {closure}
    return Call(({values},))

def cuda({parameters}):
    if False:
        {closure}
    return run(None, None, {values})

def cuda_out({parameters}, *, {outs}):
    if False:
        {closure}
    run({outs_checked}, None, {values})

def autograd({parameters}):
    if False:
        {closure}
    if not ({needs_redispatch}) and {plain} and not (is_grad_enabled() and ({grads})):
        return run(None, device, {values})
    refuse_gradient(({tensors},))
    with below_autograd():
        return ops.{name}.default({arguments})

def autograd_out({parameters}, *, {outs}):
    if False:
        {closure}
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
    if False:
        {closure}
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
_NAMES: Final = ("bind", "cuda", "cuda_out", "autograd", "autograd_out", "function")
_STUB: Final = """\
def {name}(*args, **kwargs):
    if False:
        {closure}
    generate()
    return functions["{name}"](*args, **kwargs)
"""
_generating: Final = threading.Lock()


def _functions(signature: Signature, path: CallPath[Any]) -> tuple[dict[str, Callable[..., Any]], Callable[[], None]]:
    """Return stubs of the functions that ``_TEMPLATE`` defines for an op, keyed by name, and a function that generates
    the code of all stubs.

    Compiling the generated source takes a millisecond per op, so it is deferred to the op's first call.
    ``torch.compile`` never sees a stub, because the registry generates all code when ``torch._dynamo`` is imported.
    """
    functions: dict[str, Any] = {}

    def given_outputs(out: Any) -> Any:
        return _checks.check_given_outputs(signature.name, out, signature.out_names)

    def generate() -> None:
        source = _source(signature, path)
        # Store the source under this file name, so that tracebacks can show its lines.
        filename = f"<torch_cute_ops {signature.name}>"
        text = _in_closure(source, values)
        with _generating:
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            for stub, made in zip(functions.values(), _made(text, filename)(**values), strict=True):
                stub.__defaults__, stub.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
                stub.__code__ = made.__code__

    values = CHECKS | {
        "Call": path.call_type._make,
        # Use ``run_verified`` only in debug mode, because its checks would slow down every call.
        "run": path.run_verified if settings.CHECK else path.run,
        "ops": torch.ops.cute,
        "PLAIN": PLAIN,
        "Tensor": torch.Tensor,
        "below_autograd": below_autograd,
        "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "is_grad_enabled": torch.is_grad_enabled,
        "refuse_gradient": partial(refuse_gradient, signature),
        "check_kinds": signature.check_kinds,
        "given_outputs": given_outputs,
        "functions": functions,
        "generate": generate,
    }
    functions.update(zip(_NAMES, _stubs(tuple(values))(**values), strict=True))
    return functions, generate


@functools.cache
def _stubs(names: tuple[str, ...]) -> Callable[..., tuple[Callable[..., Any], ...]]:
    """Return a replacement for the function ``make`` of ``_in_closure``. It returns stubs, which generate their code
    when they are first called."""
    stubs = "\n".join(_STUB.format(name=name, closure="{closure}") for name in _NAMES)
    return _made(_in_closure(stubs, names), "<torch_cute_ops>")


def _in_closure(source: str, names: Iterable[str]) -> str:
    """Wrap ``source`` in a function ``make`` that takes these names as parameters and returns the functions of
    ``source``.

    The functions use closure variables instead of globals, because ``torch.compile`` looks for globals in an imported
    module, and generated code belongs to no module. Python lets a function's code be replaced only by code with the
    same number of free variables. Therefore ``{closure}`` mentions all names in each function.
    """
    body = source.replace("{closure}", ", ".join(names))
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    return f"def make({', '.join(names)}):\n{lines}    return {', '.join(_NAMES)}\n"


def _made(text: str, filename: str) -> Callable[..., tuple[Callable[..., Any], ...]]:
    namespace: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), namespace)
    made: Callable[..., tuple[Callable[..., Any], ...]] = namespace["make"]
    return made


def _source(signature: Signature, path: CallPath[Any]) -> str:
    """Return the source of one op's functions: ``_TEMPLATE`` filled in."""
    parameters = ", ".join(
        each.name if each.default is inspect.Parameter.empty else f"{each.name}={each.default!r}"
        for each in signature.parameters
    )
    fields = {path.renames.get(name, name): name for name in signature.names}
    call = ", ".join(
        fields.get(field) or repr(path.fixed.get(field, path.call_type._field_defaults.get(field)))
        for field in path.call_type._fields
    )
    tensors = [each.name for each in signature.tensors]
    outs = signature.out_names
    plain = [
        f"({each.name} is None or {_is_plain(each.name)})" if each.is_optional else _is_plain(each.name)
        for each in signature.tensors
    ]
    is_single = len(outs) == 1
    return _TEMPLATE.format(
        closure="{closure}",
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
        # ``CallPath.run`` expects ``out=None``, not a tuple of None, if the call gives no outputs.
        outs_checked=f"given_outputs({outs[0]})" if is_single else f"({', '.join(outs)})",
        outs_target=outs[0] if is_single else ", ".join(outs),
        outs_by_name=", ".join(f"{name}={name}" for name in outs),
        plain_outs=" and ".join(map(_is_plain, outs)),
        needs_dispatcher=NEEDS_DISPATCHER if "torch._dynamo" in sys.modules else NEEDS_DISPATCHER_WITHOUT_DYNAMO,
        needs_redispatch=NEEDS_REDISPATCH,
        out_is_plain=_is_plain("out") if is_single else f"type(out) is tuple and len(out) == {len(outs)}",
    )


def _is_plain(name: str) -> str:
    """Return source code that tests if the variable ``name`` is a plain tensor. The code tests for ``Tensor`` before
    ``nn.Parameter``, because few arguments are parameters."""
    return f"(type({name}) is Tensor or type({name}) in PLAIN)"


def refuse_gradient(signature: Signature, tensors: Sequence[torch.Tensor | None], outputs: Outputs = ()) -> None:
    """Check that no tensor requires grad while gradients are on, and that no tensor has a tangent.

    Raises: ValueError: if a tensor requires grad or has a tangent, because the ops have no derivatives.
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
