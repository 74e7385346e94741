"""MMAs with an FP4 weight that lanes decode in registers: by a warp (mma.sync) or by a warpgroup (wgmma)."""

from collections.abc import Callable
from typing import Final

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words
from torch_cute_ops.kernels.common.fp4.activations import K_GROUP_BYTES
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M, ActivationLayout
from torch_cute_ops.kernels.common.fp4.weight import WeightStages

WORD_STEPS: Final = 2
"""Number of MMAs with K = 16 that use one of a lane's words of codes."""


def warp_mma(pairs: list, word: int, m: int, a_at: cute.Pointer, pitch: int, lane, acc: cute.Tensor, dtype) -> None:
    """Multiply 16 rows of the weight by ``m`` tokens with two MMAs of K = 16, and add to ``acc``. The MMAs use one word
    of codes.

    Args:
        pairs: decoded ``word``-th word of each of the lane's two rows (``WeightStages.pairs``).
        word: index of the word in the lane's quarter of a k tile, counted from ``a_at``.
        m: number of tokens, a multiple of 8.
        a_at: address of a k tile of activations in shared memory, in the layout for mma.sync
            (``kernels.common.fp4.activations``).
        pitch: distance between neighbouring tokens in bytes. If the pitch is an odd number of k groups, k groups are
            not swizzled.
        lane: index of the lane in its warp.
        acc: accumulators, four per eight tokens.
        dtype: dtype of the operands.
    """
    name = "bf16" if dtype is BFloat16 else "f16"
    token, quarter = lane // 4, lane % 4
    place = token * pitch + quarter * 16 + word * K_GROUP_BYTES
    if pitch // K_GROUP_BYTES % 2 == 0:
        # To avoid bank conflicts, k group ``word`` is stored at place ``word xor token % 2``.
        place = place + (1 - word % 2 * 2) * (token % 2) * K_GROUP_BYTES
    for group in range(m // ATOM_M):
        at = a_at + cute.assume(place + group * (ATOM_M * pitch), divby=16)
        activations = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        total = [acc[4 * group + i] for i in range(4)]
        for step in range(2):
            weights = [pairs[r][step][high] for high in range(2) for r in range(2)]
            total = ptx.mma_16x8x16(weights, activations[2 * step : 2 * step + 2], total, name)
        for i, value in enumerate(total):
            acc[4 * group + i] = value


def warpgroup_mma(dtype, m: int, elements: int, stages: int, order: tuple, at: cute.Pointer) -> Callable:
    """Return a function that starts the MMAs for one packed word of FP4 codes per weight row. Each lane holds two rows,
    so it passes two decoded words. The MMAs of the previous words may still run.

    Args:
        dtype: dtype of the operands.
        m: number of tokens, a multiple of 8.
        elements: number of elements along K of a stage of activations.
        stages: number of stages of activations.
        order: order of the swizzle atoms (8 tokens x 64 elements) along tokens, elements and stages.
        at: address of the activations in shared memory, in the layout for wgmma (``kernels.common.fp4.activations``).

    The returned function takes

        pairs: decoded words of the lane's two rows (``WeightStages.pairs``),
        word: index of the words in the stage,
        stage: stage of the activations,
        adds: True to add to the accumulators, False to overwrite them,
        acc: accumulators, four per eight tokens.

    Even and odd words use separate registers. Callers must therefore alternate between even and odd words. Before a
    caller starts word i, the MMAs of word i - 2 must have ended.
    """

    def tiled() -> cute.TiledMma:
        shape, mode = (WGMMA_M, m, 16), OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, warpgroup.OperandSource.RMEM, mode, mode)
        return cute.make_tiled_mma(op)

    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    layout = cute.tile_to_shape(atom, (m, elements, stages), order=order)
    mma = tiled()
    activations = cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=dtype), layout.outer)
    operand = mma.make_fragment_B(mma.get_slice(0).partition_B(activations))
    words = cute.make_rmem_tensor((2 * WORD_STEPS * 4,), Uint32)
    weights = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=dtype),
        cute.make_layout(((2, 2, 2), 1, 2 * WORD_STEPS), stride=((1, 2, 4), 0, 8)),
    )

    def start(pairs: list, word: int, stage, adds, acc: cute.Tensor) -> None:
        slot = word % 2 * WORD_STEPS
        for step in range(WORD_STEPS):
            for high in range(2):
                for r in range(2):
                    words[(slot + step) * 4 + high * 2 + r] = pairs[r][step][high]
        # The DSL tracks ACCUMULATE per scope, so each scope that sets it needs a new atom.
        mma = tiled()
        accumulators = cute.make_tensor(acc.iterator, mma.partition_shape_C((WGMMA_M, m)))
        warpgroup.fence()
        for step in range(WORD_STEPS):
            mma.set(warpgroup.Field.ACCUMULATE, adds if step == 0 else True)
            cute.gemm(
                mma,
                accumulators,
                weights[None, None, slot + step],
                operand[None, None, word * WORD_STEPS + step, stage],
                accumulators,
            )
        warpgroup.commit_group()

    return start


class KTileMma:
    """MMAs of a warp or a warpgroup, one k tile at a time: rows of an FP4 weight times ``tile_m`` tokens.

    Both operands are in shared memory, in stages. ``WeightStages`` describes the stages of the weight, and
    ``kernels.common.fp4.activations`` describes the layouts of the tokens. Each warp multiplies 16 rows of the weight.

    Attributes:
        pitch: distance in bytes between neighbouring tokens of a stage. The default is the size of a token.
        last_blocks: number of blocks of a row in its last k tile if this k tile is not full, else None.
    """

    def __init__(
        self,
        weight: WeightStages,
        arranged: ActivationLayout,
        tile_m: int,
        stages: int,
        k: int,
        pitch: int | None = None,
    ):
        self.weight, self.tile_m, self.stages, self.k_tile = weight, tile_m, stages, arranged.k_tile
        self.dtype, self.by_warp = DSL_DTYPES[arranged.dtype], arranged.by_warp
        self.pitch = pitch or arranged.token_bytes
        self.last_blocks = k // weight.fmt.block_size if k % arranged.k_tile else None

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations of a stage."""
        return self.tile_m * self.pitch

    def start_of(self, activations: cute.Pointer) -> Callable | None:
        """Return the function that starts wgmmas on the stages of activations, or None if warps multiply by
        mma.sync."""
        if self.by_warp:
            return None
        # A group of eight tokens stores all its elements contiguously, then the next group follows.
        return warpgroup_mma(self.dtype, self.tile_m, self.k_tile, self.stages, (1, 0, 2), activations)

    def multiply(
        self, start, part: int, parts: int, k_tile, stage, adds, rows, lane, acc, smem, free_before, phase=None
    ) -> None:
        """Multiply a k tile, or one of ``parts`` ranges of it, and add to the accumulators. A range contains some of
        each lane's words. With mma.sync, ``part`` may be a run-time value.

        With wgmma, the MMAs of this k tile may still run when this function returns. The MMAs of the previous k tile
        have then ended, and ``free_before``, if it is not None, has been called.

        Args:
            start: result of ``start_of``.
            part, parts: index of the range, and number of ranges.
            k_tile, stage: index of the k tile, and index of the stage that holds its activations.
            adds: True to add to the accumulators, False to overwrite them. mma.sync ignores it and always adds.
            rows: for each of the lane's two rows: stage of the weight, index of the row in the stage, and row of its
                scales.
            lane: index of the lane in its warp.
            acc: accumulators, four per eight tokens.
            smem: object with the pointers ``codes``, ``scales`` and ``activations``.
            free_before: function that releases the previous k tile's stage, or None.
            phase: the expert's phase, which ``WeightStages.factors`` describes.
        """
        quad = lane % 4
        existing = None
        if self.last_blocks is not None:
            existing = self.weight.existing(self.last_blocks - k_tile * self.weight.blocks, quad)
        if not isinstance(part, int):
            self._multiply_part(part, parts, stage, rows, existing, phase, lane, acc, smem)
            return
        codes = [self.weight.codes(smem.codes, at, row, quad) for at, row, _ in rows]
        scales = [self.weight.factors(smem.scales, at, row, quad, existing, self.dtype, phase) for at, _, row in rows]
        count = self.weight.words // parts
        for i in range(count):
            word = part * count + i
            pairs = self.weight.pairs(codes, scales, word, self.dtype)
            if start is None:
                at = smem.activations + cute.assume(stage * self.activation_bytes, divby=K_GROUP_BYTES)
                warp_mma(pairs, word, self.tile_m, at, self.pitch, lane, acc, self.dtype)
                continue
            start(pairs, word, stage, adds if i == 0 else True, acc)
            # After this wait, the previous word's MMAs have ended, and its registers may be overwritten.
            warpgroup.wait_group(1)
            if i == 0 and free_before is not None:
                free_before()

    def _multiply_part(self, part, parts: int, stage, rows, existing, phase, lane, acc, smem) -> None:
        """Multiply one of ``parts`` ranges of a k tile by mma.sync, where ``part`` is a run-time value.

        All warps then execute the same instructions. If each range had its own instructions, ptxas would predicate
        them, and every warp would issue the instructions of all ranges.
        """
        quad, weight = lane % 4, self.weight
        codes = [weight.codes_of_part(smem.codes, at, row, quad, part, parts) for at, row, _ in rows]
        scales = [
            weight.factors_of_part(smem.scales, at, row, quad, existing, self.dtype, phase, part, parts)
            for at, _, row in rows
        ]
        count = weight.words // parts
        at = smem.activations + cute.assume(stage * self.activation_bytes, divby=K_GROUP_BYTES)
        if count > 1:
            at = at + cute.assume(part * (count * K_GROUP_BYTES), divby=K_GROUP_BYTES)
        for i in range(count):
            pairs = weight.pairs(codes, scales, i, self.dtype)
            warp_mma(pairs, i if count > 1 else part, self.tile_m, at, self.pitch, lane, acc, self.dtype)
