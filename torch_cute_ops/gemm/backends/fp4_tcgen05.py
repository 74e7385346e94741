"""Both operands in FP4 on the block-scaled tensor cores of data-center Blackwell: ``kernels/fp4_tcgen05``.

No such GPU was at hand: the kernel runs in an emulator of PTX, and every constant here is from data sheets and nothing
measured.
"""

from typing import Final

from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.decode import fp4_format, reason_no_tcgen05, reason_not_words, weight_scales
from torch_cute_ops.gemm.problem import GemmProblem, Tactic
from torch_cute_ops.kernels import fp4_tcgen05
from torch_cute_ops.kernels.common.activation_layout import CHUNK
from torch_cute_ops.kernels.common.block_scaled_stage import ROWS, STEP
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch
from torch_cute_ops.runtime.compiler import KernelSpec

LEAST_COLUMNS: Final = 64
"""Rows of activations below which an MMA takes no less time: it reads 128 rows of the weight from shared memory."""
RAMP_SECONDS: Final = 1.5e-6
"""Pipeline fill, tensor memory's allocation and the last tile's epilogue of a CTA."""
CLUSTER_BYTES_PER_SECOND: Final = 1.5e11
"""Rate at which a CTA of a cluster exchanges and adds up partial sums (that of an H200)."""
STORE_BYTES_PER_CLOCK: Final = 32
"""Rate at which a CTA stores results, where no MMAs run meanwhile."""
SHARES: Final = 2
"""Bandwidth of L2, as a multiple of memory's."""


class FP4Tcgen05(FP4KernelBackend):
    """A tactic is (rows of ``a`` in a tile, CTAs of an MMA, CTAs that split K)."""

    name = "tcgen05"
    has_wgmma = False

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_tcgen05(target) or super().reason_unsupported(problem, target)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        layout = weight_scales(problem)
        if not problem.a.is_fp4:
            return f"both operands have to be in FP4; a is {problem.a.format}"
        if problem.a.scale_layout != layout:
            return f"a's scales have to be in the weight's layout, {layout.name}"
        if problem.k % STEP:
            return f"k={problem.k}: it has to be a multiple of {STEP}"
        return reason_not_words(problem)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[Tactic, ...]:
        chunks = -(-problem.k // CHUNK)
        widest = cost.smallest_tile(fp4_tcgen05.TILES[1], m)
        # Several tiles of few rows read the weight again for each.
        least = min(widest, LEAST_COLUMNS)
        every = [
            (tokens, group, splits)
            for group, tiles in fp4_tcgen05.TILES.items()
            for tokens in tiles
            for splits in (fp4_tcgen05.SPLITS if group == 1 and tokens <= ROWS else (1,))
            if least <= tokens <= widest and splits <= chunks
        ]
        return tuple(one for one in every if target.arch is None or _config(problem, one, target.arch) is not None)

    def estimate(self, problem: GemmProblem, m: int, tactic: Tactic, target: Target) -> float:
        tokens, group, splits = map(int, tactic)
        rows, chunks = ROWS * group, -(-problem.k // CHUNK)
        tiles = -(-problem.n // rows) * -(-m // tokens)
        teams = cost.places(target.sms, group * splits) // (group * splits)
        waves = -(-tiles // teams)
        # Of a CTA and a chunk. Tiles of tokens that run together read the weight from memory once.
        line = problem.b.row_bytes(CHUNK)
        again = min(-(-m // tokens), SHARES)
        weight, activations = ROWS * line / again, tokens // group * line / SHARES
        read = (weight + activations) / (cost.bytes_per_second(target) / target.sms)
        flops = 2 * ROWS * max(tokens, LEAST_COLUMNS) * CHUNK
        computed = cost.fp4_tensor_core_seconds(flops, target, sms=1)
        seconds = waves * -(-chunks // splits) * cost.overlapped(computed, read, order=8)
        stored = ROWS * tokens * problem.out_dtype.itemsize / STORE_BYTES_PER_CLOCK / CLOCK_HZ
        # Of 256 rows of activations, tensor memory has one accumulator: nothing is multiplied meanwhile.
        seconds += stored * (waves if tokens > ROWS else 1)
        if splits > 1:
            seconds += waves * 2 * 4 * ROWS * tokens / CLUSTER_BYTES_PER_SECOND
        return cost.LAUNCH_SECONDS + RAMP_SECONDS * (waves if splits > 1 else 1) + seconds

    def kernels(self, problem: GemmProblem, tactic: Tactic, arch: Arch) -> tuple[KernelSpec, ...]:
        return (KernelSpec(fp4_tcgen05.KERNEL, _config(problem, tactic, arch)),)

    def launcher(self, problem: GemmProblem, tactic: Tactic, target: Target) -> Launch:
        function, _ = self.compiled(problem, tactic, target)
        ctas = target.sms
        return lambda a, b, a_scale, b_scale, alpha, bias, offsets, counts, out: function(
            a, a_scale, b, b_scale, alpha, bias, out, ctas
        )

    def checks_operands(self, problem: GemmProblem) -> bool:
        return True


def _config(problem: GemmProblem, tactic: Tactic, arch: Arch) -> fp4_tcgen05.Config | None:
    """How the kernel is built; ``None`` if it cannot be, on ``arch``."""
    tokens, group, splits = map(int, tactic)
    return fp4_tcgen05.plan(
        fmt=fp4_format(problem),
        layout=weight_scales(problem),
        epilogue=problem.epilogue,
        tokens=tokens,
        group=group,
        splits=splits,
        arch=arch,
        pdl=settings.PDL,
    )
