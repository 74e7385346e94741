"""State of a thread, and pointers into shared memory, which the classes of the kernel pass to each other."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_cute_ops.kernels.row_quant.experts import ExpertRows


@dataclass
class Thread:
    """Place of a thread in its group, in the CTA and in the grid, and the tensors of the call.

    A *walker* processes whole rows in sequence. A walker is a group or, in a cluster, the groups with the same index in
    all CTAs of the cluster.

    Attributes:
        tid, threads: index of the thread in its CTA, and number of threads of the CTA.
        lane: index of the thread in its warp.
        group, in_group: index of the group in the CTA, and index of the thread in its group.
        warp: index among the warps that share a row, rotated from group to group (``Config.first_column``).
        column: index, in the slice, of the thread's first block.
        row: index of the thread's row among the group's rows, if several rows share a warp.
        rank: rank of the CTA in its cluster.
        first_block, cta_blocks: index, in the row, of the first block of the CTA's slice, and number of blocks of the
            slice.
        walker, walkers: index of this walker, and number of walkers.
        input, residual, y, scale, scale_linear, norm, row_scale: tensors in global memory.
        gate: alpha, beta and limit of the general gate, or None.
        rows: number of rows of the launch. For experts' rows, the number is known only after the table is filled.
        first_row: first row in the input, if the experts' rows are one range.
        quads: number of quads of rows (see the package's docstring). ``Rows.distribute`` sets this field and the fields
            below, except ``peers``.
        quad_iterations, iterations: number of this walker's iterations over rows of quads, which come first, and number
            of all its iterations.
        peers: state of the exchange with other GPUs, an ``all_reduce_rows.exchange.Peers``, or None.
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
    row_scale: cute.Tensor | None
    gate: tuple[Float32, Float32, Float32] | None
    rows: Int32
    first_row: Int32 | None = None
    quads: Int32 | None = None
    quad_iterations: Int32 | None = None
    iterations: Int32 | None = None
    peers: Any = None


class Smem(NamedTuple):
    """Pointers into shared memory. ``Config.smem_offsets`` defines the offsets of the buffers. A field is None if the
    configuration does not need it.

    Attributes:
        buffers: row buffers of the group.
        norms: the group's buffers for normalised rows.
        weight, bias: the CTA's slices of the norm's weight and bias.
        all_scales, scales: scale buffers of quads: of all groups, and of this group.
        partial_sums: partial results of the group.
        experts: table of experts' rows.
        barriers: mbarriers of all groups.
        full: mbarriers of the group, one per stage. A stage's mbarrier completes when the stage's rows have arrived.
        partial_sums_full: mbarriers of the group for the partial results of even rows, of odd rows, and of an amax that
            is recomputed. For general norms, each reduction has two mbarriers: one for even rows and one for odd rows.
        weight_barrier: mbarrier that completes when weight and bias have arrived.
    """

    buffers: cute.Pointer
    norms: cute.Pointer | None
    weight: cute.Pointer | None
    bias: cute.Pointer | None
    all_scales: cute.Pointer | None
    scales: cute.Pointer | None
    partial_sums: cute.Pointer
    experts: ExpertRows | None
    barriers: cute.Pointer
    full: cute.Pointer
    partial_sums_full: cute.Pointer
    weight_barrier: cute.Pointer
