"""MMAs of a warp (mma.sync) with an FP4 weight that it has decoded in registers. MMAs of a warpgroup (wgmma) with 64
rows of an FP4 weight that it has decoded in registers. MMAs of a warp, or of a warpgroup, with rows of an FP4 weight
and a unit's tokens, a chunk of k at a time."""

from collections.abc import Callable
from typing import Final

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.layouts import WGMMA_M
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, load_words
from torch_cute_ops.kernels.common.fp4.activations import STEPS_BYTES
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M, ActivationLayout
from torch_cute_ops.kernels.common.fp4.weight import WeightStages

# warp mma
#
# MMAs of a warp (mma.sync) with an FP4 weight that it has decoded in registers.


def warp_mma(
    pairs: list, word: int, tokens: int, chunk_at: cute.Pointer, pitch: int, lane, sums: cute.Tensor, dtype
) -> None:
    """Add two k16 steps to the sums of 16 rows of the weight and ``tokens`` tokens.

    Args:
        pairs: what ``decode`` makes of the ``word``-th words of a lane's two rows.
        word: index of the word in the lane's quarter of a chunk.
        tokens: a multiple of 8.
        chunk_at: the chunk of activations in shared memory, in the layout for mma.sync
            (``kernels.common.fp4.activations``).
        pitch: bytes from a token to the next. Where it is an odd number of pieces, no piece is moved.
        lane: index in the warp.
        sums: accumulators, four for each eight tokens.
        dtype: dtype of the operands.
    """
    name = "bf16" if dtype is BFloat16 else "f16"
    token, quarter = lane // 4, lane % 4
    place = token * pitch + quarter * 16 + word * STEPS_BYTES
    if pitch // STEPS_BYTES % 2 == 0:
        # Piece ``word`` is at place ``word xor token % 2``.
        place = place + (1 - word % 2 * 2) * (token % 2) * STEPS_BYTES
    for group in range(tokens // ATOM_M):
        at = chunk_at + cute.assume(place + group * (ATOM_M * pitch), divby=16)
        activations = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        total = [sums[4 * group + i] for i in range(4)]
        for step in range(2):
            weights = [pairs[r][step][high] for high in range(2) for r in range(2)]
            total = ptx.mma_16x8x16(weights, activations[2 * step : 2 * step + 2], total, name)
        for i, value in enumerate(total):
            sums[4 * group + i] = value


# warpgroup mma
#
# MMAs of a warpgroup (wgmma) with 64 rows of an FP4 weight that it has decoded in registers.

WORD_STEPS: Final = 2
"""k16 steps of a lane's word of codes."""


def warpgroup_mma(dtype, tokens: int, elements: int, stages: int, order: tuple, at: cute.Pointer) -> Callable:
    """A function that starts the MMAs of one word of a lane's two rows. Those of the word before may still run.

    Args:
        dtype: dtype of the operands.
        tokens: a multiple of 8.
        elements: elements of k of a stage of activations.
        stages: stages of activations.
        order: which of tokens, elements and stages the tiles of 8 tokens x 64 elements follow each other by first.
        at: the activations in shared memory, in the layout for wgmma (``kernels.common.fp4.activations``).

    The function takes

        pairs: what ``decode`` makes of the words of the lane's two rows,
        word: which word of the stage they are,
        stage: stage of the activations,
        adds: whether to add to the sums or to replace them,
        sums: accumulators, four for each eight tokens.

    Even and odd words use separate registers. So words must alternate, and the MMAs of a word must be waited for before
    the second word after it.
    """

    def tiled() -> cute.TiledMma:
        shape, mode = (WGMMA_M, tokens, 16), OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, warpgroup.OperandSource.RMEM, mode, mode)
        return cute.make_tiled_mma(op)

    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    layout = cute.tile_to_shape(atom, (tokens, elements, stages), order=order)
    mma = tiled()
    activations = cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=dtype), layout.outer)
    operand = mma.make_fragment_B(mma.get_slice(0).partition_B(activations))
    words = cute.make_rmem_tensor((2 * WORD_STEPS * 4,), Uint32)
    weights = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=dtype),
        cute.make_layout(((2, 2, 2), 1, 2 * WORD_STEPS), stride=((1, 2, 4), 0, 8)),
    )

    def start(pairs: list, word: int, stage, adds, sums: cute.Tensor) -> None:
        slot = word % 2 * WORD_STEPS
        for step in range(WORD_STEPS):
            for high in range(2):
                for r in range(2):
                    words[(slot + step) * 4 + high * 2 + r] = pairs[r][step][high]
        # A new object each time: the DSL knows whether it accumulates only in the scope where that was set.
        mma = tiled()
        accumulators = cute.make_tensor(sums.iterator, mma.partition_shape_C((WGMMA_M, tokens)))
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


# unit mma
#
# MMAs of a warp, or of a warpgroup, with rows of an FP4 weight and a unit's tokens, a chunk of k at a time.
#
# Both operands are in stages in shared memory: the weight in a ``WeightStages``, the tokens in the layouts of
# ``kernels.common.fp4.activations``. Each warp has 16 rows.


class KTileMma:
    """The MMAs of units of ``group`` tokens.

    Attributes:
        pitch: bytes from a token of a stage to the next: those of a token, unless ``__init__`` is told.
        last_blocks: blocks of a row where those of its last chunk are fewer than a chunk has; else ``None``.
    """

    def __init__(
        self,
        ring: WeightStages,
        arranged: ActivationLayout,
        group: int,
        stages: int,
        width: int,
        pitch: int | None = None,
    ):
        self.ring, self.group, self.stages, self.k_tile = ring, group, stages, arranged.k_tile
        self.dtype, self.by_warp = DSL_DTYPES[arranged.dtype], arranged.by_warp
        self.pitch = pitch or arranged.token_bytes
        self.last_blocks = width // ring.fmt.block_size if width % arranged.k_tile else None

    @property
    def activation_bytes(self) -> int:
        """Activations of a stage, bytes."""
        return self.group * self.pitch

    def start_of(self, tokens: cute.Pointer) -> Callable | None:
        """What starts the MMAs of warpgroups with the stages of activations at ``tokens``; ``None`` for those of
        warps."""
        if self.by_warp:
            return None
        # All elements of a group of eight tokens, then those of the next
        return warpgroup_mma(self.dtype, self.group, self.k_tile, self.stages, (1, 0, 2), tokens)

    def multiply(
        self, start, part: int, parts: int, chunk, stage, adds, rows, lane, sums, smem, free_before, phase=None
    ) -> None:
        """Add a chunk to the sums, with a part of each lane's codes.

        The MMAs of a warpgroup may still run at the end, but those of the chunk before are done: then ``free_before``
        is called, if it is not ``None``.

        Args:
            start: what ``start_of`` returns.
            part, parts: which part of the words of codes, of how many.
            chunk, stage: the chunk, and the stage of its activations.
            adds: whether a warpgroup adds to the sums or replaces them; a warp always adds.
            rows: of each of the lane's two rows its stage in the ring of the weight, its row there, and that of its
                scales.
            lane: index in the warp.
            sums: accumulators, four for each eight tokens.
            smem: has the pointers ``codes``, ``scales`` and ``tokens``.
            free_before: frees the stage of the chunk before.
            phase: of the expert, as ``WeightStages.factors`` takes it.
        """
        quad = lane % 4
        existing = None
        if self.last_blocks is not None:
            existing = self.ring.existing(self.last_blocks - chunk * self.ring.blocks, quad)
        codes = [self.ring.codes(smem.codes, at, row, quad) for at, row, _ in rows]
        scales = [self.ring.factors(smem.scales, at, row, quad, existing, self.dtype, phase) for at, _, row in rows]
        count = self.ring.words // parts
        for i in range(count):
            word = part * count + i
            pairs = self.ring.pairs(codes, scales, word, self.dtype)
            if start is None:
                at = smem.activations + cute.assume(stage * self.activation_bytes, divby=STEPS_BYTES)
                warp_mma(pairs, word, self.group, at, self.pitch, lane, sums, self.dtype)
                continue
            start(pairs, word, stage, adds if i == 0 else True, sums)
            # The MMAs of the word before are done, and its registers free.
            warpgroup.wait_group(1)
            if i == 0 and free_before is not None:
                free_before()
