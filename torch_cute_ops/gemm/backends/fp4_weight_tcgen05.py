"""GEMMs of 16-bit activations and an FP4 weight on the tensor cores of data-center Blackwell
(``kernels/fp4_weight_tcgen05``)."""

from typing import Final, NamedTuple

import torch

from torch_cute_ops.formats import MXFP4, NVFP4
from torch_cute_ops.gemm import cost
from torch_cute_ops.gemm.backend import Launch, Target
from torch_cute_ops.gemm.backends._fp4 import FP4KernelBackend
from torch_cute_ops.gemm.backends._tcgen05 import Tcgen05Model
from torch_cute_ops.gemm.decode import (
    fp4_format,
    reason_no_tcgen05,
    reason_not_words,
    sixteen_bit_dtype,
    weight_scales,
)
from torch_cute_ops.gemm.operands import Operands
from torch_cute_ops.gemm.problem import GemmProblem
from torch_cute_ops.kernels import fp4_weight_tcgen05
from torch_cute_ops.kernels.common.blackwell.layouts import MMA_M
from torch_cute_ops.kernels.fp4_weight_tcgen05 import K_TILE, STREAM_K
from torch_cute_ops.runtime import settings
from torch_cute_ops.runtime.allocate import new_bytes
from torch_cute_ops.runtime.arch import CLOCK_HZ, Arch

DECODING_INSTRUCTIONS: Final = {
    (NVFP4, torch.bfloat16): 344.0,
    (NVFP4, torch.float16): 286.0,
    (MXFP4, torch.bfloat16): 422.0,
}
"""Number of instructions with which a thread decodes a weight row of a k tile, keyed by the format and the dtype of the
MMAs' operands. Counted in the PTX."""
LOOP_INSTRUCTIONS: Final = 49.0
"""Number of a thread's other instructions for a k tile: addresses of scales, stage and phase, waits and arrivals.
Counted in the PTX for NVFP4 and bf16."""
DECODER_RATE: Final = 0.4
"""Instructions per clock that a decoder warp issues, if one or two warps run on each scheduler of the SM. Not measured:
more than half of the instructions are logic, shifts and permutations, which take two clocks each (CUDA C++ Programming
Guide, "Arithmetic Instructions"), so two warps on a scheduler can issue at most 0.45 instructions per clock each."""
REDUCE_SECONDS: Final = 1e-6
"""Time in seconds from the end of the GEMM to the end of the kernel that adds up partial sums. Measured on an H200:
with programmatic dependent launch, a kernel that adds up two tiles of one row for each of 132 CTAs took 0.7 µs."""


class WeightTcgen05Tactic(NamedTuple):
    """Tactic of ``FP4WeightTcgen05``.

    Attributes:
        tile_m: number of rows of ``a`` in a tile.
        split_k: number of CTAs of a cluster that share a tile, each with a range of K; or ``STREAM_K``, without
            clusters: each CTA multiplies nearly the same number of k tiles, and another kernel adds up partial sums.
    """

    tile_m: int
    split_k: int


class FP4WeightTcgen05(Tcgen05Model, FP4KernelBackend):
    """Backend for 16-bit activations and an FP4 weight. Decoder warps decode the weight to tensor memory, and
    ``tcgen05.mma`` multiplies it."""

    name = "tcgen05"
    tactic_type = WeightTcgen05Tactic
    kernel = fp4_weight_tcgen05.KERNEL
    has_wgmma = False

    def handles(self, problem: GemmProblem) -> bool:
        return super().handles(problem) and not problem.a.is_fp4

    def reason_unsupported(self, problem: GemmProblem, target: Target) -> str | None:
        return reason_no_tcgen05(target) or super().reason_unsupported(problem, target)

    def reason_unfit(self, problem: GemmProblem) -> str | None:
        if problem.epilogue.has_row_scale:
            return "16-bit activations have no row_scale"
        return reason_not_words(problem)

    def tactics(self, problem: GemmProblem, m: int, target: Target) -> tuple[WeightTcgen05Tactic, ...]:
        k_tiles = -(-problem.k // K_TILE)
        widest = cost.smallest_tile(fp4_weight_tcgen05.TILES_M, m)
        # Do not try narrower tiles: with several m tiles, each would decode the weight again.
        least = min(widest, self.least_mma_n)
        every = [
            WeightTcgen05Tactic(tile_m, split_k)
            for tile_m in fp4_weight_tcgen05.TILES_M
            for split_k in fp4_weight_tcgen05.split_ks(tile_m)
            if least <= tile_m <= widest and split_k <= k_tiles
            # With several m tiles, stream-K is not tried: the number of tiles is usually large enough to divide evenly.
            if split_k != STREAM_K or m <= tile_m
        ]
        return self.buildable(problem, every, target)

    def estimate(self, problem: GemmProblem, m: int, tactic: WeightTcgen05Tactic, target: Target) -> float:
        tile_m, split_k = tactic
        k_tiles, m_tiles, n_tiles = -(-problem.k // K_TILE), -(-m // tile_m), -(-problem.n // MMA_M)
        places = target.sms if split_k == STREAM_K else cost.places(target.sms, split_k) // split_k
        flops = 2 * MMA_M * max(tile_m, self.least_mma_n) * K_TILE
        computed = cost.tensor_core_seconds(flops, target, sms=1)
        instructions = DECODING_INSTRUCTIONS[fp4_format(problem), sixteen_bit_dtype(problem)] + LOOP_INSTRUCTIONS
        decoded = instructions / DECODER_RATE / fp4_weight_tcgen05.teams(tile_m) / CLOCK_HZ
        weight_bytes = MMA_M * problem.b.row_bytes(K_TILE)

        def main_loop(m_tiles: int) -> float:
            read = self.read_seconds(weight_bytes, tile_m * 2 * K_TILE, m_tiles, target)
            if split_k == STREAM_K:
                own = -(-n_tiles * k_tiles // target.sms) * m_tiles
            else:
                own = -(-n_tiles * m_tiles // places) * -(-k_tiles // split_k)
            return own * cost.overlapped(computed, read, decoded, order=8)

        # Several m tiles share one read of the weight. The m tiles take at least as long as a single m tile.
        waves = -(-n_tiles * m_tiles // places)
        seconds = max(main_loop(m_tiles), main_loop(1))
        stored = self.store_seconds(tile_m, problem.out_dtype.itemsize)
        # With 256 rows, only one accumulator fits into tensor memory. So no MMA runs while the accumulator is stored.
        seconds += stored * (waves if tile_m > MMA_M else 1)
        if split_k > 1:
            seconds += waves * self.exchange_seconds(tile_m)
        if split_k == STREAM_K:
            # The partial sums of up to two tiles of each CTA are written once and read once.
            size = 2 * 4 * 2 * target.sms * MMA_M * min(m, tile_m)
            seconds += REDUCE_SECONDS + size / cost.bytes_per_second(target)
        seconds += cost.LAUNCH_SECONDS + self.ramp_seconds * (waves if split_k > 1 else 1)
        if _casts(problem):
            seconds += cost.memory_seconds(m * problem.k * 4, 1, target)
        return seconds

    def config(self, problem: GemmProblem, tactic: WeightTcgen05Tactic, arch: Arch) -> fp4_weight_tcgen05.Config | None:
        return fp4_weight_tcgen05.plan(
            dtype=sixteen_bit_dtype(problem),
            fmt=fp4_format(problem),
            layout=weight_scales(problem),
            epilogue=problem.epilogue,
            **tactic._asdict(),
            arch=arch,
            pdl=settings.PDL,
        )

    def launcher(self, problem: GemmProblem, tactic: WeightTcgen05Tactic, target: Target) -> Launch:
        function, config = self.compiled(problem, tactic, target)
        dtype, casts, max_ctas = sixteen_bit_dtype(problem), _casts(problem), target.sms
        device, row_bytes = target.device, config.workspace_bytes(1, max_ctas)

        def launch(given: Operands, out: torch.Tensor) -> None:
            a, b, _, b_scale, alpha, bias, _, _, _, _ = given
            if casts:
                a = a.to(dtype)
            workspace = new_bytes(device, row_bytes * a.shape[0]) if row_bytes else None
            function(a, b, None, b_scale, None, None, alpha, bias, out, None, max_ctas, workspace)

        return launch

    def checks_operands(self, problem: GemmProblem, tactic: WeightTcgen05Tactic) -> bool:
        return not _casts(problem)


def _casts(problem: GemmProblem) -> bool:
    """Return True if calls round the activations to the dtype of the MMAs' operands."""
    return problem.a.format != sixteen_bit_dtype(problem)
