"""Compute the grids that a kernel's host function would launch for tensors at chosen addresses. Neither memory nor a
GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ptx_emulator.adapter import compile_ptx
from ptx_emulator.host import host_launches
from torch_cute_ops.runtime.arch import ARCHS, Arch
from torch_cute_ops.runtime.argspec import Dim, TensorArg


class Placed(NamedTuple):
    """Tensor at a chosen address: address of the first byte, bytes per element, shape, and strides in elements."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.itemsize

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def placed(spec: TensorArg, address: int, dims: dict[str, int]) -> Placed:
    """Return the tensor at ``address`` that ``spec`` describes. ``dims`` contains the tensor's run-time extents and
    strides by name."""
    import cutlass

    def known(dim: int | Dim) -> int:
        return dims[dim.name] if isinstance(dim, Dim) else dim

    itemsize = getattr(cutlass, spec.dtype).width // 8
    return Placed(address, itemsize, tuple(map(known, spec.shape)), tuple(map(known, spec.stride)))


SEPARATE = 1 << 48
"""Distance in bytes between tensors that must not overlap."""


def call_apart(kernel: Any, dims: dict[str, int], numbers: Mapping[str, float]) -> Any:
    """Return arguments for a kernel in which no tensors overlap."""
    specs = kernel.arguments()
    given: dict[str, Placed | float | None] = {}
    for i, (name, spec) in enumerate(zip(specs._fields, specs, strict=True)):
        is_tensor = isinstance(spec, TensorArg)
        given[name] = placed(spec, (i + 1) * SEPARATE, dims) if is_tensor else None if spec is None else numbers[name]
    return type(specs)(**given)


def grids(kernel: Any, arch: Arch, *arguments: Placed | float | None) -> list[tuple[int, int, int]]:
    """Return the grid of each launch of a call. Pass the arguments of the call in the order of
    ``kernel.arguments()``."""
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


# GEMM kernels

DIMS = {
    **{"m": 24, "n": 136, "k": 512, "k_bytes": 256, "blocks": 32},
    **{"a_bytes": 256, "a_scale_rows": 24, "a_blocks": 32, "scale_rows": 136, "workspace_bytes": 4096},
    **{
        "tile_rows": 2,
        "tile_columns": 8,
        "tile_pitch": 4096,
        "a_tile_rows": 1,
        "a_tile_columns": 8,
        "a_tile_pitch": 4096,
    },
    **{"b_tile_rows": 2, "b_tile_columns": 8, "b_tile_pitch": 4096},
    **{"experts": 2, "alpha_stride": 2, "alpha_column_stride": 1},
    **{"rows": 12, "offsets": 3, "rows_of_expert": 6144, "out_of_expert": 1632, "a_scale_pitch": 24},
    **{"a_scale_of_expert": 12, "all_rows": 24, "a_scale_stride": 1},
    **{
        "b_of_expert": 136 * 512,
        "b_scale_rows": 2,
        "b_scale_of_expert": 64,
        "b_scale_pitch": 136,
        "slabs": 3,
        "b_scale_slab": 136 * 16,
    },
    **{"b_blocks": 32, "note_words": 64, "prefetch_rows": 3, "prefetch_bytes": 64},
}
"""Extents and strides of a small GEMM, dense or with two experts, keyed by their names in the kernels' arguments."""
NUMBERS = {"num_ctas": 3, "has_partial_sums": 1, "max_ctas": 8}


def gemm_call(kernel: Any, **changes: int) -> Any:
    """Return arguments for a GEMM kernel in which no tensors overlap. ``changes`` replaces extents and numbers."""
    return call_apart(kernel, DIMS | changes, NUMBERS | changes)


def check_ctas(case: Any, ctas: int, **changes: int) -> None:
    """Check the number of CTAs that a case's kernel launches. ``changes`` are passed to ``gemm_call``."""
    assert grids(case.kernel, ARCHS[case.arch], *gemm_call(case.kernel, **changes)) == [(ctas, 1, 1)]


def check_nothing_is_launched_on_overlap(kernel: Any, arch: Arch, **changes: int) -> None:
    """Check that a kernel launches nothing if the result overlaps another tensor by one byte at either end, or if the
    workspace starts at another tensor's address. Adjacent tensors must not count as overlapping."""
    call = gemm_call(kernel, **changes)
    usual = grids(kernel, arch, *call)
    assert all(0 not in grid for grid in usual)
    others = {name: other for name, other in call._asdict().items() if isinstance(other, Placed) and name != "prefetch"}
    out = others.pop("out")
    for name, other in others.items():
        for address, overlaps in (
            (other.end - 1, True),
            (other.end, False),
            (other.address - out.nbytes + 1, True),
            (other.address - out.nbytes, False),
        ):
            launched = grids(kernel, arch, *call._replace(out=out._replace(address=address)))
            assert (0 in launched[0]) is overlaps, (name, address - other.address)
            # a launch without CTAs is an error, after which nothing else is launched
            assert launched == (launched[:1] if overlaps else usual)
    workspace = others.pop("workspace", None)
    if workspace is not None:
        for name, other in [*others.items(), ("out", out)]:
            moved = call._replace(workspace=workspace._replace(address=other.address))
            assert 0 in grids(kernel, arch, *moved)[0], name
