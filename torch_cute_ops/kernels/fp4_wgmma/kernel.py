"""Device code of the FP4 wgmma GEMM. The package's docstring describes the roles and the data path."""

from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels.activation_tiles.config import Config as ActivationTilesConfig
from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps, factors_argument
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.memory import clear, prefetch_argument
from torch_cute_ops.kernels.common.core.partial_sums import reduced_rows
from torch_cute_ops.kernels.common.core.pipeline import Pipeline
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.codes import scale_matrix
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, K_TILE
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import BARRIER_BYTES, K_SLICES, Arguments, Config
from torch_cute_ops.kernels.fp4_wgmma.epilogue import WorkTileEpilogue
from torch_cute_ops.kernels.fp4_wgmma.load import (
    CodeActivations,
    Loads,
    RowActivations,
    Smem,
    Work,
    Workspace,
    existing_sizes,
)
from torch_cute_ops.kernels.fp4_wgmma.mma import CodeMma, Consumers, RowMma, WarpgroupMma, WarpMma
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

REGISTERS: Final = 2**16
"""Number of registers of an SM."""


class FP4WgmmaKernel:
    """GEMM kernel, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.epilogue = EpilogueOps(config.epilogue)
        self.weight = WeightStages(config.weight_tile, config.stages)
        if config.by_codes:
            self.activations = CodeActivations(config.arranged)
            mma = CodeMma(config, self.weight, self.activations)
        elif config.tile_m == 1:
            self.activations = RowActivations(config.arranged)
            mma = RowMma(config, self.weight, self.activations)
        else:
            self.activations = Activations(config.arranged)
            mma = (WarpMma if config.by_warp else WarpgroupMma)(config, self.weight)
        self.loads = Loads(config, self.weight, self.activations)
        self.consumers = Consumers(config, mma, WorkTileEpilogue(config, self.epilogue, mma.acc_scale))
        self.activation_tiles = ActivationTilesKernel(ActivationTilesConfig(**vars(config.arranged), pdl=config.pdl))

    def arguments(self) -> Arguments:
        c = self.config
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.weight.arguments(n)
        alpha, bias = self.epilogue.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=alpha if c.expert_k is None else factors_argument(m),
            bias=bias,
            row_scale=self.epilogue.row_scale_argument(m),
            out=TensorArg(self.epilogue.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=None if c.rearranges else TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            prefetch=prefetch_argument() if c.prefetches else None,
            num_ctas=ScalarArg("Int32"),
            has_partial_sums=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self,
        a,
        a_scale,
        b,
        b_scale,
        alpha,
        bias,
        row_scale,
        out,
        workspace,
        prefetch,
        num_ctas: Int32,
        has_partial_sums: Int32,
        stream,
    ):
        c = self.config
        m_tiles = cute.ceil_div(out.shape[0], c.tile_m)
        written, read = (out, workspace), (a, a_scale, b, b_scale, alpha, bias, row_scale)
        a_scale = scale_matrix(a_scale, c.arranged.layout)
        shared = None
        if const_expr(not c.rearranges):
            k_tiles = cute.ceil_div(b.shape[0], self.weight.row_bytes)
            shared = self._workspace(workspace, m_tiles, k_tiles, num_ctas, has_partial_sums)
            by_expert = alpha if const_expr(c.expert_k is not None) else None
            ctas = ctas_unless_overlapping(self.activation_tiles.ctas(a), written, read)
            self.activation_tiles.launch(ctas, a, a_scale, shared[0], shared[3], by_expert, shared[1], stream)
        if const_expr(c.split_k > 0):
            num_ctas = cute.ceil_div(b.shape[1], c.tile_n) * c.split_k
        ctas = num_ctas * m_tiles
        if const_expr(c.rearranges):
            ctas = ctas_unless_overlapping(ctas, written, read)
        terms = alpha, bias, row_scale
        self.kernel(a, a_scale, shared, self.weight.maps(b, b_scale), terms, out, prefetch, num_ctas).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.split_k, 1, 1] if const_expr(c.split_k > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _workspace(self, workspace, m_tiles, k_tiles, num_ctas, has_partial_sums) -> tuple:
        """Divide the workspace into buffers. Return the fields of ``Workspace``."""
        c = self.config
        slots = m_tiles * num_ctas * has_partial_sums
        activation_bytes = Int64(m_tiles) * (c.tile_m * self.weight.row_bytes * K_SLICES) * k_tiles
        sums = Int64(slots) * (c.tile_n * c.tile_m)
        activations = cute.make_tensor(workspace.iterator, cute.make_layout((activation_bytes,)))
        after = workspace.iterator + cute.assume(activation_bytes, divby=ATOM_BYTES)
        factors = None
        if const_expr(c.expert_k is not None):
            experts = k_tiles * K_TILE // c.expert_k
            layout = cute.make_layout((c.tile_m, experts, m_tiles))
            factors = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), layout)
            after = after + cute.assume(Int64(4 * c.tile_m) * experts * m_tiles, divby=4 * ATOM_M)
        partial_sums = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), cute.make_layout((sums,)))
        after = after + cute.assume(4 * sums, divby=4 * ATOM_M)
        flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((slots * c.consumer_groups,)))
        return activations, factors, partial_sums, flags

    @cute.kernel
    def kernel(self, a, a_scale, shared, weight, terms, out, prefetch, num_ctas):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        work = self._work(cta, a, a_scale, shared, weight, terms, out, prefetch, num_ctas)
        smem = self._allocate()
        if tid == 0:
            self.weight.prefetch(weight)
            smem.weight_pipeline.init(full=1, empty=c.consumer_warps)
            smem.a_pipeline.init(full=c.a_full_arrivals, empty=c.consumer_warps)
            if const_expr(c.sends):
                cute.arch.mbarrier_init(smem.received_full, 1)
                rows, columns = existing_sizes(c, work)
                own = reduced_rows(c.partial_sums, c.split_k, work.cta % c.split_k, rows)
                cute.arch.mbarrier_arrive_and_expect_tx(smem.received_full, own * columns * (c.split_k * 4))
        cute.arch.mbarrier_init_fence()
        if const_expr(c.cleared_bytes > 0):
            clear(smem.activations - c.zeros_bytes, c.cleared_bytes, tid, c.threads)
        if const_expr(c.sends):
            # Tell the other CTAs of the cluster that this CTA's mbarriers are initialised. The other CTAs wait for this
            # signal before they send partial sums.
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if warp >= 4 * c.consumer_groups:
            self._set_registers(c.registers[1])
            if warp == 4 * c.consumer_groups:
                self.loads.produce(self.weight.open(weight, smem.codes, smem.scales), work, smem)
            elif const_expr(c.rearranges):
                decoder = warp - 4 * c.consumer_groups - 1
                if decoder < c.decoder_groups * c.a_full_arrivals:
                    self.loads.rearrange(decoder, tid % 32, work, smem)
        else:
            self._set_registers(c.registers[0])
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
                if const_expr(c.static_weight):
                    # A CTA with a static weight has now waited for the previous kernel. So all earlier kernels are
                    # complete, and the next kernel may start.
                    cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.first_k_tiles > 0):
                self.loads.rearrange_first(tid, work, smem)
            self.consumers.consume(self.epilogue.factor(terms[0]), tid, work, smem)

    def _work(self, cta, a, a_scale, shared, weight, terms, out, prefetch, num_ctas) -> Work:
        """Return the work of a CTA: its m tile, its range of iterations, and the tensors of the call. ``terms`` is
        (alpha, bias, row_scale)."""
        c = self.config
        alpha, bias, row_scale = terms
        n, half, _ = weight[1].shape
        k_tiles = cute.ceil_div(half, self.weight.row_bytes)
        n_tiles = cute.ceil_div(n, c.tile_n)
        m_tiles = cute.ceil_div(out.shape[0], c.tile_m)
        # ``raster_tile`` expects a number of n tiles. Here, a persistent CTA or a cluster takes the place of an n tile,
        # so pass the number of an m tile's persistent CTAs or clusters.
        together = max(c.split_k, 1)
        index, m_tile = raster_tile(cta // together, num_ctas // together, m_tiles)
        iterations = Int64(n_tiles) * k_tiles
        if c.split_k == 0:
            begin, end = Int32(index * iterations // num_ctas), Int32((index + 1) * iterations // num_ctas)
        else:
            # A cluster computes one n tile. Its CTAs divide the n tile's k tiles into ranges of (nearly) equal length.
            rank, start = cta % c.split_k, index * k_tiles
            index = index * c.split_k + rank
            begin, end = start + rank * k_tiles // c.split_k, start + (rank + 1) * k_tiles // c.split_k
        return Work(
            n=n,
            m=out.shape[0],
            k_tiles=k_tiles,
            blocks=half * 2 // c.operands.fmt.block_size,
            m_tile=m_tile,
            m_tiles=m_tiles,
            cta=index,
            num_ctas=num_ctas,
            begin=begin,
            end=end,
            iterations=iterations,
            a=a,
            a_scale=a_scale,
            alpha=alpha if c.expert_k is None else None,
            bias=bias,
            row_scale=row_scale,
            out=out,
            workspace=None if c.rearranges else Workspace(*shared),
            prefetch=prefetch,
        )

    def _set_registers(self, count: int) -> None:
        """Set the number of registers per thread of this warpgroup."""
        if count > REGISTERS // self.config.threads:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        zeros = base + c.stages * self.weight.code_bytes
        scales = zeros + c.a_bytes
        factors = scales + c.stages * self.weight.scale_bytes
        received = factors + c.a_stages * c.factor_bytes
        barriers = cute.recast_ptr(base + (c.smem_bytes - BARRIER_BYTES), dtype=Int64)
        return Smem(
            codes=base,
            activations=zeros + c.zeros_bytes,
            scales=scales,
            factors=factors,
            received=received,
            weight_pipeline=Pipeline.at(barriers, c.stages),
            a_pipeline=Pipeline.at(barriers + 2 * c.stages, c.a_stages),
            received_full=barriers + 2 * (c.stages + c.a_stages),
        )
