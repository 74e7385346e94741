"""What the products of FP8 matrices under block scales share: checks, and the way to a kernel."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from torch_cute_ops.formats.experts import MAX_EXPERTS
from torch_cute_ops.ops import _checks
from torch_cute_ops.ops._fp8_tactics import Shape, Tactic, choose
from torch_cute_ops.ops._kernels import aligned, are_int32, keep_usual
from torch_cute_ops.ops._spec import Call, OpSpec, cuda_device
from torch_cute_ops.runtime.allocate import allocator
from torch_cute_ops.runtime.arch import Arch, arch_of_device, sm_count
from torch_cute_ops.runtime.calls import launch_error
from torch_cute_ops.runtime.capture import forbid_in_capture
from torch_cute_ops.runtime.compiler import Wanted, compile_kernel
from torch_cute_ops.runtime.dispatch import mark_written

if TYPE_CHECKING:
    from torch_cute_ops.kernels.common.expert_layout import ExpertLayout

Tensor = torch.Tensor

BLOCK: Final = 128
COLUMNS: Final = 8
"""N is a multiple of this."""
SMS: Final = 132
"""Of the GPU that kernels are compiled ahead for."""


class Given(NamedTuple):
    """The arguments of a call of either op."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    offsets: Tensor | None
    counts: Tensor | None
    out_dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that are tensors, or could be."""
        return self[:6]


NAMES: Final = ("a", "b", "a_scale", "b_scale", "offsets", "counts")


class Usual(NamedTuple):
    """What computes calls of the same shapes.

    Attributes:
        device: of the tensors.
        function: the compiled kernel.
        workers: CTAs of a launch.
        size, strides: of the result.
        bytes_: of each of ``Given.tensors``.
    """

    device: torch.device
    function: Callable[..., None]
    workers: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    bytes_: tuple[int, ...]


class FP8Product:
    """One product: ``a`` times ``b`` in FP8 with fp32 scales, or one for each expert.

    Args:
        op: the op's name.
        arguments: the schema's arguments.
        arrange: a function that takes what it shall call, and the op's arguments, and calls it with ``Given``.
    """

    def __init__(self, op: str, arguments: str, arrange: Callable[..., Any]) -> None:
        self.op = op
        self.arguments = arguments
        self.arrange = arrange
        self.is_grouped = "offsets" in arguments
        # By facts of a call, the number of rows among them.
        self._usual: dict[tuple[Any, ...], Usual] = {}
        # By kernel and device. What has been run is loaded, and can be captured.
        self._ran: dict[tuple[Wanted, int], Callable[..., None]] = {}

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
        masked: bool = False,
        counts: bool | None = None,
        device: torch.device | int | str | None = None,
        **choices: Any,
    ) -> Call:
        """A call with these static facts.

        Args:
            n, k: columns of the result, and elements of a sum.
            m: rows of ``a``; of the masked layout, those of an expert.
            experts: how many there are, of the op that has experts.
            masked: whether the layout is masked, of that op.
            counts: whether calls in the contiguous layout will pass counts, of that op; ``None`` means that they will.
            device: of the tensors; ``None`` means the current CUDA device.
            choices: ``out_dtype``.

        Raises:
            TypeError: for a fact that the op does not have, or that it lacks.
        """
        if self.is_grouped != (experts is not None):
            lacks = "needs the fact experts: how many there are" if self.is_grouped else "has no fact experts"
            raise TypeError(f"cute::{self.op} {lacks}")
        if not self.is_grouped and (masked or counts is not None):
            raise TypeError(f"cute::{self.op} has no fact {'masked' if masked else 'counts'}")
        target = cuda_device(device)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target)

        def codes(*shape: int) -> Tensor:
            return zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

        blocks, bands = k // BLOCK, -(-n // BLOCK)
        if experts is None:
            return (codes(m, k), codes(n, k).t(), zeros(blocks, m), zeros(bands, blocks)), choices
        weight = codes(experts, n, k), zeros(experts, bands, blocks)
        ints = zeros(experts + 1, dtype=torch.int32), zeros(experts, dtype=torch.int32)
        if masked:
            return (codes(experts, m, k), weight[0], zeros(blocks, experts, m), weight[1], None, ints[1]), choices
        given = None if counts is False else ints[1]
        return (codes(m, k), weight[0], zeros(blocks, m), weight[1], ints[0], given), choices

    # The way of a call

    def check(self, given: Given) -> None:
        """Refuse arguments that the op does not take.

        Raises:
            ValueError: for a wrong shape or device, and for an input that requires grad.
            TypeError: for a wrong dtype.
        """
        op = self.op
        a, b, a_scale, b_scale, offsets, counts, out_dtype = given
        masked = self.is_grouped and offsets is None
        if masked and counts is None:
            raise ValueError(
                f"cute::{op}: offsets and counts are None; expected offsets (E + 1,) of the contiguous layout, or "
                "counts (E,) of the masked one"
            )
        for name, tensor in (("a", a), ("b", b)):
            _checks.check_dtype(op, name, tensor, (torch.float8_e4m3fn,))
        for name, tensor in (("a_scale", a_scale), ("b_scale", b_scale)):
            _checks.check_dtype(op, name, tensor, (torch.float32,))
        if self.is_grouped:
            if b.dim() != 3:
                raise ValueError(f"cute::{op}: b has shape {tuple(b.shape)}; expected (E, N, K)")
            experts, n, k = b.shape
            if not 1 <= experts <= MAX_EXPERTS:
                raise ValueError(f"cute::{op}: b is of {experts} experts; expected 1 to {MAX_EXPERTS}")
        else:
            _checks.check_matrix(op, "b", b, "(K, N)")
            experts, (k, n) = 1, b.shape
        if k == 0 or k % BLOCK:
            raise ValueError(f"cute::{op}: b has K = {k}; expected a positive multiple of {BLOCK}")
        if n % COLUMNS:
            raise ValueError(f"cute::{op}: b has N = {n}; expected a multiple of {COLUMNS}")
        if masked:
            if a.dim() != 3:
                raise ValueError(
                    f"cute::{op}: a has shape {tuple(a.shape)}; expected (E, rows of an expert, K), since offsets is "
                    "None"
                )
            _checks.check_shape(op, "a", a, (experts, a.shape[1], k), "the E and K of b")
        else:
            _checks.check_matrix(op, "a", a, "(R, K)" if self.is_grouped else "(M, K)")
            _checks.check_shape(op, "a", a, (a.shape[0], k), "the K of b")
        blocks = k // BLOCK
        scales = (-(-n // BLOCK), blocks)
        _checks.check_shape(op, "a_scale", a_scale, (blocks, *a.shape[:-1]), "a scale for 128 elements of a row of a")
        wanted = (experts, *scales) if self.is_grouped else scales
        _checks.check_shape(op, "b_scale", b_scale, wanted, "a scale for 128 rows of the weight and 128 elements of k")
        if offsets is not None:
            _checks.check_dtype(op, "offsets", offsets, (torch.int32,))
            _checks.check_shape(op, "offsets", offsets, (experts + 1,), "where experts begin, and where the last ends")
        if counts is not None:
            _checks.check_dtype(op, "counts", counts, (torch.int32,))
            _checks.check_shape(op, "counts", counts, (experts,), "one for each expert of b")
        if out_dtype not in _checks.INPUT_DTYPES:
            raise TypeError(f"cute::{op}: out_dtype is {out_dtype}; expected bfloat16, float16 or float32")
        for name, other in zip(NAMES[1:], given.tensors[1:], strict=True):
            if other is not None:
                _checks.check_device(op, name, other, "a", a.device)
        _checks.check_no_grad(op, a, b, a_scale, b_scale)

    def run(self, given: Given, out: Tensor | None = None) -> Tensor:
        """Compute on CUDA tensors, into ``out`` or into a new tensor.

        What follows is the way of nearly every call, written out for speed; whatever it does not expect it leaves to
        ``_run_checked``. Strides, alignment and devices, and the shape of ``out``, are for the compiled function to
        refuse.
        """
        a, b, a_scale, b_scale, offsets, counts, out_dtype = given
        facts = (
            a.shape,
            b.shape,
            a_scale.shape,
            b_scale.shape,
            None if offsets is None else offsets.shape,
            None if counts is None else counts.shape,
            out_dtype,
            a.get_device(),
        )
        usual = self._usual.get(facts)
        if (
            usual is None
            or _checks.asks_for_grad(a, b, a_scale, b_scale)
            # That one expert's rows follow another's the kernel takes on trust.
            or (self.is_grouped and not (a.is_contiguous() and are_int32(offsets, counts)))
        ):
            return self._run_checked(facts, given, out)
        if out is None:
            result = allocator(usual.device)(usual.size, usual.strides, out_dtype)
        else:
            begin = out.data_ptr()
            end = begin + out.nbytes
            for tensor, size in zip(given.tensors, usual.bytes_, strict=True):
                if tensor is not None and begin < tensor.data_ptr() + size and tensor.data_ptr() < end:
                    return self._run_checked(facts, given, out)
            if (
                out.requires_grad
                or out.dtype is not out_dtype
                or out.shape != usual.size
                or (self.is_grouped and not out.is_contiguous())
                # These may have strides of their own, and reach further than those of calls before.
                or not _checks.are_apart(out, a_scale)
            ):
                return self._run_checked(facts, given, out)
            result = out
        try:
            usual.function(a, b, a_scale, b_scale, offsets, counts, result, usual.workers)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: from DLPack, for tensors without data
            return self._run_checked(facts, given, out)
        except Exception as error:  # from CUDA
            raise launch_error(self.op, error, *given) from error
        if out is not None:
            mark_written((out,))
        return result

    def _run_checked(self, facts: tuple[Any, ...], given: Given, out: Tensor | None) -> Tensor:
        """``run`` with every check, for the first call, for unusual tensors, and for those that were refused."""
        self.check(given)
        a = given.a
        size = (*a.shape[:-1], self._columns(given))
        if out is None:
            result = torch.empty(size, dtype=given.out_dtype, device=a.device)
        else:
            result = out
            _checks.check_output(self.op, "out", out, size, given.out_dtype, a.device)
            _checks.check_aligned(self.op, "out", out)
            for name, tensor in zip(NAMES, given.tensors, strict=True):
                if tensor is not None:
                    _checks.check_apart(self.op, "out", out, name, tensor)
            mark_written((out,))
        if not result.numel():
            return result
        device = a.get_device()
        tactic = self._choose(given, arch_of_device(device), sm_count(device))
        kernel = tactic.wanted(self._rows(given), given.out_dtype, arch_of_device(device))
        function = self._ran.get((kernel, device))
        if function is None:
            forbid_in_capture(self.op, self._described(given, tactic), self._warmup_call(given))
            function = compile_kernel(kernel, arch_of_device(device))
        workers = tactic.workers(self._shape(given), sm_count(device))
        operands = self._operands(given)
        try:
            function(*operands, result, workers)
        except Exception as error:  # from CUDA
            raise launch_error(self.op, error, *given) from error
        self._ran[kernel, device] = function
        if all(tensor is operand for tensor, operand in zip(given.tensors, operands, strict=True)):
            sizes = tuple(0 if tensor is None else _checks.reach(tensor) for tensor in given.tensors)
            keep_usual(self._usual, facts, Usual(a.device, function, workers, size, result.stride(), sizes))
        return result

    def _operands(self, given: Given) -> tuple[Tensor | None, ...]:
        """The tensors as kernels take them: themselves, or copies."""
        a, b, a_scale, b_scale, offsets, counts, _ = given
        if self.is_grouped:
            b = aligned(b)
        elif not b.t().is_contiguous() or b.data_ptr() % 16:
            b = aligned(b.t()).t()
        rows_side_by_side = a_scale.stride(-1) == 1 and (
            a_scale.dim() == 2 or a_scale.stride(1) == a_scale.shape[2] or a_scale.shape[1] == 1
        )
        return (
            aligned(a),
            b,
            a_scale if rows_side_by_side and a_scale.stride(0) >= 0 else a_scale.contiguous(),
            b_scale.contiguous(),
            None if offsets is None else offsets.contiguous(),
            None if counts is None else counts.contiguous(),
        )

    # What decides about a kernel

    def _columns(self, given: Given) -> int:
        return given.b.shape[1]

    def _rows(self, given: Given) -> "ExpertLayout":
        from torch_cute_ops.kernels.common.expert_layout import ExpertLayout

        return ExpertLayout(given.offsets is not None, given.counts is not None)

    def _shape(self, given: Given) -> Shape:
        if self._rows(given).is_masked:
            experts, rows, _ = given.a.shape
            return Shape(experts * rows, experts, self._columns(given), given.a.shape[-1], rows)
        experts = given.b.shape[0] if self.is_grouped else 1
        return Shape(given.a.shape[0], experts, self._columns(given), given.a.shape[-1])

    def _choose(self, given: Given, arch: Arch, sms: int) -> Tactic:
        return choose(self._shape(given), arch, sms)

    def kernels(self, arch: Arch, *args: Any, **kwargs: Any) -> tuple[Wanted, ...]:
        """The kernel that a call launches on a GPU of ``arch``; the tensors may be on meta."""
        return self.arrange(partial(self._kernels, arch), *args, **kwargs)

    def _kernels(self, arch: Arch, given: Given) -> tuple[Wanted, ...]:
        self.check(given)
        if not given.a.shape[:-1].numel() or not self._columns(given):
            return ()
        return (self._choose(given, arch, SMS).wanted(self._rows(given), given.out_dtype, arch),)

    def _described(self, given: Given, tactic: Tactic) -> str:
        return f"{self._shape(given)}, out_dtype={given.out_dtype}, {tactic}"

    def _warmup_call(self, given: Given) -> str:
        """The call of ``torch_cute_ops.warmup`` that makes a call like this one ready."""
        shape = self._shape(given)
        shown: dict[str, Any] = {"n": shape.n, "k": shape.k, "m": given.a.shape[-2]}
        if self.is_grouped:
            shown["experts"] = shape.experts
            shown |= {"masked": True} if given.offsets is None else {"counts": given.counts is not None}
        shown |= {"out_dtype": given.out_dtype, "device": given.a.get_device()}
        return f"torch_cute_ops.warmup({self.op!r}, {', '.join(f'{name}={value!r}' for name, value in shown.items())})"
