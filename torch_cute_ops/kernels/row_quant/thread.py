"""State of a thread, and pointers into shared memory. The classes of the kernel pass both to each other."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_cute_ops.kernels.row_quant.experts import ExpertRows


@dataclass
class Thread:
    """Place of a thread in its group, in the CTA and in the grid, and the tensors of the call.

    A *walker* is a unit that processes whole rows in sequence: a group, or, in a cluster, the groups with the same
    index in all CTAs of the cluster.

    Attributes:
        tid, threads: index in the CTA, and number of threads of the CTA.
        lane: index in the warp.
        group, in_group: index of the group in the CTA, and index of the thread in the group.
        warp: index among the warps that share a row, rotated from group to group (``Config.first_column``).
        column: first block of the thread in the slice.
        row: index of the thread's row among the group's rows, if several share a warp.
        rank: rank of the CTA in its cluster.
        first_block, cta_blocks: first block of the CTA's slice in the row, and number of blocks of the slice.
        walker, walkers: index of this walker, and number of walkers.
        input, residual, y, scale, scale_linear, norm: tensors in global memory.
        gate: alpha, beta and limit of the general gate, or None.
        rows: number of rows of the launch. For experts' rows, it is known only after the table is filled.
        first_row: first row in the input, if the experts' rows are one range.
        quads: number of quads of rows (see the package's docstring). ``Rows.distribute`` sets this field and the next
            fields.
        quad_iterations, iterations: number of this walker's iterations over rows of quads, which come first, and number
            of all iterations of the walker.
    """

    tid: Int32
    threads: Int32
    lane: Int32
    group: Int32
    in_group: Int32
    warp: Int32
    column: Int32
    row: Int32
    rank: Int32
    first_block: Int32
    cta_blocks: Int32
    walker: Int32
    walkers: Int32
    input: cute.Tensor
    residual: cute.Tensor | None
    y: cute.Tensor
    scale: cute.Tensor
    scale_linear: cute.Tensor | None
    norm: cute.Tensor | None
    gate: tuple[Float32, Float32, Float32] | None
    rows: Int32
    first_row: Int32 | None = None
    quads: Int32 | None = None
    quad_iterations: Int32 | None = None
    iterations: Int32 | None = None


class Smem(NamedTuple):
    """Shared memory, as ``Config.smem_offsets`` divides it. A field is None if the configuration does not need it.

    Attributes:
        buffers: row buffers of the group.
        norms: buffers of the group for normalised rows.
        weight: slice of the norm's weight.
        all_scales, scales: scale buffers of quads: of all groups, and of this group.
        partial_sums: partial results of the group.
        experts: table of experts' rows.
        barriers: mbarriers of all groups.
        full: mbarriers of the group, one per stage, which complete when rows have arrived.
        partial_sums_full: mbarriers of the group for partial results of even rows, of odd rows, and of a recomputed
            amax.
        weight_barrier: mbarrier that completes when the weight has arrived.
    """

    buffers: cute.Pointer
    norms: cute.Pointer | None
    weight: cute.Pointer | None
    all_scales: cute.Pointer | None
    scales: cute.Pointer | None
    partial_sums: cute.Pointer
    experts: ExpertRows | None
    barriers: cute.Pointer
    full: cute.Pointer
    partial_sums_full: cute.Pointer
    weight_barrier: cute.Pointer
