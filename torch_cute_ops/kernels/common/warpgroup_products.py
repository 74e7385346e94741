"""Products of a warpgroup with 64 rows of an FP4 weight that it has decoded in registers, by wgmma."""

from collections.abc import Callable
from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from torch_cute_ops.kernels.common.warpgroup import GROUP_ROWS

WORD_STEPS: Final = 2
"""k16 steps of a lane's word of codes."""


def warpgroup_products(dtype, tokens: int, elements: int, stages: int, order: tuple, at: cute.Pointer) -> Callable:
    """The function that starts the products of a word of a lane's two rows; those of the word before may still run.

    Args:
        dtype: of the operands.
        tokens: a multiple of 8.
        elements: of k of a stage of activations.
        stages: of these.
        order: of their tiles of 8 tokens and 64 elements: which comes first of tokens, elements and stages.
        at: where they lie in shared memory, in the order for products of warpgroups (``kernels.common.activations``).

    The function takes of the lane's two rows what ``decode`` makes of their words (``pairs``), which word that is of
    the stage, the stage, whether products are added to the sums or take their place, and the sums: accumulators, four
    for each eight tokens. Even and odd words have to take turns, and the products of a word to be waited for before the
    second one after it, whose registers are the same.
    """

    def tiled() -> cute.TiledMma:
        shape, mode = (GROUP_ROWS, tokens, 16), OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, warpgroup.OperandSource.RMEM, mode, mode)
        return cute.make_tiled_mma(op)

    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    layout = cute.tile_to_shape(atom, (tokens, elements, stages), order=order)
    product = tiled()
    activations = cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=dtype), layout.outer)
    operand = product.make_fragment_B(product.get_slice(0).partition_B(activations))
    # Of a word, and of the one before it, whose products may still run
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
        # One of its own: whether it accumulates is known where that was set alone.
        product = tiled()
        accumulators = cute.make_tensor(sums.iterator, product.partition_shape_C((GROUP_ROWS, tokens)))
        warpgroup.fence()
        for step in range(WORD_STEPS):
            product.set(warpgroup.Field.ACCUMULATE, adds if step == 0 else True)
            cute.gemm(
                product,
                accumulators,
                weights[None, None, slot + step],
                operand[None, None, word * WORD_STEPS + step, stage],
                accumulators,
            )
        warpgroup.commit_group()

    return start
