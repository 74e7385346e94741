"""MMAs of a warpgroup (wgmma) with 64 rows of an FP4 weight that it has decoded in registers."""

from collections.abc import Callable
from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.core.warpgroup import GROUP_ROWS

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
        shape, mode = (GROUP_ROWS, tokens, 16), OperandMajorMode.K
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
        accumulators = cute.make_tensor(sums.iterator, mma.partition_shape_C((GROUP_ROWS, tokens)))
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
