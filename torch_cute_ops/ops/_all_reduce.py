"""Call path of ops that sum rows over the ranks of a process group, and then normalise and possibly quantise the
sums."""

from typing import Any, ClassVar, NamedTuple

import torch

from torch_cute_ops.formats.gates import Gate
from torch_cute_ops.ops._call import Launcher
from torch_cute_ops.ops._properties import Property, size
from torch_cute_ops.ops._row_quant import RowCall, RowLauncher, RowQuant
from torch_cute_ops.runtime import groups, settings
from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.compiler import KernelSpec

Tensor = torch.Tensor


class ReducedRowCall(NamedTuple):
    """Arguments of an op that sums rows over ranks: the fields of ``RowCall``, and the name of the group."""

    input: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    factor: Tensor | None = None
    eps: float = 0.0
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    swiglu_limit: float | None = None
    block_size: int = 0
    scale_format: str | None = None
    granularity: str | None = None
    scale_layout: str | None = "128x4"
    interleaved: bool = False
    weight_plus_one: bool = False
    gate: Gate = "silu"
    bias: Tensor | None = None
    subtract_mean: bool = False
    group: str = ""

    @property
    def swiglu(self) -> tuple[float, float, float | None]:
        """Parameters of SwiGLU: alpha, beta and limit."""
        return self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit


class ReducedRowLauncher(RowLauncher):
    """Launcher of the kernel ``all_reduce_rows``. One launch processes the rows that fit in the group's shared memory.

    Attributes:
        group: name of the process group.
    """

    group: str

    def __init__(self, kernel: KernelSpec, function: Any, device: torch.device, sms: int) -> None:
        super().__init__(kernel, self._launch_parts, device, sms)
        self.compiled = function

    def run(self, call: Any, out: Any) -> Any:
        if out is not None or self.is_padded or not 0.0 <= call.eps < float("inf"):
            return None
        rows, _ = call.input.shape  # raises unless ``input`` has two dimensions
        if not rows:
            return None
        memory = groups.shared_memory(self.group, self.device.index)
        # With several launches, an output must not overlap the input of a later launch. Only the checked path checks
        # this.
        if rows > self._most_rows(memory):
            return None
        outputs = self.new_outputs(rows, call.input.dtype)
        y, scale, norm = (None, None, outputs) if not self.has_scale else (*outputs, None)
        factor = None if call.factor is None else call.factor.reshape(1)
        memory.enter()
        given = call.input, call.residual, call.weight, factor, y, scale, norm
        self.compiled(*given, call.eps, self.max_ctas, *memory.arguments)
        return outputs

    def _launch_parts(
        self,
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: None,
        factor: Tensor | None,
        y: Tensor | None,
        scale: Tensor | None,
        linear: None,
        norm: Tensor | None,
        row_scale: None,
        offsets: None,
        counts: None,
        eps: float,
        *rest: Any,
    ) -> None:
        """Launch the kernel with the arguments of ``row_quant``, several times if the rows do not fit into the memory
        that the GPUs share."""
        memory = groups.shared_memory(self.group, self.device.index)
        memory.enter()
        rows, max_ctas = input.shape[0], rest[-1]
        most = self._most_rows(memory)
        if most == 0:
            raise ValueError(
                f"{self.tile_rows} rows of {self.width} elements do not fit into the {memory.slot_bytes} bytes that a "
                "GPU can send to another GPU in one launch"
            )
        if rows <= most:
            self.compiled(input, residual, weight, factor, y, scale, norm, eps, max_ctas, *memory.arguments)
            return
        # Allocate everything before the first launch: after an error between two launches, this rank would have
        # launched fewer kernels than the other ranks.
        parts, copies = [slice(first, min(first + most, rows)) for first in range(0, rows, most)], []
        for part in parts:
            own = scale
            if scale is not None and self.has_scale_rows:
                own = scale[part.start // self.tile_rows : -(-part.stop // self.tile_rows)]
            elif scale is not None and self.is_column:
                count = part.stop - part.start
                own = scale.new_empty_strided((count, self.scale_width), (1, count))
            copies.append(own)
        for part, own in zip(parts, copies, strict=True):
            self.compiled(
                input[part],
                residual[part],
                weight,
                factor,
                None if y is None else y[part],
                own,
                None if norm is None else norm[part],
                eps,
                max_ctas,
                *memory.arguments,
            )
        if self.is_column and scale is not None:
            for part, own in zip(parts, copies, strict=True):
                assert own is not None
                scale[part].copy_(own)

    def _most_rows(self, memory: groups.SharedMemory) -> int:
        """Return the largest number of rows of one launch, a multiple of the rows of a scale tile."""
        return memory.slot_bytes // self.config.row_bytes // self.tile_rows * self.tile_rows


def launcher_of(kernel: KernelSpec, *given: Any) -> RowLauncher:
    """Return the launcher of a kernel, which is ``row_quant`` if the group has a single rank."""
    return (ReducedRowLauncher if hasattr(kernel.config, "ranks") else RowLauncher)(kernel, *given)


class AllReduceRowQuant(RowQuant):
    """Call path of an op that sums rows over ranks, adds the sums to a residual, normalises and may quantise them."""

    call_type: ClassVar[Any] = ReducedRowCall

    def __init__(self, **fixed: Any) -> None:
        super().__init__("add", normalises=True, **fixed)

    launcher_type: ClassVar[Any] = staticmethod(launcher_of)
    run: Any = RowQuant.run_by_launcher

    def key(self, call: Any, device: int) -> tuple[Any, ...]:
        # The name may belong to a new group, with a different number of ranks than an earlier group of this name.
        return (*super().key(call, device), call.group, groups.ranks_of(call.group))

    def check(self, call: Any) -> None:
        try:
            groups.ranks_of(call.group)
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None
        super().check(call)

    def kernel(self, call: Any, arch: Arch) -> KernelSpec:
        ranks = groups.ranks_of(call.group)
        if ranks == 1:
            return super().kernel(call, arch)
        from torch_cute_ops.kernels import all_reduce_rows

        try:
            config = all_reduce_rows.plan(self._problem(call), arch, ranks, pdl=settings.PDL)
        except ValueError as error:
            raise ValueError(f"cute::{self.op}: {error}") from None
        return KernelSpec(all_reduce_rows.KERNEL, config)

    def make_launcher(self, call: Any, device: int) -> Launcher[RowCall]:
        made = super().make_launcher(call, device)
        if isinstance(made, ReducedRowLauncher):
            made.group = call.group
        return made

    def declare(self) -> dict[str, Property]:
        named = self.arguments_as_properties("group")["group"]
        group = Property(str, "", False, (), named.of)
        return super().declare() | {"group": group, "ranks": size(lambda call: groups.ranks_of(call.group), 1)}

    def make_example(self, given: Any, device: torch.device) -> dict[str, Any]:
        return super().make_example(given, device) | {"group": given.group or groups.name_without_group(given.ranks)}
