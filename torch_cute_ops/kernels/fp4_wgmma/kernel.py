"""The device code; the package's docstring describes the roles and the data path."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from torch_cute_ops.kernels import activation_tiles
from torch_cute_ops.kernels.activation_tiles.kernel import ActivationTilesKernel
from torch_cute_ops.kernels.common.core.epilogue import EpilogueOps
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, raster_tile
from torch_cute_ops.kernels.common.core.memory import clear, prefetch_argument
from torch_cute_ops.kernels.common.core.partial_sums import reduced_rows
from torch_cute_ops.kernels.common.core.pipeline import Pipeline
from torch_cute_ops.kernels.common.experts.factors import factors_argument
from torch_cute_ops.kernels.common.fp4.activations import Activations
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, K_TILE
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.codes import CodeActivations, CodeMma
from torch_cute_ops.kernels.fp4_wgmma.config import BARRIER_BYTES, QUARTERS, Arguments, Config
from torch_cute_ops.kernels.fp4_wgmma.copies import Copies
from torch_cute_ops.kernels.fp4_wgmma.mma import WarpgroupMma, WarpMma
from torch_cute_ops.kernels.fp4_wgmma.multiply import Consumers
from torch_cute_ops.kernels.fp4_wgmma.part import Part, Smem, Workspace, existing
from torch_cute_ops.kernels.fp4_wgmma.results import Results
from torch_cute_ops.kernels.fp4_wgmma.row import RowActivations, RowMma
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

REGISTERS = 2**16  # of an SM


class FP4WgmmaKernel:
    """The kernel of one ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.epilogue = EpilogueOps(config.epilogue)
        self.ring = WeightStages(config.chunks, config.stages)
        if config.by_codes:
            self.activations = CodeActivations(config.arranged)
            mma = CodeMma(config, self.ring, self.activations)
        elif config.tokens == 1:
            self.activations = RowActivations(config.arranged)
            mma = RowMma(config, self.ring, self.activations)
        else:
            self.activations = Activations(config.arranged)
            mma = (WarpMma if config.by_warp else WarpgroupMma)(config, self.ring)
        self.copies = Copies(config, self.ring, self.activations)
        self.consumers = Consumers(config, mma, Results(config, self.epilogue, mma.acc_scale))
        self.arrange = ActivationTilesKernel(activation_tiles.Config(**vars(config.arranged), pdl=config.pdl))

    def arguments(self) -> Arguments:
        c = self.config
        m, n = Dim("m"), Dim("n", divisibility=8)
        a, a_scale = self.activations.arguments()
        b, b_scale = self.ring.arguments(n)
        alpha, bias = self.epilogue.arguments(n)
        return Arguments(
            a=a,
            a_scale=a_scale,
            b=b,
            b_scale=b_scale,
            alpha=alpha if c.width is None else factors_argument(m),
            bias=bias,
            out=TensorArg(self.epilogue.out_dtype.__name__, (m, n), (n, 1), align=16),
            workspace=None if c.arranges else TensorArg("Uint8", (Dim("workspace_bytes", bits=64),), (1,), align=16),
            prefetch=prefetch_argument() if c.prefetches else None,
            workers=ScalarArg("Int32"),
            shares=ScalarArg("Int32"),
        )

    @cute.jit
    def __call__(
        self, a, a_scale, b, b_scale, alpha, bias, out, workspace, prefetch, workers: Int32, shares: Int32, stream
    ):
        c = self.config
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        written, read = (out, workspace), (a, a_scale, b, b_scale, alpha, bias)
        shared = None
        if const_expr(not c.arranges):
            shared = self._share(
                workspace, token_tiles, cute.ceil_div(b.shape[0], self.ring.row_bytes), workers, shares
            )
            by_expert = alpha if const_expr(c.width is not None) else None
            ctas = ctas_unless_overlapping(self.arrange.ctas(a), written, read)
            self.arrange.launch(ctas, a, a_scale, shared[0], shared[3], by_expert, shared[1], stream)
        if const_expr(c.splits > 0):
            workers = cute.ceil_div(b.shape[1], c.rows) * c.splits
        ctas = workers * token_tiles
        if const_expr(c.arranges):
            ctas = ctas_unless_overlapping(ctas, written, read)
        self.kernel(a, a_scale, shared, self.ring.maps(b, b_scale), alpha, bias, out, prefetch, workers).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.splits, 1, 1] if const_expr(c.splits > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    def _share(self, workspace, token_tiles, chunks, workers, shares) -> tuple:
        """The fields of ``Workspace``."""
        c = self.config
        slots = token_tiles * workers * shares
        tile_bytes = Int64(token_tiles) * (c.tokens * self.ring.row_bytes * QUARTERS) * chunks
        sums = Int64(slots) * (c.rows * c.tokens)
        tiles = cute.make_tensor(workspace.iterator, cute.make_layout((tile_bytes,)))
        after = workspace.iterator + cute.assume(tile_bytes, divby=ATOM_BYTES)
        factors = None
        if const_expr(c.width is not None):
            experts = chunks * K_TILE // c.width
            layout = cute.make_layout((c.tokens, experts, token_tiles))
            factors = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), layout)
            after = after + cute.assume(Int64(4 * c.tokens) * experts * token_tiles, divby=4 * ATOM_M)
        partials = cute.make_tensor(cute.recast_ptr(after, dtype=Float32), cute.make_layout((sums,)))
        after = after + cute.assume(4 * sums, divby=4 * ATOM_M)
        flags = cute.make_tensor(cute.recast_ptr(after, dtype=Int32), cute.make_layout((slots * c.groups,)))
        return tiles, factors, partials, flags

    @cute.kernel
    def kernel(self, a, a_scale, shared, weight, alpha, bias, out, prefetch, workers):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        part = self._part(cta, a, a_scale, shared, weight, alpha, bias, out, prefetch, workers)
        smem = self._allocate()
        if tid == 0:
            self.ring.prefetch(weight)
            smem.weight_pipeline.init(full=1, empty=c.warps)
            smem.a_pipeline.init(full=c.members, empty=c.warps)
            if const_expr(c.sends):
                cute.arch.mbarrier_init(smem.sums_full, 1)
                tokens, rows = existing(c, part)
                own = reduced_rows(c.sum_tile, c.splits, part.worker % c.splits, tokens)
                cute.arch.mbarrier_arrive_and_expect_tx(smem.sums_full, own * rows * (c.splits * 4))
        cute.arch.mbarrier_init_fence()
        if const_expr(c.cleared_bytes > 0):
            clear(smem.tokens - c.zeros_bytes, c.cleared_bytes, tid, c.threads)
        if const_expr(c.sends):
            # Waited for before sums are sent
            cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        if warp >= 4 * c.groups:
            self._take_registers(c.registers[1])
            if warp == 4 * c.groups:
                self.copies.produce(self.ring.open(weight, smem.codes, smem.scales), part, smem)
            elif const_expr(c.arranges):
                helper = warp - 4 * c.groups - 1
                if helper < c.teams * c.members:
                    self.copies.arrange(helper, tid % 32, part, smem)
        else:
            self._take_registers(c.registers[0])
            if const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
                if const_expr(c.static_weight):
                    # The kernel before this one has ended, so those before it have, and the next may start.
                    cute.arch.griddepcontrol_launch_dependents()
            if const_expr(c.first_chunks > 0):
                self.copies.arrange_first(tid, part, smem)
            self.consumers.consume(self.epilogue.factor(alpha), tid, part, smem)

    def _part(self, cta, a, a_scale, shared, weight, alpha, bias, out, prefetch, workers) -> Part:
        """The part of a CTA."""
        c = self.config
        n, half, _ = weight[1].shape
        chunks = cute.ceil_div(half, self.ring.row_bytes)
        row_tiles = cute.ceil_div(n, c.rows)
        token_tiles = cute.ceil_div(out.shape[0], c.tokens)
        # A worker, or a cluster of them, takes the place of a tile of rows.
        together = max(c.splits, 1)
        worker, token_tile = raster_tile(cta // together, workers // together, token_tiles)
        units = Int64(row_tiles) * chunks
        if c.splits == 0:
            begin, end = Int32(worker * units // workers), Int32((worker + 1) * units // workers)
        else:
            # A cluster has a tile of rows; its CTAs have equal parts of the chunks.
            rank, start = cta % c.splits, worker * chunks
            worker = worker * c.splits + rank
            begin, end = start + rank * chunks // c.splits, start + (rank + 1) * chunks // c.splits
        return Part(
            n=n,
            m=out.shape[0],
            chunks=chunks,
            blocks=half * 2 // c.operands.fmt.block_size,
            token_tile=token_tile,
            token_tiles=token_tiles,
            worker=worker,
            workers=workers,
            begin=begin,
            end=end,
            units=units,
            a=a,
            a_scale=a_scale,
            alpha=alpha if c.width is None else None,
            bias=bias,
            out=out,
            workspace=None if c.arranges else Workspace(*shared),
            prefetch=prefetch,
        )

    def _take_registers(self, count: int) -> None:
        """Set the registers of each thread of the warpgroup."""
        if count > REGISTERS // self.config.threads:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def _allocate(self) -> Smem:
        c = self.config
        base = SmemAllocator().allocate(c.smem_bytes, 1024)
        zeros = base + c.stages * self.ring.code_bytes
        scales = zeros + c.token_ring_bytes
        factors = scales + c.stages * self.ring.scale_bytes
        received = factors + c.token_stages * c.factor_bytes
        barriers = cute.recast_ptr(base + (c.smem_bytes - BARRIER_BYTES), dtype=Int64)
        return Smem(
            codes=base,
            tokens=zeros + c.zeros_bytes,
            scales=scales,
            factors=factors,
            received=received,
            weight_pipeline=Pipeline.at(barriers, c.stages),
            a_pipeline=Pipeline.at(barriers + 2 * c.stages, c.token_stages),
            sums_full=barriers + 2 * (c.stages + c.token_stages),
        )
