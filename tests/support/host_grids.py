"""The grids that a kernel's host function launches for tensors at given addresses, without memory and without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptx.launch import compile_ptx, host_launches

from torch_cute_ops.runtime.arch import Arch
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class Placed(NamedTuple):
    """A tensor that lies somewhere: address of its first byte, bytes of an element, shape and strides in elements."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to behind the last; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.itemsize

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def placed(spec: TensorArg, address: int, dims: dict[str, int]) -> Placed:
    """The tensor of a call that ``spec`` describes, with these run-time extents and strides by name."""
    import cutlass

    def known(dim: int | Dim) -> int:
        return dims[dim.name] if isinstance(dim, Dim) else dim

    itemsize = getattr(cutlass, spec.dtype).width // 8
    return Placed(address, itemsize, tuple(map(known, spec.shape)), tuple(map(known, spec.stride)))


def grids(kernel: Any, arch: Arch, *arguments: Placed | float | None) -> list[tuple[int, int, int]]:
    """The grid of each launch of a call with these arguments, in the order of ``kernel.arguments()``."""
    compiled = compile_ptx(kernel, arch)
    leaves: list[list[Any]] = []
    for spec, value in zip(kernel.arguments(), arguments, strict=True):
        assert (spec is None) == (value is None)
        if isinstance(value, Placed):
            found = zip((*spec.shape, *spec.stride), (*value.shape, *value.stride), strict=True)
            leaves.append([value.address, *(extent for dim, extent in found if isinstance(dim, Dim))])
        elif value is not None:
            leaves.append([value])
    sizes = {name: [param.size for param in program.params] for name, program in compiled.programs.items()}
    return [launch.grid for _, launch in host_launches(compiled.module, leaves, sizes)]
