"""What the FP4 products share: checks, the choice of a backend, and the way to it."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from torch_cute_ops.fake.fp4_quantize import fp4_shapes
from torch_cute_ops.formats import FP4Format, ScaleLayout
from torch_cute_ops.formats.scale_layout import weight_layout
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._kernels import aligned, keep_usual
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.ops.fp4_dequantize import scale_dtypes
from torch_cute_ops.runtime import tuning
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import Wanted
from torch_cute_ops.runtime.dispatch import mark_written

if TYPE_CHECKING:
    from torch_cute_ops.mm_backends import Choice, Launcher, Operands, Product, Target

    Chosen = tuple[Product, Choice, Target]

AUTO: Final = "auto"
A_DTYPES = (torch.bfloat16, torch.float16)
"""Of activations that are not in FP4."""
EXPERT_MULTIPLE = 64
"""Elements of a row of ``a`` that an expert has are a multiple of this: whole bytes, blocks, and steps of a kernel."""

Tensor = torch.Tensor
Choices = tuple[int, str | None, str]
"""``block_size``, ``scale_format``, ``scale_layout``."""


class Given(NamedTuple):
    """The arguments of a call of any of the ops: ``a_scale`` is ``None`` where ``a`` has no scales. ``b`` is (K/2, N),
    or of an op with experts ``w`` (N, K/2), whose rows are that view's columns."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor
    alpha: Tensor | None
    out_dtype: torch.dtype
    choices: Choices
    backend: str


class FP4Product:
    """One product: ``a`` (M, K) in FP4 or in 16 bits, times ``b`` (K, N) in FP4; or a product for each of E experts,
    which have ranges of K, added up as ``alpha`` (M, E) tells.

    Args:
        op: the op's name.
        arguments: the schema's arguments.
        arrange: a function that takes what it shall call, and the op's arguments, and calls it with ``Given``.
    """

    def __init__(self, op: str, arguments: str, arrange: Callable[..., Any]) -> None:
        self.op = op
        self.arguments = arguments
        self.arrange = arrange
        self.has_a_scale = "Tensor a_scale" in arguments
        self.has_experts = "Tensor w," in arguments
        self._weight_name = "w" if self.has_experts else "b"
        # By facts of a call, M among them: its device, columns, sizes of its tensors in bytes, what computes it.
        self._usual: dict[tuple[Any, ...], tuple[torch.device, int, tuple[int, ...], Launcher]] = {}
        # By what decides the choice.
        self._launchers: dict[tuple[Any, ...], tuple[Launcher, Chosen]] = {}
        # What has been run is compiled and loaded, and can be captured.
        self._ran: set[Chosen] = set()

    def spec(self, function: Callable[..., Any]) -> OpSpec:
        """The op's place in the registry."""
        return OpSpec(
            name=self.op,
            arguments=self.arguments,
            outputs=("out",),
            check=partial(self.arrange, self.check),
            cuda=partial(self.arrange, self.run),
            cuda_out=self.cuda_out,
            function=function,
            example=self.example,
            kernels=self.kernels,
            backends=self.backends,
        )

    def cuda_out(self, *args: Any, out: Tensor, **kwargs: Any) -> None:
        """The CUDA entry of the ``.out`` overload."""
        self.arrange(partial(self.run, out=out), *args, **kwargs)

    def example(
        self,
        *,
        n: int,
        k: int,
        m: int = 1,
        experts: int | None = None,
        dtype: torch.dtype | None = None,
        alpha: bool | None = None,
        device: torch.device | int | str | None = None,
        **choices: Any,
    ) -> Call:
        """A call with these static facts.

        Args:
            n, k: columns of the result, and elements of a sum: of all experts together.
            m: rows; calls with the same ``mm_backends.bucket(m)`` are made ready too.
            experts: how many there are, of an op that has experts.
            dtype: of ``a``, where that is not in FP4; ``None`` means bfloat16.
            alpha: whether calls will pass one, of an op that has no experts; ``None`` means that they will not.
            device: of the tensors; ``None`` means the current CUDA device.
            choices: the op's arguments from ``out_dtype`` on.

        Raises:
            TypeError: for a fact that the op does not have, or that it lacks.
        """
        if self.has_a_scale and dtype is not None:
            raise TypeError(f"cute::{self.op} has no fact dtype: a is in FP4")
        if self.has_experts and alpha is not None:
            raise TypeError(f"cute::{self.op} has no fact alpha: every call has one")
        if self.has_experts != (experts is not None):
            lacks = "needs the fact experts: how many there are" if self.has_experts else "has no fact experts"
            raise TypeError(f"cute::{self.op} {lacks}")
        target = cuda_device(device)
        named = {"block_size": 16, "scale_format": None, "scale_layout": "128x4"} | choices
        fmt, layout, b_layout = self._formats((named["block_size"], named["scale_format"], named["scale_layout"]))
        weight, b_scale = _zeros(n, k, fmt, b_layout, target)
        b = weight if self.has_experts else weight.t()
        shape = (1,) if experts is None else (m, experts)
        factor = torch.ones(shape, dtype=torch.float32, device=target) if alpha or self.has_experts else None
        if not self.has_a_scale:
            return (torch.zeros(m, k, dtype=dtype or torch.bfloat16, device=target), b, b_scale, factor), choices
        a, a_scale = _zeros(m, k, fmt, layout, target)
        return (a, b, a_scale, b_scale, factor), choices

    # The way of a call

    def check(self, given: Given) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            ValueError: for a wrong shape, device, format or layout, an unknown backend, or one that cannot run on a
                CPU where the tensors are there; and for an input that requires grad.
            TypeError: for a wrong dtype.
        """
        op = self.op
        a, b, a_scale, b_scale, alpha, out_dtype, choices, backend = given
        fmt, layout, b_layout = self._formats(choices)
        if not self.has_a_scale and layout != b_layout:
            raise ValueError(f"cute::{op}: scale_layout={layout.name!r} is for activations; use '128x4' or 'linear'")
        b_name, a_columns = self._weight_name, "E·I" if self.has_experts else "K"
        _checks.check_matrix(op, b_name, b, "(N, E·I/2)" if self.has_experts else "(K/2, N)")
        weight = self._weight(given)
        _checks.check_packed(op, "w" if self.has_experts else "b.t()", weight, fmt)
        n, k = weight.shape[0], weight.shape[1] * 2
        line = "a row of w" if self.has_experts else "a column of b"
        _checks.check_matrix(op, "a", a, f"(M, {a_columns}/2)" if self.has_a_scale else f"(M, {a_columns})")
        if a_scale is None:
            _checks.check_dtype(op, "a", a, A_DTYPES)
            _checks.check_shape(op, "a", a, (a.shape[0], k), f"the {k} elements that {line} has")
        else:
            _checks.check_packed(op, "a", a, fmt)
            _checks.check_shape(op, "a", a, (a.shape[0], k // 2), f"the {k // 2} bytes that {line} has")
            self._check_scale("a_scale", a_scale, a.shape[0], k, fmt, layout)
            _checks.check_device(op, "a_scale", a_scale, "a", a.device)
        _checks.check_device(op, b_name, b, "a", a.device)
        self._check_scale(f"{b_name}_scale", b_scale, n, k, fmt, b_layout)
        _checks.check_device(op, f"{b_name}_scale", b_scale, "a", a.device)
        if self.has_experts:
            self._check_expert_factors(alpha, a, k)
        elif alpha is not None:
            _checks.check_scalar(op, "alpha", alpha, "a", a.device)
        if out_dtype not in _checks.INPUT_DTYPES:
            raise TypeError(f"cute::{op}: out_dtype is {out_dtype}; expected bfloat16, float16 or float32")
        if backend != AUTO and (backend not in _mm().BACKENDS or a.device.type == "cpu"):
            self._choose(self._product(given), 1, _mm().target_of(torch.device("cpu")), backend)
        _checks.check_no_grad(op, a, b, a_scale, b_scale, alpha)

    def _check_expert_factors(self, alpha: Tensor | None, a: Tensor, k: int) -> None:
        """``alpha`` is (M, E) float32, for E experts that have equal parts of the ``k`` elements."""
        if alpha is None:
            raise TypeError(f"cute::{self.op}: alpha is None; expected a tensor (M, E)")
        _checks.check_dtype(self.op, "alpha", alpha, (torch.float32,))
        _checks.check_matrix(self.op, "alpha", alpha, "(M, E)")
        m, experts = alpha.shape
        _checks.check_shape(self.op, "alpha", alpha, (a.shape[0], experts), "a row for each of a")
        if experts == 0 or k % (experts * EXPERT_MULTIPLE):
            raise ValueError(
                f"cute::{self.op}: alpha has shape {(m, experts)}, for {experts} experts, and a row of w has {k} "
                f"elements; expected the same number for each expert, a multiple of {EXPERT_MULTIPLE}"
            )
        _checks.check_device(self.op, "alpha", alpha, "a", a.device)

    def _check_scale(self, name: str, scale: Tensor, rows: int, k: int, fmt: FP4Format, layout: ScaleLayout) -> None:
        _checks.check_dtype(self.op, name, scale, scale_dtypes(fmt))
        shape = fp4_shapes((rows, k), fmt, layout)[1]
        _checks.check_shape(self.op, name, scale, shape, f"the {layout.name} scales of {name[0]}")

    def run(self, given: Given, out: Tensor | None = None) -> Tensor:
        """Compute on CUDA tensors, into ``out`` or into a new tensor.

        What follows is the way of nearly every call, written out for speed; whatever it does not expect it leaves to
        ``_run_checked``. Strides, alignment and devices, and the shape of ``out``, are for the compiled function to
        refuse.
        """
        a, b, a_scale, b_scale, alpha, out_dtype, choices, backend = given
        facts = (
            a.shape,
            a.dtype,
            b.shape,
            b.dtype,
            b_scale.shape,
            b_scale.dtype,
            None if a_scale is None else (a_scale.shape, a_scale.dtype),
            None if alpha is None else (alpha.shape, alpha.dtype),
            out_dtype,
            choices,
            backend,
            a.get_device(),
            tuning.generation,
            tuning.is_on(),
        )
        usual = self._usual.get(facts)
        if usual is None or _checks.asks_for_grad(a, b, a_scale, b_scale, alpha):
            return self._run_checked(facts, given, out)
        device, n, sizes, launch = usual
        if out is None:
            result = allocator(device)((a.shape[0], n), (n, 1), out_dtype)
        else:
            begin = out.data_ptr()
            end = begin + out.nbytes
            for tensor, size in zip((a, b, a_scale, b_scale, alpha), sizes, strict=True):
                if tensor is not None and begin < tensor.data_ptr() + size and tensor.data_ptr() < end:
                    return self._run_checked(facts, given, out)
            if out.requires_grad or out.dtype is not out_dtype:
                return self._run_checked(facts, given, out)
            # Of experts it has any strides, and may reach further than its size.
            if self.has_experts and alpha is not None and not _checks.are_apart(out, alpha):
                return self._run_checked(facts, given, out)
            result = out
        try:
            launch(a, a_scale, b, b_scale, alpha, result)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
            return self._run_checked(facts, given, out)
        except Exception as error:  # from CUDA
            raise self._error(error, given) from error
        if out is not None:
            mark_written((out,))
        return result

    def _run_checked(self, facts: tuple[Any, ...], given: Given, out: Tensor | None) -> Tensor:
        """``run`` with every check, for the first call, for unusual tensors, and for those that were refused."""
        self.check(given)
        a, b, a_scale, b_scale, alpha, out_dtype, choices, backend = given
        weight = self._weight(given)
        m, n = a.shape[0], weight.shape[0]
        if out is None:
            result = torch.empty((m, n), dtype=out_dtype, device=a.device)
        else:
            result = out
            _checks.check_output(self.op, "out", out, (m, n), out_dtype, a.device)
            _checks.check_aligned(self.op, "out", out)
            for name, tensor in self._tensors(given):
                _checks.check_apart(self.op, "out", out, name, tensor)
            mark_written((out,))
        if not result.numel():
            return result
        planned = _mm().bucket(m)
        tunes = tuning.is_on() and backend == AUTO and not torch.cuda.is_current_stream_capturing()
        experts = self._experts(given)
        key = (planned, n, a.shape[1], a.dtype, alpha is not None, experts, out_dtype, choices, backend, a.device)
        prepared = self._launchers.get((key, tuning.generation, tunes))
        if prepared is None:
            prepared = self._launcher(given, planned, tunes)
            # What is tuned is so outside of the block too.
            for known in {False, tunes}:
                self._launchers[key, tuning.generation, known] = prepared
        launch, chosen = prepared
        fmt = self._formats(choices)[0]
        operands = _mm().Operands(
            a=aligned(a if a_scale is None else _seen_as(a, torch.uint8)),
            a_scale=None if a_scale is None else aligned(_seen_as(a_scale, fmt.scale_dtype)),
            b=aligned(_seen_as(weight, torch.uint8)).t(),
            b_scale=aligned(_seen_as(b_scale, fmt.scale_dtype)),
            alpha=alpha if alpha is None or self.has_experts else alpha.reshape(1),
            out=result,
        )
        try:
            launch(*operands)
        except RuntimeError as error:
            # Of torch, such as memory that ran out; or of another op that the backend uses, where a launch failed.
            cause = error.__cause__
            if not isinstance(cause, Exception):
                raise
            raise self._error(cause, given) from cause
        except Exception as error:  # from CUDA
            raise self._error(error, given) from error
        self._ran.add(chosen)
        product, choice, _ = chosen
        # In a capture nothing is tuned: a call after it may have to be.
        may_tune = tuning.is_on() and backend == AUTO and not tunes
        if choice.backend.refuses(product) and not may_tune and self._is_usual(given, operands):
            tensors = (a, b, a_scale, b_scale, alpha)
            sizes = tuple(0 if tensor is None else tensor.nbytes for tensor in tensors)
            usual = a.device, n, sizes, _of_rows(launch) if self.has_experts else launch
            keep_usual(self._usual, facts, usual)
        return result

    def _is_usual(self, given: Given, operands: "Operands") -> bool:
        """Whether the tensors of the call went to the backend as they are."""
        pairs = zip(
            (given.a, given.a_scale, given.b_scale), (operands.a, operands.a_scale, operands.b_scale), strict=True
        )
        return (
            all(tensor is operand for tensor, operand in pairs)
            and given.b.data_ptr() == operands.b.data_ptr()
            and given.b.dtype == operands.b.dtype
            and (given.alpha is None or self.has_experts or given.alpha.dim() == 1)
        )

    def _weight(self, given: Given) -> Tensor:
        """The weight by rows, (N, K/2)."""
        return given.b if self.has_experts else given.b.t()

    def _experts(self, given: Given) -> int | None:
        return given.alpha.shape[1] if self.has_experts and given.alpha is not None else None

    def _tensors(self, given: Given) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a call by the op's names of them."""
        a, b, a_scale, b_scale, alpha, *_ = given
        names = ("a", self._weight_name, "a_scale", f"{self._weight_name}_scale", "alpha")
        for name, tensor in zip(names, (a, b, a_scale, b_scale, alpha), strict=True):
            if tensor is not None:
                yield name, tensor

    def _launcher(self, given: Given, planned: int, tunes: bool) -> tuple["Launcher", "Chosen"]:
        """What computes calls like this one, with at most ``planned`` rows; compiled."""
        product = self._product(given)
        target = _mm().target_of(given.a.device)
        if tunes:
            _tune(self.op, product, planned, target)
        choice = self._choose(product, planned, target, given.backend)
        chosen = product, choice, target
        if chosen not in self._ran:
            call = self._warmup_call(product, given.a.shape[0], given.choices, given.backend, given.a.device)
            forbid_in_capture(self.op, str(product), call)
        return choice.backend.launcher(product, choice.tactic, target), chosen

    def _error(self, error: Exception, given: Given) -> Exception:
        """What a failed launch is reported as."""
        a, b, a_scale, b_scale, alpha, out_dtype, choices, _ = given
        return launch_error(self.op, error, a, b, a_scale, b_scale, alpha, out_dtype, *choices)

    def _warmup_call(self, product: "Product", m: int, choices: Choices, backend: str, device: torch.device) -> str:
        """The call of ``torch_cute_ops.warmup`` that makes a call like this one ready."""
        shown: dict[str, Any] = {"n": product.n, "k": product.k, "m": m}
        if self.has_experts:
            shown["experts"] = product.experts
        if not self.has_a_scale:
            shown["dtype"] = product.a_dtype
        if not self.has_experts:
            shown["alpha"] = product.has_alpha
        shown["out_dtype"] = product.out_dtype
        shown |= zip(("block_size", "scale_format", "scale_layout"), choices, strict=True)
        shown |= {"backend": backend, "device": device.index}
        return f"torch_cute_ops.warmup({self.op!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def kernels(self, arch: Arch, *args: Any, **kwargs: Any) -> tuple[Wanted, ...]:
        """Our kernels that a call launches on a GPU of ``arch``, whichever of them; the tensors may be on meta."""
        return self.arrange(partial(self._kernels, arch), *args, **kwargs)

    def _kernels(self, arch: Arch, given: Given) -> tuple[Wanted, ...]:
        self.check(given)
        product = self._product(given)
        m = _mm().bucket(given.a.shape[0])
        chosen = (self._choose(product, m, target, given.backend) for target in _mm().usual_targets(arch))
        kernels = (kernel for choice in chosen for kernel in choice.backend.kernels(product, choice.tactic, arch))
        return tuple(dict.fromkeys(kernels))

    def backends(self, device: torch.device, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """Why each backend cannot compute a call on ``device``; ``None``: it can."""
        return self.arrange(partial(self._backends, device), *args, **kwargs)

    def _backends(self, device: torch.device, given: Given) -> dict[str, str | None]:
        self.check(given._replace(backend=AUTO))
        return _mm().reasons(self._product(given), _mm().target_of(device))

    def _formats(self, choices: Choices) -> tuple[FP4Format, ScaleLayout, ScaleLayout]:
        """The format, and the layouts of the scales of ``a`` and ``b``."""
        fmt, layout = _checks.check_fp4_format(self.op, *choices)
        return fmt, layout, weight_layout(layout)

    def _product(self, given: Given) -> "Product":
        a, _, a_scale, _, alpha, out_dtype, choices, _ = given
        fmt, layout, b_layout = self._formats(choices)
        weight = self._weight(given)
        product: Product = _mm().Product(
            n=weight.shape[0],
            k=weight.shape[1] * 2,
            fmt=fmt,
            a_dtype=a.dtype if a_scale is None else torch.uint8,
            a_layout=None if a_scale is None else layout,
            b_layout=b_layout,
            has_alpha=alpha is not None,
            out_dtype=out_dtype,
            experts=self._experts(given),
        )
        return product

    def _choose(self, product: "Product", m: int, target: "Target", backend: str) -> "Choice":
        try:
            choice: Choice = _mm().choose(product, m, target, backend)
            return choice
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None


@cache
def _mm() -> ModuleType:
    """The backends, which a process that multiplies nothing does not import."""
    from torch_cute_ops import mm_backends

    return mm_backends


def _tune(op: str, product: "Product", m: int, target: "Target") -> None:
    from torch_cute_ops.mm_backends import _tune

    _tune.tune(op, product, m, target)


def _of_rows(launch: "Launcher") -> "Launcher":
    """``launch`` for a weight (N, K/2)."""

    def transposed(
        a: Tensor, a_scale: Tensor | None, w: Tensor, w_scale: Tensor, alpha: Tensor | None, out: Tensor
    ) -> None:
        launch(a, a_scale, w.t(), w_scale, alpha, out)

    return transposed


def _seen_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor itself, or its bytes as ``dtype``."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _zeros(rows: int, k: int, fmt: FP4Format, layout: ScaleLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    codes, scale = fp4_shapes((rows, k), fmt, layout)
    blank = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in (codes, scale)]
    return blank[0], blank[1].view(fmt.scale_dtype)
