"""Base class of kernels with ``tcgen05.mma``: the copies of operands, and the roles of the warps with their pipelines.

A subclass of ``Tcgen05Kernel`` defines the methods ``_produce``, ``_issue_mmas``, ``_run_epilogue`` and, with scale
loaders, ``_load_scales``. All four methods loop over the same tiles and k tiles in the same order.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.common.blackwell import tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import (
    ALIGNMENT,
    EPILOGUE_WARPS,
    K_TILE_BYTES,
    Tcgen05Config,
)
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.pipeline import Pipeline

WARP = 32
PRODUCER_WARP, MMA_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
LEADER = 0  # rank of the CTA that issues the MMAs of a CTA pair


class OperandCopies:
    """Device code that copies operands to stages by TMA.

    Attributes:
        line: bytes of a row of a k tile, 64 or 128. The swizzle is as wide as a row.
    """

    line: int = K_TILE_BYTES

    def map(self, codes: cute.Tensor, rows: int) -> tuple:
        """Return the TMA descriptor of a matrix of bytes, as a CuTe copy atom and tensor. Each TMA copy transfers a box
        of ``rows`` rows of a k tile.

        ``codes`` is (rows, bytes), or (rows, bytes, experts). If an expert's last k tile extends beyond its range of K,
        TMA fills the rest with zeros.
        """
        rank = len(codes.shape)
        box = self._box(rows, rank)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), codes, box, (rows, self.line, 1)[:rank])

    def _box(self, rows: int, rank: int):
        """Return the shared-memory layout of a k tile's codes, (rows, bytes of a row)."""
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW64 if self.line == 64 else kinds.K_SW128, Uint8)
        return cute.tile_to_shape(atom, (rows, self.line, 1)[:rank], order=(0, 1, 2)[:rank])

    def boxes(self, map: tuple, rows: int):
        """Divide the matrix that ``map`` describes into boxes. The result is indexed by (row tile, k tile, expert)."""
        rank = len(map[1].shape)
        return cute.local_tile(map[1], (rows, self.line, 1)[:rank], (None,) * rank)

    def copy_box(self, map: tuple, boxes, rows: int, to: cute.Pointer, place: tuple, barrier, policy) -> None:
        """Start the TMA copy of box ``place`` to shared memory at ``to``. ``barrier`` counts the bytes."""
        rank = len(map[1].shape)
        layout = self._box(rows, rank)
        box = cute.make_tensor(cute.recast_ptr(to, layout.inner, dtype=Uint8), layout.outer)
        target, source = cpasync.tma_partition(
            map[0], 0, cute.make_layout(1), cute.group_modes(box, 0, rank), cute.group_modes(boxes, 0, rank)
        )
        options = {} if policy is None else {"cache_policy": Int64(policy)}
        cute.copy(map[0], source[(None, *place)], target, tma_bar_ptr=barrier, **options)


@dataclass(frozen=True)
class Smem:
    """Shared memory of a CTA.

    Attributes:
        stages: stages of codes and scales.
        pipeline: barriers of the stages.
        peer_full: mbarriers, one per stage. In a CTA pair, they complete when the second CTA's stage is full.
        scales_empty: mbarriers, one per buffer for scales in tensor memory.
        acc_pipeline: barriers of the accumulators in tensor memory.
        tmem: word that holds the address of the allocated tensor memory.
    """

    stages: cute.Pointer
    pipeline: Pipeline
    peer_full: cute.Pointer
    scales_empty: cute.Pointer
    acc_pipeline: Pipeline
    tmem: cute.Pointer


class Tcgen05Kernel:
    """Base class of the kernels with ``tcgen05.mma``. ``config`` is a ``Tcgen05Config``."""

    def __init__(self, config: Tcgen05Config):
        self.config: Any = config
        self.stage = config.stage

    # Roles

    @cute.jit
    def _set_up(self, tid) -> Smem:
        """Allocate shared memory and tensor memory, and initialise the barriers. Other warps may use the barriers after
        ``_sync``."""
        c = self.config
        smem = self._allocate()
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.allocate(smem.tmem, c.tmem_columns, self.stage.cta_group)
        if tid == 0:
            self._init_barriers(smem)
        cute.arch.mbarrier_init_fence()
        return smem

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, ALIGNMENT)
        barriers = cute.recast_ptr(base + c.stages * self.stage.size_bytes, dtype=Int64)
        peers = c.stages * (self.stage.cta_group - 1)
        counts = (c.stages, peers, c.stages, c.scale_stages, c.accumulators, c.acc_empty_barriers)
        full, peer_full, empty, scales_empty, acc_full, acc_empty, end = (
            barriers + start for start in itertools.accumulate(counts, initial=0)
        )
        return Smem(
            stages=base,
            pipeline=Pipeline(full, empty, c.stages),
            peer_full=peer_full,
            scales_empty=scales_empty,
            acc_pipeline=Pipeline(acc_full, acc_empty, c.accumulators),
            tmem=cute.recast_ptr(end, dtype=Uint32),
        )

    def _init_barriers(self, smem: Smem) -> None:
        c = self.config
        for i in range(c.stages):
            cute.arch.mbarrier_init(smem.pipeline.full + i, self.stage.full_arrivals)
            if self.stage.cta_group == 2:
                cute.arch.mbarrier_init(smem.peer_full + i, 1)
            cute.arch.mbarrier_init(smem.pipeline.empty + i, self.stage.empty_arrivals)
        for i in range(c.scale_stages):
            cute.arch.mbarrier_init(smem.scales_empty + i, 1)
        for i in range(c.accumulators):
            cute.arch.mbarrier_init(smem.acc_pipeline.full + i, 1)
        for i in range(c.acc_empty_barriers):
            cute.arch.mbarrier_init(smem.acc_pipeline.empty + i, EPILOGUE_WARPS * self.stage.cta_group)

    @cute.jit
    def _sync(self):
        """Synchronise all threads of the CTA or, if two CTAs compute an MMA together, of both CTAs."""
        if const_expr(self.stage.cta_group > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _run_roles(self, tid, maps, work) -> tuple[Smem, Uint32]:
        """Set up the CTA, and run the code of this warp's role.

        All warps except the MMA warp first wait for the previous kernels. The MMA warp need not wait, because it reads
        only data that other warps have copied.

        Returns:
            Shared memory, and the address of the allocated tensor memory.
        """
        c = self.config
        smem = self._set_up(tid)
        self._sync()
        work = self._begin(tid, work, smem)
        warp = cute.arch.make_warp_uniform(tid // WARP)
        tmem = Uint32(cute.make_tensor(smem.tmem, cute.make_layout(1))[0])
        if warp == PRODUCER_WARP:
            if const_expr(c.pdl and not c.waits_first):
                cute.arch.griddepcontrol_wait()
            self._produce(*maps, work, smem)
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_launch_dependents()
        elif warp == MMA_WARP:
            if tid % WARP == 0:
                self._issue_mmas(tmem, work, smem)
        elif warp < EPILOGUE_WARPS:
            if const_expr(c.pdl and not c.waits_first):
                cute.arch.griddepcontrol_wait()
            self._run_epilogue(tmem, tid, work, smem)
        elif const_expr(self.stage.has_scale_loaders):
            scale_loader = tid - WARP * (MMA_WARP + 1)
            if const_expr(c.pdl and not c.waits_first):
                cute.arch.griddepcontrol_wait()
            self._load_scales(scale_loader, work, smem)
        cute.arch.sync_warp()
        return smem, tmem

    def _begin(self, tid, work, smem):
        """Do the preparations that involve all threads of the CTA, and return the CTA's work."""
        return work

    @cute.jit
    def _free_tmem(self, tid, tmem):
        """Free the tensor memory. Before the call, the CTA must synchronise after its last load from tensor memory."""
        if cute.arch.make_warp_uniform(tid // WARP) == MMA_WARP:
            tcgen05.free(tmem, self.config.tmem_columns, self.stage.cta_group)

    # K tiles

    def _wait_full(self, stage, parity, smem) -> None:
        """Wait, in the MMA thread, until a stage is full. In a CTA pair, also wait until the second CTA's stage is
        full."""
        smem.pipeline.wait_full(stage, parity)
        if self.stage.cta_group == 2:
            ptx.wait(smem.peer_full + stage, parity, scope="cluster")

    def _wait_acc_empty(self, accumulator, parity, smem) -> None:
        """Wait, in the MMA thread, until the epilogue warps have loaded an accumulator. In a CTA pair, this includes
        the second CTA's epilogue warps."""
        scope = "cluster" if self.stage.cta_group == 2 else "cta"
        ptx.wait(smem.acc_pipeline.empty + accumulator, parity, scope=scope)

    @cute.jit
    def _relay_tile(self, stage, parity, work, smem) -> tuple:
        """Signal to the first CTA of a pair, for each stage of a tile, that the second CTA's stage is full. One thread
        of the second CTA calls this method.

        Returns:
            The stage and parity for the next tile.
        """
        for _k_tile in cutlass.range(work.begin, work.end, unroll=1):
            smem.pipeline.wait_full(stage, parity)
            ptx.arrive_at_if(smem.peer_full + stage, Uint32(LEADER), Uint32(1), releases="shared")
            stage, parity = smem.pipeline.next(stage, parity)
        return stage, parity

    def _stage_at(self, stage, smem: Smem) -> cute.Pointer:
        return smem.stages + cute.assume(stage * self.stage.size_bytes, divby=ALIGNMENT)

    def _signal_acc_loaded(self, barrier, tid) -> None:
        """Signal that this epilogue warp has loaded the accumulator. When all epilogue warps have signalled, MMAs may
        overwrite the accumulator."""
        tcgen05.fence_before()
        cute.arch.sync_warp()
        leads = Uint32(tid % WARP == 0)
        if self.stage.cta_group == 2:
            ptx.arrive_at_if(barrier, Uint32(LEADER), leads, releases="shared")
        else:
            ptx.arrive_if(barrier, leads)
